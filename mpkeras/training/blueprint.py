"""The facts that a process needs to make a model and its step again, and that no configuration of the model says."""

import keras

from mpkeras import _keras
from mpkeras.conversion.last import last_conversion
from mpkeras.conversion.store_weights import give_dtypes
from mpkeras.distribution.sharded import SPLIT_AXES, Sharded, check_shard, mesh_of
from mpkeras.policies.policy import Policy, storing_slots
from mpkeras.policies.rules import is_quantized
from mpkeras.scaling.arguments import checked_optimizer
from mpkeras.scaling.rewrap import own_calls, own_slot_dtype
from mpkeras.training.made_under import policy_without_rule
from mpkeras.training.objective import Objective


class Blueprint:
    """A model beside its config, and its optimizer, loss and devices, as JSON can hold them."""

    @staticmethod
    def beside_config_of(model) -> dict:
        """Returns what the config of a model does not say of it.

        Paths, what is frozen, LoRA, `keras.RematScope`, and the policies of layers that a model of the user's
        own makes: those that they have without the rules of the last conversion, as another policy has others.
        """
        facts = _keras.beside_config_of(model)
        policies = [_policy_of(layer, model) for layer in _keras.flatten_layers(model, include_self=True)]
        return {**facts, "policies": [policy and [policy.compute_dtype, policy.variable_dtype] for policy in policies]}

    @staticmethod
    def give_beside_config(model, facts: dict):
        """Gives a model that was made again from its configuration what that does not say: rules go by the paths.

        Raises:
            ValueError: If its configuration makes other weights than the model had.
        """
        _keras.give_beside_config(model, facts)
        layers = _keras.flatten_layers(model, include_self=True)
        if [type(layer).__name__ for layer in layers] == [part["class_name"] for part in facts["layers"]]:
            pairs = zip(layers, facts["policies"], strict=True)
            give_dtypes(model, [(layer, *dtypes) for layer, dtypes in pairs if dtypes is not None])

    @staticmethod
    def check_loss(loss):
        """Raises `TypeError` or `ValueError` unless `make_train_step` takes the loss."""
        Objective(loss, metrics=None)

    @staticmethod
    def checked_optimizer(optimizer, argument: str):
        """Returns the optimizer that `optimizer` is or names; `argument` is what the caller calls it."""
        return checked_optimizer(optimizer, argument)

    @staticmethod
    def own_calls(optimizer) -> int:
        """Returns how many calls to an update the user of an optimizer set, whatever a plan asks for."""
        return own_calls(optimizer)

    @staticmethod
    def with_slots_of(optimizer, policy: Policy) -> Policy:
        """Returns `policy` with the `slot_dtype` that the user of an optimizer gave it, where it says none itself."""
        is_said = policy.slot_dtype != "auto"
        return policy if is_said else storing_slots(policy, own_slot_dtype(optimizer))

    @staticmethod
    def config_of(optimizer) -> dict:
        """Returns the configuration of an optimizer without what belongs to this process."""
        return _keras.portable_config(optimizer)

    @staticmethod
    def layouts_of(distribution) -> dict:
        """Returns how a `keras.distribution.ModelParallel` lays variables out: arguments of `model_parallel`."""
        if isinstance(distribution, Sharded):
            return {"shard": distribution.shard, "axis": distribution.axis}
        stock = keras.distribution.ModelParallel.get_variable_layout
        if type(distribution).get_variable_layout is not stock:
            raise ValueError(
                "Expected a `keras.distribution.ModelParallel` whose layouts are those of its `layout_map`, as only "
                f"they can be handed to the process that compiles. Received: {type(distribution).__name__}, with a "
                "`get_variable_layout` of its own. Put its layouts into a `keras.distribution.LayoutMap`."
            )
        layouts = _keras.layout_map_of(distribution)
        paths = [[path, list(layout.axes)] for path, layout in layouts.items()]
        return {"paths": paths, "batch_dim_name": distribution.batch_dim_name}

    @staticmethod
    def model_parallel(mesh, *, paths=(), batch_dim_name=None, shard=None, axis="largest"):
        """Returns the `ModelParallel` that `layouts_of` describes, on another mesh."""
        if shard is not None:
            return Sharded(mesh, shard, axis)
        layouts = keras.distribution.LayoutMap(mesh)
        for path, axes in paths:
            layouts[path] = keras.distribution.TensorLayout(axes, mesh)
        return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name=batch_dim_name)

    @staticmethod
    def sharded(devices, shard: str) -> list:
        """Returns distributions that split what is trained, the usual one first; they differ in the axis."""
        check_shard(shard)
        mesh = mesh_of(devices)
        return [Sharded(mesh, shard, axis) for axis in SPLIT_AXES]

    @staticmethod
    def lay_out(variables, distribution):
        """Gives variables without values the layouts that a distribution has for them."""
        _keras.lay_out(variables, distribution)


def _policy_of(layer, model):
    """Returns the policy that a layer of `model` has, or would have without a rule; `None` of what its config says."""
    is_in_config = is_quantized(layer) or isinstance(layer.dtype_policy, keras.dtype_policies.DTypePolicyMap)
    return None if is_in_config else policy_without_rule(layer, last_conversion(model))
