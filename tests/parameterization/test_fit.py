"""Factors fitted to a trained weight: how close they come, what a converted network keeps, and ordered factors."""

from dataclasses import dataclass
from statistics import median

import numpy as np
import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import data, models
from fedpara.errors import SchemeError
from fedpara.parameterization import fit, fit_errors, forms, write
from fedpara.parameterization.fit import truncation_error
from fedpara.parameterization.order import ordered

SCHEMES = [
    fp.FedPara(rank=3),
    fp.FedPara(rank=3, nonlinearity="tanh"),
    fp.FedPara(rank=3, conv="reshape"),
    fp.PFedPara(rank=3),
    fp.PFedPara(rank=3, nonlinearity="tanh"),
    fp.LowRank(rank=3),
]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.name}-{s.nonlinearity}-{s.conv}")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def product(form, seed: int) -> torch.Tensor:
    """A weight that factors of this form can make exactly."""
    generator = seeded(seed)
    return form.compose([torch.randn(s, generator=generator) for s in form.factors.values()])


def relative(form, factors, w) -> float:
    return float((form.compose(factors) - w).norm() / w.norm())


def svd_error(w: torch.Tensor, r: int) -> float:
    """||W - W_r|| / ||W|| of the truncated SVD, by its singular values."""
    s = torch.linalg.svdvals(w.flatten(1).double())
    return float(s[r:].norm() / s.norm())


def hosvd_error(w: torch.Tensor, r: int) -> float:
    """||W - P_X P_Y W|| / ||W||, P the projections on the leading r directions of the two channel unfoldings."""
    w = w.double()
    x = torch.linalg.svd(w.flatten(1), full_matrices=False)[0][:, :r]
    y = torch.linalg.svd(w.transpose(0, 1).flatten(1), full_matrices=False)[0][:, :r]
    projected = torch.einsum("oa,pa,ib,jb,pj...->oi...", x, x, y, y, w)
    return float((w - projected).norm() / w.norm())


def test_weights_that_are_products_are_fitted_far_better_than_by_a_truncated_svd():
    """The median of 20 draws of 64 x 64 with r = 8, after 40 of the 300 steps that conversion takes."""
    form = write(fp.FedPara(rank=8), (64, 64))
    weights = [product(form, seed) for seed in range(20)]
    ours = [fit(form, w, steps=40)[1] for w in weights]
    svd = [svd_error(w, 8) for w in weights]
    assert median(a / b for a, b in zip(ours, svd, strict=True)) < 0.55
    assert max(ours) < 0.4 < 0.55 < min(svd)


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (fp.FedPara(rank=4), (12, 12, 3, 3)),
        (fp.FedPara(rank=4, conv="reshape"), (12, 6, 3, 3)),
        (fp.FedPara(rank=4, nonlinearity="tanh"), (20, 24)),
        (fp.PFedPara(rank=4), (20, 24)),
    ],
    ids=str,
)
def test_products_of_the_other_forms(scheme, shape):
    form = write(scheme, shape)
    ratios = []
    for seed in range(2):
        w = product(form, seed)
        factors, error = fit(form, w, steps=60)
        assert relative(form, factors, w) == pytest.approx(error, abs=1e-4)
        ratios.append(error / truncation_error(form, w))
    assert median(ratios) < 0.65


@pytest.mark.parametrize("shape", [(20, 24), (8, 6, 3, 3)], ids=str)
def test_a_low_rank_weight_is_fitted_exactly(shape):
    form = write(fp.LowRank(rank=3), shape)
    assert fit(form, product(form, 0))[1] < 1e-5


@each_scheme
@pytest.mark.parametrize("shape", [(14, 18), (12, 10, 3), (10, 9, 3, 3), (8, 8, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("steps", [1, 30])
def test_never_worse_than_the_truncation(scheme, shape, steps):
    form = write(scheme, shape)
    w = 0.1 * torch.randn(shape, generator=seeded(1))
    factors, error = fit(form, w, steps=steps)
    assert relative(form, factors, w) == pytest.approx(error, abs=1e-5)
    assert error <= truncation_error(form, w) + 1e-6
    if form.scheme.nonlinearity is None:
        bound = (hosvd_error if form.is_kernel else svd_error)(w, form.rank)
        assert error <= bound + 1e-5
        assert truncation_error(form, w) == pytest.approx(bound, rel=1e-3)


@each_scheme
@pytest.mark.parametrize("scale", [1e-4, 0.05, 0.9])
def test_the_scale_of_the_weight_does_not_matter(scheme, scale):
    w = torch.randn(14, 18, generator=seeded(2)).clamp(-2, 2) / 2
    form = write(scheme, w.shape)
    factors, error = fit(form, scale * w, steps=30)
    assert relative(form, factors, scale * w) == pytest.approx(error, abs=1e-4)
    assert error < 0.75
    assert all(f.isfinite().all() for f in factors)


@pytest.mark.parametrize("scale", [1e-30, 1e21, 1e36])
@pytest.mark.parametrize("scheme", [fp.FedPara(rank=3), fp.PFedPara(rank=3), fp.LowRank(rank=3)])
def test_weights_whose_square_overflows_float32(scheme, scale):
    w = torch.randn(12, 12, generator=seeded(0))
    form = write(scheme, w.shape)
    factors, error = fit(form, w * scale)
    assert all(factor.isfinite().all() for factor in factors)
    composed = form.compose([factor.double() for factor in factors])
    target = w.double() * scale
    assert float((composed - target).norm() / target.norm()) == pytest.approx(error, rel=1e-2)


def test_a_weight_beyond_tanhs_range_reports_its_error():
    factors, error = fit(write(fp.FedPara(rank=3, nonlinearity="tanh"), (20, 20)), torch.full((20, 20), 1e30))
    assert all(factor.isfinite().all() for factor in factors)
    assert error == pytest.approx(1.0)


@dataclass(frozen=True)
class Shifted(fp.FedPara):
    """A custom scheme that does not scale with its factors."""

    def join(self, inner):
        return 3 + super().join(inner)


def test_a_custom_scheme_cannot_be_fitted():
    layer = nn.Linear(40, 40)
    before = layer.weight.clone()
    with pytest.raises(SchemeError, match=r"factors of Shifted.*cannot be fitted to a weight"):
        fp.factorize(layer, Shifted(rank=4), init="fit")
    assert torch.equal(layer.weight, before)


@each_scheme
def test_ranks_above_a_side_and_constant_weights(scheme):
    form = write(type(scheme)(gamma=1.0, conv=scheme.conv), (3, 20, 3, 3))
    assert fit(form, torch.randn(form.shape, generator=seeded(3)), steps=30)[1] < 1
    form = write(scheme, (14, 18))
    factors, error = fit(form, torch.zeros(form.shape), steps=5)
    assert error == 0
    assert form.compose(factors).eq(0).all()
    factors, error = fit(form, torch.full(form.shape, 0.5), steps=30)
    assert error < 1e-3


def test_the_result_is_reproducible_and_keeps_the_dtype():
    form = write(fp.FedPara(rank=3), (14, 18))
    w = torch.randn(form.shape, generator=seeded(4), dtype=torch.float64)
    before = torch.get_rng_state()
    one, two = fit(form, w, steps=20)[0], fit(form, w, steps=20)[0]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert {f.dtype for f in one} == {torch.float64}
    assert [tuple(f.shape) for f in one] == list(form.factors.values())


def test_factorize_reports_the_error_of_each_layer():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 8), nn.Linear(8, 4))
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    each = {"0": fp.LowRank(ratio=0.5), "2": fp.PFedPara(rank=2)}
    fp.factorize(model, each["0"], lambda n, m, p: p == "weight" and each.get(n, False), init="fit")
    errors = fit_errors(model)
    assert list(errors) == ["0.weight", "2.weight"] == list(forms(model))
    for name, error in errors.items():
        w = model.get_submodule(name[0]).weight.detach()
        assert float((w - dense[name]).norm() / dense[name].norm()) == pytest.approx(error, abs=1e-4)
        assert 0 < error < 1
    fresh = fp.factorize(nn.Linear(32, 8), fp.FedPara(gamma=0.3))
    assert fit_errors(fresh) == {}


def test_a_converted_digits_network_keeps_its_accuracy():
    """After conversion at gamma 0.5 and one epoch of fine-tuning, accuracy is within a point of the original."""
    train, test = data.load("digits")
    x, y = data.normalise(train.inputs, train.mean, train.std), train.targets
    x_test = data.normalise(test.inputs, test.mean, test.std)

    order = seeded(0)

    def epochs(model, count, lr, momentum=0.0):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        for _ in range(count):
            for batch in torch.randperm(len(x), generator=order).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()

    def accuracy(model):
        with torch.no_grad():
            return 100 * float((model(x_test).argmax(1) == test.targets).float().mean())

    torch.manual_seed(0)
    model = models.mlp(inputs=64, hidden=64, classes=10)
    epochs(model, 8, lr=0.05, momentum=0.9)
    before = accuracy(model)
    assert before > 96
    dense = sum(p.numel() for p in model.parameters())
    fp.factorize(model, fp.FedPara(gamma=0.5), init="fit")
    assert sum(p.numel() for p in model.parameters()) < dense
    assert set(fit_errors(model)) == {"fc1.weight", "fc2.weight"}
    epochs(model, 1, lr=0.01)
    assert accuracy(model) >= before - 1
    assert accuracy(fp.merge(model)) == pytest.approx(accuracy(model), abs=0.3)


@pytest.mark.parametrize(
    "scheme", [fp.FedPara(gamma=0.3), fp.FedPara(gamma=0.3, nonlinearity="tanh"), fp.LowRank(gamma=0.3)]
)
@pytest.mark.parametrize("shape", [(20, 30), (24, 16, 3, 3), (48, 3, 3, 3), (16, 12, 5)])
def test_ordered_factors_compose_to_the_same_weight(scheme, shape):
    """Also where the rank exceeds a side, as with three input channels."""
    form = write(scheme, shape)
    torch.manual_seed(0)
    factors = [torch.randn(size) for size in form.factors.values()]
    made = ordered(form, factors)
    assert [tuple(f.shape) for f in made] == list(form.factors.values())
    torch.testing.assert_close(form.compose(made), form.compose(factors), rtol=1e-4, atol=1e-3)
    again = ordered(form, made)
    torch.testing.assert_close([f.abs() for f in again], [f.abs() for f in made], rtol=1e-3, atol=1e-3)


def test_golden_the_first_ordered_columns_are_the_truncated_svd():
    form = write(fp.FedPara(gamma=0.5), (30, 40))
    torch.manual_seed(0)
    factors = [torch.randn(size) for size in form.factors.values()]
    x, y = ordered(form, factors)[:2]
    u, s, vh = np.linalg.svd((factors[0].double() @ factors[1].double().T).numpy())
    for r in range(1, form.rank + 1):
        best = (u[:, :r] * s[:r]) @ vh[:r]
        np.testing.assert_allclose((x[:, :r] @ y[:, :r].T).numpy(), best, rtol=1e-3, atol=1e-3)
