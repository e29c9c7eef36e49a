import gc
import threading
import warnings

import keras
import pytest

import mpkeras
from mpkeras import policy_scope, set_global_policy
from mpkeras.policies import Policy, get_policy, global_policy, register_policy, registered_policies, registry
from mpkeras.policies.loss_scaling import FixedLossScale
from mpkeras.training.global_policy import install_from_environment

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

BUILT_IN = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "mixed_float16",
    "mixed_bfloat16",
    "mixed_float8",
    "mixed_auto",
)


QUANTIZED = keras.dtype_policies.QuantizedDTypePolicy("int8", "mixed_bfloat16")


def mine(**options):
    return Policy("mine", compute_dtype="bfloat16", variable_dtype="float32", **options)


def test_register_and_overwrite():
    assert registered_policies() == BUILT_IN
    register_policy(mine())
    assert registered_policies() == (*BUILT_IN, "mine")
    with pytest.raises(ValueError, match="overwrite=True"):
        register_policy(mine(loss_scale=2.0))
    assert get_policy("mine").loss_scale is None
    register_policy(mine(loss_scale=2.0), overwrite=True)
    assert get_policy("mine").loss_scale == FixedLossScale(2.0)
    with pytest.raises(TypeError, match=r"mpkeras\.Policy\(name"):
        register_policy(keras.DTypePolicy("float32"))


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        pytest.param("mixed_float16", Policy("mixed_float16"), id="a name"),
        pytest.param(mine(loss_scale=4.0), mine(loss_scale=4.0), id="a Policy"),
        pytest.param(keras.DTypePolicy("mixed_float16"), Policy("mixed_float16"), id="a Keras policy"),
        pytest.param(keras.dtype_policies.serialize(mine()), mine(), id="a serialized Policy"),
        pytest.param(
            {"class_name": "DTypePolicy", "config": {"name": "mixed_bfloat16"}},
            Policy("mixed_bfloat16"),
            id="a serialized Keras policy",
        ),
        pytest.param(None, Policy("float32"), id="the global one"),
    ],
)
def test_get_policy(identifier, expected):
    policy = get_policy(identifier)
    assert policy == expected
    assert type(policy) is Policy


@pytest.mark.parametrize(
    ("identifier", "error", "message"),
    [
        ("mixed_bfloat", ValueError, "Did you mean 'mixed_bfloat16'"),
        ("float8", ValueError, "Use 'mixed_float8'"),
        (keras.DTypePolicy("int32"), ValueError, "Use 'float32'"),
        (keras.dtype_policies.DTypePolicyMap("float32"), TypeError, r"\.default_policy"),
        (QUANTIZED, TypeError, r"model\.quantize\('int8'\)"),
        (16, TypeError, "Use for example 'mixed_float16'"),
        ({"name": "mine"}, TypeError, "a config or None. Received: {'name': 'mine'}"),
    ],
)
def test_what_is_no_policy_is_refused_and_changes_nothing(identifier, error, message):
    set_global_policy(mine(loss_scale=4.0))
    in_keras = keras.config.dtype_policy()
    for function in (get_policy, set_global_policy, lambda policy: policy_scope(policy).__enter__()):
        with pytest.raises(error, match=message):
            function(identifier)
        assert keras.config.dtype_policy() is in_keras
        assert global_policy() == mine(loss_scale=4.0)


def test_keras_gets_its_own_policy_where_it_has_one_and_what_it_is_told_later_wins():
    set_global_policy(mine(loss_scale=4.0))
    assert keras.config.dtype_policy() == keras.DTypePolicy("mixed_bfloat16")
    # What a saved layer says has no trace of mpkeras (G8).
    assert keras.layers.Dense(1).get_config()["dtype"]["config"] == {"name": "mixed_bfloat16"}
    assert global_policy() == mine(loss_scale=4.0)
    keras.config.set_dtype_policy("mixed_bfloat16")  # The same dtypes, and still the later word.
    assert global_policy() == Policy("mixed_bfloat16")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("float16", "refuses to train.*'mixed_float16'"),
        ("bfloat16", "compiled trains them with stochastic rounding.*stock optimizer"),
    ],
)
def test_p40_a_policy_with_16_bit_variables_says_how_to_train_them(name, remedy):
    message = f"'{name}' layers make {name} variables.*{remedy}"
    with pytest.warns(UserWarning, match=message):
        assert set_global_policy(name).name == name
    with pytest.warns(UserWarning, match=message), policy_scope(name):
        pass
    assert keras.layers.Dense(1).variable_dtype == name


@pytest.mark.filterwarnings("ignore:Under policy 'odd' layers make:UserWarning")
def test_keras_gets_ours_where_it_has_none():
    odd = Policy("odd", compute_dtype="float16", variable_dtype="bfloat16")
    set_global_policy(odd)
    assert keras.config.dtype_policy() == odd
    layer = keras.layers.Dense(1)
    assert (layer.compute_dtype, layer.variable_dtype) == ("float16", "bfloat16")


@pytest.mark.parametrize(
    ("keras_policy", "expected"),
    [
        (mine(), mine()),
        (keras.dtype_policies.DTypePolicyMap("mixed_float16"), Policy("mixed_float16")),
        (QUANTIZED, Policy("int8_from_mixed_bfloat16", compute_dtype="bfloat16", variable_dtype="float32")),
    ],
)
def test_global_policy_answers_whatever_keras_holds(keras_policy, expected):
    keras.config.set_dtype_policy(keras_policy)
    assert global_policy() == expected


def test_scopes_nest_and_restore_after_an_exception_too():
    set_global_policy(mine(loss_scale=4.0))
    outside = keras.config.dtype_policy()
    with pytest.raises(RuntimeError, match="inside"), policy_scope("mixed_float16") as first:
        assert (first, global_policy()) == (Policy("mixed_float16"), Policy("mixed_float16"))
        with policy_scope("float64"):
            assert keras.layers.Flatten().compute_dtype == "float64"
        assert global_policy() == Policy("mixed_float16")
        assert keras.layers.Flatten().compute_dtype == "float16"
        raise RuntimeError("inside")
    assert keras.config.dtype_policy() is outside
    assert global_policy() == mine(loss_scale=4.0)


# What Keras resets.


def small_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def by_callback(model):
    x = keras.ops.zeros((2, 3))
    model.fit(x, x[:, :1], verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision()])
    return model


def by_autoprepare(model):
    with mpkeras.autoprepare():
        model.compile("sgd", "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("door", [mpkeras.prepare, by_callback, by_autoprepare, mpkeras.apply_policy])
def test_a_policy_that_clear_session_took_away_is_in_force_again_and_that_is_said_once(door):
    set_global_policy(mine(loss_scale=4.0))
    keras.utils.clear_session(free_memory=False)
    with pytest.warns(UserWarning, match=r"clear_session.*'mine'.*`mpkeras.set_global_policy` after"):
        model = door(small_model())
    assert model.layers[0].compute_dtype == keras.layers.Dense(1).compute_dtype == "bfloat16"
    keras.utils.clear_session(free_memory=False)
    assert global_policy() == mine(loss_scale=4.0)
    assert door(small_model()).layers[0].compute_dtype == "bfloat16"


@pytest.mark.parametrize("after_clear", [False, True])
def test_a_policy_set_through_keras_stays_through_clear_session_the_later_word(after_clear):
    set_global_policy("mixed_float16")
    if after_clear:
        keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy("mixed_bfloat16" if after_clear else "float32")
    if not after_clear:
        # Keras' default is now what was there before, too.
        keras.utils.clear_session(free_memory=False)
    assert global_policy() == Policy("mixed_bfloat16" if after_clear else "float32")


def test_many_clear_sessions_leave_nothing_behind():
    mpkeras.set_global_policy("mixed_bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(30):
            keras.utils.clear_session(free_memory=False)
            mpkeras.global_policy()
        keras.utils.clear_session(free_memory=False)
        layer = keras.layers.Dense(1)
        mpkeras.global_policy()
    gc.collect()
    # The layer that was made in between is known still, to have been meant for the policy.
    assert registry.made_under(layer.dtype_policy).name == "mixed_bfloat16"
    assert len([default for default, _ in registry._made_in_between if default() is not None]) <= 2


def test_what_clear_session_cannot_change_is_not_said():
    set_global_policy("float32")
    keras.utils.clear_session(free_memory=False)
    assert global_policy() == Policy("float32")
    with policy_scope("float32"):
        keras.utils.clear_session(free_memory=False)
    set_global_policy("mixed_float16")
    keras.utils.clear_session(free_memory=False)
    set_global_policy("mixed_bfloat16")
    assert global_policy() == Policy("mixed_bfloat16")


def test_a_scope_that_clear_session_ends_says_so_and_restores_what_was_around_it():
    set_global_policy(mine(loss_scale=4.0))
    with pytest.warns(UserWarning, match=r"clear_session.*policy_scope.*not 'mixed_float16'") as told:
        with policy_scope("mixed_float16"):
            keras.utils.clear_session(free_memory=False)
            assert keras.layers.Dense(1).compute_dtype == "float32"
        assert global_policy() == mine(loss_scale=4.0) and keras.layers.Dense(1).compute_dtype == "bfloat16"
    assert len(told) == 1
    # Inside, it is in force again from what asks for it on.
    with pytest.warns(UserWarning, match="clear_session") as told, policy_scope("mixed_float16"):
        keras.utils.clear_session(free_memory=False)
        assert mpkeras.prepare(small_model()).layers[0].compute_dtype == "float16"
    assert len(told) == 1 and global_policy() == mine(loss_scale=4.0)
    keras.config.set_dtype_policy("float64")
    with pytest.warns(UserWarning, match="clear_session"), policy_scope("mixed_float16"):
        keras.utils.clear_session(free_memory=False)
    assert global_policy() == Policy("float64")


def in_thread(function):
    """Returns what `function()` returns in a new thread, and what was said there."""
    result = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread = threading.Thread(target=lambda: result.append(function()))
        thread.start()
        thread.join()
    return result[0], [str(warning.message) for warning in told]


def test_a_new_thread_has_the_default_and_that_is_said():
    set_global_policy("mixed_float16")
    policy, told = in_thread(global_policy)
    assert policy == Policy("float32") and len(told) == 1
    assert "of this thread is Keras' default, 'float32'" in told[0] and "'mixed_float16'" in told[0]
    assert in_thread(lambda: set_global_policy("mixed_float16")) == (Policy("mixed_float16"), [])
    assert in_thread(lambda: mpkeras.prepare(small_model(), "mixed_bfloat16").layers[0].compute_dtype)[0] == "bfloat16"
    with policy_scope("float32"):
        assert in_thread(global_policy) == (Policy("float32"), [])
    keras.config.set_dtype_policy("float32")
    global_policy()
    assert in_thread(global_policy) == (Policy("float32"), [])


@pytest.mark.parametrize("value", ["mixed_float16", " mixed_float16 ", "", None, "fp16"])
def test_environment_variable(monkeypatch, value):
    monkeypatch.delenv("MPKERAS_POLICY", raising=False)
    if value is not None:
        monkeypatch.setenv("MPKERAS_POLICY", value)
    if value == "fp16":
        with pytest.raises(ValueError, match="MPKERAS_POLICY='fp16'.*unset MPKERAS_POLICY"):
            install_from_environment()
    else:
        install_from_environment()
    assert global_policy() == Policy("mixed_float16" if "mixed" in (value or "") else "float32")


def test_mixed_auto_is_a_policy_of_that_name_with_a_reason():
    policy = get_policy("mixed_auto")
    assert policy.name == "mixed_auto"
    assert (policy.compute_dtype, policy.variable_dtype) in (
        ("float32", "float32"),
        ("float16", "float32"),
        ("bfloat16", "float32"),
    )
    assert policy.reason
    # A reloaded one keeps its dtypes, whatever the machine is.
    config = {**policy.get_config(), "compute_dtype": "float16", "variable_dtype": "float32"}
    assert get_policy(Policy.from_config(config)).compute_dtype == "float16"
