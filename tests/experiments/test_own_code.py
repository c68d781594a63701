"""Experiments whose model, data, split, rule and algorithm are the user's own functions."""

import json
import sys

import pytest
import torch
from own_code import fields, forget, write_package
from torch import nn

from fedpara.errors import ConfigError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.build import build
from fedpara.experiments.config_file import read_toml, to_toml
from fedpara.experiments.storage.catalog import Library, archive_run
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.storage.sources import describe_sources
from fedpara.parameterization import forms

NAME = "mine"
TINY = {"clients": 4, "cohort": 2, "rounds": 3, "batch_size": 16, "gamma": 0.0, "engine": "sequential"}


@pytest.fixture
def own(tmp_path, monkeypatch):
    write_package(tmp_path, NAME)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield Experiment(**fields(NAME), **TINY)
    forget(NAME)


def with_fields(experiment, **changed):
    return Experiment(**{**fields(NAME), **TINY, **changed})


def test_every_part_is_the_users(own):
    parts = build(own)
    assert isinstance(parts.task.model[1], nn.Linear)
    assert parts.task.model[3].in_features == 12
    assert list(forms(parts.task.model)) == ["1.weight"]
    assert (len(parts.data), len(parts.data.train), len(parts.task.test)) == (4, 200, 100)
    assert parts.data.clients[0].tolist() != parts.data.clients[1].tolist()
    assert (parts.algorithm.name, parts.algorithm.local.batch_size) == ("slow", 16)


def test_a_config_is_read_without_importing_anything(own, tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(own))
    assert read_toml(tmp_path / "config.toml") == own
    assert own.references.keys() == {"dataset", "model", "where", "split", "algorithm"}
    assert NAME not in sys.modules


def test_a_resumed_run_has_the_same_bits(own, tmp_path):
    run(own, tmp_path / "whole")
    run(with_fields(own, rounds=1), tmp_path / "parts")
    forget(NAME)
    resume(tmp_path / "parts", rounds=3)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()
    whole, parts = (final_checkpoint(tmp_path / name).state for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert "changed since" not in (tmp_path / "parts" / "log.txt").read_text()


def test_the_folder_records_references_and_digests(own, tmp_path):
    run(own, tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "sources.json").read_text())
    assert recorded["references"] == own.references
    assert {"mine/networks.py", "helping_mine.py"} <= recorded["sha256"].keys()
    model = json.loads((tmp_path / "run" / "model.json").read_text())
    assert (model["name"], model["classes"], model["shape"]) == ("mine:net(width=12)", 10, [1, 8, 8])
    run(Experiment(**TINY), tmp_path / "library")
    assert not (tmp_path / "library" / "sources.json").exists()
    assert (archive_run(tmp_path / "run", tmp_path / "archive") / "sources.json").exists()


def test_resuming_tells_that_a_source_changed(own, tmp_path, caplog):
    run(with_fields(own, rounds=1), tmp_path / "run")
    forget(NAME)
    file = tmp_path / "mine" / "methods.py"
    file.write_text(file.read_text() + "# another version\n")
    resume(tmp_path / "run", rounds=2)
    says = "mine/methods.py changed since the run began: the next rounds use the new code."
    assert says in (tmp_path / "run" / "log.txt").read_text()
    assert [r.levelname for r in caplog.records if r.getMessage() == says] == ["WARNING"]


def test_a_missing_module_is_one_sentence_and_the_folder_is_still_readable(own, tmp_path):
    run(with_fields(own, rounds=1), tmp_path / "run")
    forget(NAME)
    (tmp_path / "mine").rename(tmp_path / "moved")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"cannot be imported \(ModuleNotFoundError.*: looked in ") as error:
        resume(tmp_path / "run", rounds=2)
    assert "\n" not in str(error.value)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert read_run(tmp_path / "run").rounds == 1
    assert not Library.of(tmp_path).damaged


def test_a_dataset_may_be_a_federation(own, tmp_path):
    federation = {"dataset": "mine.reading:federation", "split": "dirichlet"}
    summary = run(Experiment(**{**fields(NAME), **TINY, **federation, "clients": 100}), tmp_path / "run")
    assert summary.clients == 4
    assert len(build(with_fields(own, **federation)).data) == 4
    for changed, says in (
        ({"clients": 5}, "clients is 5, but .* with 4 clients"),
        ({"split": "iid"}, "split is 'iid', but .* already has its clients: leave split out"),
        ({"data_fraction": 0.5}, "data_fraction is 0.5"),
    ):
        with pytest.raises(ConfigError, match=says):
            run(with_fields(own, **{**federation, **changed}), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "mine.networks:number"}, "returned int: expected a torch.nn.Module"),
        (
            {"dataset": "mine.reading:number"},
            r"returned int: expected \(train, test\), both fedpara Examples",
        ),
        ({"algorithm": "mine.methods:number", "options": {}}, "returned int: expected an Algorithm"),
        ({"algorithm": "mine.methods:without"}, "takes neither `local` nor"),
        ({"options": {"nu": 1.0}}, "has no hyper-parameter 'nu': it has mu"),
        ({"where": "mine.networks:at_least"}, "is not a rule .*rule.name, module, parameter"),
        ({"where": "mine.networks:number"}, "is not a rule"),
        ({"split": "mine.reading:strips(offset=0.5)"}, "returned no split .*indices are float64"),
        ({"split": "mine.reading:halves"}, "returned 2 clients: expected 4"),
        ({"split": "mine.reading:number"}, "cannot be called"),
        ({"model": "mine:net(width=12", "rounds": 2}, "model is 'mine:net.*expected package.module:function"),
        ({"model": "nett"}, r"unknown model 'nett'.*Your own is package\.module:function"),
    ],
)
def test_mistakes_leave_no_folder(own, tmp_path, changed, says):
    with pytest.raises(ConfigError, match=says):
        run(with_fields(own, **changed), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parentheses_call_a_rule_and_local_is_passed_on(own):
    parts = build(
        with_fields(own, where="mine.networks:at_least(size=500)", algorithm="mine.methods:with_local")
    )
    assert list(forms(parts.task.model)) == ["1.weight"]
    assert parts.algorithm.local.batch_size == 16


def test_a_reference_to_this_package_has_no_digests():
    """The version in environment.json tells its code."""
    assert describe_sources(Experiment(model="fedpara.models:mlp(inputs=64)")) == {}
