"""A round's line of metrics.jsonl, and the round that a line describes."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fedpara.engines.progress import Everyone, Progress, Round, Schedule
from fedpara.engines.server.products import AggregationError
from fedpara.tasks import Score


def metrics_of(result: Round) -> dict[str, Any]:
    return {
        "round": result.number,
        "accuracy": _finite(result.accuracy),
        "loss": _finite(result.loss),
        "before": _finite(result.before),
        "after": _finite(result.after),
        "train_loss": _finite(result.train_loss),
        "up": result.bytes_up,
        "down": result.bytes_down,
        "total_up": result.progress.bytes_up,
        "total_down": result.progress.bytes_down,
        "clients": len(result.cohort) - len(result.refused),
        "refused": [{"client": client, "reason": reason} for client, reason in result.refused],
        "notes": list(result.notes),
        **_own_scores(result),
        **({"clock": result.clock} if result.clock is not None else {}),
        **_aggregation_error(result),
        **({"privacy": dict(result.privacy)} if result.privacy else {}),
        **({"everyone": _everyone(result)} if result.everyone else {}),
    }


def round_of(
    line: dict[str, Any], schedule: Schedule, seed: int, by_client: Mapping[int, Score] | None = None
) -> Round:
    """The round of a line, without the server's tensors and without what the line does not hold.

    `by_client` are the clients' scores of this round, from clients.jsonl.
    """
    number, everyone = line["round"], None
    if found := line.get("everyone"):
        values = {"worst_tenth": math.nan, "spread": math.nan, **found, "by_client": by_client or {}}
        score = values.pop("accuracy", None)
        everyone = Everyone(**{"score": score, **values})
    scores = line.get("scores") or {name: line[name] for name in ("accuracy", "loss")}
    privacy = line.get("privacy")
    secret = bool(privacy and privacy["private"] and privacy["kind"] == "user")  # its cohorts are not kept
    measured = any(value is not None for value in scores.values())
    return Round(
        Progress(number, {}, {}, {}, line["total_up"], line["total_down"], line.get("clock")),
        () if secret else tuple(schedule.cohorts(seed).draw(number)),
        math.nan if line["train_loss"] is None else line["train_loss"],
        line["up"],
        line["down"],
        tuple((refused["client"], refused["reason"]) for refused in line["refused"]),
        scores={name: math.nan if v is None else v for name, v in scores.items()} if measured else {},
        before=line["before"],
        after=line["after"],
        notes=tuple(line["notes"]),
        everyone=everyone,
        primary=schedule.primary,
        aggregation_error=AggregationError(**error) if (error := line.get("aggregation_error")) else None,
        privacy=privacy,
    )


def _own_scores(result: Round) -> dict[str, Any]:
    """The primary metric if it is not the accuracy, and all metrics if there are others than accuracy and loss."""
    scores = {name: _finite(value) for name, value in result.scores.items()}
    primary = {"score": scores.get(result.primary)} if result.primary != "accuracy" else {}
    return {**primary, "scores": scores} if primary or scores.keys() - {"accuracy", "loss"} else {}


def _aggregation_error(result: Round) -> dict[str, Any]:
    if result.aggregation_error is None:
        return {}
    values = asdict(result.aggregation_error)
    return {"aggregation_error": {name: value for name, value in values.items() if value is not None}}


def _everyone(result: Round) -> dict[str, Any]:
    """The scores of all clients. An accuracy keeps the name that it had before there were other metrics."""
    assert result.everyone is not None
    values = {**vars(result.everyone)}
    del values["by_client"]  # in clients.jsonl
    return {"accuracy" if result.primary == "accuracy" else "score": values.pop("score"), **values}


def _finite(value: float | None) -> float | None:
    """The value, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
