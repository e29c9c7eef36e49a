"""The arguments that a model was compiled with, as `make_train_step` takes them."""

import keras

from mpkeras.seams import ModelView


def loss_and_targets(model, y, default=None) -> tuple:
    """Returns the loss the model is compiled with, or `default` for each output, and its targets.

    Both are as `make_train_step` takes them: by name where the outputs are a dictionary, and by position elsewhere.
    Keras takes a list for a dictionary and the other way round, and targets of those outputs alone that have a loss.

    Raises:
        ValueError: If there are several outputs, and other targets than theirs.
    """
    loss = model.loss if getattr(model, "compiled", False) else None
    loss = default if loss is None else loss
    structure = ModelView(model).outputs
    is_dict = isinstance(structure, dict)
    names = list(getattr(model, "output_names", None) or [])
    if is_dict:
        # In the order in which Keras takes a dictionary apart, whatever its own is.
        names = keras.tree.flatten({name: name for name in structure})
    losses = _in_order(loss, names)
    if keras.tree.is_nested(structure) and loss is not None and not isinstance(losses, dict):
        losses = losses if isinstance(losses, list) else [loss] * len(names)
        keys = names if is_dict else list(range(len(names)))
        with_loss = [i for i, part in enumerate(losses[: len(names)]) if part is not None]
        return {keys[i]: losses[i] for i in with_loss}, _targets(model, y, names, with_loss)
    if isinstance(losses, list) and len(losses) > 1:
        return {i: part for i, part in enumerate(losses) if part is not None}, y
    if isinstance(losses, dict):
        return {name: part for name, part in losses.items() if part is not None}, y
    targets = _in_order(y, names)
    # `(32,)` is a shape, of which `forecast` takes any.
    is_in_list = isinstance(targets, list) and len(targets) == 1 and not isinstance(targets[0], int)
    return losses[0] if isinstance(losses, list) else losses, targets[0] if is_in_list else y


def _in_order(parts, names):
    """Returns what a list or a dictionary has for the outputs `names`, as a list; anything else as it is."""
    if isinstance(parts, dict):
        return [parts.get(name) for name in names] if names and parts.keys() <= set(names) else parts
    return list(parts) if isinstance(parts, (list, tuple)) else parts


def _targets(model, y, names, with_loss):
    """Returns `y` as the outputs `names` of a model are, of which those with the numbers `with_loss` have a loss."""
    structure = ModelView(model).outputs
    if y is None or _are_alike(y, structure):
        return y
    targets = _in_order(y, names)
    if not isinstance(targets, list):
        targets = [targets]
    if len(targets) == len(with_loss) < len(names):
        by_number = dict(zip(with_loss, targets, strict=True))
        targets = [by_number.get(i) for i in range(len(names))]
    if len(targets) != len(names) or any(targets[i] is None or isinstance(targets[i], dict) for i in with_loss):
        received = sorted(map(str, y)) if isinstance(y, dict) else f"{type(y).__name__} of {len(targets)}"
        raise ValueError(
            f"Expected `y` with targets for the outputs {names} of model '{model.name}'. Received: {received}. Pass a "
            "dictionary with these names, or a list in this order."
        )
    return dict(zip(names, targets, strict=True)) if isinstance(structure, dict) else targets


def _are_alike(y, structure) -> bool:
    """Whether `y` has the structure of the outputs, in which lists and dictionaries may hold others."""
    try:
        keras.tree.assert_same_structure(y, structure)
    except (ValueError, TypeError):
        return False
    return True


def unwrapped(optimizer):
    """Returns an optimizer without those around it that scale the loss."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer
