"""`LossScaleOptimizer`: holds the loss scale's state and lets only finite steps reach the optimizer inside."""

import functools
import warnings
import weakref
from typing import Any

import keras
from keras import ops

from mpkeras import _keras
from mpkeras.distribution import distribution_backend
from mpkeras.policies.dtypes import SMALL_DTYPE, check_slot_dtype
from mpkeras.policies.loss_scaling import FixedLossScale, LossScale, number, scalars
from mpkeras.scaling import files
from mpkeras.scaling.arguments import check_parts, checked_inner_optimizer, refuse_inner_arguments, rule_from_arguments
from mpkeras.scaling.facts import (
    FactsOfReplicas,
    StepFacts,
    check_loss_was_scaled,
    ended_update,
    gradient_statistics,
)
from mpkeras.scaling.record import Record
from mpkeras.scaling.small_state import Rounding, parts_of, replaced_methods, shapes_of_slots, slot_dtypes
from mpkeras.scaling.window import Decision, GradientWindow, add_number, checked_steps, single_step

if keras.backend.backend() == "tensorflow":
    from mpkeras.scaling import _tensorflow as _backend
elif keras.backend.backend() == "jax":
    from mpkeras.scaling import _jax as _backend  # type: ignore[no-redef]
else:
    from mpkeras.scaling import _torch as _backend  # type: ignore[no-redef]


_alive: weakref.WeakSet = weakref.WeakSet()
# Functions of an optimizer and its variables: called with its first update in a loop that mpkeras does not run.
ON_FIRST_UNGUARDED_UPDATE: list = []


def _of_inner(name: str) -> property:
    def read(self):
        return getattr(self.inner_optimizer, name)

    def write(self, value):
        # Keras' constructor sets its neutral defaults before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=f"`{name}` of the inner optimizer.")


def _saved_as_stock(optimizer_class):
    """Registers the wrapper with Keras, and lets files name it so that plain Keras finds its own wrapper."""
    # Keras writes the module and the name of `obj.__class__`, and the name that it is registered under. When it reads,
    # the registered name comes first; where nobody has registered it, the class in the module is taken, if the module
    # is one of Keras' own. It has to be the module that defines the class, as for Keras' own Functional models: under
    # the public name `keras.optimizers.LossScaleOptimizer` Keras 3.15.1 refuses a config with another registered name.
    stock = keras.optimizers.LossScaleOptimizer
    written = type(stock.__name__, (optimizer_class,), {"__module__": stock.__module__})
    register = keras.saving.register_keras_serializable("mpkeras", stock.__name__)
    # Two classes of one name: the last one is what the name stands for.
    register(written)
    optimizer_class._written_class = written
    return register(optimizer_class)


@_saved_as_stock
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Scales the loss, unscales the gradients, and skips every step that is not finite.

    A drop-in for `keras.optimizers.LossScaleOptimizer` and for the one of tf.keras. On each step the
    gradients are checked with one float32 sum each (all replicas together), multiplied by the reciprocal of
    the scale, and handed to `inner_optimizer`: clipping, weight decay, averages, accumulation and learning
    rate schedules see unscaled gradients and applied steps only. A step whose loss or gradients are not
    finite changes no variable but this optimizer's own. The scale backs off after it, unless the unscaled
    loss itself was not finite: then the forward pass is at fault, and no scale cures it.

    A gradient whose float32 *sum* overflows (values near 1e38) counts as not finite.

    In a loop of your own `mpkeras.apply_policy(model)` goes before the first step: an optimizer knows no layers, and
    so cannot keep those in float32 that the policy names. Where they were made under `mpkeras.set_global_policy` or
    `mpkeras.policy_scope` and compute in 16 bits, the first update names them in a warning.

    Args:
        inner_optimizer: A Keras optimizer, its name or its configuration.
        initial_scale: The first loss scale; with `dynamic=False` the only one. Default 2**15.
        dynamic_growth_steps: Finite steps in a row before the scale doubles. Default 2000.
        name: Name of the optimizer.
        loss_scale: `"dynamic"`, a number (a fixed scale), or a `mpkeras.LossScale`.
        dynamic: `False` for a fixed scale, as in tf.keras.
        on_overflow: With `gradient_accumulation_steps` on the inner optimizer, what a step that is not finite
            takes from the update: itself (`"drop_micro"`, the default) or all of it (`"drop_window"`).
        slot_dtype: The dtype of what the inner optimizer keeps beside each weight (moments, accumulators):
            `"bfloat16"`, `"float32"`, or `"auto"`, that of the weight; `None` is `"auto"`. The inner optimizer computes
            in float32 in any case, and each value that it assigns to a bfloat16 variable is rounded
            stochastically: up or down with the probability of its distance. Moving averages of the
            weights and sums of accumulated gradients stay in float32.
        all_reduce_dtype: `"float16"`, `"bfloat16"` or `"float32"`: under a `tf.distribute` strategy the scaled
            gradients are summed over replicas in this dtype, as with `Policy(reduce_dtype=...)`, and a sum that
            overflows is a skipped step. Clipping then sees the sum, where Keras clips each replica's part. By default
            they are summed as they are.
        **kwargs: Arguments of other Keras optimizers, with their neutral values only.

    Attributes:
        dynamic_scale: float32 variable of shape `()`, the loss scale (once built).
        step_counter: integer variable of shape `()`, finite steps since the scale last changed (once built).

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
        bfloat16 weights and stochastic rounding: Zamirai et al., 2021, https://arxiv.org/abs/2010.06192.
    """

    built: bool
    window: GradientWindow | None = None
    record: Record

    def __init__(
        self,
        inner_optimizer,
        initial_scale: float | None = None,
        dynamic_growth_steps: int | None = None,
        name: str | None = None,
        *,
        loss_scale: str | float | LossScale | None = "dynamic",
        dynamic: bool | None = None,
        on_overflow: str | None = None,
        slot_dtype: str | None = None,
        all_reduce_dtype: str | None = None,
        **kwargs,
    ) -> None:
        refuse_inner_arguments(kwargs)
        slot_dtype = check_slot_dtype("auto" if slot_dtype is None else slot_dtype)
        _backend.check_all_reduce_dtype(all_reduce_dtype)
        inner_optimizer = checked_inner_optimizer(inner_optimizer)
        rule = rule_from_arguments(initial_scale, dynamic_growth_steps, loss_scale, dynamic)
        factor = inner_optimizer.loss_scale_factor
        # A whole rule is a decision.
        if factor is not None and not isinstance(loss_scale, LossScale):
            warnings.warn(
                f"`loss_scale_factor={factor}` of the inner optimizer gives way to {rule!r}, or the loss would be "
                f"scaled twice. For a fixed scale pass `loss_scale={factor}` instead.",
                stacklevel=2,
            )
        super().__init__(inner_optimizer, initial_scale=rule.initial_scale, name=name)
        # Keras' constructor takes it from the inner optimizer, which is the user's. It is out of force in `apply`.
        inner_optimizer.loss_scale_factor = factor
        self._rule = rule
        self.record = Record()
        self.facts_of_replicas = FactsOfReplicas()
        self._saved_beside = _keras.SavedBeside(self)
        # Not in `build`: a train step is traced with these counters before it builds the optimizer.
        self._skipped_steps = self._add_scalar("skipped_steps", 0)
        self._consecutive_skips = self._add_scalar("consecutive_skips", 0)
        # Flags are 0 or 1: Keras' `OrbaxCheckpoint` stores no bools.
        self._last_step_skipped = self._add_scalar("last_step_skipped", 0)
        self._nonfinite_losses = self._add_scalar("nonfinite_losses", 0)
        self._skipped_in_step = self._add_scalar("skipped_in_step", 0)
        self._accepted_in_step = self._add_scalar("accepted_in_step", 0)
        # The variables that the rule moves.
        self._state: dict = {}
        self._slot_dtype = slot_dtype
        self.all_reduce_dtype = all_reduce_dtype
        _alive.add(self)
        self._take_over_accumulation(on_overflow)

    # ---------------------------------------------------------------------------------------------- state

    def build(self, variables) -> None:
        """Creates the state for `variables`, and the inner optimizer's unless it has been built before.

        Args:
            variables: List of the trainable `keras.Variable`s.

        Raises:
            ValueError: If a part of a `MultiOptimizer` accumulates gradients by itself.
        """
        if self.built:
            return
        self._warn_of_float16(variables)
        check_parts(self.inner_optimizer)
        # Within a traced step, too, once and not in it: what `build` assigns (ScheduleFreeAdamW starts from the
        # weights) must not become part of every step.
        with _backend.build_scope():
            self.make_scale_state()
            has_trained = self.inner_optimizer.built
            if not has_trained:
                self._build_inner(list(variables))
            self.store_slots()
            if not has_trained:
                # The first update that counts overwrites them; a callback may swap them in before it.
                for part in parts_of(self.inner_optimizer):
                    _keras.begin_averages(part)
            if self.window is not None:
                self.window.build(self, self.trainable_variables)
                # Of one that is new there is nothing to take, and a `tf.train.Checkpoint` may have filled the window.
                if has_trained:
                    self.window.take_sums_of(self.inner_optimizer)
            distribution_backend.split_slots(self.variables, self.trainable_variables)
        # Not `super().build`: it would read `use_ema` and `gradient_accumulation_steps` of the inner
        # optimizer through this one and create averages and accumulators a second time.
        self.built = True

    def _warn_of_float16(self, variables):
        narrow = [v for v in variables if keras.backend.standardize_dtype(v.dtype) == "float16"]
        if not narrow:
            return
        names = [getattr(v, "path", v.name) for v in narrow[:3]]
        warnings.warn(
            f"`{self.name}` is built on {len(narrow)} trainable variables of float16, {names} among them: small "
            "updates are lost there, and Adam's epsilon of 1e-8 is 0. Train float32 variables, or bfloat16 ones, which "
            "are rounded stochastically: build the model under 'mixed_float16' or 'bfloat16', or call "
            "`mpkeras.apply_policy(model, 'mixed_float16', float32_variables=True)` before the optimizer is built.",
            stacklevel=3,
        )

    # ---------------------------------------------------------------------------------------------- small state

    @property
    def slot_dtype(self) -> str:
        """The dtype of what the inner optimizer keeps beside each weight: `"auto"` is that of the weight.

        Setting it converts a built optimizer with its state. On TensorFlow a `tf.function` of your own, and the train
        function of a compiled model that is not prepared, hold the state as it was: make them anew.
        """
        return self._slot_dtype

    @slot_dtype.setter
    def slot_dtype(self, value):
        check_slot_dtype(value)
        self._slot_dtype, self.record.slots_are_chosen_by_prepare = value, False
        if self.built:
            self.store_slots()

    def _build_inner(self, variables):
        """Builds the inner optimizer with its slots in `slot_dtype` from the start: in float32 they need more."""
        shapes = shapes_of_slots(variables)

        def slot_maker(part):
            add_variable = part.add_variable

            @functools.wraps(add_variable)
            def add_slot(shape, initializer="zeros", dtype=None, *args, **kwargs):
                is_slot = tuple(shape) in shapes and "float" in keras.backend.standardize_dtype(dtype)
                return add_variable(shape, initializer, self._slot_dtype if is_slot else dtype, *args, **kwargs)

            # Copies of the weights begin in their dtype.
            is_as_made = self._slot_dtype == "auto" or _keras.follows_copies(part)
            return {} if is_as_made else {"add_variable": add_slot}

        excluded = self.record.excluded_from_weight_decay
        missing = self._exclude_again([(self.inner_optimizer, variables)], excluded[:1])
        with replaced_methods(self.inner_optimizer, slot_maker):
            self.inner_optimizer.build(variables)
        parts = [(part, _keras.optimizer_trainable_variables(part)) for part in parts_of(self.inner_optimizer)[1:]]
        missing += self._exclude_again(parts, excluded[1:])
        self.record.excluded_from_weight_decay = []
        if missing:
            warnings.warn(
                f"`{self.name}` was saved with weights that do not decay, and {missing[:3]} among them are not where "
                "they were: they decay now. Before the optimizer is built, call `optimizer.exclude_from_weight_decay`.",
                stacklevel=4,
            )

    @staticmethod
    def _exclude_again(parts, exclusions) -> list:
        """Excludes from weight decay what a config says; returns the names of what is not found."""
        pairs = [pair for pair in zip(parts, exclusions, strict=False) if pair[1]]
        missing = [_keras.exclude_again(part, told, variables) for (part, variables), told in pairs]
        return [name for names in missing for name in names]

    def store_slots(self):
        """Stores each slot in `slot_dtype`, its value kept, or as `slot_dtypes` says."""
        for part in parts_of(self.inner_optimizer):
            for variable, dtype in slot_dtypes(part, self._slot_dtype):
                if dtype in ("float32", SMALL_DTYPE) and dtype != _keras.stored_dtype(variable):
                    _keras.retype(variable, dtype)

    def finalize_variable_values(self, var_list) -> None:
        """Gives the weights their averages, where the inner optimizer keeps them (`use_ema`). `fit` ends with it.

        Before the first update there are no averages yet, and the weights stay as they are.

        Args:
            var_list: List of the `keras.Variable`s that the optimizer was built on, in that order.

        Example:

        >>> inner_optimizer = keras.optimizers.SGD(2.0, use_ema=True, ema_momentum=0.75)
        >>> optimizer = mpkeras.LossScaleOptimizer(inner_optimizer, loss_scale=1.0)
        >>> variable = keras.Variable([8.0], dtype="bfloat16")
        >>> for _ in range(2):
        ...     optimizer.apply([keras.ops.array([1.0])], [variable])
        >>> optimizer.finalize_variable_values([variable])
        >>> float(keras.ops.convert_to_numpy(variable)[0])  # 6 after one step, 4 after two: 0.75 * 6 + 0.25 * 4
        5.5
        """
        # Where an error ends `fit` on JAX, Keras asks for them while no variable has a value.
        if _keras.is_purged(self._inner_calls):
            return
        is_known = not _backend.traces() and not _keras.in_stateless_scope()
        if is_known and not number(self._inner_calls):
            # Every step was skipped. Averages begin at zero with the first update: there is nothing to give.
            return
        is_small = bool(self.rounding().small)

        def portable(part):
            # TensorFlow's own form assigns native variables, of float32 to those of bfloat16, and TensorFlow refuses.
            name = _keras.OVERWRITE_METHOD
            return {name: _keras.portable_method(part, name)} if is_small else {}

        with replaced_methods(self.inner_optimizer, portable):
            self.inner_optimizer.finalize_variable_values(var_list)
        _backend.unshare([*self.trainable_variables, *self.variables])

    def rounding(self) -> Rounding:
        """Returns how the assignments of one update are rounded; its `small` is empty where none is."""
        inner = self.inner_optimizer
        # A user's own optimizer may hold another one, whose variables it does not list.
        listed = [*self.trainable_variables, *(v for part in parts_of(inner) for v in part.variables)]
        variables = {id(v): v for v in listed if isinstance(v, keras.Variable)}.values()
        return Rounding(variables, _keras.step_count(inner))

    def make_scale_state(self) -> None:
        """Makes the variables of the loss scale, unless they are there; `build` makes them with all others.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> optimizer.make_scale_state()
        >>> float(optimizer.dynamic_scale), optimizer.built
        (1024.0, False)
        """
        if self._state:
            return
        # These two come first, in stock Keras' order.
        initial_state = {"step_counter": 0, "dynamic_scale": 1.0} | self._rule.initial_state()
        # Keras' "int": int64 on TensorFlow, int32 on JAX and torch, as its own counter.
        self._state = {
            key: self._add_scalar(key, value, "int" if key == "step_counter" else "int32")
            for key, value in initial_state.items()
        }
        self.step_counter, self.dynamic_scale = self._state["step_counter"], self._state["dynamic_scale"]

    def _add_scalar(self, name: str, value, int_dtype: str = "int32"):
        dtype = {bool: "bool", int: int_dtype, float: "float32"}[type(value)]
        return add_number(self, name, value, dtype)

    @property
    def variables(self) -> list:
        """The variables of this optimizer and of the inner one, in a fixed order."""
        # `build` adds to the end alone, as in Keras' optimizers: a callback may have kept the values before `fit`.
        of_build = [*self._state.values(), *([] if self.window is None else self.window.sums)]
        known = {id(variable) for variable in of_build}
        before_build = [variable for variable in self._own_variables() if id(variable) not in known]
        return [*before_build, *self.inner_optimizer.variables, *of_build]

    @property
    def variables_as_stored(self) -> list:
        """The same variables, in the order in which files and `mpkeras.state_dict` number them."""
        return [*self._own_variables(), *self.inner_optimizer.variables]

    def _own_variables(self) -> list:
        # Variables of the window come last among its own, although its counters are made first.
        of_window = [] if self.window is None else self.window.variables
        known = {id(variable) for variable in of_window}
        of_wrapper = [variable for variable in self._variables if id(variable) not in known]
        return [*of_wrapper, *of_window]

    @property
    def trainable_variables(self) -> list:
        """The model variables this optimizer was built on."""
        return _keras.optimizer_trainable_variables(self.inner_optimizer)

    @property
    def loss_scale(self):
        """The loss scale now: float32 scalar tensor of shape `()`."""
        # A scale that never moves is not read where it is: JAX may have given its array to the last step.
        if not (self._state and self._rule.dynamic):
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

    @initial_scale.setter
    def initial_scale(self, value):
        self._change_rule("initial_scale", value)

    @property
    def dynamic_growth_steps(self):
        """Finite steps in a row before the scale grows; `None` for a rule without."""
        return getattr(self._rule, "dynamic_growth_steps", None)

    @dynamic_growth_steps.setter
    def dynamic_growth_steps(self, value):
        self._change_rule("dynamic_growth_steps", value)

    def _change_rule(self, name: str, value):
        if "_rule" not in self.__dict__:
            # Keras' constructor sets its own before there is a rule.
            return
        config = self._rule.get_config()
        if name == "initial_scale" and isinstance(self._rule, FixedLossScale):
            name = "scale"
        if name not in config:
            raise ValueError(
                f"Expected a loss scale with `{name}`. Received: {name}={value} for {self._rule!r}. "
                "Create the optimizer with `loss_scale=mpkeras.DynamicLossScale(...)`."
            )
        self._rule = self._rule.from_config({**config, name: value})
        if not self.built:
            for key, initial in self._rule.initial_state().items():
                if key in self._state:
                    self._state[key].assign(initial)

    @property
    def scale_is_one(self) -> bool:
        """Whether there is nothing to scale: the steps are checked only."""
        return isinstance(self._rule, FixedLossScale) and self._rule.scale == 1.0

    @property
    def scale_state(self) -> dict:
        """The variables that the loss-scaling rule moves, by name; empty before the first step or `build`."""
        return dict(self._state)

    @property
    def skipped_steps(self):
        """Steps left out so far: integer variable of shape `()`."""
        return self._skipped_steps

    @property
    def consecutive_skips(self):
        """Steps left out since the last applied one: integer variable of shape `()`."""
        return self._consecutive_skips

    @property
    def nonfinite_losses(self):
        """Steps left out as the unscaled loss itself was not finite, where that is known: integer variable."""
        return self._nonfinite_losses

    @property
    def last_step_skipped(self):
        """Whether the last step was left out: bool scalar tensor of shape `()`."""
        # A value: a Keras variable cannot be asked `if optimizer.last_step_skipped`.
        return ops.not_equal(self._last_step_skipped.value, 0)

    @property
    def accepted_steps(self):
        """Counts the calls of `apply` that were not skipped; with accumulation, more than the updates."""
        return self._inner_calls if self.window is None else self.window.accepted_steps

    # ------------------------------------------------------------------------------------------ the step

    def scale_loss(self, loss) -> Any:
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

    def get_scaled_loss(self, loss) -> Any:
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

    def get_unscaled_gradients(self, grads) -> list:
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
        return self.unscale(grads, [None] * len(grads))

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

    def apply(self, grads, trainable_variables=None) -> None:
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
        with ended_update(self, _backend.traces()) as facts:
            variables = self._checked_variables(grads, trainable_variables)
            check_loss_was_scaled(self, facts)
            self.record.warn_of_lost_guard(facts.is_guarded)
            self._look_at_own_loop(facts.is_guarded, variables)
            self._note_statistics(grads, variables, facts)
            _backend.apply(self, grads, variables, facts)

    def apply_gradients(self, grads_and_vars) -> Any:
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

    def stateless_apply(self, optimizer_variables, grads, trainable_variables) -> tuple:
        """`apply` without side effects, for JAX and torch.

        The gradients must be those of a loss scaled with the scale in `optimizer_variables`.

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
        with ended_update(self, _backend.traces()) as facts:
            self._check_values(optimizer_variables, grads, trainable_variables)
            check_loss_was_scaled(self, facts, is_stateless=True)
            self.record.warn_of_lost_guard(facts.is_guarded)
            self._look_at_own_loop(facts.is_guarded, self.trainable_variables)
            variables, own_variables = self.trainable_variables, self.variables
            mapping = [
                *zip(variables, trainable_variables, strict=True),
                *zip(own_variables, optimizer_variables, strict=True),
            ]
            with keras.StatelessScope(state_mapping=mapping):
                self._note_statistics(grads, variables, facts)
            new_value = _backend.new_values(self, mapping, grads, variables, facts)
            return [new_value(variable) for variable in variables], [new_value(variable) for variable in own_variables]

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

    def _note_statistics(self, grads, variables, facts):
        if facts.wants_statistics:
            scale = None if facts.grads_are_unscaled or self.scale_is_one else self.loss_scale
            self.facts.statistics = gradient_statistics(_backend.of_all_replicas(grads, variables), scale)

    @property
    def facts(self) -> StepFacts:
        """The facts of the step that is under way, on this replica."""
        return self.facts_of_replicas.here

    @facts.setter
    def facts(self, facts: StepFacts):
        self.facts_of_replicas.here = facts

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
            self.record.hears_losses = True
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

    @property
    def step_outcome(self) -> tuple:
        """Whether a call of `apply` was skipped, and whether one was not, since the guarded step was opened.

        Two int32 variables of shape `()`, 0 or 1: whoever guards a step clears them at its end. No part of `StepFacts`,
        as an update may happen in a function, a branch or a loop that is compiled by itself: only variables reach the
        step around.
        """
        return self._skipped_in_step, self._accepted_in_step

    def _counted(self, facts, is_accepted, lost_its_loss) -> list:
        """Returns `(variable, value)` for each counter after a step.

        `lost_its_loss`: whether the loss was computed and is not finite, a bool scalar; `None` if unknown.
        """
        is_skipped = scalars.logical_not(is_accepted)
        skipped, row, lost = self._skipped_steps, self._consecutive_skips, self._nonfinite_losses
        values = [(skipped, skipped.value + ops.cast(is_skipped, skipped.dtype))]
        values.append((row, scalars.where(is_accepted, scalars.zeros_like(row.value), row.value + 1)))
        values.append((self._last_step_skipped, ops.cast(is_skipped, "int32")))
        if lost_its_loss is not None:
            values.append((lost, lost.value + ops.cast(lost_its_loss, lost.dtype)))
        if facts.wants_outcome:
            pairs = zip(self.step_outcome, (is_skipped, is_accepted), strict=True)
            values += [(variable, ops.maximum(variable.value, ops.cast(flag, "int32"))) for variable, flag in pairs]
        return values

    # ---------------------------------------------------------------------------------------- accumulation

    def _take_over_accumulation(self, on_overflow):
        """Sums the gradients here instead of in the inner optimizer, which would count skipped calls."""
        # The setting of the inner optimizer stays: it is the user's, and the next wrapper reads it, too.
        steps = self.inner_optimizer.gradient_accumulation_steps
        if steps is not None:
            self.window = GradientWindow(self, steps, on_overflow or "drop_micro")
        elif on_overflow is not None:
            raise ValueError(
                "Expected `on_overflow` with an inner optimizer that accumulates gradients. Received: "
                f"on_overflow={on_overflow!r} without. Set `gradient_accumulation_steps` on it."
            )

    def accumulate(self, steps: int, on_overflow: str = "drop_micro"):
        """Updates at every `steps`-th call of `apply` only, with the mean of the gradients of the calls.

        The same as `gradient_accumulation_steps=steps` on the inner optimizer.

        Args:
            steps: At least 1, in calls of `apply`; 1 updates at every call.
            on_overflow: A call whose loss or gradients are not finite takes itself from the update
                (`"drop_micro"`), or all of it (`"drop_window"`).

        Raises:
            ValueError: If an argument is out of its range, or this optimizer accumulates otherwise already.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=1.0, dynamic=False)
        >>> optimizer.accumulate(2)
        >>> variable = keras.Variable(5.0)
        >>> for grad in (1.0, 3.0):
        ...     optimizer.apply([keras.ops.array(grad)], [variable])
        >>> variable.numpy().item()
        3.0
        """
        steps = checked_steps(steps, on_overflow)
        now = (1, on_overflow) if self.window is None else (self.window.steps, self.window.on_overflow)
        if now == (steps, on_overflow):
            return
        if self.built and self.window is not None:
            raise ValueError(
                "Expected a built optimizer to go on accumulating as it does: its sums may be half full. Received: "
                f"steps={steps}, on_overflow={on_overflow!r} for {now[0]} steps and {now[1]!r}. "
                "Create a new optimizer."
            )
        if steps != now[0]:
            # The user's own number counts, whatever a policy asked for.
            self.record.parts = 1
        if self.window is not None:
            self.window.steps, self.window.on_overflow = steps, on_overflow
            return
        self.window = GradientWindow(self, steps, on_overflow)
        if self.built:
            self.window.build(self, self.trainable_variables)
            self.window.take_sums_of(self.inner_optimizer)

    @property
    def _inner_calls(self):
        """The counter of the inner optimizer's steps: its calls, where that one is set to accumulate."""
        return _keras.step_count(self.inner_optimizer)

    @property
    def gradient_accumulation_steps(self):
        """Calls of `apply` to an update; `None` where each updates."""
        return None if self.window is None or self.window.steps == 1 else self.window.steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps):
        # Keras' constructor sets its neutral default before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            self.accumulate(1 if steps is None else steps, self.window.on_overflow if self.window else "drop_micro")

    # ------------------------------------------------------------------------- attributes of the inner optimizer

    # Keras' own wrapper passes `learning_rate` and `iterations` on, and reads the rest as its own neutral defaults.
    weight_decay = _of_inner("weight_decay")
    clipnorm = _of_inner("clipnorm")
    global_clipnorm = _of_inner("global_clipnorm")
    clipvalue = _of_inner("clipvalue")
    use_ema = _of_inner("use_ema")
    ema_momentum = _of_inner("ema_momentum")
    ema_overwrite_frequency = _of_inner("ema_overwrite_frequency")
    loss_scale_factor = _of_inner("loss_scale_factor")

    def __getattr__(self, name):
        # Only reached when the wrapper has no such attribute.
        if name.startswith("_") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name, value):
        # A public name that only the inner optimizer has is written there.
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        inner_optimizer = self.__dict__.get("inner_optimizer")
        if not is_own and inner_optimizer is not None and hasattr(inner_optimizer, name):
            setattr(inner_optimizer, name, value)
        else:
            super().__setattr__(name, value)

    def exclude_from_weight_decay(self, var_list: list | None = None, var_names: list[str] | None = None) -> None:
        # As in Keras, a call takes the place of what was said before.
        self.record.excluded_from_weight_decay = []
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def set_weights(self, weights) -> None:
        """Sets the values of `variables`, the inner optimizer's included.

        Args:
            weights: One array for each of `variables`, of its shape, in their order.

        Raises:
            ValueError: If the optimizer is not built, or the number of arrays is not that of `variables`.

        Example:

        >>> first, second = (mpkeras.LossScaleOptimizer("sgd", initial_scale=scale) for scale in (8.0, 4.0))
        >>> for optimizer in (first, second):
        ...     optimizer.build([keras.Variable(1.0)])
        >>> first.set_weights([keras.ops.convert_to_numpy(variable) for variable in second.variables])
        >>> float(first.loss_scale)
        4.0
        """
        if not self.built:
            raise ValueError(
                "Expected a built optimizer. Received: `set_weights` on one that is not. "
                "Call `optimizer.build(trainable_variables)` first."
            )
        if len(weights) != len(self.variables):
            raise ValueError(
                f"Expected {len(self.variables)} weights. Received: {len(weights)}. "
                "Pass the values of `optimizer.variables`, in their order."
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)

    def _look_at_own_loop(self, in_guarded_step: bool, variables):
        if self.record.had_update:
            return
        self.record.had_update = True
        if not in_guarded_step:
            for look in ON_FIRST_UNGUARDED_UPDATE:
                look(self, variables)

    # ------------------------------------------------------------------------------------ configuration, files

    @property  # type: ignore[misc]
    def __class__(self):
        # For whoever writes the class into a file: the one place where Keras asks is `obj.__class__`. Two other ways
        # were tried (Keras 3.15.1). With stock's module as `__module__` of the class itself, `print` and `help` call it
        # Keras' own, and `pickle` does not find it. Under a name in Keras' list of public names, which leaves class and
        # object as they are, `keras.optimizers.deserialize` makes stock Keras' optimizer of the config.
        # A class of the user's that extends ours is written as what it is.
        return vars(type(self)).get("_written_class", type(self))

    def get_config(self) -> dict:
        return files.config_of(self)

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return files.optimizer_from(cls, config, custom_objects)

    def save_own_variables(self, store) -> None:
        """Saves what stock Keras' `LossScaleOptimizer` would, by number; the other variables lie beside it, by name.

        Args:
            store: The open group of a file, which Keras hands over. In a dictionary, beside which there is nothing,
                the other variables are stored, too.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> optimizer.build([keras.Variable(1.0)])
        >>> store = {}
        >>> optimizer.save_own_variables(store)
        >>> int(store["skipped_steps"]), float(store["dynamic_scale"])
        (0, 1024.0)
        """
        files.save_numbered(self, store)
        if isinstance(store, dict):
            self._saved_beside.save_own_variables(store)

    def load_own_variables(self, store) -> None:
        """Loads what this class saved, what stock Keras' LossScaleOptimizer saved, or a plain optimizer.

        Args:
            store: The open group of a file, which Keras hands over: arrays by `"0"`, `"1"`, ...; or a dictionary
                that `save_own_variables` has filled.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> optimizer.build([keras.Variable(1.0)])
        >>> store = {}
        >>> optimizer.save_own_variables(store)
        >>> _ = optimizer.dynamic_scale.assign(2.0)
        >>> optimizer.load_own_variables(store)
        >>> float(optimizer.loss_scale)
        1024.0
        """
        is_dict = isinstance(store, dict)
        numbered = {key: value for key, value in store.items() if key.isdigit()} if is_dict else store
        left_out = []
        if not files.load_numbered(self, numbered):
            files.warn_of_skipped(self, numbered)
            if not self.built:
                # The scale is not there yet, to which the counters belong.
                left_out = list(self._variables_beside().values())
            elif self.window is not None:
                # Half a window, without the sums of weights that the file does not have.
                left_out = self.window.variables
        self._saved_beside.left_out = {variable.name for variable in left_out}
        if is_dict:
            self._saved_beside.load_own_variables(store)

    def _variables_beside(self) -> dict:
        """Returns the variables of this optimizer, by the names that files give them."""
        counters = (self._skipped_steps, self._consecutive_skips, self._last_step_skipped, self._nonfinite_losses)
        variables = {variable.name: variable for variable in counters}
        # Of a rule of the user's own, too, which may have any names.
        stock = ("step_counter", "dynamic_scale")
        variables |= {key if key in stock else f"rule_{key}": variable for key, variable in self._state.items()}
        if self.window is not None:
            variables |= {variable.name: variable for variable in self.window.variables}
        return variables


def _check_some_gradient(grads):
    """Raises the error of Keras' optimizers, which they raise when half of a step is taken."""
    if grads and all(grad is None for grad in grads):
        raise ValueError(
            "No gradients provided for any variable. Received: `None` for each of them. Pass gradients of a loss that "
            "depends on at least one of the variables."
        )


def optimizers_alive() -> list:
    """Returns every `LossScaleOptimizer` of this process that is still in use, for those that look for one."""
    return list(_alive)
