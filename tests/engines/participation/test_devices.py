"""Slow clients: the simulated clock and deadlines."""

import numpy as np
import pytest
import torch

import fedpara as fp
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.devices import Devices, Lognormal, read_amount, read_devices
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.errors import ConfigError

BANDWIDTH = (1000.0, 2000.0, 500.0, 4000.0, 800.0, 100.0)
SPEED = (1.0, 2.0, 4.0, 0.5, 8.0, 3.0)


def by_hand(seen, t, clients):
    """bytes_down / bandwidth + steps / speed + bytes_up / bandwidth; one epoch in batches of 4."""
    steps = {client: -(-size // 4) for client, size in enumerate((12, 7, 16, 9, 5, 11))}
    return {
        reply.client: len(seen.down[t]) / BANDWIDTH[reply.client]
        + steps[reply.client] / SPEED[reply.client]
        + len(reply.message) / BANDWIDTH[reply.client]
        for reply in seen.up[t]
        if reply.client in clients
    }


@pytest.mark.parametrize("link", ["float32", "int8"])
def test_the_clock_equals_a_calculation_by_hand(world, engine, link):
    session = world.session(world.model(), link=fp.Link(up=link))
    seen = world.engine(engine, session, InMemory())
    schedule = Schedule(3, 6, 3, world.federation.size, devices=Devices(BANDWIDTH, SPEED))
    rounds = list(run_rounds(session, seen, schedule, personal=False))
    clock = 0.0
    for t, result in enumerate(rounds):
        clock += max(by_hand(seen, t, result.cohort).values())
        assert result.clock == pytest.approx(clock)
    resumed = list(run_rounds(session, seen, schedule, personal=False, start=rounds[0].progress))
    assert resumed[-1].clock == rounds[-1].clock


def test_clients_after_the_deadline_are_refused_and_the_round_takes_the_deadline(world, engine):
    session = world.session(world.model(), world.algorithm("scaffold"))
    seen = world.engine(engine, session, InMemory())
    free = Schedule(1, 6, 6, world.federation.size, devices=Devices(BANDWIDTH, SPEED))
    (result,) = run_rounds(session, seen, free, personal=False)
    took = by_hand(seen, 0, range(6))
    deadline = (took[1] + took[0]) / 2  # between two clients
    late = sorted(client for client, seconds in took.items() if seconds > deadline)
    assert late
    assert len(late) < 5
    memory = InMemory()
    seen = world.engine(engine, session, memory)
    strict = Schedule(1, 6, 6, world.federation.size, devices=Devices(BANDWIDTH, SPEED, deadline))
    (result,) = run_rounds(session, seen, strict, personal=False)
    assert [client for client, _ in result.refused] == late
    assert result.refused[0][1] == (
        f"it took {took[late[0]]:.4g} s, and the deadline is {deadline:g} s (simulated)"
    )
    assert result.clock == deadline
    assert seen.accepted == [[client for client in range(6) if client not in late]]
    assert [client for client in range(6) if memory.get(client) is None] == late
    assert result.bytes_up == sum(len(reply.message) for reply in seen.up[0]), "late bytes were sent too"


def test_a_deadline_that_everyone_meets_changes_nothing(world, engine):
    plain, timed = (
        world.simulate(world.model(), engine=engine, devices=devices)
        for devices in (Devices(speed=2.0), Devices(speed=2.0, deadline=1e6))
    )
    assert [r.clock for r in plain.rounds] == [r.clock for r in timed.rounds]
    for name, tensor in plain.state.items():
        assert torch.equal(tensor, timed.state[name])


def test_without_devices_there_is_no_clock_and_with_them_the_same_model(world, engine):
    plain, timed = (
        world.simulate(world.model(), engine=engine, devices=devices)
        for devices in (None, Devices(speed=2.0))
    )
    assert [r.clock for r in plain.rounds] == [None, None]
    for name, tensor in plain.state.items():
        assert torch.equal(tensor, timed.state[name])


@pytest.mark.parametrize("deadline", [100.0, None])
def test_the_server_waits_for_lost_clients_until_the_deadline(world, deadline):
    """Each client takes 4 steps at 2 per second. Without a deadline the server cannot wait for a lost one."""
    devices = Devices(speed=2.0, deadline=deadline)
    run = world.simulate(world.model(), world.algorithm(steps=4), rounds=6, lost=0.2, devices=devices)
    lost = [len(result.refused) for result in run.rounds]
    assert 0 in lost
    assert 0 < max(lost) < 3
    seconds = np.diff([0.0, *(result.clock for result in run.rounds)])
    assert seconds.tolist() == [deadline if n and deadline else 2.0 for n in lost]


def test_a_distribution_gives_each_client_one_device_per_seed():
    devices = Devices(bandwidth=fp.lognormal(1e6, 0.5), speed=lambda generator: generator.uniform(1, 2))
    first = [devices.rate(0, "bandwidth", i) for i in range(4_000)]
    assert first == [devices.rate(0, "bandwidth", i) for i in range(4_000)]
    assert first != [devices.rate(1, "bandwidth", i) for i in range(4_000)]
    logs = np.log(first)
    assert abs(logs.mean() - np.log(1e6)) < 5 * 0.5 / 4_000**0.5
    assert abs(logs.std() - 0.5) < 5 * 0.5 / (2 * 4_000) ** 0.5
    assert all(1 <= devices.rate(0, "speed", i) < 2 for i in range(100))


@pytest.mark.parametrize("table", [list(SPEED), np.array(SPEED), torch.tensor(SPEED)])
def test_a_table_may_be_a_list_an_array_or_a_tensor(table):
    assert [Devices(speed=table).rate(0, "speed", i) for i in range(6)] == list(SPEED)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Devices(speed=0.0), "speed is 0.0: expected a number above 0"),
        (lambda: Devices(bandwidth=[1.0, -2.0]), "bandwidth is -2.0: expected a number above 0"),
        (lambda: Devices(speed=1.0, deadline=-1.0), "deadline is -1.0: expected a number above 0"),
        (lambda: Devices(deadline=5.0), "devices without bandwidth and speed take no time"),
        (lambda: fp.lognormal(0.0, 1.0), r"lognormal\(0.0, 1.0\): expected a median above 0"),
        (
            lambda: read_amount("speed", "fast"),
            "speed is 'fast': expected a number, or a distribution such as",
        ),
        (lambda: read_amount("speed", "lognormal(1)"), "expected a number, or a distribution"),
    ],
)
def test_bad_devices_are_named(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_table_of_another_length_and_a_negative_draw_are_named(world):
    with pytest.raises(ConfigError, match="speed has 2 numbers: expected one per client, 6"):
        world.simulate(world.model(), devices=Devices(speed=[1.0, 2.0]))
    with pytest.raises(ConfigError, match=r"bandwidth of client \d is -1.0: expected a number above 0"):
        world.simulate(world.model(), devices=Devices(bandwidth=lambda generator: -1.0))


def test_devices_are_read_from_strings():
    assert read_devices("lognormal(5e6, 0.5)", " 20 ", 60.0) == Devices(Lognormal(5e6, 0.5), 20.0, 60.0)
    assert read_devices(None, "3", None) == Devices(speed=3.0)
    assert read_devices(None, None, None) is None
