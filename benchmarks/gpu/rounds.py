"""Times all variants of a model in interleaved rounds over processes that live side by side."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import harness
from gpu.variants import FLOAT32, TF32, UNITS, Variant

BENCHMARKS = Path(__file__).resolve().parents[1]
NO_TF32 = "TF32 is a mode of NVIDIA GPUs; on this device the variant would be the float32 one again"
# Of the memory that the largest process so far took: what has to be free before another is started. More than one,
# as a compiler that finds little memory left quietly takes slower algorithms.
HEADROOM = 1.25


class WorkerError(RuntimeError):
    """What went wrong in a worker, in its words."""


class Worker:
    """A process of `worker.py`; `extra` are environment variables of its own."""

    def __init__(self, framework: str, python: str = sys.executable, extra: dict | None = None):
        path = os.pathsep.join(entry for entry in (str(BENCHMARKS), os.environ.get("PYTHONPATH")) if entry)
        settings = {
            "TF_CPP_MIN_LOG_LEVEL": "2",
            **os.environ,
            "PYTHONPATH": path,
            "KERAS_BACKEND": "jax",
            # JAX would take three quarters of the memory at once and leave nothing for the other processes.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **(extra or {}),
        }
        command = [python, "-m", "gpu.worker", framework]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=settings, **pipes)

    def ask(self, do: str, **arguments):
        """Returns the result of a command. Raises `WorkerError` where it failed or the process is gone."""
        try:
            print(json.dumps({"do": do, **arguments}), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            raise WorkerError(f"the process ended with exit status {self._process.wait()}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def close(self):
        """Ends the process and waits until its memory is free."""
        try:
            self._process.stdin.close()
        except OSError:
            pass  # It was gone before.
        self._process.stdout.close()
        self._process.wait()


class Workers:
    """Hands out a process for each variant; with `shared` one for all variants of a framework.

    Shared processes start and compile faster, but what each variant needs of the memory cannot be told.
    """

    def __init__(self, shared: bool, torch_python: str = sys.executable):
        self._shared = {} if shared else None
        self._pythons = {"keras": sys.executable, "torch": torch_python}

    @property
    def are_shared(self) -> bool:
        return self._shared is not None

    def start(self, framework: str, variant: str | None = None) -> Worker:
        if self._shared is None:
            # JAX is told by its precision; NVIDIA's libraries hear of it as well, in case a call does not pass it on.
            extra = {"NVIDIA_TF32_OVERRIDE": "0"} if variant == FLOAT32 else {}
            return Worker(framework, self._pythons[framework], extra)
        if framework not in self._shared:
            # Half the time of a tiny run is XLA's: less optimized, its programs are quick enough.
            extra = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")}
            self._shared[framework] = Worker(framework, self._pythons[framework], extra)
        return self._shared[framework]

    def release(self, worker: Worker):
        if self._shared is None:
            worker.close()

    def close(self):
        for worker in (self._shared or {}).values():
            worker.close()


def free_bytes() -> int | None:
    """Returns the free memory of the GPU, `None` where `nvidia-smi` does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    # The GPU that the workers see first; the others' memory is of no use here.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    answer = subprocess.run([*query, *(["-i", visible] if visible else [])], capture_output=True, text=True)
    try:
        return int(answer.stdout.splitlines()[0]) * 2**20
    except (IndexError, ValueError):
        return None


def measure_model(model: str, names: list[str], workers: Workers, options: dict, *, is_gpu: bool, log=print) -> dict:
    """Returns a result for each variant in `names`: timed blocks, losses, memory, or what went wrong.

    Variants are started one after the other, as long as the GPU has memory, and timed in rounds; what found no
    room comes in a group of its own after the first has ended. `"group"` tells which variants shared rounds.

    Args:
        model: A key of `CASES`.
        names: Of the variants.
        workers: Where processes come from.
        options: `"rounds"`, `"steps"`, `"warm_up"` and what the trainers take.
        is_gpu: Whether TF32 can be asked for.
        log: Gets a line when a variant is ready.
    """
    units = [[variant for variant in unit if variant.name in names] for unit in UNITS]
    units = [unit for unit in units if unit]
    results, group = {}, 0
    while units:
        running, needed = {}, 0
        try:
            while units and (not running or _has_room(needed * len(units[0]))):
                for variant in units.pop(0):
                    before = free_bytes()
                    results[variant.name] = result = {"group": group, "blocks": [], "unavailable": None}
                    if variant.name == TF32 and not is_gpu:
                        result["unavailable"] = NO_TF32
                        continue
                    worker = _prepared(model, variant, workers, options, result, log)
                    if worker is not None:
                        running[variant.name] = worker
                    if before is not None:
                        needed = max(needed, before - (free_bytes() or before))
            if running:
                _time_rounds(model, running, options, results)
        finally:
            for worker in running.values():
                workers.release(worker)
        group += 1
    return {name: results[name] for name in names}


def _has_room(needed: int) -> bool:
    free = free_bytes()
    return free is None or free >= HEADROOM * needed


def _prepared(model, variant: Variant, workers, options, result, log) -> Worker | None:
    start = time.perf_counter()
    worker = workers.start(variant.framework, variant.name)
    try:
        described = worker.ask(
            "prepare", model=model, variant=variant.name, warm_up=options["warm_up"], options=options
        )
    except WorkerError as error:
        result["unavailable"] = str(error)
        log(f"{model}, {variant.name}: {error}")
        workers.release(worker)
        return None
    result |= described | {"prepare_s": time.perf_counter() - start}
    log(f"{model}, {variant.name}: ready after {result['prepare_s']:.1f} s")
    return worker


def _time_rounds(model, running, options, results):
    """Fills `results` of the variants in `running`. One that fails in between is left out of the rest."""

    def ask(name, do, **arguments):
        try:
            return running[name].ask(do, model=model, variant=name, **arguments)
        except WorkerError as error:
            results[name]["unavailable"] = str(error)
            results[name]["blocks"] = []
            return None

    for order in harness.round_orders(list(running), options["rounds"]):
        for name in order:
            if results[name]["unavailable"] is None:
                block = ask(name, "block", steps=options["steps"])
                results[name]["blocks"] += [block] if block else []
    for name in running:
        if results[name]["unavailable"] is None:
            results[name] |= ask(name, "finish") or {}
