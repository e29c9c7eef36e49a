"""Quantized layers, and those whose arithmetic meets theirs: they keep the policies that they have.

A quantized layer returns the dtype that it was quantized under, for good. Between the layers of a graph Keras casts it
to what the next one takes. A layer that runs quantized ones in its `call` computes with what they return: given another
dtype, it would add float32 to bfloat16.
"""

import keras

from mpkeras import _keras


def has_own_call(layer) -> bool:
    """Whether the arithmetic of `layer` is the user's own."""
    return not type(layer).call.__module__.startswith("keras.") or isinstance(layer, keras.layers.Lambda)


def is_quantized(layer) -> bool:
    """Whether `layer` computes with int8, int4, float8, GPTQ or AWQ kernels, which another policy reads as numbers."""
    return layer.quantization_mode is not None


def running_quantized(model, dtype: str) -> list:
    """Returns the layers of `model` that run quantized layers of another compute dtype than `dtype` in their `call`."""
    found = []
    holds: dict = {}  # `id` of a layer -> whether it is, or has in it, such a quantized layer.

    def walk(layer) -> bool:
        if id(layer) not in holds:
            holds[id(layer)] = is_quantized(layer) and layer.compute_dtype != dtype
            if any([walk(inner) for inner in _keras.direct_sublayers(layer)]):
                holds[id(layer)] = True
                if not _is_graph(layer):
                    found.append(layer)
        return holds[id(layer)]

    walk(model)
    return found


def bound_layers(model, dtype: str) -> set[int]:
    """Returns the `id`s of the layers of `model` that are not given the compute dtype `dtype`.

    The quantized ones; and those that run some of another dtype, with all else that they run.
    """
    layers = [layer for layer in _keras.flatten_layers(model, include_self=True) if is_quantized(layer)]
    for layer in running_quantized(model, dtype) if layers else []:
        layers.extend(_keras.flatten_layers(layer, include_self=True))
    return {id(layer) for layer in layers}


def _is_graph(layer) -> bool:
    is_graph = isinstance(layer, keras.Sequential) or _keras.graph_of(layer) is not None
    return is_graph and not has_own_call(layer)
