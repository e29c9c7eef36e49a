"""Layers that compute in float32 under any policy."""

from mpkeras.layers.mixin import Float32Mixin, float32_island
from mpkeras.layers.stock import (
    Activation,
    BatchNormalization,
    GroupNormalization,
    LayerNormalization,
    RMSNormalization,
    Softmax,
)

__all__ = [
    "Activation",
    "BatchNormalization",
    "Float32Mixin",
    "GroupNormalization",
    "LayerNormalization",
    "RMSNormalization",
    "Softmax",
    "float32_island",
]
