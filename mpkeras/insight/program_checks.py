"""What an audit reads from the traced program: islands of float32, layers that mix dtypes, sizes that do not fit."""

import keras

from mpkeras import _keras
from mpkeras.conversion import mixing
from mpkeras.conversion.apply import CAST_NAME
from mpkeras.conversion.plan import compute_dtypes, computes_in, layers_of
from mpkeras.insight.findings import Finding, listed, mebibytes, percent
from mpkeras.insight.layer_rows import total
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES

# Of all FLOPs: what a float32 layer may cost before it is a warning.
_DEAR = 0.05
# Of all FLOPs: below it the size of a layer does not matter.
_SMALL = 0.01
_TILE = 8
_SIZES = ("units", "filters", "output_dim", "key_dim")
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


def check_trace(forward, rows) -> list:
    """Says what is not known, and names the layers that mix dtypes (P11)."""
    findings = []
    if forward.is_mixing:
        findings.append(_of_mixing(forward))
    elif forward.why_not is not None:
        where = forward.culprit and (forward.culprit.path or forward.culprit.name)
        what = f"FLOPs, casts and outputs are unknown, as the model could not be traced: {forward.why_not}"
        findings.append(Finding("note", where, what, forward.remedy))
    for index, what in forward.mixed.items():
        row = rows[index]
        findings.append(Finding("warning", row.path, f"{what} It computes in float32.", mixing.remedy(row.layer)))
    if forward.program is not None and forward.program.uncounted:
        what = (
            "The program does not say how long a loop or how large a product is, in places: "
            f"{forward.program.uncounted}. Such a loop counts once, a product as if it were of the batch alone."
        )
        findings.append(Finding("note", None, what, "Take the FLOPs of the layers with them as a lower bound."))
    half = [dtype for dtype in forward.output_dtypes if dtype in SIXTEEN_BIT_DTYPES]
    if half:
        what = f"The model returns {' and '.join(half)}: what you compute from it by hand does so in 16 bits."
        remedy = "Let it end in float32: `mpkeras.apply_policy`, or `mpkeras.layers.Activation('linear')` at its end."
        findings.append(Finding("note", None, what, remedy))
    return findings


def _of_mixing(forward) -> Finding:
    layer = forward.culprit
    what = forward.why_not.partition(": ")[2]
    return Finding("error", layer.path or layer.name, f"The backend refuses it. {what}", mixing.remedy(layer))


def check_islands(model, rows) -> list:
    """Layers in float32 that no default rule names, with what each costs (P2, P36)."""
    if not computes_in(model, SIXTEEN_BIT_DTYPES):
        return []
    by_layer = {id(row.layer): row for row in rows}
    named = {id(row.layer) for row in rows if row.rule is not None}
    inner: set = set()
    islands = []
    for row in rows:
        is_wide = row.compute_dtype in ("float32", "float64")
        if row.is_container or not is_wide or {id(row.layer)} & (named | inner) or row.layer.name.startswith(CAST_NAME):
            continue
        all_of_it = [by_layer[id(layer)] for layer in layers_of(row.layer)]
        inner.update(id(part.layer) for part in all_of_it)
        islands.append((row, all_of_it))
    all_flops = sum(row.total_flops for row in rows)
    findings, cheap = [], []
    for row, parts in islands:
        flops = sum(part.total_flops - part.half_flops for part in parts)
        if all_flops and flops > _DEAR * all_flops:
            what = (
                f"It computes in {row.compute_dtype} while others compute in 16 bits, and no default rule names it: "
                f"{percent(flops / all_flops)} of all FLOPs, {_bytes(parts)}."
            )
            findings.append(Finding("warning", row.path, what, _remedy(row, model)))
        elif sum(total(parts, "output_bytes").values()) or any(part.parameters or part.flops is None for part in parts):
            cheap.append((row, parts, flops))
    if cheap:
        findings.append(_of_cheap_islands(cheap, all_flops))
    return findings + _of_wide_products(rows, all_flops)


def _of_cheap_islands(cheap, all_flops) -> Finding:
    parts = [part for _, parts, _ in cheap for part in parts]
    flops = sum(flops for *_, flops in cheap)
    share = f", {percent(flops / all_flops)} of all FLOPs" if all_flops else ""
    what = (
        f"In float32 though no default rule names {'it' if len(cheap) == 1 else 'them'}: "
        f"{listed(f'{row.path} ({row.class_name})' for row, *_ in cheap)}{share}, {_bytes(parts)}."
    )
    remedy = "Right if it is on purpose: each is a cast in and a cast out. `apply_policy` leaves float32 layers alone."
    severity = "warning" if flops > _DEAR * all_flops else "note"
    return Finding(severity, cheap[0][0].path if len(cheap) == 1 else None, what, remedy)


def _of_wide_products(rows, all_flops) -> list:
    """Layers that compute in 16 bits by their policy, and multiply in something wider."""
    wide = [row for row in rows if row.compute_dtype in SIXTEEN_BIT_DTYPES and "float32" in (row.flops or {})]
    wide = sorted(wide, key=lambda row: -row.flops["float32"])
    if not wide:
        return []
    share = sum(row.flops["float32"] for row in wide) / all_flops
    what = (
        f"By their policy these compute in 16 bits, yet their products are in float32: "
        f"{listed(map(_name, wide))}, {percent(share)} of all FLOPs."
    )
    remedy = (
        "Look for float32 inputs, tensors and `float32_island`; a `TFSMLayer` or `JaxLayer` keeps the dtypes it "
        "was made with; and Keras multiplies float16 in float32 on a CPU with torch."
    )
    return [Finding("warning" if share > _DEAR else "note", wide[0].path if len(wide) == 1 else None, what, remedy)]


def _name(row) -> str:
    between = "operations between the layers of " * row.is_container
    return f"{between}{row.path} ({row.class_name})"


def _remedy(row, model) -> str:
    dtype = min(compute_dtypes(model) & set(SIXTEEN_BIT_DTYPES))
    if row.class_name in ("TFSMLayer", "JaxLayer", "FlaxLayer"):
        return "Its dtypes are fixed in what it wraps: make that anew in 16 bits."
    return (
        f'Unless it needs float32, give it `dtype="mixed_{dtype}"`; `apply_policy(model, "float32")` and then '
        f'`apply_policy(model, "mixed_{dtype}")` converts it with the others.'
    )


def _bytes(parts) -> str:
    weights, outputs = (sum(total(parts, name).values()) for name in ("weight_bytes", "output_bytes"))
    known = f" and {mebibytes(outputs)} of outputs" if outputs else ""
    return f"{mebibytes(weights)} of weights{known}"


def check_sizes(rows) -> list:
    """Sizes of 16-bit products that are no multiple of 8, as tensor cores want them (P2)."""
    all_flops = sum(row.total_flops for row in rows)
    in_attention = {
        id(layer) for row in rows if isinstance(row.layer, _ATTENTION) for layer in _keras.flatten_layers(row.layer)
    }
    findings = []
    for row in rows:
        has_sizes = row.parameters or isinstance(row.layer, _ATTENTION)
        if row.compute_dtype not in SIXTEEN_BIT_DTYPES or id(row.layer) in in_attention or not has_sizes:
            continue
        share = row.total_flops / all_flops if all_flops else None
        is_table = isinstance(row.layer, keras.layers.Embedding)
        if share is not None and share < _SMALL and not is_table:
            continue
        names = [*_SIZES, "input_dim"] if is_table and row.total_flops else _SIZES
        for name in names:
            n = getattr(row.layer, name, None)
            if type(n) is int and n % _TILE:
                larger = -(-n // _TILE) * _TILE
                of_all = f", {percent(share)} of all FLOPs" if share else ""
                what = f"`{name}` is {n}, no multiple of {_TILE}{of_all}: tensor cores compute as if it were {larger}."
                findings.append(Finding("note", row.path, what, f"`{name}={larger}` costs the same there, or less."))
    return findings
