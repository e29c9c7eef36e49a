"""`prepare`: makes a compiled model train under a policy, with nothing failing silently."""

import weakref

import keras

from mpkeras import _keras_private, loss_scaling
from mpkeras.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.optimizer_wrapping import rewrapped
from mpkeras.optimizers import LossScaleOptimizer
from mpkeras.policies.registry import get_policy
from mpkeras.policies.rules import apply_rules, set_layer_policy
from mpkeras.training import rollback as guard

_CONVERTIBLE = ("float32", "float16", "bfloat16")
_SIXTEEN_BITS = ("float16", "bfloat16")


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
    chosen = _chosen_policy(model, policy)
    explicit_rule = loss_scaling.resolve(loss_scale)
    if jit_compile not in (None, True, False):
        raise TypeError(
            f"Expected `jit_compile` to be True, False or None. Received: jit_compile={jit_compile!r}. "
            "Leave it out to train as `compile` decided."
        )
    guard._backend.check_jit_compile(model, model.jit_compile if jit_compile is None else jit_compile)
    _check_variables(model, chosen)

    convert = _converter(model, chosen, converts=policy is not None or not _computes_in(model, _SIXTEEN_BITS))
    convert()
    with guard._backend.variable_scope(model):
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


def _chosen_policy(model, policy):
    """Returns the `Policy` whose rules and loss scale hold for `model`."""
    if policy is not None:
        return get_policy(policy)
    global_policy = get_policy(None)
    dtypes = {layer.compute_dtype for layer in _layers(model)} & set(_SIXTEEN_BITS)
    if not dtypes or global_policy.compute_dtype in dtypes:
        return global_policy
    # The layers, not the model's name or the global policy, say what this model computes in.
    return get_policy("mixed_float16" if "float16" in dtypes else "mixed_bfloat16")


def _layers(model) -> list:
    return _keras_private.flatten_layers(model, include_self=True)


def _computes_in(model, dtypes) -> bool:
    return any(layer.compute_dtype in dtypes for layer in _layers(model))


def _check_variables(model, policy):
    """Raises `ValueError` for trainable float16 variables: updates and Adam's epsilon round to zero."""
    half = [v.path for v in model.trainable_variables if v.dtype == "float16"]
    if half or policy.variable_dtype == "float16":
        what = f"float16 variables {half[:3]}" if half else f"policy '{policy.name}'"
        raise ValueError(
            "Expected float32 variables to train: in float16 small updates and Adam's epsilon of 1e-8 round "
            f"to zero. Received: {what}. Build the model under 'mixed_float16'."
        )


def _converter(model, policy, converts: bool):
    """Returns a function that gives the layers of `model` their dtypes; called again, the new ones among them.

    Layers of a layer often come into being when it is built, in the middle of the first step.
    """
    # Among 16-bit layers a float32 layer is there on purpose; alone, it is what Keras does by default.
    sources = _SIXTEEN_BITS if _computes_in(model, _SIXTEEN_BITS) else _CONVERTIBLE
    if policy.compute_dtype not in _SIXTEEN_BITS:
        sources = _SIXTEEN_BITS
    target = policy.stock() or policy
    seen = weakref.WeakSet()

    def convert():
        new_layers = [layer for layer in _layers(model) if layer not in seen]
        if not new_layers:
            return
        seen.update(new_layers)
        for layer in new_layers if converts else []:
            follows = layer.compute_dtype in sources and layer.quantization_mode is None
            if follows and layer.compute_dtype != policy.compute_dtype:
                set_layer_policy(layer, target)
        apply_rules(model, policy)
        _let_inputs_through(model)
        guard._backend.track_random_states(model)

    return convert


def _let_inputs_through(model):
    """Keeps a Sequential or subclassed model from casting its inputs before its first layer sees them.

    Raw inputs may be beyond float16's 65504 and belong to a float32 normalization layer. A Functional model
    passes inputs on as they are; the others cast them to their own compute dtype. Where the model holds no
    variables of its own, nothing else depends on that dtype.
    """
    if model.compute_dtype not in _SIXTEEN_BITS or _keras_private.casts_no_inputs(model):
        return
    if not _keras_private.own_variables(model):
        set_layer_policy(model, keras.DTypePolicy("float32"))


def _wrap_optimizers(model, policy, explicit_rule, rollback: bool):
    computes_float16 = _computes_in(model, ("float16",))
    replaced = {}
    for name, optimizer in guard.find_optimizers(model).items():
        if id(optimizer) not in replaced:
            rule = _rule_for(optimizer, policy, explicit_rule, computes_float16, rollback)
            replaced[id(optimizer)] = _wrapped(optimizer, rule)
        if replaced[id(optimizer)] is not optimizer:
            setattr(model, name, replaced[id(optimizer)])
    if getattr(model, "optimizer", None) is not None:
        _keras_private.replace_compiled_optimizer(model, model.optimizer)


def _rule_for(optimizer, policy, explicit_rule, computes_float16: bool, rollback: bool):
    """Returns the loss-scaling rule for `optimizer`, or `None` to leave it as it is."""
    is_ours = isinstance(optimizer, LossScaleOptimizer)
    if explicit_rule is not None:
        return explicit_rule
    # A policy's own settings; the default rule gives way to what is set on the optimizer.
    if policy.loss_scale is not None and policy.loss_scale != DynamicLossScale():
        return policy.loss_scale
    if is_ours and not optimizer._chosen_by_prepare:
        return optimizer.loss_scale_rule
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not is_ours:
        return DynamicLossScale(optimizer.initial_scale, dynamic_growth_steps=optimizer.dynamic_growth_steps)
    if not is_ours and optimizer.loss_scale_factor is not None:
        return FixedLossScale(optimizer.loss_scale_factor)
    if computes_float16:
        is_scaling = is_ours and optimizer.loss_scale_rule != FixedLossScale(1.0)
        return optimizer.loss_scale_rule if is_scaling else DynamicLossScale()
    # Nothing to scale, but float32 and bfloat16 steps are checked and skipped as well.
    return FixedLossScale(1.0) if rollback or is_ours else None


def _wrapped(optimizer, rule):
    if rule is None or (isinstance(optimizer, LossScaleOptimizer) and optimizer.loss_scale_rule == rule):
        return optimizer
    wrapped = rewrapped(optimizer, rule)
    wrapped._chosen_by_prepare = True
    return wrapped
