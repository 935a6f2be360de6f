#!/usr/bin/env python3
"""The layers of bench/models.h by moe.h and by PyTorch, on the same data, in turn, in one run.

    python3 bench/peers/compare.py [--threads N] [--quick]

Results are compared before anything is timed. Wants numpy and PyTorch (pip install numpy torch), and says so where they
are missing.
"""
import argparse
import math
import os
import re
import statistics
import sys
import time

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # large pages for PyTorch, as numpy and moe_bench have them
try:
    import numpy as np
    import torch
except ImportError as missing:
    print(f"compare.py: nothing compared, as there is no {missing.name} here (pip install numpy torch)")
    sys.exit(0)

from library import Library, Ours
from torch_peers import Grouped, Loop, has_grouped_mm, tensor

HERE = os.path.dirname(os.path.abspath(__file__))
MEMORY = 8e9
ROUNDING = 2.0 ** -8  # of bfloat16, relative
BUSY = 0.7  # load average


def read_tables():
    """Models (name, H, I, E, K) and cases (name, op, T) of bench/models.h."""
    with open(os.path.join(HERE, "..", "models.h")) as file:
        text = file.read()
    models = re.findall(r'\{"([^"]+)", (\d+), (\d+), (\d+), (\d+)\}', text)
    cases = re.findall(r'\{"([^"]+)", "(\w+)", (\d+)\}', text)
    return [(name, *map(int, sizes)) for name, *sizes in models], [(name, op, int(T)) for name, op, T in cases]


def scaled_experts(H, I, E, K, op):
    """Halves E until the weights, and backward both sides' gradients, fit into MEMORY."""
    while E // 2 >= K and 6 * H * I * E * (3 if op == "bwd" else 1) > MEMORY:
        E //= 2
    return E


# ------------------------------------------------------------------------------------------------------------- checking


class Distance:
    """How far two tensors, given in pieces, are apart."""

    def __init__(self):
        self.ab = self.aa = self.bb = self.dd = self.worst = self.largest = 0.0

    def add(self, ours, theirs):
        a, b = ours.double().flatten(), theirs.double().flatten()
        d = a - b
        self.ab, self.aa, self.bb = self.ab + float(a @ b), self.aa + float(a @ a), self.bb + float(b @ b)
        self.dd += float(d @ d)
        self.worst = max(self.worst, float(d.abs().max()))
        self.largest = max(self.largest, float(b.abs().max()))

    def check(self, what, bound):
        """A NaN fails, too."""
        length = math.sqrt(self.aa * self.bb)
        cosine = self.ab / length if length else 1.0
        norm = math.sqrt(self.dd / self.bb) if self.bb else math.sqrt(self.dd)
        print(f"    {what}: cosine {cosine:.7f}, largest difference {self.worst / (self.largest or 1):.1e} of the "
              f"largest value, norm of the difference {norm:.1e} (at most {bound:.1e})")
        if not norm <= bound:
            raise SystemExit(f"compare.py: {what} differs from the peer's by more than rounding explains")


def bound(K):
    """Of the norm of a difference, relative to the norm of the tensor.

    Both sides sum products in binary32, so what keeps them apart is the tensors they round to bfloat16. A rounding
    moves a tensor by at most ROUNDING of its norm, 0.3 of that in the mean, and the directions are independent: they
    add up as squares, so that the plain sum used here leaves room for what silu and the gating stretch. Products with
    random matrices carry a relative distance on as it is. On the longest way, to the gate's weight gradient, PyTorch
    rounds g, u, silu, dY*a, dm, its product with u, silu's gradient and the result; moe.h g, u, dg and the result: 12.
    The K terms of an output or an input gradient are added with one more rounding each.
    """
    return (12 + K) * ROUNDING


def check_forward(ours, peer):
    distance = Distance()
    distance.add(tensor(ours.y), peer.y)
    distance.check(f"y against {peer.name}", bound(ours.K))


def check_backward(ours, peer):
    dx, dw, da = Distance(), Distance(), Distance()
    dx.add(tensor(ours.dx), peer.x.grad)
    daffinities = torch.from_numpy(ours.daffinities)
    da.add(daffinities[peer.tokens, torch.from_numpy(peer.experts).long()], peer.weights.grad)
    for expert in range(ours.E):
        for mine, grad in zip((ours.dgate_up[expert], ours.ddown[expert]), peer.weight_gradients(expert)):
            flat = tensor(mine.reshape(-1))
            dw.add(flat, torch.zeros_like(flat) if grad is None else grad.flatten())
    for distance, what in ((dx, "dX"), (dw, "dW"), (da, "dA")):
        distance.check(f"{what} against {peer.name}", bound(ours.K))


def check(ours, peers, op):
    for peer in peers:
        ours.forward()
        peer.forward()
        check_forward(ours, peer)
        if op == "bwd":
            peer.prepare_backward()
            ours.backward()
            peer.backward()
            check_backward(ours, peer)
            peer.forget()


# --------------------------------------------------------------------------------------------------------------- timing


def timed(library, side, op):
    """Seconds of one run, from memory: emptying the caches lets the other side's threads fall asleep, too."""
    if op == "bwd":
        side.prepare_backward()
    library.empty_caches()
    begin = time.perf_counter()
    if op == "bwd":
        side.backward()
    else:
        side.forward()
    seconds = time.perf_counter() - begin
    side.forget()
    return seconds


def compare(library, sides, op, repeats):
    """Medians of runs in turn, A B C A B C; the first round is not counted."""
    rounds = [[timed(library, side, op) for side in sides] for _ in range(repeats + 1)]
    return [statistics.median(column) for column in zip(*rounds[1:])]


def case(library, model, op, T, arguments):
    """One line of the table; the ratio against the fastest peer."""
    name, H, I, full, K = model
    E = scaled_experts(H, I, full, K, op)
    scaled = "" if E == full else f" (E scaled from {full})"
    print(f"{name} {op} T={T} H={H} I={I} E={E} K={K}{scaled}", flush=True)
    ours = Ours(library, T, H, I, E, K, op == "bwd")
    peers = [kind(ours) for kind in ([Loop, Grouped] if arguments.grouped else [Loop])]
    check(ours, peers, op)
    seconds = compare(library, [ours, *peers], op, 3 if arguments.quick else 7)
    flops = (12 if op == "bwd" else 6) * T * K * H * I
    for side, each in zip([ours, *peers], seconds):
        ratio = "" if side is ours else f", moe.h is {each / seconds[0]:.2f} times as fast"
        print(f"  {side.name:12}{each * 1e3:10.2f} ms {flops / each * 1e-9:9.1f} GFLOP/s{ratio}", flush=True)
    ours.free()
    return min(seconds[1:]) / seconds[0]


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(value) for value in values))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="for both sides; all processors by default")
    parser.add_argument("--quick", action="store_true", help="the two models with the smallest experts, with a quarter "
                                                             "of the tokens and experts; three runs")
    return parser.parse_args()


def main():
    arguments = parse()
    arguments.grouped = has_grouped_mm()
    torch.set_num_threads(arguments.threads)
    models, cases = read_tables()
    if arguments.quick:
        smallest = sorted(models, key=lambda model: model[1] * model[2])[:2]
        models = [(name, H, I, E // 4, K) for name, H, I, E, K in smallest]
        cases = [(name, op, max(T // 4, 1)) for name, op, T in cases if T != 1]
    print(f"moe.h and PyTorch {torch.__version__}, bf16, threads: {arguments.threads}"
          + ("" if arguments.grouped else "; this PyTorch has no grouped_mm on the CPU"))
    if os.getloadavg()[0] > BUSY:
        print("the machine is busy: with more than one thread, PyTorch's barriers then wait for the processor, and its "
              "times mean little")
    library = Library(arguments.threads)
    ratios = {}
    for model in models:
        for _, op, T in cases:
            ratios[f"{model[0]} {op} T={T}"] = case(library, model, op, T, arguments)
    library.close()
    print("times as fast as the fastest peer:")
    for line, ratio in ratios.items():
        print(f"  {line:34}{ratio:6.2f}")
    print(f"  {'geometric mean':34}{geometric_mean(ratios.values()):6.2f}")


if __name__ == "__main__":
    main()
