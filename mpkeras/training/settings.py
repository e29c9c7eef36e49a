"""Which policy and which loss-scaling rule hold for a model, from what its layers compute in."""

import keras

from mpkeras.conversion.apply import converted_by
from mpkeras.conversion.plan import compute_dtypes, layers_of
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.policies.registry import get_policy
from mpkeras.scaling.optimizer import LossScaleOptimizer, rewrapped


def chosen_policy(model, policy):
    """Returns the `Policy` whose rules and loss scale hold for `model`."""
    if policy is not None:
        return get_policy(policy)
    global_policy = get_policy(None)
    dtypes = compute_dtypes(model) & set(SIXTEEN_BIT_DTYPES)
    converted = converted_by(model)
    if converted is not None and converted.compute_dtype in dtypes:
        # Its rules and loss scale were chosen for this model.
        return converted
    if not dtypes or global_policy.compute_dtype in dtypes:
        return global_policy
    # The layers, not the model's name or the global policy, say what this model computes in.
    return get_policy("mixed_float16" if "float16" in dtypes else "mixed_bfloat16")


def check_model(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a `keras.Model`. Received: {model!r} (of type {type(model).__name__}). "
            "Pass the model that you train."
        )


def check_variables(model, policy, converts: bool = False):
    """Raises `ValueError` for trainable 16-bit variables, those that layers would make as they are built included.

    Args:
        model: A `keras.Model`.
        policy: The `Policy` that holds for it.
        converts: Whether layers that are not built yet are given that policy first.
    """
    found = {v.path: v.dtype for v in model.trainable_variables if v.dtype in SIXTEEN_BIT_DTYPES}
    if not converts:
        found |= {
            f"of layer {layer.name}": layer.variable_dtype
            for layer in layers_of(model)
            if not layer.built and layer.trainable and layer.variable_dtype in SIXTEEN_BIT_DTYPES
        }
    if not found and policy.variable_dtype not in SIXTEEN_BIT_DTYPES:
        return
    dtype = next(iter(found.values()), policy.variable_dtype)
    what = f"{dtype} variables {list(found)[:3]}" if found else f"policy '{policy.name}'"
    raise ValueError(
        "Expected float32 variables to train: in 16 bits small updates round to nothing, as do Adam's epsilon of 1e-8 "
        f"(float16) and its 1 - beta_2 (bfloat16), without which no weight moves. Received: {what}. Build the model "
        f"under 'mixed_{dtype}', or call `mpkeras.apply_policy(model, 'mixed_{dtype}', float32_variables=True)` before "
        "`compile`."
    )


def rule_for(optimizer, policy, explicit_rule, computes_float16: bool, rollback: bool):
    """Returns the loss-scaling rule for `optimizer`, or `None` to leave it as it is."""
    is_ours = isinstance(optimizer, LossScaleOptimizer)
    if explicit_rule is not None:
        return explicit_rule
    # A policy's own settings; the default rule gives way to what is set on the optimizer.
    if policy.loss_scale is not None and policy.loss_scale != DynamicLossScale():
        return policy.loss_scale
    if policy.loss_scale is None and policy.compute_dtype == "float16":
        # Every float16 policy scales unless it is told not to.
        return FixedLossScale(1.0)
    if is_ours and not optimizer._chosen_by_prepare:
        return optimizer.loss_scale_rule
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not is_ours:
        return DynamicLossScale(optimizer.initial_scale, dynamic_growth_steps=optimizer.dynamic_growth_steps)
    # Of one that was wrapped here before, too: the setting stays on the inner optimizer.
    if optimizer.loss_scale_factor is not None:
        return FixedLossScale(optimizer.loss_scale_factor)
    if computes_float16:
        is_scaling = is_ours and optimizer.loss_scale_rule != FixedLossScale(1.0)
        return optimizer.loss_scale_rule if is_scaling else DynamicLossScale()
    # Nothing to scale, but float32 and bfloat16 steps are checked and skipped as well.
    return FixedLossScale(1.0) if rollback or is_ours else None


def wrapped(optimizer, rule):
    """Returns `optimizer` in a `LossScaleOptimizer` with `rule`; itself where it is one, or `rule` is `None`."""
    is_ours = isinstance(optimizer, LossScaleOptimizer)
    if rule is None or (is_ours and optimizer.loss_scale_rule == rule):
        return optimizer
    wrapper = rewrapped(optimizer, rule)
    wrapper._chosen_by_prepare = True
    return wrapper
