"""An estimate of the memory of a step where the backend tells nothing."""

import math

import keras

from mpkeras import _keras_private
from mpkeras.policies import products

#: An estimate compares policies; it decides nothing.
ESTIMATE = "an estimate: the layers' outputs for this batch, in the dtypes they compute in"


def estimated_output_bytes(model, x):
    """Returns `(bytes, ESTIMATE)` of what the layers of a Functional or Sequential model return; otherwise `None`."""
    graph = _keras_private.graph_of(model)
    if graph is None:
        return None
    rows = next((value.shape[0] for value in keras.tree.flatten(x) if len(value.shape)), 1)
    total = 0
    for operation in graph.operations:
        if isinstance(operation, keras.layers.InputLayer):
            continue
        policy = products.product_policy(operation) if isinstance(operation, keras.layers.Layer) else None
        compute_dtype = getattr(policy or operation, "compute_dtype", "float32")
        for tensor in keras.tree.flatten(operation.output):
            if None in tensor.shape[1:]:
                return None
            dtype = compute_dtype if "float" in tensor.dtype else tensor.dtype
            total += rows * math.prod(tensor.shape[1:]) * _item_bytes(dtype)
    return total, ESTIMATE


def _item_bytes(dtype: str) -> int:
    # "bfloat16" and "int32" end in their size in bits; "bool" does not.
    return 1 if dtype == "bool" else int(dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8
