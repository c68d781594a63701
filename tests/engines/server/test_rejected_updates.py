"""Contract: the server refuses a bad update with a reason, keeps nothing of it, and continues the round."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedpara.engines.client import Reply
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.progress import Schedule
from fedpara.engines.server.collect import LARGE_MESSAGE, is_large
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import PRIVATE
from fedpara.engines.threads import checked_in_order
from fedpara.state import State, mean
from fedpara.wire import Header, Message, decode, encode

Change = Callable[[Reply], list[Reply]]


class Tampered:
    """An engine whose replies are changed on their way to the server."""

    name, why = "tampered", "a test"

    def __init__(self, engine, change: Change) -> None:
        self.engine, self.change = engine, change

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterator[Reply]:
        for reply in self.engine.train(round, clients, message, personal):
            yield from self.change(reply)

    def commit(self, round: int, clients: Sequence[int]) -> None:
        self.engine.commit(round, clients)

    def evaluate(self, state: State):
        return self.engine.evaluate(state)

    def score_clients(self, round: int, clients: Sequence[int], message: Message):
        return self.engine.score_clients(round, clients, message)


def rewritten(reply: Reply, edit: Callable[[Header, State], tuple[Header, State]]) -> Reply:
    assert reply.message is not None
    return replace(reply, message=encode(*reversed(edit(*decode(reply.message)))))


def not_a_number(header, state):
    state["fc1.bias"][3] = float("nan")
    return header, state


def infinite(header, state):
    state["fc2.weight"][0, 0] = float("inf")
    return header, state


def missing_name(header, state):
    del state["fc1.bias"]
    return header, state


def another_name(header, state):
    return header, {**state, "fc3.bias": torch.zeros(1)}


def another_shape(header, state):
    return header, {**state, "fc1.bias": torch.zeros(31)}


def another_type(header, state):
    return header, {**state, "fc1.bias": torch.zeros(32, dtype=torch.int64)}


def far_away(header, state):
    return header, {**state, "fc1.bias": state["fc1.bias"] + 1e4}


def last_round(header, state):
    return replace(header, round=header.round - 1), state


def other_method(header, state):
    return replace(header, method="fedprox"), state


def no_examples(header, state):
    return replace(header, examples=0), state


def all_the_weight(header, state):
    return replace(header, examples=2**63 - 1), state


def someone_else(header, state):
    return replace(header, sender="client:999"), state


def the_server(header, state):
    return replace(header, sender="server"), state


EDITS = {
    not_a_number: "NaN or infinity",
    infinite: "NaN or infinity",
    missing_name: r"lacks 'fc1\.bias'",
    another_name: r"also holds 'fc3\.bias'",
    another_shape: r"shape \(31,\): expected \(32,\)",
    another_type: "type torch.int64",
    far_away: "its norm is .* expected at most 100",
    last_round: "its round is 0: expected 1",
    other_method: "its method is 'fedprox': expected 'fedavg'",
    no_examples: "0 examples",
    all_the_weight: r"claims 9223372036854775807 examples: expected \d+",
    someone_else: "names client:999 as its sender",
    the_server: "names server as its sender",
}
CHANGES: dict[str, tuple[Change, str]] = {
    edit.__name__: (lambda reply, edit=edit: [rewritten(reply, edit)], reason)
    for edit, reason in EDITS.items()
} | {
    "cut": (lambda reply: [replace(reply, message=bytes(reply.message)[:-7])], "digest"),
    "flipped": (lambda reply: [replace(reply, message=flipped(reply.message))], "digest"),
    "empty": (lambda reply: [replace(reply, message=b"")], "starts with"),
    "silent": (lambda reply: [], "no reply"),
    "failed": (lambda reply: [Reply(reply.client, reason="its disk is full")], "its disk is full"),
}


def flipped(message: Message) -> bytes:
    content = bytearray(bytes(message))
    content[len(content) // 2] ^= 1
    return bytes(content)


CHOSEN = Cohorts(0, 6, 4).draw(1)
BAD = CHOSEN[1]


def tampered(world, session, change: Change, bad=(BAD,), memory=None):
    engine = world.engine("sequential", session, InMemory() if memory is None else memory)
    return engine, Tampered(engine, lambda reply: change(reply) if reply.client in bad else [reply])


@pytest.mark.parametrize("how", sorted(CHANGES))
def test_a_bad_update_is_refused_with_a_reason_and_the_round_continues(world, how):
    change, reason = CHANGES[how]
    session = world.session(world.model())
    seen, engine = tampered(world, session, change)
    schedule = Schedule(1, 6, 4, world.federation.size, max_norm=100.0)
    (result,) = run_rounds(session, engine, schedule, personal=False)

    assert [client for client, _ in result.refused] == [BAD]
    assert re.search(reason, result.refused[0][1]), result.refused
    assert result.notes == ()
    assert seen.accepted == [[client for client in CHOSEN if client != BAD]]
    good = [decode(reply.message) for reply in seen.up[0] if reply.client != BAD]
    expected = mean([state for _, state in good], [header.examples for header, _ in good])
    for name, tensor in result.progress.x.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-6, atol=1e-7
        )  # the others' weights add up to 1 again


def test_a_client_counts_once_and_only_if_it_is_in_the_cohort(world):
    session = world.session(world.model())
    outsider = next(client for client in range(6) if client not in CHOSEN)
    seen, engine = tampered(world, session, lambda reply: [reply, reply, replace(reply, client=outsider)])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    (fair,) = run_rounds(
        session,
        world.engine("sequential", session, InMemory()),
        Schedule(1, 6, 4, world.federation.size),
        personal=False,
    )
    assert all(torch.equal(result.progress.x[name], fair.progress.x[name]) for name in fair.progress.x)
    assert len(result.notes) == 2
    assert all("dropped" in note for note in result.notes)
    assert result.refused == ()
    more = next(len(reply.message) for reply in seen.up[0] if reply.client == BAD)
    assert result.bytes_up == fair.bytes_up + 2 * more, "dropped replies count as received bytes"


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "feddyn", "fedadam"])
def test_a_round_without_usable_updates_keeps_the_model_and_notes_it(world, algorithm):
    session = world.session(world.model(), world.algorithm(algorithm))
    _, engine = tampered(world, session, CHANGES["not_a_number"][0], bad=range(6))
    first, second = run_rounds(session, engine, Schedule(2, 6, 4, world.federation.size), personal=False)
    start = session.program.initial
    for result in (first, second):
        assert all(torch.equal(result.progress.x[name], start[name]) for name in start)
        assert len(result.refused) == 4
        assert result.notes == (f"round {result.number} had no usable update: the model stays unchanged",)
        assert result.train_loss != result.train_loss
        assert result.bytes_up > 0
    assert first.accuracy == second.accuracy


@pytest.mark.parametrize(("algorithm", "variable"), [("scaffold", "control"), ("feddyn", "h")])
def test_a_refused_client_keeps_its_old_variables(world, algorithm, variable):
    """The server's variable stays the mean of the clients' variables: c = 1/N sum c_i."""
    memory = InMemory()
    session = world.session(world.model("pfedpara"), world.algorithm(algorithm))
    refuse = iter([True, False, True] * 100)
    engine = Tampered(
        world.engine("sequential", session, memory),
        lambda reply: [replace(reply, message=flipped(reply.message)) if next(refuse) else reply],
    )
    rounds = list(run_rounds(session, engine, Schedule(4, 6, 4, world.federation.size), personal=False))
    assert sum(len(result.refused) for result in rounds) > 6
    taken = {k for r in rounds for k in r.cohort} - {k for k in range(6) if memory.get(k) is None}
    assert 0 < len(taken) < 6
    server = rounds[-1].progress.server[variable]
    for name, tensor in server.items():
        theirs = sum(memory.get(client)[variable][name] for client in taken) / 6
        torch.testing.assert_close(tensor, theirs, rtol=1e-4, atol=1e-6)
    assert any(tensor.abs().max() > 0 for tensor in server.values())


def test_a_refused_client_keeps_its_old_private_part(world):
    memory = InMemory()
    session = world.session(world.model("pfedpara"))
    good = world.engine("sequential", session, memory)
    (first,) = run_rounds(session, good, Schedule(1, 6, 6, world.federation.size), personal=False)
    before = {k: {name: t.clone() for name, t in memory.get(k)[PRIVATE].items()} for k in range(6)}
    _, engine = tampered(world, session, CHANGES["cut"][0], memory=memory)
    list(
        run_rounds(
            session, engine, Schedule(2, 6, 6, world.federation.size), personal=False, start=first.progress
        )
    )
    for client in range(6):
        unchanged = [torch.equal(memory.get(client)[PRIVATE][n], t) for n, t in before[client].items()]
        assert unchanged == [client == BAD] * len(unchanged)


def test_a_negative_variance_is_refused(world):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10))

    def negative(header, state):
        state["2.running_var"][3] = -1e9
        return header, state

    session = world.session(world.model(network=network))
    _, engine = tampered(world, session, lambda reply: [rewritten(reply, negative)])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    assert [client for client, _ in result.refused] == [BAD]
    assert "'2.running_var' holds a negative variance" in result.refused[0][1]
    assert bool((result.progress.buffers["2.running_var"] >= 0).all())


def test_too_few_replies_change_no_client_memory(world):
    """If the model stays unchanged, a changed control variate would no longer match the server's."""
    session = world.session(world.model(), world.algorithm("scaffold"))
    seen, engine = tampered(world, session, CHANGES["cut"][0])
    (result,) = run_rounds(
        session, engine, Schedule(1, 6, 4, world.federation.size, minimum=4), personal=False
    )
    assert result.notes == ("round 1 had 3 of 4 usable updates: the model stays unchanged",)
    assert seen.accepted == [[]]
    assert result.memories == ()


def test_a_refused_client_is_not_in_the_rounds_memories(world):
    """The checkpoint expects a file of this round from each client listed here."""
    session = world.session(world.model("pfedpara"))
    _, engine = tampered(world, session, CHANGES["cut"][0])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    assert result.memories == tuple(client for client in CHOSEN if client != BAD)


def test_bytes_down_include_clients_that_never_reply(world):
    session = world.session(world.model())
    seen, engine = tampered(world, session, CHANGES["silent"][0])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    assert result.bytes_down == 4 * len(seen.down[0])


def test_the_training_loss_is_the_mean_over_accepted_clients(world):
    session = world.session(world.model())
    seen, engine = tampered(world, session, CHANGES["cut"][0])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    losses = [reply.loss for reply in seen.up[0] if reply.client != BAD]
    assert result.train_loss == pytest.approx(sum(losses) / 3)


def test_replies_of_any_size_are_checked_in_order():
    """Equal bits need equal order. Threads check large replies; small ones are checked immediately."""
    sizes = [LARGE_MESSAGE, 1, LARGE_MESSAGE, LARGE_MESSAGE, 0]
    replies = [Reply(client, bytes(size)) for client, size in enumerate(sizes)]
    checked = [
        (reply.client, verdict)
        for reply, verdict in checked_in_order(replies, lambda reply: len(reply.message), is_large)
    ]
    assert checked == list(enumerate(sizes))
