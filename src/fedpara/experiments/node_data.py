"""Custom data: dataset "load:package.module:function" names a function that each node calls.

load(node_config) -> (train, test), both `Examples`; test may be None. The server calls it too, with
{"server": True}. It uses only the shape, classes, mean and std of `train`, which may be empty, and scores the global
model on `test`.
"""

from collections.abc import Mapping
from typing import Any

from fedpara import references
from fedpara.data import Examples, FederatedData
from fedpara.errors import ConfigError, DataError
from fedpara.experiments.config import Experiment

OWN = "load:"
SERVER = {"server": True}


def is_own(dataset: str) -> bool:
    return dataset.startswith(OWN)


def read_own(dataset: str, node_config: Mapping[str, Any]) -> tuple[Examples, Examples | None]:
    match got := references.call(dataset.removeprefix(OWN), dict(node_config)):
        case (Examples() as train, (Examples() | None) as test):
            return train, test
    raise DataError(
        f"{dataset} returned {type(got).__name__}: expected (train, test), each fedpara Examples; test may be None."
    )


def server_side(experiment: Experiment) -> tuple[FederatedData, Examples | None]:
    """A federation without examples, since the nodes hold them, and the server's test set."""
    if experiment.engine != "flower":
        raise ConfigError(
            f"Flower nodes read dataset {experiment.dataset!r} themselves: use --engine flower."
        )
    if experiment.validation:
        raise ConfigError(
            f"validation is not supported for dataset {experiment.dataset!r}: leave it out, and return validation "
            "examples as the test data."
        )
    train, test = read_own(experiment.dataset, SERVER)
    empty: list[list[int]] = [[] for _ in range(experiment.clients)]
    return FederatedData(train.subset([]), empty, test_clients=empty if experiment.personal else None), test
