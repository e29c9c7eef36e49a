"""How `LossScaleOptimizer` is saved and loaded, its own files and those of stock Keras."""

import keras

from mpkeras._typing import OptimizerMixin
from mpkeras.loss_scaling import DynamicLossScale


class SavesItsState(OptimizerMixin):
    """Goes before `keras.optimizers.LossScaleOptimizer` in the bases of our wrapper."""

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
        targets = self._targets(len(store.keys())) if self.built else None
        if targets is None:
            super().load_own_variables(store)
            return
        for i, variable in enumerate(targets):
            variable.assign(store[str(i)])

    def _targets(self, saved: int):
        """Returns the variables that a file of `saved` arrays holds, in its order, or `None`."""
        inner = self.inner_optimizer.variables
        window = {id(variable) for variable in self.window.variables} if self.window else set()
        # Stock Keras' own: iteration, learning_rate, step_counter, dynamic_scale.
        stock = [*self.variables[:2], self.step_counter, self.dynamic_scale, *inner]
        without_window = [variable for variable in self.variables if id(variable) not in window]
        for targets in (self.variables, stock, inner, without_window):
            if saved == len(targets):
                return targets
        return None

    def get_config(self):
        inner_config = keras.saving.serialize_keras_object(self.inner_optimizer)
        if self.window is not None:
            # Taken over from the inner optimizer; written back, so that stock Keras reads it where it looks.
            inner_config["config"]["gradient_accumulation_steps"] = self.window.steps
        config = {"name": self.name, "inner_optimizer": inner_config}
        if self.window is not None and self.window.on_overflow != "drop_micro":
            config["on_overflow"] = self.window.on_overflow
        if self.all_reduce_dtype is not None:
            config["all_reduce_dtype"] = self.all_reduce_dtype
        rule = self.loss_scale_rule
        if type(rule) is DynamicLossScale and rule == DynamicLossScale(
            initial_scale=rule.initial_scale, dynamic_growth_steps=rule.dynamic_growth_steps
        ):
            # Stock Keras' four keys, wherever they say it all.
            config["initial_scale"] = rule.initial_scale
            config["dynamic_growth_steps"] = rule.dynamic_growth_steps
        else:
            config["loss_scale"] = keras.saving.serialize_keras_object(rule)
        if self.scale_is_one and self._chosen_by_prepare:
            # Or a model saved in bfloat16 would train in float16 without loss scaling.
            config["chosen_by_prepare"] = True
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        chosen_by_prepare = config.pop("chosen_by_prepare", False)
        inner_optimizer = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        if isinstance(config.get("loss_scale"), dict):
            config["loss_scale"] = keras.saving.deserialize_keras_object(
                config["loss_scale"], custom_objects=custom_objects
            )
        optimizer = cls(inner_optimizer, **config)
        optimizer._chosen_by_prepare = chosen_by_prepare
        return optimizer
