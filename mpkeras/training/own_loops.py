"""Names what a loop of the user's own trains in 16 bits, although the policy of the model looks after it."""

import warnings

import keras

from mpkeras import _keras
from mpkeras.conversion.exact_inputs import reads_names
from mpkeras.conversion.last import converted_by
from mpkeras.conversion.plan import plan
from mpkeras.policies.heads import has_own_call
from mpkeras.training.living import living_layers
from mpkeras.training.made_under import policy_made_under

# More are counted.
_MOST_NAMED = 5
# The changes of a policy without which numbers go into a model, or come out of it, rounded.
_OF_NUMBERS = ("raw inputs", "float32 outputs")


def warn_of_layers_in_16_bits(optimizer, variables):
    """Warns where the model that `variables` belong to was made under a policy that no door has carried out.

    A policy of mpkeras' gives all layers its dtype as they are made, as Keras offers no way to tell them apart then.
    `compile`, `make_train_step` and `apply_policy` do what its float32 rules say; a loop that does without them trains
    a softmax in float16. No variable knows its layer: they are found among all objects, once for an optimizer.
    """
    trained = {id(variable) for variable in variables}
    layers = living_layers()
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
        for row in plan(root, policy):
            what, layer = _missed(row), row.layer
            if what and id(layer) not in converted:
                texts_by_policy.setdefault(policy.name, {})[id(layer)] = f"'{_keras.path_of(layer)}' ({what})"
    for name, texts in texts_by_policy.items():
        warnings.warn(
            f"Optimizer '{optimizer.name}' trains in 16 bits what policy '{name}' looks after: "
            f"{listed(list(texts.values()), _MOST_NAMED)}. In a loop of your own, call `mpkeras.apply_policy(model, "
            f"'{name}')` once before the first step, or let `mpkeras.make_train_step` run it.",
            stacklevel=4,
        )


def listed(texts: list, most: int) -> str:
    """Returns the first `most` of `texts`, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def _missed(row) -> str | None:
    """Returns what a policy would do for the numbers of a layer: the rule that keeps it in float32, or changes."""
    layer = row.layer
    if layer.compute_dtype != row.after.compute_dtype:
        return row.rule
    # Of layers that compute in 16 bits a Sequential model rounds nothing that they do not.
    rounds = has_own_call(layer) or any(map(reads_names, _keras.direct_sublayers(layer)))
    return ", ".join(name for name in row.changes if name in _OF_NUMBERS) if rounds else None
