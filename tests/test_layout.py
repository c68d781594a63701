"""Properties of layout: the same numbers in the same order, and no copy of neighbouring tensors."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara import layout
from fedpara.state import clone


@given(st.lists(st.integers(0, 4), max_size=6), st.permutations(range(6)))
def test_runs_hold_the_same_numbers_in_the_same_order(sizes, order):
    """Only neighbours in memory become one, whatever the order of the others."""
    memory = torch.arange(sum(sizes), dtype=torch.float32)
    parts = list(memory.split(sizes)) if sizes else []
    chosen = [parts[i] for i in order if i < len(parts)]
    found = layout.runs(chosen)
    assert torch.equal(torch.cat([torch.empty(0), *found]), torch.cat([torch.empty(0), *chosen]))
    assert len(layout.runs(parts)) == min(1, sum(sizes))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=9, max_size=9), st.booleans())
def test_flat_and_cut_are_inverse(numbers, scattered):
    shapes = {"fc.weight.x1": (2, 3), "fc.bias": (2,), "scale": ()}
    parts = torch.tensor(numbers).split([6, 2, 1])
    a = {name: part.reshape(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
    if scattered:
        a = clone(a)
    names = sorted(a)
    whole = layout.flat(a, names)
    assert whole.tolist() == [x for name in names for x in a[name].reshape(-1).tolist()]
    back = layout.cut(whole, a, names)
    assert list(back) == names
    assert all(torch.equal(back[name], a[name]) for name in a)
    again = layout.flat(back, names)
    assert again.data_ptr() == whole.data_ptr()  # neighbours already: nothing is copied
    rows = layout.cut(torch.stack([whole, whole + 1]), a, names)
    assert all(torch.equal(rows[name][1], a[name] + 1) for name in a)


def test_flat_takes_empty_tensors_and_runs_do_not_mix_types():
    empty = {"a": torch.empty(0, 3), "b": torch.empty(0)}
    assert layout.flat(empty, ["a", "b"]).shape == (0,)
    base = torch.arange(8, dtype=torch.int32)
    found = layout.runs([base[:4], base[4:].view(torch.float32)])
    assert [(run.dtype, len(run)) for run in found] == [(torch.int32, 4), (torch.float32, 4)]


def test_joined_and_separated_are_inverse():
    some = {"c": torch.randn(2, 2), "a": torch.arange(3), "b": torch.randn(())}
    blocks = layout.joined(some)
    assert {kind: len(block) for kind, block in blocks.items()} == {"torch.int64": 3, "torch.float32": 5}
    back = layout.separated(blocks, some)
    assert list(back) == list(some)
    assert all(torch.equal(back[name], some[name]) for name in some)
    assert layout.joined(back)["torch.float32"].data_ptr() == blocks["torch.float32"].data_ptr()


def test_names_by_type_are_sorted():
    some = {"c": torch.ones(1), "a": torch.tensor(1), "b": torch.ones(2)}
    assert sorted(layout.by_type(some)) == [["a"], ["b", "c"]]
