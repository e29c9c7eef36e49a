"""What does rematerialization save and cost in the training steps of BERT-base, GPT-2-small and ResNet-50 on GPUs?

`mpkeras.forecast` of the models of `gpu_training.py`, at their sizes, with Adam, under each policy and each `remat`:
state, temporaries, peak, whether it fits, and the FLOPs of the products as a factor of those of the step that keeps
everything. Needs `pip install "mpkeras[forecast]"` and no device. The goals are those of a causal transformer and of a
convolutional network in 16 bits. `--peer` compiles the models as `keras.RematScope` makes them beside it. A compilation
takes about 25 seconds on two cores; what is there in `--json` is kept, so that a run goes on where one was stopped.

    python benchmarks/remat.py --device h100 --policy mixed_bfloat16 --peer full --json benchmarks/results/remat.json
"""

import argparse
import contextlib
import json
from pathlib import Path

import harness
from gpu.cases import CASES, case_of

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# By device, what is compiled if nothing else is asked for. A T4 has no units for bfloat16.
DEVICES = {
    "h100": ("float32", "mixed_bfloat16"),
    "l4": ("mixed_bfloat16",),
    "t4": ("mixed_float16",),
    "cpu": ("float32", "mixed_bfloat16"),
}
REMATS = (None, "products", "blocks")
PEERS = ("full", "activations")
# `(share of the temporaries, factor of the FLOPs)` at the most, in 16 bits.
GOALS = {
    ("gpt2_small", "blocks"): (0.15, 1.25),
    ("gpt2_small", "products"): (0.30, 1.05),
    ("resnet50", "products"): (0.65, 1.01),
}
FIGURES = ("persistent_bytes", "temporary_bytes", "peak_bytes", "fits", "step_time_lower_bound_ms")


def compile_steps(name: str, device: str, policy: str, remats, *, is_tiny: bool) -> list[dict]:
    """Returns what the compiler of `device` says of the steps of one model, one for each of `remats`.

    One that starts with `"RematScope"` is the model made in that scope of Keras, in the step of mpkeras.
    """
    import keras

    import mpkeras
    from gpu import keras_models

    found = []
    case = case_of(name, is_tiny)
    own = [remat for remat in remats if not f"{remat}".startswith("RematScope")]
    for group in [own, *([remat] for remat in remats if remat not in own)]:
        if not group:
            continue
        keras.utils.clear_session()
        is_peer = group[0] not in own
        scope = keras.RematScope(mode=group[0].split()[-1]) if is_peer else contextlib.nullcontext()
        with scope:
            model = keras_models.build(case)
        chosen = [mpkeras.Policy(policy, remat=None if is_peer else remat).renamed(f"{remat}") for remat in group]
        shape = (case.batch_size, *model.inputs[0].shape[1:])
        try:
            report = mpkeras.forecast(
                model,
                keras.KerasTensor(shape, model.inputs[0].dtype),
                device=device,
                policies=chosen,
                optimizer="adam",
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                verbose=0,
            )
        except ValueError as error:
            if not is_peer:
                raise
            found.append({"remat": group[0], "batch": case.batch_size, "refused": _reason(error)})
            continue
        for remat in group:
            said = report.policies[f"{remat}"]
            flops = sum(said["matrix_flops"].values())
            figures = {key: said[key] for key in FIGURES}
            found.append({"remat": remat, "batch": case.batch_size, "matrix_flops": flops, **figures})
    return found


def _reason(error) -> str:
    """Returns why there is no program, without the advice, and without where on this machine it was found out."""
    return str(error).partition("Received: ")[2].partition(" The error occurred")[0]


def with_ratios(results: list[dict]) -> list[dict]:
    """Returns `results` with temporaries and FLOPs to those of the step that keeps everything, and the goals."""
    everything = {
        (result["model"], result["device"], result["policy"]): result for result in results if result["remat"] is None
    }
    found = []
    for result in results:
        kept = everything.get((result["model"], result["device"], result["policy"]))
        added = {}
        if kept is not None and "refused" not in result:
            added["temporary_share"] = result["temporary_bytes"] / kept["temporary_bytes"]
            added["flops_factor"] = result["matrix_flops"] / kept["matrix_flops"]
            goal = GOALS.get((result["model"], result["remat"]))
            if goal is not None and result["policy"] != "float32":
                added["goal_temporary_share"], added["goal_flops_factor"] = goal
        found.append(result | added)
    return found


def rows_of(results: list[dict]) -> list[dict[str, str]]:
    """Returns one row of the table for each result."""

    def gib(result, key):
        return f"{result[key] / 2**30:.2f}" if key in result else ""

    def ratio(result, key):
        if key not in result:
            return ""
        goal = f" (goal {result[f'goal_{key}']:.2f})" if f"goal_{key}" in result else ""
        return f"{result[key]:.2f}{goal}"

    return [
        {
            "model": result["model"],
            "device": result["device"],
            "policy": result["policy"],
            "remat": f"{result['remat']}",
            "batch": str(result["batch"]),
            "state GiB": gib(result, "persistent_bytes"),
            "temporary GiB": gib(result, "temporary_bytes"),
            "of everything kept": ratio(result, "temporary_share"),
            "peak GiB": gib(result, "peak_bytes"),
            "FLOPs": ratio(result, "flops_factor"),
            "fits": "no program" if "refused" in result else "yes" if result["fits"] else "no",
        }
        for result in with_ratios(results)
    ]


def _in_order(results: dict) -> list[dict]:
    devices, models = list(DEVICES), list(CASES)
    remats = [*REMATS, *(f"RematScope {mode}" for mode in PEERS)]

    def place(result):
        policy, remat = POLICIES.index(result["policy"]), remats.index(result["remat"])
        return models.index(result["model"]), devices.index(result["device"]), policy, remat

    return sorted(results.values(), key=place)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--model", action="append", choices=tuple(CASES), help="may be repeated (default: all)")
    option("--device", action="append", choices=tuple(DEVICES), help="may be repeated (default: h100, l4 and t4)")
    option("--policy", action="append", choices=POLICIES, help="may be repeated (default: those of the device)")
    option("--peer", action="append", choices=PEERS, help="a mode of keras.RematScope beside it; may be repeated")
    option("--quick", action="store_true", help="tiny models, compiled for this machine's CPU")
    option("--json", type=Path, help="write the results here, and keep those that are there")
    options = parser.parse_args(argv)
    devices = ["cpu"] if options.quick else options.device or ["h100", "l4", "t4"]
    wanted = [*REMATS, *(f"RematScope {mode}" for mode in options.peer or ())]
    results = {}
    if options.json and options.json.exists():
        for result in json.loads(options.json.read_text())["results"]:
            results[result["model"], result["device"], result["policy"], result["remat"]] = result
    for name in options.model or CASES:
        for device in devices:
            for policy in options.policy or DEVICES[device]:
                missing = [remat for remat in wanted if (name, device, policy, remat) not in results]
                if not missing:
                    continue
                for found in compile_steps(name, device, policy, missing, is_tiny=options.quick):
                    place = {"model": name, "device": device, "policy": policy}
                    results[name, device, policy, found["remat"]] = {**place, **found}
                if options.json:
                    content = {"environment": harness.environment(), "results": with_ratios(_in_order(results))}
                    harness.write_json(options.json, content)
    harness.print_table(rows_of(_in_order(results)), "Steps that compute again, as compilers of GPUs make them")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
