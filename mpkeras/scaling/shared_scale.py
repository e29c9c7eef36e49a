"""The loss scale of one optimizer or of several: who holds its state, and which scale a step has used."""

import keras
from keras import ops

from mpkeras._typing import OptimizerMixin
from mpkeras.policies.loss_scaling import FixedLossScale, LossScale


class ScaleRule:
    """The loss-scaling rule of all optimizers that share one scale: a change by one holds for all.

    A plain object: Keras and `tf.train.Checkpoint` save what they find through attributes, and one
    optimizer must not be saved as a part of another.
    """

    def __init__(self, rule: LossScale):
        self.rule = rule
        self.is_shared = False


class HoldsScale(OptimizerMixin):
    """Goes before `keras.optimizers.LossScaleOptimizer` in the bases of our wrapper: its loss scale."""

    def _start_scale(self, rule: LossScale, shared_with):
        """Takes `rule`, or the rule and the variables of `shared_with` where that is an optimizer."""
        self._scale = ScaleRule(rule)
        self._state: dict = {}
        if shared_with is None:
            return
        # Now, and not when one of the two is built: each may be built on variables of its own at any time.
        shared_with._make_scale_state()
        self._scale = shared_with._scale
        self._scale.is_shared = True
        self._hold(shared_with._state)

    def _make_scale_state(self):
        """Makes the variables that the rule moves, unless this optimizer has them already."""
        if self._state:
            return
        initial_state = {"step_counter": 0, **self._rule.initial_state()}
        ordered = ["step_counter", "dynamic_scale"]
        ordered += [key for key in initial_state if key not in ordered]
        # Keras' "int": int64 on TensorFlow, int32 on JAX and torch, as its own counter.
        state = {"step_counter": self._add_scalar("step_counter", initial_state["step_counter"], "int")}
        state.update({key: self._add_scalar(key, initial_state[key]) for key in ordered[1:]})
        self._hold(state)

    def _hold(self, state: dict):
        # Keras' optimizers track the variables they are given as attributes, those in a dictionary, too:
        # this is what puts another optimizer's among `variables`, each once.
        self.step_counter = state["step_counter"]
        self.dynamic_scale = state["dynamic_scale"]
        self._state = dict(state)

    def _add_scalar(self, name: str, value, int_dtype: str = "int32"):
        dtype = {bool: "bool", int: int_dtype, float: "float32"}[type(value)]
        return self.add_variable(
            shape=(),
            initializer=keras.initializers.Constant(value),
            dtype=dtype,
            aggregation="none",
            name=name,
        )

    @property
    def _rule(self) -> LossScale:
        return self._scale.rule

    @property
    def loss_scale(self):
        """The loss scale now: float32 scalar tensor of shape `()`."""
        if not self._state:
            return ops.convert_to_tensor(self._rule.initial_scale, "float32")
        # A copy: a rule may return a value of the state itself, and variables are assigned in place.
        return ops.copy(self._rule.current_scale({key: variable.value for key, variable in self._state.items()}))

    @property
    def loss_scale_rule(self) -> LossScale:
        """The `mpkeras.LossScale` by which the scale moves."""
        return self._rule

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale can change during training."""
        return self._rule.dynamic

    @property
    def dynamic_counter(self):
        """`step_counter`, by its tf.keras name; `None` for a fixed scale."""
        return self.step_counter if self.dynamic else None

    @property
    def initial_scale(self) -> float:
        """The first loss scale; setting it changes the rule, and the scale of an optimizer not yet built."""
        return self._rule.initial_scale

    @property
    def dynamic_growth_steps(self):
        """Finite steps in a row before the scale grows; `None` for a rule without."""
        return getattr(self._rule, "dynamic_growth_steps", None)

    @property
    def scale_is_one(self) -> bool:
        """Whether there is nothing to scale: the steps are checked only."""
        return isinstance(self._rule, FixedLossScale) and self._rule.scale == 1.0

    @property
    def scale_state(self) -> dict:
        """The variables that the loss-scaling rule moves, by name; empty before `build`, unless shared."""
        return dict(self._state)


def shared_scale_owner(inner_optimizer, loss_scale):
    """Returns `loss_scale` where it is an optimizer whose scale is to be shared, else `None`.

    Raises:
        TypeError: If it is stock Keras' `LossScaleOptimizer`.
        ValueError: If it wraps `inner_optimizer` itself.
    """
    if isinstance(loss_scale, HoldsScale):
        if loss_scale.inner_optimizer is inner_optimizer:
            raise ValueError(
                "Expected `loss_scale` to be the wrapper of another optimizer. Received: a wrapper of the same "
                f"{inner_optimizer!r}. Use that one, or wrap an optimizer of its own for each loss."
            )
        return loss_scale
    if isinstance(loss_scale, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "Expected a scale that can be shared, of a `mpkeras.LossScaleOptimizer`. Received: "
            f"loss_scale={loss_scale!r}, stock Keras' own, which knows no bounds and no rule. Wrap its "
            "`inner_optimizer` in a `mpkeras.LossScaleOptimizer` and pass that one."
        )
    return None


def scale_of_step(optimizer, facts, is_within_reach):
    """Returns the loss scale that this step has used or will use: float32 scalar, shape `()`.

    Another optimizer may move a shared scale between `scale_loss` and `apply`. So the first `scale_loss` of a
    step notes the scale, and all that follows up to `apply` uses the noted one.

    Args:
        is_within_reach: Function of a tensor: whether the code that runs now can read it.
    """
    if not optimizer._scale.is_shared:
        return optimizer.loss_scale
    if facts.loss_scale is None or not is_within_reach(facts.loss_scale):
        scale = optimizer.loss_scale
        facts.loss_scale = scale if is_within_reach(scale) else None
        return scale
    return facts.loss_scale
