"""The hands on one layer or model in a conversion: its way to float32, and the policy that files name."""

import functools

import keras

from mpkeras._replaced import replace, restore
from mpkeras.conversion.float8 import has_product
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, SMALL_DTYPE
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.rules import set_layer_policy


def move_to_float32(layer):
    """Moves the arithmetic of `layer` to float32; its variables stay as they are."""
    policy = keras.DTypePolicy("float32")
    if layer.quantization_mode == "float8" and has_product(layer):
        # A layer that its user quantized stays so: it is trained with the scales that Keras keeps in it.
        policy = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "float32")
    set_layer_policy(layer, policy)


def draws_orthogonal(layer) -> bool:
    """Whether an initializer of `layer`, or of its cell, is `Orthogonal`: no backend draws such a matrix in 16 bits."""
    holders = [holder for holder in (layer, getattr(layer, "cell", None)) if holder is not None]
    return any(
        isinstance(value, keras.initializers.Orthogonal) for holder in holders for value in vars(holder).values()
    )


def save_as_mixed(layer):
    """Saves `layer`, while its weights are bfloat16, with `mixed_bfloat16`: to be made anew, with the same values."""
    mixed = keras.DTypePolicy(f"mixed_{SMALL_DTYPE}")
    _save_with(layer, lambda: mixed if layer.variable_dtype == SMALL_DTYPE else None, kind="orthogonal")


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
    _save_with(model, lambda: made_with, kind="converted")


def _save_with(layer, policy_of, *, kind: str):
    """Lets the configuration of `layer` name the policy that `policy_of()` returns; its own one for `None`."""
    get_config = layer.get_config

    @functools.wraps(get_config)
    def get_config_with_policy():
        config, policy = get_config(), policy_of()
        if policy is None or "dtype" not in config:
            return config
        return {**config, "dtype": keras.dtype_policies.serialize(policy)}

    replace(layer, "get_config", get_config_with_policy, kind=kind)
