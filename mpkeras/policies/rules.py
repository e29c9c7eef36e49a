"""Rules for the layers that stay in float32: the default ones with their reasons, and what rules match in a model."""

import difflib
import itertools
import re

import keras

from mpkeras import _keras
from mpkeras.policies import kernels
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import OUTPUTS, casts_inside, has_own_call, is_large
from mpkeras.policies.survey import Survey

# Their softmax runs between two matrix products: in float32 it would drag the second one into float32 too.
_KEEP_OWN_PRECISION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
)

# Measured with Keras 3.15 on TensorFlow, JAX and torch (CPU): each layer under `mixed_float16` and
# `mixed_bfloat16` against itself in float32, on inputs of 0, ±300, ±1e5, standard normal numbers and pixels in
# [0, 255]. Where the backends differ, the worst is given.
#
# `python benchmarks/layer_zoo.py` measures every layer of Keras, with these rules and without, and a test fails when a
# rule is no longer needed or a layer needs one. Numbers here for sizes that the zoo does not have (kernels, windows and
# random draws of their own) were measured once, with Keras 3.15.
_AVERAGE = (
    "the sum over the window overflows float16 (32x32 windows of 305: inf on TensorFlow and JAX), and JAX "
    "adds up in bfloat16 (8x8 windows: 2.7% off, 32x32: 51%)"
)
_ADAPTIVE_AVERAGE = "JAX adds up in bfloat16: 1.4% off, and 314 instead of 305 over 64x64"


def _moves(float16: float, bfloat16: float) -> str:
    return (
        f"pixels in [0, 255] move by up to {bfloat16} in bfloat16 and {float16} in float16; "
        "inputs of 1e5 leave float16 as inf or NaN"
    )


def _draws(difference: int) -> str:
    return (
        "draws other random numbers in 16 bits than in float32: with one seed, pixels in [0, 255] differ by "
        f"up to {difference}; inputs of 1e5 leave float16 as inf or NaN"
    )


# Rows of `(rule, reason)`: layers that are given the data as it comes.
FOR_THE_DATA = (
    # Numbers that are names. Bins and codes follow from them, and a mask is where one of them equals a value.
    # `Embedding` is not here: it casts none of its inputs, and its rows may be 16-bit.
    (
        "CategoryEncoding",
        "a graph of TensorFlow casts its inputs, integers too: code 2049 is encoded as 2048 in float16, 257 as 256 in "
        "bfloat16",
    ),
    (
        "Discretization",
        "in a graph of TensorFlow the years 2048 and 2049 fall into one bin, and `count` raises in 16 bits; elsewhere "
        "3001 numbers in a bin count as 3000 in float16, 3008 in bfloat16",
    ),
    ("Masking", "beside `mask_value=2052`, steps of 2051 are masked in float16, and those of 2044 to 2056 in bfloat16"),
    # Preprocessing: the data as it comes, not yet in a range that suits 16 bits.
    ("Normalization", "a mean of 7e4 or a variance of 1e6 is inf in float16: NaN for every input"),
    ("Rescaling", _moves(float16=0.2, bfloat16=3.6)),
    ("Resizing", _moves(float16=0.2, bfloat16=1.6)),
    ("ContrastLimitedAdaptiveHistogramEqualization", _moves(float16=3.0, bfloat16=4.9)),
    ("MaxNumBoundingBoxes", _moves(float16=0.1, bfloat16=0.5)),
    ("CenterCrop", _moves(float16=0.1, bfloat16=0.5)),
    ("AutoContrast", _moves(float16=0.2, bfloat16=2.0)),
    ("Equalization", _moves(float16=4.1, bfloat16=7.9)),
    ("Solarization", _moves(float16=0.1, bfloat16=0.7)),
    ("MixUp", _moves(float16=0.2, bfloat16=1.5)),
    ("RandomBrightness", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomColorDegeneration", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomColorJitter", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomCrop", _moves(float16=0.1, bfloat16=0.5)),
    ("RandomFlip", _moves(float16=0.1, bfloat16=0.5)),
    ("RandomGrayscale", _moves(float16=0.1, bfloat16=1.1)),
    ("RandomHue", _moves(float16=0.1, bfloat16=1.5)),
    ("RandomInvert", _moves(float16=0.1, bfloat16=0.7)),
    ("RandomPosterization", _moves(float16=0.0, bfloat16=35.7)),
    ("RandomRotation", _moves(float16=0.1, bfloat16=1.0)),
    ("RandomSaturation", _moves(float16=0.1, bfloat16=1.5)),
    ("RandomSharpness", _moves(float16=0.3, bfloat16=1.6)),
    ("RandomTranslation", _moves(float16=0.1, bfloat16=0.9)),
    ("RandomZoom", _moves(float16=0.1, bfloat16=0.9)),
    ("CutMix", "bfloat16 raises on TensorFlow, float16 and bfloat16 on torch; on JAX another box is drawn"),
    ("AugMix", _draws(92)),
    ("RandAugment", _draws(176)),
    ("RandomContrast", _draws(13)),
    ("RandomElasticTransform", _draws(122)),
    ("RandomErasing", _draws(255)),
    ("RandomGaussianBlur", _draws(115)),
    ("RandomPerspective", _draws(255)),
    ("RandomShear", _draws(222)),
    ("MelSpectrogram", "off by 0.29 dB in bfloat16, 0.03 dB in float16; samples of 1e5 leave float16 as NaN"),
    ("STFTSpectrogram", "bfloat16 raises on every backend; float16 is off by 5e-3 of the largest"),
)
# Rows of `(rule, reason)`. The first rule that matches a layer counts.
DEFAULT_RULES = (
    # Probability heads. Keras looks for their logits, and the loss's cast of 16-bit numbers hides those.
    (
        "Softmax",
        "through the crossentropy, logits [15, 0] with label 1 get the gradient NaN in float16, and logits "
        "[20, 0] get [0, 0] instead of [1, -1] in 16 bits (TensorFlow)",
    ),
    ("activation:softmax", "as a `Softmax` layer"),
    (
        "activation:log_softmax",
        "for logits of ±30, log-probabilities are off by up to 0.25 in bfloat16 and 0.03 in float16",
    ),
    (
        "activation:sigmoid",
        "through the binary crossentropy, logit 10 with label 0 gets the gradient 0 instead of 1 in 16 bits",
    ),
    # Other activations.
    ("activation:squareplus", "float16: the square of 300 overflows, and 300 becomes inf"),
    ("activation:sparse_plus", "float16: the gradient for an input of 6e4 is NaN (JAX, torch)"),
    ("activation:sparsemax", "bfloat16: rows of 300 become inf or NaN"),
    # Normalization. `LayerNormalization` is not here: under any policy it casts nothing on the way in, sums in
    # float32 and rounds to the dtype of its input. Under the policy `float32` it gives the same numbers bit for
    # bit, on every backend, and writes them in twice the memory.
    (
        "BatchNormalization",
        "inputs of 1e5: NaN in float16; float32 inputs of 300 ± 1: off by 31% in bfloat16, 4% in float16",
    ),
    (
        "GroupNormalization",
        "inputs of 1e5: NaN in float16 with Keras 3.10; 300 ± 1: off by 40 epsilons (3.15 gives the same numbers under "
        "any policy)",
    ),
    ("RMSNormalization", "inputs of 1e5: NaN in float16; float32 inputs of 300 ± 1: off by 6e-3 in bfloat16"),
    ("UnitNormalization", "float16: zeros become NaN, and rows of 300 become 0 as their squares overflow"),
    (
        "SpectralNormalization",
        "float16: NaN for kernels with a standard deviation of 1e-3 and of 300 (TensorFlow, JAX); "
        "16 bits on torch: the kernel is not normalized at all",
    ),
    ("Dot", "with `normalize=True`, float16: zeros become NaN, and rows of 300 give 0 instead of 1"),
    # Averages.
    ("Average", "the sum comes before the division: three inputs of 6e4 become inf in float16"),
    ("AveragePooling1D", _AVERAGE),
    ("AveragePooling2D", _AVERAGE),
    ("AveragePooling3D", _AVERAGE),
    ("AdaptiveAveragePooling1D", _ADAPTIVE_AVERAGE),
    ("AdaptiveAveragePooling2D", _ADAPTIVE_AVERAGE),
    ("AdaptiveAveragePooling3D", _ADAPTIVE_AVERAGE),
    ("GlobalAveragePooling1D", "with a mask, the sum overflows float16 (4096 steps of 305: inf)"),
    # Regularizers.
    ("ActivityRegularization", "float16: the penalty of 512 activations of 300 is inf instead of 14400"),
    *FOR_THE_DATA,
    # By their place in the model, whatever their class.
    (
        OUTPUTS,
        "an output in 16 bits is rounded for good: a regression of years ends with an error of 2.35 in bfloat16 and "
        "0.35 in float16 instead of 0.17, and prices of 80000 are inf in float16",
    ),
)


def default_rules() -> tuple[str, ...]:
    """Returns the rules of `DEFAULT_RULES` without the reasons, as `Policy(keep_float32=...)` takes them.

    Example:

    >>> mpkeras.policies.default_rules()[:2]
    ('Softmax', 'activation:softmax')
    """
    return tuple(rule for rule, _ in DEFAULT_RULES)


def describe_rules() -> str:
    """Returns the default rules with their reasons as a table in plain text.

    Example:

    >>> print(mpkeras.policies.describe_rules())
    stays in float32 because
    Softmax through the crossentropy, logits ...
    """
    width = max(len(rule) for rule, _ in DEFAULT_RULES)
    lines = [f"{'stays in float32':{width}}  because"]
    lines.extend(f"{rule:{width}}  {reason}" for rule, reason in DEFAULT_RULES)
    return "\n".join(lines)


def filled_in(rules, default: tuple):
    """Returns `rules` with those of `default` in place of `...`; `default` for `None`."""
    if rules is None:
        return default
    if not isinstance(rules, (tuple, list, set, frozenset)) or ... not in rules:
        return rules
    return type(rules)(itertools.chain.from_iterable(default if rule is ... else (rule,) for rule in rules))


def kept_by(*rules: str, argument: str = "keep_float32") -> str:
    """Returns the argument of a policy that adds these rules to those that hold without it, as code."""
    return f"`{argument}=(..., {', '.join(map(repr, rules))})`"


def validate(rules, argument: str = "keep_float32", example: str = "for example (..., 'Softmax')") -> tuple:
    """Returns `rules`, the value of `argument`, as a tuple. Raises `TypeError` or `ValueError` where one is none.

    Args:
        example: The value to pass, as the error says it.
    """
    if not isinstance(rules, (tuple, list, set, frozenset)):
        raise TypeError(
            f"Expected `{argument}` to be a tuple of rules. Received: "
            f"{argument}={rules!r} (of type {type(rules).__name__}). Pass {example}."
        )
    # A set has no order of its own; a policy's rules need one to be compared.
    rules = tuple(sorted(rules, key=str)) if isinstance(rules, (set, frozenset)) else tuple(rules)
    for rule in rules:
        _check(rule)
    return rules


def path_rule(path: str) -> str:
    """Returns the rule for the layer of this path alone."""
    return f"path:^{re.escape(path)}$"


def written(rule) -> str:
    """Returns `rule` as a string for the same layers: the registered name of a class, the path of a layer.

    A layer that is not built has no path; its name is returned, for people to read.
    """
    if isinstance(rule, type):
        return keras.saving.get_registered_name(rule)
    if isinstance(rule, keras.layers.Layer):
        return path_rule(rule.path) if rule.path else f"layer {rule.name!r}"
    return rule


def serialized(rules, write=written):
    """Returns `rules` as strings for the same layers, each as `write` returns it.

    Args:
        rules: Rules, or what a `Policy` may have in their place, which is returned: `None`, or a word.
        write: Function of a rule.

    Raises:
        ValueError: If a layer among the rules is not built.
    """
    if rules is None or isinstance(rules, str):
        return rules
    for rule in rules:
        if isinstance(rule, keras.layers.Layer) and not rule.path:
            raise ValueError(
                "Expected the layers among the rules to be built before their policy is saved: they are saved by "
                f"their path. Received: layer '{rule.name}', which is not. Build the model first, or write a "
                "'path:REGEX' rule in the place of the layer."
            )
    return [write(rule) for rule in rules]


def serialized_for_copies(rules):
    """Returns `rules` as `serialized`, for the same layers of a model that is made again from its config.

    There Keras leaves the name of a Sequential model out of the paths of its layers: what is before the name of a layer
    may be missing.
    """

    def written_for_copies(rule):
        if not isinstance(rule, keras.layers.Layer):
            return written(rule)
        *around, name = map(re.escape, rule.path.split("/"))
        return f"path:^{''.join(f'(?:{part}/)?' for part in around)}{name}$"

    return serialized(rules, written_for_copies)


def matches(rule, layer) -> bool:
    """Returns whether `rule` names `layer` itself.

    A class, or its name, matches subclasses too; so do all names under which `keras.layers` has a class. `activation:`
    compares `layer.activation` with the Keras activation of that name. `path:` searches the expression anywhere in
    `layer.path`, or in `layer.name` until the layer is built; `^` and `$` tie it to the ends. The rule "outputs" goes
    by the place of a layer in its model, which a layer alone does not know: it matches none here.
    """
    if not isinstance(rule, str):
        return isinstance(layer, rule) if isinstance(rule, type) else layer is rule
    kind, _, argument = rule.partition(":")
    if kind == "activation":
        return _has_activation(layer, argument)
    if kind == "path":
        return re.search(argument, getattr(layer, "path", None) or layer.name) is not None
    # Keras has several names for some classes, and the one in its API is not always that of the class itself.
    public = getattr(keras.layers, rule, None)
    if isinstance(public, type) and isinstance(layer, public):
        return True
    name_of = keras.saving.get_registered_name if ">" in rule else lambda base: base.__name__
    return any(name_of(base) == rule for base in type(layer).__mro__)


def first_match(rules, layer):
    """Returns the first of `rules` that names `layer`, or `None`."""
    matching = next((rule for rule in rules if matches(rule, layer)), None)
    # `TimeDistributed` runs `layer.call`, which passes by the policy of the layer it wraps: the wrapper's
    # policy decides what that layer computes in.
    if matching is None and isinstance(layer, keras.layers.TimeDistributed):
        return first_match(rules, layer.layer)
    return matching


def unmatched(model, rules, argument: str) -> list[str]:
    """Returns a sentence for each of `rules`, the value of `argument`, that matches no layer of a built `model`.

    Not for default rules.
    """
    places = _compared(Survey.of(model))
    return [
        unmatched_text(model, rule, argument)
        for rule in dict.fromkeys(rules)
        if rule not in default_rules()
        and not any(first_match([rule], layer) for layer, is_inside in places if not is_inside or _is_of_a_place(rule))
    ]


def unmatched_text(model, rule, argument: str) -> str:
    """Says that `rule`, in the value of `argument`, matches no layer of `model`, a model or a `Survey` of it."""
    survey = Survey.of(model)
    layers = [layer for layer, _ in _compared(survey)]
    return (
        f"Expected each rule of `{argument}` to match a layer. Received: rule {written(rule)!r}, which matches none of "
        f"model '{survey.model.name}'. {_suggestion(rule, layers)}Correct the rule, or leave it out."
    )


def _compared(survey) -> list:
    """Returns `(layer, whether it is inside an attention layer)` for each layer that rules are compared with."""
    places: dict = {}

    def walk(parent, is_inside):
        is_inside = is_inside or isinstance(parent, _KEEP_OWN_PRECISION)
        for layer in survey.direct(parent):
            if id(layer) not in places:
                places[id(layer)] = layer, is_inside
                walk(layer, is_inside)

    walk(survey.model, False)
    return list(places.values())


def _suggestion(rule, layers) -> str:
    """Returns "Did you mean ...? " with what is nearest to a rule that matches nothing, or nothing."""
    if not isinstance(rule, str):
        return ""
    kind, _, argument = rule.partition(":")
    if kind == "activation":
        names = {getattr(getattr(layer, "activation", None), "__name__", "") for layer in layers} - {""}
    elif kind == "path":
        paths = {_keras.path_of(layer) for layer in layers}
        names = paths | {part for path in paths for part in path.split("/")}
    else:
        kind, argument, names = "", rule, {type(layer).__name__ for layer in layers} | set(dir(keras.layers))
    near = difflib.get_close_matches(argument, sorted(names), n=1)
    if not near:
        return ""
    # After `path:` stands an expression: names such as `block[2]` are written with backslashes in it.
    meant = near[0] if not kind else f"{kind}:{re.escape(near[0]) if kind == 'path' else near[0]}"
    # The name of a class of which the model has no layer is no slip.
    return f"Did you mean {meant!r}? " if meant != rule else ""


def layers_to_keep(model, rules, heads=()) -> list:
    """Returns `(layer, rule)` for every layer in `model` that `rules` keep in float32; the first that matches counts.

    A rule on a layer holds for everything inside it, unless the layer runs quantized layers that compute in 16 bits:
    then it stays as it is. Otherwise only rules for a place (a path, a layer) reach inside attention layers: these look
    after their own precision.

    Args:
        model: A `keras.Model` of any kind, or a layer, or a `Survey` of it.
        rules: As in `Policy.keep_float32`.
        heads: Layers that make outputs of the model, beside those that its graph shows.

    Returns:
        The rules are strings, those of classes and layers in the form in which they are saved.
    """
    rules, survey = tuple(rules), Survey.of(model)
    model = survey.model
    fixed = {id(layer) for layer in running_quantized(survey, "float32")}
    heads = (*survey.heads.layers, *heads)
    by_place = {id(layer) for layer in heads if not is_large(layer) or casts_inside(layer)}
    rule_by_layer: dict = {}
    seen = set()

    def walk(layer, inherited, rules=rules):
        rule = first_match(rules, layer) if inherited is None else inherited
        if rule is None and OUTPUTS in rules and id(layer) in by_place:
            rule = OUTPUTS
        if id(layer) in fixed:
            rule = None
        # A layer used in two places is walked again when only the second one is kept in float32.
        if (id(layer), rule is None) in seen:
            return
        seen.add((id(layer), rule is None))
        if rule is not None:
            rule_by_layer.setdefault(id(layer), (layer, written(rule)))
        if isinstance(layer, _KEEP_OWN_PRECISION):
            rules = tuple(filter(_is_of_a_place, rules))
        # A large head that casts inside lets the layers in it multiply in 16 bits.
        goes_on = rule != OUTPUTS or not is_large(layer)
        for inner in survey.direct(layer):
            walk(inner, rule if goes_on else None, rules)

    # A model with a `call` of its own and no layers is what makes its outputs.
    has_parts = isinstance(model, keras.Model) and model not in survey.heads.layers
    for layer in survey.direct(model) if has_parts else [model]:
        walk(layer, None)
    return list(rule_by_layer.values())


def _is_of_a_place(rule) -> bool:
    return isinstance(rule, keras.layers.Layer) or (isinstance(rule, str) and rule.startswith("path:"))


def kept_in_float32(model, policy, dtypes, heads=()) -> dict:
    """Returns `{id: (layer, rule, reason)}` for the layers that a rule, or a missing kernel, keeps in float32.

    Args:
        model: A `keras.Model` of any kind, or a layer, or a `Survey` of it.
        policy: The `Policy` with the rules.
        dtypes: `{id: dtype}`, what each layer computes in without them.
        heads: As in `layers_to_keep`.
    """
    reasons, survey = dict(DEFAULT_RULES), Survey.of(model)
    reason_by_layer = {
        id(layer): (layer, rule, reasons.get(rule, f"kept in float32 by the policy {policy.name!r}"))
        for layer, rule in layers_to_keep(survey, policy.keep_float32, heads)
    }
    others = {dtype for key, dtype in dtypes.items() if key not in reason_by_layer}
    for dtype in SIXTEEN_BIT_DTYPES:
        # A trial takes time, and a model in float32 needs none.
        for layer, rule, reason in _without_kernel(survey, dtype) if dtype in others else []:
            if dtypes[id(layer)] in (dtype, "float32"):
                reason_by_layer.setdefault(id(layer), (layer, rule, reason))
    return reason_by_layer


def _without_kernel(survey, dtype: str) -> list:
    """Returns `(layer, class name, reason)` for the layers that the backend and device cannot run in `dtype`."""
    layers = survey.layers
    classes = {base.__name__ for layer in layers for base in type(layer).__mro__}
    missing = dict(kernels.missing_kernel_rules(dtype, among=classes))
    lacking_layers: list = [(layer, rule, missing[rule]) for layer, rule in layers_to_keep(survey, missing)]
    for lacking in layers:
        reason = kernels.missing_kernel_of(lacking, dtype)
        # With a wrapper around it.
        for layer, _ in layers_to_keep(survey, [lacking]) if reason is not None else []:
            lacking_layers.append((layer, type(lacking).__name__, reason))
    return lacking_layers


# Quantized layers, and those whose arithmetic meets theirs, keep the policies that they have. A quantized layer returns
# the dtype that it was quantized under, for good. Between the layers of a graph Keras casts it to what the next one
# takes. A layer that runs quantized ones in its `call` computes with what they return: given another dtype, it would
# add float32 to bfloat16.


def is_quantized(layer) -> bool:
    """Whether `layer` computes with int8, int4, float8, GPTQ or AWQ kernels, which another policy reads as numbers."""
    return layer.quantization_mode is not None


def running_quantized(model, dtype: str) -> list:
    """Returns the layers of `model` that run quantized layers of another compute dtype than `dtype` in their `call`."""
    quantized, survey = [], Survey.of(model)
    holds: dict = {}  # `id` of a layer -> whether it is, or has in it, such a quantized layer.

    def walk(layer) -> bool:
        if id(layer) not in holds:
            holds[id(layer)] = is_quantized(layer) and layer.compute_dtype != dtype
            if any([walk(inner) for inner in survey.direct(layer)]):
                holds[id(layer)] = True
                if not is_graph(layer):
                    quantized.append(layer)
        return holds[id(layer)]

    walk(survey.model)
    return quantized


def bound_layers(model, dtype: str) -> set[int]:
    """Returns the `id`s of the layers of `model` that are not given the compute dtype `dtype`.

    The quantized ones; and those that run some of another dtype, with all else that they run.
    """
    survey = Survey.of(model)
    bound = {id(layer) for layer in survey.layers if is_quantized(layer)}
    for layer in running_quantized(survey, dtype):
        bound |= {id(inner) for inner in survey.within(layer)}
    return bound


def is_graph(layer) -> bool:
    """Whether `layer` is a model that passes tensors from layer to layer, and computes nothing itself."""
    is_graph = isinstance(layer, keras.Sequential) or _keras.graph_of(layer) is not None
    return is_graph and not has_own_call(layer)


def layer_policy(layer) -> keras.DTypePolicy:
    """Returns the policy that `layer` follows: its own entry, where it has a `DTypePolicyMap`."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and layer.path:
        policy = policy[layer.path]
    return policy


def set_layer_policy(layer, policy: keras.DTypePolicy):
    """Sets the policy of `layer`, built or not, for all of it, and what it keeps in the compute dtype."""
    layer.dtype_policy = policy
    # `Normalization` casts its mean and variance once, when it is built: a variance of 1e6 is inf by then.
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        if layer.input_mean is None:
            layer.finalize_state()
        else:
            layer.build(layer.get_build_config()["input_shape"])


def _has_activation(layer, name: str) -> bool:
    activation = getattr(layer, "activation", None)
    if activation is None:
        return False
    # By name too: a wrapped activation (rematerialization, `functools.wraps`) is another object.
    return activation is getattr(keras.activations, name, None) or getattr(activation, "__name__", None) == name


def _check(rule):
    is_layer_class = isinstance(rule, type) and issubclass(rule, keras.layers.Layer)
    if is_layer_class or isinstance(rule, keras.layers.Layer):
        return
    if not isinstance(rule, str):
        raise TypeError(
            "Expected each rule to be a string, a layer class or a layer. Received: "
            f"{rule!r} (of type {type(rule).__name__}). Name the layer's class, such as 'Softmax'."
        )
    kind, separator, argument = rule.partition(":")
    if not separator:
        # A class that is registered with Keras may be named with its package.
        if not rule.rpartition(">")[2].isidentifier():
            raise ValueError(
                "Expected a rule to be a layer class name, 'activation:NAME' or 'path:REGEX'. Received: "
                f"{rule!r}. Use 'Softmax', 'activation:softmax' or 'path:head'."
            )
    elif kind == "activation":
        if not argument.isidentifier():
            raise ValueError(
                "Expected the name of an activation after 'activation:'. Received: "
                f"{rule!r}. Use for example 'activation:softmax'."
            )
    elif kind == "path":
        _check_expression(rule, argument)
    else:
        raise ValueError(
            "Expected a rule to start with 'activation:' or 'path:', or to be a layer class name. Received: "
            f"{rule!r}. For a class leave out the prefix; for one layer use 'path:' with its `layer.path`."
        )


def _check_expression(rule: str, expression: str):
    if not expression:
        # An empty expression is found in every path.
        raise ValueError(
            f"Expected an expression after 'path:'. Received: {rule!r}. Use 'path:head', or 'path:.' for every layer."
        )
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(
            "Expected a regular expression after 'path:'. Received: "
            f"{rule!r} ({error}). Put a backslash before special characters."
        ) from error
