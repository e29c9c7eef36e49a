"""Notes on an optimizer beside its state: who chose its settings, who guards its steps, how training began."""

import dataclasses
import warnings
from collections.abc import Sequence

from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.policy import Policy


@dataclasses.dataclass
class Record:
    """What other rooms note of one `LossScaleOptimizer`. Nothing here is part of the state of a step.

    Attributes:
        rule_is_chosen_by_prepare: Such a rule gives way to what the next policy asks for; one of the user's own stays.
        slots_are_chosen_by_prepare: As for the rule.
        excluded_from_weight_decay: From a config, one dictionary for each of `parts_of`, until the build.
        is_guarded: Whether a guard around the train step undoes what a skipped step did to the rest of the model.
        was_guarded: Whether it was so in the model that this optimizer was saved with.
        parts: The policy's calls of `apply` to an update. The user's own number times this is the length of the window.
        remat: What the model keeps for the backward pass, as `Policy.remat`; or did when this optimizer was saved.
        policy: The 16-bit `Policy` that the model was converted to, as `get_policy` takes it; `None` where it was not.
        was_made_in_16_bits: Whether that conversion left layers in float32 that the user had made so among others.
        had_update: Whether there was an update since this object was made.
        hears_losses: Whether such an update was told if its loss is finite, which `scale_loss` does.
        steps_before_scale: How many steps had counted when the loss scale was begun anew.
        incurable_batches: Batches whose gradients overflowed at every scale that was tried, before a step counted.
        is_told_below_one: Whether the user was told that the scale fell below 1.
    """

    rule_is_chosen_by_prepare: bool = False
    slots_are_chosen_by_prepare: bool = False
    excluded_from_weight_decay: list = dataclasses.field(default_factory=list)
    is_guarded: bool = False
    was_guarded: bool = False
    parts: int = 1
    remat: str | Sequence | None = None
    policy: Policy | str | dict | None = None
    was_made_in_16_bits: bool = False
    had_update: bool = False
    hears_losses: bool = False
    steps_before_scale: int = 0
    incurable_batches: int = 0
    is_told_below_one: bool = False

    def note_guard(self, is_guarded: bool | None = None):
        """Notes whether the model's `train_step` is guarded now, for the copies that files make of the model.

        `None`: another step guards the optimizer, whatever becomes of the model's `train_step`.
        """
        if is_guarded is not None:
            self.is_guarded = is_guarded
        # A guard that is put around the step, or taken away, decides.
        self.was_guarded = False

    def note_policy(self, policy: Policy | None, was_made_in_16_bits: bool):
        """Notes what the model was converted to, for what is made of its file: layers in others come back in float32.

        `None`: it was not converted.
        """
        is_small = policy is not None and policy.compute_dtype in SIXTEEN_BIT_DTYPES
        self.policy, self.was_made_in_16_bits = policy if is_small else None, is_small and was_made_in_16_bits

    def warn_of_lost_guard(self, is_in_guarded_step: bool):
        """Warns once where an optimizer of a guarded model trains a copy of it that is not guarded."""
        if not self.was_guarded:
            return
        self.was_guarded = False
        if not is_in_guarded_step:
            warnings.warn(
                "This optimizer comes from a model whose train step was guarded by `mpkeras.prepare` or the "
                "`MixedPrecision` callback. The model that it trains now (loaded, unpickled or copied) is not: a "
                "skipped step leaves its traces in BatchNormalization statistics, metrics and random generators. Call "
                "`mpkeras.prepare(model)` before `fit`; in a loop of your own use `mpkeras.make_train_step`.",
                stacklevel=4,
            )
