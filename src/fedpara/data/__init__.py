"""Data sets, and their partition over clients.

train, test = data.load("cifar10")
clients = data.dirichlet(train.targets, clients=100, alpha=0.5, seed=0)
"""

from fedpara.data.examples import Examples, normalise, unit_scale
from fedpara.data.federated import FederatedData
from fedpara.data.partition import (
    Partition,
    by_owner,
    dirichlet,
    dirichlet_capped,
    iid,
    personal_test,
    shards,
    split,
)
from fedpara.data.registry import Report, Status, data_folder, load, names, prepare, status, verify

__all__ = [
    "Examples",
    "FederatedData",
    "Partition",
    "Report",
    "Status",
    "by_owner",
    "data_folder",
    "dirichlet",
    "dirichlet_capped",
    "iid",
    "load",
    "names",
    "normalise",
    "personal_test",
    "prepare",
    "shards",
    "split",
    "status",
    "unit_scale",
    "verify",
]
