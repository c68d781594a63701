"""Golden and properties: factors refitted to a composed weight, from factors near it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.parameterization import FedPara, LowRank, PFedPara, write
from fedpara.parameterization.composed import Blocks, gauss_newton
from fedpara.parameterization.composed.gauss_newton import Fit
from fedpara.parameterization.fedmud.aware import AwareLowRank
from fedpara.parameterization.fedmud.kronecker import Kronecker

FORMS = {
    "matrix": write(FedPara(rank=2), (9, 11)),
    "kernel": write(FedPara(rank=2), (6, 5, 3, 3)),
    "low rank": write(LowRank(rank=3), (9, 11)),
    "low-rank kernel": write(LowRank(rank=2), (6, 5, 3, 3)),
    "tanh": write(FedPara(rank=2, nonlinearity="tanh"), (9, 11)),
    "personal": write(PFedPara(rank=2), (9, 11)),
    "Kronecker": write(Kronecker(ratio=0.3), (8, 8)),
}


def refit(compose, w, start, **options):
    return Fit(compose, start)(w, start, **options)


def drawn(form, seed, weights=1, size=None, around=None):
    """Small enough by default that tanh is not saturated."""
    size = size or (0.5 if form.scheme.nonlinearity else 1.0)
    generator = torch.Generator().manual_seed(seed)
    around = around or [torch.zeros(weights, *shape, dtype=torch.float64) for shape in form.factors.values()]
    return [t + size * torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in around]


def composed(form, factors):
    return torch.stack([form.compose(one) for one in zip(*factors, strict=True)])


def distances(form, w, factors):
    return (w - composed(form, factors)).flatten(1).norm(dim=1)


@pytest.mark.parametrize("kind", FORMS)
def test_a_product_near_the_start_is_found_to_rounding(kind):
    form = FORMS[kind]
    start = drawn(form, 0, weights=3)
    w = composed(form, drawn(form, 1, size=0.01, around=start))
    found = refit(form.compose, w, start, enough=0)
    rounding = 1e-4 if kind == "tanh" else 1e-6  # of float32; tanh has directions that hardly change W
    assert (distances(form, w, found) <= rounding * w.flatten(1).norm(dim=1)).all()


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(0, 2**31),
    st.sampled_from([1e-4, 0.1, 1.0, 30.0]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_no_refit_is_farther_than_its_start(kind, seed, size, dtype):
    form = FORMS[kind]
    start = [t.to(dtype) for t in drawn(form, seed, weights=2)]
    w = composed(form, start)
    w = w + size * torch.randn(w.shape, generator=torch.Generator().manual_seed(seed + 1), dtype=dtype)
    before, after = distances(form, w, start), distances(form, w, refit(form.compose, w, start))
    assert (after <= before * (1 + 1e-6)).all()
    assert (after < 0.999 * before).any()


@pytest.mark.parametrize("kind", FORMS)
def test_a_weight_comes_as_near_alone_as_in_a_batch(kind):
    form = FORMS[kind]
    start = drawn(form, 0, weights=3)
    w = composed(form, drawn(form, 1, size=0.01, around=start))
    w = w + 0.001 * torch.randn(w.shape, generator=torch.Generator().manual_seed(2), dtype=w.dtype)
    together = distances(form, w, refit(form.compose, w, start))
    for i in range(3):
        one = [t[i : i + 1] for t in start]
        alone = distances(form, w[i : i + 1], refit(form.compose, w[i : i + 1], one))
        assert abs(alone - together[i]) <= 0.02 * distances(form, w[i : i + 1], one), (
            "others may iterate longer"
        )


@pytest.mark.parametrize("kind", ["matrix", "kernel", "low rank"])
def test_the_scale_of_the_start_changes_no_weight(kind):
    """(c X, Y / c) is another start with the same weight."""
    form = FORMS[kind]
    start = drawn(form, 0)
    w = composed(form, drawn(form, 1, size=0.1, around=start))
    rescaled = [t.clone() for t in start]
    rescaled[0] *= 50
    rescaled[1] /= 50
    a, b = (composed(form, refit(form.compose, w, factors)) for factors in (start, rescaled))
    assert (a - b).norm() <= 1e-8 * (a - composed(form, start)).norm()


def test_golden_one_step_against_numpy(monkeypatch):
    """The first step is the least-squares solution of least norm for the scaled Jacobian of (X1 Y1^T) * (X2 Y2^T)."""
    form = FORMS["matrix"]
    start = drawn(form, 0)
    w = composed(form, drawn(form, 1, size=0.001, around=start))
    w = w + 0.01 * torch.randn(w.shape, generator=torch.Generator().manual_seed(2), dtype=w.dtype)
    x1, y1, x2, y2 = (t[0].numpy() for t in start)
    w1, w2 = x1 @ y1.T, x2 @ y2.T
    rows, columns = np.eye(9), np.eye(11)
    jacobian = np.concatenate(
        [
            np.einsum("mi,na,mn->mnia", rows, y1, w2).reshape(99, -1),
            np.einsum("nj,ma,mn->mnja", columns, x1, w2).reshape(99, -1),
            np.einsum("mi,na,mn->mnia", rows, y2, w1).reshape(99, -1),
            np.einsum("nj,ma,mn->mnja", columns, x2, w1).reshape(99, -1),
        ],
        1,
    )
    scale = np.concatenate([np.full(t.size, np.sqrt((t**2).mean())) for t in (x1, y1, x2, y2)])
    r = w[0].numpy().ravel() - (w1 * w2).ravel()
    expected = scale * np.linalg.lstsq(jacobian * scale, r, rcond=1e-10)[0]
    monkeypatch.setattr(gauss_newton, "STEPS", 1)
    monkeypatch.setattr(gauss_newton, "ITERATIONS", 80)
    monkeypatch.setattr(gauss_newton, "STALLED", 1 - 1e-15)
    found = refit(form.compose, w, start, enough=0)
    moved = torch.cat([(a - b).flatten() for a, b in zip(found, start, strict=True)]).numpy()
    np.testing.assert_allclose(moved, expected, atol=1e-6 * np.abs(expected).max())


def test_a_weight_that_cannot_be_reached_keeps_its_factors():
    form = FORMS["kernel"]
    start = drawn(form, 0, weights=3)
    w = composed(form, start)
    w[1] = torch.inf
    w[2] += 0.1
    found = refit(form.compose, w, start)
    for before, after in zip(start, found, strict=True):
        assert torch.equal(before[:2], after[:2])
        assert not torch.equal(before[2], after[2])


def test_factors_of_zeros_move():
    """An adapter starts with X = 0, where W does not depend on Y."""
    form = FORMS["low rank"]
    x, y = drawn(form, 0)
    w = composed(form, [0.1 * x, y])
    found = refit(form.compose, w, [torch.zeros_like(x), y], enough=0)
    assert distances(form, w, found) <= 1e-9 * w.norm()
    torch.testing.assert_close(found[1], y)


def test_blocks_of_one_form_are_refitted_together_and_fixed_factors_apart():
    one, other = write(FedPara(rank=2), (9, 11)), write(FedPara(rank=2), (11, 9))
    aware = write(AwareLowRank(rank=2), (9, 11))
    forms = {"a": one, "b": other, "c": one, "d": aware, "e": aware}
    drawn_of = {name: drawn(form, i) for i, (name, form) in enumerate(forms.items())}
    every = {f"{n}.{k}": t[0] for n in forms for k, t in zip(forms[n].factors, drawn_of[n], strict=True)}
    fixed = {n: t for n, t in every.items() if n.rpartition(".")[2] in AwareLowRank.fixed and n[0] in "de"}
    x = {n: t for n, t in every.items() if n not in fixed} | {"bias": torch.zeros(3, dtype=torch.float64)}
    blocks = Blocks(forms, fixed)
    generator = torch.Generator().manual_seed(9)
    near = {n: t + 0.01 * torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in x.items()}
    weights = {block.name: block.of(near) for block in blocks.over(x)}
    found = blocks.refit(x, weights)
    assert {*found} == {*x}
    assert torch.equal(found["bias"], near["bias"])
    for block in blocks.over(x):
        moved = (weights[block.name] - block.of(x)).norm()
        assert (weights[block.name] - block.of(found)).norm() <= 0.011 * moved
    kinds = [block.kind for block in blocks.over(x)]
    assert kinds[0] == kinds[2] != kinds[1]
    assert kinds[3] != kinds[4]


class Replays:
    """A recorder whose replays run the step again."""

    def warm_up(self, step):
        step()

    def record(self, step):
        return step


@pytest.mark.parametrize("kind", FORMS)
def test_recorded_iterations_find_the_same_factors(kind):
    form = FORMS[kind]
    start = drawn(form, 0, weights=3)
    w = composed(form, drawn(form, 1, size=0.1, around=start))
    plain, recorded = Fit(form.compose, start), Fit(form.compose, start)
    f = torch.cat([factor.flatten(1) for factor in start], 1)
    recorded._search = gauss_newton._Search(recorded.composed, f, w.flatten(1))
    recorded._search._record(Replays())
    for _ in range(2):  # the second time, the tensors hold what the first left
        for one, other in zip(plain(w, start), recorded(w, start), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", FORMS)
def test_a_gpu_finds_the_same_factors_and_repeats_them(kind):
    form = FORMS[kind]
    start = drawn(form, 0, weights=3)
    w = composed(form, drawn(form, 1, size=0.1, around=start))
    there = [factor.cuda() for factor in start]
    fit = Fit(form.compose, there)
    first, second = (fit(w.cuda(), there) for _ in range(2))
    for one, other, expected in zip(first, second, refit(form.compose, w, start), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one.cpu(), expected, rtol=1e-6, atol=1e-6)
