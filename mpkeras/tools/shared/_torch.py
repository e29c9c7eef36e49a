"""On torch: what a model computes, and gradients by the tensors inside it."""

import contextlib
import logging

import keras
import torch
from keras import ops
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mpkeras.tools.shared.flops import Program, size


def run_with_gradients(run, variables, values):
    """As in `_tensorflow.py`."""
    taps = []

    def tap_output(tensor):
        if not tensor.requires_grad:
            tensor.requires_grad_(True)
        taps.append(tensor)
        return tensor

    def tap_input(tensor):
        # A tensor of its own for each layer that reads it.
        return tap_output(tensor.view_as(tensor))

    mapping = list(zip(variables, values, strict=True))
    # Keras reads regularized weights from the scope alone.
    with torch.enable_grad(), keras.StatelessScope(state_mapping=mapping, collect_losses=True):
        loss, results = run(tap_input, tap_output)
    if loss is None or not loss.requires_grad:
        return results, [None] * len(taps), [None] * len(variables)
    # Weights that were frozen as torch parameters take no gradient.
    reached = [tensor for tensor in taps + values if tensor.requires_grad]
    grads_by_tensor = dict(zip(map(id, reached), torch.autograd.grad(loss, reached, allow_unused=True), strict=True))
    grads = [grads_by_tensor.get(id(tensor)) for tensor in taps + values]
    return results, grads[: len(taps)], grads[len(taps) :]


_layers: list = []


@contextlib.contextmanager
def scope(index: int):
    _layers.append(index)
    try:
        yield
    finally:
        _layers.pop()


def trace(function, inputs) -> Program:
    """Returns what `function`, of a list of tensors of these `(shape, dtype)`, computes; nothing is run."""
    program = Program()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), _Recording(program), _without_tracebacks():
        function([ops.zeros(shape, dtype) for shape, dtype in inputs])
    return program


@contextlib.contextmanager
def _without_tracebacks():
    """Keeps torch from writing what fails to standard error before it raises: the caller says it in a sentence."""
    log = logging.getLogger("torch._subclasses.fake_tensor")

    def refuse(record):
        return False

    log.addFilter(refuse)
    try:
        yield
    finally:
        log.removeFilter(refuse)


# torch counts no FLOPs of them; of what their first operand holds each number is multiplied once.
_PRODUCTS_WITH_A_VECTOR = ("mv", "dot")
# Operations that leave whole numbers in a row what they are, the sum with a number among them.
_HANDING_ON = ("_to_copy", "add", "detach", "expand", "permute", "squeeze", "sub", "transpose", "unsqueeze", "view")


class _Recording(TorchDispatchMode):
    def __init__(self, program):
        super().__init__()
        self._program = program
        # How many whole numbers in a row a tensor holds, which stays for that, or another would have its `id`.
        self._numbers: dict = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operation = function.overloadpacket
        _check_operands(operation, args)
        result = function(*args, **(kwargs or {}))
        owner = _layers[-1] if _layers else None
        name = operation.__name__
        tensors = [value for value in args if torch.is_tensor(value)]
        if name == "arange":
            self._numbers[id(result)] = result, result.numel()
        elif name in _HANDING_ON and len(tensors) == 1 and id(tensors[0]) in self._numbers:
            self._numbers[id(result)] = result, self._numbers[id(tensors[0])][1]
        if name in ("arange", "_to_copy"):
            self._program.add_counted(owner, _dtype(result), self._numbers.get(id(result), (None, None))[1])
        if name == "_to_copy":
            self._program.add_cast(owner, _dtype(args[0]), _dtype(result), result.numel())
        elif name.startswith("_scaled_dot_product"):
            query, key, value = (tensor.shape for tensor in tensors[:3])
            flops = 2 * size(query[:-1]) * key[-2] * (query[-1] + value[-1])
            self._program.add_product(owner, map(_dtype, tensors[:3]), flops)
        elif name in _PRODUCTS_WITH_A_VECTOR:
            self._program.add_product(owner, map(_dtype, tensors[:2]), 2 * tensors[0].numel())
        elif operation in flop_registry:
            flops = flop_registry[operation](*args, **(kwargs or {}), out_val=result)
            # `addmm` and its like: the first of the three is what the product is added to.
            operands = tensors[1:3] if name in ("addmm", "baddbmm") else tensors[:2]
            self._program.add_product(owner, map(_dtype, operands), flops)
        return result


def _check_operands(operation, args):
    """Raises as torch does for a product of two dtypes; without data it lets them pass."""
    dtypes = [_dtype(value) for value in args if torch.is_tensor(value) and value.is_floating_point()]
    if operation in flop_registry and len(set(dtypes)) > 1:
        raise RuntimeError(f"{operation.__name__}: expected operands of the same dtype, but got {' and '.join(dtypes)}")


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
