"""Adapters: a trained change on top of a frozen weight W0 (`factorize(..., onto="frozen")`).

    LowRank     W = W0 + (alpha / r) X Y^T                               LoRA: X is B and Y^T is A
    FedPara     W = W0 + (alpha / r) s(X1 Y1^T) * s(X2 Y2^T)             LoHa
    PFedPara    W = W0 + (alpha / r) s(X1 Y1^T) * (s(X2 Y2^T) + 1)       X2 and Y2 are private

At the start LowRank's X, FedPara's X2 and PFedPara's X1 are 0 (`initialise.adapter`). So the change is exactly 0, but
the gradient of this factor is not. The other factors get a gradient once it has moved.

This file chooses the weights that get an adapter and the parameters that train beside them.
"""

from collections.abc import Iterable, Sequence

from torch import nn

from fedpara.errors import SchemeError
from fedpara.parameterization.naming import is_named, unknown
from fedpara.parameterization.schemes import Scheme, write
from fedpara.parameterization.selection import Where, everything

REST = "*"
"""In `train`: every parameter that gets no adapter trains as it did."""


def rule(model: nn.Module, scheme: Scheme, where: Where | None, train: str | Sequence[str]) -> Where:
    """`where` without the parameters that `train` names.

    The default leaves out embeddings, because every client would compose the whole table in every step, and
    weights that are too small for the rank.
    """
    named = [name for name in _each(train) if name != REST]
    held = dict(model.named_parameters(remove_duplicate=False))
    if problem := unknown(model, [*held], named):
        raise SchemeError(f"train {problem}")
    taken = {id(p) for name, p in held.items() if is_named(name, named)}
    if where is None:
        tables = (m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        taken |= {id(p) for module in tables for p in module.parameters(recurse=False)}

    def chosen(name: str, module: nn.Module, parameter: str) -> "bool | Scheme":
        if id(getattr(module, parameter)) in taken:
            return False
        if where is not None:
            return where(name, module, parameter)
        return everything(name, module, parameter) and _fits(scheme, getattr(module, parameter))

    return chosen


def freeze(model: nn.Module, train: str | Sequence[str], factors: Iterable[nn.Parameter]) -> None:
    """Let only the factors train, and the parameters that `train` names."""
    if REST not in _each(train):
        model.requires_grad_(False)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if is_named(name, _each(train)):
            parameter.requires_grad_(True)
    for factor in factors:
        factor.requires_grad_(True)


def _each(train: str | Sequence[str]) -> Sequence[str]:
    return [train] if isinstance(train, str) else train


def _fits(scheme: Scheme, weight: nn.Parameter) -> bool:
    try:
        write(scheme, weight.shape)
    except SchemeError:
        return False
    return True
