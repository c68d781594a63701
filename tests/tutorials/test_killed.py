"""The commands of the tutorials: `run`, which is interrupted, and the others on the folder that it leaves."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise

import pytest
from flower_nodes import same_results
from typer.testing import CliRunner

from fedpara.apps.cli import app
from fedpara.experiments import read_run, resume
from fedpara.experiments.run import lay_out

# `fedpara`, with a SIGKILL as the checkpoint of round 2 is renamed.
KILLED = """
import os, signal, sys

left = 2

def watch(event, arguments):
    global left
    if event == "os.rename" and str(arguments[1]).endswith("/checkpoint.safetensors"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
from fedpara.apps.cli import main
main()
"""


def changed(words, fields):
    """The words of a command with other values for its options."""
    options = {f"--{field.replace('_', '-')}": value for field, value in fields.items()}
    return [str(options.get(before, word)) for before, word in pairwise(["", *words])]


def fedpara(*words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


class Interrupted(BaseException):
    pass


def interrupt(words, monkeypatch):
    """Run `fedpara run` in this process until the checkpoint of round 2 is renamed."""
    rename, seen = os.replace, []

    def interrupted(source, target):
        seen.extend([target] if str(target).endswith("/checkpoint.safetensors") else [])
        if len(seen) == 2:
            raise Interrupted
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", interrupted)
        with pytest.raises(Interrupted):
            CliRunner().invoke(app, ["run", *words])


def kill(words):
    done = subprocess.run([sys.executable, "-c", KILLED, "run", *words], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_an_ended_run_resumes_to_the_same_bits_and_is_reported_and_exported(tutorial, tmp_path, monkeypatch):
    """One tutorial in a real process that is killed: starting a process takes longer than its rounds."""
    pytest.importorskip("onnxscript")
    small, commands = tutorial.experiment(), tutorial.commands
    words = changed(commands["run"], asdict(small))
    folder = words[words.index("--out") + 1]
    if tutorial.name == "language_model":
        kill(words)
    else:
        interrupt(words, monkeypatch)
    assert read_run(tmp_path / folder).rounds < small.rounds
    fedpara("resume", folder)
    lay_out(small, tmp_path / "whole")
    resume(tmp_path / "whole")
    assert same_results(tmp_path / folder, tmp_path / "whole")

    fedpara("resume", *changed(commands["resume"], {"rounds": 4}))
    assert read_run(tmp_path / folder).rounds == (4 if "--rounds" in commands["resume"] else 3)
    fedpara("report", *commands["report"], "--out", "page.html")
    fedpara("export", *changed(commands["export"], {"model": small.model}), "--out", "model")
    assert {"page.html", "model"} <= {path.name for path in tmp_path.iterdir()}
