"""Is a step slower than in an earlier mpkeras?

Two processes of each backend stay side by side, one with the mpkeras of this repository and one with that of another
commit, and take turns: in each round every variant of both is timed once, in an order of its own. Runs that follow one
another would not do: what a step without mpkeras takes here changes by a third from one minute to the next.

Both run the benchmarks of their own commit: whole steps as in `train_step_overhead.py` and `rollback_overhead.py`, the
optimizer's step as in `loss_scale_overhead.py`. `bare` has no code of mpkeras in the first and the last: what it shows
between the two processes is noise. A cell is slower where the median of its ratios, after to before, is above 1.02, and
above all those of `bare` on its backend.

    python benchmarks/before_after.py --before COMMIT --backend jax
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import harness
from before_after_steps import VARIANTS
from models import MODELS, MODES

ROOT = Path(__file__).resolve().parents[1]
# What may be noise, whatever the other cells say.
TOLERANCE = 1.02
PARAMETERS = (3_000_000, 30_000_000)


def cases(backend: str, models: list[str]) -> list[dict]:
    """Returns what is timed: `{"benchmark", "mode", "jit_compile", "model" or "params"}`."""
    found = []
    for mode, jit_compile in MODES[backend]:
        of_mode = {"mode": mode, "jit_compile": jit_compile}
        for benchmark in ("train_step_overhead", "rollback_overhead"):
            found += [{"benchmark": benchmark, **of_mode, "model": model} for model in models]
        found += [{"benchmark": "loss_scale_overhead", **of_mode, "params": params} for params in PARAMETERS]
    return found


class Commit:
    """A process that runs the benchmarks and the mpkeras in `root`."""

    def __init__(self, root: Path, backend: str):
        paths = [str(root / "benchmarks"), str(root), os.environ.get("PYTHONPATH", "")]
        settings = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "KERAS_BACKEND": backend}
        settings["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = [sys.executable, str(ROOT / "benchmarks" / "before_after_steps.py")]
        self._process = subprocess.Popen(
            command, env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what):
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("Expected both commits to run their benchmarks. Received: a process that has ended.")
        return json.loads(line)

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def measure(backend: str, root_before: Path, models: list[str], rounds: int) -> dict:
    """Returns `{"environments", "results"}`; each result has the times of both commits and their ratios."""
    commits = {"before": Commit(root_before, backend), "after": Commit(ROOT, backend)}
    results = []
    try:
        environments = [commit.ask("environment") for commit in commits.values()]
        for case in cases(backend, models):
            for commit in commits.values():
                commit.ask(case)
            names = [(which, variant) for which in commits for variant in VARIANTS[case["benchmark"]]]
            times_ms = {name: [] for name in names}
            for order in harness.round_orders(names, rounds):
                for which, variant in order:
                    times_ms[which, variant].append(commits[which].ask(variant))
            for variant in VARIANTS[case["benchmark"]]:
                before, after = times_ms["before", variant], times_ms["after", variant]
                result = {"backend": backend, **case, "variant": variant, "before_ms": harness.summarize(before)}
                result |= {"after_ms": harness.summarize(after)}
                results.append(result | {"ratio": harness.summarize(harness.paired_ratios(after, before))})
    finally:
        for commit in commits.values():
            commit.close()
    return {"environments": environments, "results": results}


def is_noise(result: dict) -> bool:
    """Whether a result says nothing of mpkeras: it has no code of it."""
    return result["variant"] == "bare" and result["benchmark"] != "rollback_overhead"


def slower(results: list[dict]) -> list[dict]:
    """Returns the results in which a step has become slower by more than noise."""
    found = []
    for result in results:
        of_bare = [r["ratio"]["median"] for r in results if r["backend"] == result["backend"] and is_noise(r)]
        if not is_noise(result) and result["ratio"]["median"] > max(TOLERANCE, *of_bare):
            found.append(result)
    return found


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "benchmark": result["benchmark"],
            "step": result["mode"],
            "model or parameters": result.get("model") or f"{result['params']:,}",
            "variant": result["variant"],
            "before ms": f"{result['before_ms']['median']:.3f}",
            "after ms": f"{result['after_ms']['median']:.3f}",
            "after / before": f"{result['ratio']['median']:.3f}",
            "quartiles": f"{result['ratio']['q1']:.2f} - {result['ratio']['q3']:.2f}",
            "": "slower" if result in slower(results) else "",
        }
        for result in results
    ]


def check_out(reference: str, folder: str) -> Path:
    """Writes the files of a commit into `folder`."""
    done = subprocess.run(["git", "archive", reference], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise SystemExit(f"Expected a commit. Received: {reference} ({done.stderr.decode().strip()}).")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", required=True, help="the commit to compare with")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be given more than once")
    parser.add_argument("--rounds", type=int, metavar="N", help="timed steps of each variant (default: 36)")
    parser.add_argument("--quick", action="store_true", help="6 rounds, of the smallest model alone")
    parser.add_argument("--backend", action="append", choices=harness.BACKENDS, help="may be given more than once")
    parser.add_argument("--json", metavar="OUT", help="write the results here")
    options = parser.parse_args()
    models = options.model or (["cnn"] if options.quick else list(MODELS))
    rounds = options.rounds or (6 if options.quick else 36)
    environments, results = [], []
    with tempfile.TemporaryDirectory() as folder:
        root_before = check_out(options.before, folder)
        for backend in options.backend or harness.installed_backends():
            measured = measure(backend, root_before, models, rounds)
            environments += measured["environments"]
            results += measured["results"]
    for line in harness.environment_lines(environments):
        print(line)
    question = __doc__.splitlines()[0]
    harness.print_table(table_rows(results), title=question)
    if options.json:
        settings = {"before": options.before, "rounds": rounds}
        content = {"question": question, "settings": settings, "environments": environments, "results": results}
        harness.write_json(options.json, content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
