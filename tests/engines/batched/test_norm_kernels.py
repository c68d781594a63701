"""The engine's GroupNorm equals torch's in values and gradients, also for stacked clients."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedpara.engines.batched.kernels.norm import LanesGroupNorm, use_lane_norms


def norms(affine=True):
    torch.manual_seed(0)
    theirs = nn.GroupNorm(4, 8, affine=affine)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours = use_lane_norms(deepcopy(theirs))
    assert isinstance(ours, LanesGroupNorm)
    return ours, theirs


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_values_and_gradients_equal_torchs(affine, shift):
    found = []
    for norm in norms(affine):
        x = (torch.randn(3, 8, 6, 5, generator=torch.Generator().manual_seed(1)) + shift).requires_grad_()
        y = norm(x)
        found.append((y, *torch.autograd.grad((y**3).sum(), [x, *norm.parameters()])))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 + 2e-3 * shift)


@pytest.mark.parametrize("ratio", [0.0, 1.0, 100.0, 1000.0])
def test_a_mean_far_above_the_deviation_loses_no_accuracy(ratio):
    """Compared with float64. E[x^2] - mean^2 would be off by a quarter at a ratio of 1,000."""
    ours, theirs = norms()
    x = torch.randn(3, 8, 16, 16, generator=torch.Generator().manual_seed(1)) + ratio
    exact = theirs.double()(x.double()).detach()
    y = ours(x).double().detach()
    assert float((y - exact).abs().max()) < 1e-5 + 2e-6 * ratio
    assert float((y.std() / exact.std() - 1).abs()) < 1e-4


def test_stacked_clients_have_the_same_gradients():
    ours, theirs = norms()
    state = {name: p.detach() + 0.1 * torch.randn(3, *p.shape) for name, p in theirs.named_parameters()}
    x = torch.randn(3, 2, 8, 4, 4)

    def step(norm):
        return vmap(grad(lambda s, x: functional_call(norm, s, (x,)).square().sum()))(state, x)

    for name, expected in step(theirs).items():
        torch.testing.assert_close(step(ours)[name], expected, rtol=1e-4, atol=1e-4)


def test_a_constant_image_stays_finite():
    ours, theirs = norms()
    x = torch.full((2, 8, 4, 4), 3.1).requires_grad_()
    y = ours(x)
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()
    torch.testing.assert_close(y, theirs(x), rtol=1e-3, atol=1e-1)


def test_other_shapes_and_float64_use_torchs_norm():
    ours, theirs = norms()
    for x in (torch.randn(3, 8), torch.randn(2, 8, 7)):
        assert torch.equal(ours(x), theirs(x))
    x = torch.randn(2, 8, 3, 3, dtype=torch.float64)
    assert torch.equal(ours.double()(x), theirs.double()(x))
