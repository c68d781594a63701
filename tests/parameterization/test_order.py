"""Properties: ordered factors compose to the same weight, and their first columns are its best part."""

import numpy as np
import pytest
import torch

import fedpara as fp
from fedpara.parameterization import write
from fedpara.parameterization.order import ordered


@pytest.mark.parametrize(
    "scheme", [fp.FedPara(gamma=0.3), fp.FedPara(gamma=0.3, nonlinearity="tanh"), fp.LowRank(gamma=0.3)]
)
@pytest.mark.parametrize("shape", [(20, 30), (24, 16, 3, 3), (48, 3, 3, 3), (16, 12, 5)])
def test_the_weight_stays(scheme, shape):
    """Also where the rank exceeds a side, as with three input channels."""
    form = write(scheme, shape)
    torch.manual_seed(0)
    factors = [torch.randn(size) for size in form.factors.values()]
    made = ordered(form, factors)
    assert [tuple(f.shape) for f in made] == list(form.factors.values())
    torch.testing.assert_close(form.compose(made), form.compose(factors), rtol=1e-4, atol=1e-3)
    again = ordered(form, made)
    torch.testing.assert_close([f.abs() for f in again], [f.abs() for f in made], rtol=1e-3, atol=1e-3)


def test_golden_the_first_columns_are_the_truncated_svd():
    form = write(fp.FedPara(gamma=0.5), (30, 40))
    torch.manual_seed(0)
    factors = [torch.randn(size) for size in form.factors.values()]
    x, y = ordered(form, factors)[:2]
    u, s, vh = np.linalg.svd((factors[0].double() @ factors[1].double().T).numpy())
    for r in range(1, form.rank + 1):
        best = (u[:, :r] * s[:r]) @ vh[:r]
        np.testing.assert_allclose((x[:, :r] @ y[:, :r].T).numpy(), best, rtol=1e-3, atol=1e-3)
