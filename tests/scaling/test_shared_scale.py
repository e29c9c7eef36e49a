import keras
import numpy as np
import pytest

from mpkeras.policies.loss_scaling import DynamicLossScale, LossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.inventory import find_optimizers
from mpkeras.training.prepare import prepare
from tests.step_modes import MODES, applier, snapshot

# Most tests hand the optimizers scaled gradients without a loss.
pytestmark = pytest.mark.filterwarnings("ignore:.*the loss was not scaled since the last step")

GRADIENT = np.array([1.0, 6.0], "float32")
INFINITE = np.array([1.0, np.inf], "float32")
tensor = keras.ops.convert_to_tensor


def variable():
    return keras.Variable(np.array([1.0, 2.0], "float32"))


def numpy(v):
    return keras.ops.convert_to_numpy(v)


def pair(**options):
    """Two optimizers with one scale of 1024; after a step of 0.5 with GRADIENT, [1, 2] is [0.5, -1]."""
    owner = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=DynamicLossScale(1024.0, **options))
    return owner, LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=owner)


def state(optimizer):
    return float(optimizer.dynamic_scale), int(optimizer.step_counter), int(optimizer.skipped_steps)


def test_both_hold_the_same_variables_each_once():
    owner, follower = pair()
    owner.build([variable()])
    follower.build([variable()])
    assert owner.scale_state.keys() == {"step_counter", "dynamic_scale", "hysteresis_counter"}
    for name, shared in owner.scale_state.items():
        assert follower.scale_state[name] is shared
        assert [id(v) for v in follower.variables].count(id(shared)) == 1
        assert [id(v) for v in owner.variables].count(id(shared)) == 1
    names = [v.name for v in owner.variables]
    assert [v.name for v in follower.variables] == names
    own = {id(v) for v in follower.variables} - {id(v) for v in follower.scale_state.values()}
    assert not own & {id(v) for v in owner.variables}


@pytest.mark.parametrize("mode", MODES)
def test_every_step_of_either_moves_the_scale_and_each_counts_its_own_skips(mode):
    owner, follower = pair(dynamic_growth_steps=2)
    v, w = variable(), variable()
    step, other_step = applier(owner, [v], mode), applier(follower, [w], mode)
    step([GRADIENT * 1024.0])
    assert (state(owner), state(follower)) == ((1024.0, 1, 0), (1024.0, 1, 0))
    other_step([GRADIENT * 1024.0])
    assert (state(owner), state(follower)) == ((2048.0, 0, 0), (2048.0, 0, 0))
    other_step([INFINITE])
    assert (state(owner), state(follower)) == ((1024.0, 0, 0), (1024.0, 0, 1))
    step([INFINITE])
    assert (state(owner), state(follower)) == ((512.0, 0, 1), (512.0, 0, 1))
    step([GRADIENT * 512.0])
    # 1 - 0.5 * 1, 2 - 0.5 * 6: exact, as the scale is a power of two; a second step by the owner
    np.testing.assert_array_equal(numpy(w), [0.5, -1.0])
    np.testing.assert_array_equal(numpy(v), [0.0, -4.0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "jit"])
@pytest.mark.parametrize("gradient", [pytest.param(INFINITE, id="backs off"), pytest.param(GRADIENT, id="grows")])
@pytest.mark.parametrize("way", ["apply", "get_unscaled_gradients", "another loss after the move"])
def test_a_step_is_unscaled_with_the_scale_its_loss_was_scaled_with(mode, gradient, way):
    """Both losses are scaled, then both optimizers applied: the first one has moved the scale by then."""
    owner, follower = pair(dynamic_growth_steps=1)
    v, w = variable(), variable()
    owner.build([v])
    follower.build([w])
    one = keras.ops.ones(())

    def step():
        scaled, other_scaled = owner.scale_loss(one), follower.scale_loss(one)
        owner.apply([tensor(gradient) * scaled], [v])
        grads = [tensor(GRADIENT) * other_scaled]
        if way == "another loss after the move":
            # Its gradients are added: they must have been scaled alike.
            grads = [(grads[0] + tensor(GRADIENT) * follower.scale_loss(one)) * 0.5]
        if way == "get_unscaled_gradients":
            grads = follower.get_unscaled_gradients(grads)
        follower.apply(grads, [w])

    if mode in ("graph", "xla"):
        import tensorflow as tf

        step = tf.function(step, jit_compile=mode == "xla")
    step()
    np.testing.assert_array_equal(numpy(w), [0.5, -1.0])
    step()
    np.testing.assert_array_equal(numpy(w), [0.0, -4.0])
    # two moves a step
    expected = 4096.0 * 4.0 if gradient is GRADIENT else 1024.0
    assert float(owner.dynamic_scale) == float(follower.dynamic_scale) == expected


@pytest.mark.backends("jax")
def test_the_scale_of_a_scope_is_not_noted_for_what_comes_after():
    """A `StatelessScope` has a state of its own, and with it a scale."""
    owner, follower = pair()
    v = variable()
    follower.build([v])
    state = [u.value * 4.0 if u is owner.dynamic_scale else u.value for u in follower.variables]
    with keras.StatelessScope(state_mapping=list(zip(follower.variables, state, strict=True))):
        assert float(follower.scale_loss(tensor(1.0))) == 4096.0
    follower.apply([tensor(GRADIENT) * 1024.0], [v])
    np.testing.assert_array_equal(numpy(v), [0.5, -1.0])


class Halving(LossScale):
    """Its scale is the state variable's own value, which is not to change once noted."""

    def initial_state(self):
        return {"dynamic_scale": 1024.0}

    def next_state(self, state, is_finite):
        return {"dynamic_scale": state["dynamic_scale"] * 0.5}

    def get_config(self):
        return {}


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "jit"])
def test_the_scale_of_a_rule_of_ones_own_is_noted_as_it_is_then(mode):
    owner = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=Halving())
    follower = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=owner)
    v, w = variable(), variable()
    owner.build([v])
    follower.build([w])

    def step():
        scaled, other_scaled = owner.scale_loss(tensor(1.0)), follower.scale_loss(tensor(1.0))
        owner.apply([tensor(GRADIENT) * scaled], [v])
        follower.apply([tensor(GRADIENT) * other_scaled], [w])

    if mode in ("graph", "xla"):
        import tensorflow as tf

        step = tf.function(step, jit_compile=mode == "xla")
    step()
    assert float(owner.dynamic_scale) == 256.0
    np.testing.assert_array_equal(numpy(w), [0.5, -1.0])


@pytest.mark.backends("tensorflow")
def test_a_scale_noted_outside_does_not_become_a_constant_of_a_graph():
    import tensorflow as tf

    owner, follower = pair()
    v, w = variable(), variable()
    owner.build([v])
    follower.build([w])
    follower.scale_loss(tf.ones(()))

    @tf.function
    def step():
        scaled = follower.scale_loss(tf.ones(()))
        follower.apply([GRADIENT * scaled], [w])
        return scaled

    for scale in (1024.0, 256.0):
        owner.dynamic_scale.assign(scale)
        assert step() == scale
    np.testing.assert_array_equal(numpy(w), [0.0, -4.0])
    assert follower.scale_loss(tf.ones(())) == 256.0


@pytest.mark.backends("jax")
def test_stateless_optimizers_take_turns():
    import jax

    owner, follower = pair(dynamic_growth_steps=1)
    v, w = variable(), variable()
    owner.build([v])
    follower.build([w])

    def scaled_grad(optimizer, values):
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, values, strict=True))):
            return [GRADIENT * optimizer.scale_loss(keras.ops.ones(()))]

    @jax.jit
    def step(first, second, values, other_values):
        values, first = owner.stateless_apply(first, scaled_grad(owner, first), values)
        moved = dict(zip(map(id, owner.variables), first, strict=True))
        second = [moved.get(id(v), value) for v, value in zip(follower.variables, second, strict=True)]
        other_values, second = follower.stateless_apply(second, scaled_grad(follower, second), other_values)
        return first, second, values, other_values

    first, second = [v.value for v in owner.variables], [v.value for v in follower.variables]
    first, second, values, other_values = step(first, second, [v.value], [w.value])
    np.testing.assert_array_equal(values[0], [0.5, -1.0])
    np.testing.assert_array_equal(other_values[0], [0.5, -1.0])
    scale = [v.name for v in follower.variables].index("dynamic_scale")
    assert (float(first[scale]), float(second[scale])) == (2048.0, 4096.0)


@pytest.mark.backends("jax")
def test_the_shared_scale_is_not_baked_into_a_compiled_function_even_before_the_build():
    import jax

    _, follower = pair()
    with pytest.raises(ValueError, match="bakes the present"):
        jax.jit(follower.scale_loss)(1.0)


def test_the_follower_may_be_built_and_used_before_the_owner():
    owner, follower = pair()
    w = variable()
    follower.apply([tensor(INFINITE)], [w])
    assert not owner.built
    assert not owner.inner_optimizer.built
    assert float(owner.loss_scale) == float(follower.loss_scale) == 512.0
    v = keras.Variable(np.ones((2, 2), "float32"))
    owner.apply([tensor(np.full((2, 2), 512.0, "float32"))], [v])
    assert owner.trainable_variables == [v]
    # 1 - 0.5 * 1
    np.testing.assert_array_equal(numpy(v), np.full((2, 2), 0.5))
    assert int(follower.step_counter) == 1


def test_a_third_one_shares_with_the_first_and_a_changed_rule_holds_for_all():
    owner, follower = pair()
    third = LossScaleOptimizer("sgd", loss_scale=follower)
    assert third.scale_state["dynamic_scale"] is owner.scale_state["dynamic_scale"]
    third.dynamic_growth_steps = 5
    assert owner.dynamic_growth_steps == follower.dynamic_growth_steps == 5


def test_a_loaded_configuration_has_a_scale_of_its_own_by_the_same_rule():
    owner, follower = pair(hysteresis=2)
    loaded = LossScaleOptimizer.from_config(follower.get_config())
    assert loaded.get_config() == follower.get_config()
    assert loaded.loss_scale_rule == owner.loss_scale_rule
    loaded.build([variable()])
    assert loaded.scale_state["dynamic_scale"] is not follower.scale_state["dynamic_scale"]


def test_a_state_saved_by_one_pair_is_loaded_by_another():
    owner, follower = pair()
    new_owner, new_follower = pair()
    stores = {}, {}
    for optimizer in (owner, follower, new_owner, new_follower):
        optimizer.build([variable()])
    follower.apply([tensor(INFINITE)])
    owner.apply([tensor(GRADIENT)])
    for optimizer, store in zip((owner, follower), stores, strict=True):
        optimizer.save_own_variables(store)
    for optimizer, store in zip((new_owner, new_follower), stores, strict=True):
        optimizer.load_own_variables(store)
    assert snapshot(new_owner.variables) == snapshot(owner.variables)
    assert snapshot(new_follower.variables) == snapshot(follower.variables)


def test_errors_show_the_remedy():
    owner, _ = pair()
    with pytest.raises(ValueError, match="wrapper of the same.*Use that one"):
        LossScaleOptimizer(owner.inner_optimizer, loss_scale=owner)
    with pytest.raises(ValueError, match="does not scale the loss itself"):
        LossScaleOptimizer(owner, loss_scale=owner)
    with pytest.raises(TypeError, match=r"stock Keras' own.*`mpkeras\.LossScaleOptimizer` and pass"):
        LossScaleOptimizer("sgd", loss_scale=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))
    with pytest.raises(ValueError, match="the scale to be given once"):
        LossScaleOptimizer("sgd", initial_scale=8.0, loss_scale=owner)
    with pytest.raises(ValueError, match="`dynamic=False`"):
        LossScaleOptimizer("sgd", initial_scale=8.0, dynamic=False, loss_scale=owner)
    with pytest.raises(TypeError, match="Expected a `loss_scale` of"):
        LossScaleOptimizer("sgd", loss_scale=keras.optimizers.SGD())


class Holder(keras.Model):
    """Holds optimizers in every way there is."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.in_dict = {"g": keras.optimizers.SGD(), "rate": 0.1, "d": keras.optimizers.SGD()}
        self.in_list = [keras.optimizers.SGD(), None]
        self._in_tuple = (1.0, keras.optimizers.SGD())
        self.alone = keras.optimizers.SGD()
        self.again = self.in_list[0]

    def build(self, input_shape):
        self.dense.build(input_shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


PLACES = ["optimizer", "in_dict['g']", "in_dict['d']", "in_list[0]", "_in_tuple[1]", "alone"]


def test_optimizers_in_lists_tuples_and_dictionaries_are_found_and_wrapped_where_they_are():
    model = Holder()
    model.build((None, 2))
    model.compile("sgd", "mse")
    plain = find_optimizers(model)
    assert list(plain) == PLACES
    containers = model.in_dict, model.in_list
    prepare(model, "mixed_float16")
    found = find_optimizers(model)
    assert list(found) == PLACES
    assert all(isinstance(optimizer, LossScaleOptimizer) for optimizer in found.values())
    assert [o.inner_optimizer for o in found.values()] == list(plain.values())
    assert containers[0] is model.in_dict
    assert containers[1] is model.in_list
    assert model.in_dict["d"] is found["in_dict['d']"]
    assert model.again is model.in_list[0]
    assert (model.in_dict["rate"], model.in_list[1], model._in_tuple[0]) == (0.1, None, 1.0)
    prepare(model, "mixed_float16")
    assert list(map(id, find_optimizers(model).values())) == list(map(id, found.values()))


def test_prepare_keeps_a_scale_shared():
    model = Holder()
    model.compile("sgd", "mse")
    owner, follower = pair()
    model.in_dict["d"], model.in_dict["g"] = owner, follower
    prepare(model, "mixed_float16")
    assert (model.in_dict["d"], model.in_dict["g"]) == (owner, follower)
    # The follower is found first, and built alone.
    follower.apply([tensor(INFINITE)], [variable()])
    prepare(model, "mixed_float16", loss_scale=DynamicLossScale(64.0, dynamic_growth_steps=3))
    d, g = model.in_dict["d"], model.in_dict["g"]
    assert d.inner_optimizer is owner.inner_optimizer
    assert g.scale_state["dynamic_scale"] is d.scale_state["dynamic_scale"]
    assert d.scale_state["dynamic_scale"] is not model.optimizer.scale_state.get("dynamic_scale")
    assert float(d.dynamic_scale) == 512.0
    assert (int(d.skipped_steps), int(g.skipped_steps)) == (0, 1)
    assert d.dynamic_growth_steps == 3
