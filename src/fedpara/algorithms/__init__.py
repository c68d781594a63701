"""Federated learning algorithms: what a client computes and how the server aggregates, as pure functions of states.

algorithms.scaffold(lr=0.1, epochs=5, batch_size=64)
"""

from fedpara.algorithms.adaptive import fedadagrad, fedadam, fedyogi
from fedpara.algorithms.core import (
    Algorithm,
    FromMean,
    Mean,
    Personal,
    Update,
    Variables,
    Visit,
    clip_by_norm,
    on_any_device,
)
from fedpara.algorithms.ditto import ditto
from fedpara.algorithms.fedavg import fedavg, fedprox
from fedpara.algorithms.feddyn import feddyn
from fedpara.algorithms.fednova import fednova
from fedpara.algorithms.fedntd import fedntd
from fedpara.algorithms.local import Local
from fedpara.algorithms.optimizers import Optimizer, adam, adamw, sgd
from fedpara.algorithms.registry import build, names
from fedpara.algorithms.scaffold import scaffold

__all__ = [
    "Algorithm",
    "FromMean",
    "Local",
    "Mean",
    "Optimizer",
    "Personal",
    "Update",
    "Variables",
    "Visit",
    "adam",
    "adamw",
    "build",
    "clip_by_norm",
    "ditto",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "feddyn",
    "fednova",
    "fedntd",
    "fedprox",
    "fedyogi",
    "names",
    "on_any_device",
    "scaffold",
    "sgd",
]
