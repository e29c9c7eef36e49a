"""Which policy and which loss-scaling rule hold for a model, from what its layers compute in."""

import keras

from mpkeras._arguments import check_switch
from mpkeras.conversion.apply import converted_by, unstored_dtypes
from mpkeras.conversion.plan import compute_dtypes, layers_of
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, SMALL_DTYPE
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
    if converted is not None and not dtypes and converted.compute_dtype == global_policy.compute_dtype:
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


def check_switches(jit_compile, rollback):
    """Raises `TypeError` unless `rollback` is `True` or `False`, and `jit_compile` one of these or `None`."""
    check_switch("rollback", rollback)
    if jit_compile is not None:
        check_switch("jit_compile", jit_compile)


def check_variables(model, policy, converts: bool = False):
    """Raises `ValueError` for trainable float16 variables, those that layers would make as they are built included.

    Args:
        model: A `keras.Model`.
        policy: The `Policy` that holds for it.
        converts: Whether layers that are not built yet are given that policy first.
    """
    found = _weights_of(model, "float16", converts)
    if not found and policy.variable_dtype != "float16":
        return
    what = f"float16 variables {found[:3]}" if found else f"policy '{policy.name}'"
    raise ValueError(
        "Expected float32 or bfloat16 variables to train: in float16 small updates round to nothing, as does Adam's "
        f"epsilon of 1e-8. Received: {what}. Build the model under 'mixed_float16', or call "
        "`mpkeras.apply_policy(model, 'mixed_float16', float32_variables=True)` before `compile`."
    )


def needs_rounding(model, policy) -> bool:
    """Whether an optimizer of `model` has to round what it assigns: weights or its own state are bfloat16."""
    is_small = SMALL_DTYPE in (policy.variable_dtype, policy.slot_dtype)
    return is_small or bool(_weights_of(model, SMALL_DTYPE))


def _weights_of(model, dtype: str, built_only: bool = False) -> list:
    """Returns the names of the trainable weights of a dtype, those that layers would make when built included."""
    unstored = unstored_dtypes(model)
    found = [v.path for v in model.trainable_variables if unstored.get(id(v), v.dtype) == dtype]
    if not built_only:
        unbuilt = [layer for layer in layers_of(model) if not layer.built and layer.trainable]
        found += [f"of layer {layer.name}" for layer in unbuilt if layer.variable_dtype == dtype]
    return found


def rule_for(optimizer, policy, explicit_rule, computes_float16: bool, must_wrap: bool):
    """Returns the loss-scaling rule for `optimizer`, or `None` to leave it as it is.

    Args:
        optimizer: Any Keras optimizer.
        policy: The `Policy` that holds for its model.
        explicit_rule: What the user asked for in the call; `None` without.
        computes_float16: Whether layers of the model do.
        must_wrap: Whether it is wrapped where there is nothing to scale, too: to check its steps, or to round.
    """
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
        return _rule_of(optimizer, DynamicLossScale, "initial_scale", "dynamic_growth_steps")
    # Of one that was wrapped here before, too: the setting stays on the inner optimizer.
    if optimizer.loss_scale_factor is not None:
        return _rule_of(optimizer, lambda loss_scale_factor: FixedLossScale(loss_scale_factor), "loss_scale_factor")
    if computes_float16:
        is_scaling = is_ours and optimizer.loss_scale_rule != FixedLossScale(1.0)
        return optimizer.loss_scale_rule if is_scaling else DynamicLossScale()
    # Nothing to scale, but float32 and bfloat16 steps are checked and skipped as well.
    return FixedLossScale(1.0) if must_wrap or is_ours else None


def _rule_of(optimizer, make, *names):
    """Returns the rule that `make` makes of the settings of these names, which the user gave an optimizer of Keras'."""
    settings = {name: getattr(optimizer, name) for name in names}
    try:
        return make(**settings)
    except (TypeError, ValueError) as error:
        received = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise type(error)(
            "Expected an optimizer whose own settings make a loss scale. Received: "
            f"{type(optimizer).__name__} '{optimizer.name}' with {received}. Make it with others. ({error})"
        ) from error


def wrapped(optimizer, rule, slot_dtype: str = "auto"):
    """Returns `optimizer` in a `LossScaleOptimizer` with `rule`; itself where it is one, or `rule` is `None`.

    Args:
        slot_dtype: That of the policy; with `"auto"` what its user gave the optimizer stays.
    """
    if rule is None:
        return optimizer
    is_ours = isinstance(optimizer, LossScaleOptimizer)
    is_same_rule = is_ours and optimizer.loss_scale_rule == rule
    if is_ours and slot_dtype == "auto" and not optimizer._slots_chosen_by_prepare:
        slot_dtype = optimizer.slot_dtype
    is_same_slot_dtype = is_ours and optimizer.slot_dtype == slot_dtype
    if is_same_rule and is_same_slot_dtype:
        return optimizer
    wrapper = rewrapped(optimizer, rule, slot_dtype)
    wrapper._chosen_by_prepare = optimizer._chosen_by_prepare if is_same_rule else True
    wrapper._slots_chosen_by_prepare = optimizer._slots_chosen_by_prepare if is_same_slot_dtype else True
    return wrapper
