"""The float8 product on torch: `torch._scaled_mm` where the device has units for it, else bfloat16 products."""

import torch

from mpkeras.conversion.float8.rounding import GRADIENT_DTYPE, OPERAND_DTYPE, once, rounded, tie
from mpkeras.devices._torch import has_float8_units, is_distributed


def float8_product(inputs, kernel, training, state=()):
    """As in `_jax.py`. In training ranks scale by the largest value of all of them."""
    # What is saved in float8 is no function of the arguments to torch.
    tied = tie(inputs, kernel)
    return _Product.apply(inputs, kernel, tied, training, *state)


class _Product(torch.autograd.Function):
    """The product of two bfloat16 matrices. What is kept for the backward pass is in float8."""

    @staticmethod
    def forward(ctx, inputs, kernel, tied, training, *state):
        inputs, of_inputs, by_inputs = rounded(inputs, OPERAND_DTYPE, state[:2], _over_ranks if training else None)
        kernel, of_kernel, by_kernel = rounded(kernel, OPERAND_DTYPE, state[2:4])
        ctx.save_for_backward(inputs, of_inputs, kernel, of_kernel, tied, *by_inputs, *by_kernel, *state[4:])
        return _multiply(inputs, kernel, of_inputs, of_kernel)

    @staticmethod
    def backward(ctx, gradient):
        inputs, of_inputs, kernel, of_kernel, tied, *state = ctx.saved_tensors
        gradient, of_gradient, by_gradient = rounded(gradient, GRADIENT_DTYPE, tuple(state[4:]), _over_ranks)
        state[4:] = by_gradient
        by_kernel = once(_multiply(inputs.t(), gradient, of_inputs, of_gradient), tied)
        if not ctx.needs_input_grad[0]:
            return None, by_kernel, None, None, *state
        by_inputs = once(_multiply(gradient, kernel.t(), of_gradient, of_kernel), tied)
        return by_inputs, by_kernel, None, None, *state


def _over_ranks(largest):
    if is_distributed():
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest


def _multiply(left, right, of_left, of_right):
    """Returns the product of two float8 matrices, times both scalars, in bfloat16."""
    if has_float8_units(left.device):
        return _scaled_mm(left, right, of_left, of_right)
    product = torch.matmul(left.to(torch.bfloat16), right.to(torch.bfloat16))
    return product * (of_left * of_right).to(torch.bfloat16)


def _scaled_mm(left, right, of_left, of_right):
    # cuBLASLt takes rows of the left and columns of the right, in multiples of 16; zeros add nothing to a sum.
    rows, summed = left.shape[0], -left.shape[1] % 16
    if summed:
        left = torch.nn.functional.pad(left.view(torch.uint8), (0, summed)).view(left.dtype)
        right = torch.nn.functional.pad(right.view(torch.uint8), (0, 0, 0, summed)).view(right.dtype)
    right = right.t().contiguous().t()
    return torch._scaled_mm(left.contiguous(), right, scale_a=of_left, scale_b=of_right, out_dtype=torch.bfloat16)[
        :rows
    ]
