"""The cache file is complete or absent, whatever happens to its writer."""

import os
import signal
import stat
import subprocess
import sys

import pytest
import torch

from fedpara.data import cache
from fedpara.errors import FedParaError
from fedpara.files import write_tensors

ARRAYS = {"a": torch.arange(10), "b": torch.zeros(3, 0)}


def test_a_cache_is_read_for_the_same_sources_only(tmp_path):
    path = cache.location(tmp_path, "set")
    assert cache.read(path, "s1") is None
    cache.write(path, ARRAYS, "s1", (7, 3))
    found = cache.read(path, "s1")
    assert found is not None
    assert all(torch.equal(found[name], ARRAYS[name]) for name in ARRAYS)
    assert cache.counts(path, "s1") == (7, 3)
    assert cache.read(path, "s2") is None
    assert cache.counts(path, "s2") is None
    assert [entry.name for entry in path.parent.iterdir()] == ["set.safetensors"]


def test_another_version_of_the_format_is_not_read(tmp_path, monkeypatch):
    path = cache.location(tmp_path, "set")
    cache.write(path, ARRAYS, "s", (1, 1))
    monkeypatch.setattr(cache, "VERSION", "0")
    assert cache.read(path, "s") is None


@pytest.mark.parametrize("examples", ["", "7", "7 3 1", "seven three", None])
def test_a_cache_without_valid_counts_is_ignored(tmp_path, examples):
    path = cache.location(tmp_path, "set")
    cache.write(path, ARRAYS, "s", (7, 3))
    metadata = {"version": cache.VERSION, "sources": "s"} | (
        {} if examples is None else {"examples": examples}
    )
    write_tensors(path, ARRAYS, metadata)
    assert cache.counts(path, "s") is None
    assert cache.read(path, "s") is None


def test_changing_a_loaded_tensor_changes_no_file(tmp_path):
    path = cache.location(tmp_path, "set")
    cache.write(path, ARRAYS, "s", (1, 1))
    first = cache.read(path, "s")
    assert first is not None
    first["a"].zero_()
    second = cache.read(path, "s")
    assert second is not None
    assert second["a"].tolist() == list(range(10))


def test_replacing_a_cache_does_not_change_loaded_tensors(tmp_path):
    path = cache.location(tmp_path, "set")
    cache.write(path, ARRAYS, "s", (1, 1))
    held = cache.read(path, "s")
    cache.write(path, {"a": torch.ones(10, dtype=torch.int64)}, "s", (1, 1))
    assert held is not None
    assert held["a"].tolist() == list(range(10))


def test_the_cache_has_the_usual_mode(tmp_path):
    path = cache.location(tmp_path, "set")
    path.parent.mkdir()
    path.parent.chmod(0o755)
    cache.write(path, ARRAYS, "s", (1, 1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_failed_write_leaves_nothing(tmp_path):
    path = cache.location(tmp_path, "set")
    path.mkdir(parents=True)
    (path / "occupied").touch()
    with pytest.raises(FedParaError, match=r"set\.safetensors is not a place for a file"):
        cache.write(path, ARRAYS, "s", (1, 1))
    assert [entry.name for entry in path.parent.iterdir()] == ["set.safetensors"]


def test_the_next_writer_removes_the_files_of_a_killed_one(tmp_path):
    path = cache.location(tmp_path, "set")
    path.parent.mkdir()
    old, fresh = (path.with_name(f".{token}.part.safetensors") for token in ("a1", "b2"))
    for left in (old, fresh):
        left.write_bytes(b"half")
    os.utime(old, (1, 1))
    cache.write(path, ARRAYS, "s", (1, 1))
    assert not old.exists()
    assert fresh.exists()


WRITER = """
import sys, torch
from pathlib import Path
from fedpara.data import cache
path = cache.location(Path(sys.argv[1]), "set")
arrays = [{"a": torch.full((500_000,), value, dtype=torch.uint8)} for value in (1, 2)]
print("writing", flush=True)
while True:
    for each in arrays:
        cache.write(path, each, "s", (1, 1))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_killed_writer_leaves_a_complete_cache_or_none(tmp_path):
    path = cache.location(tmp_path, "set")
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            seen = 0
            while seen < 50:  # while the writer is active: never a partial file
                assert writer.poll() is None
                found = cache.read(path, "s")
                if found is not None:
                    assert found["a"].unique().tolist() in ([1], [2])
                    seen += 1
        finally:
            writer.kill()
    found = cache.read(path, "s")
    assert found is not None
    assert len(found["a"]) == 500_000
    assert found["a"].unique().tolist() in ([1], [2])
