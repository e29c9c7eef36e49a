"""Objects, names and assignments that a method of a layer can reach, found by reading its code. Nothing is run."""

import collections
import contextlib
import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

import keras

from mpkeras import _keras

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
# Instructions that compare, as `training is None` and `training == False` do.
_COMPARES = ("COMPARE_OP", "IS_OP")
# Objects that may hold variables.
CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)


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


class Reach:
    """The code that methods of a layer can reach: by name, and so rather too much than too little.

    Attributes:
        writes: The assignments in it, each a `_Write`.
        metrics: The names of the metrics in it: their variables are written.
        assigned: The variables whose `assign` it has as a function, as after `self.count = self.steps.assign_add`.
        recomputes: Whether it uses `keras.remat` on a backend that runs a function twice.
        names: All names in it.
        outside: By name, variables that functions know as global ones, as those of a function around them, or as
            attributes of a class or a module.
    """

    def __init__(self, layer, *methods: str):
        """Reads the code of these methods of `layer`, without any that of its `call`."""
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
        if isinstance(layer, keras.layers.Lambda):
            self._look_at(layer.function)
        for method in methods or ("call",):
            for base in type(layer).__mro__:
                # `super().call`, too.
                self._look_at(vars(base).get(method))
        # Code of the user's that Keras' own `call` runs: an activation, a method that a subclass has of its own.
        first_of_keras = next(base for base in type(layer).__mro__ if _is_foreign(base))
        for name in () if methods else _named_by_stock_call(first_of_keras):
            self._ask(layer, name)
        self._follow()

    def holds(self, value) -> bool:
        """Whether an object is in reach."""
        return id(value) in self._objects

    def values_of(self, name: str) -> list:
        """Returns what the objects in reach have as their attribute `name`."""
        values = [_own_attributes(owner).get(name) for owner in self._objects.values()]
        return [value for value in [*values, *self.outside.get(name, ())] if value is not None]

    def holds_cast_variable(self) -> bool:
        attributes = [value for owner in self._objects.values() for value in _own_attributes(owner).values()]
        outside = itertools.chain.from_iterable(self.outside.values())
        return any(map(is_cast, [*self._layer.variables, *attributes, *outside]))

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
        if any(isinstance(item, keras.Variable) for item in variables_in([value])):
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
        elif isinstance(value, CONTAINERS):
            self._look_at_all(items_of(value))
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
    for part in with_code_inside(code):
        names.update(part.co_names)
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


def asks_for(function, argument: str) -> bool:
    """Whether the code of a function goes one way or another by its `argument`, and does not only hand it on."""
    for code in with_code_inside(function.__code__):
        instructions = list(dis.get_instructions(code))
        for number, instruction in enumerate(instructions):
            is_read = instruction.argval == argument and "LOAD" in instruction.opname
            behind = [following.opname for following in instructions[number + 1 : number + 3]]
            # The other side of a comparison may be loaded first.
            if is_read and (_tests(behind[0]) or behind[-1] in _COMPARES):
                return True
    return False


def _tests(opname: str) -> bool:
    # In `training and x` and `training or x` the value is copied first, or kept by the jump itself.
    return "JUMP" in opname or opname in ("UNARY_NOT", "TO_BOOL", "COPY", *_COMPARES)


def with_code_inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields `code`, and the code of all functions and classes inside it."""
    waiting = [code]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [constant for constant in part.co_consts if isinstance(constant, types.CodeType)]


def is_cast(value) -> bool:
    """Whether a value is a float variable that is read in the compute dtype inside `call`."""
    if isinstance(value, CONTAINERS):
        return any(map(is_cast, items_of(value)))
    return isinstance(value, keras.Variable) and _keras.follows_autocast(value)


def items_of(container) -> list:
    """Returns what a container holds, of a long one the beginning."""
    return [*itertools.islice(container.values() if isinstance(container, dict) else container, 1000)]


def variables_in(values) -> list:
    found: list = []
    for value in values:
        found += variables_in(items_of(value)) if isinstance(value, CONTAINERS) else [value]
    return found
