"""`autoprepare`: every `compile` is followed by `prepare`, in programs that know nothing of mpkeras."""

import keras

from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy
from mpkeras.training import covered_compile
from mpkeras.training.prepare import prepare_model


def autoprepare(policy: str | Policy | keras.DTypePolicy | None = None) -> "AutoPrepare":
    """Lets every `compile` of a Keras model be followed by `mpkeras.prepare`, until it is undone.

    It is for programs that are not to be touched (`mpkeras run` calls it), and for models that are built elsewhere, in
    whatever dtype. A model that is built under `mpkeras.set_global_policy` or `mpkeras.policy_scope` needs no
    `autoprepare`. A `compile` of the user's own class counts, too: a GAN is prepared when its own `compile` is done,
    with all its optimizers. Models that are compiled by `load_model` or `clone_model` are prepared as well. A model
    that was given to `mpkeras.prepare` itself keeps what it was prepared with, and a model that is compiled without an
    optimizer is left alone.

    It covers the `compile` of `keras.Model` and of its subclasses, and `keras.Model.__init_subclass__`, which finds the
    subclasses that are defined later, as `mpkeras.set_global_policy` does; `repr` lists them. All are as before when
    the last one in force is undone. The models prepared until then stay prepared.

    Args:
        policy: A policy or its name, as in `mpkeras.prepare`; by default the global one, or what the layers of a
            model compute in.

    Returns:
        The way back: a context manager, at the end of which it is undone, with an `undo()` for those who do not use
        `with`. The innermost that is in force decides, global policies included.

    Raises:
        ValueError: If `policy` is not known. Nothing is changed then.
        TypeError: If `policy` is of a wrong type.

    Example:

    >>> with mpkeras.autoprepare("mixed_float16"):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
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
        covered_compile.leave(self._follow)

    def _follow(self, model) -> bool:
        prepare_model(model, self.policy, is_explicit=False)
        return True

    def __enter__(self) -> "AutoPrepare":
        if covered_compile.position_of(self._follow) is None:
            covered_compile.enter(self._follow)
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def __repr__(self):
        if covered_compile.position_of(self._follow) is None:
            return "<mpkeras.autoprepare: undone>"
        policy = "the global policy" if self.policy is None else repr(self.policy.name)
        return f"<mpkeras.autoprepare: {policy}; covers {', '.join(covered_compile.covered_names())}>"
