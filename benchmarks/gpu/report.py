"""What is said of the measurements: rates, ratios, what loss scaling costs, and the goals."""

import harness
from gpu.cases import Case, flops_per_step
from gpu.trainer import median_of
from gpu.variants import (
    FLOAT32,
    KERAS_FLOAT16,
    MPKERAS_BFLOAT16,
    MPKERAS_FLOAT16,
    TF32,
    TORCH_BFLOAT16,
    TORCH_FLOAT16,
    VARIANTS,
)

SPEED_GOAL, SPEED_MODELS = 1.7, ("resnet50", "bert_base")
MEMORY_GOAL = 0.67
NO_PEAK = "this device's runtime counts no memory"
SHARED_PEAK = "variants shared a process, and its peak is that of the largest"
NO_UTILISATION = "only said of a GPU: a CPU has no 16-bit matrix peak that float32 could be held against"


def summarized(model: str, case: Case, measured: dict, peak_flops_per_s: float | None, are_shared: bool) -> list[dict]:
    """Returns a result for each variant of `model`: what was measured, and what follows from it.

    A number that there is none of is `None`, and the reason is in `"notes"`.

    Args:
        measured: What `rounds.measure_model` returned.
        peak_flops_per_s: Measured rate of 16-bit matrix products; `None` for no utilisation.
        are_shared: Whether variants shared processes.
    """
    return [
        {"model": model, "variant": name, "unit": case.unit, "batch_size": case.batch_size}
        | _result(name, case, measured, peak_flops_per_s, are_shared)
        for name in measured
    ]


def _result(name, case, measured, peak_flops_per_s, are_shared) -> dict:
    own, notes = measured[name], []
    found = {key: own.get(key) for key in ("losses", "loss_scale", "params", "attention", "compiler_bytes")}
    found |= {"prepare_s": own.get("prepare_s"), "group": own["group"], "peak_bytes": own.get("peak_bytes")}
    if found["peak_bytes"] is None or are_shared:
        found["peak_bytes"] = None
        notes.append("no peak memory: " + (own["unavailable"] or (SHARED_PEAK if are_shared else NO_PEAK)))
    if not own["blocks"]:
        missing = ("step_ms", "queue_ms", "per_s", "speedup", "speedup_tf32", "memory_ratio", "scaling_ms")
        return {**found, **dict.fromkeys((*missing, "utilisation", "flops_per_s")), "notes": [own["unavailable"]]}
    step_ms = [block["step_ms"] for block in own["blocks"]]
    found |= {"step_ms": harness.summarize(step_ms), "queue_ms": median_of(own["blocks"], "queue_ms")}
    found["per_s"] = harness.summarize([case.units_per_step / ms * 1e3 for ms in step_ms])
    found["flops_per_s"] = flops_per_step(case) / found["step_ms"]["median"] * 1e3
    found["utilisation"] = found["flops_per_s"] / peak_flops_per_s if peak_flops_per_s else None
    if peak_flops_per_s is None:
        notes.append("no utilisation: " + NO_UTILISATION)
    found["speedup"] = speedup(measured, name, FLOAT32)
    found["speedup_tf32"] = speedup(measured, name, TF32)
    if found["speedup"] and not found["speedup"]["paired"]:
        notes.append("its float32 was timed before, not in the same rounds: the memory did not hold both")
    found["memory_ratio"] = None
    if found["peak_bytes"] and measured.get(FLOAT32, {}).get("peak_bytes"):
        found["memory_ratio"] = found["peak_bytes"] / measured[FLOAT32]["peak_bytes"]
    found["scaling_ms"] = scaling_ms(measured, name)
    if found["attention"] == "XLA" and VARIANTS[name].dtype != "float32":
        notes.append("attention without the flash kernel")
    return {**found, "notes": notes}


def speedup(measured: dict, name: str, baseline: str) -> dict | None:
    """Returns by how much `name` is faster than `baseline`, as a summary; `None` where one was not timed.

    `"paired"` tells whether the ratios are those within each round. Otherwise there is one: that of the medians.
    """
    own, other = measured.get(name), measured.get(baseline)
    if not own or not other or not own["blocks"] or not other["blocks"]:
        return None
    own_ms, other_ms = ([block["step_ms"] for block in found["blocks"]] for found in (own, other))
    is_paired = own["group"] == other["group"]
    if is_paired:
        return {**harness.summarize(harness.paired_ratios(other_ms, own_ms)), "paired": True}
    ratio = harness.summarize(other_ms)["median"] / harness.summarize(own_ms)["median"]
    return {**harness.summarize([ratio]), "paired": False}


def scaling_ms(measured: dict, name: str) -> dict | None:
    """Returns the milliseconds that loss scaling adds to a step, as a summary of the differences within each round."""
    bare = VARIANTS[name].unscaled
    if bare is None or not measured[name]["blocks"] or not measured.get(bare, {}).get("blocks"):
        return None
    pairs = zip(measured[name]["blocks"], measured[bare]["blocks"], strict=True)
    return harness.summarize([block["step_ms"] - other["step_ms"] for block, other in pairs])


def goals(results: list[dict], is_judged: bool) -> list[dict]:
    """Returns each goal with what was measured. `"met"` is `None` where nothing was, or where it is not judged.

    Args:
        is_judged: Whether this was the full size on a GPU. On a CPU 16 bits are slower, and no goal speaks of it.
    """
    found = []
    for model in dict.fromkeys(result["model"] for result in results):
        by_name = {result["variant"]: result for result in results if result["model"] == model}
        for name, others in (
            (MPKERAS_FLOAT16, {"stock Keras": (KERAS_FLOAT16,), "the faster torch": TORCH_FLOAT16}),
            (MPKERAS_BFLOAT16, {"the faster torch": TORCH_BFLOAT16}),
        ):
            own = by_name.get(name, {})
            values = []
            if model in SPEED_MODELS:
                speed = (own.get("speedup") or {}).get("median")
                values.append((f"at least {SPEED_GOAL} x float32 (TF32 off)", speed, SPEED_GOAL, 1))
            values.append((f"at most {MEMORY_GOAL} of float32's memory", own.get("memory_ratio"), MEMORY_GOAL, -1))
            for words, names in others.items():
                values.append((f"ahead of {words} (x its rate)", _rate_ratio(by_name, name, names), 1.0, 1))
            for text, value, bound, sign in values:
                met = sign * value >= sign * bound if is_judged and value is not None else None
                found.append({"model": model, "variant": name, "goal": text, "value": value, "met": met})
    return found


def _rate_ratio(by_name, name, others) -> float | None:
    """Returns the rate of `name` divided by that of the fastest of `others`."""
    rates = {key: by_name[key]["per_s"] for key in (name, *others) if key in by_name and by_name[key]["per_s"]}
    fastest = max((rates[key]["median"] for key in others if key in rates), default=None)
    return rates[name]["median"] / fastest if name in rates and fastest else None


def goal_lines(found: list[dict]) -> list[str]:
    """Returns a line for each goal."""
    words = {True: "met", False: "NOT met", None: "not judged"}
    return [
        f"{goal['model']}, {goal['variant']}: {goal['goal']}: "
        f"{'not measured' if goal['value'] is None else format(goal['value'], '.2f')}, {words[goal['met']]}"
        for goal in found
    ]


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "model": result["model"],
            "variant": result["variant"],
            "per s": _cell(result["per_s"], ",.1f") + (f" {result['unit']}" if result["per_s"] else ""),
            "step ms (quartiles)": _spread(result["step_ms"]),
            "queue ms": _cell(result["queue_ms"], ".1f"),
            "x float32": _cell(result["speedup"], ".2f"),
            "x TF32": _cell(result["speedup_tf32"], ".2f"),
            "peak GiB": _cell(result["peak_bytes"] and result["peak_bytes"] / 2**30, ".2f"),
            "planned GiB": _cell(result["compiler_bytes"] and result["compiler_bytes"] / 2**30, ".2f"),
            "of float32's": _cell(result["memory_ratio"], ".2f"),
            "scaling ms": _cell(result["scaling_ms"], "+.2f"),
            "utilisation": _cell(result["utilisation"], ".1%"),
            "loss": _losses(result["losses"]),
            "attention": result["attention"] or "-",
        }
        for result in results
    ]


def note_lines(results: list[dict]) -> list[str]:
    """Returns what stands behind the dashes of the table, each reason once."""
    where = {}
    for result in results:
        for note in result["notes"]:
            where.setdefault(note, []).append(f"{result['model']}, {result['variant']}")
    return [
        f"{note} ({'; '.join(names)})" if len(names) <= 3 else f"{note} ({len(names)} variants)"
        for note, names in where.items()
    ]


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the speed in float32's as bars."""
    groups = {}
    for result in results:
        if result["speedup"] and result["variant"] != FLOAT32:
            groups.setdefault(result["model"], {})[result["variant"]] = result["speedup"]
    harness.write_bar_plot(
        path,
        groups,
        title="Training speed on JAX and torch",
        ylabel="rate / rate of Keras in float32 (TF32 off)",
        goals=dict.fromkeys(SPEED_MODELS, SPEED_GOAL),
    )


def _cell(value, form: str) -> str:
    if isinstance(value, dict):
        value = value["median"]
    return "-" if value is None else format(value, form)


def _spread(summary) -> str:
    if summary is None:
        return "-"
    return f"{summary['median']:.2f} ({summary['q1']:.2f} - {summary['q3']:.2f})"


def _losses(losses) -> str:
    return f"{losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "-"
