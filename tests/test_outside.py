"""What trials from outside broke in 0.1.0: for each fault the tests that failed before it was mended.

A test without a mark runs on TensorFlow, JAX and torch; `backends` says where the fault was on some of them only.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.backends("tensorflow")  # reads files alone

ROOT = Path(__file__).parents[1]
# Below each fault its tests, behind the file that has them.
FAULTS = """
A: models without `call`, such as a GAN, could not be prepared
    training/test_own_train_steps.py test_in_float32_every_bit_is_as_without
        test_in_16_bits_all_parts_train_as_in_float32
        test_parts_without_inputs_are_converted_before_the_first_step_is_trained
        test_a_step_that_is_not_finite_leaves_no_trace test_jax_trains_a_stateless_step_of_parts
B: no way to guard a program without a line in it
    training/test_autoprepare.py test_every_compile_is_followed_by_prepare_until_the_block_ends
        test_all_classes_are_as_before_also_after_an_error test_repr_says_what_is_covered
    cli/test_run.py test_run_prepares_an_unmodified_program
C: a second `compile`, a clone, a loaded, unpickled or copied model lost the guard in silence
    training/test_doors.py test_compiled_again_a_model_is_prepared_again_with_the_same_arguments
        test_a_clone_of_a_converted_model_is_wrapped_by_compile_as_stock_keras_does
    scaling/test_saving.py test_a_copy_of_a_guarded_model_says_at_its_first_step_that_it_is_not_guarded
D: `prepare` neither logged nor warned
    training/test_doors.py test_prepare_logs_and_warns_as_the_callback_does
E: logs said 0.0 where nothing was learned
    training/test_metric_states.py test_until_a_step_counts_the_losses_are_those_of_the_skipped_steps
        test_callbacks_that_look_at_the_loss_do_not_take_nothing_learned_for_the_best
        test_metrics_of_make_train_step_are_nan_until_a_step_counts
F: quantized models did not train
    conversion/test_quantized.py test_a_quantized_language_model_trains
G: the demo took minutes for float16, and `hardware` called native what is slower
    demo/test_runs.py test_what_would_take_minutes_is_shortened_or_left_out_and_said_before
        test_as_many_runs_as_fit_into_the_limit test_what_is_not_run_is_said_with_the_numbers_and_the_way_to_run_it
    demo/test_summary.py test_what_did_not_run_was_shortened_or_left_out_gets_a_footnote
    tools/advise/test_hardware.py test_what_the_probe_finds_slower_is_not_called_native
        test_of_this_process_what_is_native_is_what_was_probed
H: `make_train_step` applied no float32 rules
    training/test_step.py test_a_probability_head_built_under_the_global_policy_is_float32
        test_layers_compute_in_what_prepare_gives_them
1: bfloat16 weights were trained and did not move
    training/test_small_weights.py test_bfloat16_trains_as_float32_does
    scaling/test_small_state.py test_moves_as_in_float32
    training/test_prepare.py test_float16_variables_are_refused
    training/test_step.py test_float16_variables_are_refused
    scaling/test_optimizer.py test_variables_of_float16_are_warned_of_once
2: quantized layers were given another policy
    conversion/test_quantized.py test_a_model_that_was_converted_before_it_was_quantized
        test_trace_numerics_of_quantized_layers
3: float16 without loss scaling after a second `compile`
    training/test_doors.py test_after_the_callback_a_compile_wraps_as_stock_keras_does
4: `path:` rules were matched on the name of a layer that was not built
    conversion/test_apply.py test_path_rules_are_matched_when_there_is_a_path
5: rules that match nothing passed silently, and so did aliases
    policies/test_rules.py test_a_rule_that_matches_nothing_is_named_with_what_is_near
        test_classes_and_layers_are_rules_like_their_names
6: the user's optimizer lost its accumulation and its scale factor
    training/test_prepare.py test_an_optimizer_given_twice_means_the_same_twice
    training/test_step.py test_one_optimizer_in_two_steps_accumulates_in_both
    scaling/test_window.py test_one_optimizer_wrapped_twice_accumulates_twice
7: XLA replaced an optimizer's own weight decay
    scaling/test_optimizer.py test_xla_decays_as_the_optimizer_itself_does
8: compiled models inside a model kept plain optimizers
    training/test_doors.py test_compiled_models_inside_are_wrapped_too
9: a loop that forgets `scale_loss` was not noticed after a trace
    scaling/test_facts.py test_a_loop_that_forgets_is_told_whatever_came_before
10: on JAX a log whose name ends in loss decided why a step was skipped
    training/test_guard.py test_a_metric_whose_name_ends_in_loss_has_no_say_in_why_a_step_was_skipped
        test_a_users_jax_step_knows_the_loss_that_it_scaled
11: an activation that the user changed was changed back
    conversion/test_kept_float32.py test_an_activation_that_the_user_has_changed_is_the_users
12: gradients unscaled in another thread were divided twice; growth steps beyond int32 on torch
    scaling/test_facts.py test_the_parts_of_a_step_may_run_in_threads_of_their_own
    scaling/test_optimizer.py test_numbers_of_steps_beyond_int32
13: `fit` with accumulation and the callback failed
    callbacks/test_mixed_precision.py test_fit_with_accumulation
14: `apply_policy` renamed outputs and appended layers
    conversion/test_apply.py test_outputs_keep_the_names_that_losses_and_targets_go_by_in_copies_and_files
        test_a_sequential_keeps_its_layers
15: upsampling under XLA on TensorFlow failed
    policies/test_kernels.py test_p42_upsampling_trains
    benchmarks/test_layer_zoo.py test_p42_xla_refuses_no_layer_that_it_takes_in_float32
16: a tracer left behind, sparse and complex gradients, gradients that are all missing, Nadam on torch
    scaling/test_facts.py test_a_traced_step_that_raises_leaves_nothing_behind
        test_gradients_that_are_all_missing_are_an_error_as_in_keras
    scaling/test_optimizer.py test_sparse_arrays_of_jax test_complex_gradients_keep_both_parts
    scaling/test_small_state.py test_moves_as_in_float32
17: buffers of torch modules and native variables kept the trace of a skipped step
    training/test_no_trace.py test_state_that_is_no_keras_variable
18: metrics stayed NaN for an epoch whose first step was bad
    training/test_metric_states.py test_until_a_step_counts_the_losses_are_those_of_the_skipped_steps
19: an inner guarded step took off the watch of the outer one
    training/test_no_trace.py test_an_inner_guarded_step_leaves_the_outer_ones_watch_alone
20: a batch without rows, or a step that raises, left NaN
    training/test_no_trace.py test_a_batch_without_rows_is_a_skipped_step
        test_make_train_step_skips_a_batch_without_rows test_a_step_that_raises_leaves_no_trace
21: copies of a prepared model dropped the guard without a word
    scaling/test_saving.py test_a_guard_that_is_there_again_puts_a_bad_step_back
22: torch cloned all frozen weights at every step
    training/test_no_trace.py test_frozen_weights_are_copied_only_when_a_layer_writes_them
23: `NumericsMonitor` undid `steps_per_execution`
    tools/numerics/test_numerics_monitor.py test_several_steps_per_execution_stay_one_call
        test_the_batch_is_found_among_several_of_any_structure
24: a trace for every length of a sequence
    training/test_step.py test_ten_lengths_are_traced_twice
25: the guard walked over the model at every eager and torch step
    training/test_inventory.py test_walks_are_made_again_only_after_a_change
        test_a_skipped_step_leaves_no_trace_in_what_has_changed
26: `dynamic` took anything
    scaling/test_optimizer.py test_contradictions_are_named
27: layers frozen or freed between steps
    training/test_step.py test_layers_frozen_and_freed_between_steps_obey_from_the_next_step_on
        test_a_freed_layer_that_the_optimizer_does_not_know_is_named
28: a saved, compiled model did not load in plain Keras
    tools/export/test_without_mpkeras.py test_a_compiled_model_goes_on_in_plain_keras
    scaling/test_saving.py test_plain_keras_makes_its_own_optimizer_of_the_config
29: changes of the code that no test noticed
    training/test_guard.py test_a_guarded_step_knows_nothing_of_how_the_last_one_unscaled
        test_a_metric_that_a_skipped_update_made_non_finite_is_put_back_whole
    scaling/test_window.py test_the_scale_stays_at_the_end_of_a_window_without_an_update
    scaling/test_optimizer.py test_rewrapped_keeps_every_counter_and_leaves_the_old_one_whole
        test_the_scale_of_a_scope_is_not_noted_for_what_comes_after
    conversion/test_apply.py test_after_an_error_the_model_is_as_it_was
        test_after_an_error_a_converted_model_is_as_it_was
30: tests that could not fail
    test_guarantees.py test_every_cell_names_a_test_or_says_why_there_is_none
    training/test_step.py test_metrics_that_make_their_variables_late
    policies/test_rules.py test_each_rule_names_something_of_keras_and_has_a_reason
31: `trace_numerics` alarmed on healthy models
    tools/numerics/test_numerics.py test_a_healthy_language_model_raises_no_alarm
        test_a_layer_whose_gradient_is_lost_raises_an_alarm_that_is_true test_that_no_loss_scale_suits_is_true
32: `audit` took 64 for open sizes, let torch write to standard error, and had no short form
    tools/audit/test_audit.py test_open_sizes_are_said_and_may_be_given
        test_what_torch_says_of_a_failure_is_in_the_note_alone
        test_the_summary_has_the_sums_and_what_is_more_than_a_note test_casts_are_counted_where_they_cost
    cli/test_audit.py test_the_summary_and_open_sizes
33: `advise` without measuring: an empty table, Python in a shell, ignored data, other advice than measured
    cli/test_advise.py test_without_measuring_there_is_no_table_and_the_remedy_is_an_option
        test_bad_input_is_one_line test_what_16_bits_are_good_for_is_followed_by_the_commands
        test_of_a_model_without_names_of_inputs_x_alone_is_asked_for
    tools/advise/test_advice.py test_the_guess_is_a_setting_in_which_16_bits_have_been_seen_to_gain
        test_the_guess_says_stay_only_of_what_the_model_has
34: `NumericsMonitor()` alone did nothing, and `mpkeras` alone was an error
    tools/numerics/test_numerics_monitor.py test_alone_it_names_the_layer_and_training_goes_on
    cli/test_main.py test_status_0
"""


def named() -> dict:
    """Returns for each fault, by its label, the pairs of a file and a test."""
    found: dict = {}
    for line in FAULTS.strip().splitlines():
        if not line.startswith(" "):
            label = line.partition(":")[0]
            continue
        for word in line.split():
            if word.endswith(".py"):
                file = word
            else:
                found.setdefault(label, []).append((file, word))
    return found


TESTS = named()


@pytest.mark.parametrize("label", TESTS)
def test_each_fault_has_tests_that_exist(label):
    for file, name in TESTS[label]:
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), (file, name)


def test_no_fault_is_without_tests():
    assert len(TESTS) == len(re.findall(r"^\w+: ", FAULTS, flags=re.MULTILINE)) == 42
