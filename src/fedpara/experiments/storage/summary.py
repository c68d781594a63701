"""Summary: the contents of a run folder, read without locking it."""

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError
from fedpara.experiments.config import LATER, OWNED, Experiment, read_toml
from fedpara.experiments.storage.jsonl import read_lines


@dataclass(frozen=True)
class Summary:
    path: Path
    experiment: Experiment
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]

    @property
    def rounds(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def accuracy(self) -> float | None:
        measured = [line["accuracy"] for line in self.metrics if line["accuracy"] is not None]
        return float(measured[-1]) if measured else None

    @property
    def final(self) -> float | None:
        """The accuracy to report: of all clients' own models at the end if they were scored, else `accuracy`."""
        return self.everyone["accuracy"] if self.everyone else self.accuracy

    @property
    def of_cohort(self) -> bool:
        """Whether each personal score covers only the cohort of its round and not all clients."""
        return self.experiment.personal and self.experiment.cohort < self.clients

    @cached_property
    def clients(self) -> int:
        """The number of clients. data.json has it if the data and not the config decides it."""
        given = self.experiment.keep or self.experiment.clients
        try:
            return int(json.loads((self.path / "data.json").read_text()).get("clients", given))
        except (OSError, ValueError, RecursionError, AttributeError):
            return given

    @property
    def everyone(self) -> dict[str, Any] | None:
        """The mean `accuracy` of all clients' own models after the last round, and the number of `clients`.

        None if they were not scored.
        """
        return self.metrics[-1].get("everyone") if self.metrics else None

    @property
    def bytes_up(self) -> int:
        return int(self.metrics[-1]["total_up"]) if self.metrics else 0

    @property
    def bytes_down(self) -> int:
        return int(self.metrics[-1]["total_down"]) if self.metrics else 0

    @property
    def seconds(self) -> float:
        return float(sum(line["seconds"] for line in self.timing))

    @property
    def engine(self) -> str | None:
        """The engine of the last round, and why it was chosen."""
        return self.timing[-1].get("engine") if self.timing else None

    def __repr__(self) -> str:
        e, sent = self.experiment, (self.bytes_up + self.bytes_down) / 1e6
        accuracy = "not measured" if self.final is None else f"{self.final:.2%}"
        path = str(self.path) if len(str(self.path)) <= 120 else f"...{str(self.path)[-117:]}"
        what = f"{e.dataset}, {e.model}, {e.scheme}, {e.algorithm}, seed {e.seed}"
        return (
            f"Summary({path}\n    {what}\n"
            f"    {self.rounds} of {e.rounds} rounds, {sent:.2f} MB sent, {self.seconds:.1f} s\n"
            f"    accuracy: {accuracy})"
        )

    def reached(self, accuracy: float) -> dict[str, Any] | None:
        """The metrics of the first round with at least this accuracy."""
        return next(
            (m for m in self.metrics if m["accuracy"] is not None and m["accuracy"] >= accuracy), None
        )


def evaluations(experiment: Experiment, metrics: Iterable[dict[str, Any]]) -> list[float]:
    """The scores that patience counts, as `Schedule.evaluated` gave them."""
    every = experiment.evaluate_every
    return [m["accuracy"] for m in metrics if m["accuracy"] is not None and m["round"] % every == 0]


def stops_early(experiment: Experiment, metrics: Sequence[dict[str, Any]]) -> bool:
    """Whether these rounds met the experiment's target or used up its patience."""
    schedule = Schedule(
        experiment.rounds,
        experiment.clients,
        experiment.cohort,
        lambda client: 0,
        target=experiment.target,
        patience=experiment.patience,
    )
    met = any(schedule.reaches_target(line["accuracy"]) for line in metrics)
    return met or schedule.has_stalled(evaluations(experiment, metrics))


def read_run(path: str | os.PathLike[str]) -> Summary:
    path = Path(path)
    experiment = read_config(path)
    return Summary(path, experiment, read_lines(path / "metrics.jsonl"), read_lines(path / "timing.jsonl"))


def read_config(path: Path) -> Experiment:
    """The experiment of a run folder. Runs that are older than `test_owners` used the test data of all owners."""
    if not (path / "config.toml").exists():
        raise ConfigError(
            f"{path} is not a run folder: it has no config.toml. `fedpara run --out {shlex.quote(str(path))}` creates "
            "one."
        )
    found = read_toml(path / "config.toml", Experiment(**LATER))
    return found if found.split in OWNED else replace(found, test_owners=Experiment.test_owners)
