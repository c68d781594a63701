"""Golden sizes of encoded messages: 122 / 91.5 / 46.3 / 34.7 MB per client and round for VGG16."""

import math
from itertools import pairwise

import pytest
import torch

from fedpara.errors import PrivacyError
from fedpara.state import State
from fedpara.wire import Header, Link, Meter, combine, decode, encode, guard, pack, split

CHANNELS = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
HEADER = Header(round=0, method="fedavg", scheme="fedpara(0.5)")


def rank(o: int, i: int, k: int, gamma: float) -> int:
    """r = round((1 - gamma) r_min + gamma r_max), r_max the root of k^2 R^2 + (O + I) R = O I k^2 / 2"""
    r_min = min(math.ceil(math.sqrt(o)), math.ceil(math.sqrt(i)))
    r_max = math.floor((math.sqrt((o + i) ** 2 + 2 * o * i * k**4) - (o + i)) / (2 * k * k))
    return max(1, round((1 - gamma) * r_min + gamma * r_max))


def vgg16(gamma: float | None) -> State:
    """The tensors of VGG16 with GroupNorm for 10 classes; gamma None means the original weights."""
    state: State = {}
    for layer, (i, o) in enumerate(pairwise(CHANNELS)):
        name = f"features.{layer}.weight"
        if gamma is None:
            state[name] = torch.zeros(o, i, 3, 3)
        else:
            r = rank(o, i, 3, gamma)
            for half in "12":
                state |= {f"{name}.x{half}": torch.zeros(o, r), f"{name}.y{half}": torch.zeros(i, r)}
                state[f"{name}.t{half}"] = torch.zeros(r, r, 3, 3)
        for vector in ("bias", "norm.weight", "norm.bias"):
            state[f"features.{layer}.{vector}"] = torch.zeros(o)
    for layer, (i, o) in enumerate([(512, 512), (512, 512), (512, 10)]):
        state |= {f"classifier.{layer}.weight": torch.zeros(o, i), f"classifier.{layer}.bias": torch.zeros(o)}
    return state


def test_states_have_the_papers_sizes() -> None:
    def numbers(gamma: float | None) -> int:
        return sum(tensor.numel() for tensor in vgg16(gamma).values())

    assert numbers(None) == 15_253_578
    assert numbers(0.1) == 1_545_442
    assert numbers(0.5) == pytest.approx(5.79e6, abs=0.015e6)


@pytest.mark.parametrize(
    ("gamma", "link", "megabytes"),
    [
        (None, Link(), 122.0),
        (None, Link(up="float16"), 91.5),
        (0.5, Link(), 46.3),
        (0.5, Link(up="float16"), 34.7),
    ],
)
def test_traffic_per_client_and_round_equals_the_paper(
    gamma: float | None, link: Link, megabytes: float
) -> None:
    state = vgg16(gamma)
    meter = Meter()
    meter.down(0, 17, encode(state, HEADER, link.down))
    meter.up(0, 17, encode(state, HEADER, link.up))
    assert meter.total / 1e6 == pytest.approx(megabytes, rel=0.01)


def test_a_control_variate_doubles_the_message() -> None:
    state = vgg16(0.1)
    one, two = (len(encode(sent, HEADER)) for sent in (state, pack({"": state, "control": state})))
    assert two == pytest.approx(2 * one, rel=0.01)


def test_algorithm_2_sends_the_first_inner_weight_and_the_biases() -> None:
    """pFedPara on 784-256-62, gamma 0.5: 3.4 times fewer numbers than the original's 216,894."""
    state: State = {}
    for layer, (n, m, r) in {"fc1": (784, 256, 56), "fc2": (256, 62, 16)}.items():
        for half in "12":
            state |= {
                f"{layer}.weight.x{half}": torch.randn(m, r),
                f"{layer}.weight.y{half}": torch.randn(n, r),
            }
        state[f"{layer}.bias"] = torch.randn(m)
    private = {name for name in state if name.endswith("2")}
    shared, kept = split(state, private)
    guard(shared, private)
    with pytest.raises(PrivacyError):
        guard(state, private)
    message = encode(shared, HEADER)
    received = decode(message)[1]
    assert set(received) == {
        f"{layer}.{part}" for layer in ("fc1", "fc2") for part in ("weight.x1", "weight.y1", "bias")
    }
    assert sum(tensor.numel() for tensor in received.values()) == 63_646
    assert len(message) == pytest.approx(216_894 * 4 / 3.4, rel=0.01)
    whole = combine(received, kept, state)
    assert list(whole) == list(state)
    assert all(torch.equal(whole[name], state[name]) for name in state)
