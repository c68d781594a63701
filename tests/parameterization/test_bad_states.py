"""States that do not fit the model: a StateError that names the tensor, and an unchanged model."""

import re

import pytest
import torch
from snapshot import Snapshot, network

import fedpara as fp
from fedpara.errors import StateError
from fedpara.parameterization import load

FEDPARA = fp.FedPara(rank=2)


def without(state, *prefixes):
    return {name: tensor for name, tensor in state.items() if not name.startswith(prefixes)}


FAULTS = {
    "missing": (lambda s: without(s, "3.weight.y2"), "missing: 3.weight.y2"),
    "misshapen": (
        lambda s: {**s, "3.weight.y2": torch.zeros(72, 3)},
        "wrong shape: 3.weight.y2 (72, 3) instead of (72, 2)",
    ),
    "extra": (lambda s: {**s, "3.weight.x3": torch.zeros(10, 2)}, "unexpected: 3.weight.x3"),
    "the core of a matrix": (lambda s: {**s, "3.weight.t1": torch.zeros(2, 2)}, "unexpected: 3.weight.t1"),
    "dense": (
        lambda s: {**without(s, "3.weight."), "3.weight": torch.zeros(10, 72)},
        "unexpected: 3.weight.",
    ),
    "dense beside factors": (lambda s: {**s, "3.weight": torch.zeros(10, 72)}, "unexpected: 3.weight."),
}
WAYS = {
    "load": load,
    "load_state_dict": lambda model, state: model.load_state_dict(state),
    "merge": fp.merge,
    "load_state_dict of a part": lambda model, state: model[3].load_state_dict(
        {name[2:]: tensor for name, tensor in state.items() if name.startswith("3.")}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_state_that_does_not_fit_changes_no_tensor(fault, way):
    model = fp.factorize(network(), FEDPARA)
    before = Snapshot(model)
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    spoil, text = FAULTS[fault]
    with pytest.raises(StateError, match=re.escape(text.replace("3.", "") if "part" in way else text)):
        WAYS[way](model, spoil(other))
    before.assert_unchanged()
    load(model, other)
    assert torch.equal(model.state_dict()["3.weight.y2"], other["3.weight.y2"])


@pytest.mark.parametrize("how", ["load", "merge"])
@pytest.mark.parametrize("name", ["0.bias", "1.weight"])
def test_dense_tensors_that_do_not_fit(name, how):
    model = fp.factorize(network(), FEDPARA)
    before = Snapshot(model)
    state = {k: v + 1 for k, v in model.state_dict().items()}
    act = load if how == "load" else fp.merge
    for bad in (
        {k: v for k, v in state.items() if k != name},
        {**state, name: torch.zeros(3)},
        {**state, "5.bias": state[name]},
    ):
        with pytest.raises(StateError, match=f"{name}|5.bias"):
            act(model, bad)
        before.assert_unchanged()


def test_a_lenient_load_still_rejects_a_wrong_shape():
    model = fp.factorize(network(), FEDPARA)
    before = Snapshot(model)
    with pytest.raises(StateError, match=r"wrong shape: 3\.weight\.y2"):
        model.load_state_dict({"0.bias": torch.zeros(8), "3.weight.y2": torch.zeros(72, 3)}, strict=False)
    before.assert_unchanged()


def test_a_state_of_another_rank():
    state = fp.factorize(network(), fp.FedPara(rank=1)).state_dict()
    with pytest.raises(
        StateError, match=r"0.weight.x1 \(8, 1\) instead of \(8, 2\).*another model, scheme, rank or gamma"
    ):
        fp.factorize(network(), FEDPARA).load_state_dict(state)


def test_dense_weights_in_a_factorized_model():
    model = fp.factorize(network(), FEDPARA)
    with pytest.raises(
        StateError, match=r"missing: 0.weight.x1.*unexpected: 0.weight.*before factorize.*init=\"fit\""
    ):
        model.load_state_dict(network().state_dict())
