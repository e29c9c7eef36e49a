"""Counts, switches, words, times, batches and paths: what is none is refused wherever it is passed; nothing changed."""

import re
from pathlib import Path

import keras
import numpy as np
import pytest

import mpkeras
from _mpkeras_cli.saved_model import audit_saved
from mpkeras._arguments import check_switch, checked_count, checked_path
from mpkeras.callbacks import BlackBox, Float32Fallback, NumericsMonitor, ResourceMonitor
from mpkeras.tools.export.convert import convert
from mpkeras.tools.shared.arguments import checked_seconds

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.parametrize("value", [0, -3, 2.0, True, "4", None, np.float64(3), [3]])
def test_what_is_no_count(value):
    with pytest.raises(ValueError, match=r"`keep` to be a whole number of at least 1\. Received: keep=.*\. Try 3\.$"):
        checked_count("keep", value, "Try 3.")


def test_whole_numbers_of_numpy_are_counts():
    assert [checked_count("keep", value) for value in (1, np.int64(7), np.uint8(9))] == [1, 7, 9]
    assert type(checked_count("keep", np.int64(7))) is int


@pytest.mark.parametrize("value", [0, 1, "no", None, np.array([True])])
def test_what_is_no_switch(value):
    with pytest.raises(TypeError, match="`force` to be True or False. Received: force=.*Leave it out"):
        check_switch("force", value)


@pytest.mark.parametrize("value", [0, -1.5, True, "60", np.inf, np.nan, None])
def test_what_is_no_time(value):
    with pytest.raises(ValueError, match="`budget_s` to be a positive number of seconds. Received: budget_s="):
        checked_seconds("budget_s", value)


def test_times_of_numpy_are_times_of_python():
    """Elsewhere a queue waits for them, and JSON holds them."""
    seconds = checked_seconds("budget_s", np.float32(2.5))
    assert (type(seconds), seconds) == (float, 2.5)


@pytest.mark.parametrize("value", [77, b"step.mpk", None, 2.5, ["a"], True])
def test_what_is_no_path(value):
    with pytest.raises(TypeError, match=r"`out` to be a text or a `pathlib.Path`\. Received: out=.*\. Try 'a'\.$"):
        checked_path("out", value, "Try 'a'.")


def test_texts_and_path_objects_are_paths(tmp_path):
    assert checked_path("out", "a/b", "") == Path("a/b") and checked_path("out", tmp_path, "") == tmp_path


PATHS = {
    "folder=4711": lambda: BlackBox(4711),
    r"path=b'step\.mpk'": lambda: mpkeras.load_capsule(b"step.mpk"),
    "path=12": lambda: mpkeras.make_train_step(_model(), "sgd", "mse").capsule(12),
    "source=3": lambda: convert(3, "served.keras", "mixed_bfloat16"),
    "out=None": lambda: convert("model.keras", None, "mixed_bfloat16"),
    "path=7": lambda: audit_saved(7),
}


@pytest.mark.parametrize("received", PATHS)
def test_every_path_is_checked(received):
    with pytest.raises(TypeError, match=rf"Expected `\w+` to be a text or.*Received: {received} .*Pass the"):
        PATHS[received]()


def _model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def _compiled():
    model = _model()
    model.compile("sgd", "mse")
    return model


WORDS = {
    "slot_dtype": lambda value: mpkeras.Policy("mixed_bfloat16", slot_dtype=value),
    "compute_dtype": lambda value: mpkeras.Policy("mixed_bfloat16", compute_dtype=value),
    "variable_dtype": lambda value: mpkeras.Policy("mixed_bfloat16", variable_dtype=value),
    "float8": lambda value: mpkeras.Policy("mixed_float8", float8=value),
    "keep_16_bits": lambda value: mpkeras.Policy("mixed_bfloat16", keep_16_bits=value),
    "remat": lambda value: mpkeras.prepare(_compiled(), "mixed_bfloat16", remat=value),
    "loss_scale": lambda value: mpkeras.LossScaleOptimizer("sgd", loss_scale={"a": value}),
    "all_reduce_dtype": lambda value: mpkeras.LossScaleOptimizer("sgd", all_reduce_dtype=value),
    "on_overflow": lambda value: mpkeras.make_train_step(_model(), "sgd", "mse", on_overflow=value),
    "on_min_scale": lambda value: mpkeras.callbacks.MixedPrecision("mixed_float16", on_min_scale=value),
    "shard": lambda value: mpkeras.sharded(shard=value),
    "batch": lambda value: mpkeras.plan_memory(_model(), (4, 2), device="cpu", batch=value),
}


@pytest.mark.parametrize("value", [np.ones(3), ""], ids=["array", "empty"])
@pytest.mark.parametrize("name", WORDS)
def test_an_array_is_no_word_and_no_rule(name, value):
    with pytest.raises((ValueError, TypeError), match=rf"Expected .*`{name}`.* Received: (.* )?{name}=") as error:
        WORDS[name](value)
    assert re.search(r"\. (Use|Leave|Pass|For)", str(error.value))


NAMES = {
    "optimizer='adamm'": lambda: mpkeras.make_train_step(_model(), "adamm", "mse"),
    "inner_optimizer='adamm'": lambda: mpkeras.LossScaleOptimizer("adamm"),
    "loss_fn='msee'": lambda: mpkeras.make_train_step(_model(), "adam", ["mse", "msee"]),
}


@pytest.mark.parametrize("received", NAMES)
def test_a_name_that_keras_does_not_know(received):
    with pytest.raises(ValueError, match=rf"a name that Keras knows\. Received: {received}\. Pass for example '\w+'"):
        NAMES[received]()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.ones((4, 2)), np.ones((4, 1))


BATCHES = {
    "trace_numerics": (lambda x: mpkeras.trace_numerics(_compiled(), x, np.ones((4, 1))), ValueError),
    "advise": (lambda x: mpkeras.advise(_compiled(), x, np.ones((4, 1)), verbose=0), ValueError),
    "step": (lambda x: mpkeras.make_train_step(_model(), "sgd", "mse")(x), TypeError),
}


@pytest.mark.parametrize("value", [Batches(), iter(Batches())], ids=["PyDataset", "generator"])
@pytest.mark.parametrize("name", BATCHES)
def test_what_makes_batches_is_none(name, value):
    call, error = BATCHES[name]
    with pytest.raises(error, match=rf"Expected .*batch.* Received: .*{type(value).__name__}.*[pP]ass "):
        call(value)


VERBOSE = {
    "advise": lambda verbose: mpkeras.advise(_compiled(), np.ones((4, 2)), np.ones((4, 1)), verbose=verbose),
    "forecast": lambda verbose: mpkeras.forecast(_model(), (4, 2), device="cpu", verbose=verbose),
    "plan_memory": lambda verbose: mpkeras.plan_memory(_model(), (4, 2), device="cpu", verbose=verbose),
}


@pytest.mark.parametrize("name", VERBOSE)
def test_what_is_no_verbosity(name):
    for value in ("no", None, 2, -1, 1.0, np.ones(2)):
        with pytest.raises(ValueError, match=r"`verbose` to be 0 or 1\. Received: verbose=.*\. Leave it out for 1\.$"):
            VERBOSE[name](value)


CALLS = {
    "patience": (lambda: Float32Fallback(patience=2.0), ValueError),
    "max_layers": (lambda: Float32Fallback(max_layers=True), ValueError),
    "every": (lambda: NumericsMonitor(every=0), ValueError),
    "max_findings": (lambda: NumericsMonitor(max_findings=None), ValueError),
    "gradients": (lambda: NumericsMonitor(gradients="no"), TypeError),
    "keep": (lambda: BlackBox("never-made", keep=True), ValueError),
    "batch_size": (lambda: ResourceMonitor(batch_size=0.5), ValueError),
    "open_size": (lambda: mpkeras.audit(_model(), open_size=True), ValueError),
    "measure": (lambda: mpkeras.advise(_model(), np.ones((4, 2)), np.ones((4, 1)), measure="no"), TypeError),
    "budget_s": (lambda: mpkeras.forecast(_model(), (4, 2), device="cpu", budget_s=True), ValueError),
    "largest_batch": (lambda: mpkeras.forecast(_model(), (4, 2), device="cpu", largest_batch="no"), TypeError),
    # As `None` it would let a file run code, where Keras reads it as its own default, which does not.
    "safe_mode": (lambda: mpkeras.load_capsule("never-read.mpk", safe_mode=None), TypeError),
    "overwrite": (lambda: mpkeras.register_policy(mpkeras.Policy("mixed_float16"), overwrite="no"), TypeError),
    "float32_variables": (lambda: mpkeras.apply_policy(_model(), float32_variables=1), TypeError),
    "rollback": (lambda: mpkeras.make_train_step(_model(), "sgd", "mse", rollback=0), TypeError),
    "jit_compile": (lambda: mpkeras.make_train_step(_model(), "sgd", "mse", jit_compile="auto"), TypeError),
    "accumulate_steps": (
        lambda: mpkeras.make_train_step(_model(), "sgd", "mse", accumulate_steps=2.0),
        ValueError,
    ),
    "optimized": (
        lambda: mpkeras.make_train_step(_model(), "sgd", "mse").compiler_ir(
            np.ones((4, 2)), np.ones((4, 1)), optimized="no"
        ),
        TypeError,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_names_its_argument(name):
    call, error = CALLS[name]
    with pytest.raises(error, match=f"Expected `{name}` to be .* Received: {name}="):
        call()


class Pair(keras.Model):
    """As a GAN: its parts are trained by a `train_step`, and it has no `call`."""

    def __init__(self):
        super().__init__(name="pair")
        self.generator = _model()


OF_A_BATCH = {
    "advise": lambda model: mpkeras.advise(model, np.ones((4, 2)), np.ones((4, 1)), verbose=0),
    "forecast": lambda model: mpkeras.forecast(model, (4, 2), device="cpu", verbose=0),
    "plan_memory": lambda model: mpkeras.plan_memory(model, (4, 2), device="cpu", verbose=0),
}


@pytest.mark.parametrize("name", OF_A_BATCH)
def test_a_model_without_a_call_is_told_that_its_parts_can_be_asked_about(name):
    model = Pair()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="with a `call`.* Received: model 'pair', which has none. .* models inside"):
        OF_A_BATCH[name](model)
    assert "its class has no `call`. Audit the models inside" in str(mpkeras.audit(model))
