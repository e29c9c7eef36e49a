"""A process that trains what it is told to: one line of JSON in, one out.

    python -m gpu.worker keras

It keeps compiled variants and their state, so that another process can have it train a few steps now and then:
that way processes, each with memory statistics of its own, are timed in interleaved rounds and compile once.
"""

import importlib
import json
import os
import sys
import traceback

from gpu.cases import case_of
from gpu.variants import VARIANTS

FRAMEWORKS = ("keras", "torch")


class Commands:
    """What the worker can be told. Each method's result goes back as JSON."""

    def __init__(self, framework: str):
        self._module = importlib.import_module(f"gpu.{framework}_trainer")
        self._trainers = {}

    def hello(self) -> dict:
        return {"device": self._module.device(), "environment": self._module.environment()}

    def matrix(self, size: int) -> dict:
        return self._module.matrix_rates(size)

    def prepare(self, model: str, variant: str, warm_up: int, options: dict) -> dict:
        case = case_of(model, options["is_tiny"], options["batch_size"])
        trainer = self._module.make_trainer(case, VARIANTS[variant], options)
        trainer.warm_up(warm_up)
        self._trainers[model, variant] = trainer
        return trainer.describe()

    def block(self, model: str, variant: str, steps: int) -> dict:
        return self._trainers[model, variant].block(steps)

    def finish(self, model: str, variant: str) -> dict:
        return self._trainers.pop((model, variant)).state()


def main():
    # Libraries print what they like: the replies have a channel of their own, and prints go to the errors.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    commands = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            commands = commands or Commands(sys.argv[1])
            reply = {"result": getattr(commands, command.pop("do"))(**command)}
        except Exception as error:  # Out of memory, no kernel, no compiler: a result like any other.
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
