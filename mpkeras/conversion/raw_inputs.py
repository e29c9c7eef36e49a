"""Raw inputs go on as they are to a layer that normalizes them or reads names, unless arithmetic meets them."""

import contextlib
import functools
import weakref

import keras

from mpkeras import _keras
from mpkeras._replaced import is_replaced, replace, restore
from mpkeras.conversion.inner_results import dtypes_returned, taking_inner_results
from mpkeras.policies.dtypes import FLOAT_DTYPES, tensor_dtype

# Models and layers whose `call` mixes its inputs with what layers in 16 bits return.
_computing: weakref.WeakSet = weakref.WeakSet()
# Layers with a `call` of their own that only hand on what they are given.
_handing_on: weakref.WeakSet = weakref.WeakSet()


def takes_raw_inputs(model, layer) -> bool:
    """Whether `layer` is a Sequential or subclassed model that casts its inputs before its first layer sees them.

    Raw inputs may be beyond float16's 65504 and belong to a float32 normalization layer. A Functional model passes
    inputs on as they are; the others cast them to their own compute dtype, unless they are told not to. Where the first
    call of a model has shown that it takes its inputs in 16 bits alone, they stay as Keras has them.

    Not by another policy for the model: Keras' `compile` goes by its name.
    """
    # Of the models inside, a Sequential alone is sure to compute nothing with its inputs itself.
    is_passing_on = layer is model or isinstance(layer, keras.Sequential)
    return is_passing_on and not _keras.casts_no_inputs(layer) and layer not in _computing


def pass_inputs_on(model):
    """Lets `model` hand its inputs to its `call` as they are."""
    replace(model, "autocast", False, kind="inputs")


def passes_inputs_on(model) -> bool:
    """Whether `pass_inputs_on` is in force."""
    return is_replaced(model, "autocast", "inputs")


def casts_by_itself(layer) -> bool:
    """Whether `take_inputs_raw` is in force: `layer` casts its inputs in place of Keras, unless it hands them on."""
    return is_replaced(layer, "call", "inputs")


def hands_inputs_on(layer) -> bool:
    """Whether `layer` was seen to hand on what it is given as it is, and not to compute with it."""
    return casts_by_itself(layer) and layer in _handing_on


def is_to_tell(layer) -> bool:
    """Whether the first call of `layer` is to tell whether it hands its inputs on."""
    return casts_by_itself(layer) and layer not in _handing_on and layer not in _computing


def let_keras_cast_inputs(model):
    """Lets `model`, whose `call` computes with its inputs, be given them in its compute dtype, from now on."""
    _computing.add(model)
    restore(model, "autocast", kind="inputs")


def cast_inputs(model, args, kwargs) -> tuple:
    """Returns what Keras makes of the arguments of `model` where it casts them."""

    def cast(value):
        mask_of, value = value, model.dtype_policy.convert_input(value, True, model.input_dtype)
        if keras.ops.is_tensor(value):
            _keras.copy_mask(mask_of, value)
        return value

    return keras.tree.map_structure(cast, (args, kwargs))


def take_inputs_raw(layer, may_hand_on: bool):
    """Lets `layer`, which has a `call` of its own, be given its inputs as they are, and casts them for its `call`.

    Keras casts them before the layer makes its mask of them. With `may_hand_on` the `call` is given them as they are,
    too, where it returns the same dtypes then: layers inside cast for themselves, and an `Embedding` inside sees whole
    names. Arithmetic of the `call` itself would go on in float32.
    """
    call = layer.call
    if not may_hand_on:
        _computing.add(layer)

    @functools.wraps(call)
    def call_with_inputs(*args, **kwargs):
        # Keras opens none around a `call` whose inputs it does not cast.
        scope = _keras.autocast_scope(layer.compute_dtype) if _keras.autocast_dtype() is None else None
        with scope or contextlib.nullcontext():
            if not _hands_on(layer, args, kwargs):
                args, kwargs = cast_inputs(layer, args, kwargs)
            return call(*args, **kwargs)

    pass_inputs_on(layer)
    replace(layer, "call", call_with_inputs, kind="inputs")


def _hands_on(layer, args, kwargs) -> bool:
    if layer in _handing_on or layer in _computing:
        return layer in _handing_on
    dtypes = {tensor_dtype(value) for value in keras.tree.flatten((args, kwargs))}
    # Keras builds by a run whose results are not used; and before a layer has told its heads none is in float32.
    is_to_be_used = layer.built and not is_replaced(layer, "call", "heads")
    if not is_to_be_used or dtypes.isdisjoint({*FLOAT_DTYPES} - {layer.compute_dtype}):
        return False
    raw, cast = (
        dtypes_returned(layer, taking_inner_results(layer, functools.partial(type(layer).call, layer)), *given)
        for given in ((args, kwargs), _narrowed((args, kwargs), layer.compute_dtype))
    )
    # On TensorFlow 16 bits do not meet the float32 of a layer inside that makes an output; the inputs as they are do.
    hands_on = raw == cast if cast is not None else raw is not None and _has_float32_inside(layer)
    (_handing_on if hands_on else _computing).add(layer)
    return layer in _handing_on


def _has_float32_inside(layer) -> bool:
    return any(inner.compute_dtype == "float32" for inner in _keras.flatten_layers(layer))


def _narrowed(structure, dtype: str):
    return keras.tree.map_structure(
        lambda value: _keras.cast_with_mask(value, dtype) if tensor_dtype(value) in FLOAT_DTYPES else value, structure
    )
