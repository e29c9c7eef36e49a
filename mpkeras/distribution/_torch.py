"""What travels between ranks on torch: what the user's module sends, `DistributedDataParallel` or FSDP2."""

from mpkeras.devices._torch import is_distributed

# Whether an optimizer sums gradients over replicas, and so has a dtype for it.
OPTIMIZERS_REDUCE = False


def check_travel(policy):
    """Raises `ValueError` for dtypes of a `Policy` in which nothing travels here."""
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


def with_dtypes(run, travel, variables):
    """Returns `run`: torch has sent everything before."""
    return run


def split_slots(slots, weights):
    """Leaves the state of optimizers where it is: there is no `keras.distribution` in parts here."""
