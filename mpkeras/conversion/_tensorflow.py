"""TensorFlow's part of a conversion: attention that keeps its probabilities in 16 bits, and the float8 product."""

import contextlib
import functools

import keras
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from mpkeras import _keras
from mpkeras.conversion.again import alike
from mpkeras.conversion.float8_rounding import GRADIENT_DTYPE, OPERAND_DTYPE, once, rounded, tie
from mpkeras.devices._tensorflow import in_xla
from mpkeras.policies.heads import Flow, has_own_call
from mpkeras.policies.reach import Reach


def has_cudnn() -> bool:
    """As in `_torch.py`."""
    return bool(tf.config.list_physical_devices("GPU"))


def keeping_arguments(function):
    """As in `_jax.py`, where less is kept. `tf.recompute_grad` has no second derivative, as gradient penalties take."""
    return function


def takes_kernel(layer, query, key, value, *, is_masked: bool) -> bool:
    """Whether a layer asks for flash attention, which Keras refuses on TensorFlow."""
    del query, key, value, is_masked
    return _keras.asks_for_flash_attention(layer)


def dot_product_attention(query, key, value, scale: float, mask=None, is_causal: bool = False):
    """As in `_jax.py`, by the operations of Keras' `dot_product_attention` on TensorFlow."""
    scores = tf.cast(tf.einsum("BTNH,BSNH->BNTS", query, key, optimize="optimal"), tf.float32) * scale
    if is_causal:
        causal = tf.linalg.band_part(tf.ones(tf.shape(scores)[2:], tf.bool), -1, 0)
        mask = causal if mask is None else tf.logical_and(mask, causal)
    if mask is not None:
        # Keras' own number: where nothing is left to look at, all keys count the same.
        scores = tf.where(mask, scores, -0.7 * 3.38953e38)
    return tf.einsum("BNTS,BSNH->BTNH", _probabilities(scores, query.dtype), value, optimize="optimal")


def _probabilities(scores, dtype):
    """Returns the softmax of float32 `scores` in 16 bits, with a derivative that is computed from the result."""

    @tf.custom_gradient
    def probabilities(scores):
        result = _barrier(tf.cast(tf.nn.softmax(scores, axis=-1), dtype))

        def gradient(upstream):
            # A graph computes what it can as soon as it can: this would be there from the forward pass on.
            with tf.control_dependencies([upstream]):
                y = tf.cast(result, tf.float32)
            t = tf.cast(upstream, tf.float32)
            return y * (t - tf.reduce_sum(y * t, axis=-1, keepdims=True))

        return result, gradient

    return probabilities(scores)


@tf.custom_gradient
def _barrier(values):
    """Hides from XLA that 16-bit `values` are made from float32 ones, which it would keep for the derivative."""
    # TensorFlow has no public name for it, and no gradient.
    (hidden,) = gen_xla_ops.xla_optimization_barrier([values]) if in_xla() else (values,)
    return hidden, lambda upstream: upstream


@tf.custom_gradient
def product_with_float32_sums(inputs, kernel):
    """As in `_jax.py`. Outside of XLA, TensorFlow has no such kernel, and multiplies the 16-bit numbers as float32."""

    def gradient(upstream):
        upstream = tf.cast(upstream, inputs.dtype)
        return tf.matmul(upstream, kernel, transpose_b=True), tf.matmul(inputs, upstream, transpose_a=True)

    if in_xla():
        return tf.raw_ops.BatchMatMulV3(x=inputs, y=kernel, Tout=tf.float32), gradient
    return tf.matmul(tf.cast(inputs, tf.float32), tf.cast(kernel, tf.float32)), gradient


def float8_product(inputs, kernel, training):
    """As in `_jax.py`. In training replicas scale by the largest value of all of them."""
    # TensorFlow follows neither float8 nor bits, and would take the gradient for a constant.
    tied = tie(inputs, kernel)

    @tf.custom_gradient
    def product(inputs, kernel):
        over_devices = _over_replicas if training else None
        inputs, of_inputs = rounded(inputs, OPERAND_DTYPE, over_devices, by_row=not training)
        kernel, of_kernel = rounded(kernel, OPERAND_DTYPE)

        def backward(gradient_as_given):
            round_gradient = functools.partial(
                rounded, dtype=GRADIENT_DTYPE, over_devices=_over_replicas, cast=_to_e5m2
            )
            gradient, of_gradient = round_gradient(gradient_as_given)
            by_inputs = _multiply(gradient, kernel, of_gradient * of_kernel, transpose_b=True)
            of_rows = of_inputs
            if not training:
                # As in `_jax.py`.
                gradient, of_gradient = round_gradient(gradient_as_given * tf.cast(of_inputs, tf.bfloat16))
                of_rows = 1.0
            by_kernel = _multiply(inputs, gradient, of_rows * of_gradient, transpose_a=True)
            return once(by_inputs, gradient_as_given, tied), once(by_kernel, gradient_as_given, tied)

        return _multiply(inputs, kernel, of_inputs * of_kernel), backward

    return product(inputs, kernel)


def _to_e5m2(values, dtype):
    """Returns `values` as float16 tensors of e5m2 values, whose bits are the upper halves of theirs.

    TensorFlow's graph optimizer knows no e5m2, and says so on stderr (2.21).
    """
    del dtype
    bits = tf.cast(tf.bitcast(tf.cast(values, tf.float16), tf.uint16), tf.int32)
    # To the nearest, ties to even. float16 holds all of bfloat16's bits that count here.
    bits = (bits + 0x7F + (bits // 0x100) % 2) // 0x100 * 0x100
    return tf.bitcast(tf.cast(bits, tf.uint16), tf.float16)


def is_one_of_replicas() -> bool:
    """Whether this code runs on one of several replicas of a strategy."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1


def _over_replicas(largest):
    if not is_one_of_replicas():
        return largest
    context = tf.distribute.get_replica_context()
    # Replicas can form sums and means alone.
    replicas = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync) * largest
    return tf.reduce_max(context.all_reduce(tf.distribute.ReduceOp.SUM, replicas))


def _multiply(left, right, inverse, **transposed):
    left, right = tf.cast(left, tf.bfloat16), tf.cast(right, tf.bfloat16)
    return tf.matmul(left, right, **transposed) * tf.cast(inverse, tf.bfloat16)


CAN_KEEP_PRODUCTS = False
JOINS_OPERATIONS = False


def compute_again(run, tensors, layers, *, keeps_products: bool) -> list:
    """As in `_jax.py`; the backward pass keeps tensors of floats alone, others are given as they are."""
    del keeps_products
    is_float = [tensor.dtype.is_floating for tensor in tensors]
    if not all(isinstance(tensor, (tf.Tensor, tf.Variable)) for tensor in tensors):
        # Sparse and ragged ones.
        return run(tensors)
    # A custom gradient would make the sparse gradient of a table dense.
    if not any(is_float) or any(isinstance(layer, keras.layers.Embedding) for layer in layers):
        return run(tensors)
    inside = {id(part): part for layer in layers for part in _keras.flatten_layers(layer, include_self=True)}
    added = {key: len(_keras.added_losses(part)) for key, part in inside.items()}
    if not tf.executing_eagerly():
        _refuse_draws_in_loops(inside.values())
    held = {id(tensor): tensor for part in inside.values() for _, tensor in _tensors_held(part)}
    # A replica may not assign to a variable of its user's: under a strategy these move in both runs.
    holders = [] if is_one_of_replicas() else inside.values()
    natives = {id(v): v for part in holders for v in vars(part).values() if isinstance(v, tf.Variable)}
    natives_before = [tf.identity(variable) for variable in natives.values()]
    outputs: list = []

    def run_on_floats(*floats):
        inputs = iter(floats)
        filled = [next(inputs) if flag else tensor for tensor, flag in zip(tensors, is_float, strict=True)]
        for tensor, new in zip(tensors, filled, strict=True):
            _keras.set_mask(new, _keras.get_mask(tensor))
        if not outputs:
            outputs.extend(run(filled))
            return [tensor for tensor in outputs if _is_float(tensor)]
        # As Keras' variables in `alike`: the layers find what they found, and what they write is gone afterwards.
        present = [tf.identity(variable) for variable in natives.values()]
        _assign(natives.values(), natives_before)
        results = run(filled)
        _assign(natives.values(), present)
        return [tensor for tensor in results if _is_float(tensor)]

    floats = [tensor for tensor, flag in zip(tensors, is_float, strict=True) if flag]
    results = tf.recompute_grad(alike(layers, run_on_floats))(*floats)
    for key, part in inside.items():
        if len(_keras.added_losses(part)) > added[key]:
            raise _lost_loss(part)
    for part in inside.values():
        for name, tensor in _tensors_held(part):
            if id(tensor) not in held:
                setattr(part, name, _without_gradient(tensor, results, _keras.path_of(part), name))
    results = iter(results)
    returned = [next(results) if _is_float(tensor) else tensor for tensor in outputs]
    for tensor, new in zip(outputs, returned, strict=True):
        _keras.copy_mask(tensor, new)
    return returned


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def check_again(layers):
    """As in `_jax.py`: a layer that adds a loss is refused, if not here, where it does so in the first step."""
    if any(isinstance(layer, keras.layers.Embedding) for layer in layers):
        return
    for part in [part for layer in layers for part in _keras.flatten_layers(layer, include_self=True)]:
        adds_own = has_own_call(part) and "add_loss" in Reach(part).names
        if adds_own or getattr(part, "activity_regularizer", None) is not None:
            raise _lost_loss(part)


def _lost_loss(layer) -> ValueError:
    return ValueError(
        "Expected no layer that adds a loss (`add_loss`, an activity regularizer) where TensorFlow computes again in "
        f"the backward pass: the gradient of the loss would be lost. Received: '{_keras.path_of(layer)}'. Name the "
        "layers whose outputs are kept, `remat=[...]`, so that it is behind the last one, or train on JAX or torch."
    )


def _refuse_draws_in_loops(layers):
    """Raises `ValueError` for a recurrent layer whose cell draws at each step, as a `Dropout` in a cell of one's own.

    The loop is traced once, and the state of the generator that the second run is to begin with would be that of each
    step. A cell of Keras' draws its masks before the loop.
    """
    for layer in layers:
        cells = _keras.flatten_layers(layer) if isinstance(layer, keras.layers.RNN) else []
        drawing = [x for x in cells if _keras.own_seed_generators(x) and not hasattr(x, "get_dropout_mask")]
        if drawing:
            name = _keras.path_of(drawing[0])
            raise ValueError(
                "Expected parts that TensorFlow can compute again in a graph: a loop in which a layer draws random "
                f"numbers at each step is none. Received: '{layer.path}', in whose cell '{name}' draws. Name the "
                "layers whose outputs are kept, `remat=[...]`, so that it is behind the last one, or train on torch."
            )


def _tensors_held(layer) -> list:
    """Returns `(name, tensor)` of the attributes of a layer of the user's that are tensors of floats."""
    if _keras.is_of_keras(type(layer)):
        # State that Keras keeps there, such as the masks of a cell, is part of no loss.
        return []
    return [(name, x) for name, x in vars(layer).items() if isinstance(x, tf.Tensor) and x.dtype.is_floating]


def _without_gradient(tensor, results, path, name):
    """Returns a tensor, left on a layer by what is computed again, whose gradient would be lost in silence.

    To TensorFlow it depends on nothing. Its gradient is asked for as it seems to be made of `results`.
    """

    @tf.custom_gradient
    def refused(tensor, *results):
        def gradient(upstream):
            raise ValueError(
                "Expected a loss of what the layers return where TensorFlow computes again in the backward pass: a "
                f"tensor that a layer keeps as an attribute has no gradient there. Received: attribute '{name}' of "
                f"'{path}'. Return it from the layer's `call`, or name the layers whose outputs are kept, "
                "`remat=[...]`, so that this one is behind the last."
            )

        return tf.identity(tensor), gradient

    return refused(tensor, *results)


def _is_float(value) -> bool:
    return tf.is_tensor(value) and value.dtype.is_floating


@tf.custom_gradient
def with_gradient_of_sum(outputs, addend):
    """Returns `outputs`, to the derivative a sum with `addend`, which broadcasts to their shape."""

    def gradient(upstream):
        # Beside `BiasAddGrad`, TensorFlow's sums of 16 bits are in float32.
        sizes = [1] * (len(upstream.shape) - len(addend.shape)) + addend.shape.as_list()
        axes = [axis for axis, size in enumerate(sizes) if size == 1]
        return upstream, tf.reshape(tf.reduce_sum(upstream, axes), tf.shape(addend))

    return tf.identity(outputs), gradient


class FlowTrace:
    """As in `_jax.py`: by what an operation of the graph is given."""

    def __init__(self):
        self._marked: dict = {}

    def mark(self, tensor, made_by):
        """As in `_jax.py`."""
        marked = tf.identity(tensor)
        self._marked |= {part.op.name: made_by for part in tf.nest.flatten(marked, expand_composites=True)}
        return marked

    def run(self, call, args, kwargs) -> Flow:
        """As in `_jax.py`."""

        def tensors(values) -> list:
            return [(tensor.name, tensor.op.name) for tensor in values]

        graph = tf.compat.v1.get_default_graph()
        outputs = tf.nest.flatten(keras.tree.flatten(call(*args, **kwargs)), expand_composites=True)
        # A tensor of another graph, or of none, is a constant.
        outputs = [value for value in outputs if getattr(value, "graph", None) is graph]
        given_to = {operation.name: tensors(operation.inputs) for operation in graph.get_operations()}
        return Flow(tensors(outputs), given_to, self._marked)


def trace(layer, call, args, kwargs, *, is_dry_run=False):
    """As in `_jax.py`."""
    del is_dry_run  # It always does.
    _keras.trace_for_shapes(call, layer.variables, args, kwargs)


def buffers_put_back(layers):
    """As in `_torch.py`: here no run of symbols writes."""
    return contextlib.nullcontext()
