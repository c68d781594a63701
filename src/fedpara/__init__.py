"""FedPara: low-rank Hadamard products for communication-efficient federated learning."""

from fedpara.errors import FedParaError
from fedpara.parameterization import FedPara, LowRank, PFedPara, factorize, merge

__version__ = "0.1.0"

__all__ = ["FedPara", "FedParaError", "LowRank", "PFedPara", "factorize", "merge"]
