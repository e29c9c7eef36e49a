"""Reads and writes an optimizer wrapper's attributes through to the optimizer inside it."""

from mpkeras.policies.loss_scaling import FixedLossScale
from mpkeras.scaling.optimizer_arguments import INNER_ARGUMENTS


def _delegated(name: str) -> property:
    def read(self):
        return getattr(self.inner_optimizer, name)

    return property(read, doc=f"`{name}` of the inner optimizer.")


class DelegatesToInner:
    """Goes before `keras.optimizers.LossScaleOptimizer` in the bases of a wrapper with a `loss_scale_rule`.

    Keras' own wrapper knows `learning_rate` and `iterations` only: `beta_1` raises, and `clipnorm` reads as
    the wrapper's `None` whatever the inner optimizer does.
    """

    weight_decay = _delegated("weight_decay")
    clipnorm = _delegated("clipnorm")
    global_clipnorm = _delegated("global_clipnorm")
    clipvalue = _delegated("clipvalue")
    use_ema = _delegated("use_ema")
    ema_momentum = _delegated("ema_momentum")
    ema_overwrite_frequency = _delegated("ema_overwrite_frequency")
    loss_scale_factor = _delegated("loss_scale_factor")

    def __getattr__(self, name):
        # Only reached when the wrapper has no such attribute.
        if name.startswith("_") or "inner_optimizer" not in self.__dict__:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.inner_optimizer, name)

    def __setattr__(self, name, value):
        inner_optimizer = self.__dict__.get("inner_optimizer")
        if name == "gradient_accumulation_steps" and inner_optimizer is not None:
            # Accumulation is the wrapper's own work.
            super().__setattr__(name, value)
            return
        if name in INNER_ARGUMENTS:
            # Before there is an inner optimizer, Keras' own constructor sets its neutral defaults.
            if inner_optimizer is not None:
                setattr(inner_optimizer, name, value)
            return
        if name in ("initial_scale", "dynamic_growth_steps"):
            if "_scale" in self.__dict__:
                self._replace_rule(name, value)
            return
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if inner_optimizer is not None and not is_own and hasattr(inner_optimizer, name):
            setattr(inner_optimizer, name, value)
            return
        super().__setattr__(name, value)

    def _replace_rule(self, name: str, value):
        config = self._rule.get_config()
        if name == "initial_scale" and isinstance(self._rule, FixedLossScale):
            name = "scale"
        if name not in config:
            raise ValueError(
                f"Expected a loss scale with `{name}`. Received: {name}={value} for {self._rule!r}. "
                "Create the optimizer with `loss_scale=mpkeras.DynamicLossScale(...)`."
            )
        self._scale.rule = self._rule.from_config({**config, name: value})

    def exclude_from_weight_decay(self, var_list=None, var_names=None):
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def set_weights(self, weights):
        """Sets the values of `variables`, the inner optimizer's included.

        Args:
            weights: One array for each of `variables`, of its shape, in their order.

        Raises:
            ValueError: If the optimizer is not built, or the number of arrays is not that of `variables`.

        Example:

        >>> first, second = (mpkeras.LossScaleOptimizer("sgd", initial_scale=scale) for scale in (8.0, 4.0))
        >>> for optimizer in (first, second):
        ...     optimizer.build([keras.Variable(1.0)])
        >>> first.set_weights([keras.ops.convert_to_numpy(variable) for variable in second.variables])
        >>> float(first.loss_scale)
        4.0
        """
        if not self.built:
            raise ValueError(
                "Expected a built optimizer. Received: `set_weights` on one that is not. "
                "Call `optimizer.build(trainable_variables)` first."
            )
        if len(weights) != len(self.variables):
            raise ValueError(
                f"Expected {len(self.variables)} weights. Received: {len(weights)}. "
                "Pass the values of `optimizer.variables`, in their order."
            )
        for variable, weight in zip(self.variables, weights, strict=True):
            variable.assign(weight)
