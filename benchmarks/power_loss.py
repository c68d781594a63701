"""Runs killed at random moments, with files damaged as a power loss would: each resumes to the same bits or is refused.

    OMP_NUM_THREADS=1 python benchmarks/power_loss.py [--kills 100] [--seed 0] [--only TEXT]

It forks, and a fork of a process with more threads may wait for ever.
The runs are those of `kill_cases.py`, without its commands, in turn. After each kill (SIGKILL; `crash.py` says when)
files of the run folder are emptied, cut, zeroed, flipped or removed:

    unsynced   files written since the newest checkpoint, the ends of metrics.jsonl and timing.jsonl after it
    newest     also what the newest checkpoint alone counts on: its clients' files, its line, or itself; a disk that
               said it had synced and had not
    both       also a file that both checkpoints count on

Before round 2, and between a fall back and the next checkpoint, a folder has one checkpoint only: damage to what it
counts on is refused.
A folder that is refused must name a damaged file and be left as it is, byte for byte; the damaged files are then
brought back, and it goes on. Every finished folder is compared with the run left alone, as in `crash.py`. A kill that
leaves nothing to damage does not count.
"""

import argparse
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from crash import OPERATIONS, Fate, contents, differences, killed, preload
from kill_cases import CASES, Case

from fedpara.errors import RunError
from fedpara.experiments.build import build
from fedpara.experiments.storage.checkpoint import CHECKPOINT, PREVIOUS, Checkpoint, read_checkpoint
from fedpara.experiments.storage.client_files import memory_file, memory_files
from fedpara.experiments.storage.jsonl import raw_lines
from fedpara.experiments.storage.run_folder import open_run
from fedpara.files import PART

KINDS = {"unsynced": 0.4, "newest": 0.4, "both": 0.2}


def emptied(content: bytes, rng: random.Random) -> bytes:
    return b""


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def zeroed(content: bytes, rng: random.Random) -> bytes:
    """Its length was written, the rest of the content was not."""
    start = rng.randrange(len(content))
    return content[:start] + bytes(len(content) - start)


def flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return bytes(changed)


WAYS: list[Callable[[bytes, random.Random], bytes]] = [emptied, cut, zeroed, flipped]


class Folder:
    """A run folder between two starts, and what was damaged in it."""

    def __init__(self, path: Path, case: Case) -> None:
        self.path, self.case = path, case
        self.whole: dict[Path, bytes] = {}
        self.told: list[str] = []
        self.newest, self.count = 0, 0

    def damage(self, file: Path, rng: random.Random, after: int = 0) -> None:
        """Damage the file's content from byte `after` on."""
        content = file.read_bytes()
        if len(content) <= after:
            return
        self.whole.setdefault(file, content)
        if after == 0 and rng.random() < 0.2:
            file.unlink()
            self.told.append(f"{file.name} lost")
            return
        way = rng.choice(WAYS)
        file.write_bytes(content[:after] + way(content[after:], rng))
        self.told.append(f"{file.name} {way.__name__}")

    def bring_back(self) -> None:
        for file, content in self.whole.items():
            file.write_bytes(content)
        self.whole, self.told = {}, []

    def content(self) -> dict[Path, bytes]:
        return {file: file.read_bytes() for file in self.path.rglob("*") if file.is_file()}

    def checkpoints(self) -> list[tuple[Path, Checkpoint]]:
        paths = [self.path / name for name in (CHECKPOINT, PREVIOUS) if (self.path / name).exists()]
        return [(path, read_checkpoint(path)) for path in paths]

    def lose_power(self, kind: str, rng: random.Random) -> None:
        checkpoints = self.checkpoints()
        newest = self.newest = checkpoints[0][1].round if checkpoints else 0
        self.count = len(checkpoints)
        for _, round, file in list(memory_files(self.path / "clients")):
            if round > newest and rng.random() < 0.7:
                self.damage(file, rng)
        for file in list(self.path.rglob(PART)):
            self.damage(file, rng)
        for name in ("metrics.jsonl", "timing.jsonl"):
            if (file := self.path / name).exists() and rng.random() < 0.7:
                self.damage(file, rng, after=len(b"".join(raw_lines(file)[:newest])))
        if kind == "newest" and checkpoints:
            self._damage_newest(checkpoints, rng)
        if kind == "both" and checkpoints:
            of_both = set.intersection(*(self._counted_on(checkpoint) for _, checkpoint in checkpoints))
            for file in rng.sample(sorted(of_both), min(len(of_both), 1)):
                self.damage(file, rng)

    def _damage_newest(self, checkpoints: list[tuple[Path, Checkpoint]], rng: random.Random) -> None:
        path, newest = checkpoints[0]
        files = self._counted_on(newest)
        for _, older in checkpoints[1:]:
            files -= self._counted_on(older)
        for file in rng.sample(sorted(files), rng.randint(0, len(files))):
            self.damage(file, rng)
        if rng.random() < 0.3:
            self.damage(path, rng)
        if rng.random() < 0.3:
            metrics = self.path / "metrics.jsonl"
            self.damage(metrics, rng, after=len(b"".join(raw_lines(metrics)[: newest.round - 1])))

    def _counted_on(self, checkpoint: Checkpoint) -> set[Path]:
        return {memory_file(self.path / "clients", *entry) for entry in checkpoint.memories.items()}


def opened(folder: Folder, data: str) -> str:
    """How the folder opens. A refusal that names no damaged file or changes anything ends all."""
    before = folder.content()
    try:
        run = open_run(folder.path, folder.case.experiment, data)
    except RunError as error:
        if folder.content() | {folder.path / ".lock": b""} != before | {folder.path / ".lock": b""}:
            sys.exit(f"{folder.path} was refused and changed: {error}")
        # Where both checkpoints are lost, the newest is the one that is named.
        names = {
            name for file in folder.whole for name in (file.name, file.name.replace(PREVIOUS, CHECKPOINT))
        }
        if not any(name in str(error) for name in names):
            sys.exit(f"{folder.path} was refused without the name of a damaged file: {error}")
        folder.bring_back()
        again = open_run(folder.path, folder.case.experiment, data)
        again.close()
        return f"refused by name; brought back, goes on after round {again.progress.round if again.progress else 0}"
    run.close()
    folder.whole, folder.told = {}, []
    at = run.progress.round if run.progress else 0
    return f"fell back to round {at}" if at < folder.newest else f"goes on after round {at}"


def expected(kind: str, checkpoints: int) -> tuple[str, ...]:
    """Damage to what nothing counts on changes nothing, and what the newest alone counts on is made again."""
    if kind == "unsynced":
        return ("goes on",)
    return (
        ("goes on", "fell back") if kind == "newest" and checkpoints == 2 else ("goes on", "fell", "refused")
    )


def trial(case: Case, kills: int, rng: random.Random, scratch: Path) -> Counter[str]:
    """Folders of one case, until that many kills were followed by damage."""
    data = build(case.experiment).digest
    alone = scratch / "alone"
    began = time.monotonic()
    killed(case, alone)
    length = time.monotonic() - began
    reference = contents(alone)
    tally: Counter[str] = Counter()
    folder = Folder(scratch / "0", case)
    while tally["kills"] < kills:
        fate = Fate.drawn(case, length, rng, 2 * OPERATIONS)
        if not killed(case, folder.path, fate):
            _finish(folder, reference, tally)
            folder = Folder(scratch / str(tally["folders"]), case)
            continue
        if not (folder.path / "config.toml").exists():
            continue
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        folder.lose_power(kind, rng)
        if not folder.told:
            continue
        told, outcome = ", ".join(folder.told), opened(folder, data)
        if not outcome.startswith(expected(kind, folder.count)):
            sys.exit(f"{case.name}: {kind}, {folder.count} checkpoints, {told}: {outcome}")
        tally["kills"] += 1
        tally[" ".join(outcome.split()[:2])] += 1
        checkpoints = f"{folder.count} checkpoint{'s' * (folder.count != 1)}"
        print(f"{case.name}, {checkpoints}, {kind:8}: {told}: {outcome}", flush=True)
    killed(case, folder.path)
    _finish(folder, reference, tally)
    return tally


def _finish(folder: Folder, reference: dict[str, object], tally: Counter[str]) -> None:
    tally["folders"] += 1
    differing = differences(contents(folder.path), reference)
    tally["the same"] += not differing
    said = f"other bytes in {', '.join(differing)}" if differing else "the same bytes"
    print(f"{folder.case.name}, folder {tally['folders']} finished: {said}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="drawn and printed if left out")
    parser.add_argument("--only", default="", help="only runs with this text in their name")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    chosen = [case for name, case in CASES.items() if given.only in name and not case.command]
    print(
        f"seed {seed}, one thread, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
        flush=True,
    )
    preload()
    tally: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        for i, case in enumerate(chosen):
            (within := Path(scratch) / str(i)).mkdir()
            tally += trial(case, (given.kills + i) // len(chosen), random.Random(seed + i), within)
    print(
        f"{len(chosen)} runs: {tally['kills']} kills, files damaged after each; "
        f"{tally['goes on']} went on at the newest checkpoint, {tally['fell back']} fell back one, "
        f"{tally['refused by']} refused by name and left as they were; "
        f"{tally['the same']} of {tally['folders']} finished folders have the same bytes"
    )
    return 0 if tally["the same"] == tally["folders"] else 1


if __name__ == "__main__":
    sys.exit(main())
