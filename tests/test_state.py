"""Properties of the arithmetic of states."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedpara import state
from fedpara.errors import StateError

numbers = st.floats(-1e3, 1e3, width=32)
SHAPES = {"fc.weight.x1": (2, 3), "fc.bias": (2,), "scale": ()}


@st.composite
def states(draw, count=1):
    """`count` states with the same names and shapes."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    rows = [draw(st.lists(numbers, min_size=sum(sizes), max_size=sum(sizes))) for _ in range(count)]
    return [
        {
            name: part.reshape(shape)
            for part, (name, shape) in zip(torch.tensor(row).split(sizes), SHAPES.items(), strict=True)
        }
        for row in rows
    ]


def same(a, b, **tolerance):
    return list(a) == list(b) and all(torch.allclose(a[name], b[name], **tolerance) for name in a)


@settings(deadline=None, max_examples=40)
@given(states(2), st.floats(-4, 4, width=32))
def test_add_subtract_and_scale_agree(pair, factor):
    a, b = pair
    assert same(state.add(a, b, factor), state.add(a, state.scale(b, factor)), rtol=1e-5, atol=1e-2)
    assert same(state.subtract(state.add(a, b), b), a, rtol=1e-5, atol=1e-3)
    assert same(state.subtract(a, a), state.zeros_like(a))
    assert same(state.add(a, b), state.add(b, a))


@settings(deadline=None, max_examples=40)
@given(states(3), st.lists(st.integers(0, 500), min_size=3, max_size=3).filter(any))
def test_mean_is_the_weighted_average(three, weights):
    mean = state.mean(three, weights)
    for name in SHAPES:
        expected = np.average([s[name].double().numpy() for s in three], axis=0, weights=weights)
        np.testing.assert_allclose(mean[name].numpy(), expected, rtol=1e-5, atol=1e-3)
    assert all(torch.equal(mean[name], again) for name, again in state.mean(three, weights).items())
    assert same(mean, state.mean(three, [10 * w for w in weights]), rtol=1e-5, atol=1e-3)


@settings(deadline=None, max_examples=25)
@given(states(1), st.integers(1, 500))
def test_the_mean_of_one_is_itself(one, weight):
    assert all(torch.equal(tensor, one[0][name]) for name, tensor in state.mean(one, [weight]).items())


def test_the_mean_is_summed_in_the_order_given():
    """Two engines that pass the same clients in the same order get the same bits."""
    values = [torch.tensor([v]) for v in (1e8, 1.0, -1e8)]
    first = state.mean([{"w": v} for v in values], [1, 1, 1])["w"]
    by_hand = values[0] * (1 / 3)
    for v in values[1:]:
        by_hand = torch.add(by_hand, v, alpha=1 / 3)
    assert torch.equal(first, by_hand)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clients", [10, 100, 1000])
def test_the_mean_of_equal_narrow_states_is_that_state(dtype, clients):
    """Summed in bfloat16, a thousand terms would give an eighth of the mean."""
    one = {"w": torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)}
    assert torch.equal(state.mean([one] * clients, [1] * clients)["w"], one["w"])


def test_counters_are_averaged_and_stay_integers():
    """BatchNorm's step counter is an int64 scalar."""
    a, b = (nn.BatchNorm1d(2).state_dict() for _ in range(2))
    a["num_batches_tracked"] += 4
    b["num_batches_tracked"] += 9
    mean = state.mean([a, b], [1, 3])
    assert mean["num_batches_tracked"].dtype == torch.int64
    assert mean["num_batches_tracked"] == 8
    large = [{"n": torch.tensor(2**40 + i)} for i in (1, 3)]
    assert state.mean(large, [1, 1])["n"] == 2**40 + 2


def test_types_and_order_of_names_are_kept():
    a = {"z": torch.ones(2, dtype=torch.float64), "a": torch.ones(3, dtype=torch.bfloat16)}
    backwards = dict(reversed(a.items()))
    for result in (
        state.add(a, backwards),
        state.mean([a, backwards], [1, 2]),
        state.scale(a, 2),
        state.clone(a),
    ):
        assert [(name, t.dtype) for name, t in result.items()] == [(name, t.dtype) for name, t in a.items()]


def test_results_are_new_tensors():
    layer = nn.Linear(3, 2)
    own = dict(layer.named_parameters())
    for result in (
        state.clone(own),
        state.zeros_like(own),
        state.scale(own, 1.0),
        state.add(own, own),
        state.mean([own], [1]),
    ):
        before = {name: tensor.detach().clone() for name, tensor in own.items()}
        with torch.no_grad():
            for tensor in result.values():
                tensor.fill_(7)
        assert all(torch.equal(own[name], before[name]) for name in own)
    assert not any(tensor.requires_grad for tensor in state.clone(own).values())


@settings(deadline=None, max_examples=25)
@given(states(1), st.floats(-100, 100, width=32))
def test_norm(one, factor):
    (a,) = one
    flat = np.concatenate([tensor.double().numpy().ravel() for tensor in a.values()])
    assert state.norm(a) == pytest.approx(np.linalg.norm(flat))
    assert state.norm(state.scale(a, factor)) == pytest.approx(
        abs(factor) * state.norm(a), rel=1e-4, abs=1e-3
    )
    assert state.norm({}) == 0


def test_norm_does_not_overflow_in_half_precision():
    assert state.norm({"w": torch.full((100,), 1e4, dtype=torch.float16)}) == pytest.approx(1e5)


def test_nbytes_counts_each_type():
    a = {"w": torch.zeros(3, 4), "h": torch.zeros(5, dtype=torch.float16), "n": torch.tensor(1)}
    assert state.nbytes(a) == 48 + 10 + 8
    assert state.nbytes({}) == 0


@pytest.mark.parametrize(
    "act",
    [state.add, state.subtract, lambda a, b: state.mean([a, b], [1, 1])],
    ids=["add", "subtract", "mean"],
)
def test_states_with_different_names_are_rejected(act):
    a = {name: torch.zeros(1) for name in "abcdefgh"}
    with pytest.raises(StateError, match="differ in names: b"):
        act(a, {name: tensor for name, tensor in a.items() if name != "b"})
    with pytest.raises(StateError, match=r"differ in names: a, b, c, d, e \.\.\."):
        act(a, {})


def test_the_mean_of_no_states_is_an_error():
    with pytest.raises(StateError, match="mean of 0 states: expected at least one"):
        state.mean([], [])


def test_all_finite() -> None:
    assert state.all_finite(torch.empty(0))
    assert state.all_finite(torch.tensor(3))
    assert state.all_finite(torch.tensor([3e38, -3e38]))
    assert state.all_finite(torch.full((2, 3), 1e30).T)
    for bad in (math.nan, math.inf, -math.inf):
        assert not state.all_finite(torch.tensor([0.0, bad, 1.0]))


def test_a_state_is_finite_if_every_tensor_is_finite():
    flat = torch.zeros(10)
    pieces = dict(zip("abc", flat.split([3, 3, 4]), strict=True)) | {"n": torch.tensor(3)}
    assert state.finite(pieces)
    flat[7] = math.nan
    assert not state.finite(pieces)
