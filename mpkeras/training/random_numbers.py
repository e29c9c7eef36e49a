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
