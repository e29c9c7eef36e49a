"""Asks the process that compiles for `forecast`: the request, checked, and the answers to it."""

import contextlib
import importlib.util
import inspect
import itertools
import json
import math
import numbers
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import keras

from mpkeras.policies.registry import get_policy, registered_policies
from mpkeras.seams import Blueprint, ModelView
from mpkeras.tools.forecast.targets import find_target
from mpkeras.tools.shared.arguments import check_call, dtype_of
from mpkeras.tools.shared.compiled import loss_and_targets, unwrapped
from mpkeras.tools.shared.report import shortened

# The package of each platform's compiler.
_MODULES = {"cpu": ("jax",), "cuda": ("jax", "jax_plugins.xla_cuda12"), "tpu": ("jax", "libtpu")}


class NotCompiled(ValueError):
    """A model of which JAX makes no program.

    Attributes:
        said: An exception from where it is traced, in its own words.
    """

    def __init__(self, text, said):
        super().__init__(text)
        self.said = said


class Compiler:
    """The process that compiles. Raises `TimeoutError` when `deadline` is over; ends the process on the way out."""

    def __init__(self, request, deadline):
        self._request = request
        self._deadline = deadline

    def __enter__(self):
        request = self._request
        _check_installed(request.target)
        environment = {**os.environ, **request.target.environment(request.devices), "KERAS_BACKEND": "jax"}
        # The user's own flags are XLA's last word.
        environment["XLA_FLAGS"] = f"{environment['XLA_FLAGS']} {os.environ.get('XLA_FLAGS', '')}".strip()
        # Where this process finds its modules, and first of all this mpkeras.
        paths = [str(Path(__file__).parents[3]), *(path or os.getcwd() for path in sys.path)]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment.pop("MPKERAS_POLICY", None)
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mpkeras.tools.forecast.compiling"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._answers: queue.Queue = queue.Queue()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests = self._process.stdin
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        try:
            self._ask(request.text)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._log.close()

    def _read(self, lines):
        with lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def compile(self, policy: str, batch: int, accumulate_steps: int = 1) -> dict:
        """Returns what the compiler says of one step, by the keys of `Forecast.to_dict`, and `moved_bytes`."""
        # Of a plan, and of a model that has one, too: sums of gradients are state, however many calls they are of.
        of_policy, of_model = self._request.policies[policy].accumulate_steps, self._request.accumulate_steps
        steps = max(accumulate_steps, of_policy, of_model)
        return self._ask(json.dumps({"policy": policy, "batch": batch, "accumulate_steps": steps}))

    def _ask(self, text) -> dict:
        left = self._deadline - time.monotonic()
        try:
            self._requests.write(text + "\n")
            self._requests.flush()
            line = self._answers.get(timeout=max(0.0, left) if left < math.inf else None)
        except BrokenPipeError:
            line = None
        except queue.Empty:
            raise TimeoutError from None
        if line is None:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise self._failed(answer)
        return answer

    @staticmethod
    def _failed(answer) -> Exception:
        if answer["says_remedy"]:
            return NotCompiled(answer["message"], answer["message"])
        where = "one" if answer["layer"] is None else f"layer '{answer['layer']}'"
        if not answer["is_made"]:
            remedy = (
                "Put the classes and functions of the model, with all that they use, into a module and import it; of a "
                "script only imports, definitions and constants run there. Classes need `get_config` and `from_config`."
            )
        elif answer["layer"] is None:
            remedy = "Pass `x` and `y` as the model and its loss take them, and write model and loss with `keras.ops`."
        else:
            remedy = "Write layers with `keras.ops`, and pass `x` as the model takes it."
        said = shortened(f"{answer['error']}: {answer['message']}", 500)
        return NotCompiled(
            "Expected a model that JAX can trace and compile, through which programs for accelerators are made. "
            f"Received: {where} that raised {said}. {remedy}",
            said.removeprefix("ValueError: "),
        )

    def _ended(self) -> Exception:
        code = self._process.wait()
        self._log.seek(0)
        said = shortened(self._log.read()[-600:].strip() or "nothing", 600)
        if code == -9:
            return MemoryError(
                f"Expected memory enough to compile for {self._request.target.title}. Received: a process that the "
                "system ended, most likely for want of memory. Ask for one policy at a time, or use a larger machine."
            )
        return RuntimeError(f"Expected a compiler that answers. Received: exit status {code}; it said: {said}")


def _check_installed(target):
    for name in _MODULES[target.platform]:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise ModuleNotFoundError(
                f"Expected the compiler for {target.title}. Received: no module '{name}' that is installed. Run "
                '`pip install "mpkeras[forecast]"`, on Linux and x86-64 with Python 3.11 or later.',
                name=name,
            )


class CompileRequest:
    """What `forecast` asks for, checked.

    Attributes:
        target: The device, a `Target`.
        policies: `{name: Policy}`.
        devices: How many share a batch.
        rows_split: Over how many of them its rows are split.
        batch: Rows of the batch.
        accumulate_steps: Calls to one update of the optimizer, by itself or by what wraps it.
        own_steps: Of these, what its user set, whatever a plan that the model was given asks for.
        own_methods: Methods of `fit`'s step that the model's class has of its own, and that are not compiled.
        text: What the process that compiles reads, JSON.
    """

    def __init__(self, model, x, y, device, devices, policies, optimizer, loss):
        check_call(model, "Ask for the models inside, each with what it is given: `model.generator`.")
        self.target = find_target(device)
        self.policies = _policies(policies)
        mesh, layouts = _mesh(devices)
        self.devices = 1 if mesh is None else math.prod(mesh["shape"])
        self.rows_split = 1 if mesh is None else mesh["shape"][mesh["axis_names"].index(mesh["batch_dim_name"])]
        if loss is None:
            loss, y = loss_and_targets(model, y, "mean_squared_error")
        Blueprint.check_loss(loss)
        x = _tensors(x, ModelView(model).inputs, "x")
        arrays = [tensor for tensor in keras.tree.flatten(x) if tensor is not None]
        if not arrays:
            raise ValueError(
                f"Expected at least one array or shape in `x`. Received: {x!r}. Pass a batch, or its shape."
            )
        self.batch = arrays[0].shape[0]
        sparse = [_takes_classes(part) for part in keras.tree.flatten(loss)]
        y = None if y is None else _tensors(y, None, "y", "int32" if any(sparse) else "float32")
        rows = {tensor.shape[0] for tensor in keras.tree.flatten((x, y)) if tensor is not None}
        if rows != {self.batch}:
            raise ValueError(f"Expected `x` and `y` of the same number of rows. Received: {sorted(rows)}.")
        if self.batch % self.rows_split:
            raise ValueError(
                f"Expected a batch that {self.rows_split} devices can share evenly. Received: {self.batch} rows. Pass "
                f"{self.batch // self.rows_split * self.rows_split or self.rows_split}."
            )
        self.own_methods = ModelView(model).own_methods
        config, owners = _config(model)
        optimizer = _optimizer(model, optimizer)
        self.accumulate_steps = optimizer.gradient_accumulation_steps or 1
        self.own_steps = Blueprint.own_calls(optimizer)
        # What a policy does not say its user's optimizer does, in the step that trains, too.
        policies = {name: Blueprint.with_slots_of(optimizer, policy) for name, policy in self.policies.items()}
        # Unwrapped: each policy scales the loss in its own way.
        optimizer = unwrapped(optimizer)
        owners += [optimizer, *keras.tree.flatten(loss)]
        modules = sorted({_module(owner) for owner in owners} - {"", "builtins"})
        self.text = json.dumps(
            {
                "floatx": keras.config.floatx(),
                "image_data_format": keras.config.image_data_format(),
                "modules": modules,
                "main": _main_source() if "__main__" in modules else None,
                "model": config,
                "beside_config": Blueprint.beside_config_of(model),
                "optimizer": Blueprint.config_of(optimizer),
                "losses": keras.saving.serialize_keras_object(keras.tree.flatten(loss)),
                # As text: JSON knows no numbers as keys.
                "loss_structure": repr(keras.tree.map_structure(lambda part: 0, loss)),
                "sparse": sparse,
                "x": keras.saving.serialize_keras_object(x),
                "y": keras.saving.serialize_keras_object(y),
                "device": device,
                "devices": self.devices,
                "mesh": mesh,
                "layouts": layouts,
                "policies": keras.saving.serialize_keras_object(policies),
            }
        )


def chosen_policies(policies, without: str) -> list:
    """Returns the `Policy` objects that the argument `policies` asks for, one or several.

    Args:
        without: How the error calls those that are taken without it.

    Raises:
        TypeError: If it is neither a policy nor a list of them.
        ValueError: If there is none in it.
    """
    if isinstance(policies, (str, keras.DTypePolicy)):
        policies = [policies]
    if not isinstance(policies, Iterable):
        raise TypeError(
            f"Expected `policies` to be a list of policies or their names. Received: {policies!r} of type "
            f"{type(policies).__name__}. Leave it out for {without}."
        )
    chosen = [get_policy(policy) for policy in policies]
    if not chosen:
        raise ValueError(f"Expected at least one policy. Received: none. Leave `policies` out for {without}.")
    return chosen


def called(policy) -> str:
    """Returns how a policy is called in reports: by its name, and by the dtype of its slots where that is its own."""
    has_own_slots = policy.name in registered_policies() and policy.slot_dtype != get_policy(policy.name).slot_dtype
    return f"{policy.name}, slots {policy.slot_dtype}" if has_own_slots else policy.name


def _policies(policies) -> dict:
    """Returns `{how it is called: Policy}`."""
    return by_names(chosen_policies(policies, "the usual three"))


def by_names(chosen: list) -> dict:
    """Returns `{how it is called: Policy}`; raises `ValueError` where two are called alike."""
    names = [called(policy) for policy in chosen]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Expected policies that can be told apart by their names. Received: {names}. Pass each once, or give it a "
            "name of its own: `policy.renamed('mine')`."
        )
    return dict(zip(names, chosen, strict=True))


def _mesh(devices) -> tuple:
    """Returns the mesh and the layouts that `devices` asks for, as JSON can hold them; `None` for one device."""
    if isinstance(devices, (keras.distribution.DataParallel, keras.distribution.ModelParallel)):
        mesh = devices.device_mesh
        axes = [str(name) for name in mesh.axis_names]
        description = {
            "shape": [int(n) for n in mesh.shape],
            "axis_names": axes,
            "batch_dim_name": devices.batch_dim_name,
        }
        if isinstance(devices, keras.distribution.DataParallel):
            return description, None
        return description, Blueprint.layouts_of(devices)
    if isinstance(devices, bool) or not isinstance(devices, numbers.Integral):
        raise TypeError(
            "Expected `devices` to be a whole number or a `keras.distribution.DataParallel` or `ModelParallel`. "
            f"Received: {devices!r} of type {type(devices).__name__}. Leave it out for one."
        )
    if devices < 1:
        raise ValueError(f"Expected at least one device. Received: devices={devices}. Leave it out for one.")
    if devices == 1:
        return None, None
    return {"shape": [int(devices)], "axis_names": ["batch"], "batch_dim_name": "batch"}, None


def _takes_classes(loss) -> bool:
    """Whether the targets of a loss are class numbers, by the names of its class and its function."""
    # Not by its attribute `name`, which is the user's to choose.
    names = [loss] if isinstance(loss, str) else [base.__name__ for base in type(loss).__mro__]
    names.append(getattr(getattr(loss, "fn", loss), "__name__", ""))
    return any("sparse" in name.lower() for name in names)


def _optimizer(model, optimizer):
    if optimizer is None:
        optimizer = getattr(model, "optimizer", None) or "adam"
    return Blueprint.checked_optimizer(optimizer, "optimizer")


def _config(model) -> tuple:
    """Returns the model's config without how it was compiled, and the objects whose classes it names."""
    try:
        config = keras.saving.serialize_keras_object(model)
        text = json.dumps(config)
    except Exception as error:  # of a `get_config` of the user's
        raise ValueError(
            f"Expected a model that can be made again from its config, in the process that compiles. Received: model "
            f"'{model.name}' ({type(model).__name__}), whose config cannot be had: "
            f"{shortened(f'{type(error).__name__}: {error}')} Give its class a `get_config` and a `from_config`."
        ) from error

    def without_compile(part):
        if isinstance(part, dict):
            return {name: without_compile(value) for name, value in part.items() if name != "compile_config"}
        return [without_compile(value) for value in part] if isinstance(part, list) else part

    layers = [model, *ModelView(model).layers]
    functions = [value for layer in layers for value in vars(layer).values() if inspect.isfunction(value)]
    owners = [*layers, *functions]
    # Of what is registered in this process, that which the config names.
    owners += [thing for name, thing in keras.saving.get_custom_objects().items() if f'"{name}"' in text]
    return without_compile(json.loads(text)), owners


def _module(thing) -> str:
    """Returns the module to import for what is not Keras' or ours."""
    thing = thing if isinstance(thing, type) or not hasattr(thing, "get_config") else type(thing)
    name = getattr(thing, "__module__", "") or ""
    return "" if isinstance(thing, str) or name.split(".")[0] in ("keras", "mpkeras") else name


def _main_source() -> str:
    """Returns the text of the script or notebook that runs, where classes of the model are defined."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path is not None and Path(path).is_file():
        return Path(path).read_text(encoding="utf-8")
    cells = getattr(main, "In", None)
    if cells:
        # IPython's own commands are no Python.
        lines = [line for cell in cells for line in cell.splitlines() if not line.lstrip().startswith(("%", "!"))]
        return "\n".join(lines)
    raise ValueError(
        "Expected the classes of the model in a module, which the process that compiles can import. Received: some "
        "that were typed in. Put them into a file and import it."
    )


def _tensors(structure, inputs, name, default="float32"):
    """Returns `KerasTensor`s for arrays, tensors and shapes; `None` where one is left out."""
    if structure is None:
        return None
    if _is_shape(structure):
        dtype = default if inputs is None else keras.tree.flatten(inputs)[0].dtype
        return _tensor(structure, dtype, name)
    if isinstance(structure, dict):
        known = [] if inputs is None else keras.tree.flatten(inputs)
        # Keras takes inputs that are in a list by their names, too.
        named = inputs if isinstance(inputs, dict) else {tensor.name: tensor for tensor in known}
        return {key: _tensors(part, named.get(key), name, default) for key, part in structure.items()}
    if isinstance(structure, (list, tuple)):
        placed = inputs if isinstance(inputs, (list, tuple)) else ()
        pairs = itertools.zip_longest(structure, placed[: len(structure)])
        return [_tensors(part, other, name, default) for part, other in pairs]
    if not hasattr(structure, "shape") or not hasattr(structure, "dtype"):
        raise TypeError(
            f"Expected `{name}` to be arrays or shapes. Received: {structure!r} of type {type(structure).__name__}. "
            "Pass a batch, or its shape, such as (32, 224, 224, 3)."
        )
    return _tensor(tuple(structure.shape), dtype_of(structure), name)


def _is_shape(value) -> bool:
    # Sizes may be NumPy's.
    is_size = [isinstance(n, numbers.Integral) or n is None for n in value] if isinstance(value, (list, tuple)) else []
    return len(is_size) > 0 and all(is_size)


def _tensor(shape, dtype, name):
    if not shape or any(n is None or n < 1 for n in shape):
        raise ValueError(
            f"Expected sizes that are all known and positive in `{name}`, the batch's first. Received: {tuple(shape)}. "
            "Pass a batch, or its whole shape, such as (32, 224, 224, 3)."
        )
    if dtype == "string":
        raise ValueError(
            f"Expected numbers in `{name}`, as JAX, which compiles, knows no text. Received: a tensor of dtype "
            "'string'. Let the pipeline of the data look the numbers up, and pass the part of the model that takes "
            "them."
        )
    # As Keras feeds JAX.
    narrow = {"float64": keras.config.floatx(), "int64": "int32", "uint64": "uint32"}
    return keras.KerasTensor(tuple(map(int, shape)), narrow.get(dtype, dtype))
