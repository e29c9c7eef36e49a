"""The global policy, and what it does for the models that are built under it: compiled, they are prepared."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import keras

from mpkeras.conversion.from_file import comes_from_a_file, program_layers
from mpkeras.policies import registry
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, SMALL_DTYPE
from mpkeras.policies.policy import NOTES_FOR_REPR, Policy
from mpkeras.scaling.optimizer import ON_FIRST_UNGUARDED_UPDATE
from mpkeras.training import covered_compile
from mpkeras.training.made_under import policy_made_under
from mpkeras.training.own_loops import listed, warn_of_layers_in_16_bits
from mpkeras.training.prepare import prepare_model

ENVIRONMENT_VARIABLE = "MPKERAS_POLICY"
# So many layers are named in a warning.
_NAMED = 3


def set_global_policy(policy: str | Policy | keras.DTypePolicy | None) -> Policy:
    """Makes a policy global in Keras and mpkeras, and returns it: the one line at the top of a program.

    A model whose layers are made from now on has the policy's dtypes, and when it is compiled,
    `mpkeras.prepare(model, policy)` follows: layers that the policy keeps in float32, loss scaling, checks,
    rollback and logs. The policy that the layers were made under counts, not the one in force at `compile`: a model
    that is compiled after another policy was set is prepared with its own, and so is a clone. A model that
    `load_model` makes is prepared if its layers compute in 16 bits. A policy that `keras.utils.clear_session()`
    takes away is in force again at the next `compile`, also for that model, and a warning says so. Models whose
    layers were made before, or under `keras.config.set_dtype_policy`, are left as Keras makes them;
    `mpkeras.prepare` is for those; a warning at `compile` names layers that were made before, in float32.

    For that the `compile` of `keras.Model` and of its subclasses is covered, also of those that are defined later, from
    the first policy other than float32 on (the `repr` of the global policy lists it), until `set_global_policy(None)`.
    This makes Keras' default policy global and takes back exactly what was covered. Models prepared until then stay
    prepared. An `mpkeras.autoprepare` that began later decides before it.

    Keras is given its own policy wherever one has the same dtypes, so that models built under it are saved
    without any mention of mpkeras. Rules and loss scale stay with mpkeras, until Keras' global policy is set
    to something else. A warning says what training needs under a policy with 16-bit variables.

    Args:
        policy: As for `get_policy`, in each thread by itself, as Keras keeps it; `None` for Keras' default, and no
            cover in any thread.

    Raises:
        ValueError, TypeError: As `get_policy` does; then nothing has changed.

    Returns:
        The `Policy`.

    Example:

    >>> policy = mpkeras.set_global_policy("mixed_bfloat16")
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
    >>> model.compile("adam", "sparse_categorical_crossentropy")
    >>> [layer.compute_dtype for layer in model.layers], type(model.optimizer).__name__
    (['bfloat16', 'float32'], 'LossScaleOptimizer')
    >>> policy = mpkeras.set_global_policy(None)
    """
    if policy is None:
        covered_compile.leave(_prepare_if_made_under_a_policy)
        ON_FIRST_UNGUARDED_UPDATE[:] = [f for f in ON_FIRST_UNGUARDED_UPDATE if f is not warn_of_layers_in_16_bits]
        registry.forget_global()
        return registry.global_policy()
    made = registry.make_global(policy)
    _guard_what_is_made_under(made)
    return made


@contextlib.contextmanager
def policy_scope(policy: str | Policy | keras.DTypePolicy | None) -> Iterator[Policy]:
    """Context manager: the policy is global inside, and what was global before is so again afterwards.

    Models whose layers are made inside are prepared when they are compiled, inside or later, as with
    `mpkeras.set_global_policy`.

    Args:
        policy: As for `get_policy`.

    Yields:
        The `Policy`. `keras.utils.clear_session()` ends its force, which a warning says at the end.

    Raises:
        ValueError, TypeError: As `get_policy` does; then nothing has changed.

    Example:

    >>> with mpkeras.policy_scope("mixed_float16") as policy:
    ...     inside = keras.layers.Dense(2).compute_dtype
    >>> policy.name, inside, keras.layers.Dense(2).compute_dtype
    ('mixed_float16', 'float16', 'float32')
    """
    around = covered_compile.position_of(_prepare_if_made_under_a_policy)
    with registry.global_in_scope(policy) as made:
        _guard_what_is_made_under(made)
        try:
            yield made
        finally:
            if covered_compile.position_of(_prepare_if_made_under_a_policy) is not None:
                # The policy in force around the scope is the innermost again.
                covered_compile.enter(_prepare_if_made_under_a_policy, around or 0)


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


def _guard_what_is_made_under(policy):
    if not _guards(policy):
        return
    covered_compile.enter(_prepare_if_made_under_a_policy)
    if warn_of_layers_in_16_bits not in ON_FIRST_UNGUARDED_UPDATE:
        ON_FIRST_UNGUARDED_UPDATE.append(warn_of_layers_in_16_bits)


def _list_covered(policy) -> str:
    if not registry.is_global(policy) or covered_compile.position_of(_prepare_if_made_under_a_policy) is None:
        return ""
    return f"what is built under it is prepared when compiled, covers {', '.join(covered_compile.covered_names())}"


NOTES_FOR_REPR.append(_list_covered)


def _guards(policy) -> bool:
    """Whether a model under `policy` trains otherwise than in plain Keras: not all in float32, or by another step."""
    is_small = {policy.compute_dtype, policy.variable_dtype} != {"float32"} or policy.slot_dtype == SMALL_DTYPE
    return is_small or policy.remat is not None or policy.accumulate_steps > 1


def _prepare_if_made_under_a_policy(model) -> bool:
    registry.look_for_clear_session()
    policy = policy_made_under(model)
    if policy is not None:
        if not _guards(policy):
            return False
        prepare_model(model, policy, is_explicit=False)
        _warn_of_layers_made_before(model)
        return True
    if not comes_from_a_file(model):
        if covered_compile.position_of(_prepare_if_made_under_a_policy) == 0:
            # No `autoprepare` comes behind.
            _warn_of_layers_made_before(model)
            _warn_of_layers_made_in_new_thread(model)
        return False
    prepare_model(model, None, is_explicit=False)
    return True


def _warn_of_layers_made_before(model):
    policy = registry.policy_in_force()
    if policy is None or policy.compute_dtype not in SIXTEEN_BIT_DTYPES:
        return
    layers = [layer for layer in program_layers(model) if layer.weights or not layer.built]
    in_float32 = [layer for layer in layers if layer.compute_dtype == "float32"]
    before = [layer for layer in in_float32 if registry.was_made_before(layer.dtype_policy)]
    if not before:
        return
    named = listed([f"'{layer.name}'" for layer in before], _NAMED)
    # In a model with layers in 16 bits, too, those in float32 are taken for the user's choice.
    prepare = f", or call `mpkeras.prepare(model, {policy.name!r})` after `compile`" if before == layers else ""
    warnings.warn(
        f"Model '{model.name}' is compiled under the global policy '{policy.name}', but layers of it were made before "
        f"that was set and compute in float32, {len(before)} of {len(layers)}: {named}. Set the policy before "
        f"they are made{prepare}; where float32 is meant, make them with `dtype='float32'`, which is not named.",
        stacklevel=4,
    )


def _warn_of_layers_made_in_new_thread(model):
    default = keras.config.dtype_policy()
    # Layers with a `dtype` of their own, and models that another thread has made, have other objects.
    if any(layer.dtype_policy is default for layer in program_layers(model)):
        registry.warn_of_new_thread(default, stacklevel=6)


@contextlib.contextmanager
def policy_alone(policy, *, compile_left_alone: bool = False):
    """Context manager: `policy` is in force for layers that are made inside, and no `compile` prepares a model for it.

    Args:
        policy: As for `get_policy`.
        compile_left_alone: Whether a model that is compiled inside is prepared for no other policy either: not for a
            global one, nor by an `autoprepare`, that began before.
    """
    with registry.global_in_scope(policy), contextlib.ExitStack() as stack:
        if compile_left_alone:
            stack.enter_context(covered_compile.left_alone())
        yield
