"""How wrong does each stock Keras layer get in 16 bits, with the default rules and without?

Every layer of `keras.layers` runs forward and backward in float16 and bfloat16, on inputs of 0, ±1, ±300, ±6e4 and on
typical ones, and is compared with itself in float64; `zoo_measure.py` says how, `zoo_cases.py` with what. What becomes
inf or NaN while float32 does not, what raises, and whose output itself leaves the 16-bit range is listed.

    python benchmarks/layer_zoo.py --backend tensorflow --layer LSTM --layer Softmax
    python benchmarks/layer_zoo.py --out benchmarks/results
"""

import argparse
import contextlib
import io
import logging
import sys
from pathlib import Path

import harness
from zoo_cases import CASES
from zoo_plot import write_plot

DTYPES = ("float16", "bfloat16")


def measure(backend: str, layers: list[str]) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    import zoo_measure

    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    results = []
    for name in zoo_measure.runnable_cases():
        if not layers or zoo_measure.class_name(name) in layers:
            results += [{"backend": backend, **result} for result in zoo_measure.measure_case(name)]
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, one per case and dtype: the worst backend without and with the rules."""
    rows = []
    for name in dict.fromkeys(result["case"] for result in results):
        for dtype in DTYPES:
            found = [result for result in results if (result["case"], result["dtype"]) == (name, dtype)]
            if not found:
                continue
            bare = [result for result in found if result["mode"] == "bare"]
            ruled = [result for result in found if result["mode"] == "rules"]
            row = {"layer": name, "dtype": dtype}
            row |= {"output": _worst(bare, "output"), "gradient": _worst(bare, "gradient")}
            row["rules"] = " ".join(sorted({rule for result in ruled for rule in result["rules"]}))
            row |= {"output, rules": _worst(ruled, "output"), "gradient, rules": _worst(ruled, "gradient")}
            row["inf or NaN"], row["inf or NaN, rules"] = _where(bare, "nonfinite"), _where(ruled, "nonfinite")
            row["output beyond range"] = _where(bare, "outside")
            rows.append(row)
    return rows


def _worst(results, part) -> str:
    if any("raises" in result for result in results):
        return "raises on " + ", ".join(result["backend"] for result in results if "raises" in result)
    errors = [result["errors"].get("typical", {}).get(part) for result in results]
    errors = [error for error in errors if error is not None]
    return f"{max(errors):.2f}" if errors else ""


def _where(results, what) -> str:
    """Returns at which inputs, and on which backends if not on all of them."""
    inputs = {}
    for result in results:
        for entry in result.get(what, ()):
            part, _, given = entry.partition(" at ")
            if what == "nonfinite" or part == "output":
                inputs.setdefault(given, set()).add(result["backend"])
    groups = {}
    for given, backends in inputs.items():
        groups.setdefault(", ".join(sorted(backends)), []).append(given)
    everywhere = len({result["backend"] for result in results})
    return "; ".join(
        " ".join(given) + ("" if len(backends.split(", ")) == everywhere else f" ({backends})")
        for backends, given in groups.items()
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({name.partition("[")[0] for name in CASES})
    parser.add_argument(
        "--layer",
        action="append",
        choices=names,
        metavar="CLASS",
        help="a class of keras.layers; may be given more than once (default: all)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="write layer_zoo.json, .txt and .png there")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.layer = options.layer or []
    if options.out:
        options.json = options.json or str(Path(options.out) / "layer_zoo.json")
        options.plot = options.plot or str(Path(options.out) / "layer_zoo.png")
    return options


def main() -> int:
    options = parse_arguments()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = harness.run_benchmark(
            __file__,
            __doc__.splitlines()[0],
            options,
            measure=lambda backend: measure(backend, options.layer),
            arguments=[argument for name in options.layer for argument in ("--layer", name)],
            settings={"error": "largest difference to float64 / (largest value * epsilon), typical inputs"},
            table_rows=table_rows,
            write_plot=write_plot,
        )
    print(printed.getvalue(), end="")
    if options.out and not options.worker:
        (Path(options.out) / "layer_zoo.txt").write_text(printed.getvalue())
    return status


if __name__ == "__main__":
    sys.exit(main())
