"""One step of `fit`, run by hand on a model as it was when that step was taken."""

import keras

from mpkeras import _keras
from mpkeras.scaling.small_state import follow_weights
from mpkeras.training import guard, inventory, retake


class FitStep:
    """The train function of a compiled model whose step is guarded.

    Args:
        model: The model; its variables are read and written.
    """

    def __init__(self, model):
        self.model = model

    def get_ready(self, batch):
        """Makes the variables and the train function, which takes the batch that it is given and no other attempt."""
        model = self.model
        _keras.symbolic_build(model, batch)
        for optimizer in guard.scaling_optimizers(model):
            if optimizer is model.optimizer:
                optimizer.build(model.trainable_variables)
        model.make_train_function(force=True)
        retake.end(model.train_function)

    def run(self, batch):
        """Runs one step on the variables of the model, and returns its logs."""
        model = self.model
        if keras.backend.backend() == "torch":
            return model.train_function([batch])
        if keras.backend.backend() != "jax":
            return model.train_function(iter([batch]))
        # Copies, as the step takes over what it is given.
        state = self.state(model.optimizer, model.metrics_variables, keras.ops.copy)
        logs, state = model.train_function(state, iter([batch]))
        _keras.put_state(model, state)
        return logs

    def state(self, optimizer, metric_variables, copy=lambda value: value) -> tuple:
        """Returns the state that a train step takes on JAX, as a tuple of one; elsewhere `()`: variables hold it."""
        if keras.backend.backend() != "jax":
            return ()
        model = self.model
        groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables, metric_variables)
        return tuple([copy(variable.value) for variable in group] for group in groups)

    def store(self, dtypes):
        """Stores variables of the model in other dtypes, and the slots of its optimizers with them.

        Args:
            dtypes: List of `(variable, dtype)`.
        """
        for variable, dtype in dtypes:
            _keras.retype(variable, dtype)
        if dtypes:
            _keras.track_parameters_again(self.model)
            for optimizer in inventory.all_optimizers(self.model):
                follow_weights(optimizer)
