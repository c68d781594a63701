"""Contract: one bad client is refused with a reason, and nothing of it stays; the round goes on."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.engines.client import Reply
from fedpara.engines.memory import InMemory
from fedpara.engines.progress import Schedule
from fedpara.engines.rng import cohort
from fedpara.engines.server import LARGE_MESSAGE, _with_verdicts, run_rounds
from fedpara.engines.session import PRIVATE
from fedpara.errors import ConfigError, RunError
from fedpara.state import State, mean, norm
from fedpara.wire import Header, Message, decode, encode

Change = Callable[[Reply], list[Reply]]


class Tampered:
    """An engine whose replies pass through someone else's hands."""

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


def lacking(header, state):
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
    lacking: r"lacks 'fc1\.bias'",
    another_name: r"also holds 'fc3\.bias'",
    another_shape: r"shape \(31,\): expected \(32,\)",
    another_type: "type torch.int64",
    far_away: "its norm is .* expected at most 100",
    last_round: "of round 0: expected 1",
    other_method: "of method 'fedprox': expected 'fedavg'",
    no_examples: "0 examples",
    all_the_weight: r"rests on 9223372036854775807 examples: expected \d+",
    someone_else: "names client:999 as its sender",
    the_server: "names server as its sender",
}
HANDS: dict[str, tuple[Change, str]] = {
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


CHOSEN = cohort(0, 1, 6, 4)
BAD = CHOSEN[1]


def tampered(world, session, change: Change, bad=(BAD,), memory=None):
    engine = world.engine("sequential", session, InMemory() if memory is None else memory)
    return engine, Tampered(engine, lambda reply: change(reply) if reply.client in bad else [reply])


@pytest.mark.parametrize("how", sorted(HANDS))
def test_a_bad_update_is_refused_with_its_reason_and_the_round_goes_on(world, how):
    change, reason = HANDS[how]
    session = world.session(world.model())
    seen, engine = tampered(world, session, change)
    schedule = Schedule(1, 6, 4, world.federation.size, max_norm=100.0)
    (result,) = run_rounds(session, engine, schedule, personal=False)

    assert [client for client, _ in result.refused] == [BAD]
    assert re.search(reason, result.refused[0][1]), result.refused
    assert result.notes == ()
    assert seen.kept == [[client for client in CHOSEN if client != BAD]]
    good = [decode(reply.message) for reply in seen.up[0] if reply.client != BAD]
    expected = mean([state for _, state in good], [header.examples for header, _ in good])
    for name, tensor in result.progress.x.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)  # its share is divided again


def test_a_client_votes_once_and_only_if_asked(world):
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
    assert result.bytes_up == fair.bytes_up + 2 * more, "dropped, but they came"


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "feddyn", "fedadam"])
def test_a_round_with_none_left_keeps_the_model_and_says_so(world, algorithm):
    session = world.session(world.model(), world.algorithm(algorithm))
    _, engine = tampered(world, session, HANDS["not_a_number"][0], bad=range(6))
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
def test_what_a_refused_client_computed_is_forgotten(world, algorithm, variable):
    """The server's variable stays the mean of the clients', whoever was refused: c = 1/N sum c_i."""
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


def test_a_refused_client_keeps_the_private_part_it_had(world):
    memory = InMemory()
    session = world.session(world.model("pfedpara"))
    good = world.engine("sequential", session, memory)
    (first,) = run_rounds(session, good, Schedule(1, 6, 6, world.federation.size), personal=False)
    before = {k: {name: t.clone() for name, t in memory.get(k)[PRIVATE].items()} for k in range(6)}
    _, engine = tampered(world, session, HANDS["cut"][0], memory=memory)
    list(
        run_rounds(
            session, engine, Schedule(2, 6, 6, world.federation.size), personal=False, start=first.progress
        )
    )
    for client in range(6):
        unchanged = [torch.equal(memory.get(client)[PRIVATE][n], t) for n, t in before[client].items()]
        assert unchanged == [client == BAD] * len(unchanged)


def test_a_client_without_examples_is_passed_over(world):
    clients = [*world.clients[:2], range(0), *world.clients[3:]]
    run = world.simulate(
        world.model(),
        world.algorithm("scaffold"),
        federation=fp.FederatedData(world.train, clients),
        cohort=6,
    )
    assert [result.refused for result in run.rounds] == [((2, "it holds no examples"),)] * 2
    assert run.memory.get(2) is None


def test_a_federation_of_nobody_with_examples_learns_nothing_and_says_so(world):
    run = world.simulate(world.model(), federation=fp.FederatedData(world.train, [range(0)] * 6))
    assert all(torch.equal(run.state[n], t) for n, t in run.session.program.initial.items())
    assert all("no usable update" in result.notes[0] for result in run.rounds)


def test_a_client_with_fewer_examples_than_a_batch_takes_one_step(world):
    federation = fp.FederatedData(world.train, [range(3)] * 6)
    small = world.simulate(world.model(), world.algorithm(batch_size=64), federation=federation)
    exact = world.simulate(world.model(), world.algorithm(batch_size=3), federation=federation)
    assert all(torch.equal(small.state[name], exact.state[name]) for name in exact.state)
    assert not any(result.refused for result in small.rounds)


@pytest.mark.parametrize("scheme", ["original", "fedpara", "pfedpara"])
def test_a_diverging_run_stops_and_names_the_client_and_the_round(world, scheme):
    memory, seen = InMemory(), []
    every = r"round \d+: no update is left, and \d+ of \d+ clients diverged \(client \d+: it diverged: its "
    with pytest.raises(RunError, match=every):
        world.simulate(
            world.model(scheme),
            world.algorithm("scaffold", lr=3e38, epochs=3),
            rounds=50,
            memory=memory,
            on_round=seen.append,
        )
    assert all(tensor.isfinite().all() for result in seen for tensor in result.progress.x.values())
    taken = {client for result in seen for client in result.memories}
    assert {client for client in range(6) if memory.get(client) is not None} == taken


@pytest.mark.parametrize("name", ["sequential", "batched"])
def test_one_client_that_diverges_is_refused_and_the_round_goes_on(world, name):
    """Its examples are far out of range; the others are not held up, and it keeps what it had."""
    inputs = world.train.inputs.float() / 255
    inputs[world.clients[BAD].start : world.clients[BAD].stop] = 1e30
    federation = fp.FederatedData(replace(world.train, inputs=inputs, mean=None, std=None), world.clients)
    memory = InMemory()
    run = world.simulate(
        world.model(),
        world.algorithm("scaffold"),
        federation=federation,
        cohort=6,
        engine=name,
        memory=memory,
    )
    for result in run.rounds:
        assert [client for client, _ in result.refused] == [BAD]
        assert result.refused[0][1].startswith("it diverged: its ")
        assert result.memories == tuple(client for client in range(6) if client != BAD)
    assert memory.get(BAD) is None
    assert all(tensor.isfinite().all() for tensor in run.state.values())


def test_a_last_step_to_infinity_counts_as_diverged(world):
    """The loss is measured before the step: it is finite when the parameters no longer are."""
    with pytest.raises(RunError, match="client 0: it diverged: its parameters are no longer finite"):
        world.simulate(
            world.model(),
            world.algorithm(lr=3e38, weight_decay=1e3, batch_size=12),
            federation=fp.FederatedData(world.train, [range(12)]),
            cohort=1,
        )


def test_a_change_too_large_for_the_uplink_is_refused_and_the_run_goes_on(world):
    run = world.simulate(
        world.model(), world.algorithm(lr=1e6, batch_size=16), link=fp.Link(up="float16"), rounds=2
    )
    for result in run.rounds:
        assert len(result.refused) == 3
        assert all("to travel as float16" in reason for _, reason in result.refused)
        assert result.bytes_up == 0


def test_a_model_too_large_for_the_downlink_stops_the_run(world):
    with pytest.raises(RunError, match=r"cannot be sent in round 2: .* to travel as float16"):
        world.simulate(world.model(), world.algorithm(lr=1e6, batch_size=16), link=fp.Link(down="float16"))


def test_a_bound_that_nobody_meets_is_said_every_round(world):
    run = world.simulate(world.model(), max_norm=1e-9)
    assert [len(result.refused) for result in run.rounds] == [3, 3]
    with pytest.raises(ConfigError, match="max_norm"):
        world.simulate(world.model(), max_norm=-1.0)


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


def test_too_few_replies_leave_no_client_changed(world):
    """Where the round keeps the model, a control variate that moved would be out of step with the server's."""
    session = world.session(world.model(), world.algorithm("scaffold"))
    seen, engine = tampered(world, session, HANDS["cut"][0])
    (result,) = run_rounds(
        session, engine, Schedule(1, 6, 4, world.federation.size, minimum=4), personal=False
    )
    assert result.notes == ("round 1 had 3 of 4 usable updates: the model stays unchanged",)
    assert seen.kept == [[]]
    assert result.memories == ()


def test_a_refused_client_is_not_among_those_that_keep(world):
    """The checkpoint looks for a file of that round from each client named here."""
    session = world.session(world.model("pfedpara"))
    _, engine = tampered(world, session, HANDS["cut"][0])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    assert result.memories == tuple(client for client in CHOSEN if client != BAD)


def test_a_client_that_never_answers_was_sent_the_model(world):
    session = world.session(world.model())
    seen, engine = tampered(world, session, HANDS["silent"][0])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    assert result.bytes_down == 4 * len(seen.down[0])


def test_the_training_loss_is_of_those_that_were_taken(world):
    session = world.session(world.model())
    seen, engine = tampered(world, session, HANDS["cut"][0])
    (result,) = run_rounds(session, engine, Schedule(1, 6, 4, world.federation.size), personal=False)
    losses = [reply.loss for reply in seen.up[0] if reply.client != BAD]
    assert result.train_loss == pytest.approx(sum(losses) / 3)


def test_replies_are_judged_in_their_order_whatever_their_size():
    """Equal bits need equal order: large ones are judged by threads, small ones at once."""
    sizes = [LARGE_MESSAGE, 1, LARGE_MESSAGE, LARGE_MESSAGE, 0]
    replies = [Reply(client, bytes(size)) for client, size in enumerate(sizes)]
    judged = [
        (reply.client, verdict)
        for reply, verdict in _with_verdicts(replies, lambda reply: len(reply.message))
    ]
    assert judged == list(enumerate(sizes))


def test_a_model_that_is_no_number_is_not_sent(world):
    model = world.model()
    with torch.no_grad():
        model.fc1.bias[3] = float("nan")
    with pytest.raises(RunError, match="the model cannot be sent in round 1: it holds NaN or infinity"):
        world.simulate(model)


@pytest.mark.parametrize("up", ["float32", "float16"])
def test_a_bound_is_on_the_change_where_the_change_travels(world, up):
    run = world.simulate(world.model(), max_norm=1.0, link=fp.Link(up=up))
    assert norm(run.session.program.initial) > 2
    assert [result.refused for result in run.rounds] == [(), ()]


@pytest.mark.parametrize("up", ["float32", "float16"])
def test_running_statistics_count_by_their_change_on_every_uplink(world, up):
    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.BatchNorm1d(256), nn.Linear(256, 10))

    run = world.simulate(
        world.model(network=network), world.algorithm(steps=1), rounds=1, max_norm=8.0, link=fp.Link(up=up)
    )
    assert run.rounds[0].refused == ()  # 256 variances of 1 are 16 away from nothing
