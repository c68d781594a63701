"""Whom each defence drops. The runs hold out examples, as `fedpara reproduce robustness --validation` does.

    python benchmarks/filtering.py                                            # digits, the runs of the guide
    python benchmarks/filtering.py --scale cifar10 --attacks none label-flip  # on a GPU
    python benchmarks/filtering.py --live --forms auto flame

The server knows the hostile clients and leaves them out, so every defence judges the same updates. With `--live` each
defence decides in a run of its own, so what it lets in early counts later. Each line of
`results/robustness/filtering*.jsonl` is a defence (`form`), an attack and a seed, with four numbers per round: honest
updates, how many of them were dropped, hostile ones, how many of them were kept. Lines that the file holds are not
repeated.
"""

import argparse
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
    ABSENT,
    ATTACKS,
    FIRST_VALIDATION_SEED,
    HELD_OUT,
    HOSTILE,
    SCALES,
    experiment_of,
)
from fedpara.references import library_call
from fedpara.robust import DEFENCES, Defence
from fedpara.robust.geometry import Geometry, among

RESULTS = Path(__file__).parents[1] / "results" / "robustness"
FORMS = ("auto", "multi-krum", "flame")
PHASES = {
    "digits": {"1-2": (0, 2), "3-4": (2, 4), "5-6": (4, 6), "7-11": (6, 11), "12-20": (11, 20)},
    "cifar10": {"1-5": (0, 5), "6-10": (5, 10), "11-20": (10, 20), "21-40": (20, 40), "41-60": (40, 60)},
}
Counts = list[list[int]]


@dataclass
class Recorder:
    """A sampler that remembers the uniform cohorts, and a defence that remembers the updates."""

    hostile: frozenset[int]

    def __post_init__(self) -> None:
        self.cohorts: dict[int, list[int]] = {}
        self.rounds: list[Geometry] = []
        self.kept: list[Tensor] = []

    def drawn(self, round: int, clients: int, cohort: int, generator: np.random.Generator) -> Iterable[int]:
        self.cohorts[round] = sorted(uniform(round, clients, cohort, generator))
        return self.cohorts[round]

    def are_hostile(self, round: int) -> Tensor:
        return torch.tensor([client in self.hostile for client in self.cohorts[round]])

    def honest_mean(self) -> Defence:
        """Residuals are taken from the median of all updates, so that every defence judges the same numbers."""

        def weigh(g: Geometry) -> Tensor:
            self.rounds.append(replace(g, past=None))
            kept = g.w * ~self.are_hostile(len(self.rounds))
            return kept / kept.sum()

        return Defence("honest", weigh=weigh, reference=lambda g: torch.ones(len(g), dtype=torch.bool))

    def watched(self, defence: Defence) -> Defence:
        """The same defence, whose decisions are kept."""
        decide = defence.weigh
        assert decide is not None

        def weigh(g: Geometry) -> Tensor:
            weights = decide(g)
            self.kept.append(weights != 0)
            return weights

        return replace(defence, weigh=weigh)


def recorded(scale: str, attack: str, seed: int, form: str | None, data_dir: str | None) -> Recorder:
    """A run whose server decides by the defence `form`, or knows the hostile clients."""
    base = replace(SCALES[scale], validation=HELD_OUT[scale])
    experiment = experiment_of(base, attack, "none", seed)
    parts = build(experiment, data_dir)
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
        robust=recorder.honest_mean() if form is None else recorder.watched(defence_of(form)),
        attack=build_attack(experiment),
        hostile=experiment.hostile,
    )
    return recorder


def defence_of(form: str) -> Defence:
    name, arguments = library_call(form, DEFENCES, "robust")
    return DEFENCES[name](**arguments)


def filtered(scale: str, form: str, recorder: Recorder) -> Counts:
    """What a defence decides on recorded updates."""
    defence = defence_of(form)
    standing = torch.zeros(SCALES[scale].clients, dtype=torch.float64)
    counts = []
    for round, g in enumerate(recorder.rounds, 1):
        ids = recorder.cohorts[round]
        g = replace(g, past=standing[ids])
        assert defence.weigh is not None
        kept, usable = torch.zeros(len(ids), dtype=torch.bool), g.norms.isfinite()
        kept[usable] = defence.weigh(among(g, usable)) != 0
        if defence.remember is not None:
            after = standing[ids]
            after[usable] = defence.remember(among(g, usable))
            standing[ids] = after
        counts.append(counts_of(recorder.are_hostile(round), kept))
    return counts


def decided(recorder: Recorder) -> Counts:
    """What the defence of a live run decided."""
    return [counts_of(recorder.are_hostile(round), kept) for round, kept in enumerate(recorder.kept, 1)]


def counts_of(hostile: Tensor, kept: Tensor) -> list[int]:
    return [int(some.sum()) for some in (~hostile, ~hostile & ~kept, hostile, hostile & kept)]


def show(lines: Sequence[dict[str, Any]], phases: dict[str, tuple[int, int]]) -> None:
    heading = "  ".join(f"{phase:>5}" for phase in phases)
    for attack in dict.fromkeys(line["attack"] for line in lines):
        print(f"{attack:18} {'honest updates dropped in rounds':37} hostile updates kept")
        print(f"{'':18} {heading}   {heading}")
        of = [line for line in lines if line["attack"] == attack]
        for form in dict.fromkeys(line["form"] for line in of):
            same = [line for line in of if line["form"] == form]
            print(f"{form:18} {_shares(same, phases, 0)}   {_shares(same, phases, 2)}")


def _shares(lines: Sequence[dict[str, Any]], phases: dict[str, tuple[int, int]], column: int) -> str:
    found = []
    for start, end in phases.values():
        rounds = [counts for line in lines for counts in line["rounds"][start:end]]
        several = sum(counts[column] for counts in rounds)
        share = f"{sum(counts[column + 1] for counts in rounds) / several:5.0%}" if several else "    –"
        found.append(share)
    return "  ".join(found)


def main(
    scale: str,
    attacks: list[str],
    forms: list[str],
    seeds: int,
    live: bool,
    out: Path | None,
    data: str | None,
) -> None:
    if SCALES[scale].device == "cpu":
        torch.set_num_threads(1)
    name = "-".join(["filtering", *[scale] * (scale != "digits"), *["live"] * live])
    file = out or RESULTS / f"{name}.jsonl"
    there = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(line["form"], line["attack"], line["seed"]) for line in there}
    for seed, attack in product(range(FIRST_VALIDATION_SEED, FIRST_VALIDATION_SEED + seeds), attacks):
        missing = [form for form in forms if (form, attack, seed) not in done]
        if not missing:
            continue
        if live:
            found = {form: decided(recorded(scale, attack, seed, form, data)) for form in missing}
        else:
            recorder = recorded(scale, attack, seed, None, data)
            found = {form: filtered(scale, form, recorder) for form in missing}
        made = [
            {"form": form, "attack": attack, "seed": seed, "rounds": rounds} for form, rounds in found.items()
        ]
        there += made
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.writelines(json.dumps(line) + "\n" for line in made)
    show([line for line in there if line["attack"] in attacks and line["form"] in forms], PHASES[scale])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=tuple(PHASES), default="digits")
    parser.add_argument("--attacks", nargs="+", default=[attack for attack in ATTACKS if attack != ABSENT])
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--live", action="store_true", help="each defence decides in a run of its own")
    parser.add_argument("--out", type=Path, help="a JSON Lines file; default: in results/robustness")
    parser.add_argument("--data", help="the folder of the data sets")
    main(**vars(parser.parse_args()))
