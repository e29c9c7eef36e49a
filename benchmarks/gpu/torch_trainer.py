"""Training with plain torch: `torch.autocast`, `torch.amp.GradScaler`, op by op or compiled."""

import os
import platform

import torch
from torch.nn import functional as F

import harness
from gpu import torch_models
from gpu.cases import Case, make_batches
from gpu.trainer import Trainer, matrix_flops_per_s
from gpu.variants import Variant

KIND = "cuda" if torch.cuda.is_available() else "cpu"


def make_trainer(case: Case, variant: Variant, options: dict) -> Trainer:
    """Returns the trainer of `variant`. `options` has `"torch_compiler"` and `"torch_mode"`, as torch calls them."""
    torch.manual_seed(0)
    # The fastest that torch offers: cuDNN tries its algorithms, what stays in float32 may be TF32.
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    return TorchTrainer(case, variant, options)


class TorchTrainer(Trainer):
    """Channels last for convolutions, SDPA for attention, the fused optimizer, no reading between steps."""

    def __init__(self, case: Case, variant: Variant, options: dict):
        layout = torch.channels_last if case.family == "resnet" else torch.preserve_format
        super().__init__([_on_device(x, y, layout) for x, y in make_batches(case)])
        self.model = torch_models.build(case).to(KIND, memory_format=layout)
        self._dtype = getattr(torch, variant.dtype)
        if case.family == "resnet":
            make = torch.optim.SGD
            arguments = {"lr": case.learning_rate, "momentum": 0.9}
        else:
            make, arguments = torch.optim.Adam, {"lr": case.learning_rate}
        # Fused: one kernel, which takes scale and overflow flag from the device. The scaler then waits for nothing.
        self.optimizer = make(self.model.parameters(), fused=True, **arguments)
        if case.family == "resnet":
            # What a first step sets, unless the scaler skips it: then the fused optimizer goes on with whatever was in
            # the memory (torch 2.11 on a GPU: ResNet-50 was lost to NaN in its third step; 2.13 on a CPU, too).
            for parameter in self.model.parameters():
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.scaler = torch.amp.GradScaler(KIND, enabled=variant.scales)
        self._loss_of = self._forward
        if variant.compiles:
            # Model and loss together: the cross-entropy over a large vocabulary is worth fusing.
            mode = options["torch_mode"] if options["torch_compiler"] == "inductor" else None
            self._loss_of = torch.compile(self._forward, backend=options["torch_compiler"], mode=mode)

    def _forward(self, x, y):
        logits = self.model(x)
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    def step(self, x, y):
        with torch.autocast(KIND, dtype=self._dtype, enabled=self._dtype != torch.float32):
            loss = self._loss_of(x, y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        # A copy: a compiled step with CUDA graphs writes the next loss into the same memory.
        return loss.detach().clone()

    def wait(self, loss):
        if KIND == "cuda":
            torch.cuda.synchronize()

    def describe(self) -> dict:
        """Returns what does not change while it trains."""
        params = sum(parameter.numel() for parameter in self.model.parameters())
        attention = "torch SDPA" if isinstance(self.model, torch_models.Transformer) else None
        held_bytes = torch.cuda.max_memory_reserved() if KIND == "cuda" else None
        return {"params": params, "attention": attention, "compiler_bytes": None, "held_bytes": held_bytes}

    def state(self) -> dict:
        """Returns where training has come to, and what it took."""
        return {
            "losses": self.losses,
            "loss_scale": self.scaler.get_scale() if self.scaler.is_enabled() else None,
            "peak_bytes": torch.cuda.max_memory_allocated() if KIND == "cuda" else None,
        }


def _on_device(x, y, layout):
    x = torch.from_numpy(x)
    if x.ndim == 4:
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=layout)
    # int64: `cross_entropy` takes no other labels, embeddings take both.
    return x.to(KIND), torch.from_numpy(y).long().to(KIND)


def device() -> dict:
    """Returns what the device is; `"kind"` is `"gpu"` or `"cpu"`."""
    is_gpu = KIND == "cuda"
    return {"kind": "gpu" if is_gpu else "cpu", "name": torch.cuda.get_device_name() if is_gpu else "cpu"}


def environment() -> dict:
    """As `harness.environment`, without Keras."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if KIND == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return {
        "backend": "plain torch",
        "versions": versions,
        "devices": [device()["name"]],
        "threads": torch.get_num_threads(),
        "cpu": harness.cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
    }


def matrix_rates(size: int) -> dict:
    """Returns the measured FLOP/s of a large product in each 16-bit dtype."""
    rates = {}
    for name in ("float16", "bfloat16"):
        generator = torch.Generator(KIND).manual_seed(0)
        a, b = (torch.randn(size, size, generator=generator, device=KIND).to(getattr(torch, name)) for _ in range(2))

        def wait(product):
            del product
            if KIND == "cuda":
                torch.cuda.synchronize()

        rates[name] = matrix_flops_per_s(lambda a=a, b=b: a @ b, wait, size)
    return rates
