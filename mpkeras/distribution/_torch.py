"""The ranks of `torch.distributed` take one decision."""

import torch
import torch.distributed


def is_distributed() -> bool:
    """Whether this process is one of several: two attribute reads where it is not."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def on_all_ranks(grads_are_finite, loss_is_finite):
    """Returns both flags for all ranks together: true where they are true on every rank.

    `DistributedDataParallel` sums the gradients before the optimizer sees them, but the loss stays with its
    rank, and so do the gradients of a model that is trained in any other way. The message is the same whether
    a rank knows its loss or not: ranks that wait for different messages wait for ever.

    Args:
        grads_are_finite: bool scalar, shape `()`, for this rank; on the device that the message is sent from.
        loss_is_finite: bool scalar, shape `()`, for this rank and on that device, or `None` where it is not known.

    Returns:
        `(grads_are_finite, loss_is_finite)`, bool scalars of shape `()`. A loss that no rank
        knows counts as finite: the scale then moves by the gradients alone.
    """
    known_loss = torch.ones_like(grads_are_finite) if loss_is_finite is None else loss_is_finite
    # A sum of int32, which every backend of torch.distributed can form.
    bad_ranks = (~torch.stack([grads_are_finite, known_loss])).to(torch.int32)
    torch.distributed.all_reduce(bad_ranks)
    all_finite = bad_ranks == 0
    return all_finite[0], all_finite[1]
