import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale, LossScale, resolve


def numbers(state):
    return {key: float(value) for key, value in state.items()}


def state_of(dynamic_scale, step_counter=0, hysteresis_counter=0):
    return dict(step_counter=step_counter, dynamic_scale=dynamic_scale, hysteresis_counter=hysteresis_counter)


@pytest.mark.parametrize(
    ("settings", "before", "is_finite", "scale", "counter"),
    [
        pytest.param({}, (8.0, 0), True, 8.0, 1, id="first finite step"),
        pytest.param({}, (8.0, 1), True, 8.0, 2, id="one step before growth is due"),
        pytest.param({}, (8.0, 2), True, 16.0, 0, id="grows on the third finite step"),
        pytest.param({}, (8.0, 3), True, 16.0, 0, id="counter restored past a smaller interval grows at once"),
        pytest.param({}, (8.0, 1999), True, 16.0, 0, id="counter restored far past the interval grows once"),
        pytest.param({}, (8.0, 2), False, 4.0, 0, id="non-finite step halves and restarts"),
        pytest.param({}, (1.0, 0), False, 1.0, 0, id="stays at the floor"),
        pytest.param({}, (1.5, 0), False, 1.0, 0, id="stops at the floor"),
        pytest.param({}, (64.0, 2), True, 64.0, 0, id="stays at the ceiling"),
        pytest.param({}, (48.0, 2), True, 64.0, 0, id="stops at the ceiling"),
        pytest.param({"growth_factor": 4.0}, (8.0, 2), True, 32.0, 0, id="other growth factor"),
        pytest.param({"backoff_factor": 0.25}, (8.0, 0), False, 2.0, 0, id="other backoff factor"),
        pytest.param({"dynamic_growth_steps": 1}, (8.0, 0), True, 16.0, 0, id="grows on every step"),
        pytest.param({}, (0.25, 0), True, 1.0, 1, id="restored 0.25 is brought to the floor"),
        pytest.param({}, (0.0, 0), True, 8.0, 1, id="restored 0 begins anew"),
        pytest.param({}, (0.0, 0), False, 4.0, 0, id="restored 0 backs off from where it begins"),
        pytest.param({}, (float("inf"), 0), True, 64.0, 1, id="restored inf is brought to the ceiling"),
        pytest.param({}, (2.0**40, 0), False, 32.0, 0, id="restored 2**40 backs off from the ceiling"),
        pytest.param({}, (float("nan"), 0), True, 8.0, 1, id="restored NaN begins anew"),
    ],
)
def test_dynamic_rule_at_each_border(settings, before, is_finite, scale, counter):
    rule = DynamicLossScale(
        **{"initial_scale": 8.0, "dynamic_growth_steps": 3, "min_scale": 1.0, "max_scale": 64.0, **settings}
    )
    after = rule.next_state(state_of(before[0], before[1]), is_finite)
    assert numbers(after) == {
        "dynamic_scale": scale,
        "step_counter": counter,
        "hysteresis_counter": 0.0 if is_finite else 1.0,
    }


def test_a_long_row_of_skipped_steps_does_not_overflow_the_hysteresis_counter():
    rule = DynamicLossScale(hysteresis=3)
    top = rule.next_state(state_of(8.0, hysteresis_counter=3), False)
    assert int(top["hysteresis_counter"]) == 3


def test_powers_of_two_stay_exact_down_and_up_again():
    rule = DynamicLossScale(2.0**24, dynamic_growth_steps=1, min_scale=2.0**-126, max_scale=2.0**126)
    state = rule.initial_state()
    for exponent in range(23, -127, -1):
        state = rule.next_state(state, False)
        assert float(state["dynamic_scale"]) == 2.0**exponent
    assert float(rule.next_state(state, False)["dynamic_scale"]) == 2.0**-126
    assert float(rule.next_state(state, True)["dynamic_scale"]) == 2.0**-125


@settings(max_examples=30, deadline=None)
@given(
    start=st.one_of(
        st.sampled_from([0.0, float("inf"), float("nan"), 2.0**40]),
        st.floats(2.0**-20, 2.0**24, width=32),
    ),
    steps=st.lists(st.booleans(), max_size=20),
    growth_steps=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
)
def test_scale_stays_positive_finite_and_within_bounds(start, steps, growth_steps, hysteresis):
    rule = DynamicLossScale(dynamic_growth_steps=growth_steps, min_scale=0.25, hysteresis=hysteresis)
    state = state_of(start)
    assert 0.25 <= float(rule.current_scale(state)) <= 2.0**24
    for is_finite in steps:
        state = rule.next_state(state, is_finite)
        assert 0.25 <= float(state["dynamic_scale"]) <= 2.0**24


# Worked by hand from the rule, so that every backend is held to the same numbers (G4).
# "." is a finite step, "x" one that is not; growth every 3 steps, bounds 1 and 32, start 8.
TRAJECTORIES = [
    pytest.param(1, ".........", [8, 8, 16, 16, 16, 32, 32, 32, 32], id="grows every third step, stops at the ceiling"),
    pytest.param(1, "xxxx...x", [4, 2, 1, 1, 1, 1, 2, 1], id="stops at the floor and comes back"),
    pytest.param(1, "..x...", [8, 8, 4, 4, 4, 8], id="a skip restarts the count"),
    pytest.param(1, "x.x.x...", [4, 4, 2, 2, 1, 1, 1, 2], id="alternating"),
    pytest.param(2, "x.x.", [8, 8, 8, 8], id="hysteresis 2 lets single ones pass"),
    pytest.param(2, "xxx.", [8, 4, 2, 2], id="hysteresis 2: the second in a row halves, and each after it"),
    pytest.param(3, "xx.xxx", [8, 8, 8, 8, 8, 4], id="hysteresis 3: a finite step starts the row anew"),
]


@pytest.mark.parametrize(("hysteresis", "steps", "scales"), TRAJECTORIES)
def test_trajectory_is_the_same_on_every_backend(hysteresis, steps, scales):
    rule = DynamicLossScale(8.0, dynamic_growth_steps=3, min_scale=1.0, max_scale=32.0, hysteresis=hysteresis)
    state, seen = rule.initial_state(), []
    for step in steps:
        state = rule.next_state(state, step == ".")
        seen.append(float(state["dynamic_scale"]))
    assert seen == scales


def test_next_state_keeps_shapes_and_dtypes():
    before = {
        "step_counter": keras.ops.zeros((), "int32"),
        "dynamic_scale": keras.ops.ones((), "float32"),
        "hysteresis_counter": keras.ops.zeros((), "int32"),
    }
    after = DynamicLossScale().next_state(before, keras.ops.convert_to_tensor(True))
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert (value.dtype, tuple(value.shape)) == (before[name].dtype, ()), name
    # The scale within its bounds is float32, whatever it was.
    rule = DynamicLossScale(2.0, min_scale=1.0, max_scale=2.0)
    bounded = rule.current_scale({"dynamic_scale": keras.ops.convert_to_tensor(3.0, "float16")})
    assert (keras.backend.standardize_dtype(bounded.dtype), float(bounded)) == ("float32", 2.0)


def test_fixed_scale_never_moves_and_ignores_a_restored_one():
    rule = FixedLossScale(128.0)
    for is_finite in (True, False):
        assert numbers(rule.next_state({"dynamic_scale": 7.0}, is_finite)) == {"dynamic_scale": 128.0}


@pytest.mark.parametrize(
    ("initial_scale", "bounds"),
    [(2.0**15, (2.0**-24, 2.0**24)), (2.0**-30, (2.0**-30, 2.0**24)), (2.0**30, (2.0**-24, 2.0**30))],
    ids=["inside", "below: the floor gives way", "above: the ceiling gives way"],
)
def test_initial_scale_widens_default_bounds(initial_scale, bounds):
    rule = DynamicLossScale(initial_scale)
    assert (rule.min_scale, rule.max_scale) == bounds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_scale": "1024"}, "Received: "),
        ({"hysteresis": 1.5}, "Received: "),
        ({"growth_factor": True}, "Received: "),
        ({"max_scale": None}, "Received: "),
        ({"initial_scale": 0.5, "min_scale": 1.0}, r"min_scale=1\.0, initial_scale=0\.5,.*Move `initial_scale`"),
        ({"initial_scale": 2.0**30, "max_scale": 2.0**24}, "Move `initial_scale`"),
        ({"min_scale": 4.0, "max_scale": 2.0, "initial_scale": 3.0}, "widen them"),
        ({"initial_scale": 0.0}, "2\\*\\*-126 <= `initial_scale`"),
        ({"initial_scale": float("nan")}, "`initial_scale`"),
        ({"max_scale": float("inf")}, "`max_scale`"),
        ({"growth_factor": 1.0}, "`growth_factor` > 1"),
        ({"growth_factor": float("inf")}, "`growth_factor` > 1"),
        ({"backoff_factor": 1.0}, "`backoff_factor` < 1"),
        ({"backoff_factor": 0.0}, "`backoff_factor` < 1"),
        ({"dynamic_growth_steps": 0}, "`dynamic_growth_steps` >= 1"),
        ({"hysteresis": 0}, "`hysteresis` >= 1"),
    ],
)
def test_bad_settings_name_the_rule_and_the_remedy(settings, message):
    with pytest.raises(TypeError if message == "Received: " else ValueError, match=message):
        DynamicLossScale(**settings)


@pytest.mark.parametrize("rule", [FixedLossScale(64.0), DynamicLossScale(4.0, 3.0, 0.25, 7, 0.5, 1024.0, 2)])
def test_rules_are_immutable_equal_hashable_and_serializable(rule):
    restored = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(rule))
    assert restored == rule
    assert hash(restored) == hash(rule)
    assert resolve(keras.saving.serialize_keras_object(rule)) == rule
    with pytest.raises(AttributeError):
        rule.initial_scale = 1.0


@pytest.mark.parametrize(
    ("identifier", "rule"),
    [
        (None, None),
        ("dynamic", DynamicLossScale()),
        (128, FixedLossScale(128.0)),
        (0.5, FixedLossScale(0.5)),
        (np.float32(2.0), FixedLossScale(2.0)),
        (DynamicLossScale(8.0), DynamicLossScale(8.0)),
    ],
)
def test_resolve(identifier, rule):
    assert resolve(identifier) == rule


def test_resolve_names_what_it_takes():
    with pytest.raises(ValueError, match="'dynamic', a number"):
        resolve("automatic")
    with pytest.raises(TypeError, match="of type bool"):
        resolve(True)


def test_a_rule_of_ones_own_needs_three_methods():
    class Halfway(LossScale):
        def initial_state(self):
            return {"dynamic_scale": 4.0}

        def next_state(self, state, is_finite):
            return {"dynamic_scale": keras.ops.where(is_finite, state["dynamic_scale"], 2.0)}

        def get_config(self):
            return {}

    rule = Halfway()
    assert rule.initial_scale == 4.0
    assert numbers(rule.next_state(rule.initial_state(), False)) == {"dynamic_scale": 2.0}
    assert rule == Halfway() and hash(rule) == hash(Halfway())
