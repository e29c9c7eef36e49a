"""Runs the programs of this folder, alone or as several workers, and returns what they found."""

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


def run_program(script: str, *arguments, timeout_s: float = 300):
    """Runs `script` in a process of its own and returns its result."""
    return run_workers(script, [(arguments, {})], timeout_s=timeout_s)[0]


def run_processes(script: str, *arguments, timeout_s: float = 300) -> list:
    """Runs `script` as two processes that know each other by number and port (JAX, torch); returns their results."""
    (port,) = free_ports(1)
    options = [*arguments, "--processes", 2, "--port", port]
    return run_workers(script, [([*options, "--process", i], {}) for i in range(2)], timeout_s)


def run_tensorflow_workers(script: str, *arguments, timeout_s: float = 300) -> list:
    """Runs `script` as two workers, to which `TF_CONFIG` says which they are; returns their results."""
    ports = free_ports(2)
    return run_workers(script, [(arguments, {"TF_CONFIG": tf_config(i, ports)}) for i in range(2)], timeout_s)


def tf_config(index: int, ports) -> str:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def result_of(output: str):
    """Returns the result that a program of this folder has printed; `None` where there is none."""
    found = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[-1].removeprefix("RESULT ")) if found else None


def run_workers(script: str, workers, timeout_s: float = 300, read=result_of) -> list:
    """Runs `script` once for each `(arguments, environment)`, all at a time; returns what `read` makes of each output.

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
            results.append(read(Path(f"{logs}/{i}.out").read_text()) if code == 0 else None)
        said = [
            f"worker {i}, exit status {codes[i]}:\n{Path(f'{logs}/{i}.err').read_text()[-3000:]}"
            for i in range(len(codes))
        ]
        assert None not in results, "\n".join(said)
        return results


def run_torchrun(script, *arguments, timeout_s: float = 75) -> str:
    """Runs `script` as two ranks under `torchrun`, which needs not be on the path, and returns what they printed.

    One process in ten aborts in torch 2.13 as it ends, with all its work done, as a thread of torch is still running
    then, and the other process is ended for it; very few wait for that thread for good. Such a run is made anew.
    """
    options = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    for _ in range(4):
        (port,) = free_ports(1)
        agent = subprocess.Popen(
            [sys.executable, *options, "--master_port", str(port), str(script), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        try:
            output, errors = agent.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # Not killed at once: the agent ends its ranks, which would otherwise stay.
            agent.terminate()
            output, errors = agent.communicate(timeout=timeout_s)
            continue
        if agent.returncode == 0 or "terminate called without an active exception" not in errors:
            break
    assert agent.returncode == 0, errors[-2000:]
    return output


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
