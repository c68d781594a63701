"""A model again from its description: what a saved state says about where its network comes from.

{"name": "vgg16", "classes": 10, "shape": [3, 32, 32]}      a model of this package
{"target": "package.module:function"}                       a custom model; "shape" if an example has one

Only `build_target` imports and calls code, and only the user's own words go there: a target that comes with a file is a
hint, which error messages show and `rebuild` refuses.
"""

import importlib
import shlex
from collections.abc import Mapping
from difflib import get_close_matches

from torch import Tensor, nn

from fedpara import models
from fedpara.errors import StateError, UsageError, expect_kind

Description = Mapping[str, object]

EXPECTED = (
    'expected {"name": "vgg16", "classes": 10, "shape": [3, 32, 32]}, or {"target": "package.module:function"} '
    'with or without a "shape"'
)

FEW = 4
"""Names that a text says before it stops."""


def is_description(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    shape = value.get("shape", [1])
    if not isinstance(shape, list | tuple) or not all(type(side) is int for side in shape):
        return False
    if "target" in value:
        return isinstance(value["target"], str) and value.keys() <= {"target", "shape"}
    return (
        value.keys() == {"name", "classes", "shape"}
        and isinstance(value["name"], str)
        and type(value["classes"]) is int
    )


def rebuild(description: Description) -> nn.Module:
    """The described model of this package with fresh weights. UsageError for a target, which is never called here."""
    if not is_description(description):
        raise UsageError(f"a model cannot be built from {description!r}: {EXPECTED}.")
    if "target" in description:
        target = description["target"]
        raise UsageError(
            f"the state names {target!r} as its model, and code that a file names is never run: pass --model "
            f"{shlex.quote(str(target))} if you trust it. In Python, pass model=build_target({target!r})."
        )
    classes = description["classes"]
    assert isinstance(classes, int)
    return models.build(str(description["name"]), classes=classes, shape=shape_of(description) or ())


def refuse_misfit(state: Mapping[str, Tensor], network: nn.Module, what: str) -> None:
    """StateError unless a plain state has the network's names and shapes; `what` is the network's name."""
    own = network.state_dict()
    found = {
        "missing": [name for name in own if name not in state],
        "too many": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(state[name].shape)}, which is {tuple(tensor.shape)} there"
            for name, tensor in own.items()
            if name in state and state[name].shape != tensor.shape
        ],
    }
    told = [f"{kind}: {_some(names)}" for kind, names in found.items() if names]
    if told:
        raise StateError(
            f"the state does not fit the model {what}; {'; '.join(told)}. Expected a state of that very model: for as "
            "many classes, and examples of that shape."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def shape_of(description: Description) -> tuple[int, ...] | None:
    """The shape of one example, without the batch, if the description says it."""
    shape = description.get("shape")
    return tuple(shape) if isinstance(shape, list | tuple) else None


def build_target(target: str) -> nn.Module:
    """The module that `package.module:function` returns when it is called without arguments."""
    expect_kind("the target", target, str, UsageError)
    module_name, colon, function_name = target.partition(":")
    if not colon or not function_name.isidentifier() or not module_name:
        raise UsageError(
            f"{target!r} does not name a function: expected package.module:function, as in "
            "mypackage.networks:build_model."
        )
    # Whatever the user's own code raises on the way is named in one sentence, and kept as the cause.
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"{module_name!r} of {target!r} could not be imported ({type(error).__name__}: {error}): expected an "
            "importable module. Install its package, or run from the folder that holds it."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        near = get_close_matches(
            function_name, [name for name in vars(module) if callable(vars(module)[name])]
        )
        raise UsageError(
            f"{module_name!r} has no function {function_name!r}: expected one that returns a torch.nn.Module."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
    try:
        model = function()
    except Exception as error:
        raise UsageError(
            f"{target!r} failed ({type(error).__name__}: {error}): expected a function that needs no arguments "
            "and returns a torch.nn.Module. Wrap it in one that does."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target!r} returned {type(model).__name__}: expected a torch.nn.Module.")
    return model
