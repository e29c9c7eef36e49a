"""Trains each task under each policy with each seed, by a plain `fit` with the `MixedPrecision` callback."""

import time
import traceback

import keras

from mpkeras.callbacks import MixedPrecision
from mpkeras.demo.memory import XlaMemory, layer_output_bytes
from mpkeras.demo.plan import counted, duration, estimated_run_s, plan_case, rounds_within
from mpkeras.demo.summary import BASELINE
from mpkeras.demo.timing import ROUNDS, WARM_UP_ROUNDS, first_steps, interleaved_step_times
from mpkeras.policies.kernels import missing_kernel_rules
from mpkeras.policies.registry import get_policy, policy_scope


def compare(tasks, data_sets, policies, seeds: int, epochs=None, *, limit_s: float, verbose=2) -> tuple:
    """Returns `(records, step_times_ms, plans)`.

    `records` has one record for each task, seed and policy, in the order they were run; `step_times_ms` the
    times of single training steps, by task and policy; `plans` what was to be run, by task and policy.

    Args:
        tasks: `Task`s.
        data_sets: The `DataSet` of each task.
        policies: List of names, `"float32"` among them.
        seeds: Number of seeds; they are 0, 1, ... and drive initialization and shuffling.
        epochs: Epochs for every task; by default each task's own.
        limit_s: Seconds that the runs of one policy on one task may take. What would take longer, by what its first
            steps took, is run with fewer seeds or left out; so is the timing of steps.
        verbose: As in `fit`.
    """
    records, step_times_ms, plans = [], {}, {}
    for task, data_set in zip(tasks, data_sets, strict=True):
        models, plans[task.name] = _planned(task, data_set, policies, seeds, epochs or task.epochs, limit_s)
        failed = {policy for policy in policies if policy not in models}
        for seed in range(seeds):
            for policy in policies:
                # One failure is enough: it is the device, not the seed.
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
        steps_s = [planned[policy].step_ms / 1e3 for policy in timed]
        rounds = rounds_within(steps_s, limit_s, ROUNDS)
        about = duration((rounds + WARM_UP_ROUNDS) * sum(steps_s))
        print(f"{task.name}, timing steps of {', '.join(timed)} in turn: about {about}", flush=True)
        times = interleaved_step_times(timed, data_set.x_train, data_set.y_train, task.batch_size, rounds)
        step_times_ms[task.name] = times
    return records, step_times_ms, plans


def _planned(task, data_set, policies, seeds, epochs, limit_s) -> tuple:
    """Returns a prepared model and a `Plan` for each policy, by what its first steps take, and prints them.

    A policy whose steps the backend cannot run here has a plan and no model: its first run says why.
    """
    models, plans = {}, {}
    held_out = epochs * len(data_set.x_held_out)
    for policy in policies:
        run_s = step_s = None
        try:
            model = _compiled(task, data_set, 0, epochs)
            first = first_steps(model, policy, data_set.x_train, data_set.y_train, task.batch_size)
        except Exception as error:
            if not _is_about_the_device(error):
                raise
        else:
            models[policy] = model
            steps = task.steps(data_set, epochs)
            run_s, step_s = estimated_run_s(first, steps, task.batch_size, held_out), first.step_s
        plan = plan_case(seeds, run_s, step_s, limit_s, is_baseline=policy == BASELINE)
        plans[policy] = plan
        if plan.run_s is not None:
            about = plan.shortened or f"about {duration(plan.seeds * plan.run_s)} for {counted(plan.seeds)}"
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
    """Whether the backend cannot do it here; all other errors are mistakes in the program."""
    # Each backend has exceptions of its own for a missing kernel or too little memory.
    from_backend = type(error).__module__.split(".")[0] in ("tensorflow", "jax", "jaxlib", "torch")
    return from_backend or isinstance(error, (RuntimeError, MemoryError))


def _compiled(task, data_set, seed, epochs):
    keras.utils.set_random_seed(seed)
    # Under float32 whatever the process' global policy is: the callback alone brings the policy in.
    with policy_scope("float32"):
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
    callbacks = [MixedPrecision(policy)]
    xla_memory = XlaMemory(data_set.x_train[: task.batch_size], data_set.y_train[: task.batch_size])
    if seed == 0:  # the bytes are the same with every seed
        callbacks.append(xla_memory)
    history = model.fit(
        data_set.x_train,
        data_set.y_train,
        batch_size=task.batch_size,
        epochs=epochs,
        steps_per_epoch=task.steps_per_epoch,
        validation_data=(data_set.x_held_out, data_set.y_held_out),
        validation_batch_size=128,
        callbacks=callbacks,
        verbose=verbose,
    ).history
    history = {name: [float(value) for value in values] for name, values in history.items()}
    quality = [task.quality({name: values[i] for name, values in history.items()}) for i in range(epochs)]
    output_bytes = layer_output_bytes(model, data_set.x_train, task.batch_size) if seed == 0 else None
    return {
        "history": {**history, "quality": quality},
        "quality": quality[-1],
        "steps": task.steps(data_set, epochs),
        "skipped_steps": int(history["skipped_steps"][-1]),
        "loss_scale": history["loss_scale"][-1],
        "layer_output_bytes": output_bytes,
        "xla_temporary_bytes": xla_memory.temporary_bytes,
        "missing_kernels": missing_kernels(model, policy),
        "compute_dtypes": {layer.name: layer.compute_dtype for layer in model.layers},
    }


def uses_xla() -> bool:
    """Whether the demo compiles with XLA: on JAX.

    Not on TensorFlow: on a CPU with 16-bit matrix instructions graph mode uses them and XLA does not.
    """
    return keras.backend.backend() == "jax"


def missing_kernels(model, policy: str) -> list:
    """Returns `[layer class, reason]` for what stays in float32 as the backend cannot do it here."""
    classes = {type(layer).__name__ for layer in model.layers}
    return [list(row) for row in missing_kernel_rules(get_policy(policy).compute_dtype, classes)]


def settings(task, data_set, epochs=None) -> dict:
    """Returns what of a task's training belongs into the report."""
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
