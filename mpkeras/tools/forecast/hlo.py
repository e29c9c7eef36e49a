"""Reads a program as XLA compiled it: matrix products by dtype, what devices tell each other, and who waits for whom.

The text is that of `HloModule::ToString`: https://openxla.org/xla/operation_semantics says what the operations mean.
"""

import dataclasses
import functools
import math
import re
from collections import Counter, defaultdict

import numpy as np

_DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "bf16": "bfloat16",
    "f16": "float16",
    "s32": "int32",
    "u32": "uint32",
    "s8": "int8",
    "u8": "uint8",
    "pred": "bool",
}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# Such as f32[8,<=4]; beside arrays there are tokens and opaque values.
_ARRAY = re.compile(r"\b(pred|(?:b?f|[suc])\d\w*)\[([\d,<=]*)\]")
_HEADING = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Of an operation of XLA: lhs_contracting_dims={1}; of a call of cuBLAS: "lhs_contracting_dimensions":["1"].
_CONTRACTED = re.compile(r'\blhs_contracting_dim(?:s=\{|ensions":\[)([^\]}]*)')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# Such as dot_bf16_bf16_f32; dot_bf16_bf16_f32_x3 multiplies three times, for float32's precision.
_ALGORITHM = re.compile(r"\balgorithm\"?[=:]\"?(?:ALG_)?dot_(bf16|f16)_\1_f32\b(?!_)", flags=re.IGNORECASE)
# How `mpkeras.distribution` calls the operations that gather a weight and that make its gradient.
_WEIGHT = {
    "all-gather": re.compile(r"mpkeras_gather\(([^()]*)\)"),
    "all-reduce": re.compile(r"mpkeras_reduce\(([^()]*)\)"),
}
_WEIGHT["reduce-scatter"] = _WEIGHT["all-reduce"]
# How JAX calls what a step takes: the values of the weights are in the first list of the state.
_PARAMETER = re.compile(r'op_name="state\[0\]\[(\d+)\]"')
# Operations that hand on what they are given.
_PASSED_ON = ("bitcast", "convert", "copy", "reshape", "transpose")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass
class Instruction:
    """One line of a program: `name = type operation(operands), attributes`."""

    name: str
    type: str
    operation: str
    operands: list
    attributes: str

    @functools.cached_property
    def arrays(self) -> list:
        """`(HLO's name of the dtype, shape)` of each array of the result."""
        return [
            (dtype, tuple(int(n.lstrip("<=")) for n in sizes.split(",") if n))
            for dtype, sizes in _ARRAY.findall(self.type)
        ]

    @functools.cached_property
    def called(self) -> list:
        """The names of the computations that it calls."""
        return re.findall(r"[\w.\-]+", " ".join(_CALLED.findall(self.attributes)))

    @property
    def target(self) -> str:
        """The function of a library that is called; `""` where none is."""
        match = _TARGET.search(self.attributes) if self.operation == "custom-call" else None
        return match[1] if match else ""


@dataclasses.dataclass
class Program:
    """The contents of a compiled program.

    Attributes:
        matrix_flops: `{dtype of the operands: FLOP}` of matrix products and convolutions, a multiplication and an
            addition counted as two, those in loops as often as the loop runs. The dtype is the one that is multiplied.
        products: `{dtype of the operands: number of products}`, each once, wherever it stands.
        collectives: `[{"kind", "dtype", "bytes", "tensors"}]`, summed by kind and dtype; bytes of the results on one
            device, those in loops as often as the loop runs. `tensors` are `{weight: bytes}`: the path of the weight
            that is gathered or whose gradient is summed, and `""` for anything else.
        conditionals: Number of branches.
        host_transfers: Number of operations that wait for the host or hand it something.
        loops_of_unknown_length: Number of loops with products that do not say how often they run; those count once.
        float8_call_flops: FLOP of the products that cuBLASLt is called for with float8 operands: those that are sure to
            be computed in float8. XLA's own fusions may widen such operands on the way to the units.
    """

    matrix_flops: dict
    products: dict
    collectives: list
    conditionals: int = 0
    host_transfers: int = 0
    loops_of_unknown_length: int = 0
    float8_call_flops: int = 0


def read_program(text: str, weights=()) -> Program:
    """Returns what is in the HLO text of a compiled module; `ValueError` where a product cannot be counted.

    Args:
        text: The text.
        weights: The paths of the weights that the program trains, in the order in which it takes them: first of all.
    """
    computations, entry = parse(text)
    flops_by_dtype: Counter = Counter()
    products: Counter = Counter()
    exchanged: defaultdict = defaultdict(Counter)
    sources = _Sources(computations, weights)
    program = Program({}, {}, [])
    seen: set = set()

    def count(name, times) -> bool:
        """Counts a computation that runs `times` times, and those that it calls; returns whether they multiply."""
        is_new = name not in seen
        seen.add(name)
        multiplies = False
        types = {instruction.name: instruction.arrays for instruction in computations[name]}
        for instruction in computations[name]:
            operands = [array for operand in instruction.operands for array in types.get(operand, [])]
            flops = _flops(instruction, operands)
            if flops is not None:
                multiplies = True
                dtype = _multiplied_in(instruction, operands)
                flops_by_dtype[dtype] += flops * times
                products[dtype] += is_new
                program.float8_call_flops += flops * times * (instruction.target == "__cublas$lt$matmul$f8")
            if is_new:
                program.conditionals += instruction.operation == "conditional"
                program.host_transfers += _is_host_transfer(instruction)
            for (kind, dtype), number, moved in _exchanged(instruction):
                sent = sources.bytes_by_weight(name, instruction, kind, number, moved)
                exchanged[kind, dtype].update({path: part * times for path, part in sent.items()})
            is_loop = instruction.operation == "while"
            trips = _TRIPS.search(instruction.attributes) if is_loop else None
            rounds = times * (int(trips[1]) if trips else 1)
            inside = [count(inner, rounds) for inner in instruction.called if inner in computations]
            program.loops_of_unknown_length += is_loop and trips is None and any(inside)
            multiplies = multiplies or any(inside)
        return multiplies

    count(entry, 1)
    program.matrix_flops, program.products = dict(sorted(flops_by_dtype.items())), dict(sorted(products.items()))
    program.collectives = [
        {"kind": kind, "dtype": dtype, "bytes": sum(tensors.values()), "tensors": dict(sorted(tensors.items()))}
        for (kind, dtype), tensors in sorted(exchanged.items())
    ]
    return program


def parse(text: str) -> tuple[dict, str]:
    """Returns `({computation: [Instruction]}, name of the entry)`. Raises `ValueError` where there is no entry."""
    computations: dict = {}
    entry = current = None
    for line in text.splitlines():
        heading = _HEADING.match(line)
        if heading:
            current = computations.setdefault(heading[2], [])
            entry = heading[2] if heading[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            current.append(_instruction(line))
    if entry is None:
        raise ValueError(f"Expected the text of an HLO module. Received: {text[:80]!r}, without an entry.")
    return computations, entry


def _instruction(line: str) -> Instruction:
    name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    begin = rest.index("(")
    end = _closing(rest, begin)
    operands = re.findall(r"%([\w.\-]+)", rest[begin:end])
    return Instruction(name.lstrip("%"), kind, rest[:begin], operands, rest[end + 1 :])


def _closing(text: str, begin: int) -> int:
    """Returns the index of the bracket that closes the one at `begin`."""
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"Expected brackets that close. Received: {text[:80]!r}.")


def _name(dtype: str) -> str:
    return "float8" if dtype.startswith("f8e") else _DTYPES.get(dtype, dtype)


def _bits_of(dtype: str) -> int:
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8


class _Sources:
    """Finds the weights that a collective is for, by the names of the operations that make what it sends.

    Args:
        computations: As `parse` returns them.
        weights: The paths of the weights, in the order in which the program takes them.
    """

    def __init__(self, computations: dict, weights):
        self._by_name = {name: {i.name: i for i in inside} for name, inside in computations.items()}
        self._weights = weights

    def bytes_by_weight(self, computation: str, collective, kind: str, number: int, moved: int) -> dict:
        """Returns `{path: bytes}` of one array that a collective sends; `""` is what belongs to no weight.

        Args:
            computation: The name of the computation that it is in.
            collective: The `Instruction`.
            kind: Its kind, such as `"all-gather"`.
            number: Which of its operands the array is.
            moved: The bytes of the array.
        """
        named = _WEIGHT.get(kind)
        if named is None:
            return {"": moved}
        known = self._by_name[computation]
        operand = known.get((collective.operands[number : number + 1] or collective.operands[:1] or [""])[0])
        parts = self._parts(computation, operand)
        if len(parts) == 1:
            path = self._made_by(computation, operand, named)
            if not path and len(collective.operands) == 1:
                path = "".join(named.findall(collective.attributes)[:1])
            if not path and kind == "all-gather":
                path = self._updated(computation, operand, collective.arrays[-1])
            return {path: moved}
        bytes_of: Counter = Counter()
        for part in parts:
            sizes = [] if part is None else part.arrays
            # Single numbers are sums that tell whether a gradient is finite, not gradients.
            if sum(math.prod(shape) for _, shape in sizes) > 1:
                sent = sum(math.prod(shape) * _bits_of(dtype) // 8 for dtype, shape in sizes)
                bytes_of[self._made_by(computation, part, named)] += sent
        bytes_of[""] += moved - sum(bytes_of.values())
        return +bytes_of

    def _parts(self, computation: str, instruction) -> list:
        """Returns the instructions that make the parts of an array: one, but of what puts several arrays into one."""
        if instruction is None:
            return [None]
        inside = list(self._by_name.get((instruction.called or [""])[0], {}).values())
        if instruction.operation == "concatenate" or inside and inside[-1].operation == "concatenate":
            return [self._by_name[computation].get(name) for name in instruction.operands]
        return [instruction]

    def _updated(self, computation: str, instruction, result) -> str:
        """Returns the path of the weight whose next value an instruction makes of its present one; `""` of others."""
        known = self._by_name[computation]
        names = [] if instruction is None else [name for name in instruction.operands if name in known]
        for taken in [known[name] for name in names]:
            number = _PARAMETER.search(taken.attributes)
            if number is not None and int(number[1]) < len(self._weights) and taken.arrays[0][1] == result[1]:
                return self._weights[int(number[1])]
        return ""

    def _made_by(self, computation: str, instruction, named, number: int = 0) -> str:
        """Returns the path that the operation names which makes the result of an instruction; `""` where it names none.

        Args:
            computation: The name of the computation that the instruction is in.
            instruction: The `Instruction`, or `None`.
            named: The pattern of the names.
            number: Which of the results of a tuple.
        """
        if instruction is None:
            return ""
        parameter = _PARAMETER.search(instruction.attributes)
        if parameter is not None and int(parameter[1]) < len(self._weights):
            return self._weights[int(parameter[1])]
        names = named.findall(instruction.attributes)
        # Several results are of several operations, but those of a call: what a library returns, and its workspace.
        if names and (instruction.operation == "custom-call" or not instruction.type.startswith("(")):
            return names[0]
        known, operands = self._by_name[computation], instruction.operands
        if instruction.operation == "get-tuple-element":
            (index,) = re.findall(r"\bindex=(\d+)", instruction.attributes)
            return self._made_by(computation, known.get(operands[0]), named, int(index))
        if instruction.operation == "while":
            # A loop returns what its body does.
            (body,) = re.findall(r"\bbody=%?([\w.\-]+)", instruction.attributes)
            return self._made_by(body, list(self._by_name[body].values())[-1], named, number)
        if instruction.operation == "tuple":
            return self._made_by(computation, known.get(operands[number]), named)
        if instruction.operation == "fusion":
            inside = list(self._by_name.get(instruction.called[0], {}).values())
            root = inside[-1] if inside else None
            path = self._made_by(instruction.called[0], root, named, number)
            # A fusion of one operand changes that operand.
            return path or (self._made_by(computation, known.get(operands[0]), named) if len(operands) == 1 else "")
        if instruction.operation in _PASSED_ON and operands:
            return self._made_by(computation, known.get(operands[0]), named)
        return ""


def _exchanged(instruction) -> list:
    """Returns `[((kind, dtype), number of the array, bytes)]` of what a collective operation gives one device."""
    operation = instruction.operation
    kind = operation.removesuffix("-start")
    if kind not in _COLLECTIVES:
        return []
    arrays = instruction.arrays
    # The array that is sent, the one that is received, and, of a permutation, two numbers.
    if operation in ("all-gather-start", "reduce-scatter-start"):
        arrays = arrays[len(arrays) // 2 :]
    elif operation == "collective-permute-start":
        arrays = arrays[1:2]
    return [
        ((kind, _name(dtype)), number, math.prod(shape) * _bits_of(dtype) // 8)
        for number, (dtype, shape) in enumerate(arrays)
    ]


def _multiplied_in(instruction, operands) -> str:
    """Returns the dtype that an algorithm rounds the operands to, whatever they are stored in; else the widest."""
    match = _ALGORITHM.search(instruction.attributes)
    if match:
        return _name(match[1].lower())
    return _name(max((dtype for dtype, _ in operands[:2]), key=_bits_of))


def _is_host_transfer(instruction) -> bool:
    operation = instruction.operation
    if operation in ("infeed", "outfeed"):
        return True
    if operation in ("send", "recv"):
        return "is_host_transfer=true" in instruction.attributes
    if operation in ("copy", "copy-start"):
        return "S(5)" in instruction.type  # Memory space 5 is the host's.
    return "callback" in instruction.target or "MoveToHost" in instruction.target


def _flops(instruction, operands) -> int | None:
    """Returns the FLOP of a product; `None` of what is none."""
    target = instruction.target
    if instruction.operation == "dot" or target.startswith(("__cublas$", "__onednn$matmul")):
        left, result = operands[0][1], instruction.arrays[0][1]
        return 2 * math.prod(result) * math.prod(left[axis] for axis in _contracted(instruction, left))
    if instruction.operation == "convolution" or target.startswith("__cudnn$conv"):
        result, first, second = instruction.arrays[0][1], operands[0][1], operands[1][1]
        # In the order input, kernel, output of the convolution that is differentiated.
        if target == "__cudnn$convBackwardInput":
            return _of_convolution(instruction, result, second, first)
        if target == "__cudnn$convBackwardFilter":
            return _of_convolution(instruction, first, result, second)
        return _of_convolution(instruction, first, second, result)
    return None


def _contracted(instruction, left) -> list:
    """Returns the axes of the left operand over which a product sums."""
    if instruction.target.startswith("__onednn$matmul"):
        return [len(left) - 1]
    match = _CONTRACTED.search(instruction.attributes)
    if match is None and instruction.operation != "dot":
        raise ValueError(f"Expected a product that says what it sums over. Received: {instruction.attributes[:200]}.")
    return [int(n) for n in re.findall(r"\d+", match[1])] if match else []


def _of_convolution(instruction, inputs, kernel, outputs) -> int:
    """Counts the products of an input and a weight, without those with padding and the zeros that dilation puts in."""
    attributes = instruction.attributes
    labels = _LABELS.search(attributes)
    if labels is None:
        raise ValueError(f"Expected a convolution that names its axes. Received: {attributes[:200]}.")
    of_input, of_kernel, of_output = labels.groups()
    window = _WINDOW.search(attributes)
    fields = dict(field.split("=") for field in window[1].split()) if window and window[1] else {}
    groups = re.search(r"feature_group_count=(\d+)", attributes)
    batch_groups = re.search(r"batch_group_count=(\d+)", attributes)
    positions = 1
    for axis in sorted(label for label in of_input if label.isdigit()):
        place = int(axis)
        positions *= _positions(
            n=inputs[of_input.index(axis)],
            kernel=kernel[of_kernel.index(axis)],
            outputs=outputs[of_output.index(axis)],
            stride=_at(fields, "stride", place, 1),
            pad=_at(fields, "pad", place, 0),
            dilation_of_input=_at(fields, "lhs_dilate", place, 1),
            dilation_of_kernel=_at(fields, "rhs_dilate", place, 1),
        )
    features = inputs[of_input.index("f")] // (int(groups[1]) if groups else 1)
    batch = inputs[of_input.index("b")] // (int(batch_groups[1]) if batch_groups else 1)
    return 2 * positions * batch * features * outputs[of_output.index("f")]


def _at(fields, name, place, default) -> int:
    """Returns one number of a field such as `stride=2x2`; of `pad=1_2x0_0` the first of the pair."""
    if name not in fields:
        return default
    return int(fields[name].split("x")[place].split("_")[0])


def _positions(*, n, kernel, outputs, stride, pad, dilation_of_input, dilation_of_kernel) -> int:
    """Returns how many pairs of an output and a weight meet an input along one axis."""
    at = np.arange(outputs)[:, None] * stride + np.arange(kernel) * dilation_of_kernel - pad
    inside = (at >= 0) & (at <= (n - 1) * dilation_of_input) & (at % dilation_of_input == 0)
    return int(inside.sum())
