"""Runs a program of `examples/cluster` that kills itself, at once and without a word, in the middle of a step.

`killed.py PROGRAM KILL_STEP DELAY_S ARGUMENTS`: the timer starts as step KILL_STEP begins.
"""

import importlib
import os
import signal
import sys
import threading
from pathlib import Path

# Keras imports it wherever it is installed, which takes longer than much of what is trained here.
sys.modules.update(dict.fromkeys(("matplotlib",)))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))


def main():
    name, step, delay_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    sys.argv[1:] = sys.argv[4:]
    program = importlib.import_module(name)
    kill_in_step(program, step, delay_s)
    program.main()


def kill_in_step(program, kill_step: int, delay_s: float):
    """Lets this process be killed so many seconds after `program` has begun its step `kill_step`."""
    rows_of_batch = program.rows_of_batch

    def and_kill(number, count):
        if number == kill_step:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return rows_of_batch(number, count)

    program.rows_of_batch = and_kill


if __name__ == "__main__":
    main()
