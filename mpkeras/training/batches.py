"""What a custom loop hands to a train step, in the dtypes that `fit` would give it."""

import keras
import numpy as np


def as_array(value) -> np.ndarray:
    """Returns `value` as an array; float64, NumPy's default and not what was meant, becomes Keras' float."""
    value = np.asarray(value)
    return value.astype(keras.config.floatx()) if value.dtype == np.float64 else value
