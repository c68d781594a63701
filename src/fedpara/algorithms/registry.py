"""Algorithms by name, for configs and the command line. A name may be a reference to your function."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fedpara import references
from fedpara.algorithms.adaptive import fedadagrad, fedadam, fedyogi
from fedpara.algorithms.core import Algorithm
from fedpara.algorithms.ditto import ditto
from fedpara.algorithms.fedavg import fedavg, fedprox
from fedpara.algorithms.feddyn import feddyn
from fedpara.algorithms.fednova import fednova
from fedpara.algorithms.fedntd import fedntd
from fedpara.algorithms.local import SETTINGS, Local
from fedpara.algorithms.scaffold import scaffold
from fedpara.errors import ConfigError, among

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "fednova": fednova,
    "fedntd": fedntd,
    "ditto": ditto,
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
}


def names() -> list[str]:
    return list(ALGORITHMS)


def options() -> set[str]:
    """The hyper-parameters of all algorithms, such as mu."""
    every = [p for factory in ALGORITHMS.values() for p in inspect.signature(factory).parameters.values()]
    return {p.name for p in every if p.kind is not p.VAR_KEYWORD} - {"local"}


def build(name: str, local: Local, **hyper: Any) -> Algorithm:
    """The named algorithm with its hyper-parameters (mu, alpha, lambda_, server_lr, beta, beta1, beta2, tau)."""
    if references.is_reference(name):
        return _referenced(name, local, hyper)
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}: {among(name.lower(), ALGORITHMS)}")
    factory = ALGORITHMS[name]
    _refuse_unknown(name, hyper, inspect.signature(factory).parameters.values())
    return factory(local=local, **hyper)


def _referenced(name: str, local: Local, hyper: dict[str, Any]) -> Algorithm:
    """The algorithm that the function returns. It takes `local`, or the fields of Local as its **keywords."""
    named = references.parameters(name)
    _refuse_unknown(name, hyper, named.values())
    given: dict[str, Any] = {"local": local}
    if "local" not in named or named["local"].kind is inspect.Parameter.VAR_KEYWORD:
        given = {name: getattr(local, name) for name in SETTINGS}
        if not any(p.kind is p.VAR_KEYWORD for p in named.values()):
            raise ConfigError(
                f"{name!r} takes neither `local` nor **keywords, so it would not get lr, epochs and batch_size: add "
                "`local=None` to its parameters and pass it on."
            )
    algorithm = references.call(name, **{**given, **(references.parse(name).keywords or {}), **hyper})
    if not isinstance(algorithm, Algorithm):
        raise references.wrong_result(name, algorithm, "an Algorithm")
    return algorithm


def _refuse_unknown(name: str, hyper: Iterable[str], parameters: Iterable[inspect.Parameter]) -> None:
    own = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "local"]
    for option in [option for option in hyper if option not in own]:
        raise ConfigError(
            f"{name} has no hyper-parameter {option!r}: it has {', '.join(own) or 'none'}. "
            "Learning rate, epochs and batch size are fields of Local."
        )
