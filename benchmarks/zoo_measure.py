"""How wrong one layer gets in 16 bits: runs a case forward and backward in four dtypes and compares.

The same layer with the same weights is run in float64, in float32 and in 16 bits: on inputs of 0, ±1, ±300 and ±6e4
(a sample of +v, then one of -v, ...) and on typical ones (standard normal numbers, or the data of the case). Inputs
are numbers that both 16-bit dtypes have, so that their rounding is not counted against the layer; data "as it comes"
is not, because there the rounding of the input *is* what a layer in 16 bits does to it.

The backward pass is that of a random linear function of everything the layer returns, its losses included; gradients
are taken to the inputs and to the trainable weights.

Error: the largest `|y16 - y64|` of a tensor, divided by the largest `|y64|` of that tensor and by the epsilon of the
compute dtype (2^-10 for float16, 2^-7 for bfloat16). A single rounding to nearest is at most 0.5. Where float32 itself
is off by more than a quarter of that epsilon, as in a tensor that is rounding noise around 0, no error is given.
Layers that draw random numbers are compared with float32, as they draw others in float64, and so are those that have
no float64 kernel.
"""

import keras
import numpy as np

from zoo_cases import CASES, NOT_RUN
from zoo_runner import Runner, make_inputs

# How wrong a layer may get on typical inputs, by its family, in epsilons of the compute dtype. One rounding is 0.5; in
# the gradient several add up.
BOUNDS = {
    "moves": 0.75,
    "elementwise": 1.5,
    "products": 4.0,
    "averages": 0.75,
    "normalization": 1.0,
    "recurrent": 4.0,
    "attention": 4.0,
    "random": 1.0,
    # Data as it comes: nothing of it is to be rounded to 16 bits at all.
    "data": 0.05,
}
# Sums whose terms cancel, so that what is left is small beside its rounding.
WIDER_BOUNDS = {"Attention[concat]": 60.0, "Bidirectional": 30.0}
# `2^-mantissa bits` and the largest finite number.
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
MODES = ("bare", "rules")


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
    return class_name(name) != "Activation" or not variant or hasattr(keras.activations, variant.partition(",")[0])


def bound(case: str) -> float:
    """Returns the error that the case called `case` may show on typical inputs, in epsilons."""
    return WIDER_BOUNDS.get(case, BOUNDS[CASES[case].family])


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
    difference = float(np.abs(sixteen[judged] - reference[judged]).max())
    of_float32 = float(np.abs(float32[judged] - reference[judged]).max())
    found["moved"] = difference
    if of_float32 <= 0.25 * EPSILON[dtype] * scale:
        # Where everything is 0 and ought to be, no scale is needed.
        found["error"] = difference / ((scale or 1.0) * EPSILON[dtype])
    return found


def measure_case(name: str, dtypes=tuple(EPSILON), modes=MODES, reference: str = "float64") -> list[dict]:
    """Returns one result per dtype and mode of the case called `name`.

    The modes are `"bare"`, the layer wholly in 16 bits, and `"rules"`, with the default rules applied. Where two runs
    would be the same arithmetic, one is made.

    Args:
        name: A key of `CASES`.
        dtypes: Compute dtypes, `"float16"` and `"bfloat16"`.
        modes: Out of `MODES`.
        reference: What the errors are taken against, `"float64"` or, to save a run, `"float32"`.
    """
    case = CASES[name]
    data = make_inputs(case)
    single = Runner(case, "float32")
    double = single if case.draws or reference == "float32" else _in_float64(case, single, data)
    results = []
    for dtype in dtypes:
        runners = [single]
        for mode in modes:
            result = {"case": name, "family": case.family, "dtype": dtype, "mode": mode, "rules": []}
            results.append(result)
            try:
                runner = Runner(case, f"mixed_{dtype}", single.weights(), rules=mode == "rules")
                result["rules"] = sorted({change.rule for change in runner.applied})
                runner = next((earlier for earlier in runners if runner.computes_as(earlier)), runner)
                runners.append(runner)
                result.update(_summary(case, data, runner, single, double, dtype))
            except Exception as error:  # Each backend has its own for a kernel that it lacks.
                result["raises"] = _first_line(error)
    return results


def refused_by_xla(name: str, dtype: str) -> str | None:
    """Returns how XLA on TensorFlow refuses a training step of the case called `name` with the default rules.

    `None` where it takes it, or refuses float32 as well.
    """
    case = CASES[name]
    inputs = make_inputs(case)["typical"]
    try:
        Runner(case, f"mixed_{dtype}", rules=True).run_under_xla(inputs)
    except Exception as error:  # XLA has several.
        message = _first_line(error)
    else:
        return None
    try:
        Runner(case, "float32").run_under_xla(inputs)
    except Exception:  # No remedy, then.
        return None
    return message


def _in_float64(case, single, data) -> Runner:
    """Returns the float64 runner of `case`, or `single` where a layer has no float64 kernel."""
    try:
        double = Runner(case, "float64", single.weights())
        double.run_all(data)
    except Exception:  # Each backend has its own; the run in 16 bits, if at fault too, says so itself.
        return single
    return double


def _first_line(error) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _summary(case, data, runner, single, double, dtype):
    result = {"errors": {}, "nonfinite": [], "outside": [], "moved": 0.0}
    if runner is single is double:
        # Float32 throughout, compared with itself.
        return {**result, "errors": {given: {"output": 0.0} for given in data}}
    found, float32, reference = (each.run_all(data) for each in (runner, single, double))
    for given, arrays in found.items():
        result["errors"][given] = errors = {}
        for part in ("output", "gradient"):
            triples = zip(arrays[part], float32[given][part], reference[given][part], strict=True)
            tensors = [compare(*triple, dtype) for triple in triples]
            judged = [tensor["error"] for tensor in tensors if tensor["error"] is not None]
            # At constant inputs many gradients are 0 but for rounding: an error relative to them says nothing.
            # Of their outputs, what stays below one epsilon is not kept.
            is_kept = given == "typical" or part == "output" and judged and max(judged) >= 1
            if judged and case.family != "random" and is_kept:
                errors[part] = float(f"{max(judged):.3g}")
            if any(tensor["range"] for tensor in tensors):
                result["outside"].append(f"{part} at {given}")
            # What leaves the range on the way out comes back as inf or NaN: one cause, listed once.
            is_lost = any(tensor["nonfinite"] for tensor in tensors)
            if is_lost and f"output at {given}" not in result["outside"]:
                result["nonfinite"].append(f"{part} at {given}")
            if given == "typical" and part == "output":
                result["moved"] = max((tensor["moved"] for tensor in tensors), default=0.0)
    return result
