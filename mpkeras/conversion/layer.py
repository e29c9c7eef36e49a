"""The hands on one layer or model in a conversion: its policy with the float8 state, and the policy that files name."""

import contextlib
import functools

import keras

from mpkeras import _keras
from mpkeras._replaced import replace, restore
from mpkeras.conversion.float8 import float8_state
from mpkeras.conversion.plan import with_float8_state
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.rules import is_quantized, set_layer_policy


def give_policy(layer, policy, state=()):
    """Sets the policy of `layer`, and gives it the float8 state that goes with it: `state`, or what Keras makes."""
    before, needs_state = float8_state(layer), policy.quantization_mode is not None
    if needs_state and state and before is None:
        _keras.give_variables(layer, state)
    with _keras.strategy_scope(layer.variables[0]) if needs_state and layer.built else contextlib.nullcontext():
        set_layer_policy(layer, policy)
    if not needs_state and before is not None:
        _keras.take_variables(layer, before)
    elif before is None:
        # As in a layer that is built under this policy, or loaded from its configuration.
        _keras.put_first(layer, (float8_state(layer) or {}).values())


def move_to_float32(layer):
    """Moves the arithmetic of `layer` to float32; its variables stay as they are."""
    policy, has_state = keras.DTypePolicy("float32"), float8_state(layer) is not None
    set_layer_policy(layer, with_float8_state(policy, has_state, is_given=not is_quantized(layer)))


def save_as_made(model, made_with):
    """Saves a subclassed model with the policy that its author made it with.

    Its layers are made anew by its `__init__`, under the global policy; with a 16-bit policy of its own the loaded
    model would cast the inputs of float32 layers. (Sequential and Functional models load without one of their own.)
    """
    if model.compute_dtype not in SIXTEEN_BIT_DTYPES:
        restore(model, "get_config", kind="converted")
        return
    if not has_own_call(model) or model.dtype_policy == made_with:
        return
    get_config, serialized = model.get_config, keras.dtype_policies.serialize(made_with)

    @functools.wraps(get_config)
    def get_config_as_made():
        config = get_config()
        return {**config, "dtype": serialized} if "dtype" in config else config

    replace(model, "get_config", get_config_as_made, kind="converted")


def is_with_state(before, after) -> bool:
    """Whether a layer has the state of Keras' float8 under one of two policies alone."""
    return (before.quantization_mode is None) != (after.quantization_mode is None)
