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
from fedpara.experiments import Experiment, read_run, resume
from fedpara.experiments.run import lay_out

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


def asked(name):
    """The experiment of the page's command."""
    words, fields = command(name), {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        field = option.removeprefix("--").replace("-", "_")
        fields.setdefault(field, []).append(literal_eval(value) if value[0].isdigit() else value)
    fields |= {"metrics": [", ".join(fields.pop("metric"))]}
    return Experiment(**{field: value for field, [value] in fields.items() if field != "out"})


def experiment(name, **changes):
    """The same with a small federation and few rounds."""
    return replace(asked(name), cohort=2, rounds=3, **SMALL[name], **changes)


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
        resume(tmp_path / "killed", on_round=kill)
    resume(tmp_path / "killed")
    assert same_results(tmp_path / "whole", tmp_path / "killed")


def test_the_command_of_a_page_runs_and_its_folder_is_resumed_reported_and_exported(name, tmp_path):
    pytest.importorskip("onnxscript")
    words, small = command(name), experiment(name)
    for option in ("dataset", "clients", "cohort", "rounds"):
        words[words.index(f"--{option}") + 1] = str(getattr(small, option))
    folder = words[words.index("--out") + 1]
    for line in (
        ["run", *words],
        ["resume", folder, "--rounds", "4"],
        ["report", "runs", "--out", "page.html"],
        ["export", folder, "--format", "onnx", "--model", small.model, "--out", "model.onnx"],
    ):
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 0, done.output
    found = read_run(tmp_path / folder)
    assert found.metric.name == small.metrics.split(",")[0]
    assert len(found.metrics) == 4
    assert {"page.html", "model.onnx"} <= {path.name for path in tmp_path.iterdir()}


def test_the_command_of_a_page_repeats_the_numbers_of_its_script(name):
    script = (ROOT / "examples" / f"{name}.py").read_text()
    calls = re.findall(r"(?:algorithms[.]fedavg|fp[.]simulate|fp[.]FedPara)\((.*?)\)", script)
    numbers = dict(re.findall(r"(\w+)=([\w.\-\"]+)", " ".join(calls)))
    assert {"lr", "gamma", "rounds", "cohort", "batch_size"} <= numbers.keys()
    assert {field: getattr(asked(name), field) for field in numbers} == {
        field: literal_eval(value) for field, value in numbers.items()
    }
