#!/usr/bin/env python3
"""Writes moe.h as one file: every #include "..." of our own is replaced by the file's text, recursively. The optional
moe_neuron.h, which includes it, is written next to it.

    tools/amalgamate.py [OUTPUT]        (default: dist/moe.h)

A header with an include guard is pasted where it is first included, and no more. What has none, such as a template
(.inl), is pasted every time: it is included many times with different macros. <system> includes stay. The licence is
added at the end.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
GUARD = re.compile(r'^#ifndef (MOE_(?:\w+_)?H)\n#define \1$', re.MULTILINE)
COMPUTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]+[A-Za-z_]')


def find(name, including):
    """A quoted include is looked for beside the including file, then from the root, as with -I<root>."""
    for base in (including.parent, ROOT):
        path = (base / name).resolve()
        if path.is_file():
            return path
    sys.exit(f"{including.relative_to(ROOT)}: cannot find {name!r}")


def paste(path, pasted):
    """The lines of `path` with its own includes pasted; `pasted` are the guarded headers that already are."""
    lines = []
    text = path.read_text(encoding="utf-8")
    if GUARD.search(text):
        pasted.add(path)
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if COMPUTED.match(line):
            sys.exit(f"{path.relative_to(ROOT)}:{number}: an include by macro cannot be pasted")
        if not match or match.group(1) == "moe.h":  # the manual tells how to include it
            lines.append(line)
            continue
        if match.group(1) == "../moe.h":
            lines.append('#include "moe.h"')
            continue
        target = find(match.group(1), path)
        if target in pasted:  # its guard would make it empty
            continue
        name = target.relative_to(ROOT)
        lines += [f"/* >>> {name} */", *paste(target, pasted), f"/* <<< {name} */"]
    return lines


def write(source, output):
    lines = paste(source, set())
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8").rstrip()
    lines += ["", "/*", *licence.splitlines(), "*/"]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main():
    output = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "moe.h"
    write(ROOT / "moe.h", output)
    write(ROOT / "moe" / "moe_neuron.h", output.parent / "moe_neuron.h")


if __name__ == "__main__":
    main()
