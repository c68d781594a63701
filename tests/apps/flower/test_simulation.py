"""Contract: Flower's simulator gives the sequential engine's results, through the command line."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from living import alive

from fedpara.apps.flower.watchdog import family as family_of
from fedpara.experiments import Experiment, read_run
from fedpara.experiments.run import lay_out, resume
from fedpara.experiments.storage.checkpoint import final_checkpoint

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
pytest.importorskip("ray", reason="Flower's simulator is not installed: pip install '.[flower]'")

BASE = Experiment(model="mlp", clients=5, cohort=3, rounds=3, epochs=None, steps=2, lr=0.05, batch_size=16)
CASES = {
    "fedavg": BASE,
    "scaffold": replace(BASE, algorithm="scaffold"),
    "feddyn": replace(BASE, algorithm="feddyn"),
    "pfedpara": replace(BASE, scheme="pfedpara", personal=True, link_up="float16"),
    "folded": replace(BASE, scheme="lowrank", fold_every=1, link_down="float16"),
}
FEDPARA = "from fedpara.apps.cli import main; main()"


def fedpara(*words, cwd, **options):
    return subprocess.Popen(
        [sys.executable, "-c", FEDPARA, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def run_sequentially(experiment, folder):
    lay_out(experiment, folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        resume(folder, engine="sequential")
    finally:
        torch.set_num_threads(threads)
    return final_checkpoint(folder).state


def test_flower_equals_the_sequential_engine(tmp_path):
    """All cases in a single simulation, because starting Flower and Ray takes longer than the rounds."""
    for name, experiment in CASES.items():
        lay_out(experiment, tmp_path / "all" / name)
    process = fedpara("resume", "all", "--engine", "flower", cwd=tmp_path)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "Traceback" not in out + err
    assert "look deeper: fedpara export" in out
    for name, experiment in CASES.items():
        folder, expected = tmp_path / "all" / name, tmp_path / "sequential" / name
        ours = run_sequentially(experiment, expected)
        newest = final_checkpoint(folder)
        theirs = newest.state
        assert newest.round == 3
        assert (folder / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
        assert read_run(folder).by_client == read_run(expected).by_client
        assert bool(read_run(folder).by_client) == experiment.personal
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
        assert f"{name}: round 3/3" in err
        assert read_run(folder).experiment.engine == "flower"
        assert "engine flower" in (folder / "log.txt").read_text()
        assert bool(list(folder.glob("nodes-*/*/*.safetensors"))) == (name != "fedavg")


def test_ctrl_c_stops_every_process(tmp_path):
    """While Flower starts. The run folder stays resumable."""
    words = [
        "run",
        "--model",
        "mlp",
        "--clients",
        "3",
        "--cohort",
        "3",
        "--rounds",
        "3",
        "--engine",
        "flower",
    ]
    process = fedpara(
        *words,
        "--out",
        "a",
        cwd=tmp_path,
        # A shell that starts the suite in the background ignores SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    end = time.monotonic() + 120
    while len(family := family_of(process.pid)) < 4 and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    assert alive(family)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not alive(family)
    assert read_run(tmp_path / "a").rounds == 0
