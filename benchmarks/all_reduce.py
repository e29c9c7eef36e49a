"""What does summing gradients in 16 bits give to training on several machines: bytes sent, and time a step?

Two workers of `tf.distribute.MultiWorkerMirroredStrategy` on this machine train the same dense model with gradients
summed as they are (float32), and with `all_reduce_dtype` in float16 and bfloat16, in interleaved rounds. Bytes are
those that Linux counts on the loopback device, so nothing else should talk there. They are the same on any network;
the time is not: here a byte costs less than between two machines, and both workers share one processor.

    python benchmarks/all_reduce.py --json benchmarks/results/all_reduce.json
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import harness

DTYPES = (None, "float16", "bfloat16")
WORKERS = 2
BATCH = 32
# Of each layer: a million parameters.
WIDTH = 1000


def free_addresses(count: int) -> list[str]:
    """Returns addresses of this machine that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    finally:
        for one in sockets:
            one.close()


def loopback_bytes() -> int:
    """Returns the bytes that this machine has sent to itself."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise RuntimeError("Expected a loopback device in /proc/net/dev. Received: none. Run this on Linux.")


def train_as_worker(layers: int, rounds: int, steps: int) -> list[dict]:
    """Returns time and bytes of a step under each dtype; the other workers run the same at the same time."""
    import keras
    import numpy as np
    import tensorflow as tf

    import mpkeras

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    x, y = tf.constant(rows), tf.constant(0.01 * rows)
    bytes_of: dict = {}

    def make(dtype):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(layers))])
            optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(1e-3), all_reduce_dtype=dtype)
            model.compile(optimizer, "mse", jit_compile=False)
            mpkeras.prepare(model, "mixed_bfloat16")

        @tf.function
        def step():
            return strategy.run(lambda: model.train_step((x, y)))["loss"]

        def run():
            begin = loopback_bytes()
            for _ in range(steps):
                loss = step()
            # Reading the weights waits for the last update.
            weights = model.trainable_variables[-1].numpy()
            if not (np.isfinite(float(loss)) and np.isfinite(weights).all()):
                raise RuntimeError(f"Expected finite numbers. Received: a loss of {float(loss)}, {weights}.")
            bytes_of.setdefault(str(dtype), []).append((loopback_bytes() - begin) / steps / WORKERS)

        return run

    runs = {str(dtype): make(dtype) for dtype in DTYPES}
    # Every worker takes the same order, as each step waits for all of them.
    times_ms = harness.time_interleaved(runs, rounds, warm_up=1)
    times_ms = {name: [ms / steps for ms in values] for name, values in times_ms.items()}
    of_float32 = harness.summarize(bytes_of["None"][1:])["median"]
    return [
        {
            "variant": "as they are" if name == "None" else name,
            "params": layers * (WIDTH + 1) * WIDTH,
            **summary,
            "sent_bytes": harness.summarize(bytes_of[name][1:])["median"],
            "sent_share": harness.summarize(bytes_of[name][1:])["median"] / of_float32,
        }
        for name, summary in harness.compare(times_ms, baseline="None").items()
    ]


def measure(arguments: list[str]) -> dict:
    """Starts the workers, and returns what the first of them found."""
    cluster = {"worker": free_addresses(WORKERS)}
    started = []
    try:
        for index in range(WORKERS):
            settings = {
                "TF_CPP_MIN_LOG_LEVEL": "3",
                **os.environ,
                "KERAS_BACKEND": "tensorflow",
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}}),
            }
            command = [sys.executable, str(Path(__file__).resolve()), "--is-worker", *arguments]
            started.append(subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True))
        said = [worker.communicate()[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
    if any(worker.returncode for worker in started):
        statuses = [worker.returncode for worker in started]
        raise RuntimeError(
            f"Expected every worker to succeed. Received: exit statuses {statuses}. Read their messages above."
        )
    return json.loads(said[0].splitlines()[-1])


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "gradients are summed": result["variant"],
            "parameters": f"{result['params']:,}",
            "sent a step, MB": f"{result['sent_bytes'] / 1e6:.1f}",
            "of float32's": f"{result['sent_share']:.2f}",
            **harness.summary_cells(result),
        }
        for result in results
    ]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--layers", type=int, metavar="N", help=f"of {WIDTH:,} units each (default: 10; with --quick: 1)")
    option("--rounds", type=int, metavar="N", help="timed epochs of each variant (default: 12; with --quick: 3)")
    option("--steps", type=int, metavar="N", help="an epoch (default: 20; with --quick: 3)")
    option("--quick", action="store_true", help="a small model, few rounds")
    option("--json", type=Path, help="write the results here")
    option("--is-worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, values in {"layers": (10, 1), "rounds": (12, 3), "steps": (20, 3)}.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more")
    return options


def main() -> int:
    options = parse_arguments()
    settings = {name: getattr(options, name) for name in ("layers", "rounds", "steps")}
    if options.is_worker:
        found = {"results": train_as_worker(**settings), "environment": harness.environment()}
        print(json.dumps(found))
        return 0
    try:
        found = measure([text for name, value in settings.items() for text in (f"--{name}", str(value))])
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(*harness.environment_lines([found["environment"]]), sep="\n")
    harness.print_table(table_rows(found["results"]), __doc__.splitlines()[0])
    if options.json:
        harness.write_json(options.json, {"question": __doc__.splitlines()[0], "settings": settings, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
