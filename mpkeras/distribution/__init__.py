"""Many devices that share a batch: what lies where, and what travels."""

import importlib

import keras

# The active backend's part: `check_travel`, `check_program`, `with_dtypes`, `split_slots`, `layout_of_number`,
# `devices_that_share_a_batch`; `OPTIMIZERS_REDUCE`.
distribution_backend = importlib.import_module(f"mpkeras.distribution._{keras.backend.backend()}")
