"""Layers whose weights and gradients do not travel by themselves as a policy says, for `test_travel.py`."""

import keras
from keras import ops

from mpkeras import _keras


class WithKernel(keras.layers.Layer):
    """A square kernel."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def compute_output_shape(self, shape):
        return shape


@keras.saving.register_keras_serializable("tests")
class ReadsFloat32(WithKernel):
    """Computes in 16 bits, and reads its kernel as it is stored all the same: a gather in float32."""

    def call(self, inputs):
        with _keras.autocast_scope(None):
            kernel = ops.convert_to_tensor(self.kernel)
        return ops.cast(ops.matmul(ops.cast(inputs, "float32"), kernel), self.compute_dtype)


@keras.saving.register_keras_serializable("tests")
class LoopsInBackward(WithKernel):
    """Makes the gradient of its kernel itself, in a loop whose length the numbers decide: a sum in 16 bits."""

    def call(self, inputs):
        @ops.custom_gradient
        def product(inputs, kernel):
            def backward(upstream):
                count = 1 + ops.cast(ops.max(upstream) > 1e9, "int32")

                def add(i, total):
                    return i + 1, total + ops.matmul(ops.transpose(inputs), upstream)

                _, gradient = ops.while_loop(lambda i, total: i < count, add, (0, ops.zeros_like(kernel)))
                return ops.matmul(upstream, ops.transpose(kernel)), gradient

            return ops.matmul(inputs, kernel), backward

        return product(inputs, ops.convert_to_tensor(self.kernel))


@keras.saving.register_keras_serializable("tests")
class ClipsGradient(WithKernel):
    """Clips the gradient of its kernel, element by element."""

    def call(self, inputs):
        @ops.custom_gradient
        def as_it_is(kernel):
            return kernel, lambda upstream: ops.clip(upstream, -1e-3, 1e-3)

        return ops.matmul(inputs, as_it_is(ops.convert_to_tensor(self.kernel)))


@keras.saving.register_keras_serializable("tests")
class LeavesOut(WithKernel):
    """Leaves out weights, by a choice and by a product with a mask."""

    def call(self, inputs):
        kernel = ops.convert_to_tensor(self.kernel)
        kernel = ops.where(kernel > 0.01, kernel, 0) - ops.cast(kernel < -0.01, kernel.dtype) * kernel
        return ops.matmul(inputs, kernel)


@keras.saving.register_keras_serializable("tests")
class DividesByNorm(WithKernel):
    """Multiplies in 16 bits, and takes the norm of the same kernel in float32: its gradient is a sum of both."""

    def call(self, inputs):
        kernel = ops.convert_to_tensor(self.kernel)
        norm = ops.sqrt(ops.sum(ops.square(ops.cast(kernel, "float32"))))
        return ops.matmul(inputs, kernel) / ops.cast(norm, inputs.dtype)


@keras.saving.register_keras_serializable("tests")
class Branches(WithKernel):
    """Multiplies in one of two branches."""

    def call(self, inputs):
        kernel = ops.convert_to_tensor(self.kernel)
        is_positive = ops.sum(inputs) > 0
        return ops.cond(is_positive, lambda: ops.matmul(inputs, kernel), lambda: ops.matmul(inputs, 2 * kernel))
