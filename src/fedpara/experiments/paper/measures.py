"""Measures: numbers from the summary of a run. Measures with a target give None if it was not reached."""

from typing import Any

from fedpara.experiments.paper.study import Measure, Ratio
from fedpara.experiments.storage.summary import Summary
from fedpara.wire import PAPER_MEGA, energy_joules, round_seconds

GIGABYTE = 2**30
"""Figure 3 uses binary gigabytes (see `wire.energy_joules`)."""


def asked(line: dict[str, Any]) -> int:
    """The number of clients that received the model in a round, including rejected ones."""
    return max(1, int(line["clients"]) + len(line["refused"]))


def accuracy(run: Summary) -> float | None:
    """The last accuracy in %: of the global model, or the mean of the clients' own if parts are private."""
    return None if run.accuracy is None else 100 * run.accuracy


def before(run: Summary) -> float | None:
    """The mean accuracy in % of the clients' models before the local training of the last scored round."""
    return _last(run, "before")


def after(run: Summary) -> float | None:
    """The mean accuracy in % of the clients' models after the local training of the last scored round."""
    return _last(run, "after")


def gain(short: Summary, long: Summary) -> float | None:
    """The gain of the longer run in percentage points. Both runs have the same seed."""
    a, b = accuracy(short), accuracy(long)
    return None if a is None or b is None else b - a


WITHOUT_TARGET: tuple[Measure, ...] = (accuracy, before, after, gain)
"""Measures without a target. They give None if the run was not scored."""


def rounds_to(target: float) -> Measure:
    def measure(run: Summary) -> float | None:
        reached = run.reached(target)
        return None if reached is None else float(reached["round"])

    return measure


def gigabytes_to(target: float) -> Measure:
    """Gigabytes sent both ways by all clients until the target is first reached."""

    def measure(run: Summary) -> float | None:
        sent = _sent_to(run, target)
        return None if sent is None else sent / GIGABYTE

    return measure


def megajoules_to(target: float) -> Measure:
    def measure(run: Summary) -> float | None:
        sent = _sent_to(run, target)
        return None if sent is None else energy_joules(sent) / 1e6

    return measure


def times_fewer_to(target: float) -> Ratio:
    """The original's bytes divided by the other run's, each until it reaches the target."""
    return Ratio(gigabytes_to(target), gigabytes_to(target))


def minutes_to(target: float, mbps: float, compute: float) -> Measure:
    """Rounds to the target times (t_comp + t_comm). t_comm is for the bytes of one client's messages."""

    def measure(run: Summary) -> float | None:
        reached = run.reached(target)
        if reached is None:
            return None
        first = run.metrics[0]
        bytes_ = round((first["up"] + first["down"]) / asked(first))
        return float(reached["round"] * round_seconds(compute, bytes_, mbps, PAPER_MEGA) / 60)

    return measure


def times_shorter_to(target: float, mbps: float, compute: tuple[float, float]) -> Ratio:
    """The original's minutes divided by the other run's."""
    return Ratio(minutes_to(target, mbps, compute[0]), minutes_to(target, mbps, compute[1]))


def _last(run: Summary, key: str) -> float | None:
    scored = [line[key] for line in run.metrics if line[key] is not None]
    return 100 * float(scored[-1]) if scored else None


def _sent_to(run: Summary, target: float) -> int | None:
    reached = run.reached(target)
    return None if reached is None else int(reached["total_up"] + reached["total_down"])
