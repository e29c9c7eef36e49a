"""`apply_policy`: gives an existing model the dtypes of a policy."""

import contextlib
import functools
import re
import warnings
import weakref

import keras

from mpkeras import _keras
from mpkeras._arguments import check_switch
from mpkeras._replaced import replace, restore
from mpkeras.conversion.changes import changes_of, make_changes, planned_changes
from mpkeras.conversion.float8 import ENDS, float8_change, float8_state
from mpkeras.conversion.plan import (
    Conversion,
    computes_in,
    layers_of,
    plan,
    planned_float8,
    why_not_float8,
    with_float8_state,
)
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, SMALL_DTYPE
from mpkeras.policies.registry import get_policy
from mpkeras.policies.rules import has_own_call, is_quantized, layer_policy, set_layer_policy, unmatched
from mpkeras.scaling.small_state import following

# What ends a 16-bit output in float32. In a file of `convert` it is a layer, known by this name on the way back.
CAST_NAME = "mpkeras_float32_output"
# Model -> its last conversion.
_conversions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def apply_policy(model, policy=None, *, float32_variables: bool = False):
    """Gives a model the dtypes of a policy and returns the model to use.

    Works on models of any kind, built or not, compiled or not: Functional, Sequential, nested, subclassed,
    models that share layers. Layers compute in the policy's dtype, except those its `keep_float32` rules name, and
    those that are quantized or run quantized layers in their `call`: they stay as they are. The weights are the same
    variables as before, with the same values: under a policy with bfloat16 variables rounded to the nearest, once, but
    those of layers that stay in float32. Symbolic dtypes of Functional and Sequential models follow, and 16-bit outputs
    of such a model end in a cast to float32: the last product stays in 16 bits, while whoever uses the model gets
    float32, as before. The cast is no layer: the layers and the names of the outputs stay those of the model.

    The file of a Functional model holds the cast as well, unless an output has a mask or a name that you gave it, which
    plain Keras would lose behind a cast. Such a file, and that of a Sequential model, gives plain Keras the same values
    in 16 bits; so does a Sequential model whose layers have changed since. A model that is not built is converted once
    more when it is.

    `apply_policy(model, "float32")` is the way back: the model is then as it was. What its user has changed since is
    left alone.

    Args:
        model: A `keras.Model`.
        policy: A policy or its name; by default the global one.
        float32_variables: Whether float16 variables become float32 ones of the same values: the master weights in
            which small updates are not lost. Without it such a model is refused. (Those in bfloat16 follow the policy.)

    Returns:
        `model` itself, converted. It stays compiled; to train it with `fit` call `mpkeras.prepare`, or use the
        callback, or pass it to `mpkeras.make_train_step`. A subclassed model returns what its `call` returns.

    Raises:
        ValueError: If the policy is not known, asks for float16 variables, or the model has some and
            `float32_variables` is false or its optimizer is built on them. The model is then as before.
        TypeError: If an argument is of a wrong type, or a layer of the user's own in a Functional or Sequential
            model mixes other float dtypes into the policy's: it is named. The model is then as before.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Softmax()])
    >>> model = mpkeras.apply_policy(model, "mixed_bfloat16")
    >>> [layer.compute_dtype for layer in model.layers]
    ['bfloat16', 'float32']
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a `keras.Model`. Received: {model!r} (of type {type(model).__name__}). "
            "Pass the model itself; for one layer, set `layer.dtype_policy`."
        )
    policy = get_policy(policy)
    _check_variable_dtypes(model, policy, float32_variables)
    optimizer = getattr(model, "optimizer", None)
    optimizers = [] if optimizer is None else [optimizer]
    convert = layer_converter(model, policy, optimizers=optimizers)
    with converting(model, refreshes=True):
        convert()
        _refresh(model)
    store_weights(model, optimizers)
    _store(model, [(variable, "float32") for variable in model.variables if variable.dtype == "float16"])
    end_in_float32(model)
    if not model.built:
        _convert_when_built(model, convert)
    _forget_functions(model, "train_function", "test_function", "predict_function")
    _warn_unscaled(model)
    return model


@contextlib.contextmanager
def converting(model, refreshes: bool = False):
    """Context manager around a conversion: where it raises, the layers of `model` are as before.

    Where they change, Keras makes what `evaluate` and `predict` run anew. Not the train function: in the middle of a
    first step, where layers are converted, too, it must stay. `refreshes` says whether the conversion brings symbolic
    dtypes up to date.
    """
    before = _computed(model)
    with _put_back_on_error(model, refreshes):
        yield
    if _computed(model) != before:
        _forget_functions(model, "test_function", "predict_function")


@contextlib.contextmanager
def _put_back_on_error(model, refreshes: bool = False):
    put_back, earlier = recorded(model), _conversions.get(model)
    try:
        yield
    except Exception:
        put_back(refresh=refreshes)
        _conversions.pop(model, None)
        if earlier is not None:
            _conversions[model] = earlier
        raise


def _computed(model) -> list:
    return [
        (layer, layer.compute_dtype, layer.variable_dtype, changes_of(layer), float8_change(layer))
        for layer in layers_of(model)
    ]


def _forget_functions(model, *names):
    # Those that Keras compiled before hold the old dtypes; so do those of the models inside.
    for part in layers_of(model):
        if isinstance(part, keras.Model):
            for name in names:
                setattr(part, name, None)


def _warn_unscaled(model):
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not computes_in(model, ("float16",)):
        return
    if not scales_loss(optimizer):
        warnings.warn(
            f"Model '{model.name}' computes in float16 now, but is compiled with an optimizer that scales no loss: "
            "small gradients would be lost. Before `fit`, call `mpkeras.prepare(model)`.",
            stacklevel=3,
        )


def converted_by(model):
    """Returns the `Policy` that the layers of `model` were given last; `None` if they were given none."""
    conversion = _conversions.get(model)
    return None if conversion is None else conversion.asked_for


def times_stored(model) -> int:
    """Returns how often weights of `model` were stored in another dtype."""
    conversion = _conversions.get(model)
    return 0 if conversion is None else conversion.times_stored


def float8_products(model) -> dict:
    """Returns `{id: reason}` of the layers of a converted model with a product: why it is not in float8, or `None`.

    Empty for a model that was not converted to a policy with float8.
    """
    conversion = _conversions.get(model)
    if conversion is None:
        return {}
    return why_not_float8(model, conversion, _dtypes_of(model))


def _dtypes_of(model) -> dict:
    return {id(layer): layer.compute_dtype for layer in layers_of(model)}


def leave_float8(model, layer, reason: str):
    """Moves the product of `layer` in a converted model from float8 to bfloat16, for later conversions, too."""
    conversion, dtypes = _conversions[model], _dtypes_of(model)
    conversion.left_float8[layer] = reason
    make_changes(layer, planned_changes(model, dtypes, planned_float8(model, conversion, dtypes))[id(layer)])


def move_to_float32(layer):
    """Moves the arithmetic of `layer` to float32; its variables stay as they are."""
    policy, has_state = keras.DTypePolicy("float32"), float8_state(layer) is not None
    set_layer_policy(layer, with_float8_state(policy, has_state, is_given=not is_quantized(layer)))


def scales_loss(optimizer) -> bool:
    """Whether `optimizer` multiplies the loss before the backward pass."""
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
    return is_scaling and not getattr(optimizer, "scale_is_one", False)


def layer_converter(model, policy, converts: bool = True, optimizers=()):
    """Returns a function that gives the layers of `model` their dtypes; called again, the new ones among them.

    Layers of a layer often come into being when it is built, in the middle of the first step. The function returns
    whether it had anything to do; `converting` takes back what it did before an error.

    Args:
        converts: Whether layers change to the policy's dtype, or only its float32 rules are applied.
        optimizers: Those that train the model. If one is built, a conversion that adds weights or takes some away
            raises `ValueError`.
    """
    conversion = Conversion(model, policy, converts, _conversions.get(model))

    def convert() -> bool:
        if conversion.is_up_to_date(layers_of(model)):
            return False
        rows = plan(model, policy, conversion)
        with_new_weights = [row.layer for row in rows if row.layer.built and _is_with_state(row.before, row.after)]
        _check_not_built(optimizers, with_new_weights)
        for row in rows:
            if row.after is not row.before:
                _give_policy(row.layer, row.after)
            make_changes(row.layer, row.changes)
        if with_new_weights:
            _keras.track_parameters_again(model)
        _save_as_made(model, conversion.made_with)
        if not conversion.seen:
            restore(model, "build", kind="converted")  # An earlier conversion is not to go on.
        conversion.note(rows)
        _conversions[model] = conversion
        _name_unmatched_rules(model, conversion)
        return True

    return convert


def _is_with_state(before, after) -> bool:
    """Whether a layer has the state of Keras' float8 under one of two policies alone."""
    return (before.quantization_mode is None) != (after.quantization_mode is None)


def _check_not_built(optimizers, layers):
    built = [type(optimizer).__name__ for optimizer in optimizers if optimizer.built]
    if built and layers:
        raise ValueError(
            "Expected an optimizer that is not built yet, where layers are given float8 state or lose it: 'delayed' "
            f"keeps it in variables of the layer, which the optimizer is built on. Received: a built {built[0]} and "
            f"{len(layers)} such layers, '{layers[0].path}' first. Call `model.compile` with a new optimizer first, "
            "and build the model before you prepare it."
        )


def _give_policy(layer, policy, state=()):
    """Sets the policy of `layer`, and gives it the float8 state that goes with it: `state`, or what Keras makes."""
    before, needs_state = float8_state(layer), policy.quantization_mode is not None
    if needs_state and state and before is None:
        _keras.give_variables(layer, state)
    with _keras.strategy_scope(layer.variables[0]) if needs_state and layer.built else contextlib.nullcontext():
        set_layer_policy(layer, policy)
    if not needs_state and before is not None:
        _keras.take_variables(layer, before)
    elif before is None:
        # As in a layer that is built under this policy, or loaded from its configuration.
        _keras.put_first(layer, (float8_state(layer) or {}).values())


def _convert_when_built(model, convert):
    """Converts `model` once more when it is built: its layers have their paths then, and layers of their own."""
    build = model.build

    @functools.wraps(build)
    def build_and_convert(*args, **kwargs):
        build(*args, **kwargs)
        restore(model, "build", kind="converted")
        with _put_back_on_error(model):
            is_converted = convert()
        if is_converted:
            _refresh(model)
            store_weights(model, [])
            end_in_float32(model)

    replace(model, "build", build_and_convert, kind="converted")


def _name_unmatched_rules(model, conversion):
    # A layer that is not built may be matched later, and others may come into being in it.
    if conversion.policy.compute_dtype not in SIXTEEN_BIT_DTYPES or not _keras.is_built(model):
        return
    keep_16_bits = [rule for rule in conversion.policy.keep_16_bits if rule not in ENDS]
    messages = unmatched(model, conversion.policy.keep_float32, "keep_float32")
    for message in [*messages, *unmatched(model, keep_16_bits, "keep_16_bits")]:
        if message not in conversion.told:
            conversion.told.add(message)
            warnings.warn(message, stacklevel=4)


def _save_as_made(model, made_with):
    """Saves a subclassed model with the policy that its author made it with.

    Its layers are made anew by its `__init__`, under the global policy; with a 16-bit policy of its own the loaded
    model would cast the inputs of float32 layers. (Sequential and Functional models load without one of their own.)
    """
    if model.compute_dtype not in SIXTEEN_BIT_DTYPES:
        restore(model, "get_config", kind="converted")
        return
    if not has_own_call(model) or model.dtype_policy == made_with:
        return
    get_config, serialized = model.get_config, keras.dtype_policies.serialize(made_with)

    @functools.wraps(get_config)
    def get_config_as_made():
        config = get_config()
        return {**config, "dtype": serialized} if "dtype" in config else config

    replace(model, "get_config", get_config_as_made, kind="converted")


def _check_variable_dtypes(model, policy, float32_variables):
    check_switch("float32_variables", float32_variables, "Pass True to make float16 variables float32.")
    half = [v.path for v in model.variables if v.dtype == "float16"]
    if policy.variable_dtype == "float16" or (half and not float32_variables):
        what = f"float16 variables {half[:3]}" if half else f"policy '{policy.name}'"
        raise ValueError(
            "Expected no float16 variables before and after: small updates are lost in them. Received: "
            f"{what}. Use 'mixed_float16', or 'bfloat16' for small weights, with `float32_variables=True` if the model "
            "has float16 variables: they become float32 ones of the same values."
        )
    optimizer = getattr(model, "optimizer", None)
    if half and optimizer is not None and optimizer.built:
        raise ValueError(
            "Expected no optimizer that is built on the float16 variables: its state is of their dtype. Received: "
            f"model '{model.name}' with a built {type(optimizer).__name__}. Call `model.compile` with a new one first."
        )


def _store(model, dtypes):
    """Stores variables of `model` in other dtypes, given as `(variable, dtype)`."""
    for variable, dtype in dtypes:
        _keras.retype(variable, dtype)
    if dtypes:
        _keras.track_parameters_again(model)


def store_weights(model, optimizers):
    """Stores the weights of each layer that was converted in the dtype that its policy says, to the nearest.

    A layer that computes in float32 from now on has all of its variables in float32. Of one that only trains in
    float32, frozen weights stay small: they need no room for updates. In bfloat16 a layer has its weights, trained or
    frozen; statistics stay in float32. The state of `optimizers` that are built on the weights follows.
    """
    conversion = _conversions[model]
    rows, conversion.unstored = conversion.unstored, []
    changed = _weight_dtypes(rows)
    if not changed:
        return
    conversion.times_stored += 1
    with following(optimizers, [variable for variable, _ in changed]):
        _store(model, changed)


def _weight_dtypes(rows) -> list:
    """Returns `(variable, dtype)` of the weights that rows of a plan store in another dtype; see `store_weights`."""
    found: dict = {}
    for row in rows:
        dtype = row.after.variable_dtype
        weights = [v for v in _keras.own_weights(row.layer) if not _keras.overwrites_with_gradient(v)]
        variables = weights if dtype == SMALL_DTYPE else _keras.own_variables(row.layer)
        if row.after.compute_dtype in SIXTEEN_BIT_DTYPES and dtype == "float32":
            frozen = {id(v) for v in weights if not (v.trainable and row.layer.trainable)}
            variables = [v for v in variables if id(v) not in frozen]
        # A variable of several rows, of layers that share it or of one conversion after another, follows the last.
        found |= {id(v): (v, dtype) for v in variables if dtype in ("float32", SMALL_DTYPE)}
    stored = [(v, dtype, _keras.stored_dtype(v)) for v, dtype in found.values()]
    return [(v, dtype) for v, dtype, old in stored if old != dtype and old in ("float32", *SIXTEEN_BIT_DTYPES)]


def unstored_dtypes(model) -> dict:
    """Returns `{id(variable): dtype}` of the weights that `store_weights` is to store anew."""
    conversion = _conversions.get(model)
    rows = [] if conversion is None else conversion.unstored
    return {id(variable): dtype for variable, dtype in _weight_dtypes(rows)}


def planned_weight_dtypes(model, policy) -> dict:
    """Returns `{id(variable): dtype}` of the weights that `apply_policy(model, policy)` would store anew."""
    rows = plan(model, policy, Conversion(model, policy, earlier=_conversions.get(model)))
    return {id(variable): dtype for variable, dtype in _weight_dtypes([row for row in rows if row.stores_anew])}


def recorded(model, on=None):
    """Returns a function that gives every layer of `model`, or of `on`, a copy of it, what it computes in now.

    Called with `refresh=False` it leaves the symbolic dtypes as they are, which only new graphs are made of: on a
    large model that is quick.
    """
    on = model if on is None else on
    before = [
        (target, layer_policy(layer), float8_state(target), changes_of(layer), float8_change(layer))
        for layer, target in zip(layers_of(model), layers_of(on), strict=True)
    ]
    stored = [(v, _keras.stored_dtype(v)) for v in on.variables]

    def put_back(refresh: bool = True):
        with_new_weights = False
        for layer, policy, state, *_ in before:
            if not is_quantized(layer) and layer_policy(layer) is not policy:
                with_new_weights |= _is_with_state(layer_policy(layer), policy)
                _give_policy(layer, policy, state)
        in_float8 = {id(layer): change for layer, *_, change in before if change is not None}
        names = planned_changes(on, _dtypes_of(on), in_float8)
        for layer, *_, changes, _ in before:
            make_changes(layer, names[id(layer)])
            # A layer that was made in 16 bits, and never converted, has had none.
            for name, kind in changes_of(layer) - changes:
                restore(layer, name, kind=kind)
        if with_new_weights:
            _keras.track_parameters_again(on)
        _store(on, [(variable, dtype) for variable, dtype in stored if _keras.stored_dtype(variable) != dtype])
        _save_as_made(on, on.dtype_policy)
        if refresh:
            _refresh(on)

    return put_back


def _refresh(model):
    """Brings the symbolic dtypes of every Functional and Sequential model in `model` up to date, inner ones first."""
    for layer in reversed(layers_of(model)):
        graph = _keras.graph_of(layer)
        if graph is not None:
            _keras.refresh_symbolic_dtypes(graph)


def end_in_float32(model, in_file: bool = False):
    """Casts 16-bit outputs of a Functional or Sequential model to float32; takes out casts that are not needed.

    With `in_file` the casts are layers, which files of all formats can hold.
    """
    graph = _keras.graph_of(model)
    if graph is None:
        return
    restore(graph, "get_config", kind="converted")
    structure = _keras.output_structure(graph)
    old_outputs = keras.tree.flatten(structure)
    plain_outputs = [without_cast(output) for output in old_outputs]
    cast = _cast_by_layer if in_file else _keras.cast_to_float32
    outputs = [
        cast(output, i) if output.dtype in SIXTEEN_BIT_DTYPES else output for i, output in enumerate(plain_outputs)
    ]
    if any(new is not old for new, old in zip(outputs, old_outputs, strict=True)):
        # The names that Keras gives outputs are those of what made them.
        names = [_keras.made_by(output)[0].name for output in (outputs if in_file else plain_outputs)]
        _keras.replace_outputs(graph, keras.tree.pack_sequence_as(structure, outputs), names)
        if graph is not model:
            _keras.replace_last_layers(model, _cast_layers(old_outputs), _cast_layers(outputs))
    cast_outputs = [plain for plain, new in zip(plain_outputs, outputs, strict=True) if new is not plain]
    if not in_file and any(map(_loses_in_file, cast_outputs)):
        _save_without_casts(graph, keras.tree.pack_sequence_as(structure, plain_outputs))


def _loses_in_file(output) -> bool:
    """Whether an output would lose something of its user's by a cast behind it in plain Keras: its name, or a mask."""
    maker = _keras.made_by(output)[0]
    named_by_keras = re.sub(r"_\d+$", "", maker.name).replace("_", "") == type(maker).__name__.lower()
    return not named_by_keras or _keras.has_mask(output)


def _save_without_casts(graph, plain_outputs):
    get_config = graph.get_config

    @functools.wraps(get_config)
    def get_config_without_casts():
        with _keras.replaced_outputs(graph, plain_outputs):
            return get_config()

    replace(graph, "get_config", get_config_without_casts, kind="converted")


def _cast_layers(outputs) -> list:
    layers = [_keras.made_by(output)[0] for output in outputs]
    return [layer for layer in layers if layer.name.startswith(CAST_NAME)]


def _cast_by_layer(output, index: int):
    return keras.layers.Activation("linear", dtype="float32", name=f"{CAST_NAME}_{index}")(output)


def without_cast(output):
    """Returns what the cast of an earlier conversion was given; any other output as it is."""
    layer, node_index = _keras.made_by(output)
    if layer.name.startswith(CAST_NAME) or _keras.is_float32_cast(output):
        return _keras.inputs_of_call(layer, node_index)[0]
    return output
