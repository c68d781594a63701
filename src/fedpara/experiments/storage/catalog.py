"""Library: run folders found by what they are, whole ones and their small form alike.

The small form, what `results/` keeps, is a finished run without its checkpoint:

    config.toml  environment.json  metrics.jsonl  timing.jsonl
"""

import fnmatch
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from fedpara.errors import ConfigError, FedParaError, RunError, UsageError, in_a_line
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.checkpoint import CHECKPOINT, PREVIOUS
from fedpara.experiments.storage.run_folder import LOCK
from fedpara.experiments.storage.summary import Summary, read_run
from fedpara.files import write_bytes

SMALL = ("config.toml", "metrics.jsonl", "timing.jsonl")
BESIDE = ("environment.json", "model.json", "data.json", "metrics.jsonl", CHECKPOINT, PREVIOUS)
"""Of these a run has at least one beside its config: the first is written before it."""
OWN = (*SMALL, *BESIDE, LOCK, "log.txt", "clients", "nodes*")
"""What is the run's own in its folder, and with it all below."""


@dataclass(frozen=True)
class Library:
    """The run folders below some roots, by the identity of their experiments. One that cannot be read keeps nobody from
    the others: `damaged` says why."""

    runs: dict[str, tuple[Summary, ...]]
    damaged: dict[Path, RunError] = field(default_factory=dict)

    @classmethod
    def of(cls, *roots: Path) -> "Library":
        found: dict[str, list[Summary]] = {}
        damaged: dict[Path, RunError] = {}
        for path in _folders(roots):
            try:
                summary = read_run(path)
            except FedParaError as error:
                damaged[path] = RunError(str(error))
            except OSError as error:
                damaged[path] = RunError(f"{path} cannot be read ({in_a_line(error)}).")
            else:
                found.setdefault(summary.experiment.identity, []).append(summary)
        return cls({identity: tuple(runs) for identity, runs in found.items()}, damaged)

    def __repr__(self) -> str:
        runs, damaged = sum(map(len, self.runs.values())), len(self.damaged)
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        return f"Library({runs} runs of {len(self.runs)} experiments, {seeds}, {damaged} damaged)"

    def refuse_damaged(self, done: str) -> None:
        """RunError that names them, after the others are `done`."""
        if self.damaged:
            count, rest = len(self.damaged), f"; the others are {done}" * bool(self.runs)
            told = " ".join(map(str, self.damaged.values()))
            raise RunError(f"{count} run{'s' * (count > 1)} cannot be read{rest}. {told}")

    def __iter__(self) -> Iterator[Summary]:
        return (run for runs in self.runs.values() for run in runs)

    @property
    def seeds(self) -> list[int]:
        return sorted({run.experiment.seed for run in self})

    def find(self, experiment: Experiment) -> Summary | None:
        """The run that did this experiment's rounds, cut to them; None if none did them all and was scored there."""
        done = [run for run in self.runs.get(experiment.identity, ()) if _holds(run, experiment.rounds)]
        return cut(done[0], experiment.rounds) if done else None

    def name_of(self, run: Summary) -> str:
        """`paper/cifar10-iid-...`: what a run is called beside the others, with the folder it lies in."""
        return self._names[run.path]

    def begun(self, experiment: Experiment) -> Path | None:
        """The folder, of those that can go on to the experiment's last round, which is furthest."""
        paths = [
            (run.rounds, run.path)
            for run in self.runs.get(experiment.identity, ())
            if run.rounds < experiment.rounds
            and (not run.metrics or any((run.path / name).exists() for name in (CHECKPOINT, PREVIOUS)))
        ]
        return max(paths)[1] if paths else None

    @cached_property
    def _names(self) -> dict[Path, str]:
        """The last two parts of each path, and as many more as tell it from all others."""
        names: dict[Path, str] = {}
        left, parts = {run.path for run in self}, 2
        while left:
            tails = Counter(path.parts[-parts:] for path in left)
            alone = [path for path in left if tails[path.parts[-parts:]] == 1]
            names |= {path: Path(*path.parts[-parts:]).as_posix() for path in alone}
            left, parts = left.difference(alone), parts + 1
        return names


def finished(run: Summary, rounds: int) -> bool:
    """All rounds asked for are in its metrics, whether or not a checkpoint is there."""
    return run.rounds >= rounds


def _holds(run: Summary, rounds: int) -> bool:
    """Finished; and a longer one has a score of that round, which a run that ends there always has."""
    return run.rounds == rounds or (
        finished(run, rounds) and cut(run, rounds).metrics[-1]["accuracy"] is not None
    )


def cut(run: Summary, rounds: int) -> Summary:
    """The run as it stood after so many rounds."""
    return replace(run, metrics=run.metrics[:rounds], timing=run.timing[:rounds])


def save_small(run: Path, into: Path) -> Path:
    """The small form of a run folder, in a folder of the same name below `into`: that of another run stays."""
    if run.resolve().parent == into.resolve():
        raise ConfigError(f"{run} lies in {into} already: choose another folder for its small form.")
    found, target = read_run(run), into / run.name
    if (target / "config.toml").exists():
        there = read_run(target).metrics
        if there != found.metrics[: len(there)]:
            raise ConfigError(
                f"{target} holds another run than {run}: move it away first, nothing is overwritten."
            )
    try:
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{run / 'environment.json'} cannot be read ({error}): it says where the run ran."
        ) from None
    target.mkdir(parents=True, exist_ok=True)
    for name in SMALL:
        if (run / name).exists():
            shutil.copyfile(run / name, target / name)
    # Where things lay on one machine is no one else's business.
    words = environment.get("command", [])
    environment["command"] = [Path(word).name if word.startswith("/") else word for word in words]
    write_bytes(target / "environment.json", (json.dumps(environment, indent=2) + "\n").encode())
    return target


def _folders(roots: Iterable[Path]) -> list[Path]:
    """Each run folder once: a root itself or anything below it that is one."""
    found: dict[Path, None] = {}
    for root in roots:
        if not root.is_dir():
            continue
        paths = [root] if is_run(root) else sorted(p.parent for p in root.rglob("config.toml"))
        found |= dict.fromkeys(path.resolve() for path in paths if is_run(path))
    return list(found)


def is_run(folder: Path) -> bool:
    """A config by itself is someone's own, to be given with --config."""
    return os.path.exists(folder / "config.toml") and any(os.path.exists(folder / name) for name in BESIDE)


def refuse_own(path: Path) -> None:
    """UsageError for a place that is a run's own, whatever lies there now."""
    place = Path(os.path.realpath(path.parent), path.name)
    for folder in place.parents:
        first = place.relative_to(folder).parts[0]
        if is_run(folder) and any(fnmatch.fnmatch(first, pattern) for pattern in OWN):
            raise UsageError(f"{path} is a name of the run's own in {folder}: choose another --out.")
