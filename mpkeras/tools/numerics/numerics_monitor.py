"""`NumericsMonitor`: names the layer when a step is not finite."""

import dataclasses
from typing import Any

import keras
import numpy as np

from mpkeras.seams import ModelInFit, ModelView, check_switch, checked_count, number
from mpkeras.tools.numerics.numerics import (
    NumericsReport,
    remedies_of_lost_outputs,
    remedy_of_culprit,
    trace_numerics,
    traced,
)
from mpkeras.tools.shared.observation import Culprit
from mpkeras.tools.shared.report import shortened
from mpkeras.tools.shared.skipped_steps import KeptBatches, SkippedSteps


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found when a step was skipped.

    Attributes:
        epoch, batch: Of the step, counted from 0; with `steps_per_execution` the last batch of its execution.
        culprit: A `Culprit`, or `None` where the batch is finite with the weights as they are now.
        report: The `NumericsReport` of the batch; `None` where the model cannot be run on it.
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

    A model that cannot be run on its batch (one without a `call`, or whose `train_step` takes the batch apart in a way
    of its own) is looked at as far as it can be: a warning says whether its batch and its weights are finite, once the
    loss itself was not finite or steps are skipped 5 times in a row. `BlackBox` names the operation then.

    The first batch of a validation from which on a value of it is not finite is run again as well, as in validation,
    and the layer that is at fault is warned of.

    Each culprit is warned of once. Gradients that overflow while a dynamic loss scale settles are as it should be: they
    are among the findings, and warned of when they go on for 5 steps in a row.

    A model whose train step is not guarded, by `MixedPrecision` or `mpkeras.prepare`, is guarded for this `fit` as
    `MixedPrecision()` does: steps that are not finite are skipped. Its layers go on computing in what they do.

    Args:
        every: Also looks at the batch after every so many steps; `None` does not. The result is `last_report`; a layer
            whose outputs 16 bits lose, though all are finite, is warned of once.
        gradients: Whether to add `grad_norm` (of the unscaled gradients) and `zero_grad_fraction` (the share of the
            weights' gradients that are exactly zero) to the logs. Replicas of a TensorFlow strategy sum their
            gradients once more for it.
        max_findings: After so many findings, skipped steps are only counted: each costs two passes op by op.

    Attributes:
        findings: List of `Finding`s.
        last_report: The last `NumericsReport`.

    Raises:
        ValueError: If an argument is out of range, or, when training begins, another callback has taken the guard away.
        TypeError: If `gradients` is neither `True` nor `False`.

    Example:

    >>> layers = [keras.Input((2,)), keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1)]
    >>> model = keras.Sequential(layers, name="net")
    >>> model.compile("sgd", "mse")
    >>> monitor = mpkeras.callbacks.NumericsMonitor()
    >>> callbacks = [mpkeras.callbacks.MixedPrecision("mixed_float16"), monitor]
    >>> history = model.fit(np.full((4, 2), 1e5), np.ones((4, 1)), verbose=0, callbacks=callbacks)
    >>> print(monitor.findings[0].culprit.message)
    layer 'net/hidden' is given up to 1e+05, more than float16 holds
    """

    def __init__(self, *, every: int | None = None, gradients: bool = False, max_findings: int = 20) -> None:
        super().__init__()
        check_switch("gradients", gradients)
        self.findings: list = []
        self.last_report: NumericsReport | None = None
        self._every = None if every is None else checked_count("every", every)
        self._gradients = gradients
        self._max_findings = checked_count("max_findings", max_findings)
        self._skipped: int | None = None
        # A guard that adds the norm of the gradients to the logs, for this monitor alone.
        self._given_logs: Any = None
        self._steps = self._in_a_row = 0
        self._kept_tests = KeptBatches(name="test_function")
        # Whether a batch of the present validation was looked at.
        self._looked_at_test = False
        # Steps whose loss itself was not finite, as far as they were looked at.
        self._lost: float = 0

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        present = ModelInFit(self.model).guard
        if present is not None and self._gradients and not present.add_gradient_logs:
            self._given_logs = present
        ModelInFit(self.model).add_logs(gradients=self._gradients)

    def _leave(self):
        super()._leave()
        self._skipped, present, self._given_logs = None, self._given_logs, None
        if present is not None and self._in_fit.guard is present:
            # One of `mpkeras.prepare` stays, and later logs are without those that were asked for here.
            present.add_gradient_logs = False
            self._in_fit.trace_again()

    def _stop_watching(self):
        """Forgets what was kept; with the next batch everything begins anew."""
        self._kept.detach(self._trained)
        self._skipped = None

    def on_train_batch_begin(self, batch, logs=None):
        # Here and not at the end of a batch: there, Keras would wait for every step on JAX.
        self._look_at_executions(ahead=1 if keras.backend.backend() == "jax" else 0)
        super().on_train_batch_begin(batch, logs)
        if self._skipped is None:
            self._skipped = sum(number(optimizer.skipped_steps) for optimizer in ModelInFit(self.model).optimizers)
            self._lost = self._lost_losses()

    def on_test_begin(self, logs=None):
        self._looked_at_test = False

    def on_test_batch_begin(self, batch, logs=None):
        self._kept_tests.attach(self._trained, batch)

    def on_test_batch_end(self, batch, logs=None):
        if not self._looked_at_test and ModelInFit.not_finite(logs):
            self._looked_at_test = True
            for execution in list(self._kept_tests.executions)[-1:]:
                self._look_at_test(execution)
        self._kept_tests.executions.clear()

    def on_test_end(self, logs=None):
        self._kept_tests.detach(self._trained)
        super().on_test_end(logs)

    def _look_at_test(self, execution):
        """Warns of the layer at fault in an execution of `evaluate`, or says that there is none."""
        told: list[str] = []
        for data in execution.batches:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            try:
                report = traced(self.model, x, None, None, 1.0, training=False)
            except Warning:
                raise
            except Exception as error:
                told.append(f"which layer is at fault cannot be said, as {_why_not_run(error)}.")
                continue
            self.last_report = report
            if report.culprit is not None:
                told = [f"{report.culprit.message}. {remedy_of_culprit(report)}".strip()]
                break
            if not all(_is_finite(leaf) for leaf in keras.tree.flatten((y, sample_weight))):
                told.append("the targets or sample weights are not finite.")
        what = told[0] if told else "what the layers compute is finite; look at the loss, the metrics and the targets."
        several = f"one of the batches {execution.first} to {execution.step}"
        begin = f"batch {execution.step}" if execution.first == execution.step else several
        self._warn_once(("validation", what), f"Validation is not finite from {begin} on: {what}")

    def on_epoch_end(self, epoch, logs=None):
        self._look_at_executions(ahead=0)
        super().on_epoch_end(epoch, logs)

    def _look_at_executions(self, ahead: int):
        """Looks at the executions that are new, but for the last `ahead`; at all of them while steps are skipped."""
        while len(self._kept.executions) > (0 if self._in_a_row else ahead):
            execution = self._kept.executions.popleft()
            logs = execution.logs or {}
            skipped_before = self._skipped or 0
            skipped = int(number(logs.get("skipped_steps", skipped_before)))
            self._steps += 1
            is_due = self._every is not None and self._steps % self._every == 0 and bool(execution.batches)
            was_skipped = skipped > skipped_before
            if (was_skipped or is_due) and keras.backend.backend() == "jax":
                # `fit` holds the state itself there, and takes it up again from the variables.
                self.model.jax_state_sync()
            self._skipped = skipped
            self._in_a_row = self._in_a_row + 1 if was_skipped else 0
            if was_skipped:
                self._look_at_skipped(execution)
            elif is_due:
                self._look_at_finite(execution)

    def _look_at_skipped(self, execution):
        if len(self.findings) >= self._max_findings:
            return
        if not execution.batches:
            message = ": which layer was at fault cannot be said with several replicas."
            self._warn("nothing kept", execution.step, message)
            return
        scale = self._scales(execution)[0]
        try:
            report = self.last_report = self._first_report(execution)
        except Warning:
            raise
        except Exception as error:
            self.findings.append(Finding(self._epoch, execution.step, None, None, scale))
            self.found(self.findings[-1])
            self._say_without_report(execution, error)
            return
        self.findings.append(Finding(self._epoch, execution.step, report.culprit, report, scale))
        self.found(self.findings[-1])
        if report.culprit is None:
            message = ": with the weights as they are now its batch is finite."
            self._warn(None, execution.step, message, execution.first)
        elif report.culprit.side != "gradient" or not self._scale_may_settle():
            where = report.culprit.path or report.culprit.side
            message = f": {report.culprit.message}. {remedy_of_culprit(report)}"
            self._warn(where, execution.step, message, execution.first)

    def _look_at_finite(self, execution):
        try:
            report = self.last_report = self._trace(execution.batches[-1], self._scales(execution)[0])
        except Warning:
            raise
        except Exception as error:
            self._warn_once("every", f"`every={self._every}` gives no report: {_why_not_run(error)}.")
            return
        named = ModelView(self.model).named_for_lost_outputs()
        for path, sentence in remedies_of_lost_outputs(report).items():
            if path in named:
                continue
            self._warn_once(("lost outputs", path), f"Step {execution.step} of epoch {self._epoch + 1}: {sentence}")

    def _say_without_report(self, execution, error):
        """Says what can be said of a skipped step whose batch the model cannot be run on."""
        lost = self._lost_losses()
        if self._lost == lost and self._scale_may_settle():
            return
        bad = [variable.path for variable in self.model.variables if not _is_finite(variable)]
        if not all(_is_finite(leaf) for leaf in keras.tree.flatten(execution.batches)):
            what = "Its batch holds values that are not finite."
        elif bad:
            what = f"The weight '{bad[0]}' is not finite."
        elif self._kept.executions:
            # On JAX a step has been taken since, and the loss that was not finite may be that one's.
            return
        else:
            what = "Its batch and the weights are finite."
        self._lost = lost
        self._warn(
            "no report",
            execution.step,
            f": which layer was at fault cannot be said, as {_why_not_run(error)}. {what} "
            "`mpkeras.callbacks.BlackBox` keeps such a step, and `mpkeras replay` names its first bad operation.",
            execution.first,
        )

    def _scale_may_settle(self) -> bool:
        """Whether gradients that are not finite may be no fault, as a dynamic scale comes down after them."""
        rules = [optimizer.loss_scale_rule for optimizer in ModelInFit(self.model).optimizers]
        return self._in_a_row < 5 and any(rule.dynamic for rule in rules)

    def _lost_losses(self):
        return sum(number(optimizer.nonfinite_losses) for optimizer in ModelInFit(self.model).optimizers)

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
        """Returns the report of the first batch with a culprit, at the present scale, or at the one before.

        A forward pass that is not finite comes first: it was skipped at whatever scale. Gradients are those of the
        weights as they are now, which another step of the execution may have changed.
        """
        first = None
        for scale in self._scales(execution):
            for data in execution.batches:
                report = self._trace(data, scale)
                if report.culprit is not None and report.culprit.side != "gradient":
                    return report
                if first is None or first.culprit is None:
                    first = report
            if first is not None and first.culprit is not None:
                break
        return first

    def _scales(self, execution) -> list:
        """Returns the loss scales that the step may have had: the one after it, and the one that backed off to it."""
        optimizers = ModelInFit(self.model).optimizers
        if not optimizers:
            return [1.0]
        scale = number((execution.logs or {}).get("loss_scale", optimizers[0].loss_scale))
        backoff = getattr(optimizers[0].loss_scale_rule, "backoff_factor", None)
        return [scale] if backoff is None else [scale, scale / backoff]

    def _trace(self, data, scale):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        return trace_numerics(self.model, x, y, sample_weight, loss_scale=scale)


def _why_not_run(error) -> str:
    return f"the model cannot be run on its batch ({type(error).__name__}: {shortened(str(error), 160)})"


def _is_finite(value) -> bool:
    """Whether a tensor, an array or a variable holds no inf and no NaN; whatever is none of these counts as finite."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or "float" not in keras.backend.standardize_dtype(dtype):
        return True
    return bool(np.isfinite(keras.ops.convert_to_numpy(keras.ops.cast(value, "float32"))).all())
