"""Policies by name, and the one that is global."""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator

import keras

from mpkeras._arguments import check_switch
from mpkeras.devices import native
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, SMALL_DTYPE
from mpkeras.policies.policy import REGISTERED, LayerPolicy, Policy, registered

ENVIRONMENT_VARIABLE = "MPKERAS_POLICY"

# As Keras keeps its global policy per thread, so do we: `.policy` is ours, `.installed` what Keras was given.
_global = threading.local()


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


def set_global_policy(identifier) -> Policy:
    """Makes a policy global in Keras and mpkeras, and returns it.

    Keras is given its own policy wherever one has the same dtypes, so that models built under it are saved
    without any mention of mpkeras. Rules and loss scale stay with mpkeras, until Keras' global policy is set
    to something else. A warning says what training needs under a policy with 16-bit variables.

    Args:
        identifier: As for `get_policy`.

    Raises:
        ValueError, TypeError: As `get_policy` does; then nothing has changed.

    Returns:
        The `Policy`.

    Example:

    >>> policy = mpkeras.set_global_policy("mixed_bfloat16")
    >>> keras.layers.Dense(2).compute_dtype
    'bfloat16'
    """
    policy = get_policy(identifier)
    if policy.variable_dtype == "float16":
        warnings.warn(
            f"Under policy '{policy.name}' layers make float16 variables, for inference: mpkeras refuses to train "
            "them, and in plain Keras small updates are lost, with Adam all of them. To train, use 'mixed_float16'.",
            stacklevel=2,
        )
    elif policy.variable_dtype == SMALL_DTYPE:
        warnings.warn(
            f"Under policy '{policy.name}' layers make bfloat16 variables. Train them through mpkeras (`prepare`, the "
            "`MixedPrecision` callback, `make_train_step`, or a `LossScaleOptimizer` in a loop of your own), which "
            "rounds stochastically; in a plain `fit` small updates are lost, with Adam all of them.",
            stacklevel=2,
        )
    installed = policy.stock() or policy
    keras.config.set_dtype_policy(installed)
    _global.policy, _global.installed = policy, installed
    return policy


def global_policy() -> Policy:
    """Returns the global `Policy`: the one set last, through mpkeras or through Keras.

    Raises:
        ValueError: If Keras was given a policy whose dtypes are not floating point.

    Example:

    >>> keras.config.set_dtype_policy("mixed_float16")
    >>> mpkeras.global_policy().loss_scale.initial_scale
    32768.0
    """
    current = keras.config.dtype_policy()
    if current is getattr(_global, "installed", None):
        return _global.policy
    if isinstance(current, Policy):
        return _plain(current)
    # Asking for the global policy must not fail: of a map the default counts, of a quantized one its dtypes.
    if isinstance(current, keras.dtype_policies.DTypePolicyMap):
        current = current.default_policy
    return _from_keras(current)


@contextlib.contextmanager
def policy_scope(identifier) -> Iterator[Policy]:
    """Context manager: the policy is global inside, and what was global before is so again afterwards.

    Args:
        identifier: As for `get_policy`.

    Yields:
        The `Policy`.

    Raises:
        ValueError, TypeError: As `get_policy` does; then nothing has changed.

    Example:

    >>> with mpkeras.policy_scope("mixed_float16") as policy:
    ...     inside = keras.layers.Dense(2).compute_dtype
    >>> policy.name, inside, keras.layers.Dense(2).compute_dtype
    ('mixed_float16', 'float16', 'float32')
    """
    keras_policy = keras.config.dtype_policy()
    remembered = getattr(_global, "policy", None), getattr(_global, "installed", None)
    policy = set_global_policy(identifier)
    try:
        yield policy
    finally:
        # The same objects, not equal ones: that is how `global_policy` knows its own.
        keras.config.set_dtype_policy(keras_policy)
        _global.policy, _global.installed = remembered


def install_from_environment() -> Policy | None:
    """Makes the policy that the environment variable `MPKERAS_POLICY` names global, if it is set and not empty."""
    name = os.environ.get(ENVIRONMENT_VARIABLE, "").strip()
    if not name:
        return None
    try:
        return set_global_policy(name)
    except ValueError as error:
        raise ValueError(
            f"Expected the environment variable {ENVIRONMENT_VARIABLE} to name a registered policy. "
            f"Received: {ENVIRONMENT_VARIABLE}={name!r}. {error} Correct or unset {ENVIRONMENT_VARIABLE}."
        ) from error


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
