"""The state of a recurrent layer: carried from step to step in float32, multiplied with the weights in 16 bits.

So is that of a stateful layer from batch to batch.
"""

import functools
import importlib

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replace, replaced_attributes
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, widen

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")

# The name of the change, a key of `conversion.changes.CHANGES`.
STATE_IN_FLOAT32 = "state in float32"

_CONV_LSTM = (keras.layers.ConvLSTM1D, keras.layers.ConvLSTM2D, keras.layers.ConvLSTM3D)


def carries_state_in_16_bits(layer) -> bool:
    """Whether `layer`, which computes in 16 bits, is a loop of Keras' around cells of Keras', which carry such a state.

    A state adds up: behind gates of 0.982, as a bias of 4 makes them, a `GRU` takes no step in bfloat16 that is smaller
    than a quarter of a percent of its state, and a `SimpleRNN` that counts stops at 256.
    """
    is_loop = isinstance(layer, keras.layers.RNN) and _keras.is_of_keras(type(layer).inner_loop)
    return is_loop and all(_step_of(layer, cell) is not None for cell in _cells(layer))


def carry_state_in_float32(layer):
    """Lets the steps of `layer` take and return a float32 state, unless cuDNN runs them.

    Products are those of 16 bits, with a copy of the weights for each step, whose gradients are summed in float32:
    without cuDNN, steps on torch would share one copy, and of 1000 equal addends in bfloat16 its gradient holds 256
    (Keras 3.15.1). Sums, gates and states are float32; a `SimpleRNN`, in which nothing but a product carries the
    state, multiplies it in float32.
    """
    inner_loop = layer.inner_loop
    # A `call` of the user's own may begin with any states.
    is_known = _keras.is_of_keras(type(layer).call)
    between_batches = _carry_between_batches(layer) if layer.stateful and is_known else None

    @functools.wraps(inner_loop)
    def loop_in_float32(sequences, initial_state, mask=None, training=False):
        # It may have moved to float32 since, or one of its cells may be kept there.
        is_in_16_bits = all(part.compute_dtype in SIXTEEN_BIT_DTYPES for part in (layer, *_cells(layer)))
        if not is_in_16_bits or _is_for_cudnn(layer, mask):
            return inner_loop(sequences, initial_state, mask=mask, training=training)
        state = keras.tree.map_structure(widen, initial_state)
        if between_batches is not None and between_batches.initial is not None:
            state = keras.tree.pack_sequence_as(state, between_batches.initial)
        mask = None if mask is None else keras.tree.flatten(mask)[0]
        loop = _LoopOf(layer, functools.partial(_step, layer, training=training))
        result = keras.layers.RNN.inner_loop(loop, sequences, state, mask=mask)
        if between_batches is not None:
            between_batches.final = keras.tree.flatten(result[-1])
        return result

    replace(layer, "inner_loop", loop_in_float32, kind="steps")
    # `Bidirectional` asks it before it hands both directions of an `LSTM` to cuDNN at once.
    if hasattr(layer, "use_cudnn") and not _backend.has_cudnn():
        replace(layer, "use_cudnn", False, kind="steps")


def multiplies_state_in_float32(layer) -> bool:
    """Whether steps of `layer` that carry a state in float32 multiply it so, as those of a `SimpleRNN` do."""
    is_carried = any(entry.name == "inner_loop" for entry in replaced_attributes(layer))
    return is_carried and any(_step_of(layer, cell) is _step_of_simple_rnn for cell in _cells(layer))


class _BetweenBatches:
    """The states of a stateful layer in one of its calls, each a flat list of float32; `None` where Keras' own count.

    Keras hands them to the loop, and assigns what that returns, in the dtype that the layer computes in.
    """

    initial: list | None = None
    final: list | None = None

    def end(self) -> list | None:
        """Returns the states that the loop has ended with, and holds no tensors any more."""
        final, self.initial, self.final = self.final, None, None
        return final


def _carry_between_batches(layer) -> _BetweenBatches:
    """Lets a stateful `layer` begin with its states as they are stored, and store what its loop says that they are."""
    call, between_batches = layer.call, _BetweenBatches()

    @functools.wraps(call)
    def call_with_states(sequences, initial_state=None, *args, **kwargs):
        variables = _keras.recurrent_states(layer)
        if initial_state is None:
            between_batches.initial = [_in_float32(variable) for variable in variables]
        try:
            result = call(sequences, initial_state, *args, **kwargs)
        finally:
            final = between_batches.end()
        if final is not None:
            # Within the layer an assignment on torch would go to the copy in 16 bits.
            with _keras.autocast_scope(None):
                for variable, state in zip(variables, final, strict=True):
                    variable.assign(state)
        return result

    replace(layer, "call", call_with_states, kind="steps")
    return between_batches


class _LoopOf:
    """A recurrent layer to the loop of Keras, but for its cell."""

    def __init__(self, layer, step):
        self._layer = layer
        self.cell = step

    def __getattr__(self, name):
        return getattr(self._layer, name)


def _is_for_cudnn(layer, mask) -> bool:
    """Whether cuDNN may run the loop of `layer`: as `cudnn_ok` of each backend in Keras 3.15."""
    if not isinstance(layer, (keras.layers.LSTM, keras.layers.GRU)) or not layer.use_cudnn:
        return False
    is_stock = layer.activation is keras.activations.tanh and layer.recurrent_activation is keras.activations.sigmoid
    is_alike = is_stock and layer.use_bias and not layer.unroll and not layer.recurrent_dropout
    takes_mask = mask is None or keras.backend.backend() == "tensorflow"
    return is_alike and takes_mask and getattr(layer, "reset_after", True)


def _cells(layer) -> list:
    return layer.cell.cells if type(layer.cell) is keras.layers.StackedRNNCells else [layer.cell]


def _step_of(layer, cell):
    """Returns our step for a cell of Keras' in `layer`, a function like `cell.call`; `None` for any other cell."""
    if isinstance(layer, _CONV_LSTM):
        return _step_of_lstm if _keras.is_of_keras(type(cell)) else None
    return _STEPS.get(type(cell))


def _step(layer, inputs, states, training):
    """Returns `(outputs, new states)` of one step. A cell is given the outputs of the one before it, in 16 bits."""
    is_stacked = layer.cell is not _cells(layer)[0]
    new_states = []
    for cell, state in zip(_cells(layer), states if is_stacked else [states], strict=True):
        is_single = not keras.tree.is_nested(state)
        inputs, new_state = _step_of(layer, cell)(cell, inputs, [state] if is_single else state, training)
        inputs = ops.cast(inputs, layer.compute_dtype)
        new_states.append(new_state[0] if is_single else new_state)
    return inputs, new_states if is_stacked else new_states[0]


def _step_of_simple_rnn(cell, inputs, states, training):
    inputs_masks, state_masks = _dropout_masks(cell, inputs, states[0], training)
    state = states[0] if state_masks is None else states[0] * widen(state_masks)
    sums = widen(_product(cell, inputs, cell.kernel, inputs_masks))
    sums += ops.matmul(state, _in_float32(cell.recurrent_kernel))
    sums = sums if cell.bias is None else sums + _in_float32(cell.bias)
    outputs = sums if cell.activation is None else cell.activation(sums)
    return outputs, [outputs]


def _step_of_lstm(cell, inputs, states, training):
    state, carry = states
    inputs_masks, state_masks = _dropout_masks(cell, inputs, state, training)
    convolve, convolve_state, axis = ops.matmul, ops.matmul, -1
    if hasattr(cell, "recurrent_conv"):
        convolve, convolve_state = functools.partial(cell.input_conv, padding=cell.padding), cell.recurrent_conv
        axis = 1 if cell.data_format == "channels_first" else -1
    of_inputs = _product(cell, inputs, cell.kernel, inputs_masks, convolve, axis)
    of_state = _product(cell, state, cell.recurrent_kernel, state_masks, convolve_state, axis)
    bias = 0.0
    if cell.bias is not None:
        shape = [1] * len(of_inputs.shape)
        shape[axis] = -1
        bias = ops.reshape(_in_float32(cell.bias), shape)

    def gates(of_inputs, of_state, carry):
        i, f, new, o = ops.split(widen(of_inputs) + widen(of_state) + bias, 4, axis=axis)
        carry = cell.recurrent_activation(f) * carry + cell.recurrent_activation(i) * cell.activation(new)
        return cell.recurrent_activation(o) * cell.activation(carry), carry

    outputs, carry = _backend.keeping_arguments(gates)(of_inputs, of_state, carry)
    return outputs, [outputs, carry]


def _step_of_gru(cell, inputs, states, training):
    (state,) = states
    inputs_masks, state_masks = _dropout_masks(cell, inputs, state, training)
    of_inputs = _product(cell, inputs, cell.kernel, inputs_masks)
    bias = None if cell.bias is None else _in_float32(cell.bias)
    if cell.reset_after:
        of_state = _product(cell, state, cell.recurrent_kernel, state_masks)
        x_bias, h_bias = (0.0, 0.0) if bias is None else (bias[0], bias[1])

        def gates(of_inputs, of_state, state):
            x_z, x_r, x_new = ops.split(widen(of_inputs) + x_bias, 3, axis=-1)
            h_z, h_r, h_new = ops.split(widen(of_state) + h_bias, 3, axis=-1)
            z, r = cell.recurrent_activation(x_z + h_z), cell.recurrent_activation(x_r + h_r)
            return z * state + (1 - z) * cell.activation(x_new + r * h_new)

        outputs = _backend.keeping_arguments(gates)(of_inputs, of_state, state)
        return outputs, [outputs]
    gate_masks, new_masks = (None, None) if state_masks is None else (state_masks[:2], state_masks[2:])
    of_gates, of_new = ops.split(cell.recurrent_kernel, [2 * cell.units], axis=-1)
    sums = widen(of_inputs) if bias is None else widen(of_inputs) + bias
    x_z, x_r, x_new = ops.split(sums, 3, axis=-1)
    h_z, h_r = ops.split(widen(_product(cell, state, of_gates, gate_masks)), 2, axis=-1)
    z, r = cell.recurrent_activation(x_z + h_z), cell.recurrent_activation(x_r + h_r)
    new = cell.activation(x_new + widen(_product(cell, r * state, of_new, new_masks)))
    outputs = z * state + (1 - z) * new
    return outputs, [outputs]


_STEPS = {
    keras.layers.SimpleRNNCell: _step_of_simple_rnn,
    keras.layers.LSTMCell: _step_of_lstm,
    keras.layers.GRUCell: _step_of_gru,
}


def _dropout_masks(cell, inputs, state, training) -> tuple:
    """Returns the masks of inputs and state, as Keras' cells make them: one, a list with one for each gate, or `None`.

    They were drawn before the loop.
    """
    drops_inputs, drops_state = (training and 0.0 < rate < 1.0 for rate in (cell.dropout, cell.recurrent_dropout))
    return (
        cell.get_dropout_mask(inputs) if drops_inputs else None,
        cell.get_recurrent_dropout_mask(state) if drops_state else None,
    )


def _product(cell, operand, kernel, masks, multiply=ops.matmul, axis=-1):
    """Returns the product of `operand` and `kernel` in 16 bits.

    Args:
        masks: As in `_dropout_masks`; with a mask for each gate, each has its part of the kernel.
        axis: That of the gates in what `multiply` returns.
    """
    operand, kernel = (ops.cast(value, cell.compute_dtype) for value in (operand, kernel))
    if not isinstance(masks, list):
        return multiply(operand if masks is None else operand * masks, kernel)
    parts = ops.split(kernel, len(masks), axis=-1)
    products = [multiply(operand * mask, part) for mask, part in zip(masks, parts, strict=True)]
    return ops.concatenate(products, axis=axis)


def _in_float32(variable):
    """Returns a weight as it is stored, and not its copy in 16 bits, in float32."""
    return ops.cast(_keras.unscoped_value(variable), "float32")
