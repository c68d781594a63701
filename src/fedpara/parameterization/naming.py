"""Readable factor names in state dicts: `features.0.weight.x1` instead of torch's `original0`.

Each module with factors gets a pair of state-dict hooks that translate both ways. So `state_dict()` and
`load_state_dict()` use the readable names, on the model and on any part of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

from torch import Size, Tensor, nn
from torch.nn.utils import parametrize

from fedpara.errors import StateError
from fedpara.parameterization.schemes import Form

HOOKS = "_fedpara_hooks"
BASE = "base"
"""The name of an adapter's frozen weight W0 in a state: `features.0.weight.base`."""


def is_named(tensor: str, names: Iterable[str]) -> bool:
    """Whether one of the names is a whole part of the dotted name: "head" names `model.head.weight`."""
    return any(f".{name}." in f".{tensor}." for name in names)


def unknown(model: nn.Module, tensors: Sequence[str], names: Iterable[str]) -> str:
    """What is wrong with the first of the names that no tensor has, in words that follow the option; "" if none."""
    wrong = next((name for name in names if not any(is_named(tensor, [name]) for tensor in tensors)), None)
    if wrong is None:
        return ""
    parts = ", ".join(dict.fromkeys(tensor.partition(".")[0] for tensor in tensors))
    return (
        f"names {wrong!r}, and {type(model).__name__} has no such module or parameter: expected names such as those of "
        f"its parts ({parts})."
    )


def attach(module: nn.Module) -> None:
    if HOOKS not in vars(module):
        handles = (
            module.register_state_dict_post_hook(_to_readable),
            module.register_load_state_dict_pre_hook(_to_internal),
        )
        # Not setattr: a wrapper, such as torch.compile's, sets attributes on the module inside it.
        vars(module)[HOOKS] = handles
        vars(module)["load_state_dict"] = MethodType(_load_state_dict, module)
        if isinstance(module, nn.RNNBase) and is_parametrized(module):
            _drop_flat_weights_on_copy(module)


def detach(module: nn.Module) -> None:
    if HOOKS in vars(module):
        for handle in vars(module).pop(HOOKS):
            handle.remove()
        del vars(module)["load_state_dict"]


def is_parametrized(module: nn.Module, parameter: str | None = None) -> bool:
    """torch's function for this module only: a wrapper may forward the question to the module inside it."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module, parameter)


def mismatch(state: Mapping[str, Tensor], shapes: Mapping[str, Size | tuple[int, ...]]) -> str:
    """How a state's names and shapes differ from those expected, or "" if they agree."""
    found = {
        "missing": [name for name in shapes if name not in state],
        "unexpected": [name for name in state if name not in shapes],
        "wrong shape": [
            f"{name} {tuple(state[name].shape)} instead of {tuple(shape)}"
            for name, shape in shapes.items()
            if name in state and state[name].shape != shape
        ],
    }
    return "; ".join(f"{kind}: {_shortened(names)}" for kind, names in found.items() if names)


def _to_readable(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for readable, internal, _factor in _names(module):
        if prefix + internal in state:
            state[prefix + readable] = state.pop(prefix + internal)


def _to_internal(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for readable, internal, _factor in _names(module):
        if prefix + readable in state:
            state[prefix + internal] = state.pop(prefix + readable)


def _load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
    """Compare the factors of all submodules with the state before copying the first tensor.

    This cannot be a hook: torch does not pass `strict` to its hooks.
    """
    strict = options.get("strict", args[0] if args else True)
    if isinstance(state_dict, Mapping):  # otherwise torch raises its own TypeError
        given: dict[str, Tensor] = {}
        shapes: dict[str, Size] = {}
        for name, module in self.named_modules():
            own, needed = _factors(module, state_dict, f"{name}." if name else "", strict)
            given |= own
            shapes |= needed
        refuse_mismatch(given, shapes)
    return type(self).load_state_dict(self, state_dict, *args, **options)


def refuse_mismatch(state: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> None:
    if wrong := mismatch(state, shapes):
        raise StateError(
            f"the state does not fit the model; {wrong}. It may belong to another model, scheme, rank or gamma. "
            'If it holds dense weights, load them before factorize(..., init="fit").'
        )


def _factors(
    module: nn.Module, state: Mapping[str, Tensor], prefix: str, strict: bool
) -> tuple[dict[str, Tensor], dict[str, Size]]:
    """What a state holds for this module's factors, under either name, and the shapes they need."""
    names = list(_names(module))
    weights = {readable.rpartition(".")[0] for readable, _, _ in names}
    inside = tuple(f"{prefix}{weight}." for weight in weights)
    given = {name: tensor for name, tensor in state.items() if name.startswith(inside)} if inside else {}
    given |= {prefix + weight: state[prefix + weight] for weight in weights if prefix + weight in state}
    internal = {prefix + name: prefix + readable for readable, name, _ in names}
    given |= {internal[name]: tensor for name, tensor in state.items() if name in internal}
    shapes = {prefix + readable: factor.shape for readable, _, factor in names}
    if not strict:
        given = {name: tensor for name, tensor in given.items() if name in shapes}
        shapes = {name: shape for name, shape in shapes.items() if name in given}
    return given, shapes


def _names(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(`weight.x1`, `parametrizations.weight.original0`, the tensor) for each factor and W0 of this module."""
    if not is_parametrized(module):
        return
    for parameter, chain in module.parametrizations.items():  # type: ignore[union-attr, operator]
        form = getattr(chain[0], "form", None)
        for i, factor in enumerate(form.factors if isinstance(form, Form) else ()):
            name = f"original{i}"
            yield f"{parameter}.{factor}", f"parametrizations.{parameter}.{name}", getattr(chain, name)
        if isinstance(form, Form) and form.scale is not None:
            yield f"{parameter}.{BASE}", f"parametrizations.{parameter}.0.{BASE}", chain[0].base


def _drop_flat_weights_on_copy(module: nn.RNNBase) -> None:
    """torch's RNNs keep the last composed weights in a list, and deepcopy fails on tensors with a history."""
    cls = type(module)
    copy = cls.__deepcopy__  # type: ignore[attr-defined]

    def deepcopy(self: nn.RNNBase, memo: dict[int, Any]) -> nn.RNNBase:
        flat, self._flat_weights = self._flat_weights, []
        try:
            replica: nn.RNNBase = copy(self, memo)
        finally:
            self._flat_weights = flat
        replica._init_flat_weights()
        return replica

    cls.__deepcopy__ = deepcopy  # type: ignore[attr-defined]


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
