"""Computing again in the backward pass, by Keras (`keras.RematScope`) or by us: the second time as the first."""

import functools

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replace


def compute_again_alike(layer):
    """Makes `layer` compute the second time what it computed the first time.

    Keras runs `call` again outside of everything that `Layer.__call__` opens around it. Weights would be read in
    float32 there (torch and TensorFlow raise), `training` would be forgotten by the layers inside, random generators
    would draw other numbers, and statistics would move twice.
    """
    rematerialized_call = layer.rematerialized_call

    @functools.wraps(rematerialized_call)
    def rematerialized_call_alike(layer_call, *args, **kwargs):
        # Shapes are computed once. TensorFlow recomputes nothing in a graph, and raises.
        if _keras.in_symbolic_scope():
            return layer_call
        return rematerialized_call(alike([layer], layer_call), *args, **kwargs)

    replace(layer, "rematerialized_call", rematerialized_call_alike, kind="remat")


def is_computed_again(tensors) -> bool:
    """Whether a part of a model that is given `tensors` now is one that the backward pass will need: in training."""
    symbolic = any(isinstance(tensor, keras.KerasTensor) for tensor in tensors)
    return not symbolic and not _keras.in_symbolic_scope() and _keras.is_training()


def alike(layers, call):
    """Returns `call`, which runs `layers`, for two calls: what it found the first time is there the second time."""
    first: list = []

    def masks():
        return [mask for layer in layers for mask in _keras.dropout_masks(layer)]

    @functools.wraps(call)
    def call_alike(*args, **kwargs):
        if not first:
            states = {id(v): v for layer in layers for v in _states(layer)}
            old_values = [(v, ops.copy(_keras.unscoped_value(v))) for v in states.values()]
            first.append((_keras.surroundings(), old_values, masks()))
            return call(*args, **kwargs)
        surroundings, states, masks_before = first[0]
        present = masks()
        _keras.set_dropout_masks(masks_before)
        try:
            with _Again(state_mapping=states), _keras.surrounded_by(surroundings):
                return call(*args, **kwargs)
        finally:
            # torch stops where it has what it needs, and the RNN then does not clear them.
            _keras.set_dropout_masks(present)

    return call_alike


class _Again(keras.StatelessScope):
    """The scope of a repeated call: states are what they were before the first, and nothing is written for good.

    Other variables, weights first of all, were written by the first call: they are read.
    """

    def add_update(self, update):
        variable, value = update
        if id(variable) in self.state_mapping:
            # In the first call the variable was read back, through which no gradient flows.
            super().add_update((variable, ops.stop_gradient(value)))


def _states(layer) -> list:
    """Returns the variables that a call of `layer` may change: statistics, random generators, recurrent states."""
    layers = _keras.flatten_layers(layer, include_self=True)
    weights = _keras.frozen_weights(layer)
    generator = _keras.made_global_seed_generator()
    states = [variable for variable in layer.variables if id(variable) not in weights]
    states += [state for part in layers for state in _keras.recurrent_states(part)] + layer.metrics_variables
    states += [] if generator is None else [generator.state]
    return list({id(variable): variable for variable in states}.values())
