"""The same layer in PyTorch: a loop over experts, and grouped products where this PyTorch has them on the CPU."""
import numpy as np
import torch


def tensor(array):
    """The array's own memory as a tensor; uint16 means bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor_):
    """The tensor's own memory as an array; bfloat16 becomes uint16."""
    if tensor_.dtype == torch.bfloat16:
        return tensor_.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor_.detach().numpy()


class TorchLayer:
    """What the peers share: the problem as tensors, pairs of (token, expert) sorted by expert, autograd."""

    def __init__(self, problem):
        pairs = problem.pairs()
        self.x = tensor(problem.x)
        self.dy = tensor(problem.dy) if problem.backward_too else None
        self.gate_up = tensor(problem.gate_up).reshape(problem.E, problem.H, 2 * problem.I)
        self.down = tensor(problem.down)
        self.counts, self.tokens = pairs.counts, torch.from_numpy(pairs.tokens)
        self.weights = torch.from_numpy(pairs.weights).to(self.x.dtype)
        self.leaves, self.y = [], None

    def free(self):
        """Its tensors go with it."""

    def forward(self):
        with torch.no_grad():
            self.y = self.run()

    def prepare_backward(self):
        """Untimed: the forward that autograd goes back through, and no gradients left from before."""
        for leaf in self.leaves:
            leaf.grad = None
            leaf.requires_grad_(True)
        self.y = self.run()

    def backward(self):
        self.y.backward(self.dy)

    def forget(self):
        for leaf in self.leaves:
            leaf.grad = None
        self.y = None

    def output(self):
        return array(self.y)

    def input_gradient(self):
        return array(self.x.grad)

    def affinity_gradients(self):
        return array(self.weights.grad)


def gated(product):
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class Loop(TorchLayer):
    """One expert after the other, each with its own parameters, as in a ModuleList of experts."""

    name = "loop"

    def __init__(self, problem):
        super().__init__(problem)
        self.gate_ups, self.downs = [w.detach() for w in self.gate_up], [w.detach() for w in self.down]
        ends = np.cumsum(self.counts)
        self.rows = [slice(int(end - count), int(end)) for end, count in zip(ends, self.counts)]
        self.leaves = [self.x, self.weights, *self.gate_ups, *self.downs]

    def run(self):
        y = torch.zeros_like(self.x, requires_grad=False)
        for rows, gate_up, down in zip(self.rows, self.gate_ups, self.downs):
            if rows.start == rows.stop:
                continue
            tokens = self.tokens[rows]
            d = gated(self.x[tokens] @ gate_up) @ down
            y.index_add_(0, tokens, d * self.weights[rows, None])
        return y

    def weight_gradients(self, expert):
        """Zeros for an expert that no token chose, for which autograd has none."""
        leaves = self.gate_ups[expert], self.downs[expert]
        return [array(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) for leaf in leaves]


class Grouped(TorchLayer):
    """All experts in one call per product."""

    name = "grouped_mm"

    def __init__(self, problem):
        super().__init__(problem)
        self.ends = torch.from_numpy(np.cumsum(self.counts).astype(np.int32))
        self.product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
        self.leaves = [self.x, self.weights, self.gate_up, self.down]

    def run(self):
        m = gated(self.product(self.x[self.tokens], self.gate_up, offs=self.ends))
        d = self.product(m, self.down, offs=self.ends)
        return torch.zeros_like(self.x, requires_grad=False).index_add_(0, self.tokens, d * self.weights[:, None])

    def weight_gradients(self, expert):
        return array(self.gate_up.grad[expert]), array(self.down.grad[expert])
