"""Properties of the split into shared and private, and of the variables of a message."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.errors import PrivacyError, StateError, WireError
from fedpara.state import State
from fedpara.wire import combine, guard, pack, split, unpack

NAMES = st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"]), min_size=1, max_size=6)
PRIVATE = frozenset({"fc.weight.x2", "fc.weight.y2"})


def numbered(names: list[str]) -> State:
    return {name: torch.tensor(float(place)) for place, name in enumerate(names)}


@settings(deadline=None, max_examples=60)
@given(names=st.lists(NAMES, unique=True, max_size=8), data=st.data())
def test_combine_undoes_split(names: list[str], data: st.DataObject) -> None:
    state = numbered(names)
    private = data.draw(st.sets(st.sampled_from(names))) if names else set()
    shared, kept = split(state, private)
    assert set(kept) == private
    assert not shared.keys() & kept.keys()
    whole = combine(shared, kept, state)
    assert list(whole) == names
    assert all(whole[name] is state[name] for name in names)


def test_a_misspelt_private_name_is_rejected() -> None:
    with pytest.raises(StateError, match=r"fc\.weight\.x3"):
        split(numbered(["fc.weight.x2"]), {"fc.weight.x3"})


def test_parts_that_do_not_make_up_the_state_are_rejected() -> None:
    a, b = numbered(["a"]), numbered(["b"])
    with pytest.raises(StateError, match="c is missing"):
        combine(a, b, ["a", "b", "c"])
    with pytest.raises(StateError, match="b is missing or unexpected"):
        combine(a, b, ["a"])
    with pytest.raises(StateError, match="both shared and private: a"):
        combine(a, a, ["a"])


@pytest.mark.parametrize(
    "name",
    [
        "fc.weight.x2",
        "control/fc.weight.y2",
        "control/fc.weight.x2.delta",
        "fc.weight.x2.momentum",
        "outer/inner/fc.weight.x2",
        "fc.weight.x2/moment",
    ],
)
def test_guard_stops_a_private_name_in_any_form(name: str) -> None:
    with pytest.raises(PrivacyError, match="private and stays") as caught:
        guard(numbered(["fc.bias", name]), PRIVATE)
    assert name in str(caught.value)
    assert isinstance(caught.value, WireError)


def test_guard_lets_the_shared_part_pass() -> None:
    state = numbered(
        ["fc.weight.x1", "fc.weight.y1", "fc.weight.x2", "fc.weight.y2", "fc.weight.x22", "afc.weight.x2"]
    )
    shared, _ = split(state, PRIVATE)
    guard(pack({"": shared, "control": shared}), PRIVATE)
    guard(state, frozenset())


@settings(deadline=None, max_examples=60)
@given(
    variables=st.dictionaries(NAMES, st.lists(NAMES, unique=True, min_size=1, max_size=4), max_size=4),
    data=st.data(),
)
def test_unpack_undoes_pack(variables: dict[str, list[str]], data: st.DataObject) -> None:
    model = data.draw(st.lists(NAMES, unique=True, max_size=4))
    given_ = {"": numbered(model)} | {variable: numbered(names) for variable, names in variables.items()}
    packed = pack(given_)
    assert len(packed) == sum(map(len, given_.values()))
    assert set(model) == {name for name in packed if "/" not in name}
    assert unpack(packed) == given_


def test_pack_rejects_names_that_unpack_would_misread() -> None:
    for variables in ({"": numbered(["a/b"])}, {"a/b": numbered(["c"])}, {"g": numbered(["a/b"])}):
        with pytest.raises(StateError, match="/"):
            pack(variables)
