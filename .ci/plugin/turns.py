"""Which tests one run of `.ci/run` leaves out: a pytest plugin, `PYTHONPATH=.ci/plugin pytest -p turns`.

`pytest -m ""` runs every case on every backend, which takes hours. So `.ci/run` takes of parametrized tests one slow
case, another one after 72 numbers, and lets slow tests take turns over the backends, and over runs without them: 72
numbers in a row have each on each of its backends. The others run on TensorFlow each time, and of three times once on
JAX and once on torch.
"""

import zlib

import pytest

BACKENDS = ("tensorflow", "jax", "torch")

# By file and test, the backends on which each case of a test matters, whatever it takes; for a whole file in place of a
# dictionary.
EVERY_CASE = {
    "tests/conversion/test_attention.py": {
        "test_forward_is_stock_and_the_gradient_as_near_to_float32": BACKENDS,
        "test_trains_and_returns_from_a_file": BACKENDS,
    },
    "tests/conversion/test_bias_sums.py": {
        "test_the_sum_of_many_gradients": ("tensorflow",),
    },
    "tests/conversion/test_float8.py": {
        "test_a_bad_row_spoils_only_itself_outside_training": ("jax", "torch"),
        "test_a_layer_that_overflows_leaves_float8_first_and_then_16_bits": ("jax", "torch"),
        "test_a_second_derivative_is_refused": ("jax", "torch"),
        "test_every_door_leads_to_the_same_layers": ("jax", "torch"),
        "test_gradients_are_products_of_rounded_operands_and_gradients": ("jax", "torch"),
        "test_gradients_that_are_not_finite_stay_visible": ("jax", "torch"),
        "test_what_is_not_finite_stays_visible": ("jax", "torch"),
    },
    "tests/conversion/test_remat.py": {
        "test_it_trains_as_without": BACKENDS,
        "test_a_kept_step_computes_again_and_has_the_same_bits": BACKENDS,
    },
    "tests/distributed/test_sharded.py": {
        "test_everything_trains_under_every_layout_as_on_one_device": BACKENDS,
    },
    "tests/distributed/test_rounding.py": {
        "test_all_devices_round_alike": BACKENDS,
    },
    "tests/scaling/test_facts.py": {
        "test_a_loop_that_forgets_is_told_whatever_came_before": BACKENDS,
        "test_a_loop_that_scales_its_loss_is_not_warned_of": BACKENDS,
    },
    "tests/scaling/test_scale_trajectories.py": {
        "test_scales_are_those_of_the_documented_rule": BACKENDS,
    },
    "tests/scaling/test_small_state.py": {
        "test_a_skipped_step_leaves_no_trace": ("jax",),
        "test_moves_as_in_float32": ("tensorflow",),
        "test_the_same_bits_in_every_mode": ("tensorflow",),
    },
    "tests/test_docstrings.py": {
        "test_example_runs": BACKENDS,
    },
    "tests/test_migration.py": {
        "test_both_sides_train_alike": BACKENDS,
        "test_what_stands_on_the_right_runs": BACKENDS,
    },
    "tests/test_programs.py": {
        "test_a_program_learns_in_float16": BACKENDS,
    },
    "tests/test_readme.py": {
        "test_code_block_runs": ("torch",),
    },
    "tests/tools/blackbox/test_black_box.py": {
        "test_training_is_the_same_without_it": BACKENDS,
    },
    "tests/tools/forecast/test_forecast.py": {
        "test_programs_for_an_h100": BACKENDS,
    },
    "tests/tools/forecast/test_memory_plan.py": {
        "test_what_fits_is_found_and_no_plan_is_over_its_limit": BACKENDS,
    },
    "tests/training/test_compiled_program.py": {
        "test_no_conditional_and_no_host_transfer": BACKENDS,
        "test_one_trace_in_fit": BACKENDS,
        "test_products_run_in_16_bits_and_softmax_statistics_and_losses_in_float32": BACKENDS,
        "test_the_program_grows_with_the_number_of_layers_not_with_its_square": BACKENDS,
    },
    "tests/training/test_each_door.py": {
        "test_layers_rules_checks_and_logs": BACKENDS,
    },
    "tests/training/test_global_policy.py": {
        "test_it_trains_as_after_prepare_and_a_skipped_step_leaves_no_trace": BACKENDS,
        "test_the_environment_variable_guards": BACKENDS,
    },
    "tests/training/test_no_trace.py": ("jax",),
    "tests/training/test_prepare.py": {
        "test_what_ran_before_runs_in_the_new_dtypes": BACKENDS,
    },
    "tests/training/test_resume.py": {
        # What takes time is the fixture, which has them all.
        "test_training_goes_on_exactly": BACKENDS,
    },
}

# The backends on which a test is left out with `--one-case`: another test, or this one elsewhere, would fail as well.
SELDOM = {
    "tests/benchmarks/test_accelerators.py": {
        "test_the_step_of_a_peer_is_compiled_for_the_same_model": BACKENDS,
    },
    "tests/benchmarks/test_black_box.py": {
        "test_each_fault_is_kept_runs_again_and_is_named": ("tensorflow", "jax"),
    },
    "tests/benchmarks/test_hub.py": {
        "test_a_model_learns_in_float16": ("jax",),
    },
    "tests/benchmarks/test_many_devices.py": {
        "test_tiny_steps_are_compiled_for_this_cpu": BACKENDS,
    },
    "tests/benchmarks/test_overheads.py": {
        "test_every_callback_is_measured": BACKENDS,
    },
    "tests/benchmarks/test_remat.py": {
        "test_a_tiny_plan_for_this_cpu": BACKENDS,
        "test_tiny_steps_are_compiled_for_this_cpu": BACKENDS,
    },
    "tests/conversion/test_remat.py": {
        "test_trace_numerics_sees_what_the_layers_compute": ("jax",),
    },
    "tests/tools/export/test_without_mpkeras.py": {
        "test_a_compiled_model_goes_on_in_plain_keras": ("jax",),
    },
    "tests/tools/forecast/test_forecast.py": {
        "test_layers_losses_and_optimizers_of_the_user": ("torch",),
        "test_targets_and_inputs_that_the_program_leaves_out_are_no_state": ("torch",),
        "test_what_the_user_quantized_to_float8_stays_so": ("torch",),
    },
    "tests/tools/numerics/test_numerics.py": {
        "test_attention_is_compared_with_the_masks_that_it_was_given": ("jax",),
        "test_attention_with_dropout_is_looked_at_as_any_other": ("jax",),
    },
    "tests/tools/numerics/test_reasons.py": {
        "test_a_layer_that_fails_inside_is_told_from_one_whose_output_is_large": ("jax",),
    },
    "tests/training/test_small_weights.py": {
        "test_an_optimizer_of_an_own_loop_finds_weights_that_are_stored_anew": ("jax",),
    },
}

# Files whose slow tests run in each turn, on one of their backends.
EVERY_TURN = ("tests/training/test_no_trace.py",)


def pytest_addoption(parser):
    parser.addoption(
        "--one-case",
        choices=("slow", "all"),
        help="the first quick case alone of each parametrized test (or all its quick ones) and one of the slow ones, "
        "but for tests in EVERY_CASE; no test in SELDOM",
    )
    parser.addoption(
        "--turn",
        type=int,
        metavar="N",
        help="of the slow tests those alone whose turn it is: within 72 numbers in a row, each runs at least "
        "once on each of its backends; of the others a third on JAX, and another one on torch",
    )


# Last: what runs on other backends alone is marked as skipped by then.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    # Not at the top: the process that hands the tests out runs none.
    import keras

    active = keras.backend.backend()
    left_out = {}
    if config.getoption("one_case") is not None:
        only_slow = config.getoption("one_case") == "slow"
        left_out |= later_cases(items, active, only_slow, turn=config.getoption("turn") or 0)
        left_out |= {item: None for item in items if active in _entry(SELDOM, item)}
    if config.getoption("turn") is not None:
        left_out |= {item: None for item in items if not has_its_turn(item, active, config.getoption("turn"))}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def later_cases(items, backend: str, slow_ones_only: bool, turn: int) -> dict:
    """Returns of each parametrized test all slow cases but one, and all quick ones but the first.

    With `slow_ones_only` all quick cases remain, and all cases of tests in `EVERY_CASE` always do. Which slow case
    remains of the others changes with every 72 turns.
    """
    cases: dict = {}
    for item in items:
        marks = _marks(item)
        is_slow = _is_slow(item)
        if "skip" not in marks and (is_slow or not slow_ones_only):
            cases.setdefault((item.parent.nodeid, _name(item), is_slow), []).append(item)
    later = {}
    for (_, _, is_slow), of_test in cases.items():
        all_matter = backend in _entry(EVERY_CASE, of_test[0])
        taken = of_test[turn // 72 % len(of_test) if is_slow and not all_matter else 0]
        # Of a test in `EVERY_CASE`, single cases may be marked `matrix`.
        others = (item for item in of_test if item is not taken and (not all_matter or "matrix" in _marks(item)))
        later.update(dict.fromkeys(others))
    return later


def has_its_turn(item, backend: str, turn: int) -> bool:
    """Whether a test runs on a backend in this turn: all but the slow ones do in each, and on JAX in every third."""
    # By name, all cases of a test together: the same ones everywhere, whoever is asked.
    number = zlib.crc32(f"{item.location[0]}::{_name(item)}".encode()) + turn
    runs_on = item.get_closest_marker("backends")
    names = BACKENDS if runs_on is None else runs_on.args
    if not _is_slow(item):
        # TensorFlow runs it each time.
        takes_turns = backend != "tensorflow" and "tensorflow" in names
        return not takes_turns or number % 3 == BACKENDS.index(backend)
    names = [name for name in BACKENDS if name in names and name not in _entry(SELDOM, item)]
    if not names:
        return False
    # 23 runs without it follow, so that a run takes 20 minutes.
    runs_without = 0 if item.location[0] in EVERY_TURN else 23
    places = [place for name in names for place in (name, *[None] * runs_without)]
    return places[number % len(places)] == backend


def _entry(table: dict, item) -> tuple:
    """Returns the backends that a table names for a test."""
    of_file = table.get(item.location[0], ())
    return of_file.get(_name(item), ()) if isinstance(of_file, dict) else of_file


def _marks(item) -> set:
    return {marker.name for marker in item.iter_markers()}


def _is_slow(item) -> bool:
    # One cell of a table may take minutes as well.
    return not _marks(item).isdisjoint({"slow", "matrix"})


def _name(item) -> str:
    return getattr(item, "originalname", item.name)
