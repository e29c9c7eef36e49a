"""The answers of a backend on which no strategy owns models and their variables: JAX and torch."""

import contextlib


def check_jit_compile(model, jit_compile):
    """JAX compiles under every distribution, torch what it can: nothing to refuse."""
    del model, jit_compile


def check_scope(model, variables):
    """Variables belong to no scope here."""
    del model, variables


def is_distributed(model) -> bool:
    """Models belong to no strategy here."""
    del model
    return False


def in_replica_context() -> bool:
    """No code runs on one replica alone here."""
    return False


def replicas(model=None) -> int:
    """JAX sees one batch, not parts of it; each process of torch averages for itself."""
    del model
    return 1


def ensure_built(model, *args):
    """Keras builds the model before the train step here."""
    del model, args


def variable_scope(model):
    """Variables belong to no scope here."""
    del model
    return contextlib.nullcontext()


def track_random_states(model):
    """`state_dict` carries the random generators here."""
    del model
