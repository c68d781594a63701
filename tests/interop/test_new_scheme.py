"""A new scheme is one class: every part of the library that handles schemes works with it."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara.interop import read_state, save_state
from fedpara.parameterization import SCHEMES, Scheme, fit_errors, forms, make_scheme
from fedpara.parameterization.schemes import ConvStyle, register


@pytest.fixture
def scheme() -> Iterator[Scheme]:
    @register
    @dataclass(frozen=True)
    class Sum(Scheme):
        """W = W1 + scale W2"""

        scale: float = 0.5
        conv: ConvStyle = "tensor"

        name = "sum"
        title = "sum"
        degree = 1

        def rank_bound(self, r):
            return 2 * r

        def join(self, inner):
            return inner[0] + self.scale * inner[1]

        def split(self, w):
            return [[w, 0.0]]

    yield make_scheme("sum", rank=3, scale=0.25)
    del SCHEMES["sum"]


@pytest.mark.parametrize("init", [None, "fit"])
def test_a_new_scheme_is_factorized_fitted_and_merged(scheme: Scheme, init: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(12, 16, 3), nn.Flatten(), nn.Linear(16, 20))
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    fp.factorize(model, scheme, init=init)
    assert set(forms(model)) == {"0.weight", "2.weight"}
    merged = fp.merge(model).state_dict()
    for name, error in fit_errors(model).items():
        assert float((merged[name] - dense[name]).norm() / dense[name].norm()) == pytest.approx(
            error, abs=1e-4
        )
        assert error < 0.9
    x = torch.randn(2, 12, 3, 3)
    torch.testing.assert_close(fp.merge(model)(x), model(x))


def test_a_new_scheme_is_saved_with_its_options(scheme: Scheme, tmp_path) -> None:
    model = fp.factorize(nn.Sequential(nn.Linear(16, 20)), scheme)
    save_state(tmp_path / "state", model.state_dict(), forms(model))
    saved = read_state(tmp_path / "state")
    assert saved.forms == forms(model)
    assert torch.equal(saved.merged()["0.weight"], model[0].weight)
