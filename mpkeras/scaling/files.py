"""What files hold of a `LossScaleOptimizer`: a stock one, so that a compiled model loads without mpkeras.

Other rules, counters and windows, which only mpkeras knows, lie where plain Keras does not look.
"""

import itertools
import warnings

import keras

from mpkeras import _keras, _replaced
from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.policies.policy import REGISTERED, Policy, registered
from mpkeras.policies.rules import serialized_for_copies
from mpkeras.scaling.arguments import rule_from_arguments
from mpkeras.scaling.small_state import parts_of

# Where the configuration holds what only mpkeras knows: beside what plain Keras reads of the inner optimizer.
_EXTRA = "mpkeras"
# Stock Keras' scale grows after so many steps: never. It compares a counter that is int32 on JAX and torch.
_NEVER = 2**31 - 1


def config_of(optimizer) -> dict:
    """Returns the configuration of a `LossScaleOptimizer`, from which plain Keras makes its own."""
    inner_config = _keras.config_for_every_backend(keras.saving.serialize_keras_object(optimizer.inner_optimizer))
    if optimizer.window is not None:
        # Of this optimizer's `accumulate`, too: stock Keras reads it there.
        inner_config["config"]["gradient_accumulation_steps"] = optimizer.gradient_accumulation_steps
    config = {"name": optimizer.name, "inner_optimizer": inner_config, **_stock_rule(optimizer.loss_scale_rule)}
    extra = _extra_config(optimizer, config)
    if extra:
        inner_config[_EXTRA] = extra
    return config


def _stock_rule(rule) -> dict:
    """Returns the settings with which stock Keras' wrapper, which doubles and halves, comes closest to the rule."""
    growth_steps = getattr(rule, "dynamic_growth_steps", 2000) if rule.dynamic else _NEVER
    return {"initial_scale": rule.initial_scale, "dynamic_growth_steps": min(growth_steps, _NEVER)}


def _extra_config(optimizer, config: dict) -> dict:
    rule, record, extra = optimizer.loss_scale_rule, optimizer.record, {}
    said = DynamicLossScale(config["initial_scale"], dynamic_growth_steps=config["dynamic_growth_steps"])
    if rule != said:
        extra["loss_scale"] = keras.saving.serialize_keras_object(rule)
    if optimizer.window is not None and optimizer.window.on_overflow != "drop_micro":
        extra["on_overflow"] = optimizer.window.on_overflow
    inner_accumulation = optimizer.inner_optimizer.gradient_accumulation_steps
    if optimizer.window is not None and inner_accumulation != optimizer.gradient_accumulation_steps:
        extra["inner_accumulation"] = inner_accumulation
    parts = parts_of(optimizer.inner_optimizer)
    exclusions = record.excluded_from_weight_decay or [_keras.decay_exclusions(part) for part in parts]
    if any(exclusions):
        extra["excluded_from_weight_decay"] = exclusions
    if optimizer.slot_dtype != "auto":
        extra["slot_dtype"] = optimizer.slot_dtype
        if record.slots_are_chosen_by_prepare:
            # Or another policy, asked of the model from the file, would leave them as this one stores them.
            extra["slots_chosen_by_prepare"] = True
    if optimizer.all_reduce_dtype is not None:
        extra["all_reduce_dtype"] = optimizer.all_reduce_dtype
    if optimizer.scale_is_one and record.rule_is_chosen_by_prepare:
        # Or a model saved in bfloat16 would train in float16 without loss scaling.
        extra["chosen_by_prepare"] = True
    if record.is_guarded or record.was_guarded:
        extra["was_guarded"] = True
    if record.parts > 1:
        extra["parts"] = record.parts
    if record.remat is not None:
        extra["remat"] = serialized_for_copies(record.remat)
    if record.policy is not None:
        policy = _written_policy(record.policy)
        extra |= {} if policy is None else {"policy": policy, "was_made_in_16_bits": record.was_made_in_16_bits}
    return extra


def _written_policy(policy) -> str | dict | None:
    """Returns what `get_policy` makes `policy` of again; `None` where its rules hold layers that have no path yet."""
    if not isinstance(policy, Policy):
        return policy
    if policy.name in REGISTERED and registered(policy.name) == policy:
        return policy.name
    try:
        serialized = keras.dtype_policies.serialize(policy)
    except ValueError:
        return None
    settings = serialized["config"]
    for name in {"keep_float32", "keep_16_bits", "remat"} & settings.keys():
        settings[name] = serialized_for_copies(getattr(policy, name))
    return serialized


def optimizer_from(optimizer_class, config: dict, custom_objects=None):
    """Returns the optimizer that a configuration describes: ours, stock Keras', or one of mpkeras 0.1.0."""
    config = dict(config)
    inner_config = config.pop("inner_optimizer")
    extra = inner_config.get(_EXTRA, {}) if isinstance(inner_config, dict) else {}
    # Files of 0.1.0 have the same keys beside the inner optimizer, in what stock Keras reads.
    config |= extra
    window = None
    if "inner_accumulation" in extra:
        # The sums are this optimizer's alone: with those of the inner one they would take their memory twice.
        settings = dict(inner_config["config"])
        window = settings["gradient_accumulation_steps"] or 1, config.pop("on_overflow", "drop_micro")
        settings["gradient_accumulation_steps"] = config.pop("inner_accumulation")
        inner_config = {**inner_config, "config": settings}
    # Files that an earlier version wrote on torch.
    inner_config = _keras.config_for_every_backend(inner_config)
    inner_optimizer = keras.saving.deserialize_keras_object(inner_config, custom_objects=custom_objects)
    noted = {
        "rule_is_chosen_by_prepare": config.pop("chosen_by_prepare", False),
        "slots_are_chosen_by_prepare": config.pop("slots_chosen_by_prepare", False),
        "was_guarded": config.pop("was_guarded", False),
        "excluded_from_weight_decay": config.pop("excluded_from_weight_decay", []),
        "parts": config.pop("parts", 1),
        "remat": config.pop("remat", None),
        "policy": config.pop("policy", None),
        "was_made_in_16_bits": config.pop("was_made_in_16_bits", False),
    }
    if isinstance(config.get("loss_scale"), dict):
        config["loss_scale"] = keras.saving.deserialize_keras_object(
            config["loss_scale"], custom_objects=custom_objects
        )
        # They say for plain Keras what the rule says for us.
        config.pop("initial_scale", None)
        config.pop("dynamic_growth_steps", None)
    arguments = {name: config.pop(name, None) for name in ("initial_scale", "dynamic_growth_steps", "dynamic")}
    # As one whole rule: a `loss_scale_factor` of the inner optimizer has given way to it before.
    rule = rule_from_arguments(**arguments, loss_scale=config.pop("loss_scale", "dynamic"))
    optimizer = optimizer_class(inner_optimizer, loss_scale=rule, **config)
    if window is not None:
        optimizer.accumulate(*window)
    for name, value in noted.items():
        setattr(optimizer.record, name, value)
    return optimizer


def stock_variables(optimizer) -> list:
    """Returns the variables that stock Keras' wrapper has beside those of the inner optimizer, in its order."""
    # The first two are its own iteration and learning_rate, which mean nothing.
    scale = [optimizer.step_counter, optimizer.dynamic_scale] if optimizer.built else []
    return [*optimizer.variables[:2], *scale]


def save_numbered(optimizer, store):
    """Saves by number what stock Keras' wrapper saves around the same inner optimizer, into that one's group, too."""
    inner = optimizer.inner_optimizer
    tracked = _tracked_by_stock(inner)
    _save(stock_variables(optimizer) + tracked, store)
    if len(tracked) < len(inner.variables) and not isinstance(store, dict):

        def save_own_variables(store):
            _replaced.restore(inner, "save_own_variables", kind="loading")
            _save(tracked, store)

        _replaced.replace(inner, "save_own_variables", save_own_variables, kind="loading")


def _save(variables, store):
    for i, variable in enumerate(variables):
        store[str(i)] = variable.numpy()


def _tracked_by_stock(inner_optimizer) -> list:
    """Returns the variables that an inner optimizer has in stock Keras' wrapper, in their order."""
    stand_ins = _keras.stand_ins_of_factors(inner_optimizer)
    return [variable for variable in inner_optimizer.variables if id(variable) not in stand_ins]


def load_numbered(optimizer, store) -> bool:
    """Loads the numbered arrays of `store`; returns whether they are those of one of the files that we know."""
    targets = _numbered_variables(optimizer, store)
    if targets is None:
        return False
    for i, variable in enumerate(targets):
        variable.assign(store[str(i)])
    inner, window = optimizer.inner_optimizer, optimizer.window
    sums = _keras.accumulated_gradients(inner)
    lasting = len(optimizer.variables) - len(optimizer.step_outcome)
    if window is not None and sums and len(targets) < lasting:
        # Of an optimizer that accumulates by itself its sums, of any other the count of its updates.
        if any(variable is sums[0] for variable in targets):
            window.take_sums_of(inner)
        else:
            calls = _keras.step_count(inner)
            calls.assign(calls.value * inner.gradient_accumulation_steps)
    if len(targets) == len(inner.variables) or len(_tracked_by_stock(inner)) < len(inner.variables):
        _expect_nothing(inner)
    return True


def warn_of_skipped(optimizer, store):
    """Warns, as stock Keras does, that `store` holds the numbered arrays of another optimizer, and none is loaded.

    Stock Keras goes by how many there are. Here that tells nothing: files do not number all of `optimizer.variables`.
    """
    count = len(stock_variables(optimizer)) + len(optimizer.inner_optimizer.variables)
    saved = len(store.keys())
    remedy = "To go on with the state of the file, load it into a model of the same trainable weights and optimizer."
    if not optimizer.built:
        remedy = "Before loading, call `model.optimizer.build(model.trainable_variables)`."
    which = f"{saved} variables" if saved != count else "variables of other shapes"
    warnings.warn(
        f"Skipping variable loading for optimizer '{optimizer.name}', because it has {count} variables whereas the "
        f"saved optimizer has {which}. {remedy}",
        stacklevel=3,
    )


def _numbered_variables(optimizer, store) -> list | None:
    """Returns the variables whose values the numbered arrays of `store` are, in their order, or `None`."""
    # First come those of stock Keras' wrapper, which is what we write, too; all of ours, as mpkeras 0.1.0 wrote
    # them, with a window or without; or none, in the file of a plain optimizer. Then those of an inner optimizer
    # that has sums of its own, or has none; as it tracks them in a plain one, and earlier versions wrote them, or not.
    inner = optimizer.inner_optimizer.variables
    sums = {id(variable) for variable in _keras.accumulated_gradients(optimizer.inner_optimizer)}
    of_step = {id(variable) for variable in optimizer.step_outcome}
    stored = optimizer.variables_as_stored
    ours = [variable for variable in stored[: len(stored) - len(inner)] if id(variable) not in of_step]
    of_window = 0 if optimizer.window is None else len(optimizer.window.variables)
    firsts = [stock_variables(optimizer), ours, ours[: len(ours) - of_window], *([[]] if optimizer.built else [])]
    shapes = [tuple(store[str(i)].shape) for i in range(len(store.keys()))]
    for first, known in itertools.product(firsts, (inner, _tracked_by_stock(optimizer.inner_optimizer))):
        for rest in (known, [variable for variable in known if id(variable) not in sums]):
            if [tuple(variable.shape) for variable in [*first, *rest]] == shapes:
                return [*first, *rest]
    return None


def _expect_nothing(inner_optimizer):
    """Lets the next call of its `load_own_variables` find nothing, or less, in the file, where Keras would warn."""

    # The wrapper has given the arrays to the inner one. Keras goes on to ask that one, too: in the file of a plain
    # optimizer there is no place for it, and one of stock Keras' wrapper leaves out what is no state.
    def load_own_variables(store):
        _replaced.restore(inner_optimizer, "load_own_variables", kind="loading")
        if len(store.keys()) == len(inner_optimizer.variables):
            inner_optimizer.load_own_variables(store)

    _replaced.replace(inner_optimizer, "load_own_variables", load_own_variables, kind="loading")
