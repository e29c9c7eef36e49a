"""The process that compiles, seen from the one that asks."""

import contextlib
import importlib.util
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from mpkeras.insight.report import shortened

_INSTALL = 'pip install "mpkeras[forecast]"'


# What the compiler of each platform is in.
_MODULES = {"cpu": ("jax",), "cuda": ("jax", "jax_plugins.xla_cuda12"), "tpu": ("jax", "libtpu")}


def check_installed(target):
    """Raises `ModuleNotFoundError` where the compiler for a `Target` is not installed."""
    for name in _MODULES[target.platform]:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ModuleNotFoundError(
                f"Expected the compiler for {target.title}. Received: no module '{name}' that is installed. Run "
                f"`{_INSTALL}`, on Linux and x86-64 with Python 3.11 or later.",
                name=name,
            )


class Compiler:
    """The process that compiles. Raises `TimeoutError` when `deadline` is over; ends the process on the way out."""

    def __init__(self, request, deadline):
        self._request = request
        self._deadline = deadline
        self._compiled: dict = {}

    def __enter__(self):
        request = self._request
        check_installed(request.target)
        environment = {**os.environ, **request.target.environment(request.devices), "KERAS_BACKEND": "jax"}
        # The user's own flags are XLA's last word.
        environment["XLA_FLAGS"] = f"{environment['XLA_FLAGS']} {os.environ.get('XLA_FLAGS', '')}".strip()
        # Where this process finds its modules, and first of all this mpkeras.
        paths = [str(Path(__file__).parents[2]), *(path or os.getcwd() for path in sys.path)]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment.pop("MPKERAS_POLICY", None)
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mpkeras.insight.compiling"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answers: queue.Queue = queue.Queue()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        try:
            self._ask(request.text)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._log.close()

    def _read(self, lines):
        with lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def compile(self, policy: str, batch: int) -> dict:
        """Returns what the compiler says of one step, by the keys of `Forecast.to_dict`, and `moved_bytes`."""
        if (policy, batch) not in self._compiled:
            self._compiled[policy, batch] = self._ask(json.dumps({"policy": policy, "batch": batch}))
        return self._compiled[policy, batch]

    def _ask(self, text) -> dict:
        left = self._deadline - time.monotonic()
        try:
            self._requests.write(text + "\n")
            self._requests.flush()
            line = self._answers.get(timeout=max(0.0, left) if left < math.inf else None)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(answer)
        return answer

    def _failed(self, answer) -> Exception:
        message = answer["message"]
        where = "one" if answer["layer"] is None else f"layer '{answer['layer']}'"
        if not answer["is_made"]:
            remedy = (
                "Put the classes and functions of the model, with all that they use, into a module and import it; of a "
                "script only imports, definitions and constants run there. Classes need `get_config` and `from_config`."
            )
        elif answer["layer"] is None:
            remedy = "Pass `x` and `y` as the model and its loss take them, and write model and loss with `keras.ops`."
        else:
            remedy = "Write layers with `keras.ops`, and pass `x` as the model takes it."
        return ValueError(
            "Expected a model that JAX can trace and compile, through which programs for accelerators are made. "
            f"Received: {where} that raised {shortened(answer['error'] + ': ' + message, 500)}. {remedy}"
        )

    def _ended(self) -> Exception:
        code = self._process.wait()
        self._log.seek(0)
        said = shortened(self._log.read()[-600:].strip() or "nothing", 600)
        if code == -9:
            return MemoryError(
                f"Expected memory enough to compile for {self._request.target.title}. Received: a process that the "
                "system ended, most likely for want of memory. Ask for one policy at a time, or use a larger machine."
            )
        return RuntimeError(f"Expected a compiler that answers. Received: exit status {code}; it said: {said}")
