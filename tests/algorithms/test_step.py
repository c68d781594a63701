"""sgd_step equals torch.optim.SGD and clip_by_norm equals clip_grad_norm_, as functions of states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from fedpara.algorithms import Local, clip_by_norm, sgd_step
from fedpara.state import State, norm

SHAPES = {"weight": (3, 4), "bias": (4,)}


def drawn(seed: int, *stack: int, scale: float = 1.0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: scale * torch.randn((*stack, *shape), generator=generator, dtype=torch.float64)
        for n, shape in SHAPES.items()
    }


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_sgd_step_is_torch_sgd(momentum: float, weight_decay: float, tensor_lr: bool) -> None:
    local = Local(momentum=momentum, weight_decay=weight_decay)
    y, velocity = drawn(0), None
    parameters = {n: nn.Parameter(t.clone()) for n, t in y.items()}
    sgd = torch.optim.SGD(parameters.values(), lr=0.3, momentum=momentum, weight_decay=weight_decay)
    for step in range(6):
        lr = 0.3 * 0.8**step
        gradient = drawn(step + 1)
        for n, parameter in parameters.items():
            parameter.grad = gradient[n].clone()
        sgd.param_groups[0]["lr"] = lr
        sgd.step()
        rate = torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr
        y, velocity = sgd_step(y, gradient, velocity, rate, local)
        for n, parameter in parameters.items():
            torch.testing.assert_close(y[n], parameter.detach(), rtol=0, atol=1e-13)
    assert bool(velocity) is bool(momentum)


def test_no_velocity_equals_zero_velocity() -> None:
    local = Local(momentum=0.9)
    zeros = {n: torch.zeros_like(t) for n, t in drawn(0).items()}
    for start in (None, {}, zeros):
        y, velocity = sgd_step(drawn(0), drawn(1), start, 0.1, local)
        assert all(torch.equal(velocity[n], drawn(1)[n]) for n in SHAPES)
        assert all(torch.allclose(y[n], drawn(0)[n] - 0.1 * drawn(1)[n]) for n in SHAPES)


def test_sgd_step_does_not_modify_its_inputs() -> None:
    y, gradient, velocity = drawn(0), drawn(1), drawn(2)
    sgd_step(y, gradient, velocity, 0.1, Local(momentum=0.9, weight_decay=0.1))
    for state, seed in ((y, 0), (gradient, 1), (velocity, 2)):
        assert all(torch.equal(state[n], drawn(seed)[n]) for n in SHAPES)


def test_velocity_does_not_share_memory_with_the_gradient() -> None:
    """An engine may reuse its gradient buffers between steps."""
    gradient = drawn(1)
    _, velocity = sgd_step(drawn(0), gradient, None, 0.1, Local(momentum=0.9))
    gradient["weight"].zero_()
    assert torch.equal(velocity["weight"], drawn(1)["weight"])


def test_a_tensor_learning_rate_keeps_the_type_of_y() -> None:
    for dtype in (torch.float32, torch.float64):
        y = {"w": torch.ones(3, dtype=dtype)}
        for rate in (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)):
            assert sgd_step(y, y, None, rate, Local())[0]["w"].dtype == dtype


def test_vmap_over_clients_equals_a_loop() -> None:
    """Each lane with its own learning rate and its own norm."""
    local = Local(momentum=0.9, weight_decay=0.1)
    y, gradient, velocity = drawn(0, 3), drawn(1, 3), drawn(2, 3)
    rates = torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64)
    stacked, kept = vmap(lambda y, g, v, lr: sgd_step(y, clip_by_norm(g, 1.0), v, lr, local))(
        y, gradient, velocity, rates
    )
    for i in range(3):
        mine = [{n: t[i] for n, t in state.items()} for state in (y, gradient, velocity)]
        one, v = sgd_step(mine[0], clip_by_norm(mine[1], 1.0), mine[2], float(rates[i]), local)
        for n in SHAPES:
            torch.testing.assert_close(stacked[n][i], one[n], rtol=0, atol=1e-14)
            torch.testing.assert_close(kept[n][i], v[n], rtol=0, atol=1e-14)


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([1e-8, 1e-3, 1.0, 1e3, 1e8]),
    max_norm=st.floats(1e-3, 1e3),
)
def test_clip_is_torch_clip(seed: int, scale: float, max_norm: float) -> None:
    gradient = drawn(seed, scale=scale)
    parameters = [nn.Parameter(torch.zeros_like(t)) for t in gradient.values()]
    for parameter, g in zip(parameters, gradient.values(), strict=True):
        parameter.grad = g.clone()
    nn.utils.clip_grad_norm_(parameters, max_norm)
    clipped = clip_by_norm(gradient, max_norm)
    assert norm(clipped) <= max_norm * (1 + 1e-12)
    for parameter, n in zip(parameters, gradient, strict=True):
        torch.testing.assert_close(clipped[n], parameter.grad, rtol=1e-12, atol=0)


def test_clip_of_zero_is_zero() -> None:
    zeros = {n: torch.zeros(shape) for n, shape in SHAPES.items()}
    assert all(torch.equal(tensor, zeros[n]) for n, tensor in clip_by_norm(zeros, 1.0).items())


def test_clip_keeps_each_tensors_type() -> None:
    gradient = {"a": torch.ones(3), "b": torch.ones(3, dtype=torch.float64), "c": torch.ones(3).half()}
    clipped = clip_by_norm(gradient, 0.1)
    assert {n: t.dtype for n, t in clipped.items()} == {n: t.dtype for n, t in gradient.items()}
