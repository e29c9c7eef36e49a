"""What travels between ranks on torch: what the user's module sends, `DistributedDataParallel` or FSDP2."""

import torch

from mpkeras.devices._torch import is_distributed
from mpkeras.distribution.defaults import check_program, layout_of_number, split_slots, with_dtypes  # noqa: F401

# Whether an optimizer sums gradients over replicas, and so has a dtype for it.
OPTIMIZERS_REDUCE = False


def check_travel(model, policy):
    """Raises `ValueError` for dtypes of a `Policy` in which nothing travels here, and for a model under FSDP2."""
    if is_distributed():
        _check_no_fsdp(model)
    asked_for = {name: getattr(policy, name) for name in ("gather_dtype", "reduce_dtype")}
    asked_for = {name: dtype for name, dtype in asked_for.items() if dtype is not None}
    if asked_for and is_distributed():
        received = ", ".join(f"{name}={dtype!r}" for name, dtype in asked_for.items())
        raise ValueError(
            "Expected the dtypes of what travels where torch takes them: it gathers weights and sums gradients before "
            f"an optimizer sees them. Received: {received} in the policy. Leave them out, and for "
            "`DistributedDataParallel` call `module.register_comm_hook(None, default_hooks.bf16_compress_hook)` of "
            "`torch.distributed.algorithms.ddp_comm_hooks`, for FSDP2 pass "
            "`mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)` to `fully_shard`."
        )


def devices_that_share_a_batch(model) -> int:
    """Returns how many ranks train on parts of one batch; 1 for one alone."""
    return torch.distributed.get_world_size() if is_distributed() else 1


def _check_no_fsdp(model):
    # Not at the top: torch imports much for it.
    from torch.distributed.fsdp import FSDPModule

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if sharded:
        raise ValueError(
            "Expected a Keras model whose layers read the parameters that torch trains. Received: a model under "
            f"`fully_shard`, in {len(sharded)} modules: its layers go on with the weights from before, and each rank "
            "would train by itself. Shard a module that calls `layer.stateless_call`, as "
            "`examples/cluster/torch_fsdp2.py` does, or use `DistributedDataParallel`."
        )
