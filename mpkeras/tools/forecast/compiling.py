"""The process of its own in which `forecast` compiles: `python -m mpkeras.tools.forecast.compiling`, on JAX.

One JSON object a line. It reads what to compile, then, for each `{"policy": name, "batch": rows}`, writes what the
compiler says of that step. No variable gets a value, so a model needs no more memory than the compiler.
"""

import ast
import codeop
import contextlib
import copy
import dataclasses
import importlib
import json
import os
import re
import sys
import traceback
import types

import keras

from mpkeras.conversion.apply import apply_policy
from mpkeras.seams import Blueprint, ModelView, devices
from mpkeras.tools.forecast.hlo import read_program
from mpkeras.tools.forecast.targets import find_target
from mpkeras.tools.forecast.travel import travels_otherwise
from mpkeras.training.step import make_train_step

_BYTES = re.compile(r"[Uu]sed ([\d.]+)([KMGT]?)")
# A policy that the model cannot be given, and a config that makes another model, say by themselves what is to be done.
_SAY_REMEDY = (apply_policy.__code__, Blueprint.give_beside_config.__code__)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main():
    """Answers requests until there are no more."""
    # Output of the user's code goes to the log: only answers go where they are read.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(what):
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        steps = Steps(json.loads(sys.stdin.readline()))
    except Exception as error:  # Whatever the model's own code raises.
        answer(failure(error))
        return
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(steps.compiled(**request))
        except Exception as error:
            answer(failure(error))


def failure(error: Exception) -> dict:
    """Returns an error as an answer: what it says, where it came from, or the memory that is too much."""
    text = str(error)
    traceback.print_exception(error)
    if "RESOURCE_EXHAUSTED" in text:
        used = _BYTES.search(text)
        return {"too_large": round(float(used[1]) * _UNITS[used[2]]) if used else 0}
    layer = _layer_of(error)
    running = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    # A layer runs when its model is made, too, and a name may be missing as late as in its call.
    is_made = layer is not None or running.isdisjoint((define.__code__, _made.__code__))
    is_made = is_made and not isinstance(error, NameError)
    cause = error
    while not is_made and isinstance(cause.__context__, type(error)):
        # Keras puts the configs of all that holds it before it.
        cause = cause.__context__
    return {
        "error": type(error).__name__,
        "message": str(cause),
        "layer": layer,
        "is_made": is_made,
        "says_remedy": isinstance(error, ValueError) and not running.isdisjoint(_SAY_REMEDY),
    }


def _layer_of(error: Exception) -> str | None:
    """Returns the name of the innermost layer of the user's or of Keras that was running."""
    name = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        running = frame.f_locals.get("self")
        if isinstance(running, keras.layers.Layer) and not isinstance(running, keras.Model):
            # It has none before `Layer.__init__` has run.
            name = getattr(running, "name", name)
    return name


def define(source: str, names: dict):
    """Runs the imports, definitions and constants of a script, without doing its work, and puts them into `names`."""
    compiled = codeop.Compile()  # Knows what was imported from `__future__`, and takes trees as `compile` does.
    for node in ast.parse(source).body:
        if _is_definition(node):
            # It may need what is left out, and the model may not need it: then nothing is missing.
            with contextlib.suppress(NameError):
                exec(compiled(ast.Module([node], []), "__main__", "exec"), names)  # type: ignore[arg-type]


def _is_definition(node) -> bool:
    """Whether a statement imports, defines or names something, and calls nothing for it."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [name for target in targets for name in getattr(target, "elts", [target])]
        return all(isinstance(name, ast.Name) for name in names) and not _calls(node)
    if isinstance(node, ast.Try) or (isinstance(node, ast.If) and not _calls(node.test)):
        blocks = [node, *getattr(node, "handlers", [])]
        fields = ("body", "orelse", "finalbody")
        return all(_is_definition(part) for block in blocks for field in fields for part in getattr(block, field, []))
    kept = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)
    return isinstance(node, kept)


def _calls(node) -> bool:
    """Whether a statement calls something when it runs."""
    if isinstance(node, ast.Lambda):
        return False
    return isinstance(node, (ast.Call, ast.Await)) or any(_calls(part) for part in ast.iter_child_nodes(node))


class Steps:
    """The guarded train steps of one model, one for each policy. `wanted`: what `forecast` asks for."""

    def __init__(self, wanted):
        keras.config.set_floatx(wanted["floatx"])
        keras.config.set_image_data_format(wanted["image_data_format"])
        # The frames that Keras hides say which layer was running.
        keras.config.disable_traceback_filtering()
        keras.config.enable_unsafe_deserialization()  # The model is the user's own, and was not read from a file.
        if wanted["main"] is not None:
            main_module = types.ModuleType("__main__")
            sys.modules["__main__"] = main_module
            define(wanted["main"], vars(main_module))
        # A config names classes and functions of the user's without the modules that they are in.
        for name in wanted["modules"]:
            objects = vars(importlib.import_module(name))
            keras.saving.get_custom_objects().update({key: thing for key, thing in objects.items() if callable(thing)})
        self._wanted = wanted
        self._target = find_target(wanted["device"])
        backend = devices.backend_module()
        targets = backend.compile_devices(self._target, wanted["devices"])
        # This device is asked for its kernels in 16 bits, not the CPU that compiles.
        backend.try_for(targets[0])
        self._device = self._distribution = None
        if wanted["mesh"] is None:
            self._device = targets[0]
        else:
            mesh = backend.MeshOfDevices(wanted["mesh"]["shape"], wanted["mesh"]["axis_names"], targets)
            self._distribution = _distribution(wanted, mesh)
        self._policies = _made(wanted["policies"])
        self._batch = _made(wanted["x"]), _made(wanted["y"])
        self._steps: dict = {}

    def compiled(self, policy: str, batch: int, accumulate_steps: int) -> dict:
        """Returns what the compiler says of the step of `policy` on a batch of so many rows."""
        x, y = (_of_rows(structure, batch) for structure in self._batch)
        try:
            step, traced = self._traced(_without_values, policy, x, y, accumulate_steps)
        except (TypeError, ValueError):
            # Nadam makes a variable of a value, as layers of users do, which Keras refuses there.
            step, traced = self._traced(contextlib.nullcontext, policy, x, y, accumulate_steps)
        with _without_values():
            program = traced.lower().compile()
        facts = facts_of(program, [variable.path for variable in step.model.trainable_variables])
        splits_weights = (self._wanted["layouts"] or {}).get("shard") != "state"
        facts["travels_otherwise"] = travels_otherwise(
            step.model, ModelView(step.model).travel, facts["collectives"], splits_weights
        )
        if "float8" not in self._target.matrix_rates:
            # The compiler leaves out casts before a product: a device without units for it widens what it reads.
            for counted in (facts["matrix_flops"], facts["products"]):
                if "float8" in counted:
                    counted["bfloat16"] = counted.get("bfloat16", 0) + counted.pop("float8")
        if self._policies[policy].float8 is not None:
            facts["float8"] = _in_float8(step.model, traced, facts["float8_call_flops"], self._wanted["devices"])
        return facts

    def _traced(self, values, policy, x, y, accumulate_steps) -> tuple:
        """Returns a step and its traced program; `values()` is the scope in which its variables are made."""
        key = values, policy, accumulate_steps
        if key not in self._steps:
            self._steps[key] = self._step(values, policy, x, accumulate_steps)
        step = self._steps[key]
        with values():
            if y is None:
                with _without_values():
                    y = self._targets(_outputs(step.model, x))
            # Only here: what an optimizer begins with could not be put on a device that is not there.
            with contextlib.nullcontext() if self._distribution is None else self._distribution.scope():
                return step, step.traced_for(self._device, x, y)

    def _step(self, values, policy, x, accumulate_steps):
        wanted = self._wanted
        with values():
            model = _made(wanted["model"])
            if not ModelView(model).is_built:
                model(x)
            Blueprint.give_beside_config(model, wanted["beside_config"])
            apply_policy(model, self._policies[policy])
            if self._distribution is not None:
                # Before there are slots, which lie as their weights do.
                Blueprint.lay_out(model.variables, self._distribution)
        loss = self._of_losses(_made(wanted["losses"]))
        # An optimizer begins with a few numbers, which it has to get.
        optimizer = _made(wanted["optimizer"])
        return make_train_step(model, optimizer, loss, jit_compile=None, accumulate_steps=accumulate_steps)

    def _targets(self, outputs):
        """Returns targets for what the model returns: as it, or class numbers where the loss takes them."""
        takes_classes = self._of_losses(self._wanted["sparse"])

        def targets_of(outputs, takes_classes):
            def target(output):
                shape, dtype = (output.shape[:-1], "int32") if takes_classes else (output.shape, "float32")
                return keras.KerasTensor(shape, dtype)

            return keras.tree.map_structure(target, outputs)

        if not isinstance(takes_classes, (dict, list)):
            return targets_of(outputs, takes_classes)
        by_key = takes_classes if isinstance(takes_classes, dict) else dict(enumerate(takes_classes))
        by_name = isinstance(outputs, dict)
        flat = outputs if by_name else dict(enumerate(keras.tree.flatten(outputs)))
        # An output without a loss has no targets.
        targets = {key: targets_of(flat[key], of_loss) for key, of_loss in by_key.items() if key in flat}
        return targets if by_name else keras.tree.pack_sequence_as(outputs, [targets.get(key) for key in flat])

    def _of_losses(self, flat):
        """Returns what there is for each loss, in the structure of the losses."""
        return keras.tree.pack_sequence_as(ast.literal_eval(self._wanted["loss_structure"]), flat)


def _without_values():
    """Context manager: variables are made without values, and get none when it ends."""
    return keras.StatelessScope(initialize_variables=False)


def _outputs(model, x):
    """Returns what a model makes of `x`, as `KerasTensor`s of known sizes."""
    outputs = model(x)
    if any(None in output.shape for output in keras.tree.flatten(outputs)):
        # A layer may say less of its outputs than its `call` shows: of `EinsumDense(..., (None, 8))` one size is open.
        outputs = importlib.import_module("mpkeras.tools.shared._jax").outputs_of(model, x)
    return outputs


def _of_rows(structure, batch):
    """Returns `KerasTensor`s for a batch of so many rows; `None` for what is not there."""

    def of_rows(tensor):
        return None if tensor is None else keras.KerasTensor((batch, *tensor.shape[1:]), tensor.dtype)

    return keras.tree.map_structure(of_rows, structure)


def facts_of(program, weights=()) -> dict:
    """Returns what the compiler says of a program of a state and a batch, by the keys of `Forecast.to_dict`.

    Args:
        program: The program, compiled.
        weights: The paths of the weights, in the order in which the state begins with them.
    """
    memory = program.memory_analysis()
    arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    facts = read_program(program.as_text(), weights)
    return {
        "persistent_bytes": arguments - importlib.import_module("mpkeras.tools.shared._jax").batch_bytes_of(program),
        "temporary_bytes": temporary,
        # Donated buffers are not there twice.
        "peak_bytes": arguments + outputs + temporary + memory.generated_code_size_in_bytes,
        # Read and written once at the least.
        "moved_bytes": arguments + memory.output_size_in_bytes,
        **dataclasses.asdict(facts),
        "float8": None,
    }


def _in_float8(model, traced, compiled_flops, devices) -> dict:
    """Returns what was asked for in float8, and what the compiler made: the key `"float8"` of `Forecast.to_dict`."""
    products = importlib.import_module("mpkeras.tools.shared._jax").program_of(traced.jaxpr.jaxpr).products
    asked_for = [product.flops for product in products if product.dtype.startswith("float8")]
    reasons = ModelView(model).float8_products()
    layers = [layer for layer in ModelView(model).layers if id(layer) in reasons]
    return {
        "products": len(asked_for),
        # Of one device, as all that is compiled. The compiler merges products that share an operand: only FLOPs can be
        # compared.
        "flops": sum(asked_for) // devices,
        "compiled_flops": compiled_flops,
        "layers": [{"path": layer.path, "reason": reasons[id(layer)]} for layer in layers],
    }


def _made(config):
    """Returns what a config stands for."""
    # Keras takes apart what it reads.
    return keras.saving.deserialize_keras_object(copy.deepcopy(config))


def _distribution(wanted, mesh):
    if wanted["layouts"] is None:
        return keras.distribution.DataParallel(device_mesh=mesh)
    return Blueprint.model_parallel(mesh, **wanted["layouts"])


if __name__ == "__main__":
    main()
