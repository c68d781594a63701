"""The weight of each update, and the number of updates in memory."""

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpara import algorithms
from fedpara.algorithms import Update
from fedpara.engines.memory import InMemory
from fedpara.engines.progress import Schedule
from fedpara.engines.server.aggregation import Aggregator, capped, round_weights
from fedpara.engines.server.rounds import run_rounds
from fedpara.wire import decode, encode

COUNTS = st.lists(st.integers(0, 2**62), min_size=1, max_size=12).filter(any)


@given(COUNTS, st.floats(0.01, 1.0))
def test_no_client_has_more_than_its_share_of_the_weight(counts, max_share):
    weights = capped(counts, max_share)
    present = sum(count > 0 for count in counts)
    bound = max(max_share, 1 / present)
    assert max(weights) <= bound * sum(weights) * (1 + 1e-9)
    assert all(0 <= weight <= count for weight, count in zip(weights, counts, strict=True))
    assert all((weight > 0) == (count > 0) for weight, count in zip(weights, counts, strict=True))
    ceiling = max(weights)
    assert all(weight in (count, ceiling) for weight, count in zip(weights, counts, strict=True))


@given(COUNTS)
def test_a_share_of_one_changes_nothing(counts):
    assert capped(counts, 1.0) == counts


def test_the_cap_equals_hand_computed_values():
    assert capped([2**40, 100, 100], 0.5) == [200.0, 100, 100]
    assert capped([600, 300, 100], 0.4) == pytest.approx([200.0, 200.0, 100])
    assert capped([600, 300, 100], 0.2) == [100, 100, 100], "three clients cannot all have a fifth"


def test_a_capped_client_moves_the_model_by_no_more_than_its_share(world):
    """Client 0 claims 2^40 examples. Uncapped it decides the mean; capped it has half, and a note names it."""
    session = world.session(world.model())
    claims = {0: 2**40, 1: 100, 2: 100}

    class Claimed:
        def __init__(self, engine):
            self.engine = engine

        def __getattr__(self, name):
            return getattr(self.engine, name)

        def train(self, round, clients, message, personal):
            for reply in self.engine.train(round, clients, message, personal):
                self.states[reply.client] = decode(reply.message)[1]
                yield rewritten(reply, claims[reply.client])

    def rewritten(reply, examples):
        header, state = decode(reply.message)
        return replace(reply, message=encode(state, replace(header, examples=examples)))

    def first(max_share, weights="examples"):
        engine = Claimed(world.engine("sequential", session, InMemory()))
        engine.states = {}
        schedule = Schedule(1, 3, 3, claims.__getitem__, max_share=max_share, weights=weights)
        (result,) = run_rounds(session, engine, schedule, personal=False)
        return result, engine.states

    free, states = first(None)
    capped_, _ = first(0.5)
    uniform, _ = first(None, "uniform")
    name = "fc2.weight"
    torch.testing.assert_close(free.progress.x[name], states[0][name])
    half = 0.5 * states[0][name] + 0.25 * (states[1][name] + states[2][name])
    torch.testing.assert_close(capped_.progress.x[name], half)
    third = (states[0][name] + states[1][name] + states[2][name]) / 3
    torch.testing.assert_close(uniform.progress.x[name], third)
    assert free.notes == uniform.notes == ()
    (note,) = capped_.notes
    assert "client 0 with 1099511627776 examples counts as 200" in note
    assert "max_share limits each client to 50% of a round's weight" in note


def test_a_share_that_cannot_hold_is_said_once():
    weights, notes = round_weights({0: 30, 1: 10, 2: 20}, "examples", 0.2)
    assert len(set(weights.values())) == 1
    assert notes == ["3 clients cannot each have at most 20% of a round's weight: all count the same"]


@pytest.mark.parametrize("name", algorithms.names())
def test_an_update_is_freed_after_it_is_added_to_the_mean(name):
    algorithm = algorithms.build(name, algorithms.Local())
    x = {"w": torch.randn(5)}
    server = algorithm.server_init(x)
    updates = [
        Update({"w": torch.randn(5)}, {g: {"w": torch.randn(5)} for g in _sent(algorithm, x)}, n)
        for n in (3, 1, 2)
    ]
    together = algorithm.aggregate(x, server, updates, 10)
    intake = Aggregator(algorithm, x, {7: 3.0, 8: 1.0, 9: 2.0})
    for client in (7, 8, 9):
        update = updates.pop(0)
        held = weakref.ref(update.y["w"])
        intake.add(client, update, {})
        del update
        assert held() is None, "a round keeps only the sum"
    one_by_one = intake.aggregate(server, 10)
    assert torch.equal(one_by_one[0]["w"], together[0]["w"])
    for group, state in together[1].items():
        assert torch.equal(one_by_one[1][group]["w"], state["w"])


def _sent(algorithm, x):
    down = algorithm.broadcast(algorithm.server_init(x))
    return algorithm.finish(x, x, down, algorithm.client_init(x), 1, 0.1)[0]


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_a_round_holds_few_messages_at_once(world, engine):
    """At most two of six replies are in memory: the one being checked, and the one before it."""
    session = world.session(world.model())
    inner = world.engine(engine, session, InMemory()).engine
    alive: list[weakref.ref] = []
    most = 0

    class Watched:
        name, why = "watched", ""
        commit, evaluate = inner.commit, inner.evaluate

        def train(self, *given):
            nonlocal most
            for reply in inner.train(*given):
                alive.append(weakref.ref(reply.message))
                most = max(most, sum(ref() is not None for ref in alive))
                yield reply
                del reply

    schedule = Schedule(1, 6, 6, world.federation.size)
    list(run_rounds(session, Watched(), schedule, personal=False))
    assert len(alive) == 6
    assert most <= 2
