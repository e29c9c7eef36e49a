"""On torch: the operations of a step one by one."""

import warnings

import keras
import ml_dtypes
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpkeras.tools.blackbox.origins import frames_of_text, stack, user_line

# Under this name a node of the graph has the path of the layer that made it.
_LAYER = "mpkeras_layer"
_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)


def first_operation(step, state, data, gradients, origins, watch_layers):
    """Runs `step` op by op and returns the `Operation` at which inf or NaN began, or `None`.

    A dispatch mode sees every operation, forward and backward.

    Args:
        step: The train step: a function of `*state` and the batch.
        state: Empty; on JAX, the state that the step takes.
        data: The batch, of tensors.
        gradients: List that the step fills with the gradients it computed.
        origins: The `Origins`.
        watch_layers: Context manager: each layer's `call` is run by the function that it is given, as
            `around(layer path, call)`.
    """

    def around(path, call):
        with origins.within(path):
            outputs = call()
        for tensor in keras.tree.flatten(outputs):
            if torch.is_tensor(tensor):
                _note_layer(tensor.grad_fn, path)
        return outputs

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        # It keeps with each node of the graph where in the forward pass it was made.
        anomaly = torch.autograd.detect_anomaly(check_nan=False)
    with watch_layers(around), anomaly, _Watching(origins):
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
    def __init__(self, origins):
        super().__init__()
        self._origins = origins

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        arguments = keras.tree.flatten((args, kwargs))
        # Before the call, where it may write into what it reads.
        copies = (
            [(tensor, array.copy()) for tensor, array in _floats(arguments)] if function._schema.is_mutable else None
        )
        result = function(*args, **kwargs)
        name = function.overloadpacket.__name__

        def place():
            node = torch._C._current_autograd_node()
            if node is None:
                return "forward", name, self._origins.layer, user_line(stack())
            line = user_line(frames_of_text(node.metadata.get("traceback_", [])))
            return "backward", name, node.metadata.get(_LAYER), line

        # Not memory that nothing was written to yet.
        if not name.startswith(("empty", "new_empty")):
            outputs = _floats(keras.tree.flatten(result))
            self._origins.note(lambda: _floats(arguments) if copies is None else copies, outputs, place)
        return result


def _floats(values) -> list:
    return [(value, _array(value)) for value in values if torch.is_tensor(value) and value.is_floating_point()]


def _array(tensor):
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        # torch gives NumPy no bfloat16.
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return (tensor if tensor.dtype in _KNOWN_TO_NUMPY else tensor.to(torch.float32)).numpy()
