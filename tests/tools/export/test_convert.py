"""`mpkeras convert`: what it writes and says, and one clear line for each bad input."""

import json
import sys
import textwrap
import zipfile

import keras
import numpy as np
import pytest

import mpkeras
from _mpkeras_cli import main
from _mpkeras_cli.convert import FORMAT_NAMES
from mpkeras.tools.export import files
from mpkeras.tools.export.convert import convert
from tests.cli.lines import lines_of
from tests.sixteen_bits import without_outputs

# Keras 3.10 warns of the structure of inputs for any Functional model that it has loaded.
pytestmark = pytest.mark.filterwarnings("ignore:The structure of `inputs` does:UserWarning")
HAS_LITERT = tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 13)
LITERT = [
    pytest.mark.backends("tensorflow"),
    pytest.mark.skipif(not HAS_LITERT, reason="since Keras 3.13"),
]
IMAGES = np.random.default_rng(0).uniform(0, 255, size=(2, 8, 8, 3)).astype("float32")


def numpy(tensor):
    return np.asarray(keras.ops.convert_to_numpy(tensor), "float64")


def cnn():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Rescaling(1 / 255)(inputs)
    x = keras.layers.Conv2D(4, 3, activation="relu", name="conv")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(5, name="head")(keras.layers.GlobalAveragePooling2D()(x)))


@pytest.fixture
def saved(tmp_path):
    """Returns `(path, model)` of a compiled model that was trained for a step."""
    model = cnn()
    model.compile("adam", "mse", run_eagerly=True)
    model.train_on_batch(IMAGES, np.ones((2, 5), "float32"))
    path = tmp_path / "model.keras"
    model.save(path)
    return path, model


_, failing_line = lines_of("convert")


@pytest.mark.slow
def test_a_keras_file_there_and_back(saved, capsys):
    path, _ = saved
    dtype = "float16"
    out = path.parent / "new" / "converted.keras"
    assert main(["convert", str(path), str(out), "--policy", f"mixed_{dtype}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Convolution and pooling; rescaling, normalization and head by rules.
    assert found["layers_by_dtype"] == {dtype: 2, "float32": 3}
    reasons = {layer["class_name"]: layer["reason"] for layer in found["layers"]}
    assert reasons == {
        "Rescaling": "rule Rescaling",
        "Conv2D": f"policy mixed_{dtype}",
        "BatchNormalization": "rule BatchNormalization",
        "GlobalAveragePooling2D": f"policy mixed_{dtype}",
        "Dense": "rule outputs",
    }
    # 3 * 3 * 3 * 4 + 4, 4 * 4, 4 * 5 + 5
    assert (found["parameters"], found["inputs"], found["outputs"]) == (112 + 16 + 25, ["float32"], ["float32"])
    assert (found["source_bytes"], found["out_bytes"]) == (path.stat().st_size, out.stat().st_size)
    assert (found["was_compiled"], found["needs_mpkeras"]) == (True, [])

    loaded = keras.saving.load_model(out)
    assert not loaded.compiled
    assert loaded.get_layer("conv").compute_dtype == dtype
    # The compiled model would be warned of its optimizer, which scales no loss.
    twin = mpkeras.apply_policy(keras.saving.load_model(path, compile=False), f"mixed_{dtype}")
    np.testing.assert_array_equal(numpy(loaded(IMAGES)), numpy(twin(IMAGES)))
    # And back.
    model = keras.saving.load_model(path, compile=False)
    assert convert(out, path.parent / "back.keras", "float32").layers_by_dtype() == {"float32": 5}
    loaded = keras.saving.load_model(path.parent / "back.keras")
    assert loaded.get_config()["layers"] == model.get_config()["layers"]
    np.testing.assert_array_equal(numpy(loaded(IMAGES)), numpy(model(IMAGES)))


@pytest.mark.slow
def test_weights_in_bfloat16_and_back(saved, capsys):
    """A file half as large, which predicts what mixed_bfloat16 does: that rounds the same weights when it computes."""
    path, model = saved
    mixed, small, back = (path.parent / f"{name}.keras" for name in ("mixed", "small", "back"))
    convert(path, mixed, "mixed_bfloat16")
    assert main(["convert", str(path), str(small), "--policy", "bfloat16"]) == 0
    # 112 of the convolution; the normalization stays in float32, and the 25 of the head.
    printed = capsys.readouterr().out
    assert f"{path} under bfloat16" in printed and "compile it again" in printed
    assert "rule BatchNormalization" in printed and "norm" in printed
    assert f"Written to {small} (keras): 112 parameters in bfloat16 and 41 in float32, " in printed
    assert "Inputs are float32, outputs float32." in printed
    loaded = keras.saving.load_model(small)
    assert (loaded.get_layer("conv").kernel.dtype, loaded.get_layer("norm").gamma.dtype) == ("bfloat16", "float32")
    assert loaded.outputs[0].dtype == "float32"
    np.testing.assert_array_equal(numpy(loaded(IMAGES)), numpy(keras.saving.load_model(mixed)(IMAGES)))

    report = convert(small, back, "float32")
    assert report.to_dict()["parameters_by_dtype"] == {"float32": 153}
    assert report.layers_by_dtype() == {"float32": 5}
    again = keras.saving.load_model(back)
    assert {weight.dtype for weight in again.weights} == {"float32"}
    for weight, rounded, first in zip(again.weights, loaded.weights, model.weights, strict=True):
        np.testing.assert_array_equal(numpy(weight), numpy(rounded))
        np.testing.assert_allclose(numpy(weight), numpy(first), rtol=2.0**-8)  # to the nearest of 8 bits
    convert(small, path.parent / "trains.keras", "mixed_bfloat16")
    assert keras.saving.load_model(path.parent / "trains.keras").get_layer("conv").kernel.dtype == "float32"


def test_a_file_of_bfloat16_weights_is_half_as_large(tmp_path):
    layers = [keras.layers.Dense(512), keras.layers.Dense(1)]
    keras.Sequential([keras.Input((256,)), *layers]).save(tmp_path / "in.keras")
    report = convert(tmp_path / "in.keras", tmp_path / "out.keras", "bfloat16")
    assert 0.48 < report.out_bytes / report.source_bytes < 0.55


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_an_h5_file(saved):
    path, model = saved
    model.save(path.with_suffix(".h5"))
    report = convert(path.with_suffix(".h5"), path.parent / "out.keras", "mixed_bfloat16")
    assert report.was_compiled
    assert report.layers_by_dtype() == {"bfloat16": 2, "float32": 3}


def test_the_same_file_and_a_figure_with_a_bar_for_each_dtype(saved):
    path, _ = saved
    before = path.stat().st_size
    report = convert(path, path, "mixed_bfloat16", force=True)
    assert (report.source_bytes, report.out_bytes) == (before, path.stat().st_size)
    loaded = keras.saving.load_model(path)
    assert [loaded.get_layer(name).compute_dtype for name in ("conv", "head")] == ["bfloat16", "float32"]
    pytest.importorskip("matplotlib")
    (axes,) = report.plot().axes
    assert {text.get_text() for text in axes.get_yticklabels()} == {"bfloat16", "float32"}


@pytest.mark.slow
def test_an_output_in_16_bits_ends_in_a_layer_that_plain_keras_loads(saved):
    path, _ = saved
    dtype = "bfloat16"
    out, back, policy = path.parent / "out.keras", path.parent / "back.keras", without_outputs(f"mixed_{dtype}")
    report = convert(path, out, policy)
    assert report.layers_by_dtype() == {dtype: 3, "float32": 3} and report.outputs == ["float32"]
    reasons = {layer["class_name"]: layer["reason"] for layer in report.to_dict()["layers"]}
    assert (reasons["Dense"], reasons["Activation"]) == (f"policy mixed_{dtype}", "float32 outputs")
    loaded = keras.saving.load_model(out)
    assert loaded.get_layer("head").compute_dtype == dtype
    twin = mpkeras.apply_policy(keras.saving.load_model(path, compile=False), policy)
    np.testing.assert_array_equal(numpy(loaded(IMAGES)), numpy(twin(IMAGES)))
    # The layer goes on the way back, and where the head is in float32.
    assert convert(out, back, "float32").layers_by_dtype() == {"float32": 5}
    assert "Activation" not in {type(layer).__name__ for layer in keras.saving.load_model(back).layers}


def test_policy_objects_become_stock_and_layers_of_mpkeras_are_named(tmp_path):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(3, dtype=mpkeras.Policy("mixed_bfloat16"))(inputs)
    model = keras.Model(inputs, mpkeras.layers.Softmax()(x))
    model.save(tmp_path / "model.keras")
    report = convert(tmp_path / "model.keras", tmp_path / "out.keras", "mixed_bfloat16")
    assert report.needs_mpkeras == ["Softmax"]
    assert "Loads only where mpkeras is installed, because of: Softmax." in str(report)


CUSTOM = """
    import keras

    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    @keras.saving.register_keras_serializable(package="theirs")
    class Thrice(keras.layers.Layer):
        def call(self, x):
            return 3 * x
"""


def test_classes_of_the_user(tmp_path, monkeypatch, capsys):
    (tmp_path / "their_layers.py").write_text(textwrap.dedent(CUSTOM))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    code = "import their_layers; names = [their_layers.Twice, their_layers.Thrice]"
    scope = {}
    with monkeypatch.context() as context:
        context.syspath_prepend(tmp_path)
        exec(code, scope)
    twice, thrice = scope["names"]
    inputs = keras.Input((4,))
    x = thrice()(twice()(keras.layers.Dense(4)(inputs)))
    keras.Model(inputs, keras.layers.Dense(2)(x)).save("model.keras")
    # As in a process of its own, in which nobody imported it.
    keras.saving.get_custom_objects().pop("theirs>Thrice")
    del sys.modules["their_layers"]

    line = failing_line(capsys, "model.keras", "out.keras", "--policy", "mixed_bfloat16")
    assert "'model.keras' with the class 'T" in line and "`--import MODULE`" in line
    arguments = ["model.keras", "out.keras", "--policy", "mixed_bfloat16", "--json", "--import", "their_layers"]
    assert main(["convert", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["layers_by_dtype"] == {"bfloat16": 3, "float32": 1}
    del sys.modules["their_layers"]
    keras.saving.get_custom_objects().pop("theirs>Thrice")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param("{in} {out}", "required: --policy", id="no policy"),
        pytest.param("{dir}/no.keras {out} --policy float32", "which does not exist", id="no file"),
        pytest.param("{dir}/text.keras {out} --policy float32", "to be a zip archive", id="not a zip"),
        pytest.param("{dir}/half.keras {out} --policy float32", "half of one", id="half of the file"),
        pytest.param("{dir}/text.h5 {out} --policy float32", "that Keras 3.", id="not HDF5"),
        pytest.param("{dir}/zip.keras {out} --policy float32", "config.json", id="another zip"),
        pytest.param("{dir}/text.pt {out} --policy float32", "a `.keras` or `.h5` file", id="other file"),
        pytest.param("{dir}/w.weights.h5 {out} --policy float32", "holds weights only", id="weights only"),
        pytest.param("{in} {out} --policy float16", "with float32 or bfloat16 variables", id="float16 variables"),
        pytest.param("{in} {in} --policy float32", "Say `--force` to replace it", id="output exists"),
        pytest.param(
            "{in} {dir} --policy float32 --force --format savedmodel",
            "to replace a SavedModel",
            id="a directory of something else",
            marks=pytest.mark.backends("tensorflow", "jax"),
        ),
        pytest.param("{in} {dir}/out.pb --policy float32", "Received: '{dir}/out.pb'", id="unknown ending"),
        pytest.param("{in} {out} --policy float32 --format onnx", "to end in '.onnx'", id="format and ending"),
        pytest.param("{in} {out} --policy float32 --format savedmodel", "to be a directory", id="not a directory"),
        pytest.param("{in} {dir}/text.pt/o.keras --policy float32", "can be written to", id="no place"),
        pytest.param(
            "{in} {dir}/o.tflite --policy mixed_float16", "Use `--policy float32`", id="16-bit TFLite", marks=LITERT
        ),
        pytest.param(
            "{in} {dir}/o.tflite --policy float32",
            "set KERAS_BACKEND=tensorflow",
            id="TFLite elsewhere",
            marks=pytest.mark.backends("jax", "torch"),
        ),
        pytest.param(
            "{in} {dir}/served --policy float32",
            "set KERAS_BACKEND=tensorflow",
            id="SavedModel on torch",
            marks=pytest.mark.backends("torch"),
        ),
    ],
)
def test_bad_input(saved, capsys, tmp_path, arguments, expected):
    path, model = saved
    folder = tmp_path / "bad.d"
    folder.mkdir()
    for name in ("text.keras", "text.h5", "text.pt"):
        (folder / name).write_text("words")
    (folder / "half.keras").write_bytes(path.read_bytes()[:2000])
    with zipfile.ZipFile(folder / "zip.keras", "w") as archive:
        archive.writestr("words.txt", "words")
    model.save_weights(folder / "w.weights.h5")
    before = {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()}

    places = {"{in}": str(path), "{out}": str(tmp_path / "new" / "out.keras"), "{dir}": str(folder)}
    for place, value in places.items():
        arguments = arguments.replace(place, value)
        expected = expected.replace(place, value)
    assert expected in failing_line(capsys, *arguments.split())
    assert {found: found.read_bytes() for found in tmp_path.rglob("*") if found.is_file()} == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"force": "no"}, "Expected `force` to be True or False. Received: force='no'"),
        ({"force": True, "imports": "my_layers"}, "Expected `imports` to be a list .*Received: imports='my_layers'"),
        ({"force": True, "imports": None}, "Received: imports=None .*NoneType"),
    ],
)
def test_arguments_of_a_wrong_type_leave_what_is_there(tmp_path, options, message):
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)]).save(tmp_path / "model.keras")
    (tmp_path / "out.keras").write_text("precious")
    with pytest.raises(TypeError, match=message):
        convert(tmp_path / "model.keras", tmp_path / "out.keras", "mixed_bfloat16", **options)
    assert (tmp_path / "out.keras").read_text() == "precious"


def test_lambdas_are_not_run(tmp_path, capsys):
    path = tmp_path / "model.keras"
    keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: 2 * x)]).save(path)
    assert "without Python lambdas" in failing_line(capsys, path, tmp_path / "out.keras", "--policy", "float32")


def test_16_bit_variables_are_refused_and_what_was_there_stays(tmp_path, capsys):
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, dtype="float16")]).save(tmp_path / "model.keras")
    (tmp_path / "out.keras").write_text("precious")
    arguments = [tmp_path / "model.keras", tmp_path / "out.keras", "--policy", "mixed_float16", "--force"]
    assert "float16 variables" in failing_line(capsys, *arguments)
    assert (tmp_path / "out.keras").read_text() == "precious"


@pytest.mark.slow
def test_a_failed_export_leaves_what_was_there(saved, monkeypatch, capsys):
    path, _ = saved
    out = path.parent / "out.keras"
    out.write_text("precious")

    def fail(self, path):
        print("a graph of a thousand lines")
        path.write_text("half")
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(keras.Model, "save", fail)
    line = failing_line(capsys, path, out, "--policy", "mixed_bfloat16", "--force")
    assert "RuntimeError: no such kernel. Try the policy float32" in line
    assert out.read_text() == "precious"
    assert sorted(found.name for found in path.parent.iterdir()) == ["model.keras", "out.keras"]


def test_packages_are_looked_for_before_any_work(monkeypatch):
    onnx, policy = files.FORMATS["onnx"], mpkeras.get_policy("float32")
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: object())
    files.check(onnx, policy)
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"Run `pip install .*onnx"):
        files.check(onnx, policy)


def test_format_names_are_those_of_the_formats():
    assert FORMAT_NAMES == tuple(files.FORMATS)


class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = keras.layers.Dense(2)

    def call(self, x):
        return self.head(x)


def test_subclassed_models(tmp_path, monkeypatch):
    monkeypatch.setitem(keras.saving.get_custom_objects(), "Subclassed", Subclassed)
    model = Subclassed()
    model(IMAGES)
    model.save(tmp_path / "model.keras")
    report = convert(tmp_path / "model.keras", tmp_path / "out.keras", "mixed_bfloat16")
    assert report.layers_by_dtype() == {"bfloat16": 1}
    assert "what the `call` of the model makes of them" in str(report)
    # A class makes its layers anew: the file cannot say what they compute in.
    loaded = keras.saving.load_model(tmp_path / "out.keras")
    assert loaded.head.compute_dtype == "float32"
    assert 'float32 as a rule: call `mpkeras.apply_policy(model, "mixed_bfloat16")` there.' in str(report)
    assert mpkeras.apply_policy(loaded, "mixed_bfloat16").head.compute_dtype == "bfloat16"


def test_a_sequential_model_without_shapes_is_no_class_of_the_user(tmp_path):
    model = keras.Sequential([keras.layers.Dense(5, name="body"), keras.layers.Dense(3, name="head")])
    with pytest.warns(UserWarning, match="has not yet been built"):
        model.save(tmp_path / "model.keras")
        report = convert(tmp_path / "model.keras", tmp_path / "out.keras", "mixed_bfloat16")
    # Of its layers the file says what they compute in.
    loaded = keras.saving.load_model(tmp_path / "out.keras")
    assert [layer.compute_dtype for layer in loaded.layers] == ["bfloat16", "float32"]
    assert "that its class makes" not in str(report) and "out.keras (keras): no parameters, " in str(report)


def test_a_policy_object_that_the_file_has_already_is_stock_in_the_new_one(tmp_path):
    # A float32 layer among layers in 16 bits is there on purpose, and stays as it is.
    on_purpose = keras.layers.Dense(3, dtype=mpkeras.Policy("float32"))
    others = [keras.layers.Dense(2, dtype="mixed_bfloat16") for _ in range(2)]
    model = keras.Sequential([keras.Input((4,)), others[0], on_purpose, others[1]])
    model.save(tmp_path / "model.keras")
    convert(tmp_path / "model.keras", tmp_path / "out.keras", "mixed_bfloat16")
    for name, has_ours in (("model", True), ("out", False)):
        with zipfile.ZipFile(tmp_path / f"{name}.keras") as file:
            assert (b"mpkeras" in file.read("config.json")) == has_ours
