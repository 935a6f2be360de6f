"""compare.py --table: the time and the error of a few layers by moe.h and by whichever peers are installed.

Every side has the same stored weights, in the order that it wants, the same hidden states in bf16 and the same routing.
Errors are those of the result against the layer in double, see reference.py.
"""
import os
import sys
from typing import NamedTuple

import numpy as np

from library import Library, Ours
from measure import medians
from reference import Reference, errors


class Case(NamedTuple):
    name: str
    op: str
    shape: tuple  # T, H, I, E, K
    storage: str


TRAINED, GPT_OSS, QWEN = (2048, 768, 16, 4), (2880, 2880, 32, 4), (2048, 768, 128, 8)
CASES = [
    Case("bf16 forward", "fwd", (1024, *TRAINED), "bf16"),
    Case("bf16 backward", "bwd", (1024, *TRAINED), "bf16"),
    Case("bf16", "fwd", (1, *GPT_OSS), "bf16"),
    Case("mxfp4", "fwd", (1, *GPT_OSS), "mxfp4"),
    Case("mxfp4, blocks of ggml", "fwd", (1, *GPT_OSS), "mxfp4_ggml"),
    Case("mxfp4", "fwd", (16, *GPT_OSS), "mxfp4"),
    Case("mxfp4", "fwd", (512, *GPT_OSS), "mxfp4"),
    Case("fp8, a scale per column", "fwd", (1, *GPT_OSS), "fp8"),
    Case("fp8, a scale per column", "fwd", (16, *GPT_OSS), "fp8"),
    Case("fp8, blocks of 128", "fwd", (1, *QWEN), "fp8_block"),
    Case("fp8, blocks of 128", "fwd", (8, *QWEN), "fp8_block"),
    Case("mxfp8", "fwd", (1, *QWEN), "mxfp8"),
    Case("mxfp8", "fwd", (8, *QWEN), "mxfp8"),
]


class Column(NamedTuple):
    """A peer: the fastest of its kinds is shown."""

    title: str
    kinds: list


def tell(text):
    print(text, file=sys.stderr, flush=True)


def has_plain_weights(problem):
    return problem.storage == problem.dtype


def torch_column(threads):
    import torch
    import torch_peers
    torch.set_num_threads(threads)
    return Column(f"PyTorch {torch.__version__}", [torch_peers.Loop, torch_peers.Grouped])


def ggml_column(threads):
    import ggml_peer
    return Column(f"ggml {ggml_peer.load(threads)}", [ggml_peer.Ggml, ggml_peer.Repacked])


def kt_column(threads):
    import kt_peer
    return Column(f"kt-kernel {kt_peer.load(threads)}", [kt_peer.KtKernel])


def installed(threads):
    """Every peer's column; one without kinds is a peer that is not here."""
    columns = []
    for name, make in (("PyTorch", torch_column), ("ggml", ggml_column), ("kt-kernel", kt_column)):
        try:
            columns.append(make(threads))
        except (ImportError, OSError) as reason:
            tell(f"no {name}: {(str(reason).splitlines() or [''])[0]}")
            columns.append(Column(f"no {name} here", []))
    return columns


def draw(problem, seed=1):
    """Normal hidden states, and scales that differ: the bench's own are all alike."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(problem.x.shape, np.float32).view(np.uint32)
    problem.x[...] = (x + 0x7fff + (x >> 16 & 1)) >> 16
    if problem.backward_too:
        problem.save()
    if has_plain_weights(problem):
        return
    for scales in (problem.gate_up_scales, problem.down_scales):
        if scales.dtype == np.uint8:
            scales[...] = rng.integers(119, 122, scales.shape, np.uint8)
        else:
            scales[...] = rng.uniform(0.01, 0.04, scales.shape)


def made(kind, problem):
    """None where the peer cannot."""
    if not getattr(kind, "supports", has_plain_weights)(problem):
        return None
    try:
        return kind(problem)
    except (RuntimeError, NotImplementedError, AttributeError) as reason:
        tell(f"  no {kind.name}: {str(reason).splitlines()[0]}")
        return None


def run_once(side, op):
    side.forward()
    if op == "bwd":
        side.prepare_backward()
        side.backward()


def row(library, columns, case, repeats):
    """(seconds, error, largest error) of moe.h and of each column; None where it has no such layer."""
    tell(f"{case.name} {case.shape}")
    ours = Ours(library, case.shape, "bf16", case.op == "bwd", case.storage)
    draw(ours)
    reference = Reference(ours)
    kinds = [(column.title, made(kind, ours)) for column in columns for kind in column.kinds]
    sides = [("moe.h", ours)] + [(title, side) for title, side in kinds if side]
    apart = []
    for _, side in sides:
        run_once(side, case.op)
        apart.append(errors(reference, side, case.op))
        side.forget()
    del reference
    seconds = medians(library, [side for _, side in sides], case.op, repeats)
    best = {}
    for (title, side), time, (norm, largest) in zip(sides, seconds, apart):
        tell(f"  {side.name:16}{time * 1e3:9.2f} ms, error {norm:.2e}, largest {largest:.2e}")
        best[title] = min(best.get(title, (np.inf, 0, 0)), (time, norm, largest))
    for _, side in sides[::-1]:
        side.free()
    return [best.get(title) for title in ("moe.h", *(column.title for column in columns))]


def cell(result, fastest):
    """Three digits of the time, two of the errors."""
    if result is None:
        return "–"
    time, norm, largest = result
    milliseconds = time * 1e3
    text = f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"
    return f"{f'**{text}**' if fastest else text} · {100 * norm:.2g} % ({100 * largest:.2g} %)"


def markdown(columns, results):
    """The table's lines."""
    lines = ["| layer | T, H, I, E, K | " + " | ".join(("moe.h", *(column.title for column in columns))) + " |"]
    lines.append("|---" * (3 + len(columns)) + "|")
    for case, result in results:
        fastest = min(each[0] for each in result if each)
        cells = [cell(each, each is not None and each[0] == fastest) for each in result]
        lines.append(f"| {case.name} | {', '.join(map(str, case.shape))} | " + " | ".join(cells) + " |")
    return lines


def processor():
    """Its name, where Linux tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = [line.split(":", 1) for line in file if ":" in line]
    except OSError:
        return "this processor"
    values = {name.strip(): value.strip() for name, value in fields}
    extensions = [name for name in ("avx512_bf16", "amx_bf16") if name in values.get("flags", "").split()]
    return f"{values.get('model name', 'this processor')} ({', '.join(extensions) or 'no bf16 instructions'})"


def run(arguments):
    """Peers may print what they like: standard output is for the table alone."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    columns = installed(arguments.threads)
    library = Library(arguments.threads)
    chosen = [CASES[i] for i in arguments.rows] if arguments.rows else CASES
    results = [(case, row(library, columns, case, 21 if case.shape[0] <= 16 else 7)) for case in chosen]
    library.close()
    print("\n".join(markdown(columns, results)), file=output)
    print(f"\n{processor()}, threads: {arguments.threads}. Times are medians, weights come from memory. Errors are "
          "against the layer in double: the norm of the difference relative to that of the result and, in brackets, "
          "the largest difference relative to the result's root mean square. Of a backward: its worst tensor's.",
          file=output)
    output.close()
