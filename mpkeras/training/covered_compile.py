"""The `compile` of models, covered: while something is in force, it is asked what follows a `compile`."""

import functools
from collections.abc import Callable

import keras

from mpkeras.training import inventory
from mpkeras.training.prepared import prepared_of

_MISSING = object()
# Those in force, the innermost last: functions that do with a compiled model what is theirs to do, and return whether
# that is so. The innermost is asked first.
_in_force: list[Callable[[keras.Model], bool]] = []
# `(class, attribute, what its `__dict__` had, what it was given)`, for as long as one is in force.
_covered: list = []
# The `id`s of models whose `compile` runs: what follows does so when the outermost is done, also where a class calls
# `super().compile()`.
_compiling: set = set()


def enter(follow: Callable[[keras.Model], bool], position: int | None = None):
    """Lets `follow` be asked about every model that is compiled, before those that are in force.

    Args:
        follow: Takes a model that has been compiled with an optimizer; returns whether no other is to be asked. In
            force already, it moves.
        position: Among those in force, counted from the outermost; by default it is the innermost.
    """
    if follow in _in_force:
        _in_force.remove(follow)
    _in_force.insert(len(_in_force) if position is None else position, follow)
    if not _covered:
        _cover_classes()


def leave(follow: Callable[[keras.Model], bool]):
    """Asks `follow` no more; with the last one, all classes are as they were before the first."""
    if follow in _in_force:
        _in_force.remove(follow)
    if not _in_force:
        _uncover_classes()


def position_of(follow: Callable[[keras.Model], bool]) -> int | None:
    """Returns the place of `follow` among those in force, counted from the outermost; `None` if it is not."""
    return _in_force.index(follow) if follow in _in_force else None


def covered_names() -> list[str]:
    """Returns the full names of the methods that are covered now."""
    return [f"{cls.__module__}.{cls.__qualname__}.{name}" for cls, name, _, _ in _covered]


class left_alone:
    """Context manager: what is compiled inside is left as `compile` makes it."""

    def __enter__(self):
        # Nothing is covered for this alone.
        if _in_force:
            _in_force.append(self)

    def __exit__(self, *_):
        leave(self)

    def __call__(self, model):
        return True


def _cover_classes():
    _cover(keras.Model, "__init_subclass__", _init_subclass)
    for cls in _with_subclasses(keras.Model):
        _cover_compile(cls)


def _uncover_classes():
    while _covered:
        cls, name, old_method, new_method = _covered.pop()
        # A cover that somebody else has put there since is not ours to take away.
        if vars(cls).get(name) is not new_method:
            continue
        if old_method is _MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, old_method)


def _cover(cls, name: str, new_method):
    _covered.append((cls, name, vars(cls).get(name, _MISSING), new_method))
    setattr(cls, name, new_method)


def _cover_compile(cls):
    """Covers `compile` where `cls` has it from: itself, a class of the user's that it is mixed with, or Keras."""
    owner = next(base for base in cls.__mro__ if "compile" in vars(base))
    if all((owner, "compile") != (covered, name) for covered, name, _, _ in _covered):
        # On the class that defines it: Keras compares the two to see whether a model's `compile` is its own.
        _cover(owner, "compile", _followed(vars(owner)["compile"]))


@classmethod  # type: ignore[misc]
def _init_subclass(cls, **options):
    super(keras.Model, cls).__init_subclass__(**options)
    _cover_compile(cls)


def _with_subclasses(cls) -> list:
    classes = [cls]
    for subclass in cls.__subclasses__():
        classes += _with_subclasses(subclass)
    return list(dict.fromkeys(classes))


def _followed(compile):
    @functools.wraps(compile)
    def compile_and_follow(self, *args, **kwargs):
        if not _in_force or id(self) in _compiling or not isinstance(self, keras.Model):
            return compile(self, *args, **kwargs)
        _compiling.add(id(self))
        try:
            result = compile(self, *args, **kwargs)
        finally:
            _compiling.discard(id(self))
        prepared = prepared_of(self)
        if inventory.find_optimizers(self) and not (prepared is not None and prepared.is_explicit):
            for follow in reversed(list(_in_force)):
                if follow(self):
                    break
        return result

    return compile_and_follow
