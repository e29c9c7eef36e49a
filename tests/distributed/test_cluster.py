"""The programs of `examples/cluster`, each with two processes on this machine."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.distributed.launch import FOLDER, ROOT, free_ports, run_torchrun, run_workers, tf_config

CLUSTER = ROOT / "examples" / "cluster"
# Not imported here: only the programs need it.
WITH_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
LAST_LINE = re.compile(r"rank (\d): loss (\d+\.\d+), (?:accuracy \d\.\d+, )?loss scale (\d+\.\d), skipped (\d+)")


def last_lines(output: str) -> list:
    """Returns `(rank, loss, loss scale, skipped steps)` of each last line in `output`; two ranks may share a line."""
    found = [(int(rank), *map(float, numbers)) for rank, *numbers in LAST_LINE.findall(output)]
    # Ray shows what a worker prints more than once.
    return sorted(set(found))


def check_both_ranks(lines, loss_below: float = 0.25, skipped: int = 3, loss_scale: float = 4096.0):
    """One batch of rank 1 overflows in each of three epochs: both ranks skip it, and both halve their scale."""
    (_, loss, *first), (_, other_loss, *second) = lines
    assert [line[0] for line in lines] == [0, 1]
    assert first == second == [loss_scale, skipped]
    assert 0 < loss == other_loss < loss_below


def worker(index: int, ports, arguments) -> tuple:
    """Returns arguments and environment of a worker: on TensorFlow `TF_CONFIG` says which it is."""
    if keras.backend.backend() == "tensorflow":
        return arguments, {"TF_CONFIG": tf_config(index, ports), "OMP_NUM_THREADS": "1"}
    return [*arguments, "--coordinator", f"127.0.0.1:{ports[0]}", "--worker", index], {"OMP_NUM_THREADS": "1"}


@pytest.mark.backends("tensorflow")
def test_the_page_on_many_devices_names_every_program():
    page = (ROOT / "docs" / "many_devices.md").read_text()
    links = re.findall(r"\[(\w+)\]\(\.\./examples/cluster/(\w+)\.py\)", page)
    assert {name for _, name in links} == {path.stem for path in CLUSTER.glob("*.py")}
    assert all(shown == name for shown, name in links)


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_jax_distributed():
    (port,) = free_ports(1)
    arguments = ["--coordinator", f"127.0.0.1:{port}", "--plant-overflow", 1]
    workers = [([*arguments, "--process", i], {}) for i in range(2)]
    lines = run_workers(CLUSTER / "jax_distributed.py", workers, timeout_s=180, read=last_lines)
    check_both_ranks(sum(lines, []))


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("loop", ["step", pytest.param("own", marks=pytest.mark.slow)])
def test_tensorflow_workers(loop):
    ports = free_ports(2)
    workers = [worker(i, ports, ["--loop", loop, "--plant-overflow", 1]) for i in range(2)]
    lines = run_workers(CLUSTER / "tensorflow_workers.py", workers, timeout_s=180, read=last_lines)
    check_both_ranks(sum(lines, []))


@pytest.mark.slow
@pytest.mark.backends("torch")
@pytest.mark.parametrize("program", ["torch_ddp.py", "torch_fsdp2.py"])
def test_torch_ranks(program):
    # Of FSDP2 it is the loss of the whole data, after the weights were put together.
    check_both_ranks(last_lines(run_torchrun(CLUSTER / program, "--plant-overflow", 1)))


@pytest.mark.slow
@pytest.mark.backends("torch")
def test_what_fsdp2_sends_and_holds():
    (port,) = free_ports(1)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    results = run_workers("fsdp2.py", [((), {"RANK": str(i), **group}) for i in range(2)], timeout_s=180)
    for result in results:
        assert result["dtypes"] == {"_allgather_base_": ["float16"], "_reduce_scatter_base_": ["float32"]}
        assert result["gradients_differ_by"] < 2e-3  # float16 has 11 significant bits
        # Of 64 * 128 + 128 + 128 * 10 + 10 numbers half, and none beside them.
        assert [result["weights"], result["held"], result["held_by_keras"]] == [9610, 4805, 0]
        assert result["same_after"]
    # Why the example has a module for the weights: `fully_shard(model)` is silently nothing, as each rank keeps its own
    # gradients. Where this fails, Keras or torch has changed, and the example can be shorter.
    first, second = (result["plain"] for result in results)
    assert first["gradients_of_parameters"] == second["gradients_of_parameters"] == [False, False]
    assert first["kernel_gradient"] != second["kernel_gradient"]


KILLED_STEPS = 60
EVERY = 4


class Job:
    """`resume.py` as two workers, started again whenever one of them was killed, as a job manager does it."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        # Of each start: the number of steps before it on each rank, and the lines of the steps by rank.
        self.begins = []
        self.lines = []

    def run(self, kill=None):
        """Starts the workers once; `kill` is `(worker, step, delay_s)`, or `None`."""
        ports = free_ports(2)
        processes, logs = [], []
        for i in range(2):
            step, delay_s = kill[1:] if kill is not None and kill[0] == i else (-1, 0)
            own = ["resume", step, delay_s, "--folder", self.folder, "--steps", KILLED_STEPS, "--every", EVERY]
            arguments, environment = worker(i, ports, own)
            logs.append(self.folder / f"{len(self.begins)}.{i}.log")
            with open(logs[-1], "w") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(FOLDER / "killed.py"), *map(str, arguments)],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                    )
                )
        deadline = time.monotonic() + 180
        try:
            while time.monotonic() < deadline:
                codes = [process.poll() for process in processes]
                if any(codes) or None not in codes:
                    break
                time.sleep(0.01)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [log.read_text() for log in logs]
        if kill is None:
            assert codes == [0, 0], "\n".join(text[-2000:] for text in texts)
        else:
            # It was the kill that ended the job; the other worker may have noticed.
            assert processes[kill[0]].returncode == -signal.SIGKILL, texts[kill[0]][-2000:]
        self.begins.append({int(n) for text in texts for n in re.findall(r"goes on after (\d+) steps", text)})
        self.lines.append(re.findall(r"rank 0: step (\d+), first row (\d+), loss (\S+)", texts[0]))

    def surviving_history(self) -> list:
        """Returns the lines of rank 0 for those steps that no later start took again."""
        history = []
        for i, lines in enumerate(self.lines):
            (begin,) = self.begins[i]
            (end,) = self.begins[i + 1] if i + 1 < len(self.begins) else {KILLED_STEPS}
            assert begin == len(history)
            history += [line for line in lines if int(line[0]) <= end]
        return history

    def state(self) -> dict:
        with np.load(self.folder / "checkpoint.npz") as file:
            return dict(file)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("cluster") / "undisturbed")
    job.run()
    assert [int(step) for step, *_ in job.surviving_history()] == list(range(1, KILLED_STEPS + 1))
    return job


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 10])
def test_a_job_whose_workers_are_killed_ends_as_the_one_without_kills(tmp_path, undisturbed, kills):
    rng = np.random.default_rng(kills)
    job = Job(tmp_path / "job")
    for step in sorted(rng.choice(KILLED_STEPS - EVERY, kills, replace=False)):
        # Steps take between 2 and 30 ms.
        job.run(kill=(int(rng.integers(2)), int(step), rng.uniform(0, 0.02)))
    job.run()
    # All workers of a start go on from the same step; each step's batch was taken once in what survives.
    assert job.surviving_history() == undisturbed.surviving_history()
    check_same(job.state(), undisturbed.state())


def check_same(state, expected):
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


@WITH_RAY
@pytest.mark.slow
def test_ray_train(tmp_path):
    output = run_ray(CLUSTER / "ray_train.py", "--storage", tmp_path, "--plant-overflow", 1)
    lines = last_lines(output)
    if keras.backend.backend() == "torch":
        # Of its own rows; the decisions are those of all.
        assert lines[0][1] != lines[1][1]
        lines = [(rank, 0.1, *others) for rank, _, *others in lines]
    check_both_ranks(lines, loss_below=0.4, skipped=1, loss_scale=16384.0)


@WITH_RAY
@pytest.mark.slow
def test_a_job_of_ray_whose_workers_are_killed_ends_as_the_one_without_kills(tmp_path):
    kills, rng = 10, np.random.default_rng(10)
    steps = sorted(rng.choice(KILLED_STEPS - EVERY, kills, replace=False).tolist())
    plan = [(int(rng.integers(2)), step, rng.uniform(0, 0.02)) for step in steps]
    states = {}
    for name, kills_of_job in {"undisturbed": [], "killed": plan}.items():
        folder = tmp_path / name
        folder.mkdir()
        output = run_ray(
            FOLDER / "ray_killed.py", folder, json.dumps(kills_of_job), "--storage", folder / "storage",
            "--steps", KILLED_STEPS, "--every", EVERY, timeout_s=1200,
        )  # fmt: skip
        moments = [path.read_text() for path in folder.glob("kill-*")]
        assert len(moments) == len(kills_of_job)
        # Some may fall into a checkpoint, or between two steps.
        assert not moments or "in a step" in moments
        with np.load(Path(re.findall(r"checkpoint: (\S+)", output)[-1]) / "checkpoint.npz") as file:
            states[name] = dict(file)
        # Of each start and each rank: the steps that it began.
        starts = [
            [[int(step) for step in (folder / f"steps-{i}-{rank}").read_text().split()] for rank in range(2)]
            for i in range(len(kills_of_job) + 1)
        ]
        assert all(first[0] == second[0] for first, second in starts)
        ends = [first[0] for first, _ in starts[1:]] + [KILLED_STEPS]
        surviving = [step for (first, _), end in zip(starts, ends, strict=True) for step in first if step < end]
        assert surviving == list(range(KILLED_STEPS))
    check_same(states["killed"], states["undisturbed"])


def run_ray(script, *arguments, timeout_s: float = 300) -> str:
    """Runs a program that starts a Ray of its own on this machine, and returns what was printed."""
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, CLUSTER))),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # On a machine whose memory other programs have filled Ray would end workers, as often as they start.
        "RAY_memory_monitor_refresh_ms": "0",
    }
    # Not into a pipe, as `run_workers` knows: agents of Ray outlive the program and would keep it open.
    (output,) = run_workers(script, [(arguments, environment)], timeout_s=timeout_s, read=str)
    return output


@pytest.mark.backends("tensorflow")
def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("resume", CLUSTER / "resume.py")
    resume = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(resume)
    path = tmp_path / "checkpoint.npz"
    resume.save(path, {"losses": np.arange(3)})

    def interrupted(file, **state):
        file.write(b"the first bytes of")
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(np, "savez", interrupted)
        resume.save(path, {"losses": np.arange(4)})
    assert np.load(path)["losses"].tolist() == [0, 1, 2]
    resume.save(path, {"losses": np.arange(5)})
    assert np.load(path)["losses"].tolist() == [0, 1, 2, 3, 4]
