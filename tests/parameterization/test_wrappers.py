"""A factorized model under torch.compile, other parametrizations and wrappers."""

import os
import shutil
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fedpara as fp
from fedpara.parameterization import forms

TANH = fp.FedPara(gamma=0.5, nonlinearity="tanh")


def network(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
    return fp.factorize(model, scheme, force=True, init="calibrated")


def images():
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("scheme", [TANH, fp.PFedPara(gamma=0.5)], ids=lambda s: s.name)
@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_a_graph_break(scheme):
    model, x = network(scheme), images()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), rtol=1e-5, atol=1e-6)
    compiled(x).square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6), name
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.allclose(compiled(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore:`torch.jit")  # inductor's own imports
def test_compiles_with_inductor():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(16, 4))
    fp.factorize(model, fp.FedPara(rank=1, nonlinearity="tanh"), force=True)
    x = torch.randn(2, 2, 3, 3)
    compiled = torch.compile(model, fullgraph=True, options={"cpp.simdlen": 1})  # a third less C++ to compile
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-5)


def test_torchs_cache_composes_once():
    model, x = network(TANH), images()
    with parametrize.cached():
        assert model[4].weight is model[4].weight
        cached = model(x)
    assert torch.equal(cached, model(x))


def test_a_parametrization_on_top_of_the_factors_is_merged_with_them():
    torch.manual_seed(0)
    layer = fp.factorize(nn.Linear(12, 10), TANH, force=True)
    parametrize.register_parametrization(layer, "weight", nn.Softsign())
    x = torch.randn(3, 12)
    merged = fp.merge(layer)
    assert type(merged) is nn.Linear
    assert torch.allclose(merged(x), layer(x), rtol=1e-5, atol=1e-6)


def test_weights_below_another_parametrization_can_be_factorized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 12)))
    fp.factorize(model, fp.FedPara(rank=2), lambda n, m, p: p == "original1")
    assert "0.parametrizations.weight.original1.x1" in model.state_dict()
    x, copy = torch.randn(3, 16), deepcopy(model)
    merged = fp.merge(model)
    for other in (copy, merged):
        assert torch.allclose(other(x), model(x), rtol=1e-5, atol=1e-6)
    assert set(merged.state_dict()) == {
        "0.bias",
        "0.parametrizations.weight.original0",
        "0.parametrizations.weight.original1",
    }


def test_a_custom_recurrent_class_with_factors_only_in_its_children():
    class WithHead(nn.LSTM):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.head = nn.Linear(12, 12)

    model = fp.factorize(WithHead(), fp.FedPara(rank=2), lambda n, m, p: n == "head" and p == "weight")
    assert set(forms(deepcopy(model))) == {"head.weight"}
    assert torch.allclose(fp.merge(model).head.weight, model.head.weight)


def test_a_wrapper_that_forwards_attributes():
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.gate = nn.Parameter(torch.randn(12, 16))

        def __getattr__(self, name: str):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return self.inner(x) * nn.functional.linear(x, self.gate)

    torch.manual_seed(0)
    inner = fp.factorize(nn.Sequential(nn.Linear(16, 12)), fp.FedPara(rank=2))
    model, x = Wrapper(inner), torch.randn(3, 16)
    assert set(forms(model)) == {"inner.0.weight"}
    assert set(model.state_dict()) == {
        "gate",
        "inner.0.bias",
        *(f"inner.0.weight.{f}" for f in ("x1", "y1", "x2", "y2")),
    }
    model.load_state_dict(deepcopy(model).state_dict())
    merged = fp.merge(model)
    assert torch.allclose(merged(x), model(x), rtol=1e-5, atol=1e-6)
    fp.factorize(merged, fp.FedPara(rank=2))
    assert set(forms(merged)) == {"gate", "inner.0.weight"}
    assert not forms(fp.merge(merged))
