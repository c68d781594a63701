"""The study of attacks and defences: `fedpara reproduce robustness`.

Every run is one line of a JSON Lines file. The same call skips the runs that a folder's files hold. Defences are
chosen by validation data on some seeds, and the table scores the test set on others.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from fedpara import engines
from fedpara.attacks import hostile_clients
from fedpara.engines.participation.cohorts import Sampler, uniform
from fedpara.errors import ConfigError, RunError
from fedpara.experiments.build import build, build_attack, build_robust
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.jsonl import append_line, raw_lines
from fedpara.files import write_bytes

HOSTILE = 0.2
ABSENT = "absent"
"""A row of the table: the hostile clients are known and excluded from every round. No defence can do better."""
ATTACKS = (
    *("none", ABSENT, "sign-flip", "sign-flip(10)", "scaling(100)", "noise", "label-flip", "backdoor"),
    *("backdoor(scale=5)", "alie(1.5)", "ipm", "gauge"),
)
DEFENCES = (
    *("none", "auto", "multi-krum", "rfa", "median", "trimmed-mean"),
    *("norm-clip", "flame", "fltrust", "centred-clip"),
)
SCALES = {
    "digits": Experiment(
        model="mlp",
        gamma=0.1,
        clients=20,
        cohort=10,
        rounds=20,
        epochs=5,
        evaluate_every=5,
        engine="sequential",
        device="cpu",
    ),
    "cifar10": Experiment(
        dataset="cifar10",
        model="vgg16-nobias",
        gamma=0.1,
        init="he:1.4",
        split="iid",
        clients=100,
        cohort=16,
        rounds=60,
        epochs=5,
        batch_size=64,
        lr=0.1,
        lr_decay=0.992,
        weight_decay=0.001,
        augment="crop-flip",
        evaluate_every=10,
    ),
}
"""digits takes seconds per run on a CPU; cifar10 needs a GPU and has the recipe of
`results/tuning/cifar10-iid` with half its epochs."""
HELD_OUT = {"digits": 0.2, "cifar10": 0.104}
"""The share of each client's examples that validation scores."""
SEEDS, FIRST_SEED, FIRST_VALIDATION_SEED = 3, 80, 100


@dataclass(frozen=True)
class Outcome:
    """One run: its last scores, or why it ended early."""

    scale: str
    attack: str
    defence: str
    seed: int
    rounds: int
    accuracy: float | None
    backdoor: float | None
    seconds: float
    ended: str = ""
    validation: bool = False
    """whether the scores are those of held-out training examples (otherwise of the test set)"""


def experiment_of(base: Experiment, attack: str, defence: str, seed: int) -> Experiment:
    """The absent clients of `ABSENT` would have set a backdoor: its score shows what the trigger does without them."""
    return replace(
        base,
        seed=seed,
        robust=None if defence == "none" else defence,
        attack={"none": None, ABSENT: "backdoor"}.get(attack, attack),
        hostile=0.0 if attack == "none" else HOSTILE,
    )


def without(hostile: frozenset[int]) -> Sampler:
    """The uniform cohorts without the hostile clients."""

    def drawn(round: int, clients: int, cohort: int, generator: np.random.Generator) -> Iterable[int]:
        return [client for client in uniform(round, clients, cohort, generator) if client not in hostile]

    return drawn


def outcome(
    scale: str,
    attack: str,
    defence: str,
    seed: int,
    rounds: int | None = None,
    *,
    validation: bool = False,
    device: str | None = None,
    data_dir: str | PathLike[str] | None = None,
) -> Outcome:
    """Runs one cell of the table with one seed, in memory."""
    base = replace(SCALES[scale], validation=HELD_OUT[scale] if validation else 0.0)
    base = base if rounds is None else replace(base, rounds=rounds)
    experiment = experiment_of(base, attack, defence, seed)
    parts, started = build(experiment, data_dir), time.perf_counter()
    measured: dict[str, float] = {}
    ended = ""

    def keep(result: Any) -> None:
        measured.update(result.scores)

    hostile = hostile_clients(seed, experiment.clients, HOSTILE)
    try:
        engines.simulate(
            parts.task,
            parts.data,
            parts.algorithm,
            rounds=experiment.rounds,
            cohort=experiment.cohort,
            seed=seed,
            engine=experiment.engine,
            device=device or experiment.device,
            evaluate_every=experiment.evaluate_every,
            sampler=without(hostile) if attack == ABSENT else "uniform",
            robust=build_robust(experiment),
            attack=build_attack(experiment),
            hostile=experiment.hostile,
            on_round=keep,
        )
    except RunError as error:
        ended = str(error)
    scores = {name: v for name, v in measured.items() if math.isfinite(v) and not ended}
    return Outcome(
        scale,
        attack,
        defence,
        seed,
        experiment.rounds,
        scores.get("accuracy"),
        scores.get("backdoor"),
        round(time.perf_counter() - started, 2),
        ended,
        validation,
    )


def study(
    folder: Path,
    scale: str = "digits",
    *,
    seeds: Sequence[int] | None = None,
    rounds: int | None = None,
    attacks: Sequence[str] | None = None,
    defences: Sequence[str] | None = None,
    validation: bool = False,
    part: str = "",
    device: str | None = None,
    data_dir: str | PathLike[str] | None = None,
    on_outcome: Callable[[Outcome], object] | None = None,
) -> list[Outcome]:
    """All outcomes: those in the files of `folder`, and the missing ones, which are run. All first seeds come first.

    New outcomes are added to outcomes.jsonl, validation.jsonl or, with a `part`, to a file of that part: processes with
    different parts can share a folder.
    """
    _check_names(scale, attacks or (), defences or ())
    first = FIRST_VALIDATION_SEED if validation else FIRST_SEED
    seeds = range(first, first + SEEDS) if seeds is None else seeds
    length = rounds or SCALES[scale].rounds
    chosen = [(a, d) for a in attacks or ATTACKS for d in defences or DEFENCES]
    cells = [(a, d, seed) for seed in seeds for a, d in chosen]
    same = (scale, length, validation)
    name = "validation" if validation else "outcomes"
    found = read(folder, name)
    done = {(o.attack, o.defence, o.seed): o for o in found if (o.scale, o.rounds, o.validation) == same}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / (f"{name}-{part}.jsonl" if part else f"{name}.jsonl")
    _drop_cut_line(file)
    for attack, defence, seed in cells:
        if (attack, defence, seed) in done:
            continue
        made = outcome(
            scale, attack, defence, seed, rounds, validation=validation, device=device, data_dir=data_dir
        )
        append_line(file, asdict(made))
        done[attack, defence, seed] = made
        if on_outcome is not None:
            on_outcome(made)
    return [done[cell] for cell in cells]


def _check_names(scale: str, attacks: Sequence[str], defences: Sequence[str]) -> None:
    """ConfigError for a name that does not exist, before the first run."""
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}: expected one of {', '.join(SCALES)}.")
    for attack in attacks:
        experiment_of(SCALES[scale], attack, "none", 0)
    for defence in defences:
        experiment_of(SCALES[scale], "none", defence, 0)


def read(folder: Path, name: str) -> Iterator[Outcome]:
    """The outcomes of all parts in a folder, each without a last line that a kill truncated."""
    for file in sorted(folder.glob(f"{name}*.jsonl")):
        yield from _read_file(file)


def _read_file(file: Path) -> Iterator[Outcome]:
    for number, line in enumerate(raw_lines(file), 1):
        try:
            yield Outcome(**json.loads(line))
        except (ValueError, TypeError):
            raise RunError(
                f"{file} is damaged in line {number}: delete the line to run its cell again."
            ) from None


def _drop_cut_line(file: Path) -> None:
    """Remove a last line that a kill truncated: the next one would be appended to it."""
    whole = b"".join(raw_lines(file))
    if file.exists() and file.read_bytes() != whole:
        write_bytes(file, whole)


def rows(outcomes: Iterable[Outcome]) -> tuple[list[str], list[list[str]]]:
    """(heading, rows): accuracy in %, and the backdoor's success in brackets, as means over the seeds."""
    found = list(outcomes)
    defences = list(dict.fromkeys(o.defence for o in found))
    made = []
    for attack in dict.fromkeys(o.attack for o in found):
        cells = [[o for o in found if (o.attack, o.defence) == (attack, d)] for d in defences]
        made.append([attack, *map(_cell, cells)])
    return ["attack", *defences], made


def _cell(same: list[Outcome]) -> str:
    scored = [o.accuracy for o in same if o.accuracy is not None]
    ended = len(same) - len(scored)
    if not scored:
        return "ended" if same else "-"
    doors = [o.backdoor for o in same if o.backdoor is not None]
    text = f"{100 * mean(scored):.1f}" + (f" ({100 * mean(doors):.0f})" if doors else "")
    return text + (f", {ended} ended" if ended else "")


def markdown(outcomes: Iterable[Outcome]) -> str:
    heading, body = rows(outcomes)
    lines = [heading, ["---"] * len(heading), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
