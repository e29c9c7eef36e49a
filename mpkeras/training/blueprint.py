"""What a configuration of a model does not say, and a process needs that makes the model and its step again."""

from mpkeras import _keras
from mpkeras.policies.rules import FLOAT8_STATE_MARK, has_float8_state, layer_policy
from mpkeras.policies.survey import Survey
from mpkeras.scaling.arguments import checked_optimizer
from mpkeras.training.objective import Objective


class Blueprint:
    """The paths of a model's layers, and which of them a conversion gave the state of float8; as JSON can hold it.

    Attributes:
        paths: As `_keras.paths_of` returns them.
        float8_given: The paths of layers.
    """

    def __init__(self, paths: dict, float8_given: list):
        self.paths, self.float8_given = paths, float8_given

    @classmethod
    def of(cls, model) -> "Blueprint":
        """Returns that of a model."""
        layers = Survey(model).layers
        given = [layer.path for layer in layers if layer.path and has_float8_state(layer)]
        return cls(_keras.paths_of(model), given)

    def give(self, model):
        """Gives it to a model that was made again from its configuration."""
        # Rules and layouts name layers and weights by their paths.
        _keras.give_paths(model, self.paths)
        for layer in Survey(model).layers:
            if layer.path in self.float8_given:
                # A conversion takes back what one gave, and nothing else.
                vars(layer_policy(layer))[FLOAT8_STATE_MARK] = True

    @staticmethod
    def check_loss(loss):
        """Raises `TypeError` or `ValueError` unless `make_train_step` takes the loss."""
        Objective(loss, metrics=None)

    @staticmethod
    def checked_optimizer(optimizer, argument: str):
        """Returns the optimizer that `optimizer` is or names; `argument` is what the caller calls it."""
        return checked_optimizer(optimizer, argument)

    @staticmethod
    def config_of(optimizer) -> dict:
        """Returns the configuration of an optimizer without what belongs to this process."""
        return _keras.portable_config(optimizer)

    @staticmethod
    def layouts_of(distribution):
        """Returns the `LayoutMap` of a `keras.distribution.ModelParallel`."""
        return _keras.layout_map_of(distribution)

    @staticmethod
    def lay_out(variables, distribution):
        """Gives variables without values the layouts that a distribution has for them."""
        _keras.lay_out(variables, distribution)
