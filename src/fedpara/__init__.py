"""FedPara: low-rank Hadamard products for communication-efficient federated learning."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedpara.algorithms.schedules import constant, cosine, linear, step_decay
    from fedpara.data import Examples, FederatedData
    from fedpara.engines.participation.devices import Devices, lognormal
    from fedpara.errors import FedParaError
    from fedpara.experiments import Experiment
    from fedpara.experiments.simulate import simulate
    from fedpara.parameterization import (
        AwareKronecker,
        AwareLowRank,
        FedPara,
        Kronecker,
        LowRank,
        PFedPara,
        factorize,
        merge,
    )
    from fedpara.tasks import Metric, Task, metric
    from fedpara.wire import Link

__version__ = "0.1.0"

__all__ = [
    "AwareKronecker",
    "AwareLowRank",
    "Devices",
    "Examples",
    "Experiment",
    "FedPara",
    "FedParaError",
    "FederatedData",
    "Kronecker",
    "Link",
    "LowRank",
    "Metric",
    "PFedPara",
    "Task",
    "constant",
    "cosine",
    "factorize",
    "linear",
    "lognormal",
    "merge",
    "metric",
    "simulate",
    "step_decay",
]

# A name is imported at its first use (PEP 562): importing torch takes seconds, and `fedpara --help` does not need it.
_MODULES = (
    *("algorithms", "attacks", "data", "engines", "errors", "experiments", "files", "layout", "models"),
    *("parameterization", "privacy", "robust", "state", "tasks", "trees", "wire"),
)
_HOMES = {
    "AwareKronecker": "parameterization",
    "AwareLowRank": "parameterization",
    "Devices": "engines",
    "Examples": "data",
    "Metric": "tasks",
    "constant": "algorithms.schedules",
    "cosine": "algorithms.schedules",
    "linear": "algorithms.schedules",
    "metric": "tasks",
    "step_decay": "algorithms.schedules",
    "Experiment": "experiments",
    "FedPara": "parameterization",
    "FedParaError": "errors",
    "FederatedData": "data",
    "Kronecker": "parameterization",
    "Link": "wire",
    "LowRank": "parameterization",
    "PFedPara": "parameterization",
    "Task": "tasks",
    "factorize": "parameterization",
    "lognormal": "engines",
    "merge": "parameterization",
    "simulate": "experiments.simulate",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fedpara.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedpara' has no attribute {name!r}")
    value = getattr(import_module(f"fedpara.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *__all__})
