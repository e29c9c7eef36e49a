"""`storage_choices`: the bytes of weights and slots that training keeps, by the dtypes they are stored in."""

from typing import NamedTuple

from mpkeras.conversion.apply import planned_weight_dtypes
from mpkeras.policies.dtypes import SMALL_DTYPE
from mpkeras.policies.policy import Policy
from mpkeras.scaling.small_state import parts_of, slot_dtypes
from mpkeras.training import training_backend
from mpkeras.training.state import bytes_of_training

# Policy and slot dtype of each way. How layers compute is another choice; that of the first two is any.
_WAYS = {
    "float32": ("mixed_bfloat16", "float32"),
    "bfloat16 slots": ("mixed_bfloat16", SMALL_DTYPE),
    "bfloat16 weights and slots": ("bfloat16", "auto"),
}


class Storage(NamedTuple):
    """What training keeps if weights and slots are stored in one of the three ways.

    Attributes:
        name: `"float32"`, `"bfloat16 slots"` or `"bfloat16 weights and slots"`.
        state_bytes: Bytes of the weights, trained or not, and of the slots.
        gradient_bytes: Bytes of the gradients, each in the dtype of its weight.
    """

    name: str
    state_bytes: int
    gradient_bytes: int


def storage_choices(model, optimizer) -> list[Storage]:
    """Returns what is kept under each way to store the state, counted from the variables that are there.

    Layers that stay in float32, frozen weights and averages of weights are counted in the dtypes they would have.

    Args:
        model: A built `keras.Model`, which stays as it is.
        optimizer: The optimizer that trains it, wrapped or not. Of one that is not built, a copy is built for the
            moment: it needs the memory of the slots, as training will.

    Returns:
        One `Storage` for each way, the largest first. Empty where an optimizer that is not built cannot be copied.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not inner.built:
        try:
            inner = type(inner).from_config(inner.get_config())
        except Exception:  # of an optimizer of the user's own
            return []
        with training_backend.variable_scope(model):
            inner.build(model.trainable_variables)
    found = []
    for name, (policy, slot_dtype) in _WAYS.items():
        stored = planned_weight_dtypes(model, Policy(policy))
        slots = [pair for part in parts_of(inner) for pair in slot_dtypes(part, slot_dtype, stored)]
        held = bytes_of_training(model, inner, stored | {id(variable): dtype for variable, dtype in slots})
        sums = {group: sum(by_dtype.values()) for group, by_dtype in held.items()}
        found.append(Storage(name, sums["weights"] + sums["slots"], sums["gradients"]))
    return found
