"""`make_train_step`: the train step of a custom loop, with the same handling of state as `fit`."""

import inspect

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras._arguments import check_switch, checked_path
from mpkeras.conversion.converter import layer_converter
from mpkeras.conversion.graphs import refresh_graphs
from mpkeras.conversion.last import converted_by, last_conversion, times_stored
from mpkeras.conversion.outputs import end_in_float32
from mpkeras.conversion.plan import layers_of
from mpkeras.conversion.store_weights import store_weights
from mpkeras.conversion.undo import converting
from mpkeras.distribution import distribution_backend
from mpkeras.distribution.travel import Travel
from mpkeras.policies.loss_scaling import scalars
from mpkeras.policies.policy import accumulating
from mpkeras.policies.rules import serialized_for_copies
from mpkeras.scaling.arguments import checked_optimizer
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.scaling.small_state import follow_weights
from mpkeras.scaling.window import checked_steps
from mpkeras.training import training_backend
from mpkeras.training.capsule_file import capsule_of_step
from mpkeras.training.data_layers import warn_of_layers_for_the_data
from mpkeras.training.first_batch import is_looked_at, look
from mpkeras.training.inventory import moving_variables, states_held_by
from mpkeras.training.last_step import BEFORE
from mpkeras.training.objective import Objective
from mpkeras.training.prepare import (
    asked_policy,
    check_jit_compile,
    check_model,
    check_switches,
    check_variables,
    chosen_policy,
    rule_for,
    wrapped,
)
from mpkeras.training.retake import FirstSteps
from mpkeras.training.state import load_state_dict, state_dict
from mpkeras.training.unseen_run import native_states_put_back


def make_train_step(
    model,
    optimizer,
    loss_fn,
    *,
    jit_compile: bool | None = None,
    rollback: bool = True,
    accumulate_steps: int | None = None,
    on_overflow: str = "drop_micro",
    metrics=(),
    remat=None,
) -> "TrainStep":
    """Returns a function that trains `model` on one batch: compiled, scaled, checked.

    `step(x, y=None, sample_weight=None)` runs the forward pass in training mode, adds the model's own losses
    (regularizers, `add_loss`) in float32, scales the loss, and updates the model's variables in place. A step
    whose loss or gradients are not finite is skipped: afterwards every variable of the model, the optimizer,
    the metrics and the random generators is as before, and only the loss scale's own state has moved. While no
    step has counted, a batch for which only a guessed dynamic scale is too large is taken again instead. It
    returns a dictionary of scalar tensors:

    - `"loss"`: float32, the unscaled loss of this batch, infinite or NaN where it was.
    - `"loss_scale"`: float32, the scale of the next step.
    - `"skipped"`: bool, whether this step was.
    - one entry for each of `metrics`, over all steps since its `reset_state()`.

    Under a `tf.distribute` strategy and a `keras.distribution` the step runs on all devices, and the results are
    those of the whole batch; of the ranks of torch, each has its own. See docs/many_devices.md.

    Reading one of them waits for the device. Layers keep the dtypes they have, so build the model under a policy or
    call `apply_policy`; only the float32 rules of the policy are applied, as `prepare` does. Layers that are frozen or
    freed later (`layer.trainable`) obey from the next step on. `step.optimizer` is the optimizer that the step uses,
    `step.compiler_ir(x, y)` the text of its program.

    Args:
        model: A `keras.Model` of any kind, compiled or not, built or not.
        optimizer: A Keras optimizer, its name or its configuration. An optimizer that scales no loss is wrapped in a
            `mpkeras.LossScaleOptimizer` when the model computes in float16, and, with `rollback`, to check
            the steps under every other policy.
        loss_fn: A `keras.losses.Loss` or its name, a function `loss_fn(y, y_pred)` that returns a scalar or
            one loss an example, a list or dictionary of these for several outputs (their sum is
            trained), or `None` where the model adds its own losses.
        jit_compile: Whether the step is compiled: by XLA on TensorFlow and JAX, by `torch.compile` on torch;
            otherwise it runs as a graph on TensorFlow and op by op on JAX and torch. By default XLA, where
            the layers allow it and no distribution strategy is there, and on torch op by op: there Keras' layers
            compile in many pieces, the first step takes tens of seconds, and it pays off for some models only.
        rollback: Whether a skipped step leaves no trace. Without it, BatchNormalization statistics, metrics
            and random generators keep what a skipped step did to them, and a model that does not
            compute in float16 is not checked at all.
        accumulate_steps: Calls of the step to one update, with the mean of their gradients, summed in
            float32. The loss scale does not move in between. By default the optimizer's own number times what the plan
            says that the model was converted to (`mpkeras.plan_memory`).
        on_overflow: A call that is not finite takes itself from the update (`"drop_micro"`), or all of it
            (`"drop_window"`).
        metrics: A list of `keras.metrics.Metric`, one alone, or `None`; for several outputs a list or dictionary of
            such lists. A `sample_weight` weighs them, as it does those in `compile(weighted_metrics=...)`.
        remat: The part of the forward pass that is kept for the backward pass, as in `mpkeras.Policy`; by default that
            of the model's policy, or of the file that it was loaded from.

    Returns:
        A `TrainStep`.

    Raises:
        ValueError: If trainable variables are float16, an argument is out of its range, or XLA does not work
            with the model. Model and optimizer are then as before.
        TypeError: If an argument is of a wrong type.

    Example:

    >>> with mpkeras.policy_scope("mixed_float16"):
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    >>> step = mpkeras.make_train_step(model, keras.optimizers.Adam(1e-3), keras.losses.MeanSquaredError())
    >>> for x in ([[1.0, 2.0]], [[np.inf, 2.0]]):  # or a `tf.data.Dataset`, a torch `DataLoader`
    ...     result = step(np.array(x), np.array([[0.1]]))
    ...     print(bool(result["skipped"]), float(result["loss_scale"]))
    False 32768.0
    True 32768.0
    """
    return TrainStep(
        model,
        optimizer,
        loss_fn,
        jit_compile=jit_compile,
        rollback=rollback,
        accumulate_steps=accumulate_steps,
        on_overflow=on_overflow,
        metrics=metrics,
        remat=remat,
    )


class TrainStep:
    """What `make_train_step` returns: called on a batch, it trains.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
    >>> x, y = np.ones((4, 2)), np.ones((4, 1))
    >>> state = step.state_dict()
    >>> loss = float(step(x, y)["loss"])
    >>> step.load_state_dict(state)
    >>> float(step(x, y)["loss"]) == loss
    True
    """

    def __init__(
        self, model, optimizer, loss_fn, *, jit_compile, rollback, accumulate_steps, on_overflow, metrics, remat
    ):
        check_model(model)
        with training_backend.variable_scope(model):
            optimizer = checked_optimizer(optimizer, "optimizer")
        check_switches(jit_compile, rollback)
        checked_steps(1 if accumulate_steps is None else accumulate_steps, on_overflow)
        window = accumulate_steps, on_overflow
        policy = asked_policy(model, None, remat, [optimizer])
        check_variables(model, policy)
        distribution_backend.check_travel(model, policy)
        objective = Objective(loss_fn, metrics)
        jit_compile = _resolved_jit_compile(model, jit_compile)
        distribution_backend.check_program(Travel.of(policy), jit_compile)
        self._parts = StepParts(model, optimizer, objective, jit_compile, rollback, window, policy)
        self._steps = 0
        self._batches = 0
        parts = self._parts
        self._first_steps = FirstSteps(model, lambda: [parts.optimizer] if parts.guards else [], lambda: parts.metrics)
        # The last batch with what its step returned, and the numbers that it changed.
        self._last: tuple | None = None
        with converting(model, refreshes=True):
            self._parts.apply_rules()
            self._compiled = training_backend.CompiledStep(self._parts)
            if training_backend.is_distributed(model) and not self._lacks_variables():
                # While it can be done: a replica in `strategy.run` makes no variables.
                self._build(None, None)

    @property
    def model(self):
        """The model that the step trains."""
        return self._parts.model

    @property
    def optimizer(self):
        """The optimizer that the step uses: yours, or the `LossScaleOptimizer` around it."""
        return self._parts.optimizer

    @property
    def metrics(self) -> list:
        """The metrics that the step updates, in one list."""
        return self._parts.metrics

    def __call__(self, x, y=None, sample_weight=None) -> dict:
        training_backend.check_is_outermost((x, y, sample_weight))
        # Before the step: one that raises is not the one before it, whose batch need not stay in memory either.
        self._last = None
        self._get_ready(x, y)
        if not training_backend.in_replica_context():
            self._batches += 1
            if self._batches == 1:
                warn_of_layers_for_the_data(self.model)
            if is_looked_at(self._batches):
                look(self.model, x, self._batches, again=self._batches > 1)
        return self.run_as_made(x, y, sample_weight)

    def run_as_made(self, x, y=None, sample_weight=None) -> dict:
        """Runs the step as it was made for the last call, whatever has become of the model since.

        For whoever makes steps of one model under several policies, and times them in turn.

        Args:
            x, y, sample_weight: A batch, as the step takes it.

        Returns:
            What the step returns.
        """
        if self._first_steps.are_over or not training_backend.runs_on_host():
            result = self._compiled(x, y, sample_weight)
        else:
            result, _ = self._first_steps.take(lambda: self._compiled(x, y, sample_weight), [])
        self._last = (x, y, sample_weight), result, result.pop(BEFORE)
        self._steps += 1
        return result

    def capsule(self, path) -> int:
        """Writes the step that was skipped just now to a file, for `mpkeras.load_capsule`; returns its size in bytes.

        To be called right after such a step: the state before it is what the model, the optimizer and the metrics hold
        now, and the batch is the one that you gave it, which must not have changed since. The file holds that data, the
        weights and the optimizer's state: see docs/black_box.md before you send one.

        Args:
            path: Where the file goes, `.mpk` by custom; one that is there is replaced. Whole or not at all.

        Raises:
            ValueError: If the last step was not skipped, ran on several replicas or without `rollback`, or its batch
                cannot be held.
            TypeError: If `path` is no path.

        Example:

        >>> import os, tempfile
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
        >>> path = os.path.join(tempfile.mkdtemp(), "failure.mpk")
        >>> if bool(step(np.full((4, 2), np.nan), np.ones((4, 1)))["skipped"]):
        ...     size = step.capsule(path)
        >>> bool(mpkeras.load_capsule(path).run()["skipped"])
        True
        """
        path = checked_path("path", path, "Pass the file to write, `.mpk` by custom.")
        if not self._parts.guards or training_backend.is_distributed(self.model):
            raise ValueError(
                "Expected a step that undoes skipped steps, on one replica: what it leaves is the state before them. "
                f"Received: a step of model '{self.model.name}' with `rollback=False`, or under a distribution "
                "strategy. Make one without."
            )
        if self._last is None or not bool(self._last[1]["skipped"]):
            raise ValueError(
                "Expected a step that was skipped just now: only then is the state before it still there. Received: "
                f"{'no step that came to its end' if self._last is None else 'a step that was applied'}. Call it where "
                '`bool(result["skipped"])`.'
            )
        batch, result, values = self._last
        moving_before = self._parts.unpacked(values)
        number = self._steps - 1
        return capsule_of_step(path, self._parts, moving_before, batch=batch, result=result, number=number)

    def compiler_ir(self, x, y=None, sample_weight=None, *, optimized: bool = True) -> str:
        """Returns the HLO text of the step compiled for this batch. Runs no step.

        Args:
            x, y, sample_weight: A batch, as the step takes it.
            optimized: Whether the text is of what XLA made for this device, or of what it was given.

        Raises:
            ValueError: On torch.
            TypeError: If `optimized` is neither `True` nor `False`.

        Example (TensorFlow and JAX):

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=True)
        >>> "HloModule" in step.compiler_ir(np.ones((4, 2)), np.ones((4, 1)))
        True
        """
        check_switch("optimized", optimized)
        self._get_ready(x, y)
        return self._compiled.compiler_ir(x, y, sample_weight, optimized)

    def temporary_bytes(self, x, y=None, sample_weight=None) -> int | None:
        """Returns the bytes of temporary buffers of the step compiled for this batch; `None` where no compiler tells.

        JAX with `jit_compile` does: what lives in the middle of a step, beside weights and optimizer. After a
        call of the step with such a batch nothing is compiled for it.

        Args:
            x, y, sample_weight: A batch, as the step takes it.

        Example:

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
        >>> step.temporary_bytes(np.ones((4, 2)), np.ones((4, 1))) is None  # nothing is compiled
        True
        """
        self._get_ready(x, y)
        return self._compiled.temporary_bytes(x, y, sample_weight)

    def traced_for(self, device, x, y):
        """Returns the step as JAX traces it for a device that need not be there: see `CompiledStep` in `_jax.py`.

        Args:
            device: The device; `None` for those of the `keras.distribution` in force.
            x, y: Tensors, or anything with shape and dtype, in the structure of a batch.

        Raises:
            ValueError: On a backend that is not JAX.
        """
        if not hasattr(self._compiled, "traced_for"):
            raise ValueError(
                f"Expected Keras on JAX, which compiles for other devices. Received: {keras.backend.backend()}. Call "
                "`mpkeras.forecast`, which has a process of JAX for it."
            )
        self._get_ready(x, y)
        return self._compiled.traced_for(device, x, y)

    def state_dict(self) -> dict:
        """Returns all that the step changes, as NumPy arrays by name: see `mpkeras.state_dict`.

        Model, optimizer with loss scale and half-full window, metrics and random generators: a step that is
        made in a new process, under any global policy, goes on exactly after `load_state_dict`.

        Raises:
            ValueError: If the model is not built.
        """
        return state_dict(*self._state_parts())

    def load_state_dict(self, state) -> None:
        """Gives every variable its value in `state`, or on an error none: see `state_dict`.

        Args:
            state: What `state_dict` returned, or `numpy.load` of the file it was written to with `numpy.savez`.

        Raises:
            ValueError: If the model is not built, or names, shapes or dtypes in `state` are not those of the step.
        """
        model, optimizers, others = self._state_parts()
        load_state_dict(model, state, optimizers, others)

    def _state_parts(self):
        if self.model.built:
            self._build_optimizer()
        return self.model, [self.optimizer], [*self._parts.objective.metric_variables, *self._parts.loss_states]

    def _get_ready(self, x, y):
        if self._parts.is_outdated():
            self._build(x, y)
        self._parts.look_for_frozen_weights()

    def _build(self, x, y):
        """Makes every variable before the step is compiled, which makes none."""
        if training_backend.in_replica_context():
            raise ValueError(
                "Expected a model and metrics that have their variables where the step is called in `strategy.run`. "
                f"Received: model '{self.model.name}' or metrics without. Build the model in the strategy's scope, "
                "or call the step itself, which runs on all replicas."
            )
        with training_backend.variable_scope(self.model):
            lazy = [metric for metric in self.metrics if not _keras.has_all_variables(metric)]
            if self._lacks_variables():
                # torch modules in it move their statistics in inference, too.
                with native_states_put_back(self.model):
                    y_pred = self.model(training_backend.local_tensors(x))
                for metric in lazy:
                    metric.update_state(training_backend.local_tensors(y), y_pred)
                    metric.reset_state()
        # Building may have brought new layers.
        with converting(self.model, refreshes=True):
            self._build_optimizer()
            self._parts.follow_model()
            self._parts.look_for_frozen_weights()

    def _build_optimizer(self):
        self._parts.apply_rules()
        with training_backend.variable_scope(self.model):
            if not self.optimizer.built:
                self.optimizer.build(self.model.trainable_variables)
        variables = self.model.variables + self.optimizer.variables + self._parts.objective.metric_variables
        training_backend.check_scope(self.model, variables)
        training_backend.track_random_states(self.model)

    def _lacks_variables(self) -> bool:
        """Whether the model or a metric makes its variables on the first batch."""
        return not _keras.is_built(self.model) or not all(map(_keras.has_all_variables, self.metrics))


class StepParts:
    """The parts of the backends' steps: model, optimizer, losses and metrics."""

    # Under which their results hold the values of `moving` before the step.
    BEFORE = BEFORE

    def __init__(self, model, optimizer, objective, jit_compile, rollback, window, policy):
        self.model = model
        self.optimizer = optimizer
        self.objective = objective
        self.jit_compile = jit_compile
        self._rollback = rollback
        self._window = window
        self._remat, self._planned_steps = policy.remat, policy.accumulate_steps
        # The policy, the conversion of the model by it, and the function that goes on with that.
        self._converter: tuple | None = None
        self._moving: list | None = None
        # As in `fit`: a model whose `call` takes no `training` is not told.
        takes_training = "training" in inspect.signature(model.call).parameters
        self.call_options = {"training": True} if takes_training else {}
        # The weights that the next step trains, in the order of the model, and their `id`s: while the weights are here,
        # no other one comes to have the `id` of one that is gone.
        self._trained_variables: list = []
        self.trained: tuple = ()
        # The programs, and the key that they are made for beside the weights that they train.
        self._made_for: tuple = ()
        self._programs: dict = {}
        # Before the layers are touched: what is wrong with the optimizer is said here.
        self.wrap_optimizer()

    def options(self) -> dict:
        """Returns the arguments of `make_train_step` that JSON can hold."""
        window = getattr(self.optimizer, "window", None)
        steps, on_overflow = self._window if window is None else (window.steps, window.on_overflow)
        remat = serialized_for_copies(self._remat)
        options = {"jit_compile": self.jit_compile, "rollback": self._rollback, "remat": remat}
        return {**options, "accumulate_steps": steps or 1, "on_overflow": on_overflow}

    @property
    def moving(self) -> list:
        """The variables that a skipped step changes: their values before a step are among what it returns."""
        if not self.guards:
            return []
        if self._moving is None:
            self._moving = moving_variables([self.optimizer], self.metrics)
        return self._moving

    @property
    def loss_states(self) -> list:
        """The variables that the losses hold, as a running mean, and that nothing else of the step lists."""
        states = states_held_by(self.objective.given_losses)
        # Most losses hold none, and to list all variables takes longer.
        lists = (self.model, self.optimizer, *self.metrics) if states else ()
        listed = {id(variable) for holder in lists for variable in holder.variables}
        return [state for state in states if id(state) not in listed]

    def packed(self, values) -> dict:
        """Returns the values of `moving`, those of one dtype in one tensor: each output of a step costs time."""
        groups: dict = {}
        for variable, value in zip(self.moving, values, strict=True):
            groups.setdefault(variable.dtype, []).append(value)
        return {dtype: scalars.stack(group) for dtype, group in groups.items()}

    def unpacked(self, packed: dict) -> dict:
        """Returns what `packed` was given, as NumPy arrays by the `id` of the variable."""
        rows = {dtype: iter(np.array(ops.convert_to_numpy(values))) for dtype, values in packed.items()}
        return {id(variable): next(rows[variable.dtype]) for variable in self.moving}

    @property
    def travel(self) -> Travel:
        """The dtypes of what travels between devices in the step."""
        return Travel.of(chosen_policy(self.model, None))

    def apply_rules(self):
        """Applies the policy's float32 rules to the layers that there are, and wraps the optimizer as they ask for."""
        policy = accumulating(chosen_policy(self.model, None).with_remat(self._remat), self._planned_steps)
        if self._converter is None or self._converter[:2] != (policy, last_conversion(self.model)):
            convert = layer_converter(self.model, policy, converts=False, trains=True)
        else:
            # It knows what layers were before a rule that matches them no more, now that they are built.
            convert = self._converter[-1]
        has_new = convert()
        self._converter = policy, last_conversion(self.model), convert
        if has_new:
            refresh_graphs(self.model)
            store_weights(self.model, [self.optimizer])
            end_in_float32(self.model)
        self.wrap_optimizer()
        if self.checks:
            self.optimizer.record.remat = policy.remat

    def _present(self) -> tuple:
        return converted_by(self.model), times_stored(self.model), getattr(self.optimizer, "slot_dtype", None)

    def is_outdated(self) -> bool:
        """Whether the step was not built yet, or model or optimizer's state were stored in another dtype since."""
        return self._present() != self._made_for

    def follow_model(self):
        """Lets the built optimizer know the weights as they are stored now; programs made before are not used again."""
        follow_weights(self.optimizer)
        self._made_for = self._present()
        self._programs = {}

    def program(self, name: str, make):
        """Returns what `make()` returned for the weights that are trained now: a program holds these weights."""
        key = name, self.trained
        if key not in self._programs:
            # With the variables, or another one might come to have the `id` of one that is gone.
            self._programs[key] = make(), self.model.trainable_variables
        return self._programs[key][0]

    def look_for_frozen_weights(self):
        """Takes down which weights the next step trains; `layer.trainable` may have changed since the last one.

        Raises:
            ValueError: If the optimizer was not built on one of them. Nothing has changed then.
        """
        variables = self.model.trainable_variables
        trained = tuple(map(id, variables))
        if trained == self.trained:
            return
        known = {id(variable) for variable in self._built_on()}
        unknown = [variable.path for variable in variables if id(variable) not in known]
        if unknown:
            raise ValueError(
                "Expected the trainable weights to be among those that the optimizer was built on. Received: "
                f"{unknown[:3]}, freed or made since, for which it has no state. Make a new step with a new optimizer: "
                "`mpkeras.make_train_step(model, optimizer, loss_fn)`; or free them before the first step and freeze "
                "them after it."
            )
        self._trained_variables, self.trained = variables, trained

    def trains_all(self) -> bool:
        """Whether no weight that the optimizer was built on is frozen; in the order in which it was."""
        return self.trained == tuple(map(id, self._built_on()))

    def _built_on(self) -> list:
        return _keras.optimizer_trainable_variables(getattr(self.optimizer, "inner_optimizer", self.optimizer))

    def wrap_optimizer(self):
        """Wraps the optimizer as the model's layers ask for; again when building has brought new layers."""
        model, policy = self.model, chosen_policy(self.model, None)
        passed, on_overflow = self._window
        # A number that is passed counts alone: not times that of the optimizer or the plan.
        is_passed = passed is not None and passed > 1
        planned = self._planned_steps if passed is None else 1
        rule = rule_for(self.optimizer, model, policy, None, self._rollback or is_passed or planned > 1)
        dtypes = policy.slot_dtype, policy.reduce_dtype
        with training_backend.variable_scope(model):
            self.optimizer = wrapped(self.optimizer, rule, *dtypes, None if is_passed else planned)
            if is_passed:
                self.optimizer.accumulate(passed, on_overflow)
            elif planned > 1 and on_overflow == "drop_window":
                self.optimizer.accumulate(self.optimizer.window.steps, on_overflow)
        self._moving = None
        if self.checks:
            self.optimizer.record.note_guard()

    @property
    def metrics(self) -> list:
        return self.objective.metrics

    @property
    def checks(self) -> bool:
        """Whether steps are checked at all."""
        return isinstance(self.optimizer, LossScaleOptimizer)

    @property
    def guards(self) -> bool:
        """Whether a skipped step is undone."""
        return self._rollback and self.checks

    def metric_results(self) -> dict:
        # Copies: a metric may return the variable that the next step assigns.
        return {metric.name: keras.tree.map_structure(ops.copy, metric.result()) for metric in self.metrics}

    def loss_scale(self):
        if self.checks:
            return self.optimizer.loss_scale
        return ops.convert_to_tensor(self.optimizer.loss_scale_factor or 1.0, "float32")

    def last_step_skipped(self):
        return self.optimizer.last_step_skipped if self.checks else ops.convert_to_tensor(False)


def _resolved_jit_compile(model, jit_compile) -> bool:
    """Returns whether the step is compiled. Raises `ValueError` where it is asked for and cannot be."""
    if keras.backend.backend() == "torch":
        return bool(jit_compile)
    refusing = [layer.name for layer in layers_of(model) if not layer.supports_jit]
    if jit_compile is None:
        # XLA has no sparse tensors on TensorFlow; JAX makes them of arrays.
        inputs = keras.tree.flatten(getattr(model, "inputs", ()))
        has_sparse = any(getattr(tensor, "sparse", False) for tensor in inputs)
        takes_sparse = keras.backend.backend() != "tensorflow" or not has_sparse
        return takes_sparse and not refusing and not training_backend.is_distributed(model)
    if jit_compile and refusing:
        raise ValueError(
            "Expected layers that XLA can compile with `jit_compile=True`. Received: "
            f"{refusing[:3]}, which say that they cannot. Leave `jit_compile` out."
        )
    check_jit_compile(model, jit_compile)
    return jit_compile
