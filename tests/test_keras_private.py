"""Notices when a private name of Keras that mpkeras uses changes."""

import keras
import numpy as np
import pytest

from mpkeras import _keras_private as private


@pytest.fixture
def nested():
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="deep")], name="inner")
    return keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="top")], name="outer")


def test_flatten_layers_finds_nested_layers_once(nested):
    names = [layer.name for layer in private.flatten_layers(nested)]
    assert {"inner", "deep", "top"} <= set(names)
    assert len(names) == len(set(names))
    assert private.flatten_layers(nested, include_self=True)[0] is nested
    with pytest.raises(TypeError, match="Pass the model itself"):
        private.flatten_layers(3)


def test_direct_sublayers_stop_at_the_first_level(nested):
    names = {layer.name for layer in private.direct_sublayers(nested)}
    assert {"inner", "top"} <= names
    assert "deep" not in names


def test_a_built_optimizer_knows_its_variables():
    variables = [keras.Variable([1.0]), keras.Variable([2.0])]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(variables)
    known = private.optimizer_trainable_variables(optimizer)
    assert [id(v) for v in known] == [id(v) for v in variables]


def test_put_is_an_unchecked_assign():
    v = keras.Variable([1.0, 2.0])
    private.put(v, keras.ops.convert_to_tensor([3.0, 4.0]))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(v), [3.0, 4.0])


def test_an_optimizer_counts_its_steps():
    v = keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer.build([v])
    assert any(private.step_count(optimizer) is known for known in optimizer.variables)
    assert int(private.step_count(optimizer)) == 0


def test_the_sums_of_an_accumulating_optimizer_are_taken_once():
    v = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    optimizer.build([v])
    optimizer.apply([keras.ops.convert_to_tensor([4.0, 8.0])], [v])
    (total,), calls = private.taken_accumulation(optimizer)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(total.value), [4.0, 8.0])
    assert int(calls) == 1
    assert private.taken_accumulation(optimizer)[0] == []


def test_weight_decay_goes_through_one_method_and_can_be_excluded():
    v, w = keras.Variable([1.0], name="v"), keras.Variable([1.0], name="w")
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["w"])
    assert private.decays(optimizer, v) and not private.decays(optimizer, w)
    assert callable(getattr(optimizer, private.WEIGHT_DECAY_METHOD))


@pytest.mark.backends("tensorflow")
def test_gradients_are_summed_over_replicas_in_one_method():
    optimizer = keras.optimizers.SGD(0.1)
    assert callable(getattr(optimizer, private.GRADIENT_SUM_METHOD))
    optimizer.__dict__[private.GRADIENT_SUM_METHOD] = lambda grads_and_vars: pytest.fail("called")
    v = keras.Variable([1.0])
    optimizer.build([v])
    with pytest.raises(pytest.fail.Exception):
        optimizer.apply([keras.ops.ones(1)], [v])


def test_overwrites_with_gradient():
    v = keras.Variable([1.0])
    assert not private.overwrites_with_gradient(v)
    v.overwrite_with_gradient = True
    assert private.overwrites_with_gradient(v)
    assert not private.overwrites_with_gradient(object())


def test_in_stateless_scope():
    assert not private.in_stateless_scope()
    with keras.StatelessScope():
        assert private.in_stateless_scope()


def test_autocast_scope_says_how_variables_are_read():
    v = keras.Variable([1.0])
    assert private.autocast_dtype() is None
    with private.autocast_scope("float16"):
        assert private.autocast_dtype() == "float16"
        assert keras.backend.standardize_dtype(v.value.dtype) == "float16"
    assert private.autocast_dtype() is None


def test_masks_are_copied():
    class SeesMask(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.supports_masking = True

        def call(self, x, mask=None):
            return keras.ops.where(mask, x, 0.0)

    source = keras.layers.Masking()(keras.ops.convert_to_tensor([[[1.0], [0.0]]]))
    target = keras.ops.convert_to_tensor([[5.0, 5.0]])
    private.copy_mask(source, target)
    seen = SeesMask()(target)
    assert keras.ops.convert_to_numpy(seen).tolist() == [[5.0, 0.0]]


def test_functional_models_cast_no_inputs_and_others_do(nested):
    inputs = keras.Input((2,))
    assert private.casts_no_inputs(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    assert not private.casts_no_inputs(nested)


def test_own_variables_are_not_those_of_sublayers(nested):
    assert private.own_variables(nested) == []
    assert [v.name for v in private.own_variables(nested.layers[-1])] == ["kernel", "bias"]


def test_a_layer_knows_its_random_generators(nested):
    dropout = keras.layers.Dropout(0.5)
    assert private.own_seed_generators(dropout) == [dropout.seed_generator]
    nested.add(dropout)
    assert private.own_seed_generators(nested) == []


def test_the_global_random_generator_is_known_and_can_be_put_back():
    before = private.made_global_seed_generator()
    try:
        private.set_global_seed_generator(None)
        assert private.made_global_seed_generator() is None
        keras.random.normal((1,))
        made = private.made_global_seed_generator()
        assert isinstance(made, keras.random.SeedGenerator)
        assert keras.src.random.seed_generator.global_seed_generator() is made
    finally:
        private.set_global_seed_generator(before)


def test_functional_models_know_the_structure_of_their_inputs():
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
    model = keras.Model(inputs, keras.layers.Concatenate()([inputs["a"], inputs["b"]]))
    assert {name: tensor.shape for name, tensor in private.input_structure(model).items()} == {
        "a": (None, 2),
        "b": (None, 3),
    }


def test_frozen_weights_are_not_statistics():
    norm, dense = keras.layers.BatchNormalization(), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((2,)), norm, dense])
    dense.trainable = False
    frozen = private.frozen_weights(model)
    names = {v.name for v in model.non_trainable_variables if id(v) not in frozen}
    assert {"moving_mean", "moving_variance"} <= names
    assert not names & {"kernel", "bias"}


def test_the_optimizer_of_the_compile_configuration_can_be_replaced(nested):
    nested.compile("sgd", "mse")
    private.replace_compiled_optimizer(nested, keras.optimizers.Adam(0.25))
    saved = nested.get_compile_config()["optimizer"]
    assert saved["class_name"] == "Adam"
    assert saved["config"]["learning_rate"] == 0.25


@pytest.mark.backends("tensorflow")
def test_xla_is_noticed_while_tracing():
    """`tensorflow.python.ops.control_flow_util`, read in TensorFlow 2.21."""
    import tensorflow as tf

    from mpkeras._tensorflow import in_xla

    seen = {}

    def look(name):
        seen[name] = in_xla()
        return tf.constant(0)

    look("eager")
    tf.function(lambda: look("graph"))()
    tf.function(lambda: look("xla"), jit_compile=True)()
    inner = tf.function(lambda: look("nested"), jit_compile=True)
    tf.function(lambda: inner())()
    assert seen == {"eager": False, "graph": False, "xla": True, "nested": True}


@pytest.mark.backends("tensorflow")
def test_stock_optimizers_assign_through_keras_only():
    """What `selecting_assignments` relies on: no raw assignment is left in the compiled update.

    Every stock optimizer is run with weight decay and averages under XLA on a step that must be skipped; a
    write that the selection does not cover would change a variable. See also `test_optimizers.py`.
    """
    import numpy as np
    import tensorflow as tf

    from mpkeras._tensorflow import _assigns_through_keras
    from mpkeras.optimizers import LossScaleOptimizer
    from tests.step_modes import snapshot

    names = [
        name
        for name in dir(keras.optimizers)
        if isinstance(getattr(keras.optimizers, name), type)
        and issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    ]
    assert len(names) >= 13
    for name in names:
        inner = getattr(keras.optimizers, name)(learning_rate=0.1, weight_decay=0.01, use_ema=True)
        assert _assigns_through_keras(inner)
        if name == "Muon" and keras.__version__ < "3.11":
            continue  # asks TensorFlow variables for a `path` there, under any wrapper or none
        v = keras.Variable(np.ones((4, 4), "float32"), constraint=keras.constraints.NonNeg())
        optimizer = LossScaleOptimizer(inner, loss_scale=None)
        optimizer.build([v])

        @tf.function(jit_compile=True)
        def step(g):
            optimizer.apply([g], [v])  # noqa: B023  # called in this round only

        step(tf.ones((4, 4)))
        before = snapshot([v, *inner.variables])
        step(tf.fill((4, 4), np.inf))
        assert snapshot([v, *inner.variables]) == before, name
        step(tf.ones((4, 4)))
        assert snapshot([v, *inner.variables]) != before, name


def test_losses_of_the_last_call_outlive_another_in_a_scope():
    layer = keras.layers.Dense(2, activity_regularizer="l2")
    model = keras.Sequential([keras.Input((2,)), layer])
    x = np.ones((1, 2), "float32")
    model(x)
    losses = model.losses
    with private.kept_losses([model, layer]), keras.StatelessScope():
        model(x)
    assert [id(loss) for loss in model.losses] == [id(loss) for loss in losses] and len(losses) == 1


def test_a_functional_model_knows_the_structure_of_its_inputs(nested):
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((2,), name="b")}
    model = keras.Model(inputs, keras.layers.Add()([inputs["a"], inputs["b"]]))
    assert private.input_structure(model) == inputs
    assert private.input_structure(private.graph_of(nested)).shape == (None, 2)
