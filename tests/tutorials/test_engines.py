"""Contracts of the tutorials: every engine gives the same run, and the command of a page does what its script does."""

import importlib
import re
import shlex
import shutil
import sys
from ast import literal_eval
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from flower_nodes import Nodes, run_on_nodes, run_sequentially, same_results
from typer.testing import CliRunner

import fedpara as fp
from fedpara import algorithms
from fedpara.apps.cli import app
from fedpara.errors import ConfigError
from fedpara.experiments import Experiment, read_run, resume
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint

ROOT = Path(__file__).parents[2]
SMALL = {
    "regression": {"dataset": "regression:load(clients=4)", "clients": 4},
    "segmentation": {"dataset": "segmentation:load(clients=3, images=5)", "clients": 3, "batch_size": 3},
    "larger_than_memory": {
        "dataset": "larger_than_memory:load(folder='sensors', clients=4)",
        "clients": 4,
        "steps": 4,
    },
}
TASKS = {
    "regression": lambda m: fp.Task(m.network(), loss="mse", metrics=["r2", "mae"]),
    "segmentation": lambda m: fp.Task(m.UNet(), loss=m.dice_bce, metrics=["dice", "iou"]),
    "larger_than_memory": lambda m: fp.Task(m.network(), loss="mse", metrics=["r2"]),
}
ALGORITHMS = {
    "regression": {"lr": 0.02, "epochs": 2, "batch_size": 16},
    "segmentation": {"lr": 3e-3, "optimizer": "adam", "batch_size": 3},
    "larger_than_memory": {"lr": 0.2, "steps": 4, "batch_size": 32},
}


@pytest.fixture(params=SMALL)
def name(request, tmp_path, monkeypatch):
    """The name of a tutorial, whose module and data are in the working directory."""
    for script in SMALL:
        shutil.copy(ROOT / "examples" / f"{script}.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    if request.param == "larger_than_memory":
        (tmp_path / "sensors").mkdir()
        module(request.param).write("sensors", clients=4, rows=70)
    yield request.param
    for script in SMALL:
        sys.modules.pop(script, None)


def module(name):
    return importlib.import_module(name)


def command(name):
    """The words of the page's `fedpara run`."""
    page = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text().replace("\\\n", " ")
    return shlex.split(re.search(r"^\$ fedpara run (.*)$", page, re.MULTILINE)[1])


def experiment(name, **changes):
    """The experiment of the page's command, with a small federation and few rounds."""
    words, fields = command(name), {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        field = option.removeprefix("--").replace("-", "_")
        number = re.fullmatch(r"[\d.]+", value)
        fields.setdefault(field, []).append(literal_eval(value) if number else value)
    metrics, _ = ", ".join(fields.pop("metric")), fields.pop("out")
    given = {field: value for field, [value] in fields.items()}
    small = {"cohort": 2, "rounds": 3, **SMALL[name], **changes}
    return Experiment(**{**given, "metrics": metrics, **small})


def federation(name):
    load = module(name).load
    return {
        "regression": lambda: load(clients=4),
        "segmentation": lambda: load(clients=3, images=5),
        "larger_than_memory": lambda: load("sensors", clients=4),
    }[name]()


@pytest.mark.parametrize("scheme", [None, fp.FedPara(gamma=0.1)], ids=["original", "fedpara"])
def test_the_batched_engine_equals_the_sequential_one_within_rounding(name, scheme):
    runs = []
    for engine in ("sequential", "batched"):
        torch.manual_seed(0)
        task = TASKS[name](module(name))
        task = task if scheme is None else replace(task, model=fp.factorize(task.model, scheme))
        algorithm = algorithms.fedavg(**ALGORITHMS[name])
        runs.append(fp.simulate(task, federation(name), algorithm, rounds=2, cohort=3, engine=engine))
        assert runs[-1].engine.startswith(engine)
    first, second = (run.rounds[-1].scores for run in runs)
    assert first.keys() == {*first} == {*second}
    assert first == pytest.approx(second, rel=2e-3, abs=2e-3)
    for key, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[key], rtol=1e-3, atol=1e-4)


def test_flower_equals_the_sequential_engine_bit_for_bit(name, tmp_path):
    run_sequentially(experiment(name), tmp_path / "here")
    run_on_nodes(experiment(name), tmp_path / "there", Nodes(tmp_path / "nodes", count=2))
    assert same_results(tmp_path / "here", tmp_path / "there")


class Killed(Exception):
    pass


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_killed_run_resumes_to_the_same_bits(name, engine, tmp_path):
    def kill(result, timing):
        if result.number == 2:
            raise Killed

    lay_out(experiment(name, engine=engine), tmp_path / "whole")
    resume(tmp_path / "whole")
    lay_out(experiment(name, engine=engine), tmp_path / "killed")
    with pytest.raises(Killed):
        resume(tmp_path / "killed", watch=kill)
    resume(tmp_path / "killed")
    assert same_results(tmp_path / "whole", tmp_path / "killed")


def test_the_command_of_the_page_runs_is_reported_and_exported(name, tmp_path):
    words = command(name)
    asked = experiment(name)
    for option in ("dataset", "clients", "cohort", "rounds"):
        words[words.index(f"--{option}") + 1] = str(getattr(asked, option))
    done = CliRunner().invoke(app, ["run", *words])
    assert done.exit_code == 0, done.output
    folder = tmp_path / words[words.index("--out") + 1]
    assert read_run(folder).metric.name == asked.metrics.split(",")[0]
    for command_ in (["report", "runs", "--out", "page.html"], ["export", str(folder), "--out", "x.safetensors"]):
        done = CliRunner().invoke(app, command_)
        assert done.exit_code == 0, done.output


def test_the_command_starts_from_the_scripts_hyper_parameters(name):
    """What a page's command says and what its script says is the same."""
    asked, script = experiment(name), (ROOT / "examples" / f"{name}.py").read_text()
    called = re.search(r"algorithms[.]fedavg\((.*)\)", script)[1]
    local = dict(re.findall(r"(\w+)=([\w.\-\"]+)", called))
    page = {field: getattr(experiment(name), field) for field in local}
    if name == "segmentation":
        page["batch_size"] = 8
    if name == "larger_than_memory":
        page["steps"] = 50
    assert page == {field: literal_eval(value) for field, value in local.items()}
    assert asked.scheme == "fedpara"
