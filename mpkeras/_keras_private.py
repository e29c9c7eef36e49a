"""The few private names of Keras that mpkeras needs, each with the reason.

Read in Keras 3.15.1. `tests/test_keras_private.py` fails when one of them changes.
"""

import contextlib

import keras


def flatten_layers(model, include_self: bool = False) -> list:
    """Returns every layer below `model`, nested ones included, each once.

    `Model.layers` is public but stops at the first level and does not exist on
    a plain `Layer`; `Layer._flatten_layers` is what Keras itself walks.

    Args:
        model: A `keras.Model` or `keras.layers.Layer`.
        include_self: Whether `model` comes first in the list.
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            "Expected a `keras.Model` or `keras.layers.Layer`. "
            f"Received: {model!r} (of type {type(model).__name__}). Pass the model itself."
        )
    return model._flatten_layers(include_self=include_self)


def direct_sublayers(layer) -> list:
    """Returns the layers that `layer` holds itself, not those below them."""
    return layer._flatten_layers(include_self=False, recursive=False)


def optimizer_trainable_variables(optimizer) -> list:
    """Returns the model variables a built optimizer was built on, in its order.

    `Optimizer.variables` is public but holds the optimizer's own state only.
    """
    return list(optimizer._trainable_variables)


def overwrites_with_gradient(variable) -> bool:
    """Whether `variable` takes its gradient as its new value (float8 scales): not to be unscaled.

    The attribute is public on `keras.Variable`; a `tf.Variable` has none.
    """
    return getattr(variable, "overwrite_with_gradient", False)


def in_stateless_scope() -> bool:
    """Whether the code that runs now is in a `keras.StatelessScope`, which is public; the question is not."""
    return keras.src.backend.common.stateless_scope.in_stateless_scope()


def casts_no_inputs(layer) -> bool:
    """Whether `layer` passes its inputs to `call` as they are, as Functional models do."""
    return not layer._convert_input_args


def own_variables(layer) -> list:
    """Returns the variables that `layer` itself created, not those of its sublayers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_seed_generators(layer) -> list:
    """Returns the `keras.random.SeedGenerator`s that `layer` itself holds; their states are public variables."""
    return list(layer._seed_generators)


def replace_compiled_optimizer(model, optimizer):
    """Makes `model.save` store `optimizer`, the one whose state it stores, in the compile configuration.

    Keras keeps the object that was passed to `compile`; a model saved with that configuration and another
    optimizer's variables loads without its optimizer state.
    """
    compile_config = getattr(model, "_compile_config", None)
    if compile_config is not None:
        compile_config.config["optimizer"] = optimizer


def autocast_dtype() -> str | None:
    """Returns the dtype that float variables are read in now; `None` if they are read as they are stored."""
    scope = keras.src.backend.get_autocast_scope()
    return None if scope is None else scope.dtype


def autocast_scope(dtype: str | None):
    """Context manager: float variables are read in `dtype`. Keras opens it around `Layer.call` only."""
    return keras.src.backend.AutocastScope(dtype)


def replace_policy_map(layer, policy):
    """Gives `layer` `policy` in the place of its `DTypePolicyMap`; the public setter would add an entry to it."""
    layer._dtype_policy = policy


def widen(variable):
    """Makes a 16-bit variable a float32 one of the same value: the same object, so that all who hold it still do."""
    value = keras.ops.cast(unscoped_value(variable), "float32")
    variable._dtype = "float32"
    variable._initialize(value)


def track_parameters_again(layer):
    """Lets torch know the present parameters of `layer`; elsewhere there is nothing to do."""
    if hasattr(layer, "_torch_params"):
        layer._track_variables()


def copy_mask(source, target):
    """Gives `target` the mask of `source`, if it has one: a cast makes a new tensor without it."""
    mask = keras.src.backend.get_keras_mask(source)
    if mask is not None:
        keras.src.backend.set_keras_mask(target, mask)


def is_built(model) -> bool:
    """Whether every layer of `model` has its variables."""
    return all(layer.built for layer in flatten_layers(model, include_self=True))


def symbolic_build(model, data_batch):
    """Builds the model, its metrics and its optimizer from the shapes of one batch, as Keras' `fit` does.

    Keras 3.15.1 does so itself on JAX and torch, and on TensorFlow only under a distribution strategy.
    """
    model._symbolic_build(data_batch=data_batch)


def frozen_weights(model) -> set:
    """Returns the `id`s of the variables that layers made as trainable, whatever `trainable` says now.

    Among a model's non-trainable variables they are the weights of frozen layers: large, and not statistics.
    """
    layers = flatten_layers(model, include_self=True)
    return {id(variable) for layer in layers for variable in layer._trainable_variables}


def recurrent_states(layer) -> list:
    """Returns the variables in which a stateful recurrent layer keeps its states; `[]` before it is built.

    `RNN.states` is a public attribute, but Keras' tracker does not look into it.
    """
    states = keras.tree.flatten(getattr(layer, "states", None))
    return [state for state in states if isinstance(state, keras.Variable)]


def unscoped_value(variable):
    """Returns the value of `variable` as it is stored, within a layer's `call`, too."""
    with autocast_scope(None):
        return variable.value


def put(variable, value):
    """Gives `variable` a backend tensor of its own shape and dtype, unchecked.

    `Variable.assign` is public; its conversions and checks take 5 ms a step for the 760 variables of a ResNet-50.
    """
    variable._direct_assign(value)


def step_count(optimizer):
    """Returns the variable that counts the calls of `apply`, micro-steps of an accumulation included.

    `Optimizer.iterations` is public, but with accumulation it is a tensor of another count.
    """
    return optimizer._iterations


def taken_accumulation(optimizer) -> tuple[list, keras.Variable]:
    """Returns the sums of gradients of an optimizer built with accumulation, and its step count.

    The optimizer forgets the sums: whoever takes them goes on from there.
    """
    sums = getattr(optimizer, "_accumulated_gradients", [])
    optimizer._accumulated_gradients = []
    return list(sums), step_count(optimizer)


# The method through which Keras' optimizers decay the weights. On TensorFlow it assigns to variables directly.
WEIGHT_DECAY_METHOD = "_apply_weight_decay"


def decays(optimizer, variable) -> bool:
    """Whether `optimizer` decays `variable`, after its `exclude_from_weight_decay`."""
    return optimizer._use_weight_decay(variable)


# The method in which Keras' optimizers on TensorFlow sum the gradients over replicas.
GRADIENT_SUM_METHOD = "_all_reduce_sum_gradients"


def graph_of(model):
    """Returns the Functional model that `model` is, or that a built Sequential has in it; `None` for any other."""
    if isinstance(model, keras.Sequential):
        model = model._functional
    return model if isinstance(model, keras.src.models.functional.Functional) else None


def refresh_symbolic_dtypes(model):
    """Gives every symbolic tensor of a Functional model the dtype that its layer returns now.

    Keras computes them once, when the model is made. Its own `KerasTensor.dtype` has no setter.
    """
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if node.is_input:
                continue
            args, kwargs = keras.tree.map_structure(
                lambda value, layer=node.operation: _as_input_of(layer, value),
                (node.arguments.args, node.arguments.kwargs),
            )
            # As in `Layer.__call__`: a layer without a rule of its own is asked by running its `call`.
            layer_dtype = node.operation.compute_dtype if getattr(node.operation, "autocast", False) else None
            # Those that take text compute in "string", for which Keras opens no scope either.
            with autocast_scope(layer_dtype if layer_dtype is not None and "float" in layer_dtype else None):
                specs = node.operation.compute_output_spec(*args, **kwargs)
            for tensor, spec in zip(node.outputs, keras.tree.flatten(specs), strict=True):
                tensor._dtype = spec.dtype


def _as_input_of(layer, value):
    """Returns a symbolic tensor in the dtype in which `layer` hands it to its `call`; anything else as it is."""
    converts = isinstance(layer, keras.layers.Layer) and layer._convert_input_args
    if not converts or not isinstance(value, keras.KerasTensor):
        return value
    return layer.dtype_policy.convert_input(value, layer.autocast, layer.input_dtype)


def output_structure(model):
    """Returns the outputs of a Functional model in the structure it returns them; `Model.outputs` is flat."""
    return model._outputs_struct


def input_structure(model):
    """Returns the inputs of a Functional model in the structure it takes them; `Model.inputs` is flat."""
    return model._inputs_struct


def made_by(tensor) -> tuple:
    """Returns the layer that returned a symbolic tensor, and the number of the call."""
    history = tensor._keras_history
    return history.operation, history.node_index


def inputs_of_call(layer, node_index: int) -> list:
    """Returns the symbolic tensors that a call of `layer` was given."""
    return layer._inbound_nodes[node_index].input_tensors


def replace_outputs(model, outputs):
    """Lets a Functional model end in other symbolic tensors; it stays the same object, class and weights.

    What `Function.__init__` and `Functional.__init__` do with their outputs. To make a new `keras.Model` would
    lose the class of a subclass, with its `train_step`; to call `__init__` again, all that it has become.
    """
    from keras.src.ops.function import map_graph

    before = {id(layer): layer for layer in model.layers}
    flat = keras.tree.flatten(outputs)
    nodes, nodes_by_depth, operations, operations_by_depth = map_graph(model._inputs, flat)
    # Into the dictionary: an attribute would be tracked, and its lists wrapped by TensorFlow.
    vars(model).update(
        _outputs_struct=outputs,
        _outputs=flat,
        _nodes=nodes,
        _nodes_by_depth=nodes_by_depth,
        _operations=operations,
        _operations_by_depth=operations_by_depth,
        output_names=[made_by(tensor)[0].name for tensor in flat],
    )
    after = {id(layer): layer for layer in model.layers}
    for key, layer in after.items():
        if key not in before:
            model._tracker.track(layer)
    for key, layer in before.items():
        if key not in after:
            model._tracker.untrack(layer)
    # On TensorFlow, Keras 3.10 keeps another list than the tracker's, and walks that one.
    known = [layer for layer in model._layers if id(layer) in after or id(layer) not in before]
    missing = [layer for key, layer in after.items() if key not in before and layer not in known]
    if missing or len(known) < len(model._layers):
        model._layers = [*known, *missing]


def replace_last_layers(model, old, new):
    """Exchanges the layers `old` at the end of a Sequential model for `new`, its graph left alone.

    `add` and `pop` would call every layer anew, and leave `layer.output` at the first of the calls.
    """
    layers = model._layers
    for layer in old:
        layers.remove(layer)
    layers.extend(new)


@contextlib.contextmanager
def kept_losses(layers):
    """Context manager: the losses of the last call of `layers` outlive a call, which begins by clearing them.

    Even in a `keras.StatelessScope`. `Layer.losses` is public, but returns a new list.
    """
    before = [(layer, list(layer._losses), set(layer._loss_ids)) for layer in layers]
    try:
        yield
    finally:
        for layer, losses, ids in before:
            layer._losses.clear()
            layer._losses.extend(losses)
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


def made_global_seed_generator():
    """Returns the generator that Keras' random functions without a seed draw from; `None` if it is not made yet.

    `keras.src.random.seed_generator.global_seed_generator()` makes one, from Python's generator.
    """
    return keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")


def set_global_seed_generator(generator):
    """Lets Keras' random functions draw from `generator`; with `None` they make a new one when they need it."""
    keras.src.backend.common.global_state.set_global_attribute("global_seed_generator", generator)
