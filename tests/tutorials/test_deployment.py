"""`fedpara flower up` of two pages: the user's module travels to nodes with TLS and keys, and the run folder is usable.

It takes a minute: `make test-deploy` runs it.
"""

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
from flower_nodes import run_sequentially, same_results
from typer.testing import CliRunner

from fedpara.apps.cli import app
from fedpara.experiments import read_run
from fedpara.experiments.storage.run_folder import is_locked

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")
pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

FEDPARA = "from fedpara.apps.cli import main; main()"
SEEN = (
    "\nimport os\nwith open(os.environ['SEEN'], 'a') as file:\n    print(os.getpid(), __file__, file=file)\n"
)


def up(tutorial, folder, rounds):
    """Start the command of the page at small scale. Its module notes from where it is imported."""
    (tutorial.folder / f"{tutorial.name}.py").write_text(tutorial.script.read_text() + SEEN)
    small = tutorial.experiment(rounds=rounds)
    names = ("dataset", "model", "clients", "cohort", "rounds")
    fields = [word for name in names for word in ("--set", f"{name}={getattr(small, name)}")]
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            FEDPARA,
            "flower",
            *tutorial.commands["flower"],
            *fields,
            "--out",
            str(folder),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )


def kill_after_a_round(process, folder):
    """SIGKILL in the middle of the run. A watchdog ends Flower's processes."""
    end, metrics = time.monotonic() + 400, folder / "metrics.jsonl"
    while (
        process.poll() is None and time.monotonic() < end and not (metrics.exists() and metrics.read_text())
    ):
        time.sleep(0.1)
    process.kill()
    process.communicate()
    while is_locked(folder) and time.monotonic() < end:
        time.sleep(0.1)


def fedpara(*words):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == 0, done.output


def test_a_federation_trains_the_users_module_and_its_folder_is_usable(tutorials, tmp_path, monkeypatch):
    """Both federations at the same time, because nodes mostly wait. One is killed after its first round."""
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.txt"))
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    chosen = {tutorial.name: tutorial for tutorial in tutorials}
    whole, killed = tmp_path / "runs" / "regression", tmp_path / "runs" / "language_model"
    first, second = up(chosen["regression"], whole, rounds=1), up(chosen["language_model"], killed, rounds=2)
    kill_after_a_round(second, killed)
    try:
        _, err = first.communicate(timeout=400)
    finally:
        first.kill()  # only if it hangs: its watchdog ends the rest
    assert first.returncode == 0, err
    assert [read_run(folder).rounds for folder in (whole, killed)] == [1, 1]
    imported = [line.split() for line in (tmp_path / "seen.txt").read_text().splitlines()]
    for tutorial in (chosen["regression"], chosen["language_model"]):
        copies = [path for _, path in imported if f"/{tutorial.name}.py" in path and "/node-" in path]
        assert len(copies) >= 2, "each node imports its copy"
        folder, here = tmp_path / "runs" / tutorial.name, tmp_path / "here" / tutorial.name
        fedpara("resume", folder, "--engine", "sequential", "--rounds", 2)
        run_sequentially(replace(read_run(folder).experiment, rounds=2), here)
        assert same_results(folder, here)
        fedpara(
            "export", folder, "--model", tutorial.experiment().model, "--out", f"{tutorial.name}.safetensors"
        )
    fedpara("report", "runs", "--out", "page.html")
