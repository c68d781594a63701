"""Contract of every engine: the same experiment and seed give the same bytes and the same state."""

from itertools import combinations, product

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout

import fedpara as fp
from fedpara import algorithms
from fedpara.data import normalise
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.progress import Schedule
from fedpara.engines.rng import numpy_rng
from fedpara.engines.server.rounds import run_rounds
from fedpara.state import mean, nbytes, norm, subtract
from fedpara.wire import decode

ALGORITHMS = tuple(algorithms.names())
SCHEMES = ("original", "lowrank", "fedpara", "pfedpara", "kronecker", "kronecker-aad")
SHARES = ("all", "fedper", "none")
LINKS = ("float32", "float16", "int8")
ENGINES = ("sequential", "batched")

# Every algorithm with every scheme; sharing, precision and the engine vary in turn, so that each pair occurs.
COVER = [
    (algorithm, scheme, SHARES[(a + s) % 3], LINKS[(a + 2 * s) % 3], ENGINES[(a + s) % 2])
    for a, algorithm in enumerate(ALGORITHMS)
    for s, scheme in enumerate(SCHEMES)
]


def test_the_cases_cover_every_pair():
    parts = (ALGORITHMS, SCHEMES, SHARES, LINKS, ENGINES)
    for i, j in combinations(range(5), 2):
        assert {(case[i], case[j]) for case in COVER} == {*product(parts[i], parts[j])}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def facts(run):
    """Every number of a run except the tensors."""
    return [
        (r.number, r.cohort, r.train_loss, r.bytes_up, r.bytes_down, r.accuracy, r.loss, r.before, r.after)
        for r in run.rounds
    ]


@pytest.mark.parametrize(("algorithm", "scheme", "share", "precision", "engine"), COVER)
def test_two_runs_give_equal_bits(world, algorithm, scheme, share, precision, engine):
    def run():
        return world.simulate(
            world.model(scheme),
            world.algorithm(algorithm),
            federation=world.personal,
            share=share,
            link=fp.Link(up=precision, down=precision),
            engine=engine,
            cohort=4,
        )

    first, second = run(), run()
    assert facts(first) == facts(second)
    assert same(first.state, second.state)
    for client in range(len(world.clients)):
        assert same(first.client_state(client), second.client_state(client))
    assert not same(first.client_state(first.rounds[-1].cohort[0]), first.session.program.initial)
    assert not any(result.refused for result in first.rounds)


def test_another_seed_gives_other_bits(world, engine):
    runs = [world.simulate(world.model(), engine=engine, seed=seed) for seed in (0, 1)]
    assert not same(runs[0].state, runs[1].state)


@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_a_clients_message_does_not_depend_on_the_cohort_the_order_or_scoring(world, engine, scheme):
    session = world.session(world.model(scheme), world.algorithm("scaffold"), fp.Link(up="int8"))
    alone = world.engine(engine, session, InMemory(), world.personal)
    next(iter(run_rounds(session, alone, Schedule(1, 6, 6, world.federation.size), personal=False)))
    message = alone.down[0]
    expected = {reply.client: reply.message for reply in alone.up[0]}
    for clients, personal in (([5, 4, 3, 2, 1, 0], False), ([4], True), ([0, 4, 2], True)):
        again = world.engine(engine, session, InMemory(), world.personal)
        again.evaluate({**session.program.initial})
        for reply in again.train(1, clients, message, personal):
            assert bytes(reply.message) == expected[reply.client]


def test_evaluate_every_changes_nothing_else(world, engine):
    often, seldom = (
        world.simulate(world.model(), rounds=5, engine=engine, evaluate_every=n, federation=world.personal)
        for n in (1, 3)
    )
    assert same(often.state, seldom.state)
    assert [r.accuracy is not None for r in seldom.rounds] == [False, False, True, False, True]
    assert all(r.accuracy is not None and r.before is not None for r in often.rounds)
    assert often.rounds[2].accuracy == seldom.rounds[2].accuracy


def by_hand(world, model, rounds, chosen, seed=0, lr=0.05, **sgd):
    """FedAvg written like its pseudocode, with torch's optimizer, on the model's own state dict."""
    clip = sgd.pop("clip", None)
    x = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for t in range(1, rounds + 1):
        results, weights = [], []
        for k in Cohorts(seed, len(world.clients), chosen).draw(t):
            model.load_state_dict(x)
            model.train()
            optimizer = torch.optim.SGD(model.parameters(), lr=lr, **sgd)
            examples = world.train.subset(world.clients[k])
            images = normalise(examples.inputs, examples.mean, examples.std)
            order = numpy_rng(seed, "batches", t, k).permutation(len(examples))
            for start in range(0, len(order), 4):
                batch = torch.from_numpy(order[start : start + 4])
                optimizer.zero_grad()
                cross_entropy(model(images[batch]), examples.targets[batch]).backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            results.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            weights.append(len(examples))
        total = sum(weights)
        x = {name: sum((w / total) * y[name] for w, y in zip(weights, results, strict=True)) for name in x}
    return x


@pytest.mark.parametrize("scheme", SCHEMES[:3])
@pytest.mark.parametrize(
    "sgd", [{}, {"momentum": 0.9, "weight_decay": 0.01, "clip": 1.0}], ids=["plain", "everything"]
)
def test_fedavg_equals_a_hand_written_loop(world, engine, scheme, sgd):
    run = world.simulate(world.model(scheme), world.algorithm(**sgd), rounds=3, engine=engine)
    expected = by_hand(world, world.model(scheme), 3, 3, **sgd)
    assert run.state.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(run.state[name], tensor, rtol=0, atol=1e-6)
    assert norm(subtract(expected, run.session.program.initial)) > 0.1


@pytest.mark.parametrize("precision", LINKS)
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_counted_bytes_are_the_encoded_bytes(world, engine, algorithm, precision):
    session = world.session(
        world.model("pfedpara"), world.algorithm(algorithm), fp.Link(precision, precision)
    )
    seen = world.engine(engine, session, InMemory())
    rounds = list(run_rounds(session, seen, Schedule(3, 6, 4, world.federation.size), personal=False))
    for t, result in enumerate(rounds):
        assert result.bytes_down == 4 * len(seen.down[t])
        assert result.bytes_up == sum(len(reply.message) for reply in seen.up[t])
    last = rounds[-1].progress
    assert last.bytes_down == sum(result.bytes_down for result in rounds)
    assert last.bytes_up == sum(result.bytes_up for result in rounds)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scaffold_sends_twice_the_bytes_of_fedavg(world, engine, scheme):
    sent = {}
    for algorithm in ("fedavg", "scaffold"):
        session = world.session(world.model(scheme), world.algorithm(algorithm))
        seen = world.engine(engine, session, InMemory())
        list(run_rounds(session, seen, Schedule(1, 6, 1, world.federation.size), personal=False))
        sent[algorithm] = [nbytes(decode(m)[1]) for m in (seen.down[0], seen.up[0][0].message)]
    assert sent["scaffold"] == [2 * size for size in sent["fedavg"]]
    assert min(sent["fedavg"]) > 1000


def batch_norm():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.parametrize("precision", LINKS)
@pytest.mark.parametrize("scheme", ["original", "pfedpara"])
def test_batch_norm_statistics_are_averaged_and_not_trained(world, engine, scheme, precision):
    model = world.model(scheme, batch_norm)
    local = world.algorithm(batch_size=3, steps=2, momentum=0.5, weight_decay=0.1)
    session = world.session(model, local, fp.Link(up=precision))
    seen = world.engine(engine, session, InMemory())
    first, second = run_rounds(session, seen, Schedule(2, 6, 3, world.federation.size), personal=False)
    assert not first.refused
    assert not second.refused
    assert first.progress.buffers["2.num_batches_tracked"] == 2
    assert second.progress.buffers["2.num_batches_tracked"] == 4
    assert first.progress.buffers["2.num_batches_tracked"].dtype == torch.int64
    if precision == "float32":
        names = ("2.running_mean", "2.running_var")
        theirs = [decode(reply.message) for reply in seen.up[0]]
        expected = mean(
            [{n: state[n] for n in names} for _, state in theirs], [header.examples for header, _ in theirs]
        )
        assert same(expected, {n: first.progress.buffers[n] for n in names})
    assert not torch.equal(first.progress.buffers["2.running_var"], torch.ones(32))


def test_batch_norm_stays_with_the_client_if_nothing_is_shared(world, engine):
    run = world.simulate(
        world.model("original", batch_norm),
        world.algorithm(batch_size=3, steps=2),
        share="none",
        rounds=2,
        cohort=6,
        engine=engine,
    )
    assert [run.client_state(k)["2.num_batches_tracked"].item() for k in range(6)] == [4] * 6
    assert not torch.equal(run.client_state(0)["2.running_mean"], run.client_state(1)["2.running_mean"])


def test_the_jacobian_correction_keeps_batch_norm_up_to_date(world, engine):
    fields = {"batch_size": 3, "steps": 2}
    states = [
        world.simulate(
            world.model("fedpara", batch_norm),
            world.algorithm(jacobian=jacobian, **fields),
            rounds=1,
            engine=engine,
        ).state
        for jacobian in (1e-9, 0.0)
    ]
    for name in ("2.running_mean", "2.running_var", "2.num_batches_tracked"):
        torch.testing.assert_close(states[0][name], states[1][name])


class Functional(nn.Module):
    """Dropout that is not a module."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(dropout(x.flatten(1), 0.5, self.training))


NOISY = {
    "module": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10)),
    "functional": Functional,
    "rrelu": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.RReLU(), nn.Linear(16, 10)),
}


@pytest.mark.parametrize("kind", sorted(NOISY))
def test_random_layers_ignore_the_callers_random_state_and_mode(world, engine, kind):
    states = []
    for seed in (1, 2):
        model = world.model("original", NOISY[kind])
        torch.manual_seed(seed)
        states.append(world.simulate(model.train(seed == 1), engine=engine).state)
    assert same(*states), "the caller's random state or the model's mode had an effect"


def test_a_run_does_not_change_the_callers_random_state(world, engine):
    model = world.model("original", NOISY["module"])
    torch.manual_seed(1)
    world.simulate(model, engine=engine)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("kind", sorted(NOISY))
def test_dropout_differs_between_clients_and_rounds(world, engine, kind):
    """All clients hold the same example, so they differ only in what their layers draw."""
    federation = fp.FederatedData(world.train, [range(1)] * 6)
    session = world.session(world.model("original", NOISY[kind]))
    seen = world.engine(engine, session, InMemory(), federation)
    list(run_rounds(session, seen, Schedule(1, 6, 6, world.federation.size), personal=False))
    states = [decode(reply.message)[1] for reply in seen.up[0]]
    assert not same(states[0], states[1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten = nn.Flatten()
        self.a, self.b, self.c = nn.Linear(64, 64, False), nn.Linear(64, 64, False), nn.Linear(64, 10)
        self.b.weight = self.a.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.c(self.b(self.a(self.flatten(x)).relu()).relu())


@pytest.mark.parametrize("scheme", ["original", "fedpara"])
def test_the_state_has_every_name_of_tied_and_unused_weights(world, engine, scheme):
    model = world.model(scheme, Tied)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = world.simulate(model, world.algorithm(lr=0.01), engine=engine)
    assert run.state.keys() == before.keys()
    assert same(dict(model.state_dict()), before), "the user's model was changed"
    twins = [(name, name.replace("a.", "b.", 1)) for name in run.state if name.startswith("a.")]
    assert twins
    assert all(torch.equal(run.state[a], run.state[b]) for a, b in twins)
    assert torch.equal(run.state["unused.bias"], before["unused.bias"])
    model.load_state_dict(run.state)
    if scheme == "fedpara":
        merged, images = fp.merge(model, run.state), torch.randn(4, 1, 8, 8)
        torch.testing.assert_close(merged(images), model(images))


def test_frozen_parameters_are_neither_trained_nor_sent(world, engine):
    model = world.model()
    model.fc1.requires_grad_(False)
    session = world.session(model)
    seen = world.engine(engine, session, InMemory())
    list(run_rounds(session, seen, Schedule(1, 6, 2, world.federation.size), personal=False))
    for message in (seen.down[0], *(reply.message for reply in seen.up[0])):
        assert set(decode(message)[1]) == {"fc2.weight", "fc2.bias"}


def test_only_the_last_round_holds_a_model(world, engine):
    run = world.simulate(world.model(), rounds=4, engine=engine)
    assert [bool(result.progress.x) for result in run.rounds] == [False, False, False, True]
    assert [result.number for result in run.rounds] == [1, 2, 3, 4]


def test_a_target_ends_the_run(world, engine):
    reached = world.simulate(world.model(), world.algorithm(epochs=5), rounds=50, target=0.3, engine=engine)
    assert reached.accuracy >= 0.3
    assert all(result.accuracy < 0.3 for result in reached.rounds[:-1])
    assert len(reached.rounds) < 50


def test_an_empty_memory_of_the_caller_is_used(world):
    memory = InMemory()
    run = world.simulate(world.model(), world.algorithm("scaffold"), memory=memory)
    assert run.memory is memory
    assert len(memory) == len({k for result in run.rounds for k in result.cohort})


def test_an_accuracy_equal_to_the_target_ends_the_run(world, engine):
    first = world.simulate(world.model(), rounds=1, engine=engine).accuracy
    assert first > 0
    assert len(world.simulate(world.model(), rounds=3, target=first, engine=engine).rounds) == 1
