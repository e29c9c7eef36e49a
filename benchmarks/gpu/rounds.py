"""Times all variants of a model in interleaved rounds over processes that live side by side."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness
from gpu.variants import FLOAT32, TF32, UNITS, Variant

BENCHMARKS = Path(__file__).resolve().parents[1]
NO_TF32 = "TF32 is a mode of NVIDIA GPUs; on this device the variant would be the float32 one again"
# Of the memory that a process is expected to take: what has to be free before it is started. More than one, as a
# compiler that finds little memory left quietly takes slower algorithms.
HEADROOM = 1.25
# What CUDA and its libraries take in each process, beside what the framework allocates.
CONTEXT_BYTES = 2**30


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

    def kill(self):
        """Ends the process at once, whatever it does: who waits for a reply gets a `WorkerError`."""
        self._process.kill()

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
        # What one process of JAX has compiled and chosen is used by the next: the same product gets the same kernel.
        self._cache = tempfile.TemporaryDirectory()
        self._pythons = {"keras": sys.executable, "torch": torch_python}
        self._started: list[Worker] = []
        self._is_over = False

    @property
    def are_shared(self) -> bool:
        return self._shared is not None

    def start(self, framework: str, variant: str | None = None) -> Worker:
        """Returns a worker. Raises `WorkerError` after `kill`."""
        if self._is_over:
            raise WorkerError("the benchmark is being ended")
        if self._shared is not None and framework in self._shared:
            return self._shared[framework]
        if self._shared is None:
            extra = {"JAX_COMPILATION_CACHE_DIR": self._cache.name, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            if variant == FLOAT32:
                # JAX is told by its precision; NVIDIA's libraries hear of it, too, in case a call does not pass it on.
                extra["NVIDIA_TF32_OVERRIDE"] = "0"
        else:
            # Half the time of a tiny run is XLA's: less optimized, its programs are quick enough.
            extra = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")}
        worker = Worker(framework, self._pythons[framework], extra)
        self._started.append(worker)
        if self._shared is not None:
            self._shared[framework] = worker
        return worker

    def release(self, worker: Worker):
        if self._shared is None:
            worker.close()

    def kill(self):
        """Ends all processes at once, and starts no more."""
        self._is_over = True
        for worker in self._started:
            worker.kill()

    def close(self):
        for worker in (self._shared or {}).values():
            worker.close()
        self._cache.cleanup()


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

    Variants are started as long as the GPU has memory, and timed in rounds; what found no room comes in a group of
    its own after the first has ended. `"group"` tells which variants shared rounds. Those of one framework compile one
    after the other, as its compiler times kernels to choose among them; the other framework's compile meanwhile.

    Args:
        model: A key of `CASES`.
        names: Of the variants.
        workers: Where processes come from.
        options: `"rounds"`, `"steps"`, `"warm_up"` and what the trainers take.
        is_gpu: Whether TF32 can be asked for.
        log: Gets a line when a variant is ready.
    """
    units = [[variant for variant in unit if variant.name in names] for unit in UNITS]
    # First what is in 16 bits: that is compared most closely, and more of it fits side by side.
    units = sorted((unit for unit in units if unit), key=lambda unit: unit[0].dtype == "float32")
    results, group, is_stuck = {}, 0, False
    room = Room()
    while units:
        running, lanes = {}, {}
        room.begin_group()
        # Two that ran out of memory beside each other would do so again.
        for unit in units[:1] if is_stuck else units:
            lanes.setdefault(unit[0].framework, []).append(unit)

        def prepare(lane, running=running, group=group):
            """Returns how many of the units of one framework were prepared."""
            for done, unit in enumerate(lane):
                if not room.take(unit):
                    return done
                new = {variant.name: {"group": group, "blocks": [], "unavailable": None} for variant in unit}
                results.update(new)
                started = _prepared_unit(model, unit, workers, options, new, is_gpu, log)
                for variant in unit:
                    if variant.name in started:
                        room.learn(variant, new[variant.name].get("held_bytes"))
                room.give_back(unit)
                if any(is_out_of_memory(result["unavailable"]) for result in new.values()) and not room.had_one_alone():
                    # Others held what it needed: it comes in the next group.
                    for worker in started.values():
                        workers.release(worker)
                    return done
                running.update(started)
            return len(lane)

        try:
            with ThreadPoolExecutor(1 if workers.are_shared else len(lanes)) as pool:
                try:
                    done = dict(zip(lanes, pool.map(prepare, lanes.values()), strict=True))
                except BaseException:
                    # A lane waits for its process: without this, Control-C would wait for it, too.
                    workers.kill()
                    raise
            prepared = [id(unit) for framework, lane in lanes.items() for unit in lane[: done[framework]]]
            is_stuck = not prepared
            units = [unit for unit in units if id(unit) not in prepared]
            if running:
                _time_rounds(model, {name: running[name] for name in names if name in running}, options, results)
        finally:
            for worker in running.values():
                workers.release(worker)
        group += 1
    return {name: results[name] for name in names}


def is_out_of_memory(said: str | None) -> bool:
    """Whether a variant failed, in these words, as the GPU's memory was not enough."""
    return said is not None and any(words in said for words in ("RESOURCE_EXHAUSTED", "OutOfMemoryError"))


class Room:
    """Decides whether the GPU has room for another unit, by what variants of its framework and dtype took before."""

    def __init__(self):
        self._taken_by, self._being_prepared, self._in_group = {}, [], 0
        self._lock = threading.Lock()

    def begin_group(self):
        """Tells that nothing runs."""
        self._in_group = 0

    def had_one_alone(self) -> bool:
        """Whether one unit alone has been in the group so far."""
        return self._in_group == 1

    def take(self, unit: list[Variant]) -> bool:
        """Returns whether `unit` may start; it then counts as being prepared. The first of a group always may."""
        with self._lock:
            free = free_bytes()
            needed = sum(self._expected(variant) for other in (unit, *self._being_prepared) for variant in other)
            may = self._in_group == 0 or free is None or free >= HEADROOM * needed
            if may:
                self._being_prepared.append(unit)
                self._in_group += 1
            return may

    def give_back(self, unit: list[Variant]):
        """Tells that `unit` is ready: from now on its memory is seen as taken."""
        with self._lock:
            self._being_prepared.remove(unit)

    def learn(self, variant: Variant, held_bytes: int | None):
        """Keeps what `variant` took."""
        with self._lock:
            kind = variant.framework, variant.dtype == "float32"
            self._taken_by[kind] = max(self._taken_by.get(kind, 0), (held_bytes or 0) + CONTEXT_BYTES)

    def _expected(self, variant: Variant) -> float:
        is_float32 = variant.dtype == "float32"
        known = self._taken_by.get((variant.framework, is_float32))
        if known is None:
            # Float32 takes about twice as much, and another framework about as much.
            of_others = max((taken / (1 + was) for (_, was), taken in self._taken_by.items()), default=0)
            known = of_others * (1 + is_float32)
        return known


def _prepared_unit(model, unit, workers, options, results, is_gpu, log) -> dict[str, Worker]:
    """Returns the workers of a unit by variant; of one that failed `results` says why."""
    started = {}
    for variant in unit:
        if variant.name == TF32 and not is_gpu:
            results[variant.name]["unavailable"] = NO_TF32
            continue
        worker = _prepared(model, variant, workers, options, results[variant.name], log)
        if worker is not None:
            started[variant.name] = worker
    return started


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
