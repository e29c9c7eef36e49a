"""What an audit reads from the model as it is: variables, optimizer, losses, and layers that need float32."""

import keras

from mpkeras import _keras
from mpkeras.conversion.apply import scales_loss, without_cast
from mpkeras.conversion.changes import regularizes_in_16_bits
from mpkeras.conversion.plan import computes_in, layers_of
from mpkeras.devices import native
from mpkeras.insight.findings import Finding, listed, percent
from mpkeras.policies.default_rules import DEFAULT_RULES, default_rules
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.scaling.optimizer import LossScaleOptimizer


def check_variables(model) -> list:
    """16-bit variables: small updates are lost in them (P26), those of LoRA among them (P29)."""
    findings = []
    weights = _keras.frozen_weights(model)
    for layer in layers_of(model):
        half = [v for v in _keras.own_variables(layer) if v.dtype in SIXTEEN_BIT_DTYPES]
        # Frozen weights are rounded once; only what moves, statistics among it, loses what is behind its last bit.
        moving = [v for v in half if v.trainable or id(v) not in weights]
        for dtype in SIXTEEN_BIT_DTYPES:
            names = [v.name for v in moving if v.dtype == dtype]
            if names:
                findings.append(_of_variables(layer, names, dtype))
    return findings


def _of_variables(layer, names, dtype) -> Finding:
    digits = {"float16": "11 significant bits, and nothing below 6e-8", "bfloat16": "8 significant bits"}[dtype]
    return Finding(
        "error" if dtype == "float16" else "warning",
        layer.path or layer.name,
        f"The variables {listed(names)} are {dtype}: {digits}. Updates smaller than their last bit are lost.",
        f'`mpkeras.apply_policy(model, "mixed_{dtype}", float32_variables=True)` makes them float32 ones of the same '
        "values.",
    )


def check_optimizer(model, optimizer) -> list:
    """State in 16 bits (P29), and float16 without the loss scaling it needs (P18)."""
    if optimizer is None:
        return []
    findings = []
    half = [v for v in optimizer.variables if str(v.dtype) in SIXTEEN_BIT_DTYPES]
    if half:
        findings.append(
            Finding(
                "warning",
                None,
                f"The optimizer keeps {len(half)} of its variables in 16 bits: {listed(v.path for v in half)}. Adam's "
                "second moments underflow there, and weights stop moving or jump.",
                "Make the model's variables float32 (`apply_policy(..., float32_variables=True)`), and compile anew.",
            )
        )
    if computes_in(model, ("float16",)):
        findings.extend(_of_loss_scale(optimizer))
    return findings


def _of_loss_scale(optimizer) -> list:
    name = type(optimizer).__name__
    if not scales_loss(optimizer):
        return [
            Finding(
                "error",
                None,
                f"Layers compute in float16, and the optimizer ({name}) scales no loss: gradients below 6e-8 become 0.",
                "Call `mpkeras.prepare(model)` after `compile`, or use `mpkeras.callbacks.MixedPrecision`.",
            )
        ]
    is_stock = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if is_stock and not isinstance(optimizer, LossScaleOptimizer):
        return [
            Finding(
                "note",
                None,
                "The loss is scaled by Keras' own LossScaleOptimizer: its scale has no `min_scale` (at 0 it writes NaN "
                "into the weights) and no `max_scale`, skipped steps are not counted, and a skipped step still changes "
                "BatchNormalization statistics and metrics.",
                "Call `mpkeras.prepare(model)` after `compile`.",
            )
        ]
    return []


def check_losses(model) -> list:
    """Losses and penalties that are summed in 16 bits (P21)."""
    findings = []
    if keras.config.floatx() in SIXTEEN_BIT_DTYPES:
        findings.append(
            Finding(
                "error",
                None,
                f"`keras.config.floatx()` is {keras.config.floatx()}: losses, metrics and new variables are, too.",
                'Call `keras.config.set_floatx("float32")`, and choose the arithmetic by a policy.',
            )
        )
    for loss in keras.tree.flatten(getattr(model, "loss", None)):
        if isinstance(loss, keras.losses.Loss) and loss.dtype in SIXTEEN_BIT_DTYPES:
            findings.append(
                Finding(
                    "error" if loss.dtype == "float16" else "warning",
                    None,
                    f"The loss '{loss.name}' ({type(loss).__name__}) is computed in {loss.dtype}: its sums "
                    + ("overflow at 65504." if loss.dtype == "float16" else "keep 8 significant bits."),
                    'Give it `dtype="float32"`, or none.',
                )
            )
    for layer in layers_of(model):
        if regularizes_in_16_bits(layer):
            findings.append(
                Finding(
                    "warning",
                    layer.path or layer.name,
                    f"Its activity regularizer sums in {layer.compute_dtype}: in float16, 512 activations of 400 give "
                    "inf.",
                    "`mpkeras.apply_policy` and `mpkeras.prepare` let it see float32.",
                )
            )
    return findings


def check_float32_rules(model, rows) -> list:
    """Layers in 16 bits that the default rules keep in float32: probability heads (P4), normalization, and so on.

    And large probability heads that are in float32, with what that costs.
    """
    all_flops = sum(row.total_flops for row in rows)
    ends = _last_layers(model)
    findings = []
    for row in rows:
        if row.rule not in default_rules():
            continue
        is_activation = row.rule.startswith("activation:")
        if row.compute_dtype not in SIXTEEN_BIT_DTYPES:
            findings.extend(_of_float32_head(model, row, all_flops) if is_activation else [])
            continue
        is_gate = is_activation and ends is not None and id(row.layer) not in ends
        what = "Its activation" if is_activation else "It"
        findings.append(
            Finding(
                "note" if is_gate else "warning",
                row.path,
                f"{what} computes in {row.compute_dtype}, which the default rule '{row.rule}' keeps in float32: "
                f"{_reason(row)}.",
                "Only probabilities need it; `mpkeras.apply_policy` does it." if is_gate else _REMEDY_OF_RULES,
            )
        )
    return findings


def _of_float32_head(model, row, all_flops) -> list:
    if row.parameters < _LARGE_HEAD or not computes_in(model, SIXTEEN_BIT_DTYPES):
        return []
    share = f", {percent(row.total_flops / all_flops)} of all FLOPs" if all_flops else ""
    return [
        Finding(
            "note",
            row.path,
            f"Its activation keeps all of it in float32: {row.parameters:,} parameters{share}.",
            "Let it end in logits, without an activation, and give the loss `from_logits=True`: that costs nothing. "
            "Elsewhere, make the activation a layer of its own.",
        )
    ]


# Parameters from which the product of a layer is worth a word.
_LARGE_HEAD = 4096
_REMEDY_OF_RULES = (
    'Convert the model by `mpkeras.apply_policy` or `mpkeras.prepare`, or give the layer `dtype="float32"`.'
)


def _reason(row) -> str:
    return dict(DEFAULT_RULES)["Softmax"] if row.rule == "activation:softmax" else row.reason


def _last_layers(model) -> set | None:
    """Returns the `id`s of the layers that return the outputs of a model; `None` where only its `call` knows."""
    graph = _keras.graph_of(model)
    if graph is None:
        return None
    ends = set()
    waiting = keras.tree.flatten(_keras.output_structure(graph))
    while waiting:
        output = waiting.pop()
        layer, _ = _keras.made_by(output)
        ends.add(id(layer))
        if without_cast(output) is not output:
            waiting.append(without_cast(output))
        elif isinstance(layer, keras.Model):
            ends |= _last_layers(layer) or {id(inner) for inner in layers_of(layer)}
        elif isinstance(layer, keras.layers.Wrapper):
            ends.add(id(layer.layer))
    return ends


def check_devices(model, devices, backend: str) -> list:
    """Says so where 16 bits will not pay (P2)."""
    policy, reason = native.choose(devices, backend)
    used = [dtype for dtype in SIXTEEN_BIT_DTYPES if computes_in(model, (dtype,))]
    if not used:
        suited = "16 bits will not pay on this device, do not bother" if policy == "float32" else f"{policy} suits it"
        return [
            Finding(
                "note",
                None,
                f"No layer computes in 16 bits. For this device: {suited} ({reason}).",
                "Leave it as it is." if policy == "float32" else f'Try `mpkeras.apply_policy(model, "{policy}")`.',
            )
        ]
    if policy == "float32":
        return [
            Finding(
                "warning",
                None,
                f"{' and '.join(used)} will not pay on this device, do not bother: {reason}.",
                'Use it for its memory or for another device; otherwise `mpkeras.apply_policy(model, "float32")`.',
            )
        ]
    best = policy.removeprefix("mixed_")
    natively = set.intersection(*(set(native.native_dtypes(device)) for device in _computing(devices)))
    slow = [dtype for dtype in used if dtype not in natively]
    if slow:
        return [
            Finding(
                "warning",
                None,
                f"{' and '.join(slow)} is not native on this device, and will not pay; {best} is: {reason}.",
                f'`mpkeras.apply_policy(model, "{policy}")`.',
            )
        ]
    return []


def _computing(devices) -> list:
    accelerators = [device for device in devices if device.kind != "cpu"]
    return accelerators or list(devices)
