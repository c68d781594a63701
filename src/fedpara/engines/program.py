"""Program: a model's tensors, grouped by role.

    parameters   trainable tensors, by their readable names
    buffers      tensors that the forward pass changes (BatchNorm's statistics): averaged, never trained
    private      parameters that never leave the client: pFedPara's second factors, the last layer with share="fedper",
                 the named ones with share="all but head, norm1", everything with share="none"
    kept         buffers that never leave the client: those of the named modules, as in FedBN

    frozen       parameters that do not train, an adapter's W0, and buffers that never change (`local/changing.py`)

Frozen tensors belong to the model's definition: they are neither trained nor sent. Both ends compare their digest.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import torch
from torch import Tensor, nn

from fedpara import models, parameterization
from fedpara.engines.local.changing import changing_buffers
from fedpara.engines.settings import all_but
from fedpara.errors import ConfigError
from fedpara.parameterization import Form
from fedpara.parameterization.naming import is_named, unknown
from fedpara.state import State, in_words


@dataclass(frozen=True, eq=False)
class Program:
    model: nn.Module
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    private: frozenset[str]
    scheme: str
    initial: State
    kept: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        trained = {name: self.initial[name] for name in self.parameters}
        private = {name: self.initial[name] for name in self.private}
        return (
            f"Program({type(self.model).__name__}, {self.scheme}, {len(self.buffers)} buffers\n"
            f"    trains: {in_words(trained)}\n    private: {in_words(private)})"
        )

    @cached_property
    def shared(self) -> tuple[str, ...]:
        return tuple(name for name in self.parameters if name not in self.private)

    @cached_property
    def shared_buffers(self) -> tuple[str, ...]:
        """Buffers are sent with the parameters; if nothing is shared, they stay on the client too."""
        return tuple(name for name in self.buffers if name not in self.kept) if self.shared else ()

    @cached_property
    def retained(self) -> tuple[str, ...]:
        """The names of the tensors that a client keeps between rounds."""
        return (*sorted(self.private), *(name for name in self.buffers if name not in self.shared_buffers))

    @cached_property
    def local(self) -> frozenset[str]:
        """The names of the tensors that are never sent."""
        return frozenset(self.retained)

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        moving = {*self.parameters, *self.buffers}
        return tuple(name for name in self.initial if name not in moving)

    @cached_property
    def base(self) -> str:
        """A digest of the frozen tensors and of the adapters' scales; "" if nothing is frozen."""
        if not self.frozen:
            return ""
        return base_digest(
            {name: self.initial[name] for name in self.frozen}, parameterization.forms(self.model)
        )

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The forms of the weights that train. A tied weight appears once; one with only frozen factors does not."""
        trained = set(self.parameters)
        found = parameterization.forms(self.model).items()
        return {weight: form for weight, form in found if trained & factors_of(weight, form)}

    @cached_property
    def half_frozen(self) -> str:
        """The name of a weight with trained factors and others that were frozen, or ""."""
        known = {*self.parameters, *self.fixed}
        return next((weight for weight, form in self.forms.items() if factors_of(weight, form) - known), "")

    @cached_property
    def fixed(self) -> tuple[str, ...]:
        """The factors that the scheme keeps fixed."""
        found = (f"{w}.{factor}" for w, form in self.forms.items() for factor in form.scheme.fixed)
        return tuple(name for name in found if name not in self.parameters)

    def plain(self) -> nn.Module:
        """A copy with plain weights, whose state is `compose_state(parameters, forms)`."""
        factorized = parameterization.forms(self.model)
        return parameterization.merge(self.model) if factorized else deepcopy(self.model)

    def start(self, names: tuple[str, ...]) -> State:
        """Copies of the initial values of these tensors."""
        return {name: self.initial[name].clone() for name in names}


def make_program(model: nn.Module, share: str = "all") -> Program:
    parameterization.refuse_old_norms(model)  # an engine trains a copy
    named = named_tensors(model)
    parameters = tuple(n for n, t in named.items() if isinstance(t, nn.Parameter) and t.requires_grad)
    changing = changing_buffers(model)
    buffers = tuple(n for n, t in named.items() if not isinstance(t, nn.Parameter) and id(t) in changing)
    if not parameters:
        raise ConfigError(f"{type(model).__name__} has no trainable parameter.")
    kept: frozenset[str] = frozenset()
    if names := all_but(share):
        kept = _under(model, names)
        private = parameterization.private(model) | kept
    elif share == "all":
        private = parameterization.private(model)
    elif share == "fedper":
        twins = shared_names(model)
        last = {twins.get(name, name) for name in models.last_layer(model)}
        private = parameterization.private(model) | last
    else:
        private = frozenset(parameters)
    initial = {name: tensor.detach().clone() for name, tensor in named.items()}
    scheme, local = describe(model), kept & set(buffers)
    return Program(model, parameters, buffers, private & set(parameters), scheme, initial, local)


def _under(model: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """The tensors of these modules and parameters."""
    twins, held = shared_names(model), [*model.state_dict()]
    if problem := unknown(model, held, names):
        raise ConfigError(f"share {problem}")
    return frozenset(twins.get(tensor, tensor) for tensor in held if is_named(tensor, names))


def base_digest(frozen: State, forms: Mapping[str, Form]) -> str:
    """A digest of the frozen tensors and of the adapters' scales."""
    scales = [f"{weight} {form.scale}" for weight, form in sorted(forms.items()) if form.scale is not None]
    digest = blake2b("\n".join(scales).encode(), digest_size=8)
    for name in sorted(frozen):
        tensor = frozen[name].cpu().contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by readable name; a tensor that several modules share appears once."""
    twins = shared_names(model)
    named = {name: t for name, t in model.state_dict(keep_vars=True).items() if name not in twins}
    if extra := next((name for name in named if name.rpartition(".")[2] == "_extra_state"), ""):
        raise ConfigError(
            f"{extra} is extra state (get_extra_state), which cannot be averaged: register what it holds as a buffer."
        )
    return named


def shared_names(model: nn.Module) -> dict[str, str]:
    """Maps each further name of a shared tensor to its first name."""
    first: dict[int, str] = {}
    named = model.state_dict(keep_vars=True).items()
    return {name: found for name, t in named if (found := first.setdefault(id(t), name)) != name}


def factors_of(weight: str, form: Form) -> set[str]:
    return {f"{weight}.{factor}" for factor in form.factors}


def describe(model: nn.Module) -> str:
    """The schemes in use, such as "fedpara+lowrank", for message headers: both ends must agree."""
    forms = parameterization.forms(model).values()
    names = {form.scheme.name + ("" if form.scale is None else "-adapter") for form in forms}
    return "+".join(sorted(names)) or "dense"
