"""On torch: a step under a dispatch mode, which sees every operation, forward and backward."""

import functools
import warnings

import keras
import ml_dtypes
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpkeras.insight.operations.origins import Operation, frames_of_text, stack, user_line

_LAYER = "mpkeras_layer"


def first_operation(step, state, data, gradients, origins, watch_layers):
    """Runs `step` op by op and returns the `Operation` at which inf or NaN began, or `None`.

    Args:
        step: The train step: a function of `*state` and the batch.
        state: Empty; on JAX, the state that the step takes.
        data: The batch.
        gradients: List that the step fills with the gradients it computed.
        origins: The `Origins`.
        watch_layers: Context manager: each layer's `call` is run by the function that it is given, as
            `around(layer path, call)`.
    """
    current: list = []

    def around(path, call):
        origins.enter(path, list(current))
        current.append(path)
        try:
            outputs = call()
        finally:
            current.pop()
        for tensor in keras.tree.flatten(outputs):
            if torch.is_tensor(tensor):
                _note_layer(tensor.grad_fn, path)
        return outputs

    data = keras.tree.map_structure(_as_tensor, data)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        # It keeps with each node of the graph where in the forward pass it was made.
        anomaly = torch.autograd.detect_anomaly(check_nan=False)
    with watch_layers(around), anomaly, _Watching(origins, current):
        logs = step(*state, data)
    return origins.first(_floats([*gradients, *keras.tree.flatten(logs)]))


def _note_layer(node, path):
    """Notes with each node of the graph behind `node` which layer made it, but for those that are known."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node is not None and _LAYER not in node.metadata:
            node.metadata[_LAYER] = path
            waiting += [behind for behind, _ in node.next_functions]


class _Watching(TorchDispatchMode):
    def __init__(self, origins, current):
        super().__init__()
        self._origins = origins
        self._current = current

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = keras.tree.flatten((args, kwargs))
        # Before the call, where it may write into what it reads.
        copies = [(tensor, array.copy()) for tensor, array in _floats(given)] if function._schema.is_mutable else None
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        # Memory that nothing was written to yet.
        if not name.startswith("empty") and not name.startswith("new_empty"):
            outputs = _floats(keras.tree.flatten(result))
            self._origins.note(
                lambda: _floats(given) if copies is None else copies,
                outputs,
                functools.partial(self._describe, name, outputs),
            )
        return result

    def _describe(self, name, outputs, numbers):
        node = torch._C._current_autograd_node()
        if node is None:
            side, where, line = "forward", self._current[-1] if self._current else None, user_line(stack())
        else:
            side, where = "backward", node.metadata.get(_LAYER)
            line = user_line(frames_of_text(node.metadata.get("traceback_", [])))
        return Operation(side, name, where, line, outputs[0][1].dtype.name, numbers)


def _as_tensor(value):
    return value if value is None or torch.is_tensor(value) else keras.ops.convert_to_tensor(value)


def _floats(values) -> list:
    return [(value, _array(value)) for value in values if torch.is_tensor(value) and value.is_floating_point()]


def _array(tensor):
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        # torch gives NumPy no bfloat16.
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return (tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.to(torch.float32)).numpy()


_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)
