"""`factorize` turns any nn.Module into its factorized form; `merge` turns it back into plain layers.

`torch.nn.utils.parametrize` holds the factors, so the module keeps its class, its forward and its other
parameters. State dicts name a factor after its weight: `features.0.weight.x1`, not
`features.0.parametrizations.weight.original0`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, Literal, TypeVar

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils import parametrize

from fedpara.errors import SchemeError
from fedpara.parameterization import adapters, initialise
from fedpara.parameterization.factors import Factors, prepare
from fedpara.parameterization.naming import BASE, attach, detach, is_parametrized, refuse_mismatch
from fedpara.parameterization.schemes import Form, Scheme
from fedpara.parameterization.selection import Where, plan
from fedpara.state import State

M = TypeVar("M", bound=nn.Module)

AUTOCAST = ("cpu", "cuda", "mps", "xpu")
ORDER = "_fedpara_order"
"""Attribute for a module's original parameter order, which optimizers and state dicts follow."""


@contextmanager
def composed_once(model: nn.Module, given: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Inside this context, each factorized weight of the model is composed once, when it is first read.

    The weights in `given` are not composed: the model reads those tensors.

    torch's `parametrize.cached` is not thread-safe: its cache is global, so another thread would train on weights
    composed here, and its factors would get no gradient.
    """
    weights = dict(_weights(model))
    for factors in weights.values():
        factors._composed = []
    for weight, tensor in (given or {}).items():
        weights[weight]._composed = [tensor]
    try:
        yield
    finally:
        for factors in weights.values():
            factors._composed = None


@contextmanager
def as_they_are() -> Iterator[None]:
    """Inside this context, the caller's autocast and inference mode are off: tensors keep their type and can train."""
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
    onto: Literal["frozen"] | None = None,
    alpha: float | None = None,
    train: str | Sequence[str] = (),
) -> M:
    """Write the chosen weights of `model` as factors, in place, and return the model.

    `where(name, module, parameter_name)` returns True, False, or a scheme for that weight. The default chooses
    every weight of two or more dimensions.

    Some chosen weights stay dense, and `plan` gives the reason: parameters of one dimension, integer weights,
    embeddings with sparse gradients. Unless `force`, so do weights that would not become smaller, or only at the cost
    of full rank; kernels whose filters would all be multiples of one filter; and embeddings with a padding row.
    A `rank` that is too high for a weight is an error.

    `init` is "fan_out", "calibrated", "he", "fit" (fits factors to the current weight), or a function of
    (form, generator) that returns the factors in the order of `form.factors`. The default depends on the scheme.

    `onto="frozen"` makes adapters: every chosen weight becomes W0 + scale * compose(factors), where W0 is the
    current weight and never trains. The change is exactly 0 at the start. `scale` is `alpha` / rank of the weight, and
    1 without `alpha`; LowRank is LoRA's form. All other parameters are frozen, except in the modules and parameters
    that `train` names, such as "classifier" or "bias"; "*" names all that get no adapter. Without `where`, embeddings
    and weights too small for the rank get no adapter.

    If this raises, the model is unchanged.
    """
    if where is not None and not callable(where):
        raise SchemeError(
            f"where is {where!r}: expected a function (name, module, parameter_name) that returns True, False, or a "
            "scheme for that weight."
        )
    if onto is not None:
        where = adapters.rule(model, scheme, where, train)
    elif train or alpha is not None:
        raise SchemeError('`train` and `alpha` belong to adapters: pass onto="frozen" too.')
    planned = plan(model, scheme, where, force=force)
    choices = [c for c in planned if c.form is not None]
    if not choices:
        reasons = "; ".join(f"{c.name}: {c.reason}" for c in planned[:3]) + ("; ..." if planned[3:] else "")
        raise SchemeError(
            f"no weight of {type(model).__name__} was factorized ({reasons or 'it has none'}): `where` must choose "
            "at least one that becomes smaller. `fedpara inspect` lists all weights; `force=True` also factorizes "
            "weights that grow, and a run with the scheme 'original' keeps all of them."
        )
    prepared = [prepare(choice, init, generator, onto is not None, alpha) for choice in choices]
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
    if onto is not None:
        adapters.freeze(model, train, [f for owner, name, _ in done for f in _originals(owner, name)])
    for owner, name, _ in done:
        form = _chain(owner, name)[0].form
        for factor, tensor in zip(form.factors, _originals(owner, name), strict=True):
            if factor in form.scheme.fixed:
                tensor.requires_grad_(False)
    return model


@as_they_are()
def merge(model: M, state: Mapping[str, Tensor] | None = None) -> M:
    """A copy of `model` with plain weights, composed from its factors or from those in `state`.

    A model without factors is only copied.
    """
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
    """Like `model.load_state_dict(state)`, but checks every name and shape before copying anything."""
    own = model.state_dict()
    shapes = {
        name: tensor.shape for name, tensor in own.items() if isinstance(tensor, Tensor)
    }  # no extra state
    refuse_mismatch(
        {name: tensor for name, tensor in state.items() if name in shapes or name not in own}, shapes
    )
    model.load_state_dict(dict(state))


def forms(model: nn.Module) -> dict[str, Form]:
    """The form of every factorized weight by name. A weight with two names in the state dict appears under both."""
    return {weight: factors.bound for weight, factors in _weights(model)}


def inits(model: nn.Module) -> dict[str, str | None]:
    """The name of the initialiser of every factorized weight; None for the scheme's default."""
    return {weight: factors.init for weight, factors in _weights(model)}


def is_adapter(module: nn.Module) -> bool:
    """Whether this is the parametrization of a weight on a frozen W0."""
    return isinstance(module, Factors) and module.form.scale is not None


def covered(model: nn.Module) -> str:
    """The name of a factorized weight with another parametrization on top, or "". Its form alone does not give it."""
    named = {module: name for name, module in model.named_modules()}
    over = (
        f"{named[owner]}.{parameter}".lstrip(".")
        for owner, parameter, _ in _owners(model)
        if len(_chain(owner, parameter)) > 1
    )
    return next(over, "")


def private(model: nn.Module) -> frozenset[str]:
    """The names of the private factors, which never leave the client."""
    return frozenset(f"{weight}.{factor}" for weight, form in forms(model).items() for factor in form.private)


def fit_errors(model: nn.Module) -> dict[str, float]:
    """||W - compose|| / ||W|| of every weight that was fitted (init="fit")."""
    return {weight: factors.error for weight, factors in _weights(model) if factors.error is not None}


def compose_state(state: Mapping[str, Tensor], forms: Mapping[str, Form]) -> State:
    """The state of the plain model: weights composed from their factors, other tensors unchanged.

    An adapter's frozen weight W0 is `weight.base` in the state, or the form's if the state holds only what trains.

    A pure, traceable function: `functional_call(plain, compose_state(state, forms), x)` runs the factorized model
    under vmap, grad and compile.
    """
    taken = {f"{weight}.{part}" for weight, form in forms.items() for part in (*form.factors, BASE)}
    plain = {name: tensor for name, tensor in state.items() if name not in taken}
    for weight, form in forms.items():
        factors = [state[f"{weight}.{factor}"] for factor in form.factors]
        plain[weight] = form.compose_onto(state.get(f"{weight}.{BASE}", form.base), factors)
    return plain


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, str, Factors]]:
    for module in model.modules():
        for parameter, factors in _own_factors(module):
            yield module, parameter, factors


def _weights(model: nn.Module) -> Iterator[tuple[str, Factors]]:
    """The factors by weight name. A module with two names appears under both, as in the state dict."""
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
    """Let two modules that shared a weight share its factors."""
    chain = _chain(owner, parameter)
    parametrize.register_parametrization(
        twin,
        twin_parameter,
        Factors(chain[0].form, list(_originals(owner, parameter)), base=chain[0].base),
    )
    twin.parametrizations[twin_parameter] = chain  # type: ignore[index, operator]


def _own_class(copy: nn.Module) -> None:
    """Give a deep copy its own class: torch removes the weight's property from the class, which copies share."""
    cls = type(copy)
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    copy.__class__ = type(cls.__name__, cls.__bases__, members)


def refuse_old_norms(model: nn.Module) -> None:
    """SchemeError for torch's old weight_norm and spectral_norm, whose computed tensors cannot be copied."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise SchemeError(
                    f"{f'{name}.{attribute}'.lstrip('.')} is computed from other tensors and cannot be copied: use "
                    "torch.nn.utils.parametrizations.weight_norm (or spectral_norm) instead of torch's old functions."
                )


def _restore(owner: nn.Module, parameter: str, dense: nn.Parameter) -> None:
    parameters = owner._parameters
    if is_parametrized(owner, parameter):
        parametrize.remove_parametrizations(owner, parameter, leave_parametrized=True)
        setattr(owner, parameter, dense)
    else:
        if "parametrizations" in owner._modules and not is_parametrized(owner):
            # Registration failed after torch changed the class and before it added the first property.
            del owner.parametrizations
            owner.__class__ = type(owner).__bases__[0]
        parameters[parameter] = dense
    for name in [name for name in vars(owner)[ORDER] if name in parameters]:
        parameters[name] = parameters.pop(name)


def _forget(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(ORDER, None)
