"""moe.h through ctypes: library.c compiled into a shared object, its tensors seen as numpy arrays."""
import ctypes
import math
import os
import subprocess
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
ARRAYS = {"f32": np.float32, "fp16": np.float16, "bf16": np.uint16}  # numpy has no bfloat16: its bits


def compile_shared(source, flags, libraries):
    """The functions of a C source; OSError where it does not compile."""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "library.so")
        compiled = subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", *flags, "-o", path, source,
                                   *libraries], capture_output=True, text=True, check=False)
        if compiled.returncode:
            raise OSError(compiled.stderr)
        return ctypes.CDLL(path)


class Library:
    """The compiled library, its threads, and the memory by which it empties the caches."""

    def __init__(self, threads):
        self.calls = compile_shared(os.path.join(HERE, "library.c"), ["-O2", f"-I{ROOT}"], ["-lm", "-lpthread"])
        self.calls.peer_make.restype = ctypes.c_void_p
        self.calls.peer_free.argtypes = [ctypes.c_void_p]
        self.calls.peer_run.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.calls.peer_save.argtypes = [ctypes.c_void_p]
        self.calls.peer_limit.restype = ctypes.c_double
        self.calls.peer_limit.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.calls.peer_tensor.restype = ctypes.c_void_p
        self.calls.peer_tensor.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        self.calls.peer_start(threads)

    def close(self):
        self.calls.peer_stop()

    def empty_caches(self):
        self.calls.peer_empty_caches()


class Pairs:
    """The pairs (token, expert), sorted by expert: what implementations expert by expert start from."""

    def __init__(self, index, weights, experts):
        order = np.argsort(index.reshape(-1), kind="stable")
        self.counts = np.bincount(index.reshape(-1), minlength=experts)  # [E]
        self.tokens = order // index.shape[1]  # [T*K]
        self.experts = index.reshape(-1)[order]
        self.weights = weights.reshape(-1)[order]
        self.places = np.argsort(order)  # [T,K]: where a token's pairs are


def code_shapes(storage, H, I, E):
    """Of gate and up's codes, down's, and the scales of each."""
    if storage == "fp8":
        return (E, H, 2, I), (E, I, H), (E, 2, I), (E, H)
    if storage == "fp8_block":
        rows, columns = -(-H // 128), -(-I // 128)
        return (E, H, 2, I), (E, I, H), (E, rows, 2, columns), (E, columns, rows)
    per_byte = 2 if storage == "mxfp4" else 1
    return (E, 2, I, H // per_byte), (E, H, I // per_byte), (E, 2, I, H // 32), (E, H, I // 32)


class Ours:
    """The layer by moe.h: the problem's tensors are its own. compare.py says which methods it shares with its peers.

    x, y, dy, dx are [T,H]; gate_up [E,H,2,I], down [E,I,H] and their gradients; index and weights [T,K];
    daffinities [T+1,E]. storage: how the weights are stored, None: plainly. Quantised weights have codes and scales
    instead of gate_up and down, as bytes and floats in the shapes that moe.h gives.
    """

    name = "moe.h"

    def __init__(self, library, shape, dtype, backward_too, storage=None):
        self.T, self.H, self.I, self.E, self.K = T, H, I, E, K = shape
        self.library, self.dtype, self.backward_too, self.storage = library, dtype, backward_too, storage or dtype
        self.layer = library.calls.peer_make((ctypes.c_int64 * 5)(*shape), dtype.encode(), self.storage.encode(),
                                             int(backward_too))
        rows, gate_up, down, element = (T, H), (E, H, 2, I), (E, I, H), ARRAYS[dtype]
        self.x, self.y = self.view("x", rows, element), self.view("y", rows, element)
        if self.storage == dtype:
            self.gate_up, self.down = self.view("wgu", gate_up, element), self.view("wd", down, element)
        else:
            self.view_codes()
        self.index, self.weights = self.view("index", (T, K), np.int32), self.view("weights", (T, K), np.float32)
        if backward_too:
            self.dy, self.dx = self.view("dy", rows, element), self.view("dx", rows, element)
            self.dgate_up, self.ddown = self.view("dwgu", gate_up, element), self.view("dwd", down, element)
            self.daffinities = self.view("daffinities", (T + 1, E), np.float32)

    def view(self, name, shape, dtype):
        address = self.library.calls.peer_tensor(self.layer, name.encode())
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)

    def view_codes(self):
        H, I, E = self.H, self.I, self.E
        if self.storage == "mxfp4_ggml":  # a block's first byte is its scale
            self.gate_up_codes = self.view("wgu_codes", (2, E, I, H // 32, 17), np.uint8)
            self.down_codes = self.view("wd_codes", (E, H, I // 32, 17), np.uint8)
            self.gate_up_scales, self.down_scales = self.gate_up_codes[..., 0], self.down_codes[..., 0]
            return
        gate_up, down, gate_up_scales, down_scales = code_shapes(self.storage, H, I, E)
        self.gate_up_codes = self.view("wgu_codes", gate_up, np.uint8)
        self.down_codes = self.view("wd_codes", down, np.uint8)
        scale = np.uint8 if self.storage in ("mxfp4", "mxfp8") else np.float32
        self.gate_up_scales = self.view("wgu_scales", gate_up_scales, scale)
        self.down_scales = self.view("wd_scales", down_scales, scale)

    def pairs(self):
        return Pairs(self.index, self.weights, self.E)

    def free(self):
        """The arrays, and what peers made of them, must not be used any more."""
        self.library.calls.peer_free(self.layer)

    def limit(self, op):
        """Seconds that the machine's own limits, measured now, leave for the operation."""
        return self.library.calls.peer_limit(self.layer, op.encode())

    def forward(self):
        self.library.calls.peer_run(self.layer, b"fwd")

    def prepare_backward(self):
        """The checkpoint was filled when the layer was made."""

    def save(self):
        """Fills the checkpoint anew, after x was changed."""
        self.library.calls.peer_save(self.layer)

    def backward(self):
        self.library.calls.peer_run(self.layer, b"bwd")

    def forget(self):
        """A run allocates nothing."""

    def output(self):
        return self.y

    def input_gradient(self):
        return self.dx

    def affinity_gradients(self):
        pairs = self.pairs()
        return self.daffinities[pairs.tokens, pairs.experts]

    def weight_gradients(self, expert):
        return self.dgate_up[expert], self.ddown[expert]
