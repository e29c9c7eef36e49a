"""A policy with `remat`: the backward pass computes again what it computed the first time, and less is kept."""

import gc
import re
import weakref

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras._replaced import replaced_attributes
from mpkeras.conversion.remat import named_parts, repeated_layers
from mpkeras.policies.survey import Survey
from mpkeras.training.model_view import ModelView

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(11)
IMAGES = RNG.normal(size=(24, 12, 12, 3)).astype("float32")
ROWS = RNG.normal(size=(24, 16)).astype("float32")
TOKENS = RNG.integers(1, 30, (24, 10)).astype("int32")
TOKENS[:, 7:] = 0
TARGETS = ROWS[:, :1]
BAD_ROW = 11  # of the second of three batches of 8
SKIPS = pytest.mark.filterwarnings(
    "ignore:.* steps skipped in epoch", "ignore:.*was skipped", "ignore:The outputs of layer .* are inf or NaN"
)


class Block(layers.Layer):
    """A residual block with statistics, masks of dropout and a counter of its own."""

    def __init__(self, width=16, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.norm, self.drop = layers.Dense(width, "relu"), layers.BatchNormalization(), layers.Dropout(0.2)

    def build(self, shape):
        for layer in (self.dense, self.norm, self.drop):
            layer.build(shape)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x, training=None):
        if training:
            self.count.assign_add(1.0)
        return x + self.drop(self.norm(self.dense(x), training=training), training=training)


class Branches(keras.Model):
    """Subclassed: its blocks are in a list."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = [Block() for _ in range(3)], layers.Dense(1)

    def build(self, shape):
        for layer in (*self.blocks, self.head):
            layer.build(shape)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


def residual():
    x = inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same", name="stem")(x)
    for number in range(3):
        h = layers.BatchNormalization()(x)
        h = layers.Conv2D(8, 3, padding="same", activation="relu", name=f"conv_{number}")(h)
        x = layers.Add(name=f"end_{number}")([x, layers.SpatialDropout2D(0.2)(h)])
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling2D()(x)))


def transformer(causal=True):
    tokens = keras.Input((10,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=not causal)(tokens)
    for number in range(2):
        h = layers.MultiHeadAttention(2, 8, dropout=0.1)(*2 * [layers.LayerNormalization()(x)], use_causal_mask=causal)
        x = layers.Add()([x, h])
        h = layers.Dense(32, "gelu", name=f"up_{number}")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(16)(h)])
    return keras.Model(tokens, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def recurrent():
    stack = [layers.LSTM(8, return_sequences=True, dropout=0.2) for _ in range(2)]
    return keras.Sequential([keras.Input((10,), dtype="int32"), layers.Embedding(30, 8, mask_zero=True), *stack,
                             layers.LSTM(8), layers.Dense(1)])  # fmt: skip


def nested():
    def inner(name):
        return keras.Sequential([keras.Input((16,)), layers.Dense(16, "relu"), layers.Dropout(0.2)], name=name)

    shared = inner("shared")
    x = inputs = keras.Input((16,))
    for part in (shared, inner("other"), shared):
        x = layers.Add()([x, part(x)])
    return keras.Model(inputs, layers.Dense(1)(x))


MODELS = {
    "residual": (residual, IMAGES),
    "causal": (transformer, TOKENS),
    "masked": (lambda: transformer(causal=False), TOKENS),
    "recurrent": (recurrent, TOKENS),
    "nested and shared": (nested, ROWS),
    "subclassed": (Branches, ROWS),
}


def every_layer(model):
    """As the modes "full" and "larger_than" of `keras.RematScope`, which fail with dropout, statistics or in graphs."""
    return model.layers


# Name of the model, `remat`, policy, and how else it is trained.
CASES = [(name, "blocks", "float32", {}) for name in MODELS if name != "masked"]
CASES += [
    ("nested and shared", "blocks", "mixed_float16", {}),
    ("causal", "blocks", "mixed_float8", {}),
    ("causal", "blocks", "bfloat16", {}),
    ("nested and shared", "blocks", "float32", {"optimizer": {"gradient_accumulation_steps": 3}}),
]
MORE_CASES = [("masked", "blocks", "float32", {}), *((name, "products", "float32", {}) for name in MODELS)]
MORE_CASES += [
    ("residual", ["path:end_1"], "float32", {}),
    ("causal", [layers.MultiHeadAttention, "path:up_"], "float32", {}),
    ("subclassed", [Block], "float32", {}),
    ("residual", every_layer, "float32", {}),
    ("causal", every_layer, "float32", {}),
    ("recurrent", "blocks", "mixed_bfloat16", {}),
    ("residual", "blocks", "float32", {"run_eagerly": True}),
]
if BACKEND != "torch":
    MORE_CASES += [("nested and shared", "blocks", "float32", {"steps_per_execution": 3})]
CASES += [pytest.param(*case, marks=pytest.mark.matrix) for case in MORE_CASES]
# Of losses, relative: XLA joins other operations, and rounds elsewhere.
TOLERANCES = {"float32": 1e-5, "mixed_float16": 2e-2, "mixed_bfloat16": 0.15, "mixed_float8": 0.2, "bfloat16": 0.2}


def label(value) -> str:
    values = value if isinstance(value, list) else [value]
    return " and ".join(getattr(each, "__name__", str(each)) for each in values)


def is_refused(name, remat):
    return BACKEND == "tensorflow" and name == "subclassed" and remat == "products"


def made(name):
    keras.utils.set_random_seed(5)
    model = MODELS[name][0]()
    if not model.built:
        model.build((None, 16))
    return model


def prepared(name, policy, remat=None, optimizer=None, **options):
    model = made(name)
    model.compile(keras.optimizers.SGD(1e-3, 0.5, **(optimizer or {})), "mse", **options)
    return mpkeras.prepare(model, policy, loss_scale=64.0, remat=remat(model) if callable(remat) else remat)


def trained(name, policy, remat=None, callbacks=(), bad=np.nan, **options):
    """Returns the losses of each of 9 steps, of which every second of three is bad, the model, and what was skipped."""
    model = prepared(name, policy, remat, **options)
    y = TARGETS.copy()
    y[BAD_ROW] = bad
    keras.utils.set_random_seed(6)
    losses = []
    log = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"])))
    options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
    history = model.fit(MODELS[name][1], y, callbacks=[log, *callbacks], **options).history
    return losses, model, int(history["skipped_steps"][-1])


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("name, remat, policy, options", CASES, ids=label)
def test_it_trains_as_without(name, remat, policy, options):
    """Also what a bad batch leaves; what is counted moves once a step: seeds, statistics, counters of the user's."""
    if is_refused(name, remat):
        pytest.skip("refused, as another test says")
    plain, expected, skipped = trained(name, policy, **options)
    again, model, skipped_again = trained(name, policy, remat, **options)
    assert mpkeras.audit(model).computed_again and not mpkeras.audit(expected).computed_again
    assert skipped == skipped_again > 0
    assert np.isfinite(again).tolist() == np.isfinite(plain).tolist()
    tolerance = TOLERANCES[policy]
    np.testing.assert_allclose(again, plain, rtol=tolerance, atol=tolerance / 10)
    for variable, other in zip(model.variables, expected.variables, strict=True):
        value, right = (ops.convert_to_numpy(ops.cast(v, "float32")) for v in (variable, other))
        is_counted = any(word in variable.path for word in ("seed", "count", "iteration"))
        tolerances = {"rtol": 0} if is_counted else {"rtol": 10 * tolerance, "atol": tolerance}
        np.testing.assert_allclose(value, right, err_msg=variable.path, **tolerances)


class Counted(layers.Layer):
    """Counts the runs of its `call`, and so what is computed again."""

    runs = 0

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        type(self).runs += 1
        return ops.matmul(x, self.kernel)


def chain():
    keras.utils.set_random_seed(2)
    x = inputs = keras.Input((16,))
    for number in range(3):
        x = layers.Add(name=f"end_{number}")([x, layers.Activation("tanh")(Counted(name=f"counted_{number}")(x))])
    return keras.Model(inputs, layers.Dense(1)(x))


def products_asked_for(remat, make=chain):
    step = mpkeras.make_train_step(make(), "sgd", "mse", jit_compile=True, remat=remat)
    step(ROWS, TARGETS)
    # On a CPU XLA finds what JAX computes twice, and computes it once. What TensorFlow asks for is in part not used.
    text = step.compiler_ir(ROWS, TARGETS, optimized=BACKEND == "tensorflow")
    return len(re.findall(r" dot\(|custom-call\(", text))


def test_two_layers_of_one_class_are_blocks_and_one_is_none():
    def paths(count):
        return [layer.path for layer in repeated_layers(Survey(keras.Sequential([keras.Input((16,)), *blocks(count)])))]

    def blocks(count):
        return [Block(name=f"block_{i}") for i in range(count)]

    assert [path.rpartition("/")[2] for path in paths(2)] == ["block_0", "block_1"]
    assert paths(1) == []


@pytest.mark.backends("tensorflow")
def test_a_graph_is_cut_behind_layers_that_hold_a_product():
    wrapped = [layers.SpectralNormalization(layers.Dense(16), name="wrapped"), Block(name="own")]
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(16, name="inside"), layers.ReLU(), layers.Dense(16)])
    model = keras.Sequential([keras.Input((16,)), *wrapped, inner, layers.ReLU(), layers.Dense(1, name="head")])
    ends = [last.rpartition("/")[2] for _, last in named_parts(Survey(model), "products")]
    # The model inside is cut in itself, and what follows it is in the last part of the one around it.
    assert ends == ["wrapped", "own", "inside"]


@pytest.mark.backends("jax")
def test_a_chain_is_cut_before_its_last_layer():
    chain = [layers.Dense(16, "gelu", name=f"dense_{number}") for number in range(4)]
    (part,) = named_parts(Survey(keras.Sequential([keras.Input((16,)), *chain])), "products")
    assert [path.rpartition("/")[2] for path in part] == ["dense_0", "dense_2"]


class Levelled(layers.Layer):
    """Reads a state that it has just written: on TensorFlow and torch no gradient flows through it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(16, "tanh")

    def build(self, shape):
        self.dense.build(shape)
        self.level = self.add_weight(shape=(16,), initializer="ones", trainable=False, name="level")

    def call(self, x):
        h = self.dense(x)
        self.level.assign(0.5 * self.level + ops.mean(ops.abs(h), axis=0))
        return x + h * self.level


@pytest.mark.slow
@pytest.mark.backends("torch", "tensorflow")
def test_a_state_that_is_read_back_has_no_gradient_the_second_time_either():
    def losses(remat):
        keras.utils.set_random_seed(7)
        blocks = [Levelled(name=name) for name in ("first", "second")]
        model = keras.Sequential([keras.Input((16,)), *blocks, layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        mpkeras.prepare(model, "float32", remat=remat)
        return [model.train_on_batch(ROWS, TARGETS) for _ in range(2)]

    np.testing.assert_allclose(losses("blocks"), losses(None), rtol=1e-6)


class Cell(layers.Layer):
    """A recurrent cell, which holds a layer with weights as a block does."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.state_size, self.dense = units, layers.Dense(units, "tanh")

    def build(self, shape):
        self.dense.build((shape[0], shape[1] + self.state_size))

    def call(self, x, states):
        output = self.dense(ops.concatenate([x, *states], axis=-1))
        return output, [output]


class DrawingCell(Cell):
    def __init__(self, units, **kwargs):
        super().__init__(units, **kwargs)
        self.mask = layers.Dropout(0.25, name="mask")

    def call(self, x, states, training=None):
        output, states = super().call(x, states)
        return self.mask(output, training=training), states


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["blocks", ["path:first", "path:second"]], ids=label)
def test_cells_are_computed_again_with_their_loop(remat):
    """On TensorFlow the gradient of a loop whose step is computed again cannot be made."""

    def losses(remat):
        keras.utils.set_random_seed(3)
        stack = [layers.RNN([Cell(12), Cell(8)], return_sequences=True, name=name) for name in ("first", "second")]
        model = keras.Sequential([keras.Input((5, 8)), *stack, layers.Dense(1)])
        model.compile("sgd", "mse")
        mpkeras.prepare(model, "float32", remat=remat)
        ends = [last.rpartition("/")[2] for _, last in mpkeras.audit(model).computed_again]
        assert ends == (["first", "second"] if remat else [])
        x = np.stack(5 * [ROWS[:, :8]], axis=1)
        return model.fit(x, x[..., :1], batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"]

    np.testing.assert_allclose(losses(remat), losses(None), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.backends("jax", "tensorflow")
def test_blocks_are_computed_again_in_the_compiled_program():
    # Three blocks, and the two before the only place where the graph is cut.
    assert products_asked_for("blocks") == products_asked_for(None) + 3
    assert products_asked_for(["path:end_1"]) == products_asked_for(None) + 2


@pytest.mark.backends("jax")
def test_products_are_kept():
    assert products_asked_for("products") == products_asked_for(None)


@pytest.mark.backends("torch")
def test_blocks_are_computed_again_op_by_op():
    runs = {}
    for remat in (None, "blocks", ("path:end_1",)):
        step = mpkeras.make_train_step(chain(), "sgd", "mse", remat=remat)
        step(ROWS, TARGETS)
        Counted.runs = 0
        step(ROWS, TARGETS)
        runs[remat] = Counted.runs
    assert runs == {None: 3, "blocks": 6, ("path:end_1",): 5}


class NeverToldOfTraining(keras.Model):
    """Blocks behind each other in a `call` without `training`, as Keras allows; the blocks take it."""

    def __init__(self):
        super().__init__()
        self.parts = [Block() for _ in range(3)]
        self.head = layers.Dense(1)

    def build(self, shape):
        for part in self.parts:
            part.build(shape)
        self.head.build(shape)

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return self.head(x)


def never_told():
    keras.utils.set_random_seed(3)
    model = NeverToldOfTraining()
    model.build((None, 16))
    return model


@pytest.mark.slow
@pytest.mark.backends("jax", "tensorflow")
def test_a_model_whose_call_takes_no_training_is_computed_again_in_the_compiled_program():
    assert products_asked_for("blocks", never_told) >= products_asked_for(None, never_told) + 3


@pytest.mark.backends("torch")
@pytest.mark.parametrize("door", ["fit", "step"])
def test_a_model_whose_call_takes_no_training_is_computed_again_op_by_op(door, monkeypatch):
    runs = []
    call = Block.call
    monkeypatch.setattr(Block, "call", lambda self, x, training=None: (runs.append(self), call(self, x, training))[1])

    def trained(remat):
        model = never_told()
        if door == "step":
            step = mpkeras.make_train_step(model, keras.optimizers.SGD(1e-3), "mse", remat=remat)
        else:
            model.compile(keras.optimizers.SGD(1e-3), "mse")
            step = mpkeras.prepare(model, "float32", remat=remat).train_on_batch
        runs.clear()
        for _ in range(2):
            step(ROWS, TARGETS)
        return len(runs), [keras.ops.convert_to_numpy(weight.value) for weight in model.weights]

    (runs_with, with_remat), (runs_without, without) = trained("blocks"), trained(None)
    # Three blocks in each of two steps.
    assert runs_with == runs_without + 6
    for got, expected in zip(with_remat, without, strict=True):
        np.testing.assert_array_equal(got, expected)


class ChangesInPlace(layers.Layer):
    """Adds its bias to the product itself, as tensors of torch let `+=` do."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")
        self.bias = self.add_weight(shape=(shape[-1],), initializer="ones", name="bias")

    def call(self, x):
        product = ops.matmul(x, self.kernel)
        product += self.bias
        return ops.tanh(product)


class SlopePenalty(keras.Model):
    """Its loss holds a gradient, whose own gradient goes through the model once more."""

    def train_step(self, data):
        import torch

        x, y = data
        x = x.clone().requires_grad_(True)
        outputs = self(x, training=True)
        (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        loss = self.compute_loss(x, y, outputs) + (slopes**2).mean()
        self.zero_grad()
        self.optimizer.scale_loss(loss).backward()
        variables = self.trainable_variables
        self.optimizer.apply([variable.value.grad for variable in variables], variables)
        return {"loss": loss}


@pytest.mark.backends("torch")
@pytest.mark.parametrize("layer, kind", [(ChangesInPlace, keras.Model), (layers.GRU, keras.Model),
                                         (ChangesInPlace, SlopePenalty)])  # fmt: skip
def test_products_are_kept_of_what_is_changed_in_place_or_differentiated_twice(layer, kind):
    def losses(remat):
        keras.utils.set_random_seed(4)
        options = {"return_sequences": True, "units": 16} if layer is layers.GRU else {}
        x = inputs = keras.Input((5, 16))
        for _ in range(3):
            x = layers.Add()([x, layer(**options)(x)])
        model = kind(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse")
        mpkeras.prepare(model, "float32", remat=remat)
        x = np.stack(5 * [ROWS], axis=1)
        return model.fit(x, x[..., :1], batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"]

    np.testing.assert_allclose(losses("products"), losses(None), rtol=1e-6)


class Stack(keras.Model):
    """Subclassed: eight blocks, and little else."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = [Block(64) for _ in range(8)], layers.Dense(1)

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


def stack_in_a_graph():
    x = inputs = keras.Input((64,))
    for _ in range(8):
        h = layers.Dense(64)(layers.Dense(256, "gelu")(layers.LayerNormalization()(x)))
        x = layers.Add()([x, layers.Dropout(0.1)(h)])
    return keras.Model(inputs, layers.Dense(1)(x))


@pytest.mark.backends("torch")
@pytest.mark.parametrize("make, most", [(stack_in_a_graph, 0.3), (Stack, 0.48)], ids=["graph", "subclassed"])
def test_less_is_held_on_torch_while_python_collects_no_garbage(make, most):
    """`keras.tree` leaves tensors in cycles of references, which garbage collection alone frees."""
    import torch

    x = RNG.normal(size=(2048, 64)).astype("float32")

    def most_bytes(remat):
        keras.utils.set_random_seed(3)
        step = mpkeras.make_train_step(make(), "sgd", "mse", remat=remat)
        step(x, x[:, :1])
        gc.collect()
        gc.disable()
        try:
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
                step(x, x[:, :1])
        finally:
            gc.enable()
        sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        return np.cumsum(sizes).max()

    assert most_bytes("blocks") < most * most_bytes(None)


class Watched(Block):
    """Remembers what it returns, without holding it."""

    returned: list = []

    def call(self, x, training=None):
        outputs = super().call(x, training=training)
        self.returned.append(weakref.ref(outputs))
        return outputs


@pytest.mark.backends("torch")
def test_what_is_never_differentiated_is_let_go():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((16,)), Watched(), Watched(), layers.Dense(1)])
    mpkeras.apply_policy(model, mpkeras.Policy("float32", remat="blocks"))
    Watched.returned.clear()
    assert model(ops.convert_to_tensor(ROWS), training=True).requires_grad
    gc.collect()
    assert [outputs() for outputs in Watched.returned] == [None, None]


OF_A_GRAPH = {("_run_through_graph", "again")}


def replaced_on(model):
    kinds = {(entry.name, entry.kind) for layer in model._flatten_layers() for entry in replaced_attributes(layer)}
    return {pair for pair in kinds if pair[1] == "again"}


@pytest.mark.slow
def test_what_is_computed_again_is_named_and_taken_back_by_a_policy_without():
    def parts(model, remat):
        mpkeras.apply_policy(model, mpkeras.Policy("mixed_bfloat16", remat=remat))
        report = mpkeras.audit(model)
        assert report.to_dict()["computed_again"] == [list(part) for part in report.computed_again]
        assert bool(replaced_on(model)) == bool(report.computed_again) == ("Computed again" in str(report))
        return report

    # What comes before the first block, and three blocks; the last part keeps everything.
    graph, model = chain(), made("subclassed")
    report = parts(graph, "blocks")
    assert report.computed_again == [(f"counted_{n}", f"end_{n}") for n in range(3)]
    text = "Computed again in the backward pass: 3 parts: counted_0 to end_0, counted_1 to end_1, counted_2 to end_2."
    assert text in str(report)
    assert parts(graph, ["path:end_1"]).computed_again == [("counted_0", "end_1")]
    assert parts(model, "blocks").computed_again == [(block.path, block.path) for block in model.blocks]
    assert parts(graph, None).computed_again == parts(model, None).computed_again == []
    # Keras gives no path to layers that have no `build`.
    x = inputs = keras.Input((16,))
    for number in range(4):
        x = layers.Dropout(0.1, name=f"dropped_{number}")(layers.Dense(16, name=f"dense_{number}")(x))
    dropping = keras.Model(inputs, layers.Dense(1)(x))
    assert parts(dropping, "blocks").computed_again == [(f"dense_{n}", f"dropped_{n}") for n in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["global policy", "callback"])
def test_it_belongs_to_the_policy_and_holds_after_compile(door):
    callbacks = []
    if door == "callback":
        model = dense_stack()
        callbacks = [mpkeras.callbacks.MixedPrecision("mixed_bfloat16", remat="blocks")]
    else:
        with mpkeras.policy_scope(mpkeras.Policy("mixed_bfloat16", remat="blocks")):
            model = dense_stack()
            model.compile("sgd", "mse")
        assert replaced_on(model) == OF_A_GRAPH
    model.compile("adam", "mse")
    model.fit(ROWS, TARGETS, verbose=0, callbacks=callbacks)
    assert replaced_on(model) == OF_A_GRAPH


@pytest.mark.slow
def test_predictions_are_those_of_the_model_without(tmp_path):
    model = made("masked")
    expected = model.predict(TOKENS, verbose=0)
    mpkeras.apply_policy(model, mpkeras.Policy("float32", remat="blocks"))
    np.testing.assert_array_equal(model.predict(TOKENS, verbose=0), expected)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(TOKENS, verbose=0), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remat, written", [("blocks", "blocks"), (["path:end_1"], ["path:end_1"]), ("end_1", None)])
def test_a_file_holds_it_and_prepare_gives_it_back(tmp_path, remat, written):
    model = dense_stack()
    # A layer is written as its path.
    kept = [model.get_layer(remat)] if written is None else remat
    saved_with(model, "prepare", kept, tmp_path / "model.keras")
    extra = keras.saving.serialize_keras_object(model.optimizer)["config"]["inner_optimizer"]["mpkeras"]
    assert extra["remat"] == written if written else extra["remat"][0].startswith("path:")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert not replaced_on(loaded)
    mpkeras.prepare(loaded)
    assert replaced_on(loaded) == OF_A_GRAPH
    assert mpkeras.audit(loaded).computed_again == mpkeras.audit(model).computed_again
    loaded.compile("sgd", "mse")
    assert replaced_on(loaded)
    # A policy that is named says all, in files that are written from then on, too.
    for policy in ("mixed_bfloat16", None):
        mpkeras.prepare(loaded, policy)
        assert not replaced_on(loaded)
    loaded.train_on_batch(ROWS, TARGETS)
    loaded.save(tmp_path / "without.keras")
    assert not replaced_on(loaded_through("prepare", tmp_path / "without.keras"))


def dense_stack(shape=(16,)):
    keras.utils.set_random_seed(5)
    x = inputs = keras.Input(shape)
    for number in range(3):
        x = layers.Add(name=f"end_{number}")([x, layers.Dense(16, "relu")(x)])
    return keras.Model(inputs, layers.Dense(1)(x))


def saved_with(model, door, remat, path):
    if door == "prepare":
        model.compile("sgd", "mse")
        mpkeras.prepare(model, "mixed_bfloat16", remat=remat)
        model.train_on_batch(ROWS, TARGETS)
    else:
        mpkeras.apply_policy(model, "mixed_bfloat16")
        model.compile(mpkeras.LossScaleOptimizer("sgd"), "mse")
        step = mpkeras.make_train_step(model, model.optimizer, "mse", remat=remat)
        step(ROWS, TARGETS)
        assert step.optimizer is model.optimizer
    model.save(path)


def loaded_through(door, path, policy=None):
    """Returns the model of a file, made ready to train."""
    if door in ("autoprepare", "global policy"):
        with mpkeras.autoprepare() if door == "autoprepare" else mpkeras.policy_scope("mixed_bfloat16"):
            return keras.saving.load_model(path)
    model = keras.saving.load_model(path)
    if door == "prepare":
        mpkeras.prepare(model, policy)
    elif door == "callback":
        model.fit(ROWS, TARGETS, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    else:
        if policy is not None:
            mpkeras.apply_policy(model, policy)
        mpkeras.make_train_step(model, model.optimizer, "mse")(ROWS, TARGETS)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("door", ["prepare", "callback", "step", "autoprepare", "global policy"])
@pytest.mark.parametrize("saved_by", ["prepare", "step"])
def test_every_door_gives_back_what_a_file_holds(tmp_path, saved_by, door):
    model = dense_stack()
    saved_with(model, saved_by, ["path:end_1"], tmp_path / "model.keras")
    loaded = loaded_through(door, tmp_path / "model.keras")
    assert replaced_on(loaded) == OF_A_GRAPH
    assert mpkeras.audit(loaded).computed_again == mpkeras.audit(model).computed_again != []
    # And a file of that model once more, which another door reads.
    loaded.train_on_batch(ROWS, TARGETS)
    loaded.save(tmp_path / "again.keras")
    assert replaced_on(loaded_through("callback", tmp_path / "again.keras"))


@pytest.mark.slow
def test_layers_of_a_sequential_model_are_found_in_its_file(tmp_path):
    """Whose paths begin with the name of the model, and in a model from a file do not."""
    hidden = [layers.Dense(16, "relu", name=f"hidden_{number}") for number in range(3)]
    model = keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(1)], name="net")
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "float32", remat=[hidden[0], hidden[1]])
    model.train_on_batch(ROWS, TARGETS)
    model.save(tmp_path / "model.keras")
    loaded = mpkeras.prepare(keras.saving.load_model(tmp_path / "model.keras"))
    parts = [[path.rsplit("/")[-1] for path in part] for part in mpkeras.audit(loaded).computed_again]
    assert parts == [["hidden_0", "hidden_0"], ["hidden_1", "hidden_1"]]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["callback", "step"])
def test_a_policy_that_is_named_says_all(tmp_path, door):
    saved_with(dense_stack(), "prepare", "blocks", tmp_path / "model.keras")
    assert not replaced_on(loaded_through(door, tmp_path / "model.keras", "mixed_bfloat16"))


@pytest.mark.parametrize(
    "make, remat, words",
    [
        (lambda: dense_stack(), ["path:nowhere"], r"matches none.*'blocks'"),
        (lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1)]), "blocks", "repeated blocks.*none were found"),
    ],
    ids=["a rule that matches nothing", "no blocks"],
)
def test_what_names_nothing_is_refused_and_nothing_is_changed(make, remat, words):
    model = make()
    model.compile("sgd", "mse")
    optimizer, dtypes = model.optimizer, [layer.dtype_policy for layer in model.layers]
    with pytest.raises(ValueError, match=words):
        mpkeras.prepare(model, "mixed_float16", remat=remat)
    assert model.optimizer is optimizer and [layer.dtype_policy for layer in model.layers] == dtypes
    assert not replaced_on(model) and not replaced_attributes(model)


def funnel():
    """A U-Net in small: nothing in it repeats."""
    x = inputs = keras.Input((12, 12, 3))
    skip = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same", name="down")(x)))
    x = layers.Dropout(0.2)(layers.DepthwiseConv2D(3, 2, padding="same")(skip))
    x = layers.Concatenate()([layers.Conv2DTranspose(4, 2, 2, activation="gelu")(x), skip])
    return keras.Model(inputs, layers.Conv2D(1, 1, name="head")(layers.LayerNormalization(name="last")(x)))


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_a_graph_without_blocks_is_cut_before_its_last_product():
    assert [(a, b.rpartition("/")[2]) for a, b in named_parts(Survey(funnel()), "products")] == [("down", "last")]

    def losses(remat):
        keras.utils.set_random_seed(7)
        model = funnel()
        model.compile("adam", "mse")
        mpkeras.prepare(model, "float32", remat=remat)
        return [float(model.train_on_batch(IMAGES, IMAGES[..., :1])) for _ in range(4)]

    np.testing.assert_allclose(losses("products"), losses(None), rtol=1e-6)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_rule_that_names_nothing_beside_one_that_does_is_named(policy):
    model = dense_stack()
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="each rule of `remat`.*'path:end_9', which matches none.*") as told:
        mpkeras.prepare(model, policy, remat=["path:end_1", "path:end_9"])
    assert len(told) == 1 and replaced_on(model) == OF_A_GRAPH


@pytest.mark.backends("tensorflow")
def test_tensorflow_says_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"Functional or Sequential.*Use remat='blocks'"):
        mpkeras.make_train_step(made("subclassed"), "sgd", "mse", remat="products")
    x = inputs = keras.Input((16,))
    for number in range(3):
        x = layers.Add()([x, layers.Dense(16, activity_regularizer="l2", name=f"penalized_{number}")(x)])
    step = mpkeras.make_train_step(keras.Model(inputs, layers.Dense(1)(x)), "sgd", "mse", remat="blocks")
    with pytest.raises(ValueError, match="adds a loss.*penalized"):
        step(ROWS, TARGETS)
    x = inputs = keras.Input((16,))
    for number in range(3):
        x = layers.ActivityRegularization(l2=0.1, name=f"penalty_{number}")(layers.Dense(16)(x))
    step = mpkeras.make_train_step(keras.Model(inputs, layers.Dense(1)(x)), "sgd", "mse", remat="blocks")
    with pytest.raises(ValueError, match="adds a loss.*'penalty_0'"):
        step(ROWS, TARGETS)
    # Each step of the second loop would draw the mask of the first step.
    stack = [layers.RNN(DrawingCell(6), return_sequences=True, name=name) for name in ("first", "second", "third")]
    model = keras.Sequential([keras.Input((5, 16)), *stack, layers.Dense(1)])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "float32", remat="blocks")
    with pytest.raises(ValueError, match="a loop in which a layer draws.*'sequential.*/first', in whose cell '.*mask'"):
        model.train_on_batch(np.stack(5 * [ROWS], axis=1), TARGETS[:, None])


class Remembering(layers.Layer):
    """Leaves behind how large its product was."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1])
        self.inner.build(shape)

    def call(self, x):
        product = self.inner(x)
        self.energy = ops.mean(ops.square(product))
        return x + product


@pytest.mark.slow
@SKIPS
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize("factor", [0.0, 2.0], ids=["looked at", "in the loss"])
@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
def test_a_tensor_left_on_a_layer_has_a_gradient_or_an_error(factor, run_eagerly):
    class Heated(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            self.seen = [layer.energy for layer in self.layers if isinstance(layer, Remembering)]
            return super().compute_loss(x, y, y_pred) + (factor * sum(self.seen) if factor else 0.0)

    def losses(remat):
        keras.utils.set_random_seed(2)
        x = inputs = keras.Input((16,))
        for _ in range(3):
            x = Remembering()(x)
        model = Heated(inputs, layers.Dense(1)(x))
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        mpkeras.prepare(model, "float32", remat=remat)
        return model.fit(ROWS, TARGETS, batch_size=8, shuffle=False, verbose=0).history["loss"]

    if BACKEND == "tensorflow" and factor:
        with pytest.raises(ValueError, match="attribute 'energy' of .*remembering"):
            losses("blocks")
    else:
        np.testing.assert_allclose(losses("blocks"), losses(None), rtol=1e-5)


@pytest.mark.backends("jax", "torch")
def test_losses_that_layers_add_count():
    def losses(remat):
        keras.utils.set_random_seed(3)
        x = inputs = keras.Input((16,))
        for _ in range(3):
            x = layers.Add()([x, layers.Dense(16, activity_regularizer="l2")(x)])
        step = mpkeras.make_train_step(keras.Model(inputs, layers.Dense(1)(x)), "sgd", "mse", remat=remat)
        return [float(step(ROWS, TARGETS)["loss"]) for _ in range(4)]

    np.testing.assert_allclose(losses("blocks"), losses(None), rtol=1e-5)


class Penalized(layers.Layer):
    """A block in which a layer adds a loss."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activity_regularizer=keras.regularizers.L1(0.3), name="inner")
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(x)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Penalized, lambda: keras.Sequential([Penalized()])], ids=["a layer", "a model"])
def test_losses_of_layers_inside_of_blocks_count_or_are_refused(make, backend):
    def losses(remat):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((16,)), make(), make(), make(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-2), "mse")
        mpkeras.prepare(model, "float32", remat=remat)
        fitted = model.fit(ROWS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return fitted.history["loss"]

    plain = losses(None)
    # Most of the loss is what the layers add.
    assert plain[0] > 4
    if backend == "tensorflow":
        with pytest.raises(ValueError, match="adds a loss.*/inner'"):
            losses("blocks")
    else:
        np.testing.assert_allclose(losses("blocks"), plain, rtol=1e-5)
    if backend == "jax":
        np.testing.assert_allclose(losses("products"), plain, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.backends("torch")
@pytest.mark.parametrize("remat", ["blocks", "products"])
def test_buffers_of_torch_move_once(remat):
    import torch

    class Normalized(layers.Layer):
        """Holds a torch module with buffers, and one of its own, which it counts in and computes with."""

        def __init__(self):
            super().__init__()
            self.inner = layers.TorchModuleWrapper(
                torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16, momentum=0.3))
            )
            self.register_buffer("seen", torch.zeros(()))

        def call(self, x, training=False):
            self.seen.add_(1.0)
            return x + self.inner(x, training=training) / (1 + self.seen)

    def trained(remat):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((16,)), *(Normalized() for _ in range(3)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-2), "mse")
        mpkeras.prepare(model, "float32", remat=remat)
        fitted = model.fit(ROWS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return fitted.history["loss"], [b.clone() for layer in model.layers for b in layer.buffers()]

    (losses, buffers), (plain_losses, plain_buffers) = trained(remat), trained(None)
    assert losses == plain_losses
    assert len(buffers) == 3 * 4 and all(map(torch.equal, buffers, plain_buffers))


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=["graph", "eager", "xla"])
def test_variables_of_tensorflow_move_once(options):
    import tensorflow as tf

    class Counted(layers.Layer):
        """Counts in a variable that is none of Keras', and computes with it."""

        def build(self, shape):
            self.inner = layers.Dense(shape[-1])
            self.inner.build(shape)
            self.seen = tf.Variable(0.0, trainable=False)

        def call(self, x):
            self.seen.assign_add(1.0)
            return x + self.inner(x) / (1 + self.seen)

    def trained(remat):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((16,)), *(Counted() for _ in range(3)), layers.Dense(1)])
        for layer in model.layers[:3]:
            layer.seen.assign(0.0)
        model.compile(keras.optimizers.SGD(1e-2), "mse", **options)
        mpkeras.prepare(model, "float32", remat=remat)
        fitted = model.fit(ROWS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return fitted.history["loss"], [float(layer.seen) for layer in model.layers[:3]]

    (losses, seen), (plain_losses, plain_seen) = trained("blocks"), trained(None)
    assert seen == plain_seen
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)


@pytest.mark.backends("tensorflow")
def test_gradients_of_tables_stay_sparse():
    import tensorflow as tf

    tokens = keras.Input((10,), dtype="int32")
    model = keras.Model(tokens, dense_stack((10, 16))(layers.Embedding(30, 16)(tokens)))
    mpkeras.apply_policy(model, mpkeras.Policy("float32", remat="blocks"))
    assert replaced_on(model) == OF_A_GRAPH
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(TOKENS, training=True))
    assert isinstance(tape.gradient(loss, model.layers[1].embeddings.value), tf.IndexedSlices)


def test_trace_numerics_sees_what_the_layers_compute():
    """Nothing but results can be carried out of a part that is computed again."""
    model = dense_stack()
    model.compile("sgd", "mse")
    plain = mpkeras.trace_numerics(model, ROWS[:8], TARGETS[:8]).to_dict()
    mpkeras.apply_policy(model, mpkeras.Policy("float32", remat="blocks"))
    again = mpkeras.trace_numerics(model, ROWS[:8], TARGETS[:8]).to_dict()
    assert [row["path"] for row in again["layers"]] == [row["path"] for row in plain["layers"]]
    assert replaced_on(model)


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("name, policy", [("residual", "mixed_float16"), ("recurrent", "float32")])
@pytest.mark.parametrize("door", ["fit", "step"])
def test_a_kept_step_computes_again_and_has_the_same_bits(name, policy, door, tmp_path):
    if door == "fit":
        box = mpkeras.callbacks.BlackBox(tmp_path)
        model = trained(name, policy, "blocks", [box], np.inf)[1]
        path = box.capsules[0]
    else:
        model = mpkeras.apply_policy(made(name), policy)
        step = mpkeras.make_train_step(model, keras.optimizers.SGD(1e-2), "mse", remat="blocks")
        x, path = MODELS[name][1], tmp_path / "step.mpk"
        step(x[:8], TARGETS[:8])
        assert bool(step(x[8:16], np.full_like(TARGETS[8:16], np.inf))["skipped"])
        step.capsule(path)
    capsule = mpkeras.load_capsule(path)
    assert capsule.run()["same_bits"] and capsule.first_operation().where == "y"
    # Paths may be others: Keras numbers operations, and leaves out the names of Sequential models.
    of_capsule, of_model = (mpkeras.audit(each).computed_again for each in (capsule.model, model))
    assert len(of_capsule) == len(of_model) > 0
    assert replaced_on(capsule.model) == replaced_on(model)


def test_after_a_look_the_parts_are_computed_again():
    model = mpkeras.apply_policy(dense_stack(), mpkeras.Policy("mixed_bfloat16", remat="blocks"))
    with pytest.raises(KeyError), ModelView(model).seen_through():
        assert not replaced_on(model)
        raise KeyError
    assert replaced_on(model) == OF_A_GRAPH
