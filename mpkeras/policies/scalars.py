"""Single numbers on the device: a loss scale, counters, flags. Their arithmetic, and reading one.

The arithmetic is that of `keras.ops`. On torch, which runs op by op, the functions are torch's own: a step has some
forty of them, and what `keras.ops` converts and checks before each takes five times as long as the operation.
"""

import keras

if keras.backend.backend() == "torch":
    from mpkeras.policies import _torch as functions
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


def number(scalar):
    """Returns the value of a scalar tensor or variable, also of one that has a copy on every replica."""
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(scalar)).item()
