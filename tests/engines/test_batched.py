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
from fedpara.engines.batched import Batched
from fedpara.engines.client import Protocol
from fedpara.engines.freight import bring, bring_all, fetch
from fedpara.engines.loop import Schedule, play
from fedpara.engines.memory import InMemory
from fedpara.engines.plan import look_ahead
from fedpara.engines.program import take_apart
from fedpara.engines.streams import cohort
from fedpara.errors import ConfigError, DataError, RunError

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
    method = algorithms.build("feddyn" if local.momentum else "scaffold", local)
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


class Small(Batched):
    """An engine on a device with room for two lanes."""

    room = 2

    def _tick(self, plan, places):
        if self.lanes > self.room:
            raise torch.OutOfMemoryError("no room")
        return super()._tick(plan, places)


def rounds_of(engine, protocol, clients, cohort):
    return list(play(protocol, engine, Schedule(2, clients, cohort), personal=False))


def test_a_cohort_larger_than_memory_goes_in_waves_to_the_same_model(digits):
    train, test = digits
    federation = fp.FederatedData(train, data.iid(train.labels, 8, 0))
    task = fp.Task(models.mlp(64, 24, 10), test=test)
    protocol = Protocol(take_apart(task.model), algorithms.fedavg(lr=0.1, batch_size=8), fp.Link(), 0)
    said = []
    waves = Small(protocol, task, federation, InMemory(), size=5, say=said.append)
    whole = Batched(protocol, task, federation, InMemory(), size=5)
    a, b = (rounds_of(engine, protocol, 8, 5)[-1].progress.x for engine in (waves, whole))
    assert (whole.lanes, waves.lanes) == (5, 2)
    assert "out of memory with 5 lanes: the cohort goes in waves of 2" in waves.why
    assert any("waves of 2" in text for text in said)
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
@pytest.mark.parametrize("scheme", [None, fp.PFedPara(gamma=0.3)])
def test_states_that_cannot_wait_go_to_the_host_as_clients_end_to_the_same_bits(
    digits, monkeypatch, algorithm, scheme
):
    """Unequal clients that follow one another in a lane, with what they keep from round to round."""
    train, test = digits
    model = models.mlp(64, 24, 10)
    if scheme is not None:
        fp.factorize(model, scheme)
    federation = fp.FederatedData(train, data.dirichlet(train.labels, 8, 0.5, 0))
    task = fp.Task(model, test=test)
    method = algorithms.build(algorithm, Local(lr=0.05, batch_size=8))
    protocol = Protocol(take_apart(model), method, fp.Link(), 0)
    said = []
    outlook = look_ahead(protocol, federation, 6, 3)
    roomy = Batched(protocol, task, federation, InMemory(), size=6, outlook=outlook)
    monkeypatch.setattr("fedpara.engines.batched.room_on", lambda device: 1e5)
    narrow = Batched(protocol, task, federation, InMemory(), size=6, outlook=outlook, say=said.append)
    assert (roomy.waits, narrow.waits, narrow.stays) == (True, False, False)
    a, b = (rounds_of(engine, protocol, 8, 6)[-1].progress for engine in (roomy, narrow))
    assert "they go to the host as clients end" in narrow.why
    assert any("go to the host" in text for text in said)
    assert "the host" not in roomy.why
    assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
    for name in a.x:
        assert torch.equal(a.x[name], b.x[name]), name


def test_what_does_not_train_takes_no_room_in_a_cohort(digits, monkeypatch):
    train, _ = digits
    model = models.mlp(64, 512, 10)
    federation = fp.FederatedData(train, data.iid(train.labels, 4, 0))

    def engine():
        protocol = Protocol(take_apart(model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
        return Batched(protocol, fp.Task(model), federation, InMemory(), size=4)

    monkeypatch.setattr("fedpara.engines.batched.room_on", lambda device: 2 * 4 * 3 * 4 * (512 * 10 + 10))
    assert not engine().waits
    next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).requires_grad_(False)
    assert engine().waits


def test_memory_that_runs_out_with_one_lane_is_tried_again_with_nothing_waiting(digits):
    class Full(Batched):
        def _collect(self, ended, states, losses):
            if self.waits:
                raise torch.OutOfMemoryError("no room for the cohort")
            return super()._collect(ended, states, losses)

    train, _ = digits
    federation = fp.FederatedData(train, data.iid(train.labels, 4, 0))
    task = fp.Task(models.mlp(64, 24, 10))
    protocol = Protocol(take_apart(task.model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
    outlook = look_ahead(protocol, federation, 2, 1)
    engines = [
        kind(protocol, task, federation, InMemory(), size=2, outlook=outlook) for kind in (Full, Batched)
    ]
    a, b = (rounds_of(engine, protocol, 4, 2)[-1].progress.x for engine in engines)
    assert engines[0].notes == [
        "out of memory with 1 lanes: the cohort goes in waves of 1, and states go to the host as clients end"
    ]
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_one_client_too_large_for_memory_ends_the_run_with_a_cure(digits):
    train, _ = digits
    federation = fp.FederatedData(train, data.iid(train.labels, 4, 0))
    task = fp.Task(models.mlp(64, 24, 10))
    protocol = Protocol(take_apart(task.model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
    engine = Small(protocol, task, federation, InMemory(), size=2)
    engine.room = 0
    with pytest.raises(RunError, match=r"one client alone is too large .* Lower the batch size"):
        rounds_of(engine, protocol, 4, 2)


def test_the_narrow_precisions_need_a_gpu(digits):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    train, _ = digits
    task, federation = fp.Task(models.mlp(64, 24, 10)), fp.FederatedData(train, data.iid(train.labels, 4, 0))
    for words, text in (
        ({"precision": "tf32"}, "precision 'tf32' needs a GPU"),
        (
            {"precision": "tf32", "engine": "sequential"},
            "is the batched engine's: sequential computes in float32",
        ),
        ({"precision": "float8"}, "unknown precision 'float8': expected one of float32, tf32, bfloat16"),
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
def test_a_narrow_link_does_not_change_the_models_type(digits, dtype):
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


def test_what_vmap_cannot_score_is_scored_one_by_one_and_said(digits):
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


def test_padding_is_the_clients_own():
    """An example that no client holds may be anything."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(11, 5, generator=generator), torch.arange(11) % 3
    inputs[0] = float("nan")
    federation = fp.FederatedData(Examples(inputs, labels, 3), [range(1, 8), range(8, 11)])
    a, b = both_engines(nn.Linear(5, 3), federation)
    for name, tensor in a.state.items():
        torch.testing.assert_close(tensor, b.state[name], rtol=1e-5, atol=1e-6)


def test_the_places_are_as_wide_as_any_client_needs(digits):
    """Were they to grow in a late round, a run resumed after it would have narrower ones, and other bits."""
    drawn = {client for t in range(1, 21) for client in cohort(0, t, 100, 2)}
    late = next(client for client in range(100) if client not in drawn)
    federation = fp.FederatedData(digits[0], [range(40 if i == late else 5) for i in range(100)])
    protocol = Protocol(
        take_apart(models.mlp(64, 24, 10)), algorithms.fedavg(lr=0.1, batch_size=32), fp.Link(), 0
    )
    assert look_ahead(protocol, federation, 2).width == 32


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
def test_what_are_no_indices_is_refused_in_every_engine(digits, engine, clients, text):
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
    assert "round 1 had no usable update: the model is kept" in run.rounds[0].notes[0]


def test_padding_is_no_wider_than_the_largest_batch(digits):
    """Clients of at most 20 examples and batches of 64: lanes are 20 wide, and equal to sequential."""
    train, test = digits
    method = algorithms.fedavg(lr=0.05, batch_size=64)
    a, b = both(lambda: models.mlp(64, 24, 10), None, train, test, method)
    assert_equal(a, b)
    federation = fp.FederatedData(train, data.iid(train.labels, 8, 0))
    protocol = Protocol(take_apart(models.mlp(64, 24, 10)), method, fp.Link(), 0)
    assert look_ahead(protocol, federation, 4).width == 20


def test_states_go_to_the_device_and_back_unchanged():
    state = {"b": torch.randn(2, 3), "a": torch.tensor(4), "c": torch.randn(5).double(), "e": torch.empty(0)}
    host = torch.device("cpu")
    stacked = bring_all([state, {name: tensor + 1 for name, tensor in state.items()}], host)
    assert {name: tensor.shape for name, tensor in stacked.items()} == {
        n: (2, *t.shape) for n, t in state.items()
    }
    back = fetch(bring(stacked, host))
    assert [list(client) for client in back] == [list(state)] * 2
    for name, tensor in state.items():
        assert torch.equal(back[0][name], tensor)
        assert torch.equal(back[1][name], tensor + 1)


@pytest.mark.parametrize(
    ("algorithm", "scheme", "link", "stay"),
    [
        ("fedavg", None, fp.Link(), True),
        ("fedadam", None, fp.Link(), True),
        ("fedprox", None, fp.Link(), True),
        ("scaffold", None, fp.Link(), False),
        ("fedavg", fp.PFedPara(gamma=0.3), fp.Link(), False),
        ("fedavg", None, fp.Link(up="float16"), False),
        ("fedavg", None, fp.Link(down="bfloat16"), False),
    ],
)
def test_updates_stay_on_the_device_unless_clients_keep_or_the_link_is_narrow(
    digits, algorithm, scheme, link, stay
):
    train, test = digits
    model = models.mlp(64, 24, 10)
    if scheme is not None:
        fp.factorize(model, scheme)
    protocol = Protocol(take_apart(model), algorithms.build(algorithm, Local()), link, 0)
    federation = fp.FederatedData(train, data.iid(train.labels, 8, 0))
    task = fp.Task(model, test=test)
    assert Batched(protocol, task, federation, InMemory(), size=4, device="cpu").stays is stay


def test_personal_scores_are_those_of_the_sequential_engine(digits):
    """Test sets of different sizes, one of them empty; more clients than lanes."""
    train, test = digits
    clients = data.shards(train.labels, 6, 0, 2)
    theirs = data.personal_test(test.labels, clients, train.labels, seed=0)
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


def test_images_are_cropped_alike_in_every_engine(digits):
    """What is drawn belongs to the client and the round, not to the lane."""
    train, test = digits
    clients = data.dirichlet(train.labels, clients=8, alpha=0.5, seed=0)
    states = []
    for engine in ("sequential", "batched"):
        torch.manual_seed(0)
        task = fp.Task(models.mlp(64, 24, 10), test=test, augment="crop-flip")
        method = algorithms.fedavg(lr=0.05, batch_size=8, epochs=2)
        run = fp.simulate(task, fp.FederatedData(train, clients), method, rounds=3, cohort=4, engine=engine)
        states.append(run.state)
    for name, tensor in states[0].items():
        assert torch.allclose(tensor, states[1][name], rtol=1e-5, atol=1e-5), name
