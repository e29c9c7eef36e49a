"""Tensors that travel between devices in a training step: counted in its program, or the reason why not."""

import dataclasses

import keras

# By its public name: no tool stands on another.
import mpkeras
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.seams import ModelView, dtypes
from mpkeras.tools.audit.findings import Finding
from mpkeras.tools.shared.flops import call_arguments
from mpkeras.tools.shared.report import bytes_text

# Fewer bytes that belong to no weight are single numbers: losses, and whether all gradients are finite.
_FEW_BYTES = 1024
# Of one collective: the weights that a line of the report names.
_TENSORS = 3


@dataclasses.dataclass(frozen=True)
class TravelInStep:
    """What travels between the devices that share a batch.

    Attributes:
        devices: How many there are.
        compiled_for: The device that the step was compiled for, as `mpkeras.forecast` names it; `None` where nothing
            was counted.
        rows: Rows of the batch, over all devices; 0 where nothing was counted.
        collectives: `[{"kind", "dtype", "bytes", "tensors"}]`, as `mpkeras.forecast` has them; `None` likewise.
        otherwise: `[{"tensor", "kind", "dtype", "expected", "bytes"}]` of what the policy does not say.
        why_not: A sentence where devices share a batch and nothing was counted, else `None`.
    """

    devices: int = 1
    compiled_for: str | None = None
    rows: int = 0
    collectives: list | None = None
    otherwise: tuple = ()
    why_not: str | None = None

    def lines(self) -> list:
        """Returns lines for a report; none where no devices share a batch."""
        if self.collectives is None:
            return [self.why_not] if self.why_not else []
        about = f"{self.devices} devices, {self.rows} rows, compiled for {self.compiled_for}"
        if not self.collectives:
            return [f"What travels in a step ({about}): nothing."]
        lines = [f"What travels in a step ({about}):"]
        for part in sorted(self.collectives, key=lambda part: -part["bytes"]):
            lines.append(f"- {part['kind']} in {part['dtype']}, {bytes_text(part['bytes'])}: {_weights(part)}")
        if self.compiled_for == "cpu":
            lines.append(
                "A CPU's compiler works on 16 bits in float32, so these dtypes are its own, and no findings: compile "
                "for the accelerator."
            )
        return lines


def travel_in_step(model, inputs, *, batch_size: int, open_size: int, device: str | None) -> TravelInStep:
    """Returns what travels between devices in a training step of `model`; the arguments are those of `audit`.

    Raises:
        ValueError: If `device` is given and no program of the step can be made for several devices.
    """
    view, backend = ModelView(model), keras.backend.backend()
    devices = view.devices_that_share_a_batch
    if device is None:
        return TravelInStep(devices, why_not=_why_not_counted(devices, backend, model) if devices > 1 else None)
    if backend != "jax" or devices == 1:
        raise ValueError(
            "Expected a `keras.distribution` of several devices in force, on JAX, to count what travels between them. "
            f"Received: device={device!r}, the {backend} backend and {devices} device(s) that share a batch. Leave "
            "`device` out, or set the distribution before the model is made: "
            "`keras.distribution.set_distribution(mpkeras.sharded())`."
        )
    if not getattr(model, "compiled", False) or model.loss is None:
        raise ValueError(
            "Expected a model that is compiled with an optimizer and a loss, as a training step is counted. Received: "
            f"device={device!r} and model '{model.name}', which is not. Call `model.compile` before."
        )
    distribution = keras.distribution.distribution()
    mesh = distribution.device_mesh
    split = mesh.shape[mesh.axis_names.index(distribution.batch_dim_name)]
    arguments = call_arguments(model, inputs, batch_size * split, open_size)
    if arguments is None or len(arguments[0][0]) != 1:
        raise ValueError(
            f"Expected `inputs` for a model that does not say what it takes. Received: model '{model.name}' and "
            f"device={device!r}. Pass a batch, or `keras.KerasTensor`s."
        )
    policy = view.policy_in_training
    x = arguments[0][0][0]
    report = mpkeras.forecast(model, x, device=device, devices=distribution, policies=[policy], verbose=0)
    (facts,) = report.policies.values()
    if facts["collectives"] is None:
        raise ValueError(
            f"Expected a step that fits {report.target.title}: its compiler makes no program of another. Received: "
            f"{report.batch} rows on {devices} devices. Pass a smaller `batch_size`."
        )
    return TravelInStep(
        devices,
        compiled_for=report.target.name,
        rows=report.batch,
        collectives=facts["collectives"],
        otherwise=tuple(facts["travels_otherwise"] if report.target.platform != "cpu" else ()),
    )


def _why_not_counted(devices: int, backend: str, model) -> str:
    if backend == "jax":
        return (
            f"What travels between the {devices} devices that share a batch is not counted: "
            '`mpkeras.audit(model, device="h100")` compiles the training step, which takes a while, and counts it.'
        )
    if backend == "tensorflow":
        optimizer = getattr(model, "optimizer", None)
        summed_in = getattr(optimizer, "all_reduce_dtype", None) or "the dtype that each is computed in"
        return (
            f"{devices} replicas share a batch, each with whole weights: what travels are the gradients, which the "
            f"optimizer sums in {summed_in} (`reduce_dtype` of the policy)."
        )
    return (
        f"{devices} ranks share a batch. What travels between them torch says, not the policy: the hook of "
        "`DistributedDataParallel`, or `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)` of FSDP2."
    )


def _weights(part) -> str:
    tensors = sorted(part["tensors"].items(), key=lambda pair: (pair[0] == "", -pair[1]))
    texts = [f"{path or 'of no weight'} {bytes_text(size)}" for path, size in tensors]
    # The bytes of no weight come last, and are never left out.
    shown = texts if len(texts) <= _TENSORS + 1 else [*texts[:_TENSORS], f"{len(texts) - _TENSORS} more"]
    if tensors[-1][0] == "" and texts[-1] not in shown:
        shown = [*texts[:_TENSORS], f"{len(texts) - _TENSORS - 1} more weights", texts[-1]]
    return ", ".join(shown)


def check_travel(model, optimizer, travel: TravelInStep) -> list:
    """Returns a finding for each tensor that travels in another dtype than the policy says."""
    if travel.collectives is None:
        return []
    findings, asked = [], ModelView(model).travel
    for part in travel.otherwise:
        layer, _, name = part["tensor"].rpartition("/")
        what, remedy = _otherwise(part, name, asked.is_sum(part["kind"]))
        findings.append(Finding("warning", layer or None, what, remedy))
    for part in travel.collectives:
        unnamed = part["tensors"].get("", 0)
        is_narrower = part["dtype"] in dtypes.SIXTEEN_BIT_DTYPES and part["dtype"] != asked.reduce_dtype
        if asked.is_sum(part["kind"]) and is_narrower and unnamed >= _FEW_BYTES:
            what = (
                f"{bytes_text(unnamed)} a step are summed over devices in {part['dtype']} ({part['kind']}) and belong "
                "to no weight by name: activations of a layer in parts, or statistics of a batch."
            )
            remedy = "Where their sum should be exact, let the layer that makes them compute in float32."
            findings.append(Finding("note", None, what, remedy))
    if ModelView(model).computes_in(dtypes.SIXTEEN_BIT_DTYPES) and not isinstance(optimizer, LossScaleOptimizer):
        what = (
            "The step of stock Keras has other dtypes than were counted: its compiler sums gradients in the dtype in "
            "which they are computed, and gathers weights as it likes. Counted is the step of `mpkeras.prepare` and "
            "`make_train_step`."
        )
        findings.append(Finding("warning", None, what, "Call `mpkeras.prepare(model)` after `compile`."))
    return findings


def _otherwise(part, name: str, is_summed: bool) -> tuple:
    """Returns what is found, and the remedy."""
    size, dtype, expected = bytes_text(part["bytes"]), part["dtype"], part["expected"]
    if is_summed:
        what = f"The gradient of its `{name}` is summed over devices in {dtype}, where the policy says {expected}"
        remedy = (
            f"It is made where the program cannot be changed, such as in a loop without a fixed length: compute it in "
            f'{expected} there, or keep the layer in float32. `Policy(..., reduce_dtype="{dtype}")` says that it may.'
        )
    else:
        what = f"Its `{name}` is gathered in {dtype}, where the policy says {expected}"
        remedy = (
            f"The layer reads it in {dtype}: let `call` read it in `self.compute_dtype`, or keep the layer in float32. "
            f'`Policy(..., gather_dtype="{dtype}")` says that it may.'
        )
    return f"{what} ({part['kind']}, {size} a step).", remedy
