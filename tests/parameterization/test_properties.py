"""Properties that hold for every shape, rank and draw."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedpara as fp
from fedpara.parameterization import fit, forms, ranks, write
from fedpara.parameterization.fit import truncation_error

sides = st.integers(1, 600)
kernels = st.none() | st.integers(1, 27)
small = st.integers(2, 24)


@given(sides, sides)
def test_r_min_squared_reaches_full_rank(m, n):
    r = ranks.r_min(m, n)
    assert r**2 >= min(m, n) > (r - 1) ** 2


@given(sides, sides, kernels)
def test_r_max_is_the_largest_that_is_no_bigger_than_dense(m, n, k):
    dense = m * n * (k or 1)
    r = ranks.r_max(m, n, k)
    assert ranks.parameters(m, n, k, r) <= dense < ranks.parameters(m, n, k, r + 1)


@given(sides, sides, kernels, st.floats(0, 1))
def test_gamma_interpolates_between_the_two(m, n, k, gamma):
    low, high = ranks.r_min(m, n), ranks.r_max(m, n, k)
    assert 1 <= ranks.rank_for_gamma(m, n, k, gamma) <= max(1, low, high)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 24), st.integers(2, 24), st.floats(0, 1), st.integers(0, 2**31))
def test_rank_never_exceeds_r1_r2(m, n, gamma, seed):
    generator = torch.Generator().manual_seed(seed)
    for scheme in (fp.FedPara(gamma=gamma), fp.PFedPara(gamma=gamma)):
        form = write(scheme, (m, n))
        factors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in form.factors.values()]
        w = form.compose(factors)
        assert torch.linalg.matrix_rank(w) <= form.max_rank


@settings(deadline=None, max_examples=12)
@given(st.tuples(small, small), st.floats(0.3, 1.0), st.integers(0, 2**31))
def test_fit_is_never_worse_than_the_truncated_svd(shape, gamma, seed):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for scheme in (fp.FedPara(gamma=gamma), fp.PFedPara(gamma=gamma), fp.LowRank(gamma=gamma)):
        form = write(scheme, shape)
        assert fit(form, w, steps=40)[1] <= truncation_error(form, w) + 1e-5


@settings(deadline=None, max_examples=3)
@given(st.integers(8, 16), st.integers(8, 16), st.integers(0, 2**31))
def test_factorizing_by_fit_and_merging_comes_back_near(m, n, seed):
    """The merged weight differs by the reported error, which is below the truncated SVD's."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(n, m)
    w = layer.weight.detach().clone()
    fp.factorize(layer, fp.FedPara(gamma=1.0), init="fit", force=True)
    merged = fp.merge(layer)
    error = float((merged.weight.detach() - w).norm() / w.norm())
    (form,) = forms(layer).values()
    assert abs(error - fp.parameterization.fit_errors(layer)["weight"]) < 1e-4
    assert error <= truncation_error(form, w) + 1e-5
