"""Notices when a private name of Keras that mpkeras uses changes."""

import functools
import inspect

import keras
import numpy as np
import pytest

from mpkeras import _keras as private
from tests.step_modes import QUICK_TO_START


@pytest.fixture
def nested():
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="deep")], name="inner")
    return keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="top")], name="outer")


def test_layers_are_listed_once_with_what_they_hold_themselves(nested):
    shared, dropout = keras.layers.Dense(2, name="shared"), keras.layers.Dropout(0.5)
    attention = keras.layers.MultiHeadAttention(2, 4)
    attention.build((None, 3, 4), (None, 3, 4))
    two = keras.Sequential([shared, keras.layers.TimeDistributed(keras.layers.Bidirectional(keras.layers.LSTM(2)))])
    for model in (nested, keras.Sequential([two, nested, shared]), attention, dropout):
        listed = private.flatten_layers(model, include_self=True)
        assert listed == model._flatten_layers() and listed[0] is model and len(set(map(id, listed))) == len(listed)
        for layer in listed:
            held = layer._flatten_layers(include_self=False, recursive=False)
            assert list(map(id, private.direct_sublayers(layer))) == list(map(id, held))
        lists = [private.own_lists(layer) for layer in listed]
        found = [variable for _, trained, not_trained, _ in lists for variable in (*trained, *not_trained)]
        seeds = [generator.state for *_, generators in lists for generator in generators]
        assert {id(variable) for variable in found + seeds} == {id(variable) for variable in model.variables}
        assert [list(below) for below, *_ in lists] == [private.direct_sublayers(layer) for layer in listed]
    assert {"inner", "top"} <= {layer.name for layer in private.direct_sublayers(nested)}
    assert private.own_variables(nested) == []
    assert [v.name for v in private.own_variables(nested.layers[-1])] == ["kernel", "bias"]
    assert private.own_seed_generators(dropout) == [dropout.seed_generator]
    nested.add(dropout)
    assert private.own_seed_generators(nested) == []
    with pytest.raises(TypeError, match="Pass the model itself"):
        private.flatten_layers(3)


def test_weights_are_those_made_as_trainable_and_frozen_ones_are_not_statistics():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.layers[0].trainable = False
    assert [variable.name for variable in private.weights(model)] == ["kernel", "bias", "gamma", "beta"]
    frozen = private.frozen_weights(model)
    statistics = {v.name for v in model.non_trainable_variables if id(v) not in frozen}
    assert {"moving_mean", "moving_variance"} <= statistics and not statistics & {"kernel", "bias"}


def test_functional_models_know_the_structure_of_inputs_and_outputs(nested):
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((3,), name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    outputs = {"a": keras.layers.Dense(1)(joined), "b": (keras.layers.Dense(3)(joined),)}
    model = keras.Model(inputs, outputs)
    assert private.input_structure(model) == inputs and private.output_structure(model) == outputs
    assert private.input_structure(private.graph_of(nested)).shape == (None, 2)


def test_a_built_optimizer_knows_its_variables_its_steps_and_its_sums():
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([2.0])]
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    optimizer.build(variables)
    assert list(map(id, private.optimizer_trainable_variables(optimizer))) == list(map(id, variables))
    assert any(private.step_count(optimizer) is known for known in optimizer.variables)
    assert int(private.step_count(optimizer)) == 0
    optimizer.apply([keras.ops.convert_to_tensor([4.0, 8.0]), keras.ops.zeros(1)], variables)
    total, _ = private.accumulated_gradients(optimizer)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(total.value), [4.0, 8.0])
    assert private.accumulated_gradients(keras.optimizers.SGD(0.1)) == []


def test_variables_say_how_they_are_read_and_written():
    layer = keras.layers.Layer()
    variables = [layer.add_weight(shape=()), layer.add_weight(shape=(), autocast=False)]
    variables.append(layer.add_weight(shape=(), dtype="int32", trainable=False))
    assert [private.follows_autocast(variable) for variable in variables] == [True, False, False]
    assert private.autocast_dtype() is None
    with private.autocast_scope("bfloat16"):
        assert private.autocast_dtype() == "bfloat16"
        assert [v.dtype for v in variables] == ["bfloat16", "float32", "int32"]
        assert keras.backend.standardize_dtype(variables[0].value.dtype) == "bfloat16"
        assert keras.backend.standardize_dtype(private.unscoped_value(variables[0]).dtype) == "float32"
        vars(variables[0])[private.AUTOCAST] = False
        assert variables[0].dtype == "float32"
    assert private.autocast_dtype() is None
    private.put(variables[0], keras.ops.convert_to_tensor(3.0))
    assert float(keras.ops.convert_to_numpy(variables[0])) == 3.0
    assert not private.overwrites_with_gradient(variables[0]) and not private.overwrites_with_gradient(object())
    variables[0].overwrite_with_gradient = True
    assert private.overwrites_with_gradient(variables[0])


def test_scopes_that_are_stateless_or_symbolic():
    seen = []

    class Asked(keras.layers.Layer):
        def call(self, x):
            seen.append(private.in_symbolic_scope())
            return x

    layer = Asked()
    layer.compute_output_spec(keras.KerasTensor((2, 3)))
    layer(keras.ops.ones((2, 3)))
    assert seen[0] and not seen[-1]
    assert not private.in_stateless_scope()
    with keras.StatelessScope():
        assert private.in_stateless_scope()


def test_one_update_turns_off_accumulation_and_scaling_for_the_length_of_a_call():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([4], [1.0, 0.5])
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=3, loss_scale_factor=8.0)
    v = keras.Variable([5.0])
    optimizer.build([v])
    for rate, updates in ((1.0, 1), (0.5, 2)):
        before = float(keras.ops.convert_to_numpy(v)[0])
        with private.one_update(optimizer):
            optimizer.apply([keras.ops.convert_to_tensor([2.0])], [v])
        # The calls that update are number 2 and 5, from 0.
        assert float(keras.ops.convert_to_numpy(v)[0]) == before - 2.0 * rate
        assert (int(private.step_count(optimizer)), int(optimizer.iterations)) == (3 * updates, updates)
        assert (optimizer.gradient_accumulation_steps, optimizer.loss_scale_factor) == (3, 8.0)
    with pytest.raises(ZeroDivisionError), private.one_update(optimizer):
        raise ZeroDivisionError
    assert (optimizer.gradient_accumulation_steps, optimizer.loss_scale_factor) == (3, 8.0)
    assert int(optimizer.iterations) == 2 and float(optimizer.learning_rate) == 0.5


@pytest.mark.backends("tensorflow")
def test_gradients_are_summed_over_replicas_in_one_method():
    optimizer = keras.optimizers.SGD(0.1)
    assert callable(getattr(optimizer, private.GRADIENT_SUM_METHOD))
    optimizer.__dict__[private.GRADIENT_SUM_METHOD] = lambda grads_and_vars: pytest.fail("called")
    v = keras.Variable([1.0])
    optimizer.build([v])
    with pytest.raises(pytest.fail.Exception):
        optimizer.apply([keras.ops.ones(1)], [v])


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


@pytest.mark.backends("tensorflow", "torch")
def test_the_logits_of_a_softmax_are_on_its_output():
    """On JAX no tensor takes attributes while a step is traced."""
    logits = keras.ops.convert_to_tensor([[1.0, 2.0]])
    assert private.has_logits(keras.activations.softmax(logits))
    assert not private.has_logits(logits) and not private.has_logits(keras.activations.relu(logits))


def test_functional_models_cast_no_inputs_and_others_do(nested):
    inputs = keras.Input((2,))
    assert private.casts_no_inputs(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    assert not private.casts_no_inputs(nested)


def test_metrics_given_to_compile_are_known_one_by_one():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    mine = keras.metrics.MeanAbsoluteError(name="mine")
    model.compile("sgd", "mse", metrics=[mine], weighted_metrics=["mse"], **QUICK_TO_START)
    assert [part for metric in model.metrics for part in private.metrics_given(metric)] == [model.metrics[0], mine]
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 1)))
    tracker, given = model.metrics
    assert private.parts_of_metric(tracker) == private.metrics_given(tracker) == [tracker]
    assert private.parts_of_metric(given)[0] is mine
    assert [part.name for part in private.parts_of_metric(given)] == ["mine", "mse"]
    assert [v for part in private.parts_of_metric(given) for v in part.variables] == given.variables


@pytest.mark.backends("tensorflow")
def test_metrics_that_make_variables_in_their_first_update():
    metrics = keras.metrics
    late = [metrics.R2Score(), metrics.F1Score(), metrics.AUC(multi_label=True)]
    at_once = [metrics.MeanSquaredError(), metrics.AUC(), metrics.AUC(multi_label=True, num_labels=2)]
    assert [*map(private.has_all_variables, late + at_once)] == [False] * 3 + [True] * 3
    for metric in late:
        metric.update_state(np.ones((2, 2)), np.ones((2, 2)))
    assert all(map(private.has_all_variables, late))


def test_a_tracker_of_losses_has_a_total_and_a_count_in_this_order():
    """What `mpkeras.training.metric_states` relies on; the opposite sign of both leaves the mean what it is."""
    tracker = keras.metrics.Mean()
    tracker.update_state(3.0, sample_weight=2.0)
    assert [float(keras.ops.convert_to_numpy(v)) for v in tracker.variables] == [6.0, 2.0]
    for variable, value in zip(tracker.variables, (-6.0, -2.0), strict=True):
        variable.assign(value)
    assert float(keras.ops.convert_to_numpy(tracker.result())) == 3.0


def test_a_graph_knows_how_often_it_calls_each_layer():
    inputs = keras.Input((4,))
    twice, once = keras.layers.Dense(4), keras.layers.Dense(4)
    model = keras.Model(inputs, once(twice(twice(inputs))))
    calls = private.calls_in(model)
    assert (calls[twice], calls[once]) == (2, 1)
    nodes = private.nodes_of(model)
    assert [node.operation for node in nodes if not node.is_input].count(twice) == 2
    maker, node_index = private.made_by(model.output)
    last = private.node_of(maker, node_index)
    assert last in nodes and last.operation is once and last.outputs == [model.output]
    assert private.made_by(last.input_tensors[0])[0] is twice


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

    from mpkeras.scaling._tensorflow import in_xla

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


def test_losses_of_the_last_call_outlive_another_in_a_scope():
    layer = keras.layers.Dense(2, activity_regularizer="l2")
    model = keras.Sequential([keras.Input((2,)), layer])
    x = np.ones((1, 2), "float32")
    model(x)
    losses = model.losses
    with private.kept_losses([model, layer]), keras.StatelessScope():
        model(x)
    assert [id(loss) for loss in model.losses] == [id(loss) for loss in losses] and len(losses) == 1


def test_a_layer_knows_whether_it_was_called():
    layers = keras.layers.Rescaling(0.5), keras.layers.Rescaling(0.5), keras.layers.Rescaling(0.5)
    layers[0](np.ones((1, 2), "float32"))
    layers[1](keras.Input((2,)))
    assert [private.was_called(layer) for layer in layers] == [True, True, False]


def test_the_losses_of_a_model_ask_the_regularizers_of_its_weights_by_one_method():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, kernel_regularizer="l2")])
    vars(model.layers[0].kernel)[private.REGULARIZER] = lambda value: 3.0
    assert [float(loss) for loss in model.losses] == [3.0]
    vars(model)[private.WEIGHT_PENALTIES] = lambda: [5.0]
    assert model.losses == [5.0]


def test_what_is_saved_beside_an_optimizer_is_read_by_whoever_holds_it_and_by_nobody_else(tmp_path):
    def compiled(value=None):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
        if value is not None:
            extra = keras.Variable(value, trainable=False)
            model.optimizer._variables_beside = lambda: {"extra": extra}
            model.optimizer.beside = private.SavedBeside(model.optimizer)
        return model

    path = tmp_path / "model.weights.h5"
    compiled(3.0).save_weights(path)
    for value in (None, 5.0):
        # Neither what is not looked for, nor what is not there, is a mismatch.
        model = compiled(value)
        model.load_weights(path)
        if value is not None:
            assert float(model.optimizer._variables_beside()["extra"]) == 3.0
    compiled().save_weights(path)
    model = compiled(5.0)
    model.load_weights(path)
    assert float(model.optimizer._variables_beside()["extra"]) == 5.0


@pytest.mark.backends("tensorflow")
def test_a_class_that_is_not_registered_is_found_in_a_module_of_keras():
    stock = keras.optimizers.SGD
    config = keras.saving.serialize_keras_object(stock(0.25))
    config |= {"module": stock.__module__, "registered_name": "nobody>SGD"}
    loaded = keras.saving.deserialize_keras_object(config)
    assert type(loaded) is stock and float(loaded.learning_rate) == 0.25


def test_an_output_ends_in_float32_by_an_operation_that_is_no_layer():
    inputs = keras.Input((3,))
    head = keras.layers.Dense(2, dtype="mixed_bfloat16", name="head")
    model = keras.Model(inputs, [head(inputs)])
    (plain,) = model.outputs
    output = private.cast_to_float32(plain, 0)
    assert private.is_float32_cast(output) and not private.is_float32_cast(plain)
    operation, node_index = private.made_by(output)
    assert private.inputs_of_call(operation, node_index) == [plain] and private.made_by(plain)[0] is head
    private.replace_outputs(model, [output], ["head"])
    assert (model.output_names, [layer.name for layer in model.layers][1:]) == (["head"], ["head"])
    assert keras.backend.standardize_dtype(model(np.ones((1, 3), "float32"))[0].dtype) == "float32"
    # In a file it is the stock operation; a clone has none, and so none of its name.
    config = model.get_config()
    assert [entry["class_name"] for entry in config["layers"]] == ["InputLayer", "Dense", "Cast"]
    loaded = keras.Model.from_config(model.get_config())
    assert type(loaded.operations[-1]) is type(keras.ops.cast(plain, "float32")._keras_history.operation)
    assert keras.models.clone_model(model).output_names == ["head"]
    # Written down without it, and as it was afterwards.
    with private.replaced_outputs(model, [plain]):
        assert [entry["class_name"] for entry in model.get_config()["layers"]] == ["InputLayer", "Dense"]
    assert model.get_config() == config
    private.replace_outputs(model, [plain], ["head"])
    assert model.outputs[0] is plain and len(model.operations) == 2


def test_a_cast_keeps_the_mask_of_an_output():
    words = keras.Input((3,), dtype="int32")
    output = keras.layers.Embedding(4, 2, mask_zero=True, dtype="mixed_bfloat16")(words)
    assert private.has_mask(output) and private.has_mask(private.cast_to_float32(output, 0))
    assert not private.has_mask(words)
    model = keras.Model(words, output)
    private.replace_outputs(model, private.cast_to_float32(output, 0), ["output"])
    mask = model(np.array([[1, 0, 2]]))._keras_mask
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(mask), [[True, False, True]])


def test_symbolic_dtypes_follow_the_layers():
    inputs = keras.Input((2,))
    dense = keras.layers.Dense(1)
    model = keras.Model(inputs, keras.layers.Flatten(dtype="mixed_bfloat16")(dense(inputs)))
    dense.dtype_policy = keras.DTypePolicy("mixed_float16")
    assert dense.output.dtype == "float32"
    calls = [len(layer._outbound_nodes) for layer in model.layers]
    private.refresh_symbolic_dtypes(model, lambda layer: False)
    assert (inputs.dtype, dense.output.dtype, model.output.dtype) == ("float32", "float16", "bfloat16")
    # The casts between them are no calls of the model's.
    assert [len(layer._outbound_nodes) for layer in model.layers] == calls


def test_a_sequential_that_is_given_no_shape_makes_an_input_of_the_dtype_of_its_first_layer():
    own = keras.Sequential([keras.Input((3,), dtype="float16"), keras.layers.Dense(2)])
    model = keras.Sequential([keras.layers.Embedding(9, 2, dtype="mixed_bfloat16")])
    assert [private.dtype_of_made_input(layer) for layer in (own, model, model.layers[0])] == [None, None, None]
    model.build((None, 3))
    assert private.dtype_of_made_input(model) == "bfloat16"
    assert private.dtype_of_made_input(keras.models.clone_model(model)) == "bfloat16"
    private.set_dtype_of_made_input(model, "float32")
    assert private.dtype_of_made_input(model) == model.input_dtype == model.inputs[0].dtype == "float32"
    assert model.get_config()["layers"][0]["config"]["dtype"] == "float32"


def test_last_layers_of_a_sequential_are_exchanged_without_a_call(nested):
    first, old = nested.layers
    calls = len(first._inbound_nodes)
    new = keras.layers.Activation("linear")
    private.replace_last_layers(nested, [old], [new])
    assert nested.layers == [first, new] and len(first._inbound_nodes) == calls


def test_a_16_bit_variable_becomes_a_float32_one_of_the_same_value():
    layer = keras.layers.Dense(2, dtype="bfloat16")
    layer.build((None, 3))
    kernel, before = layer.kernel, keras.ops.convert_to_numpy(keras.ops.cast(layer.kernel.value, "float32"))
    for variable in layer.variables:
        private.retype(variable, "float32")
    private.track_parameters_again(layer)
    assert layer.kernel is kernel and (kernel.dtype, layer.bias.dtype) == ("float32", "float32")
    assert keras.backend.standardize_dtype(kernel.value.dtype) == "float32"
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(kernel.value), before)
    if keras.backend.backend() == "torch":
        assert [str(p.dtype) for p in layer.parameters()] == ["torch.float32"] * 2


ATTENTION = {
    "MultiHeadAttention": functools.partial(keras.layers.MultiHeadAttention, 2, 4),
    "GroupQueryAttention": functools.partial(keras.layers.GroupQueryAttention, 4, 2, 1),
}


@pytest.mark.parametrize("make", ATTENTION.values(), ids=ATTENTION)
def test_attention_takes_its_softmax_in_one_method(make):
    attention = make()
    x = np.ones((1, 3, 8), "float32")
    attention(x, x)
    assert private.is_stock_attention(attention, private.ATTENTION_SOFTMAX)
    assert not private.is_stock_attention(keras.layers.Attention(), private.ATTENTION_SOFTMAX)
    assert keras.tree.flatten(private.softmax_axis(attention))[-1] in (-1, 3)
    seen = []
    vars(attention)[private.ATTENTION_SOFTMAX] = lambda scores, attention_mask=None: seen.append(scores.shape) or scores
    attention(x, x, return_attention_scores=True)
    assert len(seen) == 1 and tuple(seen[0])[-2:] == (3, 3)


@pytest.mark.parametrize("make", ATTENTION.values(), ids=ATTENTION)
def test_attention_is_computed_in_one_method(make):
    attention, x = make(), np.ones((1, 3, 8), "float32")
    attention(x, x)
    assert private.is_stock_attention(attention, private.ATTENTION_METHOD)
    assert not private.is_stock_attention(keras.layers.Attention(), private.ATTENTION_METHOD)
    stock, seen = getattr(attention, private.ATTENTION_METHOD), []

    def compute(*args, **kwargs):
        seen.append(inspect.signature(stock).bind(*args, **kwargs).arguments)
        return stock(*args, **kwargs)

    vars(attention)[private.ATTENTION_METHOD] = compute
    attention(x, x, attention_mask=np.ones((1, 3, 3), bool))
    attention(x, x, use_causal_mask=True)
    masked, causal = seen
    for name in ("query", "key", "value"):
        assert masked[name].shape[:2] == (1, 3) and len(masked[name].shape) == 4
    assert tuple(masked["attention_mask"].shape) == (1, 3, 3)
    # Older versions make a mask of it.
    assert causal.get("use_causal_mask") or tuple(causal["attention_mask"].shape) == (1, 3, 3)
    depth = masked["query"].shape[-1]
    assert private.attention_scale(attention) == pytest.approx(1 / np.sqrt(depth))


@pytest.mark.parametrize("make", ATTENTION.values(), ids=ATTENTION)
def test_when_attention_is_left_to_the_backend(make, monkeypatch):
    x = np.ones((1, 3, 8), "float32")
    calls = []
    # Below `keras.ops`, which layers need not go through: the test looks on, and changes nothing.
    # In Keras 3.16 it is `backend.ops.nn`.
    backend = keras.src.backend
    found_in = backend.nn if hasattr(backend, "nn") else backend.ops.nn
    stock = found_in.dot_product_attention
    monkeypatch.setattr(found_in, "dot_product_attention", lambda *a, **k: calls.append(k) or stock(*a, **k))
    for options, call in (({}, {}), ({"dropout": 0.5}, {}), ({}, {"return_attention_scores": True})):
        attention, said = make(**options), []
        method = getattr(attention, private.ATTENTION_METHOD)

        def compute(*args, attention=attention, method=method, said=said, **kwargs):
            given = inspect.signature(method).bind(*args, **kwargs).arguments
            returns_scores = given.get("return_attention_scores", False)
            said.append(private.is_fused_attention(attention, given["query"], returns_scores))
            return method(*args, **kwargs)

        calls.clear()
        vars(attention)[private.ATTENTION_METHOD] = compute
        attention(x, x, **call)
        assert said == [bool(calls)], (options, call)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX alone")
def test_keras_looks_for_a_kernel_for_attention():
    q = keras.ops.zeros((1, 2, 2, 8), "bfloat16")
    make = ATTENTION["MultiHeadAttention"]
    for asked, expected in ((True, True), (False, False)):
        assert private.takes_flash_attention(make(flash_attention=asked), q, q, q, "gpu", is_masked=False) is expected
    # There is none on a CPU; on a TPU there is, but not where a mask is traced.
    assert not private.takes_flash_attention(make(), q, q, q, "cpu", is_masked=False)
    assert private.takes_flash_attention(make(), q, q, q, "tpu", is_masked=False)
    assert not private.takes_flash_attention(make(), q, q, q, "tpu", is_masked=True)


def test_states_of_a_stateful_recurrent_layer_are_known_once_it_is_built():
    rnn = keras.layers.LSTM(2, stateful=True)
    assert private.recurrent_states(rnn) == []
    rnn.build((1, 3, 4))
    assert [tuple(state.shape) for state in private.recurrent_states(rnn)] == [(1, 2), (1, 2)]
    assert private.recurrent_states(keras.layers.LSTM(2)) == []


def test_a_model_is_built_from_the_shapes_of_a_batch():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(), "mse", metrics=["mae"])
    assert not private.is_built(model)
    private.symbolic_build(model, (np.ones((2, 3), "float32"), np.ones((2, 1), "float32"), None))
    assert private.is_built(model) and model.optimizer.built and len(model.metrics[1].variables) == 2
    assert int(model.optimizer.iterations) == 0


def test_a_model_that_is_never_called_has_all_weights_once_its_layers_have():
    class Parts(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

    class BuildsMore(Parts):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1,))

    assert not private.has_all_weights(keras.Model())
    for parts, has_all in ((Parts(), True), (BuildsMore(), False)):
        assert not private.has_all_weights(parts)
        parts.dense.build((None, 2))
        assert private.has_all_weights(parts) == has_all and not private.is_built(parts)


def test_a_variable_is_stored_in_another_dtype_by_its_native_variable():
    v = keras.Variable([1.0, -0.5], dtype="float32", name="stored")
    assert private.stored_dtype(v) == "float32"
    private.retype(v, "bfloat16")
    assert (private.stored_dtype(v), v.dtype) == ("bfloat16", "bfloat16")
    vars(v)[private.STORED_DTYPE] = "float32"
    # What it says of itself is what Keras casts to; how it is stored is what its value is.
    assert (private.stored_dtype(v), v.dtype) == ("bfloat16", "float32")
    assert keras.backend.standardize_dtype(private.stored_value(v).dtype) == "bfloat16"


@pytest.mark.backends("tensorflow")
def test_a_native_variable_is_made_trainable_or_not_for_good():
    v, statistic = keras.Variable([1.0]), keras.Variable([1.0], trainable=False)
    v.trainable = False
    for variable in (v, statistic):
        private.retype(variable, "bfloat16")
    # As Keras made the first one: frozen by what the Keras variable says alone.
    assert (private.stored_value(v).trainable, v.trainable) == (True, False)
    assert (private.stored_value(statistic).trainable, statistic.trainable) == (False, False)


def test_slots_are_named_after_their_weights_and_averages_are_known():
    layer = keras.layers.Dense(2, name="first")
    layer.build((None, 3))
    optimizer = keras.optimizers.Adam(use_ema=True)
    optimizer.build(layer.trainable_variables)
    slots = [v for v in optimizer.variables if len(v.shape) > 0]
    found = private.weights_of_slots(optimizer.variables, layer.trainable_variables)
    assert [found[id(slot)].shape for slot in slots] == [slot.shape for slot in slots] and len(slots) == 6
    # No single number is kept beside a weight.
    assert len(found) == 6
    assert [v.shape for v in private.weight_averages(optimizer)] == [v.shape for v in layer.trainable_variables]
    assert private.weight_averages(keras.optimizers.Adam()) == []


@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras 3.15 has it")
def test_copies_of_weights_are_known():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    optimizer = keras.optimizers.ScheduleFreeAdamW()
    optimizer.build(layer.trainable_variables)
    # They begin as the weights, and other slots at zero.
    copies = private.copies_of_weights(optimizer)
    np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(v) for v in (copies[0], layer.kernel)))
    others = [v for v in optimizer.variables if len(v.shape) > 0 and not any(v is copy for copy in copies)]
    assert len(copies) == len(others) == 2 and not any(keras.ops.convert_to_numpy(v).any() for v in others)
    assert private.copies_of_weights(keras.optimizers.Adam()) == []


def test_factors_of_adafactor_know_their_weights():
    layer = keras.layers.Dense(2, name="first")
    layer.build((None, 3))
    optimizers = [keras.optimizers.Adafactor(), keras.optimizers.Adam()]
    for optimizer in optimizers:
        optimizer.build(layer.trainable_variables)
    weight_of, of_others = map(private.weights_of_factors, optimizers)
    rows, columns = [v for v in optimizers[0].variables if len(v.shape) > 0 and not v.name.endswith("_velocity")]
    assert (rows.shape, columns.shape, of_others) == ((3,), (2,), {})
    assert weight_of[id(rows)] is weight_of[id(columns)] is layer.kernel


@pytest.mark.parametrize("excluded", [{"var_names": ["w"]}, {"var_list": True}], ids=["by name", "as an object"])
@pytest.mark.parametrize("is_used", [False, True], ids=["built only", "after an update"])
def test_an_optimizer_knows_what_decays_also_after_variables_are_stored_anew(excluded, is_used):
    v, w = keras.Variable([1.0], name="v"), keras.Variable([1.0], name="w")
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(**({"var_list": [w]} if "var_list" in excluded else excluded))
    # Before it is built, Keras 3.16 has no answer.
    optimizer.build([v, w])
    assert private.decays(optimizer, v) and not private.decays(optimizer, w)
    assert callable(getattr(optimizer, private.WEIGHT_DECAY_METHOD))
    if is_used:
        optimizer.apply([keras.ops.zeros(1), keras.ops.zeros(1)])
        v.assign([1.0])
    known = private.known_variables(optimizer)
    assert list(known.values()) == [v, w] and list(known) == private.variable_keys(optimizer, [v, w])
    for variable in (v, w):
        private.retype(variable, "bfloat16")
    private.know_variables_again(optimizer, known)
    assert private.decays(optimizer, v) and not private.decays(optimizer, w)
    optimizer.apply([keras.ops.ones(1, "bfloat16"), keras.ops.zeros(1, "bfloat16")], [v, w])
    # 1 - 0.5 * 0.5 - 0.5 * 1 of the one that decays.
    stored = [keras.ops.convert_to_numpy(keras.ops.cast(variable.value, "float32")).tolist() for variable in (v, w)]
    assert stored == [[0.25], [1.0]]


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_stock_optimizers_assign_through_keras_only():
    """What `_WritingScope` relies on: no raw assignment is left in the compiled update.

    Each runs with weight decay and averages under XLA on a step that must be skipped; a write that the selection does
    not cover would change a variable.
    """
    import tensorflow as tf

    from mpkeras.scaling._tensorflow import _assigns_as_keras
    from mpkeras.scaling.optimizer import LossScaleOptimizer
    from tests.step_modes import applier, snapshot

    stock = keras.optimizers.Optimizer
    classes = {
        thing for thing in vars(keras.optimizers).values() if isinstance(thing, type) and issubclass(thing, stock)
    }
    classes = {cls for cls in classes if cls.__name__ not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")}
    assert len(classes) >= 13
    for cls in classes:
        inner = cls(learning_rate=0.1, weight_decay=0.01, use_ema=True)
        assert _assigns_as_keras(inner), cls
        if cls.__name__ == "Muon" and keras.__version__ < "3.11":
            continue  # asks TensorFlow variables for a `path` there, under any wrapper or none
        v = keras.Variable(np.ones((4, 4), "float32"), constraint=keras.constraints.NonNeg())
        step = applier(LossScaleOptimizer(inner, loss_scale=None), [v], "xla")
        step([tf.ones((4, 4))])
        before = snapshot([v, *inner.variables])
        step([tf.fill((4, 4), np.inf)])
        assert snapshot([v, *inner.variables]) == before, cls
        step([tf.ones((4, 4))])
        assert snapshot([v, *inner.variables]) != before, cls


@pytest.mark.parametrize("name", [private.UPDATE_METHOD, private.WEIGHT_DECAY_METHOD, private.OVERWRITE_METHOD])
def test_methods_of_optimizers_have_a_form_of_no_backend(name):
    for make in (keras.optimizers.Adam, keras.optimizers.Nadam):
        method = private.portable_method(make(weight_decay=0.1), name)
        assert callable(method) and ".backend." not in method.func.__module__
    assert hasattr(keras.optimizers.Adam(), private.CLIP_METHOD)
    with pytest.raises(AttributeError, match="no_such_method"):
        private.portable_method(keras.optimizers.Adam(), "no_such_method")


def test_the_config_of_an_optimizer_names_the_class_of_every_backend():
    config = private.portable_config(keras.optimizers.AdamW(3e-4, beta_1=0.7))
    made = keras.saving.deserialize_keras_object(config)
    assert config["module"] == "keras.optimizers" and isinstance(made, keras.optimizers.AdamW)
    assert made.beta_1 == 0.7

    class Mine(keras.optimizers.SGD):
        pass

    assert private.portable_config(Mine())["module"] == __name__


def test_a_model_that_was_made_again_gets_what_its_config_does_not_say(nested):
    facts = private.beside_config_of(nested)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(nested))
    assert private.beside_config_of(again) != facts
    private.give_beside_config(again, facts)
    assert private.beside_config_of(again) == facts
    assert [v.path for v in again.variables] == [v.path for v in nested.variables]


class TwoWidths(keras.Model):
    """A model whose config is without the width of its first layer, and without the names of both."""

    def __init__(self, width=3, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = keras.layers.Dense(width), keras.layers.Dense(2)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], self.first.units))
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    def get_config(self):
        return {}


def test_what_is_frozen_and_lora_inside_of_a_model_without_a_graph_are_given_by_place():
    model, again = TwoWidths(), TwoWidths()
    for made in (model, again):
        made.build((None, 4))
    # Keras numbers the names of the layers of a process.
    assert model.second.name != again.second.name
    model.first.enable_lora(1, lora_alpha=5)
    model.second.bias.trainable = False
    private.give_beside_config(again, private.beside_config_of(model))
    assert [v.path for v in again.trainable_variables] == [v.path for v in model.trainable_variables]
    assert [v.name for v in again.trainable_variables] == ["bias", "lora_kernel_a", "lora_kernel_b", "kernel"]
    assert (again.first.lora_rank, again.first.lora_alpha) == (1, 5)


def test_a_config_that_makes_another_model_is_refused():
    facts = private.beside_config_of(TwoWidths(width=7))
    again = TwoWidths()
    again.build((None, 4))
    paths = [v.path for v in again.variables]
    # Nothing is known of a model that was not built.
    private.give_beside_config(again, facts)
    assert [v.path for v in again.variables] == paths
    model = TwoWidths(width=7)
    model.build((None, 4))
    message = r"has variables of shapes .*\(4, 7\).*, in place of .* have .*\(4, 3\).* Let `get_config`"
    with pytest.raises(ValueError, match=message):
        private.give_beside_config(again, private.beside_config_of(model))


@pytest.mark.backends("jax")
def test_the_layouts_that_a_distribution_was_made_with():
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), ["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["dense.*kernel"] = (None, "model")
    made = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    assert private.layout_map_of(made)["dense/kernel"].axes == (None, "model")
    layer, optimizer = keras.layers.Dense(2, name="dense"), keras.optimizers.SGD(momentum=0.5)
    with keras.StatelessScope(initialize_variables=False):
        layer.build((None, 4))
        private.lay_out(layer.variables, made)
        optimizer.build(layer.variables)
    assert [slot._layout.axes for slot in optimizer.momentums] == [(None, "model"), (None,)]
    # Keras makes their values at the end of the next scope: not on devices that are not there.
    for variable in (*layer.variables, *optimizer.variables):
        variable._layout = None
    with keras.StatelessScope():
        pass


def test_a_variable_without_a_value_gets_another_dtype_and_no_value():
    with keras.StatelessScope(initialize_variables=False):
        variable = keras.Variable("ones", shape=(2, 3))
        private.retype(variable, "bfloat16")
    assert variable.dtype == "bfloat16" and private.stored_value(variable) is None
    # Keras makes its value at the end of the next scope: in a later test's `tf.function`, which refuses.
    with keras.StatelessScope():
        pass
    assert private.stored_dtype(variable) == "bfloat16"


def test_code_that_a_fit_calls_is_in_it():
    found = []

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

        def fit(self, *args, **kwargs):
            found.append(private.is_in_fit(self))
            return super().fit(*args, **kwargs)

    class Asking(keras.callbacks.Callback):
        def set_model(self, model):
            super().set_model(model)
            found.append(private.is_in_fit(model))

        def on_test_batch_end(self, batch, logs=None):
            found.extend(private.is_in_fit(asked) for asked in (self.model, other))

    model, other = Model(), Model()
    model.compile("sgd", "mse", **QUICK_TO_START)
    x = np.ones((2, 3))
    model.fit(x, x[:, :1], validation_data=(x, x[:, :1]), verbose=0, callbacks=[Asking()])
    model.evaluate(x, x[:, :1], verbose=0, callbacks=[Asking()])
    # Before Keras' own, in its callbacks, in validation; and in an evaluation by itself.
    assert found == [False, True, True, False, False, False, False]


@pytest.mark.backends("jax")
def test_variables_hold_a_state_of_fit_without_a_synchronization():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((1, 2)), np.ones((1, 1)))
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    state = [[variable.value for variable in group] for group in (*groups, model.metrics_variables)]
    kernel_of_fit = state[0][0]
    kernel = state[0][0] = state[0][0] + 1.0
    model._jax_state, model._jax_state_synced = {"trainable_variables": [kernel + 1.0, state[0][1]]}, False
    with private.held_by_variables(model, state):
        # What asks for the present state, as `state_dict` does, leaves them as they are.
        model.jax_state_sync()
        assert model.trainable_variables[0].value is kernel
    # What they had is what they have, also where an error ends it.
    assert model.trainable_variables[0].value is kernel_of_fit
    with pytest.raises(OSError), private.held_by_variables(model, state):
        raise OSError
    assert model.trainable_variables[0].value is kernel_of_fit
    model.jax_state_sync()
    np.testing.assert_array_equal(model.trainable_variables[0].value, kernel + 1.0)
    private.put_state(model, state)
    assert model.trainable_variables[0].value is kernel


def test_the_global_policy_is_in_a_state_that_clear_session_replaces():
    policy = keras.DTypePolicy("mixed_bfloat16")
    keras.config.set_dtype_policy(policy)
    state = private.global_state()
    assert private.dtype_policy_in(state) is policy
    keras.config.set_dtype_policy("float32")
    assert private.global_state() is state and private.dtype_policy_in(state) is not policy
    keras.config.set_dtype_policy(policy)
    keras.utils.clear_session(free_memory=False)
    now = private.global_state()
    assert now is not state and private.dtype_policy_in(state) is policy and private.dtype_policy_in(now) is None


def test_compile_scales_the_loss_by_the_name_of_a_policy():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.dtype_policy = private.float32_policy_named("mixed_float16")
    assert (model.compute_dtype, model.variable_dtype) == ("float32", "float32")
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def test_surroundings_of_a_call_can_be_brought_back():
    seen = []

    class Asked(keras.layers.Layer):
        def call(self, x, training=None):
            seen.append((training, private.autocast_dtype()))
            return x

    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_bfloat16")
            self.asked = Asked(dtype="mixed_bfloat16")

        def call(self, x):
            seen.append(private.surroundings())
            return self.asked(x)

    layer = Outer()
    layer(keras.ops.ones((1,)))
    seen.clear()  # Of the build.
    layer(keras.ops.ones((1,)), training=True)
    with private.surrounded_by(seen[0]):
        assert private.autocast_dtype() == "bfloat16"
        layer.asked(keras.ops.ones((1,)))
    layer.asked(keras.ops.ones((1,)))
    assert seen[1:] == [(True, "bfloat16"), (True, "bfloat16"), (None, "bfloat16")]


def test_a_layer_keeps_the_mode_of_its_remat_scope():
    with keras.RematScope(mode="full"):
        inside = keras.layers.Dense(1)
    assert private.rematerializes(inside) and not private.rematerializes(keras.layers.Dense(1))
    # `Layer.__call__` asks this method for the function to run.
    asked = []
    stock = inside.rematerialized_call
    vars(inside)["rematerialized_call"] = lambda call, *args, **kwargs: asked.append(1) or stock(call, *args, **kwargs)
    inside(keras.ops.ones((1, 2)))
    assert asked == [1]


@pytest.mark.backends("jax")
def test_variables_have_no_values_in_a_step_of_fit():
    seen = []

    class Asking(keras.Model):
        def train_step(self, state, data):
            seen.append([private.is_purged(variable) for variable in self.variables])
            return super().train_step(state, data)

    inputs = keras.Input((2,))
    model = Asking(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    x = np.ones((2, 2), "float32")
    assert not any(map(private.is_purged, model.variables))
    model.fit(x, x[:, :1], verbose=0)
    assert seen and all(map(all, seen)) and not any(map(private.is_purged, model.variables))
    with keras.StatelessScope(initialize_variables=False):
        assert not private.is_purged(keras.Variable(keras.initializers.Zeros(), shape=(1,)))


def test_layers_that_share_a_policy_map_share_its_copy():
    policy_map = keras.dtype_policies.DTypePolicyMap("mixed_bfloat16", {"third": keras.DTypePolicy("float32")})
    layers = [keras.layers.Dense(1, name=name, dtype=policy_map) for name in ("first", "second")]
    layers.append(keras.layers.Dense(1, dtype="float32"))
    private.own_policy_maps(layers)
    first, second, plain = layers
    assert first.dtype_policy is second.dtype_policy is not policy_map and plain.dtype_policy.name == "float32"
    assert first.dtype_policy.get_config() == policy_map.get_config()
    first.build((None, 1))
    first.dtype_policy = "mixed_float16"
    assert list(policy_map) == ["third"] and list(first.dtype_policy) == ["third", first.path]


def test_an_export_takes_the_inputs_of_a_signature_in_what_the_model_computes_in():
    class Two(keras.Model):
        def call(self, inputs):
            return inputs["a"] + inputs["b"][0]

    model = Two(dtype="mixed_float16")
    model({"a": np.zeros((3, 2)), "b": [np.zeros((3, 1))]})
    (specs,) = private.float32_signature(model)
    assert (specs["a"].dtype, specs["a"].shape, specs["b"][0].shape) == ("float32", (None, 2), (None, 1))


def test_a_model_asks_its_metrics_where_the_logs_have_their_names():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    of_epoch = getattr(model, private.EPOCH_RESULTS_METHOD)
    assert list(of_epoch({"loss": 5.0})) == ["loss"] and float(of_epoch({"loss": 5.0})["loss"]) == 0.0
    logs = {"loss": 5.0, "other": 6.0}
    assert of_epoch(logs) is logs
