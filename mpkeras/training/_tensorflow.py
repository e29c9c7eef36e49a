"""TensorFlow's guarded train step."""

import keras
import tensorflow as tf

from mpkeras import _keras_private
from mpkeras._tensorflow import in_xla
from mpkeras.training.batches import as_array
from mpkeras.training.forward_writes import unlisted_states, watched_weights

_RANDOM_STATES = "_mpkeras_random_states"


def check_jit_compile(model, jit_compile):
    """Raises `ValueError` where XLA and the model's distribution strategy do not work together."""
    strategy = model.distribute_strategy
    if jit_compile and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "Expected `jit_compile` to be False or None under a `tf.distribute` strategy with several "
            f"replicas, where Keras' XLA step fails. Received: jit_compile=True with "
            f"{type(strategy).__name__} on {strategy.num_replicas_in_sync} replicas. "
            "Leave XLA off, or train on one replica."
        )


def check_scope(model, variables):
    """Raises `ValueError` for variables that are not there on every replica of the model."""
    strategy = model.distribute_strategy
    outside = [v.path for v in variables if not strategy.extended.variable_created_in_scope(v.value)]
    if is_distributed(model) and outside:
        raise ValueError(
            "Expected model, optimizer and metrics to be made in the scope of one strategy, on every replica. "
            f"Received: {outside[:3]} made outside. Make all of them in `with strategy.scope():`."
        )


def ensure_built(model, data):
    """Builds what the first call of `model` would build, and its optimizer.

    Keras builds both in TensorFlow's `fit` while it traces the step: too late for the layers that a layer
    makes in its `build` to be given a policy, and what an optimizer's `build` assigns (ScheduleFreeAdamW
    starts from the weights) would become part of every step.
    """
    if not _keras_private.is_built(model):
        _keras_private.symbolic_build(model, data)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built and model.distribute_strategy.num_replicas_in_sync == 1:
        with tf.init_scope():
            optimizer.build(model.trainable_variables)


def variable_scope(model):
    """The scope in which variables of the model's optimizers are made: on every replica."""
    return model.distribute_strategy.scope()


def track_random_states(model):
    """Lets `tf.train.Checkpoint` find the random generators: Keras shows it layers and weights alone."""
    for layer in _keras_private.flatten_layers(model, include_self=True):
        generators = _keras_private.own_seed_generators(layer)
        tracked = getattr(layer, _RANDOM_STATES, None)
        if generators and (tracked is None or len(tracked.states) != len(generators)):
            # On the layer itself, not listed on the model: TensorFlow then finds each by its place in the
            # model, whichever of the layers exist by the time a checkpoint is read.
            setattr(layer, _RANDOM_STATES, _RandomStates(generators))


class _RandomStates(tf.Module):
    def __init__(self, generators):
        super().__init__()
        self.states = [generator.state.value for generator in generators]


def global_random_states() -> dict:
    """Keras draws from variables here."""
    return {}


def set_global_random_states(states: dict):
    del states


def step_without_trace(model, optimizers, train_step, data):
    """Runs `train_step(data)`; where every update of it was skipped, puts all other state back."""
    metrics = [variable.value for variable in model.metrics_variables]
    logs, step_is_skipped = _run_without_trace(model, metrics, optimizers, lambda: train_step(data))
    return _logs_without_trace(model, logs, step_is_skipped)


def _run_without_trace(model, metrics, optimizers, run):
    """Returns `run()` and whether its step was skipped; then no other variable shows that it ran.

    A non-trainable float variable that became non-finite although the step was applied (BatchNormalization
    fed 1e25) keeps its old value, too.
    """
    frozen = _keras_private.frozen_weights(model)
    statistics = [_own_part(v.value) for v in model.non_trainable_variables if id(v) not in frozen]
    statistics += [_own_part(v.value) for v in unlisted_states(model)]
    non_trainable = statistics + [_own_part(v.value) for v in model.non_trainable_variables if id(v) in frozen]
    metrics = [_own_part(variable) for variable in metrics]
    # Reading copies nothing: TensorFlow gives a variable a new buffer when it is assigned.
    old_values = [tf.identity(variable) for variable in non_trainable + metrics]
    before = [_counters(optimizer) for optimizer in optimizers]
    with watched_weights(model, _old_weight) as weights:
        result = run()
    after = [_counters(optimizer) for optimizer in optimizers]
    any_skipped = tf.reduce_any([new[0] > old[0] for new, old in zip(after, before, strict=True)])
    any_accepted = tf.reduce_any([new[1] > old[1] for new, old in zip(after, before, strict=True)])
    step_is_skipped = tf.logical_and(any_skipped, tf.logical_not(any_accepted))

    old_non_trainable = old_values[: len(non_trainable)]
    old_metrics = old_values[len(non_trainable) :]
    # The weights of frozen layers are put back where a step is skipped, but not read on every step.
    floats = [variable for variable in statistics if variable.dtype.is_floating]
    total = tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in floats]) if floats else tf.zeros(())
    needs_restoring = tf.logical_or(any_skipped, tf.logical_not(tf.math.is_finite(total)))

    def restore():
        _restore(non_trainable, old_non_trainable, step_is_skipped, True)
        # A metric may be infinite in its own right; only a skip makes its value a trace.
        _restore(metrics, old_metrics, step_is_skipped, any_skipped)
        _restore([_own_part(v.value) for v, _ in weights], [old for _, old in weights], step_is_skipped, False)
        return tf.constant(True)

    if in_xla():
        restore()
    else:
        tf.cond(needs_restoring, restore, lambda: tf.constant(False))
    return result, step_is_skipped


def _old_weight(variable):
    return tf.identity(_own_part(_keras_private.unscoped_value(variable)))


def _own_part(variable):
    """Returns the part of a distributed variable that this replica holds; any other variable as it is.

    Assigning to the whole of one that is aggregated over replicas would have to wait for the others, which
    TensorFlow refuses in a branch; and the mean of three equal numbers need not be that number.
    """
    parts = tf.distribute.get_strategy().experimental_local_results(variable)
    if len(parts) == 1:
        return parts[0]
    replica = tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)
    # Not known while tracing: one program for all replicas (TPU), where the whole may be assigned.
    return variable if replica is None else parts[int(replica) % len(parts)]


def _counters(optimizer):
    """Returns the skipped and the accepted steps so far, integer scalars of shape `()`."""
    return tf.identity(optimizer.skipped_steps.value), tf.identity(optimizer.accepted_steps.value)


def _restore(variables, old_values, step_is_skipped, non_finite_too):
    for variable, old in zip(variables, old_values, strict=True):
        takes_old = step_is_skipped
        if variable.dtype.is_floating:
            became_non_finite = tf.logical_and(_is_finite(old), tf.logical_not(_is_finite(variable)))
            takes_old = tf.logical_or(takes_old, tf.logical_and(became_non_finite, non_finite_too))
        variable.assign(tf.where(takes_old, old, variable))


def _is_finite(values):
    return tf.math.is_finite(tf.reduce_sum(tf.cast(values, tf.float32)))


def _logs_without_trace(model, logs, step_is_skipped):
    metric_logs = model.get_metrics_result()
    if not isinstance(logs, dict) or set(logs) != set(metric_logs):
        return logs
    if tf.executing_eagerly():
        return metric_logs if bool(step_is_skipped) else logs
    return keras.tree.map_structure(
        lambda clean, value: (
            tf.where(step_is_skipped, tf.cast(clean, value.dtype), value) if tf.is_tensor(value) else value
        ),
        metric_logs,
        logs,
    )


def with_logs(optimizers, logs, names):
    if not isinstance(logs, dict):
        return logs
    values = (optimizers[0].loss_scale, sum(tf.identity(o.skipped_steps.value) for o in optimizers))
    return {**logs, **dict(zip(names, values, strict=True))}


class CompiledStep:
    """A custom loop's step: `GradientTape` in one `tf.function`. `parts` is a `StepParts`."""

    def __init__(self, parts):
        self._parts = parts
        self._function = tf.function(self._one_step, jit_compile=parts.jit_compile)
        self._distributed = tf.function(self._on_every_replica, jit_compile=parts.jit_compile)

    def __call__(self, x, y, sample_weight):
        x, y, sample_weight = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
        if in_replica_context():
            if self._parts.jit_compile:
                raise ValueError(
                    "Expected a step without XLA in a function that `strategy.run` runs. Received: jit_compile=True. "
                    "Call the step itself, which runs on every replica, or leave `jit_compile` out."
                )
            # Not in a function of its own: from there replicas cannot call each other.
            return self._one_step(x, y, sample_weight)
        if is_distributed(self._parts.model):
            with variable_scope(self._parts.model):
                return self._distributed(x, y, sample_weight)
        return self._function(x, y, sample_weight)

    def compiler_ir(self, x, y, sample_weight, optimized):
        x, y, sample_weight = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
        stage = "optimized_hlo" if optimized else "hlo"
        return self._function.experimental_get_compiler_ir(x, y, sample_weight)(stage=stage)

    def temporary_bytes(self, x, y, sample_weight):
        return None

    def _one_step(self, x, y, sample_weight):
        parts = self._parts
        optimizer = parts.optimizer
        if parts.guards:
            metrics = [variable.value for metric in parts.metrics for variable in metric.variables]
            result, skipped = _run_without_trace(
                parts.model, metrics, [optimizer], lambda: self._update(x, y, sample_weight)
            )
        else:
            result, skipped = self._update(x, y, sample_weight), parts.last_step_skipped()
        loss = result["loss"]
        if replicas() > 1:
            # Each replica's loss is its share of the mean over all.
            loss = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, loss)
        return {**result, **parts.metric_results(), "loss": loss, "skipped": skipped}

    def _update(self, x, y, sample_weight):
        parts = self._parts
        model, optimizer = parts.model, parts.optimizer
        with tf.GradientTape() as tape:
            y_pred = model(x, **parts.call_options)
            loss = parts.total_loss(y, y_pred, sample_weight, model.losses)
            scaled_loss = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(scaled_loss, variables), variables)
        parts.update_metrics(y, y_pred, sample_weight)
        return {"loss": loss, "loss_scale": parts.loss_scale()}

    def _on_every_replica(self, x, y, sample_weight):
        strategy = self._parts.model.distribute_strategy
        batch = (x, y, sample_weight)
        local_replicas = len(strategy.extended.worker_devices)
        # A batch that is not distributed yet is cut here: on several workers, each brings the rows of its own.
        leaves = keras.tree.flatten(batch)
        cut = [_rows_for_replicas(leaf, local_replicas) if tf.is_tensor(leaf) else None for leaf in leaves]

        def step(leaves, cut):
            index = tf.distribute.get_replica_context().replica_id_in_sync_group % local_replicas
            parts = [leaf if rows is None else rows[index] for leaf, rows in zip(leaves, cut, strict=True)]
            return self._one_step(*keras.tree.pack_sequence_as(batch, parts))

        per_replica = strategy.run(step, args=(leaves, cut))
        # The same everywhere, but for the metrics: read here, they are of all replicas together.
        result = {name: strategy.experimental_local_results(value)[0] for name, value in per_replica.items()}
        return {**result, **self._parts.metric_results()}


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


def _rows_for_replicas(tensor, replicas: int):
    """Returns `tensor` with a new first axis: one equal part of its rows for each replica."""
    rows = tensor.shape[0] if tensor.shape.rank else None
    if not rows or rows % replicas:
        raise ValueError(
            f"Expected a batch that {replicas} replicas can share equally. Received: shape={tuple(tensor.shape)}. Take "
            "another batch size, or pass the batches of `strategy.experimental_distribute_dataset(dataset)`."
        )
    return tf.reshape(tensor, (replicas, rows // replicas, *tensor.shape[1:]))


def local_tensors(structure):
    """Returns the tensors of a batch, or of its part for one replica."""
    strategy = tf.distribute.get_strategy()
    return keras.tree.map_structure(lambda value: _as_tensor(strategy.experimental_local_results(value)[0]), structure)


def _as_tensor(value):
    if value is None or isinstance(value, tf.distribute.DistributedValues):
        return value
    return value if tf.is_tensor(value) else tf.convert_to_tensor(as_array(value))
