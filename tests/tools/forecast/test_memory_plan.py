"""`plan_memory`: the first way to train that the compiler says fits; and the doors that take it."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras._replaced import replaced_attributes
from mpkeras.policies.policy import accumulating
from mpkeras.tools.forecast.compiler import CompileRequest, NotCompiled
from mpkeras.tools.forecast.forecast import Forecast
from mpkeras.tools.forecast.targets import TARGETS
from tests.cases import first_quick
from tests.tools.forecast.test_forecast import needs_compilers, needs_jax

ONCE = pytest.mark.backends("tensorflow")
ROWS = np.random.default_rng(2).normal(size=(32, 64)).astype("float32")


def residual(width=64, blocks=2):
    keras.utils.set_random_seed(3)
    x = inputs = keras.Input((width,))
    for _ in range(blocks):
        x = layers.Add()([x, layers.Dense(width)(layers.Dense(8 * width, "gelu")(x))])
    model = keras.Model(inputs, layers.Dense(1)(x), name="residual")
    model.compile(keras.optimizers.Adam(1e-3), "mse")
    return model


@functools.cache
def never_trained():
    """For plans alone, which leave a model as it is."""
    return residual()


class Alone(keras.Model):
    """Subclassed: no graph, and no two layers that are alike."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


def unlike():
    model = Alone()
    model.build((None, 4))
    return model


def peaks(plan):
    return [row["peak_bytes"] for row in plan.candidates]


@needs_compilers
@ONCE
@pytest.mark.slow
def test_what_fits_is_found_and_no_plan_is_over_its_limit():
    model, shape = residual(128, 6), (4096, 128)

    def planned(limit):
        return mpkeras.plan_memory(model, shape, memory=limit, device="h100", policies=["float32"], verbose=0)

    rungs = {name: mpkeras.Policy("float32", slot_dtype=slots, remat=remat).renamed(name) for name, slots, remat in [
        ("plain", "auto", None), ("slots", "bfloat16", None), ("products", "bfloat16", "products"),
        ("blocks", "bfloat16", "blocks"),
    ]}  # fmt: skip
    report = mpkeras.forecast(model, shape, device="h100", policies=list(rungs.values()), verbose=0).policies
    of_rungs = [report[name]["peak_bytes"] for name in rungs]
    # In this order, each with less memory than the one before.
    assert of_rungs == sorted(of_rungs, reverse=True)
    for name in ("slots", "products"):
        policy, peak = rungs[name], report[name]["peak_bytes"]
        # Just room for this one: 5 % are left free. The figure is that of `forecast`.
        plan = planned(int(peak / 0.95) + 100)
        (row,) = [row for row in plan.candidates if row["is_the_plan"]]
        assert plan.fits and row["peak_bytes"] == peak and len(plan.candidates) <= 3
        assert (plan.slot_dtype, plan.remat, plan.accumulate_steps) == (policy.slot_dtype, policy.remat, 1)
    limit = of_rungs[-1] / 2
    plan = planned(limit)
    assert plan.fits and plan.remat == "blocks" and plan.step_batch == 4096 // plan.accumulate_steps
    # Parts may take more memory than larger ones, whose products XLA computes otherwise: each was compiled.
    assert peaks(plan)[-1] <= 0.95 * limit < min(peaks(plan)[:-1])
    assert [row["remat"] for row in plan.candidates if row["accumulate_steps"] == 1] == [None, "blocks"]


@pytest.fixture
def compiled(monkeypatch):
    """Programs whose temporaries are told by a function `(remat, rows) -> bytes`; returns what was compiled."""
    compiled = []

    def install(temporary_bytes):
        class Compiler:
            def __init__(self, request, deadline):
                self.remat = {name: policy.remat for name, policy in request.policies.items()}
                self.small = {name: policy.slot_dtype == "bfloat16" for name, policy in request.policies.items()}

            def __enter__(self):
                return self

            def __exit__(self, *reason):
                pass

            def compile(self, name, rows, accumulate_steps):
                compiled.append((name, rows))
                temporary = temporary_bytes(self.remat[name], rows)
                state = 60 if self.small[name] else 100
                sizes = {"persistent_bytes": state, "temporary_bytes": temporary, "peak_bytes": state + temporary}
                return {**sizes, "matrix_flops": {"float32": 10 * rows}, "moved_bytes": 1}

        monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", Compiler)
        return compiled

    return install


@pytest.mark.parametrize(
    ("memory", "own", "is_planned", "words"),
    [
        (900, 3, True, "batches of 8 rows, 3 of which make one update."),
        (219, None, False, "batches of 4 rows, 2 of which make one update."),
        (
            219,
            3,
            True,
            "batches of 4 rows, 6 of which make one update (2 by the plan, times 3 by the optimizer itself).",
        ),
    ],
)
def test_a_plan_says_that_the_accumulation_of_the_optimizer_multiplies(compiled, memory, own, is_planned, words):
    compiled(in_parts)
    model = residual()
    model.compile(keras.optimizers.Adam(gradient_accumulation_steps=own), "mse")
    if is_planned:
        # The next plan takes the place of this one.
        mpkeras.prepare(model, planned("float32"))
    plan = mpkeras.plan_memory(model, (8, 64), memory=memory / 0.95 + 1, policies=["float32"], verbose=0)
    assert f"Plan: `mpkeras.prepare(model, plan)`, and {words} In" in str(plan)
    mpkeras.prepare(model, plan)
    assert (model.optimizer.gradient_accumulation_steps or 1) == plan.accumulate_steps * (own or 1)


def in_parts(remat, rows):
    return rows * {None: 100, "products": 50, "blocks": 20}[remat]


def test_a_plan_names_what_is_computed_again(compiled):
    compiled(in_parts)
    plan = mpkeras.plan_memory(never_trained(), (8, 64), memory=300 / 0.95 + 1, policies=["float32"], verbose=0)
    assert (plan.remat, plan.fits, plan.missing_bytes) == ("blocks", True, 0)
    parts = plan.to_dict()["computed_again"]
    assert len(parts) == 2 and [last.rsplit("_")[0] for _, last in parts] == 2 * ["add"]
    assert f"2 parts: {parts[0][0]} to {parts[0][1]}, {parts[1][0]} to" in str(plan)


SLOTS, PRODUCTS, BLOCKS = (
    "float32, slots bfloat16",
    *(f"float32, slots bfloat16, remat {remat}" for remat in ("products", "blocks")),
)


@ONCE
@pytest.mark.parametrize(
    "limit, expected, plan, left_out",
    [
        # By hand: 8 rows take 100 bytes of state and 800, 400 or 160 more; small slots save 40.
        (900, [("float32", 8)], "float32", []),
        (860, [("float32", 8), (BLOCKS, 8), (SLOTS, 8)], SLOTS, []),
        (859, [("float32", 8), (BLOCKS, 8), (PRODUCTS, 8)], PRODUCTS, [SLOTS]),
        (459, [("float32", 8), (BLOCKS, 8), (PRODUCTS, 8)], BLOCKS, [SLOTS]),
        (219, [("float32", 8), (BLOCKS, 8), (BLOCKS, 4)], BLOCKS, [SLOTS, PRODUCTS]),
        (100, [("float32", 8), (BLOCKS, 8), (BLOCKS, 2)], BLOCKS, [SLOTS, PRODUCTS, f"{BLOCKS}, 2 parts"]),
        # Nothing fits: the least is compiled.
        (70, [("float32", 8), (BLOCKS, 8), (BLOCKS, 1)], BLOCKS,
         [SLOTS, PRODUCTS, f"{BLOCKS}, 2 parts", f"{BLOCKS}, 4 parts"]),
    ],
)  # fmt: skip
def test_what_is_sure_to_be_too_large_is_not_compiled(compiled, limit, expected, plan, left_out):
    names = compiled(in_parts)
    found = mpkeras.plan_memory(never_trained(), (8, 64), memory=limit / 0.95 + 1, policies=["float32"], verbose=0)
    assert names == expected and found.fits == (limit > 70)
    # One row takes 60 bytes of state and 20 more.
    assert found.fits or ("misses by 10 bytes." in str(found) and "no, by 10 bytes" in str(found))
    assert (found.slot_dtype, found.remat) == {
        "float32": ("auto", None), SLOTS: ("bfloat16", None), PRODUCTS: ("bfloat16", "products"),
        BLOCKS: ("bfloat16", "blocks"),
    }[plan]  # fmt: skip
    assert list(found.to_dict()["not_compiled"]) == left_out
    # Those of one reason in one line.
    shown = [line.partition(": not compiled: ") for line in str(found).splitlines() if ": not compiled: " in line]
    assert [name for names, _, _ in shown for name in names.split("; ")] == left_out
    assert len({why for _, _, why in shown}) == len(shown)
    assert found.step_batch == (names[-1][1] if found.accumulate_steps > 1 else 8)
    # What costs least stands first, whatever was compiled first.
    work = [(row["accumulate_steps"], str(row["remat"]), row["slot_dtype"] != "auto") for row in found.candidates]
    order = {"None": 0, "products": 1, "blocks": 2}
    assert work == sorted(work, key=lambda row: (row[0], order[row[1]], row[2]))
    assert sum(row["is_the_plan"] for row in found.candidates) == 1


@ONCE
@pytest.mark.parametrize(
    ("device", "memory", "left"),
    [
        ("t4", None, "; 1.00 GiB are left to the device's libraries."),
        ("cpu", None, "."),
        ("cpu", "3MB", "; 5% of the memory are left free."),
    ],
)
def test_a_plan_says_what_is_left_free(compiled, device, memory, left):
    compiled(in_parts)
    plan = mpkeras.plan_memory(never_trained(), (8, 64), memory=memory, device=device, policies=["float32"], verbose=0)
    assert f"\nEach row was compiled, none was run{left} FLOPs" in str(plan)


@ONCE
@pytest.mark.parametrize(("bytes_of_a_row", "unit", "temporary"), [(2**8, "KiB", "2.00"), (2**26, "GiB", "0.50")])
def test_all_bytes_of_a_table_are_in_one_unit_that_fits(compiled, bytes_of_a_row, unit, temporary):
    compiled(lambda remat, rows: rows * bytes_of_a_row)
    plan = mpkeras.plan_memory(never_trained(), (8, 64), memory="1GB", policies=["float32"], verbose=0)
    header, (row,) = plan.table()
    assert header[4:7] == [f"state\n{unit}", f"temporary\n{unit}", f"peak\n{unit}"] and row[5] == temporary
    assert plan.plot().axes[0].get_xlabel() == unit
    # By hand: 100 bytes of state are 0.0977 KiB or 9.31e-08 GiB.
    assert row[4] == {"KiB": "0.098", "GiB": "9.3e-08"}[unit]


@ONCE
def test_where_less_kept_takes_more_memory_each_is_compiled(compiled):
    """As on a CPU, where XLA finds what is computed twice, and keeps it."""
    sizes = {None: 100, "products": 70, "blocks": 120}
    names = compiled(lambda remat, rows: rows * sizes[remat])
    plan = mpkeras.plan_memory(never_trained(), (8, 64), memory=700 / 0.95, policies=["float32"], verbose=0)
    assert [name for name, _ in names] == ["float32", BLOCKS, SLOTS, PRODUCTS] and plan.remat == "products"
    assert plan.to_dict()["not_compiled"] == {}


@ONCE
@pytest.mark.parametrize(
    "limit, allow, largest",
    [
        # By hand: 20 bytes a row beside 60 of state, or 100 beside 100.
        (460, ("slots", "remat"), 20),
        (460, (), 3),
        # The batch that was given.
        (500, (), 4),
        (199, (), 0),
    ],
)
def test_the_largest_batch_compiles_no_program_twice(compiled, limit, allow, largest):
    names = compiled(in_parts)
    plan = mpkeras.plan_memory(
        never_trained(), (4, 64), memory=limit / 0.95 + 1, policies=["float32"], allow=allow, batch="largest", verbose=0
    )
    assert len(names) == len(set(names)) == len(plan.candidates)
    assert plan.fits == (largest > 0)
    (row,) = [row for row in plan.candidates if row["is_the_plan"]]
    assert row["batch"] == plan.batch == (largest or 1)


@ONCE
def test_the_largest_batch_is_looked_for_under_the_policy_that_takes_least(compiled):
    """Although the one before it fits as well."""
    compiled(in_parts)
    policies = ["float32", mpkeras.Policy("float32", remat="products").renamed("again"), "mixed_bfloat16"]
    plan = mpkeras.plan_memory(
        never_trained(), (4, 64), memory=900 / 0.95 + 1, policies=policies, allow=(), batch="largest", verbose=0
    )
    # By hand: 100 of state and 50 a row.
    assert (plan.name, plan.remat, plan.batch) == ("again", "products", 16)


@ONCE
@pytest.mark.parametrize(
    "make, shape, sizes, expected, remat",
    [
        # By hand, of 690 bytes: 60 of state and 100 a row leave room for 6 rows, where 100 of state leave it for 5 ...
        (unlike, (4, 4), {None: 100}, 6, None),
        # ... and where the blocks take more than the model as it is, 60 and 70 a row are 9 rows.
        (never_trained, (4, 64), {None: 100, "products": 70, "blocks": 120}, 9, "products"),
    ],
)
def test_the_largest_batch_takes_what_is_left_of_what_is_allowed(compiled, make, shape, sizes, expected, remat):
    names = compiled(lambda remat, rows: rows * sizes[remat])
    plan = mpkeras.plan_memory(make(), shape, memory=690 / 0.95 + 1, policies=["float32"], batch="largest", verbose=0)
    assert (plan.batch, plan.slot_dtype, plan.remat, plan.fits) == (expected, "bfloat16", remat, True)
    assert len(names) == len(set(names))


@ONCE
def test_parts_that_the_model_does_not_take_are_no_candidates(compiled):
    """As those of a stateful recurrent layer, which is made for batches of one size."""

    def sizes(remat, rows):
        if rows % 8:
            raise NotCompiled("Expected a model that JAX can trace", "rows of 8")
        return rows * 100

    names = compiled(sizes)
    plan = mpkeras.plan_memory(
        unlike(), (8, 4), memory=60 / 0.95 + 1, policies=["float32"], allow=("slots", "accumulation"), verbose=0
    )
    assert not plan.fits and plan.accumulate_steps == 1 and plan.slot_dtype == "bfloat16"
    # Not even one row is sure to fit, so that the smallest parts alone are tried.
    assert names == [("float32", 8), (SLOTS, 8), (SLOTS, 1)]
    assert f"{SLOTS}, 8 parts: not possible. rows of 8" in str(plan)


@ONCE
def test_policies_that_are_called_alike_are_shown_as_they_were_given():
    policies = ["mixed_float16", "float32", "mixed_float16"]
    with pytest.raises(ValueError, match=r"Received: \['mixed_float16', 'float32', 'mixed_float16'\]\. Pass each once"):
        mpkeras.plan_memory(never_trained(), (4, 64), memory="1MB", policies=policies, verbose=0)


@ONCE
def test_a_batch_of_another_size_that_the_model_does_not_take_is_said(compiled):
    def sizes(remat, rows):
        if rows != 4:
            raise NotCompiled("Expected a model that JAX can trace", "rows of 4")
        return rows * 100

    compiled(sizes)
    with pytest.raises(NotCompiled, match=r"takes 4 rows, and not 8 \(rows of 4\)\. Ask for its own batch alone"):
        mpkeras.plan_memory(never_trained(), (4, 64), memory="1MB", policies=["float32"], batch="largest", verbose=0)


@ONCE
def test_what_fits_is_the_plan_when_time_is_up(compiled):
    def sizes(remat, rows):
        if remat == "products":
            raise TimeoutError
        return in_parts(remat, rows)

    compiled(sizes)
    plan = mpkeras.plan_memory(never_trained(), (8, 64), memory=500 / 0.95, policies=["float32"], verbose=0)
    assert plan.fits and plan.remat == "blocks" and "were not enough" in str(plan)


@ONCE
@pytest.mark.parametrize("allow, too_long, largest", [(("slots", "remat"), 20, 8), ((), 3, 1)])
def test_the_largest_batch_that_fits_is_the_plan_when_time_is_up(compiled, allow, too_long, largest):
    """Of the batch that was given it may be known that it does not fit."""

    def sizes(remat, rows):
        if rows == too_long:
            raise TimeoutError
        return in_parts(remat, rows)

    compiled(sizes)
    plan = mpkeras.plan_memory(
        never_trained(), (4, 64), memory=460 / 0.95 + 1, policies=["float32"], allow=allow, batch="largest", verbose=0
    )
    assert plan.fits and plan.missing_bytes == 0 and plan.batch == plan.step_batch == largest
    assert "were not enough" in str(plan) and "Nothing that was tried fits" not in str(plan)


@ONCE
def test_what_the_backend_cannot_compute_again_is_no_candidate(compiled):
    model = unlike()
    names = compiled(in_parts)
    plan = mpkeras.plan_memory(model, (8, 4), memory=1, policies=["float32"], allow=("remat",), verbose=0)
    assert names == [("float32", 8)] and not plan.fits and plan.computed_again == []
    assert "remat products: not possible. Expected a Functional or Sequential model" in str(plan)
    assert "remat blocks: not possible. Expected a model with repeated blocks" in str(plan)


class Penalized(keras.layers.Dense):
    def call(self, inputs):
        outputs = super().call(inputs)
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(outputs)))
        return outputs


def a_model_around(layer):
    return keras.Sequential([keras.Input((8,)), layer])


@ONCE
@pytest.mark.parametrize(
    ("make", "products"),
    [
        pytest.param(lambda: Penalized(8), [], id="add_loss"),
        pytest.param(lambda: keras.layers.Dense(8, activity_regularizer="l1"), [], id="a regularizer"),
        # It is cut behind each product: nothing inside of it is computed again.
        pytest.param(lambda: a_model_around(Penalized(8)), [("float32, remat products", 8)], id="in a block"),
    ],
)
def test_what_tensorflow_would_refuse_in_the_first_step_is_no_candidate(compiled, make, products):
    x = inputs = keras.Input((8,))
    for _ in range(3):
        x = keras.layers.Add()([x, make()(x)])
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    names = compiled(in_parts)
    plan = mpkeras.plan_memory(model, (8, 8), memory=1, policies=["float32"], allow=("remat",), verbose=0)
    assert names == [("float32", 8), *products] and not plan.fits
    assert "remat blocks" in str(plan) and "not possible. Expected no layer that adds a loss" in str(plan)


@ONCE
def test_behind_the_last_part_that_is_computed_again_a_layer_may_add_a_loss(compiled):
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4)), Penalized(1)])
    compiled(in_parts)
    plan = mpkeras.plan_memory(model, (8, 8), memory=1, policies=["float32"], allow=("remat",), verbose=0)
    assert plan.to_dict()["refused"] == {} and plan.remat is not None


@ONCE
@pytest.mark.parametrize(
    ("remat", "expected"),
    [
        ("products", "Expected .*Use remat='blocks'"),
        (["path:nowhere"], "Expected `remat` to name layers.*path:nowhere"),
    ],
)
def test_a_policy_whose_parts_are_not_there_is_refused(compiled, remat, expected):
    names = compiled(in_parts)
    policies = [mpkeras.Policy("float32", remat=remat)]
    with pytest.raises(ValueError, match=expected):
        mpkeras.plan_memory(unlike(), (8, 4), memory=1, policies=policies, allow=("remat",), verbose=0)
    assert names == []


@needs_jax
@ONCE
@pytest.mark.slow
@pytest.mark.parametrize("ask", [mpkeras.forecast, functools.partial(mpkeras.plan_memory, memory="1GB", verbose=0)])
def test_what_is_found_out_where_a_model_is_built_is_said_in_the_words_of_apply_policy(ask):
    policy = mpkeras.Policy("float32", remat=["path:nowhere"])
    with pytest.raises(ValueError) as refused:
        ask(keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)]), (8, 4), device="cpu", policies=[policy])
    text = str(refused.value)
    assert text.startswith("Expected `remat` to name layers of model") and text.endswith("use remat='blocks'.")
    assert text.count("Expected") == text.count("Received:") == 1


@needs_jax
@ONCE
@pytest.mark.slow
def test_what_the_compiler_refuses_is_said_in_its_own_words():
    """Of a model that is not built, this process does not know what is repeated."""
    model = Alone()
    plan = mpkeras.plan_memory(model, (8, 4), memory=1, device="cpu", policies=["float32"], allow=("remat",), verbose=0)
    assert all(why.startswith("Expected a model with repeated blocks") for why in plan.to_dict()["refused"].values())
    assert list(plan.to_dict()["refused"]) == ["float32, remat blocks", "float32, remat products"]


@ONCE
@pytest.mark.parametrize(
    "device, policy",
    [("t4", "mixed_float16"), ("l4", "mixed_bfloat16")],
)
def test_the_policy_in_16_bits_is_the_one_that_the_device_multiplies_fast(compiled, device, policy):
    names = compiled(in_parts)
    mpkeras.plan_memory(never_trained(), (4, 64), memory=1, device=device, allow=(), verbose=0)
    assert names == [("float32", 4), (policy, 4)]


@pytest.mark.parametrize("way", first_quick(["converted", "scope", "Keras"]))
def test_by_default_the_policy_is_that_of_the_model(compiled, way):
    names = compiled(in_parts)
    if way == "scope":
        with mpkeras.policy_scope("mixed_float16"):
            model = residual()
    elif way == "Keras":
        keras.config.set_dtype_policy("mixed_float16")
        model = residual()
        keras.config.set_dtype_policy("float32")
    else:
        model = mpkeras.prepare(residual(), "mixed_float16")
    plan = mpkeras.plan_memory(model, (4, 64), memory=1, device="l4", allow=(), verbose=0)
    assert names == [("mixed_float16", 4)] and plan.compute_dtype == "float16"


def test_a_policy_with_small_slots_is_planned_on(compiled):
    names = compiled(in_parts)
    own = mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16")
    model = mpkeras.prepare(residual(), own)
    plan = mpkeras.plan_memory(model, (8, 64), memory=1, device="l4", allow=("slots", "remat"), verbose=0)
    first, last = names
    assert first == ("mixed_bfloat16, slots bfloat16", 8)
    assert last == ("mixed_bfloat16, slots bfloat16, remat blocks", 8)
    assert (plan.name, plan.slot_dtype) == ("mixed_bfloat16", "bfloat16")
    # A second plan begins where the first one ended.
    again = mpkeras.prepare(residual(), plan)
    mpkeras.plan_memory(again, (8, 64), memory=1, device="l4", allow=("slots",), verbose=0)
    assert names[2:] == [("mixed_bfloat16, slots bfloat16", 8)]


def test_a_plan_begins_with_the_slots_of_the_optimizer(compiled):
    names = compiled(in_parts)
    model = residual()
    model.compile(mpkeras.LossScaleOptimizer("adam", slot_dtype="bfloat16"), "mse")
    options = {"memory": 1, "device": "l4", "policies": ["mixed_bfloat16"], "allow": ("slots",), "verbose": 0}
    plan = mpkeras.plan_memory(model, (8, 64), **options)
    assert (names, plan.slot_dtype) == ([("mixed_bfloat16, slots bfloat16", 8)], "bfloat16")
    mpkeras.plan_memory(model, (8, 64), optimizer="adam", **options)
    assert names[1:] == [("mixed_bfloat16", 8), ("mixed_bfloat16, slots bfloat16", 8)]


class OwnStep(Alone):
    """Trains in `fit` by another step than the one that is compiled."""

    def train_step(self, *args):
        return super().train_step(*args)


class OwnLoss(Alone):
    """Has a loss that `compile` does not know."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred))


@ONCE
@pytest.mark.parametrize(
    ("make", "names", "words"),
    [
        (OwnStep, ["train_step"], "Model 'm' has `train_step` of its own, not compiled here"),
        (OwnLoss, ["compute_loss"], "Model 'm' has `compute_loss` of its own, not compiled here"),
        (Alone, [], None),
    ],
)
def test_a_step_of_the_users_own_is_said_to_be_another(compiled, make, names, words):
    compiled(in_parts)
    model = make(name="m")
    model.build((None, 4))
    plan = mpkeras.plan_memory(model, (8, 4), memory=2000, policies=["float32"], allow=(), verbose=0)
    assert CompileRequest(model, (8, 4), None, "t4", 1, ["float32"], "sgd", "mse").own_methods == names
    report = Forecast("m", TARGETS["t4"], 1, 8, own_methods=names)
    for said in (plan, report):
        assert said.own_methods == said.to_dict()["own_methods"] == names
        assert words is None or words in str(said)
        assert words is not None or "of its own" not in str(said)


@ONCE
def test_memory_is_a_number_of_any_library(compiled):
    compiled(in_parts)
    for memory in (np.uint16(950), np.float32(950.0)):
        plan = mpkeras.plan_memory(unlike(), (8, 4), memory=memory, policies=["float32"], allow=(), verbose=0)
        assert plan.to_dict()["usable_bytes"] == 902


def planned(*args, **kwargs):
    """Returns a policy as `plan_memory` returns it, without a compiler."""
    return accumulating(mpkeras.Policy(*args, **kwargs), 4)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["prepare", "callback", "global"])
def test_doors_take_it_as_a_policy(door):
    """The mean over four quarters of a batch is that over the batch."""
    keras.utils.set_random_seed(3)
    plan = planned("float32", slot_dtype="bfloat16", remat="blocks")
    callbacks = [mpkeras.callbacks.MixedPrecision(plan)] if door == "callback" else []
    model = residual()
    if door == "prepare":
        mpkeras.prepare(model, plan)
    elif door == "global":
        with mpkeras.policy_scope(planned("mixed_bfloat16", slot_dtype="bfloat16", remat="blocks")):
            model = residual()
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    model.fit(ROWS, ROWS[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    assert model.optimizer.gradient_accumulation_steps == 4
    assert {entry.kind for entry in replaced_attributes(model)} >= {"again"}
    # One update of Adam: each weight moves by its learning rate, whatever the gradient.
    moved = [
        np.abs(keras.ops.convert_to_numpy(v) - old).max()
        for v, old in zip(model.trainable_variables, before, strict=True)
    ]
    assert max(moved) == pytest.approx(1e-3, rel=0.05)


def test_another_remat_is_of_the_same_plan():
    model = mpkeras.prepare(residual(16, 3), planned("mixed_bfloat16"), remat="blocks")
    assert (model.optimizer.gradient_accumulation_steps, model.optimizer.record.remat) == (4, "blocks")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["plan", "wrapper", "planned model"])
def test_sums_of_gradients_are_in_a_forecast(way):
    model, policy = residual(16, 3), mpkeras.Policy("float32")

    def state():
        report = mpkeras.forecast(model, (8, 16), device="cpu", policies=[policy], verbose=0)
        return report.policies["float32"]["persistent_bytes"]

    before = state()
    if way == "plan":
        policy = mpkeras.plan_memory(model, (8, 16), memory="1GB", device="cpu", policies=[policy], verbose=0)
        policy._settings = accumulating(policy, 4)._settings
    elif way == "wrapper":
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam())
        optimizer.accumulate(3)
        model.compile(optimizer, "mse")
    else:
        mpkeras.prepare(model, planned("float32"))
    assert 0 <= state() - before - 4 * model.count_params() < 100


@pytest.mark.slow
def test_a_step_accumulates_as_the_plan_says():
    policy = "mixed_bfloat16"

    def updates_of(step):
        return int(keras.ops.convert_to_numpy(step.optimizer.inner_optimizer.iterations))

    def weights(plan, remat=None, **options):
        model = mpkeras.apply_policy(residual(16, 3), plan)
        step = mpkeras.make_train_step(model, "adam", "mse", remat=remat, **options)
        for n in range(8):
            step(ROWS[4 * n : 4 * n + 4, :16], ROWS[4 * n : 4 * n + 4, :1])
        return [keras.ops.convert_to_numpy(v) for v in model.weights], updates_of(step)

    by_plan, updates = weights(planned(policy, remat="blocks"))
    passed, updates_passed = weights(mpkeras.Policy(policy, remat="blocks"), accumulate_steps=4)
    assert updates == updates_passed == 2
    for value, expected in zip(by_plan, passed, strict=True):
        np.testing.assert_array_equal(value, expected)
    # Another `remat` is another policy, of the same plan; what is passed is what counts.
    assert weights(planned(policy), remat="blocks")[1] == 2
    assert weights(planned(policy), accumulate_steps=1)[1] == 8


@ONCE
@pytest.mark.parametrize(
    "options, error, words",
    [
        ({}, ValueError, "`memory` or `device`.*neither"),
        ({"memory": "16"}, None, None),
        ({"memory": "x16GB"}, ValueError, "memory='x16GB'.*'16GB'"),
        ({"memory": True}, TypeError, "memory=True"),
        ({"memory": np.bool_(True)}, TypeError, r"memory=.*True"),
        ({"memory": np.int64(-3)}, ValueError, r"memory=.*-3"),
        ({"memory": float("inf")}, ValueError, "memory=inf"),
        ({"memory": "1GB", "allow": None}, TypeError, "tuple of names. Received: allow=None"),
        ({"memory": "1GB", "policies": 3}, TypeError, "list of policies or their names. Received: 3 of type int"),
        ({"memory": "1GB", "allow": ("remats",)}, ValueError, r"\['remats'\]"),
        ({"memory": "1GB", "batch": "most"}, ValueError, "batch='most'"),
    ],
)
def test_bad_input_is_said_before_anything_is_compiled(monkeypatch, options, error, words):
    class Compiled(Exception):
        pass

    def compiler(*args):
        raise Compiled

    monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", compiler)
    with pytest.raises(error or Compiled, match=words):
        mpkeras.plan_memory(unlike(), (8, 4), verbose=0, **options)
