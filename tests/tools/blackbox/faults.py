"""Models with one fault each, for capsules: what is wrong with them, and which operation it is."""

import keras
import numpy as np
from keras import layers, ops

NAMES = {
    # On torch's CPU Keras multiplies in float32 and casts.
    "matmul": {"MatMul", "dot_general", "mm", "addmm", "_to_copy"},
    "log": {"Log", "log"},
    "divide": {"RealDiv", "div", "div_", "div_no_nan", "true_divide", "DivNoNan"},
    "multiply": {"Mul", "mul", "mul_"},
    "exp": {"Exp", "exp"},
    "cast": {"Cast", "convert_element_type", "_to_copy"},
    # The slope of a root at 0, as each backend computes it.
    "sqrt": {"SqrtGrad", "div", "rsqrt", "reciprocal", "pow", "mul", "div_no_nan", "RealDiv"},
}


class Log(layers.Layer):
    def call(self, inputs):
        shifted = ops.abs(inputs) * 0.0
        return inputs + ops.log(shifted)


class Steep(layers.Layer):
    """Returns its inputs; its gradient is a thousand times too large."""

    def call(self, inputs):
        factor = ops.cast(3000.0, inputs.dtype)
        return inputs + (inputs - ops.stop_gradient(inputs)) * factor


class Root(layers.Layer):
    def call(self, inputs):
        return inputs + ops.sqrt(inputs * 0.0)


class Looping(layers.Layer):
    """Exponentiates in a loop of the backend, from a number that grows."""

    def call(self, inputs):
        return ops.fori_loop(0, 4, lambda i, values: ops.exp(values), inputs)


class Branching(layers.Layer):
    def call(self, inputs):
        large = ops.cast(60000.0, inputs.dtype)
        return ops.cond(ops.sum(inputs) > -60000.0, lambda: inputs * large * large, lambda: inputs)


class OwnGradient(layers.Layer):
    """Backward it divides by zero."""

    def call(self, inputs):
        @ops.custom_gradient
        def identity(x):
            def grad(*args, upstream=None):
                upstream = args[0] if upstream is None else upstream
                return upstream / (ops.abs(upstream) * 0.0)

            return x * 1.0, grad

        return identity(inputs)


class Masked(layers.Layer):
    """Its -inf is no fault: the softmax behind it makes zeros of it."""

    def call(self, inputs):
        scores = ops.where(inputs > 1e9, inputs, ops.where(ops.arange(inputs.shape[-1]) < 1, inputs, float("-inf")))
        return inputs + ops.softmax(scores)


def by_zero(y, y_pred):
    return ops.mean(ops.square(y - y_pred), axis=-1) / (ops.abs(ops.mean(y, axis=-1)) * 0.0)


def model_with(*fault, name="net", head=3, policy="mixed_float16"):
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    try:
        stack = [layers.Dense(8, "relu", name="hidden"), layers.BatchNormalization(name="norm")]
        stack += [layers.Dropout(0.25, name="drop"), *fault, layers.Dense(head, name="head")]
        return keras.Sequential([keras.Input((6,)), *stack], name=name)
    finally:
        keras.config.set_dtype_policy("float32")


def batch(rows=4, scale=1.0, seed=0, head=3):
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=(rows, 6))).astype("float32"), rng.normal(size=(rows, head)).astype("float32")
