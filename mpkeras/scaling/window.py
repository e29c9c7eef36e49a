"""The window of gradient accumulation: several calls of `apply` sum their gradients for one update."""

import dataclasses

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._arguments import checked_count, is_one_of
from mpkeras.distribution import distribution_backend
from mpkeras.policies.loss_scaling import scalars

ON_OVERFLOW = ("drop_micro", "drop_window")


def checked_steps(accumulate_steps, on_overflow) -> int:
    """Returns `accumulate_steps`. Raises `ValueError` unless it and `on_overflow` describe a window."""
    steps = checked_count("accumulate_steps", accumulate_steps, "Use 1 to update at every step.")
    if not is_one_of(on_overflow, ON_OVERFLOW):
        raise ValueError(
            f"Expected `on_overflow` to be one of {ON_OVERFLOW}. Received: on_overflow={on_overflow!r}. Use "
            "'drop_micro' to leave out the one batch, 'drop_window' to leave out the whole update."
        )
    return steps


def sum_dtype(dtype) -> str:
    """Returns the dtype in which gradients of a variable of `dtype` are summed: float32 or wider."""
    dtype = keras.backend.standardize_dtype(dtype)
    # In 16 bits a sum of many gradients loses the small ones.
    return dtype if dtype == "float64" or "complex" in dtype else "float32"


def add_number(optimizer, name: str, value, dtype: str):
    """Returns a new variable of `optimizer`, of shape `()`, whole on each device."""
    return optimizer.add_variable(
        shape=(),
        initializer=keras.initializers.Constant(value),
        dtype=dtype,
        aggregation="none",
        # Its own: a pattern that a layout map has for weights, such as ".*scale", may fit "loss_scale_optimizer", too.
        layout=distribution_backend.layout_of_number(),
        name=name,
    )


@dataclasses.dataclass(frozen=True)
class Decision:
    """The effects of one call of `apply`. The first five are bool scalars of shape `()`.

    Without accumulation a window is one step: it is the last, and due where accepted.
    """

    is_accepted: object  # the gradients of this call count
    is_last: object  # this call ends the window
    is_due: object  # the inner optimizer updates now
    scale_moves: object  # the loss-scaling rule takes a step now
    scale_is_finite: object  # what it is told
    accepted_in_window: object  # int32 scalar, this call counted
    values: list  # `(variable, value)` for the window's own counters


def single_step(grads_are_finite, loss_is_finite) -> Decision:
    """Returns the decision without accumulation. `loss_is_finite` is `None` where it is not known."""
    is_accepted, scale_moves = grads_are_finite, True
    if loss_is_finite is not None:
        is_accepted = scalars.logical_and(grads_are_finite, loss_is_finite)
        # No scale cures a forward pass that is not finite: the scale stays.
        scale_moves = loss_is_finite
    return Decision(is_accepted, True, is_accepted, scale_moves, grads_are_finite, 1, [])


class GradientWindow:
    """Sums the gradients of `steps` calls of `apply` in float32, and says when the update is due.

    The window ends at the `steps`-th call, whatever overflows. A call whose loss or gradients are not finite leaves no
    trace in the sums; the update takes the mean over the others (`"drop_micro"`), or is left out (`"drop_window"`). The
    loss scale moves at the end of a window only, and backs off if gradients overflowed anywhere in it.

    The variables of the window are variables of `optimizer`.
    """

    def __init__(self, optimizer, steps: int, on_overflow: str = "drop_micro"):
        self.steps = checked_steps(steps, on_overflow)
        self.on_overflow = on_overflow

        # Not in `build`: a train step is traced with these counters before it builds the optimizer.
        def add(name):
            return add_number(optimizer, name, 0, "int32")

        self.position = add("window_position")
        self.accepted = add("window_accepted")
        # 0 or 1, no bool: as the flags of the optimizer.
        self.overflowed = add("window_overflowed")
        # All calls whose gradients counted: what tells an accepted call from a skipped one.
        self.accepted_steps = add("accepted_steps")
        self.sums: list = []

    @property
    def variables(self) -> list:
        return [self.position, self.accepted, self.overflowed, self.accepted_steps, *self.sums]

    def build(self, optimizer, variables):
        """Makes the sums: one for each of `variables`."""
        self.sums = [
            optimizer.add_variable(
                shape=variable.shape,
                initializer="zeros",
                dtype=sum_dtype(variable.dtype),
                aggregation="none",
                layout=getattr(variable, "_layout", None),
                name=f"gradient_sum_{i}",
            )
            for i, variable in enumerate(variables)
        ]
        self._sum_of = {id(variable): total for variable, total in zip(variables, self.sums, strict=True)}

    def take_sums_of(self, inner_optimizer):
        """Takes over the half-full sums of an inner optimizer that has accumulated by itself."""
        sums, calls = _keras.accumulated_gradients(inner_optimizer), _keras.step_count(inner_optimizer)
        if not sums:
            return
        steps = inner_optimizer.gradient_accumulation_steps or self.steps
        position = ops.cast(ops.mod(calls.value, steps), "int32")
        # Copies: JAX cannot donate a buffer twice, and torch's would change with the variable it is of.
        self.position.assign(ops.copy(position))
        self.accepted.assign(ops.copy(position))
        for total, old in zip(self.sums, sums, strict=True):
            total.assign(ops.copy(ops.cast(old.value, total.dtype)))
            old.assign(ops.zeros_like(old.value))
        calls.assign(calls.value - ops.cast(position, calls.dtype))

    def sums_of(self, variables) -> list:
        """Returns the sum of each of `variables`, which may lack those frozen since `build`."""
        return [self._sum_of[id(variable)] for variable in variables]

    def decide(self, grads_are_finite, loss_is_finite) -> Decision:
        """Returns what this call of `apply` does. `loss_is_finite` is `None` where it is not known."""
        single = single_step(grads_are_finite, loss_is_finite)
        overflowed_now = scalars.logical_not(grads_are_finite)
        if loss_is_finite is not None:
            overflowed_now = scalars.logical_and(overflowed_now, loss_is_finite)
        overflowed = scalars.logical_or(scalars.greater_equal(self.overflowed.value, 1), overflowed_now)
        counted = ops.cast(single.is_accepted, "int32")
        accepted = self.accepted.value + counted
        position = self.position.value + 1
        # Not `==`: a restored position may lie beyond a window that was made shorter.
        is_last = scalars.greater_equal(position, self.steps)
        enough = self.steps if self.on_overflow == "drop_window" else 1
        is_due = scalars.logical_and(is_last, scalars.greater_equal(accepted, enough))
        return Decision(
            is_accepted=single.is_accepted,
            is_last=is_last,
            is_due=is_due,
            scale_moves=scalars.logical_and(is_last, scalars.logical_or(overflowed, is_due)),
            scale_is_finite=scalars.logical_not(overflowed),
            accepted_in_window=accepted,
            values=[
                (self.position, scalars.where(is_last, 0, position)),
                (self.accepted, scalars.where(is_last, 0, accepted)),
                (self.overflowed, ops.cast(scalars.logical_and(overflowed, scalars.logical_not(is_last)), "int32")),
                (self.accepted_steps, self.accepted_steps.value + counted),
            ],
        )

    def begins(self):
        """Returns whether no gradients counted in this window yet: a bool scalar of shape `()`."""
        # The sums are then those of the window before. They are not cleared at its end: that would be one more pass
        # over memory, and on JAX a second buffer, where the update has just read them.
        return ops.equal(self.accepted.value, 0)

    def added(self, total, grad, variable):
        """Returns the sum `total` with an unscaled gradient added; a dense float32 tensor."""
        if _keras.overwrites_with_gradient(variable):
            # Its gradient is its new value (float8 scales, largest values): as Keras' own accumulation has it.
            return ops.maximum(total, ops.cast(grad, total.dtype))
        return total + ops.cast(grad, total.dtype)

    def first(self, total, grad):
        """Returns what `total` becomes where the window begins with this unscaled gradient, or with `None`."""
        return ops.zeros_like(total) if grad is None else ops.cast(grad, total.dtype)

    def sums_left_out(self, variables) -> list:
        """Returns the sums of all but `variables`. A window that begins without a variable may end with it."""
        present = {id(total) for total in self.sums_of(variables)}
        return [total for total in self.sums if id(total) not in present]

    def next_sums(self, value_of, grads, variables, decision: Decision) -> list:
        """Returns `(sum, value)` for each sum: what it becomes with this call's unscaled gradients; without a branch.

        Args:
            value_of: Function that returns the present value of a sum.
            grads: The gradients, or `None`, of `variables`.
            variables: The variables of this call, which may lack those frozen since `build`.
            decision: What the call does.
        """
        begins = self.begins()

        def next_sum(total, grad, variable):
            old_sum = ops.where(begins, ops.zeros_like(total), total)
            new = old_sum if grad is None else self.added(old_sum, grad, variable)
            return ops.where(decision.is_accepted, new, total)

        sums, left_out = self.sums_of(variables), self.sums_left_out(variables)
        entries = [*zip(sums, grads, variables, strict=True), *((total, None, None) for total in left_out)]
        return [(total, next_sum(value_of(total), grad, variable)) for total, grad, variable in entries]

    def means(self, totals, grads, variables, decision: Decision) -> list:
        """Returns the gradients of the update: the mean over the calls that were accepted; `None` for those `None`."""
        # The division is not reached with 0: then no update is due. It must not make a NaN all the same.
        count = scalars.maximum(decision.accepted_in_window, 1)

        def mean(total, grad, variable):
            if grad is None:
                return None
            if _keras.overwrites_with_gradient(variable):
                return total
            return ops.divide(total, ops.cast(count, keras.backend.standardize_dtype(total.dtype)))

        return [mean(*entry) for entry in zip(totals, grads, variables, strict=True)]
