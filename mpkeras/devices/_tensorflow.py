"""TensorFlow's devices: kinds, waiting, memory, which replica runs, and trials that run on them."""

import concurrent.futures

import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from mpkeras.devices.native import Device


def accelerators() -> list[Device]:
    """Returns TPUs and GPUs. Does not initialize them: memory growth can still be set afterwards."""
    strategy = type(tf.distribute.get_strategy()).__name__
    # A remote TPU is no physical device here; its strategy is the sign.
    if strategy.startswith("TPUStrategy") or tf.config.get_visible_devices("TPU"):
        return [Device("tpu", "TPU")]
    details = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    return [
        Device("gpu", details_of_gpu.get("device_name", "GPU"), details_of_gpu.get("compute_capability"))
        for details_of_gpu in details
    ]


def run_eagerly(function, *arguments):
    """Runs `function(*arguments)` at once, also where a graph is being traced."""
    if tf.executing_eagerly():
        function(*arguments)
        return
    # Not in `tf.init_scope`, where no tape records. Another thread traces nothing.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(function, *arguments).result()


def run_gradient(function, tensor, jit_compile: bool):
    """Differentiates the sum of `function(tensor)`, in a graph, with XLA or without."""

    @tf.function(jit_compile=jit_compile, autograph=False)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(tf.cast(function(x), tf.float32))
        return tape.gradient(total, x)

    # Not `gradient(tensor)`: TensorFlow warns of whoever calls one function after another.
    gradient.get_concrete_function(tensor)(tensor)


def wait(model, result=None):
    """As in `_jax.py`."""
    del model, result
    tf.test.experimental.sync_devices()


def peak_bytes() -> int | None:
    """As in `_jax.py`."""
    return max((tf.config.experimental.get_memory_info(name)["peak"] for name in _gpus()), default=0) or None


def peak_bytes_of(run) -> int | None:
    """As in `_jax.py`."""
    names = _gpus()
    if not names:
        return None
    for name in names:
        tf.config.experimental.reset_memory_stats(name)
    bytes_at_begin = [tf.config.experimental.get_memory_info(name)["current"] for name in names]
    run()
    peaks = [tf.config.experimental.get_memory_info(name)["peak"] for name in names]
    return max(peak - at_begin for peak, at_begin in zip(peaks, bytes_at_begin, strict=True))


def _gpus() -> list:
    # "/device:GPU:0" -> "GPU:0"
    return [device.name.partition("/device:")[2] for device in tf.config.list_logical_devices("GPU")]


def replica() -> int:
    """Returns the number of the replica that this code runs on; 0 where there is one, or one program for all."""
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    number = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if number is None else int(number)


# The dtype of 32 bits that integer arithmetic is done in here: that of int32 is done on the host, where a GPU is.
WORD = "uint32"


def words(values):
    """As in `_jax.py`."""
    return tf.bitcast(values, tf.uint32)


def upper_halves(bits):
    """As in `_jax.py`."""
    if in_xla():
        # As there. Other kernels may flush subnormal numbers to zero in a cast.
        return tf.cast(
            tf.bitcast(tf.bitwise.bitwise_and(bits, tf.constant(0xFFFF0000, tf.uint32)), tf.float32), tf.bfloat16
        )
    return tf.bitcast(tf.cast(tf.bitwise.right_shift(bits, tf.constant(16, tf.uint32)), tf.uint16), tf.bfloat16)


def in_xla() -> bool:
    """Whether the code that runs now is traced for XLA.

    No public way exists; read in TensorFlow 2.21, where `tf.function(jit_compile=True)` enters this context.
    """
    return control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def widened(values):
    """As in `_jax.py`."""
    bits = tf.cast(tf.bitcast(values, tf.uint16), tf.uint32)
    return tf.bitcast(tf.bitwise.left_shift(bits, tf.constant(16, tf.uint32)), tf.float32)
