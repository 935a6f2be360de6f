"""What compare.py and table.py share: how tensors are read, and how runs are timed."""
import statistics
import time

import numpy as np


def as_double(array):
    """A tensor's values in a row; uint16 means bfloat16."""
    flat = array.reshape(-1)
    if flat.dtype == np.uint16:
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.astype(np.float64)


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


def medians(library, sides, op, repeats):
    """Medians of alternating runs, A B C A B C; the first round is not counted."""
    rounds = [[timed(library, side, op) for side in sides] for _ in range(repeats + 1)]
    return [statistics.median(column) for column in zip(*rounds[1:])]
