"""What a 16-bit policy brings to a layer beside its dtype: penalties in float32, raw inputs, and so on."""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import is_replaced, replace, replaced_attributes, restore
from mpkeras.conversion.attention import save_attention_memory, save_softmax_memory
from mpkeras.conversion.float8.layers import CURRENT, GIVEN, KEPT, OWN, multiply_in_float8
from mpkeras.conversion.mixing import name_mixed_dtypes
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.rules import has_own_call, is_quantized


def _penalized(model, layers) -> list:
    # Stock layers add what their regularizers return; a layer of the user's adds whatever it likes.
    return [
        layer
        for layer in layers
        if layer.activity_regularizer is not None or not type(layer).__module__.startswith("keras.")
    ]


def _with_own_call(model, layers) -> list:
    return [layer for layer in layers if has_own_call(layer)]


def _torch_modules(model, layers) -> list:
    wrapper = getattr(keras.layers, "TorchModuleWrapper", ())
    return [layer for layer in layers if isinstance(layer, wrapper)]


def _casting_inputs(model, layers) -> list:
    """Returns Sequential and subclassed models that cast their inputs before their first layer sees them.

    Raw inputs may be beyond float16's 65504 and belong to a float32 normalization layer. A Functional model passes
    inputs on as they are; the others cast them to their own compute dtype, unless they are told not to. Where a model
    holds variables of its own, it computes with its inputs, and they stay as Keras has them.

    Not by another policy for the model: Keras' `compile` goes by its name.
    """
    # Of the models inside, a Sequential alone is sure to compute nothing with its inputs itself.
    sequentials = [layer for layer in layers if isinstance(layer, keras.Sequential)]
    return [
        layer
        for layer in (model, *sequentials)
        if not _keras.casts_no_inputs(layer) and not _keras.own_variables(layer)
    ]


def _parts(model, layers) -> list:
    """Returns the parts of a model without a `call`: its own `train_step` computes with their outputs.

    There they meet the data and each other, and on TensorFlow float32 minus float16 is an error. The last product
    stays in 16 bits, as in a model that `apply_policy` converts.
    """
    if type(model).call is not keras.Model.call:
        return []
    parts = _keras.direct_sublayers(model)
    return [part for part in parts if isinstance(part, keras.Model) and not has_own_call(part)]


def _softmax_of_attention(model, layers) -> list:
    # Of 16-bit scores TensorFlow and torch keep 16-bit probabilities by themselves.
    is_on_jax = keras.backend.backend() == "jax"
    return [layer for layer in layers if _keras.has_stock_softmax(layer)] if is_on_jax else []


def _attention(model, layers) -> list:
    # torch's fused attention keeps no probabilities at all.
    keeps_them = keras.backend.backend() in ("tensorflow", "jax")
    return [layer for layer in layers if _keras.has_stock_attention(layer)] if keeps_them else []


def _add_penalties_in_float32(layer):
    """Lets the activity regularizer of `layer`, and its `add_loss`, see float32 where they would see 16 bits.

    Keras hands an activity regularizer the layer's output as it is: the L2 penalty of 512 values of 400 is inf in
    float16. The config stays that of the regularizer itself.
    """
    regularizer = layer.activity_regularizer
    if regularizer is not None and not isinstance(regularizer, _Float32Call):
        replace(layer, "activity_regularizer", _stand_in_for(regularizer), kind="layer")
    # Stock layers add what their regularizers return; a layer of the user's adds whatever it likes.
    if not type(layer).__module__.startswith("keras.") and not is_replaced(layer, "add_loss", "layer"):
        add_loss = layer.add_loss

        @functools.wraps(add_loss)
        def add_float32_loss(loss):
            return add_loss(keras.tree.map_structure(_widen, loss))

        replace(layer, "add_loss", add_float32_loss, kind="layer")


def regularizes_in_16_bits(layer) -> bool:
    """Whether the activity regularizer of `layer`, if it has one, is computed in 16 bits."""
    regularizer = layer.activity_regularizer
    is_given_16_bits = layer.compute_dtype in SIXTEEN_BIT_DTYPES and not isinstance(regularizer, _Float32Call)
    return regularizer is not None and is_given_16_bits


class _Float32Call:
    """Calls a regularizer with float32; to everyone who asks it is the regularizer."""


def _stand_in_for(regularizer):
    class StandIn(_Float32Call):
        # Keras saves a regularizer under the name of its `__class__`, which an object may answer for itself.
        __class__ = property(lambda self: type(regularizer))

        def __call__(self, x):
            return regularizer(_widen(x))

        def __getattr__(self, name):
            return getattr(regularizer, name)

    return StandIn()


def _widen(value):
    return ops.cast(value, "float32") if tensor_dtype(value) in SIXTEEN_BIT_DTYPES else value


def _pass_inputs_on(model):
    replace(model, "autocast", False, kind="inputs")


def _return_float32(part):
    call = part.call

    @functools.wraps(call)
    def call_and_cast(*args, **kwargs):
        return keras.tree.map_structure(_widen, call(*args, **kwargs))

    replace(part, "call", call_and_cast, kind="layer")


def _let_torch_module_follow(layer):
    # Imported here: only the active backend may be.
    importlib.import_module("mpkeras.conversion._torch").let_module_follow(layer)


class _Change(NamedTuple):
    """One change: which layers of a model it is for, how it is made, and the attributes that it replaces.

    `fits` is `None` where only the policy knows the layers.
    """

    fits: Callable | None
    install: Callable
    kind: str
    attributes: tuple


CHANGES = {
    "penalties in float32": _Change(
        _penalized, _add_penalties_in_float32, "layer", ("activity_regularizer", "add_loss")
    ),
    "mixed dtypes named": _Change(_with_own_call, name_mixed_dtypes, "layer", ("call",)),
    "torch.autocast": _Change(_torch_modules, _let_torch_module_follow, "layer", ("call",)),
    "softmax memory": _Change(_softmax_of_attention, save_softmax_memory, "attention", (_keras.ATTENTION_SOFTMAX,)),
    "attention memory": _Change(_attention, save_attention_memory, "attention", (_keras.ATTENTION_METHOD,)),
    "raw inputs": _Change(_casting_inputs, _pass_inputs_on, "inputs", ("autocast",)),
    "float32 outputs": _Change(_parts, _return_float32, "layer", ("call",)),
    CURRENT: _Change(None, multiply_in_float8, "layer", ("call",)),
} | {
    name: _Change(None, functools.partial(multiply_in_float8, change=name), "layer", ("quantized_call",))
    for name in (GIVEN, OWN, KEPT)
}


def planned_changes(model, dtypes, in_float8) -> dict:
    """Returns `{id: names}`, the keys of `CHANGES` that go with what each layer of `model` computes in.

    Args:
        dtypes: `{id: dtype}` of the layers.
        in_float8: `{id: name}` of the layers with a change that has to do with float8; which, the policy knows.
    """
    layers = _keras.flatten_layers(model, include_self=True)
    fitting = {
        name: {id(layer) for layer in change.fits(model, layers)}
        for name, change in CHANGES.items()
        if change.fits is not None
    }
    found = {}
    for layer in layers:
        in_16_bits = dtypes[id(layer)] in SIXTEEN_BIT_DTYPES and not is_quantized(layer)
        names = [name for name, fits in fitting.items() if in_16_bits and id(layer) in fits]
        found[id(layer)] = (*names, *([in_float8[id(layer)]] if id(layer) in in_float8 else []))
    return found


def make_changes(layer, names):
    """Gives `layer` the changes of these names, and takes back the others that it has."""
    kept = {(CHANGES[name].kind, attribute) for name in names for attribute in CHANGES[name].attributes}
    for name, change in CHANGES.items():
        if name in names:
            change.install(layer)
        else:
            for attribute in change.attributes:
                if (change.kind, attribute) not in kept:
                    restore(layer, attribute, kind=change.kind)


def changes_of(layer) -> set:
    """Returns `(attribute, kind)` of what a conversion has replaced on `layer`."""
    kinds = {change.kind for change in CHANGES.values()} | {"file"}
    return {(entry.name, entry.kind) for entry in replaced_attributes(layer) if entry.kind in kinds}
