"""The first batches of a training, taken again where only the guessed loss scale was too large for them.

A dynamic scale begins with a guess, and each step in which it comes down to what the model needs would lose a batch.
So while no step has counted, a batch whose gradients alone overflowed is run again with a smaller scale: on the host,
by the program that is there. The rollback has put the model back; here the optimizer's own numbers are put back, so
that nothing is left of the attempt but the scale. From the first counted step on nobody looks any more.

The next batches may have larger gradients. So the first attempt is made at a scale above the guess, and training goes
on as far below the scale at which the batch counted: at the guess, where the first attempt did.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras.policies.loss_scaling import LARGEST_SCALE, SMALLEST_SCALE, number
from mpkeras.training import training_backend
from mpkeras.training.inventory import (
    initial_values,
    moving_variables,
    shared_states,
    states_of_helpers,
    unlisted_states,
)
from mpkeras.training.random_numbers import global_generator_at_hand

# A batch that no scale cures is skipped as ever. After so many of them, batches are not taken again any more.
MOST_LOST = 2
# The gradients of one batch are easily two or three times those of the batch before. The scale stays so far below what
# the first batch takes, but not below 1 for this reason alone.
HEADROOM = 4.0
# A step that sums gradients updates after fewer; the batches of one that never does are not held for ever.
MOST_HELD = 64
# For a rule of the user's that lowers its scale very slowly.
_MOST_ATTEMPTS = 300


def retaking(function: Callable, first_steps: "FirstSteps") -> Callable:
    """Returns a train function that does what `function` does, and takes the first batches again."""

    @functools.wraps(function)
    def train_function(*args):
        if first_steps.are_over or not training_backend.runs_on_host():
            return function(*args)
        *state, data = args
        batches, handed_on = training_backend.held_batches(data, first_steps.model)
        if not batches:
            # At the end of the data, of which Keras' own function tells.
            return function(*args)
        # Singly, until a step has counted: a later step of the same execution changes what an earlier one needs.
        while batches and not first_steps.are_over:
            run = functools.partial(_run_on, function, handed_on(batches[:1]))
            result, state = first_steps.take(run, state)
            batches = batches[1:]
        return function(*state, handed_on(batches)()) if batches else result

    vars(train_function)["mpkeras_first_steps"] = first_steps
    return train_function


def _run_on(function, data, *state):
    return function(*state, data())


def takes_batches_again(function) -> bool:
    """Whether a train function still waits for a step that counts, and runs the steps of an execution one by one."""
    first_steps = getattr(function, "mpkeras_first_steps", None)
    return first_steps is not None and not first_steps.are_over


def end(function):
    """Lets a train function run each batch once from now on."""
    first_steps = getattr(function, "mpkeras_first_steps", None)
    if first_steps is not None:
        first_steps.are_over = True


class FirstSteps:
    """Runs steps, and runs them again, until one has counted.

    Args:
        model: The model that is trained.
        optimizers: Function that returns the `LossScaleOptimizer`s of the step, whose skipped updates leave no trace.
        metrics: Function that returns the metrics of the step.
        is_own: Whether the step is the user's own, which may update several times.

    Attributes:
        are_over: Whether each batch is run once from now on.
    """

    def __init__(self, model, optimizers: Callable[[], list], metrics: Callable[[], list], *, is_own: bool = False):
        self.model, self._is_own = model, is_own
        self.are_over = False
        self._optimizers, self._metrics = optimizers, metrics
        # The steps so far where none has updated, as those do that sum gradients for the update of a later one.
        self._held: _Held | None = None

    def take(self, run: Callable, state: list) -> tuple:
        """Runs a step on a batch, and runs it again while only the scale is too large for it.

        Args:
            run: Function that runs the step on `*state`, and returns logs; on JAX in `fit` logs and the new state.
            state: On JAX in `fit` a list of the state that the step is given; otherwise an empty list.

        Returns:
            What the last run returned, and the state after it, as a list again.
        """
        if training_backend.is_distributed(self.model):
            return self._take(run, state)
        with global_generator_at_hand():
            return self._take(run, state)

    def _take(self, run, state) -> tuple:
        step_state = training_backend.HeldState(self.model, state)
        optimizers = self._optimizers()
        with training_backend.variable_scope(self.model):
            for optimizer in optimizers:
                if optimizer.dynamic:
                    # Also of one that the step builds: the first attempt is not made at the guess.
                    optimizer.make_scale_state()
        for optimizer in optimizers:
            _note_steps_before_scale(optimizer, step_state)
        if self._held is not None and self._held.is_left_alone(step_state):
            # A global generator that nothing draws from is there during a step alone, and is another one in the next.
            self._held.at_begin.note_global_generator(step_state)
        else:
            waiting = [optimizer for optimizer in optimizers if _awaits_first_step(optimizer, step_state)]
            if not waiting:
                self.are_over, self._held = True, None
                logs, step_state = step_state.after(run(*step_state.arguments()))
                return step_state.returned(logs), step_state.arguments()
            at_begin = _Before(self.model, optimizers, self._metrics, step_state, self._is_own)
            self._held = _Held(at_begin, waiting, at_begin.scales_above_guess(waiting))
            _write_scales(step_state, self._held.scales)
        held, self._held = self._held, None
        held.runs.append(run)
        at_begin = held.at_begin
        logs, step_state, changes, scales = self._search(held, step_state)
        self.are_over |= any(change.counted for change in changes.values())
        new_scales = {}
        for optimizer, scale in scales.items():
            guess = at_begin.guess(optimizer)
            if scale == HEADROOM * guess:
                new_scales[optimizer] = at_begin.scale_after_guess(optimizer, step_state)
            elif changes[optimizer].counted:
                new_scales[optimizer] = min(_with_headroom(optimizer, step_state, scale), guess)
            elif scale > guess:
                new_scales[optimizer] = guess
        logs = _with_scales(logs, step_state, optimizers, new_scales)
        return step_state.returned(logs), step_state.arguments()

    def _search(self, held, step_state) -> tuple:
        """Runs the step until its scales are not too large for it, or none is left; and with it those held before it.

        Returns:
            Logs, state and changes of the last run, and the scales at which it was tried where they are not the guess.
        """
        at_begin, waiting, scales = held.at_begin, held.waiting, held.scales
        runs = held.runs[-1:]
        for _ in range(_MOST_ATTEMPTS):
            logs, step_state, changes = self._attempt(runs, step_state, at_begin, scales)
            has_counted = any(change.counted for change in changes.values())
            if not has_counted and not any(change.skipped for change in changes.values()):
                # Gradients that it keeps for the update of a later step have this scale in them: it stays. If it is too
                # large for that step, all are run again; where they cannot, each step runs once from here on.
                if at_begin.are_all and len(held.runs) < MOST_HELD:
                    held.scales, held.left = scales, at_begin.values_in(step_state)
                    self._held = held
                else:
                    self.are_over = True
                return logs, step_state, changes, {}
            runs = held.runs
            overflowed = [optimizer for optimizer in waiting if changes[optimizer].overflowed]
            if not overflowed and not has_counted and any(scale > at_begin.guess(o) for o, scale in scales.items()):
                # The scale has no part in it: the step is skipped as ever, at the guess.
                scales = {}
                at_begin.put_back(step_state, scales)
                continue
            if not overflowed or (has_counted and not at_begin.are_all):
                break
            scales |= {o: at_begin.next_scale(o, scales.get(o)) for o in overflowed}
            incurable = [optimizer for optimizer in overflowed if scales[optimizer] is None]
            scales = {optimizer: scale for optimizer, scale in scales.items() if scale is not None}
            at_begin.put_back(step_state, scales)
            if incurable:
                # The gradients are finite at no scale: the step is skipped as ever.
                logs, step_state, changes = self._attempt(runs, step_state, at_begin, scales)
                self._note_incurable(incurable)
                break
        if len(held.runs) > 1 and scales and has_counted:
            # Of a step that updates nothing nobody hears that its gradients overflow: at the scale of the next steps,
            # which is smaller, those of the first ones are finite, too.
            scales = {o: min(_with_headroom(o, step_state, scale), at_begin.guess(o)) for o, scale in scales.items()}
            at_begin.put_back(step_state, scales)
            logs, step_state, changes = self._attempt(held.runs, step_state, at_begin, scales)
            scales = {}
        return logs, step_state, changes, scales

    def _attempt(self, runs, step_state, at_begin, scales):
        after = step_state
        try:
            for run in runs:
                logs, after = after.after(run(*after.arguments()))
        except BaseException:
            # A program that catches it may go on from any state, but not at a scale that was tried for this batch.
            self.are_over = True
            _write_scales(step_state, {optimizer: at_begin.guess(optimizer) for optimizer in scales})
            raise
        at_begin.look_for_new_weights()
        changes = {
            optimizer: at_begin.change(optimizer, after, scales.get(optimizer)) for optimizer in self._optimizers()
        }
        return logs, after, changes

    def _note_incurable(self, optimizers):
        for optimizer in optimizers:
            optimizer.record.incurable_batches += 1
        self.are_over |= any(optimizer.record.incurable_batches >= MOST_LOST for optimizer in optimizers)


class _Held:
    """Steps that are run again together: the first ones, none of which has updated, and the one that does.

    Args:
        at_begin: What was before the first of them.
        waiting: The optimizers whose scales are looked for.
        scales: The scales at which the steps were run, by optimizer, where they are not the guess.
    """

    def __init__(self, at_begin: "_Before", waiting: list, scales: dict):
        self.at_begin, self.waiting, self.scales = at_begin, waiting, scales
        self.runs: list = []
        # The values that the last of the steps has left.
        self.left: dict = {}

    def is_left_alone(self, step_state) -> bool:
        """Whether nobody else has written since: metrics of a new epoch, or a learning rate, could not be put back."""
        now = self.at_begin.values_in(step_state)
        return all(
            np.array_equal(now[key], self.left[key], equal_nan=now[key].dtype.kind == "f")
            for key in now.keys() & self.left.keys()
        )


class _Change(NamedTuple):
    """What a step did to an optimizer: whether an update counted, was skipped, or overflowed for its scale alone."""

    counted: bool
    skipped: bool
    overflowed: bool


class _Before:
    """What a skipped step changes, as it was before the step; with several optimizers, or in a user's own step, all.

    Some updates may have counted where others were skipped, and no rollback puts that back. A copy on the host
    takes no memory of the device.
    """

    def __init__(self, model, optimizers, metrics, step_state, is_own):
        self._model, self._optimizers, self._metrics = model, optimizers, metrics
        are_there = not training_backend.is_distributed(model) and _keras.has_all_weights(model)
        self.are_all = (is_own or len(optimizers) > 1) and are_there
        self._unbuilt = [optimizer for optimizer in optimizers if not optimizer.built]
        self._values = {id(variable): step_state.read(variable) for variable in self._variables()}
        self._natives = [(state, np.array(ops.convert_to_numpy(state.value))) for state in self._native_states()]
        self._random = training_backend.global_random_states() if self.are_all else {}

    def look_for_new_weights(self):
        """Gives up on `are_all` where the step has made a weight: nobody knows what that was before."""
        self.are_all = self.are_all and all(id(variable) in self._values for variable in self._model.variables)

    def _variables(self) -> list:
        variables = moving_variables(self._optimizers, self._metrics())
        variables += [flag for optimizer in self._optimizers for flag in optimizer.step_outcome]
        if self.are_all:
            variables += [*self._model.variables, *unlisted_states(self._model), *states_of_helpers(self._model)]
            variables += shared_states()
            variables += self._model.metrics_variables
            variables += [variable for optimizer in self._optimizers for variable in optimizer.variables]
        return list({id(variable): variable for variable in variables}.values())

    def values_in(self, step_state) -> dict:
        """Returns the values of all variables that `put_back` writes, by what they are of."""
        values = {(id(v), i): x for v in self._variables() for i, x in enumerate(step_state.read(v))}
        return values | {id(state): np.array(ops.convert_to_numpy(state.value)) for state in self._native_states()}

    def note_global_generator(self, step_state):
        """Notes the state of Keras' global generator, if it was made since."""
        for variable in shared_states():
            self._values.setdefault(id(variable), step_state.read(variable))

    def _native_states(self) -> list:
        return training_backend.native_states(self._model) if self.are_all else []

    def _value(self, variable):
        """Returns the values that `variable` had in each of its copies, or the one with which it was made since."""
        if id(variable) in self._values:
            return self._values[id(variable)]
        return [np.full(tuple(variable.shape), initial_values(self._optimizers).get(id(variable), 0))]

    def _number(self, variable):
        return self._value(variable)[0].item()

    def scale_state(self, optimizer) -> dict:
        """Returns the state of the rule of `optimizer`, as numbers."""
        names = optimizer.loss_scale_rule.initial_state()
        return {name: self._number(optimizer.scale_state[name]) for name in names}

    def scales_above_guess(self, waiting: list) -> dict:
        """Returns the scales of the first attempt, by optimizer: `HEADROOM` times the guess, where the rule has it."""
        if len(waiting) > 1 and not self.are_all:
            # The update of one could not be undone where another overflows.
            return {}
        scales = {}
        for optimizer in waiting:
            scale = HEADROOM * self.guess(optimizer)
            state = {**self.scale_state(optimizer), "dynamic_scale": scale}
            if _scale_in(state, optimizer.loss_scale_rule) == scale <= LARGEST_SCALE:
                scales[optimizer] = scale
        return scales

    def guess(self, optimizer) -> float:
        """Returns the scale of `optimizer` from before the step."""
        return _scale_in(self.scale_state(optimizer), optimizer.loss_scale_rule)

    def scale_after_guess(self, optimizer, after) -> float:
        """Returns the scale that a step which was tried above the guess, and counted, would have left at the guess."""
        if after.number(optimizer.dynamic_scale) == HEADROOM * self.guess(optimizer):
            return self.guess(optimizer)
        # The rule raises it in the first step already.
        rule = optimizer.loss_scale_rule
        return _scale_in(_after(rule, self.scale_state(optimizer), is_finite=True), rule)

    def next_scale(self, optimizer, scale: float | None) -> float | None:
        """Returns the scale to try after `scale` (`None`: the guess); `None` where there is none."""
        lower, guess = lowered_scale(optimizer, self.scale_state(optimizer), scale), self.guess(optimizer)
        # On the way down from above it, the guess is not left out.
        return guess if scale is not None and scale > guess and (lower is None or lower < guess) else lower

    def change(self, optimizer, after, scale: float | None = None) -> _Change:
        """Returns what the step did to `optimizer`.

        Args:
            optimizer: The optimizer.
            after: The state that the step has left.
            scale: The scale at which the step was tried; by default that from before.
        """

        def grew(variable):
            return after.number(variable) > self._number(variable)

        moving = list(optimizer.scale_state.values())
        if optimizer.window is not None:
            # The scale moves when the window ends.
            moving.append(optimizer.window.overflowed)
        # A batch without rows is skipped, too, and neither its loss nor the scale has a part in that. It is never tried
        # below the guess; there another scale than the guess is a sign by itself, as at its floor a scale cannot move.
        begun = {} if scale is None else {id(optimizer.dynamic_scale): max(scale, self.guess(optimizer))}
        has_moved = any(after.number(v) != begun.get(id(v), self._number(v)) for v in moving)
        skipped = grew(optimizer.skipped_steps)
        overflowed = has_moved and skipped and not grew(optimizer.nonfinite_losses)
        return _Change(grew(optimizer.accepted_steps), skipped, overflowed)

    def put_back(self, step_state, scales: dict):
        """Gives `step_state` the values from before the step, and optimizers their new scales."""
        for variable in self._variables():
            step_state.write(variable, self._value(variable))
        for state, value in self._natives:
            state.assign(value)
        if self.are_all:
            training_backend.set_global_random_states(self._random)
            self._put_back_unbuilt(step_state)
        _write_scales(step_state, scales)

    def _put_back_unbuilt(self, step_state):
        """Gives the optimizers that the step has built the state that they had then."""
        for optimizer in self._unbuilt:
            if not optimizer.built:
                continue
            inner = optimizer.inner_optimizer
            anew = type(inner).from_config(inner.get_config())
            with training_backend.variable_scope(self._model):
                anew.build(optimizer.trainable_variables)
            for variable, initial in zip(inner.variables, anew.variables, strict=True):
                if id(variable) not in self._values:
                    step_state.write(variable, [ops.convert_to_numpy(initial.value)])


def _awaits_first_step(optimizer, step_state) -> bool:
    """Whether no step has counted at the scale of `optimizer`, which is where its rule begins.

    Only what files hold decides: a training that goes on from a file decides as one that never stopped. Steps that
    counted elsewhere are in the optimizer's record.
    """
    if not optimizer.dynamic or step_state.number(optimizer.accepted_steps) != optimizer.record.steps_before_scale:
        return False
    rule = optimizer.loss_scale_rule
    expected, present = rule.initial_state(), _scale_state(optimizer, step_state)
    # The scale has backed off once for each batch that no scale cured.
    for _ in range(MOST_LOST):
        if present == expected:
            return True
        expected = _after(rule, expected, is_finite=False)
    return False


def _note_steps_before_scale(optimizer, step_state):
    """Notes the counted steps of an optimizer whose scale has not moved: they counted elsewhere.

    `iterations` may come from a file of a training in float32, or from the user, for a schedule. A step that counts at
    the scale moves the state of its rule, and only a skipped step moves it back. A window counts its steps itself.
    """
    if not optimizer.dynamic or optimizer.window is not None:
        return
    rule = optimizer.loss_scale_rule
    initial = rule.initial_state()
    if _after(rule, initial, is_finite=True) == initial or step_state.number(optimizer.skipped_steps):
        return
    if _scale_state(optimizer, step_state) == initial:
        optimizer.record.steps_before_scale = step_state.number(optimizer.accepted_steps)


def _scale_state(optimizer, step_state) -> dict:
    return {name: step_state.number(optimizer.scale_state[name]) for name in optimizer.loss_scale_rule.initial_state()}


def is_stuck(optimizer) -> bool:
    """Whether no step has counted, and the gradients of several batches have overflowed at every scale."""
    counted = number(optimizer.accepted_steps) != optimizer.record.steps_before_scale
    return not counted and optimizer.record.incurable_batches >= MOST_LOST


def lowered_scale(optimizer, state: dict, scale: float | None = None) -> float | None:
    """Returns the next smaller loss scale by the rule of `optimizer`; `None` where there is none.

    Args:
        optimizer: A `LossScaleOptimizer`.
        state: The state of its rule, as numbers.
        scale: The present scale; by default that of `state`.
    """
    rule = optimizer.loss_scale_rule
    if scale is not None:
        state = {**state, "dynamic_scale": scale}
    scale = _scale_in(state, rule)
    # With hysteresis it takes several steps.
    for _ in range(_MOST_ATTEMPTS):
        new_state = _after(rule, state, is_finite=False)
        new_scale = _scale_in(new_state, rule)
        if new_scale < scale:
            # Below it, the reciprocal overflows.
            return new_scale if new_scale >= SMALLEST_SCALE else None
        if new_state == state:
            break
        state = new_state
    return None


def _scale_in(state: dict, rule) -> float:
    return number(rule.current_scale(_tensors(state)))


def _after(rule, state: dict, *, is_finite: bool) -> dict:
    new_state = rule.next_state(_tensors(state), ops.convert_to_tensor(is_finite))
    return {name: number(value) for name, value in new_state.items()}


def _tensors(state: dict) -> dict:
    return {
        name: ops.convert_to_tensor(value, "int32" if isinstance(value, int) else "float32")
        for name, value in state.items()
    }


def _with_headroom(optimizer, step_state, scale_found: float) -> float:
    """Returns the scale of the next step for one that has counted at `scale_found`."""
    lowest = max(scale_found / HEADROOM, min(scale_found, 1.0))
    scale, state = step_state.number(optimizer.dynamic_scale), _scale_state(optimizer, step_state)
    while (lower := lowered_scale(optimizer, state, scale)) is not None and lower >= lowest:
        scale = lower
    return scale


def _write_scales(step_state, scales: dict):
    for optimizer, scale in scales.items():
        step_state.write(optimizer.dynamic_scale, [np.array(scale)])


def _with_scales(logs, step_state, optimizers, scales: dict):
    """Writes the scales of the next step, and returns the logs with them."""
    _write_scales(step_state, scales)
    for optimizer, scale in scales.items():
        warn_below_one(optimizer, scale)
    in_use = [optimizer for optimizer in optimizers if optimizer.built]
    if in_use and in_use[0] in scales and isinstance(logs, dict) and "loss_scale" in logs:
        scale, shown = scales[in_use[0]], logs["loss_scale"]
        logs = {**logs, "loss_scale": scale if isinstance(shown, float) else ops.convert_to_tensor(scale, "float32")}
    return logs


def warn_below_one(optimizer, scale: float):
    """Warns, once for an optimizer, where its loss scale has come down below 1."""
    if scale >= 1 or optimizer.initial_scale < 1 or optimizer.record.is_told_below_one:
        return
    optimizer.record.is_told_below_one = True
    warnings.warn(
        f"The loss scale of optimizer '{optimizer.name}' has come down to {scale:.3g}: its gradients are larger than "
        "float16 holds, even unscaled. Training goes on, but small gradients are lost. 'mixed_bfloat16' needs no "
        "scale; smaller sample weights or a mean in place of a sum help, too.",
        stacklevel=3,
    )
