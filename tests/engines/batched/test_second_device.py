"""Updates, memories and messages that stay on a second device give the same bits as on the host."""

from dataclasses import replace

import pytest
import torch
from second_device import CUDA, Elsewhere, SecondDevice

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.algorithms import Local
from fedpara.engines.batched.engine import Batched
from fedpara.engines.batched.examples import CohortExamples
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.rng import torch_rng, uplink_rng
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import Session
from fedpara.wire.encoders.draws import uniform

CLIENTS = 4
LINKS = (
    *(
        "float32",
        "float16",
        "int8",
        "int4",
        "ternary",
        "sign",
        "topk(0.1)",
        "stc(0.1)",
        "eden(bits=2)",
        "powersgd",
        "grid(0.5)",
    ),
    *("int8(feedback=True)", "int4(feedback=True)"),
)


class Untrained(Batched):
    """Adds the same random numbers to the lanes in place of a step."""

    def _tick(self, plan, lane_state, of):
        states = (lane_state.parameters, lane_state.buffers)
        tensors = [t for state in states for t in state.values() if t.is_floating_point()]
        torch.manual_seed(of.training)
        noise = [(1e-2 * torch.randn(t.shape)).abs().to(t.device) for t in tensors]
        return lambda: torch._foreach_add_(tensors, noise)


def rounds_of(session, task, federation, elsewhere, max_norm=100.0):
    size = Cohorts(0, CLIENTS, CLIENTS)
    engine = Untrained(session, task, federation, InMemory(), cohorts=size, device="cpu", wait=True)
    if elsewhere:
        engine.device, engine.on_gpu = CUDA, True
        engine.examples = CohortExamples(session, federation, "none", CUDA, size)
    assert engine.stays
    schedule = Schedule(2, CLIENTS, CLIENTS, federation.size, max_norm=max_norm)
    rounds = list(run_rounds(session, engine, schedule, personal=False))
    return rounds[-1], [engine.memory.get(client) for client in range(CLIENTS)]


def same(digits, monkeypatch, algorithm, link, scheme=None, model=None, max_norm=100.0):
    train, _ = digits
    # Without threads: the second device exists in one thread only.
    monkeypatch.setattr(
        "fedpara.engines.batched.draw_ahead.map_in_threads", lambda f, items: list(map(f, items))
    )
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    torch.manual_seed(0)
    model = model or models.mlp(64, 24, 10)
    if scheme is not None:
        fp.factorize(model, scheme, force=True)
    session = Session(make_program(model), algorithm, link, 0)
    federation = fp.FederatedData(train, data.iid(train.targets, CLIENTS, 0))
    found = [rounds_of(session, fp.Task(model), federation, False, max_norm)]
    with SecondDevice():
        found.append(rounds_of(session, fp.Task(model), federation, True, max_norm))
    (a, kept), (b, also) = found
    assert not a.refused
    assert (a.progress.bytes_up, a.progress.bytes_down) == (b.progress.bytes_up, b.progress.bytes_down)
    pairs = [(a.progress.x, b.progress.x), (a.progress.buffers, b.progress.buffers)]
    pairs += [(a.progress.server[v], b.progress.server[v]) for v in a.progress.server]
    for mine, theirs in zip(kept, also, strict=True):
        assert (mine is None) == (theirs is None)
        pairs += [(mine[v], theirs[v]) for v in mine or {}]
    for first, second in pairs:
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert not isinstance(second[name], Elsewhere), name
            assert torch.equal(tensor, second[name]), name


def with_buffers():
    layers = torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam", "fednova", "scaffold", "feddyn"])
@pytest.mark.parametrize("model", [with_buffers, lambda: models.mlp(64, 24, 10)], ids=["buffers", "none"])
def test_updates_as_they_lie(digits, monkeypatch, name, model):
    """Without a bound on their norm, the updates of some algorithms are summed as rows."""
    algorithm = algorithms.build(name, Local(lr=0.1, batch_size=500))
    same(digits, monkeypatch, algorithm, fp.Link(), model=model(), max_norm=None)


@pytest.mark.parametrize("model", [with_buffers, lambda: models.mlp(64, 24, 10)], ids=["buffers", "none"])
def test_rows_have_the_mean_of_the_updates(digits, model):
    """A bound on the norm, however large, makes the server read every tensor by itself."""
    train, _ = digits
    model, algorithm = model(), algorithms.fedavg(lr=0.1, batch_size=500)
    session = Session(make_program(model), algorithm, fp.Link(), 0)
    federation = fp.FederatedData(train, data.dirichlet(train.targets, CLIENTS, 1.0, 0))
    assert session.sends_trained
    (a, _), (b, _) = (rounds_of(session, fp.Task(model), federation, False, m) for m in (None, 1e9))
    assert a.progress.bytes_up == b.progress.bytes_up
    for name, tensor in (a.progress.x | a.progress.buffers).items():
        assert torch.allclose(tensor, (b.progress.x | b.progress.buffers)[name], rtol=1e-6), name


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_rows_and_variables_as_from_every_tensor_by_itself(digits, name):
    train, _ = digits
    model, algorithm = models.mlp(64, 24, 10), algorithms.build(name, Local(lr=0.1, batch_size=500))
    session = Session(make_program(model), algorithm, fp.Link(), 0)
    federation = fp.FederatedData(train, data.dirichlet(train.targets, CLIENTS, 1.0, 0))
    assert session.sends_trained
    found = [rounds_of(session, fp.Task(model), federation, False, m) for m in (None, 1e9)]
    (a, kept), (b, also) = found
    assert a.progress.bytes_up == b.progress.bytes_up
    pairs = [
        (a.progress.x, b.progress.x),
        *((a.progress.server[v], b.progress.server[v]) for v in b.progress.server),
    ]
    pairs += [(mine[v], theirs[v]) for mine, theirs in zip(kept, also, strict=True) for v in theirs]
    for first, second in pairs:
        assert first.keys() == second.keys()
        assert all(torch.allclose(first[n], t, rtol=1e-6, atol=1e-8) for n, t in second.items())


@pytest.mark.parametrize(
    ("changed", "link", "scheme"),
    [
        ({"momentum": 0.5, "keep_optimizer": True}, "float32", None),
        ({}, "int8", None),
        ({}, "float32", fp.PFedPara(gamma=0.5)),
    ],
    ids=["optimizer", "link", "private"],
)
def test_what_is_more_than_rows_is_not_sent_as_rows(changed, link, scheme):
    model = models.mlp(64, 24, 10)
    if scheme is not None:
        fp.factorize(model, scheme, force=True)
    algorithm = algorithms.build("feddyn", Local(lr=0.1, batch_size=500, **changed))
    assert not Session(make_program(model), algorithm, fp.Link(up=link), 0).sends_trained


def test_a_finish_of_a_users_algorithm_gets_tensors_by_name():
    base = algorithms.scaffold(lr=0.1)
    own = replace(base, finish=lambda *given: base.finish(*given))
    program = make_program(models.mlp(64, 24, 10))
    assert Session(program, base, fp.Link(), 0).sends_trained
    assert not Session(program, own, fp.Link(), 0).sends_trained
    assert not Session(make_program(with_buffers()), base, fp.Link(), 0).sends_trained


@pytest.mark.parametrize("link", LINKS)
def test_every_link(digits, monkeypatch, link):
    algorithm = algorithms.fedavg(lr=0.1, batch_size=500)
    same(digits, monkeypatch, algorithm, fp.Link(up=link, down=link), fp.FedPara(gamma=0.5))


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm(digits, monkeypatch, name):
    algorithm = algorithms.build(name, Local(lr=0.1, batch_size=500))
    same(digits, monkeypatch, algorithm, fp.Link(up="int8(feedback=True)"), fp.PFedPara(gamma=0.5))


def test_a_kept_optimizer_and_buffers(digits, monkeypatch):
    local = Local(lr=0.1, batch_size=500, momentum=0.5, keep_optimizer=True)
    link = fp.Link(up="int8", down="int4")
    same(digits, monkeypatch, algorithms.build("fedavg", local), link, model=with_buffers())


def test_the_second_device_refuses_to_mix():
    with SecondDevice():
        here = torch.ones(3)
        there = here.to("cuda")
        assert there.device == CUDA
        assert (there + 1).device == CUDA
        assert there.cpu().device.type == "cpu"
        with pytest.raises(RuntimeError, match="mixes"):
            here + there


def test_numbers_drawn_ahead_are_the_same():
    drawn, plain = uplink_rng(3, 5, 7), torch_rng(3, "link-up", 5, 7)
    drawn.draw(1000, pinned=False)
    for _ in range(2):  # the second call draws
        assert torch.equal(
            uniform(1000, drawn, torch.device("cpu")), uniform(1000, plain, torch.device("cpu"))
        )


def test_an_algorithm_for_the_host_gets_its_updates_there(digits):
    train, _ = digits
    model, fedavg = models.mlp(64, 24, 10), algorithms.fedavg(lr=0.1)
    own = replace(fedavg, aggregate=lambda *given: fedavg.aggregate(*given))
    federation = fp.FederatedData(train, data.iid(train.targets, CLIENTS, 0))
    for algorithm, stays in ((fedavg, True), (own, False)):
        session = Session(make_program(model), algorithm, fp.Link(up="int8"), 0)
        cohorts = Cohorts(0, CLIENTS, CLIENTS)
        engine = Batched(
            session, fp.Task(model), federation, InMemory(), cohorts=cohorts, device="cpu", wait=True
        )
        assert engine.stays is stays
