"""`audit`: who computes in what in a model, and what looks wrong; no data is needed."""

import keras

from mpkeras.devices.native import probe
from mpkeras.insight import checks, program_checks
from mpkeras.insight.audit_report import AuditReport
from mpkeras.insight.findings import in_order
from mpkeras.insight.layer_rows import layer_rows
from mpkeras.insight.programs.forward import OPEN_SIZE, forward_pass


def audit(model, inputs=None, *, batch_size: int = 8, open_size: int = OPEN_SIZE) -> AuditReport:
    """Returns what each layer of a model computes in, what that covers, and what looks wrong.

    Per layer: compute and variable dtype, parameters, and how much of the FLOPs is in 16 bits, counted in the program
    that the backend makes of a forward pass. Nothing is run, no data is needed, and the model stays as it is. Then
    findings, each with a remedy: 16-bit variables and losses, float16 without loss scaling, probability heads in
    16 bits, float32 layers that cost much, layers that mix dtypes, sizes that are no multiple of 8, and a device on
    which 16 bits do not pay.

    Args:
        model: A `keras.Model`, compiled or not. Of one that is not built yet only the layers are known.
        inputs: What the model is called with: arrays or `keras.KerasTensor`s, of which shapes and dtypes are
            taken. Functional and Sequential models say it themselves, and a subclassed model knows the shapes it was
            built with.
        batch_size: At least 1. The batch for which FLOPs and bytes are counted, where the inputs leave it open.
        open_size: At least 1. Likewise for each other size that they leave open, such as the length of a sequence;
            the report says so where it was needed.

    Returns:
        An `AuditReport`: `str()` is a table with the findings under it, `.summary()` the same without the table and the
        notes, `.findings` the findings, `.to_dict()` what JSON can hold, `.plot()` a matplotlib figure.

    Raises:
        TypeError: If `model` is no `keras.Model`.
        ValueError: If `batch_size` or `open_size` is no whole number of at least 1, or `inputs` hold something without
            a shape.

    Example:

    >>> with mpkeras.policy_scope("mixed_float16"):
    ...     layers = [keras.Input((8,)), keras.layers.Dense(2, "softmax", name="head")]
    ...     model = keras.Sequential(layers, name="net")
    >>> report = mpkeras.audit(model)
    >>> print(report)
    Audit of 'net' on the ... backend
    ...
    >>> print(report.findings[0])
    warning: net/head: Its activation computes in float16, which the default rule 'activation:softmax' keeps ...
    """
    optimizer = getattr(model, "optimizer", None)
    return audit_with_optimizer(model, optimizer, inputs, batch_size=batch_size, open_size=open_size)


def audit_with_optimizer(
    model, optimizer, inputs=None, *, batch_size: int = 8, open_size: int = OPEN_SIZE
) -> AuditReport:
    """As `audit`, with the optimizer that the model will be trained by, or `None`."""
    _check_arguments(model, inputs, batch_size, open_size)
    backend = keras.backend.backend()
    forward = forward_pass(model, inputs, batch_size, open_size)
    rows = layer_rows(model, forward)
    findings = [
        *checks.check_variables(model),
        *checks.check_optimizer(model, optimizer),
        *checks.check_losses(model),
        *program_checks.check_trace(forward, rows),
        *checks.check_float32_rules(model, rows),
        *program_checks.check_islands(model, rows),
        *checks.check_devices(model, probe(backend), backend),
        *program_checks.check_sizes(rows),
    ]
    return AuditReport(model.name, backend, rows, in_order(findings), forward)


def _check_arguments(model, inputs, batch_size, open_size):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a `keras.Model`. Received: {model!r} (of type {type(model).__name__}). Pass the model itself."
        )
    for name, number, default in (("batch_size", batch_size, 8), ("open_size", open_size, OPEN_SIZE)):
        if type(number) is not int or number < 1:
            raise ValueError(
                f"Expected `{name}` to be a whole number of at least 1. Received: {name}={number!r}. "
                f"Leave it out for {default}."
            )
    for value in keras.tree.flatten(inputs):
        if inputs is not None and not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise ValueError(
                f"Expected `inputs` to be arrays or `keras.KerasTensor`s. Received: {value!r} (of type "
                f"{type(value).__name__}). Pass for example `keras.KerasTensor((None, 28, 28, 1))`."
            )
