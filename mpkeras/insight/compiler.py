"""The process that compiles, seen from the one that asks."""

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


class Compiler:
    """The process that compiles. Raises `TimeoutError` when `deadline` is over; ends the process on the way out."""

    def __init__(self, request, deadline):
        self._request = request
        self._deadline = deadline

    def __enter__(self):
        request = self._request
        environment = {**os.environ, **request.target.environment(request.devices), "KERAS_BACKEND": "jax"}
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
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._ask(request.text)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _read(self):
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def compile(self, policy: str, batch: int) -> dict:
        """Returns what the compiler says of one step, by the keys of `Forecast.to_dict`, and `moved_bytes`."""
        return self._ask(json.dumps({"policy": policy, "batch": batch}))

    def _ask(self, text) -> dict:
        left = self._deadline - time.monotonic()
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
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
        message, title = answer["message"], self._request.target.title
        missing = f"Expected the compiler for {title}. Received: none that is installed. Run `{_INSTALL}`."
        if answer["error"] in ("ModuleNotFoundError", "ImportError"):
            return ModuleNotFoundError(f"{missing} ({shortened(message, 120)})")
        return ValueError(
            "Expected a model that JAX can trace and compile, as programs for accelerators are made through it. Received: "
            f"{shortened(answer['error'] + ': ' + message, 600)}"
        )

    def _ended(self) -> Exception:
        code = self._process.wait()
        self._log.seek(0)
        said = shortened(self._log.read()[-600:].strip() or "nothing", 600)
        if code == -9:
            return MemoryError(
                f"Expected memory enough to compile for {self._request.target.title}. Received: a process that the system "
                "ended, most likely for want of memory. Ask for fewer layers or smaller shapes, or use a larger machine."
            )
        return RuntimeError(f"Expected a compiler that answers. Received: exit status {code}; it said: {said}")
