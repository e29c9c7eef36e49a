"""What runs the step. `training_backend` is the active backend's part of it."""

import importlib

import keras

training_backend = importlib.import_module(f"mpkeras.training._{keras.backend.backend()}")
