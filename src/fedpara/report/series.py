"""Curves: runs that differ in nothing but the seed are one series, and runs on the same data one panel."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedpara.experiments import Experiment, Summary
from fedpara.experiments.config import FREE
from fedpara.experiments.paper.measures import GIGABYTE, asked

_SETS = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "cinic10": "CINIC-10",
    "mnist": "MNIST",
    "femnist": "FEMNIST",
    "shakespeare": "Shakespeare",
    "digits": "digits",
}
_SPLITS = {
    "iid": "IID",
    "dirichlet": "non-IID",
    "owner": "non-IID",
    "largest": "by writer",
    "shards": "two classes a client",
}
_SCHEMES = {"original": "original", "lowrank": "low-rank", "fedpara": "FedPara", "pfedpara": "pFedPara"}
_ALGORITHMS = {"fedprox": "FedProx", "scaffold": "SCAFFOLD", "feddyn": "FedDyn", "fedadam": "FedAdam"}
_SHARES = {"none": "Local", "fedper": "FedPer"}


@dataclass(frozen=True)
class Series:
    label: str
    panel: str
    runs: tuple[Summary, ...]  # one a seed

    @property
    def original(self) -> bool:
        return self.runs[0].experiment.scheme == "original"


@dataclass(frozen=True)
class Points:
    """What is known at every round that was evaluated."""

    rounds: list[int]
    accuracy: list[float]  # [%]
    gigabytes: list[float]  # both ways, all clients, so far
    megabits: list[float]  # both ways, one client, so far
    compute: list[float]  # seconds of one client's local training, so far; zeros where no timing was kept


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
        found.accuracy.append(100 * score)
        found.gigabytes.append((line["total_up"] + line["total_down"]) / GIGABYTE)
        found.megabits.append(megabits)
        found.compute.append(compute)
    return found


def _score(experiment: Experiment, line: dict[str, Any]) -> float | None:
    """On the test set; among personal models on the clients' own test data, where a model that all share (FedAvg's)
    is scored as they receive it.
    """
    if experiment.personal and experiment.share == "all" and experiment.scheme != "pfedpara":
        return line.get("before")
    return line["accuracy"]  # type: ignore[no-any-return]


def all_series(runs: Iterable[Summary]) -> list[Series]:
    """In the order of the runs; of two runs of one experiment and seed the longer counts."""
    groups: dict[str, dict[int, Summary]] = {}
    for run in runs:
        if not run.metrics:
            continue
        same = groups.setdefault(replace(run.experiment, seed=0).identity, {})
        known = same.get(run.experiment.seed)
        if known is None or known.rounds < run.rounds:
            same[run.experiment.seed] = run
    found = [
        Series(label_of(runs_[0].experiment), panel_of(runs_[0].experiment), tuple(runs_))
        for same in groups.values()
        for runs_ in [[same[seed] for seed in sorted(same)]]
    ]
    return _told_apart(found)


def panel_of(experiment: Experiment) -> str:
    name = experiment.dataset.removeprefix("generated:")
    drawn = " (generated)" if name != experiment.dataset else ""
    share = (
        f", {experiment.data_fraction:.0%} of the data"
        if experiment.data_fraction < 1 and experiment.personal
        else ""
    )
    model = "" if experiment.model.startswith(("vgg16", "lstm", "mlp")) else f", {experiment.model}"
    return f"{_SETS.get(name, name)}{drawn} {_SPLITS.get(experiment.split, experiment.split)}{share}{model}"


def label_of(experiment: Experiment) -> str:
    e = experiment
    if e.scheme == "original" and e.share in _SHARES:
        words = [_SHARES[e.share]]
    elif e.where and e.where.startswith("hybrid:"):
        words = [f"Pufferfish, {e.where.removeprefix('hybrid:')} dense"]
    elif e.personal and e.scheme == "original":
        words = ["FedAvg's global model"]
    else:
        words = [_SCHEMES[e.scheme]]
    if e.gamma is not None and e.scheme != "lowrank":
        words.append(f"γ {e.gamma:g}")
    if e.algorithm != "fedavg":
        words.append(_ALGORITHMS.get(e.algorithm, e.algorithm))
    if e.link_up != "float32":
        words.append(f"{e.link_up} up")
    return " ".join(words)


def _told_apart(series: list[Series]) -> list[Series]:
    """Labels that two series of a panel share get the fields in which those differ."""
    found: list[Series] = []
    for one in series:
        twins = [s for s in series if (s.panel, s.label) == (one.panel, one.label)]
        if len(twins) == 1:
            found.append(one)
            continue
        own = _fields(one)
        differing = [name for name in own if len({str(_fields(twin)[name]) for twin in twins}) > 1]
        words = filter(None, (_word(name, own[name]) for name in differing))
        found.append(replace(one, label=f"{one.label} ({', '.join(words) or 'plain'})"))
    return found


def _word(name: str, value: Any) -> str:
    """Nothing for what a run is without; without an init named, it has one all the same."""
    if name == "init":
        return value or "default init"
    if not value:
        return ""
    if name == "jacobian":
        return f"λ {value:g}"
    return str(value) if name in ("nonlinearity", "augment", "model") else f"{name} {value}"


def _fields(series: Series) -> dict[str, Any]:
    return {name: v for name, v in asdict(series.runs[0].experiment).items() if name not in ("seed", *FREE)}
