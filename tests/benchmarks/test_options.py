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
advise_repetitions --repetitions 0
advise_repetitions --budget 0
advise_repetitions --task images
all_reduce --rounds 0
black_box --faults -1
black_box --rounds -1
black_box --model lstm
black_box --batch 0
fine_tune --steps 0
fine_tune --model mlp
fine_tune --backend torch
first_fit --rounds 0
first_fit --model mlp
gpu_training --model mlp
gpu_training --rounds 0
gpu_training --gpt2-small-batch 0
hub --steps 1
hub --model mlp
import_time --rounds 0
import_time --backend theano
layer_zoo --layer Nothing
layer_zoo --backend theano
loss_scale_overhead --rounds 0
loss_scale_overhead --params 3
loss_scale_overhead --backend theano
loss_scale_overhead --tensors 0
loss_scale_overhead --accumulate 0
many_devices --devices 3
many_devices --policy float16
many_devices --who torch
memory --model lstm
memory --backend torch
memory --policy float32
memory_plan --question 33
memory_plan --question largest --plot plan.png
monitor_overhead --rounds 0
monitor_overhead --steps 0
monitor_overhead --model lstm
peers --rounds 0
peers --params 3
peers --peer apex
precision_speed --rounds 0
precision_speed --budget 0
precision_speed --model resnet
remat --peer torch
remat --device gtx
remat_time --backend jax
remat_time --rounds 0
rollback_overhead --rounds 0
rollback_overhead --model mlp
rollback_overhead --backend theano
run_all --only layer_zoo
run_all --backend theano
small_state --rounds 0
small_state --params 3
small_state --backend torch
"""


@pytest.mark.parametrize("command", BAD_COMMANDS.strip().splitlines())
def test_bad_options_exit_with_status_2(command, parse, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(command)
    assert stopped.value.code == 2 and command.split()[-2] in capsys.readouterr().err


OPTIONS = {
    "advise_repetitions --task text --budget 5": {"task": ["text"], "budget": 5.0, "repetitions": 10},
    "all_reduce --quick --steps 7": {"layers": 1, "rounds": 3, "steps": 7},
    "black_box --quick --faults 5": {"faults": 5, "rounds": 3, "model": "cnn", "batch": [32]},
    "fine_tune --quick": {"model": ["transformer"], "steps": 8},
    "fine_tune --quick --model resnet50 --steps 2": {"model": ["resnet50"], "steps": 2},
    "first_fit --quick": {"model": ["transformer"], "rounds": 1},
    "hub --quick --model T5 --steps 2": {"model": ["T5"], "steps": 2},
    "import_time": {"rounds": 10},
    "import_time --quick": {"rounds": 3},
    "import_time --quick --rounds 1": {"rounds": 1},
    "loss_scale_overhead --quick": {"params": [3_000_000], "rounds": 12},
    "loss_scale_overhead --quick --params 1000 5000 --rounds 2": {"params": [1000, 5000], "rounds": 2},
    "memory": {"model": ["resnet50", "bert_base"]},
    "memory --quick --target cpu": {"model": ["resnet50_small", "bert_small"], "policy": ["mixed_bfloat16"]},
    "monitor_overhead --quick": {"model": ["cnn"], "rounds": 5},
    "peers --quick --peer jmp --rounds 2 --part training": {"part": ["training"], "peer": ["jmp"], "rounds": 2},
    "precision_speed --quick": {"model": ["digits", "text"], "rounds": 8, "budget": 8.0},
    "rollback_overhead --quick": {"model": ["cnn"], "rounds": 15},
    "rollback_overhead --quick --model lstm --rounds 2": {"model": ["lstm"], "rounds": 2},
    "run_all --quick --only peers import_time": {"quick": True, "only": ["peers", "import_time"]},
    "run_all": {"out": FOLDER / "results"},
    "train_step_overhead --quick": {"model": ["cnn", "mlp"], "rounds": 15, "policy": "float32"},
    "train_step_overhead --quick --model lstm --rounds 2": {"model": ["lstm"], "rounds": 2},
    "layer_zoo --layer Dense --out folder": {"layer": ["Dense"], "json": str(Path("folder", "layer_zoo.json"))},
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


def test_a_target_without_its_compiler_is_refused(parse, monkeypatch, capsys):
    monkeypatch.setattr("memory.available_targets", lambda: ["cpu"])
    with pytest.raises(SystemExit):
        # In quotes, a target has a space.
        importlib.import_module("memory").parse_arguments(["--target", "tpu v5p"])
    assert "libtpu" in capsys.readouterr().err
