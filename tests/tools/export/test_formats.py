"""What each format holds: float32 in and out, and the numbers of the model, read back by what will run it."""

import functools

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.tools.export.convert import convert

IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")
VECTORS = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
# Keras 3.10 warns of the structure of inputs for any Functional model that it has loaded.
pytestmark = pytest.mark.filterwarnings("ignore:The structure of `inputs` does:UserWarning")


def numpy(tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def functional():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(4, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling2D()(x)))


class Subclassed(keras.Model):
    """Keras takes the inputs that it exports from what such a model computes in."""

    def __init__(self):
        super().__init__()
        self.parts = keras.layers.Flatten(), keras.layers.Dense(4, "relu"), keras.layers.Dense(3)
        self(IMAGES)

    def call(self, inputs):
        return functools.reduce(lambda x, layer: layer(x), self.parts, inputs)


def dense():
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(16, activation="relu")(inputs)))


def trained_in_16_bits():
    """Returns a model after a few steps of mixed float16, as it is then."""
    model = functional()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    precision = mpkeras.callbacks.MixedPrecision("mixed_float16")
    model.fit(IMAGES, np.ones((2, 5), "float32"), epochs=3, verbose=0, callbacks=[precision])
    return model


# Keras asks jax2tf for what JAX will take away.
JAX_TO_TF = pytest.mark.filterwarnings("ignore:.*(native_serialization|jax2tf)")


@pytest.mark.slow
@JAX_TO_TF
@pytest.mark.backends("tensorflow", "jax")
def test_signatures_of_a_saved_model_are_float32(tmp_path):
    import tensorflow as tf

    model = mpkeras.apply_policy(Subclassed(), "mixed_bfloat16")
    model.export(tmp_path / "served", verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    signature = served.signatures["serving_default"]
    specs = [*signature.structured_input_signature[1].values(), *signature.structured_outputs.values()]
    assert {spec.dtype for spec in specs} == {tf.float32}
    # JAX compiles what is served, and rounds a 16-bit intermediate less often than one operation at a time.
    np.testing.assert_allclose(served.serve(IMAGES).numpy(), numpy(model(IMAGES)), atol=1e-2)


@pytest.mark.slow
@JAX_TO_TF
@pytest.mark.backends("tensorflow", "jax")
def test_a_saved_model_by_convert(tmp_path):
    import tensorflow as tf

    model = functional()
    model.save(tmp_path / "model.keras")
    for _ in range(2):  # the second replaces the first
        report = convert(tmp_path / "model.keras", tmp_path / "served", "mixed_bfloat16", force=True)
    assert (report.format, report.inputs, report.outputs) == ("savedmodel", ["float32"], ["float32"])
    assert report.out_bytes == sum(p.stat().st_size for p in (tmp_path / "served").rglob("*") if p.is_file())
    loaded = tf.saved_model.load(str(tmp_path / "served"))
    # The signature: `serve` takes a list on Keras 3.10, for any Functional model that was loaded.
    served = loaded.signatures["serving_default"](tf.constant(IMAGES))["output_0"]
    # bfloat16 has 8 significant bits
    np.testing.assert_allclose(served.numpy(), numpy(model(IMAGES)), atol=2e-2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "served"]


# Since TensorFlow 2.20 the interpreter announces its own package; it is the one that TensorFlow has.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
@pytest.mark.backends("tensorflow")
def test_tflite_by_convert(tmp_path):
    import tensorflow as tf

    if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 13):
        pytest.skip("Keras writes TFLite since 3.13")
    model = trained_in_16_bits()
    model.save(tmp_path / "model.keras")
    convert(tmp_path / "model.keras", tmp_path / "model.tflite", "float32")
    interpreter = tf.lite.Interpreter(model_path=str(tmp_path / "model.tflite"))
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert {taken["dtype"], given["dtype"]} == {np.float32}
    interpreter.resize_tensor_input(taken["index"], IMAGES.shape)
    interpreter.allocate_tensors()
    assert {tensor["dtype"] for tensor in interpreter.get_tensor_details()} <= {np.float32, np.int32, np.int64}
    interpreter.set_tensor(taken["index"], IMAGES)
    interpreter.invoke()
    expected = mpkeras.apply_policy(model, "float32").predict(IMAGES, verbose=0)
    np.testing.assert_allclose(interpreter.get_tensor(given["index"]), expected, atol=1e-5)


# What writes ONNX warns of its own ways: protobuf, torch's old exporter, traced constants.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("policy", "atol"),
    [
        pytest.param("float32", 1e-5, id="float32"),
        # Two products of numbers near 1, 11 significant bits each.
        pytest.param("mixed_float16", 1e-2, id="mixed_float16"),
    ],
)
def test_onnx(tmp_path, policy, atol, backend):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip({"tensorflow": "tf2onnx", "jax": "jax2onnx", "torch": "onnxscript"}[backend])
    model = dense()
    model.save(tmp_path / "model.keras")
    report = convert(tmp_path / "model.keras", tmp_path / "model.onnx", policy)
    assert ("ONNX Runtime" in str(report)) == (policy != "float32")
    graph = onnx.load(tmp_path / "model.onnx").graph
    types = {tensor.type.tensor_type.elem_type for tensor in [*graph.input, *graph.output]}
    assert types == {onnx.TensorProto.FLOAT}
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: VECTORS})
    assert output.dtype == np.float32
    np.testing.assert_allclose(output, numpy(model(VECTORS)), atol=atol)
