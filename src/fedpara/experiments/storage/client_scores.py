"""clients.jsonl: the scores of single clients, each on its own test data, after the last round.

    {"round": 20, "client": 3, "examples": 12, "scores": {"accuracy": 0.75, "loss": 0.81}}

A run that was extended beyond its end has the clients' lines of each round in which it ended.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from fedpara.engines.progress import Everyone
from fedpara.experiments.storage.jsonl import Line, read_lines
from fedpara.tasks import Score

CLIENT_SCORES = "clients.jsonl"


def lines_of(round: int, everyone: Everyone) -> Iterator[Line]:
    """One line per client. NaN and infinity, which JSON does not have, become null."""
    for client, score in everyone.by_client.items():
        values = {name: value if math.isfinite(value) else None for name, value in score.values.items()}
        yield {"round": round, "client": client, "examples": score.examples, "scores": values}


def read_client_scores(folder: Path) -> dict[int, dict[int, Score]]:
    """Each client's score, by round. A null is read as NaN."""
    found: dict[int, dict[int, Score]] = {}
    for line in read_lines(folder / CLIENT_SCORES):
        values = {name: math.nan if value is None else value for name, value in line["scores"].items()}
        found.setdefault(line["round"], {})[line["client"]] = Score(line["examples"], values)
    return found
