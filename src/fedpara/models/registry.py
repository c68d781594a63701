"""Models by name, for configs and the command line. A name may be a reference to your function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedpara import references
from fedpara.errors import ConfigError, among
from fedpara.models.cnn import cnn
from fedpara.models.lstm import lstm
from fedpara.models.mlp import mlp
from fedpara.models.resnet import resnet18
from fedpara.models.rules import Rule, convolutions, linears, recurrent
from fedpara.models.vgg import vgg16

Shape = tuple[int, ...]
Build = Callable[[int, Shape], nn.Module]


@dataclass(frozen=True)
class Entry:
    """How to build a model, its default rule, and the example shapes it takes."""

    build: Build
    rule: Rule
    shape: Shape
    expects: str
    fits: Callable[[Shape], bool]


def _image(least: int, most: float = math.inf) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) == 3 and all(least <= side <= most for side in shape[1:])


def _vgg(**options: Any) -> Build:
    return lambda classes, shape: vgg16(classes, channels=shape[0], **options)


def _resnet(**options: Any) -> Build:
    return lambda classes, shape: resnet18(classes, channels=shape[0], **options)


def _lstm(**options: Any) -> Build:
    return lambda classes, shape: lstm(classes, vocabulary=classes, **options)


def _mlp(**options: Any) -> Build:
    return lambda classes, shape: mlp(math.prod(shape), classes=classes, **options)


# Variants: no dropout; no bias before a norm; 2 channel groups instead of 32; narrow, a dense model as small as
# FedPara at gamma 0.1 (1,492,710 parameters for 10 classes); half, half as wide and without dropout; tiny, a sixteenth
# as wide, for quick trials.
VGG = {
    "vgg16": _vgg(),
    "vgg16-nodrop": _vgg(dropout=0.0),
    "vgg16-nobias": _vgg(bias=False),
    "vgg16-gn2": _vgg(groups=2),
    "vgg16-gn2-nodrop": _vgg(groups=2, dropout=0.0),
    "vgg16-narrow": _vgg(groups=10, width=20, bias=False),
    "vgg16-half": _vgg(groups=16, width=32, bias=False, dropout=0.0),
    "vgg16-tiny": _vgg(groups=4, width=4, bias=False),
}

RESNET = ((3, 32, 32), "an image (channels, height, width)", _image(1))
LSTM = ((80,), "a sequence of characters (length,)", lambda shape: len(shape) == 1)
ANY = ("any shape", lambda shape: len(shape) > 0)

MODELS: dict[str, Entry] = {
    **{
        name: Entry(
            build, convolutions, (3, 32, 32), "an image (channels, 32, 32), sides of 32 to 63", _image(32, 63)
        )
        for name, build in VGG.items()
    },
    "resnet18": Entry(_resnet(norm="batch"), convolutions, *RESNET),
    "resnet18-gn": Entry(_resnet(norm="group"), convolutions, *RESNET),
    "resnet18-tiny": Entry(_resnet(norm="batch", shrink=16), convolutions, *RESNET),
    "lstm": Entry(_lstm(), recurrent, *LSTM),
    "lstm-tiny": Entry(_lstm(hidden=16), recurrent, *LSTM),
    "mlp": Entry(_mlp(), linears, (1, 28, 28), *ANY),
    "deep-mlp": Entry(_mlp(layers=2), linears, (1, 8, 8), *ANY),
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


def build(name: str, *, classes: int | None = None, shape: Shape | None = None) -> nn.Module:
    """The named model for examples of one `shape` (without the batch), drawn from torch's global generator.

    The lstm predicts the next character, so `classes` is also its vocabulary. A model of this package needs both. A
    referenced function gets those that are known and that its signature names.
    """
    if references.is_reference(name):
        return _referenced(name, classes, shape)
    entry = _entry(name)
    if classes is None or shape is None:
        raise ConfigError(
            f"model {name!r} needs examples of one shape and a number of classes: use your own model for this data."
        )
    if classes < 1 or not all(side >= 1 for side in shape) or not entry.fits(shape):
        raise ConfigError(
            f"model {name!r} does not take examples of shape {shape} with {classes} classes: expected {entry.expects}, "
            "and at least 1 class. Choose another model or another data set."
        )
    return entry.build(classes, shape)


def rule(name: str) -> Rule | None:
    """The default rule for which weights of the named model to factorize. None, for every weight, with a reference."""
    return None if references.is_reference(name) else _entry(name).rule


def usual_shape(name: str) -> Shape:
    """The example shape of the data that the named model was made for."""
    return _entry(name).shape


def last_layer(model: nn.Module) -> set[str]:
    """The parameters of the last linear layer, named as in `model.state_dict()`. FedPer keeps them private.

    The last one in `model.named_modules()` is the output layer in every model of this package.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no linear layer to keep private: choose another `share`."
        )
    prefix = f"{layers[-1]}." if layers[-1] else ""
    return {name for name in model.state_dict() if name.startswith(prefix)}


def _referenced(name: str, classes: int | None, shape: Shape | None) -> nn.Module:
    if isinstance(references.find(name), nn.Module):
        raise ConfigError(f"{name!r} is a model: name a function that returns a new one.")
    known = {"classes": classes, "shape": shape}
    model = references.call(name, offered={key: v for key, v in known.items() if v is not None})
    if not isinstance(model, nn.Module):
        raise references.wrong_result(name, model, "a torch.nn.Module")
    return model


def _entry(name: str) -> Entry:
    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}: {among(name, MODELS)}")
    return MODELS[name]
