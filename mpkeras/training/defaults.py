"""What a backend answers where it has nothing of its own: no strategy owns models, and Keras draws from variables."""

import contextlib

import keras


def check_scope(model, variables):
    """Variables belong to no scope here."""


def is_distributed(model) -> bool:
    """Models belong to no strategy here."""
    return False


def in_replica_context() -> bool:
    """No code runs on one replica alone here."""
    return False


def replicas(model=None) -> int:
    """JAX sees one batch, not parts of it; each process of torch averages for itself."""
    return 1


def variable_scope(model):
    """Variables belong to no scope here."""
    return contextlib.nullcontext()


def ensure_built(model, own_step, data):
    """Keras builds the model before the train step here."""


def has_rows(data) -> bool:
    """Returns whether a batch has rows; of several ranks, each asks for itself only whether it can compute."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    shape = getattr(leaves[0], "shape", None) if leaves else None
    return not shape or shape[0] != 0


def native_states(model) -> list:
    """There are no variables beside Keras'."""
    return []


def track_random_states(model):
    """`state_dict` carries the random generators here."""


def global_random_states() -> dict:
    """Keras draws from variables."""
    return {}


def set_global_random_states(states: dict):
    """Keras draws from variables."""
