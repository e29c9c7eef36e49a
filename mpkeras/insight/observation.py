"""What every layer reads and returns in one forward and backward pass, and where inf or NaN begins in it."""

import contextlib
import dataclasses
import functools
import importlib
import inspect

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.plan import layers_of
from mpkeras.insight.ranges import all_finite, max_abs
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.rules import is_quantized
from mpkeras.training import training_backend

# They call the layer in them in loops of the backend, out of which nothing can be carried.
STEPPING = (keras.layers.RNN, keras.layers.TimeDistributed)


@dataclasses.dataclass
class LayerCall:
    """One call of one layer: the tensors as NumPy arrays of their own dtype, gradients like them or `None`.

    While the pass runs `inputs` and `outputs` are the numbers of the tensors.
    """

    layer: keras.layers.Layer
    path: str
    number: int  # 0 for the first call of this layer
    start: int  # 0 for the call that began first
    compute_dtype: str
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

    @property
    def gradients_are_finite(self) -> bool:
        grads = [grad for _, grad in self.variable_grads]
        for call in self.calls:
            grads += [*call.input_grads, *call.output_grads]
        return all_finite(grads)


def observe(
    model,
    x,
    y,
    sample_weight,
    *,
    loss_scale: float = 1.0,
    references: bool = False,
    rounded=None,
    loss_of=None,
    paths: dict,
) -> Observation:
    """Runs `model` forward, as in training, and backward where there are labels, and returns what it saw.

    Weights, statistics, random generators and metrics are as before afterwards.

    Args:
        model, x, y, sample_weight: The model and a batch; `y` may be `None`.
        loss_scale: The factor on the loss.
        references: Whether each 16-bit layer is also run in float32, on the same inputs.
        rounded: `rounded(layer, tensor)` takes the place of each tensor that a layer reads or returns.
        loss_of: `loss_of(y, y_pred, sample_weight)` takes the place of the loss that the model was compiled with.
        paths: By the path that a layer has now, the one that it is called by.
    """
    backend = importlib.import_module(f"mpkeras.insight._{keras.backend.backend()}")
    training = {"training": True} if "training" in inspect.signature(model.call).parameters else {}
    calls: list[LayerCall] = []

    def run(tap_input, tap_output):
        nonlocal calls
        this = _Pass(tap_input, tap_output, rounded, references, paths)
        # JAX runs it twice, first for the shapes.
        calls = this.calls
        found: dict = {"tensors": this.tensors, "references": this.references}
        with replaced_calls(observed_layers(model), this.observed):
            y_pred = model(x, **training)
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
        found, grads, variable_grads = backend.run_with_gradients(run, model.trainable_variables)
    finally:
        training_backend.set_global_random_states(random_states)
    for call in calls:
        call.input_grads = [_array(grads[i]) for i in call.inputs]
        call.output_grads = [_array(grads[i]) for i in call.outputs]
        call.references = [_array(found["references"].get(i)) for i in call.outputs]
        call.inputs = [_array(found["tensors"][i]) for i in call.inputs]
        call.outputs = [_array(found["tensors"][i]) for i in call.outputs]
    loss = None if y is None else float(ops.convert_to_numpy(found["loss"]))
    return Observation(calls, loss, list(zip(model.trainable_variables, map(_array, variable_grads), strict=True)))


def observed_layers(model) -> list:
    """Returns the layers that are looked at: all but the models around them and what runs in loops."""
    hidden = {
        id(inner) for layer in layers_of(model) if isinstance(layer, STEPPING) for inner in _keras.flatten_layers(layer)
    }
    skipped = (keras.layers.InputLayer, keras.Model)
    return [layer for layer in layers_of(model) if id(layer) not in hidden and not isinstance(layer, skipped)]


def _array(tensor):
    return None if tensor is None else np.asarray(ops.convert_to_numpy(tensor))


class _Pass:
    """The calls of one pass while it runs, and the tensors that the layers read and return, in their order."""

    def __init__(self, tap_input, tap_output, rounded, has_references, paths):
        self.calls: list[LayerCall] = []
        self.tensors: list = []
        # By the number of the output.
        self.references: dict = {}
        self._tap_input, self._tap_output = tap_input, tap_output
        self._rounded = rounded
        self._has_references = has_references
        self._paths = paths
        # The `id` of the layer of each call, in the order in which they began.
        self._started: list[int] = []
        self._is_paused = False

    def observed(self, layer):
        """Returns what takes the place of the `call` of `layer`."""
        call, path = call_of(layer), layer.path or layer.name

        @functools.wraps(call)
        def observed(*args, **kwargs):
            if self._is_paused:
                return call(*args, **kwargs)
            number, start = self._started.count(id(layer)), len(self._started)
            self._started.append(id(layer))
            record = LayerCall(layer, self._paths.get(path, path), number, start, layer.compute_dtype)
            args, kwargs = self._tapped(layer, (args, kwargs), self._tap_input, record.inputs)
            outputs = call(*args, **kwargs)
            reference = self._reference(layer, args, kwargs)
            outputs = self._tapped(layer, outputs, self._tap_output, record.outputs)
            self.references.update(zip(record.outputs, reference, strict=False))
            self.calls.append(record)
            return outputs

        return observed

    def _tapped(self, layer, structure, tap, numbers):
        """Returns `structure` with the tensors to go on with, and adds their numbers to `numbers`."""

        def tapped(value):
            if tensor_dtype(value) not in FLOAT_DTYPES:
                return value
            tensor = tap(value)
            if self._rounded is not None:
                tensor = self._rounded(layer, tensor)
            _keras.copy_mask(value, tensor)
            numbers.append(len(self.tensors))
            self.tensors.append(tensor)
            return tensor

        return keras.tree.map_structure(tapped, structure)

    def _reference(self, layer, args, kwargs) -> list:
        """Returns the float outputs of `layer` for the same inputs in float32, where it is a 16-bit one."""
        if not self._has_references or layer.compute_dtype not in SIXTEEN_BIT_DTYPES:
            return []
        self._is_paused = True
        outputs = _in_float32(layer, args, kwargs)
        self._is_paused = False
        return [value for value in keras.tree.flatten(outputs) if tensor_dtype(value) in FLOAT_DTYPES]


def _in_float32(layer, args, kwargs):
    """Returns the outputs of `layer` for the same inputs in float32; `None` where they cannot be compared."""
    layers = _keras.flatten_layers(layer, include_self=True)
    # Of a quantized one there are no other kernels; others would draw other numbers.
    if any(map(is_quantized, layers)) or any(map(_keras.own_seed_generators, layers)):
        return None
    if any(isinstance(inner.dtype_policy, keras.dtype_policies.DTypePolicyMap) for inner in layers):
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


@dataclasses.dataclass(frozen=True)
class Culprit:
    """Where inf or NaN began.

    Attributes:
        side: `"input"` (the layer was given inf or NaN, or more than its dtype holds), `"weight"`, `"output"`, `"loss"`
            or `"gradient"`.
        path: `layer.path` of the layer; `None` for the data and the loss.
        message: A sentence with the numbers.
    """

    side: str
    path: str | None
    message: str


def find_culprit(observed, reference, loss_scale: float) -> Culprit | None:
    """Returns where inf or NaN began in an `Observation`; `None` where all is finite."""
    return _forward(observed, reference) or _loss(observed) or _backward(observed, loss_scale)


def _forward(observed, reference):
    for call, twin in zip(observed.calls, reference.calls, strict=True):
        if all_finite(call.outputs):
            continue
        path = call.path
        bad = [variable for variable in call.layer.weights if not all_finite([_array(variable.value)])]
        if bad:
            # A layer of the capsule's own model may have another path than it had.
            weight = bad[0].path.replace(call.layer.path or path, path, 1)
            return Culprit("weight", path, f"the weight '{weight}' holds values that are not finite")
        if all_finite(call.inputs):
            return Culprit("output", path, f"the output of layer '{path}' is not finite: {_reached(call)}")
        # No layer before this one is to blame.
        if all_finite(twin.inputs):
            what = f"layer '{path}' is given up to {max_abs(twin.inputs):.3g}, more than {call.compute_dtype} holds"
            return Culprit("input", path, what)
        return Culprit("input", path, f"layer '{path}' was given values that are not finite: look into the data")
    return None


def _loss(observed):
    if observed.loss is None or np.isfinite(observed.loss):
        return None
    return Culprit("loss", None, f"all layers are finite, the loss is {observed.loss}: look at the loss and the labels")


def _backward(observed, loss_scale):
    grads = {id(variable): grad for variable, grad in observed.variable_grads}
    # Latest first, and of a layer and those inside it the inner one first.
    for call in sorted(observed.calls, key=lambda call: call.start, reverse=True):
        own = [grads[id(v)] for v in call.layer.trainable_variables if id(v) in grads]
        if all_finite(call.output_grads) and not all_finite([*call.input_grads, *own]):
            what = (
                f"the gradient of layer '{call.path}' by its {'weights' if all_finite(call.input_grads) else 'input'} "
                f"is not finite at a loss scale of {loss_scale:g}, while that of its output is (up to "
                f"{max_abs(call.output_grads):.3g})"
            )
            return Culprit("gradient", call.path, what)
    for call in reversed(observed.calls):
        if not all_finite(call.output_grads):
            origin = "the loss" if call is observed.calls[-1] else "what is behind it"
            what = (
                f"the gradient of the output of layer '{call.path}' is not finite at a loss scale of {loss_scale:g}: "
                f"{origin} sends back more than {call.outputs[0].dtype} holds"
            )
            return Culprit("gradient", call.path, what)
    return None


def _reached(call) -> str:
    """Returns a clause with the largest output in float32, or with the largest input where that is not known."""
    true = [reference for reference in call.references if reference is not None]
    if true:
        return f"in float32 it reaches {max_abs(true):.3g}"
    return f"from finite inputs up to {max_abs(call.inputs):.3g}"
