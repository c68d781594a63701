"""Factors: the parametrization that composes one weight from its factors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fedpara.errors import SchemeError
from fedpara.parameterization import initialise
from fedpara.parameterization.fit import fit
from fedpara.parameterization.naming import BASE
from fedpara.parameterization.schemes import Form
from fedpara.parameterization.selection import Choice

CUSTOM = "custom"
"""`Factors.init` if a function of the user drew the factors."""


class Factors(nn.Module):
    """The parametrization of one weight: `forward` composes it from its factors.

    An adapter's W0 is the buffer `base`, so that `requires_grad_` on a module cannot make it train. `init` names its
    initialiser.
    """

    base: Tensor | None

    def __init__(
        self,
        form: Form,
        start: Sequence[Tensor],
        error: float | None = None,
        base: Tensor | None = None,
        init: str | None = None,
    ) -> None:
        super().__init__()
        self.form = form
        self.error = error
        self.init = init
        self.register_buffer(BASE, base)
        self._start: list[Tensor] | None = list(start)
        self._composed: list[Tensor] | None = None

    def forward(self, *factors: Tensor) -> Tensor:
        if self._composed is None:
            return self._compose(factors)
        if not self._composed:
            self._composed.append(self._compose(factors))
        return self._composed[0]

    def _compose(self, factors: Sequence[Tensor]) -> Tensor:
        if self.base is None:
            return self.form.compose(factors)
        return self.form.compose_onto(self.base, factors)

    def right_inverse(self, weight: Tensor) -> list[Tensor]:
        """The prepared factors at registration. Later, on `module.weight = w`, factors fitted to w."""
        if self._start is not None:
            start, self._start = self._start, None
            return start
        if self.base is not None and self.form.scale is not None:
            weight = (weight - self.base) / self.form.scale
        factors, self.error = fit(self.form.whole, weight)
        return factors

    @property
    def bound(self) -> Form:
        """The form, with W0 if there is one."""
        return self.form if self.base is None else replace(self.form, base=self.base)

    def __getstate__(self) -> dict[str, Any]:
        """Copies do not share the composed weight."""
        return {**vars(self), "_composed": None}

    def extra_repr(self) -> str:
        onto = "" if self.form.scale is None else f", onto=frozen, scale={self.form.scale:g}"
        return f"{self.form.scheme}, shape={self.form.shape}, rank={self.form.rank}{onto}"


def prepare(
    choice: Choice,
    init: initialise.Init | str | None,
    generator: Generator | None,
    onto_frozen: bool,
    alpha: float | None,
) -> Factors:
    """The chosen weight's starting factors."""
    form, weight = choice.form, choice.weight
    assert form is not None
    if init == "fit":
        if onto_frozen:
            raise SchemeError(
                'init="fit" copies the weight, and an adapter starts at no change: leave init out.'
            )
        return Factors(form, *fit(form, weight))
    default = initialise.adapter if onto_frozen else initialise.default
    start = initialise.named(init) if isinstance(init, str) else init or default
    factors = start(form, generator)
    got = [tuple(factor.shape) for factor in factors]
    if got != list(form.factors.values()):
        raise SchemeError(
            f"{choice.name}: the initialiser returned factors of shapes {got}: expected {dict(form.factors)}, in this "
            "order. `form.factors` holds these shapes."
        )
    # Copies: an initialiser may return one tensor twice.
    factors = [factor.detach().to(weight, copy=True) for factor in factors]
    if not onto_frozen:
        return Factors(form, factors)
    factors = initialise.unchanged(form, factors)
    if torch.count_nonzero(form.compose(factors)):
        zero = " and ".join(initialise.zero_factors(form))
        raise SchemeError(
            f"{choice.name}: {form.scheme} does not compose to 0 where {zero} is 0, so an adapter would change the "
            "model at the start: use FedPara, PFedPara or LowRank."
        )
    scale = 1.0 if alpha is None else alpha / form.rank
    named = init if init is None or isinstance(init, str) else CUSTOM
    return Factors(replace(form, scale=scale), factors, base=weight.detach(), init=named)
