"""`apply_policy`: gives an existing model the dtypes of a policy."""

import functools
import warnings

import keras

from mpkeras import _keras
from mpkeras._arguments import check_switch
from mpkeras._replaced import is_replaced, replace, restore
from mpkeras.conversion.converter import convert_new, convert_when_built, layer_converter
from mpkeras.conversion.graphs import refresh_graphs
from mpkeras.conversion.last import conversion_of
from mpkeras.conversion.outputs import end_in_float32
from mpkeras.conversion.plan import calculates_in, layers_of
from mpkeras.conversion.store_weights import store, store_weights
from mpkeras.conversion.undo import converting, forget_functions, put_back_on_error
from mpkeras.policies.dtypes import SMALL_DTYPE
from mpkeras.policies.registry import get_policy


def apply_policy(model, policy=None, *, float32_variables: bool = False):
    """Gives a model the dtypes of a policy and returns the model to use.

    Works on models of any kind, built or not, compiled or not: Functional, Sequential, nested, subclassed,
    models that share layers. Layers compute in the policy's dtype, except those its `keep_float32` rules name, and
    those that are quantized or run quantized layers in their `call`: they stay as they are. A layer that writes state
    in its `call` computes in float32. The weights are the same variables as before, with the same values: under a
    policy with bfloat16 variables rounded to the nearest, once, but those of layers that stay in float32. Symbolic
    dtypes of Functional and Sequential models follow.

    Outputs of the model are float32, as before. The layers that make an output compute in float32 by the rule
    "outputs"; which these are, a `call` of the user's own tells when it runs first. Where an output is in 16 bits (a
    policy without the rule, a head of 4 million weights and more, quantized layers), it ends in a cast to float32. The
    cast is no layer: the layers and the names of the outputs stay those of the model.

    The file of a Functional model holds the cast as well, unless an output has a mask or a name that you gave it, which
    plain Keras would lose behind a cast. Such a file, and that of a Sequential model, gives plain Keras the same values
    in 16 bits; so does a Sequential model whose layers have changed since. A model that is not built is converted once
    more when it is.

    `apply_policy(model, "float32")` is the way back: the model is then as it was. Changes of the user's since are
    left alone.

    Args:
        model: A `keras.Model`.
        policy: A policy or its name; by default the global one.
        float32_variables: Whether float16 variables become float32 ones of the same values: the master weights in
            which small updates are not lost. Without it such a model is refused. (Those in bfloat16 follow the policy.)

    Returns:
        `model` itself, converted. It stays compiled; to train it with `fit` call `mpkeras.prepare`, or use the
        callback, or pass it to `mpkeras.make_train_step`; compiled again while `mpkeras.set_global_policy` is in force,
        it is prepared. A warning says where it is compiled, before or
        behind this, with an optimizer that cannot train it in plain Keras. A subclassed model returns float32, too.

    Raises:
        ValueError: If the policy is not known, asks for float16 variables, or the model has some and
            `float32_variables` is false or its optimizer is built on them. The model is then as before.
        TypeError: If an argument is of a wrong type, or a layer of the user's own in a Functional or Sequential
            model mixes other float dtypes into the policy's: it is named. The model is then as before.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
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
    convert = layer_converter(model, policy)

    def convert_new_layers():
        if convert_new(model, convert, put_back_on_error):
            store_weights(model, [])
            end_in_float32(model)

    with converting(model, refreshes=True):
        convert()
        refresh_graphs(model)
    record = getattr(optimizer, "record", None)
    if record is not None:
        record.note_policy(policy, conversion_of(model).spares_float32)
    store_weights(model, optimizers)
    store(model, [(variable, "float32") for variable in model.variables if variable.dtype == "float16"])
    end_in_float32(model)
    convert_when_built(model, convert_new_layers)
    forget_functions(model, "train_function")
    _warn_unscaled(model)
    _warn_not_rounded(model, policy)
    if SMALL_DTYPE in (policy.variable_dtype, policy.slot_dtype):
        _look_at_compile(model)
    else:
        restore(model, "compile", kind="converted")
    return model


def _look_at_compile(model):
    """Lets `compile` of `model` say as well where the optimizer that it is given cannot train it.

    An optimizer that scales no loss need not be looked for there: Keras itself wraps it.
    """
    on_instance = vars(model).get("compile")

    @functools.wraps(model.compile)
    def compile_and_look(*args, **kwargs):
        # The method of the class as it is then: it may be covered by a policy that is set later.
        compile = functools.partial(type(model).compile, model) if on_instance is None else on_instance
        result = compile(*args, **kwargs)
        # A prepared model wraps its optimizer when this is done.
        if not is_replaced(model, "compile", "guard"):
            _warn_not_rounded(model, conversion_of(model).policy)
        return result

    replace(model, "compile", compile_and_look, kind="converted")


def _warn_unscaled(model):
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not calculates_in(model, ("float16",)):
        return
    if not scales_loss(optimizer):
        warnings.warn(
            f"Model '{model.name}' computes in float16 now, but is compiled with an optimizer that scales no loss: "
            "small gradients would be lost. Before `fit`, call `mpkeras.prepare(model)`.",
            stacklevel=3,
        )


def _warn_not_rounded(model, policy):
    """Warns where the optimizer that a model is compiled with cannot train what is stored small."""
    optimizer = getattr(model, "optimizer", None)
    # Of those that scale the loss, ours has slots, and rounds what it assigns.
    if optimizer is None or not model.compiled or hasattr(optimizer, "slot_dtype"):
        return
    remedy = "Before `fit`, call `mpkeras.prepare(model)`, or compile it with a `mpkeras.LossScaleOptimizer`."
    if any(_has_small_weights(layer) for layer in layers_of(model)):
        warnings.warn(
            f"Model '{model.name}' has trainable bfloat16 variables now, but is compiled with "
            f"{type(optimizer).__name__}: there small updates are lost, with Adam all of them. {remedy}",
            stacklevel=3,
        )
    elif policy.slot_dtype == SMALL_DTYPE:
        warnings.warn(
            f"Policy '{policy.name}' asks for optimizer state in {SMALL_DTYPE}, but model '{model.name}' is compiled "
            f"with {type(optimizer).__name__}, which keeps it in float32. {remedy}",
            stacklevel=3,
        )


def _has_small_weights(layer) -> bool:
    if not layer.built:
        return layer.trainable and layer.variable_dtype == SMALL_DTYPE
    return any(v.trainable and _keras.stored_dtype(v) == SMALL_DTYPE for v in _keras.own_weights(layer))


def scales_loss(optimizer) -> bool:
    """Whether `optimizer` multiplies the loss before the backward pass."""
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
    return is_scaling and not getattr(optimizer, "scale_is_one", False)


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
