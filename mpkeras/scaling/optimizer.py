"""`LossScaleOptimizer`: holds the loss scale's state and lets only finite steps reach the optimizer inside."""

import warnings

import keras
from keras import ops

from mpkeras import _keras
from mpkeras.policies import scalars
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.loss_scaling import LossScale
from mpkeras.scaling.facts import FactsOfReplicas, StepFacts, check_loss_was_scaled, ended_update
from mpkeras.scaling.gradient_statistics import gradient_statistics
from mpkeras.scaling.optimizer_arguments import (
    checked_inner_optimizer,
    refuse_inner_arguments,
    rule_from_arguments,
)
from mpkeras.scaling.optimizer_delegation import DelegatesToInner
from mpkeras.scaling.optimizer_saving import SavesItsState, saved_as_stock
from mpkeras.scaling.shared_scale import HoldsScale, shared_scale_owner
from mpkeras.scaling.step_counters import CountsSteps
from mpkeras.scaling.window import AccumulatesGradients, Decision, single_step

if keras.backend.backend() == "tensorflow":
    from mpkeras.scaling import _tensorflow as _backend
elif keras.backend.backend() == "jax":
    from mpkeras.scaling import _jax as _backend  # type: ignore[no-redef]
elif keras.backend.backend() == "torch":
    from mpkeras.scaling import _torch as _backend  # type: ignore[no-redef]
else:
    raise ImportError(
        "Expected a Keras backend that trains: 'tensorflow', 'jax' or 'torch'. Received: "
        f"KERAS_BACKEND={keras.backend.backend()!r}. Set KERAS_BACKEND to one of them before importing keras."
    )


@saved_as_stock
class LossScaleOptimizer(
    HoldsScale,
    CountsSteps,
    DelegatesToInner,
    AccumulatesGradients,
    SavesItsState,
    keras.optimizers.LossScaleOptimizer,
):
    """Scales the loss, unscales the gradients, and skips every step that is not finite.

    A drop-in for `keras.optimizers.LossScaleOptimizer` and for the one of tf.keras. On each step the
    gradients are checked with one float32 sum each (all replicas together), multiplied by the reciprocal of
    the scale, and handed to `inner_optimizer`: clipping, weight decay, averages, accumulation and learning
    rate schedules see unscaled gradients and applied steps only. A step whose loss or gradients are not
    finite changes no variable but this optimizer's own. The scale backs off after it, unless the unscaled
    loss itself was not finite: then the forward pass is at fault, and no scale cures it.

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
        **kwargs: Arguments of other Keras optimizers, with their neutral values only.

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
        TypeError: If `inner_optimizer`, `loss_scale` or `dynamic` is of a wrong type.

    Example:

    >>> optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.25), initial_scale=1024.0)
    >>> variable = keras.Variable([3.0])
    >>> optimizer.build([variable])
    >>> for scaled_grad in (2048.0, np.inf):
    ...     scaled_loss = optimizer.scale_loss(2.0 * variable[0])  # `scaled_grad` is what its gradient is
    ...     optimizer.apply([keras.ops.array([scaled_grad])], [variable])
    ...     print(variable.numpy()[0], float(optimizer.loss_scale), int(optimizer.skipped_steps))
    2.5 1024.0 0
    2.5 512.0 1

    References:
        Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740.
    """

    built: bool

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
        factor = inner_optimizer.loss_scale_factor
        # Whoever passes a whole rule has decided what holds.
        if factor is not None and not isinstance(loss_scale, LossScale):
            warnings.warn(
                f"`loss_scale_factor={factor}` of the inner optimizer gives way to {rule!r}, or the loss would be "
                f"scaled twice. For a fixed scale pass `loss_scale={factor}` instead.",
                stacklevel=2,
            )
        super().__init__(inner_optimizer, initial_scale=rule.initial_scale, name=name)
        # Keras' constructor takes it from the inner optimizer, which is the user's. It is out of force in `apply`.
        inner_optimizer.loss_scale_factor = factor
        # Such a rule gives way to what the next policy asks for; one of the user's own does not.
        self._chosen_by_prepare = False
        self.facts_of_replicas = FactsOfReplicas()
        self._start_saving()
        self._make_counters()
        self._start_scale(rule, shared_with)
        self.all_reduce_dtype = all_reduce_dtype
        self._take_over_accumulation(on_overflow)

    # ---------------------------------------------------------------------------------------------- state

    def build(self, variables):
        """Creates the state for `variables`, and the inner optimizer's unless it has been built before.

        Args:
            variables: List of the trainable `keras.Variable`s.
        """
        if self.built:
            return
        self._warn_of_16_bits(variables)
        # Within a traced step, too, once and not in it: what `build` assigns (ScheduleFreeAdamW starts from the
        # weights) must not become part of every step.
        with _backend.build_scope():
            self._make_scale_state()
            if not self.inner_optimizer.built:
                self.inner_optimizer.build(list(variables))
            if self.window is not None:
                self._build_window(self.window)
        # Not `super().build`: it would read `use_ema` and `gradient_accumulation_steps` of the inner
        # optimizer through this one and create averages and accumulators a second time.
        self.built = True

    def _warn_of_16_bits(self, variables):
        narrow = [v for v in variables if keras.backend.standardize_dtype(v.dtype) in SIXTEEN_BIT_DTYPES]
        if not narrow:
            return
        _backend.check_16_bit_variables(self.inner_optimizer, narrow)
        dtype = keras.backend.standardize_dtype(narrow[0].dtype)
        names = [getattr(v, "path", v.name) for v in narrow[:3]]
        warnings.warn(
            f"`{self.name}` is built on {len(narrow)} trainable variables of 16 bits, {names} of {dtype} among them. "
            "Small updates are lost there, and Adam, AdamW, Lamb and Nadam move bfloat16 variables not at all or to "
            f"NaN, as 1 - beta_2 rounds to 0. Train float32 variables: build the model under 'mixed_{dtype}', or call "
            f"`mpkeras.apply_policy(model, 'mixed_{dtype}', float32_variables=True)` before the optimizer is built.",
            stacklevel=3,
        )

    # ------------------------------------------------------------------------------------------ the step

    def scale_loss(self, loss):
        """Returns the loss times the loss scale, computed in float32 or wider.

        Args:
            loss: A scalar or a tensor of losses of any float dtype.

        Returns:
            A tensor of the shape of `loss`, float32 (float64 where `loss` is).

        Example (TensorFlow):

        >>> import tensorflow as tf
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        >>> optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        >>> with tf.GradientTape() as tape:
        ...     loss = keras.losses.mean_squared_error([1.0], model(np.ones((1, 2)))[0])
        ...     scaled_loss = optimizer.scale_loss(loss)
        >>> scaled_grads = tape.gradient(scaled_loss, model.trainable_variables)
        >>> optimizer.apply(scaled_grads, model.trainable_variables)
        >>> float(scaled_loss), float(model.layers[0].bias[0])
        (32768.0, 1.0)
        """
        loss = ops.convert_to_tensor(loss)
        if keras.backend.standardize_dtype(loss.dtype) != "float64":
            loss = ops.cast(loss, "float32")
        self.facts.note_scaled_loss(_backend.traces())
        return _backend.scale_loss(self, loss, self.facts)

    def get_scaled_loss(self, loss):
        """Returns the scaled loss. The tf.keras name; a callable loss gives a callable.

        Args:
            loss: As for `scale_loss`, or a function without arguments that returns it.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> float(optimizer.get_scaled_loss(keras.ops.array(0.5)))
        512.0
        """
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads):
        """Returns the gradients divided by the loss scale; `None` stays `None`, sparse stays sparse.

        Until the next `scale_loss` or `get_scaled_loss`, `apply` and `apply_gradients` then take their
        gradients as unscaled, as in the tf.keras loop.

        Args:
            grads: List of scaled gradients, tensors of any float dtype.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> [float(grad) for grad in optimizer.get_unscaled_gradients([keras.ops.array(512.0)])]
        [0.5]
        """
        self.facts.grads_are_unscaled = True
        grads = list(grads)
        return self.unscale(grads, [None] * len(grads), _backend.scale_of_step(self, self.facts))

    def unscale(self, scaled_grads, variables, loss_scale=None) -> list:
        """Returns the gradients times the reciprocal of the scale: exact for powers of two.

        Args:
            scaled_grads: List of tensors of any float dtype, or `None`.
            variables: The variables, one for each gradient, or `None`.
            loss_scale: float32 scalar, shape `()`; by default the present scale.
        """
        if self.scale_is_one:
            return list(scaled_grads)
        reciprocal = ops.divide(1.0, self.loss_scale if loss_scale is None else loss_scale)
        return [
            g if g is None or _keras.overwrites_with_gradient(v) else _backend.scale_gradient(g, reciprocal)
            for g, v in zip(scaled_grads, variables, strict=True)
        ]

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
        traces = _backend.traces()
        with ended_update(self, traces) as facts:
            variables = self._checked_variables(grads, trainable_variables)
            check_loss_was_scaled(self, facts)
            self._warn_of_lost_guard(facts.is_guarded)
            self._note_statistics(grads, facts)
            _backend.apply(self, grads, variables, facts)

    def apply_gradients(self, grads_and_vars):
        """`apply` for pairs. Returns the number of applied steps, an integer scalar.

        Args:
            grads_and_vars: Pairs of a scaled gradient and its variable.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> grads = optimizer.get_unscaled_gradients([keras.ops.array(512.0)])
        >>> int(optimizer.apply_gradients([(grads[0], keras.Variable(1.0))]))
        1
        """
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

        Raises:
            ValueError: If the optimizer is not built, or the numbers of values are not those of its variables.

        Example (JAX):

        >>> import jax
        >>> variable = keras.Variable(3.0)
        >>> optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.25))
        >>> optimizer.build([variable])
        >>> values, state = [variable.value], [v.value for v in optimizer.variables]
        >>> def scaled_loss(values, state):
        ...     with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state))):
        ...         return optimizer.scale_loss(2.0 * values[0])
        >>> scaled_grads = jax.grad(scaled_loss)(values, state)
        >>> values, state = optimizer.stateless_apply(state, scaled_grads, values)
        >>> float(values[0])
        2.5
        """
        grads = list(grads)
        traces = _backend.traces()
        with ended_update(self, traces) as facts:
            self._check_values(optimizer_variables, grads, trainable_variables)
            check_loss_was_scaled(self, facts)
            self._warn_of_lost_guard(facts.is_guarded)
            # The state that is passed in says which scale was used.
            facts.loss_scale = None
            with keras.StatelessScope(state_mapping=list(zip(self.variables, optimizer_variables, strict=True))):
                self._note_statistics(grads, facts)
            return _backend.stateless_apply(self, list(optimizer_variables), grads, list(trainable_variables), facts)

    def _check_values(self, optimizer_variables, grads, trainable_variables):
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
        _check_some_gradient(grads)

    def _note_statistics(self, grads, facts):
        if facts.wants_statistics:
            scale = None if facts.grads_are_unscaled or self.scale_is_one else self.loss_scale
            self.facts.statistics = gradient_statistics(grads, scale)

    @property
    def facts(self) -> StepFacts:
        """What is known of the step that is under way, on this replica."""
        return self.facts_of_replicas.here

    @facts.setter
    def facts(self, facts: StepFacts):
        self.facts_of_replicas.here = facts

    @property
    def trainable_variables(self) -> list:
        """The model variables this optimizer was built on."""
        return _keras.optimizer_trainable_variables(self.inner_optimizer)

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
        _check_some_gradient(grads)
        return variables

    def decide(self, facts, grads_are_finite, loss_is_finite=None) -> tuple[Decision, list]:
        """Returns what a call of `apply` does, and `(variable, value)` for each of this optimizer's own.

        Args:
            facts: The `StepFacts` of the step.
            grads_are_finite: bool scalar, shape `()`, for all replicas.
            loss_is_finite: bool scalar, shape `()`, or `None` where it is not known.
        """
        # A batch without rows is skipped as one whose loss is not finite is, whatever it computes: the scale stays.
        forward_is_good, lost_its_loss = loss_is_finite, None
        if loss_is_finite is not None:
            lost_its_loss = scalars.logical_not(loss_is_finite)
        if facts.batch_has_rows is not True:
            forward_is_good = facts.batch_has_rows
            if loss_is_finite is not None:
                forward_is_good = scalars.logical_and(loss_is_finite, facts.batch_has_rows)
                # No loss was computed.
                lost_its_loss = scalars.logical_and(lost_its_loss, facts.batch_has_rows)
        decide = single_step if self.window is None else self.window.decide
        decision = decide(grads_are_finite, forward_is_good)
        # Copies: a rule may return a value under another name, and variables are assigned in place.
        state = {key: ops.copy(variable.value) for key, variable in self._state.items()}
        rule_state = {key: state[key] for key in self._rule.initial_state()}
        moved = self._rule.next_state(rule_state, decision.scale_is_finite)
        if decision.scale_moves is not True:
            moved = {key: scalars.where(decision.scale_moves, value, state[key]) for key, value in moved.items()}
        values = [(self._state[key], value) for key, value in moved.items()] + decision.values
        return decision, values + self._counted(facts, decision.is_accepted, lost_its_loss)


def _check_some_gradient(grads):
    """Raises the error of Keras' optimizers, which they raise when half of a step is taken."""
    if grads and all(grad is None for grad in grads):
        raise ValueError(
            "No gradients provided for any variable. Received: `None` for each of them. Pass gradients of a loss that "
            "depends on at least one of the variables."
        )
