#!/usr/bin/env python3
"""The layers of bench/models.h by moe.h, PyTorch and oneDNN, on the same data, in turn, in one run.

    python3 bench/peers/compare.py [--dtype bf16|fp16|f32] [--threads N] [--onednn DIR] [--quick]
    python3 bench/peers/compare.py --table [--threads N] [--rows I ...]

Results are compared before anything is timed. Wants numpy, and PyTorch (pip install numpy torch) or oneDNN 3 with
OpenMP, whose prefix --onednn gives where the compiler does not find it; says so where they are missing.

--table prints Markdown: the time and the error of some layers, most with quantised weights, by moe.h, PyTorch, ggml
(installed; GGML_DIR is its prefix where the compiler does not find it) and kt-kernel (pip install kt-kernel). A peer
that is missing, or has no such layer, is a dash. A thread of kt-kernel spins while its workers compute: it needs one
processor more than --threads says.

A peer, like Ours in library.py, is made from a problem and has forward(); prepare_backward(), untimed, and backward();
forget(), which drops what a run allocated; output(), input_gradient(), affinity_gradients() by pair sorted by expert,
weight_gradients(expert) as arrays; and free().
"""
import argparse
import math
import os
import re
import statistics
import sys

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages for PyTorch, as numpy and moe_bench have them
try:
    from library import Library, Ours
    from measure import as_double, medians
except ImportError:
    print("compare.py: nothing compared, as there is no numpy here (pip install numpy torch)")
    sys.exit(0)

HERE = os.path.dirname(os.path.abspath(__file__))
MEMORY = 8e9
SIZES = {"bf16": 2, "fp16": 2, "f32": 4}
ROUNDINGS = {"bf16": 2.0 ** -8, "fp16": 2.0 ** -11, "f32": 2.0 ** -24}  # relative
BUSY = 0.7  # load average


def read_tables():
    """Models (name, H, I, E, K) and cases (name, op, T) of bench/models.h."""
    with open(os.path.join(HERE, "..", "models.h")) as file:
        text = file.read()
    models = re.findall(r'\{"([^"]+)", (\d+), (\d+), (\d+), (\d+)\}', text)
    cases = re.findall(r'\{"([^"]+)", "(\w+)", (\d+)\}', text)
    return [(name, *map(int, sizes)) for name, *sizes in models], [(name, op, int(T)) for name, op, T in cases]


def scaled_experts(H, I, E, K, op, size):
    """Halves E until the weights, and backward both sides' gradients, fit into MEMORY."""
    while E // 2 >= K and 3 * size * H * I * E * (3 if op == "bwd" else 1) > MEMORY:
        E //= 2
    return E


# ------------------------------------------------------------------------------------------------------------- checking


def bound(problem):
    """Of the norm of a difference, relative to the norm of the tensor.

    Two things keep the sides apart. First, the tensors they round to the element type: a rounding moves a tensor by at
    most that type's relative rounding of its norm, 0.3 of that in the mean, and the directions are independent: they
    add up as squares, so that the plain sum used here leaves room for what silu and the gating stretch. Products with
    random matrices carry a relative distance on as it is. On the longest way, to the gate's weight gradient, PyTorch
    rounds g, u, silu, dY*a, dm, its product with u, silu's gradient and the result; moe.h g, u, dg and the result: 12.
    The K terms of an output or an input gradient are added with one more rounding each. Second, the order in which
    products are summed in binary32: every addition rounds a partial sum, and n independent errors of at most 2^-24 of
    sums that grow as a random walk does stay below sqrt(n) 2^-24 of the result's norm. n is the longest sum's length.
    """
    longest = max(problem.H, 2 * problem.I, problem.T)
    return (12 + problem.K) * (ROUNDINGS[problem.dtype] + math.sqrt(longest) * ROUNDINGS["f32"])


def distance(pairs):
    """The norm of the difference of a tensor of ours and theirs, given in pieces, relative to that of theirs."""
    difference = length = 0.0
    for ours, theirs in pairs:
        a, b = as_double(ours), as_double(theirs)
        difference += float((a - b) @ (a - b))
        length += float(b @ b)
    return math.sqrt(difference / length if length else difference)


def distances(ours, peer, op):
    """By the tensor's name; runs both sides."""
    ours.forward()
    peer.forward()
    result = {"y": distance([(ours.output(), peer.output())])}
    if op == "bwd":
        peer.prepare_backward()
        ours.backward()
        peer.backward()
        result["dX"] = distance([(ours.input_gradient(), peer.input_gradient())])
        result["dA"] = distance([(ours.affinity_gradients(), peer.affinity_gradients())])
        result["dW"] = distance(pair for expert in range(ours.E)
                                for pair in zip(ours.weight_gradients(expert), peer.weight_gradients(expert)))
    peer.forget()
    return result


def check(ours, peers, op):
    """Ends the program where a peer's result differs by more than rounding explains; so does a NaN."""
    for peer in peers:
        apart, most = distances(ours, peer, op), bound(ours)
        print(f"  {peer.name}: norm of the difference, relative, at most {most:.1e}: "
              + ", ".join(f"{what} {norm:.1e}" for what, norm in apart.items()))
        if not all(norm <= most for norm in apart.values()):
            raise SystemExit(f"compare.py: moe.h and {peer.name} differ by more than rounding explains")


# --------------------------------------------------------------------------------------------------------------- timing


def case(library, kinds, model, op, T, arguments):
    """One line of the table: how many times as fast as the fastest peer moe.h is, and the machine's limit would be."""
    name, H, I, full, K = model
    E = scaled_experts(H, I, full, K, op, SIZES[arguments.dtype])
    scaled = "" if E == full else f" (E scaled from {full})"
    print(f"{name} {op} T={T} H={H} I={I} E={E} K={K}{scaled}", flush=True)
    ours = Ours(library, (T, H, I, E, K), arguments.dtype, op == "bwd")
    peers = [kind(ours) for kind in kinds]
    check(ours, peers, op)
    limit = ours.limit(op)
    seconds = medians(library, [ours, *peers], op, 3 if arguments.quick else 7)
    limit = 0.5 * (limit + ours.limit(op))  # it drifts
    flops = (12 if op == "bwd" else 6) * T * K * H * I
    for side, each in zip([ours, *peers], seconds):
        share = f"{100 * limit / each:.1f} % of the limit"
        ratio = "" if side is ours else f", moe.h is {each / seconds[0]:.2f} times as fast"
        print(f"  {side.name:12}{each * 1e3:10.2f} ms {flops / each * 1e-9:9.1f} GFLOP/s, {share}{ratio}", flush=True)
    for side in [*peers, ours]:
        side.free()
    return min(seconds[1:]) / seconds[0], min(seconds[1:]) / limit


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values))


# ---------------------------------------------------------------------------------------------------------------- peers


def installed(arguments):
    """The peers that are installed, and a line about each that is not."""
    kinds, missing = [], []
    try:
        import torch
        import torch_peers
        torch.set_num_threads(arguments.threads)
        kinds += [torch_peers.Loop, torch_peers.Grouped]
        print(f"PyTorch {torch.__version__}")
    except ImportError as reason:
        missing.append(f"no PyTorch: {reason} (pip install torch)")
    try:
        import onednn_peer
        print(f"oneDNN {onednn_peer.load(arguments.threads, arguments.onednn)}")
        kinds.append(onednn_peer.OneDNN)
    except OSError as reason:
        missing.append(f"no oneDNN: {str(reason).splitlines()[0]}")
    return kinds, missing


def able(library, kind, dtype):
    """Whether the peer has kernels for this type on this CPU: asked by running a small layer."""
    ours = Ours(library, (16, 16, 16, 2, 2), dtype, True)
    try:
        peer = kind(ours)
        distances(ours, peer, "bwd")
        peer.free()
        return None
    except (RuntimeError, NotImplementedError, AttributeError) as reason:
        return f"no {kind.name}: {str(reason).splitlines()[0]}"
    finally:
        ours.free()


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=SIZES, default="bf16", help="on a CPU without bf16 instructions PyTorch's "
                                                                      "bf16 products take minutes: f32 is the fair one")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for both sides; all processors by default")
    parser.add_argument("--onednn", metavar="DIR", help="where oneDNN is installed: DIR/include, DIR/lib")
    parser.add_argument("--quick", action="store_true", help="the two models with the smallest experts, with a quarter "
                                                             "of the tokens and experts; three runs")
    parser.add_argument("--table", action="store_true", help="times and errors, in Markdown")
    parser.add_argument("--rows", type=int, nargs="+", metavar="I", help="of that table; 0 is the first")
    return parser.parse_args()


def table_with_large_pages(arguments):
    """glibc asks for large pages only where it is told so when a program starts; then no peer has to do without."""
    if "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import table
    table.run(arguments)


def main():
    arguments = parse()
    if arguments.table:
        table_with_large_pages(arguments)
        return
    print(f"moe.h and its peers, {arguments.dtype}, threads: {arguments.threads}")
    kinds, missing = installed(arguments)
    library = Library(arguments.threads)
    reasons = {kind: able(library, kind, arguments.dtype) for kind in kinds}
    missing += [reason for reason in reasons.values() if reason]
    kinds = [kind for kind in kinds if not reasons[kind]]
    for line in missing:
        print(line)
    if not kinds:
        print("compare.py: nothing compared")
        return
    models, cases = read_tables()
    if arguments.quick:
        smallest = sorted(models, key=lambda model: model[1] * model[2])[:2]
        models = [(name, H, I, E // 4, K) for name, H, I, E, K in smallest]
        cases = [(name, op, max(T // 4, 1)) for name, op, T in cases if T != 1]
    if os.getloadavg()[0] > BUSY:
        print("the machine is busy: with more than one thread, the peers' barriers then wait for the processor, and "
              "their times mean little")
    ratios = {}
    for model in models:
        for _, op, T in cases:
            ratios[f"{model[0]} {op} T={T}"] = case(library, kinds, model, op, T, arguments)
    library.close()
    print("times as fast as the fastest peer, and what a layer at the machine's limit would be:")
    ratios["geometric mean"] = [geometric_mean(column) for column in zip(*ratios.values())]
    for line, (reached, most) in ratios.items():
        print(f"  {line:34}{reached:6.2f}{most:6.2f}")


if __name__ == "__main__":
    main()
