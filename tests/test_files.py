"""A file is complete or absent, whatever happens to its writer."""

import errno
import os
import re
import stat
import time

import pytest
import torch

from fedpara.errors import FedParaError, StateError, UsageError
from fedpara.files import PART, read_tensors, replacing, sweep, write_bytes, write_tensors


def test_round_trip(tmp_path):
    write_bytes(tmp_path / "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"
    tensors = {"w": torch.randn(3, 2), "n": torch.tensor(3), "none": torch.empty(0, 4)}
    write_tensors(tmp_path / "t", tensors, {"round": "7"}, durable=False)
    state, metadata = read_tensors(tmp_path / "t")
    assert metadata == {"round": "7"}
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    assert sorted(os.listdir(tmp_path)) == ["a", "t"]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("ne")
        assert path.read_text() == "old"
        assert temporary.match(PART)
        assert temporary.suffix == ".txt"
        temporary.write_text("new")
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("disk full"), ValueError])
def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "a"
    path.write_text("old")
    expected = FedParaError if isinstance(failure, OSError) else failure

    def write():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise failure

    with pytest.raises(expected):
        write()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_no_message_names_the_temporary_file(tmp_path):
    """Not with nested writers either, nor with an OSError that has no errno."""
    path = tmp_path / "a.txt"

    def outer(write):
        with replacing(path) as temporary:
            write(temporary)

    def full(temporary):
        with replacing(temporary):
            raise OSError(errno.ENOSPC, "No space left on device")

    def told(temporary):
        raise OSError(f"cannot write {temporary}")

    def unreadable(temporary):
        temporary.write_bytes(b"torn")
        read_tensors(temporary)

    for write, kind, says in (
        (full, FedParaError, f"{path} could not be written: No space left on device."),
        (told, FedParaError, f"cannot write {path}"),
        (unreadable, StateError, f"{path} cannot be read"),
    ):
        with pytest.raises(kind, match=re.escape(says)) as error:
            outer(write)
        assert ".part" not in str(error.value)


def test_a_file_has_the_usual_mode_even_if_its_writer_made_it_private(tmp_path):
    (tmp_path / "other").touch()
    with replacing(tmp_path / "a") as temporary:
        temporary.unlink()
        temporary.write_text("mine")
        temporary.chmod(0o600)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "other")}
    assert len(modes) == 1


def test_a_path_that_cannot_be_a_file_is_rejected(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "a"):
        with pytest.raises(UsageError, match="not a place for a file"):
            write_bytes(path, b"")
    with pytest.raises(FedParaError, match="could not be written"):
        write_bytes(tmp_path / ("n" * 300), b"")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.EACCES])
def test_files_can_be_written_in_a_folder_that_cannot_be_synced(tmp_path, monkeypatch, reason):
    fsync = os.fsync

    def reject_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(reason, os.strerror(reason))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", reject_folders)
    write_bytes(tmp_path / "a", b"content")
    assert (tmp_path / "a").read_bytes() == b"content"
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(reason, "no")))
    with pytest.raises(FedParaError, match="could not be written"):
        write_bytes(tmp_path / "b", b"content")


def test_sweep_removes_the_files_of_killed_writers(tmp_path):
    (tmp_path / "below").mkdir()
    old, fresh = tmp_path / "below" / ".a1.part.txt", tmp_path / ".b2.part"
    kept = [tmp_path / name for name in ("a.part", ".hidden", "below/b.txt", ".lock")]
    for path in (old, fresh, *kept):
        path.touch()
    os.utime(old, (time.time() - 100,) * 2)
    sweep(tmp_path, older_than=50)
    assert not old.exists()
    assert fresh.exists()
    sweep(tmp_path)
    assert not fresh.exists()
    assert all(path.exists() for path in kept)


def test_slices_of_one_tensor_can_be_written(tmp_path):
    stacked = torch.arange(6.0).reshape(3, 2)
    write_tensors(tmp_path / "t", {"a": stacked[0], "b": stacked[2]}, {})
    assert read_tensors(tmp_path / "t")[0]["b"].tolist() == [4, 5]


def test_tensors_that_cannot_be_written_are_rejected(tmp_path):
    shared = torch.ones(4)
    with pytest.raises(StateError, match="could not be written as safetensors"):
        write_tensors(tmp_path / "t", {"a": shared, "b": shared}, {})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("length", [0, 7, 50, -1])
def test_a_cut_file_is_rejected(tmp_path, length):
    path = tmp_path / "t"
    write_tensors(path, {"w": torch.randn(30)}, {})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(StateError, match="expected a whole safetensors file"):
        read_tensors(path)


def test_tensors_that_were_read_do_not_change_with_the_file(tmp_path):
    path = tmp_path / "t"
    write_tensors(path, {"w": torch.zeros(1000)}, {})
    state, _ = read_tensors(path)
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) - 400)
        file.write(b"\xff" * 400)
    assert state["w"].sum() == 0
