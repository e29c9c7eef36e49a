"""`Origins`: follows what is not finite from one operation to the next, back to where it began."""

import dataclasses
import functools
import linecache
import re
import site
import sys
import sysconfig
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
    fault. Values are known by their bits: backends hand the same tensor on in objects of their own.

    Args:
        has_source: Whether the batch or a weight is not finite.
    """

    def __init__(self, has_source: bool):
        self._has_source = has_source
        self._origin_of: dict = {}
        self._operations: list[Operation] = []
        self._casts_ahead = False

    def enter(self, path: str | None):
        """Takes down that what follows is of another layer: a cast just before it, of its input, is its own."""
        if self._casts_ahead and path is not None:
            self._operations[-1] = dataclasses.replace(self._operations[-1], where=path)
        self._casts_ahead = False

    def know_constant(self, array):
        """Takes down a constant of the program."""
        if not is_finite(array):
            self._origin_of.setdefault(_key(array), _CONSTANT)

    def note(self, inputs, outputs, describe: Callable):
        """Takes down one operation, in the order in which they run.

        Args:
            inputs: Function that returns the arrays that it reads; called only where it is needed.
            outputs: List of the arrays that it returns.
            describe: Function from a clause about its numbers to an `Operation`.
        """
        bad = [array for array in outputs if not is_finite(array)]
        if not bad:
            return
        given = [array for array in inputs() if is_float(array)]
        origin = self._origin(given, bad, describe)
        for array in bad:
            self._origin_of.setdefault(_key(array), origin)

    def _origin(self, given, bad, describe) -> int:
        if not given:
            return _CONSTANT
        known = [self._origin_of.get(_key(array), _SOURCE) for array in given if not is_finite(array)]
        if not self._has_source and _SOURCE in known:
            # Of an operation that was not seen, such as one in a compiled function.
            known = [origin for origin in known if origin != _SOURCE]
        if len(known) == len(given) and set(known) == {_CONSTANT}:
            return _CONSTANT
        known = [origin for origin in known if origin != _CONSTANT]
        if known:
            return min(known)
        finite = [np.abs(array.astype("float64"))[np.isfinite(array.astype("float64"))] for array in given]
        reached = max((values.max(initial=0.0) for values in finite), default=0.0)
        what = "NaN" if any(np.isnan(array.astype("float64")).any() for array in bad) else "inf"
        found = describe(f"makes {what} of {given[0].dtype.name} numbers up to {reached:.3g}")
        self._operations.append(found)
        self._casts_ahead = found.name in _CASTS and found.side == "forward" and found.line is None
        return len(self._operations) - 1

    def first(self, results) -> Operation | None:
        """Returns the earliest operation that one of `results` (arrays) comes of; `None` if that is a source or none."""
        bad = [array for array in results if not is_finite(array)]
        found = [self._origin_of.get(_key(array), _SOURCE) for array in bad]
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


def _key(array) -> tuple:
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
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def frames_of_text(lines) -> list:
    """Returns the frames in the lines of a traceback as Python prints it, the innermost first."""
    found = [match for line in lines for match in _FRAME.finditer(line)]
    return [(match["file"], int(match["line"]), match["function"].strip()) for match in reversed(found)]
