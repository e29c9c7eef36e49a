"""Layers that need float32, as their `call` writes variables: found by reading its code. Nothing is run."""

import collections
import contextlib
import dis
import functools
import itertools
import sys
import types
from typing import NamedTuple

import keras

from mpkeras import _keras
from mpkeras.policies.rules import has_own_call, is_graph
from mpkeras.policies.survey import Survey

STATE_RULE = "writes state"
REMAT_RULE = "keras.remat"
# How a `keras.Variable` is given another value.
_ASSIGNMENTS = ("assign", "assign_add", "assign_sub")
# The tensor of a `keras.Variable`. On torch its methods that end in "_" write into it: inside `call` into a copy.
_TENSOR = ("value", "data")
# The instructions that look up an attribute: of Python 3.10 and 3.11 the second, too.
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
# Instructions that write into an object, as `tensor[i] = x` does.
_STORES = ("STORE_SUBSCR", "STORE_SLICE")
# Writes to a user's variable by these packages are looked for in the code that calls them.
_FOREIGN = frozenset({"keras", "mpkeras", "tensorflow", "jax", "jaxlib", "flax", "torch", "numpy", "ml_dtypes"})
_FOREIGN |= sys.stdlib_module_names - {"__main__"}
# Objects that may hold variables.
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)
# Keras' layers around a function that is given a state and returns the next one.
_WITH_STATE = (keras.layers.JaxLayer,) if hasattr(keras.layers, "JaxLayer") else ()


class _Write(NamedTuple):
    """An assignment in code: the name of the attribute that is assigned to, or `None`, and the function it is in.

    With `is_indirect` the function takes the tensor of that attribute, and writes into some tensor.
    """

    attribute: str | None
    function: str
    is_indirect: bool = False


class _Code(NamedTuple):
    """What one function's code names, the functions inside it included.

    Attributes:
        names: All of the names.
        set_names: Those of attributes that it sets, as `self.mean = x` does: there may be a property behind one.
        writes: The assignments to variables, each a `_Write`.
    """

    names: frozenset
    set_names: frozenset
    writes: tuple


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
            reach = _Reach(layer)
            states = _states_written(layer, reach)
            if states:
                reason = f"{_sentence(states)} in its `call`: 16 bits lose what is added to it"
                rules_by_layer[id(layer)] = layer, STATE_RULE, reason
            elif not has_own_call(layer):
                continue
            elif reach.recomputes and (not layer.built or any(map(_is_cast, _keras.own_variables(layer)))):
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
    untrained = {id(v) for v in _keras.own_variables(layer) if id(v) not in weights and _is_cast(v)}
    if not untrained or not has_own_call(layer):
        return {}
    reach = _Reach(layer)
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
    reach = _Reach(layer)
    names = {write.attribute for write in reach.writes}
    values = [v for name, found in reach.outside.items() if None in names or name in names for v in found]
    return [v for v in [*_variables_in(values), *reach.assigned] if isinstance(v, keras.Variable)]


def _variables_in(values) -> list:
    found: list = []
    for value in values:
        found += _variables_in(_items(value)) if isinstance(value, _CONTAINERS) else [value]
    return found


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
            values = _keras.own_variables(layer) if write.attribute is None else values
            if any(_is_cast(value) and not getattr(value, "trainable", False) for value in values):
                names[f"`{write.function}`" if write.attribute is None else f"'{write.attribute}'"] = None
            continue
        is_unknown = not (values and all(map(_is_known, values)))
        if any(map(_is_cast, values)) or (is_unknown and (not layer.built or reach.holds_cast_variable())):
            names[f"'{write.attribute}'"] = None
    names |= dict.fromkeys(sorted(f"'{variable.name}'" for variable in reach.assigned if _is_cast(variable)))
    # Keras' own `call` assigns what the function of its user's returns.
    if isinstance(layer, _WITH_STATE) and any(map(_is_cast, keras.tree.flatten(layer.state))):
        names["'state'"] = None
    return [*names, *(f"'{name}'" for name in reach.metrics)]


def _sentence(states) -> str:
    attributes = [name for name in states if not name.startswith("`")]
    return f"writes its own state {', '.join(attributes)}" if attributes else f"writes state, by {', '.join(states)},"


def _is_cast(value) -> bool:
    """Whether a value is a float variable that is read in the compute dtype inside `call`."""
    if isinstance(value, _CONTAINERS):
        return any(map(_is_cast, _items(value)))
    return isinstance(value, keras.Variable) and _keras.follows_autocast(value)


def _is_known(value) -> bool:
    """Whether a value is a variable that is read as it is stored: integers, `autocast=False`, native variables."""
    if isinstance(value, _CONTAINERS):
        items = _items(value)
        return bool(items) and all(map(_is_known, items))
    return isinstance(value, keras.Variable) or hasattr(value, "assign")


def _items(container) -> list:
    """Returns what a container holds, of a long one the beginning."""
    return [*itertools.islice(container.values() if isinstance(container, dict) else container, 1000)]


class _Reach:
    """The code that the `call` of a layer can reach: by name, and so rather too much than too little.

    Attributes:
        writes: The assignments in it, each a `_Write`.
        metrics: The names of the metrics in it: their variables are written.
        assigned: The variables whose `assign` it has as a function, as after `self.count = self.steps.assign_add`.
        recomputes: Whether it uses `keras.remat` on a backend that runs a function twice.
        names: All names in it.
        outside: By name, variables that functions know as global ones, as those of a function around them, or as
            attributes of a class or a module.
    """

    def __init__(self, layer):
        self.writes: list = []
        self.metrics: list = []
        self.assigned: list = []
        self.recomputes = False
        self._layer = layer
        self._objects: dict = {id(layer): layer}
        self.names: set = set()
        self._set_names: set = set()
        self.outside: dict = {}
        self._codes: set = set()
        self._waiting: collections.deque = collections.deque()
        call = layer.function if isinstance(layer, keras.layers.Lambda) else type(layer).call
        self._look_at(call)
        for base in type(layer).__mro__:
            # `super().call`, too.
            self._look_at(vars(base).get("call"))
        # Code of the user's that Keras' own `call` runs: an activation, a method that a subclass has of its own.
        for name in _named_by_stock_call(next(base for base in type(layer).__mro__ if _is_foreign(base))):
            self._ask(layer, name)
        self._follow()

    def values_of(self, name: str) -> list:
        """Returns what the objects in reach have as their attribute `name`."""
        values = [_own_attributes(owner).get(name) for owner in self._objects.values()]
        return [value for value in [*values, *self.outside.get(name, ())] if value is not None]

    def holds_cast_variable(self) -> bool:
        attributes = [value for owner in self._objects.values() for value in _own_attributes(owner).values()]
        outside = itertools.chain.from_iterable(self.outside.values())
        return any(map(_is_cast, [*self._layer.variables, *attributes, *outside]))

    def _follow(self):
        asked: set = set()
        while self._waiting:
            while self._waiting:
                self._read(self._waiting.popleft())
            # A name that one function says may be a method of an object that another has in reach.
            questions = [(self._ask, name) for name in self.names]
            questions += [(self._ask_for_setter, name) for name in self._set_names]
            for ask, name in questions:
                for owner in list(self._objects.values()):
                    if (ask, id(owner), name) not in asked:
                        asked.add((ask, id(owner), name))
                        ask(owner, name)

    def _read(self, function):
        code = _code_of(function.__code__)
        self.writes += code.writes
        self.names |= code.names
        self._set_names |= code.set_names
        around = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # A name that has no value yet.
                around[name] = cell.cell_contents
        known = {name: function.__globals__[name] for name in code.names if name in function.__globals__}
        # Imported in the function.
        imported = {name: sys.modules[name] for name in code.names if name in sys.modules}
        if "remat" in code.names and any(_has_remat(value) for value in known.values()):
            self.recomputes = _runs_twice()
        for name, value in (imported | known | around).items():
            self._look_at_outside(name, value)

    def _ask(self, owner, name: str):
        """Looks at what `name` is of an object in reach."""
        if isinstance(owner, types.ModuleType):
            self._look_at_outside(name, vars(owner).get(name))
            return
        value = _own_attributes(owner).get(name)
        if value is not None:
            self._look_at(value)
        for base in owner.__mro__ if isinstance(owner, type) else type(owner).__mro__:
            self._look_at_outside(name, vars(base).get(name))

    def _look_at_outside(self, name: str, value):
        """Looks at what `name` is outside of the objects in reach: a variable is known by it, alone or in a list."""
        self._look_at(value)
        if any(isinstance(item, keras.Variable) for item in _variables_in([value])):
            self.outside.setdefault(name, []).append(value)

    def _ask_for_setter(self, owner, name: str):
        """Looks at what runs where the attribute `name` of an object in reach is set."""
        for base in type(owner).__mro__:
            descriptor = vars(base).get(name)
            if isinstance(descriptor, property):
                self._look_at(descriptor.fset)

    def _look_at(self, value):
        """Takes down a value in reach: a function's code is read, an object's methods are asked for by name."""
        if value is None or isinstance(value, (bool, int, float, str, bytes, keras.Variable)):
            return
        if isinstance(value, keras.metrics.Metric):
            self.metrics += [] if value.name in self.metrics else [value.name]
            return
        if isinstance(value, (staticmethod, classmethod, types.MethodType)):
            if isinstance(value, types.MethodType):
                self._look_at(value.__self__)
                if isinstance(value.__self__, keras.Variable) and value.__name__ in _ASSIGNMENTS:
                    self.assigned.append(value.__self__)
            value = value.__func__
        elif isinstance(value, (property, functools.cached_property)):
            value = value.fget if isinstance(value, property) else value.func
        elif isinstance(value, functools.partial):
            self._look_at_all(value.args)
            value = value.func
        elif hasattr(type(value), "python_function"):  # A `tf.function`.
            value = value.python_function
        if callable(value) and hasattr(value, "__dict__") and _is_rematerialized(value):
            self.recomputes |= _runs_twice()
        while hasattr(value, "__wrapped__") and not isinstance(value, type):
            self._take_function(value)
            value = value.__wrapped__
        if isinstance(value, types.FunctionType):
            self._take_function(value)
        elif isinstance(value, types.MethodType):
            self._look_at(value)
        elif isinstance(value, _CONTAINERS):
            self._look_at_all(_items(value))
        elif id(value) not in self._objects and not _is_foreign(value):
            self._objects[id(value)] = value
            if not isinstance(value, (type, types.ModuleType, keras.layers.Layer)):
                self.names.add("__call__")
            self._waiting.append(_nothing)

    def _look_at_all(self, values):
        for value in values:
            self._look_at(value)

    def _take_function(self, value):
        if isinstance(value, types.FunctionType) and value.__code__ not in self._codes:
            self._codes.add(value.__code__)
            if not _is_of_foreign_package(value.__globals__.get("__name__") or ""):
                self._waiting.append(value)
                return
            # What a decorator was given.
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):
                    if isinstance(cell.cell_contents, (types.FunctionType, types.MethodType)):
                        self._look_at(cell.cell_contents)


def _runs_twice() -> bool:
    return keras.backend.backend() in ("tensorflow", "torch")


def _has_remat(value) -> bool:
    is_module = isinstance(value, types.ModuleType)
    return value is keras.remat or (is_module and getattr(value, "remat", None) is keras.remat)


def _is_rematerialized(value) -> bool:
    """Whether `keras.remat` returned `value`: on torch a function, on TensorFlow an object that holds one."""
    functions = [item for item in (value, *vars(value).values()) if isinstance(item, types.FunctionType)]
    return any(
        function.__qualname__.startswith(("remat.<locals>", "recompute_grad.<locals>")) for function in functions
    )


def _nothing():
    """Read in the place of an object: names are compared with what is in reach once more."""


def _is_foreign(value) -> bool:
    if isinstance(value, types.ModuleType):
        return _is_of_foreign_package(value.__name__)
    if isinstance(value, (keras.layers.Layer, types.SimpleNamespace)):
        return False
    return _is_of_foreign_package((value if isinstance(value, type) else type(value)).__module__ or "")


def _is_of_foreign_package(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def _own_attributes(owner) -> dict:
    """Returns what an object has itself; on torch a layer has other layers in a dictionary of its own."""
    try:
        attributes = vars(owner)
    except TypeError:
        return {name: getattr(owner, name) for name in getattr(type(owner), "__slots__", ()) if hasattr(owner, name)}
    if isinstance(owner, (type, types.ModuleType)):
        return {}
    modules = attributes.get("_modules")
    return {**modules, **attributes} if isinstance(modules, dict) else dict(attributes)


@functools.lru_cache(maxsize=1024)
def _named_by_stock_call(cls) -> frozenset:
    """Returns what the `call` of a class of Keras names, and the methods of the class that it runs."""
    names: set[str] = set()
    waiting = ["call"]
    while waiting:
        name = waiting.pop()
        functions = [vars(base).get(name) for base in cls.__mro__]
        codes = [_code_of(function.__code__) for function in functions if isinstance(function, types.FunctionType)]
        new = {named for code in codes for named in code.names} - names
        names |= new
        waiting += new
    return frozenset(names)


def _written_by(method: str, owners):
    """Returns what `method` writes: one of `owners`, the instructions for `self`, `mean` and `value`; or `None`."""
    if method in _ASSIGNMENTS:
        return owners[-1]
    if owners[-1].argval not in _TENSOR or not _is_in_place(method):
        return None
    return next((owner for owner in reversed(owners) if owner.argval not in _TENSOR), None)


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.startswith("_")


@functools.lru_cache(maxsize=4096)
def _code_of(code: types.CodeType) -> _Code:
    names: set[str] = set()
    set_names: set[str] = set()
    writes: list = []
    waiting = [code]
    while waiting:
        part = waiting.pop()
        names.update(part.co_names)
        waiting += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]
        # The variables whose tensor it takes, and whether it writes into a tensor as torch does.
        tensors_of: list = []
        writes_into = any("out" in constant for constant in part.co_consts if isinstance(constant, tuple))
        # Of the expression so far, the instructions that name what it is about.
        previous: list = []
        for instruction in dis.get_instructions(part):
            if instruction.opname == "STORE_ATTR":
                set_names.add(instruction.argval)
            is_attribute = instruction.opname in _ATTRIBUTES
            writes_into |= instruction.opname in _STORES or (is_attribute and _is_in_place(instruction.argval))
            if is_attribute and previous and instruction.argval in _TENSOR:
                tensors_of.append(previous[-1].argval if previous[-1].opname in _ATTRIBUTES else None)
            if is_attribute and previous:
                written = _written_by(instruction.argval, previous)
                # A method of a layer that is called so is among the code that is read.
                if written is not None and written.argval != "self":
                    is_named = written.opname in (*_ATTRIBUTES, "LOAD_GLOBAL", "LOAD_DEREF")
                    writes.append(_Write(written.argval if is_named else None, code.co_name))
            previous = [*previous, instruction] if is_attribute else [instruction]
        if writes_into and keras.backend.backend() == "torch":
            writes += [_Write(name, code.co_name, is_indirect=True) for name in tensors_of]
    return _Code(frozenset(names), frozenset(set_names), tuple(writes))
