"""Gradients of a loss by the tensors inside a model, on torch."""

import keras
import torch


def run_with_gradients(run, variables):
    """As in `_tensorflow.py`."""
    taps = []

    def tap_output(tensor):
        if not tensor.requires_grad:
            tensor.requires_grad_(True)
        taps.append(tensor)
        return tensor

    def tap_input(tensor):
        # A tensor of its own for each layer that reads it.
        return tap_output(tensor.view_as(tensor))

    native = [variable.value for variable in variables]
    with torch.enable_grad(), keras.StatelessScope(collect_losses=True):
        loss, results = run(tap_input, tap_output)
    # Weights that were frozen as torch parameters take no gradient.
    reached = [tensor for tensor in taps + native if tensor.requires_grad]
    if loss is None or not loss.requires_grad:
        return results, [None] * len(taps), [None] * len(variables)
    found = dict(zip(map(id, reached), torch.autograd.grad(loss, reached, allow_unused=True), strict=True))
    grads = [found.get(id(tensor)) for tensor in taps + native]
    return results, grads[: len(taps)], grads[len(taps) :]
