"""The layer in double, from the very weights that are stored and the same hidden states; errors against it."""
import numpy as np

from measure import as_double

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])


def table_of_e4m3fn():
    """The 256 codes' values."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0 ** -9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[codes & 127 == 127] = np.nan
    return np.where(codes < 128, magnitude, -magnitude)


E4M3FN = table_of_e4m3fn()


def nibbles(codes):
    """Bytes of two elements to values: low half first."""
    return E2M1[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(*codes.shape[:-1], -1)


def ggml_blocks(blocks):
    """[...,G,17] to [...,G*32]: a scale, then 16 bytes of elements j and j+16."""
    values = E2M1[np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)]
    scaled = values * 2.0 ** (blocks[..., :1].astype(np.float64) - 127)
    return scaled.reshape(*blocks.shape[:-2], -1)


def grouped(values, scales):
    """Values [...,K] times E8M0 scales [...,K/32]."""
    return values * np.repeat(2.0 ** (scales.astype(np.float64) - 127), 32, axis=-1)


def blocked(codes, scales):
    """e4m3fn codes [K,N] times float scales, one per block of 128 x 128."""
    wide = np.repeat(np.repeat(scales.astype(np.float64), 128, axis=0), 128, axis=1)
    return E4M3FN[codes] * wide[:codes.shape[0], :codes.shape[1]]


def projections(problem, e):
    """An expert's gate [H,I], up [H,I] and down [I,H] as they are stored, without any rounding."""
    p, stored = problem, problem.storage
    if stored == p.dtype:
        gate_up = as_double(p.gate_up[e]).reshape(p.H, 2, p.I)
        return gate_up[:, 0], gate_up[:, 1], as_double(p.down[e]).reshape(p.I, p.H)
    if stored == "mxfp4_ggml":
        return tuple(ggml_blocks(blocks[e]).T for blocks in (*p.gate_up_codes, p.down_codes))
    gate_up, down, gate_up_scales, down_scales = (
        tensor[e] for tensor in (p.gate_up_codes, p.down_codes, p.gate_up_scales, p.down_scales))
    if stored in ("mxfp4", "mxfp8"):
        values = nibbles if stored == "mxfp4" else E4M3FN.__getitem__
        gate, up = (grouped(values(gate_up[part]), gate_up_scales[part]) for part in (0, 1))
        return gate.T, up.T, grouped(values(down), down_scales).T
    if stored == "fp8_block":
        return (*(blocked(gate_up[:, part], gate_up_scales[:, part]) for part in (0, 1)), blocked(down, down_scales))
    return (*(E4M3FN[gate_up[:, part]] * gate_up_scales[part] for part in (0, 1)), E4M3FN[down] * down_scales)


class Reference:
    """y, and with gradients dx, dA by pair sorted by expert, and dW: per expert [H,2,I] and [I,H]."""

    def __init__(self, problem):
        self.problem, self.pairs = problem, problem.pairs()
        self.x = as_double(problem.x).reshape(problem.x.shape)
        self.dy = as_double(problem.dy).reshape(problem.x.shape) if problem.backward_too else None
        self.y, self.dx = np.zeros_like(self.x), np.zeros_like(self.x)
        self.da, self.dw = np.zeros(len(self.pairs.tokens)), []
        end = 0
        for e, count in enumerate(self.pairs.counts):
            rows, end = slice(end, end + count), end + count
            if count:
                self.expert(e, rows)
            elif self.dy is not None:
                self.dw.append((np.zeros((problem.H, 2, problem.I)), np.zeros((problem.I, problem.H))))

    def expert(self, e, rows):
        gate, up, down = projections(self.problem, e)
        tokens, weights = self.pairs.tokens[rows], self.pairs.weights[rows, None].astype(np.float64)
        x = self.x[tokens]
        g, u = x @ gate, x @ up
        sigmoid = 1 / (1 + np.exp(-g))
        m = g * sigmoid * u
        d = m @ down
        self.y[tokens] += weights * d  # a token has an expert once
        if self.dy is None:
            return
        dy = self.dy[tokens]
        self.da[rows] = (dy * d).sum(axis=1)
        dd = weights * dy
        dm = dd @ down.T
        dg, du = dm * u * sigmoid * (1 + g * (1 - sigmoid)), dm * g * sigmoid
        self.dx[tokens] += dg @ gate.T + du @ up.T
        self.dw.append((np.stack([x.T @ dg, x.T @ du], axis=1), m.T @ dd))


def error(pairs):
    """Of a tensor given in parts (theirs, exact): the norm of the difference, relative to the tensor's, and the
    largest difference, relative to the root of the mean square of the tensor's values."""
    difference = length = largest = 0.0
    count = 0
    for theirs, exact in pairs:
        apart, exact = as_double(theirs) - exact.reshape(-1), exact.reshape(-1)
        difference += float(apart @ apart)
        length += float(exact @ exact)
        largest = max(largest, float(np.abs(apart).max(initial=0))) if largest == largest else largest
        largest = np.nan if np.isnan(apart).any() else largest
        count += exact.size
    return np.sqrt(difference / length), largest / np.sqrt(length / count)


def errors(reference, side, op):
    """Of what a run of op left in a side: forward of the output, backward of the worst tensor."""
    if op != "bwd":
        return error([(side.output(), reference.y)])
    experts = range(reference.problem.E)
    tensors = [[(side.input_gradient(), reference.dx)], [(side.affinity_gradients(), reference.da)],
               ((theirs, exact) for e in experts for theirs, exact in zip(side.weight_gradients(e), reference.dw[e]))]
    return max(error(pairs) for pairs in tensors)
