"""The checks of an audit: of the model as it is, and of its traced forward pass."""

import dataclasses

import keras

from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.seams import (
    ConvertedLayer,
    ModelView,
    RuleNames,
    dtypes,
    missing_kernel_rules,
    mixing,
    native,
    scales_loss,
)
from mpkeras.tools.shared.flops import LAST_WHOLE_NUMBERS, sums_by_dtype
from mpkeras.tools.shared.report import bytes_text, listed, percent

SEVERITIES = ("error", "warning", "note")
# Of all FLOPs: what a float32 layer may cost before it is a warning.
_DEAR = 0.05
# Of all FLOPs: below it the size of a layer does not matter.
_SMALL = 0.01
# Parameters from which the product of a layer is worth a word.
_LARGE_PRODUCT = 4096
_TILE = 8
_WIDEN = '`mpkeras.apply_policy(model, "{}", float32_variables=True)` makes them float32 ones of the same values.'
_ROUND = "`mpkeras.prepare(model)` after `compile` rounds weights stochastically, which loses nothing on average"
_SIZES = ("units", "filters", "output_dim", "key_dim")
_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that an audit found.

    Args:
        severity: `"error"`: training goes wrong. `"warning"`: it may, or speed is lost. `"note"`: good to know.
        layer: Path of the layer, or `None` where it is about the model or the machine.
        what: A sentence, with the numbers.
        remedy: A sentence.
    """

    severity: str
    layer: str | None
    what: str
    remedy: str

    def __str__(self) -> str:
        where = "" if self.layer is None else f"{self.layer}: "
        return f"{self.severity}: {where}{self.what} {self.remedy}"


def in_order(findings) -> list:
    """Returns the findings, the worst first."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def check_variables(model, optimizer) -> list:
    """16-bit variables: small updates are lost in them (P26, P40), those of LoRA among them (P29)."""
    findings = []
    frozen = ModelView(model).frozen_weights()
    # It rounds bfloat16 weights so that nothing is lost.
    is_rounded = isinstance(optimizer, LossScaleOptimizer)
    for layer in ModelView(model).layers:
        for dtype in dtypes.SIXTEEN_BIT_DTYPES:
            # Frozen weights are rounded once; only what moves, statistics among it, loses what is behind its last bit.
            variables = [v for v in ConvertedLayer(layer).own_variables if v.dtype == dtype]
            moving = [v for v in variables if v.trainable or id(v) not in frozen]
            names = [v.name for v in moving if not (v.trainable and is_rounded and dtype == dtypes.SMALL_DTYPE)]
            if not names:
                continue
            remedy = _WIDEN.format(f"mixed_{dtype}")
            severity, bits = "error", "11 significant bits, and nothing below 6e-8"
            if dtype == dtypes.SMALL_DTYPE:
                severity, bits, remedy = "warning", "8 significant bits", f"{_ROUND}; {remedy}"
            what = f"The variables {listed(names)} are {dtype}: {bits}. Updates smaller than their last bit are lost."
            findings.append(Finding(severity, ConvertedLayer(layer).path, what, remedy))
    return findings


def check_optimizer(model, optimizer) -> list:
    """State in 16 bits (P29), and float16 without the loss scaling it needs (P18)."""
    if optimizer is None:
        return []
    findings = []
    is_rounded = isinstance(optimizer, LossScaleOptimizer)
    half = [v for v in optimizer.variables if str(v.dtype) in dtypes.SIXTEEN_BIT_DTYPES]
    if half and not (is_rounded and all(str(v.dtype) == dtypes.SMALL_DTYPE for v in half)):
        what = (
            f"The optimizer keeps {len(half)} of its variables in 16 bits: {listed(v.path for v in half)}. Adam's "
            "second moments underflow there, and weights stop moving or jump."
        )
        remedy = "Call `mpkeras.prepare(model)` after `compile`: its optimizer computes in float32 on bfloat16 state."
        findings.append(Finding("warning", None, what, remedy))
    if not ModelView(model).calculates_in(("float16",)):
        return findings
    if not scales_loss(optimizer):
        what = (
            f"Layers compute in float16, and the optimizer ({type(optimizer).__name__}) scales no loss: gradients "
            "below 3e-8 become 0."
        )
        remedy = "Call `mpkeras.prepare(model)` after `compile`, or use `mpkeras.callbacks.MixedPrecision`."
        findings.append(Finding("error", None, what, remedy))
    elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer) and not isinstance(optimizer, LossScaleOptimizer):
        what = (
            "The loss is scaled by Keras' own LossScaleOptimizer: its scale has no `min_scale` (at 0 it writes NaN "
            "into the weights) and no `max_scale`, skipped steps are not counted, and a skipped step still changes "
            "BatchNormalization statistics and metrics."
        )
        findings.append(Finding("note", None, what, "Call `mpkeras.prepare(model)` after `compile`."))
    return findings


def check_losses(model) -> list:
    """Losses and penalties that are summed in 16 bits (P21)."""
    findings = []
    floatx = keras.config.floatx()
    if floatx in dtypes.SIXTEEN_BIT_DTYPES:
        what = f"`keras.config.floatx()` is {floatx}: losses, metrics and new variables are, too."
        remedy = 'Call `keras.config.set_floatx("float32")`, and choose the arithmetic by a policy.'
        findings.append(Finding("error", None, what, remedy))
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        if isinstance(loss, keras.losses.Loss) and loss.dtype in dtypes.SIXTEEN_BIT_DTYPES:
            is_float16 = loss.dtype == "float16"
            what = f"The loss '{loss.name}' ({type(loss).__name__}) is computed in {loss.dtype}: its sums "
            what += "overflow at 65504." if is_float16 else "keep 8 significant bits."
            findings.append(
                Finding("error" if is_float16 else "warning", None, what, 'Give it `dtype="float32"`, or none.')
            )
    for layer in ModelView(model).layers:
        if ConvertedLayer(layer).regularizes_in_16_bits:
            what = (
                f"Its activity regularizer sums in {layer.compute_dtype}: in float16, 512 activations of 400 give inf."
            )
            remedy = "`mpkeras.apply_policy` and `mpkeras.prepare` let it see float32."
            findings.append(Finding("warning", ConvertedLayer(layer).path, what, remedy))
    return findings


def check_float32_rules(model, rows) -> list:
    """Layers in 16 bits that the default rules keep in float32 (P4), and what large products in float32 cost."""
    all_flops = sum(row.total_flops for row in rows)
    heads = {id(layer) for layer in ModelView(model).known_heads()}
    ends = ModelView(model).last_layers()
    findings = []
    for row in rows:
        if row.rule not in RuleNames.default():  # Others have no kernel in 16 bits.
            continue
        is_activation = row.rule.startswith("activation:")
        if row.compute_dtype not in dtypes.SIXTEEN_BIT_DTYPES:
            if is_activation or row.rule == RuleNames.OUTPUTS:
                findings.extend(_of_float32_product(model, row, all_flops, id(row.layer) in heads))
            continue
        is_gate = is_activation and ends is not None and id(row.layer) not in ends
        reason = RuleNames.reason("Softmax") if row.rule == "activation:softmax" else row.reason
        what = (
            f"{'Its activation' if is_activation else 'It'} computes in {row.compute_dtype}, which the default rule "
            f"'{row.rule}' keeps in float32: {reason}."
        )
        remedy = (
            'Convert the model by `mpkeras.apply_policy` or `mpkeras.prepare`, or give the layer `dtype="float32"`.'
        )
        if is_gate:
            remedy = "Only probabilities need it; `mpkeras.apply_policy` does it."
        findings.append(Finding("note" if is_gate else "warning", row.path, what, remedy))
    return findings


def check_rounded_outputs(model, rows) -> list:
    """Layers so large that they multiply in 16 bits, and whose results, outputs of the model, are rounded."""
    heads = {id(layer) for layer in ModelView(model).known_heads()}
    findings = []
    for row in rows:
        layer = ConvertedLayer(row.layer)
        # Of a wrapper, the layer inside makes them.
        is_maker = id(row.layer) in heads and not isinstance(row.layer, keras.layers.Wrapper)
        if not (is_maker and layer.is_large) or row.compute_dtype not in dtypes.SIXTEEN_BIT_DTYPES:
            continue
        if layer.sums_in_float32:
            continue
        dtype, parameters = row.compute_dtype, row.parameters
        what = f"It makes outputs of the model from {parameters:,} parameters, and rounds them to {dtype}."
        remedy = "`mpkeras.apply_policy` and `mpkeras.prepare` let it sum in float32."
        if layer.has_own_call:
            remedy = (
                f"Its `call` is its author's, and is not looked into. {RuleNames.keeping(row.path)} keeps it in "
                "float32; `Dense`, `EinsumDense` and `ReversibleEmbedding` in its place multiply in 16 bits and sum in "
                "float32."
            )
        findings.append(Finding("note", row.path, what, remedy))
    return findings


def check_written_state(model, rows) -> list:
    """Layers that write state in their `call`: those that do so in 16 bits, and those that stay in float32 for it."""
    findings = []
    for row in rows if ModelView(model).computes_in(dtypes.SIXTEEN_BIT_DTYPES) else ():
        if row.rule != RuleNames.STATE:
            continue
        in_16_bits = row.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES
        what = f"It {'computes' if in_16_bits else 'stays'} in {row.compute_dtype} and {row.reason}."
        remedy = "`mpkeras.apply_policy` and `mpkeras.prepare` keep it in float32." if in_16_bits else "Leave it so."
        findings.append(Finding("warning" if in_16_bits else "note", row.path, what, remedy))
    return findings


def check_missing_kernels(model, rows) -> list:
    """Layers that stay in float32, as the backend has no kernel in 16 bits for them here, and what they cost."""
    view = ModelView(model)
    used = [dtype for dtype in dtypes.SIXTEEN_BIT_DTYPES if view.computes_in((dtype,))]
    rules = {row.rule for row in rows}
    missing = {rule for dtype in used for rule, _ in missing_kernel_rules(dtype, among=rules)}
    all_flops = sum(row.total_flops for row in rows)
    findings = []
    inner: set = set()
    for row in rows:
        in_16_bits = row.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES
        if in_16_bits or row.rule not in missing or id(row.layer) in inner:
            continue
        inside = set(map(id, view.within(row.layer)))
        inner |= inside
        flops = sum(part.total_flops for part in rows if id(part.layer) in inside)
        what = f"It stays in {row.compute_dtype}{_share_text(flops, all_flops)}: it {row.reason.rstrip('.: ')}."
        remedy = "Leave it so: `mpkeras.apply_policy` tries anew on another device or backend, and in another dtype."
        findings.append(Finding("note", row.path, what, remedy))
    return findings


def _of_float32_product(model, row, all_flops, makes_outputs: bool) -> list:
    """Says what a product costs that a rule for an activation, or for outputs, keeps in float32."""
    if row.parameters < _LARGE_PRODUCT or not ModelView(model).computes_in(dtypes.SIXTEEN_BIT_DTYPES):
        return []
    what = f"Its activation keeps all of it in float32: {row.parameters:,} parameters"
    remedy = "Make the activation a layer of its own: the product is in 16 bits then."
    layer = ConvertedLayer(row.layer)
    if makes_outputs and layer.is_large and not layer.has_own_call:
        remedy = (
            "Let it end in logits, without an activation, and give the loss `from_logits=True`: so large a product is "
            "in 16 bits then, and its sums are in float32."
        )
    elif makes_outputs:
        if row.total_flops <= _DEAR * all_flops:
            return []
        what = f"It makes outputs of the model, and stays in float32: {row.parameters:,} parameters"
        remedy = (
            "In 16 bits the outputs would be rounded for good. Where that does no harm, a policy whose `keep_float32` "
            'lacks the rule "outputs" leaves the product of logits in 16 bits.'
        )
    return [Finding("note", row.path, f"{what}{_share_text(row.total_flops, all_flops)}.", remedy)]


def _share_text(flops, all_flops) -> str:
    return f", {percent(flops / all_flops)} of all FLOPs" if all_flops else ""


def check_devices(model, devices, backend: str) -> list:
    """Devices on which 16 bits will not pay (P2)."""
    policy, reason = native.choose(devices, backend)
    used = [dtype for dtype in dtypes.SIXTEEN_BIT_DTYPES if ModelView(model).computes_in((dtype,))]
    if not used:
        suited = "16 bits will not pay on this device, do not bother" if policy == "float32" else f"{policy} suits it"
        what = f"No layer computes in 16 bits. For this device: {suited} ({reason})."
        remedy = "Leave it as it is." if policy == "float32" else f'Try `mpkeras.apply_policy(model, "{policy}")`.'
        return [Finding("note", None, what, remedy)]
    if policy == "float32":
        what = f"{' and '.join(used)} will not pay on this device, do not bother: {reason}."
        remedy = 'Use it for its memory or for another device; otherwise `mpkeras.apply_policy(model, "float32")`.'
        return [Finding("warning", None, what, remedy)]
    computing = [device for device in devices if device.kind != "cpu"] or list(devices)
    natively = set.intersection(*(set(native.native_dtypes(device)) for device in computing))
    slow = [dtype for dtype in used if dtype not in natively]
    if not slow:
        return []
    best = policy.removeprefix("mixed_")
    what = f"{' and '.join(slow)} is not native on this device, and will not pay; {best} is: {reason}."
    return [Finding("warning", None, what, f'`mpkeras.apply_policy(model, "{policy}")`.')]


def check_trace(forward, rows) -> list:
    """What could not be counted, and layers that mix dtypes (P11) or whose dtype the backend refuses."""
    findings = []
    if forward.refusal is not None:
        layer = forward.culprit
        what = f"The backend refuses it. {forward.refusal.what}"
        findings.append(Finding("error", ConvertedLayer(layer).path, what, forward.refusal.remedy))
    elif forward.why_not is not None:
        where = forward.culprit and ConvertedLayer(forward.culprit).path
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
    half = [dtype for dtype in forward.output_dtypes if dtype in dtypes.SIXTEEN_BIT_DTYPES]
    if half:
        what = f"The model returns {' and '.join(half)}: what you compute from it by hand does so in 16 bits."
        remedy = "Let it end in float32: `mpkeras.apply_policy`, or `mpkeras.layers.Activation('linear')` at its end."
        findings.append(Finding("note", None, what, remedy))
    return findings


def check_whole_numbers(model, inputs) -> list:
    """Ids, codes and positions in a batch that a layer would round before they are read."""
    if inputs is None:
        return []
    return [
        Finding("warning", rounded.layer, *rounded.sentences())
        for rounded in ModelView(model).rounded_whole_numbers(inputs)
    ]


def check_counted_numbers(forward, rows) -> list:
    """Positions and the like that a layer counts in 16 bits, beyond what these hold."""
    most: dict = {}
    for owner, dtype, numbers in forward.program.counted if forward.program is not None else ():
        most[owner or 0, dtype] = max(numbers, most.get((owner or 0, dtype), 0))
    findings = []
    for (owner, dtype), numbers in most.items():
        last = LAST_WHOLE_NUMBERS[dtype]
        if numbers - 1 > last:
            what = (
                f"It counts {numbers:,} numbers in {dtype}, which holds every whole number up to {last:,} alone: the "
                "others are rounded."
            )
            remedy = (
                "Count in int32 and compute in float32 what follows, or keep the layer in float32 with "
                f"{RuleNames.keeping(rows[owner].path)}."
            )
            findings.append(Finding("warning", rows[owner].path, what, remedy))
        elif numbers == forward.open_size:
            what = (
                f"It counts in {dtype}, {numbers:,} numbers, as many as were taken for the sizes that the model leaves "
                f"open: beyond {last:,} whole numbers are rounded."
            )
            remedy = "Pass the longest that there may be as `open_size` (`--open-size`)."
            findings.append(Finding("note", rows[owner].path, what, remedy))
    return findings


def check_islands(model, rows) -> list:
    """Layers in float32 that no default rule names, with what each costs (P2, P36)."""
    if not ModelView(model).computes_in(dtypes.SIXTEEN_BIT_DTYPES):
        return []
    by_layer = {id(row.layer): row for row in rows}
    all_flops = sum(row.total_flops for row in rows)
    findings, cheap = [], []
    inner: set = set()
    for row in rows:
        is_wide = row.compute_dtype in ("float32", "float64")
        if row.is_container or not is_wide or row.rule is not None or id(row.layer) in inner:
            continue
        if ConvertedLayer(row.layer).is_output_cast:
            continue
        rows_inside = [by_layer[id(layer)] for layer in ModelView(row.layer).layers]
        inner.update(id(part.layer) for part in rows_inside)
        flops = sum(part.total_flops - part.half_flops for part in rows_inside)
        if all_flops and flops > _DEAR * all_flops:
            # All may do so: the policy of the model alone is of 16 bits then.
            has_others = any(r.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES for r in rows if not r.is_container)
            beside = "while others compute in 16 bits" if has_others else "in a model whose policy is of 16 bits"
            what = (
                f"It computes in {row.compute_dtype} {beside}, and no default rule names it: "
                f"{percent(flops / all_flops)} of all FLOPs, {_bytes(rows_inside)}."
            )
            findings.append(Finding("warning", row.path, what, _remedy_of_island(row, model)))
        elif sum(sums_by_dtype(rows_inside, "output_bytes").values()) or any(
            part.parameters or part.flops is None for part in rows_inside
        ):
            cheap.append((row, rows_inside, flops))
    if cheap:
        findings.append(_of_cheap_islands(cheap, all_flops))
    return findings + _of_wide_products(rows, all_flops)


def _of_cheap_islands(cheap, all_flops) -> Finding:
    parts = [part for _, parts, _ in cheap for part in parts]
    flops = sum(flops for *_, flops in cheap)
    names = listed(f"{row.path} ({row.class_name})" for row, *_ in cheap)
    what = (
        f"In float32 though no default rule names {'it' if len(cheap) == 1 else 'them'}: "
        f"{names}{_share_text(flops, all_flops)}, {_bytes(parts)}."
    )
    remedy = "Right if it is on purpose: each is a cast in and a cast out. `apply_policy` leaves float32 layers alone."
    severity = "warning" if flops > _DEAR * all_flops else "note"
    return Finding(severity, cheap[0][0].path if len(cheap) == 1 else None, what, remedy)


def _of_wide_products(rows, all_flops) -> list:
    """Layers that compute in 16 bits by their policy, and multiply in something wider."""
    wide = [row for row in rows if row.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES and "float32" in (row.flops or {})]
    wide = sorted(wide, key=lambda row: -row.flops["float32"])
    large_heads = [row for row in wide if ConvertedLayer(row.layer).sums_in_float32]
    loops = [row for row in wide if ConvertedLayer(row.layer).multiplies_state_in_float32]
    wide = [row for row in wide if row not in large_heads and row not in loops]
    findings = [_of_large_head(row, all_flops) for row in large_heads]
    findings += [_of_float32_state(row, all_flops) for row in loops]
    if not wide:
        return findings
    share = sum(row.flops["float32"] for row in wide) / all_flops
    # The products of a model itself stand between its layers.
    between = ["operations between the layers of " * row.is_container for row in wide]
    names = listed(f"{text}{row.path} ({row.class_name})" for text, row in zip(between, wide, strict=True))
    what = (
        f"By their policy these compute in 16 bits, yet their products are in float32: {names}, {percent(share)} of "
        "all FLOPs."
    )
    remedy = (
        "Look for float32 inputs, tensors and `float32_island`; a `TFSMLayer` or `JaxLayer` keeps the dtypes it "
        "was made with; and Keras multiplies float16 in float32 on a CPU with torch."
    )
    severity = "warning" if share > _DEAR else "note"
    return [*findings, Finding(severity, wide[0].path if len(wide) == 1 else None, what, remedy)]


def _of_large_head(row, all_flops) -> Finding:
    what = (
        f"It makes outputs of the model, and sums in float32: its 16-bit numbers are multiplied in float32 here"
        f"{_share_text(row.flops['float32'], all_flops)}."
    )
    return Finding("note", row.path, what, "XLA (`jit_compile=True`), and torch on a GPU, multiply them in 16 bits.")


def _of_float32_state(row, all_flops) -> Finding:
    what = f"It multiplies its state in float32{_share_text(row.flops['float32'], all_flops)}."
    remedy = (
        "Right so: nothing but this product carries the state of a `SimpleRNN` from step to step. An `LSTM` and a "
        "`GRU` multiply theirs in 16 bits."
    )
    return Finding("note", row.path, what, remedy)


def _remedy_of_island(row, model) -> str:
    dtype = min(ModelView(model).compute_dtypes() & set(dtypes.SIXTEEN_BIT_DTYPES))
    if row.class_name in ("TFSMLayer", "JaxLayer", "FlaxLayer"):
        return "Its dtypes are fixed in what it wraps: make that anew in 16 bits."
    if id(row.layer) in ModelView(model).bound_layers(dtype):
        return (
            "It is quantized, or runs a layer that is, and no conversion gives it another policy: quantize the model "
            f'after `apply_policy(model, "mixed_{dtype}")`.'
        )
    return (
        f'Unless it needs float32, give it `dtype="mixed_{dtype}"`; `apply_policy(model, "float32")` and then '
        f'`apply_policy(model, "mixed_{dtype}")` converts it with the others.'
    )


def _bytes(parts) -> str:
    weights, outputs = (sum(sums_by_dtype(parts, name).values()) for name in ("weight_bytes", "output_bytes"))
    known = f" and {bytes_text(outputs)} of outputs" if outputs else ""
    return f"{bytes_text(weights)} of weights{known}"


def check_sizes(rows) -> list:
    """Sizes of 16-bit products that are no multiple of 8, as tensor cores want them (P2)."""
    all_flops = sum(row.total_flops for row in rows)
    in_attention = {
        id(layer) for row in rows if isinstance(row.layer, _ATTENTION) for layer in ConvertedLayer(row.layer).inner
    }
    findings = []
    for row in rows:
        has_sizes = row.parameters or isinstance(row.layer, _ATTENTION)
        if row.compute_dtype not in dtypes.SIXTEEN_BIT_DTYPES or id(row.layer) in in_attention or not has_sizes:
            continue
        is_table = isinstance(row.layer, keras.layers.Embedding)
        if row.total_flops < _SMALL * all_flops and not is_table:
            continue
        names = [*_SIZES, "input_dim"] if is_table and row.total_flops else _SIZES
        for name in names:
            n = getattr(row.layer, name, None)
            if type(n) is int and n % _TILE:
                larger = -(-n // _TILE) * _TILE
                share = _share_text(row.total_flops, all_flops) if row.total_flops else ""
                what = f"`{name}` is {n}, no multiple of {_TILE}{share}: tensor cores compute as if it were {larger}."
                findings.append(Finding("note", row.path, what, f"`{name}={larger}` costs the same there, or less."))
    return findings
