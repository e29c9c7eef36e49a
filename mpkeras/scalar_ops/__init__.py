"""The arithmetic of loss scales, counters and flags: functions of `keras.ops`, on scalars.

On torch, which runs op by op, they are torch's own: a step has some forty of them, and what `keras.ops` converts and
checks before each takes five times as long as the operation.
"""

import keras

if keras.backend.backend() == "torch":
    from mpkeras.scalar_ops import _torch as functions
else:
    from keras import ops as functions  # type: ignore[no-redef]

greater_equal = functions.greater_equal
logical_and = functions.logical_and
logical_not = functions.logical_not
logical_or = functions.logical_or
maximum = functions.maximum
minimum = functions.minimum
where = functions.where
zeros_like = functions.zeros_like
