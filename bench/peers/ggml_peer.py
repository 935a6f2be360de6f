"""The layer's forward by ggml: ggml_peer.c compiled against an installed ggml, whose prefix GGML_DIR gives."""
import ctypes
import os

import numpy as np

from library import compile_shared
from measure import as_double

HERE = os.path.dirname(os.path.abspath(__file__))


class Problem(ctypes.Structure):
    """peer_problem of ggml_peer.c."""

    _fields_ = [(name, ctypes.c_int64) for name in ("T", "H", "I", "E", "K", "threads", "repack")] + [
        (name, ctypes.c_void_p) for name in ("gate", "up", "down", "x", "weights", "index")]


def blocks(codes, scales):
    """Rows of nibble pairs (2j, 2j+1) and scale bytes as ggml's blocks: the scale, then bytes of elements j, j+16."""
    pairs = codes.reshape(*scales.shape, 16)
    elements = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scales.shape, 32)
    return np.concatenate([scales[..., None], elements[..., :16] | elements[..., 16:] << 4], axis=-1)


class Ggml:
    """mul_mat_id with the weights as they are in a file. It has no backward."""

    name = "ggml"
    repack = 0
    calls, threads = None, 1  # ggml_peer.c's functions, by load()

    @staticmethod
    def supports(problem):
        return problem.storage in ("bf16", "mxfp4", "mxfp4_ggml") and not problem.backward_too

    def __init__(self, problem):
        weights = self.weights_of(problem)
        x = as_double(problem.x).astype(np.float32)
        self.y = np.zeros(problem.y.shape, np.float32)
        sizes = {name: getattr(problem, name) for name in "THIEK"}
        arrays = {"x": x, "weights": problem.weights, "index": problem.index, **weights}
        self.layer = self.calls.peer_make(
            ctypes.byref(Problem(**sizes, threads=self.threads, repack=self.repack,
                                 **{name: array.ctypes.data for name, array in arrays.items()})),
            b"bf16" if problem.storage == "bf16" else b"mxfp4")
        if not self.layer:
            raise RuntimeError(f"{self.name} does not take {problem.storage} weights on this CPU")

    @staticmethod
    def weights_of(p):
        """Rows along the contraction: gate and up [E,I,H], down [E,H,I]."""
        if p.storage == "bf16":
            gate_up = p.gate_up.transpose(2, 0, 3, 1)
            parts = gate_up[0], gate_up[1], p.down.transpose(0, 2, 1)
        elif p.storage == "mxfp4_ggml":
            parts = p.gate_up_codes[0], p.gate_up_codes[1], p.down_codes
        else:
            parts = (blocks(p.gate_up_codes[:, 0], p.gate_up_scales[:, 0]),
                     blocks(p.gate_up_codes[:, 1], p.gate_up_scales[:, 1]), blocks(p.down_codes, p.down_scales))
        return dict(zip(("gate", "up", "down"), map(np.ascontiguousarray, parts)))

    def free(self):
        self.calls.peer_free(self.layer)

    def forward(self):
        if self.calls.peer_forward(self.layer):
            raise RuntimeError("ggml failed")

    def forget(self):
        """A run allocates nothing."""

    def output(self):
        self.calls.peer_output(self.layer, self.y.ctypes.data)
        return self.y


class Repacked(Ggml):
    """With the weights as ggml's CPU backend rearranges them when it loads a model, where it has kernels for that."""

    name = "ggml, repacked"
    repack = 1


def load(threads):
    """Compiles ggml_peer.c and tells ggml's version; OSError where it does not compile."""
    root = os.environ.get("GGML_DIR")
    places = [f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{os.path.abspath(root)}/lib"] if root else []
    calls = compile_shared(os.path.join(HERE, "ggml_peer.c"), ["-O2", *places],
                           ["-lggml", "-lggml-cpu", "-lggml-base"])
    calls.peer_version.restype = ctypes.c_char_p
    calls.peer_make.restype = ctypes.c_void_p
    calls.peer_free.argtypes = calls.peer_forward.argtypes = [ctypes.c_void_p]
    calls.peer_output.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    Ggml.calls, Ggml.threads = calls, threads
    return calls.peer_version().decode()
