"""Runs one layer of the zoo, forward and backward, under one policy on the active backend."""

import contextlib
import importlib
import inspect

import keras
import numpy as np
from keras import ops, tree

import mpkeras
from mpkeras import _keras
from mpkeras.conversion.plan import plan
from mpkeras.policies.rules import set_layer_policy
from zoo_cases import Case

# 6e4, rounded to a number that bfloat16 has as well.
CONSTANTS = {"0": 0.0, "±1": 1.0, "±300": 300.0, "±6e4": 59904.0}


# Factor on the gradient that comes from above, by the data; elsewhere 2^-10. A gradient that leaves float16 only for
# its own size comes back when the loss scale backs off: at large inputs what counts is what no scale cures.
_UPSTREAM = {"typical": 1.0}
# The machine code is optimized less, which changes no result and halves the time; what XLA fuses stays fused.
_QUICK_COMPILING = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def make_inputs(case: Case, seed: int = 0) -> dict[str, list[np.ndarray]]:
    """Returns `{name of the data: arrays}`, one array per input of the case."""
    if case.kind == "ids":
        return {"typical": [_random(seed).integers(0, 10, shape).astype("int32") for shape in case.shapes]}
    data = {"typical": [_typical(case.kind, shape, _random(seed + place)) for place, shape in enumerate(case.shapes)]}
    if case.kind in ("offset", "large", "logits", "names"):
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
    if kind == "logits":
        return np.array([[15, 0], [20, 0], [-29.875, 30.25], [10, 0]], "float32")
    if kind == "offset":
        return random.normal(300, 1, shape).astype("float32")
    if kind == "names":
        # Each step of one number alone: it is masked where that is the mask's.
        return np.broadcast_to(random.integers(2041, 2056, (*shape[:-1], 1)), shape).astype("float32")
    if kind == "wave":
        return random.uniform(-1, 1, shape).astype("float32")
    return to_both_16_bit_dtypes(random.normal(size=shape))


def to_both_16_bit_dtypes(values) -> np.ndarray:
    """Returns `values` as float32 with 8 significant bits: float16 and bfloat16 both have those numbers."""
    mantissas, exponents = np.frexp(np.asarray(values, "float64"))
    return np.ldexp(np.round(mantissas * 256) / 256, exponents).astype("float32")


def _apply_rules(layer, policy: str) -> list:
    """Moves what `policy` keeps in float32 there. Returns the rows of the plan."""
    rows = [row for row in plan(layer, mpkeras.Policy(policy)) if row.after is not row.before]
    for row in rows:
        set_layer_policy(row.layer, row.after)
    return rows


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
        self.case, self.policy, self._found = case, policy, None
        # In a model, what comes into a layer was computed by one in 16 bits; data as it comes is float32.
        self.input_dtype = "float64" if policy == "float64" else "float32"
        if policy.startswith("mixed_") and case.kind in ("float", "logits"):
            self.input_dtype = policy.removeprefix("mixed_")
        keras.utils.set_random_seed(1)
        with _global_dtype(policy):
            self.layer = case.make(keras.layers)
            typical = make_inputs(case)["typical"]
            # Before the first call, for its operation may lack a kernel; and after it, for layers that it makes.
            self.applied = _apply_rules(self.layer, policy) if rules else []
            if case.family == "data" and case.draws:
                pass  # Without weights, and slow to trace.
            elif keras.backend.backend() == "jax" or case.family == "normalization":
                # Traced, not run: operation by operation JAX would compile each one, and normalization layers would
                # change their statistics, and kernels, before they are copied.
                self._call([keras.KerasTensor(values.shape, self._dtype(values)) for values in typical])
            else:
                self._call([self._tensor(values) for values in typical])
            for variable, value in zip(self.layer.variables, weights or [], strict=bool(weights)):
                variable.assign(value.astype(variable.dtype))
            self.applied += _apply_rules(self.layer, policy) if rules else []
            self.state = list(self.layer.non_trainable_variables)
            self._run = self._compiled()

    def computes_as(self, other: "Runner") -> bool:
        """Returns whether both run the same arithmetic on the same inputs, so that one run is enough."""
        return self._dtypes() == other._dtypes()

    def _dtypes(self):
        layers = _keras.flatten_layers(self.layer, include_self=True)
        # A wrapper such as `TimeDistributed` lends its own policy to the layer inside; both are in the list.
        return self.input_dtype, [layer.compute_dtype for layer in layers]

    def weights(self) -> list[np.ndarray]:
        return [keras.ops.convert_to_numpy(variable.value) for variable in self.layer.variables]

    def run_all(self, data: dict[str, list[np.ndarray]]) -> dict[str, dict[str, list[np.ndarray]]]:
        """Returns `run` of every entry of `data`; what it was the first time, when called again."""
        if self._found is None:
            self._found = self._run_each(data)
        return self._found

    def _run_each(self, data):
        return {given: self.run(inputs, _UPSTREAM.get(given, 2.0**-10)) for given, inputs in data.items()}

    def run(self, inputs: list[np.ndarray], upstream: float = 1.0) -> dict[str, list[np.ndarray]]:
        """Returns `{"output": arrays, "gradient": arrays}` as float64; what is no float is left out."""
        with _global_dtype(self.policy):
            scale = ops.convert_to_tensor(upstream, "float64" if self.policy == "float64" else "float32")
            outputs, gradients = self._run([self._tensor(values) for values in inputs], scale)
            arrays = {"output": [_to_numpy(value) for value in outputs]}
            arrays["gradient"] = [_to_numpy(value) for value in gradients if value is not None]
        return arrays

    def run_under_xla(self, inputs: list[np.ndarray]):
        """Compiles the forward and backward pass by XLA on TensorFlow, and runs it.

        Each input comes from a `relu`, as behind a convolution: its gradient is where XLA meets a dtype that is not
        the one that it was promised.
        """
        tf = importlib.import_module("tensorflow")
        trainable = [variable.value for variable in self.layer.trainable_variables]

        @tf.function(jit_compile=True, autograph=False)
        def step(trainable, inputs):
            floats = [values for values in inputs if values.dtype.is_floating]
            with tf.GradientTape() as tape:
                tape.watch([*trainable, *floats])
                given = [tf.nn.relu(values) if values.dtype.is_floating else values for values in inputs]
                total, outputs = self._functional(trainable, given, 1.0)
            return outputs, tape.gradient(total, [*trainable, *floats])

        with _global_dtype(self.policy):
            step(trainable, [self._tensor(values) for values in inputs])

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
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = tree.flatten(self._call(inputs)) + list(layer.losses)
            outputs += [scope.get_current_value(variable) for variable in self.state]
        return [output for output in outputs if "float" in keras.backend.standardize_dtype(output.dtype)]

    def _functional(self, trainable, inputs, scale):
        """Returns a scalar, a random linear function of `_forward` times `scale`, and `_forward`."""
        outputs = self._forward(trainable, inputs)
        dtype = "float64" if self.policy == "float64" else "float32"
        total = ops.zeros((), dtype)
        for place, output in enumerate(outputs):
            factors = to_both_16_bit_dtypes(_random(100 + place).normal(size=tuple(output.shape)))
            total += ops.sum(ops.cast(output, dtype) * ops.convert_to_tensor(factors, dtype))
        return total * scale, outputs

    def _compiled(self):
        """Returns a function from input tensors to `(outputs, gradients)`."""
        trainable = [variable.value for variable in self.layer.trainable_variables]
        has_inputs = self.case.kind != "ids"
        backend = keras.backend.backend()
        if self.case.family == "data":
            # Nobody differentiates through data preparation, much of it has no derivative, and some no `jit`.
            return lambda inputs, scale: (self._forward(trainable, inputs), [])
        if backend == "jax":
            jax = importlib.import_module("jax")
            arguments = (0, 1) if has_inputs else 0
            gradients_of = jax.grad(self._functional, argnums=arguments, has_aux=True)
            gradients_of = jax.jit(gradients_of, compiler_options=_QUICK_COMPILING)

            def run(inputs, scale):
                gradients, outputs = gradients_of(trainable, inputs, scale)
                return outputs, tree.flatten(gradients)

        elif backend == "tensorflow":
            tf = importlib.import_module("tensorflow")

            def run(inputs, scale):
                variables = [tf.convert_to_tensor(value) for value in trainable]
                sources = variables + (inputs if has_inputs else [])
                with tf.GradientTape() as tape:
                    tape.watch(sources)
                    total, outputs = self._functional(variables, inputs, scale)
                gradients = tape.gradient(total, sources)
                return outputs, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

        else:
            torch = importlib.import_module("torch")

            def run(inputs, scale):
                variables = [value.detach().clone().requires_grad_() for value in trainable]
                inputs = [value.detach().clone().requires_grad_() for value in inputs] if has_inputs else inputs
                total, outputs = self._functional(variables, inputs, scale)
                sources = variables + (inputs if has_inputs else [])
                if not sources:
                    return outputs, []
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
    return "float32" if dtype in ("float16", "bfloat16") else dtype
