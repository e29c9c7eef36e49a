"""Rules for the layers that stay in float32: reading, matching and applying them."""

import difflib
import re
from typing import NamedTuple

import keras

from mpkeras import _keras
from mpkeras.policies import kernels
from mpkeras.policies.default_rules import DEFAULT_RULES, default_rules
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES

# On the policy of a layer that has its float8 state from a conversion. No file and no config holds it.
FLOAT8_STATE_MARK = "_mpkeras_gave_state"
# Their softmax runs between two matrix products: in float32 it would drag the second one into float32 too.
_KEEP_OWN_PRECISION = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
)


class AppliedRule(NamedTuple):
    """One layer that a rule moved to float32."""

    layer: keras.layers.Layer
    rule: str
    reason: str
    old_policy: keras.DTypePolicy

    def undo(self):
        """Gives the layer the policy back that it had before."""
        set_layer_policy(self.layer, self.old_policy)


def validate(rules, argument: str = "keep_float32") -> tuple:
    """Returns `rules` as a tuple.

    Args:
        rules: Each a layer class or its name (`"Softmax"`), `"activation:NAME"`, `"path:REGEX"` or a layer.
        argument: What they are given as, for the message of an error.

    Raises:
        TypeError: If `rules` is one rule alone, or holds something else than rules.
        ValueError: If a rule cannot be read.
    """
    if not isinstance(rules, (tuple, list, set, frozenset)):
        raise TypeError(
            f"Expected `{argument}` to be a tuple of rules. Received: "
            f"{argument}={rules!r} (of type {type(rules).__name__}). Pass for example ('Softmax',)."
        )
    # A set has no order of its own; a policy's rules need one to be compared.
    rules = tuple(sorted(rules, key=str)) if isinstance(rules, (set, frozenset)) else tuple(rules)
    for rule in rules:
        _check(rule)
    return rules


def path_rule(path: str) -> str:
    """Returns the rule that names the layer of this path alone."""
    return f"path:^{re.escape(path)}$"


def written(rule) -> str:
    """Returns `rule` as a string that stands for the same layers.

    That of a class is the name that Keras saves it under, that of a layer its path; of a layer that is not built its
    name, which no rule can be read from.
    """
    if isinstance(rule, type):
        return keras.saving.get_registered_name(rule)
    if isinstance(rule, keras.layers.Layer):
        return path_rule(rule.path) if rule.path else f"layer {rule.name!r}"
    return rule


def serialized(rules) -> list[str]:
    """Returns `rules` as strings, from which `validate` makes rules for the same layers.

    Raises:
        ValueError: If one is a layer that is not built: it has no path by which it could be found again.
    """
    for rule in rules:
        if isinstance(rule, keras.layers.Layer) and not rule.path:
            raise ValueError(
                "Expected the layers among the rules to be built before their policy is saved: they are saved by "
                f"their path. Received: layer '{rule.name}', which is not. Build the model first, or write a "
                f"'path:REGEX' rule in the place of the layer."
            )
    return [written(rule) for rule in rules]


def matches(rule, layer) -> bool:
    """Returns whether `rule` names `layer` itself.

    A class, or its name, matches subclasses too; so do all names under which `keras.layers` has a class. `activation:`
    compares `layer.activation` with the Keras activation of that name. `path:` searches the expression anywhere in
    `layer.path`, or in `layer.name` until the layer is built; `^` and `$` tie it to the ends.
    """
    if isinstance(rule, type):
        return isinstance(layer, rule)
    if isinstance(rule, keras.layers.Layer):
        return layer is rule
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
    for rule in rules:
        if matches(rule, layer):
            return rule
    # `TimeDistributed` runs `layer.call`, which passes by the policy of the layer it wraps: the wrapper's
    # policy decides what that layer computes in.
    if isinstance(layer, keras.layers.TimeDistributed):
        return first_match(rules, layer.layer)
    return None


def unmatched(model, rules, argument: str) -> list[str]:
    """Returns a sentence for each of `rules` that is no default rule and matches no layer of `model`.

    Args:
        model: A `keras.Model` that is built, with the paths that its layers will keep.
        rules: As in `Policy.keep_float32`.
        argument: What they were given as, for the sentence.
    """
    layers = _reachable(model)
    return [
        f"Expected each rule of `{argument}` to match a layer. Received: rule {written(rule)!r}, which matches none "
        f"of model '{model.name}'. {_suggestion(rule, layers)}Correct the rule, or leave it out."
        for rule in dict.fromkeys(rules)
        if rule not in default_rules() and not any(first_match([rule], layer) for layer in layers)
    ]


def _reachable(model) -> list:
    """Returns the layers that rules are compared with: all but those inside attention layers."""
    found: dict = {}

    def walk(parent):
        for layer in _keras.direct_sublayers(parent):
            if id(layer) not in found:
                found[id(layer)] = layer
                if not isinstance(layer, _KEEP_OWN_PRECISION):
                    walk(layer)

    walk(model)
    return list(found.values())


def _suggestion(rule, layers) -> str:
    """Returns "Did you mean ...? " with what is nearest to a rule that matches nothing, or nothing."""
    if not isinstance(rule, str):
        return ""
    kind, _, argument = rule.partition(":")
    if kind == "activation":
        names = {getattr(getattr(layer, "activation", None), "__name__", "") for layer in layers} - {""}
    elif kind == "path":
        paths = {layer.path or layer.name for layer in layers}
        names = paths | {part for path in paths for part in path.split("/")}
    else:
        kind, argument, names = "", rule, {type(layer).__name__ for layer in layers} | set(dir(keras.layers))
    near = difflib.get_close_matches(argument, sorted(names), n=1)
    return f"Did you mean {f'{kind}:{near[0]}' if kind else near[0]!r}? " if near else ""


def layers_to_keep(model, rules) -> list:
    """Returns `(layer, rule)` for every layer in `model` that `rules` keep in float32.

    A rule on a layer holds for everything inside it, unless the layer runs quantized layers that compute in 16 bits:
    then it stays as it is. Otherwise the layers inside attention layers are left out: attention layers look after
    their own precision.

    Args:
        model: A `keras.Model` of any kind, or a layer.
        rules: As in `Policy.keep_float32`, the first that matches counts.

    Returns:
        The rules are strings, those of classes and layers in the form in which they are saved.
    """
    kept: dict = {}
    rules = tuple(rules)
    is_any_quantized = any(map(is_quantized, _keras.flatten_layers(model, include_self=True)))
    fixed = {id(layer) for layer in running_quantized(model, "float32")} if is_any_quantized else set()
    rule = None if isinstance(model, keras.Model) or id(model) in fixed else first_match(rules, model)
    if rule is not None:
        kept[id(model)] = (model, written(rule))
    if rule is not None or not isinstance(model, _KEEP_OWN_PRECISION):
        _walk(model, rules, rule, kept, fixed, set())
    return list(kept.values())


def apply_rules(model, policy) -> list[AppliedRule]:
    """Moves the layers of `model` that `policy` keeps in float32 there, and returns what was changed.

    Each such layer gets the stock policy `float32`. Layers that the active backend and device have no 16-bit
    kernel for move as well. Layers that do not compute in 16 bits and quantized layers are left alone, so a
    second call changes nothing.

    Args:
        model: A `keras.Model` of any kind, built or not, or a layer.
        policy: The `Policy` whose `keep_float32` is applied.

    Returns:
        A list of `AppliedRule(layer, rule, reason, old_policy)`, in the order of the layers.
    """
    dtypes = {id(layer): layer.compute_dtype for layer in _keras.flatten_layers(model, include_self=True)}
    applied = []
    for layer, rule, reason in kept_in_float32(model, policy, dtypes).values():
        if layer.compute_dtype in SIXTEEN_BIT_DTYPES and not is_quantized(layer):
            applied.append(AppliedRule(layer, rule, reason, layer_policy(layer)))
    for change in applied:
        set_layer_policy(change.layer, keras.DTypePolicy("float32"))
    return applied


def kept_in_float32(model, policy, dtypes) -> dict:
    """Returns `{id: (layer, rule, reason)}` for the layers that a rule, or a missing kernel, keeps in float32.

    Args:
        model: A `keras.Model` of any kind, or a layer.
        policy: The `Policy` with the rules.
        dtypes: `{id: dtype}`, what each layer computes in without them.
    """
    reasons = dict(DEFAULT_RULES)
    kept = {
        id(layer): (layer, rule, reasons.get(rule, f"kept in float32 by the policy {policy.name!r}"))
        for layer, rule in layers_to_keep(model, policy.keep_float32)
    }
    others = {dtype for key, dtype in dtypes.items() if key not in kept}
    for dtype in SIXTEEN_BIT_DTYPES:
        # A trial takes time, and a model in float32 needs none.
        for layer, rule, reason in layers_without_kernel(model, dtype) if dtype in others else []:
            if dtypes[id(layer)] in (dtype, "float32"):
                kept.setdefault(id(layer), (layer, rule, reason))
    return kept


def layers_without_kernel(model, dtype: str) -> list:
    """Returns `(layer, class name, reason)` for every layer that the active backend and device cannot run in `dtype`.

    Args:
        model: A `keras.Model` of any kind, or a layer.
        dtype: `"float16"` or `"bfloat16"`.
    """
    classes = _class_names(model)
    missing = dict(kernels.missing_kernel_rules(dtype, among=classes))
    found: list = [(layer, rule, missing[rule]) for layer, rule in layers_to_keep(model, missing)]
    for lacking in _keras.flatten_layers(model, include_self=True):
        reason = kernels.missing_kernel_of(lacking, dtype)
        # With a wrapper around it.
        for layer, _ in layers_to_keep(model, [lacking]) if reason is not None else []:
            found.append((layer, type(lacking).__name__, reason))
    return found


def has_own_call(layer) -> bool:
    """Whether the arithmetic of `layer` is the user's own."""
    return not type(layer).call.__module__.startswith("keras.") or isinstance(layer, keras.layers.Lambda)


# Quantized layers, and those whose arithmetic meets theirs, keep the policies that they have. A quantized layer returns
# the dtype that it was quantized under, for good. Between the layers of a graph Keras casts it to what the next one
# takes. A layer that runs quantized ones in its `call` computes with what they return: given another dtype, it would
# add float32 to bfloat16.


def is_quantized(layer) -> bool:
    """Whether `layer` computes with int8, int4, float8, GPTQ or AWQ kernels, which another policy reads as numbers.

    Not one that a conversion gave Keras' float8 state: its kernel is what it was, and it may be converted again.
    """
    return layer.quantization_mode is not None and not has_float8_state(layer)


def has_float8_state(layer) -> bool:
    """Whether a conversion gave `layer` the state of Keras' `quantize("float8")`."""
    return getattr(layer_policy(layer), FLOAT8_STATE_MARK, False)


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


def layer_policy(layer) -> keras.DTypePolicy:
    """Returns the policy that `layer` follows: its own entry, where it has a `DTypePolicyMap`."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and layer.path:
        policy = policy[layer.path]
    return policy


def undo_rules(applied):
    """Gives every layer in the result of `apply_rules` the policy back that it had before."""
    for change in applied:
        change.undo()


def set_layer_policy(layer, policy: keras.DTypePolicy):
    """Sets the policy of `layer`, built or not, for all of it, and what it keeps in the compute dtype."""
    layer.dtype_policy = policy
    # `Normalization` casts its mean and variance once, when it is built: a variance of 1e6 is inf by then.
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        if layer.input_mean is None:
            layer.finalize_state()
        else:
            layer.build(layer.get_build_config()["input_shape"])


def _walk(parent, rules, inherited, kept, fixed, seen):
    for layer in _keras.direct_sublayers(parent):
        rule = inherited if inherited is not None else first_match(rules, layer)
        if id(layer) in fixed:
            rule = None
        # A layer used in two places is walked again when only the second one is kept in float32.
        if (id(layer), rule is None) in seen:
            continue
        seen.add((id(layer), rule is None))
        if rule is not None:
            kept.setdefault(id(layer), (layer, written(rule)))
        if rule is not None or not isinstance(layer, _KEEP_OWN_PRECISION):
            _walk(layer, rules, rule, kept, fixed, seen)


def _class_names(model) -> set[str]:
    layers = _keras.flatten_layers(model, include_self=True)
    return {base.__name__ for layer in layers for base in type(layer).__mro__}


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
