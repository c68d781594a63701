"""Library: run folders, found by their experiment.

`results/` holds archived runs: finished runs without their checkpoint and client memories.

    config.toml  environment.json  metrics.jsonl  timing.jsonl
    sources.json if the config has references, model.json if it names a metric other than the accuracy
    clients.jsonl if clients were scored on their own test data
"""

import fnmatch
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from fedpara.errors import ConfigError, FedParaError, RunError, UsageError, in_a_line
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.checkpoint import CHECKPOINT, PREVIOUS, checkpoint_files
from fedpara.experiments.storage.client_scores import CLIENT_SCORES
from fedpara.experiments.storage.environment import read_environment
from fedpara.experiments.storage.run_folder import LOCK, OUTPUT
from fedpara.experiments.storage.sources import SOURCES
from fedpara.experiments.storage.summary import Primary, Summary, read_run, score_of
from fedpara.files import write_bytes

ARCHIVED = ("metrics.jsonl", "timing.jsonl", CLIENT_SCORES, SOURCES, "config.toml")
"""In the order in which they are copied: a folder without a config is no run yet."""
RUN_FILES = ("environment.json", "model.json", "data.json", "metrics.jsonl", CHECKPOINT, PREVIOUS)
"""A run folder has at least one of these files beside its config."""
OWN = (*ARCHIVED, *RUN_FILES, LOCK, "log.txt", OUTPUT, "clients", "nodes*")
"""The files and folders of a run."""


@dataclass(frozen=True)
class Library:
    """The run folders below some roots, by the identity of their experiments.

    `damaged` holds the folders that cannot be read, with the reason.
    """

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
        """RunError if there are damaged folders. `done` says what happened to the others, such as "archived"."""
        if self.damaged:
            count, rest = len(self.damaged), f"; the others are {done}" * bool(self.runs)
            reasons = " ".join(map(str, self.damaged.values()))
            raise RunError(f"{count} run{'s' * (count > 1)} cannot be read{rest}. {reasons}")

    def __iter__(self) -> Iterator[Summary]:
        return (run for runs in self.runs.values() for run in runs)

    @property
    def seeds(self) -> list[int]:
        return sorted({run.experiment.seed for run in self})

    def find(self, experiment: Experiment) -> Summary | None:
        """The run of this experiment, cut to its rounds. None unless a run did them and was scored at the last."""
        done = [run for run in self.runs.get(experiment.identity, ()) if _holds(run, experiment.rounds)]
        return cut(done[0], experiment.rounds) if done else None

    def name_of(self, run: Summary) -> str:
        """A unique name of the run: its folder and the parent folder, such as `paper/cifar10-iid-...`."""
        return self._names[run.path]

    def resumable(self, experiment: Experiment) -> Path | None:
        """The resumable folder of this experiment with the most rounds, if any."""
        paths = [
            (run.rounds, run.path)
            for run in self.runs.get(experiment.identity, ())
            if run.rounds < experiment.rounds and (not run.metrics or checkpoint_files(run.path))
        ]
        return max(paths)[1] if paths else None

    @cached_property
    def _names(self) -> dict[Path, str]:
        """The last two parts of each path, or more if they are not unique."""
        names: dict[Path, str] = {}
        left, parts = {run.path for run in self}, 2
        while left:
            tails = Counter(path.parts[-parts:] for path in left)
            alone = [path for path in left if tails[path.parts[-parts:]] == 1]
            names |= {path: Path(*path.parts[-parts:]).as_posix() for path in alone}
            left, parts = left.difference(alone), parts + 1
        return names


def finished(run: Summary, rounds: int) -> bool:
    """Whether the metrics hold that many rounds."""
    return run.rounds >= rounds


def _holds(run: Summary, rounds: int) -> bool:
    """Whether the run ended at that round, or is longer and was scored at it."""
    return run.rounds == rounds or (finished(run, rounds) and score_of(run.metrics[rounds - 1]) is not None)


def cut(run: Summary, rounds: int) -> Summary:
    """The run as it was after that many rounds."""
    return replace(run, metrics=run.metrics[:rounds], timing=run.timing[:rounds])


def archive_run(run: Path, into: Path, name: str | None = None) -> Path:
    """Archive a run folder as the folder `name` (default: its own) in `into`. Another run there is not overwritten."""
    found, target = read_run(run), into / (name or run.name)
    if (target / "config.toml").exists():
        there = read_run(target).metrics
        if there != found.metrics[: len(there)]:
            raise ConfigError(
                f"{target} already holds a different run than {run}: move it away, or choose another folder."
            )
    environment = read_environment(run)
    target.mkdir(parents=True, exist_ok=True)
    named = () if found.metric == Primary() else ("model.json",)
    # Absolute paths are private to the machine.
    words = environment.get("command", [])
    environment["command"] = [Path(word).name if word.startswith("/") else word for word in words]
    write_bytes(target / "environment.json", (json.dumps(environment, indent=2) + "\n").encode())
    for name in (*named, *ARCHIVED):
        if (run / name).exists():
            write_bytes(target / name, (run / name).read_bytes())
    return target


def _folders(roots: Iterable[Path]) -> list[Path]:
    """Each run folder once: the roots that are run folders, and all below the other roots."""
    found: dict[Path, None] = {}
    for root in roots:
        if not root.is_dir():
            continue
        paths = [root] if is_run(root) else sorted(p.parent for p in root.rglob("config.toml"))
        found |= dict.fromkeys(path.resolve() for path in paths if is_run(path))
    return list(found)


def is_run(folder: Path) -> bool:
    """Whether the folder is a run folder. A lone config.toml may be a user's config for --config."""
    return os.path.exists(folder / "config.toml") and any(os.path.exists(folder / name) for name in RUN_FILES)


def refuse_own(path: Path) -> None:
    """UsageError if the path belongs to the files of a run, whether it exists or not."""
    place = Path(os.path.realpath(path.parent), path.name)
    for folder in place.parents:
        first = place.relative_to(folder).parts[0]
        if is_run(folder) and any(fnmatch.fnmatch(first, pattern) for pattern in OWN):
            raise UsageError(f"{path} belongs to the run in {folder}: choose another --out.")
