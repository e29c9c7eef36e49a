"""What training would keep, by the dtypes of weights and slots: counted by hand, and as it then is."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.devices.native import Device
from mpkeras.insight.advice import AdviceReport
from mpkeras.insight.bench import ESTIMATE, TEMPORARY
from mpkeras.insight.storage import storage_choices
from mpkeras.insight.timing import Cell
from mpkeras.training.state import bytes_of_training
from tests.step_modes import snapshot

CPU = Device("cpu", "CPU")


def classifier():
    """Of 362 parameters 216 are in a layer that follows "bfloat16", the others stay in float32; 48 are statistics."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(24),  # 8 * 24 + 24 = 216
            keras.layers.BatchNormalization(),  # 48 trained, 48 not
            keras.layers.Dense(2, activation="softmax"),  # 24 * 2 + 2 = 50
        ]
    )


def dense(units=50, inputs=20, **options):
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(units, use_bias=False, **options)])


@pytest.mark.parametrize("is_built", [True, False], ids=["built", "not built"])
@pytest.mark.parametrize(
    ("model", "optimizer", "expected"),
    [
        # 1000 parameters with two moments: 12, 8 and 6 bytes each.
        pytest.param(dense, keras.optimizers.Adam, [(12000, 4000), (8000, 4000), (6000, 2000)], id="Adam"),
        pytest.param(dense, keras.optimizers.SGD, [(4000, 4000), (4000, 4000), (2000, 2000)], id="no slots"),
        pytest.param(
            dense,
            lambda: keras.optimizers.Adam(use_ema=True),
            [(16000, 4000), (12000, 4000), (10000, 2000)],
            id="averages of the weights stay float32",
        ),
        pytest.param(
            # 20 * 50 + 50 * 10
            lambda: keras.Sequential([keras.Input((20,)), *dense().layers, keras.layers.Dense(10, use_bias=False)]),
            keras.optimizers.Adam,
            [(18000, 6000), (12000, 6000), (9000, 3000)],
            id="two layers",
        ),
        pytest.param(
            classifier,
            keras.optimizers.Adam,
            # 362 * 4 + 2 * 314 * 4; the same with 2 * 314 * 2; of 216 in bfloat16 with their slots and 98 + 48 not.
            [(3960, 1256), (2704, 1256), (216 * 6 + 98 * 12 + 48 * 4, 216 * 2 + 98 * 4)],
            id="layers that stay float32",
        ),
    ],
)
def test_bytes_by_hand(model, optimizer, expected, is_built):
    model, optimizer = model(), optimizer()
    if is_built:
        optimizer.build(model.trainable_variables)
    found = storage_choices(model, optimizer)
    assert [way.name for way in found] == ["float32", "bfloat16 slots", "bfloat16 weights and slots"]
    assert [(way.state_bytes, way.gradient_bytes) for way in found] == expected
    assert optimizer.built == is_built


@pytest.mark.parametrize(
    ("way", "policy"),
    [
        (0, "mixed_bfloat16"),
        (1, mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16")),
        (2, "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("before", [None, "bfloat16", "mixed_float16"])
def test_what_is_told_is_what_is_kept(before, way, policy):
    model = classifier()
    model.compile(keras.optimizers.Nadam(), "mse")
    if before is not None:
        mpkeras.prepare(model, before)
    state = snapshot(model.weights), [weight.dtype for weight in model.weights]
    told = storage_choices(model, model.optimizer)[way]
    assert (snapshot(model.weights), [weight.dtype for weight in model.weights]) == state
    mpkeras.prepare(model, policy)
    model.optimizer.build(model.trainable_variables)
    held = {group: sum(sums.values()) for group, sums in bytes_of_training(model, model.optimizer).items()}
    assert (told.state_bytes, told.gradient_bytes) == (held["weights"] + held["slots"], held["gradients"])


def test_parts_of_frozen_weights_are_counted_as_weights_alone():
    model = classifier()
    model.layers[0].trainable = False
    found = storage_choices(model, keras.optimizers.Adam())
    # 362 weights and two slots for 98; in bfloat16 the 216 frozen ones, and no slot.
    assert [way.state_bytes for way in found] == [362 * 4 + 98 * 8, 362 * 4 + 98 * 4, 216 * 2 + 146 * 4 + 98 * 8]


def advice(optimizer=None, cells=(), memory_kind=None, file=None, model=dense):
    return AdviceReport(model(), cells, False, [CPU], optimizer=optimizer, memory_kind=memory_kind, file=file)


def test_the_report_names_the_ways():
    text = str(advice(keras.optimizers.Adam()))
    assert (
        "Weights and optimizer state, with Adam: 11.7 KiB (12.0 bytes a parameter) in float32, 7.8 KiB (8.0 bytes a "
        'parameter) with `slot_dtype="bfloat16"`, 5.9 KiB (6.0 bytes a parameter) under "bfloat16".'
    ) in text
    assert 'short: `mpkeras.prepare(model, mpkeras.Policy("float32", slot_dtype="bfloat16"))`' in text
    assert '`mpkeras.prepare(model, "bfloat16")` the weights as well' in text
    # There is no slot to store.
    text = str(advice(keras.optimizers.SGD()))
    assert 'short: `mpkeras.prepare(model, "bfloat16")` stores weights' in text and "Policy(" not in text
    assert "short: `mpkeras run --policy bfloat16 SCRIPT`" in str(advice(keras.optimizers.Adam(), file="m.keras"))


@pytest.mark.parametrize(
    ("step_bytes", "kind", "named"),
    [
        # bfloat16 saves 6000 bytes of 12000 and what the step needs.
        pytest.param(18000, TEMPORARY, True, id="a fifth"),
        pytest.param(18400, TEMPORARY, False, id="less"),
        pytest.param(18400, ESTIMATE, True, id="an estimate decides nothing"),
    ],
)
def test_it_is_a_choice_where_the_state_is_much_of_the_memory(step_bytes, kind, named):
    cell = Cell("float32", False)
    cell.times_ms, cell.memory_bytes = [1.0, 1.0, 1.0], step_bytes
    text = str(advice(keras.optimizers.Adam(), [cell], kind))
    assert ("Where memory is what is short" in text) == named
    assert ("Small state would save 20% of the memory at most" in text) == (not named)


def test_what_is_not_known_is_not_told():
    class Own(keras.optimizers.SGD):
        def __init__(self, needed, **kwargs):
            super().__init__(**kwargs)

    not_built = keras.Sequential([keras.layers.Dense(2)])
    reports = [advice(), advice(Own(1)), advice(keras.optimizers.Adam(), model=lambda: not_built)]
    assert all(report.storage == [] and "optimizer state" not in str(report) for report in reports)


def test_advise_counts_with_the_optimizer_of_the_model():
    model = dense()
    model.compile(keras.optimizers.Adadelta(), "mse")
    report = mpkeras.advise(model, None, measure=False)
    assert report.to_dict()["storage"][2] == {
        "name": "bfloat16 weights and slots",
        "state_bytes": 6000,
        "gradient_bytes": 2000,
    }
    assert "with Adadelta: 11.7 KiB" in str(report) and not model.optimizer.built
    x, y = np.ones((8, 20), "float32"), np.ones((8, 50), "float32")
    measured = mpkeras.advise(model, x, y, verbose=0, jit_compile=False, budget_s=5.0)
    assert measured.storage == report.storage and not model.optimizer.built
