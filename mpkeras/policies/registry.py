"""Policies by name, and the one that is global."""

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Iterator

import keras

from mpkeras import _keras
from mpkeras._arguments import check_switch
from mpkeras.devices import native
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, SMALL_DTYPE
from mpkeras.policies.policy import REGISTERED, LayerPolicy, Policy, registered


@dataclasses.dataclass
class _Setting:
    """A policy that was made global through mpkeras.

    Attributes:
        policy: The `Policy`.
        installed: What Keras was given: the same dtypes.
        keras_state: Where Keras keeps it, `None` in a Keras that does not tell. `clear_session` drops that.
    """

    policy: Policy
    installed: keras.DTypePolicy
    keras_state: object

    def was_dropped(self) -> bool:
        """Whether `clear_session` has taken this policy away, and nobody has set another before or since."""
        now = _keras.global_state()
        if now is self.keras_state or _keras.dtype_policy_in(self.keras_state) is not self.installed:
            return False
        return _is_default(keras.config.dtype_policy())


# As Keras keeps its global policy per thread, so do we: `.setting` is that of this thread. New threads begin with
# Keras' default; to say so, that of the main thread is known to all.
_global = threading.local()
_of_main_thread: list[_Setting] = []
# `(Keras' default policy after a `clear_session`, the `Policy` that it took away)`: a layer with this very default
# was made in between. A default that no layer holds any more is forgotten.
_made_in_between: list[tuple[weakref.ref, Policy]] = []
# Keras' default policies that were in force as a policy was made global: what has one of them was made before.
_replaced_defaults: list[weakref.ref] = []
_told: set = set()


def register_policy(policy: Policy, *, overwrite: bool = False) -> Policy:
    """Makes `policy` available under its name, and returns it.

    Args:
        policy: A `Policy`.
        overwrite: Whether to replace a policy of that name. Policies made from the old one stay as they are.

    Raises:
        TypeError: If `policy` is not a `Policy`.
        ValueError: If the name is taken and `overwrite` is false.

    Returns:
        `policy`.

    Example:

    >>> policy = mpkeras.Policy("mine", compute_dtype="bfloat16", variable_dtype="float32")
    >>> mpkeras.register_policy(policy) is policy
    True
    >>> mpkeras.get_policy("mine") == policy
    True
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            "Expected `policy` to be a `mpkeras.Policy`. Received: "
            f"policy={policy!r} (of type {type(policy).__name__}). "
            "Make one with `mpkeras.Policy(name, compute_dtype=..., variable_dtype=...)`."
        )
    check_switch("overwrite", overwrite)
    if policy.name in REGISTERED and not overwrite:
        raise ValueError(
            f"Expected a name that is not registered yet. Received: policy={policy!r}. "
            "Give it another name, or pass `overwrite=True`."
        )
    REGISTERED[policy.name] = _plain(policy)
    return policy


def registered_policies() -> tuple[str, ...]:
    """Returns the names of the registered policies, built in ones first.

    Example:

    >>> "mixed_float16" in mpkeras.registered_policies()
    True
    """
    return tuple(REGISTERED)


def get_policy(identifier=None) -> Policy:
    """Returns the `Policy` that `identifier` stands for.

    Args:
        identifier: The name of a registered policy, a `Policy`, a `keras.DTypePolicy`, the serialized form of
            one, or `None` for the global policy.

    Raises:
        ValueError: If no policy has that name, or a Keras policy does not compute in floating point.
        TypeError: If it is none of these, a `DTypePolicyMap` (more than one policy), or a quantized policy.

    Example:

    >>> mpkeras.get_policy("mixed_bfloat16").compute_dtype
    'bfloat16'
    >>> mpkeras.get_policy(keras.DTypePolicy("float32")).name
    'float32'
    """
    if identifier is None:
        return global_policy()
    if isinstance(identifier, Policy):
        return _plain(identifier)
    if isinstance(identifier, str):
        return registered(identifier)
    if isinstance(identifier, dict) and "class_name" in identifier:
        return get_policy(keras.dtype_policies.get(identifier))
    if isinstance(identifier, keras.dtype_policies.DTypePolicyMap):
        raise TypeError(
            "Expected one policy. Received a `DTypePolicyMap`, which has one for each layer: "
            f"{identifier!r}. Pass `.default_policy` of the map, and keep the map as `dtype` of the layers."
        )
    if isinstance(identifier, keras.DTypePolicy):
        if identifier.quantization_mode is not None:
            raise TypeError(
                "Expected a policy that is not quantized. Received: "
                f"{identifier!r}. Pass the policy to compute in, such as {identifier.compute_dtype!r}, and "
                f"quantize the built model with `model.quantize({identifier.quantization_mode!r})`."
            )
        return _from_keras(identifier)
    raise TypeError(
        "Expected the name of a policy, a `mpkeras.Policy`, a `keras.DTypePolicy`, a config or None. "
        f"Received: {identifier!r} (of type {type(identifier).__name__}). Use for example 'mixed_float16'."
    )


class _MadeUnder(str):
    """The name of Keras' policy that was made global for a `Policy`.

    A layer has the policy that is global when it is made, and of that Keras hands on to a clone of the layer the name
    alone. Files, copies and pickles hold the plain name.
    """

    policy: Policy

    def __reduce__(self):
        return str, (str(self),)


def made_under(policy) -> Policy | None:
    """Returns the `Policy` that mpkeras had made global when a layer, or the one that it is a clone of, was made.

    A policy that `clear_session` has taken away counts, too.

    Args:
        policy: The `dtype_policy` that the layer was made with.
    """
    if isinstance(policy, Policy):
        return _plain(policy)
    for default, taken_away in _made_in_between:
        if policy is default():
            return taken_away
    name = getattr(policy, "name", None)
    return name.policy if isinstance(name, _MadeUnder) else None


def was_made_before(policy) -> bool:
    """Whether a layer was made under Keras' default, before mpkeras made another policy global.

    Args:
        policy: The `dtype_policy` that the layer was made with; one that it was given itself was never global.
    """
    return any(policy is default() for default in _replaced_defaults)


def _marked(policy: Policy):
    """Returns what Keras is given for `policy`: its own policy of these dtypes, if it has one."""
    stock = policy.stock()
    if stock is None:
        return policy
    name = _MadeUnder(stock.name)
    name.policy = policy
    return _keras.named_policy(name)


def make_global(identifier) -> Policy:
    """Makes a policy global in Keras and mpkeras, and returns it: `mpkeras.set_global_policy`, `compile` left alone."""
    policy = get_policy(identifier)
    if policy.variable_dtype == "float16":
        warnings.warn(
            f"Under policy '{policy.name}' layers make float16 variables, for inference: mpkeras refuses to train "
            "them, and in plain Keras small updates are lost, with Adam all of them. To train, use 'mixed_float16'.",
            stacklevel=3,
        )
    elif policy.variable_dtype == SMALL_DTYPE:
        warnings.warn(
            f"Under policy '{policy.name}' layers make bfloat16 variables. A model that is compiled trains them with "
            "stochastic rounding, and so do `make_train_step` and a `LossScaleOptimizer`; with a stock optimizer in a "
            "loop of your own small updates are lost, with Adam all of them.",
            stacklevel=3,
        )
    _told.clear()
    replaced = keras.config.dtype_policy()
    if _is_default(replaced) and made_under(replaced) is None and not was_made_before(replaced):
        _replaced_defaults[:] = [default for default in _replaced_defaults if default() is not None]
        _replaced_defaults.append(weakref.ref(replaced))
    installed = _marked(policy)
    keras.config.set_dtype_policy(installed)
    _note(_Setting(policy, installed, _keras.global_state()))
    return policy


def is_global(policy: Policy) -> bool:
    """Whether it is this very policy that was made global last through mpkeras, in this thread."""
    setting = getattr(_global, "setting", None)
    return setting is not None and setting.policy is policy


def policy_in_force() -> Policy | None:
    """Returns the policy that was made global last through mpkeras, where it still is in this thread."""
    setting = getattr(_global, "setting", None)
    return setting.policy if setting is not None and keras.config.dtype_policy() is setting.installed else None


def forget_global():
    """Makes Keras' default policy global, as if no other had been, in this thread."""
    _told.clear()
    _made_in_between.clear()
    keras.config.set_dtype_policy(keras.config.floatx())
    _note(None)


def _note(setting: _Setting | None):
    """Remembers what this thread's global policy was set to through mpkeras; `None`: to nothing."""
    _global.setting = setting
    if threading.current_thread() is threading.main_thread():
        _of_main_thread[:] = [] if setting is None else [setting]


def _is_default(policy) -> bool:
    return policy == keras.DTypePolicy(keras.config.floatx())


def look_for_clear_session():
    """Makes the policy of this thread global again if `clear_session` has taken it away, and warns of that."""
    setting = getattr(_global, "setting", None)
    if setting is not None and setting.was_dropped():
        _install_again(setting)


def _have_same_dtypes(policy, other) -> bool:
    return (policy.compute_dtype, policy.variable_dtype) == (other.compute_dtype, other.variable_dtype)


def _note_made_in_between(default, taken_away: Policy):
    _made_in_between[:] = [pair for pair in _made_in_between if pair[0]() is not None]
    _made_in_between.append((weakref.ref(default), taken_away))


def _install_again(setting: _Setting):
    """Makes a policy that `clear_session` has taken away global again, and says so where the default is another one."""
    default = keras.config.dtype_policy()
    is_same = _have_same_dtypes(default, setting.installed)
    _note_made_in_between(default, setting.policy)
    keras.config.set_dtype_policy(setting.installed)
    setting.keras_state = _keras.global_state()
    if not is_same:
        _warn_once(
            "clear_session",
            f"`keras.utils.clear_session()` has reset the global policy '{setting.policy.name}', which was set through "
            "mpkeras, to Keras' default. It is in force again from here on; layers that were made in between have the "
            "default until their model is compiled. Call `mpkeras.set_global_policy` after `clear_session`, also to "
            "choose the default.",
        )


def warn_of_new_thread(current, stacklevel: int = 4):
    """Warns where the main thread's global policy is from mpkeras, and this thread has Keras' default.

    Args:
        current: The policy that is global in Keras, in this thread.
        stacklevel: Of the warning, counted from where it is given.
    """
    if not _of_main_thread or not _is_default(current) or hasattr(_global, "setting"):
        return
    policy = _of_main_thread[0].policy
    if not _have_same_dtypes(current, policy):
        _warn_once(
            "thread",
            f"The global policy of this thread is Keras' default, '{current.name}', while that of the main thread is "
            f"'{policy.name}', set through mpkeras: Keras keeps it by thread. Call `mpkeras.set_global_policy` in this "
            "thread, too, also to choose the default, or pass the policy.",
            stacklevel,
        )


def _warn_once(key: str, message: str, stacklevel: int = 4):
    if key not in _told:
        _told.add(key)
        warnings.warn(message, stacklevel=stacklevel)


def global_policy() -> Policy:
    """Returns the global `Policy`: the one set last, through mpkeras or through Keras.

    Keras keeps it by thread, and `keras.utils.clear_session()` resets it to the default. A policy that was set through
    mpkeras is in force again when it is asked for, here or by a function of mpkeras that goes by the global policy; a
    warning says so, as layers made in between have the default. In another thread than the main one a warning says
    where the default differs from the main thread's policy.

    Raises:
        ValueError: If Keras was given a policy whose dtypes are not floating point.

    Example:

    >>> keras.config.set_dtype_policy("mixed_float16")
    >>> mpkeras.global_policy().loss_scale.initial_scale
    32768.0
    """
    look_for_clear_session()
    in_force = policy_in_force()
    if in_force is not None:
        return in_force
    if getattr(_global, "setting", None) is not None:
        # Set through Keras since.
        _note(None)
    current = keras.config.dtype_policy()
    warn_of_new_thread(current)
    if isinstance(current, Policy):
        return _plain(current)
    # Asking for the global policy must not fail: of a map the default counts, of a quantized one its dtypes.
    if isinstance(current, keras.dtype_policies.DTypePolicyMap):
        current = current.default_policy
    return _from_keras(current)


@contextlib.contextmanager
def global_in_scope(identifier) -> Iterator[Policy]:
    """Context manager: `mpkeras.policy_scope`, with `compile` left alone."""
    look_for_clear_session()
    around = getattr(_global, "setting", None)
    keras_policy = keras.config.dtype_policy()
    policy = make_global(identifier)
    inside = _global.setting
    try:
        yield policy
    finally:
        if inside.was_dropped() and not _have_same_dtypes(keras.config.dtype_policy(), inside.installed):
            _note_made_in_between(keras.config.dtype_policy(), policy)
            _warn_once(
                "clear_session",
                f"`keras.utils.clear_session()` was called in a `mpkeras.policy_scope` and has ended it: layers made "
                f"since have Keras' default policy, not '{policy.name}', until their model is compiled. Open the scope "
                "after `clear_session`.",
            )
        # The same objects, not equal ones: that is how `global_policy` knows its own.
        keras.config.set_dtype_policy(keras_policy)
        if around is not None:
            around.keras_state = _keras.global_state()
        _note(around)


def _from_keras(policy: keras.DTypePolicy) -> Policy:
    """Returns the `Policy` with the dtypes of a Keras policy: the registered one, if it has the name."""
    dtypes = policy.compute_dtype, policy.variable_dtype
    # A policy of the user's own may have no name.
    name = getattr(policy, "name", None) or ""
    known = registered(name) if name in REGISTERED else None
    if known is not None and (known.compute_dtype, known.variable_dtype) == dtypes:
        return known
    for dtype in dtypes:
        if dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"Expected a policy with the dtypes {', '.join(FLOAT_DTYPES)}. Received: {policy!r} with "
                f"compute_dtype={dtypes[0]!r}, variable_dtype={dtypes[1]!r}. "
                "Use 'float32' or a mixed precision policy."
            )
    # A subclass of one's own, or a quantized policy.
    own_name = name if name and known is None else "_".join(dtypes)
    return Policy(own_name, compute_dtype=dtypes[0], variable_dtype=dtypes[1])


def _plain(policy: Policy) -> Policy:
    return policy.default_policy if isinstance(policy, LayerPolicy) else policy


def _resolve_mixed_auto() -> Policy:
    name, reason = native.resolve()
    return registered(name).renamed("mixed_auto", reason)


def _register_built_in():
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        REGISTERED[dtype] = Policy(dtype, compute_dtype=dtype, variable_dtype=dtype)
    for dtype in SIXTEEN_BIT_DTYPES:
        REGISTERED[f"mixed_{dtype}"] = Policy(f"mixed_{dtype}", compute_dtype=dtype, variable_dtype="float32")
    REGISTERED["mixed_float8"] = Policy(
        "mixed_float8", compute_dtype="bfloat16", variable_dtype="float32", float8="current"
    )
    # Looking at devices takes time and initializes them: only when it is first asked for.
    REGISTERED["mixed_auto"] = _resolve_mixed_auto


_register_built_in()
