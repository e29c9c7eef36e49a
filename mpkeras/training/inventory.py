"""The inventory of what a step may change: optimizers, variables, states."""

import itertools
import operator
from collections.abc import Callable

import keras

from mpkeras import _keras
from mpkeras.policies.own_state import states_outside
from mpkeras.policies.rules import is_graph
from mpkeras.policies.survey import Survey
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import metric_states


def compiled_parts(model) -> list:
    """Returns the models inside `model` that hold optimizers of their own: `gan.discriminator.compile(...)`.

    Here and below `model` is a model or a `Survey` of it.
    """
    return [layer for layer in layers(model)[1:] if isinstance(layer, keras.Model) and find_optimizers(layer)]


def all_optimizers(model, held_elsewhere=None) -> list:
    """Returns the Keras optimizers that train `model`, each once: its own, those of the models inside it, and others.

    Args:
        held_elsewhere: The result of `optimizers_held_elsewhere`, where that is known.
    """
    model = Survey.of(model)
    models = [part for part in model.layers if isinstance(part, keras.Model)]
    by_identity = {id(optimizer): optimizer for part in models for optimizer in find_optimizers(part).values()}
    others = optimizers_held_elsewhere(model) if held_elsewhere is None else held_elsewhere
    return list((by_identity | {id(optimizer): optimizer for optimizer in others}).values())


def checking_optimizers(model, held_elsewhere=None) -> list:
    """Returns those of `all_optimizers` that check for finite steps."""
    optimizers = all_optimizers(model, held_elsewhere)
    return [optimizer for optimizer in optimizers if isinstance(optimizer, LossScaleOptimizer)]


def optimizers_held_elsewhere(model) -> list:
    """Returns the Keras optimizers that layers of `model` hold which are no models, and helper objects."""
    holders = [holder for holder in holders_of_optimizers(model) if not isinstance(holder, keras.Model)]
    by_identity = {id(optimizer): optimizer for holder in holders for optimizer in find_optimizers(holder).values()}
    return list(by_identity.values())


def layers(model) -> list:
    """Returns `model` and the layers in it, on which `optimizers_held_elsewhere` depends for the most part."""
    return Survey.of(model).layers


def holders_of_optimizers(model) -> list:
    """Returns the objects whose attributes may be optimizers that train `model`.

    They are the model, its layers, and the plain objects that these hold, as an agent or a trainer that is an attribute
    of the model, and what those hold in turn. No other models: their optimizers train them.
    """
    model = Survey.of(model)
    return [*layers(model), *helpers(model)]


def helpers(model, beside=()) -> list:
    """Returns the plain objects that layers of `model` hold, those `beside` it, as losses, and what those hold."""
    return _helpers_among([*beside, *(value for layer in layers(model) for value in _held(layer))])


def _helpers_among(values) -> list:
    """Returns the plain objects among `values`, and those that these hold, each once."""
    reached: dict = {}
    for _ in range(_DEPTH):
        last = {id(value): value for value in values if _is_helper(value) and id(value) not in reached}
        reached |= last
        values = [value for holder in last.values() for value in _held(holder)]
    return list(reached.values())


# How far a helper object may be away from the model or the layer that reaches it, and how many lists, tuples and
# dictionaries may be around one, or around an optimizer.
_DEPTH = 3
# More items than any list of optimizers or helpers has.
_LONG = 100
# Objects of these packages are no helpers of the user's.
_PACKAGES = (
    "builtins",
    "collections",
    "functools",
    "jax",
    "jaxlib",
    "keras",
    "mpkeras",
    "numpy",
    "tensorflow",
    "threading",
    "torch",
    "weakref",
)
# Whether objects of a class may be helpers: there are many objects, and few classes.
_are_helpers: dict = {}


def _is_helper(value) -> bool:
    cls = type(value)
    if cls not in _are_helpers:
        is_known = issubclass(cls, (type, keras.layers.Layer, keras.optimizers.Optimizer, keras.callbacks.Callback))
        is_of_package = cls.__module__.partition(".")[0] in _PACKAGES
        has_attributes = bool(getattr(cls, "__dictoffset__", 0))
        _are_helpers[cls] = has_attributes and not is_known and not is_of_package
    return _are_helpers[cls]


def _held(holder) -> list:
    """Returns the values of the attributes of `holder`, and the items of those that are lists or so."""
    values = [value for _, value in _own_attributes(holder)]
    return [*values, *(item for value in values for _, item in _items_within(value))]


def find_optimizers(model) -> dict:
    """Returns the Keras optimizers that `model`, or any other object, holds itself, each once, by where it holds them.

    They are attributes, or in lists, tuples and dictionaries that are, and in those within them. `optimizer` comes
    first; models with several (a GAN's two) keep them under names of their own: `"d_optimizer"`, `"optimizers['d']"`.
    """
    places: dict = {}
    first = getattr(model, "optimizer", None) if isinstance(model, keras.Model) else None
    for name, value in [("optimizer", first), *_own_attributes(model)]:
        if isinstance(value, keras.optimizers.Optimizer):
            places.setdefault(id(value), (name, value))
        for keys, item in _items_within(value):
            # Names are made for optimizers only: torch asks at every step, and a model holds many lists.
            if isinstance(item, keras.optimizers.Optimizer):
                places.setdefault(id(item), (name + "".join(f"[{key!r}]" for key in keys), item))
    return dict(places.values())


def replace_optimizers(model, replacements: dict):
    """Puts `replacements[id(optimizer)]` wherever `model` holds `optimizer`."""
    for name, value in _own_attributes(model):
        new_value = _with_replaced(value, replacements)
        if new_value is not value:
            setattr(model, name, new_value)


def _with_replaced(value, replacements: dict, depth: int = _DEPTH):
    """Returns `value` with `replacements` in it: a list or dictionary itself, a tuple made anew where it holds one."""
    if id(value) in replacements:
        return replacements[id(value)]
    items = _items(value) if depth else []
    results = [(key, item, _with_replaced(item, replacements, depth - 1)) for key, item in items]
    new_items = {key: result for key, item, result in results if result is not item}
    if new_items and isinstance(value, tuple):
        items = [new_items.get(i, item) for i, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    for key, item in new_items.items():
        value[key] = item
    return value


def _own_attributes(model) -> list:
    """Returns `(name, value)` of the attributes of `model`, but for TensorFlow's records of them."""
    return [(name, value) for name, value in vars(model).items() if not name.startswith("_self_")]


def _items(value) -> list:
    """Returns `(key or index, item)` of a list, tuple or dictionary; of anything else none."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def _items_within(value, keys: tuple = ()) -> list:
    """Returns `(keys, item)` of a list, tuple or dictionary, and of those within it; the keys lead to the item."""
    items = [((*keys, key), item) for key, item in _items(value)]
    # The items of a long one are data, as those of a replay buffer are, and torch asks at every step.
    if len(items) <= _LONG and len(keys) + 1 < _DEPTH:
        items += [pair for place, item in items for pair in _items_within(item, place)]
    return items


def unlisted_states(model) -> list:
    """Returns the states of stateful recurrent layers: variables that no list of Keras' holds."""
    states = [
        state
        for layer in _keras.flatten_layers(model, include_self=True)
        # The cheap question first: torch looks long for an attribute that is not there.
        if ("states" in vars(layer) or hasattr(type(layer), "states")) and getattr(layer, "stateful", False)
        for state in _keras.recurrent_states(layer)
    ]
    # Most models have none, and torch asks at every step: only then is it worth to list all variables.
    listed = {id(variable) for variable in model.variables} if states else ()
    return [state for state in states if id(state) not in listed]


def metrics_of_layers(model) -> list:
    """Returns the variables of the metrics that the layers in `model` hold, as a norm that a `call` follows."""
    variables = [variable for layer in layers(model)[1:] for variable in layer.metrics_variables]
    return list({id(variable): variable for variable in variables}.values())


def states_of_helpers(model, beside=()) -> list:
    """Returns the variables that Keras does not list: those of helper objects, as an activation, and global ones."""
    survey = Survey.of(model)
    states = _states_held(helpers(survey, beside))
    states += [state for layer in survey.layers if not is_graph(layer) for state in states_outside(layer)]
    if not states:
        return []
    listed = [*survey.model.variables, *survey.model.metrics_variables]
    listed += [variable for optimizer in all_optimizers(survey) for variable in optimizer.variables]
    known = {id(variable) for variable in listed}
    return list({id(state): state for state in states if id(state) not in known}.values())


def states_held_by(objects) -> list:
    """Returns the variables that plain objects, as losses, hold themselves or by others."""
    states = _states_held(_helpers_among(objects))
    return list({id(state): state for state in states}.values())


def _states_held(holders) -> list:
    return [state for holder in holders for value in _held(holder) for state in _states_of(value)]


def models_of_metrics(model) -> list:
    """Returns the models that metrics and losses of `model` hold and that are no part of it: encoders, for the most."""
    survey = Survey.of(model)
    holders = [part for metric in survey.model.metrics for part in _keras.metrics_given(metric)]
    holders += [helper for helper in helpers(survey) if isinstance(helper, keras.losses.Loss)]
    held = [value for holder in holders for value in _held(holder) if isinstance(value, keras.Model)]
    inside = {id(layer) for layer in survey.layers}
    return list({id(value): value for value in held if id(value) not in inside}.values())


def _states_of(value) -> list:
    """Returns the variables of what a helper object holds: a variable, a random generator, a metric."""
    if isinstance(value, keras.random.SeedGenerator):
        return [value.state]
    if isinstance(value, keras.metrics.Metric):
        return value.variables
    return [value] if isinstance(value, keras.Variable) else []


def shared_states() -> list:
    """Returns the state of the generator that all random functions of Keras without a seed draw from, if it is made."""
    generator = _keras.made_global_seed_generator()
    return [] if generator is None else [generator.state]


def moving_variables(optimizers, metrics) -> list:
    """Returns the variables that a skipped step changes, and those that count updates; all hold single numbers."""
    moving = []
    for optimizer in optimizers:
        of_others = {id(variable) for variable in (*optimizer.inner_optimizer.variables, *optimizer.step_outcome)}
        of_wrapper = [variable for variable in optimizer.variables if id(variable) not in of_others]
        moving += [variable for variable in of_wrapper if len(variable.shape) == 0]
        moving.append(_keras.step_count(optimizer.inner_optimizer))
    for metric in metric_states.flat(metrics):
        if metric_states.tracks_losses(metric):
            moving += metric.variables
    return moving


def initial_values(optimizers) -> dict:
    """Returns the values of the loss scales' variables before the very first step, which makes them, by `id`."""
    rules = [(optimizer.scale_state, optimizer.loss_scale_rule.initial_state()) for optimizer in optimizers]
    return {
        id(variable): {"step_counter": 0, **values}[name]
        for variables, values in rules
        for name, variable in variables.items()
    }


def weights_and_others(model) -> tuple[list, list]:
    """Returns what layers and wrapped torch modules made to be trained, frozen now or not, and all other variables."""
    layers = _keras.flatten_layers(model, include_self=True)
    wrapped = [v for layer in layers if isinstance(layer, keras.layers.TorchModuleWrapper) for v in layer.variables]
    weights = {id(variable): variable for variable in _keras.weights(model) + wrapped}
    return list(weights.values()), [variable for variable in model.variables if id(variable) not in weights]


def trainable(model, variables) -> list:
    """Returns those of `variables`, of `model.variables`, that are trained now: as `model.trainable_variables`."""
    return [variable for variable in variables if variable.trainable] if model.trainable else []


def non_trainable(model, variables) -> list:
    """Returns those of `variables`, of `model.variables`, that are not: as `model.non_trainable_variables`."""
    return [variable for variable in variables if not variable.trainable] if model.trainable else list(variables)


class Inventory:
    """Answers to questions about one model, each remembered until what it looked at has changed.

    Keras tells nobody when a layer or a variable is put into a model or taken out. So each question says what it looks
    at, which is compared by identity: for 100 `Dense` layers half of what the walks take.

    Args:
        model: The model.
        beside: Objects that a step uses beside it, as its losses.
    """

    def __init__(self, model, beside=()):
        self.model = model
        self.beside = beside
        self._answers: dict = {}

    def ask(self, find: Callable, looks_at: Callable, *arguments):
        """Returns `find(model, *arguments)`, of now or of an earlier step.

        Args:
            find: Function from the model to the answer; what it returns must not be changed.
            looks_at: Function from the model to a list of all objects that the answer depends on, or to `None` where
                that is not known: then nothing is remembered.
            arguments: The same ones in each step.
        """
        seen = looks_at(self.model)
        seen_last, answer = self._answers.get(find, (None, None))
        if seen is None or seen_last is None or not _are_same(seen, seen_last):
            answer = find(self.model, *arguments)
            self._answers[find] = seen, answer
        return answer


def _are_same(objects, others) -> bool:
    # Not `==`: variables compare their values.
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


# Between the lists of variables in what `layers_and_variables` returns.
_END = object()


def layers_and_variables(model) -> list | None:
    """Returns the layers of `model` and what they list as theirs; `None` where one lists variables in its own way."""
    layers = _keras.flatten_layers(model, include_self=True)
    if not all(map(_lists_variables_as_keras_does, set(map(type, layers)))):
        return None
    seen = [*layers]
    for listed in itertools.chain.from_iterable(map(_keras.own_lists, layers)):
        seen += listed
        seen.append(_END)
    return seen


def _lists_variables_as_keras_does(cls) -> bool:
    names = ("variables", "trainable_variables", "non_trainable_variables")
    return all(getattr(cls, name) is getattr(keras.layers.Layer, name) for name in names)


def layers_and_paths(model) -> list:
    """Returns the layers of `model`, and the path of each."""
    layers = _keras.flatten_layers(model, include_self=True)
    return [*layers, *[layer.path for layer in layers]]
