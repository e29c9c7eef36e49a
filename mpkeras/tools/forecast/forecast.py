"""`forecast`: what an accelerator that need not be there would give a model, as its compiler says it."""

import dataclasses
import math
import time
from collections.abc import Iterable

import keras

from mpkeras.policies.registry import get_policy
from mpkeras.seams import ModelView, check_model, check_switch
from mpkeras.tools.forecast.compiler import Compiler, CompileRequest, NotCompiled
from mpkeras.tools.forecast.program import BYTES, bound_ms, columns_of_bytes, own_methods_text, picture, room
from mpkeras.tools.forecast.targets import Target
from mpkeras.tools.shared.arguments import check_verbose, checked_seconds
from mpkeras.tools.shared.report import Figure, Report, bytes_text, decimals, float8_text

# The largest batch is found to within one part in so many.
_RESOLUTION = 64
# From so many times the FLOPs of an example on, activations are computed again; below, products were merged otherwise.
_RECOMPUTES = 1.05


def forecast(
    model,
    x,
    y=None,
    *,
    device: str = "h100",
    devices=1,
    policies=("float32", "mixed_bfloat16", "mixed_float16"),
    optimizer=None,
    loss=None,
    largest_batch: bool = False,
    budget_s: float | None = None,
    verbose: int = 1,
) -> "Forecast":
    """Says what memory and arithmetic the training step of a model takes on an accelerator that need not be there.

    The step that `make_train_step` makes, with loss scaling, check and rollback, is compiled under each policy by the
    accelerator's own compiler, through JAX, whatever backend Keras runs on. Nothing is run and no weight is made.
    It reports what XLA will allocate: a program of TensorFlow or torch without XLA is another one.

    Args:
        model: A `keras.Model` that has a config (`get_config`) and whose layers JAX can trace. It is left as it is.
        x: A batch: arrays, tensors, `keras.KerasTensor`s, or shapes such as `(32, 224, 224, 3)`, in the structure that
            the model takes. The first size is that of the whole batch, over all devices. A shape has the dtype that
            the model's input says, or float32.
        y: Its targets, likewise. By default as the outputs, or class numbers where the loss is a sparse one.
        device: `"t4"`, `"a100"` (80 GB), `"l4"`, `"h100"`, `"h200"`, `"b200"`, `"v5e"`, `"v5p"`, `"v6e"` or `"cpu"`.
        devices: How many of them share a batch, the weights on each; or a `keras.distribution.DataParallel` or
            `ModelParallel`, whose mesh and layouts are taken and whose devices need not exist either.
        policies: Names or `mpkeras.Policy` objects. Of a model that was converted to a policy with `remat`, loaded from
            a file that holds one, or made in `keras.RematScope`, what is computed again is computed again under each.
        optimizer: A Keras optimizer or its name; by default the one that the model is compiled with, or Adam.
        loss: A Keras loss, its name, or a function, as `make_train_step` takes it; by default the one that the model is
            compiled with, or the mean squared error.
        largest_batch: Whether to look for the largest batch that fits, by bisection, to within 1.5 %. Each try is
            compiled.
        budget_s: Seconds for all; what was found until then is returned, and the report says what is missing.
        verbose: 1 shows Keras' progress bar, 0 nothing.

    Returns:
        A `Forecast`: `str()` is a table, `.to_dict()` is what JSON can hold, `.plot()` a matplotlib figure.

    Raises:
        ValueError: If the device or a policy is not known, JAX cannot trace a layer, or an argument is out of range.
        TypeError: If an argument is of a wrong type.
        ModuleNotFoundError: If the compiler of the device is not installed.

    Example:

    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
    >>> report = mpkeras.forecast(model, (32, 64), device="cpu", policies=["float32", "bfloat16"], verbose=0)
    >>> report.to_dict()["policies"]["float32"]["conditionals"]
    0
    >>> print(report)
    What this machine's CPU would give model 'sequential...
    """
    check_model(model)
    check_switch("largest_batch", largest_batch)
    check_verbose(verbose)
    request = CompileRequest(model, x, y, device, devices, _as_computed_again(model, policies), optimizer, loss)
    if budget_s is not None:
        budget_s = checked_seconds("budget_s", budget_s, "Leave it out for as long as it takes.")
    deadline = math.inf if budget_s is None else time.monotonic() + budget_s
    report = Forecast(model.name, request.target, request.devices, request.batch)
    report.own_methods = request.own_methods
    progress = keras.utils.Progbar(len(request.policies), verbose=verbose, unit_name="policy")
    try:
        with Compiler(request, deadline) as compiler:
            for name in request.policies:
                tried = {request.batch: compiler.compile(name, request.batch)}
                report.add(name, tried[request.batch])
                if largest_batch:

                    def room(batch, name=name, tried=tried):
                        if batch not in tried:
                            tried[batch] = compiler.compile(name, batch)
                        return report.room(tried[batch])

                    largest = largest_that_fits(room, request.batch, request.rows_split)
                    report.add_largest_batch(name, largest, tried)
                progress.add(1)
    except TimeoutError:
        report.missing = [name for name in request.policies if name not in report.policies]
        report.out_of_time = budget_s
    return report


def _as_computed_again(model, policies) -> list:
    """Returns policies that compute again what the policy of `model` does, where they do not say it themselves."""
    remat = ModelView(model).policy_in_training.remat
    chosen = [policies] if isinstance(policies, (str, keras.DTypePolicy)) else policies
    if remat is None or not isinstance(chosen, Iterable):
        return policies
    known = map(get_policy, chosen)
    return [policy if policy.remat is not None else policy.with_remat(remat) for policy in known]


def largest_that_fits(room, first: int, unit: int) -> int:
    """Returns the largest batch that fits, to within 1.5 %: a multiple of `unit`; 0 where not even `unit` rows fit.

    Raises `NotCompiled` for a model that takes `first` rows and no others.

    `room(batch)` returns the bytes that a batch leaves. Memory grows nearly in proportion to the batch: the line
    through two tries says where to try next, and every third time what is left is halved, so that a program that does
    not keep to the line costs a few tries more.
    """
    known: dict = {}
    fits, too_large, batch = 0, None, first
    while True:
        try:
            known[batch] = room(batch)
        except NotCompiled as error:
            if batch == first:
                raise
            raise NotCompiled(
                "Expected a model that takes batches of any size, as the largest that fits is looked for. Received: "
                f"one that takes {first} rows, and not {batch} ({error.said}). Ask for its own batch alone, or make "
                "the model for batches of any size.",
                error.said,
            ) from error
        fits, too_large = (batch, too_large) if known[batch] >= 0 else (fits, batch)
        guess = _on_the_line(known) // unit * unit
        if too_large is None:
            batch = max(2 * batch, min(guess, 64 * batch))
            continue
        near = max(1, fits // _RESOLUTION // unit) * unit
        if too_large - fits <= near:
            return fits
        if len(known) % 3 == 0:
            guess = (fits + too_large) // 2 // unit * unit
        # Near what is known there is little to learn.
        batch = max(fits + unit, min(max(guess, fits + near), too_large - near))


def _on_the_line(known) -> int:
    """Returns where the line through the two tries nearest to the limit has no room left; 0 without two."""
    if len(known) < 2:
        return 0
    (a, room_a), (b, room_b) = sorted(known.items(), key=lambda pair: abs(pair[1]))[:2]
    return int(a + room_a * (b - a) / (room_a - room_b)) if room_a != room_b else 0


@dataclasses.dataclass
class Forecast(Report):
    """What an accelerator would give a model.

    Attributes:
        model_name: The model's name.
        target: The device, a `Target`.
        devices: How many share a batch.
        batch: Rows of a batch, over all devices.
        policies: For each policy the dictionary of `to_dict`.
        missing: Policies that time was up for.
        out_of_time: The seconds that were not enough, or `None`.
        own_methods: Methods of `fit`'s step that the model's class has of its own, and that were not compiled.

    Example:

    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> report = mpkeras.forecast(model, (8, 4), device="cpu", policies=["float32"], verbose=0)
    >>> report.policies["float32"]["fits"]
    True
    """

    model_name: str
    target: Target
    devices: int
    batch: int
    policies: dict = dataclasses.field(default_factory=dict)
    missing: list = dataclasses.field(default_factory=list)
    out_of_time: float | None = None
    own_methods: list = dataclasses.field(default_factory=list)

    def __post_init__(self):
        many = f"{self.devices} x " if self.devices > 1 else ""
        self.title = f"What {many}{self.target.title} would give model '{self.model_name}', batch {self.batch}"

    def room(self, facts: dict) -> int:
        """Returns the bytes that a program leaves of what one device has for it; negative where it does not fit.

        Args:
            facts: What the compiler said of it.
        """
        return room(facts, self.target.usable_bytes)

    def add(self, policy: str, facts: dict):
        """Adds what the compiler said of the step of one policy.

        Args:
            policy: Its name.
            facts: What the compiler said.
        """
        fits = self.room(facts) >= 0
        if "too_large" in facts:
            # The compiler of a TPU makes no program that does not fit, and says of its memory alone.
            facts = {"peak_bytes": facts["too_large"] or None}
        self.policies[policy] = {
            **{name: facts.get(name) for name in _OF_A_PROGRAM},
            "fits": fits,
            "largest_batch": None,
            "largest_batch_flops_factor": None,
            "step_time_lower_bound_ms": bound_ms(facts, self.target),
        }

    def add_largest_batch(self, policy: str, batch: int, tried: dict):
        """Adds the largest batch that fits under one policy, and what it costs to make it fit.

        Args:
            policy: Its name.
            batch: The largest batch.
            tried: `{batch: what the compiler said}` of all that were tried.
        """
        programs = {n: facts for n, facts in tried.items() if "too_large" not in facts}
        of_a_row = {n: sum(facts["matrix_flops"].values()) / n for n, facts in programs.items()}
        fewest = min(of_a_row.values(), default=0.0)
        factor = of_a_row[batch] / fewest if batch and fewest else None
        self.policies[policy] |= {"largest_batch": batch, "largest_batch_flops_factor": factor}

    def table(self) -> tuple[list, list]:
        """Returns `(header, rows)`, a row for each policy; bytes are those of one device."""
        headers, cells = columns_of_bytes(list(self.policies.values()))
        header = ["policy", *headers, "fits", "largest\nbatch", "products", "at least\nms"]
        rows = [
            [
                name,
                *of_bytes,
                "yes" if facts["fits"] else "no",
                "" if facts["largest_batch"] is None else str(facts["largest_batch"]),
                _products_text(facts["products"]),
                "" if facts["step_time_lower_bound_ms"] is None else decimals(facts["step_time_lower_bound_ms"]),
            ]
            for (name, facts), of_bytes in zip(self.policies.items(), cells, strict=True)
        ]
        shown = [i for i in range(len(header)) if i < 5 or any(row[i] for row in rows)]
        return [header[i] for i in shown], [[row[i] for i in shown] for row in rows]

    def notes(self) -> list:
        """Returns the lines under the table: what stands out, and what the figures are not."""
        of_float32 = self.policies.get("float32", {}).get("temporary_bytes")
        notes = [
            f"{name}: {facts['temporary_bytes'] / of_float32:.2f} of float32's temporary bytes."
            for name, facts in self.policies.items()
            if name != "float32" and of_float32 and facts["temporary_bytes"]
        ]
        fitting = [(name, facts["largest_batch"]) for name, facts in self.policies.items() if facts["largest_batch"]]
        if fitting:
            first, *others = sorted(fitting, key=lambda pair: -pair[1])
            also = "".join(f", {batch} in {name}" for name, batch in others)
            notes.append(f"Batch {first[1]} fits {self.target.title} in {first[0]}{also}.")
        for name, facts in self.policies.items():
            factor = facts["largest_batch_flops_factor"]
            if factor is not None and factor > _RECOMPUTES:
                notes.append(
                    f"{name}: to fit {facts['largest_batch']}, XLA computes activations again: {factor:.2f} times the "
                    "FLOPs of an example in a smaller batch."
                )
            if facts["float8"]:
                made, *reasons = self._float8_lines(facts["float8"])
                notes += [f"{name}: {made}", *reasons]
            if facts["conditionals"] or facts["host_transfers"]:
                notes.append(
                    f"{name}: {facts['conditionals']} conditionals and {facts['host_transfers']} host transfers in the "
                    "program; each may empty the device's queue."
                )
            if facts["loops_of_unknown_length"]:
                notes.append(
                    f"{name}: loops that do not say how often they run: {facts['loops_of_unknown_length']}. The "
                    "products in them are counted once, so FLOPs and the time are too low."
                )
            if facts["collectives"]:
                summed = ", ".join(
                    f"{part['kind']} {part['dtype']} {bytes_text(part['bytes'])}" for part in facts["collectives"]
                )
                notes.append(f"{name}: devices exchange {summed} a step.")
                notes += [_travel_text(name, part) for part in facts["travels_otherwise"]]
        if self.missing:
            notes.append(f"Not compiled within {self.out_of_time:g} s: {', '.join(self.missing)}.")
        elif self.out_of_time is not None:
            notes.append(f"{self.out_of_time:g} s were not enough to find the largest batch under every policy.")
        memory = f"One device has {_gib(self.target.memory_bytes)} GiB"
        if self.target.reserved_bytes:
            memory += f", of which {_gib(self.target.reserved_bytes)} are left to CUDA and its libraries"
        notes.append(f"{memory}. Compiled, not run; bytes are XLA's own, of one device.")
        notes += own_methods_text(self.model_name, self.own_methods)
        if self.target.bandwidth:
            notes.append(
                "The time is a lower bound, from the maker's peak rates: a real step takes longer, often several times."
            )
        return notes

    def _float8_lines(self, facts) -> list:
        asked_for, flops, compiled = (facts[name] for name in ("products", "flops", "compiled_flops"))
        if "float8" not in self.target.matrix_rates:
            return [
                "no product in float8, as this device has no units for it; operands are rounded to float8 and "
                "multiplied in bfloat16."
            ]
        lines = float8_text([(layer["path"], layer["reason"]) for layer in facts["layers"]])
        if not asked_for:
            return lines
        if compiled >= flops:
            made = f"{asked_for} of {asked_for} products that the layers ask for are in float8."
        else:
            share = f"{compiled / flops:.0%} of their FLOPs"
            made = f"{asked_for} products are asked for in float8; the program has {share} in it."
        return [made, *lines]

    def to_dict(self) -> dict:
        """Returns all of it as what JSON can hold."""
        return {
            "model": self.model_name,
            "device": self.target.name,
            "devices": self.devices,
            "device_memory_bytes": self.target.memory_bytes,
            "device_reserved_bytes": self.target.reserved_bytes,
            "batch": self.batch,
            "policies": self.policies,
            "missing": self.missing,
            "own_methods": self.own_methods,
        }

    def plot(self) -> Figure:
        """Returns a `matplotlib.figure.Figure`: bytes of one device under each policy, beside what it has."""
        return picture(
            list(self.policies),
            list(self.policies.values()),
            self.target.usable_bytes,
            title=self.title,
            where=" on one device",
            width=6.4,
            limit="memory of the device",
        )


# The facts of a program, by the keys of `to_dict`.
_OF_A_PROGRAM = (
    *BYTES,
    "matrix_flops",
    "products",
    "collectives",
    "travels_otherwise",
    "conditionals",
    "host_transfers",
    "loops_of_unknown_length",
    "float8",
)


def _travel_text(policy: str, part) -> str:
    moved = bytes_text(part["bytes"])
    return f"{policy}: {part['kind']} of {part['tensor']} in {part['dtype']}, not {part['expected']}: {moved} a step."


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f}"


def _products_text(products) -> str:
    ordered = sorted((products or {}).items(), key=lambda pair: -pair[1])
    return ", ".join(f"{n} {dtype}" for dtype, n in ordered)
