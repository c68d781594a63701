"""What of a model is factorized: predicates (name of the module, the module, name of its parameter) -> bool.

`name` is the one of `model.named_modules()` ("features.0"), `parameter` the attribute ("weight").
A rule may give any other value in place of True: the caller says what it means.
"""

from collections.abc import Callable
from typing import Literal, TypeVar

from torch import Tensor, nn

from fedpara.errors import ConfigError
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
    """The kernel of every convolution, transposed ones too."""
    return isinstance(module, CONVOLUTIONS) and parameter == "weight"


def linears(name: str, module: nn.Module, parameter: str) -> bool:
    """The matrix of every linear layer."""
    return isinstance(module, nn.Linear) and parameter == "weight"


def recurrent(name: str, module: nn.Module, parameter: str) -> bool:
    """Input and hidden matrices of every recurrent layer or cell, this package's and torch's."""
    layers = (LSTMLayer, nn.RNNBase, nn.RNNCellBase)
    return isinstance(module, layers) and parameter.startswith(("weight_ih", "weight_hh"))


def everything(name: str, module: nn.Module, parameter: str) -> bool:
    """Every parameter of two or more dimensions."""
    weight = getattr(module, parameter)
    return isinstance(weight, Tensor) and weight.dim() >= 2


def resnet_layers(early: T, rest: T) -> Callable[[str, nn.Module, str], T | Literal[False]]:
    """`early` for the first and second convolution and every 1x1 one, `rest` for the other convolutions.

    The split of appendix D.2, where the early ones keep gamma 1.0; False for what is not a convolution.
    """

    def rule(name: str, module: nn.Module, parameter: str) -> T | Literal[False]:
        if not convolutions(name, module, parameter):
            return False
        pointwise = getattr(module, parameter).shape[2:].numel() == 1
        return early if pointwise or name in {"conv1", "layer1.0.conv1"} else rest

    return rule


def hybrid(model: nn.Module, dense_layers: int) -> Rule:
    """False for the first `dense_layers` convolutions of the model and True for the later ones.

    Pufferfish's hybrid (appendix D.2): low rank only where the layers are wide and far from the input.
    Order is that of `model.named_modules()`, names are fixed when the rule is made.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, CONVOLUTIONS)]
    if not 0 <= dense_layers < len(names):
        raise ConfigError(
            f"hybrid with {dense_layers} dense layers of a model with {len(names)} convolutions: "
            f"expected 0 or more and fewer than {len(names)}."
        )
    later = set(names[dense_layers:])

    def rule(name: str, module: nn.Module, parameter: str) -> bool:
        return name in later and convolutions(name, module, parameter)

    return rule
