"""`prepare`: makes a compiled model train under a policy, with nothing failing silently."""

import functools
import warnings
from collections.abc import Iterable
from typing import TypeVar

import keras
import ml_dtypes

from mpkeras import _keras
from mpkeras._arguments import check_switch
from mpkeras.conversion.converter import convert_new, convert_when_built, layer_converter
from mpkeras.conversion.from_file import made_anew
from mpkeras.conversion.graphs import refresh_graphs
from mpkeras.conversion.last import conversion_of, converted_by, last_conversion
from mpkeras.conversion.outputs import end_in_float32
from mpkeras.conversion.plan import compute_dtypes, computes_in
from mpkeras.conversion.store_weights import store_weights, unstored_dtypes
from mpkeras.conversion.undo import converting, put_back_on_error
from mpkeras.distribution import distribution_backend
from mpkeras.distribution.travel import Travel
from mpkeras.policies import loss_scaling
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, SMALL_DTYPE
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale, LossScale
from mpkeras.policies.policy import Policy, accumulating
from mpkeras.policies.registry import get_policy
from mpkeras.policies.survey import Survey
from mpkeras.scaling.arguments import check_parts
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.scaling.rewrap import own_calls, own_slot_dtype, rewrapped
from mpkeras.training import guard, inventory, training_backend
from mpkeras.training.made_under import policy_made_under
from mpkeras.training.prepared import Prepared, forget, keep_prepared, prepared_of

# The class of the user's model: a type checker knows it after `prepare`, too.
_Model = TypeVar("_Model")


def prepare(
    model: _Model,
    policy: str | Policy | keras.DTypePolicy | None = None,
    *,
    loss_scale: str | float | LossScale | None = None,
    jit_compile: bool | None = None,
    rollback: bool = True,
    remat: str | Iterable | None = None,
) -> _Model:
    """Makes a compiled model train in mixed precision, and returns it.

    It is for a model that exists; one that is built under `mpkeras.set_global_policy` is prepared when it is compiled.

    - Layers compute in the policy's dtype, except those its `keep_float32` rules name and those that write state in
      their `call` (a counter, a running mean), which compute in float32. A model whose layers
      already compute in 16 bits keeps the float32 layers its author chose; in a float32 model all layers
      change.
    - Every optimizer of the model is wrapped in a `mpkeras.LossScaleOptimizer` (stock Keras' one is replaced,
      with its state): one that the model, a layer of it, or an object that these hold has as an attribute, or in a
      list or dictionary that is one. `fit` warns where another optimizer moves the weights. Whether the loss is
      scaled is decided by what the layers compute in.
    - The train step, the user's own included, is guarded: after a step whose loss or gradients are not finite
      every variable of the model is as before.
    - Until a first step has counted, a batch for which only a guessed dynamic loss scale is too large is taken again.
    - The logs of `fit` gain `loss_scale` (the scale for the next step) and `skipped_steps` (all so far), and an epoch
      that learned nothing is warned of, as by `mpkeras.callbacks.MixedPrecision`. So is a validation that is not finite
      while training is; callbacks do not take its epoch for the best one.
    - Compiled again, the model is prepared again, with the same arguments.

    Models inside the model that are compiled themselves (`gan.discriminator.compile(...)`) are prepared with it. For
    all this the methods `train_step`, `compile`, `fit`, `evaluate` and `make_train_function` of the model are covered.
    Calling `prepare` again changes only what differs.

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
        remat: The part of the forward pass that is kept for the backward pass, as in `mpkeras.Policy`; by default that
            of the policy, or without a policy that which the model was given before, or its file has.

    Returns:
        `model`.

    Raises:
        ValueError: If the model is not compiled, the policy is not known, `remat` names no part of the model, trainable
            variables are float16, an optimizer cannot be wrapped, or XLA does not work with the model's distribution
            strategy. The model is then as before.
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
    prepare_model(model, policy, loss_scale=loss_scale, jit_compile=jit_compile, rollback=rollback, remat=remat)
    return model


def prepare_model(
    model, policy, *, loss_scale=None, jit_compile=None, rollback=True, remat=None, is_explicit: bool = True
):
    """`prepare`; `is_explicit` says whether the user named this very model, and not all models that are compiled."""
    options = {"loss_scale": loss_scale, "rollback": rollback, "remat": remat}
    guards = prepare_to_train(model, policy, jit_compile=jit_compile, **options)
    options["is_explicit"] = is_explicit

    def keep(part, guard_again, jit_compile):
        if not guard.is_guarded(part) and jit_compile is None:
            # Nothing is left to do: a float32 or bfloat16 model without the guard.
            forget(part)
            return

        def prepare_again():
            # The dtype of the layers decides, where none was asked for or `apply_policy` has changed it.
            is_as_asked = policy is not None and computes_in(part, (get_policy(policy).compute_dtype,))
            prepare_model(part, policy if is_as_asked else None, jit_compile=jit_compile, **options)

        keep_prepared(part, Prepared(prepare_again, guard_again, is_explicit))

    for part, guard_again in guards:
        keep(part, guard_again, jit_compile if part is model else None)


def prepare_to_train(model, policy, *, loss_scale=None, jit_compile=None, rollback=True, remat=None):
    """`prepare` until the guard is taken off again: what the callback does for one `fit`.

    Returns:
        `model` and the compiled models inside it, each with a function that puts the guard around its train step again.
    """
    check_model(model)
    if not inventory.find_optimizers(model):
        raise ValueError(
            f"Expected a compiled model. Received: model '{model.name}', which has no optimizer. "
            "Call `model.compile(...)` first."
        )
    survey = Survey(model)
    saved, was_made_in_16_bits = saved_policy(survey) if policy is None else (None, None)
    chosen = asked_policy(survey, policy, remat, saved=saved)
    distribution_backend.check_travel(model, chosen)
    explicit_rule = loss_scaling.resolve(loss_scale)
    check_switches(jit_compile, rollback)
    check_jit_compile(model, model.jit_compile if jit_compile is None else jit_compile)
    has_16_bits = computes_in(survey, SIXTEEN_BIT_DTYPES)
    converts = policy is not None or saved is not None or not has_16_bits or bool(made_anew(survey))
    check_variables(survey, chosen, converts)

    convert_layers = layer_converter(
        model, chosen, converts, survey, trains=True, was_made_in_16_bits=was_made_in_16_bits
    )

    def store(optimizers):
        store_weights(model, optimizers)
        end_in_float32(model)
        training_backend.track_random_states(model)

    def convert_new_layers(around=converting):
        if convert_new(model, convert_layers, around):
            store(inventory.all_optimizers(model))

    with converting(model, refreshes=True, survey=survey):
        convert_layers()
        refresh_graphs(model)
        # Layers may have been built.
        survey = Survey(model)
        optimizers = inventory.all_optimizers(survey)
        must_wrap = rollback or chosen.accumulate_steps > 1
        rules = [rule_for(optimizer, survey, chosen, explicit_rule, must_wrap) for optimizer in optimizers]
        for optimizer, rule in zip(optimizers, rules, strict=True):
            if rule is not None:
                check_parts(getattr(optimizer, "inner_optimizer", optimizer))
                own_calls(optimizer)
    # Last, as it cannot be taken back: weights are rounded, and a wrapper stores the state of what it wraps anew.
    store(optimizers)
    with training_backend.variable_scope(model):
        wrappers = [
            wrapped(*pair, chosen.slot_dtype, chosen.reduce_dtype, chosen.accumulate_steps)
            for pair in zip(optimizers, rules, strict=True)
        ]
    for wrapper in wrappers:
        if isinstance(wrapper, LossScaleOptimizer):
            wrapper.record.remat = chosen.remat
            conversion = conversion_of(model)
            wrapper.record.note_policy(conversion.asked_for, conversion.spares_float32)
    models = (model, *inventory.compiled_parts(survey))
    new = {id(old): wrapper for old, wrapper in zip(optimizers, wrappers, strict=True) if wrapper is not old}
    for holder in inventory.holders_of_optimizers(survey):
        inventory.replace_optimizers(holder, new)
    for part in models:
        if getattr(part, "optimizer", None) is not None:
            _keras.replace_compiled_optimizer(part, part.optimizer)
    if jit_compile is not None:
        model.jit_compile = jit_compile
    checks = any(isinstance(optimizer, LossScaleOptimizer) for optimizer in wrappers)

    def guard_again(part):
        if not checks:
            guard.uninstall(part)
            # Without a guard, too, a train function that was built earlier holds the old dtypes.
            part.train_function = None
            return
        # What the parts' `train_on_batch` returns goes into the step of `model`: without logs of ours, unless the part
        # is prepared and can tell it from `fit`.
        add_logs = part is model or prepared_of(part) is not None
        guard.install(part, guard.Guard(rollback, convert_new_layers, Travel.of(chosen), add_logs))

    guards = [(part, functools.partial(guard_again, part)) for part in models]
    for _, put_around in guards:
        put_around()
    # A model that is built in the middle of `evaluate` or `predict` goes on with their functions.
    convert_when_built(model, functools.partial(convert_new_layers, put_back_on_error))
    return guards


def asked_policy(model, policy, remat=None, optimizers=(), saved: Policy | None = None) -> Policy:
    """Returns `chosen_policy` with this `remat`; without a policy a model keeps accumulation and `remat`.

    They are then what it was given last, or was saved with.

    Args:
        model: A model or a `Survey` of it.
        policy, remat: What the user asks for; `None` without.
        optimizers: Those that train it beside its own.
        saved: The policy that holds where none is asked for, in place of the one that the layers tell.
    """
    chosen, survey = saved or chosen_policy(model, policy), Survey.of(model)
    if policy is not None:
        return chosen.with_remat(remat)
    conversion = last_conversion(survey.model)
    if conversion is not None:
        steps, lasting_remat = conversion.policy.accumulate_steps, conversion.policy.remat
    else:
        optimizers = [*optimizers, *inventory.find_optimizers(survey.model).values()]
        records = [x.record for x in optimizers if isinstance(x, LossScaleOptimizer)]
        steps = next((record.parts for record in records if record.parts > 1), chosen.accumulate_steps)
        lasting_remat = next((record.remat for record in records if record.remat is not None), None)
    return accumulating(chosen, steps).with_remat(lasting_remat if remat is None else remat)


def saved_policy(survey) -> tuple[Policy | None, bool | None]:
    """Returns the policy that the model of `survey` was converted to before it was saved, and `was_made_in_16_bits`.

    Keras makes layers in the `__init__` of others anew from a file, under the global policy of that moment: in float32,
    whatever they were converted to. Where they are in 16 bits of another kind, that policy has decided.

    Returns:
        `(None, None)` where none is known.
    """
    optimizers = inventory.find_optimizers(survey.model).values() if last_conversion(survey.model) is None else ()
    for optimizer in optimizers:
        if isinstance(optimizer, LossScaleOptimizer) and optimizer.record.policy is not None:
            saved, dtypes = get_policy(optimizer.record.policy), compute_dtypes(survey) & set(SIXTEEN_BIT_DTYPES)
            if dtypes <= {saved.compute_dtype}:
                return saved, optimizer.record.was_made_in_16_bits
    return None, None


def chosen_policy(model, policy):
    """Returns the `Policy` whose rules and loss scale hold for `model`, a model or a `Survey` of it."""
    if policy is not None:
        return get_policy(policy)
    global_policy = get_policy(None)
    survey = Survey.of(model)
    dtypes = compute_dtypes(survey) & set(SIXTEEN_BIT_DTYPES)
    converted = converted_by(survey.model)
    if converted is not None and converted.compute_dtype in dtypes:
        # Its rules and loss scale were chosen for this model.
        return converted
    made_under = policy_made_under(survey.model)
    if made_under is not None and made_under.compute_dtype in dtypes:
        # Of a model that is trained outside the scope that it was made in, too.
        return made_under
    # Of a small model rules may keep every layer in float32.
    kept_in_float32 = (*SIXTEEN_BIT_DTYPES, global_policy.compute_dtype)
    if converted is not None and not dtypes and converted.compute_dtype in kept_in_float32:
        return converted
    if not dtypes or global_policy.compute_dtype in dtypes:
        return global_policy
    # The layers, not the model's name or the global policy, say what this model computes in.
    return get_policy("mixed_float16" if "float16" in dtypes else "mixed_bfloat16")


def check_model(model):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a `keras.Model`. Received: {model!r} (of type {type(model).__name__}). "
            "Pass the model that you train."
        )


def check_switches(jit_compile, rollback):
    """Raises `TypeError` unless `rollback` is `True` or `False`, and `jit_compile` one of these or `None`."""
    check_switch("rollback", rollback)
    if jit_compile is not None:
        check_switch("jit_compile", jit_compile)


def check_jit_compile(model, jit_compile):
    """Raises `ValueError` where XLA and the model's distribution strategy do not work together."""
    # On TensorFlow alone models have one.
    strategy = getattr(model, "distribute_strategy", None)
    if jit_compile and strategy is not None and strategy.num_replicas_in_sync > 1:
        raise ValueError(
            "Expected `jit_compile` to be False or None under a `tf.distribute` strategy with several "
            f"replicas, where Keras' XLA step fails. Received: jit_compile=True with "
            f"{type(strategy).__name__} on {strategy.num_replicas_in_sync} replicas. "
            "Leave XLA off, or train on one replica."
        )


def check_variables(model, policy, converts: bool = False):
    """Raises `ValueError` for trainable float16 variables, those that layers would make as they are built included.

    Warns where Keras makes losses and metrics in 16 bits.

    Args:
        model: A `keras.Model`.
        policy: The `Policy` that holds for it.
        converts: Whether layers that are not built yet are given that policy first.
    """
    weights = _weights_of(model, "float16", converts)
    if not weights and policy.variable_dtype != "float16":
        _warn_of_floatx(keras.config.floatx())
        return
    what = f"float16 variables {weights[:3]}" if weights else f"policy '{policy.name}'"
    raise ValueError(
        "Expected float32 or bfloat16 variables to train: in float16 small updates round to nothing, as does Adam's "
        f"epsilon of 1e-8. Received: {what}. Build the model under 'mixed_float16', or call "
        "`mpkeras.apply_policy(model, 'mixed_float16', float32_variables=True)` before `compile`."
    )


def _warn_of_floatx(floatx: str):
    if floatx not in SIXTEEN_BIT_DTYPES:
        return
    # From here on whole numbers are rounded, and adding 1 changes nothing.
    largest = 2 ** (ml_dtypes.finfo(floatx).nmant + 1)
    warnings.warn(
        f"`keras.config.floatx()` is {floatx}: losses, metrics and learning rates are made in it. Class {largest + 1} "
        f"is taken for class {largest}, and a metric counts no further than {largest}. Before these are made, and "
        'before `compile`, call `keras.config.set_floatx("float32")`: the policy says what layers compute in.',
        stacklevel=6,
    )


def _weights_of(model, dtype: str, built_only: bool = False) -> list:
    """Returns the names of the trainable weights of a dtype, those that layers would make when built included.

    `model` is a model or a `Survey` of it.
    """
    survey = Survey.of(model)
    unstored = unstored_dtypes(survey.model)
    paths = [v.path for v in survey.model.trainable_variables if unstored.get(id(v), v.dtype) == dtype]
    if not built_only:
        unbuilt = [layer for layer in survey.layers if not layer.built and layer.trainable]
        paths += [f"of layer {layer.name}" for layer in unbuilt if layer.variable_dtype == dtype]
    return paths


def rule_for(optimizer, model, policy, explicit_rule, must_wrap: bool):
    """Returns the loss-scaling rule for `optimizer`, or `None` to leave it as it is.

    Args:
        optimizer: Any Keras optimizer.
        model: The model that it trains, or a `Survey` of it.
        policy: The `Policy` that holds for the model.
        explicit_rule: What the user asked for in the call; `None` without.
        must_wrap: Whether it is wrapped where there is nothing to scale, too.
    """
    is_ours = isinstance(optimizer, LossScaleOptimizer)
    if explicit_rule is not None:
        return explicit_rule
    # A policy's own settings; the default rule gives way to what is set on the optimizer.
    if policy.loss_scale is not None and policy.loss_scale != DynamicLossScale():
        return policy.loss_scale
    if policy.loss_scale is None and policy.compute_dtype == "float16":
        # Every float16 policy scales unless it is told not to.
        return FixedLossScale(1.0)
    users_rule = _users_rule(optimizer)
    if users_rule is not None:
        return users_rule
    # Of one that was wrapped here before, too: the setting stays on the inner optimizer.
    if optimizer.loss_scale_factor is not None:
        return _rule_of(optimizer, lambda loss_scale_factor: FixedLossScale(loss_scale_factor), "loss_scale_factor")
    # Where rules keep every layer of a small model in float32, the policy still says it.
    if computes_in(model, ("float16",)) or (policy.compute_dtype == "float16" and policy.loss_scale is not None):
        is_scaling = is_ours and optimizer.loss_scale_rule != FixedLossScale(1.0)
        return optimizer.loss_scale_rule if is_scaling else DynamicLossScale()
    # Nothing to scale, but float32 and bfloat16 steps are checked and skipped, and what is stored small is rounded.
    is_small = SMALL_DTYPE in (policy.variable_dtype, policy.slot_dtype) or _weights_of(model, SMALL_DTYPE)
    return FixedLossScale(1.0) if must_wrap or is_ours or is_small else None


def _users_rule(optimizer):
    """Returns the rule that its user gave an optimizer which scales the loss, `None` for any other."""
    if isinstance(optimizer, LossScaleOptimizer):
        return None if optimizer.record.rule_is_chosen_by_prepare else optimizer.loss_scale_rule
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _rule_of(optimizer, DynamicLossScale, "initial_scale", "dynamic_growth_steps")
    return None


def _rule_of(optimizer, make, *names):
    """Returns the rule that `make` makes of the settings of these names, which the user gave an optimizer of Keras'."""
    settings = {name: getattr(optimizer, name) for name in names}
    try:
        return make(**settings)
    except (TypeError, ValueError) as error:
        received = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        raise type(error)(
            "Expected an optimizer whose own settings make a loss scale. Received: "
            f"{type(optimizer).__name__} '{optimizer.name}' with {received}. Make it with others. ({error})"
        ) from error


def wrapped(
    optimizer, rule, slot_dtype: str = "auto", reduce_dtype: str | None = None, accumulate_steps: int | None = None
):
    """Returns `optimizer` in a `LossScaleOptimizer` with `rule`; itself where it is one, or `rule` is `None`.

    Args:
        slot_dtype: That of the policy; with `"auto"` what its user gave the optimizer stays.
        reduce_dtype: Likewise, with `None`; a backend whose optimizers sum no gradients has no use for it.
        accumulate_steps: That of the policy, times which its user's own number of calls makes an update; `None` leaves
            what the last policy asked for.
    """
    if rule is None:
        return optimizer
    is_ours = isinstance(optimizer, LossScaleOptimizer)
    is_same_rule = is_ours and optimizer.loss_scale_rule == rule
    if slot_dtype == "auto":
        slot_dtype = own_slot_dtype(optimizer)
    is_same_slot_dtype = is_ours and optimizer.slot_dtype == slot_dtype
    all_reduce_dtype = getattr(optimizer, "all_reduce_dtype", None)
    if reduce_dtype is not None and distribution_backend.OPTIMIZERS_REDUCE:
        all_reduce_dtype = reduce_dtype
    if accumulate_steps is None:
        accumulate_steps = optimizer.record.parts if is_ours else 1
    steps = own_calls(optimizer) * accumulate_steps
    is_same_window = is_ours and (optimizer.gradient_accumulation_steps or 1) == steps
    if is_same_rule and is_same_slot_dtype and is_same_window and all_reduce_dtype == optimizer.all_reduce_dtype:
        return optimizer
    wrapper = rewrapped(optimizer, rule, slot_dtype, all_reduce_dtype, steps)
    wrapper.record.parts = accumulate_steps
    # With its defaults Keras wraps an optimizer by itself, too: they are nobody's choice.
    is_users = rule == _users_rule(optimizer) and (is_ours or rule != DynamicLossScale())
    wrapper.record.rule_is_chosen_by_prepare = not is_users
    wrapper.record.slots_are_chosen_by_prepare = not is_same_slot_dtype or optimizer.record.slots_are_chosen_by_prepare
    return wrapper
