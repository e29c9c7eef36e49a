"""`rewrapped`: another loss-scaling rule or window around the same inner optimizer, its state kept."""

import keras
from keras import ops

from mpkeras import _keras
from mpkeras.policies.loss_scaling import LossScale, number
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.scaling.window import GradientWindow, checked_steps


def own_calls(optimizer) -> int:
    """Returns how many calls of `apply` to an update the user of any Keras optimizer set, whatever a policy asks for.

    Raises:
        ValueError: If it is no count.
    """
    window = getattr(optimizer, "window", None)
    if window is not None:
        return max(1, window.steps // optimizer.record.parts)
    steps = getattr(optimizer, "inner_optimizer", optimizer).gradient_accumulation_steps
    return 1 if steps is None else checked_steps(steps, "drop_micro")


def own_slot_dtype(optimizer) -> str:
    """Returns the `slot_dtype` that the user gave an optimizer, whatever a policy asked for; `"auto"` without one."""
    is_users = isinstance(optimizer, LossScaleOptimizer) and not optimizer.record.slots_are_chosen_by_prepare
    return optimizer.slot_dtype if is_users else "auto"


def rewrapped(
    optimizer, rule: LossScale, slot_dtype: str = "auto", all_reduce_dtype=None, steps: int | None = None
) -> LossScaleOptimizer:
    """Returns a `LossScaleOptimizer` with `rule` around the same inner optimizer, its state kept.

    Args:
        optimizer: A plain Keras optimizer, stock Keras' `LossScaleOptimizer` or ours; built or not.
        rule: The rule of the result. Counters are carried over, and the current scale unless it was fixed.
        slot_dtype, all_reduce_dtype: Those of the result.
        steps: Calls of `apply` to an update of the result; by default as they are. A half-full window goes on: one
            that is fuller than `steps` ends with the next call.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        result = LossScaleOptimizer(
            optimizer, loss_scale=rule, slot_dtype=slot_dtype, all_reduce_dtype=all_reduce_dtype
        )
        if steps is not None:
            result.accumulate(steps)
        if optimizer.built:
            result.build(_keras.optimizer_trainable_variables(optimizer))
            result.record.steps_before_scale = number(result.accepted_steps)
        return result
    result = LossScaleOptimizer(
        optimizer.inner_optimizer,
        name=optimizer.name,
        loss_scale=rule,
        slot_dtype=slot_dtype,
        all_reduce_dtype=all_reduce_dtype,
    )
    window = getattr(optimizer, "window", None)
    if isinstance(optimizer, LossScaleOptimizer):
        result.record.excluded_from_weight_decay = optimizer.record.excluded_from_weight_decay
    if window is not None:
        steps = window.steps if steps is None else steps
        result.accumulate(steps, window.on_overflow)
        if result.window is None and optimizer.built and number(window.position):
            # The calls that were summed count in the next update.
            result.window = GradientWindow(result, steps, window.on_overflow)
    elif steps is not None:
        result.accumulate(steps)
    if optimizer.built:
        result.build(_keras.optimizer_trainable_variables(optimizer.inner_optimizer))
        if _has_found_its_scale(optimizer):
            for name in ("step_counter", "dynamic_scale"):
                _copy(getattr(optimizer, name), getattr(result, name))
    if optimizer.built and isinstance(optimizer, LossScaleOptimizer):
        for name in ("_skipped_steps", "_consecutive_skips", "_last_step_skipped", "_nonfinite_losses"):
            _copy(getattr(optimizer, name), getattr(result, name))
        if window is not None and result.window is not None:
            for new, old in zip(result.window.variables, window.variables, strict=True):
                _copy(old, new)
        elif result.window is not None:
            result.window.accepted_steps.assign(ops.copy(optimizer.accepted_steps.value))
    if optimizer.built and not _has_found_its_scale(optimizer):
        result.record.steps_before_scale = number(result.accepted_steps)
    return result


def _copy(source, target):
    """Assigns a copy: on JAX the array itself would be one buffer of two variables, which cannot be donated twice."""
    target.assign(ops.copy(source.value))


def _has_found_its_scale(optimizer) -> bool:
    """Whether the scale of a built optimizer is one that training has moved, and so worth more than a default."""
    if isinstance(optimizer, LossScaleOptimizer) and not optimizer.dynamic:
        # 1.0 of a bfloat16 model would stay with float16 for thousands of steps.
        return False
    # Keras' `fit` builds an optimizer before any callback is asked: without a step, nothing has been found.
    values = (optimizer.step_counter, optimizer.inner_optimizer.iterations)
    return any(number(value) for value in values) or number(optimizer.dynamic_scale) != optimizer.initial_scale
