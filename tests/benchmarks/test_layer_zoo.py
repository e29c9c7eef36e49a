"""The layer zoo: each stock Keras layer in 16 bits against itself in float64, so that a changed layer is noticed.

`python benchmarks/layer_zoo.py` writes the same numbers as a table and a picture. On JAX, where each case is compiled
several times over, one case per class runs here, with the rules only and mostly against float32; the script runs them
all.
"""

import functools
import json

import keras
import numpy as np
import pytest

import layer_zoo
import zoo_measure
import zoo_plot
from mpkeras.policies import DEFAULT_RULES, default_rules
from zoo_cases import CASES, NOT_RUN

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

BACKEND = keras.backend.backend()
RUNNABLE = zoo_measure.runnable_cases()
SHOWN = [name for name in RUNNABLE if "[" not in name] if BACKEND == "jax" else RUNNABLE

# Attention in float16: the scores of inputs this large are beyond 65504 before the softmax sees them, and a rule for
# the layer would move its matrix products to float32 as well. A rule of your own is the remedy.
SCORES_OVERFLOW = {
    "Attention": ("±300", "±6e4"),
    # The gradient of the summed scores.
    "Attention[concat]": ("±6e4",),
    "MultiHeadAttention": ("±300", "±6e4"),
    "GroupQueryAttention": ("±300", "±6e4"),
}
# Where no key is left, torch's attention kernel in float16 gives other numbers than in float32. Nobody reads them.
ARBITRARY_WITHOUT_KEYS = ("MultiHeadAttention[nothing left]", "GroupQueryAttention[nothing left]")

# Keras 3.10 cannot broadcast the mask of its keys, in float32 either.
MASKS_RAISE = ("Attention[mask]", "AdditiveAttention[mask]")
MASKS_RAISE += ("Attention[nothing left]", "AdditiveAttention[nothing left]")
IS_OLD = tuple(int(part) for part in keras.__version__.split(".")[:2]) < (3, 15)

# Rules whose reason shows on these backends only.
NEEDED_ON = {
    "AveragePooling1D": ("tensorflow", "jax"),
    "AveragePooling2D": ("tensorflow", "jax"),
    "AdaptiveAveragePooling1D": ("tensorflow", "jax"),
    "AdaptiveAveragePooling2D": ("tensorflow", "jax"),
    "AdaptiveAveragePooling3D": ("tensorflow", "jax"),
    "activation:sparse_plus": ("jax", "torch"),
    # Only a graph of TensorFlow casts what it is given.
    "CategoryEncoding": ("tensorflow",),
    # Keras 3.15 computes it in float32 whatever the policy: there the rule changes no number.
    "GroupNormalization": ("tensorflow", "jax", "torch") if IS_OLD else (),
}


@functools.cache
def measured(name):
    if BACKEND == "jax":
        # In attention the gradient of the keys' bias is 0 but for rounding, which only float64 tells.
        reference = "float64" if CASES[name].family == "attention" else "float32"
        return zoo_measure.measure_case(name, modes=("rules",), reference=reference)
    return zoo_measure.measure_case(name)


def in_mode(name, mode):
    return [result for result in measured(name) if result["mode"] == mode]


def known_nonfinite(name, dtype):
    if dtype != "float16":
        return ()
    return SCORES_OVERFLOW.get(name, SCORES_OVERFLOW.get(zoo_measure.class_name(name), ()))


def test_each_layer_of_keras_has_a_case_or_a_reason():
    assert zoo_measure.unknown_classes() == []
    assert not set(NOT_RUN) & {zoo_measure.class_name(name) for name in CASES}


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # What Keras and the backends say of 16 bits is their own affair here.
@pytest.mark.parametrize("name", SHOWN)
def test_default_rules_keep_what_float32_keeps(name):
    if IS_OLD and name in MASKS_RAISE:
        pytest.skip("this Keras may raise in float32 as well")
    for result in in_mode(name, "rules"):
        assert "raises" not in result, result
        known = known_nonfinite(name, result["dtype"])
        assert [entry for entry in result["nonfinite"] if entry.partition(" at ")[2] not in known] == [], result
        if name in ARBITRARY_WITHOUT_KEYS and BACKEND == "torch":
            continue
        for part, error in result["errors"].get("typical", {}).items():
            assert error <= zoo_measure.bound(name), (part, result)


# Random draws and data preparation have no derivative, or are left out of a step.
TRAINED = [name for name in RUNNABLE if CASES[name].family not in ("data", "random")]
TRAINED = [name for name in TRAINED if "[" not in name or name.startswith("UpSampling2D")]


@pytest.mark.matrix
@pytest.mark.backends("tensorflow")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAINED)
def test_p42_xla_refuses_no_layer_that_it_takes_in_float32(name):
    """Both 16-bit dtypes were tried once on every case; they differ in nothing here."""
    assert zoo_measure.refused_by_xla(name, "bfloat16") is None


def cases_of(rule):
    kind, _, activation = rule.partition(":")
    if activation:
        return [name for name in RUNNABLE if name.partition("[")[2].rstrip("]").partition(",")[0] == activation]
    return [name for name in RUNNABLE if zoo_measure.class_name(name) == rule]


def does_harm(result):
    """Whether the layer without rules raises, is inf or NaN, or is off by more than its bound at any input."""
    if "raises" in result or result["nonfinite"]:
        return True
    typical = result["errors"].get("typical", {})
    if any(error > zoo_measure.bound(result["case"]) for error in typical.values()):
        return True
    # A log-probability is read as it is: 0.1 of it changes a loss, however large it is itself.
    return result["case"] == "Activation[log_softmax, logits]" and result["moved"] > 0.1


@pytest.mark.matrix
@pytest.mark.backends("tensorflow", "torch")  # JAX would compile everything twice more.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", default_rules())
def test_each_default_rule_is_needed(rule):
    if BACKEND not in NEEDED_ON.get(rule, (BACKEND,)):
        pytest.skip(f"needed on {', '.join(NEEDED_ON[rule]) or 'no backend'}")
    cases = cases_of(rule)
    if not cases:
        pytest.skip("newer than this Keras")
    assert any(does_harm(result) for name in cases for result in in_mode(name, "bare")), cases


def test_a_class_without_case_is_noticed(monkeypatch):
    monkeypatch.delitem(zoo_measure.CASES, "Identity")
    assert zoo_measure.unknown_classes() == ["Identity"]


@pytest.mark.parametrize(
    ("sixteen", "expected"),
    [
        pytest.param([4.0, 2.0], {"error": 0.0, "nonfinite": False, "range": False}, id="the same"),
        # 2^-8 / (4 * 2^-10)
        pytest.param([4.0, 2.0 + 2.0**-8], {"error": 1.0, "nonfinite": False, "range": False}, id="one epsilon"),
        pytest.param([4.0, np.nan], {"error": 0.0, "nonfinite": True, "range": False}, id="lost"),
    ],
)
def test_errors_are_in_epsilons_of_the_largest_value(sixteen, expected):
    exact = np.array([4.0, 2.0])
    found = zoo_measure.compare(np.array(sixteen), exact, exact, "float16")
    assert {key: found[key] for key in expected} == expected


def test_what_leaves_the_range_in_float32_is_not_held_against_float16():
    exact = np.array([7e4, 1.0])
    found = zoo_measure.compare(np.array([np.inf, 1.0]), exact, exact, "float16")
    assert (found["range"], found["nonfinite"], found["error"]) == (True, False, 0.0)


def test_rounding_noise_is_given_no_error():
    found = zoo_measure.compare(np.array([3e-8]), np.array([1e-8]), np.array([1e-17]), "float16")
    assert found["error"] is None


@pytest.mark.slow
def test_table_picture_and_options(tmp_path):
    options = layer_zoo.parse_arguments(["--layer", "Dense", "--out", str(tmp_path)])
    assert (options.layer, options.json) == (["Dense"], str(tmp_path / "layer_zoo.json"))
    results = json.loads(json.dumps(layer_zoo.measure(BACKEND, ["Average"])["results"]))
    rows = layer_zoo.table_rows(results)
    assert [(row["dtype"], row["inf or NaN"], row["inf or NaN, rules"]) for row in rows] == [
        ("float16", "±6e4", ""),
        ("bfloat16", "", ""),
    ]
    assert rows[0]["rules"] == "Average"
    bare = [result for result in results if (result["dtype"], result["mode"]) == ("float16", "bare")]
    assert zoo_plot.worst_error(bare) == float("inf")
    pytest.importorskip("matplotlib")
    zoo_plot.write_plot(tmp_path / "layer_zoo.png", results)
    assert (tmp_path / "layer_zoo.png").stat().st_size > 10_000


def test_every_rule_has_a_case():
    assert [rule for rule, _ in DEFAULT_RULES if not cases_of(rule) and hasattr(keras.layers, rule)] == []
