"""What is counted in a traced program, and how its operations know their layer."""

import dataclasses
import math
import re
from typing import NamedTuple

from mpkeras.policies.dtypes import FLOAT_DTYPES

_OWNER = re.compile(r"mpkeras_layer(\d+)x")


class Product(NamedTuple):
    """A matrix product or convolution.

    `owner` is the number of the layer it is of, `flops` counts a multiplication and an addition as two.
    """

    owner: int | None
    dtype: str
    flops: int


class Cast(NamedTuple):
    """A conversion from one float dtype to another."""

    owner: int | None
    source: str
    target: str
    elements: int


@dataclasses.dataclass
class Program:
    """The products and casts of one pass. `uncounted`: operations of a size the program does not say."""

    products: list = dataclasses.field(default_factory=list)
    casts: list = dataclasses.field(default_factory=list)
    uncounted: int = 0

    def add_product(self, owner, dtypes, flops, times=1):
        """Adds a product of operands of `dtypes`, computed in the widest of them."""
        self.products.append(Product(owner, widest(dtypes), flops * times))

    def add_cast(self, owner, source, target, elements, times=1):
        if source != target and {source, target} <= set(FLOAT_DTYPES):
            self.casts.append(Cast(owner, source, target, elements * times))


def owner_name(index: int) -> str:
    """Returns the name of the scope in which the operations of layer `index` are."""
    # Backends append "_1" to a name that is taken: the "x" ends the number.
    return f"mpkeras_layer{index}x"


def owner_of(scopes: str, outer=None) -> int | None:
    """Returns the number of the innermost layer in a path of scopes; `outer` where there is none."""
    found = _OWNER.findall(scopes)
    return int(found[-1]) if found else outer


def widest(dtypes) -> str:
    """Returns the widest of the float dtypes; of others, the first."""
    dtypes = list(dtypes)
    floats = [dtype for dtype in dtypes if dtype in FLOAT_DTYPES]
    return max(floats, key=FLOAT_DTYPES.index) if floats else dtypes[0]


def size(shape) -> int:
    """Returns the number of elements. Raises `TypeError` where a dimension is not known."""
    return math.prod(shape)
