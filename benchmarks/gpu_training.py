"""How fast, and in how much memory, do ResNet-50, BERT-base and GPT-2-small train on one GPU?

Keras on JAX in float32 (TF32 off and on), with stock `mixed_float16`, and with mpkeras in `mixed_float16` and
`mixed_bfloat16`; beside them the same architectures in plain torch with `torch.autocast` and
`torch.amp.GradScaler`, op by op and compiled. Needs JAX, Keras and, for torch's part, torch: no TensorFlow.

Each variant has a process of its own, so that its memory is its own. The processes live side by side and train
a block of steps one at a time, in interleaved rounds: benchmarks/gpu/README.md has the commands and the columns.

    python benchmarks/gpu_training.py --model resnet50
    python benchmarks/gpu_training.py --tiny
"""

import argparse
import importlib.util
import sys
from pathlib import Path

import harness
from gpu import report
from gpu.cases import CASES, FLOPS_FORMULA, case_of, flops_per_step
from gpu.rounds import WorkerError, Workers, measure_model
from gpu.variants import VARIANTS

QUESTION = __doc__.splitlines()[0]
# Large enough to keep every matrix unit busy for milliseconds.
MATRIX_SIZE, TINY_MATRIX_SIZE = 8192, 128
DEFAULTS = {"rounds": 8, "steps": 20, "warm_up": 6}
TINY = {"rounds": 2, "steps": 2, "warm_up": 4}


def measure(options: argparse.Namespace, log=print, keep=lambda content: None) -> dict:
    """Returns the content of the JSON: environments, the matrix peak, results and goals.

    Args:
        keep: Gets what there is after each model.
    """
    workers = Workers(shared=options.tiny, torch_python=options.torch_python or sys.executable)
    content = {"environments": [], "matrix_flops_per_s": {}, "flops_formula": FLOPS_FORMULA, "results": []}
    try:
        content |= _devices(options, workers)
        is_gpu = content["device"]["kind"] == "gpu"
        peak = content["matrix_peak_flops_per_s"] if is_gpu else None
        for model in options.model:
            batch_size = getattr(options, f"{model}_batch")
            settings = _settings(options) | {"batch_size": batch_size}
            measured = measure_model(model, options.variant, workers, settings, is_gpu=is_gpu, log=log)
            case = case_of(model, options.tiny, batch_size)
            content["results"] += report.summarized(model, case, measured, peak, workers.are_shared)
            content.setdefault("model_flops_per_step", {})[model] = flops_per_step(case)
            for name, result in measured.items():
                if result["blocks"]:
                    content.setdefault("blocks", {}).setdefault(model, {})[name] = result["blocks"]
            content["goals"] = report.goals(content["results"], is_judged=is_gpu and not options.tiny)
            keep(content)
    finally:
        workers.close()
    return content


def _devices(options, workers) -> dict:
    """Measures the matrix peak first, in processes that end before anything is trained."""
    environments, rates, devices = [], {}, {}
    for framework in dict.fromkeys(VARIANTS[name].framework for name in options.variant):
        worker = workers.start(framework)
        try:
            hello = worker.ask("hello")
            environments.append(hello["environment"])
            devices[framework] = hello["device"]
            rates[framework] = worker.ask("matrix", size=TINY_MATRIX_SIZE if options.tiny else MATRIX_SIZE)
        finally:
            workers.release(worker)
    kinds = {device["kind"] for device in devices.values()}
    if len(kinds) > 1:
        raise WorkerError(
            f"Expected JAX and torch on the same device. Received: {devices}. "
            "Install the GPU version of both, or choose one side's variants with `--variant`."
        )
    sixteen = [rates[name][dtype] for name in rates for dtype in ("float16", "bfloat16")]
    return {
        "environments": environments,
        "device": next(iter(devices.values())),
        "matrix_flops_per_s": rates,
        "matrix_peak_flops_per_s": max(sixteen),
    }


def _settings(options) -> dict:
    return {
        "rounds": options.rounds,
        "steps": options.steps,
        "warm_up": (TINY if options.tiny else DEFAULTS)["warm_up"],
        "is_tiny": options.tiny,
        "data_format": options.data_format,
        # On a CPU inductor compiles C++ for minutes: there its front half shows that the code can be traced.
        "torch_compiler": "aot_eager" if options.tiny else "inductor",
        "torch_mode": options.torch_mode,
    }


def _shown(options, content) -> dict:
    """Returns the settings as tables and results show them."""
    return {
        **_settings(options),
        "batch sizes": {result["model"]: result["batch_size"] for result in content["results"]},
    }


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    several = "may be given more than once (default: all)"
    parser.add_argument("--model", action="append", choices=list(CASES), help=several)
    parser.add_argument("--variant", action="append", choices=list(VARIANTS), metavar="NAME", help=several)
    parser.add_argument("--list", action="store_true", help="print the names of the variants and end")
    for name, case in CASES.items():
        option = f"--{name.replace('_', '-')}-batch"
        parser.add_argument(option, type=int, metavar="N", help=f"examples a step (default: {case.batch_size})")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed blocks of each variant (default: 8)")
    parser.add_argument("--steps", type=int, metavar="N", help="training steps of a block (default: 20)")
    parser.add_argument(
        "--data-format",
        choices=("channels_last", "channels_first"),
        default="channels_last",
        help="of Keras' convolutions; torch's are channels_last (default: channels_last, as the matrix units work)",
    )
    parser.add_argument(
        "--torch-mode",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
        default="default",
        help="mode of torch.compile",
    )
    parser.add_argument(
        "--torch-python", metavar="PATH", help="interpreter for torch, where it has its own environment"
    )
    parser.add_argument("--tiny", action="store_true", help="everything small, for a CPU; says nothing about speed")
    parser.add_argument("--json", metavar="OUT", help="write the results here")
    parser.add_argument("--plot", metavar="OUT", help="write a picture here; needs matplotlib")
    parser.add_argument("--out", metavar="FOLDER", help="write gpu_training.json and gpu_training.png there")
    options = parser.parse_args(arguments)
    options.model = list(dict.fromkeys(options.model or CASES))
    # In the order of the table, whatever that of the command.
    options.variant = [name for name in VARIANTS if name in (options.variant or VARIANTS)]
    for name in ("rounds", "steps"):
        if getattr(options, name) is None:
            setattr(options, name, (TINY if options.tiny else DEFAULTS)[name])
    for name in ("rounds", "steps", *(f"{model}_batch" for model in CASES)):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if options.out:
        options.json = options.json or str(Path(options.out, "gpu_training.json"))
        options.plot = options.plot or str(Path(options.out, "gpu_training.png"))
    return options


def main() -> int:
    options = parse_arguments()
    if options.list:
        print("\n".join(VARIANTS))
        return 0
    if options.torch_python is None and importlib.util.find_spec("torch") is None:
        print("No torch here: its variants are left out.", file=sys.stderr)
        options.variant = [name for name in options.variant if VARIANTS[name].framework != "torch"]

    def keep(content):
        if options.json:
            harness.write_json(options.json, {"question": QUESTION, "settings": _shown(options, content), **content})

    try:
        content = measure(options, log=lambda line: print(line, file=sys.stderr, flush=True), keep=keep)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1
    for line in harness.environment_lines(content["environments"]):
        print(line)
    print("; ".join(f"{name}: {value}" for name, value in _shown(options, content).items()))
    for framework, rates in content["matrix_flops_per_s"].items():
        cells = ", ".join(f"{name} {'-' if rate is None else f'{rate / 1e12:.2f}'}" for name, rate in rates.items())
        print(f"matrix products, {framework}, TFLOP/s: {cells}")
    print(FLOPS_FORMULA, end=".\n\n")
    harness.print_table(report.table_rows(content["results"]), title=QUESTION)
    for heading, lines in (
        ("Notes", report.note_lines(content["results"])),
        ("Goals", report.goal_lines(content["goals"])),
    ):
        print(f"\n{heading}", *lines, sep="\n- ")
    if options.plot:
        report.write_plot(options.plot, content["results"])
    # A variant that failed is a result; all of them is a failure.
    return 0 if any(result["step_ms"] for result in content["results"]) else 1


if __name__ == "__main__":
    sys.exit(main())
