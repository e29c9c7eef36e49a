"""What there is to say of a file: of a model (`audit_saved` and the like), or of a step (`replayed`)."""

import dataclasses
import math
import warnings
import zipfile
from pathlib import Path

import keras
import numpy as np
from keras import ops

from mpkeras.conversion.apply import apply_policy
from mpkeras.policies.registry import get_policy
from mpkeras.seams import ModelView
from mpkeras.tools.advise.advice import AdviceReport, measured_advice, unmeasured_advice
from mpkeras.tools.audit.audit import AuditReport, audit_with_optimizer
from mpkeras.tools.audit.findings import Finding
from mpkeras.tools.blackbox.capsule import load_capsule
from mpkeras.tools.blackbox.comparison import Comparison
from mpkeras.tools.blackbox.origins import Operation
from mpkeras.tools.export import files
from mpkeras.tools.forecast.forecast import Forecast, forecast
from mpkeras.tools.forecast.memory_plan import MemoryPlan, plan_memory
from mpkeras.tools.shared.compiled import loss_and_targets
from mpkeras.tools.shared.report import shortened

_BATCH_SIZE = 32
_NO_LOSS = "no loss in the file"


def audit_saved(path, *, policy=None, imports=(), open_size: int = 64) -> AuditReport:
    """Returns what `mpkeras.audit` says of the model in a `.keras` or `.h5` file, which stays as it is."""
    # The modules may register the policy.
    custom_objects = files.import_modules(imports)
    policy = None if policy is None else get_policy(policy)
    model = files.load(path, custom_objects)
    if policy is not None:
        apply_policy(model, policy)
    optimizer, why_not = _saved_optimizer(path, custom_objects)
    report = audit_with_optimizer(model, optimizer, open_size=open_size)
    if why_not is not None:
        what = f"The optimizer in the file is not audited: {why_not}."
        report.findings.append(Finding("note", None, what, "Call `mpkeras.audit` on the compiled model in Python."))
    return report


def _saved_optimizer(path, custom_objects) -> tuple:
    """Returns `(optimizer, why_not)`: the optimizer that a model was saved with, without its state.

    The model itself is loaded without: its losses and metrics may be functions that only its owner has.
    """
    if not files.is_compiled(path):
        return None, None
    config = (files.compile_config(path) or {}).get("optimizer")
    try:
        with keras.saving.custom_object_scope(custom_objects):
            optimizer = keras.optimizers.get(config)
    except Exception as error:  # one of the owner's, or of a newer Keras: the layers can be audited all the same
        return None, shortened(f"{type(error).__name__}: {error}")
    return optimizer, None


def advise_saved(
    path, *, data=None, batch_size=None, budget_s=60.0, imports=(), measure=True, verbose=0
) -> AdviceReport:
    """Returns what `mpkeras.advise` says of the model in a `.keras` or `.h5` file."""
    custom_objects = files.import_modules(imports)
    model = files.load(path, custom_objects)
    if not measure:
        return unmeasured_advice(model, file=path)
    if data is None:
        x, y = random_inputs(model, batch_size), None
        about = "The inputs were random numbers"
    else:
        x, y = _read(model, data, batch_size)
        about = f"The inputs were those of '{data}'"
    # The optimizer, too, is the one that the model was saved with.
    why_not = _compile(model, path, custom_objects)
    if y is not None and why_not is None:
        loss_fn, y = loss_and_targets(model, y)
        remarks = [f"{about}, with the loss that the model was saved with."]
    else:
        missing = "no targets" if why_not is None else why_not
        remarks = [
            f"{about}; the mean square of the outputs stood in for the loss: {missing}.",
            "Whether float16 trains on your data, `mpkeras.trace_numerics` says, in Python.",
        ]
        loss_fn, y = mean_square, None
    report = measured_advice(model, x, y, loss_fn, budget_s=budget_s, verbose=verbose, file=path)
    for line in remarks:
        report.add_remark(line)
    return report


def forecast_saved(
    path, *, batch_size=None, open_size: int = 64, imports=(), device="h100", devices=1, policies=None, **options
) -> Forecast:
    """Returns what `mpkeras.forecast` says of the model in a `.keras` or `.h5` file, trained as it was saved."""
    model, x = _with_batch(path, batch_size, open_size, imports, "mpkeras.forecast")
    if policies:
        options["policies"] = policies
    return forecast(model, x, device=device, devices=devices, **options)


def plan_saved(path, *, batch_size=None, open_size: int = 64, imports=(), **options) -> MemoryPlan:
    """Returns what `mpkeras.plan_memory` finds for the model in a `.keras` or `.h5` file, trained as it was saved."""
    model, x = _with_batch(path, batch_size, open_size, imports, "mpkeras.plan_memory")
    plan = plan_memory(model, x, **options)
    plan.file = str(path)
    return plan


def _with_batch(path, batch_size, open_size, imports, function) -> tuple:
    """Returns the model in a file, compiled, and a batch of its inputs as `keras.KerasTensor`s."""
    custom_objects = files.import_modules(imports)
    model = files.load(path, custom_objects)
    inputs = _input_structure(model, f"Call `{function}` in Python, with the shape of a batch.")
    why_not = _compile(model, path, custom_objects)
    if why_not not in (None, _NO_LOSS):
        warnings.warn(f"Adam and the mean squared error stand in: {why_not}.", stacklevel=2)
    rows = _rows_of_batch(inputs, batch_size)

    def sized(tensor):
        sizes = (open_size if n is None else n for n in tensor.shape[1:])
        return keras.KerasTensor((rows, *sizes), tensor.dtype)

    return model, keras.tree.map_structure(sized, inputs)


def _input_structure(model, remedy: str):
    graph = ModelView(model).graph
    if graph is None:
        # A Sequential model without shapes has a graph once it is built.
        kind = "a {} that is not built" if isinstance(model, keras.Sequential) else "a subclassed {}"
        raise ValueError(
            f"Expected a model that says what inputs it takes. Received: '{model.name}', "
            f"{kind.format(type(model).__name__)}. {remedy}"
        )
    return ModelView(model).inputs


def _rows_of_batch(inputs, batch_size, default=_BATCH_SIZE):
    """Returns `batch_size`, or what there is in its place: a model with state is made for batches of one size."""
    fixed = [tensor.shape[0] for tensor in keras.tree.flatten(inputs) if tensor.shape[0] is not None]
    return batch_size or next(iter(fixed), default)


def mean_square(y, y_pred):
    """Returns the mean square of all outputs, float32 of shape `()`: a loss without targets."""
    del y
    outputs = [ops.cast(output, "float32") for output in keras.tree.flatten(y_pred)]
    return sum(ops.mean(ops.square(output)) for output in outputs) / len(outputs)


def random_inputs(model, batch_size: int | None):
    """Returns a batch of random numbers in the structure that `model` takes: normal ones, integers 0 and 1."""
    inputs = _input_structure(model, "Give a batch: `--data FILE.npz`.")
    batch_size = _rows_of_batch(inputs, batch_size)
    rng = np.random.default_rng(0)

    def draw(tensor):
        shape = (batch_size, *tensor.shape[1:])
        if None in shape:
            raise ValueError(
                f"Expected inputs of known shape, to make random ones. Received: input '{tensor.name}' of shape "
                f"{tuple(tensor.shape)}. Give a batch: `--data FILE.npz`."
            )
        if tensor.dtype == "string":
            raise ValueError(
                f"Expected inputs of numbers, to make random ones. Received: input '{tensor.name}' of text. Give a "
                "batch: `--data FILE.npz`."
            )
        if "float" in tensor.dtype:
            return rng.normal(size=shape).astype("float32")
        # 0 and 1 are in every vocabulary.
        return rng.integers(0, 2, size=shape).astype(tensor.dtype)

    return keras.tree.map_structure(draw, inputs)


def _read(model, data, batch_size) -> tuple:
    remedy = "Write it with `numpy.savez('batch.npz', x=x, y=y)`."
    try:
        with np.load(data, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    # A `.npy` file holds one array, which is no context manager: a TypeError, in Python 3.10 an AttributeError.
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"Expected an `.npz` file of arrays. Received: '{data}' ({type(error).__name__}: "
            f"{shortened(str(error), 120)}). {remedy}"
        ) from error
    graph = ModelView(model).graph
    names = [] if graph is None else [tensor.name for tensor in graph.inputs]
    found = {name: arrays[name] for name in names if name in arrays}
    if "x" in arrays:
        x = arrays["x"]
    elif names and len(found) == len(names):
        x = keras.tree.map_structure(lambda tensor: found[tensor.name], ModelView(model).inputs)
    else:
        by_name = f", or one for each of the inputs {names}" if names else ""
        raise ValueError(f"Expected an array `x`{by_name}. Received: '{data}' with {sorted(arrays)}. {remedy}")
    y = arrays.get("y")
    outputs = None if graph is None else _names_of_outputs(model)
    if outputs is not None and arrays.keys() >= set(outputs):
        is_dict = isinstance(ModelView(model).outputs, dict)
        y = {name: arrays[name] for name in outputs} if is_dict else [arrays[name] for name in outputs]
    elif outputs is not None and y is not None:
        raise ValueError(
            f"Expected an array for each of the outputs {sorted(outputs)}, by its name. Received: '{data}' with "
            f"{sorted(arrays)}. Write it with `numpy.savez('batch.npz', x=x, {min(outputs)}=...)`."
        )
    batch = (x, y) if y is not None else (x,)
    if any(array.ndim == 0 or not len(array) for array in keras.tree.flatten(batch)):
        raise ValueError(f"Expected arrays of at least one example. Received: '{data}' with empty ones. {remedy}")
    rows = batch_size if graph is None else _rows_of_batch(graph.inputs, batch_size, default=None)
    return keras.tree.map_structure(lambda array: None if array is None else array[:rows], (x, y))


def _names_of_outputs(model) -> list | None:
    """Returns the names of the outputs of a graph, in their order; `None` of a single one outside of a dictionary."""
    outputs = ModelView(model).outputs
    if isinstance(outputs, dict):
        return list(outputs)
    return model.output_names if isinstance(outputs, (list, tuple)) and len(outputs) > 1 else None


def _compile(model, path, custom_objects) -> str | None:
    """Compiles the model as it was saved; returns why it has no loss, or `None` where it has one."""
    config = files.compile_config(path)
    if not config:
        return _NO_LOSS
    try:
        with keras.saving.custom_object_scope(custom_objects):
            if Path(path).suffix == ".keras":
                model.compile_from_config(config)
            else:
                settings = {
                    name: config[name] for name in ("loss_weights", "jit_compile") if config.get(name) is not None
                }
                model.compile(keras.optimizers.get(config["optimizer"]), _losses(config.get("loss")), **settings)
    except Exception as error:  # of losses and optimizers of the user's own
        said = shortened(f"{type(error).__name__}: {error}", 120)
        remedy = "name the module that defines it: `--import MODULE`"
        return f"what the file says of optimizer and loss is not known here ({said}); {remedy}"
    return None if getattr(model, "compiled", False) and getattr(model, "loss", None) is not None else _NO_LOSS


def _losses(config):
    """Returns the losses that an `.h5` file names, in their structure."""
    if isinstance(config, list):
        return [_losses(part) for part in config]
    if isinstance(config, dict) and "class_name" not in config:
        return {name: _losses(part) for name, part in config.items()}
    known = keras.saving.get_registered_object(config) if isinstance(config, str) else None
    return known if known is not None or config is None else keras.losses.get(config)


@dataclasses.dataclass(frozen=True)
class Replay:
    """What was found in one step; the fields are those of `Capsule`, of what its methods return, and of its file."""

    file: str
    model: str
    step: int
    epoch: int | None
    is_exact: bool
    devices: int
    loss_scale_before: float
    run: dict
    layer: str | None
    operation: Operation | None
    remedy: str
    comparison: Comparison | None = None

    def __str__(self) -> str:
        when = f"Step {self.step}" + ("" if self.epoch is None else f" of epoch {self.epoch + 1}")
        lines = [f"{when} of '{self.model}' was {'skipped' if self.run['skipped'] else 'not skipped this time'}."]
        loss = f"{self.run['loss']:.6g}" if math.isfinite(self.run["loss"]) else "not finite"
        lines.append(f"Loss {loss}, loss scale {self.loss_scale_before:g}, after it {self.run['loss_scale']:g}.")
        lines.append(self._bits())
        if self.layer is not None:
            lines.append(f"First layer: {self.layer}.")
        lines.append(f"First operation: {self._operation()}.")
        lines.append(f"What to do: {self.remedy}")
        return "\n".join([*lines, *([] if self.comparison is None else ["", str(self.comparison)])])

    def _bits(self) -> str:
        if self.run["same_bits"]:
            return "The same bits as when it happened."
        versions = ", ".join(f"{name} {then} then, {now} now" for name, (then, now) in self.run["versions"].items())
        why = f"different versions: {versions}" if versions else "the versions are the same"
        if self.devices > 1 and not versions:
            why = f"{self.devices} devices shared that step"
        if not self.is_exact:
            why = "the step moved weights all the same, and the file has them after it"
        names = ", ".join(self.run["different"][:3])
        return f"Not the same bits as when it happened ({len(self.run['different'])} values: {names}): {why}."

    def _operation(self) -> str:
        found = self.operation
        if found is None:
            return "none, op by op everything is finite"
        if found.name is None:
            return f"none before the {found.side}: '{found.where}' {found.message}"
        place = f" in layer '{found.where}'" if found.where else ""
        line = f", {found.line}" if found.line else ""
        return f"'{found.name}', {found.side}{place}{line}: {found.message}"

    def to_dict(self) -> dict:
        content = dataclasses.asdict(dataclasses.replace(self, comparison=None))
        content["comparison"] = None if self.comparison is None else self.comparison.to_dict()
        if not math.isfinite(self.run["loss"]):
            content["run"]["loss"] = str(self.run["loss"])  # JSON has no word for inf and NaN.
        return content


def replayed(path, custom_objects=None, *, safe_mode: bool = True, compare: bool = False) -> Replay:
    """Runs the step in a capsule again and returns what there is to say of it; the arguments are `load_capsule`'s."""
    capsule = load_capsule(path, custom_objects=custom_objects, safe_mode=safe_mode)
    run = capsule.run()
    operation = capsule.first_operation()
    report = capsule.trace()
    return Replay(
        str(path),
        capsule.model.name,
        capsule.step,
        capsule.epoch,
        capsule.is_exact,
        capsule.devices,
        capsule.loss_scale,
        run,
        None if report.culprit is None else report.culprit.message,
        operation,
        capsule.remedy(operation, report),
        capsule.compare() if compare else None,
    )
