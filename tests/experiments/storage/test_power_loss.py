"""A run folder syncs what its checkpoint refers to, and verifies it when it is opened."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedpara.errors import RunError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.storage import checkpoint
from fedpara.experiments.storage.checkpoint import NEXT, PREVIOUS, final_checkpoint, read_checkpoint
from fedpara.experiments.storage.client_files import OnDisk, memory_file
from fedpara.experiments.storage.tensor_files import read_memory, read_tensors, write_memory, write_tensors
from fedpara.files import write_bytes

POWER_LOSS = Path(__file__).parents[3] / "benchmarks" / "power_loss.py"

SHORT = Experiment(
    model="mlp",
    scheme="original",
    algorithm="scaffold",
    clients=10,
    cohort=3,
    rounds=5,
    epochs=None,
    steps=1,
    batch_size=16,
    lr=0.02,
)
STOPPED = 4


class Stop(Exception):
    pass


def stop(result, timing):
    if result.number == STOPPED:
        raise Stop


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    path = tmp_path_factory.mktemp("alone") / "run"
    run(SHORT, path)
    return path


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Stop):
        run(SHORT, path, on_round=stop)
    return path


@pytest.fixture
def stopped(stopped_once, tmp_path):
    return shutil.copytree(stopped_once, tmp_path / "run")


def content(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def ends_like(path, reference):
    for name in ("metrics.jsonl", "checkpoint.safetensors"):
        assert (path / name).read_bytes() == (reference / name).read_bytes()


def referred_to(path, rounds):
    """A memory file that the newest checkpoint refers to, of one of these rounds."""
    memories = final_checkpoint(path).memories
    client = next(client for client, round in sorted(memories.items()) if round in rounds)
    return memory_file(path / "clients", client, memories[client])


def flip(path):
    changed = bytearray(path.read_bytes())
    changed[-3] ^= 16
    path.write_bytes(changed)


def another(path):
    """An intact file of that client and round, with other numbers."""
    client, round = map(int, path.stem.split("-"))
    groups = read_memory(path)
    next(iter(groups["control"].values())).add_(1)
    write_memory(path, groups, origin=(client, round))


DAMAGE = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": flip,
    "another": another,
    "lost": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_memory_file_makes_the_run_fall_back(stopped, alone, damage):
    file = referred_to(stopped, [STOPPED])
    damage(file)
    resume(stopped)
    ends_like(stopped, alone)
    log = (stopped / "log.txt").read_text()
    (line,) = [line for line in log.splitlines() if str(file) in line]
    assert f"Falling back to the previous checkpoint, of round {STOPPED - 1}." in line
    assert f"resumed after round {STOPPED - 1}" in log


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_of_both_checkpoints_is_rejected_by_name(stopped, alone, damage):
    """Even if that client is not in a later cohort."""
    file = referred_to(stopped, range(1, STOPPED - 1))
    whole = file.read_bytes()
    damage(file)
    (stopped / "clients" / "0" / ".ab.part.safetensors").write_bytes(b"torn")
    before = content(stopped)
    with pytest.raises(
        RunError, match=rf"no checkpoint in .* can be used: .*{file}.*The folder is unchanged"
    ):
        resume(stopped)
    assert content(stopped) == before
    file.write_bytes(whole)
    resume(stopped)
    ends_like(stopped, alone)


def test_only_files_that_the_checkpoint_refers_to_are_read(stopped, alone):
    current = {
        memory_file(stopped / "clients", *entry) for entry in final_checkpoint(stopped).memories.items()
    }
    older = {*(stopped / "clients").glob("*/*.safetensors")} - current
    assert older
    for file in older:
        file.write_bytes(b"")
    resume(stopped)
    ends_like(stopped, alone)


def test_a_failed_checkpoint_write_leaves_both_old_ones(stopped, alone, monkeypatch):
    rounds = [final_checkpoint(stopped).round, read_checkpoint(stopped / PREVIOUS).round]

    def full(*words):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(checkpoint, "write_tensors", full)
        with pytest.raises(OSError, match="No space"):
            resume(stopped)
    assert rounds == [STOPPED, STOPPED - 1]
    assert [final_checkpoint(stopped).round, read_checkpoint(stopped / PREVIOUS).round] == rounds
    (stopped / NEXT).write_bytes(b"torn")
    resume(stopped)
    ends_like(stopped, alone)
    assert not (stopped / NEXT).exists()


def without_digests(path):
    """As an earlier version wrote it."""
    for name in ("checkpoint.safetensors", "checkpoint.previous.safetensors"):
        state, metadata = read_tensors(path / name)
        del state["digests"], metadata["metrics"]
        write_tensors(path / name, state, metadata)


def test_a_checkpoint_without_digests_is_resumed_and_gets_them(stopped, alone):
    without_digests(stopped)
    resume(stopped)
    ends_like(stopped, alone)


@pytest.mark.parametrize("name", ["emptied", "cut", "zeroed", "flipped", "lost"])
def test_damage_is_detected_without_digests_too(stopped, alone, name):
    without_digests(stopped)
    DAMAGE[name](referred_to(stopped, [STOPPED]))
    resume(stopped)
    ends_like(stopped, alone)


def change(path, line):
    lines = path.read_bytes().splitlines(keepends=True)
    numbers = json.loads(lines[line])
    numbers["accuracy"] = 0.999
    lines[line] = json.dumps(numbers).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def test_a_changed_number_of_the_last_round_is_recomputed(stopped, alone):
    change(stopped / "metrics.jsonl", STOPPED - 1)
    resume(stopped)
    ends_like(stopped, alone)
    assert "do not match their digest in the checkpoint" in (stopped / "log.txt").read_text()


@pytest.mark.parametrize("path", ["stopped", "finished"])
def test_a_changed_number_of_an_earlier_round_is_rejected_by_name(stopped, path):
    if path == "finished":
        resume(stopped)
    change(stopped / "metrics.jsonl", 1)
    before = content(stopped)
    with pytest.raises(RunError, match=r"the first \d lines of .*metrics\.jsonl do not match their digest"):
        resume(stopped)
    assert content(stopped) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("end", [bytes(100), bytes(50) + b'tes": []}\n', b'{"round": 5\n'], ids=range(3))
def test_a_damaged_tail_is_dropped(stopped, alone, name, end):
    with (stopped / name).open("ab") as file:
        file.write(end)
    resume(stopped)
    ends_like(stopped, alone)
    assert len(read_run(stopped).timing) == SHORT.rounds


def test_a_damaged_first_line_is_written_again(stopped, alone):
    """Before the first checkpoint there is at most one line."""
    for file in [*stopped.glob("checkpoint.*"), *(stopped / "clients").glob("*/*")]:
        file.unlink()
    for name in ("metrics.jsonl", "timing.jsonl"):
        (stopped / name).write_bytes(bytes(90) + b"\n")
    resume(stopped)
    ends_like(stopped, alone)


def test_a_line_may_have_more_fields(stopped):
    path = stopped / "metrics.jsonl"
    line = json.loads(path.read_bytes().splitlines()[0])
    path.write_text(json.dumps(line | {"personal": {"clients": 10}}) + "\n")
    assert read_run(stopped).metrics == [line | {"personal": {"clients": 10}}]


def test_killed_and_damaged_runs_resume_or_are_rejected():
    """Real SIGKILLs and then damage as from a power loss. The benchmark does a hundred."""
    done = subprocess.run(
        [sys.executable, POWER_LOSS, "--kills", "3", "--only", "sequential: scaffold"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r": (goes on|fell back|refused by name)", done.stdout)) == 3
    assert re.search(r"3 kills, .* (\d+) of \1 finished folders have the same bytes", done.stdout), (
        done.stdout
    )


@pytest.fixture
def events(monkeypatch):
    """Every sync and rename, in order."""
    seen = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(handle):
        seen.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def watched_replace(source, target):
        replace(source, target)
        seen.append(("name", str(target)))

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return seen


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_memory_files_are_synced_before_their_checkpoint(tmp_path, events):
    path = tmp_path / "run"
    run(SHORT, path)
    checkpoints = [
        i for i, event in enumerate(events) if event == ("name", str(path / "checkpoint.safetensors"))
    ]
    assert len(checkpoints) == SHORT.rounds
    for round, (start, end) in enumerate(zip([0, *checkpoints], checkpoints, strict=False), 1):
        here = events[start:end]
        files = [name for kind, name in here if kind == "name" and name.endswith(f"-{round}.safetensors")]
        assert len(files) == SHORT.cohort
        for name in files:
            assert here.index(("sync", name)) > here.index(("name", name))
        folders = [("sync", str(path / "clients" / "0")), ("sync", str(path / "clients"))]
        assert all(
            here.index(folder) > max(here.index(("sync", name)) for name in files) for folder in folders
        )
        assert here.index(("sync", str(path / "metrics.jsonl")))
        assert events[end + 1] == ("sync", str(path)), "the checkpoint's own name"
    assert ("sync", str(tmp_path)) in events[: checkpoints[0]], "the folder's own name"


def test_a_full_disk_at_the_sync_is_reported_with_the_file(tmp_path, monkeypatch):
    disk = OnDisk(tmp_path)
    disk.put(7, 1, {"private": {"w": torch.ones(2)}})

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"7-1\.safetensors could not be written: No space left on device\."):
        disk.secure(1, [7])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_durable_write_syncs_the_folder_too(tmp_path, events):
    write_bytes(tmp_path / "a", b"content")
    content, name, folder = events
    assert (content[0], name, folder) == ("sync", ("name", str(tmp_path / "a")), ("sync", str(tmp_path)))
    events.clear()
    write_bytes(tmp_path / "a", b"content", durable=False)
    assert events == [("name", str(tmp_path / "a"))]
