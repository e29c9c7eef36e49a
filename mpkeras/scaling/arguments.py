"""The arguments of `LossScaleOptimizer`, which are those of three generations of Keras: checked, and made one rule."""

import keras

from mpkeras._arguments import named
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale, LossScale, resolve

# Arguments of every Keras optimizer that mean nothing on the wrapper, with the neutral values that configurations of
# early Keras 3 contain.
_INNER_ARGUMENTS = {
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


def checked_optimizer(optimizer, argument: str):
    """Returns the optimizer that `optimizer` is or names; `argument` is what the caller calls it."""
    if isinstance(optimizer, dict) and "class_name" not in optimizer:
        raise ValueError(
            f"Expected the configuration of a Keras optimizer. Received: {argument}={optimizer!r}, which has no "
            "'class_name'. Pass what `keras.optimizers.serialize` returns."
        )
    if isinstance(optimizer, str):
        optimizer = named(keras.optimizers.get, optimizer, argument, "adam")
    if isinstance(optimizer, dict):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"Expected `{argument}` to be a Keras optimizer, its name or its configuration. Received: "
            f"{argument}={optimizer!r} (of type {type(optimizer).__name__}). "
            "Pass for example `keras.optimizers.Adam()`."
        )
    return optimizer


def checked_inner_optimizer(inner_optimizer):
    inner_optimizer = checked_optimizer(inner_optimizer, "inner_optimizer")
    if isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Expected an `inner_optimizer` that does not scale the loss itself, or it would be scaled twice. "
            f"Received: inner_optimizer={inner_optimizer!r}. Pass its own `inner_optimizer`."
        )
    return inner_optimizer


def check_parts(inner_optimizer):
    """Raises `ValueError` where an optimizer within a `MultiOptimizer` accumulates: steps are counted for all."""
    for part in getattr(inner_optimizer, "optimizers", []):
        if part.gradient_accumulation_steps:
            raise ValueError(
                "Expected optimizers in a `MultiOptimizer` that do not accumulate gradients themselves. Received: "
                f"'{part.name}' with gradient_accumulation_steps={part.gradient_accumulation_steps}. Make it without, "
                "and call `LossScaleOptimizer.accumulate(steps)` for all of them."
            )


def refuse_inner_arguments(kwargs: dict):
    for name, default in _INNER_ARGUMENTS.items():
        if name in kwargs and kwargs.pop(name) != default:
            raise ValueError(
                f"LossScaleOptimizer does not support `{name}`. Instead, set `{name}` on the `inner_optimizer`."
            )
    if kwargs:
        raise ValueError(f"LossScaleOptimizer does not support arguments: `{'`, `'.join(kwargs)}`.")


def rule_from_arguments(initial_scale, dynamic_growth_steps, loss_scale, dynamic) -> LossScale:
    """Returns the rule that the constructor's arguments ask for, which are those of three generations of Keras."""
    if isinstance(loss_scale, keras.optimizers.Optimizer):
        raise TypeError(
            "Expected a `loss_scale` of 'dynamic', a number, a `LossScale` or None: each optimizer has a scale of its "
            f"own. Received: loss_scale={loss_scale!r}, an optimizer, whose scale is not shared any more. Give each "
            "optimizer its own, for example `loss_scale=mpkeras.DynamicLossScale()`, or use one optimizer for the sum "
            "of the losses."
        )
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(
            "Expected `dynamic` to be True or False. Received: "
            f"dynamic={dynamic!r} (of type {type(dynamic).__name__}). Leave it out for a scale that moves, or pass "
            "False, and the fixed scale as `initial_scale`."
        )
    if dynamic is False:
        if initial_scale is None:
            raise ValueError(
                "Expected `initial_scale` with `dynamic=False`: it is the fixed scale. Received: none. Pass "
                "`initial_scale=` (where stock Keras would have you set `loss_scale_factor`: here the finite "
                "check stays)."
            )
        if dynamic_growth_steps is not None or loss_scale != "dynamic":
            raise ValueError(
                "Expected only `initial_scale` with `dynamic=False`, as a fixed scale never grows. Received: "
                f"dynamic_growth_steps={dynamic_growth_steps}, loss_scale={loss_scale!r}. Leave them out."
            )
        return FixedLossScale(initial_scale)
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        settings = {"initial_scale": initial_scale, "dynamic_growth_steps": dynamic_growth_steps}
        return DynamicLossScale(**{name: value for name, value in settings.items() if value is not None})
    if initial_scale is not None or dynamic_growth_steps is not None:
        raise ValueError(
            "Expected the scale to be given once. Received: "
            f"loss_scale={loss_scale!r}, initial_scale={initial_scale}, "
            f"dynamic_growth_steps={dynamic_growth_steps}. Put the settings into `loss_scale`."
        )
    rule = resolve(loss_scale)
    if rule is not None and dynamic is True and not rule.dynamic:
        raise ValueError(
            f"Expected a moving scale with `dynamic=True`. Received: loss_scale={loss_scale!r}. "
            "Leave `dynamic` out, or use `loss_scale='dynamic'`."
        )
    # No scaling: the finite check and the skip stay.
    return FixedLossScale(1.0) if rule is None else rule
