"""Whom each defence would drop, on scikit-learn's digits: the comparison needs no test data.

    python benchmarks/filtering.py        results/robustness/filtering.jsonl

The runs hold out a fifth of every client's examples, as `fedpara reproduce robustness --validation` does, with its
seeds, attacks and 20 rounds. The server knows the hostile clients and leaves them out, so every defence judges the
same updates. Each line of the file is a defence (`form`), an attack and a seed: who was dropped in each round. Lines
that the file holds are not repeated.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpara import engines
from fedpara.attacks import hostile_clients
from fedpara.engines.participation.cohorts import uniform
from fedpara.experiments.build import build, build_attack
from fedpara.experiments.studies.robustness import (
    ATTACKS,
    FIRST_VALIDATION_SEED,
    HELD_OUT,
    HOSTILE,
    SCALES,
    SEEDS,
    experiment_of,
)
from fedpara.references import library_call
from fedpara.robust import DEFENCES, Defence
from fedpara.robust.geometry import Geometry, among

RESULTS = Path(__file__).parents[1] / "results" / "robustness" / "filtering.jsonl"
FORMS = ("auto", "multi-krum", "flame")
PHASES = {"1-2": (0, 2), "3-4": (2, 4), "5-6": (4, 6), "7-11": (6, 11), "12-20": (11, 20)}


@dataclass
class Recorder:
    """A sampler and a defence: the uniform cohorts, and the mean of the honest updates of each round."""

    hostile: frozenset[int]

    def __post_init__(self) -> None:
        self.cohorts: dict[int, list[int]] = {}
        self.rounds: list[Geometry] = []

    def drawn(self, round: int, clients: int, cohort: int, generator: np.random.Generator) -> Iterable[int]:
        self.cohorts[round] = sorted(uniform(round, clients, cohort, generator))
        return self.cohorts[round]

    def weigh(self, g: Geometry) -> Tensor:
        self.rounds.append(replace(g, past=None))
        honest = torch.tensor([client not in self.hostile for client in self.cohorts[len(self.rounds)]])
        kept = g.w * honest
        return kept / kept.sum()


def everyone(g: Geometry) -> Tensor:
    """Residuals are taken from the median of all updates, so that every defence judges the same numbers."""
    return torch.ones(len(g), dtype=torch.bool)


def recorded(attack: str, seed: int) -> Recorder:
    base = replace(SCALES["digits"], validation=HELD_OUT["digits"])
    experiment = experiment_of(base, attack, "none", seed)
    parts = build(experiment)
    hostile = hostile_clients(seed, experiment.clients, HOSTILE) if attack != "none" else frozenset()
    recorder = Recorder(hostile)
    engines.simulate(
        parts.task,
        parts.data,
        parts.algorithm,
        rounds=experiment.rounds,
        cohort=experiment.cohort,
        seed=seed,
        engine=experiment.engine,
        device=experiment.device,
        evaluate_every=experiment.rounds,
        sampler=recorder.drawn,
        robust=Defence("honest", weigh=recorder.weigh, reference=everyone),
        attack=build_attack(experiment),
        hostile=experiment.hostile,
    )
    return recorder


def filtered(form: str, recorder: Recorder) -> list[list[int]]:
    """Of each round: [honest updates, how many of them were dropped, hostile ones, how many of them were kept]."""
    name, arguments = library_call(form, DEFENCES, "robust")
    defence = DEFENCES[name](**arguments)
    standing = torch.zeros(SCALES["digits"].clients, dtype=torch.float64)
    counts = []
    for round, g in enumerate(recorder.rounds, 1):
        ids = recorder.cohorts[round]
        hostile = torch.tensor([client in recorder.hostile for client in ids])
        g = replace(g, past=standing[ids])
        assert defence.weigh is not None
        kept, usable = torch.zeros(len(ids), dtype=torch.bool), g.norms.isfinite()
        kept[usable] = defence.weigh(among(g, usable)) != 0
        if defence.remember is not None:
            after = standing[ids]
            after[usable] = defence.remember(among(g, usable))
            standing[ids] = after
        sums = [~hostile, ~hostile & ~kept, hostile, hostile & kept]
        counts.append([int(some.sum()) for some in sums])
    return counts


def show(lines: Sequence[dict[str, Any]]) -> None:
    print(f"{'defence':32} {'honest updates dropped in rounds':36} hostile updates kept, backdoor")
    print(f"{'':32} {'  '.join(PHASES):36} {'  '.join(PHASES)}")
    for form in dict.fromkeys(line["form"] for line in lines):
        of = [line for line in lines if line["form"] == form]
        doors = [line for line in of if line["attack"] == "backdoor"]
        print(f"{form:32} {_shares(of, 0):36} {_shares(doors, 2)}")


def _shares(lines: Sequence[dict[str, Any]], column: int) -> str:
    found = []
    for start, end in PHASES.values():
        counts = np.sum([line["rounds"][start:end] for line in lines], (0, 1))
        found.append(f"{counts[column + 1] / max(1, counts[column]):4.0%}")
    return "  ".join(found)


def main() -> None:
    torch.set_num_threads(1)
    there = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(line["form"], line["attack"], line["seed"]) for line in there}
    attacks = [attack for attack in ATTACKS if attack != "absent"]
    for seed, attack in product(range(FIRST_VALIDATION_SEED, FIRST_VALIDATION_SEED + SEEDS), attacks):
        if missing := [form for form in FORMS if (form, attack, seed) not in done]:
            recorder = recorded(attack, seed)
            made = [
                {"form": f, "attack": attack, "seed": seed, "rounds": filtered(f, recorder)} for f in missing
            ]
            there += made
            with RESULTS.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in made)
    show(there)


if __name__ == "__main__":
    main()
