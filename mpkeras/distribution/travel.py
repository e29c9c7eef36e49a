"""The dtypes of numbers that travel between devices, weights and gradients, by a policy."""

import dataclasses

from mpkeras.policies.policy import Policy

# The names of the operations that make what travels, by which the compiled program names the weight.
# Without a colon: what stands behind one XLA takes for another kind of name.
GATHERED = "mpkeras_gather({})"
REDUCED = "mpkeras_reduce({})"


@dataclasses.dataclass(frozen=True)
class Travel:
    """The dtypes of what travels.

    Attributes:
        gather_dtype: The dtype of a weight which is split over devices, where a layer reads it; `None` for the dtype
            that the layer computes in.
        reduce_dtype: The dtype of gradients where they are summed over devices.
        is_asked_for: Whether a user chose one of them.
    """

    gather_dtype: str | None
    reduce_dtype: str
    is_asked_for: bool

    @classmethod
    def of(cls, policy: Policy) -> "Travel":
        """Returns what a `Policy` says."""
        is_asked_for = (policy.gather_dtype, policy.reduce_dtype) != (None, None)
        return cls(policy.gather_dtype, policy.reduce_dtype or "float32", is_asked_for)

    @staticmethod
    def is_sum(kind: str) -> bool:
        """Whether a collective of this kind, as XLA calls it, adds up what devices have."""
        return kind in ("all-reduce", "reduce-scatter")
