"""`Origins`: follows what is not finite from one operation to the next, back to where it began."""

import dataclasses
import functools
import linecache
import re
import site
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Operation:
    """Where inf or NaN began in a step.

    Attributes:
        side: `"forward"`, `"backward"`, or `"batch"`, `"weight"` where it was there before the first operation.
        name: What the backend calls the operation; `None` for a batch and a weight.
        where: `layer.path`, `None` outside of all layers, as in the loss; of a batch or weight, which one.
        line: `"file.py:12, in call: return ops.log(x)"`, of code that is neither Keras' nor a backend's; or `None`.
        dtype: Of its output.
        message: A sentence with the numbers.
    """

    side: str
    name: str | None
    where: str | None
    line: str | None
    dtype: str
    message: str


# The casts that Keras puts before the `call` of a layer, as backends call them.
_CASTS = ("Cast", "_to_copy", "convert_element_type")
# What was there before the first operation; and constants, such as the -inf of a mask, which are no fault.
_SOURCE, _CONSTANT = -1, -2


class Origins:
    """Takes down the operations whose inputs are finite and whose output is not, and what comes of each.

    An operation whose inf reaches neither the loss nor a gradient (the -inf of a mask, under a softmax) is not at
    fault. A tensor is known by the object that it is, or else by its bits: backends hand some of them on in objects of
    their own. Tensors are given as pairs of the object and its values as an array.

    Args:
        has_source: Whether the batch or a weight is not finite.
    """

    def __init__(self, has_source: bool):
        self._has_source = has_source
        self._by_object: dict = {}
        self._by_bits: dict = {}
        # An `id` is of another object once the first one is gone.
        self._alive: list = []
        self._operations: list[Operation] = []
        self._casts_ahead = False

    def enter(self, path: str | None, around):
        """Takes down that what follows is of the layer `path`, in those of `around`.

        A cast just before it, within the layer around it, is that of its input: Keras casts before `call`.
        """
        if self._casts_ahead and path is not None and self._operations[-1].where in (None, *around):
            self._operations[-1] = dataclasses.replace(self._operations[-1], where=path)
        self._casts_ahead = False

    def know_constant(self, tensor):
        """Takes down a constant of the program."""
        if not is_finite(tensor[1]):
            self._put(tensor, _CONSTANT)

    def _put(self, tensor, origin):
        self._alive.append(tensor)
        self._by_object[id(tensor[0])] = origin
        self._by_bits.setdefault(_bits(tensor[1]), origin)

    def _origin_of(self, tensor) -> int:
        found = self._by_object.get(id(tensor[0]))
        return self._by_bits.get(_bits(tensor[1]), _SOURCE) if found is None else found

    def note(self, inputs, outputs, describe: Callable):
        """Takes down one operation, in the order in which they run.

        Args:
            inputs: Function that returns the tensors that it reads; called only where it is needed.
            outputs: List of the tensors that it returns.
            describe: Function from a clause about its numbers to an `Operation`.
        """
        bad = [tensor for tensor in outputs if not is_finite(tensor[1])]
        if not bad:
            return
        given = [tensor for tensor in inputs() if is_float(tensor[1])]
        origin = self._origin(given, [array for _, array in bad], describe)
        for tensor in bad:
            self._put(tensor, origin)

    def _origin(self, given, bad, describe) -> int:
        if not given:
            return _CONSTANT
        known = [self._origin_of(tensor) for tensor in given if not is_finite(tensor[1])]
        if not self._has_source and _SOURCE in known:
            # Of an operation that was not seen, such as one in a compiled function.
            known = [origin for origin in known if origin != _SOURCE]
        if len(known) == len(given) and set(known) == {_CONSTANT}:
            return _CONSTANT
        known = [origin for origin in known if origin != _CONSTANT]
        if known:
            return min(known)
        arrays = [array.astype("float64") for _, array in given]
        finite = [np.abs(array[np.isfinite(array)]) for array in arrays]
        reached = max((values.max(initial=0.0) for values in finite), default=0.0)
        what = "NaN" if any(np.isnan(array.astype("float64")).any() for array in bad) else "inf"
        found = describe(f"makes {what} of {given[0][1].dtype.name} numbers up to {reached:.3g}")
        self._operations.append(found)
        self._casts_ahead = found.name in _CASTS and found.side == "forward" and found.line is None
        return len(self._operations) - 1

    def first(self, results) -> Operation | None:
        """Returns the earliest operation that one of `results` comes of; `None` if that is a source or none."""
        found = [self._origin_of(tensor) for tensor in results if not is_finite(tensor[1])]
        found = [origin for origin in found if origin != _CONSTANT]
        if not found or (self._has_source and min(found) == _SOURCE):
            return None
        found = [origin for origin in found if origin >= 0]
        return self._operations[min(found)] if found else None


def is_float(array) -> bool:
    return array.dtype.kind in "fc" or "float" in array.dtype.name


def is_finite(array) -> bool:
    if not is_float(array):
        return True
    return bool(np.isfinite(array if array.dtype.kind in "fc" else array.astype("float32")).all())


def _bits(array) -> tuple:
    return array.dtype.name, array.shape, hash(array.tobytes())


@functools.cache
def _folders_of_others() -> tuple:
    """Returns the folders of Python, of what is installed, and of mpkeras itself."""
    ours = Path(__file__).parents[2]
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages(), str(ours)]
    return tuple(str(Path(folder)) + "/" for folder in folders)


# The function below which the step runs: what is above it in a stack is who asked, and not the step.
MARK = "run_below_here"
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')


def user_line(frames) -> str | None:
    """Returns the innermost line of the user's own code.

    Args:
        frames: Iterable of `(file, line number, function)`, the innermost first.
    """
    for file, number, function in frames:
        if function == MARK:
            return None
        if not file.startswith(("<", *_folders_of_others())):
            code = linecache.getline(file, number).strip()
            return f"{Path(file).name}:{number}, in {function}" + (f": {code}" if code else "")
    return None


def stack():
    """Yields the frames of the code that runs now, for `user_line`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def frames_of_text(lines) -> list:
    """Returns the frames in the lines of a traceback as Python prints it, the innermost first."""
    found = [match for line in lines for match in _FRAME.finditer(line)]
    return [(match["file"], int(match["line"]), match["function"].strip()) for match in reversed(found)]
