"""`where` and the split `largest`, which the paper's studies need beyond a model's own rule."""

import sys

import pytest
import torch

from fedpara import data
from fedpara.errors import ConfigError
from fedpara.experiments import Experiment
from fedpara.experiments import federation as federation_module
from fedpara.experiments.build import build_model, build_scheme
from fedpara.experiments.federation import build_federation
from fedpara.parameterization import FedPara, forms


def built(**given):
    experiment = Experiment(**given)
    return forms(build_model(experiment, 10, (3, 32, 32), build_scheme(experiment)))


def test_hybrid_leaves_the_first_convolutions_dense():
    whole = built(model="vgg16-tiny", scheme="lowrank", ratio=0.5, conv="reshape")
    hybrid = built(model="vgg16-tiny", scheme="lowrank", ratio=0.5, conv="reshape", where="hybrid:8")
    assert len(whole) == 13
    assert list(hybrid) == list(whole)[8:]


def test_early_layers_of_a_resnet_have_gamma_one():
    found = built(model="resnet18-tiny", scheme="fedpara", gamma=0.1, where="early")
    by_gamma = {
        gamma: [n for n, f in found.items() if f.scheme == FedPara(gamma=gamma)] for gamma in (1.0, 0.1)
    }
    assert sum(map(len, by_gamma.values())) == len(found)
    early = [
        name for name in found if "shortcut" in name or name in ("conv1.weight", "layer1.0.conv1.weight")
    ]
    assert by_gamma[1.0] == early


def test_every_takes_the_linear_layers_too():
    usual = built(model="vgg16", scheme="fedpara", gamma=0.1)
    every = built(model="vgg16", scheme="fedpara", gamma=0.1, where="every")
    assert set(every) - set(usual) == {f"classifier.{n}.weight" for n in (1, 4, 6)} & set(every)
    assert len(every) > len(usual)


def test_all_but_leaves_the_named_parts_of_the_models_rule_dense():
    usual = built(model="vgg16-tiny", scheme="fedpara", gamma=0.1)
    found = built(model="vgg16-tiny", scheme="fedpara", gamma=0.1, where="all but features.0, classifier")
    assert set(usual) - set(found) == {"features.0.weight"}
    one = built(model="mlp", scheme="pfedpara", gamma=0.5, where="all but fc2")
    assert list(one) == ["fc1.weight"]


def test_all_but_of_adapters_leaves_embeddings_out_as_the_default_does(tmp_path, monkeypatch):
    (tmp_path / "words.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(\n"
        "        nn.Embedding(50, 32), nn.Flatten(), nn.Linear(64, 48), nn.Linear(48, 48), nn.Linear(48, 8))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {"model": "words:net", "scheme": "lowrank", "rank": 2, "onto": "frozen"}
    assert list(built(**given)) == ["2.weight", "3.weight", "4.weight"]
    assert list(built(**given, where="all but 3")) == ["2.weight", "4.weight"]
    sys.modules.pop("words")


def test_all_but_refuses_names_that_no_module_has():
    with pytest.raises(ConfigError, match="where names 'fc9', and Sequential has no such module"):
        built(model="mlp", scheme="fedpara", where="all but fc1, fc9")


def test_early_needs_a_gamma():
    with pytest.raises(ConfigError, match="needs fedpara or pfedpara with a gamma"):
        built(model="resnet18-tiny", scheme="lowrank", ratio=0.5, where="early")


def test_the_largest_owners_come_first_with_their_own_test_data():
    train, test = data.load("generated:femnist")
    keep = (train.owners % 3 == 0) | (train.targets % 2 == 0)
    train = train.subset(keep.nonzero().flatten())
    experiment = Experiment(
        dataset="generated:femnist", split="largest", clients=4, cohort=4, personal=True, model="mlp"
    )
    federation, _ = build_federation(experiment, train, test)
    counts = train.owners.bincount()
    sizes = [federation.size(i) for i in range(4)]
    assert sizes == sorted(counts.tolist(), reverse=True)[:4]
    for i in range(4):
        (owner,) = set(federation.client(i).owners.tolist())
        assert counts[owner] == sizes[i]
        assert set(federation.client_test(i).owners.tolist()) == {owner}


def test_drawn_owners_differ_by_seed_and_have_many_examples_and_their_own_test_data(monkeypatch):
    monkeypatch.setattr(federation_module, "DRAWN_FROM", 2)
    train, test = data.load("generated:femnist")
    train = train.subset((torch.rand(len(train)) < 0.3 + train.owners / 20).nonzero().flatten())
    largest = set(train.owners.bincount().argsort(descending=True)[:8].tolist())
    chosen = []
    for seed in range(6):
        experiment = Experiment(
            dataset="generated:femnist",
            split="drawn",
            clients=4,
            cohort=4,
            personal=True,
            model="mlp",
            seed=seed,
        )
        federation, scored = build_federation(experiment, train, test)
        owners = [federation.client(i).owners.unique().item() for i in range(4)]
        assert [federation.client_test(i).owners.unique().item() for i in range(4)] == owners
        assert set(scored.owners.tolist()) == set(owners)
        chosen.append(tuple(owners))
    assert len(set(chosen)) == 6
    assert set().union(*chosen) == largest
