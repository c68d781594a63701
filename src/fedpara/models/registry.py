"""Models by name, as configs and the command line ask for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedpara.errors import ConfigError, among, expect_kind
from fedpara.models.cnn import cnn
from fedpara.models.lstm import lstm
from fedpara.models.mlp import mlp
from fedpara.models.resnet import resnet18
from fedpara.models.rules import Rule, convolutions, linears, recurrent
from fedpara.models.vgg import vgg16

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    build: Callable[[int, Shape], nn.Module]
    rule: Rule
    shape: Shape
    expects: str
    fits: Callable[[Shape], bool]


def _image(least: int, most: float = math.inf) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) == 3 and all(least <= side <= most for side in shape[1:])


def _vgg(**changed: Any) -> Callable[[int, Shape], nn.Module]:
    return lambda classes, shape: vgg16(classes, channels=shape[0], **changed)


# The variants: no dropout; no bias before a norm; two groups of channels for 32; narrow, which is dense and as small as
# FedPara at gamma 0.1 (1,492,710 parameters for 10 classes); tiny, a sixteenth as wide, for a quick try.
VGG = {
    "vgg16": _vgg(),
    "vgg16-nodrop": _vgg(dropout=0.0),
    "vgg16-nobias": _vgg(bias=False),
    "vgg16-gn2": _vgg(groups=2),
    "vgg16-gn2-nodrop": _vgg(groups=2, dropout=0.0),
    "vgg16-narrow": _vgg(groups=10, width=20, bias=False),
    "vgg16-tiny": _vgg(groups=4, width=4, bias=False),
}

MODELS: dict[str, Entry] = {
    **{
        name: Entry(
            build, convolutions, (3, 32, 32), "an image (channels, 32, 32), sides of 32 to 63", _image(32, 63)
        )
        for name, build in VGG.items()
    },
    "resnet18": Entry(
        lambda classes, shape: resnet18(classes, norm="batch", channels=shape[0]),
        convolutions,
        (3, 32, 32),
        "an image (channels, height, width)",
        _image(1),
    ),
    "resnet18-gn": Entry(
        lambda classes, shape: resnet18(classes, norm="group", channels=shape[0]),
        convolutions,
        (3, 32, 32),
        "an image (channels, height, width)",
        _image(1),
    ),
    "resnet18-tiny": Entry(
        lambda classes, shape: resnet18(classes, norm="batch", channels=shape[0], shrink=16),
        convolutions,
        (3, 32, 32),
        "an image (channels, height, width)",
        _image(1),
    ),
    "lstm": Entry(
        lambda classes, shape: lstm(classes, vocabulary=classes),
        recurrent,
        (80,),
        "a sequence of characters (length,)",
        lambda shape: len(shape) == 1,
    ),
    "lstm-tiny": Entry(
        lambda classes, shape: lstm(classes, vocabulary=classes, hidden=16),
        recurrent,
        (80,),
        "a sequence of characters (length,)",
        lambda shape: len(shape) == 1,
    ),
    "mlp": Entry(
        lambda classes, shape: mlp(math.prod(shape), classes=classes),
        linears,
        (1, 28, 28),
        "any shape",
        lambda shape: len(shape) > 0,
    ),
    "deep-mlp": Entry(
        lambda classes, shape: mlp(math.prod(shape), classes=classes, layers=2),
        linears,
        (1, 8, 8),
        "any shape",
        lambda shape: len(shape) > 0,
    ),
    "cnn": Entry(
        lambda classes, shape: cnn(classes, channels=shape[0], size=min(shape[1:])),
        convolutions,
        (1, 8, 8),
        "an image (channels, height, width), sides of 2 or more",
        _image(2),
    ),
}


def names() -> list[str]:
    return list(MODELS)


def build(name: str, *, classes: int, shape: Shape) -> nn.Module:
    """The named model for examples of one `shape` (no batch), drawn from torch's global generator.

    The lstm predicts the next character, so its vocabulary is its `classes`.
    """
    expect_kind("the model's name", name, str, ConfigError)
    expect_kind("classes", classes, int, ConfigError)
    if not isinstance(shape, tuple | list) or not all(isinstance(side, int) for side in shape):
        raise ConfigError(f"the shape is {shape!r}: expected whole numbers, such as (3, 32, 32).")
    entry = _entry(name)
    if classes < 1:
        raise ConfigError(f"model {name!r} with {classes} classes: expected 1 or more.")
    if not all(side >= 1 for side in shape) or not entry.fits(shape):
        raise ConfigError(
            f"model {name!r} does not take examples of shape {shape}: it expects {entry.expects}. "
            "Choose another model or another data set."
        )
    return entry.build(classes, shape)


def rule(name: str) -> Rule:
    """What of the named model is factorized unless told otherwise."""
    return _entry(name).rule


def usual_shape(name: str) -> Shape:
    """The shape of an example of the data the named model is made for."""
    return _entry(name).shape


def last_layer(model: nn.Module) -> set[str]:
    """The parameters of the last linear layer, named as in `model.state_dict()`: what FedPer keeps.

    Last in the order of `model.named_modules()`, which in every model here is the output layer.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer: expected one, whose parameters stay private."
        )
    prefix = f"{layers[-1]}." if layers[-1] else ""
    return {name for name in model.state_dict() if name.startswith(prefix)}


def _entry(name: str) -> Entry:
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}: {among(name, MODELS)}")
    return MODELS[name]
