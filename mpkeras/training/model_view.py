"""A model as reports see it: a survey with the questions that they ask. Nothing here changes the model."""

import contextlib

import keras

from mpkeras import _keras
from mpkeras.conversion.changes import softmax_memory_as_stock
from mpkeras.conversion.float8 import reasons_against
from mpkeras.conversion.last import converted_by, float8_products, known_heads, last_conversion
from mpkeras.conversion.outputs import without_cast
from mpkeras.conversion.plan import calculates_in, compute_dtypes, computes_in, plan
from mpkeras.conversion.remat import check_parts, computed_once, named_parts
from mpkeras.conversion.store_weights import planned_weight_dtypes
from mpkeras.distribution import distribution_backend
from mpkeras.distribution.travel import Travel
from mpkeras.policies.heads import own_methods
from mpkeras.policies.rules import bound_layers, layers_to_keep
from mpkeras.policies.survey import Survey
from mpkeras.scaling.small_state import parts_of, slot_dtypes
from mpkeras.training import training_backend
from mpkeras.training.inventory import find_optimizers
from mpkeras.training.lost_outputs import named_for_lost_outputs
from mpkeras.training.prepare import asked_policy
from mpkeras.training.state import bytes_of_training
from mpkeras.training.unseen_run import native_states_put_back
from mpkeras.training.whole_numbers import rounded_whole_numbers


class ModelView(Survey):
    """A `Survey`, and what else there is to ask of a model. Made anew where the model has been built or has grown."""

    @property
    def is_built(self) -> bool:
        """Whether the model has its variables."""
        return _keras.is_built(self.model)

    @property
    def graph(self):
        """The graph of a Functional or Sequential model; `None` where only its `call` knows."""
        return _keras.graph_of(self.model)

    @property
    def inputs(self):
        """The inputs of the graph: symbolic tensors in the structure of a call; `None` without a graph."""
        return None if self.graph is None else _keras.input_structure(self.graph)

    @property
    def outputs(self):
        """The outputs of the graph, likewise."""
        return None if self.graph is None else _keras.output_structure(self.graph)

    def compute_dtypes(self) -> set[str]:
        """Returns what the layers compute in."""
        return compute_dtypes(self)

    def calculates_in(self, dtypes) -> bool:
        """Whether a layer calculates in one of `dtypes`, and not only a graph that hands tensors on."""
        return calculates_in(self, dtypes)

    def computes_in(self, dtypes) -> bool:
        """Whether a layer computes in one of `dtypes`."""
        return computes_in(self, dtypes)

    def frozen_weights(self) -> set:
        """Returns the `id`s of the weights that are not trained now."""
        return _keras.frozen_weights(self.model)

    def known_heads(self) -> list:
        """Returns the layers that make outputs, as the graph shows them, and as calls have shown to a conversion."""
        return known_heads(self.model)

    def last_layers(self) -> set | None:
        """Returns the `id`s of the layers that return the outputs; `None` where only the model's `call` knows."""
        if self.graph is None:
            return None
        ends = set()
        waiting = keras.tree.flatten(self.outputs)
        while waiting:
            output = waiting.pop()
            layer, _ = _keras.made_by(output)
            ends.add(id(layer))
            if without_cast(output) is not output:
                waiting.append(without_cast(output))
            elif isinstance(layer, keras.Model):
                inner = ModelView(layer)
                ends |= inner.last_layers() or {id(part) for part in inner.layers}
            elif isinstance(layer, keras.layers.Wrapper):
                ends.add(id(layer.layer))
        return ends

    def bound_layers(self, dtype: str) -> set[int]:
        """Returns the `id`s of the layers that no conversion gives the compute dtype `dtype`: quantized ones."""
        return bound_layers(self, dtype)

    def converted_by(self):
        """Returns the `Policy` that the layers were given last; `None` if they were given none."""
        return converted_by(self.model)

    @property
    def policy_in_training(self):
        """The `Policy` that `prepare` takes for the model where it is given none."""
        return asked_policy(self, None)

    @property
    def travel(self) -> Travel:
        """The dtypes of what travels between devices in a step under `policy_in_training`."""
        return Travel.of(self.policy_in_training)

    @property
    def devices_that_share_a_batch(self) -> int:
        """How many devices, replicas or ranks train on parts of one batch here; 1 for one alone."""
        return distribution_backend.devices_that_share_a_batch(self.model)

    @property
    def remat(self):
        """What the last conversion keeps for the backward pass, as `Policy.remat`."""
        conversion = last_conversion(self.model)
        return None if conversion is None else conversion.policy.remat

    def computed_again(self, remat=None) -> list[tuple[str, str]]:
        """Returns the paths of the first and the last layer of each part that the backward pass computes again.

        Args:
            remat: As `Policy.remat`; by default that of the last conversion.

        Raises:
            ValueError: If there are no such parts in the model, or the backend cannot compute them again.
        """
        if remat is not None:
            check_parts(self, remat)
        return named_parts(self, self.remat if remat is None else remat)

    @contextlib.contextmanager
    def seen_through(self):
        """Context manager: tensors can be carried out of all layers but those that a backend runs in loops.

        The backward pass computes nothing again, and no layer runs inside a function with a derivative of its own.
        """
        with computed_once(self, self.remat), softmax_memory_as_stock(self.layers):
            yield

    def native_states_put_back(self):
        """Returns a context manager: what layers hold beside Keras' variables, as buffers of torch, is put back."""
        return native_states_put_back(self.model)

    def plan(self, policy, heads=()) -> list:
        """Returns what `apply_policy(model, policy)` would make of each layer: a row for each, in their order."""
        return plan(self.model, policy, heads=heads)

    def rules_met(self, rules) -> set[str]:
        """Returns those of the float32 `rules` that a layer matches."""
        return {rule for _, rule in layers_to_keep(self.model, rules)}

    def float8_products(self) -> dict:
        """Returns `{id: reason}` of the layers with a product: why it is not in float8, or `None`.

        Empty for a model that was not converted to a policy with float8.
        """
        return float8_products(self.model)

    def reasons_against_float8(self, policy) -> dict:
        """Returns the same for a conversion to `policy`, a `Policy` with float8, of a model in bfloat16."""
        return reasons_against(self.model, policy, {id(layer): "bfloat16" for layer in self.layers})

    @property
    def own_methods(self) -> list[str]:
        """The methods of `fit`'s step that the class of the model has of its own, by name."""
        return own_methods(self.model, "train_step", "compute_loss")

    def training_bytes(self, optimizer=None) -> dict:
        """Returns `{"weights": {dtype: bytes}, "slots": ..., "gradients": ...}`: see `bytes_of_training`."""
        return bytes_of_training(self.model, optimizer)

    def training_bytes_under(self, policy, slot_dtype: str, inner_optimizer) -> dict:
        """Returns the same under another policy for the weights and another dtype for the slots.

        `inner_optimizer` is built, and no `LossScaleOptimizer`.
        """
        stored = planned_weight_dtypes(self.model, policy)
        slots = [pair for part in parts_of(inner_optimizer) for pair in slot_dtypes(part, slot_dtype, stored)]
        return bytes_of_training(
            self.model, inner_optimizer, stored | {id(variable): dtype for variable, dtype in slots}
        )

    def optimizers(self) -> dict:
        """Returns the optimizers that the model holds, by where it holds them."""
        return find_optimizers(self.model)

    def rounded_whole_numbers(self, x) -> list:
        """Returns the whole numbers of a batch that the model rounds before a layer reads them."""
        return rounded_whole_numbers(self.model, x)

    def named_for_lost_outputs(self) -> set[str]:
        """Returns the paths of the layers that the first batch has shown to lose their outputs in 16 bits."""
        return named_for_lost_outputs(self.model)

    def variable_scope(self):
        """Context manager in which variables of the model's optimizers are made: on every replica."""
        return training_backend.variable_scope(self.model)

    @staticmethod
    def tensors(batch):
        """Returns a batch as tensors; under a distribution strategy its part for one replica."""
        return training_backend.local_tensors(batch)

    def kept_losses(self):
        """Context manager: what the layers add to the losses is as before afterwards."""
        return _keras.kept_losses(self.layers)
