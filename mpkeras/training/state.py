"""`state_dict` and `load_state_dict`: all that training changes, as NumPy arrays."""

import re
import warnings
from collections.abc import Iterable, Mapping

import keras
import ml_dtypes
import numpy as np

from mpkeras.policies.dtypes import bytes_of
from mpkeras.training import training_backend
from mpkeras.training.inventory import find_optimizers, states_of_helpers, unlisted_states
from mpkeras.training.prepare import check_model

_RANDOM = "random/"
# Keras numbers names by what the process has made before: "dense_3", "sequential_1_dense_3_kernel_momentum".
_AUTO_NUMBER = re.compile(r"_\d+(?=_|$)")


def state_dict(model, optimizers=None, extra=()) -> dict:
    """Returns every variable that training changes, by a name that is the same in every process.

    Weights and statistics of the model, the buffers of torch modules and `tf.Variable`s that its layers hold, the
    state of its random generators and metrics, and its optimizers with loss scale and counters. Keras' own files
    leave out random generators and metrics; from this state a model with Dropout goes on exactly, in the middle of an
    epoch, too.

    On torch, where a Dropout without a seed draws from torch's own generator, that one is part of it. Keras'
    global `SeedGenerator`, NumPy's generators and the position in the data are not; the optimizer's
    `iterations + skipped_steps` is the number of batches seen.

    Args:
        model: A built `keras.Model`. During `fit` on JAX its variables are brought up to date.
        optimizers: The optimizers whose state belongs to it, in an order of your own; by default those that
            `model` holds. An optimizer that is not built is built on the trainable variables of `model`.
        extra: Further Keras variables.

    Returns:
        Copies of the values as `numpy.ndarray`s of each variable's shape and dtype. The keys are made of a
        group, the position in it and the variable's name without Keras' numbers: `"model/0/kernel"`,
        `"metrics/1/count"`, `"optimizers/0/7/dynamic_scale"`, `"extra/0/variable"`, on torch `"random/cpu"`.

    Raises:
        ValueError: If `model` is not built, or an optimizer that is not `model.optimizer` is not.
        TypeError: If an argument is of a wrong type.

    Example:

    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> state = mpkeras.state_dict(model)
    >>> state["model/0/kernel"].shape
    (3, 2)
    >>> np.savez("state.npz", **state)
    >>> mpkeras.load_state_dict(model, np.load("state.npz"))  # in another process, into the same model
    """
    variables = named_variables(model, optimizers, extra)
    # Copies: on torch the array would share the variable's memory and change with the next step, and under a strategy
    # of TensorFlow a metric's variable is no array until an operation has summed what its replicas hold.
    arrays = {key: keras.ops.convert_to_numpy(keras.ops.copy(variable.value)) for key, variable in variables.items()}
    return {**arrays, **_random_arrays()}


def load_state_dict(model, state, optimizers=None, extra=()) -> None:
    """Gives every variable the value it has in `state`, bit for bit; all of them or, on an error, none.

    The global dtype policy plays no part. To go on in the middle of an epoch of `fit`, load in a callback's first
    `on_train_batch_begin`: when an epoch begins, `fit` resets the metrics, and torch's loader draws a seed.

    A state that torch wrote on a machine with a GPU goes on on one without, and the other way round: the generator that
    only one of them has is left as it is, with a warning.

    Args:
        model: The model of `state_dict`, built anew or not. Metrics given to `compile` come into being with
            the first batch; where `state` holds theirs, call `model.test_on_batch(x, y)` before.
        state: What `state_dict` returned, or `numpy.load` of the file it was written to with `numpy.savez`.
        optimizers, extra: As in `state_dict`.

    Raises:
        ValueError: If names, shapes or dtypes in `state` are not those of the variables.
        TypeError: If an argument is of a wrong type.

    Example:

    >>> first, second = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]) for _ in range(2))
    >>> mpkeras.load_state_dict(second, mpkeras.state_dict(first))
    >>> np.array_equal(first.get_weights()[0], second.get_weights()[0])
    True
    """
    variables = named_variables(model, optimizers, extra)
    if not isinstance(state, Mapping):
        raise TypeError(
            "Expected `state` to be a dictionary of arrays, or what `numpy.load` returns. Received: "
            f"{state!r} (of type {type(state).__name__}). Pass what `state_dict` returned."
        )
    expected = {key: (tuple(variable.shape), variable.dtype) for key, variable in variables.items()}
    random_arrays = _random_arrays()
    others = _generators_of_one_machine(random_arrays, state)
    random_arrays = {key: array for key, array in random_arrays.items() if key not in others}
    expected.update({key: (array.shape, array.dtype.name) for key, array in random_arrays.items()})
    missing = [key for key in expected if key not in state]
    unknown = [key for key in state if key not in expected and key not in others]
    if missing or unknown:
        remedy = "Load it into the model, built and compiled in the same way, that it was taken of."
        if not missing and all(str(key).startswith("metrics/") for key in unknown):
            remedy = "The metrics are not built yet: call `model.test_on_batch(x, y)` with any batch first."
        raise ValueError(
            "Expected `state` to hold one array for each variable of the model and its optimizers. Received: a "
            f"state without {_some(missing)} and with the unknown {_some(unknown)}. {remedy}"
        )
    values = {key: _checked_value(key, state[key], *expected[key]) for key in expected}
    training_backend.set_global_random_states({key.removeprefix(_RANDOM): values.pop(key) for key in random_arrays})
    for key, variable in variables.items():
        variable.assign(values[key])
    if others:
        what = f"with {others}" if others[0] in state else f"without {others}"
        warnings.warn(
            f"Expected the random generators of the devices that torch has here. Received: a state {what}, of a "
            "machine with other devices. All else is as it was there; layers that draw random numbers draw others from "
            "now on. Go on on such a machine for the same ones.",
            stacklevel=2,
        )


def _generators_of_one_machine(here, state) -> list:
    """Returns the keys of torch's generators that only one of two machines has: of a GPU. Both are named arrays."""
    if f"{_RANDOM}cpu" not in here or f"{_RANDOM}cpu" not in state:
        # Of another backend, which has no such generators.
        return []
    of_gpu = f"{_RANDOM}cuda"
    return [of_gpu] if (of_gpu in here) != (of_gpu in state) else []


def bytes_of_training(model, optimizer=None, stored=None) -> dict:
    """Returns what training holds beside the activations, in bytes by dtype: weights, slots and gradients.

    Args:
        model: A built `keras.Model`.
        optimizer: The optimizer that trains it. Of one that is not built the slots are not known: then there is no
            `"slots"`.
        stored: `{id(variable): dtype}` of those variables that are to be counted in another dtype than they have.

    Returns:
        `{"weights": {dtype: bytes}, "slots": ..., "gradients": ...}`. A gradient has the dtype of its weight.
    """
    # Without the states of random generators.
    groups = {"weights": model.weights, "gradients": model.trainable_variables}
    if optimizer is not None and optimizer.built:
        groups["slots"] = [v for v in getattr(optimizer, "inner_optimizer", optimizer).variables if len(v.shape) > 0]
    names = [name for name in ("weights", "slots", "gradients") if name in groups]
    return {name: _bytes_by_dtype(groups[name], stored or {}) for name in names}


def _bytes_by_dtype(variables, stored: dict) -> dict:
    sums: dict = {}
    for variable in variables:
        dtype = stored.get(id(variable)) or keras.backend.standardize_dtype(variable.dtype)
        if dtype == "string" or variable.shape is None:
            # Its size is not known, or it comes into being with the first batch.
            continue
        sums[dtype] = sums.get(dtype, 0) + bytes_of(variable.shape, dtype)
    return sums


def named_variables(model, optimizers=None, extra=()) -> dict:
    """Returns the variables of `state_dict` by key, in an order that depends on the model alone."""
    check_model(model)
    extra = _listed("extra", extra, keras.Variable)
    if optimizers is not None:
        optimizers = _listed("optimizers", optimizers, keras.optimizers.Optimizer)
    if not model.built:
        raise ValueError(
            f"Expected a built model. Received: model '{model.name}', some of whose variables do not exist yet. "
            "Call it on a batch of data first."
        )
    if optimizers is None:
        optimizers = find_optimizers(model).values()
    if keras.backend.backend() == "jax":
        # In the middle of `fit` the values are those of the last synchronization.
        model.jax_state_sync()
    # `model.variables`, whose order does not depend on which layers are frozen.
    groups = {"model": model.variables, "metrics": model.metrics_variables}
    for i, optimizer in enumerate(optimizers):
        _build(optimizer, model)
        # Notes of a step on itself are of that step alone.
        of_step = {id(variable) for variable in getattr(optimizer, "step_outcome", ())}
        variables = getattr(optimizer, "variables_as_stored", optimizer.variables)
        groups[f"optimizers/{i}"] = [variable for variable in variables if id(variable) not in of_step]
    groups["states"] = [*unlisted_states(model), *states_of_helpers(model)]
    groups["native"] = training_backend.native_states(model)
    groups["extra"] = extra
    return {
        f"{group}/{i}/{_AUTO_NUMBER.sub('', variable.name)}": variable
        for group, variables in groups.items()
        for i, variable in enumerate(variables)
    }


def _listed(name: str, objects, kind) -> list:
    """Returns `objects` as a list, each of `kind`, a class; raises `TypeError` where they are none."""
    listed = list(objects) if isinstance(objects, Iterable) else [None]
    if all(isinstance(thing, kind) for thing in listed):
        return listed
    remedy = f"Pass them in a list, one alone, too: `{name}=[...]`." if isinstance(objects, kind) else "Leave it out."
    raise TypeError(
        f"Expected `{name}` to be a list of objects of type {kind.__name__}. Received: {name}={objects!r}. {remedy}"
    )


def _build(optimizer, model):
    if optimizer.built:
        return
    is_own = optimizer is getattr(model, "optimizer", None)
    if not is_own:
        raise ValueError(
            f"Expected built optimizers. Received: '{optimizer.name}', which is not built and not "
            "`model.optimizer`. Call `optimizer.build(variables)` with the variables that it trains."
        )
    with training_backend.variable_scope(model):
        optimizer.build(model.trainable_variables)


def _random_arrays() -> dict:
    return {_RANDOM + name: array for name, array in training_backend.global_random_states().items()}


def _checked_value(key: str, value, shape: tuple, dtype: str):
    """Returns `value` as an array of that shape and dtype; raises `ValueError` where it is of another."""
    value = np.asarray(value)
    # NumPy knows bfloat16 only through ml_dtypes: `numpy.load` gives the same bytes without a type.
    if dtype == "bfloat16" and value.dtype == np.dtype("V2"):
        value = value.view(ml_dtypes.bfloat16)
    if dtype == "int32" and value.dtype.name == "bool":
        # Flags, as earlier versions stored them.
        value = value.astype(dtype)
    if value.shape != shape or value.dtype.name != dtype:
        raise ValueError(
            f"Expected shape {shape} and dtype {dtype} for '{key}'. Received: shape {value.shape} and dtype "
            f"{value.dtype}. Load it into the model that it was taken of."
        )
    return value


def _some(keys) -> str:
    return f"{len(keys)} keys {keys[:3]}" if keys else "keys: none"
