"""The policy that the layers of a model were made under."""

import collections

from mpkeras.conversion.from_file import program_layers
from mpkeras.conversion.last import converted_by, last_conversion
from mpkeras.policies import registry
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.policy import Policy
from mpkeras.policies.rules import is_quantized


def policy_made_under(model) -> Policy | None:
    """Returns the `Policy` that most layers of `model` were made under, or have been given since; `None` for none.

    As long as a layer was made in 16 bits those in float32 do not count, however many they are.
    """
    converted = converted_by(model)
    if converted is not None:
        return converted
    made_with = [policy_without_rule(layer, last_conversion(model)) for layer in _with_policies_of_the_program(model)]
    made = [policy for policy in map(registry.made_under, made_with) if policy is not None]
    # Layers that prepare the data, made in a scope of float32, are often more than those that train behind them.
    made = [policy for policy in made if policy.compute_dtype in SIXTEEN_BIT_DTYPES] or made
    # By identity: equal policies are as good as the same one, and not all can be hashed.
    counts = collections.Counter(map(id, made))
    return next((policy for policy in made if id(policy) == counts.most_common(1)[0][0]), None)


def policy_without_rule(layer, conversion):
    """Returns the dtype policy of a layer, or the one that it would have if no rule kept it in float32."""
    as_kept, without_rule = (None, None) if conversion is None else conversion.kept.get(layer, (None, None))
    return without_rule if as_kept is not None and layer.dtype_policy is as_kept else layer.dtype_policy


def _with_policies_of_the_program(model) -> list:
    """Returns the computing layers of `model`, or itself, if Keras has quantized them all to what it computes in.

    The policy that Keras makes for a quantized layer does not tell which one the layer had before.
    """
    layers = program_layers(model)
    if not all(map(is_quantized, layers)):
        return layers
    dtypes = {(layer.compute_dtype, layer.variable_dtype) for layer in layers}
    return [model] if (model.compute_dtype, model.variable_dtype) in dtypes else []
