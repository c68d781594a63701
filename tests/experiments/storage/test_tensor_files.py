"""Tensor files of a run folder: what was written is read back, and changed files are rejected."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedpara.errors import RunError
from fedpara.experiments.storage.tensor_files import read_tensors, write_tensors
from fedpara.wire import tensors


def test_a_tensor_file_is_plain_safetensors_with_a_digest(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(3)}, {"round": "1"})
    state, metadata = read_tensors(path)
    assert metadata == {"round": "1"}
    assert state["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    changed = load_file(path)
    assert all(torch.equal(changed[name], state[name]) for name in state)
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["round"] == "1"
        digest = file.metadata()["digest"]
    save_file(changed, path, {"round": "2", "digest": digest})
    with pytest.raises(RunError, match="does not match its digest"):
        read_tensors(path)
    changed["a"][0, 0] = 9
    save_file(changed, path, {"round": "1", "digest": digest})
    with pytest.raises(RunError, match="does not match its digest"):
        read_tensors(path)
    save_file(changed, path)
    with pytest.raises(RunError, match="does not match its digest"):
        read_tensors(path)


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_rejected_by_name(tmp_path, cut):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.arange(6.0)}, {"é": "ü"})
    assert read_tensors(path)[1] == {"é": "ü"}
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(RunError, match=r"t\.safetensors (cannot be read|does not match)"):
        read_tensors(path)


def test_a_file_may_be_empty_or_hold_many_types(tmp_path):
    path = tmp_path / "t.safetensors"
    for state in ({}, {"e": torch.empty(0, 3), "z": torch.tensor(True), "b": torch.ones(3).half()}):
        write_tensors(path, state, {})
        found, metadata = read_tensors(path)
        assert metadata == {}
        assert found.keys() == state.keys()
        assert all(
            torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state
        )


def test_tensors_that_no_message_can_hold_are_written_too(tmp_path, monkeypatch):
    path = tmp_path / "t.safetensors"
    odd = {"a": torch.randn(3, dtype=torch.complex64), "b": torch.tensor([1, 2]).to(torch.uint16)}
    write_tensors(path, odd, {"round": "1"})
    found, metadata = read_tensors(path)
    assert metadata == {"round": "1"}
    assert all(torch.equal(found[name], odd[name]) for name in odd)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunError, match="does not match its digest"):
        read_tensors(path)

    many = {f"{i:03d}": torch.ones(1) for i in range(100)}
    index, _ = tensors.lay_out(many)
    for limit in (len(index) - 16, len(index) - 8, len(index) + 40, len(index) + 200):
        monkeypatch.setattr(tensors, "MAX_INDEX", limit)
        write_tensors(path, many, {})
        assert read_tensors(path)[0].keys() == many.keys()


def test_a_file_of_an_earlier_version_is_read(tmp_path):
    path, state = tmp_path / "t.safetensors", {"a": torch.arange(3.0)}
    digest = "908c0d0e3e6b499896e37215f48ac4ce1ea8a7834879fadc22ec43d9927c1953"
    save_file(state, path, {"round": "1", "sha256": digest})
    found, metadata = read_tensors(path)
    assert torch.equal(found["a"], state["a"])
    assert metadata == {"round": "1"}


def test_an_entry_before_the_metadata_is_rejected(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"a": torch.arange(2.0)}, {})
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = b'{"b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},' + content[9 : 8 + size]
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    assert set(load_file(path)) == {"a", "b"}
    with pytest.raises(RunError, match="does not match its digest"):
        read_tensors(path)


def test_a_deeply_nested_header_is_rejected(tmp_path):
    header = b'{"__metadata__":' + b"[" * 200_000
    path = tmp_path / "t.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(RunError, match="cannot be read"):
        read_tensors(path)
