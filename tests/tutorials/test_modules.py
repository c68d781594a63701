"""Properties of three tutorials' own code: documents' padding, the weights under adapters, and algorithms."""

import math
from copy import deepcopy

import pytest
import torch

import fedpara as fp
from fedpara import algorithms
from fedpara.experiments.build import build
from fedpara.tasks.losses import mean_loss, next_token


@pytest.mark.parametrize("tutorial", ["language_model"], indirect=True)
def test_padding_does_not_count(tutorial):
    """The uniform model has the size of the vocabulary as its perplexity, on documents of every length."""
    module = tutorial.module
    test = module.load(clients=3, documents=2).test
    uniform = torch.zeros(len(test), module.LENGTH, len(module.VOCABULARY))
    assert math.exp(mean_loss(next_token(uniform, test.targets))) == pytest.approx(len(module.VOCABULARY))
    assert len({int(n) for n in (test.targets >= 0).sum(1)}) == 5


@pytest.mark.parametrize("tutorial", ["adapters"], indirect=True)
def test_the_base_is_the_same_whatever_was_drawn_before(tutorial):
    """Both ends must have the same base, and each of them may have drawn numbers."""
    module = tutorial.module
    torch.manual_seed(1)
    first = module.pretrained().state_dict()
    module.weights.cache_clear()
    torch.rand(3)
    again = module.pretrained().state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)


def trained(model, data, algorithm, engine):
    task = fp.Task(deepcopy(model))
    return fp.simulate(task, data, algorithm, rounds=3, cohort=3, engine=engine, seed=0).state


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize("tutorial", ["own_algorithm"], indirect=True)
def test_the_written_fednova_equals_the_shipped_one_bit_for_bit(tutorial, engine):
    """With uneven sizes and different numbers of epochs. FedAvg gives another model."""
    module = tutorial.module
    data, model = module.disputed(clients=4, count=200), module.network(8)
    written, shipped, fedavg = (
        trained(model, data, make(lr=0.1, per_client=lambda client: {"epochs": 1 + client}), engine)
        for make in (module.fednova, algorithms.fednova, algorithms.fedavg)
    )
    assert all(torch.equal(tensor, shipped[name]) for name, tensor in written.items())
    assert any((tensor - fedavg[name]).abs().max() > 1e-4 for name, tensor in written.items())


@pytest.mark.parametrize("tutorial", ["own_algorithm"], indirect=True)
def test_fedavgm_without_momentum_is_fedavg(tutorial):
    """Its reference and its option, as on the page. With momentum it gives another model."""
    states = []
    for name, options in (("fedavg", {}), *(("own_algorithm:fedavgm", {"beta": b}) for b in (0.0, 0.9))):
        parts = build(tutorial.experiment(algorithm=name, options=options))
        run = fp.simulate(parts.task, parts.data, parts.algorithm, rounds=3, cohort=3, seed=0)
        states.append(run.state)
    fedavg, without, with_ = states
    torch.testing.assert_close(without, fedavg)
    assert any((tensor - fedavg[name]).abs().max() > 1e-4 for name, tensor in with_.items())
