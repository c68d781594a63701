"""Callers under autocast, in inference mode, with another default device or a compiled model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedpara as fp
from fedpara.parameterization import composed_once

SCHEME = fp.FedPara(gamma=0.3)


@pytest.fixture
def layer() -> nn.Linear:
    return fp.factorize(nn.Linear(40, 40), SCHEME)


def test_merge_under_autocast_keeps_the_type(layer: nn.Linear) -> None:
    expected = fp.merge(layer).weight
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fp.merge(layer).weight, expected)
        assert torch.is_autocast_enabled("cpu")


def test_factorize_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        layer = fp.factorize(nn.Linear(40, 40), SCHEME)
    assert {p.dtype for p in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("init", [None, "fit"])
def test_factors_made_in_inference_mode_can_be_trained(init: str | None) -> None:
    layer = nn.Linear(12, 12)
    with torch.inference_mode():
        fp.factorize(layer, SCHEME, init=init, force=True)
        plain = fp.merge(layer)
    for model in (layer, plain):
        model(torch.randn(3, 12)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())


def test_the_meta_device_as_the_default() -> None:
    layer = nn.Linear(40, 40)
    with torch.device("meta"):
        fp.factorize(layer, SCHEME)
        hollow = fp.factorize(nn.Linear(40, 40), SCHEME)
        other = fp.factorize(nn.Linear(40, 40).to_empty(device="cpu").requires_grad_(), SCHEME)
    assert (
        {p.device.type for p in layer.parameters()} == {"cpu"} == {p.device.type for p in other.parameters()}
    )
    assert all(p.is_meta for p in hollow.parameters())


def test_a_fit_under_another_default_device() -> None:
    layer, again = nn.Linear(12, 12), nn.Linear(12, 12)
    again.load_state_dict(layer.state_dict())
    fp.factorize(layer, SCHEME, init="fit", force=True)
    with torch.device("meta"):
        fp.factorize(again, SCHEME, init="fit", force=True)
    assert torch.equal(layer.weight, again.weight)


def test_a_copy_does_not_share_the_composed_weight(layer: nn.Linear) -> None:
    zero = {name: torch.zeros_like(tensor) for name, tensor in layer.state_dict().items()}
    with composed_once(layer):
        assert layer.weight.abs().sum() > 0
        assert fp.merge(layer, zero).weight.abs().sum() == 0


def test_a_model_that_was_compiled_first() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(40, 40)), backend="eager")
    fp.factorize(compiled, SCHEME)
    x = torch.randn(3, 40)
    torch.testing.assert_close(fp.merge(compiled)(x), compiled(x))
    inner = fp.merge(compiled._orig_mod)
    torch.testing.assert_close(inner(x), compiled(x))
    state = compiled.state_dict()
    assert "_orig_mod.0.weight.x1" in state
    compiled.load_state_dict(state)


class OlderSignature(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict)


def test_a_custom_load_state_dict_is_still_called() -> None:
    model = fp.factorize(OlderSignature(40, 40), SCHEME)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    model.load_state_dict(state, False)
    assert torch.equal(model.bias, state["bias"])
    assert torch.equal(fp.merge(model, state).weight, model.weight)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"n": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_extra_state_travels_with_the_state() -> None:
    model = fp.factorize(WithExtraState(40, 40), SCHEME)
    plain = fp.merge(model, model.state_dict())
    assert plain.n == 1
    assert torch.equal(plain.weight, model.weight)


class Marked(nn.Module):
    """A custom parametrization with an unrelated `form` attribute."""

    form = "mine"

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def test_a_custom_parametrization_with_a_form_attribute() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    nn.utils.parametrize.register_parametrization(model[0], "weight", Marked())
    fp.factorize(model, SCHEME, where=lambda name, module, p: name == "1")
    assert "1.weight.x1" in model.state_dict()
