"""Plain networks, and the rules for which of their weights to factorize."""

from fedpara.models.cnn import cnn
from fedpara.models.lstm import lstm
from fedpara.models.mlp import mlp
from fedpara.models.registry import build, last_layer, names, rule, usual_shape
from fedpara.models.resnet import resnet18
from fedpara.models.rules import convolutions, everything, hybrid, inner, linears, recurrent, resnet_layers
from fedpara.models.vgg import vgg16

__all__ = [
    "build",
    "cnn",
    "convolutions",
    "everything",
    "hybrid",
    "inner",
    "last_layer",
    "linears",
    "lstm",
    "mlp",
    "names",
    "recurrent",
    "resnet18",
    "resnet_layers",
    "rule",
    "usual_shape",
    "vgg16",
]
