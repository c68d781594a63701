"""Contract: batched and sequential training agree up to rounding, and lanes waste little."""

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
from fedpara.engines.batched import packing as lanes
from fedpara.engines.batched.examples import CohortExamples
from fedpara.engines.batched.round_plan import typical_shape
from fedpara.engines.participation.cohorts import Cohorts, poisson
from fedpara.engines.program import make_program
from fedpara.engines.session import Session
from fedpara.errors import ConfigError, DataError

SCHEMES = {
    "original": None,
    "lowrank": fp.LowRank(gamma=0.3),
    "fedpara": fp.FedPara(gamma=0.3, nonlinearity="tanh"),
    "pfedpara": fp.PFedPara(gamma=0.3),
}


def both(model, scheme, train, test, algorithm, **options):
    """Three rounds in each engine from the same start. Checks which engine ran and returns both runs."""
    runs = []
    clients = data.dirichlet(train.targets, clients=8, alpha=0.5, seed=0)
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


@pytest.mark.parametrize(
    ("scheme", "algorithm"),
    [
        *(("fedpara", name) for name in algorithms.names()),
        *((scheme, name) for scheme in SCHEMES if scheme != "fedpara" for name in ("fedavg", "scaffold")),
        ("pfedpara", "ditto"),
    ],
)
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
    method = algorithms.build("feddyn" if local.momentum else "scaffold", local)
    assert_equal(*both(lambda: models.mlp(64, 24, 10), SCHEMES["fedpara"], *digits, method))


@pytest.mark.parametrize("link", [fp.Link(up="float16"), fp.Link(up="int8", down="bfloat16")], ids=str)
def test_every_link(digits, link):
    """A value between two quantized ones may be rounded either way: equal numbers of bytes, and close values."""
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
def test_every_client_gets_a_segment_and_segments_do_not_overlap(steps, count):
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


def test_the_narrow_precisions_need_a_gpu(digits):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    train, _ = digits
    task, federation = fp.Task(models.mlp(64, 24, 10)), fp.FederatedData(train, data.iid(train.targets, 4, 0))
    for words, text in (
        ({"precision": "tf32"}, "precision 'tf32' needs the batched or the sequential engine on a GPU"),
        (
            {"precision": "tf32", "engine": "sequential"},
            "needs the batched or the sequential engine on a GPU",
        ),
        ({"precision": "float8"}, "precision is 'float8': expected one of float32, tf32, bfloat16"),
    ):
        with pytest.raises(ConfigError, match=text):
            fp.simulate(task, federation, algorithms.fedavg(lr=0.1), rounds=1, cohort=2, **words)


def both_engines(model, federation, **words):
    return [
        fp.simulate(
            fp.Task(model),
            federation,
            algorithms.fedavg(lr=0.05, batch_size=4),
            **{"rounds": 2, "cohort": 2, "engine": engine, **words},
        )
        for engine in ("sequential", "batched")
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_lossy_link_does_not_change_the_models_type(digits, dtype):
    train = digits[0]
    model = nn.Sequential(nn.Flatten(), As(dtype), nn.Linear(64, 10).to(dtype))
    federation = fp.FederatedData(train, [range(8), range(8, 11)])
    a, b = both_engines(model, federation, link=fp.Link(down="float16"))
    assert b.engine.startswith("batched")
    assert not b.rounds[-1].refused
    for name, tensor in a.state.items():
        assert tensor.dtype == b.state[name].dtype == dtype
        torch.testing.assert_close(tensor, b.state[name], rtol=2e-2, atol=2e-3)


class As(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x):
        return x.to(self.dtype)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.fc = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, x):
        return self.fc(self.gru(x[:, 0])[0][:, -1])


def test_a_model_that_vmap_cannot_score_is_scored_client_by_client_with_a_note(digits):
    federation = fp.FederatedData(
        digits[0], [range(8), range(8, 14)], test_clients=[range(20, 30), range(30, 36)]
    )
    torch.manual_seed(0)
    a, b = both_engines(Recurrent(), federation)
    assert (
        "clients' own models are scored one after another: RuntimeError: Batching rule not implemented"
        in b.engine
    )
    assert [r.after for r in a.rounds] == [r.after for r in b.rounds]
    for name, tensor in a.state.items():
        torch.testing.assert_close(tensor, b.state[name], rtol=1e-5, atol=1e-6)


def test_padding_repeats_the_clients_own_examples():
    """An example that no client holds may be NaN."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(11, 5, generator=generator), torch.arange(11) % 3
    inputs[0] = float("nan")
    federation = fp.FederatedData(Examples(inputs, labels, 3), [range(1, 8), range(8, 11)])
    a, b = both_engines(nn.Linear(5, 3), federation)
    for name, tensor in a.state.items():
        torch.testing.assert_close(tensor, b.state[name], rtol=1e-5, atol=1e-6)


def test_lanes_are_as_wide_as_the_largest_client_needs(digits):
    """If lanes grew in a late round, a run resumed after it would have narrower lanes and other bits."""
    drawn = {client for t in range(1, 21) for client in Cohorts(0, 100, 2).draw(t)}
    late = next(client for client in range(100) if client not in drawn)
    federation = fp.FederatedData(digits[0], [range(40 if i == late else 5) for i in range(100)])
    session = Session(
        make_program(models.mlp(64, 24, 10)), algorithms.fedavg(lr=0.1, batch_size=32), fp.Link(), 0
    )
    assert typical_shape(session, federation, Cohorts(0, len(federation), 2)).width == 32


@pytest.mark.parametrize("engine", ["sequential", "batched"])
@pytest.mark.parametrize(
    ("clients", "text"),
    [
        ([[0.9, 1.9], [3.2, 4.7]], "expected a row of integers"),
        ([[True, False], [False, True]], "expected a row of integers"),
        ([[0, 1], [2, 99_999]], "expected 0 to"),
        ([[0, 1], [2, -1]], "expected 0 to"),
    ],
)
def test_invalid_indices_are_rejected_in_every_engine(digits, engine, clients, text):
    federation = fp.FederatedData(digits[0], clients)
    with pytest.raises(DataError, match=text):
        fp.simulate(
            fp.Task(models.mlp(64, 24, 10)),
            federation,
            algorithms.fedavg(lr=0.1),
            rounds=1,
            cohort=2,
            engine=engine,
        )


@pytest.mark.parametrize("engine", ["sequential", "batched", "auto"])
def test_a_federation_without_examples_keeps_the_model(digits, engine):
    federation = fp.FederatedData(digits[0], [[], []])
    task = fp.Task(models.mlp(64, 24, 10))
    run = fp.simulate(task, federation, algorithms.fedavg(lr=0.1), rounds=1, cohort=2, engine=engine)
    assert "round 1 had no usable update: the model stays unchanged" in run.rounds[0].notes[0]


def test_padding_is_no_wider_than_the_largest_batch(digits):
    """Clients of at most 20 examples and batches of 64: lanes are 20 wide, and equal to sequential."""
    train, test = digits
    method = algorithms.fedavg(lr=0.05, batch_size=64)
    a, b = both(lambda: models.mlp(64, 24, 10), None, train, test, method)
    assert_equal(a, b)
    federation = fp.FederatedData(train, data.iid(train.targets, 8, 0))
    session = Session(make_program(models.mlp(64, 24, 10)), method, fp.Link(), 0)
    assert typical_shape(session, federation, Cohorts(0, len(federation), 4)).width == 20


def test_personal_scores_equal_those_of_the_sequential_engine(digits):
    """Test sets of different sizes, one of them empty; more clients than lanes."""
    train, test = digits
    clients = data.shards(train.targets, 6, 0, 2)
    theirs = data.personal_test(test.targets, clients, train.targets, seed=0)
    sizes = [*range(3, 8), 0]
    personal = (test, data.Partition.of([theirs[i][:n] for i, n in enumerate(sizes)]))
    seen = []
    for engine in ("sequential", "batched"):
        torch.manual_seed(0)
        network = fp.factorize(models.mlp(64, 24, 10), fp.PFedPara(gamma=0.3), init="calibrated", force=True)
        run = fp.simulate(
            fp.Task(network),
            fp.FederatedData(train, clients, personal=personal),
            algorithms.fedavg(lr=0.05, batch_size=8, epochs=2),
            rounds=3,
            cohort=6,
            engine=engine,
        )
        seen.append([(r.before, r.after) for r in run.rounds])
    assert seen[0] == seen[1]


def test_every_engine_crops_images_alike(digits):
    """The draws depend on the client and the round, not on the lane."""
    train, test = digits
    clients = data.dirichlet(train.targets, clients=8, alpha=0.5, seed=0)
    states = []
    for engine in ("sequential", "batched"):
        torch.manual_seed(0)
        task = fp.Task(models.mlp(64, 24, 10), test=test, augment="crop-flip")
        method = algorithms.fedavg(lr=0.05, batch_size=8, epochs=2)
        run = fp.simulate(task, fp.FederatedData(train, clients), method, rounds=3, cohort=4, engine=engine)
        states.append(run.state)
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], rtol=1e-5, atol=1e-5), name


def test_the_next_round_is_planned_for_the_clients_that_will_be_there(digits, monkeypatch):
    """Only a GPU plans ahead: while it works on a round, the host plans the next one."""
    train, _ = digits
    federation = fp.FederatedData(train, data.iid(train.targets, 8, 0))
    session = Session(make_program(models.mlp(64, 24, 10)), algorithms.fedavg(lr=0.1), fp.Link(), 0)
    cohorts = Cohorts(0, 8, 4, poisson, lost=0.3)
    examples = CohortExamples(session, federation, "none", torch.device("cpu"), cohorts)
    monkeypatch.setattr(examples, "_device", torch.device("cuda"))
    examples.plan_ahead(1, cohorts.draw(1)[:1], 2)
    assert examples._ahead is None, "these clients are not the whole round"
    examples.plan_ahead(1, cohorts.present(1), 2)
    round, clients, plan = examples._ahead
    assert (round, clients) == (2, cohorts.present(2))
    assert clients != cohorts.draw(2)
    assert len(plan.segments) == len(clients)
