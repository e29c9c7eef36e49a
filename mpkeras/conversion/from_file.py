"""The dtypes of a model that come from a file, and the layers that Keras has made anew beside them."""

import keras

from mpkeras import _keras
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.rules import is_quantized
from mpkeras.policies.survey import Survey


def program_layers(model) -> list:
    """Returns the layers of `model` that compute. A graph has the policy that was global when it was drawn.

    `model` is a model or a `Survey` of it.
    """
    model, *layers = Survey.of(model).layers
    layers = [layer for layer in layers if _keras.graph_of(layer) is None]
    layers = [layer for layer in layers if not isinstance(layer, keras.layers.InputLayer | keras.Sequential)]
    return layers or [model]


def comes_from_a_file(model) -> bool:
    """Whether the 16-bit layers of `model` have their policies from a file, and not from a program.

    In the text of a file each layer has the name of its policy to itself. A name in a program is one string: for all
    layers under one global policy of Keras', the model included, and for their clones. `load_model` is known for what
    it is in any case.

    `model` is a model or a `Survey` of it.
    """
    survey = Survey.of(model)
    small = [layer for layer in program_layers(survey) if layer.compute_dtype in SIXTEEN_BIT_DTYPES]
    if _keras.is_deserializing():
        return bool(small)
    # Keras has made a name for each layer that it has quantized.
    small = [layer for layer in small if not is_quantized(layer)]
    if not small:
        return False
    direct = [layer for layer in survey.direct(survey.model) if layer in small]
    names = [id(layer.dtype_policy.name) for layer in (survey.model, *direct)]
    return len(set(names)) == len(names)


def made_anew(model, was_made_in_16_bits: bool | None = None) -> list:
    """Returns the layers in float32 that `load_model` has made in the `__init__` of others, which were in 16 bits.

    A file holds the arguments of the outer layer alone. The inner ones have the policy that was global as they were
    made; a layer that the user has made in float32 has a policy to itself.

    Args:
        model: A model or a `Survey` of it.
        was_made_in_16_bits: Of a model that is known to come from a file: `True` where it was made in 16 bits, its
            outer layers too, which may be of the user's and keep no dtype; `False` where it was made in float32 and
            converted, with the layers that the user had made so. `None`: not known.
    """
    survey, by_default = Survey.of(model), keras.config.dtype_policy()
    held = survey.layers
    if was_made_in_16_bits is not True:
        holders = [x for x in held if has_own_call(x) and x.compute_dtype in SIXTEEN_BIT_DTYPES]
        within = {id(layer): layer for holder in holders for layer in survey.within(holder)}
        held = list(within.values())
    held = [layer for layer in held if layer.compute_dtype == "float32"]
    if was_made_in_16_bits is False:
        return held
    held = [layer for layer in held if layer.dtype_policy is by_default]
    return held if held and (was_made_in_16_bits or comes_from_a_file(survey)) else []
