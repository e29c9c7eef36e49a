"""`apply_policy`: gives an existing model the dtypes of a policy, its weights untouched."""

import importlib
import warnings
import weakref

import keras

from mpkeras import _keras_private
from mpkeras.policies import attention, mixing, penalties, products
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.registry import get_policy
from mpkeras.policies.rules import apply_rules, layer_policy, set_layer_policy

_CONVERTIBLE = ("float32", "float16", "bfloat16")
# The layer that ends a 16-bit output in float32; known by its name, so that the way back takes it out again.
CAST_NAME = "mpkeras_float32_output"


def apply_policy(model, policy=None, *, float32_variables: bool = False):
    """Gives a model the dtypes of a policy and returns the model to use.

    Works on models of any kind, built or not, compiled or not: Functional, Sequential, nested, subclassed,
    models that share layers. Layers compute in the policy's dtype, except those its `keep_float32` rules name;
    the weights are the same variables as before. Symbolic dtypes of Functional and Sequential models follow,
    and 16-bit outputs of such a model end in a cast to float32: the last product stays in 16 bits, while whoever
    uses the model gets float32, as before.

    `apply_policy(model, "float32")` is the way back: the model is then as it was.

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
    try:
        layer_converter(model, policy)()
        _refresh(model)
    except Exception:
        put_back()
        raise
    _widen_variables(model)
    _end_in_float32(model)
    # Functions that Keras compiled before hold the old dtypes.
    model.train_function = model.test_function = model.predict_function = None
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
    sources = SIXTEEN_BIT_DTYPES if computes_in(model, SIXTEEN_BIT_DTYPES) else _CONVERTIBLE
    if policy.compute_dtype not in SIXTEEN_BIT_DTYPES:
        sources = SIXTEEN_BIT_DTYPES
    target = policy.stock() or policy
    seen: weakref.WeakSet = weakref.WeakSet()

    def convert() -> bool:
        new_layers = [layer for layer in layers_of(model) if layer not in seen]
        if not new_layers:
            return False
        seen.update(new_layers)
        for layer in new_layers:
            # Of an earlier policy, or of a file: its product counts as what the layer computes in.
            products.join(layer)
        for layer in new_layers if converts else []:
            follows = layer.compute_dtype in sources and layer.quantization_mode is None
            is_other = layer.compute_dtype != policy.compute_dtype or layer.variable_dtype in SIXTEEN_BIT_DTYPES
            if follows and is_other:
                set_layer_policy(layer, target)
        apply_rules(model, policy)
        _let_inputs_through(model)
        for layer in new_layers:
            _cover(layer)
        _let_torch_modules_follow(new_layers)
        return True

    return convert


def _cover(layer):
    """Lets what surrounds 16-bit arithmetic in a layer be as it should; takes it back from a float32 layer."""
    if layer.compute_dtype in SIXTEEN_BIT_DTYPES:
        penalties.add_in_float32(layer)
        mixing.name_mixed_dtypes(layer)
        attention.save_memory(layer)
    else:
        penalties.add_as_before(layer)
        mixing.name_nothing(layer)
        attention.be_stock(layer)


def layers_of(model) -> list:
    return _keras_private.flatten_layers(model, include_self=True)


def computes_in(model, dtypes) -> bool:
    return not compute_dtypes(model).isdisjoint(dtypes)


def compute_dtypes(model) -> set[str]:
    """Returns what the layers of `model` compute in; of those that only multiply in 16 bits, that dtype."""
    return {products.compute_dtype(layer) for layer in layers_of(model)}


def _let_inputs_through(model):
    """Keeps a Sequential or subclassed model from casting its inputs before its first layer sees them.

    Raw inputs may be beyond float16's 65504 and belong to a float32 normalization layer. A Functional model
    passes inputs on as they are; the others cast them to their own compute dtype. Where the model holds no
    variables of its own, nothing else depends on that dtype.
    """
    if model.compute_dtype not in SIXTEEN_BIT_DTYPES or _keras_private.casts_no_inputs(model):
        return
    if not _keras_private.own_variables(model):
        set_layer_policy(model, keras.DTypePolicy("float32"))


def _let_torch_modules_follow(layers):
    if keras.backend.backend() == "torch":
        # Imported here: only the active backend may be.
        torch_policies = importlib.import_module("mpkeras.policies._torch")
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
        _keras_private.widen(variable)
    for layer in layers_of(model) if half else []:
        _keras_private.track_parameters_again(layer)


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
        (target, layer_policy(layer), products.product_policy(layer), products.saved_mark(layer))
        for layer, target in zip(layers_of(model), layers_of(on), strict=True)
    ]

    def put_back(refresh: bool = True):
        for layer, policy, product_policy, mark in before:
            set_layer_policy(layer, policy)
            if mark is not None:
                _keras_private.replace_policy_map(layer, mark)
            elif product_policy is not None:
                products.split(layer, product_policy)
            _cover(layer)
        if refresh:
            _refresh(on)

    return put_back


def _refresh(model):
    """Brings the symbolic dtypes of every Functional and Sequential model in `model` up to date, inner ones first."""
    for layer in reversed(layers_of(model)):
        graph = _keras_private.graph_of(layer)
        if graph is not None:
            _keras_private.refresh_symbolic_dtypes(graph)


def _end_in_float32(model):
    """Lets 16-bit outputs of a Functional or Sequential model end in float32; takes out casts that are not needed."""
    graph = _keras_private.graph_of(model)
    if graph is None:
        return
    structure = _keras_private.output_structure(graph)
    old_outputs = keras.tree.flatten(structure)
    outputs = [_without_cast(output) for output in old_outputs]
    outputs = [_cast(i)(output) if output.dtype in SIXTEEN_BIT_DTYPES else output for i, output in enumerate(outputs)]
    if all(new is old for new, old in zip(outputs, old_outputs, strict=True)):
        return
    _keras_private.replace_outputs(graph, keras.tree.pack_sequence_as(structure, outputs))
    if graph is not model:
        _keras_private.replace_last_layers(model, _casts(old_outputs), _casts(outputs))


def _casts(outputs) -> list:
    layers = [_keras_private.made_by(output)[0] for output in outputs]
    return [layer for layer in layers if layer.name.startswith(CAST_NAME)]


def _cast(index: int):
    return keras.layers.Activation("linear", dtype="float32", name=f"{CAST_NAME}_{index}")


def _without_cast(output):
    """Returns what the cast of an earlier conversion was given; any other output as it is."""
    layer, node_index = _keras_private.made_by(output)
    if layer.name.startswith(CAST_NAME):
        return _keras_private.inputs_of_call(layer, node_index)[0]
    return output
