"""How `LossScaleOptimizer` is saved and loaded, its own files and those of stock Keras."""

import warnings

import keras

from mpkeras import _keras
from mpkeras._typing import OptimizerMixin
from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.scaling.optimizer_arguments import rule_from_arguments

# Stock Keras' scale grows after so many steps: never. It compares a counter that is int32 on JAX and torch.
_NEVER = 2**31 - 1
# Where in the configuration stands what only mpkeras knows: beside what plain Keras reads of the inner optimizer.
_EXTRA = "mpkeras"


def saved_as_stock(optimizer_class):
    """Registers the wrapper with Keras, and lets files name it so that plain Keras finds its own wrapper.

    Keras writes the module and the name of `obj.__class__`, and the name that it is registered under. When it reads,
    the registered name comes first; where nobody has registered it, the class in the module is taken, if the module is
    one of Keras' own. It has to be the module that defines the class, as for Keras' own Functional models: under the
    public name `keras.optimizers.LossScaleOptimizer` Keras 3.15.1 refuses a config with another registered name.
    """
    stock = keras.optimizers.LossScaleOptimizer
    written = type(stock.__name__, (optimizer_class,), {"__module__": stock.__module__})
    register = keras.saving.register_keras_serializable("mpkeras", stock.__name__)
    # Two classes of one name: the last one is what the name stands for.
    register(written)
    optimizer_class._written_class = written
    return register(optimizer_class)


class SavesItsState(OptimizerMixin):
    """Goes before `keras.optimizers.LossScaleOptimizer` in the bases of our wrapper.

    What is saved is a stock `LossScaleOptimizer`, configuration and arrays, so that a compiled model loads where
    mpkeras is not installed. What only we know (other rules, counters, windows) lies where Keras does not look.
    """

    # Whether a guard around the train step undoes what a skipped step did to the rest of the model.
    _is_guarded = False
    # Whether it was so in the model that this optimizer was saved with.
    _was_guarded = False

    @property  # type: ignore[misc]
    def __class__(self):
        # A class of the user's that extends ours is written as what it is.
        return vars(type(self)).get("_written_class", type(self))

    def _start_saving(self):
        self._saved_beside = _keras.SavedBeside(self)

    def _note_guard(self, is_guarded: bool | None = None):
        """Takes down whether the model's `train_step` is guarded now, for the copies that files make of the model.

        Called without: somebody looks after the steps of this optimizer, whatever becomes of the model's `train_step`.
        """
        self._is_guarded = self._is_guarded if is_guarded is None else is_guarded
        # Whoever guards the step, or takes the guard away, has decided.
        self._was_guarded = False

    def _warn_of_lost_guard(self, in_guarded_step: bool):
        """Warns once where an optimizer of a guarded model trains a copy of it that is not guarded."""
        if not self._was_guarded:
            return
        self._was_guarded = False
        if not in_guarded_step:
            warnings.warn(
                "This optimizer comes from a model whose train step was guarded by `mpkeras.prepare` or the "
                "`MixedPrecision` callback. The model that it trains now (loaded, unpickled or copied) is not: a "
                "skipped step leaves its traces in BatchNormalization statistics, metrics and random generators. Call "
                "`mpkeras.prepare(model)` before `fit`; in a loop of your own use `mpkeras.make_train_step`.",
                stacklevel=4,
            )

    def save_own_variables(self, store):
        """Saves what stock Keras' `LossScaleOptimizer` would; our own variables lie beside it in a file.

        Args:
            store: The open group of a file, which Keras hands over, for arrays by `"0"`, `"1"`, ... In a
                dictionary, beside which there is nothing, all variables are stored.

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> optimizer.build([keras.Variable(1.0)])
        >>> store = {}
        >>> optimizer.save_own_variables(store)
        >>> len(store) == len(optimizer.variables)
        True
        """
        variables = self.variables if isinstance(store, dict) else self._stock_variables()
        for i, variable in enumerate(variables):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store):
        """Loads what this class saved, what stock Keras' LossScaleOptimizer saved, or a plain optimizer.

        Args:
            store: The open group of a file, which Keras hands over: arrays by `"0"`, `"1"`, ...

        Example:

        >>> optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=1024.0)
        >>> optimizer.build([keras.Variable(1.0)])
        >>> store = {}
        >>> optimizer.save_own_variables(store)
        >>> _ = optimizer.dynamic_scale.assign(2.0)
        >>> optimizer.load_own_variables(store)
        >>> float(optimizer.loss_scale)
        1024.0
        """
        targets = self._targets(store)
        if targets is None:
            super().load_own_variables(store)
            return
        for i, variable in enumerate(targets):
            variable.assign(store[str(i)])
        sums = _keras.accumulated_gradients(self.inner_optimizer)
        if sums and len(targets) < len(self.variables):
            # Of an optimizer that accumulates by itself its sums, of any other the count of its updates.
            if any(variable is sums[0] for variable in targets):
                self._take_sums(self.window)
            else:
                self._inner_calls.assign(self._inner_calls.value * self.inner_optimizer.gradient_accumulation_steps)
        if len(targets) == len(self.inner_optimizer.variables):
            _expect_nothing(self.inner_optimizer)

    def _targets(self, store):
        """Returns the variables whose values are in a file, in its order, or `None`."""
        inner = self.inner_optimizer.variables
        sums = {id(variable) for variable in _keras.accumulated_gradients(self.inner_optimizer)}
        inner_without_sums = [variable for variable in inner if id(variable) not in sums]
        window = self.window.variables if self.window else []
        own = self.variables[: len(self.variables) - len(inner)]
        of_step = [id(variable) for variable in self.step_outcome]
        own_of_0_1 = [variable for variable in own if id(variable) not in of_step]
        own_without_window = own_of_0_1[: len(own_of_0_1) - len(window)]
        stock = self._stock_own_variables()
        candidates = [
            [*own, *inner],
            [*stock, *inner],
            [*stock, *inner_without_sums],
            # All of them: what mpkeras 0.1.0 wrote, which built the inner optimizer without sums.
            [*own_of_0_1, *inner],
            [*own_of_0_1, *inner_without_sums],
            [*own_without_window, *inner_without_sums],
            [*own[: len(own) - len(window)], *inner_without_sums],
        ]
        if self.built:
            candidates += [inner, inner_without_sums]
        for targets in candidates:
            shapes = [tuple(variable.shape) for variable in targets]
            if len(store.keys()) == len(shapes) and shapes == [store[str(i)].shape for i in range(len(shapes))]:
                return targets
        return None

    def _stock_variables(self) -> list:
        """Returns the variables that stock Keras' wrapper has, in its order."""
        return self._stock_own_variables() + self.inner_optimizer.variables

    def _stock_own_variables(self) -> list:
        # Its own iteration and learning_rate, which mean nothing.
        return self.variables[:2] + ([self.step_counter, self.dynamic_scale] if self.built else [])

    def _variables_beside(self) -> dict:
        """Returns the variables that stock Keras' wrapper does not have, by the names that files give them."""
        counters = (self._skipped_steps, self._consecutive_skips, self._last_step_skipped, self._nonfinite_losses)
        variables = {variable.name: variable for variable in counters}
        stock = ("step_counter", "dynamic_scale")
        variables |= {f"rule_{key}": variable for key, variable in self.scale_state.items() if key not in stock}
        if self.window is not None:
            variables |= {variable.name: variable for variable in self.window.variables}
        return variables

    def get_config(self):
        inner_config = keras.saving.serialize_keras_object(self.inner_optimizer)
        if self.window is not None:
            # Of this optimizer's `accumulate`, too: stock Keras reads it there.
            inner_config["config"]["gradient_accumulation_steps"] = self.gradient_accumulation_steps
        config = {"name": self.name, "inner_optimizer": inner_config, **self._stock_rule()}
        extra = self._extra_config(config)
        if extra:
            inner_config[_EXTRA] = extra
        return config

    def _stock_rule(self) -> dict:
        """Returns the settings with which stock Keras' wrapper comes closest to the rule.

        It always doubles and halves, without bounds; a scale that is to stay where it is never grows.
        """
        rule = self.loss_scale_rule
        growth_steps = getattr(rule, "dynamic_growth_steps", 2000) if rule.dynamic else _NEVER
        return {"initial_scale": rule.initial_scale, "dynamic_growth_steps": min(growth_steps, _NEVER)}

    def _extra_config(self, config: dict) -> dict:
        rule, extra = self.loss_scale_rule, {}
        said = DynamicLossScale(config["initial_scale"], dynamic_growth_steps=config["dynamic_growth_steps"])
        if rule != said:
            extra["loss_scale"] = keras.saving.serialize_keras_object(rule)
        if self.window is not None and self.window.on_overflow != "drop_micro":
            extra["on_overflow"] = self.window.on_overflow
        if self.all_reduce_dtype is not None:
            extra["all_reduce_dtype"] = self.all_reduce_dtype
        if self.scale_is_one and self._chosen_by_prepare:
            # Or a model saved in bfloat16 would train in float16 without loss scaling.
            extra["chosen_by_prepare"] = True
        if self._is_guarded or self._was_guarded:
            extra["was_guarded"] = True
        return extra

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        inner_config = config.pop("inner_optimizer")
        inner_optimizer = keras.saving.deserialize_keras_object(inner_config, custom_objects=custom_objects)
        # Files of 0.1.0 have the same keys beside the inner optimizer, in what stock Keras reads.
        config |= inner_config.get(_EXTRA, {}) if isinstance(inner_config, dict) else {}
        chosen_by_prepare = config.pop("chosen_by_prepare", False)
        was_guarded = config.pop("was_guarded", False)
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
        optimizer = cls(inner_optimizer, loss_scale=rule, **config)
        optimizer._chosen_by_prepare = chosen_by_prepare
        optimizer._was_guarded = was_guarded
        return optimizer


def _expect_nothing(inner_optimizer):
    """Lets the next call of its `load_own_variables` find nothing in the file, where Keras would warn.

    The file is of a plain optimizer, whose arrays the wrapper has given it. Keras goes on to ask the inner optimizer,
    too, for which there is no place in such a file.
    """

    def load_own_variables(store):
        del vars(inner_optimizer)["load_own_variables"]
        if len(store.keys()):
            inner_optimizer.load_own_variables(store)

    vars(inner_optimizer)["load_own_variables"] = load_own_variables
