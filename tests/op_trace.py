"""The operations of a training step as the backend sees them: what was multiplied in which dtype, and each cast."""

from typing import NamedTuple

import keras
import numpy as np

PRODUCTS = {"MatMul", "BatchMatMulV2", "Einsum", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"}
PRODUCTS |= {"dot_general", "conv_general_dilated"}
PRODUCTS |= {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
CASTS = {"Cast", "convert_element_type", "_to_copy"}
EXPONENTIALS = {"Softmax", "Exp", "Sigmoid", "exp", "logistic", "_softmax", "sigmoid"}


class Op(NamedTuple):
    name: str
    dtypes: frozenset  # float dtypes of its inputs


def training_ops(model, x, forward_only=False) -> list[Op]:
    """Returns the operations of a forward and backward pass; the loss is the sum of the outputs."""
    backend = keras.backend.backend()
    return {"tensorflow": _tensorflow_ops, "jax": _jax_ops, "torch": _torch_ops}[backend](model, x, forward_only)


def product_dtypes(ops) -> set:
    return {dtype for op in ops if op.name in PRODUCTS for dtype in op.dtypes}


def exponential_dtypes(ops) -> set:
    return {dtype for op in ops if op.name in EXPONENTIALS for dtype in op.dtypes}


def casts(ops) -> int:
    return sum(op.name in CASTS for op in ops)


def _float32_sum(outputs):
    return sum(keras.ops.sum(keras.ops.cast(output, "float32")) for output in keras.tree.flatten(outputs))


def _tensorflow_ops(model, x, forward_only):
    import tensorflow as tf

    def step(x):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            if forward_only:
                return outputs
            loss = _float32_sum(outputs)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    graph_def = tf.function(step).get_concrete_function(tf.convert_to_tensor(x)).graph.as_graph_def()
    nodes = [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]
    return [Op(node.op, _floats(node, tf)) for node in nodes]


def _floats(node, tf):
    types = [tf.as_dtype(node.attr[name].type) for name in ("T", "SrcT", "DstT") if node.attr[name].type]
    return frozenset(dtype.name for dtype in types if dtype.is_floating)


def _jax_ops(model, x, forward_only):
    import jax

    def loss(trainable, x):
        outputs, _ = model.stateless_call(trainable, [v.value for v in model.non_trainable_variables], x, training=True)
        return outputs if forward_only else _float32_sum(outputs)

    function = loss if forward_only else jax.grad(loss)
    jaxpr = jax.make_jaxpr(function)([v.value for v in model.trainable_variables], np.asarray(x))
    found = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            dtypes = [str(v.aval.dtype) for v in equation.invars if hasattr(v.aval, "dtype")]
            is_same = equation.primitive.name == "convert_element_type" and dtypes == [
                str(equation.outvars[0].aval.dtype)
            ]
            if not is_same:  # weak types only
                found.append(Op(equation.primitive.name, frozenset(d for d in dtypes if "float" in d)))
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)

    walk(jaxpr.jaxpr)
    return found


def _torch_ops(model, x, forward_only):
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            tensors = [t for t in keras.tree.flatten((args, kwargs or {})) if torch.is_tensor(t)]
            dtypes = frozenset(str(t.dtype).removeprefix("torch.") for t in tensors if t.is_floating_point())
            found.append(Op(function.overloadpacket.__name__, dtypes))
            return function(*args, **(kwargs or {}))

    with Recording():
        outputs = model(x, training=True)
        if not forward_only:
            _float32_sum(outputs).backward()
    return found
