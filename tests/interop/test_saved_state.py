"""Saved states can be read back and merged without their model, and damage is always detected."""

import json
import os
import stat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import fedpara as fp
from fedpara.errors import FedParaError, StateError, UsageError
from fedpara.interop import SavedState, read_state, save_state
from fedpara.parameterization import SCHEMES, compose_state, forms, write
from fedpara.state import State

CNN = {"name": "cnn", "classes": 10, "shape": [1, 8, 8]}
SCHEMES_TO_SAVE = [
    fp.FedPara(gamma=0.3),
    fp.FedPara(gamma=0.2, nonlinearity="tanh", conv="reshape"),
    fp.PFedPara(gamma=0.5, nonlinearity="tanh"),
    fp.LowRank(ratio=0.5),
]


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(6, 24, 3), nn.BatchNorm2d(24), nn.Flatten(), nn.Linear(24, 20), nn.Linear(20, 3)
    )


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a
    )


@pytest.fixture
def saved(tmp_path):
    model = fp.factorize(network(), fp.FedPara(gamma=0.3))
    path = tmp_path / "state.safetensors"
    save_state(path, model.state_dict(), forms(model), model=CNN)
    return path


@pytest.mark.parametrize("scheme", SCHEMES_TO_SAVE, ids=str)
def test_a_saved_state_merges_without_its_model(tmp_path, scheme):
    model = fp.factorize(network(), scheme)
    save_state(tmp_path / "state", model.state_dict(), forms(model), model=CNN)

    saved = read_state(tmp_path / "state")

    assert same(saved.state, dict(model.state_dict()))
    assert saved.model == CNN
    merged, expected = saved.merged(), fp.merge(model).state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():  # a product's last bit depends on where its factors lie in memory
        torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_forced_rank_above_r_max_is_read_back(tmp_path):
    model = fp.factorize(nn.Sequential(nn.Linear(6, 6)), fp.FedPara(gamma=0.0), force=True)
    form = forms(model)["0.weight"]
    assert form.parameters > form.dense_parameters

    save_state(tmp_path / "state", model.state_dict(), forms(model))

    assert read_state(tmp_path / "state").forms["0.weight"].factors == form.factors


def takes(scheme, conv):
    """Whether the scheme has a way to write kernels that can be chosen, and this is one."""
    return conv is not None and not scheme.endswith("-aad") and scheme != "kronecker"


@given(
    scheme=st.sampled_from(sorted(SCHEMES)),
    conv=st.sampled_from(["tensor", "reshape", None]),
    shape=st.lists(st.integers(1, 40), min_size=2, max_size=5).map(tuple),
)
@settings(deadline=None, max_examples=100)
def test_an_explicit_rank_gives_the_same_form(scheme, conv, shape):
    written = write(SCHEMES[scheme](gamma=0.5, **({"conv": conv} if takes(scheme, conv) else {})), shape)
    again = write(written.scheme, shape, written.rank)
    assert again == written
    assert list(again.factors.items()) == list(written.factors.items())


def test_a_plain_safetensors_file_is_a_state_without_forms(tmp_path):
    dense = {"w": torch.randn(3, 2), "steps": torch.tensor(7)}
    save_file(dense, tmp_path / "dense.safetensors")

    saved = read_state(tmp_path / "dense.safetensors")

    assert same(saved.state, dense)
    assert (saved.forms, saved.model) == ({}, None)
    assert same(saved.merged(), dense)


def test_every_kind_of_tensor_survives(tmp_path):
    state = {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "half": torch.randn(3).bfloat16(),
        "mask": torch.tensor([True, False]),
        "transposed": torch.randn(4, 3).T,
        "strided": torch.arange(9.0)[::4][1:2],
        "tied": (shared := torch.randn(5)),
        "twin": shared,
        "trained": torch.randn(2, requires_grad=True),
    }
    save_state(tmp_path / "state", state, {})
    assert same(read_state(tmp_path / "state").state, {name: t.detach() for name, t in state.items()})


def test_a_saved_file_is_ordinary_safetensors(saved):
    assert set(load_file(saved)) == set(read_state(saved).state)


@pytest.mark.parametrize(("start", "flip"), [(0, 0x01), (1, 0x04), (2, 0x10), (3, 0x80)])
def test_every_flipped_byte_is_detected(tmp_path, start, flip):
    path = tmp_path / "state"
    model = fp.factorize(nn.Sequential(nn.Linear(9, 9)), fp.FedPara(rank=2))
    save_state(path, model.state_dict(), forms(model), model=CNN)
    whole, reference = path.read_bytes(), read_state(path)
    for place in range(start, len(whole), 4):
        damaged = bytearray(whole)
        damaged[place] ^= flip
        path.write_bytes(damaged)
        try:
            read = read_state(path)
        except StateError:
            continue
        # Only the value of "format", which is for other tools, may change unnoticed.
        assert same(read.state, reference.state), place
        assert (read.forms, read.model) == (reference.forms, CNN), place


@pytest.mark.parametrize("length", [0, 7, 40, 200, -1])
def test_a_cut_file_is_refused(saved, length):
    saved.write_bytes(saved.read_bytes()[:length])
    with pytest.raises(StateError, match="expected a whole safetensors file"):
        read_state(saved)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(StateError, match=r"nowhere.*expected a whole safetensors file"):
        read_state(tmp_path / "nowhere")


def test_a_pickle_is_refused(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "state.pt")
    with pytest.raises(StateError, match="expected a whole safetensors file"):
        read_state(tmp_path / "state.pt")


GOOD_FORM = {"scheme": "fedpara", "rank": 2, "shape": [9, 9], "nonlinearity": None, "conv": "tensor"}


@pytest.mark.parametrize(
    "form",
    [
        None,
        [],
        {},
        GOOD_FORM | {"scheme": "tucker"},
        GOOD_FORM | {"scheme": ["fedpara"]},
        GOOD_FORM | {"rank": "2"},
        GOOD_FORM | {"rank": True},
        GOOD_FORM | {"rank": 0},
        GOOD_FORM | {"rank": 3},
        GOOD_FORM | {"shape": 9},
        GOOD_FORM | {"shape": [9]},
        GOOD_FORM | {"shape": [9, 9.0]},
        GOOD_FORM | {"shape": [9, 3, 3]},
        GOOD_FORM | {"nonlinearity": "relu"},
        GOOD_FORM | {"nonlinearity": ["tanh"]},
        GOOD_FORM | {"conv": None},
        GOOD_FORM | {"scheme": "lowrank"},
        GOOD_FORM | {"scheme": "lowrank", "nonlinearity": "tanh"},
    ],
    ids=repr,
)
def test_a_damaged_form_is_refused(tmp_path, form):
    from fedpara.interop.saved import _crc32

    factors = {f"w.{name}": torch.randn(9, 2) for name in ("x1", "y1", "x2", "y2")}
    metadata = {"fedpara": "1", "forms": json.dumps({"w": form})}
    save_file(factors, tmp_path / "state", metadata | {"crc32": _crc32(factors, metadata)})
    with pytest.raises(StateError, match="expected"):
        read_state(tmp_path / "state")


@pytest.mark.parametrize(
    "change", [{"fedpara": "2"}, {"forms": "{"}, {"model": "3"}, {"preprocessing": "{}"}, {"crc32": "0"}]
)
def test_foreign_metadata_is_refused(tmp_path, change):
    from fedpara.interop.saved import _crc32

    metadata = {"fedpara": "1", "forms": "{}"} | change
    save_file({}, tmp_path / "state", {"crc32": _crc32({}, metadata)} | metadata)
    with pytest.raises(StateError, match="expected"):
        read_state(tmp_path / "state")


def test_a_state_without_its_factors_is_never_written(tmp_path):
    model = fp.factorize(network(), fp.FedPara(gamma=0.3))
    state = model.state_dict()
    del state["0.weight.t2"]
    with pytest.raises(StateError, match=r"missing: 0\.weight\.t2"):
        save_state(tmp_path / "state", state, forms(model))
    with pytest.raises(StateError, match=r"unexpected: 0\.weight"):
        SavedState(compose_state(model.state_dict(), forms(model)), forms(model))
    assert list(tmp_path.iterdir()) == []


def test_a_numpy_rank_can_be_saved(tmp_path):
    model = fp.factorize(nn.Linear(40, 40), fp.FedPara(rank=np.int64(3)))
    save_state(tmp_path / "s.safetensors", model.state_dict(), forms(model))
    assert read_state(tmp_path / "s.safetensors").forms == forms(model)


def test_a_custom_scheme_cannot_be_saved(tmp_path):
    class Own(fp.FedPara):
        pass

    model = fp.factorize(network(), Own(gamma=0.3))
    with pytest.raises(StateError, match=r"a file cannot hold .* which is no scheme of the library: .*merge"):
        save_state(tmp_path / "state", model.state_dict(), forms(model))


@pytest.mark.parametrize(
    "description", [{}, {"name": "cnn"}, {"target": 3}, CNN | {"shape": "8"}, CNN | {"x": 1}]
)
def test_a_wrong_description_is_refused(tmp_path, description):
    with pytest.raises(StateError, match=r"expected \{\"name\""):
        save_state(tmp_path / "state", {}, {}, model=description)


def test_a_failed_write_leaves_the_old_file_whole(saved):
    before = saved.read_bytes()
    with pytest.raises(StateError, match="safetensors has no type"):
        save_state(saved, {"w": torch.ones(1, dtype=torch.complex128)}, {})
    assert saved.read_bytes() == before
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(2, dtype=torch.complex128), "safetensors has no type torch.complex128"),
    ],
    ids=["complex"],
)
def test_a_dtype_that_safetensors_lacks(tmp_path, tensor, says):
    with pytest.raises(StateError, match=says):
        save_state(tmp_path / "state", {"w": tensor}, {})
    assert not list(tmp_path.iterdir())


def test_the_file_has_the_usual_permissions(saved):
    (saved.parent / "other").touch()
    assert stat.S_IMODE(os.stat(saved).st_mode) == stat.S_IMODE(os.stat(saved.parent / "other").st_mode)


def test_a_missing_folder_is_refused(tmp_path):
    for path in (tmp_path / "nowhere" / "state", tmp_path):
        with pytest.raises(UsageError, match="not a place for a file"):
            save_state(path, {"w": torch.ones(1)}, {})


def test_a_failed_write_names_the_file(tmp_path):
    with pytest.raises(FedParaError, match="could not be written"):
        save_state(tmp_path / ("n" * 300), {"w": torch.ones(1)}, {})
