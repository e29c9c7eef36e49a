"""Which layers the active backend and device cannot compute in 16 bits, found out by trying the operation."""

import functools
import warnings

import keras
from keras import ops

from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, stock_name


def _try_pool_3d(pool: str, dtype):
    _run(lambda x: getattr(ops, pool)(x, pool_size=2, strides=2), ops.zeros((1, 2, 2, 2, 1), dtype))


def _try_adaptive_pool_3d(pool: str, dtype):
    # On TensorFlow it is made of the plain one (tried in its place: on inputs this small it ends the process).
    # Elsewhere it is an operation of its own, which exists in 16 bits.
    if keras.backend.backend() == "tensorflow":
        _try_pool_3d(pool, dtype)


def _try_attention(dtype):
    _run(lambda x: ops.dot_product_attention(x, x, x), ops.zeros((1, 2, 1, 2), dtype))


def _try_gru(dtype):
    # Keras' own GRU loop for JAX mixes float32 into a 16-bit state while it is traced (Keras 3.15).
    if keras.backend.backend() == "jax":
        from mpkeras.devices import _jax

        _jax.trace_gru(dtype)


def _try_attention_without_keys(layer_class, dtype):
    # Keras asks `scores.dtype == "float16"`, which no dtype of torch equals, and subtracts 1e9 in float16 (Keras 3.15).
    if keras.backend.backend() == "torch":
        layer = layer_class(dtype=keras.DTypePolicy(stock_name(dtype, "float32")))
        x = ops.ones((1, 2, 2), dtype)
        outputs = layer([x, x], mask=[None, ops.zeros((1, 2), "bool")])
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


def _run(function, tensor):
    """Runs `function` as a training step would. JAX on CPU lacks float16 attention only where it compiles."""
    if keras.backend.backend() == "jax":
        from mpkeras.devices import _jax

        _jax.run_compiled(function, tensor)
    else:
        function(tensor)


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
    "GRU": _try_gru,
    # Of KerasHub, whose other models in `docs/keras_hub.md` need no entry.
    "LlamaAttention": _try_attention,
    "MMDiTBlock": _try_attention,
    "T5MultiHeadAttention": _try_mask_of_t5,
}


@functools.cache
def _resize_trials(interpolation: str) -> tuple:
    return (
        functools.partial(_try_gradient_of_resize, interpolation, False),
        functools.partial(_try_gradient_of_resize, interpolation, True),
    )


def _try_gradient_of_resize(interpolation: str, jit_compile: bool, dtype):
    """On TensorFlow resizing returns float32, and its gradient, too: XLA meets it where a `relu` expects 16 bits.

    `ScaleAndTranslate`, which "lanczos3" and "lanczos5" rest on, has no gradient by 16-bit images at all (Keras 3.15).
    """
    from mpkeras.devices import _tensorflow

    policy = keras.DTypePolicy(stock_name(dtype, "float32"))
    layer = keras.layers.UpSampling2D(2, data_format="channels_last", interpolation=interpolation, dtype=policy)
    x = ops.ones((1, 2, 2, 1), dtype)
    _tensorflow.run_gradient(lambda x: layer(ops.relu(x)), x, jit_compile)


def missing_kernel_rules(compute_dtype: str, among=None) -> tuple[tuple[str, str], ...]:
    """Returns `(rule, reason)` for the layers that raise in `compute_dtype` on the active backend and device.

    Nothing is assumed from names or versions: the operation is run once on a few zeros, and the answer is
    kept for the life of the process. With Keras 3.15 TensorFlow on CPU has no float16 3-D pooling, JAX on
    CPU no float16 attention, JAX no `GRU` in 16 bits, torch on CPU no 16-bit 3-D average pooling, on torch Keras'
    own `Attention` makes NaN of fully masked rows in float16, and KerasHub's T5 of all others on TensorFlow and JAX.

    Args:
        compute_dtype: `"float16"` or `"bfloat16"`; other dtypes have every kernel.
        among: Layer class names to look at; `None` for all that are known to lack a kernel somewhere.
    """
    if compute_dtype not in SIXTEEN_BIT_DTYPES:
        return ()
    backend = keras.backend.backend()
    rows = []
    for name, trial in _TRIALS.items():
        if among is not None and name not in among:
            continue
        error = _error(trial, compute_dtype, backend)
        if error is not None:
            rows.append((name, f"fails in {compute_dtype} on {backend} and this device: {error}"))
    return tuple(rows)


# Their kernels end in a dimension of one filter, or one channel, of which torch makes gradients in another layout.
_TORCH_CONVOLUTIONS = {
    keras.layers.Conv1D: 1,
    keras.layers.Conv2D: 2,
    keras.layers.Conv3D: 3,
    keras.layers.Conv1DTranspose: 1,
    keras.layers.Conv2DTranspose: 2,
    keras.layers.Conv3DTranspose: 3,
}


def _convolution_trial(layer):
    """Returns the trial for a convolution on torch whose kernel may have no 16-bit gradient; `None` for all others.

    On a CPU torch 2.13 refuses the float16 gradient of kernels with one filter or one channel, in Keras' own layout.
    """
    rank = next((rank for base, rank in _TORCH_CONVOLUTIONS.items() if isinstance(layer, base)), None)
    if rank is None:
        return None
    if layer.built:
        *_, first, last = layer.kernel.shape
    else:
        first, last = 2, layer.filters  # channels are not known yet, and seldom one
    if min(first, last) > 1 or max(layer.kernel_size) == 1:
        return None
    is_transposed = "Transpose" in type(layer).__name__
    channels = (last if is_transposed else first * layer.groups) if layer.built else 2
    groups = 1 if is_transposed else layer.groups
    return _trial_of_convolution(
        rank, is_transposed, channels, layer.filters, layer.kernel_size, groups, layer.data_format
    )


@functools.cache
def _trial_of_convolution(*arguments):
    # One object for one kind of convolution: `_error` keeps its answer by it.
    return functools.partial(_try_gradient_of_convolution, *arguments)


def _try_gradient_of_convolution(rank, is_transposed, channels, filters, kernel_size, groups, data_format, dtype):
    from mpkeras.devices import _torch

    # Neither a name nor a seed: making it leaves Keras' counters and the user's random numbers as they are.
    options = {"name": "trial", "kernel_initializer": "zeros"} | ({} if is_transposed else {"groups": groups})
    policy = keras.DTypePolicy(stock_name(dtype, "float32"))
    layer_class = getattr(keras.layers, f"Conv{rank}D{'Transpose' if is_transposed else ''}")
    layer = layer_class(filters, kernel_size, data_format=data_format, dtype=policy, **options)
    sizes = [2 * size for size in kernel_size]
    shape = (2, channels, *sizes) if data_format == "channels_first" else (2, *sizes, channels)
    _torch.run_gradient(layer, ops.ones(shape, dtype))


def missing_kernel_of(layer, compute_dtype: str) -> str | None:
    """Returns why `layer`, as it was made, raises in `compute_dtype` where others of its class do not; `None` if not.

    The step may be compiled by XLA, as Keras does by default on TensorFlow, whatever is known of it now: a layer that
    XLA refuses is named, too.
    """
    if compute_dtype not in SIXTEEN_BIT_DTYPES:
        return None
    backend = keras.backend.backend()
    if backend == "torch":
        trial = _convolution_trial(layer)
        error = None if trial is None else _error(trial, compute_dtype, backend)
        if error is None:
            return None
        return f"its kernel of few filters or channels fails in {compute_dtype} on torch and this device: {error}"
    if backend != "tensorflow" or not isinstance(layer, keras.layers.UpSampling2D) or layer.interpolation == "nearest":
        return None
    errors = [_error(trial, compute_dtype, "tensorflow") for trial in _resize_trials(layer.interpolation)]
    found = [error for error in errors if error is not None]
    if not found:
        return None
    return f"interpolation={layer.interpolation!r} fails in {compute_dtype} on tensorflow and this device: {found[0]}"


@functools.cache
def _error(trial, compute_dtype: str, backend: str) -> str | None:
    """Returns the first line of what `trial` raised; `None` if it works, or fails in float32 as well."""
    run = functools.partial(_eagerly, backend)
    try:
        run(trial, compute_dtype)
    except Exception as error:  # Each backend has exceptions of its own for a missing kernel.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        message = (lines[0] if lines else type(error).__name__)[:200]
    else:
        return None
    try:
        run(trial, "float32")
    except Exception:
        return None  # Float32 is no remedy: the operation itself is at fault.
    return message


def _eagerly(backend: str, trial, dtype: str):
    """Runs `trial(dtype)`. Layers that come into being late are met while a step is traced, where nothing runs."""
    if backend == "tensorflow":
        from mpkeras.devices import _tensorflow

        _tensorflow.run_eagerly(trial, dtype)
    else:
        trial(dtype)
