"""Layers with a large product and an activation: the product in 16 bits, the activation in float32.

`Dense(50_000, activation="softmax")` needs its softmax in float32, not the product with its large kernel. Such a
layer gets the stock policy `float32`, by which Keras and everyone else knows it: it takes float32, returns float32, and
is saved so. Its `call` alone multiplies in 16 bits, and hands the activation a float32 result.
"""

import functools
import weakref
from typing import NamedTuple

import keras
from keras import ops

from mpkeras import _keras
from mpkeras.conversion.overrides import override, restore
from mpkeras.policies.dtypes import FLOAT_DTYPES, stock_name, tensor_dtype

# The activation is the last thing that the `call` of these does.
_PRODUCTS = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)
# Parameters below which a product costs so little that it stays with its activation: a classifier of a few classes is
# then in plain Keras, too, what it was here, bit for bit.
MIN_PARAMETERS = 4096
# As an expression it is found in no path, so plain Keras gives the layer the map's default: float32.
_MARK = "mpkeras: product in 16 bits(?!)"


class _Split(NamedTuple):
    policy: keras.DTypePolicy  # what the layer had: its product is in the compute dtype of it
    stand_in: keras.DTypePolicy  # what it was given


_splits: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
_COVERED = ("activation", "call", "get_config", "quantize", "autocast")


def layer_policy(layer) -> keras.DTypePolicy:
    """Returns the policy that `layer` follows: its own entry, where it has a `DTypePolicyMap`."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and layer.path:
        policy = policy[layer.path]
    return policy


def can_split(layer) -> bool:
    """Whether the product of `layer` can have another dtype than its activation, and is large enough to be worth it.

    A layer that is not built counts as large; what it is shows when it is called.
    """
    stock_call = type(layer).call in [base.call for base in _PRODUCTS]
    activation = getattr(layer, "activation", None)
    # One with a name of Keras is saved under this name, wrapped or not.
    stock_activation = activation is getattr(keras.activations, getattr(activation, "__name__", ""), _MARK)
    return stock_call and stock_activation and layer.quantization_mode is None and _is_large(layer)


def is_split(layer) -> bool:
    """Whether `split` holds for `layer`: not once its user has given it a policy of another kind."""
    return layer in _splits and layer_policy(layer) is _splits[layer].stand_in


def product_policy(layer) -> keras.DTypePolicy | None:
    """Returns the 16-bit policy of the product in a split layer; `None` for any other.

    A layer from a file, where it was saved as split, counts as one.
    """
    if is_split(layer):
        return _splits[layer].policy
    mark = saved_mark(layer)
    return None if mark is None else mark[_MARK]


def compute_dtype(layer) -> str:
    """Returns the dtype that `layer` computes in; of one whose product alone is in 16 bits, that dtype."""
    return (product_policy(layer) or layer).compute_dtype


def saved_mark(layer) -> keras.dtype_policies.DTypePolicyMap | None:
    """Returns the policy by which a file says that `layer` was split; `None` for any other, and once it is again."""
    policy = layer.dtype_policy
    is_mark = isinstance(policy, keras.dtype_policies.DTypePolicyMap) and _MARK in policy
    return policy if is_mark else None


def split(layer, policy: keras.DTypePolicy):
    """Puts `layer` under the stock policy `float32`, and its product alone in the compute dtype of `policy`."""
    product_dtype = policy.compute_dtype
    call, get_config, quantize = layer.call, layer.get_config, layer.quantize

    @functools.wraps(layer.activation)
    def activation(x, *args, **kwargs):
        return layer_activation(ops.cast(x, "float32"), *args, **kwargs)

    @functools.wraps(call)
    def call_with_16_bit_product(*args, **kwargs):
        dtype = product_dtype if is_split(layer) and _is_large(layer) else layer.compute_dtype
        args, kwargs = keras.tree.map_structure(lambda value: _cast(value, dtype), (args, kwargs))
        with _keras.autocast_scope(dtype):
            outputs = call(*args, **kwargs)
        # Without `activation`, where the user has put another in its place, they would be those of the product.
        return keras.tree.map_structure(lambda value: _cast(value, layer.compute_dtype), outputs)

    @functools.wraps(get_config)
    def get_config_with_mark():
        if not is_split(layer) or not _is_large(layer):
            return get_config()
        # Stock and portable; only `prepare` and `apply_policy` read the mark, and split the layer again.
        name = stock_name(product_dtype, policy.variable_dtype) or f"mixed_{product_dtype}"
        saved = keras.dtype_policies.DTypePolicyMap("float32", {_MARK: keras.DTypePolicy(name)})
        return {**get_config(), "dtype": keras.dtype_policies.serialize(saved)}

    @functools.wraps(quantize)
    def quantize_whole(*args, **kwargs):
        # As plain Keras does with a float32 layer, which it is to Keras: there is no 16-bit product any more.
        _uncover(layer)
        try:
            return quantize(*args, **kwargs)
        except Exception:
            if layer_policy(layer) is stand_in:
                split(layer, policy)
            raise

    layer_activation = layer.activation
    stand_in = layer.dtype_policy = keras.DTypePolicy("float32")
    override(layer, "activation", activation)
    override(layer, "call", call_with_16_bit_product)
    override(layer, "get_config", get_config_with_mark)
    override(layer, "quantize", quantize_whole)
    # Or a 16-bit input is cast up on the way in, and down again: twice over memory wherever XLA is not.
    override(layer, "autocast", False)
    _splits[layer] = _Split(policy, stand_in)


def join(layer):
    """Takes back `split`: the whole layer computes in the dtype of its product."""
    policy = product_policy(layer)
    _uncover(layer)
    if policy is None:
        return
    mark = saved_mark(layer)
    if mark is None:
        layer.dtype_policy = policy
    else:
        _keras.replace_policy_map(layer, policy)


def _uncover(layer):
    if _splits.pop(layer, None) is not None:
        for name in _COVERED:
            restore(layer, name)


def _is_large(layer) -> bool:
    return not layer.built or layer.count_params() >= MIN_PARAMETERS


def _cast(value, dtype: str):
    return ops.cast(value, dtype) if tensor_dtype(value) in FLOAT_DTYPES else value
