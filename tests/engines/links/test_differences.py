"""A downlink of differences: both ends have the same x^, clients that missed rounds catch up, and all bytes count."""

import math
from dataclasses import replace

import pytest
import torch

import fedpara as fp
from fedpara.engines.differences import Differences, known_after
from fedpara.engines.memory import InMemory
from fedpara.engines.progress import Schedule
from fedpara.engines.server.broadcast import broadcast
from fedpara.engines.server.rounds import initial_progress, run_rounds
from fedpara.errors import WireError
from fedpara.experiments.storage.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from fedpara.wire import decode

DOWN = (
    "int4",
    "sign",
    "topk(0.05)",
    "stc(0.05)",
    "eden",
    "powersgd(rank=1)",
    "int8(feedback=True)",
    "grid(0.5)",
    "grid(0.5, halve=2)",
)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def rounds_of(world, session, count, cohort, engine="sequential", **words):
    seen = world.engine(engine, session, InMemory())
    schedule = Schedule(count, 6, cohort, world.federation.size, **words)
    return seen, list(run_rounds(session, seen, schedule, personal=False))


@pytest.mark.parametrize("down", DOWN)
def test_a_client_computes_the_servers_state_from_the_bytes(world, engine, down):
    session = world.session(world.model(), world.algorithm("scaffold"), fp.Link(down=down))
    seen, rounds = rounds_of(world, session, 4, 3, engine)
    known, body = None, b""
    for t, (message, result) in enumerate(zip(seen.down, rounds, strict=True), 1):
        assert not result.refused
        state = session.add_differences(message, t, known, t - 1)
        known = {name: state[name] for name in session.first_known()}
        body += message
        assert same(known, result.progress.known.state)
        assert same(session.add_differences(body, t, None, 0), state), "all at once"
    assert {name for name in known if name.startswith("control/")}


@pytest.mark.parametrize("down", ["topk(0.02)", "sign", "int8(feedback=True)"])
def test_what_is_left_out_is_in_the_next_difference(world, down):
    """If the model stands still, x^ reaches it: by error feedback, although each message alone is far off."""
    session = world.session(world.model(), link=fp.Link(down=down))
    progress = initial_progress(session)
    generator = torch.Generator().manual_seed(0)
    x = {name: t + torch.randn(t.shape, generator=generator) for name, t in progress.x.items()}
    errors = []
    for t in range(1, 81):
        message, sent = broadcast(session, progress.__class__(t - 1, x, {}, {}, known=progress.known), t)
        progress = progress.__class__(t, x, {}, {}, known=known_after(message, []))
        errors.append(float((sent["fc1.weight"] - x["fc1.weight"]).norm() / x["fc1.weight"].norm()))
    assert errors[0] > 10 * errors[-1]


def test_the_bytes_of_a_client_are_its_missed_messages_or_a_copy(world):
    session = world.session(world.model(), link=fp.Link(down="int4"))
    seen, rounds = rounds_of(world, session, 8, 2)
    sizes, last, copies = [], dict.fromkeys(range(6), 0), 0
    for t, result in enumerate(rounds, 1):
        sizes.append(len(seen.down[t - 1]))
        copy = 4 * 2378  # the numbers of a copy; its index and header come on top
        expected = 0
        for client in result.cohort:
            missed = sum(sizes[last[client] :])
            copies += missed > copy + 600
            expected += min(missed, copy + 600)
            last[client] = t
        assert abs(result.bytes_down - expected) <= 600 * len(result.cohort)
        assert result.progress.known.last == {client: at for client, at in last.items() if at}
    assert copies, "no client ever needed a copy: use more rounds"
    assert rounds[-1].progress.bytes_down == sum(result.bytes_down for result in rounds)


@pytest.mark.parametrize("down", ["int4", "topk(0.02)", "int8(feedback=True)", "grid(0.5)"])
def test_what_is_sent_to_a_client_has_its_bytes_and_gives_it_the_state(world, down):
    session = world.session(world.model(), link=fp.Link(down=down))
    _, rounds = rounds_of(world, session, 9, 2)
    states = {0: session.first_known()} | {r.number: r.progress.known.state for r in rounds}
    message, _ = broadcast(session, rounds[-1].progress, 10)
    assert isinstance(message, Differences)
    kinds = set()
    for client in range(6):
        parts = message.to(client)
        body, since = b"".join(map(bytes, parts)), message.last(client)
        kinds.add(parts[0] is message.copy)
        assert len(body) == message.bytes_to(client) <= len(message.copy)
        assert same(session.add_differences(body, 10, states[since], since), message.received)
    assert (True in kinds) == (down not in ("topk(0.02)", "grid(0.5)"))
    assert sum(map(len, rounds[-1].progress.known.messages)) < 3 * len(message.copy)


@pytest.mark.parametrize("down", ["sign", "grid(0.5)"])
def test_missing_repeated_and_foreign_messages_are_refused(world, down):
    session = world.session(world.model(), link=fp.Link(down=down))
    seen, _ = rounds_of(world, session, 3, 6)
    first, second, third = seen.down
    for body in (
        third,
        first + third,
        first + second + third + third,
        second + first + third,
        b"",
        third[:-1],
    ):
        with pytest.raises(WireError):
            session.add_differences(body, 3, None, 0)


def test_a_client_whose_update_was_not_accepted_is_sent_the_messages_again(world, engine):
    session = world.session(world.model(), link=fp.Link(down="sign"))
    _, rounds = rounds_of(world, session, 2, 6, engine, max_norm=1e-9)
    assert rounds[-1].progress.known.last == {}
    sizes = rounds[-1].progress.known.sizes
    assert rounds[1].bytes_down == 6 * sum(sizes)


def test_small_tensors_and_buffers_arrive_exactly(world, engine):
    def network():
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 10)
        )

    link = fp.Link(up="int4", down="int4")
    session = world.session(world.model(network=network), world.algorithm(batch_size=6), link)
    seen, rounds = rounds_of(world, session, 2, 3, engine)
    assert not rounds[-1].refused
    _, sent = decode(seen.down[-1], session.exact, "int4", session.down)
    before = rounds[0].progress
    for name in ("1.bias", "3.weight", "2.running_var", "2.num_batches_tracked"):
        assert torch.equal(sent[name], {**before.x, **before.buffers}[name])
    assert "3.weight" not in before.known.state
    assert "1.weight" in before.known.state


def test_a_checkpoint_holds_what_clients_know(world, tmp_path):
    session = world.session(world.model(), world.algorithm("scaffold"), fp.Link(down="topk(0.1)"))
    _, rounds = rounds_of(world, session, 4, 2)
    progress = rounds[-1].progress
    write_checkpoint(tmp_path, Checkpoint(progress, {}, "identity"))
    back = read_checkpoint(tmp_path / "checkpoint.safetensors").progress
    assert same(back.known.state, progress.known.state)
    assert same(back.x, progress.x)
    for name in ("sizes", "last", "messages"):
        assert getattr(back.known, name) == getattr(progress.known, name)
    first, second = (broadcast(session, one, 5)[0] for one in (back, progress))
    assert bytes(first) == bytes(second)
    assert [first.bytes_to(client) for client in range(6)] == [second.bytes_to(client) for client in range(6)]


def test_scoring_everyone_counts_what_each_client_lacks(world, engine):
    run = world.simulate(
        world.model(),
        link=fp.Link(down="sign"),
        rounds=3,
        cohort=2,
        engine=engine,
        federation=world.personal,
    )
    message, _ = broadcast(run.session, run.progress, 4)
    assert run.rounds[-1].everyone.bytes_down == sum(message.bytes_to(client) for client in range(6))


def moved(session, progress, spread, count, cohort=()):
    """Progress and messages of rounds in which every number of the model moves at random."""
    generator, messages = torch.Generator().manual_seed(0), []
    for t in range(progress.round + 1, progress.round + 1 + count):
        message, _ = broadcast(session, progress, t)
        messages.append(message)
        x = {name: v + spread * torch.randn(v.shape, generator=generator) for name, v in progress.x.items()}
        progress = progress.__class__(t, x, {}, {}, known=known_after(message, cohort))
    return progress, messages


@pytest.mark.parametrize(("down", "step"), [("grid(0.5)", 0.5), ("grid(0.5, halve=2)", 0.5 * 2 ** (-5 / 2))])
def test_on_a_grid_the_clients_model_is_the_nearest_point(world, down, step):
    """Each number is off by at most half a unit, a power of two near the step times the tensor's root mean square."""
    session = world.session(world.model(), link=fp.Link(down=down))
    progress, _ = moved(session, initial_progress(session), 0.05, 4)
    message, sent = broadcast(session, progress, 5)
    for name in progress.known.state:
        x = progress.x[name]
        unit = 2.0 ** round(math.log2(step * float(x.double().square().mean().sqrt())))
        assert torch.equal(sent[name], (x / unit).round() * unit)
    assert message.exact


@pytest.mark.parametrize("down", ["grid(0.5)", "grid(2.0, halve=4)"])
def test_on_a_grid_one_message_takes_the_place_of_those_missed(world, down):
    """A client's way from round a has one message, shorter than all of them, also in a run that was resumed."""
    session = world.session(world.model(), link=fp.Link(down=down))
    progress, first = moved(session, initial_progress(session), 0.02, 3, cohort=[1])
    progress, later = moved(session, progress, 0.02, 5, cohort=[2])
    assert (progress.known.last, len(progress.known.messages)) == ({1: 3, 2: 8}, 5)
    message, _ = broadcast(session, progress, 9)
    (way,) = message.to(1)
    assert way is not message.copy
    assert len(way) < sum(map(len, [*later, message]))
    known = {name: first[2].received[name] for name in progress.known.state}
    assert same(session.add_differences(bytes(way), 9, known, 3), message.received)
    for wrong in (2, 4):
        with pytest.raises(WireError, match="since"):
            session.add_differences(bytes(way), 9, known, wrong)
    resumed, _ = broadcast(session, replace(progress, known=replace(progress.known, earlier=())), 9)
    assert [bytes(m) for m in resumed.to(1)] == [bytes(way)]


def test_on_a_grid_a_model_that_no_message_reaches_exactly_is_copied(world):
    """Numbers of 1e-9 that grow to 1 have no common unit within 23 bits: sums would round."""
    session = world.session(world.model(), link=fp.Link(down="grid(0.5)"))
    small = replace(
        initial_progress(session), x={n: v * 1e-12 for n, v in initial_progress(session).x.items()}
    )
    progress, _ = moved(session, small, 0.0, 2, cohort=[1])
    progress, (third,) = moved(session, replace(progress, x=initial_progress(session).x), 0.0, 1, cohort=[2])
    assert not third.exact
    assert third.to(1) == (third,)
    message, _ = broadcast(session, progress, 4)
    assert message.to(1) == (message.copy,)
    assert message.to(2) == (message,)
