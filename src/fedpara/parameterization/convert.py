"""factorize: any nn.Module to its factorized form; merge: back to plain layers with the same output.

The factors are registered through `torch.nn.utils.parametrize`, so the module keeps its class, its forward
and its other parameters. In every state dict they are called after the weight they make:
`features.0.weight.x1`, not `features.0.parametrizations.weight.original0`.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

from fedpara.errors import SchemeError, StateError, expect_kind
from fedpara.parameterization import initialise
from fedpara.parameterization.fit import fit
from fedpara.parameterization.naming import attach, detach, expect, is_parametrized
from fedpara.parameterization.schemes import Form, Scheme
from fedpara.parameterization.selection import Choice, Where, plan
from fedpara.state import State

M = TypeVar("M", bound=nn.Module)

AUTOCAST = ("cpu", "cuda", "mps", "xpu")
ORDER = "_fedpara_order"
"""The owner's parameters in the order it was built with: optimizers and state dicts go by it."""


class Factors(nn.Module):
    """The parametrization of one weight: forward composes it from its factors."""

    def __init__(self, form: Form, start: list[Tensor], error: float | None = None) -> None:
        super().__init__()
        self.form = form
        self.error = error
        self._start: list[Tensor] | None = start
        self._composed: list[Tensor] | None = None

    def forward(self, *factors: Tensor) -> Tensor:
        if self._composed is None:
            return self.form.compose(factors)
        if not self._composed:
            self._composed.append(self.form.compose(factors))
        return self._composed[0]

    def right_inverse(self, weight: Tensor) -> list[Tensor]:
        """The prepared factors at registration; afterwards, on `module.weight = w`, a fit to w."""
        if self._start is not None:
            start, self._start = self._start, None
            return start
        factors, self.error = fit(self.form, weight)
        return factors

    def __getstate__(self) -> dict[str, Any]:
        """A copy composes for itself."""
        return {**vars(self), "_composed": None}

    def extra_repr(self) -> str:
        return f"{self.form.scheme}, shape={self.form.shape}, rank={self.form.rank}"


@contextmanager
def composed_once(model: nn.Module) -> Iterator[None]:
    """Within, every factorized weight of this model is composed when first read, and not again.

    Not torch's `parametrize.cached`, which is one cache for the whole process: another thread would train on what is
    kept here, and its factors would get no gradient.
    """
    weights = [factors for _, _, factors in _owners(model)]
    for factors in weights:
        factors._composed = []
    try:
        yield
    finally:
        for factors in weights:
            factors._composed = None


@contextmanager
def as_they_are() -> Iterator[None]:
    """Within, no autocast and no inference mode of a caller: tensors keep their types, and can be trained."""
    with ExitStack() as outside:
        outside.enter_context(torch.inference_mode(False))
        for kind in AUTOCAST:
            if torch.is_autocast_enabled(kind):
                outside.enter_context(torch.autocast(kind, enabled=False))
        yield


@as_they_are()
def factorize(
    model: M,
    scheme: Scheme,
    where: Where | None = None,
    *,
    init: initialise.Init | str | None = None,
    force: bool = False,
    generator: Generator | None = None,
) -> M:
    """Write the chosen weights of `model` as factors, in place, and return it.

    `where(name, module, parameter_name)` answers True, False, or a scheme of that weight's own; by default
    every parameter of two or more dimensions is taken. Where one has fewer, True leaves it as it is. A weight that the
    rank gamma chooses would not make smaller, or only without full rank, stays dense unless `force`. So does a kernel
    with one channel on a side where that rank is 1, which makes its filters multiples of one another, and an
    embedding with a padding row. A `rank` of one's own is an error where it is too high for a weight. `init` is
    "fan_out", "calibrated", "he", "fit" (factors of the weight that is there) or a function of (form, generator) that
    gives the factors in the order of `form.factors`; left out, it is the scheme's own.
    After an error nothing has changed.
    """
    if generator is not None:
        expect_kind("generator", generator, Generator, SchemeError)
    planned = plan(model, scheme, where, force=force)
    choices = [c for c in planned if c.form is not None]
    if not choices:
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in planned[:3]) + ("; ..." if planned[3:] else "")
        raise SchemeError(
            f"no weight of {type(model).__name__} was factorized ({reasons or 'it has none'}): expected `where` "
            "to choose at least one that becomes smaller. `fedpara inspect` shows them all; `force=True` takes "
            "what is chosen even where it grows."
        )
    prepared = [_prepare(choice, init, generator) for choice in choices]
    done: list[tuple[nn.Module, str, nn.Parameter]] = []
    for owner in {owner for choice in choices for owner, _ in choice.owners}:
        setattr(owner, ORDER, tuple(owner._parameters))
    try:
        for choice, factors in zip(choices, prepared, strict=True):
            owner, parameter = choice.owners[0]
            done.append((owner, parameter, getattr(owner, parameter)))
            parametrize.register_parametrization(owner, parameter, factors)
            for twin, twin_parameter in choice.owners[1:]:
                done.append((twin, twin_parameter, getattr(twin, twin_parameter)))
                _tie(owner, parameter, twin, twin_parameter)
    except BaseException:
        for owner, parameter, dense in reversed(done):
            _restore(owner, parameter, dense)
        _forget(model)
        raise
    for owner, _, _ in done:
        attach(owner)
    attach(model)
    return model


@as_they_are()
def merge(model: M, state: Mapping[str, Tensor] | None = None) -> M:
    """A copy of `model` with plain weights, equal to what it composes now (or from `state`)."""
    expect_kind("model", model, nn.Module, SchemeError)
    if not forms(model):
        raise SchemeError(
            f"{type(model).__name__} holds no factorized weight: there is nothing to merge. "
            "Factorize it first, or use the model as it is."
        )
    refuse_old_norms(model)
    plain = deepcopy(model)
    for owner in {owner for owner, _, _ in _owners(plain)}:
        _own_class(owner)
    if state is not None:
        load(plain, state)
    merged: dict[int, nn.Parameter] = {}
    for owner, parameter, _ in list(_owners(plain)):
        key = id(_chain(owner, parameter))
        if key not in merged:
            with torch.no_grad():
                composed = _chain(owner, parameter)().contiguous()
            requires_grad = any(p.requires_grad for p in _originals(owner, parameter))
            merged[key] = nn.Parameter(composed, requires_grad=requires_grad)
        _restore(owner, parameter, merged[key])
    for module in plain.modules():
        detach(module)
    _forget(plain)
    return plain


def load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """`model.load_state_dict(state)` that checks every name and shape before it copies anything."""
    expect_kind("state", state, Mapping, StateError)
    own = model.state_dict()
    tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}  # not extra state
    expect(
        {name: tensor for name, tensor in state.items() if name in tensors or name not in own},
        {name: tensor.shape for name, tensor in tensors.items()},
    )
    if meta := [name for name, tensor in tensors.items() if tensor.is_meta and not state[name].is_meta]:
        raise StateError(
            f"{meta[0]} is on the meta device, where nothing can be loaded: expected a model with memory. Use "
            "model.to_empty(device=...) first."
        )
    model.load_state_dict(dict(state))


def forms(model: nn.Module) -> dict[str, Form]:
    """The form of every factorized weight, by each name that a state dict has for it."""
    return {weight: factors.form for weight, factors in _weights(model)}


def covered(model: nn.Module) -> str:
    """A factorized weight with another parametrization on top of it, or "": its form is then not all it is made by."""
    named = {module: name for name, module in model.named_modules()}
    over = (
        f"{named[owner]}.{parameter}".lstrip(".")
        for owner, parameter, _ in _owners(model)
        if len(_chain(owner, parameter)) > 1
    )
    return next(over, "")


def private(model: nn.Module) -> frozenset[str]:
    """The names of the factors that never leave the device."""
    return frozenset(f"{weight}.{factor}" for weight, form in forms(model).items() for factor in form.private)


def fit_errors(model: nn.Module) -> dict[str, float]:
    """||W - compose|| / ||W|| of every weight that was factorized with init="fit"."""
    return {weight: factors.error for weight, factors in _weights(model) if factors.error is not None}


def compose_state(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> State:
    """The state of the plain model: factors replaced by the weights they make, the rest as it is.

    Pure and traceable, so `functional_call(plain, compose_state(state, forms), x)` is the factorized model
    under vmap, grad and compile.
    """
    taken = {f"{weight}.{factor}" for weight, form in forms.items() for factor in form.factors}
    plain = {name: tensor for name, tensor in state.items() if name not in taken}
    for weight, form in forms.items():
        try:
            plain[weight] = form.compose([state[f"{weight}.{factor}"] for factor in form.factors])
        except KeyError as missing:
            raise StateError(
                f"the state has no factor {missing}: {weight} is written as {', '.join(form.factors)}."
            ) from None
    return plain


def _prepare(choice: Choice, init: initialise.Init | str | None, generator: Generator | None) -> Factors:
    form, weight = choice.form, choice.weight
    assert form is not None
    if isinstance(init, str) and init == "fit":
        try:
            return Factors(form, *fit(form, weight))
        except SchemeError as error:
            raise SchemeError(f"{choice.name}: {error}") from None
    if isinstance(init, str):
        init = initialise.named(init)
    if init is not None and not callable(init):
        raise SchemeError(f"init must be a name or a function of (form, generator): got {init!r}.")
    factors = initialise.checked(init or initialise.default, form, generator)
    return Factors(
        form, [factor.detach().to(weight, copy=True) for factor in factors]
    )  # two may be one tensor


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, Factors]]:
    for module in model.modules():
        for parameter, factors in _own_factors(module):
            yield module, parameter, factors


def _weights(model: nn.Module) -> Iterator[tuple[str, Factors]]:
    """By name. A module that the model holds under two is here under both, as in its state dict."""
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter, factors in _own_factors(module):
            yield f"{name}.{parameter}".lstrip("."), factors


def _own_factors(module: nn.Module) -> Iterator[tuple[str, Factors]]:
    if is_parametrized(module):
        for parameter, chain in module.parametrizations.items():  # type: ignore[union-attr, operator]
            if isinstance(chain[0], Factors):
                yield parameter, chain[0]


def _chain(owner: nn.Module, parameter: str) -> Any:
    return owner.parametrizations[parameter]  # type: ignore[index]


def _originals(owner: nn.Module, parameter: str) -> list[nn.Parameter]:
    chain = _chain(owner, parameter)
    return [getattr(chain, f"original{i}") for i in range(chain.ntensors)]


def _tie(owner: nn.Module, parameter: str, twin: nn.Module, twin_parameter: str) -> None:
    """Two modules that shared a weight share its factors."""
    chain = _chain(owner, parameter)
    parametrize.register_parametrization(
        twin, twin_parameter, Factors(chain[0].form, list(_originals(owner, parameter)))
    )
    twin.parametrizations[twin_parameter] = chain  # type: ignore[index, operator]


def _own_class(copy: nn.Module) -> None:
    """A deep copy shares the class that carries its weight's property, and torch removes the property there."""
    cls = type(copy)
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    copy.__class__ = type(cls.__name__, cls.__bases__, members)


def refuse_old_norms(model: nn.Module) -> None:
    """torch's old weight_norm and spectral_norm leave a computed tensor on the module, which cannot be copied."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise SchemeError(
                    f"{f'{name}.{attribute}'.lstrip('.')} is computed from other tensors, as torch's old weight_norm "
                    "and spectral_norm do, and cannot be copied: expected parameters. Use "
                    "torch.nn.utils.parametrizations.weight_norm (or spectral_norm) instead."
                )


def _restore(owner: nn.Module, parameter: str, dense: nn.Parameter) -> None:
    parameters = owner._parameters
    if is_parametrized(owner, parameter):
        parametrize.remove_parametrizations(owner, parameter, leave_parametrized=True)
        setattr(owner, parameter, dense)
    else:
        if "parametrizations" in owner._modules and not is_parametrized(owner):
            # Registration stopped between the change of class and the first property.
            del owner.parametrizations
            owner.__class__ = type(owner).__bases__[0]
        parameters[parameter] = dense
    for name in [name for name in vars(owner)[ORDER] if name in parameters]:
        parameters[name] = parameters.pop(name)


def _forget(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(ORDER, None)
