"""Attributes that mpkeras replaces on other people's objects: each is listed, and taken back where it is still ours."""

import contextlib
import dataclasses
from typing import Any

# The replaced attributes, and why nothing less will do. CONTRIBUTING.md has the same list.
KINDS = {
    "layer": "`call` of a layer: a user's own names the dtypes it mixes, a torch module runs under `torch.autocast`, "
    "and a `Dense` multiplies in float8; a policy alone does none of these. "
    "`activity_regularizer` and `add_loss` of a 16-bit one: Keras hands them 16-bit outputs, whose squares overflow. "
    "`_get_regularization_losses` of a model: regularizers of 16-bit weights are handed float32. `_regularizer` of the "
    "weights meanwhile",
    "outputs": "`call` of a model of the user's own, and of the models that its step computes with: it returns "
    "float32. `export` of one: it takes float32. `compute_metrics` of a model with a step of its own: metrics are "
    "computed in float32",
    "variables": "`call` of a model or layer of the user's own: variables of its own that make outputs are read in "
    "float32; of a Functional model: those that operations take",
    "made inside": "`call` of a model or layer of the user's own: while it computes in float32, so do layers that the "
    "`call` makes, as `keras.layers.concatenate` makes one, which have the global policy",
    "heads": "`call` of a model or layer of the user's own, until it has run once: which of the layers inside makes an "
    "output, and so computes in float32, only a call tells",
    "caller": "`call` of a layer: it returns the dtype that the layer which runs it computes in, where one of the two "
    "stays in float32 as it writes state in its `call`",
    "states": "`call` of a stateful recurrent layer on torch: what it assigns to its states reaches them, and not "
    "their copies in 16 bits. `_autocast` of the states meanwhile",
    "bias": "`call` of a layer with a bias on TensorFlow: in bfloat16 the gradient of the bias is summed in float32. "
    "`bias` and `activation` meanwhile",
    "steps": "`inner_loop` of a recurrent layer of Keras around cells of Keras, where cuDNN does not run it: its state "
    "is float32, to which each step adds, and the gradients of its weights are summed in float32. `use_cudnn` of one "
    "where none is that takes 16 bits. `call` of a stateful one: so is the state from batch to batch",
    "remat": "`rematerialized_call` of a layer: what Keras computes again in the backward pass is computed as the "
    "first time, in the same dtypes, with the same random numbers, and writes nothing",
    "again": "`call` of a layer, and `_run_through_graph` of a Functional model: the backward pass computes again what "
    "the policy's `remat` says, and keeps less",
    "attention": "`_masked_softmax` and `_compute_attention` of an attention layer: for its backward pass it "
    "keeps the probabilities in 16 bits, and in float32 no tensor of their size: half of its temporaries on a GPU",
    "inputs": "`autocast` of a model: raw inputs beyond float16 belong to the float32 layer that normalizes them. That "
    "and `call` of a layer of the user's own: layers inside, and its mask, are to see numbers of the data whole. Of a "
    "normalization that makes an output: it would round that to the dtype of what it is given",
    "converted": "`get_config` of a model: its file holds the policy its author chose, and no cast that plain Keras "
    "cannot name. `build` of one: its layers have their paths only then, and layers of their own. `compile` of one "
    "with weights or slots in bfloat16: it says where its optimizer cannot train them",
    "orthogonal": "`get_config` of a layer with bfloat16 weights that begin orthogonal: no backend draws such a "
    "matrix, and a file, in which it says `mixed_bfloat16`, makes it in float32",
    "guard": "`train_step` and `make_train_function` of a model: a skipped step leaves no trace, and first batches are "
    "taken again. `_get_metrics_result_or_logs` of one: metrics are asked at the end of an epoch as without loss scale "
    "in the logs. `compile`, `fit`, `evaluate` and `predict` of a prepared one: it stays prepared when it is compiled "
    "again, logs in `fit` only, and says what 16 bits would lose, and where a validation is not finite",
    "monitor": "`_is_improvement` of a callback that keeps the best epoch, until `fit` ends: a value that is not "
    "finite is no improvement",
    "callback": "`fit` of a model, while a callback has something on it for one `fit`: where an exception has ended "
    "that one, the next begins without",
    "written weights": "`assign` of a variable, for one step: what a layer writes into its weights is put back if the "
    "step is skipped",
    "update": "methods of an optimizer, for one update or for its build: on TensorFlow gradients are summed already "
    "and the decay follows the decision to skip; small variables are updated in float32, one by one, and made small. "
    "`_dtype` of small variables, meanwhile: they say that they are float32",
    "loading": "`load_own_variables` of an optimizer that is not built: what a file holds is kept until it is. That "
    "and `save_own_variables` of the inner optimizer of a wrapped one, once: a file numbers what stock Keras would",
    "observed": "`call` of a layer, for one run of `audit`, `trace_numerics` or a capsule, or of the model on its "
    "first batch: its inputs and outputs are looked at, and in the last case what it gives to its `add_loss`. `build` "
    "of one that is not built, for the same run: the run ends where it would be. `apply` of an optimizer, for one run "
    "of a capsule: its gradients are looked at",
}
# On the object, with which it goes: the functions in it hold the object.
_RECORD = "_mpkeras_replaced"
_MISSING = object()


@dataclasses.dataclass(eq=False)
class Replaced:
    """One attribute that was replaced on an instance."""

    name: str
    kind: str
    before: Any
    given: Any
    # Whether what it was put over is gone: a function that was made to call that still does.
    outlived: bool = False


class _Record:
    """The replaced attributes of one object, the oldest first. No list: Keras looks into lists when it saves."""

    def __init__(self):
        self.entries: list[Replaced] = []


def replace(owner, name: str, value, *, kind: str) -> bool:
    """Gives `owner` another value of its attribute `name`, until `restore`, unless one of this kind is in force.

    The value is put on the instance, where no file holds it, and not by `setattr`, which Keras and torch both watch.
    Values of several kinds may lie over each other. Returns whether it was put there.
    """
    if is_replaced(owner, name, kind):
        return False
    _put(owner, name, value, kind)
    return True


def restore(owner, name: str, *, kind: str):
    """Takes back `replace`, if it was done; what somebody else has put there since is left alone."""
    for entry in reversed(_entries(owner)):
        if entry.name == name and entry.kind == kind:
            _take_back(owner, entry)
            return


@contextlib.contextmanager
def replaced(owner, name: str, value, *, kind: str):
    """Context manager: `owner` has another value of its attribute `name`.

    A replacement of the same kind around it is covered, too: the inner context always ends first.
    """
    entry = _put(owner, name, value, kind)
    try:
        yield
    finally:
        _take_back(owner, entry)


@contextlib.contextmanager
def replaced_on_all(owners, name: str, make):
    """Context manager: each of `owners` has `make(owner, own value or None)` as its attribute `name`.

    For what happens at every step: nothing is listed, as hundreds of variables are replaced and taken back within one.
    """
    old_values = [vars(owner).get(name) for owner in owners]
    new_values = [make(owner, value) for owner, value in zip(owners, old_values, strict=True)]
    for owner, value in zip(owners, new_values, strict=True):
        vars(owner)[name] = value
    try:
        yield
    finally:
        for owner, value, old in zip(owners, new_values, old_values, strict=True):
            if vars(owner).get(name) is not value:
                # Someone else's by now.
                continue
            if old is None:
                del vars(owner)[name]
            else:
                vars(owner)[name] = old


def is_replaced(owner, name: str, kind: str) -> bool:
    """Whether the value of `kind` is in force: `owner` has it, or one of ours that lies over it."""
    return any(entry.name == name and entry.kind == kind for entry in replaced_attributes(owner))


def is_newest(owner, name: str, kind: str) -> bool:
    """Whether the value of `kind` lies over all of ours that `owner` has, and what it was put over is still there."""
    newest = next((entry for entry in replaced_attributes(owner) if entry.name == name), None)
    return newest is not None and newest.kind == kind and not newest.outlived


def replaced_attributes(owner) -> list[Replaced]:
    """Returns what is replaced on `owner` now, the newest first."""
    values: dict = {}
    entries = []
    for entry in reversed(_entries(owner)):
        value = values.get(entry.name, vars(owner).get(entry.name, _MISSING))
        if value is entry.given:
            entries.append(entry)
            values[entry.name] = entry.before
    return entries


def value_below(owner, name: str):
    """Returns the method `name` that `owner` has below all that is replaced on it."""
    of_name = [entry for entry in replaced_attributes(owner) if entry.name == name]
    if not of_name:
        return getattr(owner, name)
    below = of_name[-1].before
    return getattr(type(owner), name).__get__(owner, type(owner)) if below is _MISSING else below


def _entries(owner) -> list[Replaced]:
    record = vars(owner).get(_RECORD)
    return [] if record is None else record.entries


def _put(owner, name, value, kind) -> Replaced:
    if kind not in KINDS:
        raise ValueError(f"Expected a kind of {list(KINDS)}. Received: kind={kind!r}. Add it there, with its reason.")
    in_force = replaced_attributes(owner)
    # An attribute that its user has covered or deleted since is the user's, and will not be taken back any more.
    entries = [entry for entry in _entries(owner) if entry.name != name or entry in in_force]
    entry = Replaced(name, kind, vars(owner).get(name, _MISSING), value)
    vars(owner).setdefault(_RECORD, _Record()).entries = [*entries, entry]
    vars(owner)[name] = value
    return entry


def _take_back(owner, entry):
    entries = _entries(owner)
    if entry not in entries:
        return
    in_force = replaced_attributes(owner)
    above = next((other for other in in_force if other.name == entry.name and other.before is entry.given), None)
    if vars(owner).get(entry.name, _MISSING) is not entry.given:
        if entry in in_force and above is not None:
            # Another of ours lies over it: the value before this one comes back when that one goes.
            above.before, above.outlived = entry.before, True
    elif entry.before is _MISSING:
        del vars(owner)[entry.name]
    else:
        vars(owner)[entry.name] = entry.before
    entries.remove(entry)
    if not entries:
        del vars(owner)[_RECORD]
