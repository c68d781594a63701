"""Series: runs that differ only in the seed. Series on the same data share a panel."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from fedpara.experiments import Experiment, Summary
from fedpara.experiments.config import FREE, OWNED, TITLES
from fedpara.experiments.paper.measures import asked
from fedpara.experiments.seeds import Mean, group
from fedpara.experiments.storage.summary import Primary, score_of

_SETS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cinic10": "CINIC-10",
    "mnist": "MNIST",
    "femnist": "FEMNIST",
    "shakespeare": "Shakespeare",
    "shakespeare-100": "Shakespeare, 100 roles",
    "shakespeare-100-mixed": "Shakespeare, mixed windows",
    "digits": "digits",
}
_SPLITS = {
    "iid": "IID",
    "dirichlet": "non-IID (Dirichlet)",
    "dirichlet-capped": "non-IID (capped Dirichlet)",
    "owner": "non-IID",
    "largest": "by writer",
    "drawn": "by drawn writer",
    "shards": "two classes per client",
}
_ALGORITHMS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "fedadam": "FedAdam",
}
_SHARES = {"none": "Local", "fedper": "FedPer"}
_LETTERS = {"jacobian": "λ", "gamma": "γ"}


@dataclass(frozen=True)
class Series:
    label: str
    panel: str
    runs: tuple[Summary, ...]  # one per seed

    @property
    def metric(self) -> Primary:
        return self.runs[0].metric

    @property
    def original(self) -> bool:
        return self.runs[0].experiment.scheme == "original"


@dataclass(frozen=True)
class Points:
    """The numbers of a run at each evaluated round."""

    rounds: list[int]
    score: list[float]  # in %, if the metric is a fraction
    sent: list[int]  # bytes so far, both ways, by all clients
    megabits: list[float]  # sent so far, both ways, by one client
    compute: list[float]  # seconds of one client's training so far; 0 without timing


@dataclass(frozen=True)
class CurvePoint:
    """The mean over seeds at a round that all seeds have."""

    round: int
    score: Mean
    sent: float  # bytes
    megabits: float
    compute: float


def curve(runs: Iterable[Summary]) -> list[CurvePoint]:
    each = aligned(runs)
    found = []
    for i, number in enumerate(each[0].rounds if each else ()):
        score = Mean.of([one.score[i] for one in each])
        assert score is not None
        sent, megabits, compute = (
            mean(column)
            for column in zip(*((one.sent[i], one.megabits[i], one.compute[i]) for one in each), strict=True)
        )
        found.append(CurvePoint(number, score, sent, megabits, compute))
    return found


def points(run: Summary) -> Points:
    found = Points([], [], [], [], [])
    seconds = {line["round"]: line["seconds"] for line in run.timing}
    megabits = compute = 0.0
    for line in run.metrics:
        clients = asked(line)
        megabits += 8 * (line["up"] + line["down"]) / clients / 1e6
        compute += seconds.get(line["round"], 0.0) / clients
        score = _score(run.experiment, line)
        if score is None:
            continue
        found.rounds.append(line["round"])
        found.score.append(run.metric.scaled(score))
        found.sent.append(line["total_up"] + line["total_down"])
        found.megabits.append(megabits)
        found.compute.append(compute)
    return found


def aligned(runs: Iterable[Summary]) -> list[Points]:
    """The points of each run at the rounds that all runs have. Runs without points are left out.

    If the runs have no round in common, only the run with the most points is used.
    """
    each = [found for run in runs if (found := points(run)).rounds]
    if not each:
        return []
    common = set(each[0].rounds).intersection(*(found.rounds for found in each))
    if not common:
        return [max(each, key=lambda found: len(found.rounds))]
    return [_at(found, common) for found in each]


def _at(found: Points, rounds: set[int]) -> Points:
    chosen = [i for i, number in enumerate(found.rounds) if number in rounds]
    columns = (found.rounds, found.score, found.sent, found.megabits, found.compute)
    return Points(*([column[i] for i in chosen] for column in columns))  # type: ignore[arg-type]


def final_accuracy(run: Summary) -> float | None:
    """The accuracy in % that represents a run in a list: the last point of its curve.

    If each score covers only the personal models of a cohort, it is the score of all clients, or None without one.
    """
    if run.of_cohort:
        return None if run.everyone is None else 100 * float(run.everyone["accuracy"])
    found = points(run).score
    return found[-1] if found else None


def _score(experiment: Experiment, line: dict[str, Any]) -> float | None:
    """The score on the test set. Personal models are scored on the clients' own test data.

    A personal score of a model that all clients share (FedAvg's) is the one before local training.
    """
    if experiment.personal and experiment.share == "all" and experiment.scheme != "pfedpara":
        return line.get("before")
    return score_of(line)


def all_series(runs: Iterable[Summary]) -> list[Series]:
    """The series in the order of the runs. Of two runs of the same experiment and seed, the longer one is used."""
    found = [
        Series(label_of(experiment), panel_of(experiment), same.runs)
        for same in group(runs)
        for experiment in [same.runs[0].experiment]
    ]
    return _with_unique_labels(found)


def panel_of(experiment: Experiment) -> str:
    model = "" if experiment.model.startswith(("vgg16", "lstm", "mlp")) else f", {experiment.model}"
    return f"{data_of(experiment)}{model}{scored_on(experiment)}"


def data_of(experiment: Experiment) -> str:
    """The data set and its split: digits IID."""
    name = experiment.dataset.removeprefix("generated:")
    drawn = " (generated)" if name != experiment.dataset else ""
    share = (
        f", {experiment.data_fraction:.0%} of the data"
        if experiment.data_fraction < 1 and experiment.personal
        else ""
    )
    # A custom data function may have chosen the clients itself: then the default split was not used.
    chosen = "dataset" in experiment.references and experiment.split == Experiment.split
    split = "" if chosen else f" {_SPLITS.get(experiment.split, experiment.split)}"
    return f"{_SETS.get(name, name)}{drawn}{split}{share}"


def scored_on(experiment: Experiment) -> str:
    """The label of scores that are not on the test set of the training clients. They get a separate panel."""
    if experiment.validation:
        return ", validation"
    other_owners = experiment.split in OWNED and not experiment.personal and experiment.test_owners == "all"
    return ", scored on all owners' test data" if other_owners else ""


def label_of(experiment: Experiment) -> str:
    e = experiment
    algorithm = _ALGORITHMS.get(e.algorithm, e.algorithm)
    if e.scheme == "original" and e.share in _SHARES:
        words = [_SHARES[e.share]]
    elif e.where and e.where.startswith("hybrid:"):
        words = [f"Pufferfish, {e.where.removeprefix('hybrid:')} dense"]
    elif e.personal and e.scheme == "original":
        words = [f"{algorithm}'s global model"]
    else:
        words = [TITLES[e.scheme]]
    if e.scheme == "original" and e.share not in ("all", *_SHARES):
        words.append(f"share {e.share}")
    if e.gamma is not None and e.scheme != "lowrank":
        words.append(f"γ {e.gamma:g}")
    if e.algorithm != "fedavg" and not words[0].startswith(algorithm):
        words.append(algorithm)
    if e.link_up != "float32":
        words.append(f"{e.link_up} up")
    if e.validation:
        words.append("(validation)")
    return " ".join(words)


def _with_unique_labels(series: list[Series]) -> list[Series]:
    """The series with unique labels: equal ones of a panel also name the fields that differ."""
    found: list[Series] = []
    for one in series:
        twins = [s for s in series if (s.panel, s.label) == (one.panel, one.label)]
        if len(twins) == 1:
            found.append(one)
            continue
        own = _fields(one)
        differing = [name for name in own if len({str(_fields(twin)[name]) for twin in twins}) > 1]
        words = filter(None, (word_of(name, own[name]) for name in differing))
        found.append(replace(one, label=f"{one.label} ({', '.join(words) or 'plain'})"))
    return found


def word_of(name: str, value: Any) -> str:
    """The field in words, or "" if it is not set. Without `init`, the scheme's default applies."""
    if name == "init":
        return value or "default init"
    if not value:
        return ""
    if name in _LETTERS:
        return f"{_LETTERS[name]} {value:g}"
    if name == "options":
        return ", ".join(f"{option} {number:g}" for option, number in value.items())
    return str(value) if name in ("nonlinearity", "augment", "model") else f"{name} {value}"


def _fields(series: Series) -> dict[str, Any]:
    """The fields of the experiment that can distinguish the series of a panel."""
    values = asdict(series.runs[0].experiment)
    return {name: v for name, v in values.items() if name not in ("seed", "test_owners", *FREE)}
