"""`subject`: what stands for the user's model while steps are measured, so that the model stays as it was."""

import contextlib
import random

import keras
import numpy as np

from mpkeras import _keras
from mpkeras.conversion.apply import recorded
from mpkeras.training.backend import training_backend
from mpkeras.training.state import load_state_dict, state_dict


@contextlib.contextmanager
def subject(model, x):
    """Yields `(model to train, whether it is a copy)`; afterwards `model` is as it was before, bit for bit.

    A copy where Keras can make one: of Functional and Sequential models by `keras.models.clone_model`, of others by
    their `get_config`. Otherwise the model itself, and afterwards all its variables, random generators and dtype
    policies are put back. In both cases so are Python's, NumPy's, torch's and Keras' own random generators: layers
    that are made, and batches that are drawn, take numbers from them.

    Args:
        model: A `keras.Model`. One that is not built and cannot be copied is built on `x`, as `fit` would.
        x: A batch of its inputs.
    """
    with _random_generators_put_back(), training_backend.variable_scope(model):
        copy = _copy(model, x)
        if copy is not None:
            yield copy, True
            return
        if not _keras.is_built(model):
            model(x)
        state = state_dict(model, optimizers=[])
        policies, grads = recorded(model), _torch_grads(model)
        try:
            yield model, False
        finally:
            policies()
            load_state_dict(model, state, optimizers=[])
            for tensor, grad in grads:
                tensor.grad = grad


def _copy(model, x):
    """Returns a model of the same configuration and weights, built; `None` where Keras can make none."""
    try:
        if _keras.graph_of(model) is not None or isinstance(model, keras.Sequential):
            copy = keras.models.clone_model(model)
        else:
            copy = type(model).from_config(model.get_config())
        if not _keras.is_built(copy):
            copy(x)
        if _keras.is_built(model):
            _check_alike(copy, model)
            copy.set_weights(model.get_weights())
            # What `prepare` or `apply_policy` made of the layers is not in every configuration.
            recorded(model, on=copy)()
        return copy
    except Exception:  # What `get_config`, `from_config` and the layers of the user's own raise.
        return None


def _check_alike(copy, model):
    """Raises `ValueError` where the configuration did not say all: other weights, or other layers."""
    if _picture(copy) != _picture(model):
        raise ValueError(f"Expected a copy like '{model.name}'. Received: another one. Measure the model itself.")


def _picture(model) -> tuple:
    weights = [(tuple(weight.shape), weight.dtype, weight.trainable) for weight in model.weights]
    return weights, [type(layer) for layer in _keras.flatten_layers(model)]


def _torch_grads(model) -> list:
    if keras.backend.backend() != "torch":
        return []
    return [(variable.value, variable.value.grad) for variable in model.trainable_variables]


@contextlib.contextmanager
def _random_generators_put_back():
    states = random.getstate(), np.random.get_state(), training_backend.global_random_states()
    generator = _keras.made_global_seed_generator()
    seed = None if generator is None else np.array(keras.ops.convert_to_numpy(generator.state.value))
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        training_backend.set_global_random_states(states[2])
        if generator is not None:
            generator.state.assign(seed)
        _keras.set_global_seed_generator(generator)
