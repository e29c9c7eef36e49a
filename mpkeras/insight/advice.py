"""`advise`: which policy and which `jit_compile` pay off for a model on this machine, measured."""

import functools
import time

import keras
import numpy as np

from mpkeras import _keras
from mpkeras.devices import native
from mpkeras.insight.advice_report import AdviceReport
from mpkeras.insight.measuring.bench import Bench
from mpkeras.insight.measuring.grid import ROUNDS, Cell, measure_grid
from mpkeras.insight.measuring.subject import subject
from mpkeras.training.inventory import find_optimizers
from mpkeras.training.settings import check_model

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def advise(model, x, y=None, *, measure: bool = True, jit_compile=None, budget_s: float = 60.0, verbose: int = 1):
    """Says which policy and which `jit_compile` to train a model with, and how sure that is.

    Training steps in float32, bfloat16 and float16, compiled and not, are timed in interleaved rounds on your own
    batch, each with loss scaling, finite check and rollback as `mpkeras.make_train_step` has them; settings that are
    hopeless drop out early. Where 16 bits gain less than 4 % in speed and no memory, the advice is not to bother.

    The model is left exactly as it was: weights, dtype policies, optimizer, random generators, compiled functions.
    What is trained is a copy, where Keras can make one: of Functional and Sequential models by
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

    Your own `train_step` is not what is run, nor are metrics and `loss_weights`: they are the same in all settings.
    """
    check_model(model)
    _check_options(measure, budget_s)
    present_jit = _present_jit(model)
    settings = _settings(jit_compile, present_jit)
    if not measure:
        return unmeasured_advice(model)
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"Expected a compiled model, whose loss and optimizer can be measured. Received: model '{model.name}', "
            "which is not. Call `model.compile(optimizer, loss)` first, or pass `measure=False`."
        )
    loss_fn, y = loss_and_targets(model, y)
    return measured_advice(model, x, y, loss_fn, settings=settings, budget_s=budget_s, verbose=verbose)


def unmeasured_advice(model, file=None) -> AdviceReport:
    """Returns the advice that needs no data and no time; `file` as in `AdviceReport`."""
    return AdviceReport(model, [], _present_jit(model), native.probe(keras.backend.backend()), file=file)


def measured_advice(
    model, x, y, loss_fn, *, settings=None, budget_s=60.0, verbose=0, rounds=ROUNDS, file=None
) -> AdviceReport:
    """Returns the measured advice; as `advise`, with the loss that `mpkeras.make_train_step` takes.

    `file` is as in `AdviceReport`.
    """
    rows = _rows(x)
    present_jit = _present_jit(model)
    devices = native.probe(keras.backend.backend())
    cells = grid_of(settings or _settings(None, present_jit), native.choose(devices, keras.backend.backend())[0])
    notes: list = []
    started = time.perf_counter()
    with subject(model, x) as (trained, is_copy):
        bench = Bench(trained, x, y, _optimizer_maker(model, notes), loss_fn)
        left_s = max(budget_s - (time.perf_counter() - started), 0.0)
        measure_grid(cells, bench, budget_s=left_s, rounds=rounds, progress=_progress(verbose))
    if not any(cell.is_measured for cell in cells):
        # The first cell is always begun, so that one of them has failed.
        failure = next(cell for cell in cells if cell.failure is not None)
        remedy = "Try `model.train_on_batch(x, y)`." if file is None else "Give one that it takes: `--data FILE.npz`."
        raise ValueError(
            f"Expected a batch and a loss that model '{model.name}' can train on. Received: none of {len(cells)} "
            f"settings could be measured; {failure.name} {failure.failure}. {remedy}"
        ) from failure.error
    how = f"{'A copy of the model' if is_copy else 'The model itself'} trained on {rows} examples a step"
    notes.insert(0, f"{how}; all of it took {time.perf_counter() - started:.0f} s.")
    return AdviceReport(model, cells, present_jit, devices, memory_kind=bench.memory_kind, remarks=notes, file=file)


def grid_of(settings, native_policy: str) -> list:
    """Returns the cells, in the order in which they deserve a budget that may be short.

    Args:
        settings: Values of `jit_compile`, the present one first.
        native_policy: What suits the device.
    """
    first = [policy for policy in POLICIES if policy in ("float32", native_policy)]
    second = [policy for policy in POLICIES if policy not in first]
    return [Cell(policy, jit) for policies in (first, second) for jit in settings for policy in policies]


def _check_options(measure, budget_s):
    if not isinstance(measure, bool):
        raise TypeError(
            f"Expected `measure` to be True or False. Received: measure={measure!r}. Leave it out to measure."
        )
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not 0 < budget_s < float("inf"):
        raise ValueError(
            f"Expected `budget_s` to be a positive number of seconds. Received: budget_s={budget_s!r}. "
            "Leave it out for a minute."
        )


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
    shapes = [np.shape(value) for value in keras.tree.flatten(x)]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if len(rows) != 1 or rows == {0}:
        raise ValueError(
            "Expected `x` to be one batch: arrays with the same number of examples, at least one. Received: "
            f"x={type(x).__name__} of shapes {shapes[:3]}. Pass for example `x[:128]`, or the first batch of a dataset."
        )
    return rows.pop()


def loss_and_targets(model, y) -> tuple:
    """Returns the loss the model is compiled with and its targets as `make_train_step` takes them: by position."""
    loss = model.loss
    names = list(getattr(model, "output_names", None) or [])
    graph = _keras.graph_of(model)
    structure = None if graph is None else _keras.output_structure(graph)
    if isinstance(loss, dict) and names and not isinstance(structure, dict):
        loss = [loss.get(name) for name in names]
        y = [y.get(name) for name in names] if isinstance(y, dict) else y
    if isinstance(loss, (list, tuple)):
        if len(loss) == 1:
            return loss[0], y[0] if isinstance(y, (list, tuple)) and len(y) == 1 else y
        return {i: part for i, part in enumerate(loss) if part is not None}, y
    if isinstance(loss, dict):
        return {name: part for name, part in loss.items() if part is not None}, y
    outputs = keras.tree.flatten(structure) if structure is not None else []
    if len(outputs) > 1 and loss is not None:
        keys = list(structure) if isinstance(structure, dict) else range(len(outputs))
        return dict.fromkeys(keys, loss), y
    return loss, y


def _optimizer_maker(model, notes: list):
    """Returns a function that makes optimizers like the model's, and says in `notes` where it cannot."""
    optimizer = next(iter(find_optimizers(model).values()), None)
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    if optimizer is None:
        notes.append("Measured with Adam, as the model is not compiled.")
        return keras.optimizers.Adam
    make = functools.partial(_like, optimizer)
    try:
        make()
    except Exception as error:  # of an optimizer of the user's own
        notes.append(f"Measured with Adam: {type(optimizer).__name__} cannot be copied ({type(error).__name__}).")
        return keras.optimizers.Adam
    return make


def _like(optimizer):
    return type(optimizer).from_config(optimizer.get_config())


def _progress(verbose):
    if not verbose:
        return lambda done, total: None
    bars: list = []

    def progress(done, total):
        if not bars:
            bars.append(keras.utils.Progbar(total, verbose=verbose, unit_name="stage"))
        bars[0].update(done, finalize=done == total)

    return progress
