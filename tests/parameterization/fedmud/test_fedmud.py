"""Golden: FedMUD's block-Kronecker weights and aggregation-aware sums, against NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.errors import SchemeError
from fedpara.interop import read_state, save_state
from fedpara.parameterization import (
    AwareKronecker,
    AwareLowRank,
    Kronecker,
    fit,
    fit_errors,
    forms,
    make_scheme,
    write,
)
from fedpara.parameterization.initialise import adapter, calibrated, unchanged


@pytest.mark.parametrize("shape", [(12, 10), (6, 5, 3, 3)])
def test_golden_blocks_are_kronecker_products_in_a_row(shape):
    form = write(Kronecker(rank=3), shape)
    torch.manual_seed(0)
    a, b = (torch.randn(sides, dtype=torch.float64) for sides in form.factors.values())
    flat = np.concatenate([np.kron(x, y).reshape(-1) for x, y in zip(a.numpy(), b.numpy(), strict=True)])
    expected = flat[: np.prod(shape)].reshape(shape)
    np.testing.assert_allclose(form.compose([a, b]).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("shape", "ratio", "blocks", "side"),
    [
        ((512, 512, 3, 3), 1 / 32, 576, 8),  # z^4 = 4096 = mn / k exactly
        ((256, 256), 1 / 32, 16, 8),
        ((256, 64), 0.1, 27, 5),  # k = ceil(40.96), z = ceil(4.47); ceil(26.2) blocks hold all entries
        ((10, 8), 0.01, 1, 3),
    ],
)
def test_golden_the_ratio_chooses_blocks_and_their_side(shape, ratio, blocks, side):
    form = write(Kronecker(ratio=ratio), shape)
    assert form.rank == blocks
    assert form.factors == {"x": (blocks, side, side), "y": (blocks, side, side)}
    assert form.parameters == 2 * blocks * side**2
    assert blocks * side**4 >= form.dense_parameters > blocks * (side - 1) ** 4
    assert form.max_rank == min(shape[0], form.dense_parameters // shape[0])


def test_a_gamma_gives_the_size_of_fedpara_on_the_reshaped_weight():
    ours, theirs = (write(scheme, (256, 256)) for scheme in (Kronecker(gamma=0.1), fp.FedPara(gamma=0.1)))
    assert 0.6 * theirs.parameters < ours.parameters <= theirs.parameters


def test_too_many_blocks_are_refused():
    with pytest.raises(SchemeError, match="rank 200 gives a 16 x 12 weight 192 blocks, with which it grows"):
        fp.factorize(nn.Linear(12, 16), Kronecker(rank=200))
    with pytest.raises(SchemeError, match="lowrank-aad takes 'reshape' only"):
        AwareLowRank(rank=2, conv="tensor")


SCHEMES = (Kronecker(ratio=0.25), AwareLowRank(ratio=0.25), AwareKronecker(ratio=0.25))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_weights_start_with_hes_deviation(scheme):
    form = write(scheme, (48, 40))
    w = form.compose(calibrated(form, torch.Generator().manual_seed(0)))
    assert float(w.square().mean().sqrt()) == pytest.approx((2 / 40) ** 0.5, rel=1e-2)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_an_adapter_starts_at_0_and_its_first_step_is_as_long_as_loras(scheme):
    """The first step changes W by -eta P G, where P has the eigenvalues 0 and about 1/3 (LoRA's: n var(Y))."""

    def projected(some, seed):
        form = write(some, (48, 48))
        start = unchanged(form, adapter(form, torch.Generator().manual_seed(seed)))
        assert not form.compose(start).any()
        factors = [
            f.clone().requires_grad_(name not in some.fixed)
            for name, f in zip(form.factors, start, strict=True)
        ]
        g = torch.randn(48, 48, generator=torch.Generator().manual_seed(9))
        (form.compose(factors) * g).sum().backward()
        steps = [f.grad if f.grad is not None else torch.zeros_like(f) for f in factors]
        change = form.compose([f.detach() + 1e-3 * s for f, s in zip(factors, steps, strict=True)]) / 1e-3
        share = sum(s.numel() for s, f in zip(steps, factors, strict=True) if s.any()) / 48**2
        return float(change.square().mean()) / share

    ours, lora = (
        np.mean([projected(some, seed) for seed in range(5)]) for some in (scheme, fp.LowRank(ratio=0.25))
    )
    assert 0.5 < ours / lora < 2


def test_averaging_is_exact_where_one_factor_of_each_product_is_fixed():
    for scheme, exact in (
        (AwareLowRank(rank=2), True),
        (AwareKronecker(rank=3), True),
        (Kronecker(rank=3), False),
    ):
        form = write(scheme, (12, 10))
        torch.manual_seed(0)
        first = [torch.randn(sides, dtype=torch.float64) for sides in form.factors.values()]
        clients = [
            [
                f if name in scheme.fixed else f + torch.randn_like(f)
                for name, f in zip(form.factors, first, strict=True)
            ]
            for _ in range(4)
        ]
        mean = [torch.stack(each).mean(0) for each in zip(*clients, strict=True)]
        gap = form.compose(mean) - torch.stack([form.compose(client) for client in clients]).mean(0)
        assert (float(gap.abs().max()) < 1e-12) is exact


def test_fitting_finds_known_blocks():
    form = write(Kronecker(rank=4), (18, 18))  # 4 * 3^4 numbers
    torch.manual_seed(0)
    w = form.compose([torch.randn(sides) for sides in form.factors.values()])
    factors, error = fit(form, w, steps=2)
    assert error < 1e-5
    torch.testing.assert_close(form.compose(factors), w, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_a_saved_state_and_a_config_name_the_scheme(scheme, tmp_path):
    torch.manual_seed(0)
    model = fp.factorize(
        nn.Sequential(nn.Conv2d(4, 16, 3), nn.Flatten(), nn.Linear(16, 20)), scheme, init="fit"
    )
    assert all(0 < error < 1 for error in fit_errors(model).values())
    save_state(tmp_path / "state", model.state_dict(), forms(model))
    saved = read_state(tmp_path / "state")
    assert {w: replace(f, scheme=scheme) for w, f in saved.forms.items()} == forms(model)
    torch.testing.assert_close(saved.merged()["0.weight"], model[0].weight)
    assert make_scheme(scheme.name, ratio=0.25) == scheme
