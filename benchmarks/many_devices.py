"""What do a GPT-2-small and a transformer of 1.3 billion weights take on each of 1, 4 and 8 GPUs, and what travels?

`mpkeras.forecast` of training steps with Adam, in three layouts: `DataParallel`, `mpkeras.sharded()` ("weights") and
`mpkeras.sharded(shard="state")` ("state"); under float32, `mixed_bfloat16` and small state (`bfloat16`). Beside them
stock Keras: its own train step and optimizer, without mpkeras, compiled for the same devices with the same layout. Its
slots lie as their weights, so it has no layout "state". Of each program: state, temporaries and peak of one device,
whether it fits, and the bytes of collectives by dtype, those of the results on one device in a step.

Needs `pip install "mpkeras[forecast]"` and no device. Of the policies and layouts those are compiled that tell the
others' figures as well; `--all` compiles each with each. A program of the larger model takes a minute or two on two
cores. What is there in `--json` is kept, so that a run goes on where one was stopped.

    python benchmarks/many_devices.py --json benchmarks/results/many_devices.json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import harness
from gpu.cases import TINY_CASES, Case, TransformerSizes, case_of

# Sequences are those of one device. The larger one is GPT-3 XL with heads that make up its width.
CASES = {
    "gpt2_small": case_of("gpt2_small", is_tiny=False, batch_size=2),
    "gpt_1.3b": Case("decoder", 1, 1e-4, TransformerSizes(1024, 2048, 16, 24, 50304, None)),
}
TINY = TINY_CASES["gpt2_small"]
COUNTS = (8, 1, 4)
LAYOUTS = ("data", "weights", "state")
POLICIES = ("float32", "mixed_bfloat16", "bfloat16")
WHO = ("mpkeras", "stock")
FIGURES = ("persistent_bytes", "temporary_bytes", "peak_bytes", "collectives", "travels_otherwise")
PEER = Path(__file__).with_name("many_devices_peer.py")


def exists(layout: str, count: int, who: str) -> bool:
    """Whether there is such a program: one device has nothing to split, and stock slots lie as their weights."""
    return layout == "data" if count == 1 else not (who == "stock" and layout == "state")


def is_usual(layout: str, count: int, policy: str, who: str) -> bool:
    """Whether a program that exists is compiled without `--all`."""
    return policy == "mixed_bfloat16" or (who == "mpkeras" and (count == 1 or layout == "weights"))


def build_case(case: Case):
    """Returns the model of `case`, whose weights have no values: a compiler needs none, and these are gigabytes."""
    import keras

    from gpu import keras_models

    with keras.StatelessScope(initialize_variables=False):
        return keras_models.build(case)


def compile_ours(case: Case, device: str, count: int, layout: str, policies: list[str]) -> dict[str, dict]:
    """Returns what the compiler of `device` says of the steps of mpkeras, by policy."""
    import keras

    import mpkeras

    keras.utils.clear_session()
    devices = count if layout == "data" else mpkeras.sharded(devices=count, shard=layout)
    report = mpkeras.forecast(
        build_case(case),
        (case.batch_size * count, case.sizes.length),
        device=device,
        devices=devices,
        policies=policies,
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        verbose=0,
    )
    return {name: {key: said[key] for key in FIGURES} for name, said in report.policies.items()}


def compile_stock(case: Case, device: str, count: int, layout: str, policies: list[str]) -> dict[str, dict]:
    """Returns what the compiler of `device` says of the steps of stock Keras, by policy, in a process of its own."""
    from mpkeras.tools.forecast.targets import find_target

    wanted = {"case": [*case[:3], vars(case.sizes)], "device": device, "count": count, "layout": layout}
    environment = {**os.environ, **find_target(device).environment(count), "KERAS_BACKEND": "jax"}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "said.json"
        for policy in policies:
            asked = json.dumps({**wanted, "policy": policy})
            subprocess.run([sys.executable, str(PEER), asked, str(path)], env=environment, check=True)
            found[policy] = {key: value for key, value in json.loads(path.read_text()).items() if key in FIGURES}
    return found


def with_fits(result: dict) -> dict:
    """Returns `result` with whether the program fits in what one device has for it."""
    from mpkeras.tools.forecast.targets import find_target

    return {**result, "fits": result["peak_bytes"] <= find_target(result["device"]).usable_bytes}


def bytes_by_dtype(result: dict, *kinds: str) -> dict[str, int]:
    """Returns the bytes that collectives of these kinds move in a step, by dtype; of no kind: of all others."""
    found: Counter = Counter()
    known = ("all-gather", "all-reduce", "reduce-scatter")
    for collective in result["collectives"]:
        if collective["kind"] in kinds or (not kinds and collective["kind"] not in known):
            found[collective["dtype"]] += collective["bytes"]
    return dict(found)


def rows_of(results: list[dict]) -> list[dict[str, str]]:
    """Returns one row of the table for each result."""

    def gib(n):
        return f"{n / 2**30:.2f}"

    def moved(found):
        # Loss and norm are a few bytes.
        return ", ".join(f"{n / 2**20:.1f} {dtype}" for dtype, n in sorted(found.items()) if n >= 2**16)

    return [
        {
            "model": result["model"],
            "device": f"{result['devices']} x {result['device']}",
            "layout": result["layout"] if result["devices"] > 1 else "",
            "policy": result["policy"],
            "step": result["who"],
            "state GiB": gib(result["persistent_bytes"]),
            "temporary GiB": gib(result["temporary_bytes"]),
            "peak GiB": gib(result["peak_bytes"]),
            "fits": "yes" if result["fits"] else "no",
            "gathered MiB": moved(bytes_by_dtype(result, "all-gather")),
            "reduced MiB": moved(bytes_by_dtype(result, "all-reduce", "reduce-scatter")),
            "otherwise MiB": moved(bytes_by_dtype(result)),
            "not as the policy says": "" if result["who"] == "stock" else str(len(result["travels_otherwise"])),
        }
        for result in results
    ]


def _in_order(results: dict) -> list[dict]:
    def place(result):
        orders = zip((tuple(CASES), LAYOUTS, POLICIES, WHO), ("model", "layout", "policy", "who"), strict=True)
        model, *others = (values.index(result[key]) for values, key in orders)
        return model, result["device"], result["devices"], *others

    return sorted(results.values(), key=place)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--model", action="append", choices=tuple(CASES), help="may be repeated (default: all)")
    option("--device", default="h100", help="of `mpkeras.forecast` (default: h100)")
    option("--devices", action="append", type=int, choices=COUNTS, help="may be repeated (default: 8, 1 and 4)")
    option("--layout", action="append", choices=LAYOUTS, help="may be repeated (default: all)")
    option("--policy", action="append", choices=POLICIES, help="may be repeated (default: all)")
    option("--who", action="append", choices=WHO, help="may be repeated (default: both)")
    option("--all", action="store_true", help="every policy in every layout")
    option("--quick", action="store_true", help="a tiny model, compiled for this machine's CPU")
    option("--json", type=Path, help="write the results here, and keep those that are there")
    options = parser.parse_args(argv)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    results = {}
    if options.json and options.json.exists():
        for result in json.loads(options.json.read_text())["results"]:
            results[_key(result)] = result
    device = "cpu" if options.quick else options.device
    for model in options.model or CASES:
        case = TINY if options.quick else CASES[model]
        for count in options.devices or COUNTS:
            for layout in options.layout or LAYOUTS:
                for who in options.who or WHO:
                    place = {"model": model, "device": device, "devices": count, "layout": layout, "who": who}
                    missing = [
                        policy
                        for policy in options.policy or POLICIES
                        if options.all or is_usual(layout, count, policy, who)
                        if _key({**place, "policy": policy}) not in results
                    ]
                    if not missing or not exists(layout, count, who):
                        continue
                    compile_steps = compile_ours if who == "mpkeras" else compile_stock
                    for policy, said in compile_steps(case, device, count, layout, missing).items():
                        batch = case.batch_size * count
                        result = with_fits({**place, "policy": policy, "batch": batch, **said})
                        results[_key(result)] = result
                    if options.json:
                        content = {"environment": harness.environment(), "results": _in_order(results)}
                        harness.write_json(options.json, content)
    title = "Steps on many devices: bytes of one device, and what travels in a step"
    harness.print_table(rows_of(_in_order(results)), title)
    return 0


def _key(result: dict) -> tuple:
    return tuple(result[key] for key in ("model", "device", "devices", "layout", "policy", "who"))


if __name__ == "__main__":
    raise SystemExit(main())
