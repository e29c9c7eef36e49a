"""`Bench`: runs training steps of a model in several settings; the model stays as it was."""

import contextlib
import random
import time

import keras
import numpy as np

from mpkeras import _keras, devices
from mpkeras.conversion.apply import layer_converter, recorded
from mpkeras.conversion.plan import computes_in
from mpkeras.insight.timing import NotTrainable
from mpkeras.policies.dtypes import bytes_of
from mpkeras.policies.registry import get_policy
from mpkeras.policies.scalars import number
from mpkeras.training import training_backend
from mpkeras.training.state import load_state_dict, state_dict
from mpkeras.training.step import make_train_step

# float16 begins at a loss scale of 2^15: so many steps are skipped at most until it is down at 1.
_WARM_UP_STEPS = 16
TEMPORARY = "XLA's temporary buffers of the compiled step, beside weights, optimizer and batch"
PEAK = "the device memory that a step takes at its peak, beside what is held between steps"
#: An estimate compares policies; it decides nothing.
ESTIMATE = "an estimate: the layers' outputs for this batch, in the dtypes they compute in"


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
        result = step(*self._batch)
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
        found, kind = self._memory(step)
        if found is not None:
            self.memory_kind = self.memory_kind or kind
            # What is of another kind is not to be compared.
            cell.memory_bytes = found if kind == self.memory_kind else None
        return milliseconds

    def _memory(self, step) -> tuple:
        """Returns `(bytes, what they are)` of a warm step; `None` bytes where compiler and device tell nothing."""
        found = step.temporary_bytes(*self._batch)
        if found is not None:
            return found, TEMPORARY
        found = devices.backend_module().peak_bytes_of(lambda: self._run(step, 1))
        if found is not None:
            return found, PEAK
        return estimated_output_bytes(self._model, self._batch[0]), ESTIMATE

    def measure(self, cell, steps: int) -> float:
        """Returns the mean milliseconds of `steps` steps in a row, the device waited for at the end."""
        step = self._steps[cell.name]
        if _runs_op_by_op(cell.jit_compile):
            self._change_to(cell.policy)
        started = time.perf_counter()
        self._run(step, steps)
        return 1e3 * (time.perf_counter() - started) / steps

    def _run(self, step, steps: int) -> dict:
        for _ in range(steps):
            result = step.run_as_made(*self._batch)
        devices.backend_module().wait(self._model, result)
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


def _runs_op_by_op(jit_compile: bool) -> bool:
    """Returns whether a step reads the layers' policies in every call, and not only in the first.

    A step of TensorFlow is a graph at least; what `torch.compile` made is chosen by the state of the layers, too.
    """
    backend = keras.backend.backend()
    return backend == "torch" or (backend == "jax" and not jit_compile)


def estimated_output_bytes(model, x) -> int | None:
    """Returns the bytes that the layers of a Functional or Sequential model return; otherwise `None`."""
    graph = _keras.graph_of(model)
    if graph is None:
        return None
    rows = next((value.shape[0] for value in keras.tree.flatten(x) if len(value.shape)), 1)
    total = 0
    for operation in graph.operations:
        if isinstance(operation, keras.layers.InputLayer):
            continue
        compute_dtype = operation.compute_dtype if isinstance(operation, keras.layers.Layer) else "float32"
        for tensor in keras.tree.flatten(operation.output):
            if None in tensor.shape[1:]:
                return None
            dtype = compute_dtype if "float" in tensor.dtype else tensor.dtype
            total += rows * bytes_of(tensor.shape[1:], dtype)
    return total


@contextlib.contextmanager
def trainable_copy(model, x):
    """Yields `(model to train, whether it is a copy)`; afterwards `model` is as it was before, bit for bit.

    A copy where Keras can make one: of Functional and Sequential models by `keras.models.clone_model`, of others by
    their `get_config`. Otherwise the model itself, and afterwards all its variables, random generators and dtype
    policies are put back. In both cases so are Python's, NumPy's, torch's and Keras' own random generators: layers
    that are made, and batches that are drawn, take numbers from them.
    """
    with _random_generators_put_back(), training_backend.variable_scope(model):
        copy = _copy(model, x)
        if copy is not None:
            yield copy, True
            return
        if not _keras.is_built(model):
            model(x)
        state = state_dict(model, optimizers=[])
        policies, grads = recorded(model), _torch_grads(model)
        try:
            yield model, False
        finally:
            policies()
            load_state_dict(model, state, optimizers=[])
            for tensor, grad in grads:
                tensor.grad = grad


def _copy(model, x):
    """Returns a model of the same configuration and weights, built; `None` where Keras can make none."""
    try:
        if _keras.graph_of(model) is not None or isinstance(model, keras.Sequential):
            copy = keras.models.clone_model(model)
        else:
            copy = type(model).from_config(model.get_config())
        if not _keras.is_built(copy):
            copy(x)
        if _keras.is_built(model):
            _check_alike(copy, model)
            copy.set_weights(model.get_weights())
            # What `prepare` or `apply_policy` made of the layers is not in every configuration.
            recorded(model, on=copy)()
        return copy
    except Exception:  # What `get_config`, `from_config` and the layers of the user's own raise.
        return None


def _check_alike(copy, model):
    """Raises `ValueError` where the configuration did not say all: other weights, or other layers."""
    if _picture(copy) != _picture(model):
        raise ValueError(f"Expected a copy like '{model.name}'. Received: another one. Measure the model itself.")


def _picture(model) -> tuple:
    weights = [(tuple(weight.shape), weight.dtype, weight.trainable) for weight in model.weights]
    return weights, [type(layer) for layer in _keras.flatten_layers(model)]


def _torch_grads(model) -> list:
    if keras.backend.backend() != "torch":
        return []
    return [(variable.value, variable.value.grad) for variable in model.trainable_variables]


@contextlib.contextmanager
def _random_generators_put_back():
    states = random.getstate(), np.random.get_state(), training_backend.global_random_states()
    generator = _keras.made_global_seed_generator()
    seed = None if generator is None else np.array(keras.ops.convert_to_numpy(generator.state.value))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        training_backend.set_global_random_states(states[2])
        if generator is not None:
            generator.state.assign(seed)
        _keras.set_global_seed_generator(generator)
