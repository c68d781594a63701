"""The study of attacks and defences: `fedpara reproduce robustness`.

Every run is one line of a JSON Lines file. The same call skips the runs that the file holds.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from fedpara import engines
from fedpara.errors import ConfigError, RunError
from fedpara.experiments.build import build, build_attack, build_robust
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.jsonl import append_line, raw_lines
from fedpara.files import write_bytes

HOSTILE = 0.2
ATTACKS = (
    *("none", "sign-flip", "sign-flip(10)", "scaling(100)", "noise", "label-flip", "backdoor"),
    *("backdoor(scale=5)", "alie(1.5)", "ipm", "gauge"),
)
DEFENCES = (
    *("none", "norm-clip", "median", "trimmed-mean", "multi-krum"),
    *("rfa", "centred-clip", "fltrust", "flame", "auto"),
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
        model="vgg16",
        gamma=0.1,
        clients=100,
        cohort=16,
        rounds=60,
        epochs=10,
        batch_size=64,
        lr=0.1,
        lr_decay=0.992,
        evaluate_every=10,
    ),
}
"""digits takes seconds per run on a CPU; cifar10 needs a GPU."""
SEEDS, FIRST_SEED = 3, 20
"""How many seeds, and the first: `auto` was chosen with seeds 0 to 11."""


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


def experiment_of(base: Experiment, attack: str, defence: str, seed: int) -> Experiment:
    return replace(
        base,
        seed=seed,
        robust=None if defence == "none" else defence,
        attack=None if attack == "none" else attack,
        hostile=0.0 if attack == "none" else HOSTILE,
    )


def outcome(
    scale: str, attack: str, defence: str, seed: int, rounds: int | None = None, device: str | None = None
) -> Outcome:
    """Runs one cell of the table with one seed, in memory."""
    base = SCALES[scale] if rounds is None else replace(SCALES[scale], rounds=rounds)
    experiment = experiment_of(base, attack, defence, seed)
    parts, started = build(experiment), time.perf_counter()
    measured: dict[str, float] = {}
    ended = ""

    def keep(result: Any) -> None:
        measured.update(result.scores)

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
    )


def study(
    file: Path,
    scale: str = "digits",
    *,
    seeds: int = SEEDS,
    rounds: int | None = None,
    device: str | None = None,
    attacks: Sequence[str] = ATTACKS,
    defences: Sequence[str] = DEFENCES,
    on_outcome: Callable[[Outcome], object] | None = None,
) -> list[Outcome]:
    """All outcomes, those of `file` and the missing ones, which are added to it. All first seeds come first."""
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}: expected one of {', '.join(SCALES)}.")
    length = rounds or SCALES[scale].rounds
    cells = [
        (a, d, seed) for seed in range(FIRST_SEED, FIRST_SEED + seeds) for a in attacks for d in defences
    ]
    done = {(o.attack, o.defence, o.seed): o for o in read(file) if (o.scale, o.rounds) == (scale, length)}
    file.parent.mkdir(parents=True, exist_ok=True)
    _drop_cut_line(file)
    for attack, defence, seed in cells:
        if (attack, defence, seed) in done:
            continue
        made = outcome(scale, attack, defence, seed, rounds, device)
        append_line(file, asdict(made))
        done[attack, defence, seed] = made
        if on_outcome is not None:
            on_outcome(made)
    return [done[cell] for cell in cells]


def read(file: Path) -> Iterator[Outcome]:
    """The outcomes of the file, without a last line that a kill truncated."""
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
