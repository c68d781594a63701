"""Rules for which weights to factorize: predicates of (module name, module, parameter name).

`name` is as in `model.named_modules()` ("features.0"); `parameter` is the attribute ("weight").
A rule may return a scheme instead of True.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

from torch import Tensor, nn

from fedpara.models.lstm import LSTMLayer

T = TypeVar("T")
Rule = Callable[[str, nn.Module, str], bool]

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def convolutions(name: str, module: nn.Module, parameter: str) -> bool:
    """The kernel of every convolution, including transposed ones."""
    return isinstance(module, CONVOLUTIONS) and parameter == "weight"


def linears(name: str, module: nn.Module, parameter: str) -> bool:
    """The matrix of every linear layer."""
    return isinstance(module, nn.Linear) and parameter == "weight"


def recurrent(name: str, module: nn.Module, parameter: str) -> bool:
    """The input and hidden matrices of every recurrent layer or cell, from this package or torch."""
    layers = (LSTMLayer, nn.RNNBase, nn.RNNCellBase)
    return isinstance(module, layers) and parameter.startswith(("weight_ih", "weight_hh"))


def everything(name: str, module: nn.Module, parameter: str) -> bool:
    """Every parameter of two or more dimensions."""
    weight = getattr(module, parameter)
    return isinstance(weight, Tensor) and weight.dim() >= 2


def inner(model: nn.Module) -> Rule:
    """The convolutions and linear layers of the model, except the first and the last one, as in FedMUD."""
    layers = [
        name for name, module in model.named_modules() if isinstance(module, (*CONVOLUTIONS, nn.Linear))
    ]
    between = set(layers[1:-1])

    def rule(name: str, module: nn.Module, parameter: str) -> bool:
        return name in between and parameter == "weight"

    return rule


def resnet_layers(early: T, rest: T) -> Callable[[str, nn.Module, str], T | Literal[False]]:
    """`early` for the first two convolutions and every 1x1 one, `rest` for the other convolutions, False otherwise.

    The split of appendix D.2, where the early layers keep gamma 1.0.
    """

    def rule(name: str, module: nn.Module, parameter: str) -> T | Literal[False]:
        if not convolutions(name, module, parameter):
            return False
        pointwise = getattr(module, parameter).shape[2:].numel() == 1
        return early if pointwise or name in {"conv1", "layer1.0.conv1"} else rest

    return rule


def hybrid(model: nn.Module, dense_layers: int) -> Rule:
    """False for the first `dense_layers` convolutions in `model.named_modules()`, True for the later ones.

    Pufferfish's hybrid (appendix D.2): low rank only for the wide layers far from the input.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)]
    later = set(names[dense_layers:])

    def rule(name: str, module: nn.Module, parameter: str) -> bool:
        return name in later and convolutions(name, module, parameter)

    return rule
