"""Runs killed at random moments and resumed, against the same run left alone: every bit must agree.

    python benchmarks/crash.py [--kills 50] [--seed 0]

Half of the kills (SIGKILL) come after a random time, half at a random operation on a file of the run folder,
where a crash hurts most. A folder is resumed and killed again until it is finished, then compared with the
uninterrupted one: metrics.jsonl byte for byte, the checkpoint and every client's memory tensor for tensor.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedpara.experiments import Experiment, resume, run
from fedpara.experiments.storage.client_files import OnDisk
from fedpara.experiments.storage.tensor_files import read_tensors
from fedpara.files import PART

SHORT: dict[str, Any] = {
    "model": "mlp",
    "clients": 12,
    "cohort": 3,
    "rounds": 8,
    "batch_size": 16,
    "evaluate_every": 2,
}
RUNS = {
    "fedavg": Experiment(**SHORT, scheme="original"),
    "scaffold, pfedpara, float16 up": Experiment(
        **SHORT, scheme="pfedpara", algorithm="scaffold", link_up="float16", personal=True, lr=0.02
    ),
    "fedadam": Experiment(**SHORT, scheme="fedpara", init="calibrated", algorithm="fedadam", lr=0.03),
}
WRITES = ("open", "os.rename", "os.remove", "os.mkdir", "os.chmod")
OPERATIONS = 60


@dataclass
class Tally:
    kills: int = 0
    mid_run: int = 0
    folders: int = 0
    differing: int = 0


def start(experiment: Experiment, path: Path, fatal_operation: int | None = None) -> int:
    """A child that runs, or goes on with, the folder. It kills itself at that operation on one of its files."""
    child = os.fork()
    if child:
        return child
    if fatal_operation is not None:
        _die_at(fatal_operation, path)
    try:
        if (path / "config.toml").exists():
            resume(path)
        else:
            run(experiment, path)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _die_at(operation: int, path: Path) -> None:
    left = operation

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in WRITES and str(arguments[0]).startswith(str(path)):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def killed(child: int, after: float | None) -> bool:
    """Wait for the child, or kill it after that time. True if it was killed; a child that failed ends all."""
    ends = time.monotonic() + after if after is not None else float("inf")
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() >= ends:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        sys.exit("a run could not be resumed: the traceback is above")
    return False


def interrupted(experiment: Experiment, path: Path, length: float, limit: int, rng: random.Random) -> Tally:
    """One folder, killed again and again until it is finished, at most `limit` times."""
    tally = Tally(folders=1)
    while True:
        may_die = tally.kills < limit
        by_time = may_die and rng.random() < 0.5
        operation = rng.randint(1, OPERATIONS) if may_die and not by_time else None
        child = start(experiment, path, operation)
        if not killed(child, rng.uniform(0, length) if by_time else None):
            return tally
        tally.kills += 1
        tally.mid_run += (path / "metrics.jsonl").exists()


def contents(path: Path, experiment: Experiment) -> dict[str, Any]:
    """All that must not depend on the interruptions."""
    tensors, metadata = read_tensors(path / "checkpoint.safetensors")
    memory = OnDisk(path / "clients", experiment.rounds)
    kept = {
        f"{client}/{group}/{name}": tensor
        for client in range(experiment.clients)
        for group, members in (memory.get(client) or {}).items()
        for name, tensor in members.items()
    }
    return {
        "metrics": (path / "metrics.jsonl").read_bytes(),
        "config": (path / "config.toml").read_bytes(),
        "metadata": metadata,
        "tensors": {**tensors, **kept},
        "leftovers": sorted(str(left) for left in path.rglob(PART)),
    }


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (
        all(a[part] == b[part] for part in a if part != "tensors")
        and a["tensors"].keys() == b["tensors"].keys()
        and all(torch.equal(a["tensors"][name], b["tensors"][name]) for name in a["tensors"])
    )


def trial(name: str, experiment: Experiment, kills: int, rng: random.Random, scratch: Path) -> Tally:
    alone = scratch / f"{name} alone"
    began = time.monotonic()
    killed(start(experiment, alone), after=None)
    length = time.monotonic() - began
    reference = contents(alone, experiment)
    total = Tally()
    while total.kills < kills:
        path = scratch / f"{name} {total.folders}"
        one = interrupted(experiment, path, length, kills - total.kills, rng)
        total.kills += one.kills
        total.mid_run += one.mid_run
        total.folders += 1
        total.differing += not equal(contents(path, experiment), reference)
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="of all runs together")
    parser.add_argument(
        "--seed", type=int, default=None, help="of the moments; drawn and printed if left out"
    )
    given = parser.parse_args()
    seed = random.randrange(10**6) if given.seed is None else given.seed
    torch.set_num_threads(1)  # a fork has only the thread that called it
    print(f"{'run':32} {'rounds':>6} {'kills':>6} {'mid-run':>8} {'folders':>8} {'bit-identical':>14}")
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for i, (name, experiment) in enumerate(RUNS.items()):
            share = (given.kills + i) // len(RUNS)
            tally = trial(name, experiment, share, random.Random(seed + i), Path(scratch))
            wrong += tally.differing
            same = f"{tally.folders - tally.differing} of {tally.folders}"
            print(
                f"{name:32} {experiment.rounds:6} {tally.kills:6} {tally.mid_run:8} {tally.folders:8} {same:>14}",
                flush=True,
            )
    print(f"seed {seed}, one thread, Python {sys.version.split()[0]}, torch {torch.__version__}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
