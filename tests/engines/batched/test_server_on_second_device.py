"""What the server computes from updates on a second device equals what it computes from updates on the host."""

import sys
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from second_device import CUDA, Elsewhere, SecondDevice
from torch.func import vmap

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.engines.batched.engine import Batched
from fedpara.engines.batched.examples import CohortExamples
from fedpara.parameterization.composed.blocks import Blocks
from fedpara.state import device_of

CLIENTS = 8
SETTINGS = {
    "gammas": {"gammas": "0.1, 0.5"},
    "error": {"aggregation_error": True},
    "refit": {"products": "refit"},
    "rotate": {"rotate": True},
    "recycle": {"recycle": 1},
    "grid": {"link": fp.Link(up="eden", down="grid(0.5)"), "cohort": 3, "rounds": 6},
    "signs": {"link": fp.Link(up="sign", down="sign"), "cohort": 3, "rounds": 4},
    "max_share": {"max_share": 0.2},
    "uniform": {"weights": "uniform"},
    "target": {"target": 0.99, "patience": 1},
    "private": {
        "privacy": fp.privacy.User(noise=0.5, clip=0.1),
        "privacy_seed": 1,
        "sampler": "poisson",
        "weights": "uniform",
    },
    "attack": {"attack": "sign-flip(2.0)", "hostile": 0.3},
    "alie": {"attack": "alie(1.5)", "hostile": 0.3, "robust": "median"},
    **{
        name: {"robust": name}
        for name in (
            *("auto", "median", "trimmed-mean", "multi-krum", "krum(0.2)", "rfa", "norm-clip", "flame"),
            *("centred-clip", "fltrust", "mean"),
        )
    },
}


class Untrained(Batched):
    """Adds random numbers of the round to the lanes in place of a step, on the host or on the second device."""

    elsewhere = False

    def __init__(self, session, task, federation, memory, *, cohorts, **given):
        super().__init__(session, task, federation, memory, cohorts=cohorts, wait=True, **given)
        if self.elsewhere:
            self.device, self.on_gpu = CUDA, True
            self.examples = CohortExamples(session, federation, "none", CUDA, cohorts)

    def _tick(self, plan, lane_state, of):
        tensors = list(lane_state.parameters.values())
        torch.manual_seed(of.training)
        noise = [(1e-2 * torch.randn(t.shape)).to(t.device) for t in tensors]
        return lambda: torch._foreach_add_(tensors, noise)


class AtOnce(ThreadPoolExecutor):
    def submit(self, function, *given):
        future = Future()
        future.set_result(function(*given))
        return future


def on_second_device(monkeypatch):
    """What the simulated device lacks: threads, tensors that pass through `vmap`, and graphs, which a refit records."""
    monkeypatch.setattr(
        "fedpara.engines.batched.draw_ahead.map_in_threads", lambda f, items: list(map(f, items))
    )
    monkeypatch.setattr("fedpara.engines.differences.ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    monkeypatch.setattr(sys.modules["fedpara.engines.simulate"], "Batched", Untrained)
    monkeypatch.setattr(Untrained, "elsewhere", True)
    refit = Blocks.refit

    def mapped(function):
        def run(*given):
            found = vmap(function)(*(t.as_subclass(torch.Tensor) for t in given))
            return found.as_subclass(Elsewhere) if any(isinstance(t, Elsewhere) for t in given) else found

        return run

    def refitted(blocks, x, weights):
        assert device_of([x]) == device_of([weights])
        found = refit(blocks, *({name: t.cpu() for name, t in state.items()} for state in (x, weights)))
        return {name: t.to(device_of([x])) for name, t in found.items()}

    monkeypatch.setattr("fedpara.parameterization.composed.blocks.vmap", mapped)
    monkeypatch.setattr(Blocks, "refit", refitted)


def run_of(digits, settings):
    train, test = digits
    torch.manual_seed(0)
    model = fp.factorize(models.mlp(64, 24, 10), fp.FedPara(gamma=0.5), force=True)
    federation = fp.FederatedData(train, data.iid(train.targets, CLIENTS, 0))
    return fp.simulate(
        fp.Task(model, test=test),
        federation,
        algorithms.fedavg(lr=0.1, batch_size=50),
        **{"rounds": 2, "cohort": CLIENTS, "engine": "batched", "device": "cpu", **settings},
    )


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_same_bits(digits, monkeypatch, settings):
    monkeypatch.setattr(sys.modules["fedpara.engines.simulate"], "Batched", Untrained)
    here = run_of(digits, settings)
    on_second_device(monkeypatch)
    with SecondDevice():
        there = run_of(digits, settings)
    assert here.bytes == there.bytes
    for name, tensor in here.state.items():
        assert not isinstance(there.state[name], Elsewhere), name
        assert torch.equal(tensor, there.state[name]), name
