"""`Bench`: makes, warms up and times the train step of each cell, on one model and one batch."""

import importlib
import time

import keras
import numpy as np

from mpkeras.conversion.apply import computes_in, layer_converter, recorded
from mpkeras.insight.measuring.grid import NotTrainable
from mpkeras.insight.measuring.memory import estimated_output_bytes
from mpkeras.policies.registry import get_policy
from mpkeras.policies.scalars import number
from mpkeras.training.backend import training_backend
from mpkeras.training.step import make_train_step

# float16 begins at a loss scale of 2^15: so many steps are skipped at most until it is down at 1.
_WARM_UP_STEPS = 16


def backend_module():
    """Returns the module for the active backend: how to wait for the device, and what it tells about memory."""
    return importlib.import_module(f"mpkeras.insight.measuring._{keras.backend.backend()}")


class Bench:
    """The steps of all cells, which train the same model in turn.

    Weights and optimizer are shared, so that the grid needs the memory of one model and two optimizers (of float16,
    and of the others). Compiled steps keep the dtypes that they were compiled with; for those that run op by op the
    layers change between the readings of the clock.

    Args:
        model: The model to train, built.
        x, y: One batch.
        make_optimizer: Returns a fresh optimizer.
        loss_fn: As in `mpkeras.make_train_step`.
    """

    def __init__(self, model, x, y, make_optimizer, loss_fn):
        self._model = model
        # Tensors of the backend: what is measured is the step, not the way of a batch to the device.
        self._batch = training_backend.local_tensors((x, y))
        self._make_optimizer, self._loss_fn = make_optimizer, loss_fn
        self._backend = backend_module()
        self._as_it_was = recorded(model)
        self._policies: dict = {None: self._as_it_was}
        self._policy: str | None = None
        self._optimizers, self._steps = {}, {}
        #: What `memory_bytes` of the cells is; `None` before one was found.
        self.memory_kind = None

    def begin(self, cell) -> float:
        """Makes the step of `cell`, warms it up and returns the milliseconds of a warm one."""
        self._change_to(cell.policy)
        scales = computes_in(self._model, ("float16",))
        step = make_train_step(
            self._model,
            self._optimizers.get(scales) or self._make_optimizer(),
            self._loss_fn,
            jit_compile=cell.jit_compile,
        )
        result = self._run(step, 1)
        self._optimizers[scales] = step.optimizer
        steps = 1
        while bool(number(result["skipped"])):
            loss = float(number(result["loss"]))
            if not np.isfinite(loss):
                raise NotTrainable(f"loss not finite: {loss}")
            if steps == _WARM_UP_STEPS:
                raise NotTrainable("gradients not finite at every loss scale")
            result = self._run(step, 1)
            steps += 1
        self._steps[cell.name] = step
        milliseconds = self.measure(cell, 1)
        found = self._backend.step_memory(step, self._batch, lambda: self._run(step, 1))
        if found is None:
            found = estimated_output_bytes(self._model, self._batch[0])
        if found is not None:
            cell.memory_bytes, kind = found
            self.memory_kind = self.memory_kind or kind
            if kind != self.memory_kind:
                cell.memory_bytes = None  # of another kind: not to be compared
        return milliseconds

    def measure(self, cell, steps: int) -> float:
        """Returns the mean milliseconds of `steps` steps in a row, the device waited for at the end."""
        step = self._steps[cell.name]
        if self._backend.runs_op_by_op(cell.jit_compile):
            self._change_to(cell.policy)
        started = time.perf_counter()
        self._run(step, steps)
        return 1e3 * (time.perf_counter() - started) / steps

    def _run(self, step, steps: int) -> dict:
        for _ in range(steps):
            result = step(*self._batch)
        self._backend.wait(result, self._model)
        return result

    def _change_to(self, policy: str):
        if policy == self._policy:
            return
        if policy in self._policies:
            self._policies[policy](refresh=False)
        else:
            # From what it was, not from another policy: which layers follow depends on their author's choice.
            self._as_it_was()
            layer_converter(self._model, get_policy(policy))()
            self._policies[policy] = recorded(self._model)
        self._policy = policy
