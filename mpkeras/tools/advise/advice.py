"""`advise`: which policy and which `jit_compile` pay off for a model on this machine, measured."""

import dataclasses
import math
import statistics
import time
from typing import NamedTuple

import keras

from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy
from mpkeras.seams import ConvertedLayer, ModelView, check_model, check_switch, dtypes, native
from mpkeras.tools.advise.bench import (
    ESTIMATE,
    NO_TIME,
    ROUNDS,
    Bench,
    Cell,
    failure_text,
    measure_grid,
    trainable_copy,
)
from mpkeras.tools.shared.arguments import check_call, check_verbose, checked_seconds, rows_of_batch
from mpkeras.tools.shared.compiled import loss_and_targets, unwrapped
from mpkeras.tools.shared.report import Figure, Report, bytes_text, make_figure, quartiles, shortened

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
_SIXTEEN_BITS = {"mixed_bfloat16": "bfloat16", "mixed_float16": "float16"}
# Matrix products: where most of the arithmetic of a model is, and what 16-bit units are made for.
_PRODUCT_LAYERS = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.RNN,
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras.layers.SimpleRNNCell,
    keras.layers.Conv1D.__mro__[1],  # what all convolutions derive from has no public name
    keras.layers.Conv1DTranspose.__mro__[1],
)
# Said of a model whose class has a step of its own.
_ANOTHER_STEP = (
    "Model '{name}' has {methods} of its own, not timed here: the times are of mpkeras' own step, which calls the "
    "model once and takes the loss of `compile`."
)
# A GPU waits for its next kernel rather than for arithmetic in a model with fewer weights than this.
_SMALL = 1_000_000
# A 16-bit policy has to be so many times as fast as float32 to be worth it: 4 %, as the choice is to be within 5 % of
# the best cell, and what is measured has an error.
WORTH = 1.04
# Or to need so much less memory, at nearly the speed of float32.
MEMORY_WORTH = 0.2
_NEARLY = 0.97
# Of two cells as near as this the one is chosen that asks for less: the present `jit_compile`, no loss scaling.
_TIE = 1.02
# Policy and slot dtype of each way. How layers compute is another choice; that of the first two is any.
_WAYS = {
    "float32": ("mixed_bfloat16", "float32"),
    "bfloat16 slots": ("mixed_bfloat16", dtypes.SMALL_DTYPE),
    "bfloat16 weights and slots": ("bfloat16", "auto"),
}


def advise(
    model,
    x,
    y=None,
    *,
    measure: bool = True,
    jit_compile: bool | tuple[bool, ...] | None = None,
    budget_s: float = 60.0,
    verbose: int = 1,
) -> "AdviceReport":
    """Says which policy and which `jit_compile` to train a model with, and how sure that is.

    Training steps in float32, bfloat16 and float16, compiled and not, are timed in interleaved rounds on your own
    batch, each with loss scaling, finite check and rollback as `mpkeras.make_train_step` has them; settings that are
    hopeless drop out early. Where 16 bits gain less than 4 % in speed and no memory, the advice is not to bother.
    The bytes of weights and optimizer state are counted: in float32, with `slot_dtype="bfloat16"`, under `"bfloat16"`.

    The model is left exactly as it was: weights, dtype policies, optimizer, random generators, compiled functions.
    A copy is trained, where Keras can make one: of Functional and Sequential models by
    `keras.models.clone_model`, of subclassed ones by their `get_config`. Of any other the model itself trains, and
    then all of its variables, generators and policies are put back. The copy comes first because nothing can
    go wrong with it, not even by killing the process in between; it costs the memory of the model once more.

    Args:
        model: A `keras.Model`, compiled with the loss and the optimizer that you train with, built or not.
        x, y: One batch, of the size that you train with, as for `train_on_batch`.
        measure: Whether steps are run. Without, the advice comes from the device and the kinds of layers alone: it
            takes no time, looks at no data and is unsure.
        jit_compile: The settings to measure, `True`, `False` or a tuple of both; by default both, and on torch
            the one that the model has, as there `torch.compile` takes minutes.
        budget_s: Seconds for all, compiling included. A setting whose compilation would not fit is left out and
            says so; one compilation may pass the limit, as it cannot be interrupted.
        verbose: 1 shows Keras' progress bar, 0 nothing.

    Returns:
        An `AdviceReport`: `str()` is a table with the advice below, `.policy` and `.jit_compile` are what to choose,
        `.to_dict()` is what JSON can hold, `.plot()` a matplotlib figure.

    Raises:
        ValueError: If the model is not compiled, an argument is out of its range, or no setting can train on
            the batch.
        TypeError: If `model` is no `keras.Model`, or `jit_compile` or `measure` is no bool.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 4)), np.ones((8, 1))
    >>> report = mpkeras.advise(model, x, y, measure=False)  # leave it out to measure, within a minute
    >>> print(report)
    Advice for model ...
    >>> model.compile("sgd", "mse", jit_compile=report.jit_compile)
    >>> model = mpkeras.prepare(model, report.policy)

    A `train_step` or a `compute_loss` of your own is not what is run, which the report says, nor are metrics and
    `loss_weights`: they are the same in all settings.
    """
    check_model(model)
    check_switch("measure", measure, "Leave it out to measure.")
    check_verbose(verbose)
    budget_s = checked_seconds("budget_s", budget_s, "Leave it out for a minute.")
    present_jit = _present_jit(model)
    settings = _settings(jit_compile, present_jit)
    if not measure:
        return unmeasured_advice(model)
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"Expected a compiled model, whose loss and optimizer can be measured. Received: model '{model.name}', "
            "which is not. Call `model.compile(optimizer, loss)` first, or pass `measure=False`."
        )
    check_call(model, "Measure the models inside, compiled with a loss each, or pass `measure=False`.")
    loss_fn, y = loss_and_targets(model, y)
    return measured_advice(model, x, y, loss_fn, settings=settings, budget_s=budget_s, verbose=verbose)


def unmeasured_advice(model, file=None) -> "AdviceReport":
    """Returns the advice that needs no data and no time."""
    return AdviceReport(model, [], _present_jit(model), native.probe(keras.backend.backend()), file=file)


def measured_advice(
    model, x, y, loss_fn, *, settings=None, budget_s=60.0, verbose=0, rounds=ROUNDS, file=None
) -> "AdviceReport":
    """Returns the measured advice; as `advise`, with the loss that `mpkeras.make_train_step` takes."""
    rows = _rows(x)
    present_jit = _present_jit(model)
    devices = native.probe(keras.backend.backend())
    cells = grid_of(settings or _settings(None, present_jit), native.choose(devices, keras.backend.backend())[0])
    own_methods = " and ".join(f"`{name}`" for name in ModelView(model).own_methods)
    notes = [_ANOTHER_STEP.format(name=model.name, methods=own_methods)] if own_methods else []
    started = time.perf_counter()
    with trainable_copy(model, x) as (trained, is_copy):
        bench = Bench(trained, x, y, _optimizer_maker(model, notes), loss_fn)
        left_s = max(budget_s - (time.perf_counter() - started), 0.0)
        bar = keras.utils.Progbar(len(cells) + rounds, verbose=verbose, unit_name="stage")
        measure_grid(cells, bench, budget_s=left_s, rounds=rounds, progress=bar.update)
    if not any(cell.is_measured for cell in cells):
        # The first cell is always begun, so that one of them has failed.
        failure = next(cell for cell in cells if cell.failure is not None)
        # Longer than in the table: the shapes that do not go together stand at the end of Keras' messages.
        why = failure.failure if failure.error is None else shortened(failure_text(failure.error)).rstrip(".")
        remedy = "Try `model.train_on_batch(x, y)`." if file is None else "Give one that it takes: `--data FILE.npz`."
        if own_methods:
            remedy = f"Its {own_methods} is not run here: compile it with a loss that takes about as long."
        raise ValueError(
            f"Expected a batch and a loss that model '{model.name}' can train on. Received: none of {len(cells)} "
            f"settings could be measured; {failure.name} {why}. {remedy}"
        ) from failure.error
    how = f"{'A copy of the model' if is_copy else 'The model itself'} trained on {rows} examples a step"
    notes.insert(0, f"{how}; all of it took {time.perf_counter() - started:.0f} s.")
    memory_kind = bench.memory_kind
    # The copy and its optimizers: the report builds one more optimizer, where the model's is not built.
    del trained, bench
    return AdviceReport(model, cells, present_jit, devices, memory_kind=memory_kind, remarks=notes, file=file)


def grid_of(settings, native_policy: str) -> list:
    """Returns the cells, in the order in which they deserve a budget that may be short."""
    first = [policy for policy in POLICIES if policy in ("float32", native_policy)]
    second = [policy for policy in POLICIES if policy not in first]
    return [Cell(policy, jit) for policies in (first, second) for jit in settings for policy in policies]


def _present_jit(model) -> bool:
    # `jit_compile` is there once the model is compiled; on torch "auto" means no.
    if getattr(model, "compiled", False):
        return bool(model.jit_compile)
    return keras.backend.backend() != "torch" and model.supports_jit


def _settings(jit_compile, present_jit: bool) -> tuple:
    if jit_compile is None:
        return (present_jit,) if keras.backend.backend() == "torch" else (present_jit, not present_jit)
    settings = jit_compile if isinstance(jit_compile, (tuple, list)) else (jit_compile,)
    if not settings or any(not isinstance(setting, bool) for setting in settings):
        raise TypeError(
            "Expected `jit_compile` to be True, False or a tuple of both. Received: "
            f"jit_compile={jit_compile!r}. Leave it out for both."
        )
    return tuple(sorted(set(settings), key=lambda setting: setting != present_jit))


def _rows(x) -> int:
    rows = rows_of_batch(x)
    if len(rows) > 1:
        raise ValueError(
            "Expected `x` to be one batch: arrays with the same number of examples. Received: "
            f"x={type(x).__name__} of {sorted(rows)} examples. Pass for example `x[:128]`, or the first batch of a "
            "dataset."
        )
    return rows.pop()


def _optimizer_of(model):
    """Returns the optimizer that the model trains with, unwrapped; `None` if it has none."""
    return unwrapped(next(iter(ModelView(model).optimizers().values()), None))


def _optimizer_maker(model, notes: list):
    """Returns a function that makes optimizers like the model's, and says in `notes` where it cannot."""
    optimizer = _optimizer_of(model)
    if optimizer is None:
        notes.append("Measured with Adam, as the model is not compiled.")
        return keras.optimizers.Adam

    def make():
        return type(optimizer).from_config(optimizer.get_config())

    try:
        make()
    except Exception as error:  # of an optimizer of the user's own
        notes.append(f"Measured with Adam: {type(optimizer).__name__} cannot be copied ({type(error).__name__}).")
        return keras.optimizers.Adam
    return make


@dataclasses.dataclass
class Decision:
    """The cell to choose and the numbers behind it.

    Attributes:
        reference: The fastest float32 cell; `None` if none was measured.
        rival: The fastest cell beside `chosen`; `None` if there is none.
        best_16_bit: The fastest 16-bit cell; `None` if none was measured.
        because: `"speed"`, `"memory"` or `"none"`.
        speedup: How many times as fast as `reference` the best 16-bit cell is: `(q1, median, q3)` over the rounds.
        memory_saving: Share of the memory of `reference` that it saves, or `None` if not measured.
        agreeing: Share of the rounds that agree, between 0 and 1.
        rounds: Number of rounds that compare the two.
        lacked_time: Whether 16 bits, or float32, have no cell that was measured, and one that time was up for.
    """

    chosen: Cell
    reference: Cell | None
    rival: Cell | None
    best_16_bit: Cell | None
    because: str
    speedup: tuple | None = None
    memory_saving: float | None = None
    agreeing: float = 1.0
    rounds: int = 0
    lacked_time: bool = False

    @property
    def bother(self) -> bool:
        """Whether a 16-bit policy is chosen."""
        return self.because != "none"

    def sureness(self) -> str:
        """Returns `"sure"`, `"fairly sure"` or `"not sure"`."""
        if self.reference is None or self.best_16_bit is None:
            return "not sure" if self.lacked_time else "sure"  # nothing to compare
        if self.rounds >= 5 and self.agreeing >= 0.95:
            return "sure"
        return "fairly sure" if self.rounds >= 3 and self.agreeing >= 0.75 else "not sure"


def decide(cells, present_jit: bool, memory_counts: bool = True) -> Decision | None:
    """Returns which of the measured cells to choose, and how sure that is; `None` if there are none."""
    measured = [cell for cell in cells if cell.is_measured]
    if not measured:
        return None
    reference = _fastest([cell for cell in measured if cell.policy == "float32"], present_jit)
    best = _fastest([cell for cell in measured if cell.policy != "float32"], present_jit)
    if reference is None or best is None:
        chosen, because = reference or best, "none" if best is None else "speed"
        missing = [cell for cell in cells if (cell.policy == "float32") != (chosen.policy == "float32")]
        lacked_time = any(cell.failure == NO_TIME for cell in missing)
        return Decision(chosen, reference, _rival(chosen, measured), best, because, lacked_time=lacked_time)
    ratios = paired_ratios(reference, best)
    speedup, saving = quartiles(ratios), None
    if memory_counts and reference.memory_bytes and best.memory_bytes is not None:
        saving = (reference.memory_bytes - best.memory_bytes) / reference.memory_bytes
    if speedup[1] >= WORTH:
        because, agreeing = "speed", [ratio > 1.0 for ratio in ratios]
    elif saving is not None and saving >= MEMORY_WORTH and speedup[1] >= _NEARLY:
        because, agreeing = "memory", [ratio >= _NEARLY for ratio in ratios]
    else:
        because, agreeing = "none", [ratio < WORTH for ratio in ratios]
    chosen = reference if because == "none" else best
    share = sum(agreeing) / len(agreeing)
    return Decision(chosen, reference, _rival(chosen, measured), best, because, speedup, saving, share, len(ratios))


def paired_ratios(of, to) -> list:
    """Returns the ratio of the times of two cells in each of the rounds that both took part in."""
    return [first / second for first, second in zip(of.times_ms, to.times_ms, strict=False)]


def rounds_won(cell, against) -> tuple:
    """Returns `(rounds in which cell was faster, rounds)`."""
    ratios = paired_ratios(against, cell)
    return sum(ratio > 1.0 for ratio in ratios), len(ratios)


def _fastest(cells, present_jit: bool):
    if not cells:
        return None
    fastest = min(cells, key=lambda cell: cell.median_ms)
    near = [cell for cell in cells if statistics.median(paired_ratios(cell, fastest)) <= _TIE]
    return min(near, key=lambda cell: (cell.jit_compile != present_jit, cell.policy == "mixed_float16", cell.median_ms))


def _rival(chosen, measured):
    return min((cell for cell in measured if cell is not chosen), key=lambda cell: cell.median_ms, default=None)


class Storage(NamedTuple):
    """The bytes that training keeps if weights and slots are stored in one of the ways."""

    name: str
    state_bytes: int  # of the weights, trained or not, and of the slots
    gradient_bytes: int  # each in the dtype of its weight


def storage_choices(model, optimizer) -> list[Storage]:
    """Returns a `Storage` for each way, the largest first, counted from the variables that are there.

    Layers that stay in float32, frozen weights and averages of weights are counted in the dtypes they would have.
    """
    inner = unwrapped(optimizer)
    if not inner.built:
        # A copy, built for the moment: it needs the memory of the slots, as training will.
        try:
            inner = type(inner).from_config(inner.get_config())
        except Exception:  # of an optimizer of the user's own
            return []
        with ModelView(model).variable_scope():
            inner.build(model.trainable_variables)
    choices = []
    for name, (policy, slot_dtype) in _WAYS.items():
        bytes_by_part = ModelView(model).training_bytes_under(Policy(policy), slot_dtype, inner)
        sums = {group: sum(by_dtype.values()) for group, by_dtype in bytes_by_part.items()}
        choices.append(Storage(name, sums["weights"] + sums["slots"], sums["gradients"]))
    return choices


class AdviceReport(Report):
    """What `advise` returns.

    Attributes:
        policy: Name of the policy to choose.
        jit_compile: The `jit_compile` to choose.
        bother: Whether 16 bits are worth it.
        sureness: `"sure"`, `"fairly sure"`, `"not sure"`, or `"not measured"`.
        cells: One for each setting: `policy`, `jit_compile`, `times_ms` (one a round), `memory_bytes`, `failure`.
        decision: The comparison behind the choice; `None` if nothing was measured.
        memory_kind: The kind of memory of the cells; `None` if nobody tells.
        present_jit: The `jit_compile` that the model has.
        native_policy: The policy that the device suggests.
        storage: What training keeps under each way to store weights and optimizer state: `name`, `state_bytes`,
            `gradient_bytes`. Empty if the model is not built or has no optimizer, or a copy of that cannot be made.
        file: The file that was asked about at the command line, whose words the advice is then in; `None` in Python.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> report = mpkeras.advise(model, np.ones((8, 4)), measure=False)
    >>> report.sureness, report.to_dict()["policy"] == report.policy
    ('not measured', True)
    """

    def __init__(self, model, cells, present_jit: bool, devices, *, memory_kind=None, remarks=(), file=None):
        self.cells = list(cells)
        self.present_jit = present_jit
        self.memory_kind = memory_kind
        self.backend = keras.backend.backend()
        self.native_policy, self._native_reason = native.choose(devices, self.backend)
        self.file = file
        about = "Training steps of" if self.cells else "Advice for"
        self.title = f"{about} model '{model.name}' on {self.backend}" + ("" if self.cells else ", nothing measured")
        self._name, self._remarks = model.name, list(remarks)
        self._computes_in_16_bits = ModelView(model).computes_in(tuple(_SIXTEEN_BITS.values()))
        self.float8_can_pay, self._float8_reason = _float8(model, devices, self.backend)
        self._has_accelerator = any(device.kind != "cpu" for device in devices)
        self._parameters = sum(math.prod(weight.shape) for weight in model.weights)
        self._product_share = _product_share(model)
        optimizer = _optimizer_of(model)
        self.storage = storage_choices(model, optimizer) if optimizer is not None and ModelView(model).is_built else []
        self._optimizer_name = type(optimizer).__name__
        self.decision = decide(self.cells, present_jit, memory_counts=memory_kind not in (None, ESTIMATE))
        # float32 with the present `jit_compile`, if it was measured.
        present = Cell("float32", present_jit).name
        self._baseline = next((cell for cell in self.cells if cell.is_measured and cell.name == present), None)
        self._chosen = None if self.decision is None else self.decision.chosen
        if self.decision is not None:
            self.policy, self.jit_compile = self.decision.chosen.policy, self.decision.chosen.jit_compile
            self.bother, self.sureness = self.decision.bother, self.decision.sureness()
        else:
            has_products = self._product_share is None or self._product_share >= 0.5
            self.bother = self.native_policy != "float32" and has_products
            self.policy = self.native_policy if self.bother else "float32"
            # A CPU gains from 16 bits in a TensorFlow graph alone, and under XLA loses.
            self.jit_compile = present_jit and (self._has_accelerator or not self.bother)
            self.sureness = "not measured"

    def table(self) -> tuple[list, list]:
        header = ["Policy", "jit_compile", "Step (ms)", "Quartiles", "Speed", "Memory", "Rounds", ""]
        return header, [[cell.policy, str(cell.jit_compile), *self._found(cell)] for cell in self.cells]

    def _found(self, cell) -> list:
        if not cell.is_measured:
            return ["-", "-", "-", "-", "-", cell.failure or "not measured"]
        q1, median, q3 = quartiles(cell.times_ms)
        return [
            f"{median:.2f}",
            f"{q1:.2f} - {q3:.2f}",
            "-" if self._baseline is None else f"{statistics.median(paired_ratios(self._baseline, cell)):.2f}",
            "-" if cell.memory_bytes is None else bytes_text(cell.memory_bytes),
            str(len(cell.times_ms)),
            "<- choose" if cell is self._chosen else "",
        ]

    def notes(self) -> list:
        if self.decision is None:
            return self._unmeasured_notes()
        lines = [self._choice(self.decision), *self._how(), *self._sureness_lines(self.decision)]
        if self.decision.best_16_bit is not None:
            lines.append(self._why())
        if self._baseline is not None:
            lines.append(f"Speed is against float32 with jit_compile={self.present_jit}, as the model has it now.")
        lines.append(f"Memory is {self.memory_kind}." if self.memory_kind else "Nobody here tells how much memory.")
        return lines + self._storage_lines() + [self._about_float8()] + self._remarks

    def _about_float8(self) -> str:
        verb = "may pay, and was not measured" if self.float8_can_pay else "cannot pay here"
        return f"`mixed_float8` {verb}: {self._float8_reason}."

    def _choice(self, decision: Decision) -> str:
        if decision.best_16_bit is None and decision.lacked_time:
            more = "`--budget`" if self.file is not None else "`budget_s`"
            return f"Nothing to say of 16 bits, as time was up before one was measured: give more by {more}."
        if decision.best_16_bit is None:
            return f"{self._do_not_bother()} No 16-bit policy could be measured."
        if decision.reference is None:
            return f"Choose {self._setting}: float32 could not be measured."
        if decision.because == "none":
            best = f"The best in 16 bits, {decision.best_16_bit.name}, is {_times(decision.speedup)} as fast as it."
            return f"{self._do_not_bother()} {best}"
        saving = decision.memory_saving or 0.0
        speed = f"{_times(decision.speedup)} as fast as the best float32 step"
        if decision.because == "memory":
            return f"Choose {self._setting}: it needs {saving:.0%} less memory, and is {speed}."
        memory = f" and needs {saving:.0%} less memory" if saving > 0.005 else ""
        return f"Choose {self._setting}: it is {speed}{memory}."

    @property
    def _setting(self) -> str:
        return f"{self.policy} with jit_compile={self.jit_compile}"

    def _do_not_bother(self) -> str:
        is_present = self.jit_compile == self.present_jit and not self._computes_in_16_bits
        return f"Do not bother with 16 bits: {'stay with' if is_present else 'use'} {self._setting}."

    def _how(self) -> list:
        """Returns the commands that follow the advice, for who asked at the command line."""
        if self.file is None or not self.bother:
            return []
        return [
            f"`mpkeras run --policy {self.policy} SCRIPT` trains so, with `jit_compile` as the script compiles; "
            f"`mpkeras convert {self.file} --policy {self.policy} OUT.keras` converts the file."
        ]

    def _sureness_lines(self, decision: Decision) -> list:
        lines = []
        if decision.rounds:
            rounds = f"{round(decision.agreeing * decision.rounds)} of {decision.rounds} rounds"
            what = {
                "speed": f"it was faster than the best float32 step in {rounds}",
                "memory": f"it was about as fast as float32, or faster, in {rounds}",
                "none": f"16 bits were less than {WORTH - 1.0:.0%} faster in {rounds}",
            }[decision.because]
            lines.append(f"{self.sureness.capitalize()}: {what}.")
        if decision.rival is not None and decision.rival is not decision.reference:
            won, rounds = rounds_won(decision.chosen, decision.rival)
            lines.append(f"It was faster than the runner-up ({decision.rival.name}) in {won} of {rounds} rounds.")
        if self._baseline not in (None, decision.chosen, decision.reference):
            speed = quartiles(paired_ratios(self._baseline, decision.chosen))
            lines.append(f"It is {_times(speed)} as fast as float32 with the present jit_compile={self.present_jit}.")
        return lines

    def _why(self) -> str:
        if self.policy == self.native_policy:
            return f"Why: {self._native_reason}."
        if self.policy in _SIXTEEN_BITS:
            return f"Why: it was measured so, although {self._native_reason}."
        if self._has_accelerator and self._parameters < _SMALL:
            why = f"a model of {self._parameters:,} parameters waits for its kernels to start, not for arithmetic"
        elif self._product_share is not None and self._product_share < 0.5:
            why = f"{self._product_share:.0%} of the weights are in matrix products, which 16 bits speed up"
        else:
            why = "what this model does with its time is something else, on this batch"
        return f"Why: {self._native_reason}; but {why}."

    def add_remark(self, line: str):
        """Adds a line to the end of the notes.

        Args:
            line: A sentence.
        """
        self._remarks.append(line)

    def _storage_lines(self) -> list:
        """Returns what weights and slots need in each way, and how to store them in less where that is much."""
        if not self.storage or not self._parameters:
            return []
        hows = ("in float32", 'with `slot_dtype="bfloat16"`', 'under "bfloat16"')
        sizes = [
            f"{bytes_text(way.state_bytes)} ({way.state_bytes / self._parameters:.1f} bytes a parameter) {how}"
            for way, how in zip(self.storage, hows, strict=True)
        ]
        lines = [f"Weights and optimizer state, with {self._optimizer_name}: {', '.join(sizes)}."]
        saving = self._storage_saving()
        if saving < MEMORY_WORTH:
            lines.append(f"Small state would save {saving:.0%} of the memory at most: the rest is what a step needs.")
        elif self.file is not None:
            lines.append(
                "Where memory is what is short: `mpkeras run --policy bfloat16 SCRIPT` stores both in bfloat16."
            )
        elif self.storage[1].state_bytes < self.storage[0].state_bytes:
            slots = f'mpkeras.Policy("{self.policy}", slot_dtype="bfloat16")'
            lines.append(
                f"Where memory is what is short: `mpkeras.prepare(model, {slots})` stores the optimizer state in half, "
                '`mpkeras.prepare(model, "bfloat16")` the weights as well.'
            )
        else:
            lines.append('Where memory is what is short: `mpkeras.prepare(model, "bfloat16")` stores weights in half.')
        return lines

    def _storage_saving(self) -> float:
        """Returns the share of all memory that weights and slots in bfloat16 would save."""
        # The bytes of a step beside the state. Where nobody tells, the gradients at least.
        step = self.storage[0].gradient_bytes
        if self.memory_kind not in (None, ESTIMATE) and self._chosen and self._chosen.memory_bytes is not None:
            step = self._chosen.memory_bytes
        largest, smallest = self.storage[0].state_bytes, self.storage[-1].state_bytes
        return (largest - smallest) / (largest + step)

    def _unmeasured_notes(self) -> list:
        lines = ["Not measured, and so not sure: this is a guess from the device and the layers alone."]
        lines += [f"Try {self._setting}." if self.bother else self._do_not_bother(), *self._how()]
        if self._product_share is None:
            share = "how many of its weights are in matrix products is not known, as it is not built"
        else:
            share = f"{self._product_share:.0%} of the {self._parameters:,} weights are in matrix products"
        lines.append(f"Why: {self._native_reason}; {share}.")
        if self.bother and self._has_accelerator and self._parameters < _SMALL:
            lines.append("A model as small as this may gain nothing: it waits for its kernels to start.")
        lines += self._storage_lines()
        if self.file is None:
            lines.append("Leave out `measure=False` to have steps on your own batch timed.")
        else:
            lines.append("Leave out `--no-measure` to have steps timed, with `--data FILE.npz` on your own batch.")
        return [*lines, self._about_float8(), *self._remarks]

    def to_dict(self) -> dict:
        content = {
            "model": self._name,
            "backend": self.backend,
            "keras": keras.__version__,
            "policy": self.policy,
            "jit_compile": self.jit_compile,
            "bother": self.bother,
            "sureness": self.sureness,
            "present_jit_compile": self.present_jit,
            "native_policy": self.native_policy,
            "native_reason": self._native_reason,
            "parameters": self._parameters,
            "memory_is": self.memory_kind,
            "float8": {"can_pay": self.float8_can_pay, "reason": self._float8_reason},
            "storage": [way._asdict() for way in self.storage],
            "advice": self.notes(),
            "cells": [_cell_dict(cell) for cell in self.cells],
        }
        decision = self.decision
        if decision is not None:
            content |= {
                "because": decision.because,
                "speedup": _named(decision.speedup),
                "memory_saving": decision.memory_saving,
                "share_of_rounds_that_agree": decision.agreeing,
                "runner_up": None if decision.rival is None else decision.rival.name,
            }
        return content

    def plot(self) -> Figure:
        """Returns a figure: a bar for each measured setting, as long as its step, with the quartiles."""
        measured = [cell for cell in self.cells if cell.is_measured][::-1]
        figure = make_figure(figsize=(7, 1.4 + 0.45 * max(len(measured), 1)))
        axes = figure.subplots()
        if not measured:
            axes.text(0.5, 0.5, "nothing measured", ha="center", va="center", transform=axes.transAxes)
            axes.set_axis_off()
            return figure
        spread = [quartiles(cell.times_ms) for cell in measured]
        medians = [median for _, median, _ in spread]
        errors = [[median - q1 for q1, median, _ in spread], [q3 - median for _, median, q3 in spread]]
        colors = ["tab:green" if cell is self._chosen else "tab:gray" for cell in measured]
        names = [f"{cell.policy}, jit {'on' if cell.jit_compile else 'off'}" for cell in measured]
        bars = axes.barh(names, medians, xerr=errors, capsize=3, color=colors, alpha=0.8)
        axes.bar_label(bars, labels=[f"{median:.3g}" for median in medians], padding=6)
        axes.margins(x=0.12)
        # A setting ten times slower would leave the others no room to differ.
        if max(medians) > 10 * min(medians):
            axes.set_xscale("log")
        axes.set(xlabel="ms a step: median and quartiles of the rounds; green: the advice", title=self.title)
        return figure


def _cell_dict(cell) -> dict:
    return {
        "policy": cell.policy,
        "jit_compile": cell.jit_compile,
        "step_time_ms": _named(quartiles(cell.times_ms)) if cell.is_measured else None,
        "rounds": len(cell.times_ms),
        "preparation_s": cell.preparation_s,
        "memory_bytes": cell.memory_bytes,
        "failure": cell.failure,
    }


def _named(spread) -> dict | None:
    return None if spread is None else dict(zip(("q1", "median", "q3"), spread, strict=True))


def _times(speedup) -> str:
    q1, median, q3 = speedup
    return f"{median:.2f} times (quartiles {q1:.2f} to {q3:.2f})"


def _float8(model, devices, backend) -> tuple[bool, str]:
    """Returns whether `mixed_float8` can make a step faster here, and why (not)."""
    has_units, reason = native.float8_units(devices, backend)
    if not has_units:
        return False, reason
    reasons = ModelView(model).reasons_against_float8(get_policy("mixed_float8")).values()
    fitting = sum(why is None for why in reasons)
    return fitting > 0, f"{reason}, and {fitting} of {len(reasons)} layers with a product fit"


def _product_share(model) -> float | None:
    """Returns the share of the weights of `model`, frozen ones included, that layers have which multiply matrices.

    `None` if it is not built.
    """
    if not ModelView(model).is_built:
        return None
    in_products = {
        id(weight): math.prod(weight.shape)
        for layer in ModelView(model).layers
        if isinstance(layer, _PRODUCT_LAYERS)
        for weight in ConvertedLayer(layer).own_variables
    }
    total = sum(math.prod(weight.shape) for weight in model.weights)
    return sum(in_products.values()) / total if total else 0.0
