"""`apply_policy`: gives an existing model the dtypes of a policy, its weights untouched."""

import functools
import importlib
import re
import warnings
import weakref

import keras

from mpkeras import _keras
from mpkeras.conversion import attention, mixing, penalties
from mpkeras.conversion.overrides import is_overridden, overridden, override, restore
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.quantized import bound_layers, is_quantized
from mpkeras.policies.registry import get_policy
from mpkeras.policies.rules import apply_rules, layer_policy, layers_to_keep, set_layer_policy, unmatched

_CONVERTIBLE = ("float32", "float16", "bfloat16")
# What ends a 16-bit output in float32. In a file of `convert` it is a layer, known by this name on the way back.
CAST_NAME = "mpkeras_float32_output"
# Model -> the rules that matched nothing in it, of which its user has been told.
_told: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# Model -> the policy that `apply_policy` gave it.
_converted_by: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# Model -> the dtypes from which layers that come into being later are converted.
_later_sources: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def apply_policy(model, policy=None, *, float32_variables: bool = False):
    """Gives a model the dtypes of a policy and returns the model to use.

    Works on models of any kind, built or not, compiled or not: Functional, Sequential, nested, subclassed,
    models that share layers. Layers compute in the policy's dtype, except those its `keep_float32` rules name, and
    those that are quantized or run quantized layers in their `call`: they stay as they are. The weights are the same
    variables as before. Symbolic dtypes of Functional and Sequential models follow, and 16-bit outputs of such a model
    end in a cast to float32: the last product stays in 16 bits, while whoever uses the model gets float32, as before.
    The cast is no layer: the layers and the names of the outputs stay those of the model.

    The file of a Functional model holds the cast as well, unless an output has a mask or a name that you gave it, which
    plain Keras would lose behind a cast. Such a file, and that of a Sequential model, gives plain Keras the same values
    in 16 bits; so does a Sequential model whose layers have changed since. A model that is not built is converted once
    more when it is.

    `apply_policy(model, "float32")` is the way back: the model is then as it was. What its user has changed since is
    left alone.

    Args:
        model: A `keras.Model`.
        policy: A policy or its name; by default the global one.
        float32_variables: Whether 16-bit variables become float32 ones of the same values: the master weights in
            which small updates are not lost. Without it such a model is refused.

    Returns:
        `model` itself, converted. It stays compiled; to train it with `fit` call `mpkeras.prepare`, or use the
        callback, or pass it to `mpkeras.make_train_step`. A subclassed model returns what its `call` returns.

    Raises:
        ValueError: If the policy is not known, asks for 16-bit variables, or the model has some and
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
    put_back = recorded(model)
    convert = layer_converter(model, policy)
    try:
        convert()
        _refresh(model)
    except Exception:
        put_back()
        raise
    _widen_variables(model)
    _end_in_float32(model)
    if not model.built:
        _convert_when_built(model, convert)
    # Functions that Keras compiled before hold the old dtypes.
    model.train_function = model.test_function = model.predict_function = None
    _converted_by[model] = policy
    _warn_unscaled(model)
    return model


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
    """Returns the `Policy` by which `apply_policy` last converted `model`; `None` if it did not."""
    return _converted_by.get(model)


def scales_loss(optimizer) -> bool:
    """Whether `optimizer` multiplies the loss before the backward pass."""
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
    return is_scaling and not getattr(optimizer, "scale_is_one", False)


def layer_converter(model, policy, converts: bool = True):
    """Returns a function that gives the layers of `model` their dtypes; called again, the new ones among them.

    Layers of a layer often come into being when it is built, in the middle of the first step.

    Args:
        model: A `keras.Model`.
        policy: A `Policy`.
        converts: Whether layers change to the policy's dtype, or only its float32 rules are applied.
    """
    # Among 16-bit layers a float32 layer is there on purpose; alone, it is what Keras does by default.
    has_16_bits = computes_in(model, SIXTEEN_BIT_DTYPES)
    sources: tuple[str, ...] = SIXTEEN_BIT_DTYPES if has_16_bits else _CONVERTIBLE
    if policy.compute_dtype not in SIXTEEN_BIT_DTYPES:
        sources = SIXTEEN_BIT_DTYPES
    if not converts:
        sources = ()
    # Of a model that an earlier conversion found in float32, a layer that is made from now on is in float32 by default.
    later_sources = _later_sources.get(model, sources) if has_16_bits else sources
    if converts and policy.compute_dtype in SIXTEEN_BIT_DTYPES:
        _later_sources[model] = later_sources
    target = policy.stock() or policy
    made_with = model.dtype_policy
    # Layer -> the path that it had when it was looked at last: it gets one when it is built.
    seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
    by_name: list = []  # What `path:` rules did to layers that had no path yet.
    restore(model, "build")  # An earlier conversion is not to go on.

    def convert() -> bool:
        layers = layers_of(model)
        if all(layer in seen and seen[layer] == layer.path for layer in layers):
            return False
        new_layers = [layer for layer in layers if layer not in seen]
        convertible = later_sources if seen else sources
        seen.update((layer, layer.path) for layer in layers)
        bound = bound_layers(model, policy.compute_dtype)
        for layer in new_layers:
            follows = layer.compute_dtype in convertible and id(layer) not in bound
            is_other = layer.compute_dtype != policy.compute_dtype or layer.variable_dtype in SIXTEEN_BIT_DTYPES
            if follows and is_other:
                set_layer_policy(layer, target)
        by_name[:] = _matched_by_path(model, policy, by_name)
        applied = apply_rules(model, policy)
        by_name.extend(change for change in applied if change.rule.startswith("path:") and not change.layer.path)
        _name_float16(model)
        _let_inputs_through(model)
        _save_as_made(model, made_with)
        _give_float32(model)
        for layer in layers:
            _cover(layer)
        _let_torch_modules_follow(new_layers)
        _name_unmatched_rules(model, policy)
        return True

    return convert


def _matched_by_path(model, policy, by_name) -> list:
    """Takes back what rules did to layers by their name that do not match their path, and returns what has none yet."""
    kept = {id(layer) for layer, _ in layers_to_keep(model, policy.keep_float32)}
    for change in by_name:
        is_as_moved = change.layer.compute_dtype == "float32" and not is_quantized(change.layer)
        if change.layer.path and id(change.layer) not in kept and is_as_moved:
            change.undo()
    return [change for change in by_name if not change.layer.path]


def _convert_when_built(model, convert):
    """Converts `model` once more when it is built: its layers have their paths then, and layers of their own."""
    build = model.build

    @functools.wraps(build)
    def build_and_convert(*args, **kwargs):
        build(*args, **kwargs)
        restore(model, "build")
        if convert():
            _refresh(model)
            _end_in_float32(model)

    override(model, "build", build_and_convert)


def _name_unmatched_rules(model, policy):
    # A layer that is not built may be matched later, and others may come into being in it.
    if policy.compute_dtype not in SIXTEEN_BIT_DTYPES or not _keras.is_built(model):
        return
    told = _told.setdefault(model, set())
    for message in unmatched(model, policy.keep_float32):
        if message not in told:
            told.add(message)
            warnings.warn(message, stacklevel=4)


def _cover(layer):
    """Installs the float32 cover of a 16-bit layer, or removes it from a float32 or quantized one."""
    if layer.compute_dtype in SIXTEEN_BIT_DTYPES and not is_quantized(layer):
        penalties.add_in_float32(layer)
        mixing.name_mixed_dtypes(layer)
        attention.save_memory(layer)
    else:
        _uncover(layer)


def _uncover(layer):
    penalties.add_as_before(layer)
    mixing.name_nothing(layer)
    attention.be_stock(layer)


def layers_of(model) -> list:
    return _keras.flatten_layers(model, include_self=True)


def computes_in(model, dtypes) -> bool:
    return not compute_dtypes(model).isdisjoint(dtypes)


def compute_dtypes(model) -> set[str]:
    """Returns what the layers of `model` compute in."""
    return {layer.compute_dtype for layer in layers_of(model)}


def _let_inputs_through(model):
    """Keeps Sequential and subclassed models from casting their inputs before their first layer sees them.

    Raw inputs may be beyond float16's 65504 and belong to a float32 normalization layer. A Functional model passes
    inputs on as they are; the others cast them to their own compute dtype, unless they are told not to. Where a model
    holds variables of its own, it computes with its inputs, and they stay as Keras has them.

    Not by another policy for the model: Keras' `compile` goes by its name.
    """
    # Of the models inside, a Sequential alone is sure to compute nothing with its inputs itself.
    sequentials = [layer for layer in layers_of(model) if isinstance(layer, keras.Sequential)]
    for layer in {id(layer): layer for layer in (model, *sequentials)}.values():
        casts = layer.compute_dtype in SIXTEEN_BIT_DTYPES and not _keras.casts_no_inputs(layer)
        if casts and not _keras.own_variables(layer):
            override(layer, "autocast", False)
        else:
            restore(layer, "autocast")


def _name_float16(model):
    """Names a Sequential or Functional model after its float16 layers; to how it computes its own policy is nothing.

    Keras' `compile` wraps the optimizer of a model whose own policy is "mixed_float16", and of no other.
    """
    if model.compute_dtype not in SIXTEEN_BIT_DTYPES and has_stock_call(model) and computes_in(model, ("float16",)):
        set_layer_policy(model, keras.DTypePolicy("mixed_float16"))


def has_stock_call(model) -> bool:
    """Whether the arithmetic of `model` is that of its layers: Sequential, Functional, or none at all."""
    return type(model).call.__module__.startswith("keras.")


def _save_as_made(model, made_with):
    """Lets the configuration of a subclassed model hold the policy that its author made it with.

    Its layers are made anew by its `__init__`, under the global policy; with a 16-bit policy of its own the loaded
    model would cast the inputs of float32 layers. (Sequential and Functional models load without a policy of
    their own.)
    """
    if model.compute_dtype not in SIXTEEN_BIT_DTYPES:
        restore(model, "get_config")
        return
    if has_stock_call(model) or model.dtype_policy == made_with or is_overridden(model, "get_config"):
        return
    get_config, serialized = model.get_config, keras.dtype_policies.serialize(made_with)

    @functools.wraps(get_config)
    def get_config_as_made():
        config = get_config()
        return {**config, "dtype": serialized} if "dtype" in config else config

    override(model, "get_config", get_config_as_made)


def _give_float32(model):
    """Lets the parts of a model without a `call` return float32: its own `train_step` computes with their outputs.

    There they meet the data and each other, and on TensorFlow float32 minus float16 is an error. The last product
    stays in 16 bits, as in a model that `apply_policy` converts.
    """
    if type(model).call is not keras.Model.call:
        return
    for part in _keras.direct_sublayers(model):
        if not isinstance(part, keras.Model) or not has_stock_call(part):
            continue
        if part.compute_dtype not in SIXTEEN_BIT_DTYPES:
            restore(part, "call")
        elif not is_overridden(part, "call"):
            override(part, "call", _with_float32_outputs(part.call))


def _with_float32_outputs(call):
    @functools.wraps(call)
    def call_and_cast(*args, **kwargs):
        return keras.tree.map_structure(_in_float32, call(*args, **kwargs))

    return call_and_cast


def _in_float32(value):
    return keras.ops.cast(value, "float32") if tensor_dtype(value) in SIXTEEN_BIT_DTYPES else value


def _let_torch_modules_follow(layers):
    if keras.backend.backend() == "torch":
        # Imported here: only the active backend may be.
        torch_policies = importlib.import_module("mpkeras.devices._torch")
        for layer in layers:
            torch_policies.let_module_follow(layer)


def _check_variable_dtypes(model, policy, float32_variables):
    if float32_variables not in (True, False):
        raise TypeError(
            f"Expected `float32_variables` to be True or False. Received: float32_variables={float32_variables!r}. "
            "Pass True to make 16-bit variables float32."
        )
    half = [v.path for v in model.variables if v.dtype in SIXTEEN_BIT_DTYPES]
    if policy.variable_dtype in SIXTEEN_BIT_DTYPES or (half and not float32_variables):
        what = f"16-bit variables {half[:3]}" if half else f"policy '{policy.name}'"
        raise ValueError(
            "Expected float32 variables before and after: `apply_policy` changes what layers compute in, and "
            f"keeps the weights as they are. Received: {what}. Use 'mixed_float16' or 'mixed_bfloat16', with "
            "`float32_variables=True` if the model has 16-bit variables: they become float32 ones of the same values."
        )
    optimizer = getattr(model, "optimizer", None)
    if half and optimizer is not None and optimizer.built:
        raise ValueError(
            "Expected no optimizer that is built on the 16-bit variables: its state is of their dtype. Received: model "
            f"'{model.name}' with a built {type(optimizer).__name__}. Call `model.compile` with a new optimizer first."
        )


def _widen_variables(model):
    half = [variable for variable in model.variables if variable.dtype in SIXTEEN_BIT_DTYPES]
    for variable in half:
        _keras.widen(variable)
    if half:
        _keras.track_parameters_again(model)


def recorded(model, on=None):
    """Returns a function that gives every layer of `model` what it computes in now.

    Called with `refresh=False` it leaves the symbolic dtypes as they are, which only new graphs are made of: on a
    large model that is quick.

    Args:
        model: A `keras.Model`.
        on: A copy of `model`, whose layers the function is for; by default `model` itself.
    """
    on = model if on is None else on
    before = [
        (target, layer_policy(layer), overridden(layer))
        for layer, target in zip(layers_of(model), layers_of(on), strict=True)
    ]

    def put_back(refresh: bool = True):
        for layer, policy, covers in before:
            if is_quantized(layer):
                continue
            set_layer_policy(layer, policy)
            _cover(layer)
            # A layer that was made in 16 bits, and never converted, has had no covers.
            for name in overridden(layer) - covers:
                restore(layer, name)
        _let_inputs_through(on)
        _save_as_made(on, on.dtype_policy)
        _give_float32(on)
        if refresh:
            _refresh(on)

    return put_back


def _refresh(model):
    """Brings the symbolic dtypes of every Functional and Sequential model in `model` up to date, inner ones first."""
    for layer in reversed(layers_of(model)):
        graph = _keras.graph_of(layer)
        if graph is not None:
            _keras.refresh_symbolic_dtypes(graph)


def end_in_float32_layers(model):
    """Makes layers of the casts behind the outputs of a converted model, as all files can hold them."""
    _end_in_float32(model, in_file=True)


def _end_in_float32(model, in_file: bool = False):
    """Lets 16-bit outputs of a Functional or Sequential model end in float32; takes out casts that are not needed.

    Args:
        model: A model of any kind.
        in_file: Whether plain Keras is to find the casts in a file: it knows them as layers only.
    """
    graph = _keras.graph_of(model)
    if graph is None:
        return
    restore(graph, "get_config")
    structure = _keras.output_structure(graph)
    old_outputs = keras.tree.flatten(structure)
    plain_outputs = [without_cast(output) for output in old_outputs]
    cast = _cast_in_layer if in_file else _keras.cast_to_float32
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

    override(graph, "get_config", get_config_without_casts)


def _cast_layers(outputs) -> list:
    layers = [_keras.made_by(output)[0] for output in outputs]
    return [layer for layer in layers if layer.name.startswith(CAST_NAME)]


def _cast_in_layer(output, index: int):
    return keras.layers.Activation("linear", dtype="float32", name=f"{CAST_NAME}_{index}")(output)


def without_cast(output):
    """Returns what the cast of an earlier conversion was given; any other output as it is."""
    layer, node_index = _keras.made_by(output)
    if layer.name.startswith(CAST_NAME) or _keras.is_float32_cast(output):
        return _keras.inputs_of_call(layer, node_index)[0]
    return output
