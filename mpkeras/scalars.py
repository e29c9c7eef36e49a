"""Reading a number from the device."""

import keras


def number(scalar):
    """Returns the value of a scalar tensor or variable, also of one that has a copy on every replica."""
    return keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(scalar)).item()
