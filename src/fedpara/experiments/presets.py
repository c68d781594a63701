"""Presets: named experiments. Each preset is one or more runs to compare."""

from dataclasses import dataclass, replace
from typing import Any

from fedpara.errors import ConfigError, among
from fedpara.experiments.config import Experiment
from fedpara.experiments.studies.frontier.scales import SCALES

LEAN = {
    "lean": ("digits", "fedpara0 eden/stc5", 0.2),
    "lean-cifar10": ("cifar10", "fedpara0.4 eden/grid0.25", 0.1),
}
"""Presets that send few bytes: a frontier scale, the combination that validation chose, and its learning rate."""


@dataclass(frozen=True)
class Preset:
    about: str
    runs: dict[str, Experiment]


def _quickstart() -> dict[str, Experiment]:
    """Digits on a laptop: the original weights, low-rank, FedPara and pFedPara."""
    common: dict[str, Any] = {
        "dataset": "digits",
        "model": "deep-mlp",
        "clients": 20,
        "cohort": 5,
        "rounds": 20,
        "epochs": 3,
        "batch_size": 16,
        "lr": 0.1,
        "lr_decay": 0.95,
        "momentum": 0.9,
        "clip": 2.0,
    }
    return {
        "original": Experiment(scheme="original", **common),
        "lowrank": Experiment(scheme="lowrank", gamma=0.0, **common),
        "fedpara": Experiment(scheme="fedpara", gamma=0.0, **common),
        "pfedpara": Experiment(scheme="pfedpara", gamma=0.0, personal=True, **common),
    }


def _personal_mnist() -> dict[str, Experiment]:
    """Section 3.3, scenario 3: two FC layers, and the first ten of McMahan's 100 clients with two classes each.

    All ten train in every round. Without clipping, pFedPara's product explodes in the first round at the upper
    learning rates of the paper (0.01 to 0.1). The clip is the same for every method.
    """
    common: dict[str, Any] = {
        "dataset": "mnist",
        "model": "mlp",
        "split": "shards",
        "clients": 100,
        "keep": 10,
        "cohort": 10,
        "personal": True,
        "rounds": 30,
        "epochs": 5,
        "batch_size": 10,
        "lr": 0.03,
        "lr_decay": 0.999,
        "clip": 5.0,
        "evaluate_every": 5,
    }
    return {
        "pfedpara": Experiment(scheme="pfedpara", gamma=0.5, **common),
        "fedper": Experiment(scheme="original", share="fedper", **common),
        "fedavg": Experiment(scheme="original", **common),
        "local": Experiment(scheme="original", share="none", **common),
    }


def _lean(name: str) -> dict[str, Experiment]:
    """The combination with the fewest bytes that loses at most one point of validation accuracy to the original."""
    scale, combination, rate = LEAN[name]
    chosen = SCALES[scale].experiment(combination)
    return {name: replace(chosen, lr=rate, engine="auto", device=None)}


PRESETS = {
    "quickstart": Preset("digits: original, low-rank, FedPara and pFedPara side by side", _quickstart()),
    "personal-mnist": Preset(
        "MNIST, ten clients of two classes: pFedPara, FedPer, FedAvg and Local", _personal_mnist()
    ),
    "lean": Preset(
        "digits with few bytes: FedPara, one bit per number up, signs of the largest differences down",
        _lean("lean"),
    ),
    "lean-cifar10": Preset(
        "CIFAR-10 with few bytes: FedPara's VGG16, one bit per number up, moves on a grid down",
        _lean("lean-cifar10"),
    ),
}


def preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}: {among(name, PRESETS)}")
    return PRESETS[name]
