"""torch's part of a conversion: torch modules that follow the policy of their layer, and the float8 product."""

import contextlib
import functools
import gc
import itertools

import keras
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from mpkeras import _keras
from mpkeras._replaced import replace
from mpkeras.conversion.again import alike
from mpkeras.conversion.float8_rounding import GRADIENT_DTYPE, OPERAND_DTYPE, once, rounded, tie
from mpkeras.devices._torch import has_float8_units, is_distributed
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import Flow


def let_module_follow(layer):
    """Runs the module in a `TorchModuleWrapper` under `torch.autocast` whenever the layer computes in 16 bits.

    Keras casts the inputs alone: a torch module would multiply them with its float32 weights, and raise.
    """
    call = layer.call

    @functools.wraps(call)
    def call_under_autocast(*args, **kwargs):
        if layer.compute_dtype not in SIXTEEN_BIT_DTYPES:
            return call(*args, **kwargs)
        device = next((tensor.device.type for tensor in keras.tree.flatten(args) if torch.is_tensor(tensor)), "cpu")
        with torch.autocast(device, dtype=getattr(torch, layer.compute_dtype)):
            return call(*args, **kwargs)

    replace(layer, "call", call_under_autocast, kind="layer")


def has_cudnn() -> bool:
    """Whether recurrent layers in 16 bits may run by cuDNN, which sums in float32."""
    return torch.cuda.is_available() and torch.backends.cudnn.is_available()


def keeping_arguments(function):
    """As in `_jax.py`, where less is kept. torch's checkpoint takes as long as the step of a loop itself."""
    return function


def product_with_float32_sums(inputs, kernel):
    """As in `_jax.py`. Outside of CUDA, torch has no such kernel, and multiplies the 16-bit numbers as float32."""
    return _ProductWithFloat32Sums.apply(inputs, kernel)


class _ProductWithFloat32Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, kernel):
        ctx.save_for_backward(inputs, kernel)
        if inputs.device.type == "cuda":
            return torch.mm(inputs, kernel, out_dtype=torch.float32)
        return torch.matmul(inputs.float(), kernel.float())

    @staticmethod
    def backward(ctx, gradient):
        inputs, kernel = ctx.saved_tensors
        gradient = gradient.to(inputs.dtype)
        return torch.matmul(gradient, kernel.t()), torch.matmul(inputs.t(), gradient)


def float8_product(inputs, kernel, training):
    """As in `_jax.py`. In training ranks scale by the largest value of all of them."""
    # To torch, tensors saved in float8 are no functions of the arguments.
    tied = tie(inputs, kernel)
    return _Product.apply(inputs, kernel, tied, training)


class _Product(torch.autograd.Function):
    """The product of two bfloat16 matrices, which keeps float8 ones for the backward pass."""

    @staticmethod
    def forward(ctx, inputs, kernel, tied, training):
        over_devices = _over_ranks if training else None
        inputs, of_inputs = rounded(inputs, OPERAND_DTYPE, over_devices, by_row=not training)
        kernel, of_kernel = rounded(kernel, OPERAND_DTYPE)
        ctx.save_for_backward(inputs, of_inputs, kernel, of_kernel, tied)
        return _multiply(inputs, kernel, of_inputs, of_kernel)

    @staticmethod
    def backward(ctx, gradient):
        inputs, of_inputs, kernel, of_kernel, tied = ctx.saved_tensors
        rounded_gradient, of_gradient = rounded(gradient, GRADIENT_DTYPE, _over_ranks)
        by_inputs = None
        if ctx.needs_input_grad[0]:
            by_inputs = once(_multiply(rounded_gradient, kernel.t(), of_gradient, of_kernel), tied)
        if of_inputs.ndim:
            # As in `_jax.py`.
            with_rows = gradient * of_inputs.to(torch.bfloat16)
            rounded_gradient, of_gradient = rounded(with_rows, GRADIENT_DTYPE, _over_ranks)
            of_inputs = torch.ones_like(of_kernel)
        by_kernel = once(_multiply(inputs.t(), rounded_gradient, of_inputs, of_gradient), tied)
        return by_inputs, by_kernel, None, None


def _over_ranks(largest):
    if is_distributed():
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest


def _multiply(left, right, of_left, of_right):
    """Returns the product of two float8 matrices, times both numbers, in bfloat16.

    `of_left` is a scalar, or has one number for each row; `of_right` is a scalar.
    """
    if has_float8_units(left.device):
        if of_left.ndim:
            # cuBLASLt takes numbers for rows only beside numbers for columns.
            return _scaled_mm(left, right, torch.ones_like(of_right), of_right) * of_left.to(torch.bfloat16)
        return _scaled_mm(left, right, of_left, of_right)
    product = torch.matmul(left.to(torch.bfloat16), right.to(torch.bfloat16))
    return product * (of_left * of_right).to(torch.bfloat16)


def _scaled_mm(left, right, of_left, of_right):
    # cuBLASLt takes rows of the left and columns of the right, in multiples of 16; zeros add nothing to a sum.
    missing = -left.shape[1] % 16
    if missing:
        left = torch.nn.functional.pad(left.view(torch.uint8), (0, missing)).view(left.dtype)
        right = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, missing)).view(right.dtype)
    left, right = left.contiguous(), right.t().contiguous().t()
    return torch._scaled_mm(left, right, scale_a=of_left, scale_b=of_right, out_dtype=torch.bfloat16)


CAN_KEEP_PRODUCTS = True
JOINS_OPERATIONS = False
# The generation of objects that Python has just made, which it collects in less than a millisecond.
_YOUNG = 0
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default}


def compute_again(run, tensors, layers, *, keeps_products: bool) -> list:
    """As in `_jax.py`."""
    if not torch.is_grad_enabled():
        return run(tensors)
    inside = [part for layer in layers for part in _keras.flatten_layers(layer, include_self=True)]
    buffers = [(module, _copies(module._buffers)) for module in modules_with_buffers(inside)]
    runs = itertools.count()

    def run_without_garbage(tensors):
        # `keras.tree` leaves the tensors that it takes apart in cycles of references (the recursive functions of
        # `torch.utils._pytree`): collected here, they are free where the backward pass is done with them. Before the
        # run, too: the last part of the model is behind it.
        gc.collect(_YOUNG)
        with _buffers_from(buffers) if next(runs) else contextlib.nullcontext():
            outputs = run(tensors)
        gc.collect(_YOUNG)
        return outputs

    products = _Products()
    options = {"context_fn": products.contexts} if keeps_products else {}
    # To the end, in the second run, too: what a layer of the user's clears at the end of its `call` would be found by
    # the next step.
    with checkpoint.set_checkpoint_early_stop(False):
        outputs = checkpoint.checkpoint(alike(layers, run_without_garbage), tensors, use_reentrant=False, **options)
    if keeps_products:
        products.let_go(outputs)
    return outputs


def _copies(buffers: dict) -> dict:
    return {name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()}


@contextlib.contextmanager
def _buffers_from(buffers):
    """Context manager: modules have copies of the buffers in `buffers`, `(module, values)`, then their own again."""
    present = [(module, dict(module._buffers)) for module, _ in buffers]
    for module, values in buffers:
        # A part may be computed again a second time, for the gradient of a gradient: the values stay.
        module._buffers.update(_copies(values))
    try:
        yield
    finally:
        for module, own in present:
            module._buffers.update(own)


def check_again(layers):
    """As in `_jax.py`."""
    del layers


class _Products:
    """The products of one run of a part, for the run that repeats it; what is let go is computed again.

    As `checkpoint.create_selective_checkpoint_contexts`, which refuses a second backward pass (that of a gradient's
    gradient) and a product that a layer changes in place (`y = ops.matmul(x, kernel); y += bias`), or does not see it
    and takes what was made of it, where the product has three axes.
    """

    def __init__(self):
        self._kept: list = []

    def contexts(self) -> tuple:
        """Returns the context of the first run and that of each which repeats it."""
        return _Keeping(self), _Taking(self)

    def keep(self, product):
        # Without what autograd will add to it, which would hold this in a cycle.
        self._kept.append(product.detach())

    def take(self, number):
        """Returns a product, once: the backward pass frees it where it is done with it. `None` if it was let go."""
        product, self._kept[number] = self._kept[number], None
        return product

    def let_go(self, tensors):
        """Lets go the products whose memory is that of `tensors`, which are changed, or may be from now on."""
        memory = {_memory_of(x) for x in tensors if torch.is_tensor(x) and x.layout == torch.strided}
        self._kept = [None if x is None or _memory_of(x) in memory else x for x in self._kept]


def _memory_of(tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Keeping(TorchDispatchMode):
    def __init__(self, products: _Products):
        super().__init__()
        self._products = products

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if operation in _PRODUCTS:
            self._products.keep(result)
        elif operation._schema.is_mutable:
            self._products.let_go(_written(operation, args, kwargs))
        return result


def _written(operation, args, kwargs) -> list:
    """Returns the arguments that an operation writes to."""
    expected = operation._schema.arguments
    values = {**{argument.name: value for argument, value in zip(expected, args, strict=False)}, **kwargs}
    written = [x.name for x in expected if x.alias_info is not None and x.alias_info.is_write and x.name in values]
    return keras.tree.flatten([values[name] for name in written])


class _Taking(TorchDispatchMode):
    def __init__(self, products: _Products):
        super().__init__()
        self._products = products

    def __enter__(self):
        self._numbers = itertools.count()
        return super().__enter__()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        product = self._products.take(next(self._numbers)) if operation in _PRODUCTS else None
        return operation(*args, **(kwargs or {})) if product is None else product


class FlowTrace(TorchFunctionMode):
    """As in `_jax.py`: by the calls of torch's functions."""

    def __init__(self):
        super().__init__()
        self._made_by: dict = {}
        self._given_to: dict = {}
        self._marked: dict = {}
        # No other tensor gets the `id` of one that is here.
        self._tensors: list = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A function that returns no tensor looks at one (`shape`), but for this.
        returned = args[0] if func is torch.Tensor.__setitem__ else result
        made = _tensors(returned)
        if made:
            given = [_read(value) for value in keras.tree.flatten((args, kwargs)) if torch.is_tensor(_read(value))]
            self._tensors += [*given, *made]
            call = len(self._given_to)
            self._given_to[call] = self._made(given)
            self._made_by |= {id(tensor): call for tensor in made}
        return result

    def mark(self, tensor, made_by):
        """As in `_jax.py`."""
        marked = tensor.view_as(tensor)
        self._marked[self._made_by[id(marked)]] = made_by
        return marked

    def run(self, call, args, kwargs) -> Flow:
        """As in `_jax.py`."""
        with self:
            outputs = _tensors(call(*args, **kwargs))
        return Flow(self._made(outputs), self._given_to, self._marked)

    def _made(self, tensors) -> list:
        return [(id(tensor), self._made_by.get(id(tensor))) for tensor in tensors]


def _read(value):
    # An operation that is given a variable reads it itself.
    return value.value if isinstance(value, keras.Variable) else value


def trace(layer, call, args, kwargs, *, is_dry_run=False):
    """As in `_jax.py`. A dry run has numbers, by which Keras finds shapes where it finds none without.

    Read in Keras 3.15.1: on the device without numbers it reads all variables as they are stored, and torch multiplies
    dtypes there that it refuses to multiply.
    """

    def run(*args, **kwargs):
        if is_dry_run and any(tensor.is_meta for tensor in _tensors((args, kwargs))):
            raise RuntimeError("A dry run on torch is one with numbers.")
        return call(*args, **kwargs)

    # Keras' dropout draws from torch's own generators, in a dry run, too.
    own_generators = torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])
    with buffers_put_back(_keras.flatten_layers(layer, include_self=True)), own_generators:
        _keras.trace_for_shapes(run, layer.variables, args, kwargs)


def buffers_put_back(layers):
    """Context manager: the buffers of torch modules in `layers` hold afterwards what they held before."""
    return _buffers_from([(module, module._buffers) for module in modules_with_buffers(layers)])


def modules_with_buffers(layers) -> list:
    """Returns the torch modules that hold state of their own: wrapped ones, and of Keras' `layers` themselves."""
    wrapped = [layer.module for layer in layers if isinstance(layer, keras.layers.TorchModuleWrapper)]
    modules = [*layers, *(module for outer in wrapped for module in outer.modules())]
    # torch's own dictionary: to ask each of many modules without any costs ten times more.
    return list({id(module): module for module in modules if module._buffers}.values())


def _tensors(structure) -> list:
    return [value for value in keras.tree.flatten(structure) if torch.is_tensor(value)]
