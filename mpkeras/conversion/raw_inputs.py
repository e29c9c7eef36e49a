"""Raw inputs: a model passes them on as they are, to a layer that normalizes them, unless it computes with them."""

import weakref

import keras

from mpkeras import _keras
from mpkeras._replaced import is_replaced, replace, restore

# Models whose `call` mixes its inputs with what layers in 16 bits return.
_computing: weakref.WeakSet = weakref.WeakSet()


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
