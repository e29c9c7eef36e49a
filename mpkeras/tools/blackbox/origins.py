"""`Origins`: follows what is not finite from one operation of a step to the next, back to where it began."""

import contextlib
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

from mpkeras.tools.shared.ranges import is_finite


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
# Numbers that were there before the first operation; and constants, such as the -inf of a mask, which are no fault.
_SOURCE, _CONSTANT = -1, -2


class Origins:
    """Records the operations whose inputs are finite and whose output is not, and what comes of each.

    An operation whose inf reaches neither the loss nor a gradient (the -inf of a mask, under a softmax) is not at
    fault. A tensor is known by its object, or else by its bits: backends hand some of them on in other objects. Tensors
    are given as pairs of the object and its values as an array.

    Args:
        has_source: Whether the batch or a weight is not finite.
    """

    def __init__(self, has_source: bool):
        # The paths of the layers that run now, the innermost last.
        self._running: list[str] = []
        self._has_source = has_source
        self._by_object: dict = {}
        self._by_bits: dict = {}
        # An `id` is of another object once the first one is gone.
        self._alive: list = []
        self._operations: list[Operation] = []
        self._casts_ahead = False

    @property
    def layer(self) -> str | None:
        """The path of the innermost layer that runs now."""
        return self._running[-1] if self._running else None

    @contextlib.contextmanager
    def within(self, path: str):
        """Context manager: what is noted is of the layer `path`."""
        self.enter(path, self._running)
        self._running.append(path)
        try:
            yield
        finally:
            self._running.pop()

    def enter(self, path: str | None, around):
        """Says that what follows is of the layer `path`, inside those of `around`.

        A cast just before it, within the layer around it, is that of its input: Keras casts before `call`.
        """
        if self._casts_ahead and path is not None and self._operations[-1].where in (None, *around):
            self._operations[-1] = dataclasses.replace(self._operations[-1], where=path)
        self._casts_ahead = False

    def know_constant(self, tensor):
        """Records a constant of the program."""
        if not is_finite(tensor[1]):
            self._put(tensor, _CONSTANT)

    def _put(self, tensor, origin):
        self._alive.append(tensor)
        self._by_object[id(tensor[0])] = origin
        self._by_bits.setdefault(_bits(tensor[1]), origin)

    def _origins_of(self, tensors) -> list:
        """Returns the origin of each tensor that is not finite."""
        bad = [tensor for tensor in tensors if not is_finite(tensor[1])]
        origins = [(self._by_object.get(id(tensor[0])), tensor) for tensor in bad]
        return [
            self._by_bits.get(_bits(tensor[1]), _SOURCE) if origin is None else origin for origin, tensor in origins
        ]

    def note(self, inputs: Callable, outputs: list, place: Callable):
        """Records one operation, in the order in which they run.

        Args:
            inputs: Returns the float tensors that it reads; called only where it is needed, as is `place`.
            outputs: The float tensors that it returns.
            place: Returns `side`, `name`, `where` and `line` of the `Operation`.
        """
        bad = [tensor for tensor in outputs if not is_finite(tensor[1])]
        if bad:
            origin = self._origin(inputs(), outputs[0][1].dtype.name, bad, place)
            for tensor in bad:
                self._put(tensor, origin)

    def _origin(self, inputs, dtype, bad, place) -> int:
        if not inputs:
            return _CONSTANT
        known = self._origins_of(inputs)
        if not self._has_source:
            # Of an operation that was not seen, such as one in a compiled function.
            known = [origin for origin in known if origin != _SOURCE]
        if len(known) == len(inputs) and set(known) == {_CONSTANT}:
            return _CONSTANT
        known = [origin for origin in known if origin != _CONSTANT]
        if known:
            return min(known)
        arrays = [array.astype("float64") for _, array in inputs]
        reached = max(np.abs(array[np.isfinite(array)]).max(initial=0.0) for array in arrays)
        what = "NaN" if any(np.isnan(array.astype("float64")).any() for _, array in bad) else "inf"
        message = f"makes {what} of {inputs[0][1].dtype.name} numbers up to {reached:.3g}"
        side, name, where, line = place()
        operation = Operation(side, name, where, line, dtype, message)
        self._operations.append(operation)
        self._casts_ahead = operation.name in _CASTS and operation.side == "forward" and operation.line is None
        return len(self._operations) - 1

    def first(self, results) -> Operation | None:
        """Returns the earliest operation that one of `results` comes of; `None` if that is a source or none."""
        origins = [origin for origin in self._origins_of(results) if origin != _CONSTANT]
        if self._has_source and _SOURCE in origins:
            return None
        origins = [origin for origin in origins if origin != _SOURCE]
        return self._operations[min(origins)] if origins else None


def _bits(array) -> tuple:
    return array.dtype.name, array.shape, hash(array.tobytes())


@functools.cache
def _folders_of_others() -> tuple:
    """Returns the folders of Python, of what is installed, and of mpkeras itself."""
    ours = Path(__file__).parents[2]
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), *site.getsitepackages(), str(ours)]
    return tuple(f"{Path(folder)}/" for folder in folders)


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


def frames():
    """Yields the frames of the code that runs now, the innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack():
    """Yields the frames of the code that runs now, for `user_line`."""
    for frame in frames():
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def frames_of_text(lines) -> list:
    """Returns the frames in the lines of a traceback as Python prints it, the innermost first."""
    matches = [match for line in lines for match in _FRAME.finditer(line)]
    return [(match["file"], int(match["line"]), match["function"].strip()) for match in reversed(matches)]
