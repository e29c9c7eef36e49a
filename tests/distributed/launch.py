"""Runs the programs of this folder, alone or as several workers, and returns what they found."""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras

FOLDER = Path(__file__).parent
ROOT = Path(__file__).parents[2]


@functools.cache
def mirrored_runs(*runs: str, against: str = "mpkeras") -> dict:
    """What `mirrored.py` found in these runs: one process for all tests that ask for them."""
    return run_program("mirrored.py", "--against", against, *runs)


def run_program(script: str, *arguments, timeout_s: float = 300):
    """Runs `script` in a process of its own and returns its result."""
    return run_workers(script, [(arguments, {})], timeout_s=timeout_s)[0]


def run_workers(script: str, workers, timeout_s: float = 300) -> list:
    """Runs `script` once for each `(arguments, environment)`, all at a time, and returns their results.

    A worker that fails or hangs would leave the others waiting for it: all are killed as soon as one has
    failed, and when `timeout_s` is over.
    """
    processes = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for i, (arguments, environment) in enumerate(workers):
                # Files, not pipes: a full pipe that nobody reads would stop a worker.
                with open(f"{logs}/{i}.out", "w") as out, open(f"{logs}/{i}.err", "w") as err:
                    process = subprocess.Popen(
                        [sys.executable, str(FOLDER / script), *map(str, arguments)],
                        cwd=ROOT,
                        # The backend of the tests, also where no variable but Keras' file or its default names it.
                        env={
                            **os.environ,
                            "KERAS_BACKEND": keras.backend.backend(),
                            "PYTHONPATH": str(ROOT),
                            **environment,
                        },
                        stdout=out,
                        stderr=err,
                    )
                processes.append(process)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                codes = [process.poll() for process in processes]
                if any(codes) or None not in codes:
                    break
                time.sleep(0.05)
            # Read once: killing the others below gives them codes as well.
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        results = []
        for i, code in enumerate(codes):
            lines = Path(f"{logs}/{i}.out").read_text().splitlines()
            found = [line for line in lines if line.startswith("RESULT ")]
            results.append(json.loads(found[-1].removeprefix("RESULT ")) if code == 0 and found else None)
        said = [
            f"worker {i}, exit status {codes[i]}:\n{Path(f'{logs}/{i}.err').read_text()[-3000:]}"
            for i in range(len(codes))
        ]
        assert None not in results, "\n".join(said)
        return results


def free_ports(count: int) -> list:
    """Returns ports of 127.0.0.1 that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()
