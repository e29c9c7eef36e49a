"""`LossScaleOptimizer`: holds the loss scale's state and lets only finite steps reach the optimizer inside."""

import warnings

import keras
from keras import ops

from mpkeras import _keras_private
from mpkeras.accumulation import AccumulatesGradients, Decision, single_step
from mpkeras.gradient_statistics import gradient_statistics
from mpkeras.loss_scaling import FixedLossScale, LossScale
from mpkeras.optimizer_arguments import (
    checked_inner_optimizer,
    refuse_inner_arguments,
    rule_from_arguments,
)
from mpkeras.optimizer_delegation import DelegatesToInner
from mpkeras.optimizer_saving import SavesItsState
from mpkeras.shared_scale import HoldsScale, shared_scale_owner
from mpkeras.step_notes import step_notes, take_notes

if keras.backend.backend() == "tensorflow":
    from mpkeras import _tensorflow as _backend
elif keras.backend.backend() == "jax":
    from mpkeras import _jax as _backend
elif keras.backend.backend() == "torch":
    from mpkeras import _torch as _backend
else:
    raise ImportError(
        "Expected a Keras backend that trains: 'tensorflow', 'jax' or 'torch'. Received: "
        f"KERAS_BACKEND={keras.backend.backend()!r}. Set KERAS_BACKEND to one of them before importing keras."
    )


@keras.saving.register_keras_serializable(package="mpkeras")
class LossScaleOptimizer(
    HoldsScale, DelegatesToInner, AccumulatesGradients, SavesItsState, keras.optimizers.LossScaleOptimizer
):
    """Scales the loss, unscales the gradients, and skips every step that is not finite.

    A drop-in for `keras.optimizers.LossScaleOptimizer` and for the one of tf.keras. On each step the
    gradients are checked with one float32 sum each (all replicas together), multiplied by the reciprocal of
    the scale, and handed to `inner_optimizer`: clipping, weight decay, averages, accumulation and learning
    rate schedules see unscaled gradients and applied steps only. A step whose loss or gradients are not
    finite changes no variable but this optimizer's own. The scale backs off after it, unless the unscaled
    loss itself was not finite: then the forward pass is at fault, and no scale cures it.

    ```python
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))
        scaled_loss = optimizer.scale_loss(loss)
    scaled_grads = tape.gradient(scaled_loss, model.trainable_variables)
    optimizer.apply(scaled_grads, model.trainable_variables)
    ```

    A gradient whose float32 *sum* overflows (values near 1e38) counts as not finite.

    Args:
        inner_optimizer: A Keras optimizer, its name or its configuration.
        initial_scale: The first loss scale; with `dynamic=False` the only one. Default 2**15.
        dynamic_growth_steps: Finite steps in a row before the scale doubles. Default 2000.
        name: Name of the optimizer.
        loss_scale: `"dynamic"`, a number (a fixed scale), a `mpkeras.LossScale`, or another
            `mpkeras.LossScaleOptimizer` whose scale is shared: both hold the same scale variables, each step of
            either moves them, and each counts its own skipped steps. A configuration cannot say so: loaded from
            one, each has a scale of its own by the same rule.
        dynamic: `False` for a fixed scale, as in tf.keras.
        on_overflow: With `gradient_accumulation_steps` on the inner optimizer, what a step that is not finite
            takes from the update: itself (`"drop_micro"`, the default) or all of it (`"drop_window"`).
        all_reduce_dtype: `"float16"` or `"bfloat16"`: under a `tf.distribute` strategy the scaled gradients are
            summed over replicas in this dtype, and a sum that overflows is a skipped step. Clipping then sees
            the sum, where Keras clips each replica's part. By default they are summed as they are.

    Attributes:
        dynamic_scale: float32 variable of shape `()`, the loss scale (once built).
        step_counter: integer variable of shape `()`, finite steps since the scale last changed (once built).
        skipped_steps: integer variable of shape `()`, steps left out so far.
        consecutive_skips: integer variable of shape `()`, steps left out since the last applied one.
        nonfinite_losses: integer variable of shape `()`, steps left out because the unscaled loss itself was
            not finite (where that is known).
        last_step_skipped: bool scalar tensor of shape `()`.

    Any other public attribute is read from and written to `inner_optimizer`.

    Raises:
        ValueError: If arguments contradict each other, or belong on the inner optimizer.
        TypeError: If `inner_optimizer` or `loss_scale` is of a wrong type.

    References:
        Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740.
    """

    def __init__(
        self,
        inner_optimizer,
        initial_scale=None,
        dynamic_growth_steps=None,
        name=None,
        *,
        loss_scale="dynamic",
        dynamic=None,
        on_overflow=None,
        all_reduce_dtype=None,
        **kwargs,
    ):
        refuse_inner_arguments(kwargs)
        _backend.check_all_reduce_dtype(all_reduce_dtype)
        inner_optimizer = checked_inner_optimizer(inner_optimizer)
        shared_with = shared_scale_owner(inner_optimizer, loss_scale)
        if shared_with is not None:
            loss_scale = shared_with.loss_scale_rule
        rule = rule_from_arguments(initial_scale, dynamic_growth_steps, loss_scale, dynamic)
        if getattr(inner_optimizer, "loss_scale_factor", None) is not None:
            warnings.warn(
                f"`loss_scale_factor={inner_optimizer.loss_scale_factor}` of the inner optimizer is replaced by "
                f"{rule!r}, or the loss would be scaled twice. For a fixed scale pass "
                f"`loss_scale={inner_optimizer.loss_scale_factor}` instead.",
                stacklevel=2,
            )
        super().__init__(inner_optimizer, initial_scale=rule.initial_scale, name=name)
        # Such a rule gives way to what the next policy asks for; one of the user's own does not.
        self._chosen_by_prepare = False
        # Not in `build`: a train step is traced with these counters before it builds the optimizer.
        self._skipped_steps = self._add_scalar("skipped_steps", 0)
        self._consecutive_skips = self._add_scalar("consecutive_skips", 0)
        self._last_step_skipped = self._add_scalar("last_step_skipped", False)
        self._nonfinite_losses = self._add_scalar("nonfinite_losses", 0)
        self._start_scale(rule, shared_with)
        self.all_reduce_dtype = all_reduce_dtype
        self.window = None
        self._take_over_accumulation(on_overflow)

    # ---------------------------------------------------------------------------------------------- state

    def build(self, variables):
        """Creates the state for `variables`, and the inner optimizer's unless it has been built before."""
        if self.built:
            return
        self._make_scale_state()
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(list(variables))
        if self.window is not None:
            self._build_window()
        # Not `super().build`: it would read `use_ema` and `gradient_accumulation_steps` of the inner
        # optimizer through this one and create averages and accumulators a second time.
        self.built = True

    @property
    def skipped_steps(self):
        return self._skipped_steps

    @property
    def consecutive_skips(self):
        return self._consecutive_skips

    @property
    def nonfinite_losses(self):
        return self._nonfinite_losses

    @property
    def last_step_skipped(self):
        # The value: a Keras variable cannot be asked `if optimizer.last_step_skipped`.
        return self._last_step_skipped.value

    @property
    def loss_scale(self):
        """The loss scale now: float32 scalar tensor of shape `()`."""
        if not self._state:
            return ops.convert_to_tensor(self._rule.initial_scale, "float32")
        return self._rule.current_scale({key: variable.value for key, variable in self._state.items()})

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
        return self._rule.initial_scale

    @property
    def dynamic_growth_steps(self):
        return getattr(self._rule, "dynamic_growth_steps", None)

    # ------------------------------------------------------------------------------------------ the step

    def scale_loss(self, loss):
        """Returns the loss times the loss scale, computed in float32 or wider.

        Args:
            loss: A scalar or a tensor of losses of any float dtype.

        Returns:
            A tensor of the shape of `loss`, float32 (float64 where `loss` is).
        """
        loss = ops.convert_to_tensor(loss)
        if keras.backend.standardize_dtype(loss.dtype) != "float64":
            loss = ops.cast(loss, "float32")
        notes = step_notes(self)
        notes.loss_was_scaled = True
        notes.grads_are_unscaled = False
        return _backend.scale_loss(self, loss, notes)

    def get_scaled_loss(self, loss):
        """Returns the scaled loss. The tf.keras name; a callable loss gives a callable."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads):
        """Returns the gradients divided by the loss scale; `None` stays `None`, sparse stays sparse.

        Until the next `scale_loss` or `get_scaled_loss`, `apply` and `apply_gradients` then take their
        gradients as unscaled, as in the tf.keras loop.
        """
        notes = step_notes(self)
        notes.grads_are_unscaled = True
        grads = list(grads)
        return self.unscale(grads, [None] * len(grads), _backend.scale_of_step(self, notes))

    def unscale(self, scaled_grads, variables, loss_scale=None) -> list:
        """Returns the gradients times the reciprocal of the scale (the present one): exact for powers of two."""
        if self.scale_is_one:
            return list(scaled_grads)
        reciprocal = ops.divide(1.0, self.loss_scale if loss_scale is None else loss_scale)
        return [
            g if g is None or _keras_private.overwrites_with_gradient(v) else _backend.scale_gradient(g, reciprocal)
            for g, v in zip(scaled_grads, variables, strict=True)
        ]

    @property
    def scale_is_one(self) -> bool:
        """Whether there is nothing to scale: the steps are checked only."""
        return isinstance(self._rule, FixedLossScale) and self._rule.scale == 1.0

    def apply(self, grads, trainable_variables=None):
        """Unscales the gradients and updates the variables, or skips the step if it is not finite.

        Args:
            grads: List of scaled gradients (unscaled after `get_unscaled_gradients`); `None` entries allowed.
            trainable_variables: The variables, one for each gradient. May be left out once built.

        Raises:
            ValueError: If the optimizer is not built and no variables are given, if numbers do not match,
                or on TensorFlow in a cross-replica context.
        """
        grads = list(grads)
        if not grads:
            return
        variables = self._checked_variables(grads, trainable_variables)
        notes = take_notes(self)
        self._note_statistics(grads, notes)
        _backend.apply(self, grads, variables, notes)

    def apply_gradients(self, grads_and_vars):
        """`apply` for pairs. Returns the number of applied steps, an integer scalar."""
        grads, trainable_variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, trainable_variables)
        return self.iterations

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        """`apply` without side effects, for JAX and torch.

        The gradients must be those of a loss scaled with the scale in `optimizer_variables`. Optimizers that
        share a scale take turns: the values that one returns for the shared variables go into the next one's
        `optimizer_variables`, for `scale_loss` and here.

        Args:
            optimizer_variables: List of tensors, the values of `self.variables`.
            grads: List of scaled gradients.
            trainable_variables: List of tensors, the values of the variables the optimizer was built on.

        Returns:
            `(trainable_variables, optimizer_variables)`, new values in the same order.
        """
        if not self.built:
            raise ValueError(
                f"To call `stateless_apply`, {type(self).__name__} must be built (its variables must have been "
                "created). Received: an optimizer that is not. Call `optimizer.build(trainable_variables)`."
            )
        for name, values, expected in (
            ("optimizer_variables", optimizer_variables, self.variables),
            ("trainable_variables", trainable_variables, self.trainable_variables),
        ):
            if len(values) != len(expected):
                raise ValueError(
                    f"Expected `{name}` to match the {len(expected)} variables of the optimizer one to one. "
                    f"Received: {len(values)} values. Pass them in the order of the variables."
                )
        notes = take_notes(self)
        # The state that is passed in says which scale was used.
        notes.loss_scale = None
        grads = list(grads)
        with keras.StatelessScope(state_mapping=list(zip(self.variables, optimizer_variables, strict=True))):
            self._note_statistics(grads, notes)
        return _backend.stateless_apply(self, list(optimizer_variables), grads, list(trainable_variables), notes)

    def _note_statistics(self, grads, notes):
        if notes.wants_statistics:
            scale = None if notes.grads_are_unscaled or self.scale_is_one else self.loss_scale
            step_notes(self).statistics = gradient_statistics(grads, scale)

    @property
    def trainable_variables(self) -> list:
        """The model variables this optimizer was built on."""
        return _keras_private.optimizer_trainable_variables(self.inner_optimizer)

    def _checked_variables(self, grads, trainable_variables) -> list:
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    "When passing `grads` without `variables`, the optimizer must already be built on a list "
                    "of variables. Received: an optimizer that is not. "
                    "Call `optimizer.build(trainable_variables)` first."
                )
            variables = self.trainable_variables
        else:
            variables = list(trainable_variables)
            self.build(variables)
        if len(grads) != len(variables):
            raise ValueError(
                "Expected one gradient for each variable. Received: "
                f"{len(grads)} gradients and {len(variables)} variables. "
                "Pass the gradients in the order of the variables, with `None` where there is none."
            )
        return variables

    def decide(self, grads_are_finite, loss_is_finite=None) -> tuple[Decision, list]:
        """Returns what a call of `apply` does, and `(variable, value)` for each of this optimizer's own.

        Args:
            grads_are_finite: bool scalar, shape `()`, for all replicas.
            loss_is_finite: bool scalar, shape `()`, or `None` where it is not known.
        """
        decide = single_step if self.window is None else self.window.decide
        decision = decide(grads_are_finite, loss_is_finite)
        state = {key: variable.value for key, variable in self._state.items()}
        rule_state = {key: state[key] for key in self._rule.initial_state()}
        moved = self._rule.next_state(rule_state, decision.scale_is_finite)
        if decision.scale_moves is not True:
            moved = {key: ops.where(decision.scale_moves, value, state[key]) for key, value in moved.items()}
        is_skipped = ops.logical_not(decision.is_accepted)
        values = [(self._state[key], value) for key, value in moved.items()] + decision.values
        skipped, row, lost = self._skipped_steps, self._consecutive_skips, self._nonfinite_losses
        values.append((skipped, skipped.value + ops.cast(is_skipped, skipped.dtype)))
        values.append((row, ops.where(decision.is_accepted, ops.zeros_like(row.value), row.value + 1)))
        values.append((self._last_step_skipped, is_skipped))
        if loss_is_finite is not None:
            values.append((lost, lost.value + ops.cast(ops.logical_not(loss_is_finite), lost.dtype)))
        return decision, values
