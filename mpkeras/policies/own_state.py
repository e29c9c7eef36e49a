"""Layers that need float32, as their `call` writes variables: found by reading its code. Nothing is run."""

import keras

from mpkeras import _keras
from mpkeras.policies.reach import CONTAINERS, Reach, is_cast, items_of, variables_in
from mpkeras.policies.rules import has_own_call, is_graph
from mpkeras.policies.survey import Survey

STATE_RULE = "writes state"
REMAT_RULE = "keras.remat"
# Keras' layers around a function that is given a state and returns the next one.
_WITH_STATE = (keras.layers.JaxLayer,) if hasattr(keras.layers, "JaxLayer") else ()


def kept_for_state(model) -> dict:
    """Returns `{id: (layer, rule, reason)}` for the layers that stay in float32 for the variables their `call` uses.

    They write state in it, or use `keras.remat`.

    Inside `call` Keras reads a layer's float variables in the layer's compute dtype. A counter stops at 256 in bfloat16
    and at 2048 in float16, a running mean takes no small step, and torch assigns into the 16-bit copy, which is lost.

    A function under `keras.remat` is run again in the backward pass, where nothing says that variables are read in 16
    bits: torch and TensorFlow raise. JAX has traced it by then.

    The layer itself computes in float32; layers that it runs keep their dtypes. Those of Keras that run such a layer
    step by step (`TimeDistributed`, `RNN`) compute in float32 with it, and with all else that they run.

    Args:
        model: A `keras.Model` of any kind, or a layer, or a `Survey` of it.
    """
    rules_by_layer: dict = {}
    survey = Survey.of(model)
    layers = survey.layers
    for layer in layers:
        if not is_graph(layer):
            reach = Reach(layer)
            states = _states_written(layer, reach)
            if states:
                reason = f"{_sentence(states)} in its `call`: 16 bits lose what is added to it"
                rules_by_layer[id(layer)] = layer, STATE_RULE, reason
            elif not has_own_call(layer):
                continue
            elif reach.recomputes and (not layer.built or any(map(is_cast, _keras.own_variables(layer)))):
                rules_by_layer[id(layer)] = (
                    layer,
                    REMAT_RULE,
                    "reads its variables under `keras.remat`: the second time in float32",
                )
    # From the inside out: a wrapper may be in a wrapper.
    for layer in reversed(layers) if rules_by_layer else ():
        if id(layer) in rules_by_layer or has_own_call(layer) or isinstance(layer, keras.Model):
            continue
        inside = [inner for inner in survey.direct(layer) if id(inner) in rules_by_layer]
        if inside:
            _, rule, reason = rules_by_layer[id(inside[0])]
            for part in survey.within(layer):
                rules_by_layer.setdefault(id(part), (part, rule, f"runs layer '{inside[0].name}', which {reason}"))
    return rules_by_layer


def callers_of(model) -> list:
    """Returns `(layer, caller, is_direct)` of each layer of `model` that a layer with a `call` of its user's runs.

    Between them may be models that pass on what their layers return: then `is_direct` is false.
    """
    calls: list = []
    seen = set()
    survey = Survey.of(model)

    def walk(parent, caller, is_direct):
        if has_own_call(parent):
            caller, is_direct = parent, True
        elif not is_graph(parent):
            # Calls inside Keras' own layers, and inside models without a `call`, are their matter.
            caller = None
        else:
            is_direct = False
        if (id(parent), id(caller), is_direct) in seen:
            return
        seen.add((id(parent), id(caller), is_direct))
        for layer in survey.direct(parent):
            if caller is not None:
                calls.append((layer, caller, is_direct))
            walk(layer, caller, is_direct)

    walk(survey.model, None, False)
    return calls


def variables_from_outside(layer) -> dict:
    """Returns by name the variables that the `call` of `layer` reads in the compute dtype, and no optimizer moves.

    A layer that writes them in its `call` is kept in float32. These are written elsewhere, by a callback or by a step,
    or never: counters of a schedule, tables of positions.
    """
    weights = {id(variable) for variable in _keras.own_weights(layer)}
    untrained = {id(v) for v in _keras.own_variables(layer) if id(v) not in weights and is_cast(v)}
    if not untrained or not has_own_call(layer):
        return {}
    reach = Reach(layer)
    return {
        name: variable
        for name in sorted(reach.names)
        for value in reach.values_of(name)
        for variable in keras.tree.flatten(value)
        if id(variable) in untrained
    }


def states_outside(layer) -> list:
    """Returns the variables that the `call` of `layer` assigns to, and that no object holds: global ones, of a class.

    A module and a function around `call` are no objects here, either.
    """
    reach = Reach(layer)
    names = {write.attribute for write in reach.writes}
    values = [v for name, found in reach.outside.items() if None in names or name in names for v in found]
    return [v for v in [*variables_in(values), *reach.assigned] if isinstance(v, keras.Variable)]


def _states_written(layer, reach) -> list[str]:
    """Returns the names of the float variables that the `call` of `layer` assigns to, or of functions that assign."""
    names: dict = {}
    for write in reach.writes:
        if write.attribute is None:
            if not layer.built or reach.holds_cast_variable():
                names[f"`{write.function}`"] = None
            continue
        values = reach.values_of(write.attribute)
        if write.is_indirect:
            # Weights are moved by the optimizer.
            if any(is_cast(value) and not getattr(value, "trainable", False) for value in values):
                names[f"'{write.attribute}'"] = None
            continue
        is_unknown = not (values and all(map(_is_known, values)))
        if any(map(is_cast, values)) or (is_unknown and (not layer.built or reach.holds_cast_variable())):
            names[f"'{write.attribute}'"] = None
    names |= dict.fromkeys(sorted(f"'{variable.name}'" for variable in reach.assigned if is_cast(variable)))
    # Keras' own `call` assigns what the function of its user's returns.
    if isinstance(layer, _WITH_STATE) and any(map(is_cast, keras.tree.flatten(layer.state))):
        names["'state'"] = None
    return [*names, *(f"'{name}'" for name in reach.metrics)]


def _sentence(states) -> str:
    attributes = [name for name in states if not name.startswith("`")]
    return f"writes its own state {', '.join(attributes)}" if attributes else f"writes state, by {', '.join(states)},"


def _is_known(value) -> bool:
    """Whether a value is a variable that is read as it is stored: integers, `autocast=False`, native variables."""
    if isinstance(value, CONTAINERS):
        items = items_of(value)
        return bool(items) and all(map(_is_known, items))
    return isinstance(value, keras.Variable) or hasattr(value, "assign")
