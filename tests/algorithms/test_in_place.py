"""The optimizers' steps in place give the bits of their formulas, on a CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.algorithms.optimizers import adam, adamw, sgd
from fedpara.state import clone

KINDS = {
    "plain": lambda: sgd(),
    "decay": lambda: sgd(weight_decay=0.1),
    "momentum": lambda: sgd(momentum=0.9),
    "both": lambda: sgd(momentum=0.9, weight_decay=0.01),
    "adam": lambda: adam(),
    "adam with decay": lambda: adam(betas=(0.8, 0.99), weight_decay=0.1),
    "adamw": lambda: adamw(eps=1e-6),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=20)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    mixed=st.booleans(),
    lr=st.sampled_from([0.1, 3e-4, 1.0]),
    as_tensor=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_steps_in_place_have_the_bits_of_the_formula(kind, shapes, mixed, lr, as_tensor, seed):
    torch.manual_seed(seed)
    optimizer = KINDS[kind]()
    y = {
        str(i): torch.randn(shape, dtype=torch.float64 if mixed and i % 2 else torch.float32)
        for i, shape in enumerate(shapes)
    }
    changed, slots, changed_slots = clone(y), optimizer.init(y), optimizer.init(y)
    rate = torch.tensor(lr, dtype=torch.float64 if mixed else torch.float32) if as_tensor else lr
    for step in range(4):
        g = {name: torch.randn_like(tensor) * 10.0**-step for name, tensor in y.items()}
        y, slots = optimizer.step(y, g, slots, lr)
        optimizer.in_place(changed, g, changed_slots, rate)
    for name, tensor in y.items():
        assert torch.equal(tensor, changed[name]), name
    for slot, state in slots.items():
        for name, tensor in state.items():
            assert torch.equal(tensor, changed_slots[slot][name]), (slot, name)
