"""torch's part of `LossScaleOptimizer`: one pass that checks and unscales, then an update or none."""

import contextlib

import keras
import torch
import torch.distributed

from mpkeras import _keras
from mpkeras.devices._torch import is_distributed
from mpkeras.scaling import small_state
from mpkeras.scaling.facts import updating


def check_all_reduce_dtype(dtype):
    """Raises `ValueError` for any dtype: gradients are summed over ranks before an optimizer sees them."""
    if dtype is not None:
        raise ValueError(
            "Expected no `all_reduce_dtype` on torch, where `DistributedDataParallel` sums the gradients. Received: "
            f"all_reduce_dtype={dtype!r}. Leave it out, and give the module torch's own hook: "
            "`module.register_comm_hook(None, default_hooks.fp16_compress_hook)`, from "
            "`torch.distributed.algorithms.ddp_comm_hooks`."
        )


def build_scope():
    """The scope in which an optimizer makes its variables: any."""
    return contextlib.nullcontext()


def unshare(variables):
    """Gives each variable a value of its own: they always have one here."""


def traces() -> list:
    """Returns `[]`: what Python code does to its objects, `torch.compile` does at each call."""
    return []


def scale_loss(optimizer, loss, facts):
    if torch.is_tensor(loss):
        facts.loss_flags.append(torch.isfinite(loss.detach().sum()))
    return loss * optimizer.loss_scale


def of_all_replicas(grads, variables) -> list:
    """Returns the gradients of the whole batch: here each gradient is one."""
    return grads


def scale_gradient(grad, factor):
    with torch.no_grad():
        if grad.dtype in (torch.float16, torch.bfloat16):
            grad = grad.float()
        return grad * factor


def new_values(optimizer, mapping, grads, variables, facts):
    """Returns a function from variable to its value after the step."""
    with keras.StatelessScope(state_mapping=mapping) as scope:
        apply(optimizer, grads, variables, facts, in_place=False)
    return scope.get_current_value


@torch.no_grad()
def apply(optimizer, grads, variables, facts, in_place: bool = True):
    scale_is_one = facts.grads_are_unscaled or optimizer.scale_is_one
    loss_is_finite = torch.stack(facts.loss_flags).all() if facts.loss_flags else None
    scale = optimizer.loss_scale
    reciprocal = None if scale_is_one else (1.0 / scale)
    in_place = in_place and _may_unscale_in_place(grads, variables)
    if in_place and reciprocal is not None:
        # torch's own fused pass over the gradients: reads, checks and writes each once. The `.grad` that
        # the caller sees is unscaled afterwards, as after `torch.amp.GradScaler.unscale_`.
        present = [grad for grad in grads if grad is not None]
        found_inf = torch.zeros((), dtype=torch.float32, device=present[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(present, found_inf, reciprocal.to(found_inf.device))
        grads_are_finite = found_inf == 0
    else:
        grads_are_finite = _grads_are_finite(grads)
    # Of the optimizer's own scalars, with which the decision is made; NCCL sends nothing from another one.
    device = optimizer.skipped_steps.value.device
    grads_are_finite = grads_are_finite.to(device)
    loss_is_finite = None if loss_is_finite is None else loss_is_finite.to(device)
    if is_distributed():
        grads_are_finite, loss_is_finite = _on_all_ranks(grads_are_finite, loss_is_finite)
    decision, own_values = optimizer.decide(facts, grads_are_finite, loss_is_finite)
    # torch runs op by op: a host decision and no update is cheaper than selecting every variable.
    if bool(decision.is_accepted if optimizer.window is None else decision.is_accepted | decision.is_due):
        if not in_place and not scale_is_one:
            grads = optimizer.unscale(grads, variables, scale)
        if optimizer.window is None:
            _update(optimizer, grads, variables)
        else:
            _apply_window(optimizer, grads, variables, decision)
    in_scope = _keras.in_stateless_scope()
    for variable, value in own_values:
        # A rule of the user's own may return Python numbers.
        if in_scope or not torch.is_tensor(value):
            variable.assign(value)
        else:
            _keras.put(variable, value)


def _apply_window(optimizer, grads, variables, decision):
    window = optimizer.window
    sums = window.sums_of(variables)
    if bool(decision.is_accepted):
        begins = bool(window.begins())
        for total, grad, variable in zip(sums, grads, variables, strict=True):
            grad = grad.to_dense() if grad is not None and grad.is_sparse else grad
            if begins:
                total.assign(window.first(total.value, grad))
            elif grad is not None:
                total.assign(window.added(total.value, grad, variable))
        for total in window.sums_left_out(variables) if begins else []:
            total.assign(window.first(total.value, None))
    if bool(decision.is_due):
        totals = [total.value for total in sums]
        _update(optimizer, window.means(totals, grads, variables, decision), variables)


def _update(optimizer, grads, variables):
    """Lets the inner optimizer update, in float32 where variables are small."""
    inner_optimizer, rounding = optimizer.inner_optimizer, optimizer.rounding()
    with updating(optimizer), _keras.one_update(inner_optimizer), contextlib.ExitStack() as stack:
        if rounding.small:
            stack.enter_context(small_state.replaced_methods(inner_optimizer, _methods_in_float32))
            stack.enter_context(_WritingScope(rounding))
            stack.enter_context(rounding.variables_as_float32())
        inner_optimizer.apply(grads, variables)


def _methods_in_float32(optimizer) -> dict:
    """Returns what replaces the methods that update native parameters, many at a time and as they are stored."""
    update = _keras.portable_method(optimizer, _keras.UPDATE_METHOD)
    clip = getattr(optimizer, _keras.CLIP_METHOD)

    def update_in_float32(grads, variables, learning_rate):
        # Each when it is asked for: no float32 copy of all gradients at a time.
        update(map(_in_float32, grads), variables, learning_rate)

    def clip_in_float32(grads):
        clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
        return clip(list(map(_in_float32, grads))) if clips else grads

    return {
        _keras.UPDATE_METHOD: update_in_float32,
        _keras.CLIP_METHOD: clip_in_float32,
        _keras.WEIGHT_DECAY_METHOD: _keras.portable_method(optimizer, _keras.WEIGHT_DECAY_METHOD),
    }


def _in_float32(grad):
    return grad.float() if grad.dtype == torch.bfloat16 else grad


class _WritingScope(small_state.UpdateScope):
    """Writes each new value at once: into its variable, or into the `keras.StatelessScope` around."""

    def read(self, variable):
        around = self.original_scope
        value = None if around is None else around.get_current_value(variable)
        return _keras.stored_value(variable) if value is None else value

    def write(self, variable, value):
        if self.original_scope is None:
            _keras.stored_value(variable).copy_(value)
        else:
            self.original_scope.add_update((variable, value))


def _may_unscale_in_place(grads, variables) -> bool:
    """Whether every gradient is the float32 `.grad` of its variable; a tensor of the caller's own is not ours."""
    present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
    return bool(present) and all(
        not _keras.overwrites_with_gradient(v)
        and g.dtype == torch.float32
        and not g.is_sparse
        and g is getattr(getattr(v, "value", v), "grad", None)
        for g, v in present
    )


def _grads_are_finite(grads):
    """Returns whether all gradients are finite: a bool scalar of shape `()`."""
    total = None
    for grad in grads:
        if grad is not None:
            values = grad._values() if grad.is_sparse else grad
            if values.is_complex():
                values = torch.view_as_real(values.resolve_conj())
            part = values.sum(dtype=torch.float32)
            total = part if total is None else total + part
    return torch.isfinite(total) if total is not None else torch.tensor(True)


def _on_all_ranks(grads_are_finite, loss_is_finite):
    """Returns both flags, each true where it is true on every rank; a loss that no rank knows counts as finite."""
    # `DistributedDataParallel` sums the gradients before the optimizer sees them, but the loss stays with its rank, and
    # so do the gradients of a model that is trained in any other way. The message is the same whether a rank knows its
    # loss or not: ranks that wait for different messages wait for ever.
    known_loss = torch.ones_like(grads_are_finite) if loss_is_finite is None else loss_is_finite
    # A sum of int32, which every backend of torch.distributed can form.
    bad_ranks = (~torch.stack([grads_are_finite, known_loss])).to(torch.int32)
    torch.distributed.all_reduce(bad_ranks)
    all_finite = bad_ranks == 0
    return all_finite[0], all_finite[1]
