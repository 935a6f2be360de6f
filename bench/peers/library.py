"""moe.h through ctypes: library.c compiled into a shared object, its tensors seen as numpy arrays."""
import ctypes
import math
import os
import subprocess
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")


class Library:
    """The compiled library, its threads, and the memory by which it empties the caches."""

    def __init__(self, threads):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "libmoe.so")
            subprocess.run([os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", f"-I{ROOT}", "-o", path,
                            os.path.join(HERE, "library.c"), "-lm", "-lpthread"], check=True)
            self.calls = ctypes.CDLL(path)
        self.calls.peer_make.restype = ctypes.c_void_p
        self.calls.peer_free.argtypes = [ctypes.c_void_p]
        self.calls.peer_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.calls.peer_tensor.restype = ctypes.c_void_p
        self.calls.peer_tensor.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.calls.peer_start(threads)

    def close(self):
        self.calls.peer_stop()

    def empty_caches(self):
        self.calls.peer_empty_caches()


class Ours:
    """The layer by moe.h: the problem's tensors are its own, and the methods are those of torch_peers.py.

    bfloat16 tensors are uint16 arrays: x, y, dy, dx [T,H]; gate_up [E,H,2,I], down [E,I,H] and their gradients.
    index and weights are [T,K], daffinities [T+1,E].
    """

    name = "moe.h"

    def __init__(self, library, T, H, I, E, K, backward):
        self.T, self.H, self.I, self.E, self.K, self.library = T, H, I, E, K, library
        shape = (ctypes.c_int64 * 5)(T, H, I, E, K)
        self.layer = library.calls.peer_make(shape, b"bf16", int(backward))
        rows, gate_up, down = (T, H), (E, H, 2, I), (E, I, H)
        self.x, self.y = self.view("x", rows), self.view("y", rows)
        self.gate_up, self.down = self.view("wgu", gate_up), self.view("wd", down)
        self.index, self.weights = self.view("index", (T, K), np.int32), self.view("weights", (T, K), np.float32)
        if backward:
            self.dy, self.dx = self.view("dy", rows), self.view("dx", rows)
            self.dgate_up, self.ddown = self.view("dwgu", gate_up), self.view("dwd", down)
            self.daffinities = self.view("daffinities", (T + 1, E), np.float32)

    def view(self, name, shape, dtype=np.uint16):
        address = self.library.calls.peer_tensor(self.layer, name.encode())
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)

    def free(self):
        """The arrays, and what PyTorch made of them, must not be used any more."""
        self.library.calls.peer_free(self.layer)

    def forward(self):
        self.library.calls.peer_run(self.layer, b"fwd")

    def prepare_backward(self):
        """The checkpoint was filled when the layer was made."""

    def backward(self):
        self.library.calls.peer_run(self.layer, b"bwd")

    def forget(self):
        """A run allocates nothing."""
