"""torch's functions under the signatures of `keras.ops`, for scalars of one device and Python numbers."""

import torch
from keras import ops


def where(condition, x1, x2):
    return torch.where(_tensor(condition), _operand(x1), _operand(x2))


def minimum(x1, x2):
    x1, x2 = _tensor(x1), _operand(x2)
    return torch.minimum(x1, x2) if torch.is_tensor(x2) else torch.clamp(x1, max=x2)


def maximum(x1, x2):
    x1, x2 = _tensor(x1), _operand(x2)
    return torch.maximum(x1, x2) if torch.is_tensor(x2) else torch.clamp(x1, min=x2)


def greater_equal(x1, x2):
    return torch.greater_equal(_tensor(x1), _operand(x2))


def logical_and(x1, x2):
    return torch.logical_and(_tensor(x1), _tensor(x2))


def logical_or(x1, x2):
    return torch.logical_or(_tensor(x1), _tensor(x2))


def logical_not(x):
    return torch.logical_not(_tensor(x))


def zeros_like(x):
    return torch.zeros_like(_tensor(x))


def stack(x):
    return torch.stack([_tensor(value) for value in x])


def _tensor(value):
    return value if torch.is_tensor(value) else ops.convert_to_tensor(value)


def _operand(value):
    """Returns a Python number as it is: torch takes it, and it does not widen the dtype of the other operand."""
    return value if isinstance(value, (int, float)) else _tensor(value)
