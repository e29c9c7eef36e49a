"""`autoprepare`: every `compile` is followed by `prepare`, in programs that know nothing of mpkeras."""

import functools

import keras

from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy
from mpkeras.training import guard, inventory
from mpkeras.training.prepare import prepare_model

_MISSING = object()
# Those in force, the innermost last: its policy counts.
_active: list = []
# `(class, attribute, what its `__dict__` had, what it was given)`, for as long as one is in force.
_covered: list = []
# The `id`s of models whose `compile` runs: one that calls `super().compile()` is prepared when the outermost is done.
_compiling: set = set()


def autoprepare(policy: str | Policy | keras.DTypePolicy | None = None) -> "AutoPrepare":
    """Lets every `compile` of a Keras model be followed by `mpkeras.prepare`, until it is undone.

    So a program that was written for stock Keras trains guarded and with loss scaling: with `mpkeras.set_global_policy`
    and this line at its top, or unmodified, by `mpkeras run`. A `compile` of the user's own class counts, too: a GAN is
    prepared when its own `compile` is done, with all its optimizers. Models that are compiled by `load_model` or
    `clone_model` are prepared as well. A model that was given to `mpkeras.prepare` itself keeps what it was prepared
    with, and a model that is compiled without an optimizer is left alone.

    This is the one place where mpkeras changes classes of Keras and of the user's: the `compile` of `keras.Model` and
    of its subclasses, and `keras.Model.__init_subclass__`, which finds the subclasses that are defined later. `repr`
    lists them. All are as before when the last `autoprepare` is undone. The models prepared until then stay prepared.

    Args:
        policy: A policy or its name, as in `mpkeras.prepare`; by default the global one, or what the layers of a
            model compute in.

    Returns:
        What undoes it: a context manager, at the end of which it is undone, with an `undo()` for those who do not use
        `with`. The innermost that is in force decides.

    Raises:
        ValueError: If `policy` is not known. Nothing is changed then.
        TypeError: If `policy` is of a wrong type.

    Example:

    >>> with mpkeras.autoprepare("mixed_float16"):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    ...     model.compile("sgd", "mse")
    >>> type(model.optimizer).__name__, model.layers[0].compute_dtype
    ('LossScaleOptimizer', 'float16')
    """
    return AutoPrepare(None if policy is None else get_policy(policy))


class AutoPrepare:
    """An `autoprepare` in force, or undone.

    Attributes:
        policy: The `Policy` that models are prepared with; `None` for the global one.

    Example:

    >>> with mpkeras.autoprepare("mixed_bfloat16") as automatic:
    ...     print(automatic.policy.name)
    mixed_bfloat16
    """

    def __init__(self, policy):
        self.policy = policy
        self.__enter__()

    def undo(self) -> None:
        """Ends it, and takes back what it changed unless another is in force; a second time it does nothing.

        Example:

        >>> automatic = mpkeras.autoprepare()
        >>> automatic.undo()
        >>> automatic
        <mpkeras.autoprepare: undone>
        """
        if self in _active:
            _active.remove(self)
        if not _active:
            _uncover_classes()

    def __enter__(self) -> "AutoPrepare":
        if self not in _active:
            _active.append(self)
            if not _covered:
                _cover_classes()
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def __repr__(self):
        if self not in _active:
            return "<mpkeras.autoprepare: undone>"
        policy = "the global policy" if self.policy is None else repr(self.policy.name)
        names = ", ".join(f"{cls.__module__}.{cls.__qualname__}.{name}" for cls, name, _, _ in _covered)
        return f"<mpkeras.autoprepare: {policy}; covers {names}>"


def _cover_classes():
    _cover(keras.Model, "__init_subclass__", _init_subclass)
    for cls in _with_subclasses(keras.Model):
        _cover_compile(cls)


def _uncover_classes():
    while _covered:
        cls, name, before, given = _covered.pop()
        # What somebody else has put there since is not ours to take away.
        if vars(cls).get(name) is not given:
            continue
        if before is _MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


def _cover(cls, name: str, given):
    _covered.append((cls, name, vars(cls).get(name, _MISSING), given))
    setattr(cls, name, given)


def _cover_compile(cls):
    """Covers `compile` where `cls` has it from: itself, a class of the user's that it is mixed with, or Keras."""
    owner = next(base for base in cls.__mro__ if "compile" in vars(base))
    if all((owner, "compile") != (covered, name) for covered, name, _, _ in _covered):
        # On the class that defines it: Keras compares the two to see whether a model's `compile` is its own.
        _cover(owner, "compile", _followed_by_prepare(vars(owner)["compile"]))


@classmethod  # type: ignore[misc]
def _init_subclass(cls, **options):
    super(keras.Model, cls).__init_subclass__(**options)
    _cover_compile(cls)


def _with_subclasses(cls) -> list:
    found = [cls]
    for subclass in cls.__subclasses__():
        found += _with_subclasses(subclass)
    return list(dict.fromkeys(found))


def _followed_by_prepare(compile):
    @functools.wraps(compile)
    def compile_and_prepare(self, *args, **kwargs):
        if not _active or id(self) in _compiling or not isinstance(self, keras.Model):
            return compile(self, *args, **kwargs)
        _compiling.add(id(self))
        try:
            result = compile(self, *args, **kwargs)
        finally:
            _compiling.discard(id(self))
        prepared = guard.prepared_of(self)
        if inventory.find_optimizers(self) and not (prepared is not None and prepared.is_explicit):
            prepare_model(self, _active[-1].policy, is_explicit=False)
        return result

    return compile_and_prepare
