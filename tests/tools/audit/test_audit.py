"""`audit`: the table, the sums, and a finding for each thing that goes wrong in 16 bits."""

import ast
import io
import json
import logging
import re

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.conversion.plan import layers_of
from mpkeras.devices.native import Device
from mpkeras.tools.audit.findings import Finding, in_order
from mpkeras.tools.shared.report import bytes_text, listed, percent
from tests.cases import first_quick
from tests.sixteen_bits import Weighted

A100 = Device("gpu", "A100", compute_capability=(8, 0))
V100 = Device("gpu", "V100", compute_capability=(7, 0))
P100 = Device("gpu", "P100", compute_capability=(6, 0))
CPU = Device("cpu", "CPU")
X = np.ones((2, 8), "float32")


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    """A device on which all 16-bit dtypes pay, unless a test says otherwise."""
    here = [A100]
    monkeypatch.setattr("mpkeras.tools.audit.audit.native.probe", lambda backend: here)
    return here


def image_model():
    return keras.Sequential(
        [
            keras.Input((10, 10, 3)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, activation="relu", name="conv"),
            layers.BatchNormalization(name="norm"),
            layers.Flatten(),
            layers.Dense(24, activation="softmax", name="head"),
        ],
        name="images",
    )


def set_policies(model, policy, names=None):
    """Gives layers a stock policy as users of plain Keras do."""
    for layer in layers_of(model):
        if names is None or layer.name in names:
            layer.dtype_policy = keras.DTypePolicy(policy)
    return model


def row(report, name):
    (found,) = [row for row in report.layers if row.layer.name == name]
    return found


def found(report, severity, text=""):
    return [finding for finding in report.findings if finding.severity == severity and text in str(finding)]


def test_the_rows_and_sums_of_a_converted_model(backend):
    report = mpkeras.audit(mpkeras.apply_policy(image_model(), "mixed_bfloat16"))
    conv, norm, head = (row(report, name) for name in ("conv", "norm", "head"))
    conv_flops, head_flops = 2 * 8 * 64 * 16 * 27, 2 * 8 * (64 * 16) * 24
    assert (conv.compute_dtype, conv.weight_bytes, conv.parameters) == ("bfloat16", {"float32": 4 * 448}, 27 * 16 + 16)
    assert conv.flops == {"bfloat16": conv_flops}
    assert (norm.compute_dtype, norm.flops, norm.parameters) == ("float32", {}, 4 * 16)
    assert (head.compute_dtype, head.flops) == ("float32", {"float32": head_flops})
    assert report.flops == {"bfloat16": conv_flops, "float32": head_flops}
    (finding,) = report.findings
    assert finding.severity == "note" and finding.layer.endswith("head") and 'the rule "outputs"' in finding.remedy
    assert finding.what == "It makes outputs of the model, and stays in float32: 24,600 parameters, 47 % of all FLOPs."
    lines = str(report).splitlines()
    assert lines[0] == f"Audit of 'images' on the {backend} backend"
    (line,) = [line.split() for line in lines if line.strip().startswith(("images/head", "head"))]
    assert line[1:] == ["Dense", "float32", "float32", "24,600", "47", "%", "0.0", "%"]
    assert "835,584 FLOPs in a forward pass on inputs (8, 10, 10, 3), 53 % in 16 bits." in lines
    assert "Findings: 1 note" in lines
    saved = json.loads(json.dumps(report.to_dict()))
    assert saved["half_share"] == pytest.approx(442368 / 835584) and saved["input_shapes"] == [[8, 10, 10, 3]]
    (conv,) = [layer for layer in saved["layers"] if layer["path"].endswith("conv")]
    assert conv["class_name"] == "Conv2D" and conv["flops"] == {"bfloat16": 442368}
    pytest.importorskip("matplotlib")
    (axes,) = report.plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [row(report, n).path for n in ("conv", "head")]
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx([100 * 442368 / 835584, 100 * 393216 / 835584])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["bfloat16", "float32"]


class Calling(keras.Model):
    """Which of its layers makes the outputs, only its call tells."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("is_called", [True, False], ids=["called since", "not called since"])
def test_a_head_that_a_call_has_told_is_there_by_the_rule_for_outputs(is_called):
    model = Calling(layers.Dense(32), layers.Dense(16, name="end"))
    model(X)
    mpkeras.apply_policy(model, "mixed_bfloat16")
    if is_called:
        model(X)
    report = mpkeras.audit(model, X)
    assert (row(report, "end").compute_dtype, row(report, "end").rule) == ("float32", "outputs")
    # 8 * 32 products in 16 bits, 32 * 16 in float32.
    assert report.half_share == pytest.approx(1 / 3)
    assert report.findings == []


def test_large_products_in_float32_are_named_with_a_remedy_that_holds(monkeypatch):
    def audited(*parts):
        model = keras.Sequential([keras.Input((64,)), layers.Dense(72, name="first"), *parts])
        return mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16")).findings

    # 72 * 64 + 64 parameters.
    (gate,) = audited(layers.Dense(64, "sigmoid", name="gate"), layers.Dense(8))
    assert gate.what.startswith("Its activation keeps all of it in float32: 4,672 parameters")
    assert "a layer of its own" in gate.remedy and "from_logits" not in gate.remedy
    (end,) = audited(layers.Dense(64, name="end"))
    assert end.what == "It makes outputs of the model, and stays in float32: 4,672 parameters, 50 % of all FLOPs."
    assert '"outputs"' in end.remedy
    monkeypatch.setattr("mpkeras.policies.heads._LARGE", 4672)
    (end,) = audited(layers.Dense(64, "softmax", name="end"))
    assert end.what.startswith("Its activation keeps all of it") and "from_logits=True" in end.remedy
    sums = audited(layers.Dense(64, name="end"))
    if keras.backend.backend() == "jax":
        assert sums == []
    else:
        (end,) = sums
        assert (end.severity, "sums in float32" in end.what, "jit_compile=True" in end.remedy) == ("note", True, True)


def test_the_state_of_a_simple_rnn_is_multiplied_in_float32_on_purpose():
    def audited(*cells):
        model = keras.Sequential([keras.Input((7, 6)), layers.RNN(list(cells), name="loop"), layers.Dense(1)])
        return mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16"))

    report = audited(layers.GRUCell(4), layers.SimpleRNNCell(5))
    # Of eight rows seven steps, of which Keras takes the first one twice on torch.
    steps = 8 * (8 if keras.backend.backend() == "torch" else 7)
    # GRU: (6 + 4) * 12 products; SimpleRNN: 4 * 5 with its input, and 5 * 5 with its state.
    assert row(report, "loop").flops == {"bfloat16": 2 * steps * (120 + 20), "float32": 2 * steps * 25}
    (finding,) = found(report, "note", "in float32, ")
    assert finding.layer == row(report, "loop").path
    # 15 %, and 13 on torch, where Keras takes one step of the cells for the shapes of their outputs.
    assert re.fullmatch("It multiplies its state in float32, 1[35] % of all FLOPs[.]", finding.what)
    assert found(report, "warning") == found(audited(layers.GRUCell(4)), "note", "in float32, ") == []


class OwnHead(layers.Dense):
    def call(self, inputs):
        return keras.ops.matmul(inputs, self.kernel)


def rules_in(remedy):
    """Returns the rules of the argument that a remedy says, as a program that it is copied into has them."""
    return ast.literal_eval(remedy.partition("`keep_float32=")[2].partition("`")[0])


def test_outputs_that_a_large_head_rounds_are_named_with_a_rule_that_holds(monkeypatch):
    monkeypatch.setattr("mpkeras.policies.heads._LARGE", 24)

    def rounded(policy):
        model = keras.Sequential([keras.Input((6,)), OwnHead(4, name="own")], name="net")
        report = mpkeras.audit(mpkeras.apply_policy(model, policy))
        return [finding for finding in report.findings if "rounds them" in finding.what]

    (finding,) = rounded("mixed_float16")
    assert (finding.severity, finding.layer) == ("note", "net/own")
    assert finding.what == "It makes outputs of the model from 28 parameters, and rounds them to float16."
    assert rounded(mpkeras.Policy("mixed_float16", keep_float32=rules_in(finding.remedy))) == []
    # Keras' arithmetic in the policy of plain Keras.
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, dtype="mixed_bfloat16", name="stock")])
    (finding,) = [f for f in mpkeras.audit(model).findings if "rounds them" in f.what]
    assert "prepare" in finding.remedy


class Positions(Weighted):
    """Adds sines of positions, which it makes in what it computes in."""

    def call(self, x):
        positions = ops.arange(ops.shape(x)[1])
        return x + ops.sin(ops.expand_dims(ops.cast(positions, self.compute_dtype), -1) / 9.0)


class Places(layers.Layer):
    """Compares positions in int32, and takes sines of them in float32."""

    def call(self, x):
        positions = ops.arange(ops.shape(x)[1])
        earlier = ops.sum(ops.cast(positions[:, None] >= positions[None], "float32"), axis=0)
        waves = ops.sin(ops.cast(positions, "float32")) / ops.sqrt(earlier)
        return x + ops.cast(waves[:, None], self.compute_dtype)


@pytest.mark.parametrize(
    ("policy", "length", "layer", "expected"),
    [
        ("mixed_bfloat16", 300, Positions(name="own"), "300 numbers in bfloat16"),
        ("mixed_float16", 2050, Positions(name="own"), "2,050 numbers in float16"),
        ("mixed_bfloat16", 257, Positions(name="own"), None),
        ("mixed_float16", 2049, Positions(name="own"), None),
        ("mixed_bfloat16", 300, Places(name="own"), None),
    ],
)
def test_positions_counted_in_16_bits(policy, length, layer, expected):
    model = keras.Sequential([keras.Input((length, 8)), layer, layers.Dense(2)], name="net")
    mpkeras.apply_policy(model, policy)
    whole = [finding for finding in mpkeras.audit(model).findings if "whole number" in finding.what]
    if expected is None:
        assert whole == []
    else:
        (finding,) = whole
        assert (finding.severity, finding.layer) == ("warning", "net/own") and f"It counts {expected}," in finding.what
        # The remedy cures it: what is rounded by then is the sum.
        mpkeras.apply_policy(model, mpkeras.Policy(policy, keep_float32=rules_in(finding.remedy)))
        assert not [finding for finding in mpkeras.audit(model).findings if "whole number" in finding.what]


@pytest.mark.parametrize(
    ("layer", "open_size", "severity"),
    [(Positions(name="own"), 257, "note"), (Positions(name="own"), 258, "warning"), (Places(name="own"), 258, None)],
)
def test_positions_of_an_open_size_are_counted_as_far_as_it_was_taken(layer, open_size, severity):
    model = keras.Sequential([keras.Input((None, 8)), layer, layers.Dense(2)], name="net")
    mpkeras.apply_policy(model, "mixed_bfloat16")
    report = mpkeras.audit(model, open_size=open_size)
    whole = [(finding.severity, finding.layer) for finding in report.findings if "whole number" in finding.what]
    assert whole == ([] if severity is None else [(severity, "net/own")])


class Noisy(layers.Layer):
    """State, random numbers and a loss of its own."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def build(self, input_shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        self.add_loss(ops.mean(x))
        return x + keras.random.normal(ops.shape(x), dtype=x.dtype, seed=self.seed_generator)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_the_model_stays_exactly_as_it_was(policy):
    inputs = keras.Input((4,))
    x = layers.BatchNormalization()(layers.Dense(8, activity_regularizer="l2")(inputs))
    x = Noisy()(layers.Dropout(0.5, seed=1)(x))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
    model.compile(mpkeras.LossScaleOptimizer("adam"), "categorical_crossentropy", metrics=["accuracy"])
    model.fit(np.ones((8, 4), "float32"), np.ones((8, 3), "float32"), verbose=0)
    if policy is not None:
        mpkeras.apply_policy(model, policy)

    def picture():
        every = layers_of(model)
        variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        return (
            model.get_config(),
            [ops.convert_to_numpy(variable.value) for variable in variables],
            [{name: id(value) for name, value in vars(layer).items()} for layer in every],
            [(layer.dtype_policy, layer.losses and len(layer.losses)) for layer in every],
            [(tensor.dtype, tensor.shape) for tensor in model.outputs],
        )

    before = picture()
    mpkeras.audit(model)
    after = picture()
    for old, new in zip(before[1], after[1], strict=True):
        np.testing.assert_array_equal(old, new)
    assert before[0] == after[0] and before[2:] == after[2:]


def test_a_model_in_float32_gets_one_note(devices):
    report = mpkeras.audit(image_model())
    assert [finding.severity for finding in report.findings] == ["note"]
    assert "mixed_bfloat16 suits it (A100" in report.findings[0].what and report.half_share == 0.0
    devices[:] = [P100]
    (finding,) = mpkeras.audit(keras.Sequential([keras.Input((8,)), layers.Dense(2)])).findings
    assert "do not bother (P100 (compute capability 6.0) is older than 7.0" in finding.what


@pytest.mark.parametrize(
    ("here", "policy", "expected"),
    [
        pytest.param([V100], "mixed_float16", None, id="float16 pays on an older one"),
        pytest.param([V100], "mixed_bfloat16", "bfloat16 is not native on this device", id="no bfloat16"),
        pytest.param([CPU], "mixed_float16", "float16 will not pay on this device, do not bother", id="a plain CPU"),
        pytest.param([CPU, A100], "mixed_bfloat16", None, id="an accelerator hides the CPU"),
    ],
)
def test_p2_says_do_not_bother_where_that_is_so(devices, here, policy, expected):
    devices[:] = here
    model = mpkeras.apply_policy(keras.Sequential([keras.Input((8,)), layers.Dense(8)]), policy)
    warned = [finding.what for finding in found(mpkeras.audit(model), "warning", "this device")]
    assert len(warned) == (expected is not None) and all(expected in what for what in warned)


def test_p2_sizes_that_are_no_multiple_of_8():
    sizes = {"odd": 30, "even": 32, "tiny": 1, "end": 9}
    stack = [layers.Dense(units, name=name) for name, units in sizes.items()]
    model = keras.Sequential([keras.Input((16,)), *stack])
    report = mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16"))
    # 480 + 960 + 32 + 9 products; the third layer has 2 % of them. What makes the outputs is in float32.
    assert [(finding.layer, finding.what.split(":")[0]) for finding in report.findings] == [
        (row(report, "odd").path, "`units` is 30, no multiple of 8, 32 % of all FLOPs"),
        (row(report, "tiny").path, "`units` is 1, no multiple of 8, 2.2 % of all FLOPs"),
    ]
    assert "`units=32`" in report.findings[0].remedy
    assert not found(mpkeras.audit(mpkeras.apply_policy(model, "float32")), "note", "multiple of 8")


@pytest.mark.backends("tensorflow", "torch")
def test_p2_the_size_of_attention_heads(backend):
    inputs = keras.Input((5, 16))
    x = layers.MultiHeadAttention(2, 12, name="attention")(inputs, inputs)
    model = keras.Model(inputs, layers.Dense(16)(x))
    report = mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16"))
    # 2 heads of 12: scores and values 2 * 2 * 25 * 12 products, four projections of 5 * 16 * 24, the head 5 * 16 * 16.
    assert [finding.what[:39] for finding in report.findings] == ["`key_dim` is 12, no multiple of 8, 12 %"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_p26_variables_in_16_bits_are_listed(dtype):
    keras.config.set_dtype_policy(dtype)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="moves"), layers.Dense(8, name="frozen")])
    model.get_layer("frozen").trainable = False
    (finding,) = found(mpkeras.audit(model), "error" if dtype == "float16" else "warning", "variables")
    assert finding.layer == model.get_layer("moves").path and f"kernel, bias are {dtype}" in finding.what
    assert "float32_variables=True" in finding.remedy
    report = mpkeras.audit(mpkeras.apply_policy(model, f"mixed_{dtype}", float32_variables=True))
    assert not found(report, "error") and not found(report, "warning", "variables")


def test_p26_statistics_count_as_moving():
    keras.config.set_dtype_policy("float16")
    model = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(center=False, scale=False, name="norm")])
    (finding,) = found(mpkeras.audit(model), "error", "variables")
    assert "moving_mean, moving_variance are float16" in finding.what


def test_p29_lora_weights_and_optimizer_state_in_16_bits():
    keras.config.set_dtype_policy("bfloat16")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="adapted")])
    layer = model.get_layer("adapted")
    layer.enable_lora(2)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    report = mpkeras.audit(model)
    lora = [v.name for v in layer.trainable_variables if "lora" in v.name and v.dtype == "bfloat16"]
    (finding,) = found(report, "warning", "Updates smaller")
    assert all(name in finding.what for name in lora) and "kernel" not in finding.what.replace("lora_kernel", "")
    (finding,) = found(report, "warning", "The optimizer keeps")
    assert "momentum" in finding.what


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_a_layer_without_a_kernel_in_16_bits_is_named_with_what_it_costs():
    inputs = keras.Input((3, 8))
    hidden = layers.Dense(8, name="hidden")(layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs))
    model = mpkeras.apply_policy(keras.Model(inputs, layers.Dense(1)(hidden), name="net"), "mixed_float16")
    (finding,) = [finding for finding in mpkeras.audit(model).findings if "stays in float32" in finding.what]
    # Of 3 steps: 4 projections of 2 * 8 * 8 and 2 products of 2 * 3 * 8; 2 * 8 * 8 + 2 * 8 * 1 in the two others.
    assert finding.severity == "note" and "attention" in finding.layer
    assert "It stays in float32, 81 % of all FLOPs: it fails in float16 on jax" in finding.what
    assert "`mpkeras.apply_policy` tries anew" in finding.remedy
    mpkeras.apply_policy(model, "float32")
    assert not [finding for finding in mpkeras.audit(model).findings if "stays in float32" in finding.what]


@pytest.mark.filterwarnings("ignore:.*scales no loss")
@pytest.mark.parametrize("is_sequential", [True, False])
def test_float16_without_loss_scaling_is_no_error_where_rules_keep_all_layers_in_float32(is_sequential):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, {"a": layers.Dense(2)(inputs), "b": layers.Dense(3)(inputs)})
    if is_sequential:
        model = keras.Sequential([keras.Input((6,)), model.layers[1]])
    model.compile("sgd", "mse")
    report = mpkeras.audit(mpkeras.apply_policy(model, "mixed_float16"))
    assert {row.compute_dtype for row in report.layers if not row.is_container} == {"float32"}
    assert not found(report, "error")


@pytest.mark.parametrize(
    ("optimizer", "policy", "severity", "expected"),
    [
        pytest.param(keras.optimizers.Adam, "mixed_float16", "error", "(Adam) scales no loss", id="none"),
        pytest.param(keras.optimizers.Adam, "float16", "error", "mpkeras.prepare", id="none in float16"),
        pytest.param(keras.optimizers.Adam, "mixed_bfloat16", None, None, id="none in bfloat16"),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
            "mixed_float16",
            "note",
            "no `min_scale`",
            id="that of Keras",
        ),
        pytest.param(lambda: mpkeras.LossScaleOptimizer("adam"), "mixed_float16", None, None, id="ours"),
        pytest.param(lambda: keras.optimizers.Adam(loss_scale_factor=1024.0), "mixed_float16", None, None, id="fixed"),
    ],
)
def test_p18_float16_without_loss_scaling(optimizer, policy, severity, expected):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, dtype=policy), layers.Dense(8, dtype="float32")])
    model.compile(optimizer(), "mse")
    report = mpkeras.audit(model)
    named = [finding for finding in report.findings if "scales no loss" in finding.what or "LossScale" in str(finding)]
    assert [finding.severity for finding in named] == ([] if severity is None else [severity])
    assert expected is None or expected in str(named[0])
    assert severity == "error" or not found(report, "error")


class TestHeads:
    """P4: layers that the default rules keep in float32."""

    def test_a_probability_head_in_16_bits_is_a_warning_and_a_gate_a_note(self):
        inputs = keras.Input((8,))
        gate = layers.Dense(8, activation="sigmoid", name="gate")(inputs)
        x = layers.Multiply()([inputs, gate])
        softmax = layers.Softmax()(layers.Dense(8)(x))
        model = keras.Model(inputs, [layers.Dense(8, activation="softmax", name="head")(x), softmax])
        report = mpkeras.audit(set_policies(model, "mixed_float16"))
        texts = [str(finding) for finding in report.findings if "default rule" in finding.what]
        assert [text.split(":")[0] for text in texts] == ["warning", "warning", "warning", "note"]
        assert "'activation:softmax' keeps in float32: through the crossentropy, logits [15, 0]" in texts[1]
        assert "gate" in texts[3] and "logit 10" in texts[3]
        mpkeras.apply_policy(model, "mixed_float16")
        assert not [f for f in mpkeras.audit(model).findings if "default rule '" in f.what]

    def test_heads_in_a_nested_model_end_the_outer_one(self):
        inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="sigmoid", name="head")])
        inputs = keras.Input((8,))
        model = set_policies(keras.Model(inputs, inner(inputs)), "mixed_bfloat16")
        assert found(mpkeras.audit(model), "warning", "activation:sigmoid")

    def test_normalization_in_16_bits(self):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.BatchNormalization(name="norm")])
        (finding,) = found(mpkeras.audit(set_policies(model, "mixed_float16")), "warning", "default rule")
        assert "'BatchNormalization'" in finding.what and "NaN in float16" in finding.what


class TestIslands:
    """P36, P2: float32 layers among 16-bit ones."""

    def test_a_frozen_float32_layer_is_named_with_its_cost(self):
        model = keras.Sequential(
            [keras.Input((8,)), layers.Dense(16), layers.Dense(24, name="frozen", dtype="float32"), layers.Dense(8)]
        )
        mpkeras.apply_policy(set_policies(model, "mixed_bfloat16", {model.layers[0].name}), "mixed_bfloat16")
        model.layers[2].dtype_policy = keras.DTypePolicy("mixed_bfloat16")
        report = mpkeras.audit(model)
        (finding,) = found(report, "warning", "no default rule")
        assert finding.layer == row(report, "frozen").path
        # 8 * 16 + 16 * 24 + 24 * 8 = 704 products, 384 of them here; 408 weights and 192 outputs.
        assert "55 % of all FLOPs, 1.6 KiB of weights and 768 bytes of outputs" in finding.what

    def test_of_float32_layers_alone_it_says_that_the_policy_is_of_16_bits(self):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(32), layers.Dense(2)])
        model.dtype_policy = "mixed_bfloat16"
        # 6 * 32 of 6 * 32 + 32 * 2 products.
        (finding,) = found(mpkeras.audit(model), "warning", "75 % of all FLOPs")
        assert "in float32 in a model whose policy is of 16 bits" in finding.what

    @pytest.mark.slow
    @pytest.mark.backends("tensorflow")
    @pytest.mark.parametrize("mode", ["int8", "float8"])
    def test_quantized_ones_get_a_remedy_that_helps(self, mode):
        def quantized(policy):
            model = keras.Sequential([keras.Input((16,)), layers.Dense(32, name="first"), layers.Dense(8)])
            mpkeras.apply_policy(model, policy)
            for layer in model.layers:
                layer.quantize(mode)
            return mpkeras.apply_policy(model, "mixed_bfloat16")

        # 16 * 32 of 16 * 32 + 32 * 8 products.
        (finding,) = found(mpkeras.audit(quantized("float32")), "warning", "67 % of all FLOPs")
        assert "It is quantized" in finding.remedy
        assert 'quantize the model after `apply_policy(model, "mixed_bfloat16")`' in finding.remedy
        assert not found(mpkeras.audit(quantized("mixed_bfloat16")), "warning", "no default rule")

    def test_cheap_ones_share_a_note_and_rules_have_their_reason(self):
        inputs = keras.Input((8,))
        x = layers.Activation("relu", name="first", dtype="float32")(layers.Dense(64)(inputs))
        x = layers.BatchNormalization(name="norm", dtype="float32")(x)
        x = layers.Reshape((64,), name="second", dtype="float32")(layers.Dense(64)(x))
        model = keras.Model(inputs, layers.Dense(8, dtype="float32", activation="softmax")(x))
        set_policies(model, "mixed_bfloat16", {layer.name for layer in model.layers if "dense" in layer.name} - {"x"})
        model.layers[-1].dtype_policy = keras.DTypePolicy("float32")
        (finding,) = found(mpkeras.audit(model), "note", "no default rule")
        assert "first (Activation), second (Reshape)" in finding.what and "norm" not in finding.what

    @pytest.mark.parametrize(("others", "severity"), [((), "warning"), (("front",), "note")])
    def test_cheap_ones_that_are_dear_together_are_warned_of(self, others, severity):
        # Of 32 + 1.6 + 1.6 thousand products each of two, "front" and "behind", has less than a twentieth.
        stack = [layers.Dense(40, name="front"), layers.Dense(800, name="wide"), layers.Dense(2, name="behind")]
        model = keras.Sequential([keras.Input((40,)), *stack, layers.Dense(2, name="head")])
        model.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
        report = mpkeras.audit(set_policies(model, "mixed_bfloat16", ("wide", "head", *others)))
        (finding,) = [finding for finding in report.findings if "no default rule" in finding.what]
        assert finding.severity == severity

    def test_a_layer_that_multiplies_in_float32_whatever_its_policy(self):
        class Projection(layers.Layer):
            def build(self, input_shape):
                self.kernel = self.add_weight(shape=(input_shape[-1], 8), autocast=False)

            def call(self, x):
                return ops.cast(ops.cast(x, "float32") @ self.kernel.value, self.compute_dtype)

        model = keras.Sequential([keras.Input((8,)), Projection(name="mine"), layers.Dense(8)])
        report = mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16"))
        (finding,) = found(report, "warning", "yet their products are in float32")
        assert "mine (Projection), 50 % of all FLOPs" in finding.what and finding.layer.endswith("mine")

    def test_a_product_between_layers_is_in_the_dtype_of_its_operands(self):
        inputs = keras.Input((4, 8))
        products = ops.matmul(inputs, ops.transpose(inputs, (0, 2, 1)))
        model = keras.Model(inputs, layers.Dense(8)(products), name="gram")
        report = mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16"))
        # 4 * 8 * 4 products in float32, and as many after them.
        (finding,) = found(report, "warning", "products are in float32")
        assert "operations between the layers of gram (Functional), 50 % of all FLOPs" in finding.what

    @pytest.mark.slow
    @pytest.mark.backends("tensorflow")
    def test_a_saved_model_from_elsewhere_keeps_its_dtypes(self, tmp_path):
        inner = keras.Sequential([keras.Input((8,)), layers.Dense(64)])
        inner.export(tmp_path / "saved", verbose=False)
        inputs = keras.Input((8,))
        frozen = layers.TFSMLayer(str(tmp_path / "saved"), call_endpoint="serve", name="elsewhere", dtype="float32")
        model = keras.Model(inputs, layers.Dense(8, dtype="mixed_bfloat16")(frozen(inputs)))
        report = mpkeras.audit(model)
        (finding,) = found(report, "warning", "no default rule")
        assert "elsewhere" in finding.layer and "50 % of all FLOPs" in finding.what
        assert "make that anew in 16 bits" in finding.remedy


class Attribute(layers.Layer):
    """Keeps a tensor in float32, and computes `function` of it and its inputs."""

    def __init__(self, function, tensor, **kwargs):
        super().__init__(**kwargs)
        self.function, self.tensor = function, ops.convert_to_tensor(tensor)

    def call(self, x):
        return self.function(x, self.tensor)


def around(layer, policy, converted):
    """Returns a subclassed model of three layers, converted or as users of plain Keras do it."""
    model = Calling(layers.Dense(8), layer, layers.Dense(8))
    model(X)
    return mpkeras.apply_policy(model, policy) if converted else set_policies(model, policy)


@pytest.mark.parametrize("converted", first_quick([True, False]))
def test_p11_a_layer_that_lets_float32_in_is_named_with_the_tensor(converted):
    model = around(Attribute(ops.multiply, np.full(8, 2.0, "float32"), name="mine"), "mixed_bfloat16", converted)
    for _ in range(2):
        (finding,) = found(mpkeras.audit(model), "warning", "mixes it with")
        assert "Layer 'mine' (Attribute) computes in bfloat16 and mixes it with float32" in finding.what
        assert "its attribute `tensor` is float32" in finding.what and "float32_island" in finding.remedy
    if converted:
        with pytest.warns(UserWarning, match="attribute `tensor`"):  # An audit takes no warning away.
            model(X)


class OnPurpose(Attribute):
    """Returns float32, and says so."""

    def call(self, x):
        return self.function(ops.cast(x, "float32"), self.tensor)


def test_a_layer_that_names_float32_lets_it_in_on_purpose():
    model = around(OnPurpose(ops.multiply, np.full(8, 2.0, "float32"), name="mine"), "mixed_bfloat16", True)
    assert not found(mpkeras.audit(model), "warning", "mixes it with")


@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize("converted", first_quick([False, True]))
def test_p11_what_the_backend_refuses_is_an_error_with_the_culprit(converted):
    layer = Attribute(lambda x, matrix: x @ matrix, np.eye(8, dtype="float32"), name="mine")
    report = mpkeras.audit(around(layer, "mixed_float16", converted))
    (finding,) = found(report, "error", "The backend refuses it")
    assert "attribute `tensor` is float32" in finding.what and finding.layer == layer.path
    assert report.flops is None and "?" in str(report)


@pytest.mark.filterwarnings("ignore:.*scales no loss")
def test_p21_losses_and_sums_in_16_bits():
    layer = layers.Dense(8, activity_regularizer="l2", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((8,)), layer])
    model.compile("sgd", keras.losses.MeanSquaredError(dtype="float16"))
    report = mpkeras.audit(model)
    assert found(report, "error", "MeanSquaredError) is computed in float16")
    assert found(report, "warning", "activity regularizer sums in float16")
    assert found(report, "note", "The model returns float16")
    keras.config.set_floatx("float16")
    assert found(mpkeras.audit(model), "error", "set_floatx")
    keras.config.set_floatx("float32")
    assert not found(mpkeras.audit(mpkeras.apply_policy(model, "mixed_float16")), "warning", "regularizer")


class Positions(Weighted):
    """Adds a table of 32 positions: for sequences of 32 alone."""

    def build(self, shape):
        self.table = self.add_weight(shape=(32, 8), name="table")

    def call(self, x):
        return x + self.table

    def compute_output_shape(self, shape):
        return shape


def sequences():
    inputs = keras.Input((None, 8))
    return keras.Model(inputs, layers.Dense(8)(Positions(name="positions")(inputs)))


def test_open_sizes_are_said_and_may_be_given():
    report = mpkeras.audit(sequences())
    assert report.flops is None and report.open_size == 64
    (note,) = found(report, "note", "could not be traced")
    assert note.remedy.endswith("Open sizes were taken as 64; `open_size` (`--open-size`) gives another.")
    report = mpkeras.audit(sequences(), batch_size=2, open_size=32)
    assert report.flops == {"float32": 2 * 2 * 32 * 8 * 8} and report.input_shapes == [(2, 32, 8)]
    assert (
        " on inputs (2, 32, 8), 0.0 % in 16 bits. Open sizes were taken as 32; `open_size` (`--open-size`) gives"
        in str(report)
    )
    assert report.to_dict()["open_size"] == 32
    # Nothing is open but the batch.
    report = mpkeras.audit(image_model(), open_size=32)
    assert report.to_dict()["open_size"] is None and "Open sizes" not in str(report)


@pytest.mark.backends("torch")
def test_what_torch_says_of_a_failure_is_in_the_note_alone():
    # What torch writes to standard error goes through this logger, which has a handler of its own.
    log, written = logging.getLogger("torch._subclasses.fake_tensor"), io.StringIO()
    handler = logging.StreamHandler(written)
    log.addHandler(handler)
    try:
        assert found(mpkeras.audit(sequences()), "note", "could not be traced")
        assert written.getvalue() == ""
        log.error("of another")
        assert written.getvalue() == "of another\n"
    finally:
        log.removeHandler(handler)


def test_the_summary_has_the_sums_and_what_is_more_than_a_note():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(12, name="body"), layers.Dense(8, "softmax")], name="net")
    model.compile("adam", "mse")
    summary = mpkeras.audit(set_policies(model, "mixed_float16", names=["body"])).summary().splitlines()
    report = mpkeras.audit(model)
    grave = [str(finding) for finding in report.findings if finding.severity != "note"]
    notes = [str(finding) for finding in report.findings if finding.severity == "note"]
    assert len(grave) >= 1 and len(notes) >= 1
    assert summary[:2] == [report.title, "Layers: 1 in float16, 1 in float32."]
    assert summary[2].startswith("3,072 FLOPs in a forward pass")
    assert summary[3].startswith("Casts between float dtypes")
    assert [line for line in summary if line.startswith("Findings: ")][0].endswith(f"{len(notes)} note")
    assert summary[-len(grave) :] == grave and not set(notes) & set(summary)


def test_casts_are_counted_where_they_cost():
    inputs = x = keras.Input((64, 64, 8))
    for _ in range(3):
        x = layers.Activation("relu", dtype="float32")(layers.Activation("relu", dtype="bfloat16")(x))
    # Each pair reads 4 and writes 2 bytes a number, then the other way round, beside outputs of 2 and 4.
    numbers = 8 * 64 * 64 * 8
    text = str(mpkeras.audit(keras.Model(inputs, x)))
    assert "Casts between float dtypes: 3 bfloat16 to float32, 3 float32 to bfloat16; they read and write " in text
    assert f"{36 * numbers / 2**20:.1f} MiB, beside {18 * numbers / 2**20:.1f} MiB of weights and outputs." in text
    assert "matters where steps are not compiled" in text

    def deep(length):
        """One layer of 12 bytes a number of casts beside `length` outputs of 4 and one of 2."""
        inputs = x = keras.Input((64, 64, 8))
        for _ in range(length - 1):
            x = layers.Activation("relu", dtype="float32")(x)
        x = layers.Activation("relu", dtype="bfloat16")(x)
        return keras.Model(inputs, layers.Activation("relu", dtype="float32")(x))

    # 12 / (4 * 29 + 2) is more than a tenth, 12 / (4 * 30 + 2) less.
    assert "they read and write" in str(mpkeras.audit(deep(29)))
    assert "Casts between float dtypes: few, which cost little." in str(mpkeras.audit(deep(30)))
    assert "Casts between float dtypes: none." in str(mpkeras.audit(image_model()))


@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called on layer:UserWarning")  # Keras, of the unused layer
def test_of_a_model_that_is_not_built_what_is_known_is_said():
    model = Calling(layers.Dense(8, dtype="mixed_bfloat16", name="inner"))
    report = mpkeras.audit(model)
    assert row(report, "inner").compute_dtype == "bfloat16"
    (finding,) = found(report, "note", "could not be traced")
    assert "not built" in finding.what and "Call the model once" in finding.remedy
    assert not model.parts[0].built and report.half_share is None
    assert json.loads(json.dumps(report.to_dict()))["flops"] is None
    pytest.importorskip("matplotlib")
    report.plot()
    # A layer that is never called is named.
    model.unused = layers.Dense(3, name="unused")
    model(X)
    (finding,) = found(mpkeras.audit(model), "note", "could not be traced")
    assert "'unused'" in finding.what and not model.unused.built
    model.unused.build((None, 8))
    assert mpkeras.audit(model).half_share == 1.0


@pytest.mark.backends("tensorflow")
def test_a_model_of_text():
    vectorize = layers.TextVectorization(output_sequence_length=4, vocabulary=["a", "b"])
    inputs = keras.Input((1,), dtype="string")
    x = layers.Embedding(8, 16)(vectorize(inputs))
    model = keras.Model(inputs, layers.Dense(4)(layers.Dense(8)(x)))
    report = mpkeras.audit(mpkeras.apply_policy(model, "mixed_bfloat16"))
    (finding,) = report.findings
    # Of each of the two products.
    assert "in places: 2. Such a loop counts once" in finding.what and "lower bound" in finding.remedy
    # The program does not know the batch that comes out of the text, nor (after Keras 3.10) its four words.
    words = report.flops["bfloat16"] // (2 * 8 * 16 * 8)
    assert words in (1, 4)
    assert report.flops == {"bfloat16": 2 * 8 * words * 16 * 8, "float32": 2 * 8 * words * 8 * 4}
    assert all(not layer.built for layer in layers_of(vectorize)[1:])


def test_a_layer_that_raises_is_named():
    class Broken(layers.Layer):
        def call(self, x):
            if not isinstance(x, keras.KerasTensor) and self.broken:
                raise RuntimeError("no disk")
            return x

    layer = Broken(name="mine")
    layer.broken = False
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layer])
    layer.broken = True
    (finding,) = found(mpkeras.audit(model), "note", "could not be traced")
    assert finding.layer == layer.path and "RuntimeError: no disk" in finding.what
    assert "call" not in vars(layer)


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        pytest.param({"model": layers.Dense(3)}, TypeError, "Expected a `keras.Model`", id="a layer"),
        pytest.param({"batch_size": 0}, ValueError, "batch_size=0", id="no batch"),
        pytest.param({"inputs": [3, 4]}, ValueError, "Expected `inputs` to be arrays", id="numbers"),
        pytest.param({"inputs": {}}, ValueError, "at least one array in `inputs`. Received: {}", id="nothing"),
    ],
)
def test_bad_arguments(arguments, error, expected):
    arguments = {"model": keras.Sequential([keras.Input((8,)), layers.Dense(2)]), **arguments}
    with pytest.raises(error, match=expected):
        mpkeras.audit(**arguments)


def test_words():
    findings = [Finding(name, None, "What.", "Remedy.") for name in ("note", "error", "warning")]
    assert [finding.severity for finding in in_order(findings)] == ["error", "warning", "note"]
    assert str(Finding("note", "a/b", "What.", "Remedy.")) == "note: a/b: What. Remedy."
    assert listed("abcdef") == "a, b, c, d and 2 more" and listed("ab") == "a, b"
    shares = {0: "0.0 %", 0.0004: "< 0.1 %", 0.022: "2.2 %", 0.33: "33 %", 0.999: "> 99 %", 1: "100 %"}
    assert {share: percent(share) for share in shares} == shares
    assert [bytes_text(n) for n in (768, 2048, 3 * 2**20)] == ["768 bytes", "2.0 KiB", "3.0 MiB"]


def test_p40_small_weights_are_a_finding_unless_they_are_rounded():
    keras.config.set_dtype_policy("bfloat16")
    dense = [keras.layers.Dense(4, name="first"), keras.layers.Dense(3, name="end")]
    model = keras.Sequential([keras.Input((8,)), *dense], name="net")
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    found = [finding for finding in mpkeras.audit(model).findings if "Updates smaller" in finding.what]
    assert [(f.severity, "rounds weights stochastically" in f.remedy) for f in found] == [("warning", True)] * 2
    mpkeras.prepare(model)
    report = mpkeras.audit(model)
    assert not [f for f in report.findings if "Updates smaller" in f.what or "optimizer keeps" in f.what]
    # 36 numbers of 2 bytes, 15 of 4; Adam keeps two for each.
    assert report.to_dict()["training_bytes"] == {
        "weights": {"bfloat16": 72, "float32": 60},
        "slots": {"bfloat16": 144, "float32": 120},
        "gradients": {"bfloat16": 72, "float32": 60},
    }
    assert "144 B bfloat16 of optimizer state" in str(report) or "144 bytes bfloat16" in str(report)


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("dtype", [str, object])
def test_words_in_arrays_of_numpy_are_inputs(dtype):
    words = keras.Input((2,), dtype="string")
    codes = keras.layers.StringLookup(vocabulary=["yes", "no"])(words)
    model = keras.Model(words, keras.layers.Dense(3)(keras.layers.Embedding(3, 4)(codes)))
    report = mpkeras.audit(model, np.full((5, 2), "no", dtype))
    assert report.input_shapes == [(5, 2)] and report.flops == {"float32": 2 * 5 * 2 * 4 * 3}
