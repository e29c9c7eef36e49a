"""P3: no loop that scales its loss is warned of, however it is compiled, and every loop that forgets to is."""

import contextlib
import gc
import re
import threading
import warnings

import keras
import numpy as np
import pytest

from mpkeras.scaling.facts import gradient_statistics, opened_step
from mpkeras.scaling.optimizer import LossScaleOptimizer

SCALE = 8.0
SLOPE = np.array([1.0, 3.0], "float32")
FORGOTTEN = "the loss was not scaled since the last step"


def numpy(tensor):
    return keras.ops.convert_to_numpy(tensor)


def optimizer_and_variable(**options):
    v = keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=SCALE, **options)
    optimizer.build([v])
    return optimizer, v


def scaled_gradient(optimizer, x=None):
    """The gradient of the scaled loss `mean(x) * (v0 + 3 v1)`, for an `x` of ones."""
    loss = keras.ops.ones(()) if x is None else keras.ops.mean(x)
    return optimizer.scale_loss(loss) * keras.ops.convert_to_tensor(SLOPE)


def eager(optimizer, v):
    return lambda x: optimizer.apply([scaled_gradient(optimizer, x)], [v])


def of_tf_keras(optimizer, v):
    def step(x):
        (grad,) = optimizer.get_unscaled_gradients([scaled_gradient(optimizer, x)])
        optimizer.apply_gradients([(grad, v)])

    return step


def tf_function(function, **options):
    import tensorflow as tf

    return tf.function(function, **options)


def under_a_tape(optimizer, v):
    import tensorflow as tf

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            scaled_loss = optimizer.scale_loss(tf.reduce_mean(x) * tf.reduce_sum(v.value * SLOPE))
        optimizer.apply([tape.gradient(scaled_loss, v.value)], [v])

    return step


def applied_in_a_function_of_its_own(optimizer, v):
    apply = tf_function(lambda grad: optimizer.apply([grad], [v]))
    return tf_function(lambda x: apply(scaled_gradient(optimizer, x)))


def gradients_alone_in_a_function(optimizer, v):
    gradient = tf_function(lambda x: scaled_gradient(optimizer, x))
    return lambda x: optimizer.apply([gradient(x)], [v])


def two_functions(optimizer, v):
    gradient = tf_function(lambda x: scaled_gradient(optimizer, x))
    apply = tf_function(lambda grad, x: optimizer.apply([grad], [v]))
    # The second one is traced anew where the first is not.
    return lambda x: apply(gradient(keras.ops.ones(2)), x)


def scaled_in_a_function_within(optimizer, v):
    gradient = tf_function(lambda: scaled_gradient(optimizer))
    return tf_function(lambda x: optimizer.apply([gradient()], [v]))


def stateless(optimizer, v, compile_step=False, compile_parts=False):
    import jax

    def compiled(function, is_compiled):
        return jax.jit(function) if is_compiled else function

    def scaled_loss(value, state, x):
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(keras.ops.mean(x) * (value * SLOPE).sum())

    def updated(state, value, x):
        return apply(state, gradient(value, state, keras.ops.ones(2)), value, x)

    gradient = compiled(jax.grad(scaled_loss), compile_parts)
    apply = compiled(lambda state, grad, value, x: optimizer.stateless_apply(state, [grad], [value]), compile_parts)
    update = compiled(updated, compile_step)

    def step(x):
        (value,), state = update([u.value for u in optimizer.variables], v.value, x)
        for variable, new in zip([v, *optimizer.variables], [value, *state], strict=True):
            variable.assign(new)

    return step


def in_torch_compile(optimizer, v):
    import torch

    gradient = torch.compile(lambda x: scaled_gradient(optimizer, x), backend="eager")
    return lambda x: optimizer.apply([gradient(x)], [v])


# Both halves of a step in one trace, or in none.
WHOLE = [eager, of_tf_keras] + {
    "tensorflow": [
        lambda o, v: tf_function(eager(o, v)),
        lambda o, v: tf_function(eager(o, v), jit_compile=True),
        under_a_tape,
    ],
    "jax": [stateless, lambda o, v: stateless(o, v, compile_step=True)],
    "torch": [],
}[keras.backend.backend()]
# A part that is compiled by itself scales a loss, or applies, at each call without Python seeing it.
PARTS = {
    "tensorflow": [
        gradients_alone_in_a_function,
        two_functions,
        scaled_in_a_function_within,
        applied_in_a_function_of_its_own,
    ],
    "jax": [
        lambda o, v: stateless(o, v, compile_parts=True),
        lambda o, v: stateless(o, v, compile_step=True, compile_parts=True),
    ],
    "torch": [in_torch_compile],
}[keras.backend.backend()]


def train(loop):
    optimizer, v = optimizer_and_variable()
    step = loop(optimizer, v)
    # Each traces the step anew.
    for rows in (2, 2, 3, 4):
        step(keras.ops.ones(rows))
    return optimizer, v


@pytest.mark.slow
@pytest.mark.parametrize("loop", WHOLE + PARTS)
def test_a_loop_that_scales_its_loss_is_not_warned_of(loop):
    _, v = train(loop)
    np.testing.assert_array_equal(numpy(v), [1.0 - 0.5 * 4 * 1.0, 2.0 - 0.5 * 4 * 3.0])


@pytest.mark.slow
@pytest.mark.parametrize("loop", WHOLE)
def test_a_loop_that_forgets_is_told_whatever_came_before(loop):
    optimizer, v = train(loop)
    # What `get_unscaled_gradients` said holds until now.
    optimizer.scale_loss(keras.ops.ones(()))
    optimizer.apply([keras.ops.convert_to_tensor(SLOPE)], [v])
    with pytest.warns(UserWarning, match=FORGOTTEN):
        optimizer.apply([keras.ops.convert_to_tensor(SLOPE)], [v])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once for an optimizer
        optimizer.apply([keras.ops.convert_to_tensor(SLOPE)], [v])


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_a_compiled_loop_that_forgets_is_told_as_it_is_traced():
    optimizer, v = train(under_a_tape)
    forgets = tf_function(lambda grad: optimizer.apply([grad], [v]))
    with pytest.warns(UserWarning, match=FORGOTTEN):
        forgets(keras.ops.convert_to_tensor(SLOPE))


def test_two_optimizers_of_one_loss_take_what_one_of_them_has_scaled_and_unscaled():
    (first, v), (second, w) = optimizer_and_variable(), optimizer_and_variable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with opened_step([first, second]):
            (grad,) = first.get_unscaled_gradients([scaled_gradient(first)])
            first.apply([grad], [v])
            second.apply([grad], [w])
    for variable in (v, w):
        np.testing.assert_array_equal(numpy(variable), [1.0 - 0.5 * 1.0, 2.0 - 0.5 * 3.0])
    with opened_step([first, second]):
        grad = scaled_gradient(first)
        first.apply([grad], [v])
        with pytest.warns(UserWarning, match=f"{FORGOTTEN}.*through the other one's `get_unscaled_gradients`"):
            second.apply([grad], [w])


@pytest.mark.parametrize("is_guarded", [True, False])
def test_losses_that_are_scaled_together_may_have_an_update_each(is_guarded):
    optimizer, v = optimizer_and_variable()
    with opened_step([optimizer]) if is_guarded else contextlib.nullcontext():
        grads = [factor * scaled_gradient(optimizer) for factor in (1.0, 2.0)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for grad in grads:
                optimizer.apply([grad], [v])
        np.testing.assert_array_equal(numpy(v), [1.0 - 0.5 * 3 * 1.0, 2.0 - 0.5 * 3 * 3.0])
        with pytest.warns(UserWarning, match=FORGOTTEN):
            optimizer.apply([grads[0]], [v])


def test_a_loss_that_is_not_finite_is_known_to_each_update_of_the_losses_scaled_with_it():
    optimizer, v = optimizer_and_variable()
    with opened_step([optimizer]):
        grads = [scaled_gradient(optimizer, keras.ops.convert_to_tensor([x])) for x in (1.0, np.nan)]
        for grad in grads:
            optimizer.apply([grad], [v])
    assert (int(optimizer.skipped_steps), int(optimizer.nonfinite_losses), float(optimizer.loss_scale)) == (2, 2, SCALE)


def test_the_gradients_of_one_loss_are_applied_in_parts_as_the_warning_says():
    first, second = keras.Variable([1.0, 2.0]), keras.Variable([1.0, 2.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=SCALE)
    optimizer.build([first, second])
    with opened_step([optimizer]):
        scaled = scaled_gradient(optimizer)
        optimizer.apply([scaled], [first])
        with pytest.warns(UserWarning, match=f"{FORGOTTEN}.*through `get_unscaled_gradients` at once"):
            optimizer.apply([scaled], [second])
    for variable in (first, second):
        variable.assign([1.0, 2.0])
    with opened_step([optimizer]):
        scaled = scaled_gradient(optimizer)
        grads = optimizer.get_unscaled_gradients([scaled, scaled])
        optimizer.apply(grads[:1], [first])
        optimizer.apply(grads[1:], [second])
    for variable in (first, second):
        np.testing.assert_array_equal(numpy(variable), [1.0 - 0.5 * 1.0, 2.0 - 0.5 * 3.0])


@pytest.mark.backends("jax")
@pytest.mark.parametrize("scales", [False, True], ids=["forgets to scale", "scales outside of a scope"])
def test_a_stateless_step_is_told_the_scope_to_scale_in(scales):
    import jax

    optimizer, v = optimizer_and_variable()
    state = [variable.value for variable in optimizer.variables]

    def updated(value, optimizer_variables, scaled):
        gradient = jax.grad(lambda value: scaled((value * SLOPE).sum(), optimizer_variables))(value)
        return optimizer.stateless_apply(optimizer_variables, [gradient], [value])[0][0]

    def step(scaled):
        return jax.jit(lambda value, optimizer_variables: updated(value, optimizer_variables, scaled))(v.value, state)

    if scales:
        with pytest.raises(ValueError, match="outside, which bakes") as told:
            step(lambda loss, _: optimizer.scale_loss(loss))
        message = str(told.value)
    else:
        with pytest.warns(UserWarning, match=FORGOTTEN) as told:
            step(lambda loss, _: loss)
        message = str(told[0].message)
    scope = re.search(r"in `(keras\.StatelessScope\(.*?)`, with the `optimizer_variables` that", message)[1]

    def in_scope(loss, optimizer_variables):
        with eval(scope, {"keras": keras, "optimizer": optimizer, "optimizer_variables": optimizer_variables}):
            return optimizer.scale_loss(loss)

    np.testing.assert_array_equal(numpy(step(in_scope)), [1.0 - 0.5 * 1.0, 2.0 - 0.5 * 3.0])


def in_a_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.parametrize("scales", [True, False])
@pytest.mark.parametrize("unscales", [True, False])
def test_the_parts_of_a_step_may_run_in_threads_of_their_own(scales, unscales):
    optimizer, v = optimizer_and_variable()
    one = keras.ops.ones(())
    scaled = in_a_thread(lambda: optimizer.scale_loss(one)) if scales else optimizer.scale_loss(one)
    grads = [scaled * keras.ops.convert_to_tensor(SLOPE)]
    if unscales:
        grads = in_a_thread(lambda: optimizer.get_unscaled_gradients(grads))
    optimizer.apply(grads, [v])
    np.testing.assert_array_equal(numpy(v), [0.5, 0.5])


@pytest.mark.backends("tensorflow", "torch")
def test_a_loss_that_is_not_finite_is_known_in_another_thread():
    optimizer, v = optimizer_and_variable()
    scaled = in_a_thread(lambda: optimizer.scale_loss(keras.ops.full((), np.inf)))
    optimizer.apply([scaled * keras.ops.convert_to_tensor(SLOPE)], [v])
    # Otherwise the scale would have backed off.
    assert (float(optimizer.loss_scale), int(optimizer.nonfinite_losses)) == (SCALE, 1)


@pytest.mark.backends("jax")
@pytest.mark.parametrize("where", ["before `apply`", "in `apply`"])
def test_a_traced_step_that_raises_leaves_nothing_behind(where):
    import jax

    optimizer, v = optimizer_and_variable()

    @jax.jit
    def step(state, value):
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            optimizer.scale_loss(value.sum())
        # As our own train step says that it knows the loss.
        optimizer.facts.loss_flags = [keras.ops.isfinite(value.sum())]
        if where == "in `apply`":
            optimizer.stateless_apply(state, [value, value], [value, value])
        raise ValueError("not one to one")

    with pytest.raises(ValueError, match="one to one"):
        step([u.value for u in optimizer.variables], v.value)
    optimizer.apply([scaled_gradient(optimizer)], [v])
    np.testing.assert_array_equal(numpy(v), [0.5, 0.5])
    with pytest.warns(UserWarning, match=FORGOTTEN) if where == "in `apply`" else warnings.catch_warnings():
        optimizer.apply([SCALE * keras.ops.convert_to_tensor(SLOPE)], [v])
    np.testing.assert_array_equal(numpy(v), [0.0, -1.0])


def test_a_step_that_raises_is_over():
    optimizer, v = optimizer_and_variable()
    optimizer.scale_loss(keras.ops.full((), np.nan))
    with pytest.raises(ValueError, match="one gradient for each variable"):
        optimizer.apply([keras.ops.convert_to_tensor(SLOPE)] * 2, [v])
    with pytest.warns(UserWarning, match=FORGOTTEN):
        optimizer.apply([SCALE * keras.ops.convert_to_tensor(SLOPE)], [v])
    np.testing.assert_array_equal(numpy(v), [0.5, 0.5])
    assert int(optimizer.nonfinite_losses) == 0


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_that_are_all_missing_are_an_error_as_in_keras(steps):
    optimizer, v = optimizer_and_variable()
    optimizer.accumulate(steps)
    before = [numpy(u).tolist() for u in optimizer.variables]
    optimizer.facts.wants_statistics = True
    optimizer.scale_loss(keras.ops.ones(()))
    with pytest.raises(ValueError, match="No gradients provided for any variable.*Pass gradients"):
        optimizer.apply([None], [v])
    assert [numpy(u).tolist() for u in optimizer.variables] == before
    if keras.backend.backend() == "jax":
        state, value = [u.value for u in optimizer.variables], v.value
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            optimizer.stateless_apply(state, [None], [value])


@pytest.mark.backends("torch")
def test_a_function_in_torch_compile_knows_of_no_other_optimizer():
    """Where its guards were on all optimizers and one was collected meanwhile, they could not be made."""
    import torch

    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    optimizer, v = optimizer_and_variable()
    others = [optimizer_and_variable()[0] for _ in range(2)]
    for other in others:
        other.scale_loss(keras.ops.ones(()))
    gradient = torch.compile(lambda x: scaled_gradient(optimizer, x), backend=backend)

    def programs_after_a_step():
        optimizer.apply([gradient(keras.ops.ones(2))], [v])
        return len(compiled)

    programs = [programs_after_a_step() for _ in range(4)][-1]
    del others, other
    gc.collect()
    assert programs_after_a_step() == programs


@pytest.mark.backends("jax")
def test_a_loop_that_scales_op_by_op_and_applies_in_compiled_code_keeps_one_flag():
    """Its flags are never taken: compiled code cannot use what was computed before it."""
    optimizer = LossScaleOptimizer("sgd", initial_scale=4.0)
    for loss in (1.0, np.inf, 2.0):
        optimizer.scale_loss(keras.ops.convert_to_tensor(loss))
    (flag,) = optimizer.facts.loss_flags
    assert not bool(flag)


def statistics(grads, loss_scale=None):
    return [float(value) for value in gradient_statistics(grads, loss_scale)]


def test_the_norm_and_the_share_of_zeros():
    grads = [keras.ops.convert_to_tensor([3.0 * 8, 0.0]), None, keras.ops.convert_to_tensor([[4.0 * 8], [0.0]])]
    assert statistics(grads, 8.0) == [5.0, 0.5]


def test_both_parts_of_complex_gradients_count():
    grad = keras.ops.convert_to_tensor(np.array([3 + 4j, 12j, 0, 0], "complex64"))
    assert statistics([grad]) == [pytest.approx(13.0), 0.5]


@pytest.mark.backends("jax")
def test_the_rows_of_a_sparse_array_that_are_there():
    import jax.numpy as jnp
    from jax.experimental import sparse

    grad = sparse.BCOO((jnp.array([[3.0, 0.0], [4.0, 0.0]]), jnp.array([[1], [7]])), shape=(100, 2))
    assert statistics([grad]) == [5.0, 0.5]
