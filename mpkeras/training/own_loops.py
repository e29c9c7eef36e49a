"""Names the layers that a loop of the user's own trains in 16 bits, although their policy keeps them in float32."""

import gc
import warnings

import keras

from mpkeras import _keras
from mpkeras.conversion.last import converted_by
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.rules import layers_to_keep
from mpkeras.training.made_under import policy_made_under

# More are counted.
_MOST_NAMED = 5


def _is_layer(thing) -> bool:
    # Not `isinstance`: it asks objects that stand for others what they are, and some raise.
    is_layer = issubclass(type(thing), keras.layers.Layer)
    # Of some classes Keras makes an object without `__init__` first, which has nothing yet and lives on for a while.
    return is_layer and hasattr(thing, "trainable_variables")


def warn_of_layers_in_16_bits(optimizer, variables):
    """Warns where layers of the model that `variables` belong to were made under a policy that no door has carried out.

    A policy of mpkeras' gives all layers its dtype as they are made, as Keras offers no way to tell them apart then.
    `compile`, `make_train_step` and `apply_policy` do what its float32 rules say; a loop that does without them trains
    a softmax in float16. No variable knows its layer: they are found among all objects, once for an optimizer.
    """
    trained = {id(variable) for variable in variables}
    # No comprehension: in a `tf.function` AutoGraph rewrites it, and its own objects are among these.
    layers = list(filter(_is_layer, gc.get_objects()))
    converted: set = set()
    outermost = {id(layer): layer for layer in layers if trained & {id(v) for v in layer.trainable_variables}}
    for layer in layers:
        inside = _keras.flatten_layers(layer)
        # The graph of a `Sequential` is a model of its own, and no layer of it.
        graph = _keras.graph_of(layer)
        for inner in inside if graph is layer else [*inside, graph]:
            outermost.pop(id(inner), None)
        if isinstance(layer, keras.Model) and converted_by(layer) is not None:
            converted |= {id(layer), *map(id, inside)}
    texts_by_policy: dict = {}
    for root in outermost.values():
        policy = None if id(root) in converted else policy_made_under(root)
        if policy is None:
            continue
        for layer, rule in layers_to_keep(root, policy.keep_float32):
            if layer.compute_dtype in SIXTEEN_BIT_DTYPES and id(layer) not in converted:
                texts_by_policy.setdefault(policy.name, {})[id(layer)] = f"'{layer.path or layer.name}' ({rule})"
    for name, texts in texts_by_policy.items():
        named = list(texts.values())
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        warnings.warn(
            f"Optimizer '{optimizer.name}' trains layers in 16 bits that their policy '{name}' keeps in float32: "
            f"{', '.join(named[:_MOST_NAMED])}{more}. In a loop of your own, call `mpkeras.apply_policy(model, "
            f"'{name}')` once before the first step, or let `mpkeras.make_train_step` run it.",
            stacklevel=4,
        )
