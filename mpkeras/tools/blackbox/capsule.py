"""`load_capsule`: runs a skipped step again from its file, and names the operation at fault."""

import contextlib
import copy
import dataclasses
import functools
import importlib
import os
import re
from typing import Any

import keras
import numpy as np

from mpkeras.policies.policy import Policy
from mpkeras.seams import (
    ConvertedLayer,
    FitStep,
    ModelInFit,
    ModelView,
    RuleNames,
    capsule_file,
    check_model,
    check_switch,
    checked_path,
    devices,
    dtypes,
    layer_converter,
    let_heads_tell,
    number,
    policy_alone,
    replaced,
)
from mpkeras.tools.blackbox.comparison import Comparison, compare_with
from mpkeras.tools.blackbox.origins import Operation, Origins
from mpkeras.tools.numerics.numerics import NumericsReport, remedy_of_culprit, traced
from mpkeras.tools.shared.observation import call_of, replaced_calls
from mpkeras.tools.shared.ranges import is_finite, is_float
from mpkeras.tools.shared.report import shortened
from mpkeras.training.prepare import prepare
from mpkeras.training.state import load_state_dict, state_dict
from mpkeras.training.step import make_train_step

# The versions that decide which bits a step computes.
_DECISIVE = ("mpkeras", "keras", "tensorflow", "jax", "torch", "numpy", "backend", "device", "cpu")
# The state of torch's generator of a GPU, which a file of another machine has, or this machine, alone.
_OF_GPU = "random/cuda"
# What Keras says of a Python lambda where none is allowed, and Python of a name that is not there.
_REFUSED_LAMBDA = re.compile("Python `?lambda")
_MISSING_NAME = re.compile(r"name '(\w+)' is not defined")
# The arguments of `make_train_step` in a file.
_OPTIONS = {"jit_compile", "rollback", "accumulate_steps", "on_overflow", "remat"}


def load_capsule(
    path: str | os.PathLike, model=None, *, custom_objects: dict | None = None, safe_mode: bool = True
) -> "Capsule":
    """Returns the skipped step in a file that `callbacks.BlackBox` or `step.capsule` wrote.

    Nothing in the file is executed while it is read. The model is made from its configuration when it is first asked
    for, as `keras.saving.load_model` does, with the same safeguards.

    Args:
        path: The `.mpk` file.
        model: The model, where it cannot be made from its configuration (a class without `get_config`). It is given the
            state in the file; if it was skipped in `fit`, it must be compiled as it was, and is prepared.
        custom_objects: Classes and functions by name, those of your own in the model, the loss and the metrics.
        safe_mode: Whether to refuse Python lambdas, which may run any code. Turn it off for files that you trust only.

    Returns:
        A `Capsule`.

    Raises:
        ValueError: If there is no such file, or it is no capsule, damaged, of a newer mpkeras, of a step in float8 by
            scales that were removed, or of another model than the given one.
        TypeError: If `path` is no path, `model` no `keras.Model`, or `safe_mode` neither `True` nor `False`.

    Example:

    >>> import os, tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")], name="net")
    >>> step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
    >>> result = step(np.full((4, 2), np.inf), np.ones((4, 1)))
    >>> path = os.path.join(tempfile.mkdtemp(), "failure.mpk")
    >>> size = step.capsule(path)
    >>> capsule = mpkeras.load_capsule(path)
    >>> capsule.run()["same_bits"]
    True
    >>> capsule.first_operation().side
    'batch'
    """
    check_switch("safe_mode", safe_mode)
    path = checked_path("path", path, "Pass the `.mpk` file that `callbacks.BlackBox` or `step.capsule` wrote.")
    content, arrays = capsule_file.read(path)
    capsule = Capsule(path, content, arrays, custom_objects, safe_mode)
    if model is not None:
        check_model(model)
        capsule._check_backend()
        capsule._use(model)
    return capsule


def _rules_by_dtypes(model):
    """Returns a policy, or its name, whose float32 rules leave each layer of `model` in the dtype that it has."""
    in_16_bits = ModelView(model).compute_dtypes() & set(dtypes.SIXTEEN_BIT_DTYPES)
    if not in_16_bits:
        return "float32"
    small = [layer for layer in ModelView(model).heads.layers if not ConvertedLayer(layer).is_large]
    # By the rule for outputs a large head sums in float32.
    rules = () if any(layer.compute_dtype in in_16_bits for layer in small) else (RuleNames.OUTPUTS,)
    return Policy("mixed_float16" if "float16" in in_16_bits else "mixed_bfloat16", keep_float32=rules)


def _names_what_a_lambda_misses(method):
    """Raises `ValueError` where a lambda of the file needs a name of the module in which it was written.

    Of a lambda Keras writes the bytecode, and runs it in a module of its own.
    """

    @functools.wraps(method)
    def named(self, *args, **kwargs):
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            missing = None if self._safe_mode else _MISSING_NAME.search(f"{error}")
            if missing is None:
                raise
            raise ValueError(
                f"Expected Python lambdas that need no names of the module in which they were written. Received: "
                f"'{self._path}', in which one needs `{missing[1]}`. Pass `model=`, compiled as it was, to "
                "`mpkeras.load_capsule`, or write a function of a name in place of the lambda, and pass it in "
                "`custom_objects`."
            ) from error

    return named


class Capsule:
    """What `load_capsule` returns: one skipped step.

    Attributes:
        step, epoch: Of the step, counted from 0; `epoch` is `None` for a step of `make_train_step`.
        batch: `(x, y, sample_weight)` or what else the train step was given, of NumPy arrays.
        state: All state before the step, as `mpkeras.state_dict` returns it.
        versions: Of mpkeras, Keras, the backend, NumPy and Python, and the device, when it happened.
        said: What the step returned, as NumPy arrays: `"loss_scale"` after it, `"skipped"`, in `fit` its logs.
        is_exact: Whether `state` is what it was before the step. Not where the step moved weights all the same: as the
            last call of a window of accumulated gradients, or by another optimizer.
        devices: How many devices or ranks shared the batch; 1 for one alone. Of several ranks each holds its own rows.

    Example:

    >>> import os, tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
    >>> result = step(np.full((4, 2), np.inf), np.ones((4, 1)))
    >>> path = os.path.join(tempfile.mkdtemp(), "failure.mpk")
    >>> size = step.capsule(path)
    >>> capsule = mpkeras.load_capsule(path)
    >>> capsule.batch[0].shape, capsule.versions["keras"] == keras.__version__
    ((4, 2), True)
    >>> run = capsule.run()
    >>> run["skipped"], run["same_bits"], run["versions"]
    (True, True, {})
    >>> operation, report = capsule.first_operation(), capsule.trace()
    >>> operation.side, operation.where, report.culprit.side
    ('batch', 'x', 'input')
    >>> capsule.remedy(operation, report)
    'Look for inf or NaN in the data: no dtype and no loss scale cures it.'
    >>> capsule.compare(bound=0.1).first is None  # in float32 it is as bad
    True
    """

    def __init__(self, path, content, arrays, custom_objects, safe_mode):
        self._path = path
        self._content = content
        self._custom_objects = custom_objects
        self._safe_mode = safe_mode
        self._model: keras.Model = None
        self._train_step: Any = None
        # The path that a layer had, by its path in the model now.
        self._paths: dict = {}
        try:
            self.kind = {"fit": "fit", "step": "step"}[content["kind"]]
            self.step, self.epoch = int(content["step"]), content["epoch"]
            self.batch = capsule_file.batch_of(content["batch"], arrays)
            self.versions = dict(content["versions"])
            self.is_exact = bool(content["is_exact"])
            # Files of earlier versions do not say it.
            self.devices = int(content.get("devices", 1))
            self._layers = [[str(part) for part in row] for row in content["layers"]]
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"Expected the description of a step. Received: '{path}' ({type(error).__name__}: "
                f"{shortened(str(error), 120)}). Ask for the file again: it is not what mpkeras writes."
            ) from error
        for scales in {scales for row in self._layers for scales in row[5:]}:
            # mpkeras 0.2 had others than those of the step. Its files name them; the policy says that they are gone.
            Policy("mixed_float8", float8=scales)
        self.said, self.state = _group(arrays, "said"), _group(arrays, "state")
        self._after = {**self.state, **_group(arrays, "after")}

    @property
    @_names_what_a_lambda_misses
    def model(self):
        """The model before the step: made from its configuration, or the one that you gave.

        Raises:
            ValueError: If it cannot be made here: the step was skipped on another backend, the classes of the model are
                not known, it holds lambdas, or has no configuration.
        """
        if self._model is None:
            self._check_backend()
            model = self._rebuilt("model")
            if not isinstance(model, keras.Model):
                raise ValueError(
                    f"Expected the configuration of a model. Received: {type(model).__name__}. Pass `model=`."
                )
            self._give_policies(model)
            self._use(model, rules_of=_rules_by_dtypes)
        return self._model

    @_names_what_a_lambda_misses
    def run(self) -> dict:
        """Runs the step again, from the state before it, and returns what it says now.

        Afterwards the model is again as before the step.

        Returns:
            `loss` (float; in `fit` NaN where it was not finite), `loss_scale` after the step, `skipped`; `same_bits`,
            whether everything that the step returned and left behind is what it was then, bit for bit; `different`, the
            names of what is not; and `versions`, `{name: (then, now)}` of those that differ.

        Raises:
            ValueError: As `model` does.
        """
        self._restore()
        result = self._result()
        now = devices.environment()
        versions = {key: (self.versions.get(key), now.get(key)) for key in _DECISIVE}
        different = [name for name, value in result.items() if name in self.said and not _same(value, self.said[name])]
        names = {_place(name): name for name in self.state}
        here = {name: array for name, array in self._state_by_name().items() if _place(name) in names}
        after = {names[_place(name)]: array for name, array in here.items()}
        different += [name for name, value in after.items() if not _same(value, self._after.get(name))]
        self._restore()
        return {
            "loss": float(result["loss"]) if self.kind == "step" else self._loss_of_fit(),
            "loss_scale": float(result["loss_scale"]),
            "skipped": bool(result["skipped"]),
            "same_bits": not different,
            "different": different,
            "versions": {key: pair for key, pair in versions.items() if pair[0] != pair[1]},
        }

    @_names_what_a_lambda_misses
    def trace(self) -> NumericsReport:
        """Returns the range of every layer in this step, and the first culprit among them: `mpkeras.trace_numerics`.

        Raises:
            ValueError: As `model` does.
        """
        return traced(self.model, *self._data(), **self._options_of_passes())

    @_names_what_a_lambda_misses
    def compare(self, dtype: str = "float32", *, bound: float = 0.01) -> Comparison:
        """Runs the step in float32, too, and returns where 16 bits leave it.

        Layers that draw numbers compute as they did, with the recurrent layers around them: others would be drawn.

        Args:
            dtype: `"float32"`, which is all there is to compare with.
            bound: How far, as a share of the largest number that the layer returns in float32.

        Returns:
            A `Comparison`: `.first` is the first layer beyond the bound, `.rows` has all of them.

        Raises:
            ValueError: If an argument is out of its range, and as `model` does.
        """
        return compare_with(dtype, self.model, *self._data(), bound=bound, **self._options_of_passes())

    @_names_what_a_lambda_misses
    def first_operation(self) -> Operation | None:
        """Returns the operation of the step at which inf or NaN began: its inputs were finite, and its output is not.

        The step is run op by op, forward and backward, in the dtypes that it has. Operations that a compiler
        has joined are taken apart here: a number that it kept in float32 between two operations is rounded to 16 bits,
        and may overflow there. An inf that reaches neither the loss nor a gradient is no fault.

        Returns:
            An `Operation`, or `None` where op by op everything is finite.

        Raises:
            ValueError: As `model` does.
        """
        self._restore()
        sources = self._sources()
        gradients: list = []
        backend = importlib.import_module(f"mpkeras.tools.blackbox._{keras.backend.backend()}")
        step, state = self._op_by_op()

        # A frame by which the step's own code is told from that of who asks: `origins.MARK` is its name.
        def run_below_here(*arguments):
            return step(*arguments)

        with self._recorded(gradients):
            origins = Origins(has_source=bool(sources))
            watch = functools.partial(_watched_layers, self.model)
            operation = backend.first_operation(run_below_here, state, self._tensors(), gradients, origins, watch)
        self._restore()
        if operation is None:
            return sources[0] if sources else None
        return dataclasses.replace(operation, where=self._paths.get(operation.where, operation.where))

    def remedy(self, operation: Operation | None = None, report: NumericsReport | None = None) -> str:
        """Returns what to do about the step, in a sentence.

        Args:
            operation: The result of `first_operation`, which is called without.
            report: The result of `trace`, which is called without.
        """
        operation = self.first_operation() if operation is None else operation
        if operation is None and self.devices > 1:
            return (
                f"Op by op everything is finite in these rows, and {self.devices} devices decided together: run the "
                "capsule of another rank, or sum gradients in smaller parts."
            )
        if operation is None:
            return "Op by op everything is finite: compile without XLA, or sum gradients in smaller parts."
        if operation.side == "batch":
            return "Look for inf or NaN in the data: no dtype and no loss scale cures it."
        if operation.side == "weight":
            return "Load a checkpoint whose weights are finite, or lower the learning rate."
        if operation.dtype not in dtypes.SIXTEEN_BIT_DTYPES:
            what = (
                "it divides by, takes the logarithm or the root of"
                if operation.side == "forward"
                else "its slope is of"
            )
            return f"No 16 bits are at fault: look at what {what}, and add an epsilon or clip it there."
        report = self.trace() if report is None else report
        if report.rules and operation.side == "forward":
            # The first one may be of a layer in front, whose gradient is too large for what overflows behind it.
            return remedy_of_culprit(report) or report.remedies()[0]
        if operation.side == "forward":
            argument = RuleNames.keeping(operation.where or "")
            return f"Keep the layer in float32 with {argument}, or train in 'mixed_bfloat16'."
        return (
            f"Gradients overflow at a loss scale of {self.loss_scale:g}. A dynamic one comes down by itself; if it "
            "does not stop, train in 'mixed_bfloat16' or keep the layer in float32."
        )

    @property
    def loss_scale(self) -> float:
        """The loss scale before the step."""
        return number(self._optimizers()[0].loss_scale)

    # ------------------------------------------------------------------------------------------ the model

    def _use(self, model, rules_of=None):
        """Makes `model` ready to take the step, and gives it the state before it.

        `rules_of(model)` returns the `Policy` whose rules hold for it; left out, those that it was given hold.
        """
        policy = "float32" if rules_of is None else rules_of(model)
        # The policy of the file decides, and not what is in force here.
        with policy_alone("float32", compile_left_alone=True):
            if self.kind == "fit":
                self._make_ready_to_fit(model, policy)
            else:
                self._train_step = self._made_step(model, policy)
        let_heads_tell(model, self._data()[0])
        self._check_layers(model)
        self._model = model
        try:
            self._restore()
        except ValueError as error:
            self._model = None
            raise ValueError(
                f"Expected a capsule of this model. Received: '{self._path}', of model "
                f"'{self._content.get('model_name')}', whose state does not fit into '{model.name}': {error}"
            ) from error

    def _check_backend(self):
        then, now = self.versions.get("backend"), keras.backend.backend()
        if then is not None and then != now:
            raise ValueError(
                f"Expected Keras on the backend of the skipped step, whose state and operations are its own. Received: "
                f"'{self._path}', of {then}, while Keras computes with {now}. Set the environment variable "
                f"KERAS_BACKEND={then} before Keras is imported."
            )

    def _made_step(self, model, policy) -> Any:
        made = {name: self._rebuilt(name) for name in ("optimizer", "loss", "metrics")}
        options = self._content.get("options")
        if not isinstance(options, dict) or not options.keys() <= _OPTIONS:
            raise ValueError(
                f"Expected the options of `make_train_step`. Received: {options!r:.100}. Ask for the file anew."
            )
        with policy_alone(policy):
            step = make_train_step(model, made["optimizer"], made["loss"], metrics=made["metrics"] or (), **options)
            # The step that is in the file, and no other attempt.
            step._first_steps.are_over = True
            x, y, _ = self._data()
            step._get_ready(x, y)
        return step

    def _make_ready_to_fit(self, model, policy):
        if not getattr(model, "compiled", False):
            if type(model).compile is keras.Model.compile:
                model.compile(**self._rebuilt("compile"))
            else:
                # As Keras does where a class has a `compile` of its own.
                model.compile_from_config(self._described("compile"))
        model.run_eagerly = self._content.get("run_eagerly") is True
        model.steps_per_execution = 1
        if ModelInFit(model).guard is None:
            with policy_alone(policy):
                prepare(model)
        model.jit_compile = self._content.get("jit_compile") is True
        FitStep(model).get_ready(self._tensors())

    def _give_policies(self, model):
        """Gives the layers the dtypes that they had: not every kind of model has its policies in its configuration."""
        for layer, row, then in zip(
            capsule_file.computing_layers(model), capsule_file.layer_dtypes(model), self._layers, strict=False
        ):
            name = dtypes.stock_name(then[2], then[3])
            if row[1:4] != then[1:4] and row[1] == then[1] and name is not None:
                ConvertedLayer(layer).set_policy(keras.DTypePolicy(name))
        stored = [then[3] for then in self._layers if "float8" in then[4:]]
        if stored:
            pairs = zip(capsule_file.computing_layers(model), self._layers, strict=False)
            others = tuple(
                layer for layer, then in pairs if ConvertedLayer(layer).has_product and "float8" not in then[4:]
            )
            policy = Policy("mixed_float8", variable_dtype=stored[0], keep_float32=(), keep_16_bits=others)
            layer_converter(model, policy)()
        # Weights that were made before their layer had its policy, and the slots of an optimizer made with the model.
        by_place = {_place(name): array for name, array in self.state.items()}
        arrays = [(variable, by_place.get(f"model/{i}")) for i, variable in enumerate(model.variables)]
        changed = [(v, a.dtype.name) for v, a in arrays if a is not None and is_float(a) and v.dtype != a.dtype.name]
        FitStep(model).store(changed)

    def _check_layers(self, model):
        """Raises `ValueError` unless the layers of `model` have the dtypes that they had."""
        rows = capsule_file.layer_dtypes(model)
        if [row[1:] for row in rows] != [row[1:] for row in self._layers]:
            pairs = [(then, now) for then, now in zip(self._layers, rows, strict=False) if then[1:] != now[1:]]
            what = f"{pairs[0][1]} instead of {pairs[0][0]}" if pairs else f"{len(rows)} of {len(self._layers)} layers"
            raise ValueError(
                f"Expected a capsule of this model, with the same layers in the same dtypes. Received: '{self._path}' "
                f"for model '{model.name}', which has {what}. Pass the model as it was trained, or none."
            )
        self._paths = {now[0]: then[0] for now, then in zip(rows, self._layers, strict=True)}

    def _described(self, name: str):
        config = self._content.get(name)
        if config is None and f"why_no_{name}" in self._content:
            raise ValueError(
                f"Expected a capsule that describes the {name}. Received: '{self._path}', which could not: "
                f"{self._content[f'why_no_{name}']}. Pass `model=`, compiled as it was, to `mpkeras.load_capsule`."
            )
        return config

    def _rebuilt(self, name: str):
        config, errors = self._described(name), []
        # Layers that a layer makes in its own `__init__` compute in the policy in force, whatever its configuration
        # says, and on TensorFlow a model of both cannot be called. `_give_policies` tells them apart afterwards.
        computed = {row[2] for row in self._layers} & set(dtypes.SIXTEEN_BIT_DTYPES)
        for policy in ("float32", *(f"mixed_{dtype}" for dtype in sorted(computed))):
            try:
                with policy_alone(policy):
                    return keras.saving.deserialize_keras_object(
                        copy.deepcopy(config), custom_objects=self._custom_objects, safe_mode=self._safe_mode
                    )
            except Exception as error:  # Keras lets pass what the classes raise.
                errors.append(error)
        remedy = "Pass classes and functions of your own in `custom_objects`, or the model as `model`."
        if self._safe_mode and _REFUSED_LAMBDA.search(str(errors[0])):
            remedy = "If you trust the file, pass `safe_mode=False`."
        raise ValueError(
            f"Expected a {name} that can be made here. Received: '{self._path}' ({type(errors[0]).__name__}: "
            f"{shortened(str(errors[0]), 200)}). {remedy}"
        ) from errors[0]

    # ------------------------------------------------------------------------------------------ its state

    def _optimizers(self) -> list:
        model = self.model  # With it comes the train step.
        return ModelInFit(model).optimizers if self._train_step is None else [self._train_step.optimizer]

    def _restore(self):
        model = self.model
        # By place: the names of slots hold the paths that layers had when the optimizer was built.
        here = self._state_by_name()
        names = {_place(name): name for name in here}
        state = {names.get(_place(name), name): array for name, array in self.state.items()}
        if _OF_GPU in here:
            state.setdefault(_OF_GPU, here[_OF_GPU])
        else:
            state.pop(_OF_GPU, None)
        if self._train_step is None:
            load_state_dict(model, state)
        else:
            self._train_step.load_state_dict(state)

    def _state_by_name(self) -> dict:
        return state_dict(self.model) if self._train_step is None else self._train_step.state_dict()

    def _data(self) -> tuple:
        return self.batch if self.kind == "step" else keras.utils.unpack_x_y_sample_weight(self.batch)

    def _tensors(self):
        return ModelView.tensors(self.batch)

    # ------------------------------------------------------------------------------------------ the step

    def _result(self) -> dict:
        """Runs the step, which changes the state, and returns its results by their names in `said`."""
        if self._train_step is not None:
            return capsule_file.said_by_step(self._train_step(*self.batch))
        logs, optimizers = FitStep(self.model).run(self._tensors()), self._optimizers()
        # Of one that nothing uses (`super().compile()` gives every GAN a third) no step is skipped.
        return capsule_file.said_in_fit(
            logs, optimizers, any(number(optimizer.last_step_skipped) for optimizer in optimizers)
        )

    def _loss_of_fit(self) -> float:
        """Returns the loss of the batch alone: `fit` logs the mean over the steps that counted."""
        self.model.reset_metrics()
        logs = FitStep(self.model).run(self._tensors())
        self._restore()
        loss = logs.get("loss") if isinstance(logs, dict) else None
        return float("nan") if loss is None else number(loss)

    def _options_of_passes(self) -> dict:
        """Returns the options of `observe` for all passes through the model."""
        model, loss_of = self.model, None
        if self._train_step is not None:
            total = self._train_step._parts.objective.total_loss
            loss_of = lambda y, y_pred, sample_weight: total(y, y_pred, sample_weight, model.losses)  # noqa: E731
        return {"loss_scale": self.loss_scale, "loss_of": loss_of, "paths": self._paths}

    def _op_by_op(self) -> tuple:
        """Returns the step as a function of its state and the batch, to be run op by op, and its state."""
        model = self.model
        if self._train_step is not None:
            step = self._train_step._compiled.op_by_op
            metric_variables = [variable for metric in self._train_step.metrics for variable in metric.variables]
        else:
            # As the guard does: beside the losses of skipped steps, which `metric_states` keeps with a negative count,
            # an infinite loss may be a mean of 0.
            model.reset_metrics()
            step, metric_variables = model.train_step.__wrapped__, model.metrics_variables
        return step, FitStep(model).state(self._optimizers()[0], metric_variables)

    @contextlib.contextmanager
    def _recorded(self, gradients):
        """Context manager: the optimizers collect the gradients that they are given, and update nothing."""

        def apply(grads, trainable_variables=None):
            gradients.extend(grads)

        def stateless_apply(optimizer_variables, grads, trainable_variables):
            gradients.extend(grads)
            return trainable_variables, optimizer_variables

        with contextlib.ExitStack() as stack:
            for optimizer in self._optimizers():
                stack.enter_context(replaced(optimizer, "apply", apply, kind="observed"))
                stack.enter_context(replaced(optimizer, "stateless_apply", stateless_apply, kind="observed"))
            yield

    def _sources(self) -> list:
        """Returns an `Operation` for each array of the batch, then for each weight, that is not finite."""
        sources = []
        for name, part in zip(("x", "y", "sample_weight"), self._data(), strict=True):
            leaves = [np.asarray(leaf) for leaf in keras.tree.flatten(part) if leaf is not None]
            for i, array in enumerate(leaves):
                sources.append(("batch", name if len(leaves) == 1 else f"{name}[{i}]", array))
        sources += [("weight", name, array) for name, array in self.state.items() if name.startswith("model/")]
        return [
            Operation(
                side, None, where, None, array.dtype.name, f"holds {_nonfinite(array)} values that are not finite"
            )
            for side, where, array in sources
            if not is_finite(array)
        ]


def _place(name: str) -> str:
    """Returns the group of a variable and its number in it, as `state_dict` writes them."""
    match = re.match(r"(?:optimizers/\d+/\d+|\w+/\d+)(?=/)", name)
    return match[0] if match else name


def _group(arrays: dict, group: str) -> dict:
    return {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{group}/")}


def _nonfinite(array) -> int:
    return int(np.sum(~np.isfinite(array.astype("float64"))))


def _same(value, then) -> bool:
    # Some backends report a counter as float64 or int64: what it says is the same.
    value = np.asarray(value)
    return then is not None and value.shape == then.shape and value.astype(then.dtype).tobytes() == then.tobytes()


@contextlib.contextmanager
def _watched_layers(model, around):
    """Context manager: each layer's `call` is run by `around(path, call)`, inner ones within outer ones."""

    def replacement(layer):
        call, path = call_of(layer), ConvertedLayer(layer).path

        @functools.wraps(call)
        def watched(*args, **kwargs):
            return around(path, functools.partial(call, *args, **kwargs))

        return watched

    with replaced_calls(capsule_file.computing_layers(model), replacement):
        yield
