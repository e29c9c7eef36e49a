"""Which dtype policy pays off, compiled or not, on which backend?

Training steps (`mpkeras.make_train_step`: forward, loss, backward, update) of the demo's two models and of those in
`models.py`, under each policy, in each way the backend can run a step. `float32` is plain Adam without any check; the
16-bit policies have what mpkeras gives them: loss scaling in float16, finite check and rollback in both. A speed-up is
the time of `float32` over the time of the policy, both in the same mode and the same round. Before, `mpkeras.advise`
says what it would choose for the model: that row has a mark.

    python benchmarks/precision_speed.py --backend tensorflow --model digits
"""

import argparse
import logging
import sys

import harness
from models import MODELS, MODES, make_batch

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# The models of `python -m mpkeras.demo`, the first with BatchNormalization, the second a transformer.
DEMO = ("digits", "text")
# The second twice as wide and twice as deep: more of its time is in matrix products.
WIDE = "text_wide"
NAMES = (*DEMO, WIDE, *MODELS)
# What bfloat16 should reach on a CPU with units for it: so many times as fast as float32 in the same mode.
GOALS = {("tensorflow graph", "mixed_bfloat16"): 1.5}


def load(name: str):
    """Returns `(build, x, y, loss, batch_size)` of a model; `build()` returns a fresh one."""
    import keras

    from mpkeras.demo.tasks import TASKS

    if name in (*DEMO, WIDE):
        task = TASKS["text" if name == WIDE else name]()
        data = task.load()
        x, y = data.x_train[: task.batch_size], data.y_train[: task.batch_size]
        build = (lambda: wide_text_model(x.shape[1])) if name == WIDE else task.build
        return build, x, y, task.loss, task.batch_size
    build, batch_size = MODELS[name]
    x, y = make_batch(build(keras), batch_size)
    return (
        lambda: build(keras),
        x,
        y,
        lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        batch_size,
    )


def wide_text_model(context: int):
    from mpkeras.demo.tasks import text_model

    return text_model(context, width=512, heads=8, hidden=2048, blocks=2)


def make_step(build, x, y, make_loss, policy: str, jit_compile: bool):
    """Returns one training step of a fresh model under `policy`, on a fixed batch."""
    import keras

    import mpkeras
    from mpkeras.training.step import make_train_step

    keras.utils.set_random_seed(0)
    model = build()
    # Small: the loss stays finite for as long as the rounds last.
    optimizer = keras.optimizers.Adam(1e-4)
    if policy != "float32":
        mpkeras.apply_policy(model, policy)
        optimizer = mpkeras.LossScaleOptimizer(optimizer, loss_scale="dynamic" if policy == "mixed_float16" else 1.0)
    step = make_train_step(model, optimizer, make_loss(), jit_compile=jit_compile)
    # Tensors of the backend: what is measured is the step, not the way of a batch to the device.
    x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    # Reading the loss waits for the step, as a loop that logs it would.
    return lambda: float(step(x, y)["loss"])


def advised(build, x, y, make_loss, budget_s: float) -> tuple[str, bool]:
    """Returns `(policy, jit_compile)` that `mpkeras.advise` chooses."""
    import keras

    import mpkeras

    model = build()
    model.compile(keras.optimizers.Adam(1e-4), make_loss())
    report = mpkeras.advise(model, x, y, budget_s=budget_s, verbose=0)
    return report.policy, report.jit_compile


def measure(backend: str, models: list[str], rounds: int, budget_s: float) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # Each variant is a function of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    results = []
    for name in models:
        build, x, y, make_loss, batch_size = load(name)
        choice = advised(build, x, y, make_loss, budget_s)
        steps = {
            (mode, policy): make_step(build, x, y, make_loss, policy, jit_compile)
            for mode, jit_compile in MODES[backend]
            for policy in POLICIES
        }
        # float16 begins at a scale of 32768: eight steps come down to 128.
        times_ms = harness.time_interleaved(steps, rounds, wait=harness.wait_for_device, warm_up=8)
        fastest = min(harness.summarize(times_ms[mode, "float32"])["median"] for mode, _ in MODES[backend])
        for mode, jit_compile in MODES[backend]:
            for policy in POLICIES:
                times = times_ms[mode, policy]
                speedups = harness.paired_ratios(times_ms[mode, "float32"], times)
                result = {"mode": mode, "model": name, "policy": policy, "batch_size": batch_size}
                result |= {"time_ms": harness.summarize(times), "speedup": harness.summarize(speedups)}
                result["speedup_to_fastest_float32"] = fastest / result["time_ms"]["median"]
                result["advised"] = choice == (policy, jit_compile)
                if name in (*DEMO, WIDE) and (mode, policy) in GOALS:
                    result["goal_speedup"] = GOALS[mode, policy]
                results.append(result)
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "model": result["model"],
            "batch": str(result["batch_size"]),
            "step": result["mode"],
            "policy": result["policy"],
            "median ms": f"{result['time_ms']['median']:.2f}",
            "quartiles": f"{result['time_ms']['q1']:.2f} - {result['time_ms']['q3']:.2f}",
            "speed-up": f"{result['speedup']['median']:.2f}",
            "speed-up quartiles": f"{result['speedup']['q1']:.2f} - {result['speedup']['q3']:.2f}",
            "to fastest float32": f"{result['speedup_to_fastest_float32']:.2f}",
            "goal": f"{result['goal_speedup']:.2f}" if "goal_speedup" in result else "",
            "advised": "advised" if result["advised"] else "",
        }
        for result in results
    ]


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the speed-ups as bars."""
    groups, goals = {}, {}
    for result in results:
        # Many groups: a line for each word, or they run into each other.
        name = "\n".join([result["model"], *result["mode"].split()])
        if result["policy"] != "float32":
            groups.setdefault(name, {})[result["policy"]] = result["speedup"]
        if "goal_speedup" in result:
            goals[name] = result["goal_speedup"]
    harness.write_bar_plot(
        path,
        groups,
        title="Training step: how many times as fast as float32 (above 1: faster)",
        ylabel="time in float32 / time",
        goals=goals,
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=NAMES, help="may be given more than once (default: all)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each variant (default: 30; with --quick: 8)"
    )
    parser.add_argument(
        "--budget", type=float, metavar="S", help="seconds for each call of `advise` (default: 20; with --quick: 8)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; the demo's models only")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.model = options.model or list(DEMO if options.quick else NAMES)
    options.rounds = (8 if options.quick else 30) if options.rounds is None else options.rounds
    options.budget = (8.0 if options.quick else 20.0) if options.budget is None else options.budget
    if options.rounds < 1 or options.budget <= 0:
        parser.error("--rounds must be 1 or more and --budget positive")
    return options


def main() -> int:
    options = parse_arguments()
    numbers = ["--rounds", str(options.rounds), "--budget", str(options.budget)]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.model, options.rounds, options.budget),
        arguments=[*numbers, *(argument for name in options.model for argument in ("--model", name))],
        settings={"optimizer": "Adam", "rounds": options.rounds, "budget_s of advise": options.budget},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
