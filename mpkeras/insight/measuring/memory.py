"""An estimate of the memory of a step where the backend tells nothing."""

import keras

from mpkeras import _keras
from mpkeras.policies.dtypes import bytes_of

#: An estimate compares policies; it decides nothing.
ESTIMATE = "an estimate: the layers' outputs for this batch, in the dtypes they compute in"


def estimated_output_bytes(model, x):
    """Returns `(bytes, ESTIMATE)` of what the layers of a Functional or Sequential model return; otherwise `None`."""
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
    return total, ESTIMATE
