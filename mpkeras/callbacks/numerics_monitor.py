"""`NumericsMonitor`: names the layer when a step is not finite."""

import dataclasses

import keras

from mpkeras._arguments import check_switch, checked_count
from mpkeras.callbacks.skipped_steps import SkippedSteps
from mpkeras.insight.numerics import trace_numerics
from mpkeras.insight.observation import Culprit
from mpkeras.policies.loss_scaling import number
from mpkeras.training import guard


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found when a step was skipped.

    Attributes:
        epoch, batch: Of the step, counted from 0.
        culprit: A `Culprit`, or `None` where the batch is finite with the weights as they are now.
        report: The `NumericsReport` of the batch.
        loss_scale: After the step, of the first optimizer that scales its loss; 1.0 if none does.
    """

    epoch: int
    batch: int
    culprit: Culprit | None
    report: object
    loss_scale: float = 1.0


class NumericsMonitor(SkippedSteps):
    """Names the first layer that is not finite whenever a step is skipped.

    A skipped step leaves no trace in the model, so the same batch can be run again, and is: with
    `mpkeras.trace_numerics`, which names the layer, the side (input, weight, output, gradient) and the number. In steps
    that are not skipped nothing is computed. Works with XLA and with `steps_per_execution`, too; with several replicas
    the step is reported without a name. On JAX steps run ahead of `fit`, and waiting for each would cost more than all
    else here: a skipped step is looked at when one more has been taken, with the weights after that, until a step is
    finite again.

    Each culprit is warned of once. Gradients that overflow while a dynamic loss scale settles are as it should be: they
    are among the findings, and warned of when they go on for 5 steps in a row.

    A model whose train step is not guarded, by `MixedPrecision` or `mpkeras.prepare`, is guarded for this `fit` as
    `MixedPrecision()` does: steps that are not finite are skipped. Its layers go on computing in what they do.

    Args:
        every: Also looks at the batch after every so many steps; `None` does not. The result is `last_report`.
        gradients: Whether to add `grad_norm` (of the unscaled gradients) and `zero_grad_fraction` (the share of the
            weights' gradients that are exactly zero) to the logs.
        max_findings: After so many findings, skipped steps are only counted: each costs two passes op by op.

    Attributes:
        findings: List of `Finding`s.
        last_report: The last `NumericsReport`.

    Raises:
        ValueError: If an argument is out of range, or, when training begins, another callback has taken the guard away.
        TypeError: If `gradients` is neither `True` nor `False`.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")], name="net")
    >>> model.compile("sgd", "mse")
    >>> monitor = mpkeras.callbacks.NumericsMonitor()
    >>> callbacks = [mpkeras.callbacks.MixedPrecision("mixed_float16"), monitor]
    >>> history = model.fit(np.full((4, 2), 1e5), np.ones((4, 1)), verbose=0, callbacks=callbacks)
    >>> print(monitor.findings[0].culprit.message)
    layer 'net/head' is given up to 1e+05, more than float16 holds
    """

    def __init__(self, *, every: int | None = None, gradients: bool = False, max_findings: int = 20) -> None:
        super().__init__()
        check_switch("gradients", gradients)
        self.findings: list = []
        self.last_report = None
        self._every = None if every is None else checked_count("every", every)
        self._gradients = gradients
        self._max_findings = checked_count("max_findings", max_findings)
        self._skipped: int | None = None
        self._steps = self._in_a_row = 0

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        guard.add_logs(self.model, gradients=self._gradients)

    def on_train_end(self, logs=None):
        self._skipped = None
        super().on_train_end(logs)

    def _stop_watching(self):
        """Forgets what was kept; with the next batch everything begins anew."""
        self._kept.detach(self._trained)
        self._skipped = None

    def on_train_batch_begin(self, batch, logs=None):
        # Here and not at the end of a batch: there, Keras would wait for every step on JAX.
        self._look_at_executions(ahead=1 if keras.backend.backend() == "jax" else 0)
        super().on_train_batch_begin(batch, logs)
        if self._skipped is None:
            self._skipped = sum(number(optimizer.skipped_steps) for optimizer in guard.scaling_optimizers(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self._look_at_executions(ahead=0)
        super().on_epoch_end(epoch, logs)

    def _look_at_executions(self, ahead: int):
        """Looks at the executions that are new, but for the last `ahead`; at all of them while steps are skipped."""
        while len(self._kept.executions) > (0 if self._in_a_row else ahead):
            execution = self._kept.executions.popleft()
            logs = execution.logs or {}
            before = self._skipped or 0
            skipped = int(number(logs.get("skipped_steps", before)))
            self._steps += 1
            is_due = self._every is not None and self._steps % self._every == 0 and bool(execution.batches)
            was_skipped = skipped > before
            if (was_skipped or is_due) and keras.backend.backend() == "jax":
                # `fit` holds the state itself there, and takes it up again from the variables.
                self.model.jax_state_sync()
            self._skipped = skipped
            self._in_a_row = self._in_a_row + 1 if was_skipped else 0
            if was_skipped:
                self._look_at_skipped(execution)
            elif is_due:
                self.last_report = self._trace(execution.batches[-1], self._scales(execution)[0])

    def _look_at_skipped(self, execution):
        if len(self.findings) >= self._max_findings:
            return
        if not execution.batches:
            message = ": which layer was at fault cannot be said with several replicas."
            self._warn("nothing kept", execution.step, message)
            return
        report = self.last_report = self._first_report(execution)
        scale = self._scales(execution)[0]
        self.findings.append(Finding(self._epoch, execution.step, report.culprit, report, scale))
        self.found(self.findings[-1])
        if report.culprit is None:
            self._warn(None, execution.step, ": with the weights as they are now its batch is finite.")
        elif report.culprit.side != "gradient" or self._in_a_row >= 5:
            remedies = " ".join(report.remedies()[:1])
            where = report.culprit.path or report.culprit.side
            self._warn(where, execution.step, f": {report.culprit.message}. {remedies}")

    def found(self, finding: Finding) -> None:
        """Called with each finding; for subclasses.

        Args:
            finding: A `Finding`.

        Example:

        >>> class Printing(mpkeras.callbacks.NumericsMonitor):
        ...     def found(self, finding):
        ...         print(f"batch {finding.batch}:", finding.culprit.message)
        """

    def _first_report(self, execution):
        """Returns the report of the first batch with a culprit, at the scale before the last one, or at the present."""
        report = None
        for data in execution.batches:
            for scale in self._scales(execution):
                report = self._trace(data, scale)
                if report.culprit is not None:
                    return report
        return report

    def _scales(self, execution) -> list:
        """Returns the loss scales that the step may have had: the one after it, and the one that backed off to it."""
        optimizers = guard.scaling_optimizers(self.model)
        if not optimizers:
            return [1.0]
        scale = number((execution.logs or {}).get("loss_scale", optimizers[0].loss_scale))
        backoff = getattr(optimizers[0].loss_scale_rule, "backoff_factor", None)
        return [scale] if backoff is None else [scale, scale / backoff]

    def _trace(self, data, scale):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return trace_numerics(self.model, x, y, sample_weight, loss_scale=scale)
