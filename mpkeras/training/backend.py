"""The active backend's part of training, as `training_backend`."""

import keras

if keras.backend.backend() == "tensorflow":
    from mpkeras.training import _tensorflow as training_backend
elif keras.backend.backend() == "jax":
    from mpkeras.training import _jax as training_backend  # type: ignore[no-redef]
else:
    from mpkeras.training import _torch as training_backend  # type: ignore[no-redef]

__all__ = ["training_backend"]
