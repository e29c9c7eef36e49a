"""What layers cast on the way in, noted while they run."""

import contextlib

import keras

from mpkeras.policies.rules import layer_policy


@contextlib.contextmanager
def noting_casts(layer, note):
    """Context manager: `note(tensor, cast)` is told what `layer` casts on the way in, and what becomes of it."""
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        # Of a map that layers share an entry of one alone could not be taken back.
        yield
        return
    layer.dtype_policy = _NotingPolicy(layer_policy(layer), note)
    try:
        yield
    finally:
        layer.dtype_policy = policy


class Given:
    """What layers were given, by what they have cast it to: its `note` is one for `noting_casts`."""

    def __init__(self):
        # With the tensor that was cast to, so that no other one gets its `id` meanwhile.
        self._tensors: dict = {}

    def note(self, tensor, cast):
        self._tensors[id(cast)] = cast, tensor

    def instead_of(self, structure):
        """Returns a structure of arguments of a call as they were before the layer has cast them."""
        return keras.tree.map_structure(lambda value: self._tensors.get(id(value), (None, value))[1], structure)


class _NotingPolicy(keras.DTypePolicy):
    """The policy of a layer for one run, which tells what the layer casts."""

    def __init__(self, policy, note):
        self.__dict__.update(vars(policy))
        self._note = note

    def convert_input(self, x, autocast, dtype):
        cast = super().convert_input(x, autocast, dtype)
        if autocast and keras.ops.is_tensor(x) and "float" in keras.backend.standardize_dtype(x.dtype):
            self._note(x, cast)
        return cast
