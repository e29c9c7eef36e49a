"""`Float32Fallback`: layers that keep overflowing move to float32, and training goes on."""

import warnings

from mpkeras.seams import ConvertedLayer, ModelInFit, ModelView, RuleNames, checked_count, dtypes, number
from mpkeras.tools.numerics.numerics_monitor import NumericsMonitor
from mpkeras.tools.shared.skipped_steps import trace_again


class Float32Fallback(NumericsMonitor):
    """Moves the layer that keeps overflowing to float32, no other, and lets training go on with all its state.

    Skipped steps are looked at as by `NumericsMonitor`. A layer that is the culprit of `patience` of them moves, with
    the layers that it runs itself, if float32 makes it finite: at once if its input, output or weights are not, as no
    loss scale cures that; if only its gradients overflow, when they do so at the lowest loss scale, too. The train
    function is built anew; weights, optimizer, metrics and random generators stay as they are. A warning and `moved`
    name the layers, and the policy that `trace_numerics(...).policy()` returns afterwards has their rules. A layer that
    multiplies in float8 multiplies in bfloat16 first (`moved_from_float8`), and moves only if that is not enough.

    Args:
        patience: Skipped steps with the same culprit before it moves.
        max_layers: After so many layers nothing moves any more, and a warning says so.
        every, gradients, max_findings: As in `NumericsMonitor`.

    Attributes:
        moved: List of the paths of the layers that were moved, in this order.
        moved_from_float8: List of the paths of those whose products were moved from float8 to bfloat16.

    Raises:
        ValueError: If an argument is out of range, or, when training begins, the model's train step is not guarded.
        TypeError: If `gradients` is neither `True` nor `False`.

    Example:

    >>> layers = [keras.Input((2,)), keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1)]
    >>> model = keras.Sequential(layers, name="net")
    >>> model.compile("sgd", "mse")
    >>> fallback = mpkeras.callbacks.Float32Fallback(patience=1)
    >>> callbacks = [mpkeras.callbacks.MixedPrecision("mixed_float16"), fallback]
    >>> x = np.full((8, 2), 1e5)  # more than float16 holds
    >>> history = model.fit(x, np.ones((8, 1)), batch_size=4, verbose=0, callbacks=callbacks)
    >>> fallback.moved, model.layers[0].compute_dtype
    (['net/hidden'], 'float32')
    >>> policy = mpkeras.Policy("mixed_float16", keep_float32=(..., *fallback.rules))  # for the next training
    """

    def __init__(
        self,
        *,
        patience: int = 2,
        max_layers: int = 8,
        every: int | None = None,
        gradients: bool = False,
        max_findings: int = 100,
    ) -> None:
        super().__init__(every=every, gradients=gradients, max_findings=max_findings)
        self.moved: list = []
        self.moved_from_float8: list = []
        self._patience = checked_count("patience", patience)
        self._max_layers = checked_count("max_layers", max_layers)
        self._counts: dict = {}
        # Of the batches that overflowed at every scale, those that were looked at.
        self._incurable_batches = 0

    @property
    def rules(self) -> tuple[str, ...]:
        """The float32 rules that keep the moved layers where they are now, for a policy."""
        return tuple(map(RuleNames.of_path, self.moved))

    @property
    def rules_16_bits(self) -> tuple[str, ...]:
        """The `keep_16_bits` rules that keep out of float8 what has left it, for a policy."""
        return tuple(map(RuleNames.of_path, self.moved_from_float8))

    def found(self, finding):
        culprit = finding.culprit
        if culprit is None or culprit.path is None or not culprit.float32_cures:
            return
        if culprit.side == "gradient" and not self._scale_is_lowest(finding):
            return
        layer = next(
            (layer for layer in ModelView(self.model).layers if ConvertedLayer(layer).path == culprit.path), None
        )
        if layer is None or layer.compute_dtype not in dtypes.SIXTEEN_BIT_DTYPES:
            return
        self._counts[culprit.path] = self._counts.get(culprit.path, 0) + 1
        if self._counts[culprit.path] < self._patience:
            return
        if ConvertedLayer(layer).multiplies_in_float8:
            move = "float8 to bfloat16"
            self._counts[culprit.path] = 0
            ConvertedLayer(layer).leave_float8(self.model, "it overflowed")
            self.moved_from_float8.append(culprit.path)
        elif len(self.moved) < self._max_layers:
            move = f"{layer.compute_dtype} to float32"
            if not ConvertedLayer(layer).move_to_float32(self.model):
                return
            self.moved.append(culprit.path)
        else:
            self._warn(
                "no more layers",
                finding.batch,
                f": {culprit.message}. {len(self.moved)} layers are in float32 by now, and no more are moved: train in "
                "'mixed_bfloat16', or raise `max_layers`.",
            )
            return
        # The functions that are there hold the layer as it was, and so does what they have executed since.
        self._stop_watching()
        self.model.test_function = self.model.predict_function = None
        trace_again(self.model)
        warnings.warn(
            f"Layer '{culprit.path}' has moved from {move}, in step {finding.batch} of epoch {finding.epoch + 1}: "
            f"{culprit.message}.",
            stacklevel=4,
        )

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._incurable_batches = self._count_incurable(ModelInFit(self.model).optimizers)

    @staticmethod
    def _count_incurable(optimizers) -> int:
        return sum(optimizer.record.incurable_batches for optimizer in optimizers)

    def _scale_is_lowest(self, finding) -> bool:
        """Whether the batch overflowed at the lowest scale: the present one, or one of those that it was tried at."""
        optimizers = ModelInFit(self.model).optimizers
        if not optimizers:
            return False
        if self._count_incurable(optimizers) > self._incurable_batches:
            self._incurable_batches += 1
            return True
        # Of the first, what it was after that step: on JAX another step has been taken since.
        scales = [finding.loss_scale, *(number(optimizer.loss_scale) for optimizer in optimizers[1:])]
        for optimizer, scale in zip(optimizers, scales, strict=True):
            rule = optimizer.loss_scale_rule
            lowest = getattr(rule, "min_scale", None) if optimizer.dynamic else rule.initial_scale
            if lowest is not None and scale <= lowest:
                return True
        return False
