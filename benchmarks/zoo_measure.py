"""How wrong one layer gets in 16 bits: runs a case forward and backward in four dtypes and compares.

The same layer with the same weights is run in float64, in float32 and in 16 bits: on inputs of 0, ±1, ±300 and ±6e4
(a sample of +v, then one of -v, ...) and on typical ones (standard normal numbers, or the data of the case). Inputs
are numbers that both 16-bit dtypes have, so that their rounding is not counted against the layer; data "as it comes"
is not, because there the rounding of the input *is* what a layer in 16 bits does to it.

The backward pass is that of a random linear function of everything the layer returns, its losses included; gradients
are taken to the inputs and to the trainable weights.

Error: the largest `|y16 - y64|` of a tensor, divided by the largest `|y64|` of that tensor and by the epsilon of the
compute dtype (2^-10 for float16, 2^-7 for bfloat16). A single rounding to nearest is at most 0.5. Where float32 itself
is off by more than 1%, the tensor is rounding noise around 0 and no error is given. Layers that draw random numbers
are compared with float32, as they draw others in float64.
"""

import contextlib
import importlib
import inspect

import keras
import numpy as np
from keras import ops, tree
from zoo_cases import CASES, NOT_RUN, Case

import mpkeras
from mpkeras.policies.rules import apply_rules

# `2^-mantissa bits` and the largest finite number.
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
# 6e4, rounded to a number that bfloat16 has as well.
CONSTANTS = {"0": 0.0, "±1": 1.0, "±300": 300.0, "±6e4": 59904.0}


def layer_classes() -> list[str]:
    """Returns the name of every layer class of `keras.layers`; of several names, the class's own if it is there."""
    names = {}
    for name, value in vars(keras.layers).items():
        if isinstance(value, type) and issubclass(value, keras.layers.Layer):
            names[value] = value.__name__ if hasattr(keras.layers, value.__name__) else name
    return sorted(names.values())


def class_name(case: str) -> str:
    """Returns the layer class of the case named `case`."""
    return case.partition("[")[0]


def unknown_classes() -> list[str]:
    """Returns the classes of the installed Keras that have neither a case nor a reason."""
    known = {class_name(name) for name in CASES} | set(NOT_RUN)
    return [name for name in layer_classes() if name not in known]


def runnable_cases() -> list[str]:
    """Returns the cases whose class, and activation, the installed Keras has."""
    known = set(layer_classes())
    return [name for name in CASES if class_name(name) in known and _has_activation(name)]


def _has_activation(name: str) -> bool:
    variant = name.partition("[")[2].rstrip("]")
    return class_name(name) != "Activation" or not variant or hasattr(keras.activations, variant)


def make_inputs(case: Case, seed: int = 0) -> dict[str, list[np.ndarray]]:
    """Returns `{name of the data: arrays}`, one array per input of the case."""
    if case.kind == "ids":
        return {"typical": [_random(seed).integers(0, 10, shape).astype("int32") for shape in case.shapes]}
    data = {"typical": [_typical(case.kind, shape, _random(seed + place)) for place, shape in enumerate(case.shapes)]}
    if case.kind in ("offset", "large"):
        return data
    for name, value in CONSTANTS.items():
        data[name] = [_constant(value, shape) for shape in case.shapes]
    return data


def _random(seed):
    return np.random.default_rng(seed)


def _constant(value, shape):
    signs = np.where(np.arange(shape[0]) % 2, -1.0, 1.0).reshape(-1, *[1] * (len(shape) - 1))
    return np.broadcast_to(signs * value, shape).astype("float32")


def _typical(kind, shape, random):
    if kind == "pixels":
        return random.uniform(0, 255, shape).astype("float32")
    if kind == "large":
        return random.normal(7e4, 1e3, shape).astype("float32")
    if kind == "offset":
        return random.normal(300, 1, shape).astype("float32")
    if kind == "wave":
        return random.uniform(-1, 1, shape).astype("float32")
    return to_both_16_bit_dtypes(random.normal(size=shape))


def to_both_16_bit_dtypes(values) -> np.ndarray:
    """Returns `values` as float32 with 8 significant bits: float16 and bfloat16 both have those numbers."""
    mantissas, exponents = np.frexp(np.asarray(values, "float64"))
    return np.ldexp(np.round(mantissas * 256) / 256, exponents).astype("float32")


@contextlib.contextmanager
def _global_dtype(policy: str):
    """Makes `policy` global; `float64` with everything a backend needs for it."""
    old_policy, old_floatx = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_dtype_policy(policy)
    try:
        if policy != "float64":
            yield
            return
        keras.config.set_floatx("float64")
        if keras.backend.backend() == "jax":
            jax = importlib.import_module("jax")
            # JAX up to 0.7 has it among its experiments.
            holder = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
            with holder.enable_x64(True):
                yield
        else:
            yield
    finally:
        keras.config.set_floatx(old_floatx)
        keras.config.set_dtype_policy(old_policy)


class Runner:
    """One layer under one policy, run as often as there are inputs.

    Args:
        case: What to make and how to call it.
        policy: `"float64"`, `"float32"`, `"mixed_float16"` or `"mixed_bfloat16"`.
        weights: Values for its variables, from `weights()` of another one; by default its own.
        rules: Whether the default rules of the policy are applied.
    """

    def __init__(self, case: Case, policy: str, weights=None, rules: bool = False):
        self.case, self.policy = case, policy
        # In a model, what comes into a layer was computed by one in 16 bits; data as it comes is float32.
        self.input_dtype = "float64" if policy == "float64" else "float32"
        if policy.startswith("mixed_") and case.kind == "float":
            self.input_dtype = policy.removeprefix("mixed_")
        keras.utils.set_random_seed(1)
        with _global_dtype(policy):
            self.layer = case.make(keras.layers)
            typical = make_inputs(case)["typical"]
            if keras.backend.backend() == "jax":
                # Traced, not run: operation by operation JAX would compile each one.
                self._call([keras.KerasTensor(values.shape, self._dtype(values)) for values in typical])
            else:
                self._call([self._tensor(values) for values in typical])
            for variable, value in zip(self.layer.variables, weights or [], strict=weights is not None):
                variable.assign(value.astype(variable.dtype))
            self.applied = apply_rules(self.layer, mpkeras.Policy(policy)) if rules else []
            self.state = [v for v in self.layer.non_trainable_variables]
            self._run = self._compiled()

    def weights(self) -> list[np.ndarray]:
        return [keras.ops.convert_to_numpy(variable.value) for variable in self.layer.variables]

    def run(self, inputs: list[np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Returns `{"output": arrays, "gradient": arrays}` as float64; what is no float is left out."""
        with _global_dtype(self.policy):
            outputs, gradients = self._run([self._tensor(values) for values in inputs])
            arrays = {"output": [_to_numpy(value) for value in outputs]}
            arrays["gradient"] = [_to_numpy(value) for value in gradients if value is not None]
        return arrays

    def _dtype(self, values):
        return self.input_dtype if values.dtype == np.float32 else str(values.dtype)

    def _tensor(self, values):
        return ops.convert_to_tensor(values, self._dtype(values))

    def _call(self, tensors):
        call = self.case.call or (lambda layer, inputs, **options: layer(_one_or_all(inputs), **options))
        options = {name: _to_tensors(value) for name, value in self.case.options.items()}
        if "training" in inspect.signature(self.layer.call).parameters:
            options["training"] = True
        return call(self.layer, tensors, **options)

    def _forward(self, trainable, inputs):
        """Returns everything float that the layer gives: outputs, losses, and its state after the call."""
        layer = self.layer
        mapping = list(zip(layer.trainable_variables, trainable, strict=True))
        mapping += [(variable, variable.value) for variable in self.state]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            outputs = tree.flatten(self._call(inputs)) + list(layer.losses)
            outputs += [scope.get_current_value(variable) for variable in self.state]
        return [output for output in outputs if "float" in keras.backend.standardize_dtype(output.dtype)]

    def _functional(self, trainable, inputs):
        """Returns a scalar, a random linear function of `_forward`, and `_forward`."""
        outputs = self._forward(trainable, inputs)
        dtype = "float64" if self.policy == "float64" else "float32"
        total = ops.zeros((), dtype)
        for place, output in enumerate(outputs):
            factors = to_both_16_bit_dtypes(_random(100 + place).normal(size=tuple(output.shape)))
            total += ops.sum(ops.cast(output, dtype) * ops.convert_to_tensor(factors, dtype))
        return total, outputs

    def _compiled(self):
        """Returns a function from input tensors to `(outputs, gradients)`."""
        trainable = [variable.value for variable in self.layer.trainable_variables]
        has_inputs = self.case.kind != "ids"
        backend = keras.backend.backend()
        if self.case.family == "data":
            # Nobody differentiates through data preparation, and much of it has no derivative.
            forward = self._forward
            if backend == "jax":
                forward = importlib.import_module("jax").jit(forward)
            return lambda inputs: (forward(trainable, inputs), [])
        if backend == "jax":
            jax = importlib.import_module("jax")
            arguments = (0, 1) if has_inputs else 0
            gradients_of = jax.jit(jax.grad(self._functional, argnums=arguments, has_aux=True))

            def run(inputs):
                gradients, outputs = gradients_of(trainable, inputs)
                return outputs, tree.flatten(gradients)

        elif backend == "tensorflow":
            tf = importlib.import_module("tensorflow")

            def run(inputs):
                variables = [tf.convert_to_tensor(value) for value in trainable]
                sources = variables + (inputs if has_inputs else [])
                with tf.GradientTape() as tape:
                    tape.watch(sources)
                    total, outputs = self._functional(variables, inputs)
                gradients = tape.gradient(total, sources)
                return outputs, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

        else:
            torch = importlib.import_module("torch")

            def run(inputs):
                variables = [value.detach().clone().requires_grad_() for value in trainable]
                inputs = [value.detach().clone().requires_grad_() for value in inputs] if has_inputs else inputs
                total, outputs = self._functional(variables, inputs)
                sources = variables + (inputs if has_inputs else [])
                return outputs, torch.autograd.grad(total, sources, allow_unused=True)

        return run


def _one_or_all(inputs):
    return inputs[0] if len(inputs) == 1 else inputs


def _to_tensors(value):
    if isinstance(value, list):
        return [_to_tensors(entry) for entry in value]
    return ops.convert_to_tensor(value) if isinstance(value, np.ndarray) else value


def _to_numpy(value):
    return np.asarray(ops.convert_to_numpy(ops.cast(value, _readable(value))), "float64")


def _readable(value):
    dtype = keras.backend.standardize_dtype(value.dtype)
    return "float32" if dtype in EPSILON else dtype


def compare(sixteen, float32, reference, dtype: str) -> dict:
    """Returns the error of one tensor in units of `dtype`'s epsilon, and what became of its range.

    Returns:
        `{"error": float or None, "moved": float, "nonfinite": bool, "range": bool}`: `moved` is the largest difference,
        `nonfinite` whether a number that float32 has, within the range of `dtype`, is inf or NaN; `range` whether
        float32 itself leaves that range.
    """
    finite = np.isfinite(float32) & np.isfinite(reference)
    outside = finite & (np.abs(float32) > LARGEST[dtype] * (1 - EPSILON[dtype]))
    lost = finite & ~outside & ~np.isfinite(sixteen)
    judged = finite & np.isfinite(sixteen)
    found = {"nonfinite": bool(lost.any()), "range": bool(outside.any()), "error": None, "moved": 0.0}
    if not judged.any():
        return found
    scale = float(np.abs(reference[judged]).max())
    difference = float(np.abs(sixteen - reference)[judged].max())
    of_float32 = float(np.abs(float32 - reference)[judged].max())
    found["moved"] = difference
    if of_float32 <= 0.01 * scale:
        # Where everything is 0 and ought to be, no scale is needed.
        found["error"] = difference / ((scale or 1.0) * EPSILON[dtype])
    return found


def measure_case(name: str, dtypes=tuple(EPSILON)) -> list[dict]:
    """Returns one result per dtype and mode of the case called `name`.

    The modes are `"bare"`, the layer wholly in 16 bits, and `"rules"`, with the default rules applied; where those
    change nothing, the two are the same run.
    """
    case = CASES[name]
    data = make_inputs(case)
    single = Runner(case, "float32")
    weights = single.weights()
    float32 = {given: single.run(inputs) for given, inputs in data.items()}
    reference = float32
    if not case.draws:
        with contextlib.suppress(*_NO_FLOAT64):
            double = Runner(case, "float64", weights)
            reference = {given: double.run(inputs) for given, inputs in data.items()}
    results = []
    for dtype in dtypes:
        for mode in ("bare", "rules"):
            result = {"case": name, "family": case.family, "dtype": dtype, "mode": mode, "rules": []}
            try:
                runner = Runner(case, f"mixed_{dtype}", weights, rules=mode == "rules")
                result["rules"] = sorted({change.rule for change in runner.applied})
                if mode == "rules" and not runner.applied and "raises" not in results[-1]:
                    results.append({**results[-1], "mode": "rules"})
                    continue
                found = {given: runner.run(inputs) for given, inputs in data.items()}
            except Exception as error:  # Each backend has its own for a kernel that it lacks.
                lines = str(error).strip().splitlines() or [""]
                results.append({**result, "raises": f"{type(error).__name__}: {lines[0][:200]}"})
                continue
            results.append({**result, **_summary(case, found, float32, reference, dtype)})
    return results


def _summary(case, found, float32, reference, dtype):
    errors, nonfinite, outside, moved = {}, [], [], 0.0
    for given, arrays in found.items():
        errors[given] = {}
        for part in ("output", "gradient"):
            triples = zip(arrays[part], float32[given][part], reference[given][part], strict=True)
            tensors = [compare(*triple, dtype) for triple in triples]
            judged = [tensor["error"] for tensor in tensors if tensor["error"] is not None]
            if judged and case.family != "random":
                errors[given][part] = max(judged)
            if any(tensor["range"] for tensor in tensors):
                outside.append(f"{part} at {given}")
            if any(tensor["nonfinite"] for tensor in tensors):
                # What leaves the range on the way out comes back as inf or NaN: one cause, listed once.
                if f"output at {given}" not in outside:
                    nonfinite.append(f"{part} at {given}")
            if given == "typical" and part == "output":
                moved = max((tensor["moved"] for tensor in tensors), default=0.0)
    return {"errors": errors, "nonfinite": nonfinite, "outside": outside, "moved": moved}
