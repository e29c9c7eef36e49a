"""What a policy makes of a model: one row a layer, decided for the whole model at once. Nothing is changed here."""

import weakref
from collections.abc import Collection
from typing import NamedTuple

import keras

from mpkeras import _keras
from mpkeras.conversion.changes import planned_changes
from mpkeras.conversion.exact_inputs import handing_on
from mpkeras.conversion.float8 import IN_FLOAT8, reasons_against
from mpkeras.conversion.from_file import made_anew
from mpkeras.conversion.large_heads import WITH_FLOAT32_SUMS, can_sum_in_float32
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import NO_HEADS, OUTPUTS, Heads, has_own_call, is_large
from mpkeras.policies.own_state import kept_for_state
from mpkeras.policies.rules import bound_layers, is_quantized, kept_in_float32, layer_policy
from mpkeras.policies.survey import Survey


class Row(NamedTuple):
    """What happens to one layer, and why.

    Attributes:
        layer: The layer.
        before, after: The policy that it has, and the one that it gets; the same object where nothing changes.
        without_rule: The policy that it would get if no rule kept it in float32.
        rule: The rule that keeps it in float32, the class for which there is no kernel in 16 bits, or "writes state";
            otherwise `None`.
        reason: Why it gets `after`.
        changes: Names of the other changes that go with `after`: keys of `changes.CHANGES`.
    """

    layer: keras.layers.Layer
    before: keras.DTypePolicy
    after: keras.DTypePolicy
    without_rule: keras.DTypePolicy
    rule: str | None
    reason: str
    changes: tuple[str, ...]

    @property
    def stores_anew(self) -> bool:
        """Whether the weights of the layer get another dtype."""
        return self.before.variable_dtype != self.after.variable_dtype


class Conversion:
    """The knowledge of the conversion of one model: from it, layers that come into being later follow.

    Attributes:
        policy: The `Policy` that the model is converted to.
        asked_for: The `Policy` that the layers were given last, by whichever door; `None` if they were given none.
        trains: Whether mpkeras trains the model: then what Keras computes again is computed alike in float32, too.
        made_with: The policy of the model itself, before.
        seen: Layer -> the path that it had when it was looked at last; it gets one when it is built.
        kept: Layer that a rule keeps in float32 -> the policy that it has so, and the one that it has without the rule.
        left_float8: Layer -> why its product is not in float8 any more; under one policy with float8 after another.
        unstored: Rows that were carried out, whose weights are still stored as before.
        times_stored: How often weights of the model were stored in another dtype.
        told: What the user was told of rules that match nothing.
        heads: Layers that make outputs of the model, as calls of layers with a `call` of their own have told.
        reading, widened: As in `Heads`, as these calls have told.
        asked_for_heads: The layers with a `call` of their own that have told.
    """

    def __init__(
        self,
        model,
        policy,
        converts: bool = True,
        earlier: "Conversion | None" = None,
        *,
        trains: bool = False,
        was_made_in_16_bits: bool | None = None,
    ):
        """Begins a conversion after an `earlier` one; with `converts=False` by the float32 rules alone.

        Args:
            model: A model or a `Survey` of it.
            was_made_in_16_bits: As in `made_anew`.
        """
        survey = Survey.of(model)
        self.policy = policy
        self.trains = trains
        self.made_with = survey.model.dtype_policy
        self.seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.left_float8: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self.asked_for: keras.DTypePolicy | None = None
        self.unstored: list[Row] = []
        self.times_stored: int = 0
        self.told: set[str] = set()
        self.heads: weakref.WeakSet = weakref.WeakSet()
        self.reading: weakref.WeakSet = weakref.WeakSet()
        self.widened: weakref.WeakSet = weakref.WeakSet()
        self.asked_for_heads: weakref.WeakSet = weakref.WeakSet()
        self._knows_all_heads = True
        # How many layers the model had when it was looked at last.
        self._count = 0
        self._known: Collection = ()
        # The dtypes from which layers are converted that are made later; `None` before the first conversion.
        self._lasting_sources: tuple[str, ...] | None = None
        kept: dict = {}
        if earlier is not None:
            self.asked_for, self.told = earlier.asked_for, earlier.told
            self.heads, self.reading, self.widened = earlier.heads, earlier.reading, earlier.widened
            self.asked_for_heads = earlier.asked_for_heads
            self.unstored, self.times_stored = earlier.unstored, earlier.times_stored
            self._known, self._lasting_sources = earlier.seen, earlier._lasting_sources
            # The rules of the policy before go with it. Where layers keep their dtypes, what rules have done stays.
            kept = {**earlier._kept_before, **earlier.kept}
            # A callback converts anew for each training. Who went to a policy without float8 in between begins anew.
            if earlier.policy.float8 is not None and policy.float8 is not None:
                self.left_float8 = earlier.left_float8
        if converts:
            self.asked_for = policy
        self.kept: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary(kept if converts else {})
        self._kept_before: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary({} if converts else kept)
        # Among layers of narrower dtypes a wider one is there on purpose; alone, it is what Keras does by default.
        has_16_bits, has_float32 = (computes_in(survey, dtypes) for dtypes in (SIXTEEN_BIT_DTYPES, ("float32",)))
        has_16_bits |= was_made_in_16_bits is True
        is_to_16_bits = policy.compute_dtype in SIXTEEN_BIT_DTYPES
        sources: tuple[str, ...] = SIXTEEN_BIT_DTYPES
        if not has_16_bits:
            sources += ("float32",) if has_float32 else ("float32", "float64")
        self._sources: tuple[str, ...] = sources if converts else ()
        anew = made_anew(survey, was_made_in_16_bits) if converts and has_16_bits else ()
        self._made_anew = weakref.WeakSet(anew)
        if was_made_in_16_bits is False and self._lasting_sources is None:
            # The earlier conversion was that before the file.
            self._lasting_sources = (*SIXTEEN_BIT_DTYPES, "float32")
        # Of a model that an earlier conversion found in float32, a layer that is made from now on is in float32 by
        # default.
        lasting = self._lasting_sources
        self._later_sources = lasting if has_16_bits and lasting is not None else self._sources
        if converts and is_to_16_bits:
            self._lasting_sources = self._later_sources

    @property
    def spares_float32(self) -> bool:
        """Whether layers that were found in float32 among those of 16 bits have stayed so."""
        return "float32" not in (self._lasting_sources or ())

    def followed(self, layer, old):
        """Returns the policy that `layer`, which has the policy `old`, gets if no rule keeps it in float32."""
        as_kept, without_rule = self.kept.get(layer, (None, None))
        # A policy that the layer was given since, by its user or as it overflowed, stays.
        old = without_rule if old is as_kept else old
        sources = self._sources if layer in self._known else self._later_sources
        new = self.policy
        is_other = (old.compute_dtype, old.variable_dtype) != (new.compute_dtype, new.variable_dtype)
        is_convertible = layer not in self.seen and (old.compute_dtype in sources or layer in self._made_anew)
        return new.stock() or new if is_other and is_convertible else old

    def is_up_to_date(self, layers) -> bool:
        is_seen = all(layer in self.seen and self.seen[layer] == layer.path for layer in layers)
        # Behind a layer that was popped, another one makes the outputs.
        return is_seen and self._knows_all_heads and len(layers) == self._count

    def note_heads(self, asked, heads):
        """Takes down the `Heads` that a call of `asked` has shown to make its outputs; they are converted next time."""
        self.asked_for_heads.add(asked)
        known = (self.heads, heads.layers), (self.reading, heads.reading), (self.widened, heads.widened)
        for layers, new in known:
            self._knows_all_heads &= layers.issuperset(new)
            layers.update(new)

    def withdraw_heads(self, layers):
        """Takes back `note_heads`; the layers are converted next time."""
        for known in (self.heads, self.reading, self.widened):
            known.difference_update(layers)
        self._knows_all_heads = False

    def shown(self) -> Heads:
        """Returns what calls have told of the heads of the model."""
        return Heads(list(self.heads), [], list(self.reading), list(self.widened))

    def note(self, rows):
        """Takes down what was carried out."""
        self._knows_all_heads = True
        self._count = len(rows)
        self.seen.update((row.layer, row.layer.path) for row in rows)
        for row in rows:
            self.kept.pop(row.layer, None)
            if row.rule is not None and row.after.compute_dtype != row.without_rule.compute_dtype:
                self.kept[row.layer] = row.after, row.without_rule
        # A list of its own: if this conversion is taken back, the earlier one goes on with its rows alone.
        self.unstored = [*self.unstored, *(row for row in rows if row.stores_anew)]


def plan(model, policy, conversion: Conversion | None = None, heads=()) -> list[Row]:
    """Returns what `policy` makes of each layer of `model`, in the order of `layers_of(model)`.

    Args:
        model: A `keras.Model` of any kind, built or not, or a `Survey` of it.
        policy: A `Policy`.
        conversion: The conversion that is planned; without it no layer follows the policy's dtype, and the rows say
            what its float32 rules make of the model as it is.
        heads: Layers that make outputs of the model, beside those that its graph and the conversion show.
    """
    survey = Survey.of(model)
    model, layers = survey.model, survey.layers
    old_policies = {id(layer): layer_policy(layer) for layer in layers}
    followed = dict(old_policies)
    if conversion is not None:
        bound = bound_layers(survey, policy.compute_dtype)
        followed |= {
            id(layer): conversion.followed(layer, old_policies[id(layer)]) for layer in layers if id(layer) not in bound
        }
    shown = NO_HEADS if conversion is None else conversion.shown()
    heads = [*heads, *shown.layers]
    dtypes = {key: followed[key].compute_dtype for key in followed}
    writing = kept_for_state(survey) if not set(SIXTEEN_BIT_DTYPES).isdisjoint(dtypes.values()) else {}
    reason_by_layer = {**writing, **handing_on(survey, policy), **kept_in_float32(survey, policy, dtypes, heads)}
    after = dict(followed)
    for layer in layers:
        key = id(layer)
        if key in reason_by_layer and followed[key].compute_dtype in SIXTEEN_BIT_DTYPES and not is_quantized(layer):
            after[key] = _float32_policy(layer, followed[key])
    if not has_own_call(model) and after[id(model)].compute_dtype not in SIXTEEN_BIT_DTYPES:
        after[id(model)] = _policy_of_graph(after[id(model)], after.values())
    dtypes = {key: after[key].compute_dtype for key in after}
    products = planned_products(survey, conversion, dtypes)
    trains = conversion is not None and conversion.trains
    shown = shown._replace(layers=heads)
    changes = planned_changes(survey, dtypes, products, shown, kept_layers=writing, trains=trains)
    rows = []
    for layer in layers:
        key = id(layer)
        new = old_policies[key] if _is_same(after[key], old_policies[key]) else after[key]
        _, rule, reason = reason_by_layer.get(key, (layer, None, _reason(layer, new, policy)))
        rows.append(Row(layer, old_policies[key], new, followed[key], rule, reason, changes[key]))
    return rows


def _policy_of_graph(own, policies) -> keras.DTypePolicy:
    """Returns the policy that a Sequential or Functional model gets, from its `own` and the `policies` of its layers.

    `load_model` makes such a model under the global policy, whatever its layers compute in.
    """
    # Keras' `compile` wraps the optimizer of a model whose own policy is "mixed_float16", and of no other.
    if any(policy.compute_dtype == "float16" for policy in policies):
        return keras.DTypePolicy("mixed_float16")
    # An `Embedding`, which casts no inputs, reads its table as it is stored only within a model that mixes dtypes.
    # Elsewhere it casts the table, and on torch the gradient of a row is then summed in 16 bits.
    mixing = {policy.compute_dtype for policy in policies if policy.compute_dtype != policy.variable_dtype}
    return keras.DTypePolicy("mixed_bfloat16") if "bfloat16" in mixing else own


def _float32_policy(layer, policy) -> keras.DTypePolicy:
    # A model of float16 layers that is compiled later is to scale its loss.
    if isinstance(layer, keras.Model) and policy.name == "mixed_float16":
        return _keras.float32_policy_named(policy.name)
    return keras.DTypePolicy("float32")


def planned_products(model, conversion, dtypes) -> dict:
    """Returns `{id: name}`: which of the changes to its product each layer gets; most get none."""
    if conversion is None:
        return {}
    survey = Survey.of(model)
    reasons = why_not_float8(survey, conversion, dtypes)
    in_float8 = {key: IN_FLOAT8 for key, reason in reasons.items() if reason is None}
    heads = [*survey.heads.layers, *conversion.heads] if OUTPUTS in conversion.policy.keep_float32 else []
    large = [layer for layer in heads if dtypes.get(id(layer)) in SIXTEEN_BIT_DTYPES and is_large(layer)]
    return {id(layer): WITH_FLOAT32_SUMS for layer in large if can_sum_in_float32(layer)} | in_float8


def why_not_float8(model, conversion, dtypes) -> dict:
    """Returns `reasons_against` of a conversion, with what has left float8 since; empty under a policy without it."""
    if conversion.policy.float8 is None:
        return {}
    reasons = reasons_against(model, conversion.policy, dtypes)
    return reasons | {id(layer): why for layer, why in conversion.left_float8.items() if id(layer) in reasons}


def _is_same(policy, other) -> bool:
    names = ("compute_dtype", "variable_dtype", "quantization_mode")
    scales_loss = (policy.name == "mixed_float16") == (other.name == "mixed_float16")
    return scales_loss and all(getattr(policy, name) == getattr(other, name) for name in names)


def _reason(layer, after, policy) -> str:
    if is_quantized(layer):
        return "quantized"
    return f"policy {policy.name}" if after.compute_dtype == policy.compute_dtype else "as it was"


def layers_of(model) -> list:
    """Returns `model`, or what a `Survey` has looked at, and all layers in it, each once."""
    return Survey.of(model).layers


def compute_dtypes(model) -> set[str]:
    """Returns what the layers of `model` compute in.

    An input computes nothing, and may be that of another model, too, which was converted before.
    """
    return {layer.compute_dtype for layer in layers_of(model) if not isinstance(layer, keras.layers.InputLayer)}


def computes_in(model, dtypes) -> bool:
    return not compute_dtypes(model).isdisjoint(dtypes)


def calculates_in(model, dtypes) -> bool:
    """Whether a layer of `model` calculates in one of `dtypes`, and not only a graph that hands tensors on."""
    return any(layer.compute_dtype in dtypes for layer in layers_of(model) if not _hands_on(layer))


def _hands_on(layer) -> bool:
    is_graph = isinstance(layer, keras.Model) and not has_own_call(layer)
    return is_graph or isinstance(layer, keras.layers.InputLayer)
