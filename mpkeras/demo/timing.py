"""Step times of several models, measured in turn: what slows the machine down slows all of them."""

import time

from mpkeras.training.prepare import prepare

ROUNDS = 30

# The first calls trace, compile and fill caches.
WARM_UP_ROUNDS = 3


def interleaved_step_times(models: dict, x, y, batch_size: int, rounds: int = ROUNDS) -> dict:
    """Returns the times of `rounds` training steps of each model, in milliseconds.

    In every round each model takes one step on the same batch, each time another model first. The step is
    what `fit` runs under `MixedPrecision`: guarded, and with the loss scaled where the policy says so.

    Args:
        models: Compiled models by the policy they are trained under. They train on.
        x, y: Training arrays of at least `batch_size` examples.
        batch_size: Examples a step.
        rounds: Timed rounds, after `WARM_UP_ROUNDS` others.
    """
    for policy, model in models.items():
        prepare(model, policy)
    batches = len(x) // batch_size
    policies = list(models)
    times: dict = {policy: [] for policy in policies}
    for number in range(WARM_UP_ROUNDS + rounds):
        start = number % batches * batch_size
        batch = x[start : start + batch_size], y[start : start + batch_size]
        turn = number % len(policies)
        for policy in policies[turn:] + policies[:turn]:
            started = time.perf_counter()
            # The loss comes back as a Python number, so the device is done with it.
            models[policy].train_on_batch(*batch)
            if number >= WARM_UP_ROUNDS:
                times[policy].append(1e3 * (time.perf_counter() - started))
    return times
