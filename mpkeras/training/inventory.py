"""What a model holds that a step may change: optimizers, variables, states. Found once, and again after a change."""

import itertools
import operator
from collections.abc import Callable

import keras

from mpkeras import _keras


def compiled_parts(model) -> list:
    """Returns the models inside `model` that hold optimizers of their own: `gan.discriminator.compile(...)`."""
    layers = _keras.flatten_layers(model)
    return [layer for layer in layers if isinstance(layer, keras.Model) and find_optimizers(layer)]


def all_optimizers(model) -> list:
    """Returns the Keras optimizers of `model` and of the compiled models inside it, each once."""
    found = [optimizer for part in (model, *compiled_parts(model)) for optimizer in find_optimizers(part).values()]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def find_optimizers(model) -> dict:
    """Returns the Keras optimizers that `model` holds itself, each once, by where it holds them.

    They are attributes, or in lists, tuples and dictionaries that are. `optimizer` comes first; models with
    several (a GAN's two) keep them under names of their own: `"d_optimizer"`, `"optimizers['d']"`.
    """
    found: dict = {}
    for name, value in [("optimizer", getattr(model, "optimizer", None)), *_own_attributes(model)]:
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), (name, value))
        for key, item in _items(value):
            # Names are made for optimizers only: torch asks at every step, and a model holds many lists.
            if isinstance(item, keras.optimizers.Optimizer):
                found.setdefault(id(item), (f"{name}[{key!r}]", item))
    return dict(found.values())


def replace_optimizers(model, replacements: dict):
    """Puts `replacements[id(optimizer)]` wherever `model` holds `optimizer`."""
    for name, value in _own_attributes(model):
        if id(value) in replacements:
            setattr(model, name, replacements[id(value)])
            continue
        new_items = {key: replacements[id(item)] for key, item in _items(value) if id(item) in replacements}
        if new_items and isinstance(value, tuple):
            items = [new_items.get(i, item) for i, item in enumerate(value)]
            setattr(model, name, value._make(items) if hasattr(value, "_make") else tuple(items))
        else:
            for key, item in new_items.items():
                value[key] = item


def _own_attributes(model) -> list:
    """Returns `(name, value)` of the attributes of `model`, but for TensorFlow's records of them."""
    return [(name, value) for name, value in vars(model).items() if not name.startswith("_self_")]


def _items(value) -> list:
    """Returns `(key or index, item)` of a list, tuple or dictionary; of anything else none."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


def unlisted_states(model) -> list:
    """Returns the states of stateful recurrent layers: variables that no list of Keras' holds."""
    states = [
        state
        for layer in _keras.flatten_layers(model, include_self=True)
        if getattr(layer, "stateful", False)
        for state in _keras.recurrent_states(layer)
    ]
    # Most models have none, and torch asks at every step: only then is it worth to list all variables.
    listed = {id(variable) for variable in model.variables} if states else ()
    return [state for state in states if id(state) not in listed]


class Found:
    """Answers to questions about one model, each remembered until what it looked at has changed.

    Keras tells nobody when a layer, a variable or an optimizer is put into a model or taken out. So each question says
    what it looks at, which is compared by identity: for 100 `Dense` layers half of what the walks take.
    """

    def __init__(self, model):
        self.model = model
        self._answers: dict = {}

    def ask(self, find: Callable, looks_at: Callable):
        """Returns `find(model)`, of now or of an earlier step.

        Args:
            find: Function from the model to the answer; what it returns must not be changed.
            looks_at: Function from the model to a `Sight` of all that the answer depends on, or to `None` where
                that is not known: then nothing is remembered.
        """
        seen = looks_at(self.model)
        before, answer = self._answers.get(find, (None, None))
        if seen is None or before is None or not seen.is_same(before):
            answer = find(self.model)
            self._answers[find] = seen, answer
        return answer


class Sight:
    """Objects in an order, and sizes: the same where each object is the very same one and the sizes are equal."""

    def __init__(self, objects=(), sizes=()):
        self.objects = list(objects)
        self.sizes = list(sizes)

    def is_same(self, other) -> bool:
        # Not `==`: variables compare their values.
        are_sizes = self.sizes == other.sizes and len(self.objects) == len(other.objects)
        return are_sizes and all(map(operator.is_, self.objects, other.objects))

    def add(self, values):
        values = list(values)
        self.sizes.append(len(values))
        self.objects += values

    def add_held(self, values, kinds: "Kinds", depth: int = 100):
        """Adds the `kinds` among `values`, and in the containers among them; of all others, what type they are.

        Args:
            values: What a layer or a container holds.
            kinds: What to look for.
            depth: How many containers, one within the other, to look into.
        """
        # The types and not the values: a tensor that a layer keeps is another one at every step, and is not to live
        # on here.
        values = list(values)
        types = list(map(type, values))
        self.sizes.append(len(types))
        self.objects += types
        for value in kinds.among(values, types):
            self.objects.append(value)
            if depth and isinstance(value, (list, tuple, dict)):
                if value:
                    self.add_held(value.values() if isinstance(value, dict) else value, kinds, depth - 1)
                else:
                    self.sizes.append(0)

    def include(self, other):
        self.objects += other.objects
        self.sizes += other.sizes


class Kinds:
    """Lists, tuples, dictionaries and some classes more."""

    def __init__(self, *classes):
        self._classes = (list, tuple, dict, *classes)
        self._known: dict = {}

    def among(self, values, types) -> list:
        """Returns those of `values`, whose types are `types`, that are of these kinds."""
        # By type, as there are many values. The first one is asked itself: TensorFlow puts dictionaries and tuples
        # into objects that are instances of those, and whose types are no subclasses.
        for value, type_ in zip(values, types, strict=True) if not self._known.keys() >= set(types) else ():
            self._known.setdefault(type_, isinstance(value, self._classes))
        return [value for value, type_ in zip(values, types, strict=True) if self._known[type_]]


def own_values(layer) -> list:
    """Returns the values of the attributes of `layer`, but for TensorFlow's records of them."""
    return [value for name, value in vars(layer).items() if not name.startswith("_self_")]


def variables_sight(model) -> Sight | None:
    """What the layers of `model` and their variables are, apart from `trainable`."""
    layers = _keras.flatten_layers(model, include_self=True)
    if not all(map(_lists_variables_as_keras_does, set(map(type, layers)))):
        return None
    lists = list(itertools.chain.from_iterable(map(_keras.own_lists, layers)))
    return Sight([*layers, *itertools.chain.from_iterable(lists)], map(len, lists))


def _lists_variables_as_keras_does(cls) -> bool:
    names = ("variables", "trainable_variables", "non_trainable_variables")
    return all(getattr(cls, name) is getattr(keras.layers.Layer, name) for name in names)


def states_sight(model) -> Sight:
    """What the recurrent states of the layers of `model` are."""
    sight = Sight()
    for layer in _keras.flatten_layers(model, include_self=True):
        if "states" in vars(layer) or hasattr(type(layer), "states"):
            sight.add([layer, bool(getattr(layer, "stateful", False)), *_keras.recurrent_states(layer)])
    return sight


_HOLDS_OPTIMIZERS = Kinds(keras.optimizers.Optimizer)


def optimizers_sight(model) -> Sight:
    """What the optimizers of `model` and of the models inside it are."""
    sight = Sight()
    for layer in _keras.flatten_layers(model, include_self=True):
        if isinstance(layer, keras.Model):
            sight.add([layer])
            # As deep as `find_optimizers` looks.
            sight.add_held(own_values(layer), _HOLDS_OPTIMIZERS, depth=1)
    return sight


def paths_sight(model) -> Sight:
    """What the layers of `model` are, and the path of each."""
    layers = _keras.flatten_layers(model, include_self=True)
    return Sight([*layers, *[layer.path for layer in layers]])


def trainable(model, variables) -> list:
    """Returns those of `variables`, of `model.variables`, that are trained now: as `model.trainable_variables`."""
    return [variable for variable in variables if variable.trainable] if model.trainable else []


def non_trainable(model, variables) -> list:
    """Returns those of `variables`, of `model.variables`, that are not: as `model.non_trainable_variables`."""
    return [variable for variable in variables if not variable.trainable] if model.trainable else list(variables)
