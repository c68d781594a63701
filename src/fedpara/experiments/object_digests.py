"""Python objects as an Experiment: what can be said of them in a config, and digests of the rest.

    model       names and shapes of the model's tensors
    weights     the initial values of these tensors
    task        the loss and the metrics
    algorithm   its functions with their arguments, the optimizer and the schedule
    settings    the sampler and the devices

A function counts by its name, its default arguments and the values that it closes over; its code does not count. An
object counts by its class and its attributes. One without attributes counts by its `repr`, unless that has an address.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedpara.algorithms import Algorithm
from fedpara.data import FederatedData
from fedpara.engines.program import Program
from fedpara.engines.settings import Settings
from fedpara.experiments.config import Experiment
from fedpara.parameterization import SCHEMES, forms
from fedpara.references import OBJECT
from fedpara.tasks import METRICS, Task

WEIGHTS = "weights"
"""The digest that differs between runs of one setting with several seeds."""
_DEEP = 12
"""Nesting below which objects count by their class only."""


def as_experiment(
    task: Task,
    data: FederatedData,
    algorithm: Algorithm,
    settings: Settings,
    personal: bool,
    program: Program,
) -> Experiment:
    """The experiment that describes a run of these objects. It cannot be built, only compared and reported."""
    local, known = algorithm.local, {field.name for field in fields(Experiment)}
    given = {
        field.name: getattr(part, field.name)
        for part in (local, settings)
        for field in fields(part)
        if field.name in known
    }
    named = {
        "dataset": f"{OBJECT}data",
        "split": f"{OBJECT}data",
        "model": _object(type(task.model).__name__),
        "algorithm": _object(algorithm.name),
        "loss": task.loss if isinstance(task.loss, str) else _object(_name(task.loss)),
        "metrics": None if task.metrics is None else _metrics(task),
        "optimizer": local.optimizer if isinstance(local.optimizer, str) else _object(local.optimizer.name),
        "schedule": None if local.schedule is None else _object(_name(local.schedule)),
        "sampler": settings.sampler
        if isinstance(settings.sampler, str)
        else _object(_name(settings.sampler)),
        "robust": None if settings.robust is None else _object(settings.robust.name),  # type: ignore[union-attr]
        "attack": None if settings.attack is None else _object(settings.attack.name),  # type: ignore[union-attr]
        "privacy": None if settings.privacy is None else str(settings.privacy),
        "secure": None if settings.secure is None else str(settings.secure),
    }
    plain = {
        "clients": len(data),
        "augment": task.augment,
        "personal": personal,
        "link_up": settings.link.up,
        "link_down": settings.link.down,
        "objects": ", ".join(
            f"{part} {_digest(value)}" for part, value in _parts(task, algorithm, settings, program).items()
        ),
    }
    return Experiment(**{**given, **named, **_scheme(task.model), **plain})


def digests(objects: str) -> dict[str, str]:
    """The digests in the field `objects`, by part."""
    return dict(part.split(" ", 1) for part in objects.split(", ")) if objects else {}


def without_weights(objects: str | None) -> str | None:
    """The field without the initial weights, which differ between seeds."""
    if objects is None:
        return None
    return ", ".join(f"{part} {digest}" for part, digest in digests(objects).items() if part != WEIGHTS)


def _parts(task: Task, algorithm: Algorithm, settings: Settings, program: Program) -> dict[str, Any]:
    local = algorithm.local
    # A schedule without its own `rounds` follows those of the run.
    follows = local.schedule is not None and getattr(local.schedule, "rounds", None) is None
    own = {name: getattr(local, name) for name in ("optimizer", "betas", "eps", "schedule", "per_client")}
    functions = {f.name: getattr(algorithm, f.name) for f in fields(algorithm) if f.name != "local"}
    shapes = {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in program.initial.items()}
    return {
        "model": [program.scheme, sorted(program.private | program.kept), shapes],
        WEIGHTS: program.initial,
        "task": task.scored,
        "algorithm": [functions, own, settings.rounds if follows else None],
        "settings": [settings.sampler, settings.devices, *filter(None, (settings.robust, settings.attack))],
    }


def _scheme(model: nn.Module) -> dict[str, Any]:
    """The fields of the scheme. Its sizes only if all weights have the same scheme."""
    found = list(forms(model).values())
    if not found:
        return {"scheme": "original"}
    scheme = found[0].scheme
    known = scheme.name if scheme.name in SCHEMES else next(iter(SCHEMES))
    onto = None if found[0].scale is None else "frozen"
    same = all(form.scheme == scheme for form in found)
    sizes = {name: getattr(scheme, name, None) for name in ("gamma", "rank", "ratio")} if same else {}
    return {"scheme": known, "onto": onto, **sizes}


def _metrics(task: Task) -> str | None:
    names = [name for name in task.scored if name != "loss"]
    kept = [name if task.scored[name] is METRICS.get(name) else _object(name) for name in names]
    return ", ".join(kept) or None


def _object(name: str) -> str:
    return OBJECT + re.sub(r"[^\w.-]+", "_", name)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _digest(value: Any) -> str:
    digest = blake2b(digest_size=6)
    for part in _bytes(value, 0, {}):
        digest.update(part)
    return digest.hexdigest()


def _bytes(value: Any, depth: int, met: dict[int, int]) -> Iterable[bytes]:
    """What identifies the value in every process that makes it in the same way.

    `met` numbers the objects met before, by their `id`: they may refer to each other.
    """
    match value:
        case None | str() | int() | float() | bytes():
            yield f"{value!r};".encode()
        case Tensor():
            yield f"{value.dtype}{list(value.shape)}".encode()
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        case np.ndarray():
            yield f"{value.dtype}{value.shape}".encode() + value.tobytes()
        case set() | frozenset():
            yield b"".join(sorted(b"".join(_bytes(inner, depth + 1, met)) for inner in value))
        case _:
            named = isinstance(value, FunctionType | BuiltinFunctionType | type)
            kind = value if named else type(value)
            yield f"{kind.__module__}.{kind.__qualname__}(".encode()
            for inner in _inside(value, met) if depth < _DEEP else ():
                yield from _bytes(inner, depth + 1, met)
            yield b")"


def _inside(value: Any, met: dict[int, int]) -> Iterable[Any]:
    match value:
        case type() | ModuleType():
            return []
        case Mapping():
            return [part for item in value.items() for part in item]
        case list() | tuple():
            return value
        case partial():
            return [value.func, value.args, value.keywords]
        case nn.Module():
            settings = {name: _settings(part) for name, part in value.named_modules()}
            return [dict(value.state_dict()), settings]
        case MethodType():
            return [value.__func__, value.__self__]
        case BuiltinFunctionType():
            return [value.__self__]
        case FunctionType():
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return [value.__defaults__, value.__kwdefaults__, *cells]
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    if id(value) in met:
        return [met[id(value)]]
    met[id(value)] = len(met)
    if attributes := _attributes(value):
        return [attributes]
    text = repr(value)
    return [] if " at 0x" in text else [text]


def _settings(module: nn.Module) -> dict[str, Any]:
    """The module's own attributes, such as a delta, without torch's and without its mode."""
    plain = vars(module).items()
    return {name: value for name, value in plain if not name.startswith("_") and name != "training"}


def _attributes(value: Any) -> dict[str, Any]:
    """Without what `cached_property` has stored."""
    kind, slots = type(value), getattr(type(value), "__slots__", ())
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )
    return {
        name: v for name, v in found.items() if not isinstance(getattr(kind, name, None), cached_property)
    }
