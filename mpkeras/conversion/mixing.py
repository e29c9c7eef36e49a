"""Names the layer, the tensor and both dtypes where a layer of the user's mixes float32 into its 16-bit arithmetic."""

import contextlib
import dis
import functools
import inspect
import itertools
import re
import types
import warnings

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replace
from mpkeras.conversion.inner_results import taking_inner_results
from mpkeras.policies.dtypes import FLOAT_DTYPES, tensor_dtype
from mpkeras.policies.heads import called_by, own_functions, with_own_code
from mpkeras.policies.reach import with_code_inside
from mpkeras.policies.rules import kept_by

# How the backends call the dtypes in their messages.
_SPELLINGS = {name: name for name in FLOAT_DTYPES} | {"half": "float16", "double": "float64", "float": "float32"}
_DTYPE = rf"(?<![a-z])(?:{'|'.join(_SPELLINGS)})(?![a-z0-9])"
_SPELLED = re.compile(_DTYPE, re.IGNORECASE)
# "`float32` or `float64`", "tf.float32, tf.float64": what an operation takes, where the layer's own dtype is not in it.
_LISTED = re.compile(rf"{_DTYPE}(?:\W*(?:,|\bor\b|\band\b)\W*(?:\w+\.)?{_DTYPE})+", re.IGNORECASE)

# A `call` that names one of them returns float32 on purpose.
_NAMES_OF_FLOAT32 = {"float32", "variable_dtype", "float"}

# How they say that an operation has no kernel for a dtype, where they do not list those that it takes.
_NO_KERNEL = re.compile(
    r"not implemented for|(does not|doesn't) (support|accept)|dtypes not supported|unsupported dtype|not inexact|"
    r"not in (the )?list of allowed values|could not find device for node|but got (?P<one>\w+) and (?P=one)\b",
    re.IGNORECASE,
)

_silent: list = []


class RefusedError(TypeError):
    """The backend refused what a layer computes, for its dtype. `what` is a sentence, and `remedy` another one."""

    def __init__(self, message: str, what: str = "", remedy: str = ""):
        # Keras makes the error again, of a longer message alone.
        super().__init__(message)
        self.what = what
        self.remedy = remedy


class MixedDtypesError(RefusedError):
    """A layer multiplied or added tensors of two float dtypes."""


class NoKernelError(RefusedError):
    """A layer called an operation that has no kernel for the dtype of the layer."""


def name_mixed_dtypes(layer):
    """Makes `layer`, which has code of its user's own, or runs a cell that has some, say by name what it mixes.

    Where the backend raises, a `TypeError` names the layer, the attribute, argument or variable, and both dtypes. Where
    it silently goes on in float32 (JAX, and `keras.ops` everywhere), a warning does, once. Where the backend raises as
    an operation has no kernel for the dtype of the layer, the `TypeError` says that.
    """
    call = taking_inner_results(
        layer, layer.call, lambda *failed: isinstance(refused(layer, *failed), MixedDtypesError)
    )
    culprit = with_own_code(layer)[0]

    @functools.wraps(call)
    def call_and_name(*args, **kwargs):
        try:
            outputs = call(*args, **kwargs)
        except Exception as error:
            refusal = refused(culprit, args, kwargs, error)
            if refusal is None:
                raise
            raise refusal from error
        # Keras' symbolic calls on torch read variables as they are stored, and what those meet is promoted.
        if not has_warned and not _silent and not _keras.in_symbolic_scope():
            what = promoted(layer, args, kwargs, outputs)
            if what:
                has_warned.append(True)
                warnings.warn(f"{what} {remedy(layer)} Until then it computes in float32.", stacklevel=2)
        return outputs

    has_warned = []
    replace(layer, "call", call_and_name, kind="layer")


@contextlib.contextmanager
def in_silence():
    """Context manager: layers that mix without an error say nothing, and will say it the next time."""
    _silent.append(True)
    try:
        yield
    finally:
        _silent.pop()


def refused(layer, args, kwargs, error) -> RefusedError | None:
    """Returns an error that names `layer` where its `call` raised `error` for a dtype; `None` for another error."""
    # An error of a layer inside, or a warning taken for one, is no refusal of this layer.
    if isinstance(error, (RefusedError, Warning)):
        return None
    # Keras adds the arguments of the call, and they may be of any dtype.
    message = str(error).split("Arguments received by")[0]
    # Tensors made inside `call` are in nobody's reach: only the message says its dtype, and that dtypes are the matter.
    lists = [text for text in _LISTED.findall(message) if layer.compute_dtype not in _named(text)]
    for text in lists:
        message = message.replace(text, "")
    met = _named(message)
    if layer.compute_dtype not in met:
        return None
    if (lists and len(met) == 1) or _NO_KERNEL.search(message):
        return _refusal(NoKernelError, _without_kernel(layer), remedy_without_kernel(layer), error)
    if len(met) > 1:
        what = _what(layer, met, _other_dtypes(layer, args, kwargs))
        return _refusal(MixedDtypesError, what, remedy(layer), error)
    return None


def _named(message: str) -> set[str]:
    return {_SPELLINGS[word.lower()] for word in _SPELLED.findall(message)}


def _refusal(kind: type[RefusedError], what: str, remedy: str, error) -> RefusedError:
    return kind(f"{what} {remedy} The backend says: {error}", what, remedy)


def promoted(layer, args, kwargs, outputs) -> str | None:
    """Returns what lets the `call` of `layer` return a wider float, in a sentence; `None` if nothing in reach does."""
    is_promoted = _is_promoted(layer, outputs, args, kwargs) and not any(map(_names_float32, _functions(layer)))
    dtypes = _other_dtypes(layer, args, kwargs) if is_promoted else []
    return _what(layer, {dtype for _, dtype in dtypes}, dtypes) if dtypes else None


def remedy(layer) -> str:
    if own_functions(layer) or isinstance(layer, keras.layers.Lambda):
        return f"Cast it with `keras.ops.cast(..., x.dtype)` to the dtype of the argument, or {_kept_in_float32(layer)}"
    return f"Cast it with `keras.ops.cast(..., self.compute_dtype)`, {_in_float32(layer)}"


def remedy_without_kernel(layer) -> str:
    return f"Cast what the operation takes to float32, {_in_float32(layer)}"


def _in_float32(layer) -> str:
    return f"put `@mpkeras.float32_island` on the method, or {_kept_in_float32(layer)}"


def _kept_in_float32(layer) -> str:
    return (
        f'keep the layer in float32: {kept_by(f"path:{layer.name}")}, or `dtype="float32"` where it is made under the '
        "policy."
    )


def _is_promoted(layer, outputs, args, kwargs) -> bool:
    """Whether a layer of 16-bit inputs, and without layers of its own inside, returns a wider float."""
    inputs = {tensor_dtype(value) for value in keras.tree.flatten((args, kwargs))} & set(FLOAT_DTYPES)
    outputs = {tensor_dtype(value) for value in keras.tree.flatten(outputs)} & set(FLOAT_DTYPES)
    return inputs == {layer.compute_dtype} and not outputs <= inputs and not _keras.direct_sublayers(layer)


def _functions(layer) -> list[types.FunctionType]:
    """Returns the functions of Python that the user has written for `layer`; other callables are left out."""
    call = layer.function if isinstance(layer, keras.layers.Lambda) else type(layer).call
    functions = [called_by(getattr(function, "__func__", function)) for function in own_functions(layer) or [call]]
    return [function for function in functions if isinstance(function, types.FunctionType)]


def _names_float32(function) -> bool:
    codes = with_code_inside(function.__code__)
    return any(_NAMES_OF_FLOAT32 & {*code.co_names, *code.co_consts} for code in codes)


def _other_dtypes(layer, args, kwargs) -> list[tuple[str, str]]:
    """Returns `(what, dtype)` for each float tensor in reach of a call that is not in the layer's compute dtype."""
    try:
        arguments = inspect.signature(layer.call).bind(*args, **kwargs).arguments
    except TypeError:
        arguments = {}
    places: list[tuple] = [("its argument `{}`", arguments), ("its attribute `{}`", _attributes(layer))]
    for function in _functions(layer):
        places += [
            ("the variable `{}` of the function around it", inspect.getclosurevars(function).nonlocals),
            ("the global variable `{}`", _globals_of(function)),
        ]
    return [
        (where.format(name), dtype)
        for where, values in places
        for name, value in values.items()
        for dtype in sorted(_dtypes_of(value) - {layer.compute_dtype})
    ]


def _globals_of(function) -> dict:
    """Returns the global variables that the code of a function reads, that of functions inside it included.

    Up to Python 3.12 `inspect.getclosurevars` takes attributes of their names for them.
    """
    instructions = itertools.chain.from_iterable(map(dis.get_instructions, with_code_inside(function.__code__)))
    names = {instruction.argval for instruction in instructions if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return {name: function.__globals__[name] for name in sorted(names & function.__globals__.keys())}


def _attributes(layer) -> dict:
    """Returns what the user's class put on the layer, torch's parameters and buffers among it."""
    known = vars(keras.layers.Layer())
    attributes = {name: value for name, value in vars(layer).items() if name not in known}
    for registry in ("_parameters", "_buffers"):
        attributes.update(vars(layer).get(registry) or {})
    return attributes


def _dtypes_of(value) -> set[str]:
    try:
        leaves = keras.tree.flatten(value)
    except Exception:  # A structure of the user's that cannot be flattened holds nothing we could name.
        return set()
    dtypes: set = set()
    for leaf in leaves:
        if isinstance(leaf, (np.ndarray, np.generic, keras.Variable)):
            # Inside `call` the dtype of a Keras variable is the one that it is read in.
            dtypes.add(str(leaf.dtype))
        elif ops.is_tensor(leaf):
            dtypes.add(tensor_dtype(leaf))
    return dtypes & set(FLOAT_DTYPES)


def _without_kernel(layer) -> str:
    return (
        f"Layer '{layer.name}' ({type(layer).__name__}) computes in {layer.compute_dtype}, for which an operation in "
        "its `call` has no kernel here."
    )


def _what(layer, dtypes, other_dtypes) -> str:
    others = sorted(set(dtypes) - {layer.compute_dtype})
    what = "; ".join(f"{where} is {dtype}" for where, dtype in other_dtypes)
    functions = [getattr(function, "__name__", "activation") for function in own_functions(layer)]
    where = " or ".join(f"`{name}`" for name in functions or ["call"])
    made_inside = (
        f"a tensor made inside {where} (`ops.ones`, `ops.arange` … are float32 unless they are given `dtype=`)"
    )
    # A rule may keep layers inside in float32; nothing in reach says whether their outputs are what meets 16 bits.
    inner = [part for part in _keras.direct_sublayers(layer) if part.compute_dtype in others]
    if inner:
        made_inside += f", or what layer '{inner[0].name}' inside returns, in {inner[0].compute_dtype}"
    return (
        f"Layer '{layer.name}' ({type(layer).__name__}) computes in {layer.compute_dtype} and mixes it with "
        f"{' and '.join(others)}: {what or made_inside}."
    )
