"""The three models, their sizes, and how many floating-point operations a training step of each takes.

Imports neither Keras nor torch: both sides build what is written here.
"""

import dataclasses
from typing import NamedTuple


class Case(NamedTuple):
    """What both sides build. `sizes` are those of the family.

    Attributes:
        family: `"resnet"`, `"encoder"` (post-norm, as BERT) or `"decoder"` (pre-norm, causal, as GPT-2).
        batch_size: Examples a step.
        learning_rate: Small: a loss on fixed random batches has to stay finite for as long as the rounds last.
        sizes: `ResNetSizes` or `TransformerSizes`.
    """

    family: str
    batch_size: int
    learning_rate: float
    sizes: "ResNetSizes | TransformerSizes"

    @property
    def unit(self) -> str:
        return "images" if self.family == "resnet" else "tokens"

    @property
    def units_per_step(self) -> int:
        return self.batch_size * (1 if self.family == "resnet" else self.sizes.length)


@dataclasses.dataclass(frozen=True)
class ResNetSizes:
    """ResNet v1.5: the stride is in the 3 x 3 convolution, and convolutions have no bias, as in torchvision.

    Not `keras.applications.ResNet50`, which is v1 with biases: v1.5 is what published GPU figures are of.
    """

    image_size: int
    stages: tuple[int, ...]
    width: int
    classes: int


@dataclasses.dataclass(frozen=True)
class TransformerSizes:
    """`classes` is the number of classes a sequence has, or `None` where the next token is predicted.

    No dropout on either side: with it neither Keras nor JAX runs the flash kernel.
    """

    length: int
    width: int
    heads: int
    blocks: int
    vocabulary: int
    classes: int | None


# 50304, not GPT-2's 50257: a multiple of 64, which the matrix units like, for Keras and torch alike.
CASES = {
    "resnet50": Case("resnet", 128, 0.01, ResNetSizes(224, (3, 4, 6, 3), 64, 1000)),
    "bert_base": Case("encoder", 32, 1e-5, TransformerSizes(512, 768, 12, 12, 30522, 2)),
    "gpt2_small": Case("decoder", 16, 1e-4, TransformerSizes(1024, 768, 12, 12, 50304, None)),
}
# The same code at sizes that a CPU compiles and runs in seconds.
TINY_CASES = {
    "resnet50": Case("resnet", 4, 0.01, ResNetSizes(32, (2, 1), 8, 10)),
    "bert_base": Case("encoder", 4, 1e-3, TransformerSizes(16, 32, 2, 3, 64, 2)),
    "gpt2_small": Case("decoder", 4, 1e-3, TransformerSizes(16, 32, 2, 2, 64, None)),
}

FLOPS_FORMULA = (
    "model FLOPs a step = 6 x multiply-adds of the forward pass: 2 for the multiplication and the addition, 3 for the "
    "forward pass and the two products of the backward pass. Counted: every convolution and matrix product of the "
    "architecture. A transformer's forward pass over T tokens of width w: a block 12 w^2 T, its attention 2 w T^2 "
    "(half of it if causal), the head w V T (next token) or w^2 + w C (one label a sequence). Not counted: "
    "normalizations, activations, the optimizer, and what flash attention computes again"
)


def case_of(name: str, is_tiny: bool, batch_size: int | None = None) -> Case:
    """Returns the case of this name, with another batch size if one is given."""
    case = (TINY_CASES if is_tiny else CASES)[name]
    return case if batch_size is None else case._replace(batch_size=batch_size)


def flops_per_step(case: Case) -> int:
    """Returns the model FLOPs of one training step: see `FLOPS_FORMULA`."""
    macs = _resnet_macs(case.sizes) if case.family == "resnet" else _transformer_macs(case)
    return 6 * macs * case.batch_size


def _resnet_macs(sizes: ResNetSizes) -> int:
    """Returns the multiply-adds of one image's forward pass."""
    size = sizes.image_size // 2
    macs = 7 * 7 * 3 * sizes.width * size**2
    size //= 2
    channels = sizes.width
    for stage, blocks in enumerate(sizes.stages):
        width = sizes.width * 2**stage
        for block in range(blocks):
            macs += channels * width * size**2
            if block == 0:
                size //= 1 if stage == 0 else 2
                macs += channels * 4 * width * size**2
            macs += (9 * width * width + width * 4 * width) * size**2
            channels = 4 * width
    return macs + channels * sizes.classes


def _transformer_macs(case: Case) -> int:
    """Returns the multiply-adds of one sequence's forward pass."""
    sizes = case.sizes
    width, length = sizes.width, sizes.length
    attention = 2 * width * length**2 // (2 if case.family == "decoder" else 1)
    blocks = sizes.blocks * (12 * width**2 * length + attention)
    if sizes.classes is None:
        return blocks + width * sizes.vocabulary * length
    return blocks + width**2 + width * sizes.classes


def make_batches(case: Case, count: int = 2) -> list[tuple]:
    """Returns `count` seeded random batches `(x, y)` as NumPy arrays; images are channels-last float32.

    More than one, so that no step can reuse what the last one left in the caches; few, as all stay on the device.
    """
    import numpy as np

    generator = np.random.default_rng(0)
    sizes, batches = case.sizes, []
    for _ in range(count):
        if case.family == "resnet":
            shape = (case.batch_size, sizes.image_size, sizes.image_size, 3)
            x = generator.standard_normal(shape, dtype="float32")
            y = generator.integers(0, sizes.classes, case.batch_size)
        else:
            x = generator.integers(0, sizes.vocabulary, (case.batch_size, sizes.length + 1)).astype("int32")
            y = x[:, 1:] if sizes.classes is None else generator.integers(0, sizes.classes, case.batch_size)
            x = x[:, :-1]
        batches.append((np.ascontiguousarray(x), np.ascontiguousarray(y.astype("int32"))))
    return batches
