"""Which examples clients train on and are scored on: validation, and the test data of the training owners."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.data import Examples
from fedpara.errors import ConfigError
from fedpara.experiments import Experiment, resume, run
from fedpara.experiments.build import build
from fedpara.experiments.federation import build_federation

DIGITS = Experiment(model="mlp", scheme="original", clients=10, cohort=5)
FEMNIST = Experiment(
    dataset="generated:femnist", model="mlp", scheme="original", split="owner", clients=5, cohort=5
)


def parts(experiment):
    """(federation, examples that score the global model) of the experiment."""
    return build_federation(experiment, *data.load(experiment.dataset))


def indices(federation):
    return [federation.clients[i].tolist() for i in range(len(federation))]


def same(a, b):
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("split", ["iid", "dirichlet", "dirichlet-capped", "shards"])
def test_validation_holds_out_a_tenth_of_every_client(split):
    train, _ = data.load("digits")
    whole, _ = parts(replace(DIGITS, split=split))
    kept, scored = parts(replace(DIGITS, split=split, validation=0.1))
    held = []
    for before, after in zip(indices(whole), indices(kept), strict=True):
        assert set(after) < set(before)
        assert len(before) - len(after) == round(0.1 * len(before))
        held += sorted(set(before) - set(after))
    assert sorted(scored.targets.tolist()) == sorted(train.targets[held].tolist())
    assert len(scored) == len(held)
    assert not kept.has_personal


@pytest.mark.parametrize(
    ("targets", "advice"),
    [
        (torch.arange(40) % 3, r"use iid, or .*Examples\(\.\.\., classes=3\)\.$"),
        (torch.rand(40), "use iid\\.$"),
    ],
)
def test_targets_that_are_not_said_to_be_classes_are_not_divided_by_class(targets, advice):
    examples = Examples(torch.randn(40, 4), targets)
    with pytest.raises(ConfigError, match=advice):
        build_federation(replace(DIGITS, split="dirichlet"), examples, examples)


def test_validation_is_stratified_and_seeded():
    train, _ = data.load("digits")
    experiment = replace(DIGITS, split="iid", clients=2, cohort=2, validation=0.2)
    found = [parts(replace(experiment, seed=seed))[0] for seed in (0, 0, 1)]
    assert indices(found[0]) == indices(found[1]) != indices(found[2])
    scored = parts(experiment)[1]
    expected = train.targets.bincount() * len(scored) / len(train)
    assert (scored.targets.bincount() - expected).abs().max() < 4


def test_a_client_keeps_its_only_example():
    count = len(data.load("digits")[0])
    federation, scored = parts(replace(DIGITS, clients=1000, cohort=5, split="iid", validation=0.5))
    sizes = np.array([federation.size(i) for i in range(1000)])
    assert sizes.min() == 1
    assert len(scored) + sizes.sum() == count
    with pytest.raises(ConfigError, match=r"no client has an example to spare: use fewer clients"):
        parts(replace(DIGITS, clients=count, cohort=5, split="iid", validation=0.1))


def test_data_fraction_applies_before_validation():
    half = parts(replace(DIGITS, data_fraction=0.5))[0]
    kept, scored = parts(replace(DIGITS, data_fraction=0.5, validation=0.1))
    assert all(set(b) < set(a) for a, b in zip(indices(half), indices(kept), strict=True))
    assert len(scored) == sum(map(len, indices(half))) - sum(map(len, indices(kept)))


@pytest.mark.parametrize("experiment", [DIGITS, FEMNIST], ids=["by class", "by owner"])
def test_personal_models_are_scored_on_the_held_out_examples(experiment):
    experiment = replace(experiment, personal=True)
    train, test = data.load(experiment.dataset)
    whole = build_federation(experiment, train, test)[0]
    federation, _ = build_federation(replace(experiment, validation=0.2), train, test)
    for i in range(len(federation)):
        own, before = federation.client_test(i), set(whole.clients[i].tolist())
        held = sorted(before - set(federation.clients[i].tolist()))
        assert held
        assert same(own, train.subset(federation.test_clients[i]))
        assert sorted(federation.test_clients[i].tolist()) == held


def test_a_validation_run_never_sees_the_test_set(tmp_path, monkeypatch):
    """Another test set changes no score of it, but those of a test run."""
    train, test = data.load("digits")
    experiment = replace(DIGITS, rounds=2, steps=2, epochs=None, personal=True)

    def scores(shift, validation):
        other = replace(test, targets=(test.targets + shift) % 10)
        monkeypatch.setattr(data, "load", lambda name, folder=None: (train, other))
        folder = tmp_path / f"{shift}-{validation}"
        return run(replace(experiment, validation=validation), folder).metrics

    assert scores(0, 0.1) == scores(1, 0.1)
    assert scores(0, 0.0) != scores(1, 0.0)


def test_held_out_text_is_in_no_training_window():
    """Windows overlap: the held-out labels are at the ends of the texts."""
    texts = torch.randint(0, 80, (3, 280), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    windows = Examples(
        texts.unfold(1, 80, 1)[:, :-1].reshape(-1, 80),
        texts[:, 80:].reshape(-1).long(),
        80,
        torch.arange(3).repeat_interleave(200),
    )
    place = torch.arange(200).repeat(3)  # of a window in its text
    for split, clients in (("owner", 3), ("iid", 6)):
        experiment = replace(FEMNIST, split=split, clients=clients, cohort=2, validation=0.1)
        federation, scored = build_federation(experiment, windows, windows)
        trained = np.concatenate(indices(federation))
        assert len(scored) == 60
        assert len(trained) == 540
        assert place[trained].max() == 179
        assert sorted(scored.targets.tolist()) == sorted(windows.targets[place >= 180].tolist())


def test_the_public_functions_give_the_same_run(tmp_path):
    """As in the docstring of `data.split`."""
    train, _ = data.load("digits")
    clients = data.dirichlet(train.targets, clients=10, alpha=0.5, seed=0)
    kept, held = data.split(clients, train.targets, 0.1, seed=0, exact=True)
    torch.manual_seed(0)
    model = models.mlp(inputs=64, classes=10)
    by_hand = fp.simulate(
        fp.Task(model, test=train.subset(held.indices)),
        fp.FederatedData(train, kept),
        algorithms.fedavg(lr=0.1, steps=2, batch_size=32),
        rounds=2,
        cohort=5,
        engine="sequential",
    )
    experiment = replace(DIGITS, rounds=2, steps=2, epochs=None, engine="sequential", validation=0.1)
    assert by_hand.accuracy == run(experiment, tmp_path / "run").accuracy


def test_data_of_nodes_cannot_be_held_out():
    with pytest.raises(ConfigError, match=r"validation is not supported for dataset 'load:a.b:c'"):
        build(Experiment(dataset="load:a.b:c", engine="flower", validation=0.1))


@pytest.mark.parametrize("changes", [{"clients": 5}, {"clients": 8, "keep": 5}, {"split": "largest"}])
def test_the_test_set_is_of_the_training_owners(changes):
    experiment = replace(FEMNIST, **changes)
    _, test = data.load("generated:femnist")
    federation, scored = parts(experiment)
    training = {owner for i in range(5) for owner in federation.client(i).owners.tolist()}
    assert len(training) == 5
    expected = [i for i, owner in enumerate(test.owners.tolist()) if owner in training]
    assert 0 < len(expected) < len(test)
    assert same(scored, test.subset(expected))
    assert same(parts(replace(experiment, test_owners="all"))[1], test)
    personal, again = parts(replace(experiment, personal=True))
    assert same(again, scored)
    assert {o for i in range(5) for o in personal.client_test(i).owners.tolist()} == training


def test_the_test_set_is_whole_if_all_owners_train():
    _, test = data.load("generated:femnist")
    assert same(parts(replace(FEMNIST, clients=12))[1], test)
    assert same(parts(replace(FEMNIST, split="iid"))[1], test)


def test_test_data_without_owners_cannot_be_narrowed():
    train, test = data.load("generated:femnist")
    unowned = replace(test, owners=None)
    with pytest.raises(ConfigError, match=r"have no owners.*test_owners to 'all'"):
        build_federation(FEMNIST, train, unowned)
    assert same(build_federation(replace(FEMNIST, test_owners="all"), train, unowned)[1], test)


def test_a_folder_without_test_owners_resumes_unchanged(tmp_path):
    """Earlier versions scored the test data of all owners and had no such field."""
    experiment = replace(FEMNIST, rounds=1, steps=1, epochs=None, test_owners="all")
    run(experiment, tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('test_owners = "all"\n', ""))
    went_on = resume(tmp_path / "run", rounds=2)
    whole = run(replace(experiment, rounds=2, evaluate_every=1), tmp_path / "whole")
    assert [line["accuracy"] for line in went_on.metrics] == [line["accuracy"] for line in whole.metrics]
