"""Times of training steps: the first ones of a model, and those of several in turn."""

import time

from mpkeras.demo.plan import FirstSteps
from mpkeras.training.prepare import prepare

ROUNDS = 30

# The first calls trace, compile and fill caches.
WARM_UP_ROUNDS = 3


def first_steps(model, policy: str, x, y, batch_size: int) -> FirstSteps:
    """Prepares a model for its policy and returns what its first two training steps take.

    The step is what `fit` runs under `MixedPrecision`: guarded, and with the loss scaled where the policy says so.

    Args:
        model: A compiled model. It is trained.
        policy: The name of its policy.
        x, y: Training arrays of at least `batch_size` examples.
        batch_size: Examples a step.
    """
    prepare(model, policy)
    times = []
    for _ in range(2):
        started = time.perf_counter()
        # The loss comes back as a Python number, so the device is done with it.
        model.train_on_batch(x[:batch_size], y[:batch_size])
        times.append(time.perf_counter() - started)
    return FirstSteps(compile_s=max(times[0] - times[1], 0.0), step_s=times[1])


def interleaved_step_times(models: dict, x, y, batch_size: int, rounds: int = ROUNDS) -> dict:
    """Returns the times of `rounds` training steps of each model, in milliseconds.

    In every round each model takes one step on the same batch, each time another model first: what slows the machine
    down slows all of them.

    Args:
        models: Models by the policy that `first_steps` has prepared them for. They train on.
        x, y: Training arrays of at least `batch_size` examples.
        batch_size: Examples a step.
        rounds: Timed rounds, after `WARM_UP_ROUNDS` others.
    """
    batches = len(x) // batch_size
    policies = list(models)
    times: dict = {policy: [] for policy in policies}
    for number in range(WARM_UP_ROUNDS + rounds):
        start = number % batches * batch_size
        batch = x[start : start + batch_size], y[start : start + batch_size]
        turn = number % len(policies)
        for policy in policies[turn:] + policies[:turn]:
            started = time.perf_counter()
            models[policy].train_on_batch(*batch)
            if number >= WARM_UP_ROUNDS:
                times[policy].append(1e3 * (time.perf_counter() - started))
    return times
