"""Layers that compute in float32 under any policy."""

from mpkeras.layers.activations import Activation, Softmax
from mpkeras.layers.island import float32_island
from mpkeras.layers.mixin import Float32Mixin
from mpkeras.layers.normalization import (
    BatchNormalization,
    GroupNormalization,
    LayerNormalization,
    RMSNormalization,
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
