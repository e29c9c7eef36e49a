"""What memory do ResNet-50, BERT-base and GPT-2-small take on GPUs and TPUs, under each policy?

`mpkeras.forecast` of the models of `gpu_training.py`, at their sizes, with Adam: temporaries, peak, the largest batch
that fits, and products by dtype, as the compilers of the devices say them. Needs `pip install "mpkeras[forecast]"` and
no device. The goal: temporaries at most 0.55 of float32's in 16 bits. `--peer` compiles the step of stock Keras, or of
jmp or flax with optax (`pip install optax jmp flax`), for the same model beside it. Each compilation takes a minute or
two; what is there in `--json` is kept, so that a run goes on where one was stopped, or adds the largest batches.

    python benchmarks/accelerators.py --device h100 --json benchmarks/results/accelerators.json
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import harness
from gpu import keras_models
from gpu.cases import CASES, case_of

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "bfloat16")
GOAL = 0.55
# The policies under which a peer has a step of its own: without loss scaling that of jmp and of flax is optax'.
PEERS = {"keras": ("float32", "mixed_bfloat16", "mixed_float16"), "jmp": ("mixed_float16",), "flax": ("mixed_float16",)}
# What a table shows of a program; none of it is known of one that a compiler refuses.
FIGURES = ("persistent_bytes", "temporary_bytes", "peak_bytes", "largest_batch", "products", "conditionals")


def forecast_model(name: str, device: str, policy: str, *, is_tiny: bool, largest_batch: bool) -> dict:
    """Returns what `mpkeras.forecast` says of one model under one policy."""
    import keras

    import mpkeras

    keras.utils.clear_session()
    case = case_of(name, is_tiny)
    model = keras_models.build(case)
    shape = (case.batch_size, *model.inputs[0].shape[1:])
    report = mpkeras.forecast(
        model,
        keras.KerasTensor(shape, model.inputs[0].dtype),
        device=device,
        policies=[policy],
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        largest_batch=largest_batch,
        verbose=0,
    )
    return {"step": "mpkeras", "batch": case.batch_size, **report.policies[policy]}


def compile_peer(name: str, device: str, policy: str, peer: str, *, is_tiny: bool) -> dict:
    """Returns what the compiler says of the step of a peer for one model, or `"refused"`: why there is none."""
    from mpkeras.tools.forecast.forecast import Forecast
    from mpkeras.tools.forecast.targets import find_target

    target, batch = find_target(device), case_of(name, is_tiny).batch_size
    wanted = {"model": name, "device": device, "policy": policy, "step": peer, "is_tiny": is_tiny}
    done = subprocess.run(
        [sys.executable, "-m", "gpu.peer_programs"],
        input=json.dumps(wanted),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **target.environment(1), "KERAS_BACKEND": "jax", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    if "refused" in found:
        return {"step": peer, "batch": batch, **dict.fromkeys(FIGURES), "fits": False, **found}
    report = Forecast(name, target, 1, batch)
    report.add(policy, found)
    return {"step": peer, "batch": batch, **report.policies[policy]}


def with_ratios(results: list[dict]) -> list[dict]:
    """Returns `results` with the temporaries of each as a share of mpkeras' in float32, and a goal for ours."""
    reference = {
        (result["model"], result["device"]): result["temporary_bytes"]
        for result in results
        if result["policy"] == "float32" and result["step"] == "mpkeras"
    }
    found = []
    for result in results:
        of_float32 = reference.get((result["model"], result["device"]))
        share = None if not of_float32 or not result["temporary_bytes"] else result["temporary_bytes"] / of_float32
        added = {"temporary_share": share}
        if share is not None and result["policy"] != "float32" and result["step"] == "mpkeras":
            added["goal_temporary_share"] = GOAL
        found.append(result | added)
    return found


def rows_of(results: list[dict]) -> list[dict[str, str]]:
    """Returns one row of the table for each result."""

    def gib(n):
        return "" if n is None else f"{n / 2**30:.2f}"

    return [
        {
            "model": result["model"],
            "device": result["device"],
            "policy": result["policy"],
            "step": result["step"],
            "batch": str(result["batch"]),
            "state GiB": gib(result["persistent_bytes"]),
            "temporary GiB": gib(result["temporary_bytes"]),
            "of float32's": "" if result["temporary_share"] is None else f"{result['temporary_share']:.2f}",
            "peak GiB": gib(result["peak_bytes"]),
            "fits": "no program" if "refused" in result else "yes" if result["fits"] else "no",
            "largest batch": "" if result["largest_batch"] is None else str(result["largest_batch"]),
            "products": ", ".join(f"{n} {dtype}" for dtype, n in (result["products"] or {}).items()),
            "conditionals": "" if result["conditionals"] is None else str(result["conditionals"]),
        }
        for result in with_ratios(results)
    ]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--model", action="append", choices=tuple(CASES), help="may be repeated (default: all)")
    option("--device", action="append", metavar="NAME", help="may be repeated (default: h100, a100 and v5p)")
    option("--policy", action="append", metavar="NAME", help="may be repeated (default: all four)")
    option("--peer", action="append", choices=tuple(PEERS), help="a step beside ours; may be repeated (default: none)")
    option("--largest-batch", action="store_true", help="look for the largest batch, too: several compilations each")
    option("--quick", action="store_true", help="tiny models, compiled for this machine's CPU")
    option("--json", type=Path, help="write the results here, and keep those that are there")
    options = parser.parse_args(argv)
    devices = ["cpu"] if options.quick else options.device or ["h100", "a100", "v5p"]
    results = {}
    if options.json and options.json.exists():
        for result in json.loads(options.json.read_text())["results"]:
            results[result["model"], result["device"], result["policy"], result["step"]] = result
    for device, model, step in itertools.product(devices, options.model or CASES, ("mpkeras", *(options.peer or ()))):
        for policy in options.policy or (POLICIES if step == "mpkeras" else PEERS[step]):
            key, largest_batch = (model, device, policy, step), options.largest_batch and step == "mpkeras"
            if key in results and not (largest_batch and results[key]["largest_batch"] is None):
                continue
            if step == "mpkeras":
                found = forecast_model(model, device, policy, is_tiny=options.quick, largest_batch=largest_batch)
            else:
                found = compile_peer(model, device, policy, step, is_tiny=options.quick)
            results[key] = {"model": model, "device": device, "policy": policy, **found}
            if options.json:
                content = {"environment": harness.environment(), "results": with_ratios(list(results.values()))}
                harness.write_json(options.json, content)
    harness.print_table(rows_of(list(results.values())), "Training steps, as the compilers of accelerators make them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
