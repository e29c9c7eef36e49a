"""What an audit knows of each layer: its dtypes, parameters, products and outputs."""

import dataclasses
from collections import Counter, defaultdict

import keras

from mpkeras import _keras
from mpkeras.conversion.plan import layers_of, plan
from mpkeras.insight.programs.program import size
from mpkeras.policies.default_rules import default_rules
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, bytes_of
from mpkeras.policies.policy import Policy


@dataclasses.dataclass
class LayerRow:
    """One layer, without those in it.

    Attributes:
        layer: The layer.
        path: Its path in the model.
        compute_dtype: What it computes in.
        rule: The default rule that keeps it in float32, or its class where there is no kernel in 16 bits; `None` for
            most.
        reason: Why it stays in float32; of others what the plan of a conversion says.
        weight_bytes: `{dtype: bytes}` of its own variables.
        parameters: How many numbers these are.
        flops: `{dtype: FLOPs}` of its products in one forward pass; `None` where it is not known.
        casts: Casts between float dtypes within it; `None` where it is not known.
        output_bytes: `{dtype: bytes}` of what it returns; empty where it is not known, or a layer in it returns it.
    """

    layer: keras.layers.Layer
    path: str
    compute_dtype: str
    rule: str | None
    reason: str
    weight_bytes: dict
    parameters: int
    flops: dict | None
    casts: int | None
    output_bytes: dict

    @property
    def class_name(self) -> str:
        return type(self.layer).__name__

    @property
    def total_flops(self) -> int:
        return sum((self.flops or {}).values())

    @property
    def half_flops(self) -> int:
        return sum(flops for dtype, flops in (self.flops or {}).items() if dtype in SIXTEEN_BIT_DTYPES)

    @property
    def is_container(self) -> bool:
        """Whether the layer is a model or an input: it computes nothing itself."""
        return isinstance(self.layer, (keras.Model, keras.layers.InputLayer))

    def to_dict(self) -> dict:
        names = [field.name for field in dataclasses.fields(self) if field.name != "layer"]
        return {"class_name": self.class_name, **{name: getattr(self, name) for name in names}}


def layer_rows(model, forward) -> list:
    """Returns a `LayerRow` for each layer of `model`, in the order of `layers_of(model)`."""
    program = forward.program
    flops_of: defaultdict = defaultdict(dict)
    for product in program.products if program is not None else ():
        flops = flops_of[product.owner or 0]
        flops[product.dtype] = flops.get(product.dtype, 0) + product.flops
    casts_of = Counter(cast.owner or 0 for cast in (program.casts if program is not None else ()))
    rows = []
    by_default = Policy("audit", compute_dtype="bfloat16", variable_dtype="float32", keep_float32=default_rules())
    planned = plan(model, by_default)
    for index, layer in enumerate(layers_of(model)):
        variables = _keras.own_variables(layer)
        row = LayerRow(
            layer,
            path=layer.path or layer.name,
            compute_dtype=layer.compute_dtype,
            rule=planned[index].rule,
            reason=planned[index].reason,
            weight_bytes={},
            parameters=sum(size(variable.shape) for variable in variables if _is_initialized(variable)),
            flops=None if program is None else flops_of[index],
            casts=None if program is None else casts_of[index],
            output_bytes=forward.output_bytes.get(index, {}),
        )
        for variable in variables:
            if _is_initialized(variable):
                dtype = str(variable.dtype)
                row.weight_bytes[dtype] = row.weight_bytes.get(dtype, 0) + bytes_of(variable.shape, dtype)
        rows.append(row)
    return rows


def rows_to_show(rows) -> list:
    """Returns the rows that say something: without inputs, models, and what only does as the layer around it does."""
    inner_to_outer = {}
    for row in rows:
        if not row.is_container:
            for layer in _keras.direct_sublayers(row.layer):
                inner_to_outer[id(layer)] = row.layer

    def says_something(row):
        if row.parameters or row.total_flops:
            return True
        outer = inner_to_outer.get(id(row.layer))
        return not row.is_container and (outer is None or outer.compute_dtype != row.compute_dtype)

    return [row for row in rows if says_something(row)]


def total(rows, attribute: str) -> dict:
    """Returns the sums of a `{dtype: number}` attribute over the rows."""
    sums: dict = {}
    for row in rows:
        for dtype, number in (getattr(row, attribute) or {}).items():
            sums[dtype] = sums.get(dtype, 0) + number
    return sums


def _is_initialized(variable) -> bool:
    return variable.shape is not None and None not in tuple(variable.shape) and str(variable.dtype) != "string"
