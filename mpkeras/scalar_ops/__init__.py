"""The arithmetic of loss scales, counters and flags: functions of `keras.ops`, on scalars.

On torch, which runs op by op, they are torch's own: a step has some forty of them, and what `keras.ops` converts and
checks before each takes five times as long as the operation.
"""

import keras

if keras.backend.backend() == "torch":
    from mpkeras.scalar_ops._torch import (
        greater_equal,
        logical_and,
        logical_not,
        logical_or,
        maximum,
        minimum,
        where,
        zeros_like,
    )
else:
    from keras.ops import (
        greater_equal,
        logical_and,
        logical_not,
        logical_or,
        maximum,
        minimum,
        where,
        zeros_like,
    )

__all__ = [
    "greater_equal",
    "logical_and",
    "logical_not",
    "logical_or",
    "maximum",
    "minimum",
    "where",
    "zeros_like",
]
