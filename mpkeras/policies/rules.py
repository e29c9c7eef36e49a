"""Rules for the layers that stay in float32: reading, matching and applying them."""

import re
from typing import NamedTuple

import keras

from mpkeras import _keras_private
from mpkeras.policies import kernels, products
from mpkeras.policies.default_rules import DEFAULT_RULES
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES

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


def validate(rules) -> tuple[str, ...]:
    """Returns `rules` as a tuple.

    Args:
        rules: Strings, each a layer class name (`"Softmax"`), `"activation:NAME"` or `"path:REGEX"`.

    Raises:
        TypeError: If `rules` is one string, or holds something else than strings.
        ValueError: If a rule cannot be read.
    """
    if isinstance(rules, str) or not isinstance(rules, (tuple, list, set, frozenset)):
        raise TypeError(
            "Expected `keep_float32` to be a tuple of strings. Received: "
            f"keep_float32={rules!r} (of type {type(rules).__name__}). Pass for example ('Softmax',)."
        )
    # A set has no order of its own; a policy's rules need one to be compared.
    rules = tuple(sorted(rules)) if isinstance(rules, (set, frozenset)) else tuple(rules)
    for rule in rules:
        _check(rule)
    return rules


def matches(rule: str, layer) -> bool:
    """Returns whether `rule` names `layer` itself.

    A class name matches subclasses too. `activation:` compares `layer.activation` with the Keras activation
    of that name. `path:` searches the expression anywhere in `layer.path`, or in `layer.name` until the layer
    is built; `^` and `$` tie it to the ends.
    """
    kind, _, argument = rule.partition(":")
    if kind == "activation":
        return _has_activation(layer, argument)
    if kind == "path":
        return re.search(argument, getattr(layer, "path", None) or layer.name) is not None
    return any(base.__name__ == rule for base in type(layer).__mro__)


def first_match(rules, layer) -> str | None:
    """Returns the first of `rules` that names `layer`, or `None`."""
    for rule in rules:
        if matches(rule, layer):
            return rule
    # `TimeDistributed` runs `layer.call`, which passes by the policy of the layer it wraps: the wrapper's
    # policy decides what that layer computes in.
    if isinstance(layer, keras.layers.TimeDistributed):
        return first_match(rules, layer.layer)
    return None


def layers_to_keep(model, rules) -> list:
    """Returns `(layer, rule)` for every layer in `model` that `rules` keep in float32.

    A rule on a layer holds for everything inside it. Otherwise the layers inside attention layers are left
    out: attention layers look after their own precision.

    Args:
        model: A `keras.Model` of any kind, or a layer.
        rules: Rule strings, the first that matches counts.
    """
    kept = {}
    rule = None if isinstance(model, keras.Model) else first_match(rules, model)
    if rule is not None:
        kept[id(model)] = (model, rule)
    if rule is not None or not isinstance(model, _KEEP_OWN_PRECISION):
        _walk(model, tuple(rules), rule, kept, set())
    return list(kept.values())


def apply_rules(model, policy) -> list[AppliedRule]:
    """Moves the layers of `model` that `policy` keeps in float32 there, and returns what was changed.

    Each such layer gets the stock policy `float32`. Where a rule names the activation of a `Dense` or convolution
    layer, its product stays in 16 bits nevertheless. Layers that the active backend and device have no 16-bit
    kernel for move as well. Layers that do not compute in 16 bits and quantized layers are left alone, so a
    second call changes nothing.

    Args:
        model: A `keras.Model` of any kind, built or not, or a layer.
        policy: The `Policy` whose `keep_float32` is applied.

    Returns:
        A list of `AppliedRule(layer, rule, reason, old_policy)`, in the order of the layers.
    """
    reasons = dict(DEFAULT_RULES)
    applied = []

    def move(layer, rule, reason):
        old_policy = products.product_policy(layer) or layer_policy(layer)
        # A quantized layer computes with int8 or float8 kernels, which another policy would read as numbers.
        if old_policy.compute_dtype not in SIXTEEN_BIT_DTYPES or old_policy.quantization_mode is not None:
            return
        if rule.startswith("activation:") and _names_activation_alone(layer, policy.keep_float32):
            if products.is_split(layer):
                return
            products.split(layer, old_policy)
        else:
            set_layer_policy(layer, keras.DTypePolicy("float32"))
        applied.append(AppliedRule(layer, rule, reason, old_policy))

    for layer, rule in layers_to_keep(model, policy.keep_float32):
        move(layer, rule, reasons.get(rule, f"kept in float32 by the policy {policy.name!r}"))
    for dtype in SIXTEEN_BIT_DTYPES:
        classes = _class_names(model, dtype)
        missing = dict(kernels.missing_kernel_rules(dtype, among=classes)) if classes else {}
        for layer, rule in layers_to_keep(model, missing):
            if layer.compute_dtype == dtype:
                move(layer, rule, missing[rule])
    return applied


def undo_rules(applied):
    """Gives every layer in the result of `apply_rules` the policy back that it had before."""
    for change in reversed(applied):
        change.undo()


def layer_policy(layer) -> keras.DTypePolicy:
    """Returns the policy that `layer` follows: its own entry, where it has a `DTypePolicyMap`."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap) and layer.path:
        policy = policy[layer.path]
    return policy


def set_layer_policy(layer, policy: keras.DTypePolicy):
    """Sets the policy of `layer`, built or not, for all of it, and what it keeps in the compute dtype."""
    products.join(layer)
    layer.dtype_policy = policy
    # `Normalization` casts its mean and variance once, when it is built: a variance of 1e6 is inf by then.
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        if layer.input_mean is None:
            layer.finalize_state()
        else:
            layer.build(layer.get_build_config()["input_shape"])


def _walk(parent, rules, inherited, kept, seen):
    for layer in _keras_private.direct_sublayers(parent):
        rule = inherited or first_match(rules, layer)
        # A layer used in two places is walked again when only the second one is kept in float32.
        if (id(layer), rule is None) in seen:
            continue
        seen.add((id(layer), rule is None))
        if rule is not None:
            kept.setdefault(id(layer), (layer, rule))
        if rule is not None or not isinstance(layer, _KEEP_OWN_PRECISION):
            _walk(layer, rules, rule, kept, seen)


def _names_activation_alone(layer, rules) -> bool:
    """Whether `rules` name the activation of `layer` only, and its product can do without float32."""
    if not products.is_split(layer) and not products.can_split(layer):
        return False
    return {rule.partition(":")[0] for rule in rules if matches(rule, layer)} == {"activation"}


def _class_names(model, compute_dtype: str) -> set[str]:
    layers = _keras_private.flatten_layers(model, include_self=True)
    return {base.__name__ for layer in layers if layer.compute_dtype == compute_dtype for base in type(layer).__mro__}


def _has_activation(layer, name: str) -> bool:
    activation = getattr(layer, "activation", None)
    if activation is None:
        return False
    # By name too: a wrapped activation (rematerialization, `functools.wraps`) is another object.
    return activation is getattr(keras.activations, name, None) or getattr(activation, "__name__", None) == name


def _check(rule):
    if not isinstance(rule, str):
        raise TypeError(
            "Expected each rule to be a string. Received: "
            f"{rule!r} (of type {type(rule).__name__}). Name the layer's class, such as 'Softmax'."
        )
    kind, separator, argument = rule.partition(":")
    if not separator:
        if not rule.isidentifier():
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
