"""Runs killed at random moments and resumed, against the same run left alone: every byte must agree.

    python benchmarks/crash.py [--kills 50] [--seed 0] [--only TEXT]

Half of the kills (SIGKILL) come after a random time, half at a random operation on a file of the folder (open, mkdir,
chmod, fsync, rename, unlink), where a crash hurts most. A folder is resumed and killed again until it is finished, then
compared with the uninterrupted one: the metrics, the checkpoint, and every client's memory.

On Flower, the server and its nodes are one process here, so all of them die at once; `chaos.py` kills real SuperNodes,
ServerApps and SuperLinks one at a time. Under torchrun, one of two ranks is killed, or both at once; a rank that is
left ends by itself, or is stopped as torchrun does. Ranks are forked with torchrun's environment, which saves their
imports. A sweep or a tuning is a command: half of the time `fedpara resume FOLDER` continues its runs first, and then
the same command again.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from kill_cases import CASES, Case

from fedpara.apps.flower.processes import free_port
from fedpara.engines.distributed.process_group import join
from fedpara.experiments.storage.checkpoint import CHECKPOINT, read_checkpoint
from fedpara.experiments.storage.client_files import memory_file
from fedpara.experiments.storage.run_folder import NODES
from fedpara.files import PART

PRELOADED = ("torch._dynamo", "dp_accounting", "fedpara.secure.client", "fedpara.apps.studies.tune")
"""What a run would import when it needs it: here once, and not in every child."""
WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod")
OPERATIONS = 120
LEFT_ALONE = 30.0
"""Seconds until a rank that is left is stopped, as torchrun does: one that waits for the others does not end."""


@dataclass
class Tally:
    kills: int = 0
    mid_run: int = 0
    folders: int = 0
    differing: int = 0


@dataclass(frozen=True)
class Fate:
    """How a start ends: after some seconds, or at an operation on a file. `of` are the ranks that are killed."""

    seconds: float | None = None
    operation: int | None = None
    of: tuple[int, ...] = (0,)

    @classmethod
    def drawn(cls, case: Case, length: float, rng: random.Random, operations: int = OPERATIONS) -> "Fate":
        of = rng.choice([(0,), (1,), (0, 1)]) if case.ranks > 1 else (0,)
        if rng.random() < 0.5:
            return cls(seconds=rng.uniform(0, length), of=of)
        return cls(operation=rng.randint(1, operations * (3 if case.command else 1)), of=of)


SPARED = Fate()


def preload() -> None:
    torch.set_num_threads(1)  # a fork has only the thread that called it
    for name in PRELOADED:
        import_module(name)


def killed(case: Case, path: Path, fate: Fate = SPARED, takes_up: bool = False) -> bool:
    """Start the case, or go on with it, and wait for its end. True if it was killed; a failure ends all."""
    port = str(free_port())
    children = []
    for rank in range(case.ranks):
        child = os.fork()
        if not child:
            _run_child(case, path, rank, port, fate, takes_up)
        children.append(child)
    began = time.monotonic()
    ends = began + fate.seconds if fate.seconds is not None else float("inf")
    statuses: dict[int, int] = {}
    first: float | None = None
    while len(statuses) < len(children):
        for rank, child in enumerate(children):
            if rank not in statuses:
                done, status = os.waitpid(child, os.WNOHANG)
                statuses |= {rank: status} if done else {}
        now = time.monotonic()
        if now >= ends:
            for rank in fate.of:
                if rank not in statuses:
                    os.kill(children[rank], signal.SIGKILL)
            ends = float("inf")
        if statuses and first is None:
            first = now
        if first is not None and now - first > LEFT_ALONE and len(statuses) < len(children):
            for rank in {*range(case.ranks)} - {*statuses}:
                os.kill(children[rank], signal.SIGKILL)
        time.sleep(0.002)
    if any(os.WIFSIGNALED(status) for status in statuses.values()):
        return True
    if any(os.WEXITSTATUS(status) for status in statuses.values()):
        sys.exit(f"{case.name} in {path} could not go on: {_errors(path).read_text()}")
    return False


def _run_child(case: Case, path: Path, rank: int, port: str, fate: Fate, takes_up: bool) -> None:
    """In a child: run the folder and end the process."""
    join.cache_clear()
    if case.ranks > 1:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": str(rank)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks), **where}
    quiet = os.open(_errors(path), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if fate.operation is not None and rank in fate.of:
        _die_at(fate.operation, path)
    try:
        case.play(path, takes_up)
        join().leave()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _errors(path: Path) -> Path:
    return path.with_name(f"{path.name}.txt")


def _die_at(operation: int, path: Path) -> None:
    left = operation

    def one_more() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WRITES and str(arguments[0]).startswith(str(path)):
            one_more()

    def watched(sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def fsync(handle: Any) -> None:
            one_more()
            sync(handle)

        return fsync

    sys.addaudithook(watch)
    os.fsync = watched(os.fsync)  # type: ignore[assignment]


def interrupted(case: Case, path: Path, length: float, limit: int, rng: random.Random) -> Tally:
    """One folder, killed again and again until it is finished, at most `limit` times."""
    tally = Tally(folders=1)
    while True:
        fate = Fate.drawn(case, length, rng) if tally.kills < limit else SPARED
        if not killed(case, path, fate, takes_up=rng.random() < 0.5):
            return tally
        tally.kills += 1
        tally.mid_run += any(path.rglob("metrics.jsonl"))


COMPARED = (
    *("config.toml", "metrics.jsonl", "clients.jsonl", "model.json", "data.json", CHECKPOINT),
    *("sources.json", "grid.json", "chosen.json"),
)


def contents(path: Path) -> dict[str, Any]:
    """All that must not depend on the interruptions, by its place below the folder: of one run, or of several."""
    found: dict[str, Any] = {
        str(file.relative_to(path)): file.read_bytes() for name in COMPARED for file in path.rglob(name)
    }
    for file in path.rglob(CHECKPOINT):
        nodes = file.parent / NODES
        for client, round in read_checkpoint(file).memories.items():
            kept = memory_file(file.parent / "clients", client, round)
            found[str(kept.relative_to(path))] = kept.read_bytes()
            if nodes.exists():
                home = path.with_name(f"{path.name}-nodes") / f"node-{client % 3}"
                on_node = home / f"nodes-{nodes.read_text().strip()}" / str(client) / f"{round}.safetensors"
                found[f"on its node: {client}"] = on_node.read_bytes()
    found["leftovers"] = sorted(str(left) for left in path.rglob(PART))
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


def trial(case: Case, kills: int, rng: random.Random, scratch: Path) -> Tally:
    alone = scratch / "alone"
    began = time.monotonic()
    killed(case, alone)
    length = time.monotonic() - began
    reference = contents(alone)
    total = Tally()
    while total.kills < kills:
        path = scratch / str(total.folders)
        one = interrupted(case, path, length, kills - total.kills, rng)
        total.kills += one.kills
        total.mid_run += one.mid_run
        total.folders += 1
        if differing := differences(contents(path), reference):
            total.differing += 1
            print(f"{case.name}, folder {total.folders}: other bytes in {', '.join(differing)}", flush=True)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="of all runs together")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the moments; drawn and printed if left out"
    )
    parser.add_argument("--only", default="", help="only runs with this text in their name")
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    chosen = [case for name, case in CASES.items() if given.only in name]
    preload()
    print(f"{'engine':11} {'feature':34} {'kills':>6} {'mid-run':>8} {'folders':>8} {'the same bytes':>15}")
    wrong, kills, folders, began = 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for i, case in enumerate(chosen):
            (within := Path(scratch) / str(i)).mkdir()
            tally = trial(case, (given.kills + i) // len(chosen), random.Random(seed + i), within)
            wrong, kills, folders = wrong + tally.differing, kills + tally.kills, folders + tally.folders
            same = f"{tally.folders - tally.differing} of {tally.folders}"
            print(
                f"{case.engine:11} {case.feature:34} {tally.kills:6} {tally.mid_run:8} {tally.folders:8} {same:>15}",
                flush=True,
            )
    print(f"{kills} kills, {folders - wrong} of {folders} folders the same, {time.monotonic() - began:.0f} s")
    print(f"seed {seed}, one thread, Python {sys.version.split()[0]}, torch {torch.__version__}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
