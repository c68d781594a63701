"""A process of `--jobs`: its runs have the bits and the output of `fedpara resume`, and leave no memory behind."""

import gc
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from fedpara.experiments import Experiment, read_run, resume
from fedpara.experiments.run import lay_out_all

SMALL = Experiment(model="mlp", scheme="fedpara", clients=6, cohort=6, steps=2, rounds=2, engine="batched")
RUNS = {
    "first": SMALL,
    "diverges": replace(SMALL, lr=1e30),
    "third": replace(SMALL, engine="sequential", algorithm="scaffold", link_up="int8", seed=3),
    "long": replace(SMALL, rounds=100_000, seed=4),
}


@pytest.fixture
def process():
    """The process, and a function that lets it resume a run and returns its answer."""
    started = subprocess.Popen(
        [sys.executable, "-P", "-m", "fedpara.apps.studies.run_process", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )

    def give(path):
        print(json.dumps(str(path)), file=started.stdin, flush=True)

    with started:
        yield started, give
        started.kill()


def test_runs_in_one_process_are_those_of_processes_of_their_own(process, tmp_path):
    started, give = process
    lay_out_all({tmp_path / name: e for name, e in RUNS.items()})
    lay_out_all({tmp_path / "own": RUNS["third"]})
    for name, code in {"first": 0, "diverges": 1, "third": 0}.items():
        give(tmp_path / name)
        assert started.stdout.readline() == f"{code}\n"
    own = [sys.executable, "-P", "-m", "fedpara", "resume", str(tmp_path / "own")]
    subprocess.run(own, check=True, capture_output=True)
    for file in ("metrics.jsonl", "checkpoint.safetensors"):
        assert (tmp_path / "third" / file).read_bytes() == (tmp_path / "own" / file).read_bytes()
    printed = {
        name: (tmp_path / name / "output.txt").read_text().splitlines() for name in RUNS if name != "long"
    }
    assert json.loads(printed["first"][-1])["run"] == str(tmp_path / "first")
    assert printed["diverges"][-1].startswith("fedpara: round ")
    assert not any("first" in line or "diverges" in line for line in printed["third"])

    give(tmp_path / "long")
    end = time.monotonic() + 30
    while time.monotonic() < end and not (tmp_path / "long" / "timing.jsonl").exists():
        time.sleep(0.05)
    started.send_signal(signal.SIGINT)
    assert started.wait(30) == 130
    said = "interrupted: finished rounds are saved, `fedpara resume` continues a run that has begun."
    assert (tmp_path / "long" / "output.txt").read_text().splitlines()[-1] == said
    assert read_run(tmp_path / "long").rounds


@pytest.mark.parametrize("engine", ["batched", "sequential"])
def test_a_finished_run_leaves_no_tensor_behind(tmp_path, engine):
    counts = []
    for seed in range(3):
        lay_out_all({tmp_path / str(seed): replace(SMALL, engine=engine, seed=seed)})
        resume(tmp_path / str(seed))
        gc.collect()
        counts.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert counts[1] == counts[2]
