"""`prepare`: makes a compiled model train under a policy, with nothing failing silently."""

import functools
from typing import TypeVar

import keras

from mpkeras import _keras
from mpkeras.conversion.apply import converting, layer_converter, store_weights
from mpkeras.conversion.plan import computes_in
from mpkeras.policies import loss_scaling
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.loss_scaling import LossScale
from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy
from mpkeras.scaling.optimizer import LossScaleOptimizer, check_parts
from mpkeras.training import guard, inventory
from mpkeras.training.backend import training_backend
from mpkeras.training.settings import (
    check_model,
    check_switches,
    check_variables,
    chosen_policy,
    needs_rounding,
    rule_for,
    wrapped,
)

# The class of the user's model: a type checker knows it after `prepare`, too.
_Model = TypeVar("_Model")


def prepare(
    model: _Model,
    policy: str | Policy | keras.DTypePolicy | None = None,
    *,
    loss_scale: str | float | LossScale | None = None,
    jit_compile: bool | None = None,
    rollback: bool = True,
) -> _Model:
    """Makes a compiled model train in mixed precision, and returns it.

    - Layers compute in the policy's dtype, except those its `keep_float32` rules name. A model whose layers
      already compute in 16 bits keeps the float32 layers its author chose; in a float32 model all layers
      change.
    - Every optimizer of the model is wrapped in a `mpkeras.LossScaleOptimizer` (stock Keras' one is replaced,
      with its state). Whether the loss is scaled is decided by what the layers compute in.
    - The train step, the user's own included, is guarded: after a step whose loss or gradients are not finite
      every variable of the model is as before.
    - The logs of `fit` gain `loss_scale` (the scale for the next step) and `skipped_steps` (all so far), and an epoch
      that learned nothing is warned of, as by `mpkeras.callbacks.MixedPrecision`.
    - Compiled again, the model is prepared again, with the same arguments.

    Models inside the model that are compiled themselves (`gan.discriminator.compile(...)`) are prepared with it. For
    all this the methods `train_step`, `compile`, `fit` and `make_train_function` of the model are covered. Calling
    `prepare` again changes only what differs.

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
        ValueError: If the model is not compiled, the policy is not known, trainable variables are float16, an
            optimizer cannot be wrapped, or XLA does not work with the model's distribution strategy. The model is then
            as before.
        TypeError: If an argument is of a wrong type.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
    >>> model.compile("adam", "sparse_categorical_crossentropy")
    >>> model = mpkeras.prepare(model, "mixed_float16")
    >>> [layer.compute_dtype for layer in model.layers], float(model.optimizer.loss_scale)
    (['float16', 'float32'], 32768.0)

    References:
        Micikevicius et al., 2018, https://arxiv.org/abs/1710.03740.
    """
    prepare_model(model, policy, loss_scale=loss_scale, jit_compile=jit_compile, rollback=rollback)
    return model


def prepare_model(model, policy, *, loss_scale=None, jit_compile=None, rollback=True, is_explicit: bool = True):
    """`prepare`; `is_explicit` says whether the user named this very model, and not all models that are compiled."""
    guard_again = prepare_to_train(model, policy, loss_scale=loss_scale, jit_compile=jit_compile, rollback=rollback)
    options = {"loss_scale": loss_scale, "rollback": rollback, "is_explicit": is_explicit}

    def keep(part, jit_compile):
        if not guard.is_guarded(part) and jit_compile is None:
            # Nothing is left to do: a float32 or bfloat16 model without the guard.
            guard.forget(part)
            return

        def prepare_again():
            # What the layers compute in by now decides, where it was not asked for or `apply_policy` has changed it.
            is_as_asked = policy is not None and computes_in(part, (get_policy(policy).compute_dtype,))
            prepare_model(part, policy if is_as_asked else None, jit_compile=jit_compile, **options)

        guard.keep_prepared(
            part, prepare_again=prepare_again, guard_again=functools.partial(guard_again, part), is_explicit=is_explicit
        )

    keep(model, jit_compile)
    for part in inventory.compiled_parts(model):
        keep(part, None)


def prepare_to_train(model, policy, *, loss_scale=None, jit_compile=None, rollback=True):
    """`prepare` until the guard is taken off again: what the callback does for one `fit`.

    Returns:
        Function that puts the guard around the train step of `model`, or of a compiled model inside it, once more.
    """
    _check_compiled(model)
    chosen = chosen_policy(model, policy)
    explicit_rule = loss_scaling.resolve(loss_scale)
    check_switches(jit_compile, rollback)
    training_backend.check_jit_compile(model, model.jit_compile if jit_compile is None else jit_compile)
    converts = policy is not None or not computes_in(model, SIXTEEN_BIT_DTYPES)
    check_variables(model, chosen, converts)

    convert_layers = layer_converter(model, chosen, converts=converts, optimizers=inventory.all_optimizers(model))

    def store():
        store_weights(model, inventory.all_optimizers(model))
        training_backend.track_random_states(model)

    def convert_new_layers():
        with converting(model):
            has_new = convert_layers()
        if has_new:
            store()

    with converting(model):
        convert_layers()
        rules = _decided_rules(model, chosen, explicit_rule, rollback)
    # Last, as it cannot be taken back: weights are rounded, and a wrapper stores the state of what it wraps anew.
    store()
    with training_backend.variable_scope(model):
        _wrap_optimizers(model, rules, chosen.slot_dtype)
    if jit_compile is not None:
        model.jit_compile = jit_compile
    checks = rollback or any(isinstance(o, LossScaleOptimizer) for o in inventory.all_optimizers(model))

    def guard_again(part):
        if not checks:
            guard.uninstall(part)
            # Without a guard, too, a train function that was built earlier holds the old dtypes.
            part.train_function = None
            return
        # What the parts' `train_on_batch` returns goes into the step of `model`: without logs of ours, unless the part
        # is prepared and can tell it from `fit`.
        add_logs = part is model or guard.is_prepared(part)
        guard.install(part, rollback=rollback, convert_new_layers=convert_new_layers, add_logs=add_logs)

    for part in (model, *inventory.compiled_parts(model)):
        guard_again(part)
    return guard_again


def _check_compiled(model):
    check_model(model)
    if not inventory.find_optimizers(model):
        raise ValueError(
            f"Expected a compiled model. Received: model '{model.name}', which has no optimizer. "
            "Call `model.compile(...)` first."
        )


def _decided_rules(model, policy, explicit_rule, rollback: bool) -> list:
    """Returns `(optimizer, rule)` of the optimizers of a model, as `rule_for`; raises where one cannot be wrapped."""
    computes_float16 = computes_in(model, ("float16",))
    must_wrap = rollback or needs_rounding(model, policy)
    optimizers = inventory.all_optimizers(model)
    rules = [rule_for(optimizer, policy, explicit_rule, computes_float16, must_wrap) for optimizer in optimizers]
    for optimizer, rule in zip(optimizers, rules, strict=True):
        if rule is not None:
            check_parts(getattr(optimizer, "inner_optimizer", optimizer))
    return list(zip(optimizers, rules, strict=True))


def _wrap_optimizers(model, rules, slot_dtype):
    replaced = {}
    for optimizer, rule in rules:
        wrapper = wrapped(optimizer, rule, slot_dtype)
        if wrapper is not optimizer:
            replaced[id(optimizer)] = wrapper
    for part in (model, *inventory.compiled_parts(model)):
        inventory.replace_optimizers(part, replaced)
        if getattr(part, "optimizer", None) is not None:
            _keras.replace_compiled_optimizer(part, part.optimizer)
