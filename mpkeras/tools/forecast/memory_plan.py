"""`plan_memory`: what to change in a training so that it fits, confirmed by a compiler."""

import dataclasses
import math
import numbers
import re
import time
from collections.abc import Iterable

import keras

from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy, registered_policies
from mpkeras.seams import Blueprint, ModelView, check_model, dtypes
from mpkeras.tools.forecast.compiler import Compiler, CompileRequest, NotCompiled, by_names, called, chosen_policies
from mpkeras.tools.forecast.forecast import largest_that_fits
from mpkeras.tools.forecast.program import bound_ms, columns_of_bytes, own_methods_text, picture, room
from mpkeras.tools.forecast.targets import Target, find_target
from mpkeras.tools.shared.arguments import check_verbose, checked_seconds
from mpkeras.tools.shared.report import Figure, Report, bytes_text, computed_again_text, decimals

# In the order in which they are tried.
_ALLOWED = ("slots", "remat", "accumulation")
_REMAT = ("products", "blocks")
_BATCHES = ("keep", "largest")
# Of memory that is given as a number: what allocators lose between tensors, and what runs beside the program.
_MARGIN = 0.05
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def plan_memory(
    model,
    x,
    y=None,
    *,
    memory: str | float | None = None,
    device: str | None = None,
    policies=None,
    allow=_ALLOWED,
    batch: str = "keep",
    optimizer=None,
    loss=None,
    budget_s: float | None = 600,
    verbose: int = 1,
) -> "MemoryPlan":
    """Finds what to change in a training so that it fits into memory, with the least extra work.

    Candidates are compiled by the device's own compiler, as `mpkeras.forecast` does, and the first that fits is the
    plan. In this order: the policies; slots of the optimizer in bfloat16; rematerialization, `"products"` and then
    `"blocks"`; accumulation, where 2, 4, 8, ... parts of the batch are taken one after the other for one update, with
    the mean of their gradients; and, if asked for, another batch. What has been taken stays for those that follow:
    each needs less memory, or the same, and more time.

    Only what was compiled becomes a plan; estimates save compiling what is sure to be too large. Where the model as it
    is does not fit, `"blocks"` comes next: if it does not fit either, what keeps more is left out. Parts of a batch
    are left out for which not even their share of all but the state fits. The plan says what was not compiled, and why.

    `mpkeras.prepare(model, plan)`, the callback, `set_global_policy` and `apply_policy` take the plan as a policy. With
    accumulation they, and `make_train_step` for a model that was given the plan, set the optimizer; pass batches of
    `plan.step_batch` rows.

    Args:
        model, x, y, optimizer, loss: As in `mpkeras.forecast`.
        memory: The limit, as `"16GB"` (10^9 bytes), `"16GiB"` (2^30) or a number of bytes, of which 5 % are left free.
            By default what the device has for a program.
        device: As in `mpkeras.forecast`; by default `"h100"`, where `memory` is given. One of the two is needed.
        policies: Policies to choose from, the best first, by name or as `mpkeras.Policy`. By default that of the
            model; for one in float32 also `"mixed_bfloat16"`, or `"mixed_float16"` where the device multiplies float16
            faster, as a T4 does, which has no units for bfloat16.
        allow: Means that the plan may use, of `"slots"`, `"remat"` and `"accumulation"`.
        batch: `"keep"`, or `"largest"`: the largest batch that fits, to within 1.5 %, with all that is allowed but
            accumulation, under the policy that takes the least memory.
        budget_s: Seconds for all; the plan says what was not tried. `None`: as long as it takes.
        verbose: 1 says what is compiled, 0 nothing.

    Returns:
        A `MemoryPlan`: `print` shows all candidates. `plan.fits` says whether one was found; if not, the plan is the
        smallest that was tried, and says by how much it misses.

    Raises:
        ValueError: If neither `memory` nor `device` is given, an argument is out of range, or the model cannot be
            compiled.
        TypeError: If an argument is of a wrong type.
        ModuleNotFoundError: If the compiler of the device is not installed.

    Example:

    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
    >>> plan = mpkeras.plan_memory(model, (32, 64), memory="1GB", device="cpu", policies=["float32"], verbose=0)
    >>> plan.fits, plan.name, plan.accumulate_steps
    (True, 'float32', 1)
    """
    check_model(model)
    limit = None if memory is None else bytes_of(memory)
    if limit is None and device is None:
        raise ValueError(
            "Expected `memory` or `device`, what the training is to fit into. Received: neither. Pass for example "
            "memory='16GB' or device='t4'."
        )
    target = find_target("h100" if device is None else device)
    allowed = _checked_allow(allow)
    if not isinstance(batch, str) or batch not in _BATCHES:
        raise ValueError(f"Expected `batch` to be one of {_BATCHES}. Received: batch={batch!r}. Use 'keep'.")
    check_verbose(verbose)
    if budget_s is not None:
        budget_s = checked_seconds("budget_s", budget_s, "Leave it out for ten minutes.")
    trainer = getattr(model, "optimizer", None) if optimizer is None else optimizer
    known = [Blueprint.with_slots_of(trainer, policy) for policy in _policies(model, policies, target)]
    ladders = [_ladder(policy, allowed) for policy in known]
    of_candidates = [candidate.policy().renamed(candidate.name) for ladder in ladders for candidate in ladder]
    request = CompileRequest(model, x, y, target.name, 1, of_candidates, optimizer, loss)
    usable = target.usable_bytes if limit is None else int(limit * (1 - _MARGIN))
    # A plan takes the place of an earlier one.
    request.accumulate_steps = request.own_steps
    segments, impossible = _segments_by_remat(ModelView(model), ladders)
    search = _Search(segments, impossible, request.batch, usable, "accumulation" in allowed, verbose, request.own_steps)
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    try:
        with Compiler(request, deadline) as compiler:
            search.run(compiler, ladders, looks_for_largest=batch == "largest")
    except TimeoutError:
        search.out_of_time = budget_s
        if not search.tried:
            raise ValueError(
                f"Expected time to compile one program. Received: {budget_s:g} s, which were not enough. Give more."
            ) from None
    return MemoryPlan(model.name, target, limit, search, request.own_methods)


def bytes_of(memory) -> int:
    """Returns what `"16GB"` or a number stands for, in bytes."""
    if isinstance(memory, bool) or not isinstance(memory, (str, numbers.Real)):
        raise TypeError(
            f"Expected `memory` as text or a number of bytes. Received: memory={memory!r} (of type "
            f"{type(memory).__name__}). Pass for example '16GB'."
        )
    value = _in_bytes(memory) if isinstance(memory, str) else float(memory)
    if not 1 <= value < math.inf:
        raise ValueError(
            f"Expected `memory` as a number of bytes with a unit of {', '.join(['GB', 'GiB', 'MB', 'MiB'])}. Received: "
            f"memory={memory!r}. Pass for example '16GB'."
        )
    return int(value)


def _in_bytes(text) -> float:
    """Returns the bytes that a number with a unit stands for; NaN where the text is something else."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    unit = None if match is None else _UNITS.get(match[2].upper())
    try:
        return math.nan if match is None or unit is None else float(match[1]) * unit
    except ValueError:
        return math.nan


def _checked_allow(allow) -> tuple:
    is_list = isinstance(allow, Iterable) and not isinstance(allow, str)
    if not is_list or not all(isinstance(name, str) for name in allow):
        raise TypeError(f"Expected `allow` to be a tuple of names. Received: allow={allow!r}. Pass {_ALLOWED}.")
    others = [name for name in allow if name not in _ALLOWED]
    if others:
        raise ValueError(f"Expected `allow` to name some of {_ALLOWED}. Received: {others}. Leave it out for all.")
    return tuple(name for name in _ALLOWED if name in allow)


def _policies(model, policies, target) -> list:
    if policies is not None:
        return list(by_names(chosen_policies(policies, "that of the model")).values())
    present = ModelView(model).converted_by() or ModelView(model).policy_in_training
    if present.compute_dtype != "float32" or ModelView(model).computes_in(dtypes.SIXTEEN_BIT_DTYPES):
        return [present]
    # Not by float32's rate: a TPU rounds float32 to bfloat16, and multiplies both at one rate.
    bfloat16, float16 = (target.matrix_rates.get(dtype, 0.0) for dtype in ("bfloat16", "float16"))
    return [present, get_policy("mixed_bfloat16" if bfloat16 >= float16 else "mixed_float16")]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        base: The `Policy` that it starts from.
        slot_dtype, remat: Those of its own policy.
        accumulate_steps: Parts of a batch that are taken one after the other for one update.
        batch: Rows of one update; `None` for those that were asked for.
    """

    base: Policy
    slot_dtype: str
    remat: str | tuple | None
    accumulate_steps: int = 1
    batch: int | None = None

    @property
    def name(self) -> str:
        """The name of its policy, and what is changed in it."""
        slots = "" if self.slot_dtype == self.base.slot_dtype else f", slots {self.slot_dtype}"
        remat = "" if self.remat == self.base.remat else f", remat {self.remat}"
        return f"{called(self.base)}{slots}{remat}"

    def policy(self) -> Policy:
        """Returns the `Policy` to train under."""
        config = {**self.base.get_config(), "slot_dtype": self.slot_dtype, "remat": self.remat}
        return Policy.from_config(config).renamed(self.base.name)


def _ladder(policy, allowed) -> list[Candidate]:
    """Returns the ways to train under a policy, each with less memory and no less work than the one before."""
    candidates = [Candidate(policy, policy.slot_dtype, policy.remat)]
    if "slots" in allowed and policy.slot_dtype != "bfloat16" and policy.variable_dtype == "float32":
        candidates.append(dataclasses.replace(candidates[-1], slot_dtype="bfloat16"))
    if "remat" in allowed and policy.remat is None:
        candidates += [dataclasses.replace(candidates[-1], remat=remat) for remat in _REMAT]
    return candidates


def _segments_by_remat(view, ladders) -> tuple[dict, dict]:
    """Returns `{remat: segments that are computed again}` and `{remat: why there are none}` of all candidates.

    Raises:
        ValueError: If there are none for the `remat` of a policy that is to be taken.
    """
    segments, impossible = {}, {}
    of_policies = {ladder[0].remat for ladder in ladders}
    for remat in {candidate.remat for ladder in ladders for candidate in ladder} - {None}:
        try:
            segments[remat] = view.computed_again(remat)
        except ValueError as error:
            if remat in of_policies:
                raise
            # JAX compiles; the backend of this process, which then trains, may not be able to do the same.
            impossible[remat] = f"{error}"
    return segments, impossible


class _Search:
    """Compiles candidates until one fits.

    Attributes:
        segments: `{remat: paths of the first and the last layer of each part that is computed again}`.
        tried: `[(Candidate, what the compiler said)]`, in the order in which they were compiled.
        not_compiled: `{name: why}` of those that were left out by an estimate.
        refused: `{name: why}` of those that there is no program of.
        found: The one that fits; `None` until then.
        usable: Bytes that a program may take.
        out_of_time: The seconds that were not enough, or `None`.
        own_steps: Batches to an update by the optimizer's own accumulation.
    """

    def __init__(self, segments, impossible, batch, usable, accumulates, verbose, own_steps=1):
        self.segments = segments
        self.own_steps = own_steps
        self._impossible = impossible
        self.batch = batch
        self.usable = usable
        self.tried: list = []
        self.not_compiled: dict = {}
        self._rungs: list = []
        self.refused: dict = {}
        self.found: Candidate | None = None
        self.out_of_time: float | None = None
        self._accumulates = accumulates
        self._verbose = verbose

    def run(self, compiler, ladders, looks_for_largest: bool):
        """Goes up the ladders; the smallest of their first rungs is the one that is climbed."""
        self._rungs = [*(ladder[0] for ladder in ladders), *(rung for ladder in ladders for rung in ladder[1:])]
        if looks_for_largest:
            # Of another policy even more rows may fit: each is compiled.
            for ladder in ladders:
                self._first_that_fits(compiler, ladder[:1])
        elif self._first_that_fits(compiler, [ladder[0] for ladder in ladders]):
            return
        plain = self.smallest()
        (ladder,) = [ladder for ladder in ladders if ladder[0] is plain]
        if looks_for_largest:
            # The last keeps least. Where there is no program of it, or it takes more, those before it may take less.
            for candidate in reversed(ladder[1:]):
                self._first_that_fits(compiler, [candidate])
                if self.smallest() is not plain:
                    break
            self._look_for_largest(compiler, self.smallest())
            return
        if ladder[1:]:
            self._climb(compiler, *ladder)
        if self.found is None and self._accumulates:
            self._accumulate(compiler, self.smallest())

    def by_work(self) -> list:
        """Returns `tried`, what costs least first."""

        def work(pair):
            candidate, _ = pair
            return self._rungs.index(
                dataclasses.replace(candidate, accumulate_steps=1, batch=None)
            ), candidate.accumulate_steps

        return sorted(self.tried, key=work)

    def _climb(self, compiler, plain, *rungs):
        """Looks for the first of `rungs` that fits, above `plain`, which does not.

        The last is compiled first: it keeps least. Where it does not fit either, those between are left out, unless it
        takes more memory than `plain` does: then nothing is known of them.
        """
        *between, last = rungs
        known, said = self._said(plain), self._compiled(compiler, last)
        fits = said is not None and self.room(said) >= 0
        if said is not None and not fits and self.room(said) > self.room(known):
            for candidate in between:
                self.not_compiled[candidate.name] = f"{last.name} keeps less, and does not fit."
            return
        # Until one with less work fits, or time is up.
        self.found = last if fits else None
        for candidate in between:
            if fits and candidate.remat == plain.remat and not self._fits_with_state_of(known, said):
                self.not_compiled[candidate.name] = "by the bytes of its smaller state it does not fit."
            elif self._first_that_fits(compiler, [candidate]):
                return

    def _fits_with_state_of(self, known, other) -> bool:
        """Whether a program that was compiled would fit if it had the state of another one; true where that is open."""
        if "persistent_bytes" not in known or "persistent_bytes" not in other:
            return True
        return self.room(known) + known["persistent_bytes"] - other["persistent_bytes"] >= 0

    def _accumulate(self, compiler, candidate):
        """Looks for the fewest parts of a batch that fit; where not even their share of all fits, they are left out."""
        said = self._said(candidate)
        counts = [2**n for n in range(1, self.batch.bit_length()) if self.batch % 2**n == 0]
        # Weights and optimizer stay as large as they are; the sums of gradients come to them.
        state = said.get("persistent_bytes")
        hopeful = (
            counts if state is None else [k for k in counts if state + (said["peak_bytes"] - state) / k <= self.usable]
        )
        first = hopeful[0] if hopeful else max(counts, default=0)
        for k in (k for k in counts if k < first):
            self.not_compiled[f"{candidate.name}, {k} parts"] = "all but the state divided by the parts does not fit."
        for k in (k for k in counts if k >= first):
            in_parts = dataclasses.replace(candidate, accumulate_steps=k)
            # A model that takes no such part, as one made for batches of one size, takes no smaller one either.
            if self._first_that_fits(compiler, [in_parts]) or in_parts not in dict(self.tried):
                return

    def _said(self, candidate) -> dict:
        return dict(self.tried)[candidate]

    def smallest(self) -> Candidate:
        """Returns the candidate that takes the least memory."""
        return min(self.tried, key=lambda pair: -self.room(pair[1]))[0]

    def room(self, said) -> int:
        """Returns the bytes that a program leaves; negative where it does not fit."""
        return room(said, self.usable)

    def _first_that_fits(self, compiler, candidates) -> bool:
        for candidate in candidates:
            said = self._compiled(compiler, candidate)
            if said is not None and self.room(said) >= 0:
                self.found = candidate
                return True
        return False

    def _look_for_largest(self, compiler, candidate):
        def of_rows(batch):
            return candidate if batch == self.batch else dataclasses.replace(candidate, batch=batch)

        def room(batch):
            left = self.room(self._compiled(compiler, of_rows(batch)))
            if left >= 0:
                # Of batches that fit each is larger than those before it. Time may be up with the next one.
                self.found = of_rows(batch)
            return left

        self.found = None
        largest_that_fits(room, self.batch, 1)

    def _compiled(self, compiler, candidate):
        """Returns what the compiler says of a candidate; `None` where there is no program of it.

        A candidate that was compiled before is not compiled again.
        """
        if candidate in dict(self.tried):
            return self._said(candidate)
        rows = (candidate.batch or self.batch) // candidate.accumulate_steps
        if candidate.remat in self._impossible:
            self.refused[candidate.name] = self._impossible[candidate.remat]
            return None
        if self._verbose:
            print(f"Compiling {candidate.name}, {candidate.accumulate_steps} x {rows} rows ...", flush=True)
        try:
            said = compiler.compile(candidate.name, rows, candidate.accumulate_steps)
        except NotCompiled as error:
            in_parts = candidate.accumulate_steps > 1
            # What was asked for itself: the model under a policy, and batches of other sizes.
            if candidate.batch is not None or (candidate.remat == candidate.base.remat and not in_parts):
                raise
            name = f"{candidate.name}, {candidate.accumulate_steps} parts" if in_parts else candidate.name
            self.refused[name] = error.said
            return None
        self.tried.append((candidate, said))
        return said


@keras.saving.register_keras_serializable(package="mpkeras")
class MemoryPlan(Policy, Report):
    """The result of `plan_memory`: the policy to train under, and all candidates as a table.

    Attributes:
        fits: Whether it fits. If not, it is the smallest that was tried.
        missing_bytes: Bytes by which it does not fit; 0 where it does.
        accumulate_steps: Parts of a batch that are taken one after the other for one update.
        batch: Rows of one update; where the optimizer accumulates by itself, too, it is of several such batches.
        step_batch: Rows of one part: what a batch of `fit` is to have.
        computed_again: The paths of the first and the last layer of each part that the backward pass computes again.
        own_methods: Methods of `fit`'s step that the model's class has of its own, and that were not compiled.
        candidates: A dictionary for each candidate, as in `to_dict`.
        file: The file that was asked about at the command line, whose words the notes are then in; `None` in Python.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> plan = mpkeras.plan_memory(model, (16, 8), memory="1GB", device="cpu", policies=["float32"], verbose=0)
    >>> plan.step_batch, plan.candidates[0]["fits"]
    (16, True)
    """

    def __init__(self, model_name, target: Target, limit, search, own_methods=()):
        chosen = search.found or search.smallest()
        self._settings = dataclasses.replace(chosen.policy()._settings, accumulate_steps=chosen.accumulate_steps)
        self.fits = search.found is not None
        self.batch = chosen.batch or search.batch
        self.step_batch = self.batch // self.accumulate_steps
        said = dict(search.tried).get(chosen)
        self.missing_bytes = 0 if self.fits else -search.room(said)
        self.own_methods = list(own_methods)
        self.file: str | None = None
        self.computed_again = search.segments.get(chosen.remat, [])
        self._model_name, self._target, self._limit, self._search = model_name, target, limit, search
        tried = search.by_work()
        self._labels = [candidate.name for candidate, _ in tried]
        of_a_row = [self._flops_of_a_row(*pair) for pair in tried]
        fewest = min((flops for flops in of_a_row if flops), default=0.0)
        self.candidates = [
            {**self._row(candidate, said, chosen), "flops_factor": flops / fewest if flops else None}
            for (candidate, said), flops in zip(tried, of_a_row, strict=True)
        ]
        room = target.title if limit is None else f"{_gib_text(limit)}, compiled for {target.title}"
        self.title = f"To train model '{model_name}' within {room}, batch {search.batch}"

    @classmethod
    def from_config(cls, config: dict):
        # Of a plan a file holds the policy.
        return Policy.from_config(config)

    def _row(self, candidate, said, chosen) -> dict:
        rows = candidate.batch or self._search.batch
        bound = bound_ms(said, self._target)
        return {
            "policy": candidate.base.name,
            "slot_dtype": candidate.slot_dtype,
            "remat": candidate.remat,
            "accumulate_steps": candidate.accumulate_steps,
            "batch": rows,
            "persistent_bytes": said.get("persistent_bytes"),
            "temporary_bytes": said.get("temporary_bytes"),
            "peak_bytes": said["too_large"] if "too_large" in said else said["peak_bytes"],
            "step_time_lower_bound_ms": None if bound is None else candidate.accumulate_steps * bound,
            "fits": self._search.room(said) >= 0,
            "is_the_plan": candidate == chosen,
        }

    def _flops_of_a_row(self, candidate, said) -> float:
        rows = (candidate.batch or self._search.batch) // candidate.accumulate_steps
        return sum(said.get("matrix_flops", {}).values()) / rows

    def table(self) -> tuple[list, list]:
        """Returns `(header, rows)`, a row for each candidate, sorted by their costs."""
        headers, cells = columns_of_bytes(self.candidates)
        header = ["policy", "slots", "remat", "parts x rows", *headers, "FLOPs", "at least\nms", "fits"]
        rows = [
            [
                row["policy"],
                row["slot_dtype"],
                "" if row["remat"] is None else f"{row['remat']}",
                f"{row['accumulate_steps']} x {row['batch'] // row['accumulate_steps']}",
                *of_bytes,
                "" if row["flops_factor"] is None else f"{row['flops_factor']:.2f}",
                "" if row["step_time_lower_bound_ms"] is None else decimals(row["step_time_lower_bound_ms"]),
                ("yes, the plan" if row["is_the_plan"] else "yes") if row["fits"] else _missing_text(row, self._search),
            ]
            for row, of_bytes in zip(self.candidates, cells, strict=True)
        ]
        return header, rows

    def notes(self) -> list:
        """Returns the lines under the table: the plan, what was not tried, and what the figures are not."""
        search = self._search
        notes = []
        if self.fits:
            notes.append(self._what_to_do())
        else:
            notes.append(f"Nothing that was tried fits. The smallest misses by {_gib_text(self.missing_bytes)}.")
        notes += computed_again_text(self.computed_again)
        for how, reasons in (("not compiled:", search.not_compiled), ("not possible.", search.refused)):
            for why in dict.fromkeys(reasons.values()):
                names = [name for name, reason in reasons.items() if reason == why]
                notes.append(f"{'; '.join(names)}: {how} {why}")
        if search.out_of_time is not None:
            notes.append(f"{search.out_of_time:g} s were not enough to try all that is allowed.")
        left = ""
        if self._limit is not None:
            left = f"; {_MARGIN:.0%} of the memory are left free"
        elif self._target.reserved_bytes:
            left = f"; {_gib_text(self._target.reserved_bytes)} are left to the device's libraries"
        notes.append(f"Each row was compiled, none was run{left}. FLOPs: of an example, by the fewest in the table.")
        notes += own_methods_text(self._model_name, self.own_methods)
        notes.append("TensorFlow and torch without XLA allocate otherwise: there the plan is a guess.")
        return notes

    def _what_to_do(self) -> str:
        steps = self.accumulate_steps * self._search.own_steps
        how = "" if steps == 1 else f", {steps} of which make one update"
        if self.file is not None:
            # The program that trains has no `plan`, but what the plan says can be written in it. An optimizer that is
            # made with `gradient_accumulation_steps` keeps sums of its own, which only some plans were compiled with.
            setting = f"`model.optimizer.accumulate({steps})` behind it"
            if self._search.own_steps > 1:
                setting = f"`gradient_accumulation_steps={steps}` of the optimizer"
            how += f": {setting}" * (self.accumulate_steps > 1)
            return (
                f"Plan: in the program that trains `mpkeras.prepare(model, {self._as_written()})`, and batches of "
                f"{self.step_batch} rows{how}."
            )
        if 1 < self._search.own_steps < steps:
            how += f" ({self.accumulate_steps} by the plan, times {self._search.own_steps} by the optimizer itself)"
        return (
            f"Plan: `mpkeras.prepare(model, plan)`, and batches of {self.step_batch} rows{how}. In a loop of your "
            "own: `apply_policy(model, plan)` and `make_train_step`, which takes as many of them for one update."
        )

    def _as_written(self) -> str:
        """Returns the policy of the plan as a program writes it."""
        registered = get_policy(self.name) if self.name in registered_policies() else self
        changes = [
            f", {name}={getattr(self, name)!r}"
            for name in ("slot_dtype", "remat")
            if getattr(self, name) != getattr(registered, name)
        ]
        return f"mpkeras.Policy({self.name!r}{''.join(changes)})" if changes else f"{self.name!r}"

    def to_dict(self) -> dict:
        """Returns all of it as what JSON can hold."""
        # Rules may be layers.
        candidates = [{**row, "remat": None if row["remat"] is None else f"{row['remat']}"} for row in self.candidates]
        return {
            "model": self._model_name,
            "device": self._target.name,
            "usable_bytes": self._search.usable,
            "fits": self.fits,
            "missing_bytes": self.missing_bytes,
            "policy": self.get_config(),
            "accumulate_steps": self.accumulate_steps,
            "batch": self.batch,
            "step_batch": self.step_batch,
            "computed_again": [list(part) for part in self.computed_again],
            "own_methods": self.own_methods,
            "candidates": candidates,
            "not_compiled": self._search.not_compiled,
            "refused": self._search.refused,
            "out_of_time": self._search.out_of_time,
        }

    def plot(self) -> Figure:
        """Returns a `matplotlib.figure.Figure`: bytes of each candidate, beside the limit."""
        labels = [f"{name}\n{row[3]}" for name, row in zip(self._labels, self.table()[1], strict=True)]
        return picture(
            labels,
            self.candidates,
            self._search.usable,
            title=self.title,
            where="",
            width=7.2,
            limit="what there is",
        )


def _missing_text(row, search) -> str:
    return f"no, by {_gib_text(row['peak_bytes'] - search.usable)}"


def _gib_text(n: int) -> str:
    # The unit of the table, where it says more than 0.00.
    return f"{decimals(n / 2**30)} GiB" if n >= 2**30 / 100 else bytes_text(n)
