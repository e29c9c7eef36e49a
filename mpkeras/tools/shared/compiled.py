"""The arguments that a model was compiled with, as `make_train_step` takes them."""

import keras

from mpkeras.seams import ModelView


def loss_and_targets(model, y, default=None) -> tuple:
    """Returns the loss the model is compiled with, or `default` for each output, and its targets.

    Both are by position, as `make_train_step` takes them.
    """
    loss = model.loss if getattr(model, "compiled", False) else None
    loss = default if loss is None else loss
    names = list(getattr(model, "output_names", None) or [])
    structure = ModelView(model).outputs
    if isinstance(loss, dict) and names and not isinstance(structure, dict):
        loss = [loss.get(name) for name in names]
        y = [y.get(name) for name in names] if isinstance(y, dict) else y
    if isinstance(loss, (list, tuple)):
        if len(loss) == 1:
            return loss[0], y[0] if isinstance(y, (list, tuple)) and len(y) == 1 else y
        return {i: part for i, part in enumerate(loss) if part is not None}, y
    if isinstance(loss, dict):
        return {name: part for name, part in loss.items() if part is not None}, y
    outputs = keras.tree.flatten(structure) if structure is not None else []
    if len(outputs) > 1 and loss is not None:
        keys = list(structure) if isinstance(structure, dict) else range(len(outputs))
        return dict.fromkeys(keys, loss), y
    return loss, y


def unwrapped(optimizer):
    """Returns an optimizer without those around it that scale the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer
