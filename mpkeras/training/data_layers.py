"""Names layers for the data that compute in 16 bits outside of every model, in a `tf.data` pipeline for example."""

import gc
import warnings
import weakref

import keras

from mpkeras import _keras
from mpkeras.policies import registry
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.rules import FOR_THE_DATA, first_match
from mpkeras.training.living import living_layers
from mpkeras.training.made_under import policy_made_under

# More are counted.
_MOST_NAMED = 3
# Layers that were named already, and models with whose training all layers were looked through.
_told: weakref.WeakSet = weakref.WeakSet()
_looked: weakref.WeakSet = weakref.WeakSet()


def warn_of_layers_for_the_data(model):
    """Warns of layers that prepare the data in 16 bits, although rules of the policy keep such layers in float32.

    A global policy, of mpkeras' or of Keras', gives all layers its dtype as they are made, and the rules reach those of
    the model alone. A layer that runs in a pipeline, or in front of the model, is in none: it casts what it is given,
    integers in a graph of TensorFlow included. Such layers are found among all objects, once for a model.
    """
    if model in _looked:
        return
    _looked.add(model)
    of_model = policy_made_under(model)
    if of_model is None or of_model.compute_dtype not in SIXTEEN_BIT_DTYPES:
        return
    if not _in_16_bits(of_model):
        return
    # Layers that nobody holds any more may still be there.
    gc.collect()
    texts_by_policy: dict = {}
    for layer, policy, rule in _in_16_bits(of_model):
        _told.add(layer)
        texts_by_policy.setdefault(policy.name, []).append(f"'{layer.name}' ({dict(FOR_THE_DATA)[rule]})")
    for name, texts in texts_by_policy.items():
        more = f"; and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
        warnings.warn(
            "Layers that are in no model that is trained, such as those of a data pipeline, compute in 16 bits, "
            f"although rules of policy '{name}' keep them in float32: {'; '.join(texts[:_MOST_NAMED])}{more}. Make "
            "them in `with mpkeras.policy_scope('float32'):`, or with `dtype='float32'`.",
            stacklevel=4,
        )


def _in_16_bits(of_model) -> list:
    """Returns `(layer, policy, rule)` for the living layers that are to be named, and were not yet.

    The rules are those of the policy that a layer was made under, or `of_model` where that is Keras' global policy.
    """
    of_keras = keras.config.dtype_policy()
    # The oldest Keras lacks some.
    for_the_data = tuple(getattr(keras.layers, rule) for rule, _ in FOR_THE_DATA if hasattr(keras.layers, rule))
    living = living_layers([*for_the_data, keras.Model])
    candidates: list = [layer for layer in living if isinstance(layer, for_the_data)]
    if not candidates:
        return []
    models = [layer for layer in living if isinstance(layer, keras.Model)]
    # A model that nobody has compiled yet will be converted; one of preprocessing layers alone never is. What is inside
    # of another candidate follows from that.
    holders = [*(model for model in models if model.trainable_variables), *candidates]
    inside = {id(inner) for holder in holders for inner in _keras.flatten_layers(holder)}
    found = []
    for layer in candidates:
        # A layer that was given its dtype has a policy of its own.
        policy = registry.made_under(layer.dtype_policy) or (of_model if layer.dtype_policy is of_keras else None)
        is_small = layer.compute_dtype in SIXTEEN_BIT_DTYPES and _keras.was_called(layer)
        if policy is not None and is_small and id(layer) not in inside and layer not in _told:
            rule = first_match([rule for rule, _ in FOR_THE_DATA if rule in policy.keep_float32], layer)
            found += [] if rule is None else [(layer, policy, rule)]
    return found
