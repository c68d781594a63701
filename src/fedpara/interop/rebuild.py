"""Build a model from its description in a saved state.

    {"name": "vgg16", "classes": 10, "shape": [3, 32, 32]}      a model of this package
    {"target": "package.module:function"}                       a custom model; "classes" and "shape" are optional

Only `build_target` imports and calls code, and only a target that the user typed goes there. `rebuild` refuses
a target that comes from a file: error messages merely show it.
"""

import shlex
from collections.abc import Mapping

from torch import Tensor, nn

from fedpara import models
from fedpara.errors import StateError, UsageError
from fedpara.parameterization.naming import mismatch
from fedpara.references import EXPECTED as EXPECTED_REFERENCE
from fedpara.references import OBJECT, is_reference

Description = Mapping[str, object]

EXPECTED = (
    'expected {"name": "vgg16", "classes": 10, "shape": [3, 32, 32]}, or {"target": "package.module:function"} '
    'with or without "classes" and a "shape"'
)


def is_description(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    shape = value.get("shape", [1])
    if not isinstance(shape, list | tuple) or not all(type(side) is int for side in shape):
        return False
    if "target" in value:
        known = isinstance(value["target"], str) and value.keys() <= {"target", "classes", "shape"}
        return known and type(value.get("classes", 0)) is int
    return (
        value.keys() == {"name", "classes", "shape"}
        and isinstance(value["name"], str)
        and type(value["classes"]) is int
    )


def rebuild(description: Description) -> nn.Module:
    """The described model of this package, with fresh weights. A target is a UsageError and is never called."""
    if "target" in description:
        target = str(description["target"])
        if target.startswith(OBJECT):
            raise UsageError(
                f"the run's model was a Python object ({target}): pass --model package.module:function, which builds "
                "it."
            )
        raise UsageError(
            f"the state names {target!r} as its model, and code that a file names is never run: pass --model "
            f"{shlex.quote(str(target))} if you trust it. In Python, pass model=build_target({target!r})."
        )
    classes: int = description["classes"]  # type: ignore[assignment]
    return models.build(str(description["name"]), classes=classes, shape=shape_of(description) or ())


def refuse_misfit(state: Mapping[str, Tensor], network: nn.Module, what: str) -> None:
    """StateError unless a plain state has the network's names and shapes; `what` is the network's name."""
    if wrong := mismatch(state, {name: tensor.shape for name, tensor in network.state_dict().items()}):
        raise StateError(
            f"the state does not fit the model {what}; {wrong}. Check its classes and input shape."
        )


def shape_of(description: Description) -> tuple[int, ...] | None:
    """The shape of one example, without the batch, if the description has it."""
    shape = description.get("shape")
    return tuple(shape) if isinstance(shape, list | tuple) else None


def build_target(
    target: str, *, classes: int | None = None, shape: tuple[int, ...] | None = None
) -> nn.Module:
    """The module that `package.module:function` returns. It gets `classes` and `shape` if its signature names them."""
    if not is_reference(target):
        raise UsageError(f"{target!r} is not a reference: {EXPECTED_REFERENCE}.")
    return models.build(target, classes=classes, shape=shape)
