"""The loss-scaling rules: pure functions from one step's state to the next, on scalars."""

import dataclasses
import math
import numbers

import keras
from keras import ops

if keras.backend.backend() == "torch":
    # torch runs op by op. A step has some forty operations on scalars, and what `keras.ops` converts and checks before
    # each takes five times as long as the operation.
    from mpkeras.policies import _torch as scalars
else:
    from keras import ops as scalars  # type: ignore[no-redef]

# Between these bounds a scale and its reciprocal are both normal float32 numbers, so that
# multiplying by the reciprocal unscales exactly whenever the scale is a power of two.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126

# What the int32 counters of JAX and torch hold. Steps beyond it, which no training takes, count as this many.
_LARGEST_COUNT = 2**31 - 1


class _DefaultBound(float):
    """A default bound: unlike a bound the user wrote, it gives way to `initial_scale`."""


class LossScale:
    """A rule for the loss scale: a state in, a state out. Subclass it for a rule of your own.

    A rule holds settings only and never changes. Its state is a dictionary of scalars with the key
    `"dynamic_scale"` (float32) and any further keys the rule needs (a Python `int` in `initial_state`
    becomes an integer variable, a `float` a float32 variable). `LossScaleOptimizer` keeps the state in
    variables, so it is saved and restored with the optimizer.

    A subclass implements `initial_state`, `next_state` and `get_config`, uses `keras.ops` only (the
    state is traced into the compiled step), and is registered with
    `keras.saving.register_keras_serializable` to be saved.

    Example:

    >>> @keras.saving.register_keras_serializable("my_package")
    ... class Impatient(mpkeras.LossScale):
    ...     def initial_state(self):
    ...         return {"dynamic_scale": 1024.0}
    ...
    ...     def next_state(self, state, is_finite):
    ...         factor = keras.ops.where(is_finite, 1.01, 0.5)
    ...         return {"dynamic_scale": state["dynamic_scale"] * factor}
    ...
    ...     def get_config(self):
    ...         return {}
    >>> rule = Impatient()
    >>> state = rule.next_state(rule.initial_state(), is_finite=False)
    >>> float(rule.current_scale(state))
    512.0
    >>> Impatient.from_config(rule.get_config()) == rule
    True
    """

    #: Whether the scale can change during training.
    dynamic = True

    def initial_state(self) -> dict:
        """Returns the state before the first step: Python numbers by name."""
        raise NotImplementedError(f"{type(self).__name__} must implement `initial_state`.")

    def next_state(self, state: dict, is_finite) -> dict:
        """Returns the state after one step.

        Args:
            state: Scalars of shape `()`, with the keys of `initial_state`.
            is_finite: bool scalar, shape `()`. Whether every gradient of this step was finite.

        Returns:
            The new state: float32 and integer scalars of shape `()`, with the same keys.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `next_state`.")

    def current_scale(self, state: dict):
        """Returns the factor to use now, a float32 scalar of shape `()`.

        Args:
            state: Scalars of shape `()`, with the keys of `initial_state`.
        """
        return ops.cast(state["dynamic_scale"], "float32")

    @property
    def initial_scale(self) -> float:
        """The factor on the first step's loss."""
        return float(self.initial_state()["dynamic_scale"])

    def get_config(self) -> dict:
        """Returns the settings, as what JSON can hold: the arguments that make an equal rule."""
        raise NotImplementedError(f"{type(self).__name__} must implement `get_config`.")

    @classmethod
    def from_config(cls, config: dict):
        """Returns a rule with these settings.

        Args:
            config: What `get_config` returned.
        """
        return cls(**config)

    def __eq__(self, other):
        return type(other) is type(self) and other.get_config() == self.get_config()

    def __hash__(self):
        return hash((type(self), tuple(sorted(self.get_config().items()))))


@keras.saving.register_keras_serializable(package="mpkeras")
@dataclasses.dataclass(frozen=True)
class FixedLossScale(LossScale):
    """The same scale for the whole training; non-finite steps are still found and skipped.

    Args:
        scale: The factor on the loss, in `[2**-126, 2**126]`. A power of two scales without rounding.

    Raises:
        ValueError: If `scale` is not a finite number in that range.
        TypeError: If `scale` is not a number.

    Example:

    >>> rule = mpkeras.FixedLossScale(1024)
    >>> state = rule.next_state(rule.initial_state(), is_finite=False)
    >>> float(rule.current_scale(state))
    1024.0
    >>> rule.dynamic
    False

    References:
        Micikevicius et al., 2018, section 3.2, https://arxiv.org/abs/1710.03740.
    """

    scale: float

    dynamic = False

    def __post_init__(self):
        object.__setattr__(self, "scale", _check_scale("scale", self.scale))

    def initial_state(self) -> dict:
        return {"dynamic_scale": self.scale}

    def next_state(self, state: dict, is_finite) -> dict:
        del is_finite
        return {**state, "dynamic_scale": self.current_scale(state)}

    def current_scale(self, state: dict):
        # Not the stored one: a checkpoint of another rule may hold any other scale.
        del state
        return ops.convert_to_tensor(self.scale, "float32")

    def get_config(self) -> dict:
        return dataclasses.asdict(self)


@keras.saving.register_keras_serializable(package="mpkeras")
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Raises the scale after many finite steps and lowers it when gradients overflow.

    The scale is multiplied by `growth_factor` on the `dynamic_growth_steps`-th finite step in a row,
    and by `backoff_factor` on every non-finite step that is at least the `hysteresis`-th in a row. It
    never leaves `[min_scale, max_scale]`: at scale 0 unscaling writes NaN into the weights, and an
    infinite scale can never come down again.

    Args:
        initial_scale: The factor on the first step's loss. Outside the *default* bounds it widens them;
            outside bounds that are given it is an error.
        growth_factor: Above 1. A power of two scales without rounding.
        backoff_factor: Between 0 and 1, both excluded.
        dynamic_growth_steps: At least 1, in optimizer steps.
        min_scale, max_scale: Positive, in `[2**-126, 2**126]`. The default floor is far below 1, for models
            whose gradients are beyond float16's 65504 unscaled: it keeps the scale from 0, and stops no training.
        hysteresis: At least 1. How many non-finite steps in a row it takes for the scale to back off.

    Raises:
        ValueError: If a number is out of its range or the bounds are not in order.
        TypeError: If an argument is not a number.

    Example:

    >>> rule = mpkeras.DynamicLossScale(initial_scale=8.0, dynamic_growth_steps=2)
    >>> state = rule.initial_state()
    >>> for is_finite in (True, True, False, False):
    ...     state = rule.next_state(state, is_finite)
    ...     print(float(rule.current_scale(state)))
    8.0
    16.0
    8.0
    4.0

    References:
        Loss scaling: Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740.
        Rule: https://docs.nvidia.com/deeplearning/performance/mixed-precision-training
        Hysteresis: https://www.deepspeed.ai/docs/config-json/#fp16-training-options
    """

    initial_scale: float = 2.0**15
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    dynamic_growth_steps: int = 2000
    min_scale: float = _DefaultBound(2.0**-24)
    max_scale: float = _DefaultBound(2.0**24)
    hysteresis: int = 1

    def __post_init__(self):
        scales = ("initial_scale", "min_scale", "max_scale")
        initial_scale, min_scale, max_scale = (_check_scale(name, getattr(self, name)) for name in scales)
        if isinstance(self.min_scale, _DefaultBound):
            min_scale = min(min_scale, initial_scale)
        if isinstance(self.max_scale, _DefaultBound):
            max_scale = max(max_scale, initial_scale)
        if not min_scale <= initial_scale <= max_scale:
            raise ValueError(
                "Expected 0 < `min_scale` <= `initial_scale` <= `max_scale`. Received: "
                f"min_scale={min_scale}, initial_scale={initial_scale}, max_scale={max_scale}. "
                "Move `initial_scale` between the bounds, or widen them."
            )
        growth_factor = _check_number("growth_factor", self.growth_factor)
        if not (growth_factor > 1 and math.isfinite(growth_factor)):
            raise ValueError(
                "Expected `growth_factor` > 1, as the scale grows by it. Received: "
                f"growth_factor={growth_factor}. Use 2.0, or for a scale that stays `FixedLossScale`."
            )
        backoff_factor = _check_number("backoff_factor", self.backoff_factor)
        if not 0 < backoff_factor < 1:
            raise ValueError(
                "Expected 0 < `backoff_factor` < 1, as the scale shrinks by it. Received: "
                f"backoff_factor={backoff_factor}. Use 0.5, or for a scale that stays `FixedLossScale`."
            )
        checked = {
            "initial_scale": initial_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "dynamic_growth_steps": _check_count("dynamic_growth_steps", self.dynamic_growth_steps),
            "min_scale": min_scale,
            "max_scale": max_scale,
            "hysteresis": _check_count("hysteresis", self.hysteresis),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def initial_state(self) -> dict:
        return {"step_counter": 0, "dynamic_scale": self.initial_scale, "hysteresis_counter": 0}

    def current_scale(self, state: dict):
        scale = ops.cast(state["dynamic_scale"], "float32")
        # A checkpoint of stock Keras may hold 0, inf or 2**40, which must not be used even once. NaN and 0, which a
        # program leaves that sets all state to zero, tell nothing of the gradients: the scale begins anew.
        lowest = scalars.where(scalars.greater_equal(scale, SMALLEST_SCALE), self.min_scale, self.initial_scale)
        bounded = scalars.minimum(scale, self.max_scale)
        return scalars.where(scalars.greater_equal(scale, self.min_scale), bounded, lowest)

    def next_state(self, state: dict, is_finite) -> dict:
        scale = self.current_scale(state)
        finite_steps = state["step_counter"] + 1
        # ">=", not "==": a restored counter may already be past a smaller `dynamic_growth_steps`.
        is_due = scalars.greater_equal(finite_steps, min(self.dynamic_growth_steps, _LARGEST_COUNT))
        grown = scalars.where(is_due, scalars.minimum(scale * self.growth_factor, self.max_scale), scale)
        # Held at `hysteresis`, so that a long row of skipped steps cannot overflow the counter.
        hysteresis = min(self.hysteresis, _LARGEST_COUNT)
        bad_steps = scalars.minimum(state["hysteresis_counter"] + 1, hysteresis)
        backs_off = scalars.greater_equal(bad_steps, hysteresis)
        shrunk = scalars.where(backs_off, scalars.maximum(scale * self.backoff_factor, self.min_scale), scale)
        return {
            "step_counter": scalars.where(is_finite, scalars.where(is_due, 0, finite_steps), 0),
            "dynamic_scale": scalars.where(is_finite, grown, shrunk),
            "hysteresis_counter": scalars.where(is_finite, 0, bad_steps),
        }

    def get_config(self) -> dict:
        return dataclasses.asdict(self)


def number(scalar):
    """Returns the value of a scalar tensor or variable, also of one that has a copy on every replica."""
    return ops.convert_to_numpy(ops.convert_to_tensor(scalar)).item()


def resolve(identifier) -> LossScale | None:
    """Returns the `LossScale` that `identifier`, serialized or not, stands for; `None` for no scaling."""
    is_serialized = isinstance(identifier, dict) and "class_name" in identifier
    rule = keras.saving.deserialize_keras_object(identifier) if is_serialized else identifier
    if rule is None or isinstance(rule, LossScale):
        return rule
    if isinstance(rule, str) and rule == "dynamic":
        return DynamicLossScale()
    if not isinstance(rule, bool) and isinstance(rule, numbers.Real):
        return FixedLossScale(float(rule))
    received = (
        f"Expected a `loss_scale` of 'dynamic', a number, a `LossScale` or None. Received: loss_scale={identifier!r}"
    )
    if isinstance(identifier, str):
        raise ValueError(f"{received}. Use 'dynamic', or a number for a fixed scale.")
    raise TypeError(f"{received} (of type {type(identifier).__name__}). Pass for example `mpkeras.DynamicLossScale()`.")


def _check_number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"Expected `{name}` to be a number. Received: {name}={value!r} "
            f"(of type {type(value).__name__}). Pass a Python float."
        )
    return float(value)


def _check_scale(name: str, value) -> float:
    number = _check_number(name, value)
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"Expected 2**-126 <= `{name}` <= 2**126, where float32 holds the scale and its reciprocal. "
            f"Received: {name}={number}. Use a power of two such as 2.0**15."
        )
    return number


def _check_count(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"Expected `{name}` to be an integer. Received: {name}={value!r} "
            f"(of type {type(value).__name__}). Pass a whole number of steps."
        )
    if value < 1:
        raise ValueError(f"Expected `{name}` >= 1, in steps. Received: {name}={value}. Use 1 to act on every step.")
    return int(value)
