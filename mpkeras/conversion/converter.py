"""Gives the layers of a model what a plan says, and those that come into being later."""

import functools
import warnings

import keras

from mpkeras import _keras
from mpkeras._replaced import replace, restore
from mpkeras.conversion.changes import make_changes, planned_changes
from mpkeras.conversion.float8 import ENDS
from mpkeras.conversion.graphs import refresh_graphs
from mpkeras.conversion.inner_results import note_kept_in_float32
from mpkeras.conversion.last import conversion_of, dtypes_of, last_conversion, set_last_conversion
from mpkeras.conversion.layer import save_as_made
from mpkeras.conversion.outputs import tell_heads_at_first_call
from mpkeras.conversion.plan import Conversion, plan, planned_products
from mpkeras.conversion.raw_inputs import passes_inputs_on
from mpkeras.conversion.remat import place, repeated_parts, unmatched_parts
from mpkeras.conversion.undo import put_back_on_error
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import OUTPUTS, has_own_call, heads_of
from mpkeras.policies.own_state import REMAT_RULE, STATE_RULE
from mpkeras.policies.policy import with_rules
from mpkeras.policies.rules import default_rules, path_rule, set_layer_policy, unmatched
from mpkeras.policies.survey import Survey


def layer_converter(
    model, policy, converts: bool = True, survey=None, *, trains: bool = False, was_made_in_16_bits: bool | None = None
):
    """Returns a function that gives the layers of `model` their dtypes; called again, the new ones among them.

    Layers of a layer often come into being when it is built, in the middle of the first step. The function returns
    whether it had anything to do; `converting` takes back what it did before an error.

    Args:
        converts: Whether layers change to the policy's dtype, or only its float32 rules are applied.
        survey: A `Survey` of `model` as it is, if there is one.
        trains, was_made_in_16_bits: As in `Conversion`.
    """
    looked_at, earlier = survey or model, last_conversion(model)
    conversion = Conversion(
        looked_at, policy, converts, earlier, trains=trains, was_made_in_16_bits=was_made_in_16_bits
    )

    def convert() -> bool:
        survey = Survey(model)
        if conversion.is_up_to_date(survey.layers):
            return False
        rows = plan(survey, policy, conversion)
        # Before anything changes: a rule may match nothing.
        parts = repeated_parts(survey, policy.remat)
        if any(row.after is not row.before for row in rows):
            _keras.own_policy_maps(survey.layers)
        met_inside = _inside_of_others(survey, conversion.asked_for_heads)
        for row in rows:
            if row.after is not row.before:
                set_layer_policy(row.layer, row.after)
            is_met_inside = row.rule == OUTPUTS and row.layer in met_inside
            note_kept_in_float32(row.layer, is_met_inside or _is_kept_by_rule(row))
            make_changes(row.layer, row.changes)
            _widen_made_by_keras(row.layer)
        place(survey, parts)
        save_as_made(model, conversion.made_with)
        if not conversion.seen:
            restore(model, "build", kind="converted")  # An earlier conversion is not to go on.
        conversion.note(rows)
        set_last_conversion(model, conversion)
        _ask_for_heads(model, conversion, convert)
        _name_unmatched_rules(survey, conversion)
        return True

    return convert


def _is_kept_by_rule(row) -> bool:
    """Whether a rule of the policy's own keeps the layer of a row of a plan in float32."""
    by_itself = (None, OUTPUTS, STATE_RULE, REMAT_RULE, *default_rules())
    return row.rule not in by_itself and row.after.compute_dtype == "float32"


def _inside_of_others(survey, asked_for_heads) -> set:
    """Returns the layers inside of layers with a `call` of their own, but for the model and those that make outputs.

    A head among them is used twice, as the embedding of words that makes the logits, too: in that `call` it meets
    16 bits.
    """
    others = [layer for layer in survey.layers if layer is not survey.model and layer not in asked_for_heads]
    return {inner for layer in others if has_own_call(layer) for inner in survey.within(layer) if inner is not layer}


def _widen_made_by_keras(layer):
    """Makes float32 what Keras has made for a graph in 16 bits, through which numbers of the data go.

    A Sequential model casts what it is given, ids too, to the input that Keras made by its first layer: 257 would be
    256 in bfloat16. Masks are made of casts: beside `Masking(-999.0)` steps of -998 would be masked.
    """
    if _keras.dtype_of_made_input(layer) in SIXTEEN_BIT_DTYPES:
        _keras.set_dtype_of_made_input(layer, "float32")
    for cast in _keras.casts_of_masks(layer):
        if cast.dtype in SIXTEEN_BIT_DTYPES:
            _keras.set_dtype_of_cast(cast, "float32")


def convert_new(model, convert, around) -> bool:
    """Converts the layers of `model` that are new to `convert`, and brings its graphs up to date.

    Args:
        model: The model.
        convert: The function that `layer_converter` has returned for it.
        around: `converting` or `put_back_on_error`: after an error the model is as before.

    Returns:
        Whether there were new ones: their weights are still stored as they were.
    """
    with around(model, refreshes=True):
        has_new = convert()
        if has_new:
            refresh_graphs(model)
    return has_new


def convert_when_built(model, convert_new_layers):
    """Lets `convert_new_layers()` be called when `model` is built, unless it is.

    Its layers have their paths then, and layers of their own. Keras builds a Sequential model again when a layer is
    added or popped, and another layer makes the outputs then.
    """
    is_in_16_bits = conversion_of(model).policy.compute_dtype in SIXTEEN_BIT_DTYPES
    is_built_again = is_in_16_bits and isinstance(model, keras.Sequential)
    if model.built and not is_built_again:
        return
    build = model.build

    @functools.wraps(build)
    def build_and_convert(*args, **kwargs):
        build(*args, **kwargs)
        if not is_built_again:
            restore(model, "build", kind="converted")
        convert_new_layers()

    replace(model, "build", build_and_convert, kind="converted")


def _ask_for_heads(model, conversion, convert):
    """Lets the first call of what has a `call` of its own tell which layers make its outputs, and converts these."""

    def tell(layer, heads):
        conversion.note_heads(layer, heads)
        with put_back_on_error(model):
            convert()
        ask(heads.unknown)

    def withdraw(heads):
        asked = [*heads.layers, *heads.unknown, *heads.widened]
        inside = [inner for layer in asked for inner in _keras.flatten_layers(layer, include_self=True)]
        conversion.withdraw_heads(inside)
        conversion.asked_for_heads.update(inside)
        for layer in inside:
            restore(layer, "call", kind="heads")
        convert()

    def ask(layers):
        for layer in layers:
            restore(layer, "call", kind="heads")
            if is_asking and layer not in conversion.asked_for_heads:
                tell_heads_at_first_call(layer, functools.partial(tell, layer), withdraw, is_whole=layer is model)
            elif not is_asking and passes_inputs_on(layer):
                # Whether it computes with them shows in the same way.
                tell_heads_at_first_call(layer, lambda heads: None, lambda heads: None)

    is_asking = conversion.policy.compute_dtype in SIXTEEN_BIT_DTYPES and OUTPUTS in conversion.policy.keep_float32
    ask(heads_of(model).unknown)


def _name_unmatched_rules(survey, conversion):
    # A layer that is not built may be matched later, and others may come into being in it.
    policy = conversion.policy
    if not all(layer.built for layer in survey.layers):
        return
    messages = unmatched_parts(survey, policy.remat)
    if policy.compute_dtype in SIXTEEN_BIT_DTYPES:
        keep_16_bits = [rule for rule in policy.keep_16_bits if rule not in ENDS]
        messages += unmatched(survey, policy.keep_float32, "keep_float32")
        messages += unmatched(survey, keep_16_bits, "keep_16_bits")
    for message in messages:
        if message not in conversion.told:
            conversion.told.add(message)
            warnings.warn(message, stacklevel=4)


def leave_float8(model, layer, reason: str):
    """Moves the product of `layer` in a converted model from float8 to bfloat16, for later conversions, too."""
    conversion, dtypes = conversion_of(model), dtypes_of(model)
    conversion.left_float8[layer] = reason
    _add_rule(model, "keep_16_bits", layer)
    products = planned_products(model, conversion, dtypes)
    changes = planned_changes(model, dtypes, products, conversion.shown(), trains=conversion.trains)
    make_changes(layer, changes[id(layer)])


def note_moved_to_float32(model, layer):
    """Adds a rule for `layer`, which overflowed and has moved, to the policy that a converted model was given."""
    _add_rule(model, "keep_float32", layer)


def _add_rule(model, name: str, layer):
    conversion = last_conversion(model)
    if conversion is not None and conversion.asked_for is not None:
        # Reports and plans give the policy on, to models that begin anew.
        conversion.asked_for = with_rules(conversion.asked_for, **{name: (path_rule(_keras.path_of(layer)),)})
