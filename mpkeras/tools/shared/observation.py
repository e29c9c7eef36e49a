"""What every layer reads and returns in one forward and backward pass, and where inf or NaN begins in it."""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools

import keras
import numpy as np
from keras import ops

from mpkeras.seams import ConvertedLayer, ModelView, backend_generators_put_back, copy_mask, dtypes, replaced
from mpkeras.tools.shared.ranges import all_finite, beyond, max_abs, overflow_limit

# They call the layer in them in loops of the backend, out of which nothing can be carried.
STEPPING = (keras.layers.RNN, keras.layers.TimeDistributed)
# Two runs in float32 that differ by more have not computed the same: sums in another order differ by less.
_SAME = 1e-3


@dataclasses.dataclass
class LayerCall:
    """One call of one layer: the tensors as NumPy arrays of their own dtype, gradients like them or `None`.

    While the pass runs `inputs`, `outputs` and `added_losses` are the numbers of the tensors.
    """

    layer: keras.layers.Layer
    path: str
    number: int  # 0 for the first call of this layer
    start: int  # 0 for the call that began first
    compute_dtype: str
    inputs: list = dataclasses.field(default_factory=list)
    outputs: list = dataclasses.field(default_factory=list)
    # What its `call` gave to `add_loss`.
    added_losses: list = dataclasses.field(default_factory=list)
    # The outputs and added losses of the same layer for the same inputs in float32, where they were asked for, and
    # `None` where there are none to compare with.
    references: list = dataclasses.field(default_factory=list)
    added_references: list = dataclasses.field(default_factory=list)
    input_grads: list = dataclasses.field(default_factory=list)
    output_grads: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Observation:
    """One pass through a model.

    Attributes:
        calls: List of `LayerCall`s in the order in which they ended.
        loss: The loss, not scaled, as a float; `None` without labels.
        variable_grads: List of `(variable, gradient)`, of the trainable variables.
        data_is_finite, predictions_are_finite: Whether all numbers are that the model was given, and that it returned.
    """

    calls: list
    loss: float | None
    variable_grads: list
    data_is_finite: bool = True
    predictions_are_finite: bool = True

    @property
    def gradients_are_finite(self) -> bool:
        grads = [grad for _, grad in self.variable_grads]
        for call in self.calls:
            grads += [*call.input_grads, *call.output_grads]
        return all_finite(grads)

    def with_gradients_of_what_moves(self, still: "Observation", moved: "Observation") -> "Observation":
        """Returns this, without the gradients of tensors that no trained weight has a part in: no step computes them.

        They are those in front of all that is trained: of the data, and of a frozen base.

        Args:
            still, moved: Two passes in float32, of which the second had other trainable weights.
        """
        others = {(call.path, call.number): call for call in moved.calls}
        for call, one in zip(self.calls, still.calls, strict=True):
            # With other weights a model may choose to call other layers, as a router does.
            other = others.get((call.path, call.number))
            if other is not None:
                call.input_grads = _of_those_that_differ(call.input_grads, one.inputs, other.inputs)
                call.output_grads = _of_those_that_differ(call.output_grads, one.outputs, other.outputs)
        return self


def _of_those_that_differ(grads, values, others) -> list:
    return [
        None if np.array_equal(value, other, equal_nan=True) else grad
        for grad, value, other in zip(grads, values, others, strict=True)
    ]


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
    moves_weights: bool = False,
    paths: dict,
    training: bool = True,
) -> Observation:
    """Runs `model` forward, as in training, and backward where there are labels, and returns what it saw.

    Weights, statistics, random generators and metrics are as before afterwards, buffers of torch and `tf.Variable`s of
    layers, too.

    Args:
        model, x, y, sample_weight: The model and a batch; `y` may be `None`.
        loss_scale: The factor on the loss.
        references: Whether each 16-bit layer is also run in float32, on the same inputs.
        rounded: `rounded(layer, tensor)` takes the place of each tensor that a layer reads or returns.
        loss_of: `loss_of(y, y_pred, sample_weight)` takes the place of the loss that the model was compiled with.
        moves_weights: Whether the trainable weights are others in this pass: their own and noise.
        paths: By the path that a layer has now, the one that it is called by.
        training: Whether the layers are run as in training; otherwise as in `evaluate` and `predict`.
    """
    backend = importlib.import_module(f"mpkeras.tools.shared._{keras.backend.backend()}")
    options = {"training": training} if "training" in inspect.signature(model.call).parameters else {}
    calls: list[LayerCall] = []

    def run(tap_input, tap_output):
        nonlocal calls
        this = _Pass(tap_input, tap_output, rounded, references, paths)
        # JAX runs it twice, first for the shapes.
        calls = this.calls
        observed: dict = {"tensors": this.tensors, "references": this.references, "again": this.references_again}
        with replaced_calls(observed_layers(model), this.observed):
            y_pred = model(x, **options)
            observed["predictions"] = _floats(y_pred)
            if y is None:
                return None, observed
            if loss_of is not None:
                loss = loss_of(y, y_pred, sample_weight)
            else:
                loss = model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
        observed["loss"] = ops.cast(loss, "float32")
        return observed["loss"] * loss_scale, observed

    values = [ops.convert_to_tensor(variable.value) for variable in model.trainable_variables]
    if moves_weights:
        noise = np.random.default_rng(0)
        values = [value + ops.cast(noise.standard_normal(tuple(value.shape)), value.dtype) for value in values]
    # Put back after each pass, so that the next one draws the same numbers.
    view = ModelView(model)
    with (
        backend_generators_put_back(),
        view.native_states_put_back(),
        view.seen_through(),
        _new_metrics_begin_anew(model),
    ):
        observed, grads, variable_grads = backend.run_with_gradients(run, model.trainable_variables, values)
    for call in calls:
        call.input_grads = [_array(grads[i]) for i in call.inputs]
        call.output_grads = [_array(grads[i]) for i in call.outputs]
        call.references = [_comparable_reference(observed, i) for i in call.outputs]
        call.added_references = [_comparable_reference(observed, i) for i in call.added_losses]
        call.inputs = [_array(observed["tensors"][i]) for i in call.inputs]
        call.outputs = [_array(observed["tensors"][i]) for i in call.outputs]
        call.added_losses = [_array(observed["tensors"][i]) for i in call.added_losses]
    loss = None if y is None else float(ops.convert_to_numpy(observed["loss"]))
    variable_grads = list(zip(model.trainable_variables, map(_array, variable_grads), strict=True))
    inputs = [_as_given(value) for value in keras.tree.flatten(x) if hasattr(value, "shape")]
    predictions = [_array(value) for value in observed["predictions"]]
    return Observation(calls, loss, variable_grads, all_finite(inputs), all_finite(predictions))


@contextlib.contextmanager
def _new_metrics_begin_anew(model):
    """Context manager: metrics that come into being in it hold what they begin with afterwards.

    The loss of a model with several outputs makes one for each of them when it is first computed. On
    JAX, where a pass is traced, these hold no numbers.
    """
    known = set(map(id, model.metrics))
    try:
        yield
    finally:
        for metric in model.metrics:
            if id(metric) not in known:
                metric.reset_state()


def observed_layers(model) -> list:
    """Returns the layers that are looked at: all but the models around them and what runs in loops."""
    hidden = {
        id(inner)
        for layer in ModelView(model).layers
        if isinstance(layer, STEPPING)
        for inner in ConvertedLayer(layer).inner
    }
    skipped = (keras.layers.InputLayer, keras.Model)
    return [layer for layer in ModelView(model).layers if id(layer) not in hidden and not isinstance(layer, skipped)]


def _as_given(value):
    """Returns data as Keras takes it: float64 as float32."""
    array = _array(value)
    with np.errstate(over="ignore"):
        return array.astype("float32") if array.dtype == np.float64 else array


def _comparable_reference(observed: dict, number: int):
    """Returns the reference of an output; `None` where a second run in float32 has made other numbers of the same."""
    first, again = (_array(observed[name].get(number)) for name in ("references", "again"))
    if again is None or np.allclose(first, again, rtol=_SAME, atol=_SAME * max_abs([first]), equal_nan=True):
        return first
    return None


def _array(tensor):
    if tensor is None:
        return None
    if getattr(tensor, "shape", None) == ():
        # TensorFlow makes no array of a scalar in bfloat16.
        return np.asarray(ops.convert_to_numpy(ops.reshape(tensor, (1,))))[0]
    return np.asarray(ops.convert_to_numpy(tensor))


class _Pass:
    """The calls of one pass while it runs, and the tensors that the layers read and return, in their order."""

    def __init__(self, tap_input, tap_output, rounded, has_references, paths):
        self.calls: list[LayerCall] = []
        self.tensors: list = []
        # By the number of the output. Those of a second run are for layers that may draw numbers where Keras does not
        # know of it.
        self.references: dict = {}
        self.references_again: dict = {}
        self._tap_input, self._tap_output = tap_input, tap_output
        self._rounded = rounded
        self._has_references = has_references
        self._paths = paths
        # The `id` of the layer of each call, in the order in which they began.
        self._started: list[int] = []
        self._is_paused = False

    def observed(self, layer):
        """Returns what takes the place of the `call` of `layer`."""
        call, path = call_of(layer), ConvertedLayer(layer).path

        @functools.wraps(call)
        def observed(*args, **kwargs):
            # A layer around may be tried on symbols in this run, which have no numbers.
            if self._is_paused or ConvertedLayer(layer).is_tried_on_symbols:
                return call(*args, **kwargs)
            number, start = self._started.count(id(layer)), len(self._started)
            self._started.append(id(layer))
            record = LayerCall(layer, self._paths.get(path, path), number, start, layer.compute_dtype)
            args, kwargs = self._tapped(layer, (args, kwargs), self._tap_input, record.inputs)
            # First: attention takes the masks off what it is given.
            reference = self._reference(layer, args, kwargs)
            again = self._reference(layer, args, kwargs) if reference and _has_arithmetic_of_users(layer) else []
            tapped = functools.partial(self._tapped, layer, tap=self._tap_output, numbers=record.added_losses)
            with ConvertedLayer(layer).added_losses_through(tapped):
                outputs = call(*args, **kwargs)
            outputs = self._tapped(layer, outputs, self._tap_output, record.outputs)
            compared = [*record.outputs, *record.added_losses]
            self.references.update(zip(compared, reference, strict=False))
            self.references_again.update(zip(compared, again, strict=False))
            self.calls.append(record)
            return outputs

        return observed

    def _tapped(self, layer, structure, tap, numbers):
        """Returns `structure` with the tensors to go on with, and adds their numbers to `numbers`."""

        def tapped(value):
            if dtypes.tensor_dtype(value) not in dtypes.FLOAT_DTYPES:
                return value
            tensor = tap(value)
            if self._rounded is not None:
                tensor = self._rounded(layer, tensor)
            copy_mask(value, tensor)
            numbers.append(len(self.tensors))
            self.tensors.append(tensor)
            return tensor

        return keras.tree.map_structure(tapped, structure)

    def _reference(self, layer, args, kwargs) -> list:
        """Returns the float outputs and added losses of `layer` for the same inputs in float32, if it is a 16-bit one.

        Only where they are asked for.
        """
        if not self._has_references or layer.compute_dtype not in dtypes.SIXTEEN_BIT_DTYPES:
            return []
        self._is_paused = True
        with ModelView(layer).native_states_put_back(), ConvertedLayer(layer).noting_added_losses() as added:
            outputs = ConvertedLayer(layer).outputs_in_float32(args, kwargs)
        self._is_paused = False
        return [] if outputs is None else [*_floats(outputs), *_floats(added)]


def _floats(structure) -> list:
    return [value for value in keras.tree.flatten(structure) if dtypes.tensor_dtype(value) in dtypes.FLOAT_DTYPES]


def _has_arithmetic_of_users(layer) -> bool:
    return any(ConvertedLayer(inner).has_own_call for inner in (layer, *ConvertedLayer(layer).inner))


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
        path: `layer.path` of the layer; `None` for the loss, unless a layer adds it, and for operations outside of all
            layers.
        message: A sentence with the numbers.
        float32_cures: Whether float32 makes it finite: not where data or weights are not, or float32 fails as well.
    """

    side: str
    path: str | None
    message: str
    float32_cures: bool = True


def find_culprit(observed, reference, loss_scale: float) -> Culprit | None:
    """Returns where inf or NaN began in an `Observation`; `None` where all is finite.

    Every cause that a message names is one that the numbers of both passes show.

    Args:
        observed, reference: The pass as the model computes, and that in float32 with a loss scale of 1.
        loss_scale: The one of the first pass.
    """
    return (
        _forward(observed, reference)
        or _added_loss(observed)
        or _loss(observed, reference)
        or _backward(observed, reference, loss_scale)
    )


def _forward(observed, reference):
    twins = {id(call): twin for call, twin in zip(observed.calls, reference.calls, strict=True)}
    index = next((i for i, call in enumerate(observed.calls) if not all_finite(call.outputs)), None)
    if index is None:
        return None
    bad = observed.calls[index]
    weight = next((v for v in bad.layer.weights if not all_finite([_array(v.value)])), None)
    if weight is not None:
        # A layer of the capsule's own model may have another path than it had.
        name = weight.path.replace(bad.layer.path or bad.path, bad.path, 1)
        what = f"the weight '{name}' holds values that are not finite"
        return Culprit("weight", bad.path, what, float32_cures=False)
    if all_finite(bad.inputs):
        return _of_output(bad, twins[id(bad)])
    # The calls of layers around it whose inputs are not finite either, and the first around those.
    around = [call for call in observed.calls[index + 1 :] if call.start < bad.start]
    around.sort(key=lambda call: call.start, reverse=True)
    given_bad = list(itertools.takewhile(lambda call: not all_finite(call.inputs), around))
    first = given_bad[-1] if given_bad else bad
    twin = twins[id(first)]
    if all_finite(twin.inputs) and _is_beyond(max_abs(twin.inputs), first.compute_dtype):
        reached = beyond(max_abs(twin.inputs), first.compute_dtype)
        what = f"layer '{first.path}' is given up to {reached}, more than {first.compute_dtype} holds"
        return Culprit("input", first.path, what)
    if len(given_bad) < len(around):
        # Between the layers in it: it was given finite numbers, and gives one of them others.
        return _of_output(around[len(given_bad)], twins[id(around[len(given_bad)])], f"on the way to '{first.path}' ")
    if not observed.data_is_finite:
        what = f"layer '{first.path}' was given values that are not finite: look into the data"
        return Culprit("input", first.path, what, float32_cures=False)
    what = f"an operation outside of all layers, before layer '{first.path}', makes values that are not finite"
    return Culprit("input", None, f"{what}: {_in_float32_too(twin.inputs)}", float32_cures=all_finite(twin.inputs))


def _of_output(call, twin, where: str = "") -> Culprit:
    """Returns the culprit where a layer makes what is not finite of what is: with what float32 makes of the same."""
    true = [reference for reference in call.references if reference is not None] or twin.outputs
    what = f"the output of layer '{call.path}' is not finite" if not where else f"layer '{call.path}' makes values "
    what += f"{where}that are not finite" if where else ""
    is_16_bit = call.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES
    if not is_16_bit or not all_finite(true):
        inputs = f"from finite inputs up to {max_abs(call.inputs):.3g}"
        too = ", in float32 too" if is_16_bit else ""
        return Culprit("output", call.path, f"{what}{too}: {inputs}", float32_cures=False)
    reached = max_abs(true)
    if _is_beyond(reached, call.compute_dtype) and not where:
        return Culprit("output", call.path, f"{what}: in float32 it reaches {beyond(reached, call.compute_dtype)}")
    made = "it" if not where else "its output"
    why = f"in float32 {made} is, and at most {reached:.3g}: what it computes on the way is more than"
    return Culprit("output", call.path, f"{what}: {why} {call.compute_dtype} can tell")


def _is_beyond(reached: float, dtype: str) -> bool:
    return reached >= overflow_limit(dtype)


def _in_float32_too(arrays) -> str:
    return f"in float32 they are at most {max_abs(arrays):.3g}" if all_finite(arrays) else "in float32 too"


def _added_loss(observed):
    call = next((call for call in observed.calls if not all_finite(call.added_losses)), None)
    if call is None:
        return None
    what = f"the loss that layer '{call.path}' adds in {call.compute_dtype} is not finite"
    true = [value for value in call.added_references if value is not None]
    cures = bool(true) and all_finite(true)
    return Culprit("loss", call.path, f"{what}: in float32 it is {max_abs(true):.4g}" if cures else what, cures)


def _loss(observed, reference):
    if observed.loss is None or np.isfinite(observed.loss):
        return None
    cures = reference.loss is not None and bool(np.isfinite(reference.loss))
    if not observed.predictions_are_finite:
        what = "all layers are finite, and what the model returns is not: look at what it does behind the last of them"
    else:
        what = f"all layers are finite, the loss is {observed.loss}: look at the loss and the labels"
    return Culprit("loss", None, what, float32_cures=cures)


def _backward(observed, reference, loss_scale):
    grads = {id(variable): grad for variable, grad in observed.variable_grads}
    true_grads = {id(variable): grad for variable, grad in reference.variable_grads}
    twins = {id(call): twin for call, twin in zip(observed.calls, reference.calls, strict=True)}
    # What several calls read gets one gradient of them all, which is whole where the first of them is through.
    first_read: dict = {}
    for call in observed.calls:
        for variable in call.layer.trainable_variables:
            first_read.setdefault(id(variable), call.start)
    # Latest first, and of a layer and those inside it the inner one first.
    for call in sorted(observed.calls, key=lambda call: call.start, reverse=True):
        trained_here = [
            id(v) for v in call.layer.trainable_variables if id(v) in grads and call.start <= first_read[id(v)]
        ]
        if all_finite(call.output_grads) and not all_finite([*call.input_grads, *(grads[key] for key in trained_here)]):
            what = (
                f"the gradient of layer '{call.path}' by its {'weights' if all_finite(call.input_grads) else 'input'} "
                f"is not finite at a loss scale of {loss_scale:g}, while that of its output is (up to "
                f"{max_abs(call.output_grads):.3g})"
            )
            cures = all_finite([*twins[id(call)].input_grads, *(true_grads[key] for key in trained_here)])
            return Culprit("gradient", call.path, what if cures else f"{what}; in float32 it is not either", cures)
    for call in reversed(observed.calls):
        if not all_finite(call.output_grads):
            origin = "the loss" if call is observed.calls[-1] else "what is behind it"
            what = f"the gradient of the output of layer '{call.path}' is not finite at a loss scale of {loss_scale:g}"
            true = twins[id(call)].output_grads
            if not all_finite(true):
                why = f"{origin} sends back what is not finite, in float32 too"
            elif _is_beyond(max_abs(true) * loss_scale, call.compute_dtype):
                reached = beyond(max_abs(true) * loss_scale, call.compute_dtype)
                why = f"{origin} sends back up to {reached}, more than {call.compute_dtype} holds"
            else:
                reached = f"{max_abs(true) * loss_scale:.3g}"
                why = f"{origin} sends back what is not finite; in float32 it is at most {reached}"
            return Culprit("gradient", call.path, f"{what}: {why}", all_finite(true))
    return None
