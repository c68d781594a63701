"""Everything that the server receives from a client in a round, and what it could read from it.

A reading is a vector of n numbers that the server can compute: the masked numbers, each of their bytes, and the masked
numbers without the masks whose secrets the protocol reveals to the server. For a reading that is independent of the
update, |r| < 3.29 / sqrt(n) in 99.9% of all cases; a bound for k readings together has 0.1% / k in place of 0.1%.
Secrets come from a seed here, so that a test gives the same answer every time.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from scipy.stats import norm

pytest.importorskip("flwr")

from flower_nodes import BASE, Nodes, run_on_nodes, run_sequentially

import fedpara.engines.client as client_side
from fedpara.engines.flower.policy import Policy
from fedpara.engines.program import make_program
from fedpara.engines.secure import stages
from fedpara.experiments import read_run
from fedpara.experiments.build import build
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.secure import primitives as p
from fedpara.secure.fixed_point import restored, unpacked
from fedpara.secure.messages import STAGES
from fedpara.secure.server import Aggregation
from fedpara.secure.settings import read_secure
from fedpara.wire import decode

SECURE = replace(BASE, cohort=5, rounds=1, secure="secagg(clip=4.0, bits=24)")
HOW = read_secure(SECURE.secure)
WIDTH = HOW.width(5)
WINDOW = 16
"""Bytes by which a tensor is recognised: four float32 numbers."""


class Capture:
    """What the server of one round received, and what the test knows beside it."""

    def __init__(self, monkeypatch):
        self.received = defaultdict(dict)  # client -> stage -> bytes
        self.facts = defaultdict(set)
        self.update, self.sent, self.private = {}, {}, {}
        self.secrets, self.keys = {}, {}  # those that the server restored, and the clients' public keys
        self._spy_on_training(monkeypatch)
        self._spy_on_secrets(monkeypatch)

    def _spy_on_training(self, monkeypatch):
        reply_of = client_side.reply_of

        def spied(start, trainings, memory, *, client, **words):
            y, x = trainings[0].parameters, start.x
            self.update[client] = np.concatenate([(y[name].double() - x[name]).flatten() for name in x])
            self.sent[client] = {name: y[name].clone() for name in x}
            made = reply_of(start, trainings, memory, client=client, **words)
            both = memory.get("private", {}), made[1].get("private", {})
            self.private[client] = [tensor.clone() for state in both for tensor in state.values()]
            return made

        monkeypatch.setattr(client_side, "reply_of", spied)

    def _spy_on_secrets(self, monkeypatch):
        restore, numbers = Aggregation._restored, count()

        def spied(aggregation, client, shares, which):
            self.secrets[client, which] = restore(aggregation, client, shares, which)
            self.keys = aggregation._keys
            return self.secrets[client, which]

        monkeypatch.setattr(Aggregation, "_restored", spied)
        monkeypatch.setattr(p, "fresh_secret", lambda: p.seeded_secret("capture", next(numbers)))

    def on_nodes(self, experiment, folder, **words):
        transport = Nodes(folder.parent / "nodes", count=5)
        transport.delay = words.pop("delay", transport.delay)

        def change(request, packet):
            if request.kind != "hello":
                self.received[request.client][request.kind] = packet.body
                self.facts[request.kind] |= {*packet.facts}
            return packet

        transport.change = change
        run_on_nodes(experiment, folder, transport, **words)
        return self

    def in_a_simulation(self, experiment, folder, monkeypatch):
        stage = stages.Simulated.stage

        def recorded(simulated, name, *given):
            for reply in stage(simulated, name, *given):
                self.received[reply.client][name] = bytes(reply.message)
                yield reply

        def change(round, reply):
            if experiment.secure is None:
                self.received[reply.client]["train"] = bytes(reply.message)
            return reply

        monkeypatch.setattr(stages.Simulated, "stage", recorded)
        run_sequentially(experiment, folder, change)
        return self

    def whole(self, client):
        return b"|".join(self.received[client].values())

    def masked(self, client):
        """The masked numbers as they arrived: [n, bytes per number]"""
        _, state = decode(self.received[client]["masked"], link="float32")
        return state["masked"].numpy()

    def readings(self, client):
        raw = self.masked(client)
        numbers = unpacked(raw, WIDTH)
        yield centred(numbers)
        yield from raw.T.astype(float)
        if (client, "own") in self.secrets:
            yield centred(numbers - p.self_mask(self.secrets[client, "own"], len(numbers), WIDTH))
        if (client, "mask") in self.secrets:
            yield centred(numbers - self.pair_masks(client, self.secrets[client, "mask"], len(numbers)))

    def pair_masks(self, client, secret, length):
        """The sum of the masks that a client shares with the others, from its secret and their public keys."""
        total = np.zeros(length, np.uint32)
        for other in self.keys.keys() - {client}:
            mask = p.pair_mask(p.agreed_key(secret, self.keys[other]["mask"]), length, WIDTH)
            total = total + mask if client < other else total - mask
        return total


def centred(numbers):
    return restored(numbers, HOW, WIDTH)[0]


def correlation(a, b):
    return abs(float(np.corrcoef(a, b)[0, 1]))


def chance(n, readings=1):
    """The bound that all of so many correlations of independent vectors keep, in 99.9% of all cases."""
    return float(norm.ppf(1 - 0.0005 / readings)) / n**0.5


def windows(tensors):
    """Some bytes of the start, the middle and the end of each tensor."""
    for tensor in tensors:
        raw = tensor.contiguous().reshape(-1).numpy().tobytes()
        for start in (0, len(raw) // 8 * 4, len(raw) - WINDOW):
            if len(raw) >= WINDOW:
                yield raw[start : start + WINDOW]


def taken(where, experiment, tmp_path, monkeypatch):
    capture = Capture(monkeypatch)
    if where == "flower":
        return capture.on_nodes(experiment, tmp_path / "run")
    return capture.in_a_simulation(experiment, tmp_path / "run", monkeypatch)


@pytest.mark.parametrize("scheme", ["fedpara", "pfedpara"])
@pytest.mark.parametrize("where", ["flower", "simulation"])
def test_no_update_can_be_recognised_in_what_the_server_receives(where, scheme, tmp_path, monkeypatch):
    """n is 8,794 for FedPara and 4,530 for pFedPara: |r| < 0.0351 and < 0.0489 for the masked numbers."""
    capture = taken(where, replace(SECURE, scheme=scheme), tmp_path, monkeypatch)
    assert [*capture.received] == [*range(5)]
    for client, update in capture.update.items():
        n, readings = len(update), [*capture.readings(client)]
        assert {*capture.received[client]} == {*STAGES}
        assert n == {"fedpara": 8794, "pfedpara": 4530}[scheme] == len(capture.masked(client))
        assert correlation(readings[0], update) < chance(n)
        assert len(readings) == WIDTH + 2  # also without its own mask, which the shares reveal
        assert max(correlation(reading, update) for reading in readings) < chance(n, 5 * len(readings))
        others = [len(body) for stage, body in capture.received[client].items() if stage != "masked"]
        assert max(others) < 2000, "no other message has room for an update"
        assert not any(window in capture.whole(client) for window in windows(capture.sent[client].values()))
    if where == "flower":
        only = {"client", "round", "reason", "loss"}
        assert all(facts == only for facts in capture.facts.values())


@pytest.mark.parametrize("where", ["flower", "simulation"])
def test_without_secure_aggregation_the_same_capture_is_the_update(where, tmp_path, monkeypatch):
    """The control: every client's update is recognised, by its correlation and by its bytes."""
    capture = taken(where, replace(SECURE, secure=None, scheme="pfedpara"), tmp_path, monkeypatch)
    start = first_model(tmp_path / "run")
    for client, update in capture.update.items():
        _, state = decode(capture.received[client]["train"], link="float32")
        y = np.concatenate([state[name].double().flatten() for name in start])
        x = np.concatenate([tensor.double().flatten() for tensor in start.values()])
        assert correlation(y - x, update) > 0.999
        assert all(window in capture.whole(client) for window in windows(capture.sent[client].values()))


def first_model(folder):
    """The shared tensors before the first round, in the order of an update."""
    program = make_program(build(read_run(folder).experiment).task.model)
    assert program.start(program.shared).keys() == final_checkpoint(folder).progress.x.keys()
    return program.start(program.shared)


def test_without_masks_the_capture_gives_the_update_away(tmp_path, monkeypatch):
    """The second control, on the secure path itself: the readings find an update that is rounded and not masked."""
    monkeypatch.setattr(p, "mask", lambda key, length, width: np.zeros(length, np.uint32))
    capture = taken("flower", SECURE, tmp_path, monkeypatch)
    for client, update in capture.update.items():
        assert correlation(next(capture.readings(client)), update) > 0.99


def test_an_update_that_arrives_too_late_stays_hidden(tmp_path, monkeypatch):
    """The others have revealed the key of its masks with them by then. Its own mask is left."""
    capture = Capture(monkeypatch)
    capture.on_nodes(
        SECURE,
        tmp_path / "run",
        delay=lambda request: 150.0 * ((request.kind, request.client) == ("masked", 1)),
        policy=Policy(deadline=100, wait=5, hello=10),
    )
    assert [client for client, which in capture.secrets if which == "mask"] == [1]
    assert (1, "own") not in capture.secrets
    readings, update = [*capture.readings(1)], capture.update[1]
    assert max(correlation(reading, update) for reading in readings) < chance(len(update), len(readings))
    own = p.seeded_secret("capture", 3 * 1 + 2)  # of client 1: the third of its secrets
    numbers = unpacked(capture.masked(1), WIDTH)
    bare = numbers - capture.pair_masks(1, capture.secrets[1, "mask"], len(numbers))
    assert correlation(centred(bare - p.self_mask(own, len(numbers), WIDTH)), update) > 0.99


@pytest.mark.parametrize("secure", [SECURE.secure, None], ids=["secure", "plain"])
@pytest.mark.parametrize("where", ["flower", "simulation"])
def test_private_factors_never_arrive(where, secure, tmp_path, monkeypatch):
    """As they were before the round, and as they are after it."""
    capture = taken(where, replace(SECURE, scheme="pfedpara", secure=secure), tmp_path, monkeypatch)
    everything = b"|".join(map(capture.whole, capture.received))
    private = [tensor for tensors in capture.private.values() for tensor in tensors]
    assert len(private) == 5 * 2 * 4
    assert not any(window in everything for window in windows(private))
    assert not any(torch.equal(a, b) for a, b in zip(private[:4], private[4:8], strict=True)), (
        "they did train"
    )
