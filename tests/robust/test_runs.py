"""Runs with hostile clients and a defence: every engine, resumed bit for bit, mistakes before a folder is made."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from flower_nodes import BASE, CASES, run_on_nodes, run_sequentially, same_results
from torch import nn

import fedpara as fp
from fedpara import algorithms, attacks, data, robust
from fedpara.engines.local.worker import Worker
from fedpara.errors import ConfigError, RunError
from fedpara.experiments import Experiment, resume, run
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.experiments.studies.robustness import markdown, study, without
from fedpara.models import mlp

SMALL = Experiment(
    model="mlp",
    data_fraction=0.15,
    clients=10,
    cohort=9,
    rounds=2,
    device="cpu",
    attack="sign-flip",
    hostile=0.2,
)


@pytest.mark.parametrize(
    ("engine", "attack", "defence"),
    [("sequential", "alie(1.5)", "fltrust(20)"), ("batched", "backdoor(target=3, scale=2)", "auto")],
)
def test_an_interrupted_run_resumes_bit_for_bit(tmp_path, engine, attack, defence):
    experiment = replace(SMALL, attack=attack, robust=defence, engine=engine)
    whole = run(experiment, tmp_path / "whole")
    run(experiment, tmp_path / "cut", on_round=lambda result, timing: False)
    resumed = resume(tmp_path / "cut")
    assert resumed.metrics == whole.metrics
    a, b = (final_checkpoint(tmp_path / name).progress.x for name in ("whole", "cut"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    line = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[-1])
    assert ("backdoor" in line.get("scores", {})) == attack.startswith("backdoor")


@pytest.mark.parametrize("case", ["scaffold", "pfedpara"])
def test_defences_work_on_flower(tmp_path, case):
    experiment = replace(BASE, cohort=5, rounds=2, robust="auto", **CASES[case])
    run_sequentially(experiment, tmp_path / "a")
    run_on_nodes(experiment, tmp_path / "b")
    assert same_results(tmp_path / "a", tmp_path / "b")


def federation(clients=8):
    train, test = data.load("digits")
    held = data.iid(train.targets[:240], clients, 0)
    return fp.FederatedData(train, held, test=test.subset(np.arange(50)))


def simulated(engine="sequential", algorithm=None, **options):
    torch.manual_seed(0)
    model = fp.factorize(mlp(64, 32, 10), fp.FedPara(gamma=0.3))
    algorithm = algorithm or algorithms.fedavg(lr=0.1, epochs=1, batch_size=16)
    options = {"rounds": 2, "cohort": 8, "device": "cpu", "engine": engine, **options}
    return fp.simulate(fp.Task(model), federation(), algorithm, **options)


def test_both_engines_give_the_same_model():
    a, b = (
        simulated(engine, robust="multi-krum(0.25)", attack="backdoor", hostile=0.25).state
        for engine in ("sequential", "batched")
    )
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["fedadam", "scaffold", "fednova", "feddyn"])
def test_a_defence_wraps_any_mean(name):
    """Ten times the update of two clients: the defended model stays near the one without attackers."""
    local = algorithms.Local(lr=0.1, batch_size=16)
    algorithm = algorithms.build(name, local)

    def distance(a, b):
        return sum(float((a.state[n] - b.state[n]).square().sum()) for n in a.state) ** 0.5

    honest = simulated(algorithm=algorithm, rounds=1)
    hit = {"attack": attacks.scaling(10.0), "hostile": 0.25, "rounds": 1}
    plain, defended = (simulated(algorithm=algorithm, robust=r, **hit) for r in (None, robust.median()))
    if name != "fedadam":  # Adam's first step has the same length for every mean
        assert distance(defended, honest) < 0.5 * distance(plain, honest)
    assert defended.accuracy >= 0


def test_the_servers_own_model_starts_from_its_own_buffers(monkeypatch):
    """A client's buffers may be an attacker's."""
    seen, train = [], Worker.train

    def recorded(self, state, *words, who, **options):
        if who == 8:  # the server, after clients 0 to 7
            seen.append(state["1.running_mean"].clone())
        return train(self, state, *words, who=who, **options)

    monkeypatch.setattr(Worker, "train", recorded)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    algorithm = algorithms.fedavg(lr=0.1, epochs=1, batch_size=16)
    run = fp.simulate(
        fp.Task(model), federation(), algorithm, rounds=1, cohort=8, device="cpu", robust="fltrust(20)"
    )
    assert not torch.equal(run.state["1.running_mean"], torch.zeros(64))
    assert [bool(mean.any()) for mean in seen] == [False]


def test_a_rescaled_client_breaks_the_mean_of_factors_and_no_composed_one():
    hit = {"attack": "gauge(100)", "hostile": 0.25, "rounds": 1}
    clean, attacked = simulated(robust="mean", rounds=1), simulated(robust="mean", **hit)
    before, after, broken = map(_composed, (clean, attacked, simulated(**hit)))
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-4)
    assert (broken - before).norm() > 1


def _composed(run, weight="fc1.weight"):
    form = run.session.program.forms[weight]
    return form.compose([run.state[f"{weight}.{factor}"] for factor in form.factors])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attack": "sign-flip", "hostile": 0.6}, "at most 0.5"),
        ({"attack": "sign-flip"}, "set hostile"),
        ({"hostile": 0.2}, "needs an attack"),
        ({"robust": "krum(0.4)"}, "needs at least 9 clients in a round and the cohort has 8"),
        ({"robust": "median", "cohort": 2}, "needs at least 3"),
        ({"robust": "trimmed-mean(0.5)"}, "below 0.5"),
        ({"robust": "nonsense"}, "unknown robust"),
        ({"attack": "backdoor(target=10)", "hostile": 0.2}, "0 to 9"),
        ({"robust": "fltrust(100000)"}, "clean examples"),
    ],
)
def test_a_mistake_is_one_sentence_before_a_folder_is_made(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        simulated(out=tmp_path / "run", **options)
    assert not list(tmp_path.iterdir())


def test_attacks_are_refused_on_flower(tmp_path):
    with pytest.raises(ConfigError, match="Flower"):
        fp.engines.settings.Settings(rounds=1, cohort=3, engine="flower", attack="noise", hostile=0.2)


def test_old_identities_stay():
    assert Experiment().identity == replace(Experiment(), robust=None, attack=None, hostile=0.0).identity
    assert Experiment(robust="rfa").identity != Experiment().identity


def test_poison_reaches_hostile_clients_only():
    plain, hostile = federation(), frozenset({2, 5})
    changed = attacks.poisoned(attacks.label_flip(), plain, hostile, 0)
    for client in range(len(plain)):
        before, after = plain.client(client), changed.client(client)
        expected = 9 - before.targets if client in hostile else before.targets
        assert torch.equal(after.targets, expected)
        assert torch.equal(after.inputs, before.inputs)
    read = fp.FederatedData.of(lambda i: plain.client(i), clients=8)
    loaded = attacks.poisoned(attacks.label_flip(), read, hostile, 0)
    assert torch.equal(loaded.client(5).targets, changed.client(5).targets)


def test_the_study_skips_what_its_folder_holds(tmp_path):
    seen = []
    asked = {"rounds": 1, "seeds": [20], "attacks": ("none", "backdoor"), "defences": ("none", "median")}
    first = study(tmp_path, **asked, on_outcome=seen.append)
    assert len(seen) == 4
    assert study(tmp_path, **asked, part="b", on_outcome=seen.append) == first
    assert len(seen) == 4
    assert markdown(first).splitlines()[0] == "| attack | none | median |"
    assert [file.name for file in tmp_path.iterdir()] == ["outcomes.jsonl"]


def test_a_part_of_the_study_has_its_own_file(tmp_path):
    asked = {"rounds": 1, "attacks": ["absent"], "defences": ["none"]}
    (test,) = study(tmp_path, seeds=[20], part="a", **asked)
    (held_out,) = study(tmp_path, seeds=[20], part="a", validation=True, **asked)
    assert {file.name for file in tmp_path.iterdir()} == {"outcomes-a.jsonl", "validation-a.jsonl"}
    assert (test.validation, held_out.validation) == (False, True)
    assert test.accuracy != held_out.accuracy
    assert held_out.backdoor is not None
    with pytest.raises(ConfigError, match="unknown attack"):
        study(tmp_path, attacks=["nonsense"])


def test_absent_clients_take_part_in_no_round():
    hostile, generator = frozenset({1, 3}), np.random.default_rng(0)
    for round in range(1, 6):
        drawn = list(without(hostile)(round, 6, 4, generator))
        assert drawn
        assert not hostile & set(drawn)


def test_a_study_that_was_killed_while_writing_a_line_runs_that_cell_again(tmp_path):
    file, seen = tmp_path / "outcomes.jsonl", []
    asked = {"rounds": 1, "seeds": [20], "attacks": ("none", "backdoor"), "defences": ("none",)}
    first = study(tmp_path, **asked)
    file.write_bytes(file.read_bytes()[:-9])
    again = study(tmp_path, **asked, on_outcome=seen.append)
    assert [made.attack for made in seen] == ["backdoor"]
    assert [made.accuracy for made in again] == [made.accuracy for made in first]
    assert study(tmp_path, **asked) == again
    file.write_text(file.read_text().replace("accuracy", "score", 1))
    with pytest.raises(RunError, match="is damaged in line 1"):
        study(tmp_path, **asked)


def on_ten_clients(**options):
    train, test = data.load("digits")
    clients = data.iid(train.targets[:200], clients=10, seed=0)
    model = fp.factorize(mlp(64, 16, 10), fp.FedPara(gamma=0.1))
    return fp.simulate(
        fp.Task(model, test),
        fp.FederatedData(train, clients),
        algorithms.fedavg(lr=0.1, batch_size=5),
        rounds=1,
        cohort=10,
        engine="sequential",
        **options,
    )


@pytest.mark.parametrize(
    ("defence", "message"),
    [
        ({"weigh": lambda g: g.w.sum()}, r"weigh returned float64 \(\): expected a tensor of shape \(10,\)"),
        ({"weigh": lambda g: None}, "weigh returned nothing: expected a tensor of shape"),
        ({"weigh": lambda: None}, r"weigh failed: TypeError: .* It is called as weigh\(geometry\)"),
        ({"combine": lambda w: w.median(0)}, "combine returned median: expected a tensor of shape"),
        ({"combine": lambda w: w}, r"combine returned float32 \(10, "),
    ],
)
def test_a_custom_defence_that_returns_something_else_is_named(defence, message):
    with pytest.raises(ConfigError, match=f"robust 'mine': {message}"):
        on_ten_clients(robust=robust.Defence("mine", **defence))


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ({"send": lambda x, y, visit, forms: None}, "send returned nothing for"),
        ({"send": lambda x, y: y}, r"send failed: TypeError: .* It is called as send\(x, y, visit, forms\)"),
        ({"poison": lambda examples, generator: None}, "poison returned NoneType: expected 20 examples"),
        (
            {"poison": lambda examples, generator: examples.subset([0])},
            "poison returned 1 examples: expected 20",
        ),
        ({"collude": lambda honest, x, hostile, clients: None}, "collude returned nothing for"),
    ],
)
def test_a_custom_attack_that_returns_something_else_is_named(attack, message):
    with pytest.raises(ConfigError, match=f"attack 'mine': {message}"):
        on_ten_clients(attack=attacks.Attack("mine", **attack), hostile=0.2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: robust.Defence("mine"), "Defence 'mine' has neither weigh nor combine: give one of them"),
        (lambda: attacks.Attack("mine"), "Attack 'mine' does nothing: give it send, poison or collude"),
        (lambda: on_ten_clients(robust=lambda g: g.w), "robust is function: expected a name such as 'rfa'"),
        (
            lambda: on_ten_clients(attack=len, hostile=0.2),
            "attack is builtin_function_or_method: expected a name",
        ),
        (lambda: fp.Link(up=len), "Link up is <built-in function len>: expected one of float32"),
    ],
)
def test_a_value_of_another_kind_is_named(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
