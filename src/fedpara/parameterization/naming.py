"""Readable factor names in every state dict: `features.0.weight.x1` outside, `original0` inside.

A pair of state-dict hooks on each module that owns factors translates both ways, so plain
`state_dict()` and `load_state_dict()` speak the readable names, on the model and on any part of it.
"""

from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from torch import Size, Tensor, nn
from torch.nn.utils import parametrize

from fedpara.errors import StateError
from fedpara.parameterization.schemes import Form

HOOKS = "_fedpara_hooks"


def attach(module: nn.Module) -> None:
    if HOOKS not in vars(module):
        handles = (
            module.register_state_dict_post_hook(_to_readable),
            module.register_load_state_dict_pre_hook(_to_internal),
        )
        # Not setattr: a wrapper, such as torch.compile's, would set it on what it wraps.
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
    """torch's question, to the module itself: a wrapper may answer for what it wraps."""
    return "parametrizations" in module._modules and parametrize.is_parametrized(module, parameter)


def expect(state: Mapping[str, Tensor], shapes: Mapping[str, Size]) -> None:
    """StateError unless `state` has exactly these names and shapes."""
    missing = [name for name in shapes if name not in state]
    extra = [name for name in state if name not in shapes]
    if missing or extra:
        raise StateError(
            "the state does not fit the model:"
            + (f" missing {_some(missing)}." if missing else "")
            + (f" Unknown {_some(extra)}." if extra else "")
            + " It may belong to another scheme, rank or model, or hold dense weights: these are loaded before "
            'factorize(..., init="fit").'
        )
    for name, shape in shapes.items():
        if not isinstance(state[name], Tensor):
            raise StateError(
                f"{name} is a {type(state[name]).__name__}: expected a tensor of shape {tuple(shape)}."
            )
        if state[name].shape != shape:
            raise StateError(
                f"{name} has shape {tuple(state[name].shape)}: expected {tuple(shape)}. "
                "The state comes from another rank or gamma; factorize the model as it was when the state was saved."
            )


def _to_readable(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for readable, internal, _factor in _names(module):
        if prefix + internal in state:
            state[prefix + readable] = state.pop(prefix + internal)


def _to_internal(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for readable, internal, _factor in _names(module):
        if prefix + readable in state:
            state[prefix + internal] = state.pop(prefix + readable)


def _load_state_dict(self: nn.Module, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
    """The factors of the whole subtree are checked before the first tensor is copied.

    In the method and not in a hook: torch tells its hooks nothing of `strict`.
    """
    strict = options.get("strict", args[0] if args else True)
    if isinstance(state_dict, Mapping):  # else torch says what it expects
        for name, module in self.named_modules():
            _check_factors(module, state_dict, f"{name}." if name else "", strict)
    return type(self).load_state_dict(self, state_dict, *args, **options)


def _check_factors(module: nn.Module, state: Mapping[str, Tensor], prefix: str, strict: bool) -> None:
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
    expect(given, shapes)


def _names(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """(`weight.x1`, `parametrizations.weight.original0`, the factor) of each factor this module owns."""
    if not is_parametrized(module):
        return
    for parameter, chain in module.parametrizations.items():  # type: ignore[union-attr, operator]
        form = getattr(chain[0], "form", None)
        for i, factor in enumerate(form.factors if isinstance(form, Form) else ()):
            name = f"original{i}"
            yield f"{parameter}.{factor}", f"parametrizations.{parameter}.{name}", getattr(chain, name)


def _drop_flat_weights_on_copy(module: nn.RNNBase) -> None:
    """torch's RNNs keep the last composed weights in a list, and a tensor with a history cannot be copied."""
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


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
