"""`run_demo`: trains each task under each policy with each seed, by a plain `fit` with the `MixedPrecision` callback.

The first steps of each policy say how long all of it would take; what takes too long is shortened or left out.
"""

import dataclasses
import json
import math
import textwrap
import time
import traceback

import keras
from keras import ops

from mpkeras.demo import summary
from mpkeras.demo.summary import BASELINE
from mpkeras.demo.tasks import TASKS
from mpkeras.policies.registry import get_policy
from mpkeras.seams import MixedPrecision, devices, dtypes, missing_kernel_rules, policy_alone
from mpkeras.tools.advise.bench import orders_in_turn
from mpkeras.training.prepare import prepare
from mpkeras.training.step import make_train_step

ROUNDS = 30
# The first calls trace, compile and fill caches.
WARM_UP_ROUNDS = 3
# Of the time of a training step, for as many held-out examples: one pass forward instead of one there and one back.
_FORWARD = 1 / 3


def run_demo(
    task_names, policies, *, seeds: int, epochs=None, minutes: float, quick: bool, out, width: int = 110, verbose=2
) -> tuple:
    """Trains, writes `demo.json` and `demo.png`, and returns the result as a dictionary for JSON and as text."""
    started = time.perf_counter()
    tasks = [TASKS[name](quick=quick) for name in task_names]
    data_sets = [task.load() for task in tasks]
    where = devices.environment()
    heading = f"mpkeras demo: Keras {where['keras']}, {where['backend']} on {where['device']}, {where['cpu']}"
    print(f"{len(tasks) * len(policies) * seeds} runs of `fit`: {', '.join(policies)}", flush=True)
    records, step_times_ms, plans = compare(
        tasks, data_sets, policies, seeds, epochs, limit_s=60 * minutes, verbose=verbose
    )
    rows = summary.summarize(tasks, policies, records, step_times_ms, plans)
    sentence = "--quick shows that everything runs; its models are too small to measure anything."
    if not quick:
        sentence = summary.verdict(rows)
    json_path, png_path = out / "demo.json", out / "demo.png"
    summary.save_picture(png_path, rows, records, {task.name: task.title for task in tasks}, heading)
    wall_time_s = round(time.perf_counter() - started, 1)
    result = {
        "format": 2,
        "environment": where,
        "settings": {
            "tasks": {
                task.name: settings(task, data_set, epochs) for task, data_set in zip(tasks, data_sets, strict=True)
            },
            "policies": policies,
            "seeds": seeds,
            "quick": quick,
            "jit_compile": uses_xla(),
            "minutes": minutes,
            "timed_rounds": {task: len(next(iter(times.values()), [])) for task, times in step_times_ms.items()},
        },
        "verdict": sentence,
        "summary": rows,
        "plans": {task: {name: plan.to_dict() for name, plan in of_task.items()} for task, of_task in plans.items()},
        "runs": records,
        "step_times_ms": step_times_ms,
        "wall_time_s": wall_time_s,
        "files": {"json": str(json_path), "png": str(png_path)},
    }
    result = without_non_finite(result)
    json_path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    rounds = sorted({len(times) for of_task in step_times_ms.values() for times in of_task.values()} or {0})
    text = summary.render(rows, heading, " or ".join(map(str, rounds)), width)
    written = f"Written to {json_path} and {png_path} after {wall_time_s:.0f} s."
    return result, f"\n{text}\n\n{textwrap.fill(sentence, width)}\n\n{written}"


def without_non_finite(value):
    """Returns `value` with every NaN and infinity in it as `None`: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compare(tasks, data_sets, policies, seeds: int, epochs=None, *, limit_s: float, verbose=2) -> tuple:
    """Returns `(records, step_times_ms, plans)`: of each run in turn, of single steps, and what was to be run.

    The last two are dictionaries by task and policy.
    """
    records, step_times_ms, plans = [], {}, {}
    for task, data_set in zip(tasks, data_sets, strict=True):
        models, plans[task.name] = _planned(task, data_set, policies, seeds, epochs or task.epochs, limit_s)
        failed = {policy for policy in policies if policy not in models}
        for seed in range(seeds):
            for policy in policies:
                # A single failure is enough: the device causes it, not the seed.
                if (policy in failed and seed) or seed >= plans[task.name][policy].seeds:
                    continue
                print(f"{task.name}, {policy}, seed {seed + 1} of {plans[task.name][policy].seeds}", flush=True)
                record = run(task, data_set, policy, seed, epochs or task.epochs, verbose)
                if record["error"] is not None:
                    print(f"not run: {record['error']}", flush=True)
                    failed.add(policy)
                records.append(record)
        planned = plans[task.name]
        timed = {policy: m for policy, m in models.items() if policy not in failed and planned[policy].seeds}
        round_s = sum(planned[policy].step_ms / 1e3 for policy in timed)
        rounds = rounds_within(round_s, limit_s, ROUNDS)
        about = duration((rounds + WARM_UP_ROUNDS) * round_s)
        print(f"{task.name}, timing steps of {', '.join(timed)} in turn: about {about}", flush=True)
        step_times_ms[task.name] = interleaved_step_times(
            timed, data_set.x_train, data_set.y_train, task.batch_size, rounds
        )
    return records, step_times_ms, plans


def _planned(task, data_set, policies, seeds, epochs, limit_s) -> tuple:
    """Returns a prepared model and a `Plan` for each policy, by what its first steps take, and prints them.

    A policy whose steps the backend cannot run here has a plan and no model: its first run says why.
    """
    models, plans = {}, {}
    held_out = epochs * len(data_set.x_held_out)
    for policy in policies:
        try:
            model = _compiled(task, data_set, 0, epochs)
            compile_s, step_s = first_steps(model, policy, data_set.x_train, data_set.y_train, task.batch_size)
        except Exception as error:
            if not _is_about_the_device(error):
                raise
            plans[policy] = Plan(seeds, seeds)
            continue
        models[policy] = model
        run_s = estimated_run_s(compile_s, step_s, task.steps(data_set, epochs), task.batch_size, held_out)
        plan = plans[policy] = plan_case(seeds, run_s, step_s, limit_s, is_baseline=policy == BASELINE)
        about = plan.shortened or f"about {duration(plan.seeds * run_s)} for {counted(plan.seeds)}"
        print(f"{task.name}, {policy}: {about}", flush=True)
    return models, plans


def run(task, data_set, policy: str, seed: int, epochs: int, verbose=2) -> dict:
    """Trains `task` once and returns its record, which holds plain numbers, as JSON does.

    A case that the backend cannot run on this device (it has no float16 kernel for some layer) is a result
    too: its record has an `error` and no numbers.
    """
    record = {"task": task.name, "policy": policy, "seed": seed, "error": None}
    started = time.perf_counter()
    try:
        record.update(_train(task, data_set, policy, seed, epochs, verbose))
    except Exception as error:
        if not _is_about_the_device(error):
            raise
        reason = str(error).strip() or "no message"
        record["error"] = f"{type(error).__name__}: {reason.splitlines()[0][:200]}"
        record["traceback"] = traceback.format_exc()
    record["wall_time_s"] = round(time.perf_counter() - started, 2)
    return record


def _is_about_the_device(error: Exception) -> bool:
    """Returns whether the backend cannot run this here; all other errors are mistakes in the program."""
    # Each backend has exceptions of its own for a missing kernel or too little memory.
    from_backend = type(error).__module__.split(".")[0] in ("tensorflow", "jax", "jaxlib", "torch")
    return from_backend or isinstance(error, (RuntimeError, MemoryError))


def _compiled(task, data_set, seed, epochs):
    keras.utils.set_random_seed(seed)
    # Under float32 whatever the process' global policy is: the callback alone brings the policy in.
    with policy_alone("float32", compile_left_alone=True):
        model = task.build()
        model.compile(
            optimizer=_optimizer(task, data_set, epochs),
            loss=task.loss(),
            metrics=task.metrics(),
            jit_compile=uses_xla(),
        )
    return model


def _train(task, data_set, policy, seed, epochs, verbose) -> dict:
    model = _compiled(task, data_set, seed, epochs)
    history = model.fit(
        data_set.x_train,
        data_set.y_train,
        batch_size=task.batch_size,
        epochs=epochs,
        steps_per_epoch=task.steps_per_epoch,
        validation_data=(data_set.x_held_out, data_set.y_held_out),
        validation_batch_size=128,
        callbacks=[MixedPrecision(policy)],
        verbose=verbose,
    ).history
    history = {name: [float(value) for value in values] for name, values in history.items()}
    quality = [task.quality({name: values[i] for name, values in history.items()}) for i in range(epochs)]
    output_bytes = temporary_bytes = None
    if seed == 0:  # the bytes are the same with every seed
        output_bytes = layer_output_bytes(model, data_set.x_train, task.batch_size)
        temporary_bytes = xla_temporary_bytes(model, task, data_set)
    return {
        "history": {**history, "quality": quality},
        "quality": quality[-1],
        "steps": task.steps(data_set, epochs),
        "skipped_steps": int(history["skipped_steps"][-1]),
        "loss_scale": history["loss_scale"][-1],
        "layer_output_bytes": output_bytes,
        "xla_temporary_bytes": temporary_bytes,
        "missing_kernels": missing_kernels(model, policy),
        "compute_dtypes": {layer.name: layer.compute_dtype for layer in model.layers},
    }


def uses_xla() -> bool:
    """Whether the demo compiles with XLA: on JAX.

    Not on TensorFlow: on a CPU with 16-bit matrix instructions graph mode uses them and XLA does not.
    """
    return keras.backend.backend() == "jax"


def missing_kernels(model, policy: str) -> list:
    """Returns `[layer class, reason]` for each layer that stays in float32 as the backend has no kernel here."""
    classes = {type(layer).__name__ for layer in model.layers}
    return [list(row) for row in missing_kernel_rules(get_policy(policy).compute_dtype, classes)]


def settings(task, data_set, epochs=None) -> dict:
    """Returns the settings of a task's training, for the report."""
    return {
        "title": task.title,
        "epochs": epochs or task.epochs,
        "batch_size": task.batch_size,
        "learning_rate": task.learning_rate,
        "parameters": task.build().count_params(),
        "data": data_set.source,
    }


def _optimizer(task, data_set, epochs: int):
    steps = task.steps(data_set, epochs)
    warm_up_steps = steps // 10
    return keras.optimizers.Adam(
        keras.optimizers.schedules.CosineDecay(
            initial_learning_rate=task.learning_rate / 10,
            decay_steps=max(steps - warm_up_steps, 1),
            warmup_target=task.learning_rate,
            warmup_steps=warm_up_steps,
            alpha=0.1,
        )
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of a task is run under one policy. A time that could not be taken is `None`."""

    asked_seeds: int
    seeds: int  # runs that there will be; 0 leaves the policy out
    run_s: float | None = None  # that one of them is estimated to take
    step_ms: float | None = None  # of the step that this rests on
    limit_s: float | None = None  # that all runs may take

    @property
    def shortened(self) -> str | None:
        """Why there are fewer runs than were asked for, in words; `None` if there are not."""
        if self.run_s is None or self.seeds == self.asked_seeds:
            return None
        asked_s = self.asked_seeds * self.run_s
        runs = counted(self.asked_seeds)
        left = "left out" if not self.seeds else f"{self.seeds} of {self.asked_seeds} runs"
        return (
            f"{left}: at {self.step_ms:.0f} ms a step {runs} would take about {duration(asked_s)}. "
            f"`--minutes {math.ceil(asked_s / 60)}` runs all."
        )

    def to_dict(self) -> dict:
        """Returns what JSON can hold, the reason included."""
        return {**dataclasses.asdict(self), "shortened": self.shortened}


def estimated_run_s(compile_s: float, step_s: float, steps: int, batch_size: int, held_out_examples: int) -> float:
    """Returns the seconds of one run: compiling, training, and looking at the held-out data."""
    return compile_s + step_s * (steps + _FORWARD * held_out_examples / batch_size)


def plan_case(seeds: int, run_s: float, step_s: float, limit_s: float, *, is_baseline: bool) -> Plan:
    """Returns as many runs as fit into the limit; at least one of the baseline, against which all else is measured."""
    fitting = min(seeds, int(limit_s // run_s)) if run_s > 0 else seeds
    return Plan(seeds, max(fitting, 1) if is_baseline else fitting, run_s, 1e3 * step_s, limit_s)


def rounds_within(round_s: float, limit_s: float, rounds: int) -> int:
    """Returns how many rounds of `round_s` seconds fit into the limit: `rounds` at most, 3 at least."""
    return max(3, min(rounds, int(limit_s // round_s))) if round_s > 0 else rounds


def counted(runs: int) -> str:
    """Returns a number of runs in words."""
    return "1 run" if runs == 1 else f"{runs} runs"


def duration(seconds: float) -> str:
    """Returns seconds in words: "40 s" up to a minute and a half, minutes beyond it."""
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def first_steps(model, policy: str, x, y, batch_size: int) -> tuple:
    """Prepares a model for its policy and returns the seconds that compiling takes, and then a training step.

    The step is what `fit` runs under `MixedPrecision`: guarded, and with the loss scaled where the policy says so.
    """
    prepare(model, policy)
    times = []
    for _ in range(2):
        started = time.perf_counter()
        # The loss comes back as a Python number, so the device is done with it.
        model.train_on_batch(x[:batch_size], y[:batch_size])
        times.append(time.perf_counter() - started)
    return max(times[0] - times[1], 0.0), times[1]


def interleaved_step_times(models: dict, x, y, batch_size: int, rounds: int = ROUNDS) -> dict:
    """Returns the times of `rounds` training steps of each model, in milliseconds.

    In every round each model takes one step on the same batch: what slows the machine down slows all of them.
    """
    batches = len(x) // batch_size
    times: dict = {policy: [] for policy in models}
    for number, order in enumerate(orders_in_turn(list(models), WARM_UP_ROUNDS + rounds)):
        start = number % batches * batch_size
        batch = x[start : start + batch_size], y[start : start + batch_size]
        for policy in order:
            started = time.perf_counter()
            models[policy].train_on_batch(*batch)
            if number >= WARM_UP_ROUNDS:
                times[policy].append(1e3 * (time.perf_counter() - started))
    return times


def layer_output_bytes(model: keras.Model, x, batch_size: int) -> int:
    """Returns the bytes of all layer outputs of one batch, in the dtypes that the layers really return.

    The model is run on one example: the symbolic dtypes of a Functional model are those it was built with,
    not those of the policies its layers have now. Operations between layers (`x + y`) count as layers. Tensors
    inside a layer (attention scores) do not count, nor is there a discount for what a compiler
    fuses away: the number compares policies and does not predict peak memory.
    """
    symbolic = []
    for operation in model.operations:
        if not isinstance(operation, keras.layers.InputLayer):
            symbolic.extend(keras.tree.flatten(operation.output))
    outputs = keras.Model(model.inputs, symbolic)(ops.convert_to_tensor(x[:1]))
    described = [
        (tensor.shape, keras.backend.standardize_dtype(tensor.dtype)) for tensor in keras.tree.flatten(outputs)
    ]
    return batch_size * sum(dtypes.bytes_of(shape, dtype) for shape, dtype in described)


def xla_temporary_bytes(model, task, data_set) -> int | None:
    """Returns what XLA reserves for a train step beside weights, optimizer state and batch; `None` without XLA.

    Of a step of `mpkeras.make_train_step`, which computes what `fit` does without its metrics.
    """
    if not uses_xla():
        return None
    step = make_train_step(model, model.optimizer, task.loss(), jit_compile=True)
    return step.temporary_bytes(data_set.x_train[: task.batch_size], data_set.y_train[: task.batch_size])
