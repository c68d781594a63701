"""Private runs: in memory, into a folder, from the command line and on Flower nodes."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from flower_nodes import BASE, run_on_nodes
from typer.testing import CliRunner

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.apps.cli import app
from fedpara.engines.server.private import PrivateSum
from fedpara.errors import ConfigError
from fedpara.experiments import Experiment, resume, run
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.privacy import User, epsilon
from fedpara.report.own import sections, tables

PRIVATE = Experiment(
    model="mlp",
    clients=12,
    cohort=6,
    rounds=3,
    epochs=None,
    steps=2,
    sampler="poisson",
    weights="uniform",
    privacy="user(noise=1.0, clip=0.3, quantile=0.5)",
    privacy_seed=1,
    engine="sequential",
)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def x_of(folder):
    return final_checkpoint(folder).progress.x


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def federation():
    train, test = data.load("digits")
    train, test = train.subset(np.arange(120)), test.subset(np.arange(40))
    held = fp.FederatedData(train, data.iid(len(train), clients=12, seed=0))
    torch.manual_seed(0)
    return fp.Task(models.mlp(64, 16, 10), test=test), held, algorithms.fedavg(lr=0.1, steps=2)


def simulate(federation, **how):
    given = {"rounds": 2, "cohort": 6, "sampler": "poisson", "weights": "uniform", "engine": "sequential"}
    return fp.simulate(*federation, **{**given, "privacy": User(1.0, 0.3), **how})


def test_engines_agree(federation):
    made = [simulate(federation, privacy_seed=1, engine=engine).state for engine in ("sequential", "batched")]
    for name in made[0]:
        torch.testing.assert_close(made[0][name], made[1][name], rtol=1e-4, atol=1e-6)


def test_a_run_without_a_seed_is_private_and_never_the_same(federation):
    """Neither its noise nor its cohorts follow the run's seed."""
    runs = [simulate(federation, rounds=6) for _ in range(2)]
    assert not same(runs[0].state, runs[1].state)
    assert [r.cohort for r in runs[0].rounds] != [r.cohort for r in runs[1].rounds]
    for one in runs:
        assert one.privacy["private"]
        assert one.privacy["epsilon"] == epsilon(1.0, 0.5, 6, 12**-1.1)
        assert "privacy: epsilon" in repr(one)


def test_a_seeded_run_says_that_it_is_not_private(federation):
    first, second = (simulate(federation, privacy_seed=4) for _ in range(2))
    assert same(first.state, second.state)
    assert not first.privacy["private"]
    assert "not private" in repr(first)


def test_the_client_clips_before_it_sends(federation, monkeypatch):
    """With a learning rate that moves far, every update arrives exactly as long as the bound of its round."""
    arrived, add = [], PrivateSum.add

    def spy(self, client, update, buffers):
        norm = sum(float(((update.y[n] - self._x[n]) ** 2).sum()) for n in update.y) ** 0.5
        arrived.append((norm, self.bound))
        add(self, client, update, buffers)

    monkeypatch.setattr(PrivateSum, "add", spy)
    task, held, algorithm = federation
    loud = replace(algorithm, local=replace(algorithm.local, lr=3.0))
    simulate((task, held, loud), privacy=User(1.0, 0.01, quantile=0.5))
    assert len({bound for _, bound in arrived}) == 2
    for norm, bound in arrived:
        assert norm == pytest.approx(bound, rel=1e-4)


def test_the_budget_stops_a_run(federation):
    one, two, three = (epsilon(1.0, 0.5, t, 1e-3) for t in (1, 2, 3))
    run = simulate(federation, rounds=9, epsilon=(two + three) / 2, delta=1e-3, privacy_seed=1)
    assert [r.privacy["epsilon"] for r in run.rounds] == [one, two]
    assert "stopped after round 2: one more costs epsilon" in run.rounds[-1].notes[-1]


def test_resuming_gives_the_same_bits_with_a_seed(tmp_path):
    run(PRIVATE, tmp_path / "whole")
    run(replace(PRIVATE, rounds=1), tmp_path / "parts")
    resume(tmp_path / "parts", rounds=3)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()
    assert same(x_of(tmp_path / "whole"), x_of(tmp_path / "parts"))
    (section,) = sections([fp.experiments.read_run(tmp_path / "whole")])
    (table,) = tables([section], _Library())
    assert "not private" in " ".join(table.study.notes)
    assert "epsilon" in {entry.column for entry in table.entries}


class _Library:
    def name_of(self, run):
        return run.path.name


def test_resuming_without_a_seed_goes_on_counting(tmp_path):
    whole = replace(PRIVATE, privacy_seed=None, rounds=1)
    run(whole, tmp_path / "a")
    resume(tmp_path / "a", rounds=3)
    spent = [line["privacy"]["epsilon"] for line in lines(tmp_path / "a")]
    assert spent == [epsilon(1.0, 0.5, t, 12**-1.1) for t in (1, 2, 3)]
    assert all(line["privacy"]["private"] for line in lines(tmp_path / "a"))


def test_a_spent_budget_ends_a_folder(tmp_path):
    budget = epsilon(1.0, 0.5, 1, 12**-1.1) * 1.01
    summary = run(replace(PRIVATE, epsilon=budget), tmp_path / "a")
    assert summary.rounds == 1
    assert resume(tmp_path / "a").rounds == 1


def test_simulate_into_a_folder_resumes(federation, tmp_path):
    how = {"privacy": User(1.0, 0.3, quantile=0.5), "privacy_seed": 2}
    whole = simulate(federation, rounds=3, **how)
    simulate(federation, rounds=2, out=tmp_path / "a", **how)
    again = simulate(federation, rounds=3, out=tmp_path / "a", **how)
    assert same(whole.state, again.state)
    assert again.privacy == whole.privacy
    with pytest.raises(ConfigError, match=r"privacy \('user\(noise=1.0, clip=0.3, quantile=0.5\)' there"):
        simulate(federation, rounds=3, out=tmp_path / "a", privacy=User(2.0, 0.3), privacy_seed=2)


@pytest.mark.parametrize("link", [{}, {"link_up": "int8", "link_down": "float16"}], ids=["exact", "lossy"])
def test_flower_nodes_give_the_same_bits(tmp_path, link):
    changed = {name: getattr(PRIVATE, name) for name in ("sampler", "weights", "privacy", "privacy_seed")}
    experiment = replace(BASE, **changed, **link, engine="sequential")
    run(experiment, tmp_path / "here")
    run_on_nodes(replace(experiment, engine="flower"), tmp_path / "nodes")
    assert same(x_of(tmp_path / "here"), x_of(tmp_path / "nodes"))


BAD = {
    "noise without clipping": ({"privacy": "user(noise=1.0)"}, "has noise and no clip"),
    "unknown": ({"privacy": "users(noise=1.0)"}, "expected user"),
    "misspelled": ({"privacy": "user(noise=1.0, clp=1)"}, "unexpected keyword argument 'clp'"),
    "no noise": ({"privacy": "user(noise=0, clip=1)"}, "noise is 0: expected 0.1 or more"),
    "quantile": ({"privacy": "user(1, 1, quantile=2)"}, "quantile is 2: expected above 0 and below 1"),
    "bits": ({"privacy": "user(1, 1, quantile=0.5, bit_noise=0.4)"}, "expected a bit_noise above 0.5"),
    "sampler": ({"sampler": "uniform"}, "needs sampler 'poisson'.*the sampler is 'uniform'"),
    "weights": ({"weights": "examples"}, "weights is 'examples', expected 'uniform'"),
    "scaffold": ({"algorithm": "scaffold"}, "its clients send more than the model"),
    "batch norm": (
        {"model": "resnet18-tiny", "dataset": "generated:cifar10"},
        "averaged without noise: use GroupNorm",
    ),
    "spent": ({"epsilon": 0.01}, "the first round of .* already costs"),
    "budget": ({"epsilon": -1.0}, "epsilon is -1.0: expected a number above 0"),
    "delta": ({"delta": 0.0}, "needs a delta above 0"),
    "not private": ({"privacy": None}, "privacy_seed is 1 without privacy"),
}


@pytest.mark.parametrize(("change", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_leaves_no_folder(tmp_path, change, expected):
    with pytest.raises(ConfigError, match=expected):
        lay_out(replace(PRIVATE, **change), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_custom_aggregate_is_refused(federation):
    task, held, algorithm = federation
    median = replace(algorithm, aggregate=lambda x, server, updates, clients: (x, server))
    with pytest.raises(ConfigError, match="with fedavg it needs single updates"):
        simulate((task, held, median))


def command(text):
    return CliRunner().invoke(app, ["privacy", *shlex.split(text)]).stdout


def test_the_command_computes_noise_and_cost():
    found = json.loads(command("--epsilon 4 --delta 1e-3 --clients 100 --cohort 50 --rounds 4 --json"))
    assert found["affordable"] == 4
    assert found["costs"][-1]["epsilon"] == epsilon(found["noise"], 0.5, 4, 1e-3) <= 4
    assert [line["rounds"] for line in found["costs"]] == [1, 2, 4]
    told = command("--noise 1 --epsilon 9 --clients 100 --cohort 50 --rounds 4")
    assert "lasts for" in told
    assert "--privacy 'user(noise=1, clip=0.5)'" in told
    assert "--epsilon 9" in told, "the suggested run stops at the budget"


def test_the_command_suggests_no_run_without_a_budget_for_one_round():
    told = command("--noise 0.2 --epsilon 1 --clients 100 --cohort 50 --rounds 4")
    assert "lasts for 0 rounds" in told
    assert "run it" not in told
    refused = CliRunner().invoke(
        app, shlex.split("privacy --noise 0.001 --clients 100 --cohort 10 --rounds 5")
    )
    assert isinstance(refused.exception, ConfigError)
    assert "--noise is 0.001: expected 0.1 or more" in str(refused.exception)
