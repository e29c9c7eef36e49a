"""What a type checker is told of classes that go before a Keras class in the bases of another."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras

    # Their attributes and `super()` are those of the Keras class that comes after them.
    OptimizerMixin = keras.optimizers.LossScaleOptimizer
    LayerMixin = keras.layers.Layer
else:
    OptimizerMixin = LayerMixin = object
