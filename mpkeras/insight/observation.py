"""`observe`: records what every layer reads and returns in one forward and backward pass; the model stays as it was."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.plan import layers_of
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.rules import is_quantized
from mpkeras.training import training_backend

# They call the layer in them step by step, in loops of the backend: what that returns is no output of its own, and
# nothing can be carried out of there.
STEPPING = (keras.layers.RNN, keras.layers.TimeDistributed)


@dataclasses.dataclass
class LayerCall:
    """One call of one layer: the tensors as NumPy arrays of their own dtype, gradients like them or `None`."""

    layer: keras.layers.Layer
    number: int  # 0 for the first call of this layer
    compute_dtype: str
    start: int
    end: int = 0
    inputs: list = dataclasses.field(default_factory=list)
    outputs: list = dataclasses.field(default_factory=list)
    # The outputs of the same layer for the same inputs in float32, where it was asked for.
    references: list = dataclasses.field(default_factory=list)
    input_grads: list = dataclasses.field(default_factory=list)
    output_grads: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Observation:
    """One pass through a model.

    Attributes:
        calls: List of `LayerCall`s in the order in which they ended.
        loss: The loss, not scaled, as a float; `None` without labels.
        variable_grads: List of `(variable, gradient)`, of the trainable variables.
    """

    calls: list
    loss: float | None
    variable_grads: list


def observe(
    model,
    x,
    y=None,
    sample_weight=None,
    *,
    loss_scale: float = 1.0,
    references: bool = False,
    rounded=None,
    loss_of=None,
) -> Observation:
    """Runs `model` forward, as in training, and backward where there are labels, and returns what it saw.

    Weights, statistics, random generators and metrics are as before afterwards. With `references` each 16-bit layer is
    also run in float32, on the same inputs. `rounded(layer, tensor)` takes the place of each tensor that a layer reads
    or returns, `loss_of(y, y_pred, sample_weight)` of the loss that the model was compiled with.
    """
    backend = importlib.import_module(f"mpkeras.insight._{keras.backend.backend()}")
    calls: list = []
    taps: list = []

    def observed_call(tap_input, tap_output, found):
        clock = itertools.count()
        paused: list = []
        found = found if references else None

        def of_layer(layer):
            tap_in, tap_out = _taps(layer, tap_input, tap_output, rounded)
            return _observed_call(layer, calls, taps, tap_in, tap_out, found, clock, paused)

        return of_layer

    def run(tap_input, tap_output):
        calls.clear()
        taps.clear()
        found: dict = {"references": {}}
        with replaced_calls(observed_layers(model), observed_call(tap_input, tap_output, found["references"])):
            training = {"training": True} if "training" in inspect.signature(model.call).parameters else {}
            y_pred = model(x, **training)
            found["taps"] = list(taps)
            if y is None:
                return None, found
            if loss_of is not None:
                loss = loss_of(y, y_pred, sample_weight)
            else:
                loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
        found["loss"] = ops.cast(loss, "float32")
        return found["loss"] * loss_scale, found

    # Put back after each pass, so that the next one draws the same numbers.
    random_states = training_backend.global_random_states()
    try:
        found, tap_grads, variable_grads = backend.run_with_gradients(run, model.trainable_variables)
    finally:
        training_backend.set_global_random_states(random_states)
    _fill(calls, found, tap_grads)
    loss = None if y is None else float(ops.convert_to_numpy(found["loss"]))
    grads = [
        (v, None if g is None else _array(g)) for v, g in zip(model.trainable_variables, variable_grads, strict=True)
    ]
    return Observation(sorted(calls, key=lambda call: call.end), loss, grads)


def _taps(layer, tap_input, tap_output, rounded) -> tuple:
    """Returns the two taps of a layer; `rounded` acts on the side from which the gradient comes."""
    if rounded is None:
        return tap_input, tap_output
    return lambda tensor: rounded(layer, tap_input(tensor)), lambda tensor: rounded(layer, tap_output(tensor))


def observed_layers(model) -> list:
    """Returns the layers that are looked at: all but the models around them and what runs in loops."""
    hidden = {
        id(inner) for layer in layers_of(model) if isinstance(layer, STEPPING) for inner in _keras.flatten_layers(layer)
    }
    skipped = (keras.layers.InputLayer, keras.Model)
    return [layer for layer in layers_of(model) if id(layer) not in hidden and not isinstance(layer, skipped)]


def _fill(calls, found, tap_grads):
    """Replaces the numbers of the taps in `calls` by arrays."""
    for call in calls:
        call.input_grads = [_array(tap_grads[i]) for i in call.inputs]
        call.output_grads = [_array(tap_grads[i]) for i in call.outputs]
        call.references = [_array(found["references"].get(i)) for i in call.outputs]
        call.inputs = [_array(found["taps"][i]) for i in call.inputs]
        call.outputs = [_array(found["taps"][i]) for i in call.outputs]


def _array(tensor):
    return None if tensor is None else np.asarray(ops.convert_to_numpy(tensor))


def _observed_call(layer, calls, taps, tap_input, tap_output, references, clock, paused):
    call = call_of(layer)
    numbers = itertools.count()

    def tapped(value, tap, numbers_of_taps):
        if tensor_dtype(value) not in FLOAT_DTYPES:
            return value
        tensor = tap(value)
        _keras.copy_mask(value, tensor)
        numbers_of_taps.append(len(taps))
        taps.append(tensor)
        return tensor

    @functools.wraps(call)
    def observed(*args, **kwargs):
        if paused:
            return call(*args, **kwargs)
        compute_dtype = layer.compute_dtype
        record = LayerCall(layer, next(numbers), compute_dtype, next(clock))
        args, kwargs = keras.tree.map_structure(lambda v: tapped(v, tap_input, record.inputs), (args, kwargs))
        outputs = call(*args, **kwargs)
        reference = None
        if references is not None and compute_dtype in SIXTEEN_BIT_DTYPES:
            paused.append(True)
            reference = _in_float32(layer, args, kwargs)
            paused.clear()
        outputs = keras.tree.map_structure(lambda v: tapped(v, tap_output, record.outputs), outputs)
        if reference is not None:
            floats = [value for value in keras.tree.flatten(reference) if tensor_dtype(value) in FLOAT_DTYPES]
            references.update(zip(record.outputs, floats, strict=False))
        record.end = next(clock)
        calls.append(record)
        return outputs

    return observed


def _in_float32(layer, args, kwargs):
    """Returns the outputs of `layer` for the same inputs in float32; `None` where they cannot be compared."""
    layers = _keras.flatten_layers(layer, include_self=True)
    draws = any(_keras.own_seed_generators(inner) for inner in layers)
    if any(map(is_quantized, layers)):
        return None  # There are no other kernels.
    if draws or any(isinstance(inner.dtype_policy, keras.dtype_policies.DTypePolicyMap) for inner in layers):
        return None

    def wide(value):
        return ops.stop_gradient(ops.cast(value, "float32")) if tensor_dtype(value) in FLOAT_DTYPES else value

    before = [(inner, inner.dtype_policy) for inner in layers if inner.compute_dtype in SIXTEEN_BIT_DTYPES]
    try:
        for inner, _ in before:
            inner.dtype_policy = keras.DTypePolicy("float32")
        with _keras.autocast_scope("float32"):
            args, kwargs = keras.tree.map_structure(wide, (args, kwargs))
            # The class's own: on the instance it may multiply in 16 bits.
            return type(layer).call(layer, *args, **kwargs)
    except Exception:  # A layer of the user's that cannot do float32 has no reference.
        return None
    finally:
        for inner, policy in before:
            inner.dtype_policy = policy


@contextlib.contextmanager
def replaced_calls(layers, replacement):
    """Replaces each layer's `call` by `replacement(layer)`, which gets the old one by `call_of`; then puts it back."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, _name_of_call(layer), replacement(layer), kind="observed"))
        yield


def call_of(layer):
    """Returns the method by which `layer` computes: a quantized one has another than `call`."""
    return getattr(layer, _name_of_call(layer))


def _name_of_call(layer) -> str:
    return "call" if layer.quantization_mode is None else "quantized_call"
