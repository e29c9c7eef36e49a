"""Random generators that are put back: what is drawn in between is drawn again."""

import contextlib
import random

import keras
import numpy as np

from mpkeras import _keras
from mpkeras.training import training_backend


@contextlib.contextmanager
def backend_generators_put_back():
    """Context manager: the generators of the backend itself, which Keras draws from on torch, are as before."""
    states = training_backend.global_random_states()
    try:
        yield
    finally:
        training_backend.set_global_random_states(states)


@contextlib.contextmanager
def all_generators_put_back():
    """Context manager: so are those of Python and NumPy, and Keras' global one."""
    states = random.getstate(), np.random.get_state()
    generator = _keras.made_global_seed_generator()
    seed = None if generator is None else np.array(keras.ops.convert_to_numpy(generator.state.value))
    with backend_generators_put_back():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            if generator is not None:
                generator.state.assign(seed)
            _keras.set_global_seed_generator(generator)


@contextlib.contextmanager
def global_generator_at_hand():
    """Context manager: Keras' global generator is there, whose value before the first draw nobody knows afterwards.

    Keras makes it where a random function without a seed first needs it, by a number from Python's generator. Where
    nothing has drawn from it, both are as before; otherwise as after Keras has made it.
    """
    if _keras.made_global_seed_generator() is not None:
        yield
        return
    state = random.getstate()
    # By a name of its own, or Keras would number those that come after it otherwise.
    generator = keras.random.SeedGenerator(name="seed_generator")
    state_when_made = random.getstate()
    random.setstate(state)
    _keras.set_global_seed_generator(generator)
    value = np.array(keras.ops.convert_to_numpy(generator.state.value))
    try:
        yield
    finally:
        if _keras.made_global_seed_generator() is generator:
            if np.array_equal(value, keras.ops.convert_to_numpy(generator.state.value)):
                _keras.set_global_seed_generator(None)
            elif random.getstate() == state:
                random.setstate(state_when_made)
