"""Summary: the contents of a run folder, read without locking it."""

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedpara.engines.participation.fairness import Distribution
from fedpara.engines.progress import Schedule
from fedpara.errors import ConfigError, RunError
from fedpara.experiments.config import LATER, OWNED, Experiment
from fedpara.experiments.config_file import read_toml
from fedpara.experiments.storage.client_scores import read_client_scores
from fedpara.experiments.storage.jsonl import read_lines
from fedpara.tasks import METRICS, Score
from fedpara.tasks.metrics import FRACTIONS, shown
from fedpara.tasks.task import LOSS


@dataclass(frozen=True)
class Primary:
    """The primary metric of a run: its name and direction."""

    name: str = "accuracy"
    higher_is_better: bool = True

    @property
    def unit(self) -> str:
        return "%" if self.name in FRACTIONS else ""

    @property
    def title(self) -> str:
        """The heading of a column or an axis: accuracy [%], mse."""
        return f"{self.name} [%]" if self.unit else self.name

    def scaled(self, score: float) -> float:
        """The number to print under `title`."""
        return 100 * score if self.unit else score

    def text(self, score: float) -> str:
        """The score as text: 93.20% for a fraction, 0.01234 for other metrics."""
        return shown(self.name, score)

    def meets(self, score: float, target: float) -> bool:
        """Whether the score is at least as good as the target."""
        return score >= target if self.higher_is_better else score <= target

    def rank(self, score: float) -> float:
        """A key for sorting: the best score has the largest rank."""
        return score if self.higher_is_better else -score


@dataclass(frozen=True)
class Summary:
    path: Path
    experiment: Experiment
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    metric: Primary = Primary()

    @property
    def rounds(self) -> int:
        return int(self.metrics[-1]["round"]) if self.metrics else 0

    @property
    def accuracy(self) -> float | None:
        measured = [line["accuracy"] for line in self.metrics if line["accuracy"] is not None]
        return float(measured[-1]) if measured else None

    @property
    def score(self) -> float | None:
        """The last measured score in the primary metric."""
        measured = [score for line in self.metrics if (score := score_of(line)) is not None]
        return measured[-1] if measured else None

    @property
    def final(self) -> float | None:
        """The score to report: of all clients' own models at the end if they were scored, else `score`."""
        return self.everyone.get("score", self.everyone.get("accuracy")) if self.everyone else self.score

    @property
    def others(self) -> dict[str, float]:
        """The last scores in the other metrics, and the backdoor's success, but not the loss."""
        scored: list[dict[str, float]] = [line["scores"] for line in self.metrics if line.get("scores")]
        left_out = {self.metric.name, "loss"}
        return {name: value for name, value in scored[-1].items() if name not in left_out} if scored else {}

    @property
    def of_cohort(self) -> bool:
        """Whether each personal score covers only the cohort of its round."""
        return self.experiment.personal and self.experiment.cohort < self.clients

    @cached_property
    def clients(self) -> int:
        """The number of clients, from data.json if the data decides it, else from the config."""
        given = self.experiment.keep or self.experiment.clients
        try:
            return int(json.loads((self.path / "data.json").read_text()).get("clients", given))
        except (OSError, ValueError, RecursionError, AttributeError):
            return given

    @property
    def everyone(self) -> dict[str, Any] | None:
        """The scores of all clients' own models after the last round, or None if they were not scored.

        `accuracy` is the mean of the primary metric, `worst_tenth` the mean over the worst tenth of the clients,
        `spread` the standard deviation, and `clients` the number of scored clients out of `of`.
        """
        return self.metrics[-1].get("everyone") if self.metrics else None

    @cached_property
    def by_client(self) -> dict[int, Score]:
        """The final score of each client on its own test data. Empty if they were not scored."""
        return read_client_scores(self.path).get(self.rounds, {})

    @cached_property
    def distributions(self) -> dict[str, Distribution]:
        """How each metric spreads over the clients."""
        names = dict.fromkeys(name for score in self.by_client.values() for name in score.values)
        found = {
            name: Distribution.of(
                {client: score.values[name] for client, score in self.by_client.items()},
                self._direction(name),
            )
            for name in names
        }
        return {name: one for name, one in found.items() if one is not None}

    def _direction(self, name: str) -> bool | None:
        """Whether higher values of the metric are better. None for a user's own metric that is not the primary one."""
        if name == self.metric.name:
            return self.metric.higher_is_better
        if name == LOSS:
            return False
        return METRICS[name].higher_is_better if name in METRICS else None

    @property
    def privacy(self) -> dict[str, Any] | None:
        """What a private run has spent: `epsilon`, `epsilon_rdp`, `delta`; `private` is False with seeded noise."""
        return self.metrics[-1].get("privacy") if self.metrics else None

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
        score = "not measured" if self.final is None else self.metric.text(self.final)
        path = str(self.path) if len(str(self.path)) <= 120 else f"...{str(self.path)[-117:]}"
        what = f"{e.dataset}, {e.model}, {e.scheme}, {e.algorithm}, seed {e.seed}"
        return (
            f"Summary({path}\n    {what}\n"
            f"    {self.rounds} of {e.rounds} rounds, {sent:.2f} MB sent, {self.seconds:.1f} s\n"
            f"    {self.metric.name}: {score})"
        )

    def reached(self, target: float) -> dict[str, Any] | None:
        """The metrics of the first round whose score is at least as good as the target."""
        scored = ((line, score_of(line)) for line in self.metrics)
        return next((line for line, s in scored if s is not None and self.metric.meets(s, target)), None)


def score_of(line: dict[str, Any]) -> float | None:
    """A round's score in the primary metric. Runs with the default metrics write it only as `accuracy`."""
    score = line.get("score", line["accuracy"])
    return None if score is None else float(score)


def evaluations(experiment: Experiment, metrics: Iterable[dict[str, Any]]) -> list[float]:
    """The scores that count for patience, as `Schedule.evaluated` returned them."""
    every = experiment.evaluate_every
    counted = (score_of(line) for line in metrics if line["round"] % every == 0)
    return [score for score in counted if score is not None]


def stops_early(experiment: Experiment, metrics: Sequence[dict[str, Any]], metric: Primary) -> bool:
    """Whether these rounds met the experiment's target, or used up its patience or its privacy budget."""
    schedule = Schedule(
        experiment.rounds,
        experiment.clients,
        experiment.cohort,
        lambda client: 0,
        target=experiment.target,
        patience=experiment.patience,
        higher_is_better=metric.higher_is_better,
    )
    met = any(schedule.reaches_target(score_of(line)) for line in metrics)
    return met or schedule.has_stalled(evaluations(experiment, metrics)) or budget_spent(experiment, metrics)


def budget_spent(experiment: Experiment, metrics: Sequence[dict[str, Any]]) -> bool:
    """Whether one more round would cost more than the privacy budget."""
    if experiment.epsilon is None or not metrics or "privacy" not in metrics[-1]:
        return False
    return float(metrics[-1]["privacy"]["next"]) > experiment.epsilon


def read_run(path: str | os.PathLike[str]) -> Summary:
    path = Path(path)
    experiment = read_config(path)
    metrics, timing = read_lines(path / "metrics.jsonl"), read_lines(path / "timing.jsonl")
    return Summary(path, experiment, metrics, timing, read_metric(path))


def read_metric(folder: Path) -> Primary:
    """The primary metric of a run: accuracy if its model.json names none, or if it has no such file."""
    path = folder / "model.json"
    if not path.exists():
        return Primary()
    try:
        found = json.loads(path.read_bytes()).get("metric")
        return Primary() if found is None else Primary(str(found["name"]), bool(found["higher_is_better"]))
    except (ValueError, AttributeError, TypeError, KeyError):
        raise RunError(
            f"{path} is damaged: expected a JSON object, in which metric has a name and higher_is_better."
        ) from None


def read_config(path: Path) -> Experiment:
    """The experiment of a run folder. Runs that are older than `test_owners` used the test data of all owners."""
    if path.is_file():
        raise ConfigError(f"{path} is a file: expected a run folder.")
    if not (path / "config.toml").exists():
        raise ConfigError(
            f"{path} is not a run folder: it has no config.toml. `fedpara run --out {shlex.quote(str(path))}` creates "
            "one."
        )
    found = read_toml(path / "config.toml", Experiment(**LATER))
    return found if found.split in OWNED else replace(found, test_owners=Experiment.test_owners)
