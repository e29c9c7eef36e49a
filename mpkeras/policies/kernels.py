"""Which layers the active backend and device cannot compute in 16 bits, found out by trying the operation."""

import concurrent.futures
import functools
import math
import warnings

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras.devices import backend_module
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, relative_error, stock_name

_BACKEND = keras.backend.backend()
_devices = backend_module()


def _policy(dtype: str) -> keras.DTypePolicy:
    return keras.DTypePolicy(stock_name(dtype, "float32"))


def _try_pool_3d(pool: str, dtype):
    _run(lambda x: getattr(ops, pool)(x, pool_size=2, strides=2), ops.zeros((1, 2, 2, 2, 1), dtype))


def _try_adaptive_pool_3d(pool: str, dtype):
    # On TensorFlow it is made of the plain one (tried in its place: on inputs this small it ends the process).
    # Elsewhere it is an operation of its own, which exists in 16 bits.
    if _BACKEND == "tensorflow":
        _try_pool_3d(pool, dtype)


def _try_attention(dtype):
    _run(lambda x: ops.dot_product_attention(x, x, x), ops.zeros((1, 2, 1, 2), dtype))


def _run(function, tensor):
    # As a training step would: JAX on CPU lacks float16 attention only where it compiles.
    if _BACKEND == "jax":
        _devices.run_compiled(function, tensor)
    else:
        function(tensor)


def _try_attention_without_keys(layer_class, dtype):
    # Keras asks `scores.dtype == "float16"`, which no dtype of torch equals, and subtracts 1e9 in float16 (Keras 3.15).
    if _BACKEND == "torch":
        x = ops.ones((1, 2, 2), dtype)
        outputs = layer_class(dtype=_policy(dtype))([x, x], mask=[None, ops.zeros((1, 2), "bool")])
        if not bool(ops.all(ops.isfinite(outputs))):
            raise FloatingPointError("rows whose keys are all masked become NaN")


def _try_mask_of_t5(dtype):
    # KerasHub 0.32 adds (1 - mask) * -1e9 to the scores. Where the backend makes a float16 of that number it is minus
    # infinity, and NaN for every word that is not masked. torch multiplies in float32.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and NumPy tell of the overflow that is looked for.
        bias = (1.0 - ops.ones((1,), dtype)) * -1e9
    if not bool(ops.all(ops.isfinite(bias))):
        raise FloatingPointError("its mask adds (1 - 1) * -1e9, which is NaN")


def _try_number(number: float, what: str, dtype):
    # KerasHub 0.32 takes or makes positions and time steps in what it computes in, mostly the frequencies, too: of 512
    # positions some sines are 1.5 off in bfloat16, of 2048 some are 0.7 off in float16, and the output of Flux is off
    # by a third in bfloat16 and a tenth in float16. `AlibiBias` adds a bias of -500 to the scores, which rounds them.
    # Of 1022 anchors of RetinaNet that match a box in 512 pixels 194 get another class in bfloat16, and 39 in float16.
    rounded = float(ops.cast(ops.cast(number, dtype), "float32"))
    if rounded != float(ops.cast(number, "float32")):
        raise FloatingPointError(f"{what} {number:g} is taken for {rounded:g}, and what is made of it is another")


def _try_gradient_of_resize(interpolation: str, jit_compile: bool, dtype):
    # TensorFlow resizes to float32, and so is the gradient: XLA meets it where a `relu` expects 16 bits.
    # `ScaleAndTranslate` ("lanczos3" and "lanczos5") has no gradient by 16-bit images at all (Keras 3.15).
    layer = keras.layers.UpSampling2D(2, data_format="channels_last", interpolation=interpolation, dtype=_policy(dtype))
    _devices.run_gradient(lambda x: layer(ops.relu(x)), ops.ones((1, 2, 2, 1), dtype), jit_compile)


def _try_gradient_of_convolution(layer_class, channels, filters, kernel_size, groups, data_format, dtype):
    # Neither a name nor a seed: making it leaves Keras' counters and the user's random numbers as they are.
    options = {"name": "trial", "kernel_initializer": "zeros", "dtype": _policy(dtype)}
    if groups > 1:
        options["groups"] = groups
    layer = layer_class(filters, kernel_size, data_format=data_format, **options)
    sizes = [2 * size for size in kernel_size]
    shape = (2, channels, *sizes) if data_format == "channels_first" else (2, *sizes, channels)
    _devices.run_gradient(layer, ops.ones(shape, dtype))


def _try_numbers_of_convolution(kernel_shape, strides, dilation_rate, groups, data_format, dtype):
    # On CPUs with 16-bit units oneDNN computes some kernels of 4, 8, 14, 16 or 32 numbers in a row over 8 or 16
    # channels wrong in bfloat16, on inputs of some sizes: another number, as large as the true one.
    *kernel_size, channels, _ = kernel_shape
    kernel = _wave(kernel_shape, dtype)
    for factor in (1, 2):
        sizes = [factor * ((size - 1) * dilation_rate[axis] + 1) for axis, size in enumerate(kernel_size)]
        first = (channels * groups,) if data_format == "channels_first" else ()
        x = _wave((32, *first, *sizes, *(() if first else (channels * groups,))), dtype)
        narrow, wide = (
            ops.conv(ops.cast(x, of), ops.cast(kernel, of), strides, "valid", data_format, dilation_rate)
            for of in (dtype, "float32")
        )
        error = relative_error(*([ops.convert_to_numpy(ops.cast(y, "float32"))] for y in (narrow, wide)))
        if error > _WRONG:
            raise ArithmeticError(f"what it computes is off by {error:.0%}")


def _wave(shape, dtype):
    # Numbers of both signs that draw on nobody's random numbers.
    return ops.cast(np.cos(np.arange(math.prod(shape), dtype="float32") * 0.7).reshape(shape), dtype)


_try_positions = functools.partial(_try_number, 4095.0, "position")
_try_corners = functools.partial(_try_number, 511.3, "the corner of a box at")

# Layer class, the operation it rests on. Other layers were tried once on every backend and need no entry.
_TRIALS = {
    "MaxPooling3D": functools.partial(_try_pool_3d, "max_pool"),
    "AdaptiveMaxPooling3D": functools.partial(_try_adaptive_pool_3d, "max_pool"),
    "AveragePooling3D": functools.partial(_try_pool_3d, "average_pool"),
    "AdaptiveAveragePooling3D": functools.partial(_try_adaptive_pool_3d, "average_pool"),
    "MultiHeadAttention": _try_attention,
    "GroupedQueryAttention": _try_attention,
    "Attention": functools.partial(_try_attention_without_keys, keras.layers.Attention),
    "AdditiveAttention": functools.partial(_try_attention_without_keys, keras.layers.AdditiveAttention),
    # Of KerasHub, whose other models in `docs/keras_hub.md` need no entry.
    "LlamaAttention": _try_attention,
    "MMDiTBlock": _try_attention,
    "T5MultiHeadAttention": _try_mask_of_t5,
    "AlibiBias": _try_positions,
    "ContentAndQueryEmbedding": _try_positions,
    "ESMRotaryEmbedding": _try_positions,
    "EmbedND": _try_positions,
    "NonMaxSuppression": _try_corners,
    "RetinaNetLabelEncoder": _try_corners,
    "RoformrPositionalEmbedding": _try_positions,
    "SinePositionEncoding": _try_positions,
    "TimestepEmbedding": functools.partial(_try_number, 998.1, "time step"),
}
CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)


# Rounding alone makes 0.01 in bfloat16.
_WRONG = 0.1
# Of kernels with fewer numbers along each axis, or more channels, none was found wrong, and a trial takes longer.
_LONG_KERNEL, _FEW_CHANNELS = 4, 32


def missing_kernel_rules(compute_dtype: str, among=None) -> tuple[tuple[str, str], ...]:
    """Returns `(rule, reason)` for the layers that raise in `compute_dtype` on the active backend and device.

    Nothing is assumed from names or versions: the operation is run once on a few zeros, and the answer is
    kept for the life of the process. With Keras 3.15 TensorFlow on CPU has no float16 3-D pooling, JAX on
    CPU no float16 attention, torch on CPU no 16-bit 3-D average pooling, on torch Keras'
    own `Attention` makes NaN of fully masked rows in float16, and KerasHub's T5 of all others on TensorFlow and JAX.
    What KerasHub makes of positions and time steps is made of others in 16 bits on each of them.

    Args:
        compute_dtype: `"float16"` or `"bfloat16"`; other dtypes have every kernel.
        among: Layer class names to look at; `None` for all that are known to lack a kernel somewhere.
    """
    if compute_dtype not in SIXTEEN_BIT_DTYPES:
        return ()
    failures = {
        name: _failure(trial, compute_dtype) for name, trial in _TRIALS.items() if among is None or name in among
    }
    return tuple((name, failure) for name, failure in failures.items() if failure is not None)


def missing_kernel_of(layer, compute_dtype: str) -> str | None:
    """Returns why `layer`, as it was made, raises in `compute_dtype` where others of its class do not; `None` if not.

    So is a layer named that computes other numbers there, and one that XLA refuses: Keras compiles with XLA by default,
    and the step may be compiled later.
    """
    if compute_dtype not in SIXTEEN_BIT_DTYPES:
        return None
    if isinstance(layer, keras.layers.TFSMLayer):
        return "what it wraps takes the dtypes alone with which it was exported"
    # No `:=` here: a loop of the user's own may come by in a `tf.function`, and AutoGraph warns of it.
    convolution = _narrow_convolution(layer) if _BACKEND == "torch" else None
    if convolution is not None:
        failure = _failure(_try_gradient_of_convolution, compute_dtype, *convolution)
        if failure is not None:
            return f"its kernel of few filters or channels {failure}"
    convolution = _long_convolution(layer) if _BACKEND != "jax" else None
    if convolution is not None:
        failure = _failure(_try_numbers_of_convolution, compute_dtype, *convolution)
        return None if failure is None else f"its kernel {failure}"
    if _BACKEND == "tensorflow" and isinstance(layer, keras.layers.UpSampling2D) and layer.interpolation != "nearest":
        for jit_compile in (False, True):
            failure = _failure(_try_gradient_of_resize, compute_dtype, layer.interpolation, jit_compile)
            if failure is not None:
                return f"interpolation={layer.interpolation!r} {failure}"
    return None


def _narrow_convolution(layer) -> tuple | None:
    """Returns the arguments of a trial for a convolution with one filter or channel; `None` for any other layer.

    On a CPU torch 2.13 refuses the float16 gradient of such kernels, whose last dimension it lays out otherwise.
    """
    layer_class = next((base for base in CONVOLUTIONS if isinstance(layer, base)), None)
    if layer_class is None:
        return None
    if layer.built:
        *_, first, last = layer.kernel.shape
    else:
        first, last = 2, layer.filters  # channels are not known yet, and seldom one
    if min(first, last) > 1 or max(layer.kernel_size) == 1:
        return None
    is_transposed = "Transpose" in layer_class.__name__
    groups = 1 if is_transposed else layer.groups
    channels = 2
    if layer.built:
        channels = last if is_transposed else first * groups
    return layer_class, channels, layer.filters, layer.kernel_size, groups, layer.data_format


def _long_convolution(layer) -> tuple | None:
    """Returns the arguments of a trial for a convolution with a long kernel of few channels; `None` for others.

    The gradient of a transposed convolution by its inputs is a convolution with the same kernel.
    """
    if not isinstance(layer, CONVOLUTIONS) or not layer.built or max(layer.kernel_size) < _LONG_KERNEL:
        return None
    *kernel_size, channels, filters = layer.kernel.shape
    groups = getattr(layer, "groups", 1)
    if channels > _FEW_CHANNELS:
        return None
    shape = (*kernel_size, channels, filters)
    return shape, tuple(layer.strides), tuple(layer.dilation_rate), groups, layer.data_format


@functools.cache
def _failure(trial, compute_dtype: str, *arguments) -> str | None:
    """Returns what `trial(*arguments, compute_dtype)` raised; `None` if it works, or fails in float32 as well."""
    run = functools.partial(_eagerly, trial, *arguments)
    try:
        run(compute_dtype)
    except Exception as error:  # Each backend has exceptions of its own for a missing kernel.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = (lines[0] if lines else type(error).__name__)[:200]
    else:
        return None
    try:
        run("float32")
    except Exception:
        return None  # Float32 is no remedy: the operation itself is at fault.
    return f"fails in {compute_dtype} on {_BACKEND} and this device: {message}"


def _eagerly(trial, *arguments):
    # Layers that come into being late are met while a step is traced, where nothing runs, or while Keras asks for
    # shapes, on a device of torch's without numbers. Another thread is in no trace and in no scope.
    if _BACKEND == "tensorflow":
        _devices.run_eagerly(trial, *arguments)
    elif _keras.in_symbolic_scope():
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
            executor.submit(trial, *arguments).result()
    else:
        trial(*arguments)
