"""The layer by oneDNN 3: onednn.c compiled into a shared object, where oneDNN with OpenMP is installed."""
import ctypes
import os

import numpy as np

from library import compile_shared

HERE = os.path.dirname(os.path.abspath(__file__))


class Problem(ctypes.Structure):
    """peer_problem of onednn.c."""

    _fields_ = [(name, ctypes.c_int64) for name in "THIEK"] + [(name, ctypes.c_void_p) for name in (
        "counts", "tokens", "places", "weights", "x", "gate_up", "down", "y", "dy", "dx", "dgate_up", "ddown",
        "dweights")]


class OneDNN:
    """One expert after the other, each product a matmul primitive."""

    name = "oneDNN"
    calls = None  # onednn.c's functions, by load()

    def __init__(self, problem):
        pairs = problem.pairs()
        self.arrays = {
            "counts": pairs.counts, "tokens": pairs.tokens, "places": pairs.places, "weights": pairs.weights,
            "x": problem.x, "gate_up": problem.gate_up, "down": problem.down, "y": np.zeros_like(problem.y)}
        if problem.backward_too:
            self.arrays |= {
                "dy": problem.dy, "dx": np.zeros_like(problem.dx), "dgate_up": np.zeros_like(problem.dgate_up),
                "ddown": np.zeros_like(problem.ddown), "dweights": np.zeros_like(pairs.weights)}
        sizes = {name: getattr(problem, name) for name in "THIEK"}
        self.layer = self.calls.peer_make(
            ctypes.byref(Problem(**sizes, **{name: array.ctypes.data for name, array in self.arrays.items()})),
            problem.dtype.encode())
        if not self.layer:
            raise RuntimeError(f"oneDNN has no {problem.dtype} kernels for this CPU")

    def free(self):
        self.calls.peer_free(self.layer)

    def forward(self):
        if self.calls.peer_forward(self.layer):
            raise RuntimeError("oneDNN failed")

    def prepare_backward(self):
        """Untimed: what backward finds saved."""
        self.forward()

    def backward(self):
        if self.calls.peer_backward(self.layer):
            raise RuntimeError("oneDNN failed")

    def forget(self):
        """A run allocates nothing."""

    def output(self):
        return self.arrays["y"]

    def input_gradient(self):
        return self.arrays["dx"]

    def affinity_gradients(self):
        return self.arrays["dweights"]

    def weight_gradients(self, expert):
        return self.arrays["dgate_up"][expert], self.arrays["ddown"][expert]


def load(threads, root):
    """Compiles onednn.c and tells oneDNN's version; OSError where it does not compile. root: its prefix, or None."""
    places = [f"-I{root}/include", f"-L{root}/lib", f"-Wl,-rpath,{os.path.abspath(root)}/lib"] if root else []
    calls = compile_shared(os.path.join(HERE, "onednn.c"), ["-O3", "-march=native", "-ffast-math", "-fopenmp", *places],
                           ["-ldnnl", "-lm"])
    calls.peer_version.restype = ctypes.c_char_p
    calls.peer_make.restype = ctypes.c_void_p
    for function in (calls.peer_free, calls.peer_forward, calls.peer_backward):
        function.argtypes = [ctypes.c_void_p]
    calls.peer_threads(threads)
    OneDNN.calls = calls
    return calls.peer_version().decode()
