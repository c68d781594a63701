"""Experiments by name. Each preset is one or several runs that belong together."""

from dataclasses import dataclass
from difflib import get_close_matches

from fedpara.errors import ConfigError
from fedpara.experiments.config import Experiment


@dataclass(frozen=True)
class Preset:
    about: str
    runs: dict[str, Experiment]


def _quickstart() -> dict[str, Experiment]:
    """Digits on a laptop: what the original sends, what low-rank loses, what FedPara and pFedPara keep."""
    common = {
        "dataset": "digits",
        "model": "cnn",
        "clients": 20,
        "cohort": 5,
        "rounds": 30,
        "epochs": 2,
        "batch_size": 16,
        "lr": 0.05,
        "evaluate_every": 2,
    }
    return {
        "original": Experiment(scheme="original", **common),  # type: ignore[arg-type]
        "lowrank": Experiment(scheme="lowrank", gamma=0.1, **common),  # type: ignore[arg-type]
        "fedpara": Experiment(scheme="fedpara", gamma=0.1, **common),  # type: ignore[arg-type]
        "pfedpara": Experiment(scheme="pfedpara", gamma=0.1, personal=True, **common),  # type: ignore[arg-type]
    }


PRESETS = {
    "quickstart": Preset("digits: original, low-rank, FedPara and pFedPara side by side", _quickstart()),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"unknown preset {name!r}: {hint}Known: {', '.join(PRESETS)}.")
    return PRESETS[name]
