"""One run of a model, as in inference, of which nothing shows afterwards."""

import contextlib
import inspect

import keras
import numpy as np

from mpkeras import _keras
from mpkeras.conversion.outputs import let_heads_tell
from mpkeras.conversion.plan import layers_of
from mpkeras.training import training_backend


def run_unseen(model, x, observers):
    """Runs a built model once, as in inference.

    State and losses that the run would write are dropped, random generators and tensors that layers keep are put back.

    Args:
        model: A built `keras.Model`.
        x: The arguments of the model; arrays become tensors.
        observers: Context managers that are in force around the run.
    """
    options = {"training": False} if "training" in inspect.signature(model.call).parameters else {}
    random_states = training_backend.global_random_states()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(native_states_put_back(model))
            stack.enter_context(keras.StatelessScope())
            stack.enter_context(_keras.kept_losses(layers_of(model)))
            stack.enter_context(_keras.tensors_put_back([model, *layers_of(model)]))
            tensors = keras.tree.map_structure(_as_tensor, x)
            # Before they are observed: which layers make the outputs is found out by runs of symbols, and only once.
            with contextlib.suppress(Exception):  # The run says if something is wrong with it.
                let_heads_tell(model, tensors)
            for observer in observers:
                stack.enter_context(observer)
            model(tensors, **options)
    finally:
        training_backend.set_global_random_states(random_states)


@contextlib.contextmanager
def native_states_put_back(model):
    """Context manager: what the layers of `model` hold beside Keras' variables, as buffers of torch, is put back."""
    natives = [
        (state, np.array(keras.ops.convert_to_numpy(state.value))) for state in training_backend.native_states(model)
    ]
    try:
        yield
    finally:
        for state, value in natives:
            state.assign(value)


def _as_tensor(value):
    return keras.ops.convert_to_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value
