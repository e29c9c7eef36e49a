"""The options of every benchmark: its help asks a question, `--quick` means less, bad values are refused by name."""

import importlib
from pathlib import Path

import pytest

import harness

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

FOLDER = Path(harness.__file__).parent
# Those that are run, and not only imported by others, or started by them.
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "argparse.ArgumentParser(" in path.read_text())


@pytest.fixture
def parse(monkeypatch):
    def parse(command):
        script, *arguments = command.split()
        monkeypatch.setattr("sys.argv", [script, *arguments])
        module = pytest.importorskip(script, exc_type=ImportError)
        return (module.parse_arguments if hasattr(module, "parse_arguments") else module.main)()

    return parse


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_starts_with_the_question(script, parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(f"{script} --help")
    shown = capsys.readouterr().out
    assert stopped.value.code == 0 and "?" in shown and "--json" in shown


# The option that is wrong comes last.
BAD_COMMANDS = """
accelerators --peer apex
advise_repetitions --budget 0
black_box --faults -1
fine_tune --backend torch
gpu_training --gpt2-small-batch 0
layer_zoo --layer Nothing
loss_scale_overhead --params 3
many_devices --devices 3
memory --policy float32
memory_plan --question largest --plot plan.png
remat --device gtx
run_all --only layer_zoo
"""


@pytest.mark.parametrize("command", BAD_COMMANDS.strip().splitlines())
def test_bad_options_exit_with_status_2(command, parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(command)
    assert stopped.value.code == 2 and command.split()[-2] in capsys.readouterr().err


OPTIONS = {
    "black_box --quick --faults 5": {"faults": 5, "rounds": 3, "model": "cnn", "batch": [32]},
    "first_fit --quick": {"model": ["transformer"], "rounds": 1},
    "import_time": {"rounds": 10},
    "loss_scale_overhead --quick --params 1000 5000 --rounds 2": {"params": [1000, 5000], "rounds": 2},
    "memory --quick --target cpu": {"model": ["resnet50_small", "bert_small"], "policy": ["mixed_bfloat16"]},
    "peers --quick --peer jmp --rounds 2 --part training": {"part": ["training"], "peer": ["jmp"], "rounds": 2},
    "run_all --quick --only peers import_time": {"quick": True, "only": ["peers", "import_time"]},
    "gpu_training --out folder": {"rounds": 8, "json": str(Path("folder", "gpu_training.json"))},
}


@pytest.mark.parametrize("command", OPTIONS)
def test_quick_means_less_unless_more_is_asked_for(command, parse):
    options = vars(parse(command))
    assert {name: options[name] for name in OPTIONS[command]} == OPTIONS[command]


def test_without_options_everything_is_measured(parse):
    names = {"hub --quick": "QUICK", "peers": "NAMES", "precision_speed": "NAMES", "run_all": "SCRIPTS"}
    for command, constant in names.items():
        options, script = parse(command), importlib.import_module(command.split()[0])
        assert list(getattr(script, constant)) in vars(options).values(), command
