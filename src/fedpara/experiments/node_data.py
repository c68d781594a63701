"""A client's own data: dataset "load:package.module:function" names a function that each node calls.

load(node_config) -> (train, test), both `Examples`; test may be None. The server calls it too, with
{"server": True}: of its train only shape and classes count (it may be empty), its test scores the global model.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from fedpara.data import Examples, FederatedData
from fedpara.errors import ConfigError, DataError, FedParaError
from fedpara.experiments.config import Experiment

OWN = "load:"
SERVER = {"server": True}


def is_own(dataset: str) -> bool:
    return dataset.startswith(OWN)


def read_own(dataset: str, node_config: Mapping[str, Any]) -> tuple[Examples, Examples | None]:
    function = _function(dataset)
    try:
        got = function(dict(node_config))
    except FedParaError:
        raise
    except Exception as error:
        raise DataError(f"{dataset} failed: {type(error).__name__}: {error}") from error
    if not isinstance(got, tuple) or len(got) != 2 or not isinstance(got[0], Examples):
        raise DataError(
            f"{dataset} returned {type(got).__name__}: expected (train, test) of fedpara's Examples."
        )
    train, test = got
    if test is not None and not isinstance(test, Examples):
        raise DataError(f"{dataset} returned a test of {type(test).__name__}: expected Examples or None.")
    return train, test


def server_side(experiment: Experiment) -> tuple[FederatedData, Examples | None]:
    """A federation whose examples are elsewhere, and the server's own test set."""
    if experiment.engine != "flower":
        raise ConfigError(
            f"dataset is {experiment.dataset!r}, which each Flower node reads for itself: use --engine flower."
        )
    if experiment.validation:
        raise ConfigError(
            f"validation is {experiment.validation} and dataset is {experiment.dataset!r}, whose examples each node "
            "reads for itself: holding out a part of those is not supported yet. Leave validation out, and let the "
            "function return a validation part as its test data."
        )
    train, test = read_own(experiment.dataset, SERVER)
    nobody: list[list[int]] = [[] for _ in range(experiment.clients)]
    return FederatedData(train.subset([]), nobody, test_clients=nobody if experiment.personal else None), test


def _function(dataset: str) -> Callable[[dict[str, Any]], Any]:
    module, _, name = dataset.removeprefix(OWN).partition(":")
    if not module or not name:
        raise ConfigError(f"dataset is {dataset!r}: expected such as 'load:hospital.files:load'.")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"{dataset} cannot be imported: {error}. Install the module beside fedpara, put it on PYTHONPATH, or "
            "lay it into the Flower app's folder."
        ) from None
    if not callable(function):
        raise ConfigError(f"dataset is {dataset!r}: {name} is no function.")
    return function  # type: ignore[no-any-return]
