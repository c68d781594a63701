"""The composition functions: right values, right gradients, full rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

import fedpara as fp
from fedpara.parameterization import write

SCHEMES = [
    fp.FedPara(gamma=0.5),
    fp.FedPara(gamma=0.5, nonlinearity="tanh"),
    fp.FedPara(gamma=0.5, conv="reshape"),
    fp.PFedPara(gamma=0.5),
    fp.PFedPara(gamma=0.5, nonlinearity="tanh"),
    fp.LowRank(gamma=0.5),
    fp.LowRank(ratio=0.6, conv="reshape"),
]
SHAPES = [(6, 8), (8, 6, 3), (6, 7, 3, 2), (5, 6, 2, 1, 3)]


def draw(form, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=dtype) for s in form.factors.values()]


def by_definition(form, factors):
    """Prop. 1 and 3 as the paper writes them, in NumPy: mode products, one index at a time."""
    each = 3 if form.is_kernel else 2
    arrays = [f.numpy() for f in factors]
    inner = []
    for i in range(0, len(arrays), each):
        if each == 3:
            x, y, t = arrays[i : i + 3]
            w = np.tensordot(y, np.tensordot(x, t, (1, 0)), (1, 1)).swapaxes(0, 1)
        else:
            w = (arrays[i] @ arrays[i + 1].T).reshape(form.shape)
        inner.append(np.tanh(w) if form.scheme.nonlinearity else w)
    if form.scheme.name == "lowrank":
        return inner[0]
    return inner[0] * (inner[1] + (form.scheme.name == "pfedpara"))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compose_is_the_definition(scheme, shape):
    form = write(scheme, shape)
    factors = draw(form)
    w = form.compose(factors)
    assert w.shape == shape
    np.testing.assert_allclose(w.numpy(), by_definition(form, factors), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients(scheme, shape):
    form = write(scheme, shape)
    factors = [f.requires_grad_() for f in draw(form)]
    assert gradcheck(lambda *f: form.compose(f), factors)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_kernel_in_either_layout(scheme):
    form = write(scheme, (8, 6, 3, 3))
    factors = draw(form)
    contiguous, last = form.compose(factors), replace(form, channels_last=True).compose(factors)
    assert contiguous.is_contiguous()
    if form.is_kernel:
        assert last.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(last, contiguous, rtol=1e-12, atol=1e-12)
    assert gradcheck(
        lambda *f: replace(form, channels_last=True).compose(f), [f.requires_grad_() for f in factors]
    )


def test_what_a_factorized_convolution_returns_can_still_be_viewed():
    layer = fp.factorize(nn.Conv2d(8, 8, 3, padding=1), fp.FedPara(rank=2))
    assert layer(torch.randn(2, 8, 4, 4)).view(2, -1).shape == (2, 128)


def test_a_thousand_draws_of_rank_10_have_full_rank_100():
    """Appendix A: 100 x 100 from four 100 x 10 Gaussian factors."""
    form = write(fp.FedPara(rank=10), (100, 100))
    generator = torch.Generator().manual_seed(0)
    shapes = form.factors.values()
    factors = [torch.randn(1000, *s, generator=generator, dtype=torch.float64) for s in shapes]
    w = torch.vmap(lambda *f: form.compose(f))(*factors)
    assert torch.linalg.matrix_rank(w).eq(100).all()


@pytest.mark.parametrize("scheme", [fp.FedPara(rank=4), fp.FedPara(rank=4, conv="reshape")], ids=str)
def test_the_unfolded_kernel_reaches_full_rank(scheme):
    form = write(scheme, (16, 16, 3, 3))
    w = form.compose(draw(form))
    assert torch.linalg.matrix_rank(w.flatten(1)) == 16


def test_output_factor_gradients_of_prop_3_are_right_where_pefts_are_not():
    """PEFT's hand-written backward of the same composition, on the same factors, against finite differences."""
    loha = pytest.importorskip("peft.tuners.loha.layer", reason="needs the peft extra")
    form = write(fp.FedPara(rank=3), (7, 6, 3, 3))
    x1, y1, t1, x2, y2, t2 = (f.requires_grad_() for f in draw(form))
    weights = torch.randn(form.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def ours(x):
        return (form.compose([x, y1, t1, x2, y2, t2]) * weights).sum()

    def theirs(x):
        w = loha.HadaWeightCP.apply(t1, x.T, y1.T, t2, x2.T, y2.T, torch.tensor(1.0, dtype=torch.float64))
        return (w * weights).sum()

    assert torch.allclose(ours(x1), theirs(x1))
    exact = _differences(ours, x1.detach())
    error = {
        name: float((torch.autograd.grad(f(x1), x1)[0] - exact).norm() / exact.norm())
        for name, f in (("ours", ours), ("theirs", theirs))
    }
    assert error["ours"] < 1e-7
    assert error["theirs"] > 0.5


def _differences(f, x, h=1e-5):
    result = torch.zeros_like(x)
    for index in np.ndindex(*x.shape):
        step = torch.zeros_like(x)
        step[index] = h
        with torch.no_grad():
            result[index] = (f(x + step) - f(x - step)) / (2 * h)
    return result
