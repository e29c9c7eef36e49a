"""The few private names of Keras that mpkeras needs, each with the reason.

Read in Keras 3.15.1 and in a nightly of 3.16. `tests/test_keras.py` fails when one of them changes.
"""

import collections
import contextlib
import copy
import functools
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable

import keras


def is_of_keras(code) -> bool:
    """Whether a class or a method is Keras' own: one that `exec` made without a `__name__` says no module."""
    return (getattr(code, "__module__", None) or "").startswith("keras.")


def path_of(layer) -> str:
    """Returns the path of a layer, which has one once Keras has made or called it in a model; its name until then."""
    return layer.path or layer.name


def flatten_layers(model, include_self: bool = False) -> list:
    """Returns every layer below a model or layer, nested ones included, each once; with `include_self` it comes first.

    `Model.layers` is public but stops at the first level, and a plain `Layer` has none.
    """
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(
            "Expected a `keras.Model` or `keras.layers.Layer`. "
            f"Received: {model!r} (of type {type(model).__name__}). Pass the model itself."
        )
    return model._flatten_layers(include_self=include_self)


def direct_sublayers(layer) -> list:
    """Returns the layers that `layer` holds itself, not those below them, each once.

    The list that `Layer._flatten_layers(recursive=False)` of Keras 3.15.1 goes through.
    """
    return list({id(inner): inner for inner in layer._layers}.values())


# The lists that Keras 3.15.1 flattens into the layers below a layer and into `Layer.variables`, which are public; the
# lists are not. To compare them costs less than to ask every layer for its variables again.
own_lists = operator.attrgetter("_layers", "_trainable_variables", "_non_trainable_variables", "_seed_generators")


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


def global_state():
    """Returns what Keras keeps its global settings in, by thread. `clear_session` puts a new one in its place.

    Whether a policy is the default again as `clear_session` was called, or as somebody chose it, nothing public tells.
    """
    return getattr(keras.src.backend.common.global_state, "GLOBAL_STATE_TRACKER", None)


def named_policy(name: str):
    """Returns Keras' own policy of a name, with the string itself as its name, of whatever subclass of `str` it is.

    Given to `keras.DTypePolicy`, the name of a single dtype would be the dtype of every tensor, too.
    """
    policy = keras.DTypePolicy(str(name))
    policy._name = name
    return policy


def is_deserializing() -> bool:
    """Whether Keras makes a model from a file in this thread: `load_model` calls `compile` then."""
    objects = keras.src.backend.common.global_state.get_global_attribute("shared_objects/id_to_obj_map")
    return objects is not None


def dtype_policy_in(state):
    """Returns the global policy of this thread in what `global_state` returned; `None` where it was never asked for."""
    return getattr(state, "dtype_policy", None)


def in_stateless_scope() -> bool:
    """Whether the code that runs now is in a `keras.StatelessScope`, which is public; the question is not."""
    return keras.src.backend.common.stateless_scope.in_stateless_scope()


def stateless_scope():
    """Returns the innermost `keras.StatelessScope` that the code which runs now is in; `None` where there is none."""
    return keras.src.backend.common.stateless_scope.get_stateless_scope()


def trace_for_shapes(function, variables, args, kwargs):
    """Runs `function` as Keras does to learn the shapes of what a layer returns: nothing is computed or assigned.

    `Layer.compute_output_spec` is public, and runs the `call` of a layer alone. Read in Keras 3.15.1: values of
    `variables` in a scope around, as in a step on JAX, are not seen by it.

    Args:
        function: Function of tensors.
        variables: The variables that it may read.
        args, kwargs: The arguments of `function`; of tensors only shape and dtype count.
    """
    scope = _scope_within(variables)

    def run(*args, **kwargs):
        with scope():
            return function(*args, **kwargs)

    args, kwargs = _as_symbolic((args, kwargs))
    keras.src.backend.compute_output_spec(run, *args, **kwargs)


def _as_symbolic(structure):
    def symbolic(value):
        is_tensor = keras.ops.is_tensor(value)
        return keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype)) if is_tensor else value

    return keras.tree.map_structure(symbolic, structure)


def _scope_within(variables):
    """Returns what makes a `StatelessScope` in which `variables` have the values of the scope around."""
    outer = stateless_scope()
    read = [] if outer is None else [(v, outer.get_current_value(v)) for v in variables]
    mapping = [(variable, value) for variable, value in read if value is not None]
    return functools.partial(keras.StatelessScope, state_mapping=mapping)


def in_symbolic_scope() -> bool:
    """Whether shapes alone are computed: `keras.SymbolicScope` is public; the question is not."""
    return keras.src.backend.common.symbolic_scope.in_symbolic_scope()


def casts_no_inputs(layer) -> bool:
    """Whether `layer` passes its inputs to `call` as they are, as Functional models do."""
    return not layer._convert_input_args


def own_variables(layer) -> list:
    """Returns the variables that `layer` itself created, not those of its sublayers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def own_weights(layer) -> list:
    """Returns the variables that `layer` itself created as trainable, whatever `trainable` says now."""
    return list(layer._trainable_variables)


def own_seed_generators(layer) -> list:
    """Returns the `keras.random.SeedGenerator`s that `layer` itself holds; their states are public variables."""
    return list(layer._seed_generators)


def replace_compiled_optimizer(model, optimizer):
    """Makes `model.save` store `optimizer` in the compile configuration, as it stores that one's state.

    Keras keeps the object that was passed to `compile`: with another configuration the state is not loaded.
    """
    compile_config = getattr(model, "_compile_config", None)
    if compile_config is not None:
        compile_config.config["optimizer"] = optimizer


def autocast_dtype() -> str | None:
    """Returns the dtype that float variables are read in now; `None` if they are read as they are stored."""
    scope = keras.src.backend.common.variables.get_autocast_scope()
    return None if scope is None else scope.dtype


def autocast_scope(dtype: str | None):
    """Context manager: float variables are read in `dtype`. Keras opens it around `Layer.call` only."""
    return keras.src.backend.common.variables.AutocastScope(dtype)


@contextlib.contextmanager
def computing_in_float32():
    """Context manager: float variables are read in float32, and layers that are made in it compute in float32.

    A `call` may make layers: `keras.layers.concatenate` does, and each has the global policy, whatever runs it.
    """
    default = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float32")
    try:
        with autocast_scope("float32"):
            yield
    finally:
        keras.config.set_dtype_policy(default)


def surroundings() -> tuple:
    """Returns what `Layer.__call__` opens around `call`: the dtype of the scope, and what layers inside are told.

    The second is `training` and other arguments that go from layer to layer; `None` outside of a call.
    """
    context = keras.src.backend.common.global_state.get_global_attribute("current_call_ctx")
    return autocast_dtype(), copy.copy(context)


@contextlib.contextmanager
def surrounded_by(scope: tuple):
    """Context manager: `scope`, which `surroundings` returned within a call, is around the code that runs now."""
    dtype, context = scope
    state = keras.src.backend.common.global_state
    outer_context = state.get_global_attribute("current_call_ctx")
    # A layer notes in it what it was told, for those that come after it.
    state.set_global_attribute("current_call_ctx", copy.copy(context))
    try:
        with autocast_scope(dtype):
            yield
    finally:
        state.set_global_attribute("current_call_ctx", outer_context)


def is_training() -> bool:
    """Whether the layer that is called now was told `training=True`, or one around it was.

    Nothing is known, and so true, in a model whose `call` takes no `training`, as Keras' trainer tells it nothing, and
    in one that `stateless_call` runs without telling its layers: Keras 3.15.1 calls its `call` there.
    """
    context = keras.src.backend.common.global_state.get_global_attribute("current_call_ctx")
    if context is None or not context.entry_layer._call_has_training_arg:
        return True
    training = getattr(context, "training", None)
    return stateless_scope() is not None if training is None else bool(training)


def rematerializes(layer) -> bool:
    """Whether `layer` was made in a `keras.RematScope`, of which it keeps the mode."""
    return getattr(layer, "_remat_mode", None) is not None


# The attribute in which a `keras.Variable` keeps its dtype; `Variable.dtype` is public, but tells that of the scope.
STORED_DTYPE = "_dtype"


def stored_dtype(variable) -> str:
    """Returns the dtype that `variable` is stored in, in whatever scope it is read, and whatever it says of itself."""
    value = getattr(variable, "_value", None)
    return keras.backend.standardize_dtype(variable.dtype if value is None else value.dtype)


def follows_autocast(variable) -> bool:
    """Whether `variable` is read in the compute dtype inside a layer's `call`; one of integers never is.

    The argument `autocast` of `Layer.add_weight` is public, and the variable has no public name for it.
    """
    return bool(variable._autocast) and keras.backend.is_float_dtype(stored_dtype(variable))


# The attribute of a variable behind `follows_autocast`.
AUTOCAST = "_autocast"

# The attribute behind the public `regularizer` of a variable, and the method by which the `losses` of a layer read it.
# Read in Keras 3.10 and 3.15.1.
REGULARIZER = "_regularizer"
WEIGHT_PENALTIES = "_get_regularization_losses"


def float32_policy_named(name: str) -> keras.DTypePolicy:
    """Returns a policy that computes in float32 and has the name of another.

    Keras' `compile` scales the loss of a model by the name of the model's own policy, whatever its layers compute in.
    """
    policy = keras.DTypePolicy(name)
    policy._compute_dtype = "float32"
    return policy


def stored_value(variable):
    """Returns what holds the value of `variable`, past every scope: an array on JAX, a native variable elsewhere."""
    return variable._value


def retype(variable, dtype: str):
    """Stores a float variable in another dtype, to the nearest: the same object, so that all who hold it still do."""
    if stored_value(variable) is None:
        # Made where variables get no values, for a program that is compiled and not run.
        variable._dtype = dtype
        return
    value = keras.ops.cast(unscoped_value(variable), dtype)
    trainable = variable._trainable
    # A `tf.Variable` is trainable or not for good, and a tape never watches one that is not. Keras makes it of what
    # `trainable` says at that moment (3.10 and 3.15.1): a weight that is frozen now would not train when it is freed.
    variable._trainable = getattr(stored_value(variable), "trainable", trainable)
    try:
        with strategy_scope(variable):
            variable._dtype = dtype
            variable._initialize(value)
    finally:
        variable._trainable = trainable


def strategy_scope(variable):
    """Context manager: new variables are of the same strategy of TensorFlow as `variable`; elsewhere nothing."""
    strategy = getattr(stored_value(variable), "distribute_strategy", None)
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def weight_averages(optimizer) -> list:
    """Returns the variables in which an optimizer keeps moving averages of the weights; `[]` without."""
    return [v for v in getattr(optimizer, "_model_variables_moving_average", []) if v is not None]


def follows_copies(optimizer) -> bool:
    """Whether an optimizer moves copies of the weights, and makes the weights of them."""
    return isinstance(optimizer, getattr(keras.optimizers, "ScheduleFreeAdamW", ()))


def copies_of_weights(optimizer) -> list:
    """Returns the slots of a built optimizer that are such copies. Read in Keras 3.15.1."""
    return [v for v in optimizer._momentums if v is not None] if follows_copies(optimizer) else []


def begin_averages(optimizer):
    """Gives the moving averages of the weights the values of the weights; Keras begins them at zero."""
    averages = getattr(optimizer, "_model_variables_moving_average", [])
    for average, variable in zip(averages, optimizer_trainable_variables(optimizer), strict=False):
        if average is not None:
            # A copy: JAX donates the arrays of a step, and an array that two variables hold cannot be donated.
            average.assign(keras.ops.copy(variable))


def weights_of_slots(slots, weights) -> dict:
    """Returns `{id(slot): weight}`: the one of `weights` that each of `slots` is kept beside, by its name.

    `Optimizer.add_variable_from_reference` names a slot after the path of its weight, and notes it nowhere else. Slots
    whose name says nothing are left out.
    """
    by_name: dict = {}
    for weight in weights:
        by_name.setdefault(getattr(weight, "path", "/").replace("/", "_"), weight)
    found = {}
    for slot in slots:
        beginnings = (slot.name[:length] for length in range(len(slot.name), 0, -1))
        name = next((beginning for beginning in beginnings if beginning in by_name), None)
        if name is not None:
            found[id(slot)] = by_name[name]
    return found


def weights_of_factors(optimizer) -> dict:
    """Returns `{id(factor): weight}` of a built `Adafactor`, and `{}` of any other optimizer.

    Read in Keras 3.15.1: the two factors are named as their weight is, without its path. A weight of one axis has
    variables in their place.
    """
    if not isinstance(optimizer, keras.optimizers.Adafactor):
        return {}
    weights = optimizer_trainable_variables(optimizer)
    pairs = [pair for factors in (optimizer._r, optimizer._c) for pair in zip(factors, weights, strict=True)]
    return {id(factor): weight for factor, weight in pairs if factor is not None}


def stand_ins_of_factors(optimizer) -> set:
    """Returns the `id`s of what a built `Adafactor` has in place of the two factors of a weight of one axis.

    The optimizer tracks these zeros, but where stock Keras' `LossScaleOptimizer` builds it (read in Keras 3.15.1).
    """
    weight_of = weights_of_factors(optimizer) if optimizer.built else {}
    return {factor for factor, weight in weight_of.items() if len(weight.shape) < 2}


def config_for_every_backend(config):
    """Returns the serialized optimizer `config` with the public classes of Keras, in it and in optimizers inside.

    On torch `keras.optimizers.Adam` and eight others make objects of classes of torch's own, by whose names Keras
    serializes them. Elsewhere such an object is made as well, if torch is there, and fails at its first step.
    """
    if isinstance(config, list):
        return [config_for_every_backend(value) for value in config]
    if not isinstance(config, dict):
        return config
    config = {key: config_for_every_backend(value) for key, value in config.items()}
    if str(config.get("module")).startswith("keras.src.backend.torch.optimizers."):
        config |= {"module": "keras.optimizers", "registered_name": None}
    return config


def variable_keys(optimizer, variables) -> list:
    """Returns by what an optimizer knows variables: on TensorFlow the names of native ones, others after `retype`."""
    return [optimizer._var_key(variable) for variable in variables]


def known_variables(optimizer) -> dict:
    """Returns the variables that a built optimizer was built on, by what it knows them."""
    variables = optimizer._trainable_variables
    return {key: variables[index] for key, index in optimizer._trainable_variables_indices.items()}


def know_variables_again(optimizer, known: dict):
    """Makes an optimizer find variables after `retype`, and know which of them decay.

    Args:
        optimizer: A Keras optimizer, built or not.
        known: The variables, by what the optimizer knew them before: `known_variables`, or their `variable_keys`.
    """
    renamed = dict(zip(known, variable_keys(optimizer, known.values()), strict=True))
    attributes = vars(optimizer)
    # Which variables were excluded by name or as objects, and what Keras made of it: up to 3.15 at the first decay, as
    # 3.16 does when it is built. Into the dictionary: an attribute would be tracked.
    if "_exclude_from_weight_decay" in attributes:
        excluded = attributes["_exclude_from_weight_decay"]
        attributes["_exclude_from_weight_decay"] = {renamed.get(key, key) for key in excluded}
    # The last is that of a `MultiOptimizer`.
    for name in (
        "_trainable_variables_indices",
        "_exclude_from_weight_decay_cache",
        "_weight_decay_by_var_key",
        "_var_to_optimizer_idx",
    ):
        if name in attributes:
            attributes[name] = {renamed.get(key, key): value for key, value in attributes[name].items()}


def portable_method(optimizer, name: str):
    """Returns a method of an optimizer as the class says that belongs to no backend.

    Keras' backends replace some: TensorFlow's updates native variables through its strategy, torch's update native
    parameters in place, many at a time.
    """
    for cls in type(optimizer).__mro__:
        if name in vars(cls) and not cls.__module__.startswith("keras.src.backend."):
            return functools.partial(vars(cls)[name], optimizer)
    raise AttributeError(name)


# The methods of Keras' optimizers that those of backends replace, and one more that asks for native variables.
UPDATE_METHOD = "_backend_update_step"
DISTRIBUTED_UPDATE_METHOD = "_distributed_tf_update_step"
OVERWRITE_METHOD = "_overwrite_model_variables_with_average_value"
CLIP_METHOD = "_clip_gradients"
KEY_METHOD = "_var_key"


def track_parameters_again(model):
    """Tells torch the present parameters of `model` and of all in it; elsewhere there is nothing to do."""
    # Not its layers alone: a Sequential model holds a Functional one with the same variables that is none of them.
    for module in model.modules() if keras.backend.backend() == "torch" else ():
        if hasattr(module, "_torch_params"):
            module._track_variables()


def get_mask(tensor):
    """Returns the mask of a tensor, or `None`."""
    return keras.src.backend.common.masking.get_keras_mask(tensor)


def set_mask(tensor, mask):
    """Gives `tensor` a mask, unless that is `None`."""
    if mask is not None:
        keras.src.backend.common.masking.set_keras_mask(tensor, mask)


def copy_mask(source, target):
    """Gives `target` the mask of `source`, if it has one: a cast makes a new tensor without it."""
    set_mask(target, get_mask(source))


def cast_with_mask(tensor, dtype: str):
    """Returns `tensor` in `dtype`, with the mask it carries."""
    output = keras.ops.cast(tensor, dtype)
    copy_mask(tensor, output)
    return output


def has_logits(tensor) -> bool:
    """Whether `tensor` holds probabilities whose logits the crossentropy will find.

    Keras 3.15.1 puts them on the tensor as `_keras_logits`, and has no public name for that.
    """
    return getattr(tensor, "_keras_logits", None) is not None


def is_in_fit(model) -> bool:
    """Whether this code is called from within Keras' `fit` of `model`, which Keras notes nowhere (3.10 and 3.15.1)."""
    code = inspect.unwrap(keras.Model.fit).__code__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def is_built(model) -> bool:
    """Whether every layer of `model` has its variables."""
    return all(layer.built for layer in flatten_layers(model, include_self=True))


def has_all_weights(model) -> bool:
    """Whether no call of `model` makes variables.

    In TensorFlow's `fit` a model whose `train_step` runs its layers alone is never built itself: Keras builds a model
    by its call, and in those that have no `build` of their own there is nothing to make but the layers inside.
    """
    if is_built(model):
        return True
    inside = flatten_layers(model)
    return type(model).build is keras.Model.build and bool(inside) and all(layer.built for layer in inside)


def symbolic_build(model, data_batch):
    """Builds the model, its metrics and its optimizer from the shapes of one batch, as Keras' `fit` does.

    Keras 3.15.1 does so itself on JAX and torch, and on TensorFlow only under a distribution strategy.
    """
    model._symbolic_build(data_batch=data_batch)


def weights(model) -> list:
    """Returns the variables that layers made as trainable, each once, whatever `trainable` says now.

    Among a model's non-trainable variables they are the weights of frozen layers: large, and not statistics.
    """
    layers = flatten_layers(model, include_self=True)
    return list({id(variable): variable for layer in layers for variable in own_weights(layer)}.values())


def frozen_weights(model) -> set:
    """Returns the `id`s of `weights(model)`, to know them among the non-trainable variables."""
    return {id(variable) for variable in weights(model)}


def has_all_variables(metric) -> bool:
    """Whether no update of `metric` makes variables: `R2Score` has a counter, and makes sums in its first update."""
    return bool(metric.variables) and getattr(metric, "_built", True)


def parts_of_metric(metric) -> list:
    """Returns the metrics that hold the variables of `metric`: itself, or those that were given to `compile`.

    Keras puts the latter into one metric, whose class is not public.
    """
    return metric.metrics if isinstance(metric, keras.src.trainers.compile_utils.CompileMetrics) else [metric]


def metrics_given(metric) -> list:
    """Returns what `parts_of_metric` does, but of those given to `compile` the objects, also before Keras asks them."""
    if not isinstance(metric, keras.src.trainers.compile_utils.CompileMetrics):
        return [metric]
    given = keras.tree.flatten([metric._user_metrics, metric._user_weighted_metrics])
    return [part for part in given if isinstance(part, keras.metrics.Metric)]


def recurrent_states(layer) -> list:
    """Returns the variables in which a stateful recurrent layer keeps its states; `[]` before it is built.

    `RNN.states` is a public attribute, but Keras' tracker does not look into it.
    """
    states = keras.tree.flatten(getattr(layer, "states", None))
    return [state for state in states if isinstance(state, keras.Variable)]


def dropout_masks(layer) -> list:
    """Returns `(cell, name, mask)` of the recurrent cells in `layer`, which keep their masks while an RNN runs."""
    cells = [cell for cell in flatten_layers(layer, include_self=True) if hasattr(cell, "reset_dropout_mask")]
    return [(cell, name, getattr(cell, name, None)) for cell in cells for name in _DROPOUT_MASKS]


def set_dropout_masks(masks):
    """Gives cells the masks that `dropout_masks` has returned."""
    for cell, name, mask in masks:
        setattr(cell, name, mask)


_DROPOUT_MASKS = ("_dropout_mask", "_recurrent_dropout_mask")


def is_purged(variable) -> bool:
    """Whether `variable` has no value, and nothing that could make one: in `fit` on JAX the step alone has the values.

    Read in Keras 3.15.1. A variable that is not initialized yet has an initializer.
    """
    return getattr(variable, "_value", variable) is None and getattr(variable, "_initializer", None) is None


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


def accumulated_gradients(optimizer) -> list:
    """Returns the variables in which an optimizer built with accumulation sums its gradients; of any other `[]`."""
    return list(getattr(optimizer, "_accumulated_gradients", []))


@contextlib.contextmanager
def one_update(optimizer):
    """Within this context a call of `optimizer.apply` is one update, with the gradients as they are.

    Accumulation and loss scaling are then the work of whoever calls it. The two settings are public, but those of the
    user's object stay as the user made them, so they are out of force for the length of the call alone.

    With accumulation Keras counts calls, and works out the number of updates from them; its learning rate schedules
    look at the calls, the last of which updates. Here the counter holds the number of updates meanwhile.

    The optimizers that a `MultiOptimizer` calls scale no loss either: it gives them its own setting.
    """
    with contextlib.ExitStack() as stack:
        for part in [optimizer, *getattr(optimizer, "optimizers", [])]:
            stack.enter_context(_one_update_of(part))
        yield


@contextlib.contextmanager
def _one_update_of(optimizer):
    steps = optimizer.gradient_accumulation_steps or 1
    calls = step_count(optimizer)
    covers: dict = {"gradient_accumulation_steps": None, "loss_scale_factor": None}
    if steps > 1:
        schedule = optimizer._learning_rate
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            last_call = calls.value + (steps - 1)
            covers["_learning_rate"] = lambda: schedule(last_call)
        calls.assign(keras.ops.floor_divide(calls.value, steps))
    attributes = vars(optimizer)
    # The loss scale of a `MultiOptimizer` is a property: of its parts alone.
    covered = {name: attributes[name] for name in covers if name in attributes}
    # Into the dictionary: an attribute would be tracked.
    attributes.update({name: covers[name] for name in covered})
    try:
        yield
    finally:
        attributes.update(covered)
        if steps > 1:
            calls.assign(calls.value * steps)


# The method by which callbacks that keep the best epoch (EarlyStopping, ModelCheckpoint, ReduceLROnPlateau) compare its
# value with the best one. Nothing public comes between: after NaN as the first value, none is ever better (3.15).
IMPROVEMENT_METHOD = "_is_improvement"


# The method by which a model decides whether the logs of an epoch are what its metrics say, or those of the last step:
# by the names in them. Read in Keras 3.10 and 3.15.1.
EPOCH_RESULTS_METHOD = "_get_metrics_result_or_logs"


# The method through which Keras' optimizers decay the weights. On TensorFlow it assigns to variables directly.
WEIGHT_DECAY_METHOD = "_apply_weight_decay"


def decays(optimizer, variable) -> bool:
    """Whether a built `optimizer` decays `variable`, after its `exclude_from_weight_decay`."""
    return optimizer._use_weight_decay(variable)


def decay_exclusions(optimizer) -> dict:
    """Returns what an optimizer excludes from weight decay, so that `exclude_again` excludes it from that of another.

    `Optimizer.exclude_from_weight_decay` is public; what it was told is in no config.

    Returns:
        `{"names": regular expression or None, "variables": [[number, name], ...]}`, the latter of those that a built
        optimizer was built on; `{}` where nothing is excluded.
    """
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    if pattern is None and not getattr(optimizer, "_exclude_from_weight_decay", None):
        return {}
    variables = enumerate(optimizer._trainable_variables if optimizer.built else ())
    excluded = [[number, variable.name] for number, variable in variables if not decays(optimizer, variable)]
    return {"names": None if pattern is None else pattern.pattern, "variables": excluded}


def exclude_again(optimizer, exclusions: dict, variables=()) -> list:
    """Lets an optimizer exclude what `decay_exclusions` of another returned; of variables those among `variables`.

    Returns:
        The names of those that are not at their places there.
    """
    variables, excluded, missing = list(variables), [], []
    for number, name in exclusions["variables"]:
        if number < len(variables) and variables[number].name == name:
            excluded.append(variables[number])
        else:
            missing.append(name)
    names = None if exclusions["names"] is None else [exclusions["names"]]
    optimizer.exclude_from_weight_decay(var_list=excluded, var_names=names)
    return missing


# The method in which Keras' optimizers on TensorFlow sum the gradients over replicas.
GRADIENT_SUM_METHOD = "_all_reduce_sum_gradients"


# Both of Keras' attention layers compute `self._softmax(scores, mask)` in this method, where they use no fused kernel:
# with dropout, and where scores are returned. Read in Keras 3.10 and 3.15.1.
ATTENTION_SOFTMAX = "_masked_softmax"
# And all that comes between the products that make queries, keys and values, and the one of the outputs, in this one.
ATTENTION_METHOD = "_compute_attention"


def is_stock_attention(layer, name: str) -> bool:
    """Whether the method `name` of `layer`, one of these two, is that of Keras' attention layers."""
    method = getattr(type(layer), name, None)
    stock = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
    return method is not None and method in [getattr(base, name) for base in stock]


def is_fused_attention(layer, query, returns_scores: bool) -> bool:
    """Whether an attention layer leaves `query` to `keras.ops.dot_product_attention`."""
    # Some layers are told in the call to return their scores, others keeps it for the time of the call.
    returns_scores = returns_scores or getattr(layer, "_return_attention_scores", False)
    return not (layer.dropout > 0.0 or returns_scores or len(query.shape) != 4)


def asks_for_flash_attention(layer) -> bool:
    """Whether an attention layer was told to use a flash kernel."""
    return bool(layer._flash_attention)


def takes_flash_attention(layer, query, key, value, platform: str, *, is_masked: bool) -> bool:
    """Whether Keras on JAX looks for a kernel of its own for a fused attention, or refuses it for the lack of one.

    Read in Keras 3.15.1. On a TPU the kernel needs the values of a mask, which a traced step does not have.
    """
    if layer._flash_attention is not None:
        return layer._flash_attention
    if platform == "tpu":
        return not is_masked
    of_jax = keras.src.backend.jax
    # In Keras 3.16 it is `ops.nn`.
    nn = of_jax.nn if hasattr(of_jax, "nn") else of_jax.ops.nn
    return nn._can_use_flash_attention(query, key, value, None)


def attention_scale(layer) -> float:
    """Returns what an attention layer multiplies its scores by."""
    is_grouped = isinstance(layer, keras.layers.GroupQueryAttention)
    return layer._inverse_sqrt_head_dim if is_grouped else layer._inverse_sqrt_key_dim


def softmax_axis(layer):
    """Returns the axis or axes over which an attention layer takes its softmax."""
    return layer._softmax.axis


def graph_of(model):
    """Returns the Functional model that `model` is, or that a built Sequential has in it; `None` for any other."""
    if isinstance(model, keras.Sequential):
        model = model._functional
    return model if isinstance(model, keras.src.models.functional.Functional) else None


# The method of a Functional model that runs its calls one by one, each through a function of the operation.
RUN_GRAPH = "_run_through_graph"


def calls_in_order(graph) -> list:
    """Returns the calls of a Functional model in the order in which Keras 3.15.1 runs them, without its inputs.

    Each has the attributes `operation`, `arguments`, `input_tensors` and `outputs`.
    """
    depths = sorted(graph._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in graph._nodes_by_depth[depth] if not node.is_input]


def variables_in_operations(graph) -> list:
    """Returns the variables that operations of a Functional model take, as in `dense(x) * scale`: those of no layer."""
    taken = [
        value
        for call in calls_in_order(graph)
        if not isinstance(call.operation, keras.layers.Layer)
        for value in keras.tree.flatten((call.arguments.args, call.arguments.kwargs))
    ]
    return [value for value in taken if isinstance(value, keras.Variable)]


def packed_outputs(graph, tensors):
    """Returns a flat list of the outputs of a Functional model in their structure."""
    return keras.tree.pack_sequence_as(graph._outputs_struct, tensors)


def added_losses(layer) -> list:
    """Returns what `layer` has added with `add_loss` outside of a stateless scope."""
    return layer._losses


def was_called(layer) -> bool:
    """Whether `layer` has run, on tensors or on symbols; public is alone whether it is built, which some always are."""
    return layer._called


def rename_losses(layers, losses, new):
    """Lets `new` be what `layers`, or layers in them, added as `losses` in a stateless scope: known by their `id`."""
    parts = [part for layer in layers for part in flatten_layers(layer, include_self=True)]
    for loss, value in zip(losses, new, strict=True):
        for part in parts:
            if id(loss) in part._loss_ids:
                part._loss_ids.add(id(value))


def calls_in(model) -> collections.Counter:
    """Returns how often a Functional model calls each of its layers; public are the layers alone."""
    return collections.Counter(node.operation for nodes in model._nodes_by_depth.values() for node in nodes)


def calls_behind(outputs) -> dict:
    """Returns the calls that symbolic `outputs` come from: `{(layer or operation, number): tensors it was given}`."""
    inputs_by_call: dict = {}
    waiting = list(outputs)
    while waiting:
        call = operation, number = made_by(waiting.pop())
        # No call made what is given to a symbolic call from outside.
        if operation is not None and call not in inputs_by_call:
            inputs_by_call[call] = inputs_of_call(operation, number)
            waiting += inputs_by_call[call]
    return inputs_by_call


@contextlib.contextmanager
def kept_graphs(layers):
    """Context manager: symbolic calls of `layers` leave nothing on them, where Keras keeps its graphs.

    Read in Keras 3.15.1.
    """
    lists = [calls for layer in layers for calls in (layer._inbound_nodes, layer._outbound_nodes)]
    lengths = [len(calls) for calls in lists]
    try:
        yield
    finally:
        for calls, length in zip(lists, lengths, strict=True):
            del calls[length:]


def nodes_of(model) -> list:
    """Returns the calls in a Functional model, each with its `operation`, `input_tensors` and `outputs`.

    Read in Keras 3.15.1: a `Node` is an object for each call, and no public name leads to it.
    """
    return [node for nodes in model._nodes_by_depth.values() for node in nodes]


def node_of(layer, node_index: int):
    """Returns call number `node_index` of a layer or operation, as `nodes_of` has it."""
    return layer._inbound_nodes[node_index]


def refresh_symbolic_dtypes(model, casts_by_itself: Callable):
    """Gives every symbolic tensor of a Functional model the dtype that its layer returns now.

    `casts_by_itself` says whether a layer that Keras is told to cast no inputs of casts them itself.

    Keras computes them once, when the model is made. Its own `KerasTensor.dtype` has no setter.
    """
    nodes = [node for depth in sorted(model._nodes_by_depth, reverse=True) for node in model._nodes_by_depth[depth]]
    # A cast of what a layer is given would stay on the layer that it comes from.
    with kept_graphs([node.operation for node in nodes]):
        for node in nodes:
            if node.is_input:
                continue
            args, kwargs = keras.tree.map_structure(
                lambda value, layer=node.operation: _as_input_of(layer, value),
                (node.arguments.args, node.arguments.kwargs),
            )
            # As in `Layer.__call__`: a layer without a rule of its own is asked by running its `call`.
            layer_dtype = node.operation.compute_dtype if getattr(node.operation, "autocast", False) else None
            # Those that take text compute in "string", for which Keras opens no scope either.
            scope = autocast_scope(layer_dtype if layer_dtype is not None and "float" in layer_dtype else None)
            with scope, _stood_in_for_as_read(node.operation, casts_by_itself):
                try:
                    specs = node.operation.compute_output_spec(*args, **kwargs)
                except NotImplementedError as error:
                    # A `Lambda` says of whatever its function raises that it needs an `output_shape`.
                    raise error.__context__ or error from None
            for tensor, spec in zip(node.outputs, keras.tree.flatten(specs), strict=True):
                tensor._dtype = spec.dtype


def casts_of_masks(layer) -> list:
    """Returns the casts in a graph through which layers compare what they are given, to make masks; else `[]`.

    Keras makes a mask out of operations of the graph (`Masking` compares), behind a cast to what the layer computed in
    when it was called. A graph from a file knows them by the layers that are given the mask.
    """
    graph = graph_of(layer)
    nodes = [] if graph is None else nodes_of(graph)
    layer_nodes = [node for node in nodes if isinstance(node.operation, keras.layers.Layer)]
    makes_mask = [type(node.operation).compute_mask is not keras.layers.Layer.compute_mask for node in layer_nodes]
    compared = {id(t) for node, makes in zip(layer_nodes, makes_mask, strict=True) if makes for t in node.input_tensors}
    waiting = [get_mask(tensor) for node in layer_nodes for tensor in node.outputs]
    for node in layer_nodes:
        masks = [value for name, value in node.arguments.kwargs.items() if name.endswith("mask")]
        waiting += [value for value in keras.tree.flatten(masks) if isinstance(value, keras.KerasTensor)]
    casts: dict = {}
    seen = set()
    while waiting:
        tensor = waiting.pop()
        if tensor is None or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        operation, number = made_by(tensor)
        if isinstance(operation, keras.layers.Layer):
            continue
        read = inputs_of_call(operation, number)
        if is_cast(operation) and id(read[0]) in compared:
            casts[id(operation)] = operation
        else:
            waiting += read
    return list(casts.values())


def set_dtype_of_cast(operation, dtype: str):
    """Lets a cast of a graph cast to another dtype, in the file, too."""
    operation.dtype = dtype
    # The file goes by the arguments that Keras noted when the operation was made.
    operation._auto_config.config["dtype"] = dtype


@contextlib.contextmanager
def _stood_in_for_as_read(operation, casts_by_itself):
    """Context manager: on torch what stands for a weight where shapes alone are asked for has the dtype that is read.

    Keras 3.15 makes it in the dtype that the weight is stored in, so a layer of the user's that multiplies by a weight
    seems to return float32 where it returns 16 bits.
    """
    stored = []
    if keras.backend.backend() == "torch" and isinstance(operation, keras.layers.Layer):
        for layer in flatten_layers(operation, include_self=True):
            # One that casts its inputs itself reads its variables in no other dtype for that.
            if not (layer.autocast or casts_by_itself(layer)) or "float" not in layer.compute_dtype:
                continue
            variables = filter(follows_autocast, own_variables(layer))
            stored += [(variable, variable._dtype, layer.compute_dtype) for variable in variables]
    try:
        for variable, _, dtype_read in stored:
            variable._dtype = dtype_read
        yield
    finally:
        for variable, dtype, _ in stored:
            variable._dtype = dtype


def dtype_of_made_input(layer) -> str | None:
    """Returns the dtype of the input of a built Sequential model that Keras has made; `None` for any other layer.

    A copy of the model is given the shape of the batch as Keras gives it, and one's own mostly a shape without it.
    """
    graph = graph_of(layer)
    if graph is None or not isinstance(layer, keras.Sequential):
        return None
    first = layer._layers[0]
    was_given_shape = first._auto_config is None or first._auto_config.config.get("shape") is not None
    return None if was_given_shape else first.dtype


def set_dtype_of_made_input(sequential, dtype: str):
    """Gives it another dtype, in the graph and in the file."""
    first = sequential._layers[0]
    first._dtype = dtype
    for tensor in keras.tree.flatten(first.output):
        tensor._dtype = dtype


def _as_input_of(layer, value):
    """Returns a symbolic tensor in the dtype in which `layer` hands it to its `call`; anything else as it is."""
    converts = isinstance(layer, keras.layers.Layer) and layer._convert_input_args
    if not converts or not isinstance(value, keras.KerasTensor):
        return value
    return layer.dtype_policy.convert_input(value, layer.autocast, layer.input_dtype)


def float32_signature(model):
    """Returns the inputs that Keras exports a model without a graph with, in float32 in place of what it computes in.

    There is no public way to them. Read in Keras 3.10 and 3.15.1.
    """
    return keras.tree.map_structure(
        lambda spec: keras.InputSpec("float32", spec.shape) if spec.dtype == model.input_dtype else spec,
        keras.src.export.export_utils.get_input_signature(model),
    )


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


# The operation behind `keras.ops.subtract` and `-`, which is no layer.
_Subtract = type((keras.KerasTensor((1,)) - keras.KerasTensor((1,)))._keras_history.operation)


def is_difference(operation) -> bool:
    """Whether an operation of a graph takes the difference of two tensors: the layer `Subtract`, or `-`."""
    return isinstance(operation, (keras.layers.Subtract, _Subtract))


# The operation behind `keras.ops.cast`, which is not a layer: `Model.layers` passes it by.
_Cast = type(keras.ops.cast(keras.KerasTensor((1,), dtype="float32"), "float16")._keras_history.operation)


class _Float32Output(_Cast):  # type: ignore[misc, valid-type]
    """Ends an output in float32, and keeps its mask, which the loss looks for and a cast loses.

    It is saved as the stock operation, also in models that are made of this one's outputs. `clone_model` makes the
    model without it, as a clone's outputs are named after what made them.
    """

    def call(self, x):
        outputs = super().call(x)
        copy_mask(x, outputs)
        return outputs

    @classmethod
    def from_config(cls, config):
        return lambda x: x


# Saving asks the class where to find it again.
_Float32Output.__module__, _Float32Output.__name__ = _Cast.__module__, _Cast.__name__
_Float32Output.__qualname__ = _Cast.__qualname__


def cast_to_float32(tensor, index: int):
    """Returns the symbolic output number `index` of a model in float32, made by an operation that is no layer."""
    operation = _Float32Output("float32")
    operation.name = f"float32_output_{index}"
    output = operation(tensor)
    copy_mask(tensor, output)
    return output


def is_cast(operation) -> bool:
    """Whether an operation of a graph is `keras.ops.cast`."""
    return isinstance(operation, _Cast)


def is_float32_cast(tensor) -> bool:
    """Whether a symbolic tensor was made by `cast_to_float32`."""
    return isinstance(made_by(tensor)[0], _Float32Output)


def has_mask(tensor) -> bool:
    """Whether a tensor, symbolic or not, carries a mask. `_keras_mask` has no public reader."""
    return keras.src.backend.common.masking.get_keras_mask(tensor) is not None


def replace_outputs(model, outputs, names):
    """Gives a Functional model other symbolic outputs; it stays the same object, class and weights.

    What `Function.__init__` and `Functional.__init__` do with their outputs. To make a new `keras.Model` would
    lose the class of a subclass, with its `train_step`; to call `__init__` again, all that it has become.

    Args:
        outputs: In the structure of the old ones.
        names: Their names in `compile(loss={...})`, in flat order.
    """
    old_layers = {id(layer): layer for layer in model.layers}
    # Into the dictionary: an attribute would be tracked, and its lists wrapped by TensorFlow.
    vars(model).update(_graph_to(model, outputs), output_names=list(names))
    after = {id(layer): layer for layer in model.layers}
    for key, layer in after.items():
        if key not in old_layers:
            model._tracker.track(layer)
    for key, layer in old_layers.items():
        if key not in after:
            model._tracker.untrack(layer)
    # On TensorFlow, Keras 3.10 keeps another list than the tracker's, and walks that one.
    known = [layer for layer in model._layers if id(layer) in after or id(layer) not in old_layers]
    missing = [layer for key, layer in after.items() if key not in old_layers and layer not in known]
    if missing or len(known) < len(model._layers):
        model._layers = [*known, *missing]


@contextlib.contextmanager
def replaced_outputs(model, outputs):
    """Context manager: a Functional model has other symbolic outputs of the same layers, while it is written down."""
    graph = _graph_to(model, outputs)
    old_graph = {name: vars(model)[name] for name in graph}
    vars(model).update(graph)
    try:
        yield
    finally:
        vars(model).update(old_graph)


def _graph_to(model, outputs) -> dict:
    from keras.src.ops.function import map_graph

    flat = keras.tree.flatten(outputs)
    names = ("_nodes", "_nodes_by_depth", "_operations", "_operations_by_depth")
    return {
        "_outputs_struct": outputs,
        "_outputs": flat,
        **dict(zip(names, map_graph(model._inputs, flat), strict=True)),
    }


def replace_last_layers(model, old, new):
    """Exchanges the layers `old` at the end of a Sequential model for `new`, its graph left alone.

    `add` and `pop` would call every layer anew, and leave `layer.output` at the first of the calls.
    """
    layers = model._layers
    for layer in old:
        layers.remove(layer)
    layers.extend(new)


@contextlib.contextmanager
def tensors_put_back(layers):
    """Context manager: tensors that `layers` keep as attributes, as a table that a `call` makes once, are put back.

    A table that is made in float32 would else be read in 16 bits later.
    """
    attributes_before = [(layer, dict(vars(layer))) for layer in layers]
    try:
        yield
    finally:
        for layer, attributes in attributes_before:
            for name, value in list(vars(layer).items()):
                # All else that a first call changes stays: what a conversion was told by it, and policies.
                if value is attributes.get(name) or not any(map(_is_mere_tensor, keras.tree.flatten(value))):
                    continue
                if name in attributes:
                    vars(layer)[name] = attributes[name]
                else:
                    del vars(layer)[name]


def _is_mere_tensor(value) -> bool:
    # To TensorFlow a variable is a tensor, too: those of a layer that the run has built stay.
    return keras.ops.is_tensor(value) and not isinstance(value, keras.Variable)


@contextlib.contextmanager
def kept_losses(layers):
    """Context manager: the losses of the last call of `layers` outlive another, which clears them, in any scope.

    `Layer.losses` is public, but returns a new list.
    """
    old_losses = [(layer, list(layer._losses), set(layer._loss_ids)) for layer in layers]
    try:
        yield
    finally:
        for layer, losses, ids in old_losses:
            layer._losses.clear()
            layer._losses.extend(losses)
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


def states_of(layers) -> list:
    """Returns `(variable, value)` of what `layers` hold themselves, seeds of random generators left out.

    In a stateless scope, where no value is written over, `put_states` puts them back.
    """
    variables = [variable for layer in layers for variable in (*own_variables(layer), *recurrent_states(layer))]
    return [(variable, unscoped_value(variable)) for variable in variables]


def put_states(states):
    """Gives variables the values that `states_of` has returned, in a stateless scope."""
    with autocast_scope(None):
        for variable, value in states:
            if variable.value is not value:
                variable.assign(value)


def made_global_seed_generator():
    """Returns the generator that Keras' random functions without a seed draw from; `None` if it is not made yet.

    `keras.src.random.seed_generator.global_seed_generator()` makes one, from Python's generator.
    """
    return keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")


def set_global_seed_generator(generator):
    """Makes Keras' random functions draw from `generator`; with `None` they make a new one when they need it."""
    keras.src.backend.common.global_state.set_global_attribute("global_seed_generator", generator)


class SavedBeside(keras.src.saving.keras_saveable.KerasSaveable):
    """Carries variables of an optimizer into files by name, first of all those that stock Keras' does not have.

    Keras saves and loads every `KerasSaveable` that it finds as an attribute, in a group of its own. Stock Keras'
    optimizer has no such attribute, so plain Keras reads past the group; in the optimizer's own group it counts the
    arrays, and loads nothing where there are more. No public class is one without being a layer, a loss or so.

    Args:
        optimizer: Its `_variables_beside()` returns the variables by name.
    """

    def __init__(self, optimizer):
        # Keras walks through all attributes: it must not come back to the optimizer this way.
        self._optimizer: Callable = weakref.ref(optimizer)
        # Names that the next load leaves out: Keras loads the optimizer itself before.
        self.left_out: set = set()

    def _obj_type(self):
        return "Optimizer"

    def save_own_variables(self, store):
        for name, variable in self._optimizer()._variables_beside().items():
            store[name] = variable.numpy()

    def load_own_variables(self, store):
        # None of them in files of stock Keras; another rule, or a window of other length, has others.
        names = set(store.keys()) - self.left_out
        for name, variable in self._optimizer()._variables_beside().items():
            if name in names and tuple(store[name].shape) == tuple(variable.shape):
                variable.assign(store[name])


def layout_map_of(distribution):
    """Returns the `LayoutMap` that a `ModelParallel` was made with, for which it has no public name."""
    return distribution._layout_map


def beside_config_of(model) -> dict:
    """Returns what the config of a model does not say of it, as JSON can hold it: `give_beside_config` gives it.

    A config has neither paths, nor the mode of a `keras.RematScope`, nor, of layers within layers, LoRA and what is
    frozen.
    """
    return {
        "is_built": is_built(model),
        "layers": [
            {
                "class_name": type(layer).__name__,
                "path": layer.path,
                "remat": list(layer._remat_mode) if rematerializes(layer) else None,
                "lora": [layer.lora_rank, layer.lora_alpha] if getattr(layer, "lora_enabled", False) else None,
                "trainable": layer.trainable,
                "variables": [
                    {"shape": list(variable.shape), "path": variable.path, "trainable": variable.trainable}
                    for variable in _variables_to_match(layer)
                ],
            }
            for layer in flatten_layers(model, include_self=True)
        ],
    }


def _variables_to_match(layer) -> list:
    """Returns the own variables of a layer, in an order that is the same for a layer that was made again."""
    # A layer that was quantized when it was built has made them in another order than one made of its config.
    states = [generator.state for generator in own_seed_generators(layer)]
    return sorted([*own_variables(layer), *states], key=lambda variable: (tuple(variable.shape), variable.name))


def give_beside_config(model, facts: dict):
    """Gives a model that was made again from its config what `beside_config_of` returned for it.

    Layers are told by their places: names that Keras makes up differ from process to process. Where the model had not
    been built, what has no counterpart stays as it is.

    Raises:
        ValueError: If the model had been built, and its config makes other weights than it had.
    """
    layers = flatten_layers(model, include_self=True)
    pairs = list(itertools.zip_longest(layers, facts["layers"]))
    has_same_layers = all(layer and part and type(layer).__name__ == part["class_name"] for layer, part in pairs)
    for layer, part in pairs if has_same_layers else ():
        # Keras 3.15 builds a layer when it is read, so its path is without the model that it is in.
        layer._path = part["path"]
        layer._remat_mode = None
        if part["remat"] is not None:
            layer._remat_mode = keras.src.backend.common.remat.RematMode(*part["remat"])
        if part["lora"] is not None and not layer.lora_enabled:
            rank, alpha = part["lora"]
            layer.enable_lora(rank, lora_alpha=alpha)
        # Not the property, which frees and freezes what is in the layer.
        layer._trainable = part["trainable"]
        variables = _variables_to_match(layer)
        if [list(variable.shape) for variable in variables] == [known["shape"] for known in part["variables"]]:
            for variable, known in zip(variables, part["variables"], strict=True):
                variable._path, variable.trainable = known["path"], known["trainable"]
    if not facts["is_built"]:
        return
    had = collections.Counter(tuple(known["shape"]) for part in facts["layers"] for known in part["variables"])
    made = collections.Counter(tuple(v.shape) for layer in layers for v in _variables_to_match(layer))
    if had != made:
        raise ValueError(
            f"Expected a model whose config makes the variables that it has. Received: model '{model.name}', which has "
            f"variables of shapes {list((had - made).elements())[:3]}, in place of which those made from its config "
            f"have {list((made - had).elements())[:3]}. Let `get_config` return all that its class is made with; of "
            "layers within layers it cannot say that they were quantized, or changed otherwise, behind their class's "
            "back."
        )


def lay_out(variables, distribution):
    """Gives variables that have no values the layouts that `distribution` has for them.

    Keras does so when a variable gets its value, and lays out an optimizer's slot as the weight it is kept beside.
    """
    for variable in variables:
        variable._layout = distribution.get_variable_layout(variable)


def layout_of(variable):
    """Returns the layout that a variable has on JAX, a `TensorLayout`; `None` where it has none."""
    return getattr(variable, "_layout", None)


def give_layout(variable, layout):
    """Gives a variable on JAX a `TensorLayout`, and its value, where it has one, the place that this says."""
    variable._layout = layout
    if variable._value is not None:
        put(variable, keras.distribution.distribute_tensor(variable._value, layout))


def portable_config(optimizer) -> dict:
    """Returns the config of an optimizer, with Keras' class for all backends in place of one for this backend alone."""
    config = keras.saving.serialize_keras_object(optimizer)
    return config | ({"module": "keras.optimizers"} if config["module"].startswith("keras.src.backend.") else {})


@contextlib.contextmanager
def held_by_variables(model, state):
    """Context manager: on JAX, in the middle of `fit`, the variables of a compiled model have the values in `state`.

    `fit` hands the state on as values, and `Model.jax_state_sync`, which is public, knows those of the step before.
    Afterwards the variables have what they had: a callback may have set them, and within a step they have nothing.

    Args:
        state: What `train_step` returns besides its logs; `None` on backends that keep values in variables.
    """
    if state is None:
        yield
        return
    attributes, of_fit = vars(model), getattr(model, "_jax_state", None)
    values_of_fit = [(variable, variable._value) for variable, _ in _of_state(model, state)]
    attributes["_jax_state"] = None
    try:
        put_state(model, state)
        yield
    finally:
        attributes["_jax_state"] = of_fit
        for variable, value in values_of_fit:
            variable._value = value


def put_state(model, state):
    """Gives the variables of a compiled model on JAX the values in `state`, as `train_step` returns it."""
    for variable, value in _of_state(model, state):
        put(variable, value)


def _of_state(model, state) -> list:
    """Returns `(variable, value)` of what `train_step` returns besides its logs on JAX."""
    groups = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    pairs = zip((*groups, model.metrics_variables), state, strict=True)
    return [pair for variables, values in pairs for pair in zip(variables, values, strict=True)]


def own_policy_maps(layers):
    """Gives `layers` a copy of each `DTypePolicyMap` among their policies; those that share a map share its copy.

    `layer.dtype_policy = ...` writes into the map, which is the user's, and may be that of the layers of another model.
    A map has no copy without its private `_policy_map` in Keras 3.15.1.
    """
    copies: dict = {}
    for layer in layers:
        policy_map = layer._dtype_policy
        if type(policy_map) is not keras.dtype_policies.DTypePolicyMap:
            continue
        if id(policy_map) not in copies:
            own = copy.copy(policy_map)
            own._policy_map = dict(policy_map._policy_map)
            copies[id(policy_map)] = policy_map, own  # The map itself, too: its `id` stays its own.
        layer._dtype_policy = copies[id(policy_map)][1]
