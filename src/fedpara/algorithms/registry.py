"""Algorithms by name, for configs and the command line."""

import inspect
from collections.abc import Callable
from typing import Any

from fedpara.algorithms.adaptive import fedadagrad, fedadam, fedyogi
from fedpara.algorithms.core import Algorithm
from fedpara.algorithms.fedavg import fedavg, fedprox
from fedpara.algorithms.feddyn import feddyn
from fedpara.algorithms.fednova import fednova
from fedpara.algorithms.local import Local
from fedpara.algorithms.scaffold import scaffold
from fedpara.errors import ConfigError, among

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fednova": fednova,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
}


def names() -> list[str]:
    return list(ALGORITHMS)


def build(name: str, local: Local, **hyper: Any) -> Algorithm:
    """The named algorithm with its hyper-parameters (mu, alpha, server_lr, beta1, beta2, tau)."""
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}: {among(name.lower(), ALGORITHMS)}")
    factory = ALGORITHMS[name]
    own = [
        p.name for p in inspect.signature(factory).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    for option in hyper.keys() - own:
        raise ConfigError(
            f"{name} has no hyper-parameter {option!r}: it has {', '.join(own) or 'none'}. "
            "Learning rate, epochs and batch size are fields of Local."
        )
    return factory(local=local, **hyper)
