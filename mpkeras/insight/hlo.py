"""Reads a program as XLA compiled it: matrix products by dtype, what devices tell each other, and who waits for whom.

The text is that of `HloModule::ToString`: https://openxla.org/xla/operation_semantics says what the operations mean.
"""

import collections
import dataclasses
import json
import math
import re

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
_BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128}
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_HEADING = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
# Such as dot_bf16_bf16_f32; dot_bf16_bf16_f32_x3 multiplies three times, for float32's precision.
_ALGORITHM = re.compile(r"\balgorithm\"?[=:]\"?(?:ALG_)?dot_(bf16|f16)_\1_f32\b(?!_)", flags=re.IGNORECASE)
_FLOAT8_CALL = 'custom_call_target="__cublas$lt$matmul$f8"'
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass
class Instruction:
    """One line of a program: `name = type operation(operands), attributes`."""

    name: str
    type: str
    operation: str
    operands: list
    attributes: str

    @property
    def arrays(self) -> list:
        """`(HLO's name of the dtype, shape)` of each array of the result."""
        return arrays_in(self.type)


@dataclasses.dataclass
class Program:
    """What is in a compiled program.

    Attributes:
        matrix_flops: `{dtype of the operands: FLOP}` of matrix products and convolutions, a multiplication and an
            addition counted as two, those in loops as often as the loop runs. The dtype is the one that is multiplied.
        products: `{dtype of the operands: number of products}`, each once, wherever it stands.
        collectives: `[{"kind", "dtype", "bytes"}]`, summed by kind and dtype; bytes of the results on one device.
        conditionals: Number of branches.
        host_transfers: Number of operations that wait for the host or hand it something.
        loops_of_unknown_length: Number of loops with products that do not say how often they run; those count once.
        float8_call_flops: FLOP of the products that cuBLASLt is called for with float8 operands: those that are sure to
            be computed in float8. XLA's own fusions may widen such operands on the way to the units.
    """

    matrix_flops: dict
    products: dict
    collectives: list
    conditionals: int
    host_transfers: int
    loops_of_unknown_length: int
    float8_call_flops: int


def read_program(text: str) -> Program:
    """Returns what is in a program.

    Args:
        text: HLO text of a compiled module.

    Raises:
        ValueError: If the text has no entry, or a product cannot be counted.
    """
    computations, entry = parse(text)
    counted = _Counted(computations)
    counted.count(entry, 1)
    collectives = [
        {"kind": kind, "dtype": dtype, "bytes": n} for (kind, dtype), n in sorted(counted.collectives.items())
    ]
    return Program(
        dict(sorted(counted.flops.items())),
        dict(sorted(counted.products.items())),
        collectives,
        counted.conditionals,
        counted.host_transfers,
        counted.loops_of_unknown_length,
        counted.float8_call_flops,
    )


class _Counted:
    """Sums over the computations of a program, each as often as it runs."""

    def __init__(self, computations):
        self._computations = computations
        self._seen: set = set()
        self.flops: collections.Counter = collections.Counter()
        self.products: collections.Counter = collections.Counter()
        self.collectives: collections.Counter = collections.Counter()
        self.conditionals = 0
        self.host_transfers = 0
        self.loops_of_unknown_length = 0
        self.float8_call_flops = 0

    def count(self, name, times):
        """Adds a computation that runs `times` times, and those that it calls."""
        instructions = self._computations[name]
        is_new = name not in self._seen
        self._seen.add(name)
        types = {instruction.name: instruction.arrays for instruction in instructions}
        for instruction in instructions:
            operands = [array for operand in instruction.operands for array in types.get(operand, [])]
            flops = _flops(instruction, operands)
            if flops is not None:
                dtype = _multiplied_in(instruction) or _widest(dtype for dtype, _ in operands[:2])
                self.flops[dtype] += flops * times
                self.products[dtype] += is_new
                self.float8_call_flops += flops * times * (_FLOAT8_CALL in instruction.attributes)
            if is_new:
                self._note(instruction)
            self._count_called(instruction, times)

    def _note(self, instruction):
        operation = instruction.operation
        self.conditionals += operation == "conditional"
        self.host_transfers += _is_host_transfer(instruction)
        kind = operation.removesuffix("-start")
        if kind in _COLLECTIVES:
            arrays = instruction.arrays
            if operation == "all-gather-start" or operation == "collective-permute-start":
                # What is sent, what is received, and, of the second, two numbers.
                arrays = arrays[len(arrays) // 2 :] if operation == "all-gather-start" else arrays[1:2]
            for dtype, shape in arrays:
                self.collectives[kind, _name(dtype)] += _bytes(dtype, shape)

    def _count_called(self, instruction, times):
        trips = _TRIPS.search(instruction.attributes)
        if instruction.operation == "while":
            times *= int(trips[1]) if trips else 1
        before = self.flops.total()
        for _, names in _CALLED.findall(instruction.attributes):
            for name in re.findall(r"[\w.\-]+", names):
                if name in self._computations:
                    self.count(name, times)
        if instruction.operation == "while" and trips is None:
            self.loops_of_unknown_length += self.flops.total() > before


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


def arrays_in(text: str) -> list:
    """Returns `(HLO's name of the dtype, shape)` of each array in the text of a type."""
    return [
        (dtype, tuple(int(n.lstrip("<=")) for n in sizes.split(",") if n))
        for dtype, sizes in _ARRAY.findall(text)
        if dtype in _DTYPES or re.fullmatch(r"(f8e|[suc])\w+", dtype)
    ]


def _name(dtype: str) -> str:
    return "float8" if dtype.startswith("f8e") else _DTYPES.get(dtype, dtype)


def _widest(dtypes) -> str:
    dtypes = list(dtypes)
    return _name(max(dtypes, key=_bits_of))


def _bits_of(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    number = re.search(r"\d+", dtype)
    return int(number[0]) if number else 8


def _bytes(dtype, shape) -> int:
    return math.prod(shape) * _bits_of(dtype) // 8


def _multiplied_in(instruction) -> str | None:
    """Returns the dtype that an algorithm rounds the operands to, whatever they are stored in; `None` without one."""
    found = _ALGORITHM.search(instruction.attributes)
    return None if found is None else _name(found[1].lower())


def _is_host_transfer(instruction) -> bool:
    operation, attributes = instruction.operation, instruction.attributes
    if operation in ("infeed", "outfeed"):
        return True
    if operation in ("send", "recv"):
        return "is_host_transfer=true" in attributes
    if operation == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', attributes)
        return target is not None and ("callback" in target[1] or "MoveToHost" in target[1])
    # Memory space 5 is the host's.
    return operation in ("copy", "copy-start") and "S(5)" in instruction.type


def _flops(instruction, operands) -> int | None:
    """Returns the FLOP of a product; `None` of what is none."""
    if instruction.operation == "dot":
        return _of_dot(instruction.arrays[0][1], operands[0][1], _numbers(instruction, "lhs_contracting_dims"))
    if instruction.operation == "convolution":
        return _of_convolution(instruction, operands[0][1], operands[1][1], instruction.arrays[0][1])
    if instruction.operation != "custom-call":
        return None
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    name = target[1] if target else ""
    if name.startswith("__cublas$"):
        found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', instruction.attributes)
        if found is None:
            raise ValueError(
                f"Expected a product that says what it sums over. Received: {instruction.attributes[:200]}."
            )
        contracted = [int(n) for n in json.loads(found[1])]
        return _of_dot(instruction.arrays[0][1], operands[0][1], contracted)
    if name.startswith("__cudnn$conv"):
        result, first, second = instruction.arrays[0][1], operands[0][1], operands[1][1]
        # What of them is input, kernel and output of the convolution that is differentiated.
        if name == "__cudnn$convBackwardInput":
            return _of_convolution(instruction, result, second, first)
        if name == "__cudnn$convBackwardFilter":
            return _of_convolution(instruction, first, result, second)
        return _of_convolution(instruction, first, second, result)
    if name.startswith("__onednn$matmul"):
        return _of_dot(instruction.arrays[0][1], operands[0][1], [len(operands[0][1]) - 1])
    return None


def _numbers(instruction, attribute) -> list:
    found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", instruction.attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _of_dot(result, left, contracted) -> int:
    return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)


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
