"""Contract: batched equals sequential to rounding, whatever is trained; and lanes waste little."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.algorithms import Local
from fedpara.data import Examples
from fedpara.engines import lanes

SCHEMES = {
    "original": None,
    "lowrank": fp.LowRank(gamma=0.3),
    "fedpara": fp.FedPara(gamma=0.3, nonlinearity="tanh"),
    "pfedpara": fp.PFedPara(gamma=0.3),
}


def both(model, scheme, train, test, algorithm, **options):
    """Three rounds in each engine from the same start: the two runs, and which engine really ran."""
    runs = []
    clients = data.dirichlet(train.labels, clients=8, alpha=0.5, seed=0)
    for engine in ("sequential", "batched"):
        torch.manual_seed(0)
        network = model()
        if scheme is not None:
            fp.factorize(network, scheme, init="calibrated", force=True)
        task = fp.Task(network, test=test)
        federation = fp.FederatedData(train, clients)
        runs.append(fp.simulate(task, federation, algorithm, rounds=3, cohort=4, engine=engine, **options))
    assert [run.engine.partition(":")[0] for run in runs] == ["sequential", "batched"]
    return runs


def assert_equal(a, b):
    assert a.bytes == b.bytes
    for name, tensor in a.state.items():
        assert torch.allclose(tensor, b.state[name], rtol=1e-5, atol=1e-5), name


@pytest.fixture(scope="module")
def digits():
    train, test = data.load("digits")
    return train.subset(np.arange(160)), test.subset(np.arange(60))


@pytest.mark.parametrize("algorithm", algorithms.names())
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_algorithm_and_scheme(digits, algorithm, scheme):
    method = algorithms.build(algorithm, Local(lr=0.02, epochs=2, batch_size=8))
    assert_equal(*both(lambda: models.mlp(64, 24, 10), SCHEMES[scheme], *digits, method))


@pytest.mark.parametrize(
    "local",
    [
        Local(lr=0.02, batch_size=8, momentum=0.9, weight_decay=1e-3, clip=1.0),
        Local(lr=0.02, batch_size=8, jacobian=1.0),
        Local(lr=0.02, batch_size=8, steps=5),
    ],
    ids=["momentum-decay-clip", "jacobian", "steps"],
)
def test_every_local_option(digits, local):
    method = algorithms.build("scaffold", local)
    assert_equal(*both(lambda: models.mlp(64, 24, 10), SCHEMES["fedpara"], *digits, method))


@pytest.mark.parametrize("link", [fp.Link(up="float16"), fp.Link(up="int8", down="bfloat16")], ids=str)
def test_every_link(digits, link):
    """A quantized value on the edge of two may fall either way: equal bytes, and near."""
    method = algorithms.fedavg(lr=0.02, batch_size=8)
    a, b = both(lambda: models.mlp(64, 24, 10), SCHEMES["pfedpara"], *digits, method, link=link)
    assert a.bytes == b.bytes
    for name, tensor in a.state.items():
        assert torch.allclose(tensor, b.state[name], atol=0.02), name


def test_convolutions(digits):
    def net():
        return nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.GroupNorm(4, 12),
            nn.ReLU(),
            nn.Conv2d(12, 8, 3),
            nn.Flatten(),
            nn.Linear(288, 10),
        )

    assert_equal(*both(net, SCHEMES["fedpara"], *digits, algorithms.feddyn(lr=0.02, batch_size=8)))


def test_the_lstm():
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 12, (90, 6), generator=generator)
    examples = Examples(text, torch.randint(0, 12, (90,), generator=generator), 12)

    def net():
        return models.lstm(classes=12, vocabulary=12, hidden=8)

    assert_equal(*both(net, SCHEMES["fedpara"], examples, examples, algorithms.fedavg(lr=0.1, batch_size=8)))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=30), st.integers(1, 30))
def test_every_client_has_its_turn_and_turns_do_not_overlap(steps, count):
    segments = lanes.pack(steps, count)
    assert sorted((s.client, s.steps) for s in segments) == list(enumerate(steps))
    for lane in range(count):
        turns = sorted((s.start, s.end) for s in segments if s.lane == lane)
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(turns))
    assert lanes.length(segments) <= max(max(steps), 2 * -(-sum(steps) // count))


def test_padding_of_a_dirichlet_split_wastes_under_a_tenth():
    """CIFAR-10's sizes: 50,000 labels over 100 clients, alpha 0.5, 16 a round, batch 64, 5 epochs."""
    labels = torch.arange(50_000) % 10
    sizes = [len(rows) for rows in data.dirichlet(labels, clients=100, alpha=0.5, seed=0)]
    local = Local(epochs=5, batch_size=64)
    generator = np.random.default_rng(0)
    cohorts = [[local.steps_for(sizes[i]) for i in generator.choice(100, 16, False)] for _ in range(40)]
    count = lanes.choose(cohorts[:20], 16)
    waste = [lanes.waste(lanes.pack(steps, count), count) for steps in cohorts[20:]]
    assert count > 1
    assert sum(waste) / len(waste) < 0.10


def test_a_model_vmap_cannot_take_runs_sequentially_and_says_why(digits):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 10)

        def forward(self, x):
            return self.fc(x.flatten(1)) * (1.0 if float(x.sum()) > 0 else 2.0)

    from fedpara.engines.client import Protocol
    from fedpara.engines.memory import InMemory
    from fedpara.engines.program import take_apart
    from fedpara.engines.simulate import build_engine

    train, test = digits
    task = fp.Task(Reads(), test=test)
    federation = fp.FederatedData(train, data.iid(train.labels, 4, 0))
    protocol = Protocol(take_apart(task.model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
    engine = build_engine("batched", protocol, task, federation, InMemory(), 2)
    assert engine.name == "sequential"
    assert "not batched" in engine.why
    assert ".item()" in engine.why
