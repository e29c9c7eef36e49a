"""`gather_dtype` and `reduce_dtype`: in which dtypes weights and gradients travel, by the program for eight devices."""

import importlib.util
import itertools

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.distribution.travel import Travel
from mpkeras.tools.audit.travel import TravelInStep, check_travel
from mpkeras.tools.forecast.travel import travels_otherwise
from tests.distributed.planted import Branches, ClipsGradient, DividesByNorm, LeavesOut, LoopsInBackward, ReadsFloat32

needs_compilers = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the extra `forecast`, for Linux on x86-64"
)
GATHERS, REDUCES = ("all-gather",), ("all-reduce", "reduce-scatter")
WIDTH = 128
# The loss, and whether each gradient is finite: what is reduced beside gradients.
FEW_BYTES = 256


def model():
    """An embedding, attention, a convolution and a loop: each makes the gradient of a weight in its own way."""
    ids = keras.Input((16,))
    hidden = keras.layers.Embedding(256, WIDTH, name="words")(ids)
    attended = keras.layers.MultiHeadAttention(2, 64, name="attend")(hidden, hidden)
    hidden = keras.layers.Dense(WIDTH, "gelu", name="wide")(keras.layers.Add()([hidden, attended]))
    hidden = keras.layers.Conv1D(WIDTH, 3, padding="same", name="near")(hidden)
    hidden = keras.layers.LSTM(WIDTH, return_sequences=True, name="loop")(hidden)
    return keras.Model(ids, keras.layers.Dense(256, name="head")(hidden))


def collectives_of(policy, device="h100", devices=None):
    # Two hidden layers' worth of rows for each device.
    report = mpkeras.forecast(
        model(),
        (32, 16),
        device=device,
        devices=devices or keras.distribution.DataParallel(device_mesh=mesh((8,), ["batch"])),
        policies=[policy],
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer="adam",
        verbose=0,
    )
    (found,) = report.policies.values()
    return found


def mesh(shape, names):
    count = 1
    for size in shape:
        count *= size
    return keras.distribution.DeviceMesh(shape, names, [f"cpu:{i}" for i in range(count)])


def model_parallel():
    """Two by four: batches over two, kernels over four."""
    layouts = keras.distribution.LayoutMap(mesh((2, 4), ["batch", "model"]))
    layouts["wide/kernel"] = (None, "model")
    layouts["near/kernel"] = (None, None, "model")
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


def bytes_by_dtype(found, kinds, of) -> dict:
    """Returns `{dtype: bytes}` of the tensors that `of` says yes to, sent in collectives of these kinds."""
    counted: dict = {}
    for part in found["collectives"]:
        if part["kind"] in kinds:
            size = sum(size for tensor, size in part["tensors"].items() if tensor and of(tensor))
            if size:
                counted[part["dtype"]] = counted.get(part["dtype"], 0) + size
    return counted


def unnamed_bytes(found, kinds) -> int:
    return sum(part["tensors"].get("", 0) for part in found["collectives"] if part["kind"] in kinds)


def is_head(tensor) -> bool:
    return tensor.startswith("head/")


def elements(weights) -> int:
    return sum(int(weight.value.size) for weight in weights)


@needs_compilers
@pytest.mark.slow
@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    ("policy", "gathered", "reduced"),
    [
        ("mixed_bfloat16", "bfloat16", "float32"),
        ("bfloat16", "bfloat16", "float32"),
        (mpkeras.Policy("mixed_bfloat16", gather_dtype="float32", reduce_dtype="bfloat16"), "float32", "bfloat16"),
    ],
    ids=["mixed", "small state", "asked for"],
)
def test_each_weight_travels_as_the_policy_says(policy, gathered, reduced):
    found = collectives_of(policy, devices=mpkeras.sharded(devices=8))
    split = [v for v in model().trainable_variables if v.value.size >= 1024]
    inner = elements(v for v in split if not is_head(v.path))
    bits = {"bfloat16": 2, "float32": 4}
    # Each weight of 16-bit layers once, as the policy says; the head computes in float32.
    assert bytes_by_dtype(found, GATHERS, lambda tensor: not is_head(tensor)) == {gathered: inner * bits[gathered]}
    assert bytes_by_dtype(found, GATHERS, is_head) == {"float32": 4 * WIDTH * 256}
    assert list(bytes_by_dtype(found, REDUCES, lambda tensor: not is_head(tensor))) == [reduced]
    assert found["travels_otherwise"] == []
    # Of a loop behind it, not in each of its rounds.
    for variable in split:
        sent = bytes_by_dtype(found, REDUCES, lambda tensor, path=variable.path: tensor == path)
        assert 0 < sum(sent.values()) <= int(variable.value.size) * 4
    assert unnamed_bytes(found, REDUCES) < FEW_BYTES
    if gathered != "bfloat16":
        # The same program under a policy that says otherwise: each weight is named, twice where it is split.
        net = mpkeras.apply_policy(model(), "mixed_bfloat16")
        otherwise = travels_otherwise(net, Travel.of(mpkeras.Policy("mixed_bfloat16")), found["collectives"])
        named = {kind: {part["tensor"] for part in otherwise if part["kind"] in kind} for kind in (GATHERS, REDUCES)}
        inner_weights = {v.path for v in net.trainable_variables if not is_head(v.path)}
        assert named[GATHERS] == {v.path for v in split if not is_head(v.path)}
        assert named[REDUCES] >= named[GATHERS] and named[REDUCES] <= inner_weights


@needs_compilers
@pytest.mark.slow
@pytest.mark.backends("jax")
@pytest.mark.parametrize("where", ["data", "weights", "state", "model"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_gradients_are_summed_in_float32(where, policy):
    layouts = {
        "data": lambda: None,
        "weights": lambda: mpkeras.sharded(devices=8),
        "state": lambda: mpkeras.sharded(devices=8, shard="state"),
        "model": model_parallel,
    }
    found = collectives_of(policy, devices=layouts[where]())
    assert list(bytes_by_dtype(found, REDUCES, lambda tensor: True)) == ["float32"]
    assert found["travels_otherwise"] == []
    if where != "model":  # There activations are summed, too.
        assert unnamed_bytes(found, REDUCES) < FEW_BYTES
    # What the products multiply is as on one device.
    alone = collectives_of(policy, devices=1)
    assert found["products"] == alone["products"]


@needs_compilers
@pytest.mark.slow
@pytest.mark.backends("jax")
def test_a_program_for_tpus():
    found = collectives_of("mixed_bfloat16", device="v5e", devices=mpkeras.sharded(devices=8))
    assert "bfloat16" not in bytes_by_dtype(found, REDUCES, lambda tensor: True)
    assert list(bytes_by_dtype(found, GATHERS, lambda tensor: not is_head(tensor))) == ["bfloat16"]


def planted(*classes, width=WIDTH):
    inputs = hidden = keras.Input((width,))
    for cls in classes:
        hidden = cls(name=cls.__name__)(hidden)
    return keras.Model(inputs, keras.layers.Dense(8, name="head")(hidden))


@needs_compilers
@pytest.mark.slow
@pytest.mark.backends("jax")
def test_gradients_behind_choices_clipping_and_branches_are_summed_in_float32():
    report = mpkeras.forecast(
        planted(ClipsGradient, LeavesOut, Branches), (256, WIDTH), devices=8, policies=["mixed_bfloat16"], verbose=0
    )
    found = report.policies["mixed_bfloat16"]
    # The two branches have a product each.
    sizes = {"ClipsGradient/kernel": 4 * WIDTH**2, "LeavesOut/kernel": 4 * WIDTH**2, "Branches/kernel": 8 * WIDTH**2}
    sizes |= {"head/kernel": 4 * 8 * WIDTH, "head/bias": 4 * 8}
    (part,) = [part for part in found["collectives"] if part["kind"] in REDUCES]
    assert part["dtype"] == "float32"
    assert {path: size for path, size in part["tensors"].items() if path} == sizes


@needs_compilers
@pytest.mark.slow
@pytest.mark.backends("jax")
def test_an_audit_lists_what_travels_and_names_what_differs_from_the_policy():
    net = planted(ReadsFloat32, LoopsInBackward)
    net.compile("adam", "mse")
    mpkeras.prepare(net, "mixed_bfloat16")
    with mpkeras.sharded(devices=8).scope():
        report = mpkeras.audit(net, device="h100", batch_size=32)
    size = WIDTH**2
    collectives = report.to_dict()["collectives"]
    assert collectives == report.collectives and report.to_dict()["compiled_for"] == "h100"
    tensors = {(part["kind"], part["dtype"]): part["tensors"] for part in collectives}
    assert tensors["all-gather", "float32"]["ReadsFloat32/kernel"] == 4 * size
    assert tensors["all-gather", "bfloat16"] == {"LoopsInBackward/kernel": 2 * size}
    assert tensors["reduce-scatter", "bfloat16"] == {"LoopsInBackward/kernel": 2 * size // 8}
    lines = str(report).splitlines()
    assert "What travels in a step (8 devices, 256 rows, compiled for h100):" in lines
    assert "- all-gather in bfloat16, 32.0 KiB: LoopsInBackward/kernel 32.0 KiB" in lines
    planted_ones = [finding for finding in report.findings if "where the policy says" in finding.what]
    assert [(finding.severity, finding.layer) for finding in planted_ones] == [
        ("warning", "ReadsFloat32"),
        ("warning", "LoopsInBackward"),
    ]
    gather, reduction = (finding.what for finding in planted_ones)
    said = "where the policy says bfloat16 (all-gather, 64.0 KiB a step)."
    assert gather == f"Its `kernel` is gathered in float32, {said}"
    assert reduction == (
        "The gradient of its `kernel` is summed over devices in bfloat16, where the policy says float32 "
        "(reduce-scatter, 4.0 KiB a step)."
    )
    assert not [finding for finding in report.findings if "stock Keras" in finding.what]


@pytest.mark.backends("jax")
def test_an_audit_says_what_belongs_to_no_weight_and_which_step_was_counted():
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    sent = [
        {"kind": "all-reduce", "dtype": "bfloat16", "bytes": 4100, "tensors": {"": 4096, "dense/bias": 4}},
        {"kind": "all-reduce", "dtype": "float32", "bytes": 4096, "tensors": {"": 4096}},
        {"kind": "reduce-scatter", "dtype": "bfloat16", "bytes": 2, "tensors": {"": 2}},
        {"kind": "all-gather", "dtype": "bfloat16", "bytes": 4096, "tensors": {"": 4096}},
    ]
    travel = TravelInStep(8, "h100", 64, sent)
    (unnamed,) = check_travel(net, None, travel)
    assert (unnamed.severity, unnamed.layer) == ("note", None)
    assert unnamed.what.startswith("4.0 KiB a step are summed over devices in bfloat16 (all-reduce)")
    assert check_travel(net, None, TravelInStep(8, why_not="Not counted.")) == []
    # In 16 bits the step of stock Keras is another program than that which was compiled.
    mpkeras.apply_policy(net, mpkeras.Policy("mixed_bfloat16", keep_float32=()))
    stock = keras.optimizers.SGD()
    (warning,) = check_travel(net, stock, TravelInStep(8, "h100", 64, []))
    assert warning.severity == "warning" and "`mpkeras.prepare(model)`" in warning.remedy
    assert check_travel(net, mpkeras.LossScaleOptimizer(stock), TravelInStep(8, "h100", 64, [])) == []
    mpkeras.apply_policy(net, mpkeras.Policy("mixed_bfloat16", keep_float32=(), reduce_dtype="bfloat16"))
    assert check_travel(net, mpkeras.LossScaleOptimizer(stock), travel) == []
    assert travel.lines()[1] == "- all-reduce in bfloat16, 4.0 KiB: dense/bias 4 bytes, of no weight 4.0 KiB"
    (nothing,) = TravelInStep(8, "h100", 64, []).lines()
    assert nothing == "What travels in a step (8 devices, 64 rows, compiled for h100): nothing."
    assert "CPU's compiler" in TravelInStep(8, "cpu", 64, sent).lines()[-1]
    tensors = {"": 2} | {f"w{i}": i for i in range(3, 9)}
    many = {"kind": "all-gather", "dtype": "float32", "bytes": 35, "tensors": tensors}
    expected = "w8 8 bytes, w7 7 bytes, w6 6 bytes, 3 more weights, of no weight 2 bytes"
    assert TravelInStep(8, "h100", 64, [many]).lines()[1] == f"- all-gather in float32, 35 bytes: {expected}"


def test_an_audit_counts_what_travels_where_devices_share_a_batch():
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    report = mpkeras.audit(net)
    assert report.collectives is None and report.to_dict()["devices"] == 1
    assert "share a batch" not in str(report)
    with pytest.raises(ValueError, match="Expected a `keras.distribution` of several.*device='h100'.* 1 device"):
        mpkeras.audit(net, device="h100")
    if keras.backend.backend() != "jax":
        return
    distribution = mpkeras.sharded(devices=8)
    with distribution.scope():
        report = mpkeras.audit(net)
        assert report.collectives is None and report.to_dict()["devices"] == 8
        assert 'the 8 devices that share a batch is not counted: `mpkeras.audit(model, device="h100")`' in str(report)
        with pytest.raises(ValueError, match="compiled with an optimizer and a loss.*device='h100'"):
            mpkeras.audit(net, device="h100")
    net.compile("sgd", "mse")
    with distribution.scope():
        with pytest.raises(ValueError, match="Expected `device` to be one that can be compiled for"):
            mpkeras.audit(net, device="gtx")


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    ("policy", "kinds"),
    [
        pytest.param(mpkeras.Policy("mixed_bfloat16"), (ClipsGradient, LeavesOut, Branches), id="summed in float32"),
        pytest.param(mpkeras.Policy("mixed_bfloat16", reduce_dtype="bfloat16"), (DividesByNorm,), id="in 16 bits"),
    ],
)
def test_gradients_of_every_kind_train_as_without_a_distribution(policy, kinds):
    def losses():
        keras.utils.set_random_seed(1)
        net = planted(*kinds, width=16)
        step = mpkeras.make_train_step(mpkeras.apply_policy(net, policy), keras.optimizers.SGD(0.1), "mse")
        rng = np.random.default_rng(0)
        return [float(step(rng.normal(size=(8, 16)), rng.normal(size=(8, 8)))["loss"]) for _ in range(4)]

    alone = losses()
    with keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:1]).scope():
        # bfloat16 has 8 significant bits: gradients are summed in float32 here, and rounded there.
        np.testing.assert_allclose(losses(), alone, rtol=2e-3)


@pytest.mark.backends("jax")
def test_what_travels_otherwise_is_named():
    net = mpkeras.apply_policy(model(), "mixed_bfloat16")
    kernel, bias = "wide/kernel", "wide/bias"
    sent = [
        {"kind": "all-gather", "dtype": "float32", "bytes": 12, "tensors": {kernel: 8, "head/kernel": 4}},
        {"kind": "all-gather", "dtype": "bfloat16", "bytes": 2, "tensors": {"near/kernel": 2}},
        {"kind": "all-reduce", "dtype": "bfloat16", "bytes": 7, "tensors": {bias: 4, kernel: 2, "": 1}},
        {"kind": "all-to-all", "dtype": "float32", "bytes": 3, "tensors": {"": 3}},
    ]
    expected = [
        {"tensor": kernel, "kind": "all-gather", "dtype": "float32", "expected": "bfloat16", "bytes": 8},
        {"tensor": bias, "kind": "all-reduce", "dtype": "bfloat16", "expected": "float32", "bytes": 4},
        {"tensor": kernel, "kind": "all-reduce", "dtype": "bfloat16", "expected": "float32", "bytes": 2},
    ]
    policy = mpkeras.Policy("mixed_bfloat16")
    assert travels_otherwise(net, Travel.of(policy), sent) == expected
    assert travels_otherwise(net, Travel.of(policy), sent, gathers_for_layers=False) == expected[1:]
    asked_for = mpkeras.Policy("mixed_bfloat16", gather_dtype="float32", reduce_dtype="bfloat16")
    assert [part["tensor"] for part in travels_otherwise(net, Travel.of(asked_for), sent)] == ["near/kernel"]


def test_what_a_layer_reads_in_float32_travels_as_the_layer_says():
    """Keras casts the scale of a LayerNormalization in no scope: the layer computes with it in float32."""
    inputs = keras.Input((24,))
    hidden = keras.layers.Dense(32, name="wide")(keras.layers.LayerNormalization(name="norm")(inputs))
    net = mpkeras.apply_policy(keras.Model(inputs, keras.layers.Dense(8, name="head")(hidden)), "mixed_bfloat16")
    wide = {"norm/gamma": 40, "norm/beta": 40, "wide/kernel": 4}
    sent = [{"kind": "all-gather", "dtype": "float32", "bytes": 84, "tensors": wide}]
    asked_for = mpkeras.Policy("mixed_bfloat16", gather_dtype="bfloat16")
    for policy in (mpkeras.Policy("mixed_bfloat16"), asked_for):
        assert [part["tensor"] for part in travels_otherwise(net, Travel.of(policy), sent)] == ["wide/kernel"]
    sent = [{"kind": "all-gather", "dtype": "bfloat16", "bytes": 42, "tensors": {"norm/gamma": 20, "wide/kernel": 2}}]
    assert travels_otherwise(net, Travel.of(mpkeras.Policy("mixed_bfloat16")), sent) == []
    sent = [{"kind": "all-gather", "dtype": "float16", "bytes": 20, "tensors": {"norm/gamma": 20}}]
    (part,) = travels_otherwise(net, Travel.of(mpkeras.Policy("mixed_bfloat16")), sent)
    assert (part["tensor"], part["dtype"]) == ("norm/gamma", "float16")


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gather_dtype": "float16"}, "gather_dtype='float16', variable_dtype='float32', compute_dtype='bfloat16'"),
        ({"gather_dtype": "int8"}, "gather_dtype='int8'"),
        ({"reduce_dtype": "float64"}, "reduce_dtype='float64' and|reduce_dtype='float64', compute_dtype='bfloat16'"),
        ({"reduce_dtype": 16}, "reduce_dtype=16"),
    ],
)
def test_bad_dtypes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mpkeras.Policy("mixed_bfloat16", **options)


@pytest.mark.backends("tensorflow")
def test_a_policy_keeps_the_dtypes_of_what_travels():
    names = ("gather_dtype", "reduce_dtype")
    for gather, reduce in itertools.product((None, "bfloat16", "float32"), (None, "bfloat16", "float32")):
        policy = mpkeras.Policy("mixed_bfloat16", gather_dtype=gather, reduce_dtype=reduce)
        read = mpkeras.Policy.from_config(policy.get_config())
        for again in (read, policy.renamed("mine"), policy.with_remat("blocks")):
            assert [getattr(again, name) for name in names] == [gather, reduce]
    assert mpkeras.Policy("mixed_bfloat16", reduce_dtype="bfloat16") != mpkeras.Policy("mixed_bfloat16")
    assert "reduce_dtype=bfloat16" in repr(policy.with_remat("blocks")) or "reduce_dtype=float32" in repr(policy)


@pytest.mark.backends("jax")
def test_jax_sums_no_gradient_in_a_third_dtype():
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    net.compile("sgd", "mse")
    with pytest.raises(ValueError, match="reduce_dtype='float16' and compute_dtype='bfloat16'"):
        mpkeras.prepare(net, mpkeras.Policy("mixed_bfloat16", reduce_dtype="float16"))
    assert net.layers[0].compute_dtype == "float32"


@pytest.mark.backends("jax")
def test_a_step_without_a_program_says_no_dtypes():
    policy = mpkeras.Policy("mixed_bfloat16", reduce_dtype="float32")
    with keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:1]).scope():
        with mpkeras.policy_scope(policy):
            net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
            net.compile("sgd", "mse", run_eagerly=True)
        with pytest.raises(ValueError, match="Expected a compiled step for `gather_dtype` and `reduce_dtype`"):
            net.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)
        with pytest.raises(ValueError, match="Expected a compiled step for `gather_dtype` and `reduce_dtype`"):
            mpkeras.make_train_step(net, "sgd", "mse", jit_compile=False)
        mpkeras.prepare(net, "mixed_bfloat16")
        net.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0)


@pytest.mark.parametrize("door", ["prepare", "make_train_step"])
def test_a_model_trains_as_it_was_made_under_a_policy_outside_its_scope(door):
    policy = mpkeras.Policy("apart", compute_dtype="bfloat16", variable_dtype="float32", loss_scale=16.0)
    with mpkeras.policy_scope(policy):
        net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    if door == "prepare":
        net.compile("sgd", "mse")
        optimizer = mpkeras.prepare(net).optimizer
    else:
        optimizer = mpkeras.make_train_step(net, "sgd", "mse").optimizer
    assert float(optimizer.loss_scale) == 16.0


class LaidOutByItself(keras.distribution.ModelParallel):
    """A distribution that says in code, as JAX has it, where variables lie."""

    def get_variable_layout(self, variable):
        return self.layout


@pytest.mark.backends("jax")
def test_layouts_as_jax_has_them():
    import jax
    from jax.experimental.layout import Format, Layout

    from mpkeras.distribution._jax import _weight

    one = keras.distribution.DeviceMesh((1,), ["batch"], keras.distribution.list_devices()[:1])
    distribution = LaidOutByItself(layout_map=keras.distribution.LayoutMap(one), batch_dim_name="batch")
    variable = keras.Variable(np.zeros((4, 2)), name="kernel")
    split = jax.sharding.NamedSharding(one.backend_mesh, jax.sharding.PartitionSpec("batch", None))
    whole = jax.sharding.NamedSharding(one.backend_mesh, jax.sharding.PartitionSpec(None, None))
    for layout in (split, Format(Layout((1, 0)), split)):
        distribution.layout = layout
        weight = _weight(variable, distribution)
        assert (weight.laid_out, weight.gathered) == (split, whole)
    distribution.layout = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(ValueError, match="name the axes of a mesh.*Received: SingleDeviceSharding.* for 'kernel'"):
        _weight(variable, distribution)
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="Received: LaidOutByItself, with a `get_variable_layout` of its own"):
        mpkeras.forecast(net, (8, 4), device="cpu", devices=distribution)
