"""Golden: what Algorithms 1 and 2 send, read from the encoded bytes."""

import math
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, models
from fedpara.engines.client import reply_of
from fedpara.engines.flower.engine import digest
from fedpara.engines.local.trained_row import Start
from fedpara.engines.local.worker import Trained
from fedpara.engines.memory import InMemory
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.broadcast import broadcast
from fedpara.engines.server.rounds import initial_progress, run_rounds
from fedpara.engines.session import Session
from fedpara.errors import ConfigError, PrivacyError
from fedpara.wire import Message, decode

BIASES = {"fc1.bias", "fc2.bias"}


def crossed(world, scheme, share="all", algorithm="fedavg", link=None, network=None):
    """(session, every message of two rounds, both ways)"""
    session = world.session(world.model(scheme, network), world.algorithm(algorithm), link, share)
    seen = world.engine("sequential", session, InMemory())
    list(run_rounds(session, seen, Schedule(2, 6, 3, world.federation.size), personal=False))
    return session, [*seen.down, *(reply.message for replies in seen.up for reply in replies)]


def names(messages):
    found = {frozenset(decode(message)[1]) for message in messages}
    assert len(found) == 1, "up and down carry the same names"
    return set(next(iter(found)))


def test_fedpara_sends_its_four_factors_both_ways(world):
    _, messages = crossed(world, "fedpara")
    factors = {f"fc1.weight.{factor}" for factor in ("x1", "y1", "x2", "y2")}
    assert names(messages) == factors | {"fc2.weight"} | BIASES


def test_pfedpara_sends_the_first_inner_weight_biases_and_norms(world):
    _, messages = crossed(world, "pfedpara")
    assert names(messages) == {"fc1.weight.x1", "fc1.weight.y1", "fc2.weight"} | BIASES


def test_pfedpara_of_a_kernel_sends_its_first_core(world):
    def network():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3),
            torch.nn.GroupNorm(2, 16),
            torch.nn.Conv2d(16, 24, 3),
            torch.nn.BatchNorm2d(24),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(24, 10),
        )

    session, messages = crossed(world, "pfedpara", network=network)
    sent = names(messages)
    assert {name for name in sent if name.startswith("2.weight")} == {
        "2.weight.x1",
        "2.weight.y1",
        "2.weight.t1",
    }
    norms = {f"{layer}.{part}" for layer in (1, 3) for part in ("weight", "bias")}
    statistics = {f"3.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert norms | statistics | {"0.bias", "2.bias", "6.bias"} <= sent
    assert {"2.weight.x2", "2.weight.y2", "2.weight.t2"} <= session.program.private


def test_fedper_does_not_send_the_last_layer(world):
    _, messages = crossed(world, "original", share="fedper")
    assert names(messages) == {"fc1.weight", "fc1.bias"}


def test_fedper_with_pfedpara_sends_neither_private_part(world):
    _, messages = crossed(world, "pfedpara", share="fedper")
    assert names(messages) == {"fc1.weight.x1", "fc1.weight.y1", "fc1.bias"}


@pytest.mark.parametrize("algorithm", algorithms.names())
def test_local_sends_no_tensor(world, algorithm):
    _, messages = crossed(world, "original", share="none", algorithm=algorithm)
    assert names(messages) == set()
    assert max(map(len, messages)) < 200


def test_scaffold_sends_a_control_variate_beside_each_shared_tensor(world):
    _, messages = crossed(world, "pfedpara", algorithm="scaffold")
    shared = {"fc1.weight.x1", "fc1.weight.y1", "fc2.weight"} | BIASES
    assert names(messages) == shared | {f"control/{name}" for name in shared}


PRECISIONS = ("float32", "float16", "bfloat16", "int8")
KEPT_BACK = [("pfedpara", "all"), ("pfedpara", "fedper"), ("fedpara", "fedper"), ("pfedpara", "all but fc1")]


@pytest.mark.parametrize(
    ("scheme", "share", "algorithm", "precision"),
    [
        (*kept, algorithm, PRECISIONS[i % 4])
        for i, (kept, algorithm) in enumerate(product(KEPT_BACK, algorithms.names()))
    ],
)
def test_no_private_name_is_in_any_message(world, scheme, share, algorithm, precision):
    session, messages = crossed(world, scheme, share, algorithm, fp.Link(precision, precision))
    program = session.program
    assert program.private
    for message in messages:
        for private in program.private:
            assert private.encode() not in message
    assert sorted([*program.shared, *program.private]) == sorted(program.parameters)


def test_a_client_cannot_send_a_private_factor(world):
    """Even a custom algorithm cannot send one."""
    plain = world.algorithm()
    name = "fc1.weight.x2"

    def smuggle(x, y, down, client, steps, eta):
        return {"extra": {name: torch.zeros(1)}}, {}

    algorithm = algorithms.Algorithm(**{**vars(plain), "finish": smuggle})
    session = world.session(world.model("pfedpara"), algorithm)
    engine = world.engine("sequential", session, InMemory())
    with pytest.raises(PrivacyError, match=r"fc1\.weight\.x2"):
        list(run_rounds(session, engine, Schedule(1, 6, 1, world.federation.size), personal=False))


@pytest.mark.parametrize("link", [fp.Link(up="float16"), fp.Link(up="int8"), fp.Link("float32", "float16")])
def test_a_lossy_uplink_carries_the_change(world, link):
    """FedPAQ: few bits resolve y - x better than y. The server adds the change to its x."""
    session = world.session(world.model(), link=link)
    seen = world.engine("sequential", session, InMemory())
    (result,) = run_rounds(session, seen, Schedule(1, 6, 1, world.federation.size), personal=False)
    _, sent = decode(seen.down[0])
    _, up = decode(seen.up[0][0].message)
    exact = world.session(world.model(), link=fp.Link(down=link.down))
    wide = world.engine("sequential", exact, InMemory())
    list(run_rounds(exact, wide, Schedule(1, 6, 1, world.federation.size), personal=False))
    _, y = decode(wide.up[0][0].message)
    for name, tensor in result.progress.x.items():
        moved, x = tensor - session.program.initial[name], sent[name]
        arrived = up[name] - x if link.up == "float32" else up[name]
        torch.testing.assert_close(moved, arrived, rtol=0, atol=1e-7)
        step = float((y[name] - x).abs().max())
        worst = {"float32": 1e-7, "float16": 1e-3 * step, "int8": step / 127}[link.up]
        assert float((moved - (y[name] - x)).abs().max()) <= worst + 1e-7


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "feddyn", "fedadam", "fedyogi", "fedadagrad"])
@pytest.mark.parametrize("down", ["int8", "bfloat16"])
def test_downlink_rounding_is_not_mistaken_for_client_progress(world, algorithm, down):
    """Clients that do not move leave the server's model unchanged, even if the downlink rounds it."""
    still = world.algorithm(algorithm, lr=1e-12)
    run = world.simulate(world.model(), still, rounds=4, link=fp.Link(down=down))
    for name, x in run.session.program.initial.items():
        assert float((run.progress.x[name] - x).abs().max()) < 1e-6


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8"])
def test_every_link_sends_running_statistics_exactly(world, precision, engine):
    """Rounded to 8 bits, a small variance could become negative, which turns the model into NaN."""

    def network():
        layers = (nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 10))
        return nn.Sequential(*layers)

    link = fp.Link(up=precision, down=precision)
    session = world.session(world.model(network=network), world.algorithm(batch_size=6), link=link)
    seen = world.engine(engine, session, InMemory())
    *_, last = run_rounds(session, seen, Schedule(3, 6, 3, world.federation.size), personal=False)
    _, sent = decode(seen.down[-1], session.exact)
    *_, before = run_rounds(
        session,
        world.engine(engine, session, InMemory()),
        Schedule(2, 6, 3, world.federation.size),
        personal=False,
    )
    for name in ("3.running_mean", "3.running_var"):
        assert torch.equal(sent[name], before.progress.buffers[name])
    assert float(last.progress.buffers["3.running_var"].min()) >= 0
    assert math.isfinite(last.loss)


class Idle:
    """Clients that send back what they received: a round's bytes without training."""

    name, why = "idle", "sizes only"

    def __init__(self, session: Session) -> None:
        self.session = session

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool):
        model, down = self.session.read_down(message, round)
        trained = Trained({name: model[name] for name in self.session.program.parameters}, {}, 0.0, 1)
        for client in clients:
            reply, _ = reply_of(
                Start(self.session, model, down),
                [trained],
                self.session.first_memory(model),
                round=round,
                client=client,
                examples=1,
            )
            yield reply

    def commit(self, round, clients):
        pass

    def evaluate(self, state):
        return None


@pytest.mark.parametrize(
    ("gamma", "link", "megabytes"),
    [
        (None, fp.Link(), 122.0),
        (None, fp.Link(up="float16"), 91.5),
        (0.5, fp.Link(), 46.35),
        (0.5, fp.Link(up="float16"), 34.77),
    ],
)
def test_vgg16_sends_the_papers_bytes_per_client_and_round(gamma, link, megabytes):
    with torch.device("meta"):  # no need to draw 15 million numbers
        model = models.vgg16(classes=10)
    model = model.to_empty(device="cpu")
    for tensor in model.parameters():
        torch.nn.init.zeros_(tensor)
    if gamma is not None:
        fp.factorize(model, fp.FedPara(gamma=gamma), where=models.convolutions)
    session = Session(make_program(model), algorithms.fedavg(), link, seed=0)
    (result,) = run_rounds(session, Idle(session), Schedule(1, 1, 1, lambda client: 1), personal=False)
    assert not result.refused
    assert (result.bytes_up + result.bytes_down) / 1e6 == pytest.approx(megabytes, rel=0.001)


def test_the_server_cannot_send_a_private_factor(world):
    plain = world.algorithm()
    extra = {"extra": {"fc1.weight.x2": torch.zeros(1)}}
    algorithm = algorithms.Algorithm(**{**vars(plain), "broadcast": lambda server: extra})
    session = world.session(world.model("pfedpara"), algorithm)
    engine = world.engine("sequential", session, InMemory())
    with pytest.raises(PrivacyError, match=r"fc1\.weight\.x2"):
        list(run_rounds(session, engine, Schedule(1, 6, 1, world.federation.size), personal=False))
    assert engine.down == []


def test_the_server_rounds_int8_with_new_draws_in_every_round(world):
    """If all rounds shared one draw, its bias would never average out."""
    session = world.session(world.model(), link=fp.Link(down="int8"))
    start = initial_progress(session)
    first, second = (broadcast(session, start, round)[1]["fc1.weight"] for round in (1, 2))
    assert not torch.equal(first, second)


def test_int8_rounds_with_new_draws_for_every_client_and_round(world):
    session = world.session(world.model(), link=fp.Link(up="int8"))
    model = {name: session.program.initial[name] for name in session.program.shared}
    trained = Trained({name: t + 0.01 * torch.randn_like(t) for name, t in model.items()}, {}, 0.0, 1)
    start, memory = Start(session, model, {}), session.first_memory(model)

    def sent(client, round):
        reply, _ = reply_of(start, [trained], memory, round=round, client=client, examples=1)
        return decode(reply.message)[1]["fc1.weight"]

    assert not torch.equal(sent(0, 1), sent(1, 1))
    assert not torch.equal(sent(0, 1), sent(0, 2))


def test_the_digest_of_two_messages_distinguishes_sessions(world):
    """The server checks nodes by it. It covers names, types and shapes of both messages, and the method."""
    wider = world.model(network=lambda: models.mlp(64, hidden=33, classes=10))
    told = {digest(world.session(model)) for model in (world.model(), world.model("fedpara"), wider)}
    others = (world.algorithm("fedprox"), world.algorithm("scaffold"))
    told |= {digest(world.session(world.model(), algorithm)) for algorithm in others}
    down = algorithms.Algorithm(
        **{**vars(world.algorithm()), "broadcast": lambda _: {"c": {"a": torch.ones(1)}}}
    )
    told.add(digest(world.session(world.model(), down)))
    assert len(told) == 6
    assert digest(world.session(world.model())) in told


def test_a_control_variate_uses_the_learning_rate_of_its_round(world):
    """c_i = (x - y) / (K eta_t), eta_3 = 0.1 / 4"""
    session = world.session(world.model(), world.algorithm("scaffold", lr=0.1, lr_decay=0.5))
    model = {name: session.program.initial[name] for name in session.program.shared}
    trained = Trained({name: t + 0.01 for name, t in model.items()}, {}, 0.0, 2)
    down = {"control": {name: torch.zeros_like(t) for name, t in model.items()}}
    start = Start(session, model, down)
    _, kept = reply_of(start, [trained], session.first_memory(model), round=3, client=0, examples=1)
    for tensor in kept["control"].values():
        torch.testing.assert_close(tensor, torch.full_like(tensor, -0.2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["private", ""])
def test_a_sent_variable_cannot_have_a_reserved_name(world, name):
    """These names stand for the private part and for the model."""
    sent = {name: {"fc1.bias": torch.zeros(32)}}
    algorithm = algorithms.Algorithm(**{**vars(world.algorithm()), "finish": lambda *given: (sent, {})})
    with pytest.raises(ConfigError, match="which is reserved"):
        world.simulate(world.model(), algorithm)
