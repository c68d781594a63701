"""Which weights become factors, and why the others stay dense. Nothing here changes the model."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch import nn
from torch.nn.utils import parametrize

from fedpara.errors import SchemeError
from fedpara.parameterization.schemes import Form, Scheme, write

Where = Callable[[str, nn.Module, str], "bool | Scheme"]


@dataclass(frozen=True)
class Choice:
    """One parameter of the model: the form it takes, or the reason it stays dense."""

    name: str
    weight: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    form: Form | None
    reason: str

    @property
    def parameters(self) -> int:
        return self.weight.numel() if self.form is None else self.form.parameters


def plan(
    model: nn.Module, scheme: Scheme, where: Where | None = None, *, force: bool = False
) -> list[Choice]:
    """What `factorize` does with each parameter, in the model's order. A shared weight is one choice."""
    for name, module in model.named_modules():
        is_list = isinstance(module, parametrize.ParametrizationList)
        if is_list and isinstance(getattr(module[0], "form", None), Form):
            raise SchemeError(
                f"{type(model).__name__} is already factorized ({name.replace('.parametrizations', '')} has factors): "
                "merge it first, or factorize a fresh model."
            )
    return [
        _choose(names, owners, weight, scheme, where, force) for names, owners, weight in _parameters(model)
    ]


def everything(name: str, module: nn.Module, parameter: str) -> bool:
    """The default `where`: every parameter of two or more dimensions."""
    weight = getattr(module, parameter)
    return bool(weight.dim() >= 2 and weight.is_floating_point())


def _choose(
    names: list[str],
    owners: list[tuple[nn.Module, str]],
    weight: nn.Parameter,
    scheme: Scheme,
    where: Where | None,
    force: bool,
) -> Choice:
    def choice(form: Form | None, reason: str) -> Choice:
        return Choice(names[0], weight, tuple(owners), form, reason)

    answers = [
        (where or everything)(name.rpartition(".")[0], module, parameter)
        for name, (module, parameter) in zip(names, owners, strict=True)
    ]
    answer = next((a for a in answers if a is not False), False)
    if weight.dim() < 2:
        return choice(None, "one-dimensional")
    if answer is False:
        return choice(None, "not chosen")
    if not weight.is_floating_point():
        return choice(None, "not floating-point")
    if any(getattr(module, "sparse", False) is True for module, _ in owners):
        return choice(None, "its gradient is sparse, and the gradients of factors are dense")
    own = scheme if answer is True else answer
    if not isinstance(own, Scheme):
        raise SchemeError(
            f"the scheme of {names[0]} is {own!r}: expected a scheme, such as FedPara(gamma=0.1). `where` may also "
            "return True or False."
        )
    try:
        form = write(own, weight.shape)
    except SchemeError as error:
        raise SchemeError(f"{names[0]}: {error}") from None
    if form.parameters >= form.dense_parameters and not force:
        return choice(
            None,
            f"its factors ({form.parameters:,}) would be no smaller than the weight ({weight.numel():,})",
        )
    if _too_thin(form) and not force:
        return choice(
            None, f"rank {form.rank} would make it smaller but not of full rank, and no rank does both"
        )
    if _has_one_filter(form) and not force:
        return choice(None, "rank 1 would make all its filters multiples of one filter")
    if any(getattr(module, "padding_idx", None) is not None for module, _ in owners) and not force:
        return choice(None, "its padding row must stay fixed, and training factors would change it")
    return choice(form, "")


def _too_thin(form: Form) -> bool:
    """Where r_max < r_min, gamma chooses a rank between them, which is too low for a product of full rank."""
    if form.scheme.gamma is None or form.scheme.halves < 2:
        return False
    m, n = form.shape[0], form.shape[1] if form.is_kernel else prod(form.shape[1:])
    return form.scheme.rank_bound(form.rank) < min(m, n)


def _has_one_filter(form: Form) -> bool:
    """With one channel on a side (depthwise layers, grey images) r_min is 1, which satisfies only the formula."""
    return form.scheme.gamma is not None and form.is_kernel and form.max_rank == 1


def _parameters(model: nn.Module) -> list[tuple[list[str], list[tuple[nn.Module, str]], nn.Parameter]]:
    found: dict[int, tuple[list[str], list[tuple[nn.Module, str]], nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for parameter, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            names, owners, _ = found.setdefault(id(weight), ([], [], weight))
            names.append(f"{prefix}.{parameter}" if prefix else parameter)
            owners.append((module, parameter))
    return list(found.values())
