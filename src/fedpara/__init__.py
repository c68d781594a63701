"""FedPara: low-rank Hadamard products for communication-efficient federated learning."""

from fedpara.data import FederatedData
from fedpara.engines import Task, simulate
from fedpara.errors import FedParaError
from fedpara.experiments import Experiment
from fedpara.parameterization import FedPara, LowRank, PFedPara, factorize, merge
from fedpara.wire import Link

__version__ = "0.1.0"

__all__ = [
    "Experiment",
    "FedPara",
    "FedParaError",
    "FederatedData",
    "Link",
    "LowRank",
    "PFedPara",
    "Task",
    "factorize",
    "merge",
    "simulate",
]
