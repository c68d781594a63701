"""A run folder puts on the disk what it counts on, and verifies it when it is opened."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedpara.errors import RunError
from fedpara.experiments import Experiment, read_run, resume, run
from fedpara.experiments.storage import checkpoint
from fedpara.experiments.storage.checkpoint import NEXT, PREVIOUS, final_checkpoint, read_checkpoint
from fedpara.experiments.storage.client_files import OnDisk, kept_file
from fedpara.experiments.storage.tensor_files import read_groups, read_tensors, write_groups, write_tensors
from fedpara.files import write_bytes

POWER_LOSS = Path(__file__).parents[2] / "benchmarks" / "power_loss.py"

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


@pytest.fixture
def stopped(tmp_path):
    path = tmp_path / "run"
    with pytest.raises(Stop):
        run(SHORT, path, watch=stop)
    return path


def content(path):
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def ends_like(path, reference):
    for name in ("metrics.jsonl", "checkpoint.safetensors"):
        assert (path / name).read_bytes() == (reference / name).read_bytes()


def counted_on(path, rounds):
    """The file of a client that the newest checkpoint counts on, kept in one of these rounds."""
    kept = final_checkpoint(path).kept
    client = next(client for client, round in sorted(kept.items()) if round in rounds)
    return kept_file(path / "clients", client, kept[client])


def flip(path):
    changed = bytearray(path.read_bytes())
    changed[-3] ^= 16
    path.write_bytes(changed)


def another(path):
    """A whole file of that client and round, with other numbers."""
    client, round = map(int, path.stem.split("-"))
    groups = read_groups(path)
    next(iter(groups["control"].values())).add_(1)
    write_groups(path, groups, whose=(client, round))


DAMAGE = {
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped": flip,
    "another": another,
    "lost": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_client_file_takes_the_run_back_one_checkpoint(stopped, alone, damage):
    file = counted_on(stopped, [STOPPED])
    damage(file)
    resume(stopped)
    ends_like(stopped, alone)
    log = (stopped / "log.txt").read_text()
    (line,) = [line for line in log.splitlines() if str(file) in line]
    assert f"The checkpoint before it, of round {STOPPED - 1}, is used." in line
    assert f"resumed after round {STOPPED - 1}" in log


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_that_both_checkpoints_count_on_is_refused_by_name(stopped, alone, damage):
    """Also where that client would not be asked again."""
    file = counted_on(stopped, range(1, STOPPED - 1))
    whole = file.read_bytes()
    damage(file)
    (stopped / "clients" / "0" / ".ab.part.safetensors").write_bytes(b"torn")
    before = content(stopped)
    with pytest.raises(
        RunError, match=rf"no checkpoint in .* can be used: .*{file}.*The folder was left as it is"
    ):
        resume(stopped)
    assert content(stopped) == before
    file.write_bytes(whole)
    resume(stopped)
    ends_like(stopped, alone)


def test_only_files_that_the_checkpoint_names_are_read(stopped, alone):
    kept = {kept_file(stopped / "clients", *entry) for entry in final_checkpoint(stopped).kept.items()}
    older = {*(stopped / "clients").glob("*/*.safetensors")} - kept
    assert older
    for file in older:
        file.write_bytes(b"")
    resume(stopped)
    ends_like(stopped, alone)


def test_a_checkpoint_that_cannot_be_written_leaves_two(stopped, alone, monkeypatch):
    """Until the new one is whole, none is given up."""
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


def test_a_checkpoint_of_an_earlier_version_goes_on_and_gets_digests(stopped, alone):
    without_digests(stopped)
    resume(stopped)
    ends_like(stopped, alone)


@pytest.mark.parametrize("name", ["emptied", "cut", "zeroed", "flipped", "lost"])
def test_damage_is_seen_without_digests_too(stopped, alone, name):
    without_digests(stopped)
    DAMAGE[name](counted_on(stopped, [STOPPED]))
    resume(stopped)
    ends_like(stopped, alone)


def change(path, line):
    lines = path.read_bytes().splitlines(keepends=True)
    numbers = json.loads(lines[line])
    numbers["accuracy"] = 0.999
    lines[line] = json.dumps(numbers).encode() + b"\n"
    path.write_bytes(b"".join(lines))


def test_a_changed_number_of_the_last_round_is_computed_again(stopped, alone):
    change(stopped / "metrics.jsonl", STOPPED - 1)
    resume(stopped)
    ends_like(stopped, alone)
    assert "do not match its digest: they were changed" in (stopped / "log.txt").read_text()


@pytest.mark.parametrize("path", ["stopped", "finished"])
def test_a_changed_number_of_an_earlier_round_is_refused_by_name(stopped, path):
    if path == "finished":
        resume(stopped)
    change(stopped / "metrics.jsonl", 1)
    before = content(stopped)
    with pytest.raises(RunError, match=r"the first \d lines of .*metrics\.jsonl do not match its digest"):
        resume(stopped)
    assert content(stopped) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("end", [bytes(100), bytes(50) + b'tes": []}\n', b'{"round": 5\n'], ids=range(3))
def test_an_end_that_a_power_loss_left_is_dropped(stopped, alone, name, end):
    with (stopped / name).open("ab") as file:
        file.write(end)
    resume(stopped)
    ends_like(stopped, alone)
    assert len(read_run(stopped).timing) == SHORT.rounds


def test_a_first_line_that_a_power_loss_damaged_is_written_again(stopped, alone):
    """Before the first checkpoint there is one line at most."""
    for file in [*stopped.glob("checkpoint.*"), *(stopped / "clients").glob("*/*")]:
        file.unlink()
    for name in ("metrics.jsonl", "timing.jsonl"):
        (stopped / name).write_bytes(bytes(90) + b"\n")
    resume(stopped)
    ends_like(stopped, alone)


def test_a_line_may_say_more_than_its_readers_need(stopped):
    path = stopped / "metrics.jsonl"
    line = json.loads(path.read_bytes().splitlines()[0])
    path.write_text(json.dumps(line | {"personal": {"clients": 10}}) + "\n")
    assert read_run(stopped).metrics == [line | {"personal": {"clients": 10}}]


def test_three_kills_with_damaged_files_resume_or_are_refused():
    """Real SIGKILLs, then files damaged as a power loss would. The benchmark does a hundred."""
    done = subprocess.run(
        [sys.executable, POWER_LOSS, "--kills", "3"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^kill .*(goes on|fell back|refused by name)", done.stdout, re.M)) == 3
    assert re.search(r"3 kills, .* (\d+) of \1 finished folders bit-identical", done.stdout), done.stdout


@pytest.fixture
def events(monkeypatch):
    """What is put on the disk and what takes its name, in order."""
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
def test_clients_files_are_on_the_disk_before_their_checkpoint(tmp_path, events):
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


def test_a_disk_that_is_full_when_files_are_synced_is_named(tmp_path, monkeypatch):
    disk = OnDisk(tmp_path)
    disk.put(7, 1, {"private": {"w": torch.ones(2)}})

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"7-1\.safetensors could not be written: No space left on device\."):
        disk.secure(1, [7])


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_durable_file_has_its_name_on_the_disk(tmp_path, events):
    write_bytes(tmp_path / "a", b"content")
    content, name, folder = events
    assert (content[0], name, folder) == ("sync", ("name", str(tmp_path / "a")), ("sync", str(tmp_path)))
    events.clear()
    write_bytes(tmp_path / "a", b"content", durable=False)
    assert events == [("name", str(tmp_path / "a"))]
