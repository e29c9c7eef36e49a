"""Counts products, casts and outputs of a forward pass, by layer, in the program that the backend makes of it.

Nothing is run. On torch the FLOPs are those of `torch.utils.flop_counter`. On TensorFlow and JAX the formulas are our
own: TensorFlow's profiler counts 0 for an `Einsum`, and XLA's `cost_analysis` has one number for the whole program,
without layers and dtypes.
"""

import dataclasses
import functools
import importlib
import math
import re
import warnings
from collections import Counter
from typing import NamedTuple

import keras
from keras import ops

from mpkeras.seams import ConvertedLayer, ModelView, dtypes, let_heads_tell, mixing
from mpkeras.tools.shared.arguments import dtype_of
from mpkeras.tools.shared.observation import STEPPING, call_of, replaced_calls

# In place of a size that the model leaves open, such as the length of a sequence, where nobody gives another.
OPEN_SIZE = 64
# Up to these 16 bits hold every whole number: of 11 significant bits and of 8.
LAST_WHOLE_NUMBERS = {"float16": 2048, "bfloat16": 256}
_OWNER = re.compile(r"mpkeras_layer(\d+)x")


class Product(NamedTuple):
    """A matrix product or convolution."""

    owner: int | None  # the number of the layer it is of
    dtype: str
    flops: int  # a multiplication and an addition are two


class Cast(NamedTuple):
    """A conversion from one float dtype to another."""

    owner: int | None
    source: str
    target: str
    elements: int


class Counted(NamedTuple):
    """Whole numbers in a row that a float dtype cannot hold, as positions made with `ops.arange`."""

    owner: int | None
    dtype: str
    numbers: int


@dataclasses.dataclass
class Program:
    """The products and casts of one pass, and what it counts in 16 bits."""

    products: list = dataclasses.field(default_factory=list)
    casts: list = dataclasses.field(default_factory=list)
    counted: list = dataclasses.field(default_factory=list)
    uncounted: int = 0  # operations that leave their size open

    @property
    def flops(self) -> int:
        """The FLOPs of all products."""
        return sum(product.flops for product in self.products)

    def add_product(self, owner, of_operands, flops, times=1):
        """Adds a product of operands of these dtypes, computed in the widest of them."""
        self.products.append(Product(owner, widest(of_operands), flops * times))

    def add_cast(self, owner, source, target, elements, times=1):
        if source != target and {source, target} <= set(dtypes.FLOAT_DTYPES):
            self.casts.append(Cast(owner, source, target, elements * times))

    def add_counted(self, owner, dtype: str, numbers: int | None):
        """Adds so many whole numbers in a row, where they are counted in 16 bits."""
        if numbers is not None and dtype in LAST_WHOLE_NUMBERS:
            self.counted.append(Counted(owner, dtype, numbers))


def owner_name(index: int) -> str:
    """Returns the name of the scope in which the operations of layer `index` are."""
    # Backends append "_1" to a name that is taken: the "x" ends the number.
    return f"mpkeras_layer{index}x"


def owner_of(scopes: str, outer=None) -> int | None:
    """Returns the number of the innermost layer in a path of scopes; `outer` where there is none."""
    owners = _OWNER.findall(scopes)
    return int(owners[-1]) if owners else outer


def widest(of_operands) -> str:
    """Returns the widest of the float dtypes; of others, the first."""
    of_operands = list(of_operands)
    floats = [dtype for dtype in of_operands if dtype in dtypes.FLOAT_DTYPES]
    return max(floats, key=dtypes.FLOAT_DTYPES.index) if floats else of_operands[0]


def size(shape) -> int:
    """Returns the number of elements. Raises `TypeError` where a dimension is not known."""
    return math.prod(shape)


@dataclasses.dataclass
class ForwardPass:
    """The result of tracing a model.

    Attributes:
        program: A `Program`, or `None` where the model could not be traced; then `why_not` and `remedy` are sentences.
        culprit: The layer whose `call` raised.
        refusal: Its error, with a sentence and a remedy, where the backend refused a dtype.
        training: Whether the pass is that of training; otherwise of inference.
        open_size: What was taken for the sizes that the model leaves open besides that of the batch, if it was needed.
        output_bytes: `{number of the layer: {dtype: bytes}}`, layers with others inside left out.
        output_dtypes: The float dtypes that the model returns.
        mixed: `{number of the layer: sentence}` for layers that let wider floats in.
    """

    program: Program | None = None
    why_not: str | None = None
    remedy: str | None = None
    culprit: object = None
    refusal: mixing.RefusedError | None = None
    training: bool = True
    open_size: int | None = None
    output_bytes: dict = dataclasses.field(default_factory=dict)
    output_dtypes: tuple = ()
    input_shapes: list = dataclasses.field(default_factory=list)
    mixed: dict = dataclasses.field(default_factory=dict)


def forward_pass(model, inputs, batch_size: int, open_size: int = OPEN_SIZE) -> ForwardPass:
    """Traces `model` on symbolic inputs; numbers layers by their place among all layers of it.

    First as in training; where that cannot be traced (random numbers of a fixed seed on torch), as in inference.
    """
    if ConvertedLayer(model).lacks_call:
        return ForwardPass(
            why_not="its class has no `call`.",
            remedy="Audit the models inside, each by itself: `mpkeras.audit(model.generator)`.",
        )
    # Lookup layers, of text or whole numbers, have no variables to build, and are built in their first call.
    unbuilt = [layer.name for layer in ModelView(model).layers if not layer.built and "float" in layer.compute_dtype]
    if unbuilt:
        why_not = f"it is not built: layers {', '.join(map(repr, unbuilt[:4]))} have no variables and shapes yet."
        remedy = "Call the model once, on a batch of data, and audit it then; what it never calls needs `layer.build`."
        return ForwardPass(why_not=why_not, remedy=remedy)
    arguments = call_arguments(model, inputs, batch_size, open_size)
    if arguments is None:
        return ForwardPass(
            why_not="it does not say what it takes.",
            remedy="Pass `inputs=`: a batch, or `keras.KerasTensor`s, in the structure in which the model takes them.",
        )
    structure, is_open = arguments
    failed = []
    for training in (True, False):
        result = ForwardPass(training=training, open_size=open_size if is_open else None)
        try:
            _trace(model, structure, result)
            return result
        except Exception as error:  # Whatever the user's layers raise.
            result.why_not = f"{type(error).__name__}: {_first_line(str(error))}"
        if result.refusal is not None:
            return result
        result.remedy = "Call the model on a batch: the error says more."
        if is_open:
            result.remedy += f" Open sizes were taken as {open_size}; `open_size` (`--open-size`) gives another."
        failed.append(result)
    return failed[0]


def _first_line(message: str) -> str:
    """Returns the line of an error that says what is wrong, without what Keras puts around it."""
    plain = re.sub(r"\x1b\[\d*m", "", message)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("Exception encountered when calling")]
    return lines[0][:300] if lines else "no message"


def call_arguments(model, inputs, batch_size: int, open_size: int):
    """Returns `((args, kwargs), is_open)` for a call of the model, of KerasTensors with every size known; or `None`."""
    opened: list = []

    def sized(shape, dtype):
        opened.extend(axis for axis, n in enumerate(shape) if n is None and axis > 0)
        known = [open_size if n is None else n for n in shape]
        if known and shape[0] is None:
            known[0] = batch_size
        return keras.KerasTensor(tuple(known), dtype=dtype)

    def like(value):
        return sized(tuple(value.shape), dtype_of(value))

    call: tuple[tuple, dict]
    if inputs is None:
        inputs = ModelView(model).inputs
    if inputs is not None:
        call = (keras.tree.map_structure(like, inputs),), {}
    else:
        config = model.get_build_config() or {}
        shapes = config.get("shapes_dict") or {"input_shape": config.get("input_shape")}
        if any(shape is None for shape in shapes.values()):
            return None

        def of_shape(shape):
            return sized((None, *shape[1:]), model.input_dtype)

        tensors = {name: keras.tree.map_shape_structure(of_shape, shape) for name, shape in shapes.items()}
        if len(tensors) == 1:
            call = tuple(tensors.values()), {}
        else:
            call = (), {name.removesuffix("_shape"): tensor for name, tensor in tensors.items()}
    return call, bool(opened)


def _trace(model, structure, result):
    backend = importlib.import_module(f"mpkeras.tools.shared._{keras.backend.backend()}")
    tensors = keras.tree.flatten(structure)
    result.input_shapes = [tuple(tensor.shape) for tensor in tensors]

    def run(flat):
        args, kwargs = keras.tree.pack_sequence_as(structure, flat)
        # Nothing that the layers assign reaches their variables.
        with keras.StatelessScope():
            outputs = keras.tree.flatten(model(*args, **kwargs, training=result.training))
        outputs = [output for output in outputs if ops.is_tensor(output)]
        returned = {keras.backend.standardize_dtype(output.dtype) for output in outputs}
        result.output_dtypes = tuple(sorted(dtype for dtype in returned if "float" in dtype))
        return outputs

    view = ModelView(model)
    layers = view.layers
    unbuilt = [layer for layer in layers if not layer.built]
    if not unbuilt:
        # A first call finds the heads by calls that are not the model's.
        shapes = [keras.KerasTensor(tensor.shape, keras.backend.standardize_dtype(tensor.dtype)) for tensor in tensors]
        args, kwargs = keras.tree.pack_sequence_as(structure, shapes)
        with view.native_states_put_back():
            let_heads_tell(model, *args, **kwargs)
    with (
        view.kept_losses(),
        # On torch what a trace writes into them stays.
        view.native_states_put_back(),
        _watched(layers, backend, result),
        mixing.in_silence(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            result.program = backend.trace(run, [(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        finally:
            for layer in unbuilt:
                layer.built = False


def _watched(layers, backend, result):
    """Runs the `call` of each layer in a scope of its own, and notes what it returns, mixes and raises."""
    running: list = []
    indices = {id(layer): index for index, layer in enumerate(layers)}

    def watching(layer):
        call, index = call_of(layer), indices[id(layer)]
        is_own = ConvertedLayer(layer).has_own_call

        @functools.wraps(call)
        def call_in_scope(*args, **kwargs):
            may_mix = is_own and layer.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES
            is_step = any(isinstance(outer, STEPPING) for outer, _ in running)
            for _, inner in running:
                inner.append(layer)
            inside: list = []
            running.append((layer, inside))
            try:
                with backend.scope(index):
                    outputs = call(*args, **kwargs)
            except Exception as error:
                if result.culprit is None:  # the innermost layer comes first
                    result.culprit = layer
                    refusal = mixing.refused(layer, args, kwargs, error) if may_mix else None
                    result.refusal = error if isinstance(error, mixing.RefusedError) else refusal
                    if refusal is not None:
                        raise refusal from error
                raise
            finally:
                running.pop()
            if not is_step and (not inside or isinstance(layer, STEPPING)):
                _note_outputs(index, outputs, result)
            if may_mix and index not in result.mixed:
                what = mixing.promoted(layer, args, kwargs, outputs)
                if what:
                    result.mixed[index] = what
            return outputs

        return call_in_scope

    return replaced_calls(layers, watching)


def _note_outputs(index, outputs, result):
    known = result.output_bytes.setdefault(index, Counter())
    for output in keras.tree.flatten(outputs):
        dtype = dtypes.tensor_dtype(output)
        if dtype not in (None, "string") and None not in tuple(output.shape):
            known[dtype] += dtypes.bytes_of(output.shape, dtype)


def sums_by_dtype(rows, attribute: str) -> dict:
    """Returns the sums of a `{dtype: number}` attribute over the rows."""
    sums: Counter = Counter()
    for row in rows:
        sums.update(getattr(row, attribute) or {})
    return dict(sums)
