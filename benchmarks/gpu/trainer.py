"""What the trainers of Keras and torch share: a block of steps timed without reading anything in between."""

import statistics
import time

# Steps before each timed block: the clocks of the device fall while another process is measured.
UNTIMED_STEPS = 2


class Trainer:
    """Trains one variant. A framework's own `step`, `wait`, `loss_scale` and so on come from its subclass.

    Attributes:
        batches: `(x, y)` pairs that lie on the device.
        losses: Those of the warm-up, then the last one of each block.
    """

    def __init__(self, batches):
        self.batches = batches
        self.losses = []
        self._steps = 0

    def step(self, x, y):
        """Queues one training step and returns its loss, on the device and not waited for."""
        raise NotImplementedError

    def wait(self, loss):
        """Comes back when the device has finished all that is queued."""
        raise NotImplementedError

    def warm_up(self, steps: int):
        """Runs the first steps, which compile, and keeps their losses."""
        losses = [self._next() for _ in range(steps)]
        self.wait(losses[-1])
        self.losses += [float(loss) for loss in losses]

    def block(self, steps: int) -> dict:
        """Returns `{"step_ms", "queue_ms"}` of a step, of `steps` in a row with one wait at the end.

        `queue_ms` is what the host needed to queue it. Where both are the same, the host is what is measured.
        """
        for _ in range(UNTIMED_STEPS):
            loss = self._next()
        self.wait(loss)
        start = time.perf_counter()
        for _ in range(steps):
            loss = self._next()
        queued = time.perf_counter()
        self.wait(loss)
        end = time.perf_counter()
        self.losses.append(float(loss))
        return {"step_ms": (end - start) / steps * 1e3, "queue_ms": (queued - start) / steps * 1e3}

    def _next(self):
        x, y = self.batches[self._steps % len(self.batches)]
        self._steps += 1
        return self.step(x, y)


def matrix_flops_per_s(multiply, wait, size: int, repeats: int = 5, products: int = 20) -> float:
    """Returns the rate of the best of `repeats` blocks of matrix products: what the device can do at most.

    Args:
        multiply: Multiplies two matrices of `size` by `size` and returns the product.
        wait: Comes back when it is there.
    """
    wait(multiply())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(products):
            product = multiply()
        wait(product)
        times.append(time.perf_counter() - start)
    return 2 * size**3 * products / min(times)


def median_of(blocks: list[dict], key: str) -> float:
    return statistics.median(block[key] for block in blocks)
