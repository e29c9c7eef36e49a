"""TensorFlow's part of `LossScaleOptimizer`: replicas decide together, then one conditional or a selection."""

import contextlib
import functools
import weakref

import keras
import tensorflow as tf

from mpkeras import _keras
from mpkeras._arguments import is_one_of
from mpkeras.devices._tensorflow import in_xla
from mpkeras.scaling import small_state
from mpkeras.scaling.facts import updating

_ALL_REDUCE_DTYPES = (None, "float16", "bfloat16", "float32")


def build_scope():
    """The scope in which an optimizer makes its variables: outside of the graph that is traced, but in its strategy."""
    return contextlib.nullcontext() if tf.distribute.has_strategy() else tf.init_scope()


def unshare(variables):
    """Gives each variable a value of its own: they always have one here."""


def traces() -> list:
    """Returns the graphs that this code is traced into, the innermost first; `[]` in eager code."""
    graphs: list = []
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        graphs.append(weakref.ref(graph))
        graph = getattr(graph, "outer_graph", None)
    return graphs


def scale_loss(optimizer, loss, facts):
    facts.loss_flags.append(tf.math.is_finite(tf.reduce_sum(tf.stop_gradient(loss))))
    return loss * tf.cast(optimizer.loss_scale, loss.dtype)


def _is_of_this_graph(tensor) -> bool:
    if tf.executing_eagerly():
        return hasattr(tensor, "numpy")
    # An eager tensor would become a constant of the graph.
    return not hasattr(tensor, "numpy") and tensor.graph is tf.compat.v1.get_default_graph()


def scale_gradient(grad, factor):
    def scaled(values):
        values = _widened(values)
        return values * tf.cast(factor, values.dtype)

    return _with_values(scaled, grad)


def grad_sum(grads):
    """Returns a float32 scalar of shape `()` that is finite if and only if the sum of all gradients is.

    One float32 sum a gradient, tested once: inf and NaN survive every addition.
    """
    sums = []
    for grad in grads:
        if grad is not None:
            values = grad.values if isinstance(grad, tf.IndexedSlices) else tf.convert_to_tensor(grad)
            if values.dtype.is_complex:
                values = tf.math.real(values) + tf.math.imag(values)
            if values.dtype == tf.bfloat16 and in_xla():
                values = _sums_of_groups(values)
            sums.append(tf.reduce_sum(tf.cast(values, tf.float32)))
    return computed_once(tf.abs(tf.add_n(sums) if sums else tf.zeros(())))


def computed_once(total):
    """As in `_jax.py`; outside of XLA `total` itself."""
    return tf.sqrt(total) if in_xla() else total


def _sums_of_groups(values):
    """Returns magnitudes of float32 sums of groups of 16-bit `values`, or `values` itself where no group divides it."""
    # XLA makes a sum of more than 32 values out of several, and casts before them: it would write all values out in
    # float32 (TensorFlow 2.21 on a CPU). Sums of fewer are one loop with the cast in it. Of plain sums of sums it would
    # make one sum again; not of sums of magnitudes. Each group is spread over all values: neighbours are then summed up
    # in one vector operation.
    count = values.shape.num_elements() or 1
    group = max(size for size in range(1, 33) if count % size == 0)
    if group == 1:
        return values
    return tf.abs(tf.reduce_sum(tf.cast(tf.reshape(values, (group, -1)), tf.float32), axis=0))


def new_values(optimizer, mapping, grads, variables, facts):
    raise ValueError(
        "Expected a backend with stateless optimizers. Received: `stateless_apply` on TensorFlow, where it is "
        "incompatible with `tf.distribute`. Call `optimizer.apply(grads, trainable_variables)`."
    )


def apply(optimizer, grads, variables, facts):
    strategy = tf.distribute.get_strategy()
    if tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Expected `apply` to be called in a replica context. Received: a call in a cross-replica context. "
            "Call it in the function that `strategy.run` runs."
        )
    _know_again(optimizer, variables)
    # `None` where there is nothing to unscale.
    scale = None if facts.grads_are_unscaled or optimizer.scale_is_one else optimizer.loss_scale
    if _sums_in_chosen_dtype(optimizer):
        grads = _summed(optimizer, grads, variables, facts.grads_are_unscaled)
    grad_total = grad_sum(grads)
    loss_is_finite = _known_loss_flag(facts)
    if facts.batch_has_rows is not True and not _is_of_this_graph(facts.batch_has_rows):
        facts.batch_has_rows = True
    if _decides_alone(strategy):
        _apply(optimizer, grads, variables, facts, tf.math.is_finite(grad_total), loss_is_finite, scale)
        return
    bad_losses = tf.zeros(()) if loss_is_finite is None else 1.0 - tf.cast(loss_is_finite, tf.float32)
    # One message, of one form whether this worker knows its loss or not: workers are programs of their own,
    # and where they wait for different messages they wait for ever.
    checks = tf.stack([grad_total, bad_losses])
    context = tf.distribute.get_replica_context()
    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        grads_are_finite, loss_is_finite = _flags(context.all_reduce(tf.distribute.ReduceOp.SUM, checks))
        with _no_second_sum(optimizer):
            _apply(optimizer, grads, variables, facts, grads_are_finite, loss_is_finite, scale)
        return
    # Not among the arguments, which would be gathered from all replicas: the facts that count here are those of each.
    across_replicas = functools.partial(_apply_across_replicas, facts)
    context.merge_call(across_replicas, args=(optimizer, grads, variables, checks, scale))


def _know_again(optimizer, variables):
    """Lets an optimizer find variables that `apply_policy` has stored in another dtype since it was built."""
    known = _keras.known_variables(optimizer.inner_optimizer)
    if not all(key in known for key in _keras.variable_keys(optimizer.inner_optimizer, variables)):
        with build_scope():
            small_state.follow_weights(optimizer)


def _decides_alone(strategy) -> bool:
    """Whether this is the only replica, and the inner optimizer may be called from a branch.

    Under a `MirroredStrategy` on one device it may not: it goes the way of several.
    """
    calls_others = tf.distribute.has_strategy() and not tf.__internal__.distribute.strategy_supports_no_merge_call()
    return strategy.num_replicas_in_sync == 1 and (in_xla() or not calls_others)


def _flags(summed_checks):
    """Returns whether all gradients, and whether all known losses of all replicas are finite."""
    return tf.math.is_finite(summed_checks[0]), tf.equal(summed_checks[1], 0.0)


def _apply_across_replicas(facts, strategy, optimizer, grads, variables, checks, scale):
    # Summed over replicas before anyone decides: gradients are reduced later, inside the inner optimizer,
    # where one replica's inf would reach the weights of all.
    grads_are_finite, loss_is_finite = _flags(strategy.reduce(tf.distribute.ReduceOp.SUM, checks, axis=None))
    decision, own_values = optimizer.decide(facts, grads_are_finite, loss_is_finite)

    rounding = optimizer.rounding()

    def in_each_replica(function, *arguments):
        # The conditional stands outside the replicas, as a branch inside one could not call the others. So does what
        # holds for the update: each replica runs in a thread of its own, and the first one out must not end it.
        with (
            _no_second_sum(optimizer),
            _keras.one_update(optimizer.inner_optimizer),
            _small_through_scope(optimizer, rounding),
        ):
            strategy.extended.call_for_each_replica(function, args=arguments)

    if optimizer.window is None:
        _when(decision.is_due, in_each_replica, _update_inner, optimizer, grads, variables, scale)
    else:
        # Each replica sums its own gradients; the inner optimizer reduces them when the update is due.
        def add():
            unscaled = strategy.extended.call_for_each_replica(_unscaled, args=(optimizer, grads, variables, scale))
            _add_to_sums(
                optimizer.window, unscaled, variables, functools.partial(strategy.extended.update, group=False)
            )

        _when(decision.is_accepted, add)
        _when(decision.is_due, in_each_replica, _update_with_means, optimizer, grads, variables, decision)
    _assign_all(own_values)


def _apply(optimizer, grads, variables, facts, grads_are_finite, loss_is_finite, scale):
    decision, own_values = optimizer.decide(facts, grads_are_finite, loss_is_finite)
    window = optimizer.window
    if window is not None:
        _apply_window(optimizer, grads, variables, decision, scale)
    elif in_xla():
        _update_selecting(optimizer, grads, variables, decision.is_due, scale)
    else:
        # In eager mode and in a plain graph a conditional around the update is the fastest form.
        _when(decision.is_due, _update_inner, optimizer, grads, variables, scale)
    _assign_all(own_values)


def _apply_window(optimizer, grads, variables, decision, scale):
    window = optimizer.window
    if not in_xla():
        _when(
            decision.is_accepted,
            lambda: _add_to_sums(window, _unscaled(optimizer, grads, variables, scale), variables),
        )
        _when(decision.is_due, _update_with_means, optimizer, grads, variables, decision)
        return
    unscaled = _unscaled(optimizer, grads, variables, scale)
    sums = window.next_sums(lambda total: total.value, unscaled, variables, decision)
    _assign_all((total.value, value) for total, value in sums)

    def update(is_due):
        _update_with_means(optimizer, grads, variables, decision)
        return [tf.zeros_like(is_due)]

    # A loop that goes round once or not at all: most calls pay for the sums alone, and no branch stalls the queue.
    tf.while_loop(lambda is_due: is_due, update, [decision.is_due])


def _when(condition, function, *arguments):
    def run():
        function(*arguments)
        return tf.constant(True)

    tf.cond(condition, run, lambda: tf.constant(False))


def _unscaled(optimizer, grads, variables, scale):
    return grads if scale is None else optimizer.unscale(grads, variables, scale)


def _update_inner(optimizer, grads, variables, scale=None, is_applied=None):
    """Lets the inner optimizer update, in float32 where variables are small.

    Where a bool scalar `is_applied` is given, what it assigns takes effect only where that is true: chosen at the
    assignment, as `UpdateScope` says.
    """
    grads = _unscaled(optimizer, grads, variables, scale)
    rounding = optimizer.rounding()
    with updating(optimizer), _keras.one_update(optimizer.inner_optimizer), contextlib.ExitStack() as stack:
        if rounding.small:
            grads = [_with_values(_widened, grad) for grad in grads]
        if not tf.executing_eagerly():
            # Copies of all: Keras sums over replicas what is of one graph, and this may be a branch of another, where
            # an optimizer changes some gradients and hands on others as they are.
            grads = [_copied(grad) for grad in grads]
        if rounding.small or is_applied is not None:
            stack.enter_context(_through_scope(optimizer, rounding))
            stack.enter_context(_WritingScope(rounding, is_applied))
        optimizer.inner_optimizer.apply(grads, variables)


def _update_selecting(optimizer, grads, variables, is_due, scale):
    if _assigns_as_keras(optimizer.inner_optimizer):
        _update_inner(optimizer, grads, variables, scale, is_due)
    else:
        _update_then_select(optimizer, grads, variables, is_due, scale)


def _update_with_means(optimizer, grads, variables, decision):
    totals = [total.value for total in optimizer.window.sums_of(variables)]
    _update_inner(optimizer, optimizer.window.means(totals, grads, variables, decision), variables)


def _add_to_sums(window, grads, variables, update=lambda total, function, args: function(total, *args)):
    """Adds unscaled gradients to the sums; the first of a window take the place of what the last one left.

    `update` is `strategy.extended.update`, or what does the same on one replica.
    """
    entries = list(zip(window.sums_of(variables), grads, variables, strict=True))

    def begin_one(total, grad):
        total.assign(window.first(total, grad))

    def add_one(total, grad, variable):
        total.assign(window.added(total, grad, variable))

    def begin():
        for total, grad, _ in entries:
            update(total.value, begin_one, args=(grad,))
        for total in window.sums_left_out(variables):
            update(total.value, begin_one, args=(None,))
        return tf.constant(True)

    def add():
        for total, grad, variable in entries:
            if grad is not None:
                update(total.value, add_one, args=(grad, variable))
        return tf.constant(False)

    tf.cond(window.begins(), begin, add)


def _assign_all(values):
    for variable, value in values:
        variable.assign(value)


def _known_loss_flag(facts):
    """Returns whether the losses scaled since the last step are finite, or `None` where this is not known."""
    flags = facts.loss_flags
    if not tf.executing_eagerly():
        # An eager flag is of a loss before the trace: as a constant it would decide every later step.
        flags = [flag for flag in flags if not hasattr(flag, "numpy")]
    # A flag of another graph (a branch, a loop body, an earlier trace) is out of reach here.
    usable = bool(flags) and all(_is_of_this_graph(flag) for flag in flags)
    return tf.reduce_all(tf.stack(flags)) if usable else None


def _assigns_as_keras(inner_optimizer) -> bool:
    """Whether no class or object of the user's may write to native variables, which no scope sees."""
    return all(
        _keras.is_of_keras(type(part)) and not vars(part).keys() & set(_ASSIGNING)
        for part in small_state.parts_of(inner_optimizer)
    )


_ASSIGNING = ("assign", "assign_add", "assign_sub", _keras.WEIGHT_DECAY_METHOD)


@contextlib.contextmanager
def _through_scope(optimizer, rounding):
    """Within this context the inner optimizer updates variables through the `_WritingScope` of its thread."""
    methods = small_state.replaced_methods(optimizer.inner_optimizer, _methods_through_scope)
    with methods, rounding.variables_as_float32():
        yield


def _small_through_scope(optimizer, rounding):
    # Around all replicas, as in `_no_second_sum`: the methods find in the scope what differs.
    return _through_scope(optimizer, rounding) if rounding.small else contextlib.nullcontext()


def _methods_through_scope(optimizer) -> dict:
    """Returns what replaces the methods of `optimizer` that hand on native variables, as they are stored."""
    keys = {
        id(variable): getattr(optimizer, _keras.KEY_METHOD)(variable)
        for variable in _keras.optimizer_trainable_variables(optimizer)
    }
    # The replicas, each in a thread of its own, hand it to the update of all; it is the same for each.
    handed: dict = {}

    def update(grads, variables, learning_rate):
        scope = _keras.stateless_scope()
        handed.update(variables=variables, rounding=scope.rounding, is_applied=scope.is_applied)
        getattr(type(optimizer), _keras.UPDATE_METHOD)(optimizer, grads, variables, learning_rate)
        scope.rounding = handed["rounding"].begun_again()

    def update_on_all_devices(strategy, grads_and_vars, learning_rate):
        for (grad, _), variable in zip(grads_and_vars, handed["variables"], strict=True):
            rounding = handed["rounding"]

            def update_here(stored, grad, learning_rate, variable=variable, rounding=rounding):
                # Each device begins where the others do.
                handed["rounding"] = rounding.begun_again()
                with _WritingScope(handed["rounding"], handed["is_applied"]):
                    optimizer.update_step(grad, variable, learning_rate)

            stored = _keras.stored_value(variable)
            strategy.extended.update(stored, update_here, args=(grad, learning_rate), group=False)

    return {
        "assign": _assign,
        "assign_add": functools.partial(_assign_change, 1),
        "assign_sub": functools.partial(_assign_change, -1),
        _keras.KEY_METHOD: lambda variable: keys[id(variable)],
        _keras.UPDATE_METHOD: update,
        _keras.DISTRIBUTED_UPDATE_METHOD: update_on_all_devices,
        _keras.WEIGHT_DECAY_METHOD: _keras.portable_method(optimizer, _keras.WEIGHT_DECAY_METHOD),
        _keras.OVERWRITE_METHOD: _keras.portable_method(optimizer, _keras.OVERWRITE_METHOD),
    }


def _assign(variable, value):
    if isinstance(value, tf.IndexedSlices):
        rows = tf.cast(value.values, variable.dtype)
        value = tf.tensor_scatter_nd_update(variable.value, value.indices[:, tf.newaxis], rows)
    variable.assign(value)


def _assign_change(sign: int, variable, value):
    if isinstance(value, tf.IndexedSlices):
        rows = sign * tf.cast(value.values, variable.dtype)
        if _keras.stateless_scope().adds_to_rows_of(variable):
            _keras.stateless_scope().add_to_rows(variable, tf.IndexedSlices(rows, value.indices))
            return
        value = tf.tensor_scatter_nd_add(variable.value, value.indices[:, tf.newaxis], rows)
    else:
        value = variable.value + sign * tf.cast(value, variable.dtype)
    variable.assign(value)


class _WritingScope(small_state.UpdateScope):
    """Writes each new value into its variable at once, on all replicas alike."""

    def read(self, variable):
        return _keras.stored_value(variable)

    def write(self, variable, value):
        stored = _keras.stored_value(variable)
        context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
        # In a replica a variable with an aggregation can be assigned; of the others all copies are, together.
        if context is None or variable.aggregation != "none" or _decides_alone(tf.distribute.get_strategy()):
            stored.assign(value)
        else:
            context.merge_call(_assign_all_copies, args=(stored, value))

    def adds_to_rows_of(self, variable) -> bool:
        """Whether rows of `variable` are changed alone, without a pass over all of it: nothing is to be rounded."""
        return not self.rounding.covers(variable) and _decides_alone(tf.distribute.get_strategy())

    def add_to_rows(self, variable, rows):
        """Adds to rows, of which one may be named several times."""
        stored = _keras.stored_value(variable)
        if self.is_applied is None:
            stored.scatter_add(rows)
            return
        old_rows = tf.gather(stored, rows.indices)
        stored.scatter_add(tf.IndexedSlices(tf.where(self.is_applied, rows.values, 0), rows.indices))
        # To add 0 changes -0.0, and flushes subnormal numbers: rows are chosen whole.
        after = tf.gather(stored, rows.indices)
        stored.scatter_update(tf.IndexedSlices(tf.where(self.is_applied, after, old_rows), rows.indices))


def _assign_all_copies(strategy, stored, value):
    strategy.extended.update(stored, lambda copy, value: copy.assign(value), args=(value,))


def _with_values(function, grad):
    """Returns a gradient with `function` of its values; of a sparse one of the rows that are there."""
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(function(grad.values), grad.indices, grad.dense_shape)
    return None if grad is None else function(grad)


def _widened(values):
    if values.dtype == tf.bfloat16 and in_xla():
        # Not the cast that the sum of the check has: for all that share one, XLA writes the gradients out in float32.
        return small_state.widened(values)
    return tf.cast(values, tf.float32) if values.dtype in (tf.float16, tf.bfloat16) else values


def _copied(grad):
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(tf.identity(grad.values), tf.identity(grad.indices), grad.dense_shape)
    return None if grad is None else tf.identity(grad)


def _update_then_select(optimizer, grads, variables, is_applied, scale):
    """For any other optimizer: updates, then puts the old values back where the step is skipped."""
    touched = [v.value if isinstance(v, keras.Variable) else v for v in variables]
    touched += [v.value for v in optimizer.inner_optimizer.variables]
    old_values = [tf.identity(variable) for variable in touched]
    _update_inner(optimizer, grads, variables, scale)
    for variable, old in zip(touched, old_values, strict=True):
        variable.assign(tf.where(is_applied, variable, old))


def check_all_reduce_dtype(dtype):
    """Raises `ValueError` unless gradients can be summed in `dtype`."""
    if dtype is not None and not is_one_of(dtype, _ALL_REDUCE_DTYPES):
        raise ValueError(
            f"Expected `all_reduce_dtype` to be one of {_ALL_REDUCE_DTYPES}. Received: all_reduce_dtype={dtype!r}. "
            "Leave it out to sum gradients in their own dtype."
        )


def _sums_in_chosen_dtype(optimizer) -> bool:
    """Whether there is something to sum in a dtype that was chosen; on one device there is not."""
    return optimizer.all_reduce_dtype is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1


def _summed(optimizer, scaled_grads, variables, takes_unscaled: bool) -> list:
    """Returns the sums of this replica's scaled gradients over all replicas, in `optimizer.all_reduce_dtype`.

    Scaled, as the small ones would be lost in float16. A sum that overflows is infinite, and the check skips the step.
    """
    if takes_unscaled and optimizer.all_reduce_dtype != "float32":
        raise ValueError(
            "Expected scaled gradients with `all_reduce_dtype`, as unscaled ones may be too small for 16 bits. "
            f"Received: all_reduce_dtype={optimizer.all_reduce_dtype!r} and gradients that are not scaled. Call "
            "`scale_loss` and pass its gradients to `apply`, or leave `all_reduce_dtype` out."
        )
    return _sums_over_replicas(functools.partial(tf.cast, dtype=optimizer.all_reduce_dtype), scaled_grads, variables)


def _sums_over_replicas(cast, grads, variables) -> list:
    """Returns the sums of this replica's gradients over all replicas, of values that were `cast` before."""
    # A gradient that is the new value (float8 scales) is not summed by Keras either.
    is_summed = [
        g is not None and not _keras.overwrites_with_gradient(v) for g, v in zip(grads, variables, strict=True)
    ]
    summed = [_with_values(cast, grad) for grad, sums in zip(grads, is_summed, strict=True) if sums]
    if summed:
        summed = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, summed)
    sums = iter(summed)
    return [next(sums) if takes else grad for grad, takes in zip(grads, is_summed, strict=True)]


def of_all_replicas(grads, variables) -> list:
    """Returns the gradients of the whole batch, where each replica has those of its own rows."""
    if tf.distribute.get_strategy().num_replicas_in_sync == 1:
        return grads
    return _sums_over_replicas(_widened, grads, variables)


def _no_second_sum(optimizer):
    """Returns a context in which the inner optimizer takes its gradients as summed over replicas already."""
    # Around all replicas: each runs in a thread of its own, and the last one out must not find the method uncovered.
    methods = {_keras.GRADIENT_SUM_METHOD: list} if _sums_in_chosen_dtype(optimizer) else {}
    return small_state.replaced_methods(optimizer.inner_optimizer, lambda part: methods)
