"""TensorFlow's guarded train step."""

import contextlib
import dataclasses
import functools
import itertools
import warnings
import weakref

import keras
import numpy as np
import tensorflow as tf

from mpkeras import _keras
from mpkeras.conversion.outputs import let_heads_tell
from mpkeras.policies.dtypes import as_array
from mpkeras.scaling._tensorflow import computed_once, in_xla
from mpkeras.scaling.facts import opened_step
from mpkeras.training import defaults, metric_states
from mpkeras.training.defaults import (  # noqa: F401
    can_be_read,
    check_is_outermost,
    global_random_states,
    of_its_own,
    set_global_random_states,
)
from mpkeras.training.inventory import Inventory, helpers
from mpkeras.training.rollback import Outcome, StepInVariables, empty_step, skip  # noqa: F401

# On a layer with random generators, for good: a checkpoint is written after training and read before it, whatever the
# model computes in by then. So it is none of the replaced attributes, which are taken back.
_RANDOM_STATES = "_mpkeras_random_states"


def check_scope(model, variables):
    """Raises `ValueError` for variables that are not there on every replica of the model."""
    strategy = model.distribute_strategy
    outside = [v.path for v in variables if not strategy.extended.variable_created_in_scope(v.value)]
    if is_distributed(model) and outside:
        raise ValueError(
            "Expected model, optimizer and metrics to be made in the scope of one strategy, on every replica. "
            f"Received: {outside[:3]} made outside. Make all of them in `with strategy.scope():`."
        )


def ensure_built(model, own_step, data):
    """Builds what the first step of `model` would build.

    Keras builds it in TensorFlow's `fit` while it traces the step: too late for the layers that a layer makes in
    its `build` to be given a policy, and what an optimizer's `build` assigns (ScheduleFreeAdamW starts from the
    weights) would become part of every step.

    Args:
        model: The model that is trained.
        own_step: The train step, where it is the user's own: it may call parts of the model and never the model
            itself. `None` for Keras' own, which calls the model and updates all its weights.
        data: The arguments of the step.
    """
    is_single = model.distribute_strategy.num_replicas_in_sync == 1
    if own_step is not None:
        if is_single and _new_unbuilt_layers(model):
            _trace_in_vain(own_step, data)
        if is_single and _keras.has_all_weights(model):
            _ask_call(model, data)
        return
    if not _keras.is_built(model):
        if not is_single:
            _keras.symbolic_build(model, data)
        elif not _build_in_advance(model, data):
            return
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and is_single:
        with tf.init_scope():
            optimizer.build(model.trainable_variables)


# Model -> its layers that a trial of the train step was made for.
_tried: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def build_before_trace(model, data):
    """Builds optimizer, losses and metrics of a built model, whose step is Keras' own, as `fit` does on JAX and torch.

    A step that makes variables as it is traced is traced by TensorFlow once more. Variables that cannot be made so are
    left to the step.

    Args:
        model: The model that is trained.
        data: The argument of its train function: only an iterator of `tf.data` tells of batches that are to come.
    """
    is_traced = not model.run_eagerly and not is_distributed(model) and _keras.is_built(model)
    # Keras asks with tensors of a shape, which a ragged one is not.
    is_dense = isinstance(data, tf.data.Iterator) and all(
        isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(data.element_spec)
    )
    if is_traced and is_dense:
        layers = _keras.flatten_layers(model, include_self=True)
        with contextlib.suppress(Exception), _keras.kept_losses(layers), _keras.tensors_put_back(layers):
            _keras.symbolic_build(model, data.element_spec)


def _build_in_advance(model, data) -> bool:
    """Builds what a call of the model reaches. Returns whether that is done, or left to the step.

    Keras' own way, for shapes alone, refuses variables that a `build` makes of given values, as a stateful recurrent
    layer does. The step in TensorFlow's `fit` refuses none, so a graph is built by the trace of a call that never runs.
    """
    if not _new_unbuilt_layers(model, include_self=True):
        return False
    calls = itertools.count()

    def call(data):
        # TensorFlow traces a function that has made variables once more.
        if next(calls) == 0:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            model(x, training=True)

    # As in `_trace_in_vain`: an error comes again in the step, or the step runs eagerly and builds what is left.
    with contextlib.suppress(Exception):
        if tf.executing_eagerly():
            # A trace that fails would leave variables without values behind.
            _keras.symbolic_build(model, data)
        else:
            specs = tf.nest.map_structure(_spec, data)
            with tf.init_scope():
                # Behind this the variables have the values that an optimizer may start from.
                tf.function(call, autograph=False).get_concrete_function(specs)
        return True
    if not tf.executing_eagerly():
        # With other data the model is worth another trial.
        del _tried[model]
    return False


def _new_unbuilt_layers(model, include_self: bool = False) -> list:
    """Returns the layers below `model` that are not built yet, but for those that no trial has built."""
    tried = _tried.setdefault(model, weakref.WeakSet())
    layers = _keras.flatten_layers(model, include_self=include_self)
    unbuilt = [layer for layer in layers if not layer.built and layer not in tried]
    tried.update(unbuilt)
    return unbuilt


def _trace_in_vain(step, data):
    """Traces `step` into a graph that never runs: layers come into being, and nothing is trained."""
    # Not `tf.function`, whose variables have no values before all of it is traced. In a graph of its own they are made
    # outside of the graph at once, as they are in eager code.
    with tf.init_scope():
        graph = tf.__internal__.FuncGraph("trial_step")
    # Outside of `init_scope`, in which no tape records.
    with graph.as_default():
        data = tf.nest.map_structure(_placeholder, data, expand_composites=True)
        # An error here comes again in the step itself, where nothing of ours stands between. Only a step that must
        # run eagerly goes on from here: it builds its parts as it runs.
        with contextlib.suppress(Exception):
            step(data)


def _ask_call(model, data):
    """Lets the `call` of a model tell which layers make its outputs, where its step may run these alone.

    Keras calls a model before its step on JAX and torch, whatever the step does.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    layers = _keras.flatten_layers(model, include_self=True)
    # The data of such a step may be no arguments of the call, of which Keras warns and then raises.
    with warnings.catch_warnings(), _keras.kept_losses(layers), _keras.tensors_put_back(layers):
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):
            let_heads_tell(model, x)


def _spec(value):
    return tf.type_spec_from_value(value) if tf.is_tensor(value) else value


def _placeholder(value):
    return tf.compat.v1.placeholder(value.dtype, value.shape) if tf.is_tensor(value) else value


def first_batch(model, data):
    """As in `defaults.py`; `None` for the batch where it is distributed, or is no more than traced.

    In the place of an iterator of `tf.data` stands another one of the same batches and shapes: of a batch in Python
    Keras would trace the step for its very shape, and again for another one. It is made of tensors: a generator in
    Python takes ten times as long to set up, and that at several batches of each `fit`.
    """
    if not tf.executing_eagerly() or isinstance(data, tf.distribute.DistributedIterator):
        return None, data
    batches, handed_on = held_batches(data, model)
    if not batches:
        raise StopIteration
    return batches[0], handed_on(batches)()


def variable_scope(model):
    """The scope in which variables of the model's optimizers are made: on every replica.

    Within `strategy.run`, where a step of one replica takes its first batches again, the strategy is in force already.
    """
    if in_replica_context():
        return contextlib.nullcontext()
    return model.distribute_strategy.scope()


def track_random_states(model):
    """Lets `tf.train.Checkpoint` find the random generators: Keras shows it layers and weights alone."""
    for layer in _keras.flatten_layers(model, include_self=True):
        generators = _keras.own_seed_generators(layer)
        tracked = getattr(layer, _RANDOM_STATES, None)
        if generators and (tracked is None or len(tracked.states) != len(generators)):
            tracked = tf.Module()
            tracked.states = [generator.state.value for generator in generators]
            # On the layer itself, not listed on the model: TensorFlow then finds each by its place in the
            # model, whichever of the layers exist by the time a checkpoint is read.
            setattr(layer, _RANDOM_STATES, tracked)


@dataclasses.dataclass
class NativeState:
    """A `tf.Variable` that a layer of the user's holds itself, with what Keras' variables have."""

    variable: tf.Variable

    @property
    def name(self) -> str:
        return self.variable.name.partition(":")[0]

    @property
    def shape(self) -> tuple:
        return tuple(self.variable.shape)

    @property
    def dtype(self) -> str:
        return self.variable.dtype.name

    @property
    def value(self):
        return self.variable

    def assign(self, value):
        self.variable.assign(value)

    def set_apart(self) -> np.ndarray:
        """Returns its value, for `hold`."""
        return np.array(self.variable)

    def hold(self, value):
        """Gives it the value that `set_apart` has returned."""
        self.assign(value)


def native_states(model) -> list:
    """Returns the `tf.Variable`s that the layers of `model` and helper objects hold beside Keras' own variables.

    They are attributes, or in lists, tuples and dictionaries that are, or of a `tf.Module` or a
    `tf.random.Generator` there.
    """
    variables: dict = {}
    for holder in [*_keras.flatten_layers(model, include_self=True), *helpers(model)]:
        variables |= {id(variable): variable for variable in _native_variables(_attributes(holder))}
    of_keras = {id(variable.value) for variable in model.variables} if variables else set()
    return [NativeState(v) for v in variables.values() if id(v) not in of_keras and _is_of_numbers(v)]


def _attributes(holder) -> list:
    """Returns the attributes of `holder` without TensorFlow's own records of them."""
    return [value for name, value in vars(holder).items() if not name.startswith(("_self_", _RANDOM_STATES))]


_HOLDERS = (list, tuple, dict, tf.Variable, tf.Module, tf.random.Generator)
# Whether objects of a type are of `_HOLDERS`: of the many values of a model each type is asked once. The first object
# is asked itself: TensorFlow puts dictionaries and tuples into objects whose types are no subclasses of these.
_are_holders: dict = {}


def _native_variables(values) -> list:
    """Returns the `tf.Variable`s that are among `values`, or are held by what is."""
    variables = []
    for value in values:
        kind = type(value)
        if kind not in _are_holders:
            _are_holders[kind] = isinstance(value, _HOLDERS)
        if not _are_holders[kind]:
            continue
        if isinstance(value, (list, tuple)):
            variables += _native_variables(value)
        # May be keyed by what Keras' `tree` cannot sort.
        elif isinstance(value, dict):
            variables += _native_variables(value.values())
        elif isinstance(value, tf.Module):
            variables += value.variables
        else:
            variables.append(value.state if isinstance(value, tf.random.Generator) else value)
    return variables


def _is_of_numbers(variable) -> bool:
    dtype = variable.dtype
    return variable.shape.is_fully_defined() and (dtype.is_floating or dtype.is_integer or dtype.is_bool)


def has_rows(data):
    """Returns whether a batch has rows: `True` or `False` where its shape says, else a bool tensor of shape `()`.

    On several replicas always `True`: one without rows of its own still takes part in the step of the others.
    """
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    first = leaves[0] if leaves else None
    if replicas() > 1 or first is None or not hasattr(first, "shape"):
        return True
    shape = tf.TensorShape(first.shape)
    if shape.rank == 0:
        return True
    if shape.rank and shape[0] is not None:
        return shape[0] > 0
    return tf.shape(first)[0] > 0 if isinstance(first, tf.Tensor) else True


def step_without_trace(inventory, optimizers, train_step, data):
    """Runs `train_step(data)`; where every update of it was skipped, puts all other state back."""
    model = inventory.model
    step = _Step(inventory, optimizers, lambda: model.metrics, model.get_metrics_result)
    return step.run(lambda: train_step(data))[0]


class _Step(StepInVariables):
    def place(self, variable):
        return _own_part(variable.value)

    def copy(self, place):
        # Nothing is copied: TensorFlow gives a variable a new buffer when it is assigned.
        return tf.identity(place)

    def read(self, flag):
        return tf.greater(tf.identity(flag), 0)

    def assign(self, place, value):
        place.assign(tf.cast(value, place.dtype))

    def choose(self, place, old, takes_old):
        place.assign(tf.where(takes_old, old, place))

    def is_float(self, place):
        return place.dtype.is_floating

    def is_finite(self, places):
        return tf.math.is_finite(tf.add_n([tf.reduce_sum(tf.cast(place, tf.float32)) for place in places]))

    def any_of(self, flags):
        return computed_once(tf.add_n([tf.cast(flag, tf.float32) for flag in flags])) > 0 if flags else False

    def outcome(self, flags):
        any_skipped, any_accepted = map(tf.reduce_any, zip(*flags, strict=True))
        all_skipped = tf.logical_and(any_skipped, tf.logical_not(any_accepted))
        return Outcome(any_skipped, all_skipped, tf.logical_not(tf.logical_or(any_skipped, any_accepted)))

    def where_needed(self, any_skipped, restored, logs):
        flat_logs = keras.tree.flatten(logs)

        def restored_tensors():
            nothing_counted, new_logs = restored()
            return nothing_counted, [leaf for leaf in keras.tree.flatten(new_logs) if tf.is_tensor(leaf)]

        if in_xla():
            nothing_counted, tensors = restored_tensors()
        else:
            is_needed = tf.logical_or(any_skipped, tf.logical_not(self.statistics_are_finite()))
            as_they_are = tf.constant(False), [leaf for leaf in flat_logs if tf.is_tensor(leaf)]
            nothing_counted, tensors = tf.cond(is_needed, restored_tensors, lambda: as_they_are)
        new_leaves = iter(tensors)
        leaves = [next(new_leaves) if tf.is_tensor(leaf) else leaf for leaf in flat_logs]
        return nothing_counted, keras.tree.pack_sequence_as(logs, leaves)

    def native_states(self, model):
        return native_states(model)

    def natives_of(self, metric):
        return [NativeState(v) for v in _native_variables(_attributes(metric)) if _is_of_numbers(v)]

    def is_traced(self):
        return not tf.executing_eagerly()

    def trace_once_more(self):
        if replicas() == 1:
            # As after any function that makes a variable. What a `tf.function` inside this one makes does not count.
            tf.Variable(lambda: tf.zeros(()), trainable=False)


def _own_part(variable):
    """Returns the part of a distributed variable that this replica holds; any other variable as it is.

    Assigning to the whole of one that is aggregated over replicas would have to wait for the others, which
    TensorFlow refuses in a branch; and the mean of three equal numbers need not be that number.
    """
    on_replicas = tf.distribute.get_strategy().experimental_local_results(variable)
    if len(on_replicas) == 1:
        return on_replicas[0]
    replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    # Not known while tracing: one program for all replicas (TPU), where the whole may be assigned.
    return variable if replica is None else on_replicas[int(replica) % len(on_replicas)]


def scale_logs(optimizers, result) -> tuple:
    """Returns the loss scale of the first of `optimizers`, and the steps that all of them skipped."""
    return optimizers[0].loss_scale, sum(tf.identity(o.skipped_steps.value) for o in optimizers)


class CompiledStep:
    """A custom loop's step: `GradientTape` in one `tf.function`. `parts` is a `StepParts`."""

    def __init__(self, parts):
        self._parts = parts
        self._inventory = Inventory(parts.model, parts.objective.given_losses)

    def __call__(self, x, y, sample_weight):
        x, y, sample_weight = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
        if in_replica_context():
            if self._parts.jit_compile:
                raise ValueError(
                    "Expected a step without XLA in a function that `strategy.run` runs. Received: jit_compile=True. "
                    "Call the step itself, which runs on every replica, or leave `jit_compile` out."
                )
            # Not in a function of its own: from there replicas cannot call each other.
            return self._on_one_replica(x, y, sample_weight)
        if is_distributed(self._parts.model):
            _check_rows((x, y, sample_weight), _local_replicas(self._parts.model))
            with variable_scope(self._parts.model):
                return self._compiled(self._on_every_replica)(x, y, sample_weight)
        return self._compiled(self._on_one_replica)(x, y, sample_weight)

    def op_by_op(self, data):
        """As in `_jax.py`; the values are in the variables."""
        return self._one_step(*keras.tree.map_structure(_as_tensor, data))[0]

    def _compiled(self, step):
        """Returns the program of `step` for the weights that are trained now."""
        # As in Keras' `fit`: the second length of a batch is traced as any length.
        # And no more than there is Python turned into a graph: converting our own code took most of a first step.
        options = {"jit_compile": self._parts.jit_compile, "reduce_retracing": True, "autograph": False}
        return self._parts.program(step.__name__, lambda: tf.function(step, **options))

    def compiler_ir(self, x, y, sample_weight, optimized):
        x, y, sample_weight = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
        stage = "optimized_hlo" if optimized else "hlo"
        # Of its own: XLA gives out no text of a program that was traced for any length.
        function = tf.function(self._on_one_replica, jit_compile=self._parts.jit_compile, autograph=False)
        return function.experimental_get_compiler_ir(x, y, sample_weight)(stage=stage)

    def temporary_bytes(self, x, y, sample_weight):
        return None

    def _on_one_replica(self, x, y, sample_weight):
        return self._one_step(x, y, sample_weight)[0]

    def _one_step(self, x, y, sample_weight):
        """Returns the result of a step, and whether no step has counted since the metrics were reset."""
        parts = self._parts
        batch_has_rows = has_rows(x)
        moving_before = parts.packed([_own_part(variable.value) for variable in parts.moving])

        def run():
            update = self._no_update if parts.checks and batch_has_rows is False else self._update
            result = update(x, y, sample_weight)
            if parts.checks and tf.is_tensor(batch_has_rows):
                # A sum over no rows is 0, which is no loss.
                result["loss"] = tf.where(batch_has_rows, result["loss"], float("nan"))
            return {**result, **parts.metric_results()}

        with opened_step([parts.optimizer] if parts.checks else [], batch_has_rows=batch_has_rows):
            if parts.guards:
                step = _Step(self._inventory, [parts.optimizer], lambda: parts.metrics, parts.metric_results)
                result, skipped, nothing_counted = step.run(run)
            else:
                result, skipped, nothing_counted = run(), parts.last_step_skipped(), tf.constant(False)
        loss = result["loss"]
        if replicas() > 1:
            # Each replica's loss is its share of the mean over all.
            loss = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, loss)
        return {**result, "loss": loss, parts.BEFORE: moving_before, "skipped": skipped}, nothing_counted

    def _update(self, x, y, sample_weight):
        parts = self._parts
        model, optimizer = parts.model, parts.optimizer
        with tf.GradientTape() as tape:
            y_pred = model(x, **parts.call_options)
            loss = parts.objective.total_loss(y, y_pred, sample_weight, model.losses)
            scaled_loss = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(scaled_loss, variables), variables)
        parts.objective.update_metrics(y, y_pred, sample_weight)
        return {"loss": loss, "loss_scale": parts.loss_scale()}

    def _no_update(self, x, y, sample_weight):
        """The step for a batch without rows, as `_update`."""
        skip(self._parts.optimizer)
        return {"loss": tf.constant(float("nan")), "loss_scale": self._parts.loss_scale()}

    def _on_every_replica(self, x, y, sample_weight):
        strategy = self._parts.model.distribute_strategy
        batch = (x, y, sample_weight)
        local_replicas = _local_replicas(self._parts.model)
        # A batch that is not distributed yet is cut here: on several workers, each brings the rows of its own.
        leaves = keras.tree.flatten(batch)
        cut = [_rows_for_replicas(leaf, local_replicas) if tf.is_tensor(leaf) else None for leaf in leaves]

        def step(leaves, cut):
            index = tf.distribute.get_replica_context().replica_id_in_sync_group % local_replicas
            parts = [leaf if rows is None else rows[index] for leaf, rows in zip(leaves, cut, strict=True)]
            return self._one_step(*keras.tree.pack_sequence_as(batch, parts))

        per_replica = strategy.run(step, args=(leaves, cut))
        # The same everywhere, but for the metrics: read here, they are of all replicas together.
        result, nothing_counted = keras.tree.map_structure(
            lambda value: strategy.experimental_local_results(value)[0], per_replica
        )
        parts = self._parts
        return {**result, **metric_states.shown(parts.metrics, parts.metric_results(), nothing_counted)}


def runs_on_host() -> bool:
    """Whether Python runs the step now, and traces no program of it."""
    return tf.executing_eagerly()


def are_of_this_program(tensors) -> bool:
    """As in `defaults.py`: tensors of a `tf.function` inside the step are that one's alone."""
    here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    return all(getattr(tensor, "graph", None) in (None, here) for tensor in tensors)


class HeldState(defaults.HeldState):
    """The state between two steps of `fit`: all of it is in the variables, which each replica may have for itself."""

    def read(self, variable):
        return [np.array(part.numpy()) for part in self._parts(variable)]

    def write(self, variable, values):
        on_replicas = self._parts(variable)
        for part, value in zip(on_replicas, values * len(on_replicas) if len(values) == 1 else values, strict=True):
            part.assign(tf.cast(value, part.dtype))

    def _parts(self, variable):
        return self._model.distribute_strategy.experimental_local_results(variable.value)


def held_batches(data, model) -> tuple:
    """Takes the batches of the next execution from what `fit` hands on.

    Args:
        data: The argument of the train function: an iterator.
        model: The model that is trained. Its `steps_per_execution` says how many batches these are.

    Returns:
        The batches, fewer or none at the end of the data; and a function that turns some of them into a function that
        returns an iterator of the kind of `data`, anew at each call.
    """
    steps, strategy = model.steps_per_execution, model.distribute_strategy
    if not isinstance(data, tf.data.Iterator | tf.distribute.DistributedIterator):
        return list(itertools.islice(data, steps)), lambda batches: lambda: iter(batches)
    optionals = [data.get_next_as_optional() for _ in range(steps)]
    batches = [optional.get_value() for optional in optionals if optional.has_value()]

    def handed_on(batches):
        count = len(strategy.experimental_local_results(tf.nest.flatten(batches)[0]))
        parts = [_part_for_replica(i, batch, strategy) for batch in batches for i in range(count)]
        spec = data.element_spec if count == 1 else _spec_for_replica(data.element_spec, parts[0])

        def dataset_of_parts(context):
            datasets = [tf.data.Dataset.from_tensors(part) for part in parts]
            variant = tf.data.experimental.to_variant(functools.reduce(tf.data.Dataset.concatenate, datasets))
            # With the shapes that the iterator says, unknown lengths too: Keras' function is traced for these, and
            # where a length is known, the loss of each output weighs that much in its mean.
            return tf.data.experimental.from_variant(variant, spec)

        # The replicas take elements in turn.
        dataset = strategy.distribute_datasets_from_function(dataset_of_parts)
        return lambda: iter(dataset)

    return batches, handed_on


def _part_for_replica(number: int, batch, strategy):
    return tf.nest.map_structure(lambda leaf: strategy.experimental_local_results(leaf)[number], batch)


def _spec_for_replica(element_spec, part):
    """Returns the spec of `part`, one replica's, by that of a batch for several."""

    def of_leaf(spec, leaf):
        is_dense = isinstance(leaf, tf.Tensor)
        return tf.nest.flatten(spec, expand_composites=True)[0] if is_dense else tf.type_spec_from_value(leaf)

    return tf.nest.map_structure(of_leaf, element_spec, part)


def replicas(model=None) -> int:
    """Returns how many replicas average their losses together: those of `model`, or of the present scope."""
    strategy = tf.distribute.get_strategy() if model is None else model.distribute_strategy
    return strategy.num_replicas_in_sync


def is_distributed(model) -> bool:
    """Whether the model belongs to a distribution strategy, of one replica or several."""
    strategy = model.distribute_strategy
    # Outside of every scope the present strategy is TensorFlow's default, which distributes nothing.
    return (strategy is tf.distribute.get_strategy()) == tf.distribute.has_strategy()


def in_replica_context() -> bool:
    """Whether this code runs on one replica of a strategy: in a function that `strategy.run` was given."""
    return tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()


def _local_replicas(model) -> int:
    """Returns how many of the replicas of `model` this worker has."""
    return len(model.distribute_strategy.extended.worker_devices)


def _check_rows(batch, replicas: int):
    """Raises `ValueError` for a batch that is cut for the replicas here, and cannot be."""
    # Here and not where it is cut: a program for batches of any length sees no length.
    for tensor in keras.tree.flatten(batch):
        if tf.is_tensor(tensor) and (not tensor.shape.rank or not tensor.shape[0] or tensor.shape[0] % replicas):
            raise ValueError(
                f"Expected a batch that {replicas} replicas can share equally. Received: shape={tuple(tensor.shape)}. "
                "Take another batch size, or pass the batches of `strategy.experimental_distribute_dataset(dataset)`."
            )


def _rows_for_replicas(tensor, replicas: int):
    """Returns `tensor` with a new first axis: one equal part of its rows for each replica."""
    shape = tf.shape(tensor)
    rows = tf.reshape(tensor, tf.concat([[replicas, shape[0] // replicas], shape[1:]], 0))
    known = tensor.shape[0]
    rows.set_shape((replicas, None if known is None else known // replicas, *tensor.shape[1:]))
    return rows


def local_tensors(structure):
    """Returns the tensors of a batch, or of its part for one replica."""
    strategy = tf.distribute.get_strategy()
    return keras.tree.map_structure(lambda value: _as_tensor(strategy.experimental_local_results(value)[0]), structure)


def _as_tensor(value):
    if value is None or isinstance(value, tf.distribute.DistributedValues):
        return value
    return value if tf.is_tensor(value) else tf.convert_to_tensor(as_array(value))
