"""Contract: a corrected step, of the worker and of stacked lanes, has the gradient of a float64 reference."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import fedpara as fp
from fedpara import algorithms
from fedpara.algorithms import Local
from fedpara.engines.batched.step import LANES_OF_A_STEP, one_step
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program
from fedpara.parameterization import corrected_grad

ETA = 0.1
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(2, 6, 4, 5, 5, generator=GENERATOR, dtype=torch.float64)  # [lane, example, ...]
LABELS = torch.randint(0, 3, (2, 6), generator=GENERATOR)
SCHEMES = {
    "Prop. 3": fp.FedPara(gamma=0.5),
    "Prop. 1, reshaped, tanh": fp.FedPara(gamma=0.5, conv="reshape", nonlinearity="tanh"),
}


def program(scheme, norm=lambda: nn.GroupNorm(2, 8)):
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(72, 6), nn.ReLU(), nn.Linear(6, 3)
    return make_program(fp.factorize(nn.Sequential(*layers).double(), scheme, force=True))


def local(norm):
    return Local(lr=ETA, batch_size=6, jacobian=2.0, jacobian_norm=norm)


def expected(one, lane, norm):
    plain = one.plain().train()

    def loss(state):
        buffers = {name: one.initial[name].clone() for name in one.buffers}
        scores = functional_call(plain, {**state, **buffers}, (IMAGES[lane],))
        return nn.functional.cross_entropy(scores, LABELS[lane])

    return corrected_grad(loss, one.start(one.parameters), one.forms, eta=ETA, lambda_=2.0, norm=norm)


def stacked_step(one, algorithm):
    """(stepped, slots, buffers, losses) of both lanes"""
    objective = fp.Task(one.model).objective
    step = one_step(one.plain().train(), one.forms, objective, algorithm, "float32", one, False)
    parameters, buffers = (
        {name: torch.stack([tensor] * 2) for name, tensor in one.start(names).items()}
        for names in (one.parameters, one.buffers)
    )
    x, rates = one.start(one.shared), torch.full((2,), ETA, dtype=torch.float64)
    sizes, seeds = torch.tensor([6, 6]), torch.tensor([0, 0])
    return vmap(step, in_dims=LANES_OF_A_STEP, randomness="different")(
        parameters, {}, buffers, {}, IMAGES, LABELS, sizes, seeds, rates, x, {}, {}, {}
    )


@pytest.mark.parametrize("norm", ["plain", "squared", "network"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_the_gradient_of_a_corrected_step(scheme, norm):
    one = program(scheme)
    stepped, _, _, losses = stacked_step(one, algorithms.build("fedavg", local(norm)))
    worker = Worker(one, fp.Task(one.model))
    for lane in range(2):
        gradient, value = expected(one, lane, norm)
        found, loss = worker.gradient(IMAGES[lane], LABELS[lane], local(norm), ETA)
        assert torch.allclose(loss, value)
        assert torch.allclose(losses[lane], value)
        for name, tensor in gradient.items():
            assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-12), name
            assert torch.allclose(stepped[name][lane], one.initial[name] - ETA * tensor), name


def test_the_network_is_evaluated_once_and_its_statistics_are_kept():
    one = program(SCHEMES["Prop. 3"], lambda: nn.BatchNorm2d(8).double())
    corrected, plain = (Worker(one, fp.Task(one.model)) for _ in range(2))
    calls = Counter()
    corrected.model[1].register_forward_hook(lambda *_: calls.update(["norm"]))
    corrected.gradient(IMAGES[0], LABELS[0], local("plain"), ETA)
    plain.gradient(IMAGES[0], LABELS[0], Local(lr=ETA), ETA)
    _, _, buffers, _ = stacked_step(one, algorithms.build("fedavg", local("plain")))
    assert calls["norm"] == 1
    for name in one.buffers:
        assert not torch.equal(plain.buffers[name], one.initial[name])
        assert torch.allclose(corrected.buffers[name], plain.buffers[name])
        assert torch.allclose(buffers[name][0], plain.buffers[name])
