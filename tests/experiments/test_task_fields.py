"""Loss, metrics, optimizer, schedule, sampler and adapters as fields of an experiment."""

import json
import sys

import pytest
from own_task import FIELDS, NAME, write_module
from torch import nn

from fedpara.errors import ConfigError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.build import build, build_algorithm
from fedpara.experiments.config_file import read_toml, to_toml
from fedpara.experiments.run import rounds_done
from fedpara.parameterization import forms

VALUES = {
    "loss": ["mse", "tabular:huber", "tabular:scaled(by=2.0)"],
    "metrics": ["dice", "dice, iou", "dice, tabular:within(k=(1, 2), name='a,b'), accuracy"],
    "optimizer": ["adamw", "adamw(betas=(0.9, 0.95), eps=1e-6)", "tabular:signs"],
    "schedule": ["linear", "cosine(warmup=5)", "step_decay(30)", "tabular:halving"],
    "sampler": ["poisson", "tabular:first"],
    "keep_optimizer": [True],
    "onto": ["frozen"],
    "adapter_alpha": [8.0],
    "train": ["classifier, bias"],
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    write_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize(("name", "value"), [(name, v) for name, values in VALUES.items() for v in values])
def test_a_field_survives_a_write_and_a_read(tmp_path, name, value):
    experiment = Experiment(**{name: value})
    (tmp_path / "config.toml").write_text(to_toml(experiment))
    assert read_toml(tmp_path / "config.toml") == experiment
    assert experiment.identity != Experiment().identity
    assert NAME not in sys.modules


def test_metrics_are_numbered_references():
    found = Experiment(metrics=VALUES["metrics"][2]).references
    assert found == {"metrics.1": "tabular:within(k=(1, 2), name='a,b')"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "mze"}, "unknown loss 'mze': did you mean 'mse'"),
        ({"loss": "tabular:huber("}, "loss is 'tabular:huber.*expected package.module:function"),
        ({"metrics": "dice, acuracy"}, "unknown metrics 'acuracy': did you mean 'accuracy'"),
        ({"optimizer": "adamv"}, "unknown optimizer 'adamv': did you mean 'adam"),
        ({"optimizer": "adamw(beta=1)"}, r"optimizer is 'adamw\(beta=1\)' .*expected adamw\(\*?,? ?betas"),
        ({"optimizer": "adamw(eps=open('a'))"}, "with Python literals"),
        ({"schedule": "cosin(warmup=5)"}, "did you mean 'cosine'"),
        ({"schedule": "step_decay"}, "missing a required argument: 'every'"),
        ({"schedule": "cosine(warmup=5"}, r"schedule is 'cosine\(warmup=5'"),
        ({"schedule": "cosine()()"}, "expected cosine"),
        ({"schedule": "cosine(within=true)"}, r"\(an argument is no literal, such as 0.5, True or 'text'\)"),
        ({"sampler": "poison"}, "did you mean 'poisson'"),
        ({"onto": "molten"}, "unknown onto 'molten'"),
    ],
)
def test_a_wrong_name_is_one_sentence(changes, says):
    with pytest.raises(ConfigError, match=says) as error:
        Experiment(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss": "tabular:nothing"}, "has no function 'nothing'"),
        ({"loss": "tabular:no_optimizer()"}, "returned int: expected a function"),
        ({"metrics": "tabular:no_optimizer()"}, "returned int: expected a function"),
        ({"optimizer": "tabular:no_optimizer"}, "returned int: expected an Optimizer"),
        ({"optimizer": "adamw(eps=-1.0)"}, "eps is -1.0"),
        ({"schedule": "step_decay(0)"}, "every is 0: expected a number of rounds"),
        ({"schedule": "tabular:huber"}, "expected a function .at, rounds. -> factor"),
        ({"sampler": "tabular:twice"}, "client 0 twice"),
        ({"onto": "frozen"}, "scheme 'original' has no onto"),
        ({"train": "0", "scheme": "lowrank", "rank": 1}, 'pass onto="frozen"'),
    ],
)
def test_mistakes_leave_no_folder(module, tmp_path, changes, says):
    with pytest.raises(Exception, match=says) as error:
        run(Experiment(**{**FIELDS, **changes}), tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_every_part_is_what_the_fields_say(module):
    parts = build(
        Experiment(
            **{
                **FIELDS,
                "loss": "tabular:scaled(by=2.0)",
                "metrics": "tabular:worst, tabular:within(k=1), tabular:within(k=2)",
                "optimizer": "tabular:signs",
                "schedule": "tabular:halving",
                "keep_optimizer": True,
            }
        )
    )
    assert list(parts.task.scored) == ["worst", "within", "tabular:within(k=2)", "loss"]
    assert (parts.task.primary, parts.task.higher_is_better) == ("worst", False)
    local = parts.algorithm.local
    assert (local.optimizer.name, local.keep_optimizer, local.lr_at(3)) == ("signs", True, 0.01 / 4)


def test_a_call_of_a_library_optimizer_sets_the_fields_of_local():
    local = build_algorithm(Experiment(optimizer="adamw(betas=(0.8, 0.9))", weight_decay=0.1)).local
    assert (local.optimizer, local.betas, local.weight_decay) == ("adamw", (0.8, 0.9), 0.1)
    assert (
        build_algorithm(Experiment(optimizer="sgd(momentum=0.9)", algorithm="fedprox")).local.momentum == 0.9
    )


def test_adapters_train_only_factors_and_what_train_names(module):
    fields = {**FIELDS, "scheme": "lowrank", "rank": 2, "onto": "frozen", "adapter_alpha": 4.0, "train": "2"}
    model = build(Experiment(**fields)).task.model
    assert list(forms(model)) == ["0.weight"]
    assert forms(model)["0.weight"].scale == 2.0
    assert isinstance(model[2], nn.Linear)
    assert (model[2].weight.requires_grad, model[0].bias.requires_grad) == (True, False)


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_resumed_run_has_the_same_bits_and_its_own_metric(module, tmp_path, engine):
    fields = {**FIELDS, "engine": engine, "schedule": "cosine(warmup=1, rounds=4)", "keep_optimizer": True}
    whole = run(Experiment(**fields), tmp_path / "whole")
    run(Experiment(**{**fields, "rounds": 1}), tmp_path / "parts")
    resume(tmp_path / "parts", rounds=3)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()
    assert (whole.metric.name, whole.metric.higher_is_better) == ("r2", True)
    assert whole.metrics[-1]["scores"].keys() == {"r2", "mae", "loss"}


def test_sources_cover_the_new_references(module, tmp_path):
    run(Experiment(**{**FIELDS, "rounds": 1, "metrics": "mae, tabular:worst"}), tmp_path / "run")
    recorded = json.loads((tmp_path / "run" / "sources.json").read_text())
    assert recorded["references"]["metrics.1"] == "tabular:worst"
    assert "tabular.py" in recorded["sha256"]


def test_target_works_in_the_direction_of_the_metric(module, tmp_path):
    run(Experiment(**{**FIELDS, "metrics": "mae", "target": 100.0}), tmp_path / "run")
    assert read_run(tmp_path / "run").rounds == 1


@pytest.mark.parametrize("schedule", ["cosine(warmup=1)", "linear", "tabular:halving"])
def test_a_schedule_without_rounds_fixes_the_rounds(module, tmp_path, schedule):
    experiment = Experiment(**{**FIELDS, "schedule": schedule, "rounds": 2})
    run(experiment, tmp_path / "run")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    for change in (
        lambda: resume(tmp_path / "run", rounds=3),
        lambda: rounds_done(tmp_path / "run", 3, *[None] * 3),
    ):
        with pytest.raises(ConfigError, match=r"rounds is 3, but the schedule .* follows its 2 rounds"):
            change()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert resume(tmp_path / "run").rounds == 2


@pytest.mark.parametrize(
    ("schedule", "decide"),
    [
        *[("cosine", True), ("cosine(rounds=9)", False), ("constant(warmup=2)", False)],
        *[("step_decay(3)", False), ("a:b", True), ("a:b(rounds=9)", False), (None, False)],
    ],
)
def test_rounds_are_in_the_identity_if_they_decide(schedule, decide):
    two, three = (Experiment(schedule=schedule, rounds=rounds).identity for rounds in (2, 3))
    assert (two != three) == decide
