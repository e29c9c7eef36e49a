import random

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras import set_global_policy
from mpkeras.conversion.plan import plan
from mpkeras.policies import Policy, kernels, missing_kernel_rules, set_layer_policy
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
from tests.step_modes import QUICK_TO_COMPILE


def kept(model, policy) -> list:
    """Returns the rows of the layers that a rule, or a missing kernel, moves to float32."""
    return [row for row in plan(model, policy) if row.rule is not None and row.after is not row.before]


@pytest.fixture(autouse=True)
def forget_trials():
    kernels._failure.cache_clear()
    yield
    kernels._failure.cache_clear()


@pytest.mark.parametrize(
    ("fails_in", "expected"),
    [
        (("float16",), ["Dense"]),
        (("bfloat16",), []),
        (("float16", "float32"), []),  # float32 is no remedy.
        ((), []),
    ],
)
def test_missing_kernel_rules(monkeypatch, backend, fails_in, expected):
    def trial(dtype):
        if dtype in fails_in:
            raise NotImplementedError(f"\nno {dtype} here\nsecond line")

    monkeypatch.setattr(kernels, "_TRIALS", {"Dense": trial})
    rows = missing_kernel_rules("float16")
    assert [rule for rule, _ in rows] == expected
    for _, reason in rows:
        assert reason == f"fails in float16 on {backend} and this device: no float16 here"


def test_each_operation_is_tried_once_and_only_for_layers_that_are_there(monkeypatch):
    calls = []
    monkeypatch.setattr(kernels, "_TRIALS", {"Dense": calls.append, "Conv1D": lambda dtype: calls.append("conv")})
    for _ in range(2):
        assert missing_kernel_rules("float16", among={"Dense", "Flatten"}) == ()
    assert calls == ["float16"]
    assert missing_kernel_rules("float32") == missing_kernel_rules("float64") == ()


# With Keras 3.15 and the current backends. A release that closes a gap only makes these sets smaller.
POOLING = {"MaxPooling3D", "AveragePooling3D", "AdaptiveMaxPooling3D", "AdaptiveAveragePooling3D"}
OF_KERAS_HUB = {"LlamaAttention", "MMDiTBlock", "T5MultiHeadAttention"}
POSITIONS = {
    "AlibiBias",
    "ContentAndQueryEmbedding",
    "ESMRotaryEmbedding",
    "EmbedND",
    "NonMaxSuppression",
    "RetinaNetLabelEncoder",
    "RoformrPositionalEmbedding",
    "SinePositionEncoding",
    "TimestepEmbedding",
}
KNOWN_GAPS = {
    ("tensorflow", "float16"): POOLING | {"T5MultiHeadAttention"},
    ("jax", "float16"): OF_KERAS_HUB | {"MultiHeadAttention", "GroupedQueryAttention"},
    ("torch", "float16"): {"AveragePooling3D", "Attention", "AdditiveAttention"},
    ("torch", "bfloat16"): {"AveragePooling3D"},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_positions_are_kept_and_nothing_that_works(backend, dtype):
    # No 16 bits hold 4095, 998.1 or 511.3.
    found = {rule for rule, _ in missing_kernel_rules(dtype)}
    assert POSITIONS <= found <= KNOWN_GAPS.get((backend, dtype), set()) | POSITIONS


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_layers_without_a_kernel_train(policy):
    set_global_policy(policy)
    inputs = keras.Input((4, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    x = layers.GRU(8, return_sequences=True, name="gru")(x)
    x = layers.Reshape((2, 2, 2, 4))(x)
    x = layers.AveragePooling3D(1)(layers.MaxPooling3D(1)(x))
    model = keras.Model(inputs, layers.Dense(1)(layers.Flatten()(x)))
    policy = Policy(policy, keep_float32=())
    for row in kept(model, policy):
        assert row.reason.startswith("fails in ")
    mpkeras.apply_policy(model, policy)
    model.compile("sgd", "mse")
    history = model.fit(np.ones((4, 4, 8), "float32"), np.ones((4, 1), "float32"), verbose=0)
    assert np.isfinite(history.history["loss"]).all()


@pytest.mark.backends("jax")
def test_attention_without_a_kernel_moves_with_everything_inside():
    if not keras.distribution.list_devices()[0].startswith("cpu"):
        pytest.skip("asserts what JAX lacks on a CPU")
    set_global_policy("mixed_float16")
    attention = layers.MultiHeadAttention(2, 4)
    x = np.ones((1, 4, 8), "float32")
    attention(x, x)
    model = keras.Sequential([attention])
    policy = without_outputs("mixed_float16")
    assert {row.rule for row in kept(model, policy)} == {"MultiHeadAttention"}
    mpkeras.apply_policy(model, policy)
    assert {layer.compute_dtype for layer in attention._flatten_layers()} == {"float32"}


@pytest.mark.parametrize("layer", [layers.Attention, layers.AdditiveAttention])
def test_attention_whose_keys_are_all_masked_stays_finite(layer):
    if tuple(int(part) for part in keras.__version__.split(".")[:2]) < (3, 15):
        pytest.skip("Keras 3.10 cannot broadcast this mask, in float32 either")
    set_global_policy("mixed_float16")
    layer = layer()
    x = np.ones((1, 2, 2), "float32")
    for row in kept(layer, Policy("mixed_float16")):
        set_layer_policy(row.layer, row.after)
    outputs = layer([x, x], mask=[None, np.zeros((1, 2), "bool")])
    assert np.isfinite(keras.ops.convert_to_numpy(keras.ops.cast(outputs, "float32"))).all()


class T5MultiHeadAttention(layers.Layer):
    """The mask of the layer of KerasHub 0.32 that has this name."""

    def call(self, mask):
        scores = keras.ops.zeros_like(mask, dtype=self.compute_dtype)
        return keras.ops.softmax(scores + (1.0 - keras.ops.cast(mask, scores.dtype)) * -1e9)


class LlamaAttention(layers.Layer):
    """The product of the layer of KerasHub 0.32 that has this name."""

    def call(self, x):
        return keras.ops.dot_product_attention(x, x, x)


@pytest.mark.parametrize(
    ("layer_class", "inputs", "expected"),
    [
        # The mask of no key: 1 - 1 times minus infinity is NaN.
        (T5MultiHeadAttention, np.array([[1, 1, 0]], "int32"), [[0.5, 0.5, 0.0]]),
        (LlamaAttention, np.ones((1, 2, 1, 2), "float32"), np.ones((1, 2, 1, 2))),
    ],
)
def test_attention_of_keras_hub_computes_in_float16_or_stays_in_float32(layer_class, inputs, expected):
    model = keras.Sequential([keras.Input(inputs.shape[1:], dtype=inputs.dtype.name), layer_class()])
    mpkeras.apply_policy(model, "mixed_float16")
    # Predicted, not called: JAX on a CPU lacks the attention only where it compiles.
    np.testing.assert_allclose(model.predict(inputs, verbose=0), expected, rtol=1e-3)


class SinePositionEncoding(layers.Layer):
    """What the layer of KerasHub 0.32 that has this name computes: sines, and cosines in each second place."""

    def call(self, inputs):
        _, length, width = inputs.shape
        positions = keras.ops.cast(keras.ops.arange(length), self.compute_dtype)
        pairs = keras.ops.cast(2 * (keras.ops.arange(width) // 2), self.compute_dtype)
        smallest = keras.ops.cast(1 / 10000, self.compute_dtype)
        angles = keras.ops.outer(positions, keras.ops.power(smallest, pairs / width))
        is_cosine = keras.ops.arange(width) % 2 == 1
        encodings = keras.ops.where(is_cosine, keras.ops.cos(angles), keras.ops.sin(angles))
        return keras.ops.broadcast_to(encodings, keras.ops.shape(inputs))


@pytest.mark.parametrize(("policy", "length"), first_quick([("mixed_bfloat16", 700), ("mixed_float16", 2500)]))
def test_sines_of_positions_are_those_of_float64(policy, length):
    inputs = keras.Input((length, 6))
    x = layers.Dense(6, kernel_initializer="zeros")(inputs)
    model = keras.Model(inputs, layers.Rescaling(2.0)(x + SinePositionEncoding()(x)))
    mpkeras.apply_policy(model, policy)
    outputs = keras.ops.convert_to_numpy(model(np.ones((1, length, 6), "float32")))[0] / 2
    angles = np.arange(length)[:, None] / 10000.0 ** (2 * (np.arange(6) // 2) / 6)
    expected = np.where(np.arange(6) % 2 == 1, np.cos(angles), np.sin(angles))
    # Summed in 16 bits they are rounded, up to 2 ** -9 and 2 ** -12 of 1.
    np.testing.assert_allclose(outputs, expected, atol=4e-3 if policy == "mixed_bfloat16" else 2e-3)


class TimestepEmbedding(layers.Layer):
    """What the layers of KerasHub 0.32 that have this name begin with: sines of a time step."""

    def call(self, step):
        rates = keras.ops.exp(-0.5 * keras.ops.arange(6, dtype=step.dtype))
        return keras.ops.sin(step * rates)


@pytest.mark.parametrize(("policy", "atol"), first_quick([("mixed_bfloat16", 4e-3), ("mixed_float16", 5e-4)]))
def test_sines_of_time_steps_are_those_of_float64(policy, atol):
    inputs = keras.Input((1,))
    sines = TimestepEmbedding()(inputs)
    model = keras.Model(inputs, layers.Dense(6, kernel_initializer="identity")(layers.Identity()(sines)))
    mpkeras.apply_policy(model, policy)
    steps = np.array([[0.3], [611.7], [874.2]], "float32")
    expected = np.sin(steps.astype("float64") * np.exp(-0.5 * np.arange(6)))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model(steps)), expected, atol=atol)


class NonMaxSuppression(layers.Layer):
    """As the layer of KerasHub 0.32 that has this name does, it returns boxes of those that it is given."""

    def call(self, boxes):
        return boxes[:, :1]


class RetinaNetLabelEncoder(layers.Layer):
    """As the layer of KerasHub 0.32 that has this name does, it makes targets of boxes."""

    def call(self, boxes):
        return (boxes[:, :1, 2:] - boxes[:, :1, :2]) / 4.0


class Detector(keras.Model):
    """Both are used beside the `call`, in steps of the model's own."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(4, kernel_initializer="zeros")
        self.label_encoder, self.decoder = RetinaNetLabelEncoder(), NonMaxSuppression()
        for layer in (self.label_encoder, self.decoder):
            layer.built = True

    def call(self, boxes):
        return boxes + self.head(boxes)

    def compute_loss(self, x, y, y_pred, *args, **kwargs):
        return super().compute_loss(x, self.label_encoder(y), self.label_encoder(y_pred), *args, **kwargs)

    def predict_step(self, *args):
        outputs = super().predict_step(*args)
        if keras.backend.backend() == "jax":
            return self.decoder(outputs[0]), outputs[1]
        return self.decoder(outputs)


@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
@pytest.mark.parametrize("door", first_quick(["prepare", "the line"]))
def test_boxes_that_a_detector_learns_and_predicts_are_whole(policy, door):
    if door == "the line":
        set_global_policy(policy)
    model = Detector()
    model.compile("sgd", "mse", jit_compile=False)
    if door == "prepare":
        mpkeras.prepare(model, policy)
    boxes = np.array([[[301.3, 402.7, 303.9, 407.2], [0.0, 0.0, 9.0, 9.0]]], "float32")
    np.testing.assert_array_equal(model.predict(boxes, verbose=0), boxes[:, :1])
    # To be learned is (0.65, 1.125), and (1, 2) is said.
    said = np.array([[[301.3, 402.7, 305.3, 410.7]]], "float32")
    expected = (0.35**2 + 0.875**2) / 2
    np.testing.assert_allclose(model.evaluate(said, boxes[:, :1], verbose=0), expected, rtol=1e-4)


# Read in Keras 3.15 and TensorFlow 2.21: one is refused by XLA, the other has no gradient by 16-bit images at all.
RESIZED = {"bilinear": True, "lanczos3": False}


def upsampling(interpolation, wrapped=False):
    layer = layers.UpSampling2D(2, interpolation=interpolation, name="up")
    inputs = keras.Input((2, 4, 4, 3) if wrapped else (4, 4, 3))
    convolution = layers.Conv2D(2, 3, padding="same", activation="relu")
    if wrapped:
        layer, convolution = layers.TimeDistributed(layer), layers.TimeDistributed(convolution)
    return keras.Model(inputs, layers.Dense(1)(layer(convolution(inputs))))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("interpolation", RESIZED)
def test_p42_upsampling_trains(policy, interpolation, backend):
    """After a `relu`, whose gradient XLA refuses to take in another dtype than its features."""
    if (interpolation, backend) == ("lanczos3", "torch"):
        pytest.skip("Keras on torch has no such interpolation")
    model = upsampling(interpolation)
    is_compiled = RESIZED[interpolation] and backend != "torch"
    model.compile("sgd", "mse", jit_compile=is_compiled)
    mpkeras.prepare(model, policy)
    x, y = np.ones((2, 4, 4, 3), "float32"), np.zeros((2, 8, 8, 1), "float32")
    losses = model.fit(x, y, epochs=3, verbose=0).history["loss"]
    assert losses[2] < losses[0]
    dtype = policy.removeprefix("mixed_")
    assert model.get_layer("up").compute_dtype == ("float32" if backend == "tensorflow" else dtype)
    assert model.layers[1].compute_dtype == dtype


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_upsampling_that_works_stays_in_16_bits():
    for interpolation, name in (("nearest", "bfloat16"), ("bilinear", "float32")):
        model = upsampling(interpolation)
        mpkeras.apply_policy(model, "mixed_bfloat16")
        assert model.get_layer("up").compute_dtype == name
        assert kept(model, Policy("mixed_bfloat16", keep_float32=())) == []
    set_global_policy("mixed_float16")
    (row,) = kept(upsampling("lanczos5"), Policy("mixed_float16", keep_float32=()))
    assert row.rule == "UpSampling2D"
    assert row.reason.startswith("interpolation='lanczos5' fails in float16 on tensorflow and this device: ")
    wrapper, inner = kept(upsampling("bilinear", wrapped=True), Policy("mixed_float16", keep_float32=()))
    assert wrapper.layer.layer is inner.layer and "different precisions in %ReluGrad" in inner.reason


@pytest.mark.backends("tensorflow")
def test_a_trial_runs_where_a_step_is_traced():
    """Layers that come into being late are met there; a kernel is missed when it runs."""
    import tensorflow as tf

    found = []
    tf.function(lambda: found.append(missing_kernel_rules("float16", among={"MaxPooling3D"})), autograph=False)()
    kernels._failure.cache_clear()
    assert found == [missing_kernel_rules("float16", among={"MaxPooling3D"})]


# torch 2.13 on a CPU: the gradient of a float16 kernel that ends in one filter, or starts from one channel, is refused.
REFUSED_BY_TORCH = {
    "one filter": (layers.Conv2D, 1, 4),
    "one channel": (layers.Conv2DTranspose, 4, 1),
    "one channel, 1-D": (layers.Conv1DTranspose, 4, 1),
}


@pytest.mark.backends("torch")
@pytest.mark.parametrize("case", REFUSED_BY_TORCH)
def test_convolutions_whose_gradient_torch_refuses_train(case):
    layer_class, filters, channels = REFUSED_BY_TORCH[case]
    shape = (8, channels) if layer_class is layers.Conv1DTranspose else (8, 8, channels)
    x = np.random.default_rng(7).normal(size=(4, *shape)).astype("float32")
    losses = {}
    for policy in ("float32", "mixed_float16", "mixed_bfloat16"):
        keras.utils.set_random_seed(7)
        model = keras.Sequential([keras.Input(shape), layer_class(filters, 3, padding="same", name="convolution")])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        # The convolution makes the output.
        mpkeras.prepare(model, policy if policy == "float32" else without_outputs(policy))
        losses[policy] = model.fit(x, np.ones((4, *shape[:-1], filters)), epochs=3, verbose=0).history["loss"]
        if policy == "mixed_bfloat16":
            import torch

            # A CPU without AVX-512 takes the same way with bfloat16 as with float16.
            can = "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"
            assert model.get_layer("convolution").compute_dtype == can
    np.testing.assert_allclose(losses["mixed_float16"], losses["float32"], rtol=2e-3)  # 11 significant bits


@pytest.mark.backends("torch")
def test_convolutions_that_torch_trains_stay_in_16_bits():
    set_global_policy("mixed_float16")
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2DTranspose(4, 3)(layers.Conv2D(4, 3)(inputs))
    model = keras.Model(inputs, layers.Conv2D(1, 1)(x))  # one pixel at a time, one filter is no matter
    assert kept(model, Policy("mixed_float16", keep_float32=())) == []
    assert {layer.compute_dtype for layer in model.layers} == {"float16"}


# Class, filters, kernel and strides, and the input. oneDNN computes them wrong in bfloat16 on a CPU with such units.
LONG_KERNELS = {
    "a patch": (layers.Conv2D, 24, 4, 4, (16, 16, 16)),
    "a patch of 14": (layers.Conv2D, 8, 14, 14, (14, 14, 16)),
    "not strided": (layers.Conv2D, 16, 8, 1, (12, 12, 8)),
    "1-D": (layers.Conv1D, 16, 8, 1, (40, 8)),
    "1-D, strided": (layers.Conv1D, 8, 16, 16, (64, 16)),
    "causal": (layers.Conv1D, 12, 8, 1, (24, 8)),
}


@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize("case", first_quick(LONG_KERNELS))
def test_long_kernels_of_few_channels_compute_what_float32_computes(case):
    layer_class, filters, kernel_size, strides, shape = LONG_KERNELS[case]
    padding = "causal" if case == "causal" else "same"
    keras.utils.set_random_seed(5)
    convolution = layer_class(filters, kernel_size, strides, padding=padding, name="convolution")
    model = keras.Sequential([keras.Input(shape), convolution, layers.Flatten(), layers.Dense(2)])
    x = np.random.default_rng(5).normal(size=(3, *shape)).astype("float32")
    exact = keras.ops.convert_to_numpy(convolution(x))
    mpkeras.apply_policy(model, "mixed_bfloat16")
    narrow = keras.ops.convert_to_numpy(keras.ops.cast(convolution(x), "float32"))
    assert np.linalg.norm(narrow - exact) < 0.02 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_a_transposed_convolution_of_few_filters_has_the_gradient_of_float32():
    """By its inputs: at 8 filters, of 4 in a row."""
    keras.utils.set_random_seed(6)
    transposed = layers.Conv2DTranspose(16, 4, 4, use_bias=False, name="transposed")
    last = layers.Conv2D(1, 4, 4, use_bias=False)
    model = keras.Sequential([keras.Input((4, 4, 6)), layers.Dense(6, use_bias=False), transposed, last])
    model.compile(keras.optimizers.SGD(1.0), "mse", **QUICK_TO_COMPILE)
    start = model.get_weights()
    x = np.random.default_rng(6).normal(size=(8, 4, 4, 6)).astype("float32")

    def step_of_first_kernel():
        model.set_weights(start)
        model.train_on_batch(x, np.ones((8, 4, 4, 1), "float32"))
        return model.get_weights()[0] - start[0]

    exact = step_of_first_kernel()
    mpkeras.prepare(model, "mixed_bfloat16")
    assert np.linalg.norm(step_of_first_kernel() - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
def test_a_trial_while_keras_asks_for_shapes_says_what_it_says_at_other_times(policy):
    """A model that is not built is converted then; on torch no operation has numbers."""
    cells = layers.RNN(layers.SimpleRNNCell(2))  # A loop of the backend, which is traced, too.
    late = layers.Conv1D(8, 8, padding="same", name="late")
    model = keras.Sequential([late, cells, layers.Dense(1)])
    model.compile("sgd", "mse", **QUICK_TO_COMPILE)
    mpkeras.prepare(model, policy)
    model.train_on_batch(np.ones((4, 20, 16), "float32"), np.ones((4, 1), "float32"))
    kernels._failure.cache_clear()
    is_missing = kernels.missing_kernel_of(late, policy.removeprefix("mixed_")) is not None
    assert late.compute_dtype == ("float32" if is_missing else policy.removeprefix("mixed_"))


@pytest.mark.backends("tensorflow", "torch")
def test_a_kernel_that_computes_other_numbers_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "_WRONG", 1e-4)
    model = keras.Sequential([keras.Input((15, 6)), layers.Conv1D(5, 5, name="long"), layers.Conv1D(5, 3)])
    reason = kernels.missing_kernel_of(model.layers[0], "bfloat16")
    assert "fails in bfloat16" in reason and "what it computes is off by" in reason
    assert kernels.missing_kernel_of(model.layers[1], "bfloat16") is None


@pytest.mark.backends("torch")
def test_a_trial_leaves_names_and_random_numbers_as_they_are():
    layer = layers.Conv2D(1, 3, name="convolution")
    keras.backend.clear_session()
    state = random.getstate()
    reason = kernels.missing_kernel_of(layer, "float16")
    # A CPU that multiplies in float16 itself has the kernel.
    assert reason is None or reason.startswith("its kernel of few filters or channels fails in float16")
    assert random.getstate() == state
    assert layers.Conv2D(1, 3).name == "conv2d"


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_what_was_exported_in_float32_stays_so(tmp_path):
    exported = keras.Sequential([keras.Input((3,)), layers.Dense(5, bias_initializer="ones")])
    exported.export(tmp_path, verbose=False)
    wrapped = layers.TFSMLayer(tmp_path, call_endpoint="serve", name="wrapped")
    body = layers.Dense(3, kernel_initializer="identity", name="body")
    model = keras.Sequential([keras.Input((3,)), body, wrapped, layers.Dense(2)])
    x = np.array([[0.5, -2.0, 4.0]], "float32")
    expected = model(x)
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    assert [layer.compute_dtype for layer in model.layers[:2]] == ["bfloat16", "float32"]
    np.testing.assert_array_equal(model(x), expected)
    assert np.isfinite(model.fit(x, np.ones((1, 2)), verbose=0).history["loss"]).all()
    row = next(row for row in mpkeras.audit(model).layers if row.path == "wrapped")
    assert "exported" in str(row.reason)
