"""`examples/cluster/ray_train.py` with workers that kill themselves, without a word, in the middle of a step.

`ray_killed.py FOLDER KILLS ARGUMENTS`: KILLS is a list in JSON of `[rank, step, delay_s]`, one for each start of the
workers. FOLDER gets a file for each kill, which says whether it was in the middle of a step, and for each start and
rank one with the steps that were begun.
"""

import functools
import json
import os
import signal
import sys
import threading
from pathlib import Path

import ray_train


def main():
    folder, kills = Path(sys.argv[1]), json.loads(sys.argv[2])
    sys.argv[1:] = sys.argv[3:]
    ray_train.main(functools.partial(train_loop, folder, kills))


def train_loop(folder, kills, options):
    # In the worker: another process, in which the module is as it was written.
    import ray.train
    import ray_train

    rank = ray.train.get_context().get_world_rank()
    start = len(list(folder.glob("kill-*")))
    kill_rank, kill_step, delay_s = kills[start] if start < len(kills) else (None, None, None)
    rows_of_batch = ray_train.rows_of_batch
    is_in_step = False

    def kill():
        (folder / f"kill-{start}").write_text("in a step" if is_in_step else "between steps")
        os.kill(os.getpid(), signal.SIGKILL)

    def print_and_end(*words, **options):
        nonlocal is_in_step
        is_in_step = False
        print(*words, **options)

    def and_kill(number, count):
        nonlocal is_in_step
        is_in_step = True
        with open(folder / f"steps-{start}-{rank}", "a") as file:
            file.write(f"{number}\n")
        if (rank, number) == (kill_rank, kill_step):
            threading.Timer(delay_s, kill).start()
        return rows_of_batch(number, count)

    ray_train.rows_of_batch = and_kill
    # The first thing that the loop does when it has the loss of a step.
    ray_train.print = print_and_end
    ray_train.train_loop(options)


if __name__ == "__main__":
    main()
