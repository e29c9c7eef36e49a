"""`mpkeras audit`: what it prints of a file, and one line on bad input."""

import json
import sys

import keras
import pytest
from keras import layers

import mpkeras
from mpkeras.policies.policy import REGISTERED
from tests.cli.lines import lines_of

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

printed, failing_line = lines_of("audit")


def saved(path, optimizer=None):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(504)], name="small")
    if optimizer is not None:
        model.compile(optimizer, "categorical_crossentropy")
    model.save(path)
    return str(path)


def test_a_file_and_what_a_policy_would_make_of_it(capsys, tmp_path, backend):
    path = saved(tmp_path / "model.keras")
    before = (tmp_path / "model.keras").read_bytes()
    text = printed(capsys, path)
    assert text.startswith(f"Audit of 'small' on the {backend} backend") and "No layer computes in 16 bits" in text
    text = printed(capsys, path, "--policy", "mixed_bfloat16")
    # 8 * 16 products of 8 * 16 + 16 * 504: the others make the outputs.
    assert "bfloat16" in text and " 1.6 % in 16 bits" in text
    report = json.loads(printed(capsys, path, "--json", "--policy", "mixed_bfloat16"))
    # Batches of 8.
    assert report["flops"] == {"bfloat16": 2 * 8 * 8 * 16, "float32": 2 * 8 * 16 * 504} and report["model"] == "small"
    assert [layer["rule"] for layer in report["layers"] if layer["class_name"] == "Dense"] == [None, "outputs"]
    assert (tmp_path / "model.keras").read_bytes() == before


def test_the_summary_and_open_sizes(capsys, tmp_path, backend):
    inputs = keras.Input((None, 8))
    keras.Model(inputs, layers.Dense(8)(inputs), name="words").save(tmp_path / "words.keras")
    text = printed(capsys, tmp_path / "words.keras", "--summary", "--open-size", "16")
    assert text.startswith(f"Audit of 'words' on the {backend} backend\nLayers: 1 in float32.\n")
    assert " on inputs (8, 16, 8), 0.0 % in 16 bits. Open sizes were taken as 16" in text and "Computes in" not in text
    assert "(8, 64, 8)" in printed(capsys, tmp_path / "words.keras")


@pytest.mark.filterwarnings("ignore:.*HDF5 file:UserWarning", "ignore::UserWarning")
@pytest.mark.parametrize("ending", ["keras", "h5"])
def test_p18_the_optimizer_in_the_file_is_audited(capsys, tmp_path, ending):
    path = saved(tmp_path / f"model.{ending}", "adam")
    text = printed(capsys, path, "--policy", "mixed_float16")
    assert "error: Layers compute in float16, and the optimizer (Adam) scales no loss" in text
    assert " 1.6 % in 16 bits" in text
    path = saved(tmp_path / f"scaled.{ending}", mpkeras.LossScaleOptimizer("adam"))
    text = printed(capsys, path, "--policy", "mixed_float16")
    assert "error: " not in text and "not audited" not in text


def test_an_optimizer_that_cannot_be_read_is_said(capsys, tmp_path):
    class Own(keras.optimizers.SGD):
        pass

    path = saved(tmp_path / "model.keras", Own())
    assert "The optimizer in the file is not audited: " in printed(capsys, path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    saved(folder / "model.keras")
    (folder / "broken.keras").write_bytes(b"PK no archive")
    (folder / "model.txt").write_text("")
    return folder


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("none.keras", [], "does not exist"),
        ("broken.keras", [], "zip archive"),
        ("", [], "a directory"),
        ("model.txt", [], "`.keras` or `.h5`"),
        (
            "model.keras",
            ["--policy", "mixed_flaot16"],
            "argument --policy: Expected the name of a registered policy. Received: 'mixed_flaot16'. Did you mean",
        ),
        (
            "model.keras",
            ["--policy", "float16"],
            "for small weights. A model that has float16 variables is converted in",
        ),
        ("model.keras", ["--import", "no_such_module"], "'no_such_module'"),
        ("model.keras", ["--summary", "--json"], "argument --summary: not allowed with argument --json"),
        ("model.keras", ["--open-size", "0"], "--open-size: expected a whole number of at least 1, received '0'"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, path, options, expected):
    assert expected in failing_line(capsys, folder / path, *options)


MODULE = """
import keras

class Twice(keras.layers.Layer):
    def call(self, x):
        return x + x
"""


@pytest.fixture
def importable(tmp_path, monkeypatch):
    """The folder of a test, which is the working directory: what is imported from there is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_unknown_classes_are_named_and_may_be_imported(capsys, importable):
    (importable / "twice_of_audit.py").write_text(MODULE)
    namespace = {"__name__": "twice_of_audit"}
    exec(MODULE, namespace)
    keras.Sequential([keras.Input((8,)), namespace["Twice"](), layers.Dense(8)]).save("model.keras")
    line = failing_line(capsys, "model.keras")
    assert "'Twice'" in line and "--import MODULE" in line
    assert "Twice" in printed(capsys, "model.keras", "--import", "twice_of_audit")


def test_a_policy_may_be_registered_by_what_is_imported(capsys, importable):
    policy = "mpkeras.Policy('of_audit', compute_dtype='bfloat16', variable_dtype='float32')"
    (importable / "policy_of_audit.py").write_text(f"import mpkeras\nmpkeras.register_policy({policy})\n")
    saved("model.keras")
    try:
        assert "bfloat16" in printed(capsys, "model.keras", "--policy", "of_audit", "--import", "policy_of_audit")
    finally:
        # What is registered stays, for every test that follows.
        REGISTERED.pop("of_audit", None)
