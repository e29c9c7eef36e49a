"""`prepare`: makes a compiled model train under a policy, with nothing failing silently."""

import weakref

import keras

from mpkeras import _keras_private, loss_scaling
from mpkeras.optimizers import LossScaleOptimizer
from mpkeras.policies.rules import apply_rules, set_layer_policy
from mpkeras.training import rollback as guard
from mpkeras.training.backend import training_backend
from mpkeras.training.choice import (
    SIXTEEN_BITS,
    check_variables,
    chosen_policy,
    computes_in,
    layers_of,
    rule_for,
    wrapped,
)

_CONVERTIBLE = ("float32", "float16", "bfloat16")


def prepare(model, policy=None, *, loss_scale=None, jit_compile=None, rollback: bool = True):
    """Makes a compiled model train in mixed precision, and returns it.

    - Layers compute in the policy's dtype, except those its `keep_float32` rules name. A model whose layers
      already compute in 16 bits keeps the float32 layers its author chose; in a float32 model all layers
      change.
    - Every optimizer of the model is wrapped in a `mpkeras.LossScaleOptimizer` (stock Keras' one is replaced,
      with its state). Whether the loss is scaled is decided by what the layers compute in.
    - The train step, the user's own included, is guarded: after a step whose loss or gradients are not finite
      every variable of the model is as before.

    Calling it again changes only what differs.

    Args:
        model: A compiled `keras.Model`, built or not.
        policy: A policy or its name; by default the global one, unless layers of the model already compute
            in 16 bits.
        loss_scale: `"dynamic"`, a number (fixed) or a `mpkeras.LossScale`; by default what the policy and the
            optimizer say.
        jit_compile: Whether the train step is compiled by XLA; by default as `compile` decided.
        rollback: Whether the train step is guarded. Without it a skipped step still updates
            BatchNormalization statistics, metrics and random generators, and a float32 or bfloat16 model is
            not checked at all.

    Returns:
        `model`.

    Raises:
        ValueError: If the model is not compiled, the policy is not known, trainable variables are float16, or
            XLA does not work with the model's distribution strategy. The model is then as before.
        TypeError: If an argument is of a wrong type.
    """
    _check_model(model)
    chosen = chosen_policy(model, policy)
    explicit_rule = loss_scaling.resolve(loss_scale)
    if jit_compile not in (None, True, False):
        raise TypeError(
            f"Expected `jit_compile` to be True, False or None. Received: jit_compile={jit_compile!r}. "
            "Leave it out to train as `compile` decided."
        )
    training_backend.check_jit_compile(model, model.jit_compile if jit_compile is None else jit_compile)
    check_variables(model, chosen)

    convert = _converter(model, chosen, converts=policy is not None or not computes_in(model, SIXTEEN_BITS))
    convert()
    with training_backend.variable_scope(model):
        _wrap_optimizers(model, chosen, explicit_rule, rollback)
    if jit_compile is not None:
        model.jit_compile = jit_compile
    if rollback or any(isinstance(o, LossScaleOptimizer) for o in guard.find_optimizers(model).values()):
        guard.install(model, rollback=rollback, convert_new_layers=convert)
    else:
        guard.uninstall(model)
    return model


def _check_model(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a `keras.Model`. Received: {model!r} (of type {type(model).__name__}). "
            "Pass the model that you train."
        )
    if not guard.find_optimizers(model):
        raise ValueError(
            f"Expected a compiled model. Received: model '{model.name}', which has no optimizer. "
            "Call `model.compile(...)` first."
        )


def _converter(model, policy, converts: bool):
    """Returns a function that gives the layers of `model` their dtypes; called again, the new ones among them.

    Layers of a layer often come into being when it is built, in the middle of the first step.
    """
    # Among 16-bit layers a float32 layer is there on purpose; alone, it is what Keras does by default.
    sources = SIXTEEN_BITS if computes_in(model, SIXTEEN_BITS) else _CONVERTIBLE
    if policy.compute_dtype not in SIXTEEN_BITS:
        sources = SIXTEEN_BITS
    target = policy.stock() or policy
    seen = weakref.WeakSet()

    def convert():
        new_layers = [layer for layer in layers_of(model) if layer not in seen]
        if not new_layers:
            return
        seen.update(new_layers)
        for layer in new_layers if converts else []:
            follows = layer.compute_dtype in sources and layer.quantization_mode is None
            if follows and layer.compute_dtype != policy.compute_dtype:
                set_layer_policy(layer, target)
        apply_rules(model, policy)
        _let_inputs_through(model)
        training_backend.track_random_states(model)

    return convert


def _let_inputs_through(model):
    """Keeps a Sequential or subclassed model from casting its inputs before its first layer sees them.

    Raw inputs may be beyond float16's 65504 and belong to a float32 normalization layer. A Functional model
    passes inputs on as they are; the others cast them to their own compute dtype. Where the model holds no
    variables of its own, nothing else depends on that dtype.
    """
    if model.compute_dtype not in SIXTEEN_BITS or _keras_private.casts_no_inputs(model):
        return
    if not _keras_private.own_variables(model):
        set_layer_policy(model, keras.DTypePolicy("float32"))


def _wrap_optimizers(model, policy, explicit_rule, rollback: bool):
    computes_float16 = computes_in(model, ("float16",))
    replaced, sharing = {}, {}
    for optimizer in guard.find_optimizers(model).values():
        rule = rule_for(optimizer, policy, explicit_rule, computes_float16, rollback)
        wrapper = wrapped(optimizer, rule, sharing)
        if wrapper is not optimizer:
            replaced[id(optimizer)] = wrapper
    guard.replace_optimizers(model, replaced)
    if getattr(model, "optimizer", None) is not None:
        _keras_private.replace_compiled_optimizer(model, model.optimizer)
