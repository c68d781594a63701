"""OnDisk: client memories on disk behave like those in memory, and damaged files are rejected."""

import shutil
from pathlib import Path

import pytest
import torch

from fedpara.engines.memory import InMemory
from fedpara.errors import RunError
from fedpara.experiments.storage.client_files import OnDisk, memory_file
from fedpara.experiments.storage.tensor_files import write_memory


def groups(value, empty=()):
    full = {"private": {"w.x2": torch.full((3,), value)}, "control": {"w": torch.full((2, 2), value)}}
    return {name: {} if name in empty else members for name, members in full.items()}


@pytest.mark.parametrize("empty", [(), ("private",), ("control",)])
def test_on_disk_and_in_memory_agree(tmp_path, empty):
    """Groups without tensors survive, as in SCAFFOLD with a model that has no private parts."""
    disk, memory = OnDisk(tmp_path), InMemory()
    for store in (disk, memory):
        assert store.get(3) is None
        store.put(3, 1, groups(1.0, empty))
        store.put(3, 2, groups(2.0, empty))
        store.put(1_234_567, 2, groups(5.0, empty))
    for client in (3, 1_234_567):
        a, b = disk.get(client), memory.get(client)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[g][n], b[g][n]) for g in b for n in b[g])
        assert {g: set(members) for g, members in a.items()} == {g: set(m) for g, m in b.items()}


def value(store, client):
    found = store.get(client)
    return None if found is None else float(found["private"]["w.x2"][0])


def files(folder: Path) -> set[str]:
    return {path.name.split(".")[0] for path in folder.glob("*/*.safetensors")}


def test_on_disk_falls_back_to_the_checkpoint(tmp_path):
    disk = OnDisk(tmp_path)
    disk.put(1, 1, groups(1.0))
    disk.put(1, 3, groups(3.0))
    disk.put(2, 3, groups(30.0))
    assert (value(disk, 1), value(disk, 2)) == (3.0, 30.0)
    again = OnDisk(tmp_path, checkpoint=2)
    assert (value(again, 1), value(again, 2)) == (1.0, None)
    assert files(tmp_path) == {"1-1"}


def test_on_disk_keeps_the_files_of_two_checkpoints(tmp_path):
    disk = OnDisk(tmp_path)
    for t in range(1, 6):
        disk.put(1, t, groups(float(t)))
        if t == 2:
            disk.put(2, t, groups(20.0))
        disk.settle(t - 1)
    assert files(tmp_path) == {"1-4", "1-5", "2-2"}
    for checkpoint, expected in ((5, 5.0), (4, 4.0)):
        assert value(OnDisk(tmp_path, checkpoint), 1) == expected
        assert value(OnDisk(tmp_path, checkpoint), 2) == 20.0


def test_a_memory_under_another_name_is_rejected(tmp_path):
    disk = OnDisk(tmp_path)
    disk.put(7, 1, groups(1.0))
    disk.put(8, 1, groups(2.0))
    file = memory_file(tmp_path, 8, 1)
    shutil.copyfile(memory_file(tmp_path, 7, 1), file)
    with pytest.raises(RunError, match=r"is the memory of client 7, round 1: expected that of client 8"):
        disk.get(8)
    file.rename(memory_file(tmp_path, 7, 2))
    with pytest.raises(RunError, match="expected that of client 7, round 2"):
        OnDisk(tmp_path, 2).get(7)
    write_memory(memory_file(tmp_path, 7, 2), groups(3.0))  # as an earlier version wrote it
    assert OnDisk(tmp_path, 2).get(7).keys() == groups(3.0).keys()


def test_a_damaged_memory_is_rejected_by_name(tmp_path):
    disk = OnDisk(tmp_path)
    disk.put(7, 1, groups(1.0))
    (path,) = tmp_path.glob("*/*")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=str(path)):
        disk.get(7)
