"""What a 16-bit policy brings to a layer beside its dtype: penalties in float32, raw inputs, and so on."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import is_replaced, replace, replaced_attributes, replaced_on_all, restore, value_below
from mpkeras.conversion.again import compute_again_alike
from mpkeras.conversion.bias_sums import BIAS_IN_FLOAT32, sum_bias_in_float32, sums_bias_in_16_bits
from mpkeras.conversion.exact_inputs import has_own_mask, may_hand_on_data
from mpkeras.conversion.float8 import IN_FLOAT8, multiply_in_float8
from mpkeras.conversion.large_heads import WITH_FLOAT32_SUMS, sum_in_float32
from mpkeras.conversion.layer import draws_orthogonal, save_as_mixed
from mpkeras.conversion.mixing import name_mixed_dtypes
from mpkeras.conversion.outputs import (
    compute_metrics_in_float32,
    make_layers_as_it_computes,
    read_variables_in_float32,
    return_float32,
    serve_with_float32_inputs,
)
from mpkeras.conversion.raw_inputs import pass_inputs_on, take_inputs_raw, takes_raw_inputs
from mpkeras.conversion.recurrent_states import STATE_IN_FLOAT32, carries_state_in_16_bits, carry_state_in_float32
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, SMALL_DTYPE, tensor_dtype, widen
from mpkeras.policies.heads import (
    NO_HEADS,
    casts_inside,
    computes_with_parts,
    has_own_call,
    has_own_step,
    is_large,
    is_large_together,
    lacks_call,
    parts_used_by,
    rounds_as_its_input,
    with_own_code,
)
from mpkeras.policies.own_state import callers_of, kept_for_state
from mpkeras.policies.rules import is_quantized
from mpkeras.policies.survey import Survey

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")


def _fitting(model, layer, may_hand_on) -> Iterator[str]:
    """Yields the names of the changes for a layer of `model` that computes in 16 bits, but those with float8.

    `may_hand_on` is what `may_hand_on_data` returned for the model.
    """
    backend = keras.backend.backend()
    # Stock layers add what their regularizers return; a layer of the user's adds whatever it likes.
    if layer.activity_regularizer is not None or not _keras.is_of_keras(type(layer)):
        yield "penalties in float32"
    if with_own_code(layer):
        yield "mixed dtypes named"
    if isinstance(layer, getattr(keras.layers, "TorchModuleWrapper", ())):
        yield "torch.autocast"
    # Of 16-bit scores TensorFlow and torch keep 16-bit probabilities by themselves.
    if backend == "jax" and _keras.is_stock_attention(layer, _keras.ATTENTION_SOFTMAX):
        yield "softmax memory"
    # torch's fused attention keeps no probabilities at all.
    if backend in ("tensorflow", "jax") and _keras.is_stock_attention(layer, _keras.ATTENTION_METHOD):
        yield "attention memory"
    # Elsewhere an assignment goes past the 16-bit copy; a state that comes from 16-bit arithmetic loses nothing there.
    if backend == "torch" and isinstance(layer, keras.layers.RNN) and layer.stateful:
        yield "states kept"
    if carries_state_in_16_bits(layer):
        yield STATE_IN_FLOAT32
    if takes_raw_inputs(model, layer):
        yield "raw inputs"
    elif value_below(layer, "autocast"):
        if id(layer) in may_hand_on:
            yield "raw inputs inside"
        elif has_own_mask(layer):
            yield "own mask"
    if _keras.graph_of(layer) is layer:
        # Of what they return the symbolic dtype is that of variables as they are stored.
        variables = [v for v in _keras.variables_in_operations(layer) if _keras.follows_autocast(v)]
        if variables and not is_large_together(variables):
            yield "variables in float32"


def _of_outputs(model, layer, parts) -> Iterator[str]:
    """Yields the changes by which a `model` with 16-bit layers returns float32, where no graph can end in a cast.

    Its losses and its metrics are float32 in the same way. `parts` is what `parts_used_by` returned for the model.
    """
    if layer is model and _has_call_without_graph(model) or layer in parts:
        yield "float32 outputs"
        if _has_call_without_graph(layer):
            yield "float32 inputs of what is served"
    if isinstance(layer, keras.Model) and has_own_step(layer):
        yield "float32 metrics"
    if isinstance(layer, keras.Model):
        yield "penalties of weights in float32"


def _has_call_without_graph(model) -> bool:
    is_graph = isinstance(model, keras.Sequential) or _keras.graph_of(model) is not None
    return isinstance(model, keras.Model) and not is_graph and not lacks_call(model)


def _add_penalties_in_float32(layer):
    """Hands the activity regularizer of `layer`, and its `add_loss`, float32 in place of 16 bits.

    Keras hands an activity regularizer the layer's output as it is: the L2 penalty of 512 values of 400 is inf in
    float16. The state of a regularizer of the user's (a running mean of activations) is read and written in float32,
    too: Keras calls it in the dtype of the model around the layer. The config stays that of the regularizer itself.
    """
    if layer.activity_regularizer is not None:
        replace(layer, "activity_regularizer", _float32_regularizer(layer.activity_regularizer), kind="layer")
    if not _keras.is_of_keras(type(layer)):
        add_loss = layer.add_loss

        @functools.wraps(add_loss)
        def add_float32_loss(loss):
            return add_loss(keras.tree.map_structure(widen, loss))

        replace(layer, "add_loss", add_float32_loss, kind="layer")


def _has_own_regularizer(layer) -> bool:
    regularizer = layer.activity_regularizer
    return regularizer is not None and not _keras.is_of_keras(type(regularizer))


def regularizes_in_16_bits(layer) -> bool:
    """Whether the activity regularizer of `layer`, if it has one, is computed in 16 bits."""
    is_given_16_bits = layer.compute_dtype in SIXTEEN_BIT_DTYPES and layer.activity_regularizer is not None
    return is_given_16_bits and not is_replaced(layer, "activity_regularizer", "layer")


def _float32_regularizer(regularizer):
    """Returns what calls a regularizer with float32, and to everyone who asks is the regularizer."""

    class StandIn:
        # Keras saves a regularizer under the name of its `__class__`, which an object may answer for itself.
        __class__ = property(lambda self: type(regularizer))
        # Who looks for the states of helper objects finds what the regularizer keeps.
        __module__ = type(regularizer).__module__

        def __init__(self):
            self.stands_for = regularizer

        def __call__(self, x):
            with _keras.autocast_scope("float32"):
                return regularizer(widen(x))

        def __getattr__(self, name):
            return getattr(regularizer, name)

    return StandIn()


def _add_penalties_of_weights_in_float32(model):
    """Hands the regularizers of weights that are stored in 16 bits float32 copies of them.

    Otherwise penalties are rounded to 16 bits, and TensorFlow cannot add them to a float32 loss.
    """
    penalties = getattr(model, _keras.WEIGHT_PENALTIES)

    def with_copies(variable, regularizer):
        return lambda value: regularizer(ops.cast(value, "float32"))

    @functools.wraps(penalties)
    def float32_penalties():
        small = [v for v in model.trainable_weights if v.regularizer and _keras.stored_dtype(v) in SIXTEEN_BIT_DTYPES]
        with replaced_on_all(small, _keras.REGULARIZER, with_copies):
            return penalties()

    replace(model, _keras.WEIGHT_PENALTIES, float32_penalties, kind="layer")


def _keep_states(layer):
    """Lets a stateful recurrent layer assign to its states themselves, not to their copies in 16 bits."""
    call = layer.call

    @functools.wraps(call)
    def call_and_keep(*args, **kwargs):
        with replaced_on_all(_keras.recurrent_states(layer), _keras.AUTOCAST, lambda state, autocast: False):
            return call(*args, **kwargs)

    replace(layer, "call", call_and_keep, kind="states")


def _cast_inputs(layer):
    """Lets Keras cast what a float32 normalization is given, which would round what it returns to the dtype of that."""
    replace(layer, "autocast", True, kind="inputs")


def _return_to_caller(layer, dtype: str):
    """Makes `layer` return floats in `dtype`, which the layer that runs it computes in."""

    def as_caller(value):
        if tensor_dtype(value) not in ("float32", *SIXTEEN_BIT_DTYPES) or tensor_dtype(value) == dtype:
            return value
        return _keras.cast_with_mask(value, dtype)

    # It may have returned another dtype so far.
    restore(layer, "call", kind="caller")
    call = layer.call

    @functools.wraps(call)
    def call_for_caller(*args, **kwargs):
        return keras.tree.map_structure(as_caller, call(*args, **kwargs))

    replace(layer, "call", call_for_caller, kind="caller")


def _for_callers(survey, dtypes, heads, kept_layers) -> dict:
    """Returns `{id: name}` of the changes for layers that return another dtype than the one they are run in.

    A layer that writes state stays in float32 among 16-bit ones. Of what it runs it takes float32, and where a 16-bit
    `call` of the user's runs it, it returns 16 bits: to add float32 to float16 is an error on TensorFlow.
    """
    changes: dict = {}
    # A layer that makes an output of the model is not rounded.
    narrowed = kept_layers.keys() - {id(head) for head in heads}
    for layer, caller, is_direct in callers_of(survey):
        returned, taken = dtypes[id(layer)], dtypes[id(caller)]
        is_narrowed = id(layer) in narrowed and returned == "float32" and taken in SIXTEEN_BIT_DTYPES
        is_widened = id(caller) in kept_layers and taken == "float32" and returned in SIXTEEN_BIT_DTYPES and is_direct
        if is_narrowed or is_widened:
            changes[id(layer)] = f"outputs in {taken}"
    return changes


def _save_softmax_memory(layer):
    """Changes the softmax of an attention layer on JAX, which Keras takes with dropout, and where scores are returned.

    JAX makes a float32 tensor of 16-bit probabilities for the derivative of their softmax, too.
    """
    stock = getattr(layer, _keras.ATTENTION_SOFTMAX)

    def masked_softmax(scores, attention_mask=None):
        if not _is_16_bit(scores):
            return stock(scores, attention_mask)
        return _backend.softmax_from_probabilities(stock, _keras.softmax_axis(layer), scores, attention_mask)

    replace(layer, _keras.ATTENTION_SOFTMAX, masked_softmax, kind="attention")


@contextlib.contextmanager
def softmax_memory_as_stock(layers):
    """Context manager: attention layers among `layers` differentiate their softmax as stock Keras does.

    For a look at what the layers read and return: out of a function with a derivative of its own JAX lets nothing be
    carried. The forward pass has the same bits.
    """
    changed = [layer for layer in layers if (_keras.ATTENTION_SOFTMAX, "attention") in changes_of(layer)]
    for layer in changed:
        restore(layer, _keras.ATTENTION_SOFTMAX, kind="attention")
    try:
        yield
    finally:
        for layer in changed:
            _save_softmax_memory(layer)


def _save_attention_memory(layer):
    """Changes how an attention layer computes what Keras leaves to `keras.ops.dot_product_attention`.

    It keeps one 16-bit tensor of the size of the scores for its backward pass. Keras' own attention keeps the
    probabilities in float32, under a 16-bit policy, too. Here the forward pass is the same, bit for bit, and the
    derivative of softmax, `y * (t - sum(y * t))`, is computed in float32 from the 16-bit probabilities `y`. Where Keras
    takes a kernel that keeps none (on JAX cuDNN's flash attention, splash attention on TPUs), it still does.

    Four layers (12 heads of 64, sequence 512, batch 8) on JAX, forward and backward, temporaries as a share of
    float32's, and of the same without this: H100 0.35 (0.67) in float16 and 0.41 (0.71) in bfloat16, T4 0.40 (0.79) in
    float16, TPU v5p 0.63 (1.02) in bfloat16. Ten (8 heads of 8, sequence 512, batch 2, causal) in a graph of
    TensorFlow on a CPU, what the process grows by: 0.31 (1.28) in bfloat16.
    """
    stock = getattr(layer, _keras.ATTENTION_METHOD)
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def compute_attention(*args, **kwargs):
        options = signature.bind(*args, **kwargs).arguments
        tensors = [options[name] for name in ("query", "key", "value")]
        mask, is_causal = options.get("attention_mask"), bool(options.get("use_causal_mask", False))
        if (
            not all(_is_16_bit(tensor) and tensor.dtype == tensors[0].dtype for tensor in tensors)
            or not _keras.is_fused_attention(layer, tensors[0], options.get("return_attention_scores", False))
            or _backend.takes_kernel(layer, *tensors, is_masked=mask is not None or is_causal)
        ):
            return stock(*args, **kwargs)
        if mask is not None:
            # To `(batch, heads, queries, keys)`: heads are what a mask lacks.
            mask = ops.cast(mask, "bool")
            while len(mask.shape) < 4:
                mask = ops.expand_dims(mask, -3)
        return _backend.dot_product_attention(*tensors, _keras.attention_scale(layer), mask, is_causal), None

    replace(layer, _keras.ATTENTION_METHOD, compute_attention, kind="attention")


def _is_16_bit(tensor) -> bool:
    return ops.is_tensor(tensor) and tensor_dtype(tensor) in SIXTEEN_BIT_DTYPES


class _Change(NamedTuple):
    """How one change to a layer is made, and which attributes it replaces, as what kind."""

    install: Callable
    kind: str
    attributes: tuple


CHANGES = {
    "penalties in float32": _Change(_add_penalties_in_float32, "layer", ("activity_regularizer", "add_loss")),
    "penalties of weights in float32": _Change(
        _add_penalties_of_weights_in_float32, "layer", (_keras.WEIGHT_PENALTIES,)
    ),
    "mixed dtypes named": _Change(name_mixed_dtypes, "layer", ("call",)),
    # A function of torch's part alone.
    "torch.autocast": _Change(lambda layer: _backend.let_module_follow(layer), "layer", ("call",)),
    "made anew from files": _Change(save_as_mixed, "orthogonal", ("get_config",)),
    "softmax memory": _Change(_save_softmax_memory, "attention", (_keras.ATTENTION_SOFTMAX,)),
    "attention memory": _Change(_save_attention_memory, "attention", (_keras.ATTENTION_METHOD,)),
    "raw inputs": _Change(pass_inputs_on, "inputs", ("autocast",)),
    "inputs in float32": _Change(_cast_inputs, "inputs", ("autocast",)),
    "float32 outputs": _Change(return_float32, "outputs", ("call",)),
    "variables in float32": _Change(read_variables_in_float32, "variables", ("call",)),
    "layers made inside": _Change(make_layers_as_it_computes, "made inside", ("call",)),
    # Over the one that reads in float32: this one opens a scope.
    "raw inputs inside": _Change(functools.partial(take_inputs_raw, may_hand_on=True), "inputs", ("autocast", "call")),
    "own mask": _Change(functools.partial(take_inputs_raw, may_hand_on=False), "inputs", ("autocast", "call")),
    "float32 inputs of what is served": _Change(serve_with_float32_inputs, "outputs", ("export",)),
    "float32 metrics": _Change(compute_metrics_in_float32, "outputs", ("compute_metrics",)),
    "states kept": _Change(_keep_states, "states", ("call",)),
    STATE_IN_FLOAT32: _Change(carry_state_in_float32, "steps", ("call", "inner_loop", "use_cudnn")),
    "computed again alike": _Change(compute_again_alike, "remat", ("rematerialized_call",)),
    WITH_FLOAT32_SUMS: _Change(sum_in_float32, "layer", ("call",)),
    IN_FLOAT8: _Change(multiply_in_float8, "layer", ("call",)),
    # Over the two: a product in float8 adds its bias by itself.
    BIAS_IN_FLOAT32: _Change(sum_bias_in_float32, "bias", ("call",)),
} | {
    f"outputs in {dtype}": _Change(functools.partial(_return_to_caller, dtype=dtype), "caller", ("call",))
    for dtype in ("float32", *SIXTEEN_BIT_DTYPES)
}


def planned_changes(model, dtypes, products, heads=NO_HEADS, *, kept_layers=None, trains: bool = False) -> dict:
    """Returns `{id: names}`, the keys of `CHANGES` that go with what each layer of `model` computes in, `dtypes[id]`.

    `products` has those changes to products, `{id: name}`, that only the policy knows; `heads` the `Heads`
    of the model, as calls have told; `kept_layers` what `kept_for_state` returned, where that is known. `trains` says
    whether mpkeras trains the model.
    """
    changes = {}
    survey = Survey.of(model)
    model = survey.model
    any_in_16_bits = not set(SIXTEEN_BIT_DTYPES).isdisjoint(dtypes.values())
    kept_layers = kept_for_state(survey) if kept_layers is None and any_in_16_bits else kept_layers
    callers = _for_callers(survey, dtypes, heads.layers, kept_layers) if any_in_16_bits else {}
    may_hand_on = may_hand_on_data(survey, heads.layers) if any_in_16_bits else set()
    # In a step they meet the data, metrics and each other, and on TensorFlow float32 minus float16 is an error.
    has_parts = any_in_16_bits and isinstance(model, keras.Model) and computes_with_parts(model)
    parts = parts_used_by(model) if has_parts else []
    if any_in_16_bits:
        callers |= {id(layer): "outputs in float32" for layer in heads.widened}
    # JAX traces both computations at once, and in one scope. In float32 Keras draws the masks of an RNN anew.
    computes_again = (any_in_16_bits or trains) and keras.backend.backend() != "jax"
    for layer in survey.layers:
        in_16_bits = dtypes[id(layer)] in SIXTEEN_BIT_DTYPES and not is_quantized(layer)
        names = [*_fitting(model, layer, may_hand_on)] if in_16_bits else []
        # A layer in float32 is called by a model that reads variables in 16 bits.
        if any_in_16_bits and not in_16_bits and _has_own_regularizer(layer):
            names.append("penalties in float32")
        # In 16 bits, too: a layer that overflows moves to float32 by its policy alone.
        names += ["layers made inside"] if any_in_16_bits and has_own_call(layer) else []
        names += _of_outputs(model, layer, parts) if any_in_16_bits else []
        if computes_again and _keras.rematerializes(layer):
            names.append("computed again alike")
        names += [callers[id(layer)]] if id(layer) in callers else []
        # In a graph what they are given is float32.
        if any_in_16_bits and layer in heads.layers and _takes_16_bits(layer):
            names.append("inputs in float32")
        # Behind heads in float32.
        if in_16_bits and layer in heads.reading:
            inside = [inner for inner in survey.within(layer) if inner is not layer and inner in heads.layers]
            names += ["variables in float32"] if all(dtypes[id(head)] == "float32" for head in inside) else []
        product = products.get(id(layer))
        names += [] if product is None else [product]
        if in_16_bits and dtypes[id(layer)] == SMALL_DTYPE and draws_orthogonal(layer):
            names.append("made anew from files")
        # With sums in float32 the bias is read in float32.
        if in_16_bits and product != WITH_FLOAT32_SUMS and sums_bias_in_16_bits(layer, dtypes[id(layer)]):
            names.append(BIAS_IN_FLOAT32)
        changes[id(layer)] = tuple(names)
    return changes


def _takes_16_bits(layer) -> bool:
    """Whether a head in float32 would compute with 16-bit inputs as they are. A large one multiplies in 16 bits."""
    return rounds_as_its_input(layer) or (casts_inside(layer) and not is_large(layer))


def make_changes(layer, names):
    """Gives `layer` the changes of these names, and takes back the others that it has."""
    attributes_to_stay = {(CHANGES[name].kind, attribute) for name in names for attribute in CHANGES[name].attributes}
    for name, change in CHANGES.items():
        if name in names:
            change.install(layer)
            continue
        for attribute in change.attributes:
            if (change.kind, attribute) not in attributes_to_stay:
                restore(layer, attribute, kind=change.kind)


def changes_of(layer) -> set:
    """Returns `(attribute, kind)` of what a conversion has replaced on `layer`."""
    kinds = {change.kind for change in CHANGES.values()}
    return {(entry.name, entry.kind) for entry in replaced_attributes(layer) if entry.kind in kinds}
