"""`forecast`: the compiler's own figures, for devices that are there and for those that are not."""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.tools.forecast.compiler import CompileRequest, NotCompiled
from mpkeras.tools.forecast.compiling import define
from mpkeras.tools.forecast.forecast import Forecast, largest_that_fits
from mpkeras.tools.forecast.targets import TARGETS

FOLDER = Path(__file__).parent
HAS_COMPILERS = importlib.util.find_spec("libtpu") is not None and importlib.util.find_spec("jax_plugins") is not None
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX compiles, which is not installed")
needs_compilers = pytest.mark.skipif(not HAS_COMPILERS, reason="needs the extra `forecast`, for Linux on x86-64")


def for_an_accelerator(test):
    """Marks a test of programs for devices that are not here. JAX compiles them, whatever the backend."""
    for mark in (needs_compilers, pytest.mark.slow, pytest.mark.backends("tensorflow")):
        test = mark(test)
    return test


def compiled_by_jax(test):
    """Marks a test of models of other backends than the one that compiles."""
    for mark in (needs_jax, pytest.mark.slow, pytest.mark.backends("tensorflow", "torch")):
        test = mark(test)
    return test


class Gate(layers.Layer):
    """A layer of the user's, which keeps a function of the user's."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.dense = layers.Dense(units)

    def call(self, inputs):
        return inputs * half_sigmoid(self.dense(inputs))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def half_sigmoid(x):
    return ops.sigmoid(x) * 0.5


def absolute_error(y, y_pred):
    return ops.mean(ops.abs(y - y_pred), axis=-1)


def mlp():
    return keras.Sequential([keras.Input((96,)), layers.Dense(128, "relu"), layers.Dense(16)], name="mlp")


def cnn():
    inputs = keras.Input((16, 16, 16))
    x = layers.Conv2D(32, 3, padding="same")(inputs)
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.Conv2D(32, 3, strides=2)(x)
    x = layers.GlobalAveragePooling2D()(layers.Activation("relu")(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(16)(x), name="cnn")


def transformer():
    inputs = keras.Input((32,), dtype="int32")
    x = layers.Embedding(64, 64)(inputs)
    x = x + layers.MultiHeadAttention(2, 32, dropout=0.1)(layers.LayerNormalization()(x), x)
    x = x + layers.MultiHeadAttention(2, 32)(layers.LayerNormalization()(x), x)
    x = x + layers.Dense(64)(layers.Dropout(0.1)(layers.Dense(128, "gelu")(layers.LayerNormalization()(x))))
    return keras.Model(inputs, layers.Dense(16)(x), name="transformer")


def lstm():
    return keras.Sequential([keras.Input((12, 16)), layers.LSTM(32), layers.Dense(16)], name="lstm")


MODELS = {
    "mlp": (mlp, (64, 96)),
    "cnn": (cnn, (16, 16, 16, 16)),
    "transformer": (transformer, (8, 32)),
    "lstm": (lstm, (16, 12, 16)),
}


# The multiplications of a forward pass through the last layer, which makes the outputs in float32.
OF_HEAD = {"mlp": 64 * 128 * 16, "cnn": 16 * 32 * 16, "transformer": 8 * 32 * 64 * 16, "lstm": 16 * 32 * 16}


def check_products(found, name, dtype):
    """Fails unless the products of the head are in float32, and all others in `dtype`."""
    assert set(found["products"]) == {dtype, "float32"}
    # Forward, to the weights and to the inputs.
    assert (found["products"]["float32"], found["matrix_flops"]["float32"]) == (3, 3 * 2 * OF_HEAD[name])


def clean(found):
    assert found["conditionals"] == found["host_transfers"] == found["loops_of_unknown_length"] == 0
    return found


@needs_jax
@pytest.mark.slow
def test_the_forecast_for_this_cpu(capsys):
    model = mlp()
    before = [w.copy() for w in model.get_weights()]
    report = mpkeras.forecast(
        model, np.zeros((64, 96)), device="cpu", policies=["float32", "bfloat16"], optimizer="sgd", verbose=0
    )
    found = report.to_dict()["policies"]
    weights = 96 * 128 + 128 + 128 * 16 + 16
    # SGD keeps nothing beside the weights but a few numbers, and so does the loss scale.
    assert 0 <= found["float32"]["persistent_bytes"] - 4 * weights < 100
    # The head makes the outputs, in float32 with its weights.
    head = 128 * 16 + 16
    assert 0 <= found["bfloat16"]["persistent_bytes"] - 2 * (weights - head) - 4 * head < 100
    # Forward, and to the weights of both layers and the inputs of the second.
    assert sum(found["float32"]["matrix_flops"].values()) == 2 * 64 * (2 * 96 * 128 + 3 * 128 * 16)
    assert sum(found["float32"]["products"].values()) == 5
    for policy in found.values():
        clean(policy)
        assert policy["fits"] and policy["largest_batch"] is None and policy["collectives"] == []
        assert policy["step_time_lower_bound_ms"] is None
        assert policy["peak_bytes"] >= policy["persistent_bytes"] + policy["temporary_bytes"]
    assert json.loads(json.dumps(report.to_dict()))["device"] == "cpu"
    # The model is as it was, and nothing was printed.
    assert model.dtype_policy.name == "float32" and not model.compiled
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))
    assert capsys.readouterr().out == ""


@compiled_by_jax
def test_targets_and_inputs_that_the_program_leaves_out_are_no_state():
    inputs = {"x": keras.Input((8,), name="x"), "unused": keras.Input((512,), name="unused")}
    features = layers.Dense(256, name="features")(inputs["x"])
    outputs = {"features": features, "o": layers.Dense(1, name="o")(features)}
    model = keras.Model(inputs, outputs, name="two")
    model.compile("sgd", {"o": "mse"})
    for batch, devices in ((2, 1), (64, 2)):
        shapes = {"x": (batch, 8), "unused": (batch, 512)}
        found = mpkeras.forecast(model, shapes, device="cpu", devices=devices, policies=["float32"], verbose=0)
        weights = 8 * 256 + 256 + 256 + 1
        assert 0 <= found.policies["float32"]["persistent_bytes"] - 4 * weights < 100


class Positions(layers.Layer):
    """Adds numbers that it keeps in a variable made of a value."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.positions = keras.Variable(np.arange(24.0, dtype="float32"), trainable=False)

    def call(self, inputs):
        return inputs + self.positions


def partly_frozen():
    inputs = keras.Input((24,))
    model = keras.Model(inputs, layers.Dense(3)(Gate(24)(Gate(24)(Positions()(inputs)))))
    # The config of the layer around it does not say so.
    model.layers[2].dense.trainable = False
    model.layers[3].dense.enable_lora(2)
    return model


@compiled_by_jax
@pytest.mark.parametrize(
    ("optimizer", "per_weight", "numbers"), [("nadam", 2, 1), ("adafactor", 1, 24 + 3 + 2 * (24 + 2))]
)
def test_what_is_frozen_inside_and_optimizers_that_make_variables_of_values(optimizer, per_weight, numbers):
    model = partly_frozen()
    model.compile(optimizer, "mse")
    report = mpkeras.forecast(model, (8, 24), device="cpu", policies=["float32"], verbose=0)
    head, lora, kernel, bias = 24 * 3 + 3, 2 * 24 * 2, 24 * 24, 24
    trained = head + lora + bias
    # Nadam's is the product of its schedule, Adafactor's are means of rows and of columns, beside a slot of no use.
    state = 4 * (24 + 2 * (kernel + bias) + lora + head + per_weight * trained + numbers)
    assert 0 <= report.policies["float32"]["persistent_bytes"] - state < 150


@needs_jax
@pytest.mark.slow
@pytest.mark.parametrize("is_passed", [False, True], ids=["compiled with", "passed"])
def test_slots_are_stored_as_the_user_of_the_optimizer_says(is_passed):
    model = keras.Sequential([keras.Input((40,)), layers.Dense(24, "relu"), layers.Dense(3)])
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(), slot_dtype="bfloat16")
    model.compile("sgd" if is_passed else optimizer, "mse")
    options = {"optimizer": optimizer} if is_passed else {}
    wide = mpkeras.Policy("mixed_bfloat16", slot_dtype="float32").renamed("wide")
    policies = ["mixed_bfloat16", wide]
    found = mpkeras.forecast(model, (8, 40), device="cpu", policies=policies, verbose=0, **options).policies
    weights = 40 * 24 + 24 + 24 * 3 + 3
    # Weights in 4 bytes, and Adam's two slots in 2 or, as the policy says, 4 each.
    assert 0 <= found["mixed_bfloat16"]["persistent_bytes"] - (4 + 2 * 2) * weights < 150
    assert 0 <= found["wide"]["persistent_bytes"] - (4 + 2 * 4) * weights < 150


@compiled_by_jax
def test_outputs_without_a_loss_and_layers_that_keras_does_not_compile():
    inputs = keras.Input((8, 8, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(32, 3)(layers.RandomRotation(0.1)(inputs)))
    outputs = {name: layers.Dense(units, name=name)(x) for name, units in (("a", 3), ("b", 64), ("c", 4))}
    rows = np.zeros((8, 8, 8, 3), "float32")
    named, listed = keras.Model(inputs, outputs), keras.Model(inputs, list(outputs.values()))
    losses = {"c": "mse", "a": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    targets = {"a": np.zeros(8, "int32"), "c": np.zeros((8, 4))}
    found = []
    for model, loss, y in (
        (named, losses, None),
        (named, losses, targets),
        (listed, losses, targets),
        (listed, [losses["a"], None, "mse"], [targets["a"], None, targets["c"]]),
        (keras.Model(inputs, list(outputs.values())), None, None),
    ):
        model.compile("sgd", loss)
        report = mpkeras.forecast(model, rows, y, device="cpu", policies=["float32"], verbose=0)
        found.append(sum(report.policies["float32"]["matrix_flops"].values()))
    # What no loss asks for is not computed; without a loss each output has one, the mean squared error.
    assert len(set(found[:4])) == 1 and found[4] - found[0] == 3 * 2 * 8 * 32 * 64


@compiled_by_jax
def test_layers_losses_and_optimizers_of_the_user():
    inputs = keras.Input((24,))
    model = keras.Model(inputs, {"a": Gate(24)(inputs), "b": layers.Dense(3)(inputs)})
    losses = {"a": absolute_error, "b": "sparse_categorical_crossentropy"}
    model.compile(keras.optimizers.AdamW(1e-3, gradient_accumulation_steps=2), losses)
    small = mpkeras.Policy("mixed_float16", slot_dtype="bfloat16")
    mine = mpkeras.Policy("mine", compute_dtype="bfloat16", variable_dtype="float32")
    found = mpkeras.forecast(model, (8, 24), device="cpu", policies=["mixed_float16", small, mine], verbose=0)
    assert list(found.policies) == ["mixed_float16", "mixed_float16, slots bfloat16", "mine"]
    weights = 24 * 24 + 24 + 24 * 3 + 3
    # Weights, two slots of Adam, sums of gradients, and the inner optimizer's own sums, unused beside them.
    assert 0 <= clean(found.policies["mixed_float16"])["persistent_bytes"] - 20 * weights < 200
    # Of them the two slots are small, and those sums that stand unused.
    of_small = clean(found.policies["mixed_float16, slots bfloat16"])["persistent_bytes"]
    assert 0 <= of_small - 14 * weights < 200


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_weights_that_devices_share():
    mesh = keras.distribution.DeviceMesh((2, 4), ("rows", "model"), [f"tpu:{i}" for i in range(8)])
    layouts = keras.distribution.LayoutMap(mesh)
    # By the path of the model at hand: one that is made again from its config has others.
    layouts["^mlp/.*kernel$"] = (None, "model")
    devices = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="rows")
    report = mpkeras.forecast(
        mlp(), (64, 96), device="cpu", devices=devices, policies=["float32"], optimizer="sgd", verbose=0
    )
    found = clean(report.policies["float32"])
    assert report.devices == 8
    kernels, biases = 96 * 128 + 128 * 16, 128 + 16
    assert 0 <= found["persistent_bytes"] - 4 * (kernels // 4 + biases) < 100
    # A device has half of the rows and a quarter of each product.
    assert sum(found["matrix_flops"].values()) == 2 * 32 * (2 * 96 * 128 + 3 * 128 * 16) // 4
    assert found["collectives"]
    # A slot of Adam and the sum of gradients lie as their weight does, and so do the inner optimizer's own sums.
    adam = keras.optimizers.Adam(gradient_accumulation_steps=2)
    report = mpkeras.forecast(
        mlp(), (64, 96), device="cpu", devices=devices, policies=["float32"], optimizer=adam, verbose=0
    )
    found = clean(report.policies["float32"])
    assert 0 <= found["persistent_bytes"] - 5 * 4 * (kernels // 4 + biases) < 200


@for_an_accelerator
# Another program in float16 with attention is compiled below.
@pytest.mark.parametrize(
    "name", ["mlp", "cnn", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("transformer", "lstm"))]
)
def test_programs_for_an_h100(name):
    make, shape = MODELS[name]
    model = make()
    if name == "mlp":
        model.compile(keras.optimizers.Adam(gradient_accumulation_steps=4), "mse")
    report = mpkeras.forecast(model, shape, device="h100", policies=["mixed_float16", "bfloat16"], verbose=0)
    for policy, dtype in (("mixed_float16", "float16"), ("bfloat16", "bfloat16")):
        found = clean(report.policies[policy])
        check_products(found, name, dtype)
        assert found["fits"] and found["step_time_lower_bound_ms"] > 0


@for_an_accelerator
def test_attention_on_an_h100_takes_half_of_the_memory():
    """JAX' own keeps the probabilities in float32, and a third of the temporaries with them: 0.7 of float32's."""
    inputs = x = keras.Input((512, 32))
    for _ in range(6):
        x = x + layers.MultiHeadAttention(2, 16)(x, x, use_causal_mask=True)
    policies = ["float32", "mixed_float16"]
    report = mpkeras.forecast(keras.Model(inputs, x), (4, 512, 32), device="h100", policies=policies, verbose=0)
    of_float32, in_16_bits = (clean(report.policies[policy])["temporary_bytes"] for policy in policies)
    assert in_16_bits < 0.5 * of_float32, (in_16_bits, of_float32)


@for_an_accelerator
def test_what_is_computed_again_takes_less_on_an_h100():
    x = inputs = keras.Input((256, 64))
    for _ in range(6):
        x = layers.Add()([x, layers.MultiHeadAttention(4, 16)(x, x, use_causal_mask=True)])
        x = layers.Add()([x, layers.Dense(64)(layers.Dense(256, "gelu")(x))])
    model = keras.Model(inputs, layers.Dense(1)(x))
    kinds = (None, "products", "blocks")
    policies = [mpkeras.Policy("mixed_bfloat16", remat=remat).renamed(f"{remat}") for remat in kinds]
    report = mpkeras.forecast(model, (8, 256, 64), device="h100", policies=policies, verbose=0)
    found = [clean(report.policies[f"{remat}"]) for remat in kinds]
    bytes_ = [part["temporary_bytes"] for part in found]
    flops = [sum(part["matrix_flops"].values()) for part in found]
    assert bytes_[2] < bytes_[1] < bytes_[0] and bytes_[2] < 0.4 * bytes_[0], bytes_
    # Scores of attention are computed again under both, products with weights under the last alone.
    assert flops[0] < flops[1] < flops[2] < 1.35 * flops[0], flops
    # Of a model that was converted to such a policy, whatever the policies of the forecast say.
    mpkeras.apply_policy(model, mpkeras.Policy("mixed_bfloat16", remat="blocks"))
    again = mpkeras.forecast(model, (8, 256, 64), device="h100", policies=["mixed_bfloat16"], verbose=0)
    assert again.policies["mixed_bfloat16"]["temporary_bytes"] == bytes_[2]


@needs_compilers
@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_a_model_made_in_a_remat_scope_is_forecast_with_it():
    def bytes_and_flops(mode):
        with keras.RematScope(mode=mode):
            hidden = [layers.Dense(192, "gelu") for _ in range(3)]
        model = keras.Sequential([keras.Input((192,)), *hidden, layers.Dense(1)])
        report = mpkeras.forecast(model, (384, 192), device="h100", policies=["float32"], verbose=0)
        found = clean(report.policies["float32"])
        return found["temporary_bytes"], sum(found["matrix_flops"].values())

    (plain_bytes, plain_flops), (bytes_, flops) = bytes_and_flops(None), bytes_and_flops("full")
    # By hand: three products of 384 x 192 x 192 more.
    assert flops - plain_flops == 3 * 2 * 384 * 192 * 192 and bytes_ < plain_bytes


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_a_model_from_a_file_is_forecast_with_what_that_says_is_computed_again(tmp_path):
    def flops_of(model):
        report = mpkeras.forecast(model, (96, 48), device="cpu", policies=["float32"], verbose=0)
        return sum(report.policies["float32"]["matrix_flops"].values())

    model = keras.Sequential([keras.Input((48,)), *[layers.Dense(48, "gelu") for _ in range(4)], layers.Dense(1)])
    model.compile("sgd", "mse")
    plain_flops = flops_of(model)
    mpkeras.prepare(model, "float32", remat=[model.layers[1]])
    model.train_on_batch(np.ones((4, 48)), np.ones((4, 1)))
    model.save(tmp_path / "model.keras")
    assert flops_of(keras.saving.load_model(tmp_path / "model.keras")) == flops_of(model) > plain_flops


@for_an_accelerator
def test_a_program_for_eight_h100s(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    report = mpkeras.forecast(mlp(), (64, 96), device="h100", devices=8, policies=["mixed_float16"], verbose=0)
    found = clean(report.policies["mixed_float16"])
    hidden, head = 96 * 128, 128 * 16
    summed = {(part["kind"], part["dtype"]): part["bytes"] for part in found["collectives"]}
    # The product that makes the gradient of the hidden kernel multiplies in 16 bits; devices sum it in float32.
    assert ("all-reduce", "float16") not in summed
    assert summed["all-reduce", "float32"] >= 4 * (hidden + head)
    (text,) = (path.read_text() for path in tmp_path.glob("*pure_step*gpu_after_optimizations.txt"))
    assert decided_after_the_sums(text)


def decided_after_the_sums(text) -> bool:
    """Whether every check for finite numbers of a program reads what all devices have summed."""
    from mpkeras.tools.forecast.hlo import parse

    computations, entry = parse(text)
    lines = {line.name: line for line in computations[entry]}

    def inside(line):
        called = line.attributes.partition("calls=%")[2].partition(",")[0].strip()
        return [line.operation, *(part.operation for part in computations.get(called, []))]

    def sources(name, seen):
        if name not in seen and name in lines:
            seen.add(name)
            for operand in lines[name].operands:
                sources(operand, seen)
        return seen

    checks = [line.name for line in lines.values() if "is-finite" in inside(line)]
    assert checks
    return all(any("all-reduce" in lines[name].operation for name in sources(check, set())) for check in checks)


@for_an_accelerator
def test_a_program_for_a_tpu():
    report = mpkeras.forecast(cnn(), (16, 16, 16, 16), device="v5e", policies=["bfloat16"], verbose=0)
    check_products(clean(report.policies["bfloat16"]), "cnn", "bfloat16")


@for_an_accelerator
def test_the_check_of_programs_can_fail():
    """A conditional around a product, a copy to the host, and a callback."""
    command = [sys.executable, str(FOLDER / "programs_to_refuse.py")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=200).stdout)
    assert found["with a conditional"]["conditionals"] == 1 and found["with a conditional"]["host_transfers"] == 0
    assert found["to the host"]["conditionals"] == 0 and found["to the host"]["host_transfers"] >= 1
    assert found["with a callback"]["conditionals"] == 0 and found["with a callback"]["host_transfers"] == 1


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("slope", "fixed", "first", "unit"),
    [(3, 100, 32, 1), (7, 5000, 8, 8), (11, 999_000, 32, 1)],
)
def test_the_largest_batch(slope, fixed, first, unit):
    limit = 1_000_000
    tries = []

    def room(batch):
        tries.append(batch)
        # Buffers come in pages: not quite a line.
        return limit - fixed - math.ceil(slope * batch / 64) * 64

    exact = next(b for b in range((limit - fixed) // slope // unit * unit, -1, -unit) if room(b) >= 0)
    tries.clear()
    found = largest_that_fits(room, first, unit)
    assert found % unit == 0 and room(found) >= 0
    assert exact - found <= max(unit, found // 64)
    assert len(tries) <= 16


@pytest.mark.backends("tensorflow")
def test_no_batch_fits_or_it_grows_in_steps():
    assert largest_that_fits(lambda batch: -1 - batch, 8, 1) == 0
    # Half the memory at once from 1000 rows on, as where a compiler takes another algorithm.
    assert 983 <= largest_that_fits(lambda batch: 5000 - batch if batch < 1000 else -10 * batch, 16, 1) < 1000


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(("room_of_12", "other"), [(-5, 1), (5, 24)], ids=["too large", "fits"])
def test_a_model_that_takes_one_batch_size_alone_has_no_largest(room_of_12, other):
    def room(batch):
        if batch != 12:
            raise NotCompiled("Expected a model that JAX can trace.", "Expected batch size: 12")
        return room_of_12

    with pytest.raises(ValueError, match=rf"takes 12 rows, and not {other} \(Expected batch size: 12\)\. Ask for"):
        largest_that_fits(room, 12, 1)
    with pytest.raises(NotCompiled, match=r"^Expected a model that JAX can trace\.$"):
        largest_that_fits(room, 9, 1)


def report(**of_policies):
    target = TARGETS["l4"]
    made = Forecast("m", target, 1, 32)
    for name, found in of_policies.items():
        made.add(name, found)
    return made


def facts(**changed):
    found = {
        "persistent_bytes": 2**30,
        "temporary_bytes": 2**31,
        "peak_bytes": 3 * 2**30 + 2**20,
        "moved_bytes": 3 * 10**9,
        "matrix_flops": {"float16": 121 * 10**9},
        "products": {"float16": 7},
        "collectives": [],
        "travels_otherwise": [],
        "conditionals": 0,
        "host_transfers": 0,
        "loops_of_unknown_length": 0,
        "float8": None,
    }
    return found | changed


@pytest.mark.backends("tensorflow")
def test_the_time_is_bound_by_products_or_by_bytes():
    flops = {"float16": 121 * 10**10, "float32": 60 * 10**10, "float6": 1}
    found = report(bytes=facts(), products=facts(matrix_flops=flops)).policies
    # 3 GB at 300 GB/s; 1.21 TFLOP at 121 TFLOP/s and 0.6 at 60.
    assert found["bytes"]["step_time_lower_bound_ms"] == pytest.approx(10)
    assert found["products"]["step_time_lower_bound_ms"] == pytest.approx(20)


@pytest.mark.backends("tensorflow")
def test_what_fits():
    l4 = TARGETS["l4"]
    room = l4.memory_bytes - l4.reserved_bytes
    refused = {"too_large": 9 * 10**10}
    found = report(fits=facts(peak_bytes=room), too_much=facts(peak_bytes=room + 1), refused=refused).policies
    assert [found[name]["fits"] for name in ("fits", "too_much", "refused")] == [True, False, False]
    assert found["refused"]["peak_bytes"] == 9 * 10**10 and found["refused"]["temporary_bytes"] is None


@pytest.mark.backends("tensorflow")
def test_what_it_costs_to_make_the_largest_batch_fit():
    made = report(float32=facts(), bfloat16=facts(), none=facts(), refused={"too_large": 9 * 10**10})
    tried = {n: facts(matrix_flops={"float32": 10 * n, "bfloat16": 2 * n}) for n in (32, 96)}
    made.add_largest_batch("bfloat16", 96, tried)
    # A quarter of the products of an example is computed twice there. A TPU says nothing of what does not fit.
    tried = {32: tried[32], 160: {"too_large": 1}, 80: facts(matrix_flops={"float32": 15 * 80})}
    made.add_largest_batch("float32", 80, tried)
    made.add_largest_batch("none", 16, {16: facts(matrix_flops={})})
    made.add_largest_batch("refused", 0, {32: {"too_large": 1}})
    factors = {name: found["largest_batch_flops_factor"] for name, found in made.to_dict()["policies"].items()}
    assert factors == {"float32": 1.25, "bfloat16": 1.0, "none": None, "refused": None}
    text = " ".join(str(made).split())
    assert "float32: to fit 80, XLA computes activations again: 1.25 times the FLOPs" in text
    assert text.count("computes activations again") == 1


@pytest.mark.backends("tensorflow")
def test_the_report(tmp_path):
    made = report(
        float32=facts(temporary_bytes=2**32, products={"float32": 7}, loops_of_unknown_length=1), mixed_float16=facts()
    )
    made.policies["float32"]["largest_batch"], made.policies["mixed_float16"]["largest_batch"] = 118, 212
    made.missing, made.out_of_time = ["bfloat16"], 60.0
    text = str(made)
    assert "What NVIDIA L4 would give model 'm', batch 32" in text
    assert "Batch 212 fits NVIDIA L4 in mixed_float16, 118 in float32." in text
    assert "mixed_float16: 0.50 of float32's temporary bytes." in text
    assert "Not compiled within 60 s: bfloat16." in text
    assert "float32: loops that do not say how often they run: 1." in text and text.count("loops") == 1
    assert "7 float16" in text and "lower bound" in text
    made.plot().savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "h10"}, ValueError, "Did you mean 'h100'[?]"),
        ({"x": (32, None)}, ValueError, r"sizes that are all known .* Received: \(32, None\)\. Pass a batch, or"),
        ({"x": []}, ValueError, "at least one array or shape in `x`. Received: \\[\\]"),
        ({"loss": 3}, TypeError, "Expected `loss_fn` to be a .* Received: loss_fn=3"),
        ({"loss": []}, ValueError, "Expected at least one loss. Received: loss_fn=\\[\\]"),
        ({"loss": "mean_squard_error"}, ValueError, "that Keras knows. Received: loss_fn='mean_squard_error'"),
        ({"optimizer": {}}, ValueError, "optimizer={}.*class_name"),
        ({"optimizer": 3}, TypeError, "optimizer=3"),
        (
            {"x": np.full((64, 96), "word")},
            ValueError,
            "Expected numbers in `x`, as JAX, .* Received: .* dtype 'string'",
        ),
        ({"x": "rows"}, TypeError, "Expected `x` to be arrays or shapes. Received: 'rows' of type str"),
        ({"y": (16, 16)}, ValueError, r"Expected `x` and `y` of the same number of rows. Received: \[16, 64\]"),
        ({"devices": 0}, ValueError, "Expected at least one device. Received: devices=0"),
        ({"devices": "8"}, TypeError, "Expected `devices` to be a whole number or a .* Received: '8' of type str"),
        ({"devices": 3}, ValueError, "3 devices can share evenly. Received: 64 rows. Pass 63"),
        ({"policies": []}, ValueError, "Expected at least one policy. Received: none"),
        ({"policies": ["mixed_float17"]}, ValueError, "Received: 'mixed_float17'. Did you mean"),
        ({"policies": ["float32", "float32"]}, ValueError, r"told apart .* Received: \['float32', 'float32'\]"),
    ],
)
def test_bad_input_is_said_before_anything_is_compiled(arguments, error, message):
    with pytest.raises(error, match=message):
        mpkeras.forecast(mlp(), **({"x": (64, 96), "device": "cpu", "verbose": 0} | arguments))


class OwnSparse(keras.losses.SparseCategoricalCrossentropy):
    """A loss of the user's."""


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("loss", "takes_classes"),
    [
        ("sparse_categorical_crossentropy", [True]),
        (keras.losses.sparse_categorical_crossentropy, [True]),
        (keras.losses.SparseCategoricalCrossentropy(name="ce"), [True]),
        (OwnSparse(name="mine"), [True]),
        (keras.losses.MeanSquaredError(name="of_sparse_rows"), [False]),
        ({"a": absolute_error, "b": keras.losses.SparseCategoricalCrossentropy(name="ce")}, [False, True]),
    ],
)
def test_which_losses_take_class_numbers(loss, takes_classes):
    request = CompileRequest(mlp(), (64, 96), None, "cpu", 1, ["float32"], "sgd", loss)
    assert json.loads(request.text)["sparse"] == takes_classes


@pytest.mark.backends("tensorflow")
def test_no_input_is_left_out():
    """Also where there are more than the model takes: what it says of that is for it to say."""
    inputs = keras.Input((8,), dtype="int32")
    model = keras.Model([inputs], layers.Embedding(4, 2)(inputs))
    request = CompileRequest(model, [(4, 8), (4, 3)], None, "cpu", 1, ["float32"], "sgd", "mse")
    assert [part["config"]["shape"] for part in json.loads(request.text)["x"]] == [[4, 8], [4, 3]]
    request = CompileRequest(model, [(4, 8)], None, "cpu", 1, ["float32"], "sgd", "mse")
    assert [part["config"]["dtype"] for part in json.loads(request.text)["x"]] == ["int32"]
    # Shapes by the names of the inputs have the dtypes of those.
    numbers = keras.Input((3,), name="numbers")
    model = keras.Model([numbers, inputs], [layers.Dense(2)(numbers), layers.Embedding(9, 2)(inputs)])
    shapes = {inputs.name: (6, 8), "numbers": (6, 3)}
    request = CompileRequest(model, shapes, None, "cpu", 1, ["float32"], "sgd", "mse")
    dtypes = {name: part["config"]["dtype"] for name, part in json.loads(request.text)["x"].items()}
    assert dtypes == {inputs.name: "int32", "numbers": "float32"}


@needs_jax
@pytest.mark.backends("tensorflow")
@pytest.mark.slow
def test_targets_are_found_of_outputs_whose_layer_leaves_a_size_open():
    x = keras.Input((5, 12))
    hidden = layers.EinsumDense("abc,cd->abd", (None, 16), bias_axes="d")(layers.Dropout(0.5)(x))
    model = keras.Model(x, layers.Dense(8)(hidden))
    assert model.output_shape == (None, None, 8)
    options = {"device": "cpu", "policies": ["mixed_bfloat16"], "optimizer": "sgd", "verbose": 0}
    found, given = (mpkeras.forecast(model, (6, 5, 12), y, **options) for y in (None, (6, 5, 8)))
    assert found.policies == given.policies


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("whose", "of_policy", "expected"),
    [("user", "auto", "bfloat16"), ("user", "float32", "float32"), ("policy", "auto", "auto"), (None, "auto", "auto")],
)
def test_whose_slots_are_asked_for(whose, of_policy, expected):
    optimizer = keras.optimizers.Adam()
    if whose is not None:
        optimizer = mpkeras.LossScaleOptimizer(optimizer, slot_dtype="bfloat16")
        optimizer.record.slots_are_chosen_by_prepare = whose == "policy"
    policy = mpkeras.Policy("mixed_float16", slot_dtype=of_policy).renamed("asked")
    request = CompileRequest(mlp(), (4, 96), None, "cpu", 1, [policy], optimizer, "mse")
    asked = json.loads(request.text)["policies"]
    assert list(asked) == ["asked"] and asked["asked"]["config"]["slot_dtype"] == expected
    assert request.policies["asked"] == policy


@pytest.mark.backends("tensorflow")
def test_sizes_and_numbers_of_devices_may_be_those_of_numpy():
    sizes = np.array([12, 96])
    request = CompileRequest(mlp(), tuple(sizes), [np.int64(12), 16], "cpu", np.int32(3), ["float32"], "sgd", "mse")
    asked = json.loads(request.text)
    assert (request.batch, request.devices, asked["mesh"]["shape"]) == (12, 3, [3])
    assert (asked["x"]["config"]["shape"], asked["y"]["config"]["shape"]) == ([12, 96], [12, 16])
    assert CompileRequest(mlp(), (4, 96), None, "cpu", np.int64(1), ["float32"], "sgd", "mse").devices == 1


@pytest.mark.backends("tensorflow")
def test_a_compiler_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r'no module .jax. .* Run `pip install "mpkeras\[forecast\]"`'):
        mpkeras.forecast(mlp(), (64, 96), verbose=0)


@needs_jax
@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_a_layer_that_jax_cannot_trace_is_named():
    inputs = keras.Input((8,))
    model = keras.Model(inputs, OfTensorFlow(name="of_tensorflow")(inputs))
    with pytest.raises(ValueError, match="layer 'of_tensorflow' that raised .*Write layers with `keras.ops`, and"):
        mpkeras.forecast(model, (4, 8), device="cpu", policies=["float32"], verbose=0)


class OfTensorFlow(layers.Layer):
    """A layer of another backend's operations."""

    def call(self, inputs):
        import tensorflow as tf

        return tf.square(inputs)


@needs_jax
@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_time_that_is_up_returns_what_was_found():
    found = mpkeras.forecast(mlp(), (64, 96), device="cpu", budget_s=0.5, verbose=0)
    assert found.policies == {} and found.missing == ["float32", "mixed_bfloat16", "mixed_float16"]
    assert "Not compiled within 0.5 s" in str(found)


@pytest.mark.backends("tensorflow")
def test_of_a_script_the_definitions_run_and_nothing_else():
    script = """
from __future__ import annotations
import math
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from somewhere import Tensor
try:
    import not_installed
except ImportError:
    not_installed = None
SIZE = 3
UNITS: int = 5
UNITS *= 2
A, (B) = SIZE - 1, 4
api = math
double = lambda x: train(x)
layouts[".*"] = 1
train(SIZE)
done = train(SIZE)
twice = 2 * done
class Layer:
    size = SIZE
class Unused:
    size = done
def f(x: Tensor = UNITS):
    return api.pi
def g(x=done):
    return x
if SIZE:
    train(0)
if train(1):
    SIZE = 4
try:
    SIZE = train(0)
except NameError:
    SIZE = 5
"""
    names: dict = {}
    define(script, names)
    assert names["Layer"].size == names["SIZE"] == 3 and names["f"]() == math.pi
    assert (names["UNITS"], names["A"], names["B"], names["not_installed"]) == (10, 2, 4, None)
    assert callable(names["double"]) and not {"done", "twice", "Unused", "g", "Tensor"} & set(names)


SCRIPT = """
import keras, mpkeras
layers = keras.layers
UNITS: int = 5
LATER = int("3")

class Scaled(layers.Layer):
    def call(self, x):
        return x * UNITS

class ScaledLater(layers.Layer):
    def call(self, x):
        return x * LATER

class MadeLater(layers.Layer):
    later = LATER

for kind, size in ((Scaled, 8), (ScaledLater, 8), (MadeLater, 8), (Scaled, 9)):
    model = keras.Sequential([keras.Input((8,)), kind(name="mine"), layers.Dense(2)])
    try:
        print(mpkeras.forecast(model, (4, size), device="cpu", policies=["float32"], verbose=0).batch)
    except ValueError as error:
        print(error)
"""


@needs_jax
@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_models_of_a_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=200)
    works, no_name, no_class, other_size = done.stdout.splitlines()
    assert works == "4"
    assert re.search("layer 'mine' that raised NameError: .*'LATER' is not defined.*into a module", no_name)
    assert re.search("one that raised TypeError: Could not locate class 'MadeLater'.*into a module", no_class)
    assert re.search(r"one that raised ValueError: .*found shape=\(4, 9\).* Pass `x` and `y` as", other_size)


@for_an_accelerator
@pytest.mark.parametrize("device", ["h100", "l4", "a100", "v5e"])
def test_products_in_float8_are_float8_in_the_program_where_a_device_has_units(device):
    """Three products of each of two layers: one forward, two backward. First bfloat16, last float32."""
    hidden = [layers.Dense(width, "relu") for width in (256, 128, 256)]
    model = keras.Sequential([keras.Input((128,)), *hidden, layers.Dense(16)])
    policies = ["mixed_bfloat16", "mixed_float8"]
    report = mpkeras.forecast(model, (512, 128), device=device, policies=policies, verbose=0)
    found = report.policies["mixed_float8"]
    forward = 2 * 512 * (256 * 128 + 128 * 256)
    counts = {name: n for name, n in found["float8"].items() if name != "layers"}
    if device in ("h100", "l4"):
        assert counts == {"products": 6, "flops": 3 * forward, "compiled_flops": 3 * forward}
        assert found["products"]["float8"] == 6
        assert "6 of 6 products that the layers ask for are in float8" in str(report)
    else:
        assert counts == {"products": 0, "flops": 0, "compiled_flops": 0}
        assert "float8" not in found["products"]
        assert "no product in float8, as this device has no units for it" in str(report)
    kept = "the rule {!r} keeps it in 16 bits".format
    assert found["float8"]["layers"] == [
        {"path": layer.path, "reason": reason}
        for layer, reason in zip(model.layers, [kept("first"), None, None, "it computes in float32"], strict=True)
    ]
    assert found["conditionals"] == 0
    assert report.policies["mixed_bfloat16"]["float8"] is None
    total = sum(found["matrix_flops"].values())
    assert total == sum(report.policies["mixed_bfloat16"]["matrix_flops"].values())


@for_an_accelerator
def test_products_of_several_devices_are_in_float8():
    """Those of one device are counted: of a batch of 256 rows it has 64. XLA drops what asks for float8 of some."""
    model = keras.Sequential(
        [keras.Input((64,)), layers.Dense(48), layers.Dense(128), layers.Dense(64), layers.Dense(3)]
    )
    report = mpkeras.forecast(model, (256, 64), device="h100", devices=4, policies=["mixed_float8"], verbose=0)
    counts = report.policies["mixed_float8"]["float8"]
    expected = 3 * 2 * 64 * (48 * 128 + 128 * 64)
    assert (counts["products"], counts["flops"], counts["compiled_flops"]) == (6, expected, expected)
    assert "6 of 6 products that the layers ask for are in float8" in str(report)


@for_an_accelerator
def test_a_batch_of_one_row_has_a_program_in_float8():
    """The last one of an epoch may be. XLA for a GPU knows no float8 product of a vector and a matrix."""
    model = keras.Sequential([keras.Input((64,)), layers.Dense(48), layers.Dense(32), layers.Dense(3)])
    found = mpkeras.forecast(model, (1, 64), device="h100", policies=["mixed_float8"], verbose=0).policies
    # The gradient of the kernel is one of two vectors.
    assert found["mixed_float8"]["float8"]["products"] == 1
    assert found["mixed_float8"]["float8"]["flops"] == 2 * 48 * 32


@for_an_accelerator
def test_each_layer_that_is_not_in_float8_has_its_reason():
    model = keras.Sequential(
        [keras.Input((32,)), layers.Dense(24, name="narrow"), layers.Dense(48, name="single"), layers.Dense(16)],
        name="net",
    )
    # By the path of the model at hand: one that is made again from its config has others.
    policy = mpkeras.Policy("mixed_float8", keep_float32=("path:^net/single$",), keep_16_bits=())
    report = mpkeras.forecast(model, (64, 32), device="h100", policies=[policy], verbose=0)
    lines = str(report).splitlines()
    assert "Products in float8: those of 1 of 3 layers." in lines
    assert "    not net/narrow: its kernel is a matrix of 32 x 24, not both multiples of 16" in lines
    assert "    not net/single: it computes in float32" in lines
    assert json.loads(json.dumps(report.to_dict()))["policies"]["mixed_float8"]["float8"]["layers"] == [
        {"path": "net/narrow", "reason": "its kernel is a matrix of 32 x 24, not both multiples of 16"},
        {"path": "net/single", "reason": "it computes in float32"},
        {"path": model.layers[2].path, "reason": None},
    ]


@compiled_by_jax
def test_what_the_user_quantized_to_float8_stays_so():
    def net():
        hidden = [layers.Dense(width, "relu") for width in (32, 64, 32)]
        return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(16)], name="net")

    def bytes_of(model):
        policies = ["float32"]
        found = mpkeras.forecast(model, (64, 16), device="cpu", policies=policies, optimizer="sgd", verbose=0).policies
        return found["float32"]["persistent_bytes"]

    quantized = net()
    quantized.layers[1].quantize("float8")
    assert bytes_of(quantized) > bytes_of(net())


@for_an_accelerator
def test_plain_keras_asks_for_float8_and_gets_none():
    """P43: what `quantize("float8")` rounds is multiplied in bfloat16."""
    with mpkeras.policy_scope("mixed_bfloat16"):
        hidden = [layers.Dense(256, "relu") for _ in range(3)]
        model = keras.Sequential([keras.Input((256,)), *hidden, layers.Dense(16)])
    for layer in model.layers:
        layer.quantize("float8")
    report = mpkeras.forecast(model, (512, 256), device="h100", policies=["mixed_bfloat16"], verbose=0)
    assert set(report.policies["mixed_bfloat16"]["products"]) == {"bfloat16"}
