#!/usr/bin/env python3
"""Writes moe.h as one file: every #include "..." of our own is replaced by the file's text, recursively.

    tools/amalgamate.py [OUTPUT]        (default: dist/moe.h)

Templates (.inl) are included many times with different macros, so they are pasted every time. A header (.h) is pasted
every time too, and its include guard does what it always does. <system> includes stay. The licence is added at the end.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
COMPUTED = re.compile(r'^[ \t]*#[ \t]*include[ \t]+[A-Za-z_]')


def find(name, including):
    """A quoted include is looked for beside the including file, then from the root, as with -I<root>."""
    for base in (including.parent, ROOT):
        path = (base / name).resolve()
        if path.is_file():
            return path
    sys.exit(f"{including.relative_to(ROOT)}: cannot find {name!r}")


def paste(path, stack):
    """The lines of `path` with its own includes pasted."""
    lines = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if COMPUTED.match(line):
            sys.exit(f"{path.relative_to(ROOT)}:{number}: an include by macro cannot be pasted")
        if not match:
            lines.append(line)
            continue
        target = find(match.group(1), path)
        if target in stack:  # its guard would make it empty
            continue
        name = target.relative_to(ROOT)
        lines += [f"/* >>> {name} */", *paste(target, stack + [target]), f"/* <<< {name} */"]
    return lines


def main():
    output = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist" / "moe.h"
    source = ROOT / "moe.h"
    lines = paste(source, [source])
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8").rstrip()
    lines += ["", "/*", *licence.splitlines(), "*/"]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
