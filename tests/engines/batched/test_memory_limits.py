"""Limited device memory: fewer lanes, states that wait on the device or move to the host, updates that stay."""

import logging

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.algorithms import Local
from fedpara.engines.batched.engine import Batched
from fedpara.engines.batched.round_plan import typical_shape
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import make_program
from fedpara.engines.progress import Schedule
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.session import Session
from fedpara.engines.transfer import fetch, move, stack_on
from fedpara.errors import RunError


class Small(Batched):
    """An engine on a device with memory for two lanes."""

    room = 2

    def _tick(self, *given):
        if self.lanes > self.room:
            raise torch.OutOfMemoryError("no room")
        return super()._tick(*given)


def rounds_of(engine, session, clients, cohort):
    return list(run_rounds(session, engine, Schedule(2, clients, cohort, engine.data.size), personal=False))


def test_a_cohort_larger_than_memory_trains_in_fewer_lanes_to_the_same_model(digits, caplog):
    train, test = digits
    federation = fp.FederatedData(train, data.iid(train.targets, 8, 0))
    task = fp.Task(models.mlp(64, 24, 10), test=test)
    session = Session(make_program(task.model), algorithms.fedavg(lr=0.1, batch_size=8), fp.Link(), 0)
    caplog.set_level(logging.INFO, "fedpara")
    few = Small(session, task, federation, InMemory(), cohorts=Cohorts(0, len(federation), 5))
    whole = Batched(session, task, federation, InMemory(), cohorts=Cohorts(0, len(federation), 5))
    a, b = (rounds_of(engine, session, 8, 5)[-1].progress.x for engine in (few, whole))
    assert (whole.lanes, few.lanes) == (5, 2)
    assert "out of memory with 5 lanes: at most 2 train at a time" in few.why
    assert "at most 2 train at a time" in caplog.text
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("algorithm", ["fedavg", "ditto"])
def test_a_cohort_larger_than_the_lanes_trains_completely_if_memory_runs_out(digits, algorithm):
    train, test = digits
    federation = fp.FederatedData(train, data.iid(train.targets, 8, 0))
    task = fp.Task(models.mlp(64, 24, 10), test=test)
    method = algorithms.build(algorithm, Local(lr=0.1, batch_size=8))
    session = Session(make_program(task.model), method, fp.Link(), 0)
    cohorts = Cohorts(0, len(federation), 7)
    shape = typical_shape(session, federation, cohorts, 4)
    few, whole = (
        kind(session, task, federation, InMemory(), cohorts=cohorts, shape=shape) for kind in (Small, Batched)
    )
    (first, last), (_, expected) = (rounds_of(engine, session, 8, 7) for engine in (few, whole))
    assert (whole.lanes, few.lanes) == (4, 2)
    assert not first.refused
    for name, tensor in expected.progress.x.items():
        assert torch.allclose(last.progress.x[name], tensor, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "ditto"])
@pytest.mark.parametrize("scheme", [None, fp.PFedPara(gamma=0.3)])
def test_moving_states_to_the_host_when_clients_end_gives_the_same_bits(
    digits, monkeypatch, caplog, algorithm, scheme
):
    """Clients of different sizes share lanes and have memories."""
    train, test = digits
    model = models.mlp(64, 24, 10)
    if scheme is not None:
        fp.factorize(model, scheme)
    federation = fp.FederatedData(train, data.dirichlet(train.targets, 8, 0.5, 0))
    task = fp.Task(model, test=test)
    method = algorithms.build(algorithm, Local(lr=0.05, batch_size=8))
    session = Session(make_program(model), method, fp.Link(), 0)
    caplog.set_level(logging.INFO, "fedpara")
    shape = typical_shape(session, federation, Cohorts(0, len(federation), 6), 3)
    roomy = Batched(
        session, task, federation, InMemory(), cohorts=Cohorts(0, len(federation), 6), shape=shape, wait=True
    )
    monkeypatch.setattr("fedpara.engines.batched.budget.memory_of", lambda device: 1e5)
    narrow = Batched(
        session, task, federation, InMemory(), cohorts=Cohorts(0, len(federation), 6), shape=shape, wait=True
    )
    assert (roomy.waits, narrow.waits, narrow.stays) == (True, False, False)
    a, b = (rounds_of(engine, session, 8, 6)[-1].progress for engine in (roomy, narrow))
    assert "each state moves to the host when its client ends" in narrow.why
    assert "moves to the host" in caplog.text
    assert "the host" not in roomy.why
    assert (a.bytes_up, a.bytes_down) == (b.bytes_up, b.bytes_down)
    for name in a.x:
        assert torch.equal(a.x[name], b.x[name]), name


def test_frozen_tensors_take_no_memory_per_client(digits, monkeypatch):
    train, _ = digits
    model = models.mlp(64, 512, 10)
    federation = fp.FederatedData(train, data.iid(train.targets, 4, 0))

    def engine():
        session = Session(make_program(model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
        return Batched(
            session, fp.Task(model), federation, InMemory(), cohorts=Cohorts(0, len(federation), 4), wait=True
        )

    monkeypatch.setattr(
        "fedpara.engines.batched.budget.memory_of", lambda device: 2 * 4 * 3 * 4 * (512 * 10 + 10)
    )
    assert not engine().waits
    next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).requires_grad_(False)
    assert engine().waits


def test_out_of_memory_with_one_lane_is_retried_without_waiting_states(digits):
    class Full(Batched):
        def _trained(self, *event):
            if self.waits:
                raise torch.OutOfMemoryError("no room for the cohort")
            return super()._trained(*event)

    train, _ = digits
    federation = fp.FederatedData(train, data.iid(train.targets, 4, 0))
    task = fp.Task(models.mlp(64, 24, 10))
    session = Session(make_program(task.model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
    shape = typical_shape(session, federation, Cohorts(0, len(federation), 2), 1)
    engines = [
        kind(
            session,
            task,
            federation,
            InMemory(),
            cohorts=Cohorts(0, len(federation), 2),
            shape=shape,
            wait=True,
        )
        for kind in (Full, Batched)
    ]
    a, b = (rounds_of(engine, session, 4, 2)[-1].progress.x for engine in engines)
    assert engines[0].notes == [
        "out of memory with 1 lanes: at most 1 train at a time, and each state moves to the host when its client ends"
    ]
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_one_client_too_large_for_memory_ends_the_run_with_advice(digits):
    train, _ = digits
    federation = fp.FederatedData(train, data.iid(train.targets, 4, 0))
    task = fp.Task(models.mlp(64, 24, 10))
    session = Session(make_program(task.model), algorithms.fedavg(lr=0.1), fp.Link(), 0)
    engine = Small(session, task, federation, InMemory(), cohorts=Cohorts(0, len(federation), 2))
    engine.room = 0
    with pytest.raises(RunError, match=r"a single client does not fit .* Use a smaller batch"):
        rounds_of(engine, session, 4, 2)


def test_states_move_to_the_device_and_back_unchanged():
    state = {"b": torch.randn(2, 3), "a": torch.tensor(4), "c": torch.randn(5).double(), "e": torch.empty(0)}
    host = torch.device("cpu")
    stacked = stack_on([state, {name: tensor + 1 for name, tensor in state.items()}], host)
    assert {name: tensor.shape for name, tensor in stacked.items()} == {
        n: (2, *t.shape) for n, t in state.items()
    }
    back = fetch(move(stacked, host))
    assert [list(client) for client in back] == [list(state)] * 2
    for name, tensor in state.items():
        assert torch.equal(back[0][name], tensor)
        assert torch.equal(back[1][name], tensor + 1)


@pytest.mark.parametrize(
    ("algorithm", "scheme", "link"),
    [
        ("fedavg", None, fp.Link()),
        ("fedadam", None, fp.Link()),
        ("fedprox", None, fp.Link()),
        ("scaffold", None, fp.Link()),
        ("fednova", None, fp.Link()),
        ("fedavg", fp.PFedPara(gamma=0.3), fp.Link()),
        ("fedavg", None, fp.Link(up="int4(feedback=True)", down="bfloat16")),
    ],
)
def test_updates_of_every_link_and_algorithm_stay_on_the_device(digits, algorithm, scheme, link):
    train, test = digits
    model = models.mlp(64, 24, 10)
    if scheme is not None:
        fp.factorize(model, scheme)
    session = Session(make_program(model), algorithms.build(algorithm, Local()), link, 0)
    federation = fp.FederatedData(train, data.iid(train.targets, 8, 0))
    task = fp.Task(model, test=test)
    cohorts = Cohorts(0, len(federation), 4)
    assert Batched(session, task, federation, InMemory(), cohorts=cohorts, device="cpu", wait=True).stays
