"""One run of a model, as in inference, of which nothing shows afterwards."""

import contextlib
import inspect
import warnings
from collections.abc import Callable, Sequence

import keras
import numpy as np

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.outputs import let_heads_tell
from mpkeras.conversion.plan import layers_of
from mpkeras.training import training_backend

# So many rows of a batch are enough to tell. All looks take as many: JAX compiles each operation for each shape.
ROWS = 16


def run_on_few_rows(model, x, observe: Callable, needed: Sequence[int] = ()):
    """Runs a model as `run_unseen` does, on a few rows of a batch, or on all where it does not run on fewer.

    Args:
        model, x: As in `run_unseen`.
        observe: Function that returns a new object, whose `observers()` are context managers to be in force.
        needed: The numbers of rows that are to be among them.

    Returns:
        What `observe` returned for the last run. An error in it comes again in the step, where nothing of ours is.
    """
    for choose_rows in (_few_rows, lambda *_: x):
        observation = observe()
        with contextlib.suppress(Exception):
            run_unseen(model, choose_rows(model, x, needed), observation.observers())
            break
    return observation


def _few_rows(model, x, needed):
    """Returns the rows `needed` and others from all over a batch, or all where not every part has as many."""
    sizes = {leaf.shape[0] if getattr(leaf, "shape", ()) else None for leaf in keras.tree.flatten(x)}
    graph = _keras.graph_of(model)
    inputs = () if graph is None else keras.tree.flatten(_keras.input_structure(graph))
    size = sizes.pop() if len(sizes) == 1 else None
    if size is None or size <= ROWS or any(tensor.shape[0] is not None for tensor in inputs):
        return x
    others = np.setdiff1d(np.arange(size), needed)
    spread = np.linspace(0, len(others) - 1, max(ROWS - len(needed), 0)).astype(int)
    rows = np.sort([*needed, *others[spread]]).astype(int)

    def chosen(leaf):
        return keras.ops.take(leaf, rows, axis=0) if keras.ops.is_tensor(leaf) else leaf[rows]

    return keras.tree.map_structure(chosen, x)


def run_unseen(model, x, observers):
    """Runs a built model once, as in inference.

    State and losses that the run would write are dropped, random generators and tensors that layers keep are put back.

    Args:
        model: A `keras.Model`, with layers that are built but for those that its call does not reach.
        x: The arguments of the model; arrays become tensors.
        observers: Context managers that are in force around the run.
    """
    options = {"training": False} if "training" in inspect.signature(model.call).parameters else {}
    random_states = training_backend.global_random_states()
    layers = layers_of(model)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(native_states_put_back(model))
            stack.enter_context(keras.StatelessScope())
            stack.enter_context(_keras.kept_losses(layers))
            stack.enter_context(_keras.tensors_put_back(layers))
            for layer in layers:
                if not layer.built:
                    stack.enter_context(replaced(layer, "build", _refuse, kind="observed"))
            tensors = keras.tree.map_structure(_as_tensor, x)
            # Before they are observed: which layers make the outputs is found out by runs of symbols, and only once.
            with contextlib.suppress(Exception):  # The run says if something is wrong with it.
                let_heads_tell(model, tensors)
            for observer in observers:
                stack.enter_context(observer)
            # Of data that are no arguments of the `call`, for a step of the user's own, Keras warns before it raises.
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", module=r"keras\.")
            model(tensors, **options)
    finally:
        training_backend.set_global_random_states(random_states)


@contextlib.contextmanager
def native_states_put_back(model):
    """Context manager: what the layers of `model` hold beside Keras' variables, as buffers of torch, is put back."""
    kept = [(state, state.set_apart()) for state in training_backend.native_states(model)]
    try:
        yield
    finally:
        for state, value in kept:
            state.hold(value)


def _refuse(*args, **kwargs):
    raise ValueError("Expected a run that reaches no layer for the first time: nothing shows of it afterwards.")


def _as_tensor(value):
    return keras.ops.convert_to_tensor(value) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value
