"""The layer by kt-kernel (pip install kt-kernel): its workers take the experts' weights as checkpoints have them."""
import numpy as np
from kt_kernel import kt_kernel_ext as kt

from library import Pairs

MOST_ROWS = 1024
CLASSES = {"bf16": "AMXBF16_MOE", "mxfp4": "AMXFP4_KGroup_MOE", "mxfp8": "AMXMXFP8_KGroup_MOE",
           "fp8": "AMXFP8PerChannel_MOE", "fp8_block": "AMXFP8_MOE"}


def rows(array):
    """[E,K,N] to [E,N,K]: kt-kernel wants each column's codes or scales together."""
    return np.ascontiguousarray(array.transpose(0, 2, 1))


def weights_of(p):
    """gate, up [E,I,H], down [E,H,I]; and their scales, None where they have none."""
    if p.storage == "bf16":
        return [rows(p.gate_up[:, :, 0]), rows(p.gate_up[:, :, 1]), rows(p.down)], None
    codes, scales = [p.gate_up_codes, p.down_codes], [p.gate_up_scales, p.down_scales]
    if p.storage in ("mxfp4", "mxfp8"):
        parts = [[tensor[0][:, 0], tensor[0][:, 1], tensor[1]] for tensor in (codes, scales)]
        if p.storage == "mxfp4":  # scales in bf16
            parts[1] = [scale.astype(np.uint16) << 7 for scale in parts[1]]
        return [list(map(np.ascontiguousarray, tensors)) for tensors in parts]
    codes = [rows(codes[0][:, :, 0]), rows(codes[0][:, :, 1]), rows(codes[1])]
    if p.storage == "fp8_block":
        return codes, [rows(scales[0][:, :, 0]), rows(scales[0][:, :, 1]), rows(scales[1])]
    return codes, [np.ascontiguousarray(scale) for scale in (scales[0][:, 0], scales[0][:, 1], scales[1])]


class KtKernel:
    """Inference; with gradients, its full fine-tuning."""

    name = "kt-kernel"
    pool = None  # by load()

    @staticmethod
    def supports(problem):
        return hasattr(kt.moe, "AMXBF16_SFT_MOE") if problem.backward_too else (
            problem.storage in CLASSES and hasattr(kt.moe, CLASSES[problem.storage]))

    def __init__(self, problem):
        self.problem, self.x = problem, problem.x
        self.length = np.array([problem.T], np.int32)
        self.index, self.weights = problem.index.astype(np.int64), problem.weights
        self.y, self.order = np.zeros_like(problem.x), np.arange(problem.E)
        codes, scales = weights_of(problem)
        if problem.backward_too:
            self.make_trained(codes)
        else:
            self.make_frozen(codes, scales)

    def make_frozen(self, codes, scales):
        p = self.problem
        config = kt.moe.MOEConfig(p.E, p.K, p.H, p.I, 0)
        config.pool, config.max_len = self.pool.backend_, max(p.T, MOST_ROWS)
        if p.storage != "bf16":
            config.quant_config.bits = 4 if p.storage == "mxfp4" else 8
            config.quant_config.group_size = {"mxfp4": 32, "mxfp8": 32, "fp8_block": 128}.get(p.storage, 0)
            config.quant_config.per_channel = p.storage == "fp8"
        for i, name in enumerate(("gate", "up", "down")):
            setattr(config, name + "_projs", [[expert.ctypes.data for expert in codes[i]]])
            setattr(config, name + "_scales", [[expert.ctypes.data for expert in scales[i]] if scales else [0] * p.E])
        self.moe = getattr(kt.moe, CLASSES[p.storage])(config)
        self.do(self.moe.load_weights_task(self.order.ctypes.data))

    def make_trained(self, plain):
        p = self.problem
        self.plain, self.gradients = plain, [np.zeros_like(tensor) for tensor in plain]
        self.dx, self.daffinities = np.zeros_like(p.x), np.zeros((p.T, p.K), np.float32)
        config = kt.moe.MOESFTConfig()
        config.expert_num, config.num_experts_per_tok, config.hidden_size, config.intermediate_size = p.E, p.K, p.H, p.I
        config.pool, config.max_len, config.max_cache_depth = self.pool.backend_, max(p.T, MOST_ROWS), 1
        config.lora_rank, config.lora_alpha, config.full_weight_grad = 0, 0.0, True
        config.physical_to_logical_map = self.order.ctypes.data
        config.gate_proj, config.up_proj, config.down_proj = (tensor.ctypes.data for tensor in plain)
        self.moe = kt.moe.AMXBF16_SFT_MOE(config)
        self.do(self.moe.load_weights_task())

    def do(self, task):
        self.pool.submit(task)
        self.pool.sync()

    def arguments(self):
        return (self.length.ctypes.data, self.problem.K, self.index.ctypes.data, self.weights.ctypes.data,
                self.x.ctypes.data, self.y.ctypes.data)

    def free(self):
        del self.moe

    def forward(self):
        if self.problem.backward_too:
            self.do(self.moe.forward_sft_task(*self.arguments(), False))
        else:
            self.do(self.moe.forward_task(*self.arguments(), False))

    def prepare_backward(self):
        """Untimed: what backward finds saved."""
        self.do(self.moe.forward_sft_task(*self.arguments(), True))

    def backward(self):
        self.do(self.moe.backward_task(self.problem.dy.ctypes.data, self.dx.ctypes.data, 0, 0, 0, 0, 0, 0,
                                       self.daffinities.ctypes.data,
                                       *(tensor.ctypes.data for tensor in self.gradients), False, 1.0))

    def forget(self):
        """A run allocates nothing."""

    def output(self):
        return self.y

    def input_gradient(self):
        return self.dx

    def affinity_gradients(self):
        return Pairs(self.problem.index, self.daffinities, self.problem.E).weights

    def weight_gradients(self, expert):
        gate, up, down = (tensor[expert].T for tensor in self.gradients)
        return np.ascontiguousarray(np.stack([gate, up], axis=1)), np.ascontiguousarray(down)


def load(threads):
    """Starts its workers and tells its version."""
    import kt_kernel
    config = kt.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    KtKernel.pool = kt.CPUInfer(config)
    return f"{kt_kernel.__version__} ({kt_kernel.__cpu_variant__})"
