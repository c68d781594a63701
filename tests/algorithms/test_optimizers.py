"""Local optimizers equal torch.optim's, and clip_by_norm equals clip_grad_norm_, as functions of states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap

from fedpara.algorithms import Optimizer, adam, adamw, clip_by_norm, sgd
from fedpara.state import State, norm

SHAPES = {"weight": (3, 4), "bias": (4,)}
PAIRS = {
    "sgd": (sgd(), lambda p: torch.optim.SGD(p)),
    "sgd decay": (sgd(weight_decay=0.02), lambda p: torch.optim.SGD(p, weight_decay=0.02)),
    "momentum": (sgd(momentum=0.9), lambda p: torch.optim.SGD(p, momentum=0.9)),
    "momentum decay": (
        sgd(momentum=0.9, weight_decay=0.02),
        lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.02),
    ),
    "adam": (adam(), lambda p: torch.optim.Adam(p)),
    "adam options": (
        adam(betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
    "adamw": (adamw(), lambda p: torch.optim.AdamW(p)),
    "adamw options": (
        adamw(betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
}
every = pytest.mark.parametrize("optimizer", [pair[0] for pair in PAIRS.values()], ids=list(PAIRS))


def drawn(seed: int, *stack: int, scale: float = 1.0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: scale * torch.randn((*stack, *shape), generator=generator, dtype=torch.float64)
        for n, shape in SHAPES.items()
    }


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_step_is_torchs(name: str, tensor_lr: bool) -> None:
    optimizer, theirs = PAIRS[name]
    y = drawn(0)
    parameters = {n: nn.Parameter(t.clone()) for n, t in y.items()}
    reference, slots = theirs(list(parameters.values())), optimizer.init(y)
    for step in range(6):
        lr, gradient = 0.3 * 0.8**step, drawn(step + 1)
        for n, parameter in parameters.items():
            parameter.grad = gradient[n].clone()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        rate = torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr
        y, slots = optimizer.step(y, gradient, slots, rate)
        for n, parameter in parameters.items():
            torch.testing.assert_close(y[n], parameter.detach(), rtol=0, atol=1e-13)


def after_a_step(optimizer: Optimizer, *stack: int) -> tuple[State, State, dict[str, State]]:
    """y, a gradient and slots that are not zero."""
    init = optimizer.init
    slots = vmap(init)(drawn(0, *stack)) if stack else init(drawn(0))
    step = vmap(optimizer.step) if stack else optimizer.step
    rate = torch.full(stack, 0.1, dtype=torch.float64)
    y, slots = step(drawn(0, *stack), drawn(9, *stack), slots, rate)
    return y, drawn(1, *stack), slots


@every
def test_a_step_does_not_modify_its_inputs(optimizer: Optimizer) -> None:
    y, gradient, slots = after_a_step(optimizer)
    before = [{n: t.clone() for n, t in state.items()} for state in (y, gradient, *slots.values())]
    _, fresh = optimizer.step(y, gradient, slots, 0.1)
    for state, old in zip((y, gradient, *slots.values()), before, strict=True):
        assert all(torch.equal(state[n], old[n]) for n in old)
    gradient["weight"].zero_()  # an engine may reuse its gradient buffers
    again = optimizer.step(y, drawn(1), slots, 0.1)[1]
    assert all(torch.equal(fresh[slot][n], t) for slot, state in again.items() for n, t in state.items())


@every
def test_a_rate_of_zero_leaves_the_model(optimizer: Optimizer) -> None:
    y, gradient, slots = after_a_step(optimizer)
    stepped, _ = optimizer.step(y, gradient, slots, torch.tensor(0.0))
    assert all(torch.equal(stepped[n], y[n]) for n in SHAPES)


@every
def test_a_tensor_learning_rate_keeps_the_type_of_y(optimizer: Optimizer) -> None:
    for dtype in (torch.float32, torch.float64):
        y = {"w": torch.ones(3, dtype=dtype)}
        for rate in (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)):
            assert optimizer.step(y, y, optimizer.init(y), rate)[0]["w"].dtype == dtype


@every
def test_vmap_over_clients_equals_a_loop(optimizer: Optimizer) -> None:
    """Each lane with its own learning rate and its own norm."""
    y, gradient, slots = after_a_step(optimizer, 3)
    rates = torch.tensor([0.1, 0.2, 0.0], dtype=torch.float64)
    stacked, kept = vmap(lambda y, g, s, lr: optimizer.step(y, clip_by_norm(g, 1.0), s, lr))(
        y, gradient, slots, rates
    )
    for i in range(3):
        mine = [{n: t[i] for n, t in state.items()} for state in (y, gradient)]
        own = {slot: {n: t[i] for n, t in state.items()} for slot, state in slots.items()}
        one, after = optimizer.step(mine[0], clip_by_norm(mine[1], 1.0), own, float(rates[i]))
        for n in SHAPES:
            torch.testing.assert_close(stacked[n][i], one[n], rtol=0, atol=1e-14)
        for slot, state in after.items():
            for n, tensor in state.items():
                torch.testing.assert_close(kept[slot][n][i], tensor, rtol=0, atol=1e-14)


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
