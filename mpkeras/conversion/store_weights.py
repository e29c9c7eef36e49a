"""The dtypes that the weights of converted layers are stored in."""

import warnings

import keras

from mpkeras import _keras
from mpkeras.conversion.last import conversion_of, last_conversion
from mpkeras.conversion.plan import Conversion, Row, plan
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, SMALL_DTYPE
from mpkeras.policies.policy import Policy
from mpkeras.policies.rules import layer_policy, set_layer_policy
from mpkeras.scaling.small_state import following

# float16 is none of them: small updates are lost in it.
_STORED = (SMALL_DTYPE, "float32", "float64")
# Of the standard deviation: by more, a rounded mean moves outputs further than bfloat16 rounds them.
_LARGEST_SHIFT = 2**-7
# The attributes of a layer that has them: `Embedding` or others.
_OF_LORA = ("lora_embeddings_a", "lora_embeddings_b", "lora_kernel_a", "lora_kernel_b")


def store(model, dtypes):
    """Stores variables of `model` in other dtypes, given as `(variable, dtype)`."""
    for variable, dtype in dtypes:
        _keras.retype(variable, dtype)
    if dtypes:
        _keras.track_parameters_again(model)


def store_weights(model, optimizers):
    """Stores the weights of each layer that was converted in the dtype that its policy says, to the nearest.

    A layer that computes in float32 from now on has all of its variables in float32. Of one that only trains in
    float32, frozen weights stay small: they need no room for updates. In bfloat16 a layer has its weights, trained or
    frozen; statistics and the matrices of LoRA stay in float32. The state of `optimizers` that are built on the weights
    follows.
    """
    conversion = conversion_of(model)
    rows, conversion.unstored = conversion.unstored, []
    changed = _weight_dtypes(rows)
    if not changed:
        return
    conversion.times_stored += 1
    with following(optimizers, [variable for variable, _ in changed]):
        store(model, changed)
    for row in rows:
        if row.before.variable_dtype == SMALL_DTYPE:
            _warn_rounded_mean(row.layer)


def give_dtypes(model, dtypes):
    """Gives layers of `model` the dtypes of a twin, given as `(layer, compute dtype, variable dtype)`."""
    rows = []
    for layer, compute_dtype, variable_dtype in dtypes:
        before = layer_policy(layer)
        if (before.compute_dtype, before.variable_dtype) == (compute_dtype, variable_dtype):
            continue
        policy = Policy("as made", compute_dtype=compute_dtype, variable_dtype=variable_dtype)
        after = policy.stock() or policy
        set_layer_policy(layer, after)
        rows.append(Row(layer, before, after, after, None, "", ()))
    store(model, _weight_dtypes([row for row in rows if row.stores_anew]))


def _warn_rounded_mean(layer):
    """Warns where a `Normalization` that was adapted while its weights were bfloat16 has lost its mean."""
    if not isinstance(layer, keras.layers.Normalization) or not layer.built or layer.input_mean is not None:
        return
    means, variances = (keras.ops.convert_to_numpy(v.value) for v in (layer.adapt_mean, layer.adapt_variance))
    shifts = 2**-9 * abs(means) / variances.clip(keras.backend.epsilon()) ** 0.5
    if shifts.max() > _LARGEST_SHIFT:
        warnings.warn(
            f"Layer '{layer.name}' was adapted while its weights were {SMALL_DTYPE}, in which a mean of "
            f"{means.flat[shifts.argmax()]:g} is rounded by up to {shifts.max():.2g} standard deviations. They are "
            f"{layer.variable_dtype} now: call `adapt` once more. Next time call it in "
            "`with mpkeras.policy_scope('float32'):`, where the layer is made, too.",
            stacklevel=4,
        )


def _weight_dtypes(rows) -> list:
    """Returns `(variable, dtype)` of the weights that rows of a plan store in another dtype; see `store_weights`."""
    dtype_by_variable: dict = {}
    for row in rows:
        dtype = row.after.variable_dtype
        weights = [v for v in _keras.own_weights(row.layer) if not _keras.overwrites_with_gradient(v)]
        if dtype == SMALL_DTYPE:
            # Keras makes LoRA's matrices in float32 under every policy: those of a layer that had them before, too.
            adapters = {id(getattr(row.layer, name, None)) for name in _OF_LORA}
            weights = [v for v in weights if id(v) not in adapters]
        variables = weights if dtype == SMALL_DTYPE else _keras.own_variables(row.layer)
        if row.after.compute_dtype in SIXTEEN_BIT_DTYPES and dtype == "float32":
            frozen = {id(v) for v in weights if not (v.trainable and row.layer.trainable)}
            variables = [v for v in variables if id(v) not in frozen]
        # A variable of several rows, of layers that share it or of one conversion after another, follows the last.
        dtype_by_variable |= {id(v): (v, dtype) for v in variables if dtype in _STORED}
    stored = [(v, dtype, _keras.stored_dtype(v)) for v, dtype in dtype_by_variable.values()]
    return [(v, dtype) for v, dtype, old in stored if old != dtype and old in FLOAT_DTYPES]


def unstored_dtypes(model) -> dict:
    """Returns `{id(variable): dtype}` of the weights that `store_weights` is to store anew."""
    conversion = last_conversion(model)
    rows = [] if conversion is None else conversion.unstored
    return {id(variable): dtype for variable, dtype in _weight_dtypes(rows)}


def planned_weight_dtypes(model, policy) -> dict:
    """Returns `{id(variable): dtype}` of the weights that `apply_policy(model, policy)` would store anew."""
    rows = plan(model, policy, Conversion(model, policy, earlier=last_conversion(model)))
    return {id(variable): dtype for variable, dtype in _weight_dtypes([row for row in rows if row.stores_anew])}
