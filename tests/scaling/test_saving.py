"""Files and copies of a compiled model: stock where they can be, and with a word where the guard is not in them."""

import copy
import functools
import pickle
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.scaling import files
from mpkeras.scaling.optimizer import LossScaleOptimizer
from tests.cases import first_quick
from tests.step_modes import snapshot

rng = np.random.default_rng(5)
X = rng.normal(size=(8, 6)).astype("float32")
Y = rng.normal(size=(8, 2)).astype("float32")
SCALED = {"policy": "mixed_float16", "loss_scale": 256.0}
LOST = "comes from a model whose train step was guarded.*mpkeras.prepare"


def compiled(optimizer="adam"):
    layers = [keras.Input((6,)), keras.layers.Dense(5, activation="relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    # Quick to start; what is saved and said is the same.
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def prepared(**options):
    model = mpkeras.prepare(compiled(), **SCALED, **options)
    model.train_on_batch(X, Y)
    return model


# ------------------------------------------------------------------------------ what plain Keras finds in a file


def every_option_set():
    inner = keras.optimizers.Adam(0.25, beta_1=0.5, gradient_accumulation_steps=3)
    rule = DynamicLossScale(4.0, 4.0, 0.25, 3, 0.5, 64.0, 2)
    return LossScaleOptimizer(inner, loss_scale=rule, name="mine", on_overflow="drop_window")


def as_if_unknown(config):
    """The config with a name that nobody has registered, as ours is where mpkeras is not installed."""
    # A copy: Keras' `from_config` empties what it is given.
    return {**copy.deepcopy(config), "registered_name": config["registered_name"].replace("mpkeras>", "nobody>")}


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("make", "initial_scale", "growth"),
    [
        pytest.param(lambda: LossScaleOptimizer("sgd", 8.0, 7), 8.0, 7, id="stock settings"),
        pytest.param(every_option_set, 4.0, 3, id="bounds and factors"),
        # It compares with `==` the step before: never, and no number that int32 does not hold.
        pytest.param(lambda: LossScaleOptimizer("sgd", loss_scale=16.0), 16.0, 2**31 - 1, id="fixed"),
        pytest.param(lambda: LossScaleOptimizer("sgd", 8.0, 10**10), 8.0, 2**31 - 1, id="beyond int32"),
    ],
)
def test_plain_keras_makes_its_own_optimizer_of_the_config(make, initial_scale, growth):
    optimizer = make()
    config = keras.saving.serialize_keras_object(optimizer)
    before = copy.deepcopy(config)
    stock = keras.saving.deserialize_keras_object(as_if_unknown(config))
    assert type(stock) is keras.optimizers.LossScaleOptimizer
    assert (stock.initial_scale, stock.dynamic_growth_steps) == (initial_scale, growth)
    assert stock.name == optimizer.name
    assert type(stock.inner_optimizer) is type(optimizer.inner_optimizer)
    ours = keras.saving.deserialize_keras_object(config)
    assert type(ours) is LossScaleOptimizer and ours.name == optimizer.name
    assert ours.get_config() == optimizer.get_config() and ours.loss_scale_rule == optimizer.loss_scale_rule
    assert ours.inner_optimizer.get_config() == optimizer.inner_optimizer.get_config()
    assert type(keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))) is LossScaleOptimizer
    LossScaleOptimizer.from_config(config["config"])
    assert config == before


def written_on_torch(config):
    """The config of optimizers as Keras writes it on torch: by the names of classes that are there alone."""
    if isinstance(config, list):
        return [written_on_torch(value) for value in config]
    if not isinstance(config, dict):
        return config
    config = {key: written_on_torch(value) for key, value in config.items()}
    name = config.get("class_name")
    if name in ("Nadam", "RMSprop"):
        config |= {"module": f"keras.src.backend.torch.optimizers.torch_{name.lower()}", "registered_name": name}
    return config


def one_optimizer():
    return keras.optimizers.RMSprop(0.125, momentum=0.5)


def two_optimizers():
    two = keras.optimizers.OptimizerMap(keras.optimizers.Nadam(0.5))
    two["last"] = one_optimizer()
    return keras.optimizers.MultiOptimizer(two)


@pytest.mark.parametrize(
    "make",
    [
        one_optimizer,
        pytest.param(
            two_optimizers,
            marks=pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="not in this Keras"),
        ),
    ],
)
def test_what_was_written_on_torch_trains_on_every_backend(make):
    first = LossScaleOptimizer(make(), loss_scale=None)
    config = keras.saving.serialize_keras_object(first)
    assert "keras.src.backend" not in str(config)
    again = keras.saving.deserialize_keras_object(written_on_torch(config))
    weights = []
    for optimizer in (first, again):
        weights.append([keras.Variable([1.0, 2.0], name=name) for name in ("first", "last")])
        optimizer.apply([keras.ops.ones(2)] * 2, weights[-1])
    assert snapshot(weights[0]) == snapshot(weights[1])


def test_a_class_that_extends_ours_is_saved_under_its_own_name():
    @keras.saving.register_keras_serializable("tests")
    class Extended(LossScaleOptimizer):
        pass

    config = keras.saving.serialize_keras_object(Extended("sgd"))
    assert (config["module"], config["registered_name"]) == (__name__, "tests>Extended")
    assert type(keras.saving.deserialize_keras_object(config)) is Extended


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (DynamicLossScale(4.0, 4.0, 0.25, 3, 0.5, 64.0, 2), {}),
        (FixedLossScale(1.0), {"chosen_by_prepare": True}),
        (FixedLossScale(64.0), {"on_overflow": "drop_window"}),
    ],
)
def test_configs_of_an_earlier_version_load(rule, options):
    """0.1.0 wrote what only it knew beside stock Keras' keys."""
    inner = keras.optimizers.serialize(
        keras.optimizers.SGD(0.5, gradient_accumulation_steps=2 if "on_overflow" in options else None)
    )
    config = {
        "module": "mpkeras.scaling.optimizer",
        "class_name": "LossScaleOptimizer",
        "config": {
            "name": "mine",
            "inner_optimizer": inner,
            "loss_scale": keras.saving.serialize_keras_object(rule),
            **options,
        },
        "registered_name": "mpkeras>LossScaleOptimizer",
    }
    loaded = keras.saving.deserialize_keras_object(config)
    assert type(loaded) is LossScaleOptimizer
    assert loaded.loss_scale_rule == rule
    assert loaded.record.rule_is_chosen_by_prepare == options.get("chosen_by_prepare", False)
    assert (loaded.window and loaded.window.on_overflow) == options.get("on_overflow")


def lasting_variables(optimizer) -> list:
    """All but the flags of the step that is under way: they are `False` between steps."""
    of_step = {id(flag) for flag in optimizer.step_outcome}
    return [variable for variable in optimizer.variables if id(variable) not in of_step]


FLAGS = ("last_step_skipped", "skipped_in_step", "accepted_in_step", "window_overflowed")


def as_once(variable):
    """The value of a variable as versions stored it in which flags were bools."""
    return variable.numpy().astype(bool) if variable.name in FLAGS else variable.numpy()


def built(optimizer=None):
    model = compiled(every_option_set() if optimizer is None else optimizer)
    model.optimizer.build(model.trainable_variables)
    return model


def away_from_defaults(optimizer=None):
    model = built(optimizer)
    for i, variable in enumerate(model.optimizer.variables):
        value = 1 if variable.name in FLAGS else i + 2
        variable.assign(keras.ops.full(variable.shape, value, dtype=variable.dtype))
    return model


@pytest.mark.parametrize("written_by", first_quick(["this version", "before the scale had a name", "0.1.0"]))
@pytest.mark.parametrize("file_name", first_quick(["model.keras", "model.weights.h5"]))
def test_files_hold_every_variable(file_name, written_by, tmp_path, monkeypatch):
    model = away_from_defaults()
    if written_by == "0.1.0":
        # All variables in one group, in our order, as the base class of all optimizers writes them.
        def save_own_variables(self, store):
            for i, variable in enumerate(lasting_variables(self)):
                store[str(i)] = as_once(variable)

        monkeypatch.setattr(LossScaleOptimizer, "save_own_variables", save_own_variables)
        del model.optimizer.__dict__["_saved_beside"]
    if written_by == "before the scale had a name":
        named = model.optimizer._variables_beside()
        del named["step_counter"], named["dynamic_scale"]
        as_saved = {name: SimpleNamespace(numpy=functools.partial(as_once, v)) for name, v in named.items()}
        monkeypatch.setitem(model.optimizer.__dict__, "_variables_beside", lambda: as_saved)
    (model.save if file_name.endswith(".keras") else model.save_weights)(tmp_path / file_name)
    if file_name.endswith(".keras"):
        loaded = keras.saving.load_model(tmp_path / file_name)
    else:
        loaded = built()
        loaded.load_weights(tmp_path / file_name)
    assert type(loaded.optimizer) is LossScaleOptimizer
    assert snapshot(lasting_variables(loaded.optimizer)) == snapshot(lasting_variables(model.optimizer))
    assert loaded.optimizer.window.on_overflow == "drop_window"


def test_no_variable_is_a_bool_and_state_dictionaries_with_bools_load():
    """Keras' `OrbaxCheckpoint` stores no bools."""
    model = away_from_defaults()
    assert not [variable.path for variable in model.optimizer.variables if variable.dtype == "bool"]
    state = mpkeras.state_dict(model)
    flags = {name for name in state if name.endswith(FLAGS)}
    assert len(flags) == 2
    old = {name: array.astype(bool) if name in flags else array for name, array in state.items()}
    other = built()
    mpkeras.load_state_dict(other, old)
    assert snapshot(lasting_variables(other.optimizer)) == snapshot(lasting_variables(model.optimizer))
    assert bool(other.optimizer.last_step_skipped) is True
    assert keras.backend.standardize_dtype(other.optimizer.last_step_skipped.dtype) == "bool"


def test_what_only_we_know_is_found_by_name(tmp_path):
    """Around another inner optimizer, with another window and another rule: what both have is loaded."""
    model = away_from_defaults()
    model.save_weights(tmp_path / "model.weights.h5")
    rule = DynamicLossScale(8.0, max_scale=2.0**20)
    other = built(LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=rule))
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        other.load_weights(tmp_path / "model.weights.h5")
    for name in ("dynamic_scale", "step_counter", "skipped_steps", "consecutive_skips", "nonfinite_losses"):
        found, expected = getattr(other.optimizer, name), getattr(model.optimizer, name)
        assert snapshot([found]) == snapshot([expected]), name
    assert int(other.optimizer.iterations) == 0


def test_weights_files_give_stock_keras_its_optimizer_state(tmp_path):
    """Without a warning: they are errors here."""
    model = away_from_defaults(LossScaleOptimizer(keras.optimizers.Adam(0.25), 256.0))
    model.save_weights(tmp_path / "model.weights.h5")
    stock = built(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.25), 256.0))
    stock.load_weights(tmp_path / "model.weights.h5")
    ours, theirs = model.optimizer, stock.optimizer
    assert snapshot([theirs.dynamic_scale, theirs.step_counter]) == snapshot([ours.dynamic_scale, ours.step_counter])
    assert snapshot(theirs.inner_optimizer.variables) == snapshot(ours.inner_optimizer.variables)


def numbering_all(optimizer, store):
    """As earlier versions did, what is no state included."""
    for i, variable in enumerate([*files.stock_variables(optimizer), *optimizer.inner_optimizer.variables]):
        store[str(i)] = variable.numpy()


def adafactor():
    return keras.optimizers.Adafactor(0.25)


@pytest.mark.parametrize(
    ("written", "read"),
    first_quick(
        [
            pytest.param(LossScaleOptimizer, LossScaleOptimizer, id="ours"),
            pytest.param(LossScaleOptimizer, keras.optimizers.LossScaleOptimizer, id="ours in stock Keras"),
            pytest.param(keras.optimizers.LossScaleOptimizer, LossScaleOptimizer, id="stock Keras'"),
            pytest.param(None, LossScaleOptimizer, id="a plain one"),
            pytest.param("earlier", LossScaleOptimizer, id="an earlier version's"),
        ]
    ),
)
def test_files_of_adafactor_go_both_ways(written, read, tmp_path, monkeypatch):
    """Keras numbers zeros for its biases in a plain one, and none in its wrapper. A warning is an error here."""
    if written == "earlier":
        monkeypatch.setattr(LossScaleOptimizer, "save_own_variables", numbering_all)
        written = LossScaleOptimizer
    model = compiled(adafactor() if written is None else written(adafactor()))
    model.optimizer.build(model.trainable_variables)
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    state = [v for v in inner.variables if v.name.endswith("velocity") or v.name == "iteration"]
    for i, variable in enumerate(state):
        variable.assign(keras.ops.full(variable.shape, i + 3, dtype=variable.dtype))
    for _ in range(2):
        model.save_weights(tmp_path / "model.weights.h5")
    other = built(read(adafactor()))
    for _ in range(2):
        other.load_weights(tmp_path / "model.weights.h5")
    found = other.optimizer.inner_optimizer.variables
    found = [v for v in found if v.name.endswith("velocity") or v.name == "iteration"]
    assert len(found) == 7 and snapshot(found) == snapshot(state)


def test_a_file_of_an_optimizer_that_is_not_built_loads_into_another():
    optimizer, other = (LossScaleOptimizer("sgd", 8.0) for _ in range(2))
    optimizer.save_own_variables(store := {})
    other.skipped_steps.assign(3)
    other.load_own_variables(store)
    assert int(other.skipped_steps) == 0


# Keras says so of the inner optimizer, too.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer 'adam:UserWarning")
@pytest.mark.parametrize("layers", [1, 2])
def test_weights_load_where_the_optimizer_is_not_built_and_a_warning_says_what_is_not_loaded(layers, tmp_path):
    """Files number 10 arrays of one layer, as many as an optimizer has that is not built; 14 of two.

    Where it was as many, they were assigned by number, which failed.
    """

    def new_model():
        model = keras.Sequential([keras.Input((3,)), *[keras.layers.Dense(3) for _ in range(layers)]])
        model.compile(LossScaleOptimizer("adam", 8.0), "mse")
        return model

    model, other = new_model(), new_model()
    model.optimizer.build(model.trainable_variables)
    model.optimizer.inner_optimizer.iterations.assign(3)
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.warns(UserWarning, match="Skipping variable loading.*it has 4 variables.*optimizer.build"):
        other.load_weights(tmp_path / "model.weights.h5")
    assert snapshot(other.variables) == snapshot(model.variables)
    assert int(other.optimizer.iterations) == 0


@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning")
def test_an_optimizer_whose_state_is_not_loaded_trains_as_a_new_one(tmp_path):
    """Its window of three steps begins anew, and its first batch is taken again until the scale fits."""

    def new_model():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(1e-6, gradient_accumulation_steps=3), "mse", run_eagerly=True)
        return mpkeras.prepare(model, "mixed_float16")

    model = new_model()
    model.fit(X, Y, batch_size=2, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded, new = new_model(), new_model()
    loaded.load_weights(tmp_path / "model.weights.h5")
    new.set_weights(loaded.get_weights())
    # Gradients of all batches are alike, and far beyond float16 at the scale that is guessed.
    x, y = np.ones_like(X), np.full_like(Y, 512.0)
    history, expected = (m.fit(x, y, batch_size=2, shuffle=False, verbose=0).history for m in (loaded, new))
    assert history == expected and history["skipped_steps"] == [0.0]
    assert int(loaded.optimizer.iterations) == 1
    assert snapshot(loaded.variables) == snapshot(new.variables)


@pytest.mark.filterwarnings("ignore:Skipping variable loading:UserWarning", "ignore:A total of 2 objects:UserWarning")
def test_a_new_head_begins_with_a_whole_window(tmp_path):
    def new_model(units):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(units)])
        model.compile(keras.optimizers.SGD(0.25, gradient_accumulation_steps=3), "mse", run_eagerly=True)
        mpkeras.prepare(model, "mixed_bfloat16")
        model.optimizer.build(model.trainable_variables)
        return model

    model, loaded = new_model(2), new_model(3)
    # One batch into the second window.
    model.fit(X, Y, batch_size=2, verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    loaded.load_weights(tmp_path / "model.weights.h5", skip_mismatch=True)
    before = snapshot(loaded.trainable_variables)
    y = np.ones((4, 3), "float32")
    loaded.fit(X[:4], y, batch_size=2, verbose=0)
    assert snapshot(loaded.trainable_variables) == before
    loaded.fit(X[:2], y[:2], verbose=0)
    assert snapshot(loaded.trainable_variables) != before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`:UserWarning")
@pytest.mark.parametrize("layers", range(1, 5))
def test_a_model_that_is_quantized_after_training_loads_whatever_its_number_of_layers(layers, tmp_path):
    """The weights that its optimizer was built on are gone, and with them the place of its state: it is left out."""
    model = keras.Sequential([keras.Input((6,)), *[keras.layers.Dense(4) for _ in range(layers)]])
    model.compile(LossScaleOptimizer("adam", loss_scale=8.0), "mse", run_eagerly=True)
    model.train_on_batch(X, X[:, :4])
    model.quantize("int8")
    model.save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        other = keras.saving.load_model(tmp_path / "model.keras")
    assert snapshot(other.variables) == snapshot(model.variables)


# ------------------------------------------------------------------------------ copies of a guarded model


def loaded(model, tmp_path):
    model.save(tmp_path / "model.keras")
    return keras.saving.load_model(tmp_path / "model.keras")


COPIES = {
    "load_model": loaded,
    "pickle": lambda model, tmp_path: pickle.loads(pickle.dumps(model)),
    "deepcopy": lambda model, tmp_path: copy.deepcopy(model),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_guarded_model_says_at_its_first_step_that_it_is_not_guarded(way, tmp_path):
    """Once, and only where a step is taken; the copy of a copy says it, too."""
    model = COPIES[way](prepared(), tmp_path)
    again = COPIES[way](model, tmp_path)
    with pytest.warns(UserWarning, match=LOST):
        model.fit(X, Y, batch_size=4, verbose=0)
    model.fit(X, Y, batch_size=4, verbose=0)
    with pytest.warns(UserWarning, match=LOST):
        again.train_on_batch(X, Y)


AGAIN = {
    "prepare": lambda model: mpkeras.prepare(model).fit(X, Y, verbose=0),
    "callback": lambda model: model.fit(X, Y, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision()]),
    "our step": lambda model: mpkeras.make_train_step(model, model.optimizer, "mse", jit_compile=False)(X, Y),
    "no rollback, as asked for": lambda model: mpkeras.prepare(model, rollback=False).fit(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", AGAIN)
def test_a_copy_that_is_guarded_again_says_nothing(way):
    AGAIN[way](copy.deepcopy(prepared()))


def test_a_guard_that_is_there_again_puts_a_bad_step_back():
    model = copy.deepcopy(prepared())
    mpkeras.prepare(model)
    before = snapshot(model.variables)
    model.train_on_batch(X * np.inf, Y)
    assert snapshot(model.variables) == before
    assert int(model.optimizer.skipped_steps) == 1


def fitted_with_callback():
    """The guard went when training ended: the copy is what the model is."""
    model = compiled()
    model.fit(X, Y, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(**SCALED)])
    return model


def never_guarded():
    model = compiled(LossScaleOptimizer("adam", 256.0))
    model.train_on_batch(X, Y)
    return model


@pytest.mark.parametrize("make", first_quick([fitted_with_callback, never_guarded, lambda: prepared(rollback=False)]))
def test_a_copy_of_a_model_without_a_guard_says_nothing(make):
    copy.deepcopy(make()).train_on_batch(X, Y)


def test_a_checkpoint_of_a_guarded_fit_says_it(tmp_path):
    """P19: the guard is the callback's, and there while the file is written."""
    model = compiled()
    save = keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras"))
    model.fit(X, Y, verbose=0, callbacks=[save, mpkeras.callbacks.MixedPrecision(**SCALED)])
    with pytest.warns(UserWarning, match=LOST):
        keras.saving.load_model(tmp_path / "model.keras").train_on_batch(X, Y)


def test_a_new_optimizer_in_a_loop_of_ones_own_says_nothing():
    variable = keras.Variable([3.0])
    optimizer = LossScaleOptimizer.from_config(LossScaleOptimizer("sgd").get_config())
    optimizer.scale_loss(keras.ops.array(1.0))
    optimizer.apply([keras.ops.array([1024.0])], [variable])


def decaying(optimizer):
    """A model of two layers whose weights are of ones, compiled."""
    layers = [keras.layers.Dense(3, kernel_initializer="ones", bias_initializer="ones", name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile(optimizer(model), "mse")
    return model


def adamw(**excluded):
    def make(model):
        optimizer = keras.optimizers.AdamW(0.02, weight_decay=2.0)
        lists = {"var_list": [model.layers[0].kernel, model.layers[1].bias]} if "var_list" in excluded else {}
        optimizer.exclude_from_weight_decay(**{**excluded, **lists})
        return optimizer

    return make


def multi(model):
    parts = [keras.optimizers.AdamW(0.02, weight_decay=2.0), keras.optimizers.SGD(0.02, weight_decay=2.0)]
    parts[0].exclude_from_weight_decay(var_names=["bias"])
    parts[1].exclude_from_weight_decay(var_list=[model.layers[1].kernel])
    optimizer_map = keras.optimizers.OptimizerMap(parts[0])
    optimizer_map["b"] = parts[1]
    return keras.optimizers.MultiOptimizer(optimizer_map)


EXCLUDING = [
    pytest.param(adamw(var_names=["ker", "nothing"]), id="by name"),
    pytest.param(adamw(var_list=True), id="as objects"),
    pytest.param(adamw(var_list=True, var_names=["b/bia", "bias"]), id="both"),
    pytest.param(
        multi,
        id="in a MultiOptimizer",
        marks=pytest.mark.skipif(not hasattr(keras.optimizers, "OptimizerMap"), reason="Keras has none"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", EXCLUDING)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16"])
def test_what_does_not_decay_does_not_decay_after_a_file(policy, optimizer, tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
    model = mpkeras.prepare(decaying(optimizer), policy)
    model.train_on_batch(x, np.zeros((8, 3)))
    path = str(tmp_path / "model.keras")
    model.save(path)
    loaded = mpkeras.prepare(keras.saving.load_model(path))
    # Once more, before it has trained; and under another wrapper.
    loaded.save(path)
    loaded = mpkeras.prepare(keras.saving.load_model(path), loss_scale=2.0)
    weights = []
    for one in (model, loaded):
        for _ in range(3):
            one.train_on_batch(x, np.zeros((8, 3)))
        weights.append(snapshot(one.weights))
    assert weights[0] == weights[1]


@pytest.mark.parametrize("is_built", [False, True])
def test_the_configuration_says_what_does_not_decay(is_built):
    def weights():
        return [keras.Variable([1.0], name=name) for name in ("kernel", "bias", "scale")]

    variables, others = weights(), weights()
    inner = keras.optimizers.SGD(0.5, weight_decay=0.5)
    inner.exclude_from_weight_decay(var_names=["bias"], var_list=variables[2:] if is_built else None)
    optimizer = LossScaleOptimizer(inner, loss_scale=1.0)
    if is_built:
        optimizer.build(variables)
    made = LossScaleOptimizer.from_config(optimizer.get_config())
    assert made.get_config() == optimizer.get_config()
    made.apply([keras.ops.zeros(1)] * 3, others)
    # 1 - 0.5 * 0.5 of those that decay.
    assert [variable.numpy().tolist() for variable in others] == [[0.75], [1.0], [1.0 if is_built else 0.75]]
    plain = keras.optimizers.deserialize(optimizer.get_config()["inner_optimizer"])
    assert type(plain) is type(inner) and plain.weight_decay == 0.5


def test_what_did_not_decay_and_is_not_there_is_named():
    inner = keras.optimizers.SGD(0.5, weight_decay=0.5)
    variables = [keras.Variable([1.0], name=name) for name in ("kernel", "gain")]
    inner.exclude_from_weight_decay(var_list=variables[1:])
    optimizer = LossScaleOptimizer(inner, loss_scale=1.0)
    optimizer.build(variables)
    made, told = (LossScaleOptimizer.from_config(optimizer.get_config()) for _ in range(2))
    with pytest.warns(UserWarning, match="gain.*they decay now"):
        made.build(variables[:1])
    # What the user says now takes the place of it.
    told.exclude_from_weight_decay(var_names=["other"])
    told.build(variables[:1])


@pytest.mark.parametrize("is_users", [False, True], ids=["of a policy", "of the user's"])
def test_another_policy_stores_slots_in_a_model_from_a_file_as_in_the_model(is_users, tmp_path):
    made = LossScaleOptimizer(keras.optimizers.Adam(), slot_dtype="bfloat16") if is_users else "adam"
    policy = "mixed_float16" if is_users else mpkeras.Policy("mixed_float16", slot_dtype="bfloat16")
    model = mpkeras.prepare(compiled(made), policy)
    model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    stored = []
    for one in (model, loaded):
        mpkeras.prepare(one, "mixed_bfloat16")
        slots = [v for v in one.optimizer.inner_optimizer.variables if v.path.endswith("momentum")]
        stored.append((one.optimizer.slot_dtype, {keras.backend.standardize_dtype(v.dtype) for v in slots}))
    assert stored == [("bfloat16", {"bfloat16"}) if is_users else ("auto", {"float32"})] * 2
