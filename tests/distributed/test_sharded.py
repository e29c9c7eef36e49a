"""`sharded`: a model in parts trains as on one device, in less memory, and goes on on fewer devices."""

import importlib.util

import keras
import numpy as np
import pytest

import mpkeras
from tests.distributed.launch import run_program

only_jax = pytest.mark.backends("jax")
needs_compilers = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra `forecast`, for Linux on x86-64"
)


@only_jax
@pytest.mark.slow
def test_a_model_of_words_in_parts_trains_as_on_one_device_in_less_memory():
    """An embedding, a convolution, statistics and a loop, by our step and by `fit`, in float32.

    `test_everything_trains_under_every_layout_as_on_one_device` has 16 bits.
    """
    found = run_program("on_shards.py", "--parts", "words")["words"]
    for layout in ("weights", "state"):
        assert max(found[layout]["losses"], found[layout]["after"]) <= 2.5e-6  # sums in another order
        assert found[layout]["skipped"] == [True] * 8 and found[layout]["traces"] == []
    assert found["fit"] <= 2.5e-6
    # A part each, and what is small or odd, and whole on each device; or weights whole, Adam's two slots in parts.
    assert found["weights"]["share"] <= 1 / 8 + 0.02
    assert found["state"]["share"] <= (1 + 2 / 8) / 3 + 0.02


ALL_LAYOUTS = ["data", "weights", "state", "model"]
# float32: sums in another order. bfloat16 has 8 significant bits, float16 11: each device rounds what it computes.
# Products in float8 have the 4 of e4m3.
LARGEST_OF_VARIANT = {
    "float32": 1e-5,
    "mixed_float16": 5e-4,
    "accumulated": 1e-3,
    "mixed_bfloat16": 2e-3,
    "remat": 2e-3,
    "small state": 2e-3,
    "float8": 2e-2,
}


@only_jax
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "devices", "layouts", "replay"),
    [
        pytest.param("mixed_float16", 8, ALL_LAYOUTS, ["weights"], id="mixed_float16 on 8"),
        pytest.param("mixed_bfloat16", 4, ["weights", "model"], [], id="mixed_bfloat16 on 4"),
        # Each capsule takes programs of its own.
        pytest.param("mixed_float16", 8, ALL_LAYOUTS, ALL_LAYOUTS, id="capsules on 8", marks=pytest.mark.matrix),
        *[
            pytest.param(variant, 8, ALL_LAYOUTS, [], id=f"{variant} on 8", marks=pytest.mark.matrix)
            for variant in LARGEST_OF_VARIANT
            if variant != "mixed_float16"
        ],
    ],
)
def test_everything_trains_under_every_layout_as_on_one_device(variant, devices, layouts, replay):
    chosen = ["--variants", variant, "--layouts", *layouts, "--replay", *replay]
    result = run_program("on_shards.py", "--devices", devices, *chosen)
    assert list(result) == [f"{variant}, {layout}" for layout in layouts]
    for case, found in result.items():
        assert found["losses"] <= LARGEST_OF_VARIANT[variant], case
        assert found["after"] <= LARGEST_OF_VARIANT[variant], case
        assert found["skipped"] == found["skipped_alone"] == [True] * devices, case
        assert found["traces"] == [], case
        # A capsule of a step and one of `fit`, each skipped again, with the same bits.
        assert found.get("replayed") == ([[True, True]] * 2 if case.split(", ")[1] in replay else None), case


@only_jax
@pytest.mark.slow
def test_training_goes_on_on_fewer_devices():
    resumed = run_program("on_shards.py", "--parts", "resumed")["resumed"]
    for policy, tolerance in (("float32", 1e-6), ("mixed_float16", LARGEST_OF_VARIANT["mixed_float16"])):
        on_four = resumed[f"{policy} 4"]
        for count in (2, 1):
            found = resumed[f"{policy} {count}"]
            np.testing.assert_allclose(found["losses"], on_four["losses"], rtol=tolerance)
            # The scale and the finite steps since it moved.
            assert found["scale"] == on_four["scale"] == [64.0, 10]


@only_jax
@pytest.mark.slow
def test_every_kind_of_convolution_trains_as_on_one_device():
    assert run_program("on_shards.py", "--parts", "convolutions")["convolutions"] <= LARGEST_OF_VARIANT["mixed_float16"]


@only_jax
@pytest.mark.slow
@needs_compilers
def test_the_axis_with_which_the_fewest_bytes_travel_is_compiled_for(monkeypatch):
    counted = {}

    def counting(*arguments, devices, **options):
        report = mpkeras.forecast(*arguments, devices=devices, **options)
        (found,) = report.policies.values()
        counted[devices.axis] = sum(part["bytes"] for part in found["collectives"])
        assert list(report.policies) == ["mixed_bfloat16"]
        return report

    monkeypatch.setattr("mpkeras.tools.forecast.sharded.forecast", counting)
    # Features are the larger axis, and split over them a gradient is sent to and fro: the rows of words travel less.
    ids = keras.Input((32,))
    with mpkeras.policy_scope("mixed_bfloat16"):
        hidden = keras.layers.Embedding(64, 256)(ids)
        net = keras.Model(ids, keras.layers.Dense(8)(keras.layers.GlobalAveragePooling1D()(hidden)))
    distribution = mpkeras.sharded(net, devices=8, device="h100")
    assert mpkeras.sharded(devices=8).split((64, 256)).axes == (None, "batch")
    assert distribution.split((64, 256)).axes == ("batch", None)
    assert counted[distribution.axis] == min(counted.values()) < counted["largest"]


@only_jax
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        pytest.param((768, 3072), (None, "batch"), id="the largest axis"),
        pytest.param((3072, 768), ("batch", None), id="the largest axis, the first"),
        pytest.param((64, 64), (None, "batch"), id="of two that are alike the last"),
        pytest.param((50257, 768), (None, "batch"), id="the largest does not divide"),
        pytest.param((33, 77), (None, None), id="none divides"),
        pytest.param((3, 3, 64, 128), (None, None, None, "batch"), id="a kernel of a convolution"),
        pytest.param((1016,), (None,), id="small"),
        pytest.param((1024,), ("batch",), id="just large enough"),
        pytest.param((), (), id="a number"),
    ],
)
def test_where_the_parts_of_a_variable_lie(shape, axes):
    assert mpkeras.sharded(devices=8).split(shape).axes == axes


@only_jax
def test_a_distribution_is_keras_own():
    distribution = mpkeras.sharded(devices=16, shard="state")
    assert isinstance(distribution, keras.distribution.ModelParallel)
    assert (distribution.device_mesh.shape, distribution.batch_dim_name) == ((16,), "batch")
    assert mpkeras.sharded(devices=["cpu:0"]).device_mesh.devices.tolist() == ["cpu:0"]


@only_jax
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"shard": "slots"}, ValueError, r"shard='slots'\. Use 'weights'"),
        ({"devices": 0}, ValueError, r"devices=\[\]|at least one device"),
        ({"devices": True}, TypeError, "devices=True of type bool"),
        ({"devices": 2.0}, TypeError, r"devices=2\.0 of type float"),
        ({"device": "h100"}, ValueError, "device='h100' and no model"),
        ({"model": "net"}, TypeError, "keras.Model"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        mpkeras.sharded(**options)


@pytest.mark.backends("tensorflow", "torch")
def test_backends_without_layouts_say_so():
    with pytest.raises(ValueError, match="Expected Keras on JAX"):
        mpkeras.sharded(devices=2)
