"""torch's part of a conversion: torch modules that follow the policy of their layer, and the float8 product."""

import functools
import gc

import keras
import torch
from torch.utils import checkpoint

from mpkeras._replaced import replace
from mpkeras.conversion.again import alike
from mpkeras.conversion.float8_rounding import GRADIENT_DTYPE, OPERAND_DTYPE, once, rounded, tie
from mpkeras.devices._torch import has_float8_units, is_distributed
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES


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

    def run_without_garbage(tensors):
        # `keras.tree` leaves the tensors that it takes apart in cycles of references (the recursive functions of
        # `torch.utils._pytree`): collected here, they are free where the backward pass is done with them. Before the
        # run, too: the last part of the model is behind it.
        gc.collect(_YOUNG)
        outputs = run(tensors)
        gc.collect(_YOUNG)
        return outputs

    kept = functools.partial(checkpoint.create_selective_checkpoint_contexts, _kept_or_not)
    options = {"context_fn": kept} if keeps_products else {}
    # To the end, in the second run, too: what a layer of the user's clears at the end of its `call` would be found by
    # the next step.
    with checkpoint.set_checkpoint_early_stop(False):
        return checkpoint.checkpoint(alike(layers, run_without_garbage), tensors, use_reentrant=False, **options)


def _kept_or_not(context, operation, *args, **kwargs):
    del context, args, kwargs
    policies = checkpoint.CheckpointPolicy
    return policies.MUST_SAVE if operation in _PRODUCTS else policies.PREFER_RECOMPUTE
