"""One layer, as its conversion left it: the questions to it alone, and the changes of it alone."""

import contextlib
import functools
from collections.abc import Callable

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.changes import regularizes_in_16_bits
from mpkeras.conversion.converter import leave_float8, note_moved_to_float32
from mpkeras.conversion.float8 import has_product, multiplies_in_float8, product_change
from mpkeras.conversion.float8_rounding import GRADIENT_DTYPE, OPERAND_DTYPE
from mpkeras.conversion.inner_results import note_kept_in_float32
from mpkeras.conversion.large_heads import WITH_FLOAT32_SUMS
from mpkeras.conversion.layer import move_to_float32
from mpkeras.conversion.outputs import CAST_NAME
from mpkeras.conversion.recurrent_states import multiplies_state_in_float32
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.heads import has_own_call, is_large, lacks_call
from mpkeras.policies.rules import is_quantized, layers_to_keep, set_layer_policy


class ConvertedLayer:
    """A layer of any model, converted or not."""

    # The dtypes to which operands and gradient of a product in float8 are rounded.
    FLOAT8_OPERANDS, FLOAT8_GRADIENT = OPERAND_DTYPE, GRADIENT_DTYPE

    def __init__(self, layer):
        self.layer = layer

    @property
    def path(self) -> str:
        """Its path, or its name where Keras has called it nowhere yet."""
        return _keras.path_of(self.layer)

    @property
    def own_variables(self) -> list:
        """Its variables, without those of the layers in it."""
        return _keras.own_variables(self.layer)

    @property
    def direct(self) -> list:
        """The layers that it holds itself."""
        return _keras.direct_sublayers(self.layer)

    @property
    def inner(self) -> list:
        """All layers in it, without itself."""
        return _keras.flatten_layers(self.layer)

    @property
    def draws_numbers(self) -> bool:
        """Whether it draws from random generators of its own."""
        is_cell_of_keras = not self.has_own_call and hasattr(self.layer, "get_dropout_mask")
        # Such a cell has a generator without dropout, too.
        draws = not is_cell_of_keras or self.layer.dropout > 0 or self.layer.recurrent_dropout > 0
        return draws and bool(_keras.own_seed_generators(self.layer))

    @property
    def has_own_call(self) -> bool:
        """Whether its `call` is the user's own."""
        return has_own_call(self.layer)

    @property
    def lacks_call(self) -> bool:
        """Whether it is a model without a `call`: only the models in it can be run."""
        return lacks_call(self.layer)

    def dtype_read(self, variable) -> str:
        """Returns the dtype in which the layer reads one of its variables: as stored, where Keras does not cast it."""
        if _keras.follows_autocast(variable):
            return self.layer.compute_dtype
        return keras.backend.standardize_dtype(variable.dtype)

    @property
    def is_output_cast(self) -> bool:
        """Whether a conversion put it at the end of a model, whose outputs it casts to float32."""
        return self.layer.name.startswith(CAST_NAME)

    @property
    def is_large(self) -> bool:
        """Whether its product is so large that outputs which it makes are multiplied in 16 bits."""
        return is_large(self.layer)

    @property
    def sums_in_float32(self) -> bool:
        """Whether it multiplies in 16 bits and sums in float32, as a large layer that makes outputs does."""
        return product_change(self.layer) == WITH_FLOAT32_SUMS

    @property
    def multiplies_state_in_float32(self) -> bool:
        """Whether it is a recurrent layer that multiplies its state in float32, whatever else it computes in."""
        return multiplies_state_in_float32(self.layer)

    @property
    def regularizes_in_16_bits(self) -> bool:
        """Whether its activity regularizer, if it has one, is computed in 16 bits."""
        return regularizes_in_16_bits(self.layer)

    @property
    def has_product(self) -> bool:
        """Whether it multiplies in a way that may be done in float8."""
        return has_product(self.layer)

    @property
    def multiplies_in_float8(self) -> bool:
        """Whether it does so now."""
        return multiplies_in_float8(self.layer)

    @property
    def is_tried_on_symbols(self) -> bool:
        """Whether the call of it that runs now is one for shapes alone."""
        return _keras.in_symbolic_scope()

    @contextlib.contextmanager
    def added_losses_through(self, through: Callable):
        """Context manager: what the layer itself gives to `add_loss` in it is what `through(loss)` makes of that."""
        add_loss = self.layer.add_loss

        @functools.wraps(add_loss)
        def add_what_came_through(loss):
            return add_loss(keras.tree.map_structure(through, loss))

        with replaced(self.layer, "add_loss", add_what_came_through, kind="observed"):
            yield

    @contextlib.contextmanager
    def noting_added_losses(self):
        """Context manager that returns a list: of what the layer itself gives to `add_loss` in it."""
        added: list = []

        def note(loss):
            added.append(loss)
            return loss

        with self.added_losses_through(note):
            yield added

    @property
    def states(self) -> list:
        """What its variables hold, and those of the layers in it, for `outputs_in_float32`: in a stateless scope."""
        return _keras.states_of(_keras.flatten_layers(self.layer, include_self=True))

    def outputs_in_float32(self, args, kwargs, in_inference: bool = False, states: list | None = None):
        """Returns the outputs for the same inputs in float32; `None` where they cannot be compared.

        It runs in a stateless scope, and what the layer writes into variables is taken back.

        Args:
            args, kwargs: Of its `call`.
            in_inference: Whether a `Dropout` draws nothing.
            states: Its `states` at the begin of the call that is compared; by default the present ones.
        """
        layer = self.layer
        layers = _keras.flatten_layers(layer, include_self=True)
        # Of a quantized one there are no other kernels.
        if any(map(is_quantized, layers)):
            return None
        if not in_inference and any(ConvertedLayer(inner).draws_numbers for inner in layers):  # Other ones here.
            return None
        if any(isinstance(inner.dtype_policy, keras.dtype_policies.DTypePolicyMap) for inner in layers):
            return None

        def wide(value):
            if tensor_dtype(value) not in FLOAT_DTYPES:
                return value
            tensor = ops.stop_gradient(ops.cast(value, "float32"))
            _keras.copy_mask(value, tensor)
            return tensor

        present_states = self.states
        old_policies = [(inner, inner.dtype_policy) for inner in layers if inner.compute_dtype in SIXTEEN_BIT_DTYPES]
        try:
            _keras.put_states(states or [])
            for inner, _ in old_policies:
                inner.dtype_policy = keras.DTypePolicy("float32")
            # Losses that this run adds are not the model's.
            with _keras.computing_in_float32(), _keras.kept_losses(layers):
                args, kwargs = keras.tree.map_structure(wide, (args, kwargs))
                # The class's own: on the instance it may multiply in 16 bits.
                return type(layer).call(layer, *args, **kwargs)
        except Exception:  # A layer of the user's that cannot do float32 has no reference.
            return None
        finally:
            for inner, policy in old_policies:
                inner.dtype_policy = policy
            _keras.put_states(present_states)

    def set_policy(self, policy: keras.DTypePolicy):
        """Gives it `policy`, built or not, with what it keeps in the compute dtype."""
        set_layer_policy(self.layer, policy)

    def leave_float8(self, model, reason: str):
        """Moves its product from float8 to bfloat16, for later conversions of `model`, too."""
        leave_float8(model, self.layer, reason)

    def move_to_float32(self, model) -> bool:
        """Moves its arithmetic to float32, with that of the layers in it, as a rule on it would; its variables stay.

        The policy that `model` was given has the rule from then on.

        Returns:
            Whether it moved: a layer that runs quantized layers in 16 bits does not.
        """
        layers = [layer for layer, _ in layers_to_keep(self.layer, [self.layer])]
        for layer in [self.layer] if is_quantized(self.layer) else layers:
            if layer.compute_dtype in SIXTEEN_BIT_DTYPES:
                move_to_float32(layer)
                note_kept_in_float32(layer)
        has_moved = self.layer.compute_dtype not in SIXTEEN_BIT_DTYPES
        if has_moved:
            note_moved_to_float32(model, self.layer)
        return has_moved
