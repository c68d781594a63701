"""The mean of composed weights, beside the mean of factors.

    e = ||mean_i W_i - compose(mean_i factors_i)||,   W_i = compose(factors_i)

A weight is a product of its factors, so e is 0 only if the clients agree in all factors of a weight but one. Both means
have the round's weights. "mean" takes the mean of the factors, as FedPara does. "refit" takes the factors nearest to
the mean of the weights, found by quasi-Newton steps from the mean of the factors:

    factors = argmin ||mean_i W_i - compose(factors)||

Norms are over all factorized weights. The W of an adapter is its change, without W0.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpara.algorithms import FromMean
from fedpara.algorithms.fedavg import takes_mean
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError
from fedpara.parameterization import Form
from fedpara.parameterization.fit import refit
from fedpara.state import State, WeightedSum, norm, subtract

REFIT_STEPS = 20
"""Quasi-Newton steps per weight and round. docs/guides/aggregation.md shows what more steps change."""


@dataclass(frozen=True)
class AggregationError:
    """How far the aggregated factors are from the mean of the clients' weights, in one round."""

    norm: float
    """||mean_i W_i - compose(mean of factors)||"""
    relative: float
    """the norm, divided by ||mean_i W_i||"""
    of_change: float
    """the norm, divided by ||mean_i W_i - W||, where W is the server's before the round"""
    refitted: float | None = None
    """the norm after the refit"""


@dataclass(frozen=True, eq=False)
class Products:
    """What a run does with composed weights."""

    forms: Mapping[str, Form]
    fixed: State
    """The frozen factors of weights that also have trained ones."""
    refits: bool

    def composed(self, state: Mapping[str, Tensor]) -> State:
        """The weights of a state of shared parameters, in float32 or wider."""
        with exact_products():
            return {weight: self._compose(weight, state) for weight in self.forms}

    def refitted(self, mean: State, weights: State) -> State:
        """The state with factors that compose to the given weights, as nearly as the steps get."""
        found = dict(mean)
        for weight, form in self.forms.items():
            names = [name for factor in form.factors if (name := f"{weight}.{factor}") in mean]
            start = [_wide(mean[name]) for name in names]

            def compose(factors: list[Tensor], weight: str = weight, names: list[str] = names) -> Tensor:
                return self._compose(weight, dict(zip(names, factors, strict=True)))

            with exact_products():
                factors = refit(compose, weights[weight], start, REFIT_STEPS)  # type: ignore[arg-type]
                before, after = (float((compose(f) - weights[weight]).norm()) for f in (start, factors))
            if after < before:
                found |= {name: f.to(mean[name]) for name, f in zip(names, factors, strict=True)}
        return found

    def _compose(self, weight: str, state: Mapping[str, Tensor]) -> Tensor:
        form = self.forms[weight]
        known = {**self.fixed, **state}
        like = next(state[name] for factor in form.factors if (name := f"{weight}.{factor}") in state)
        factors = [_wide(known[f"{weight}.{factor}"].to(like.device)) for factor in form.factors]
        return replace(form, base=None).compose(factors)


class ComposedMean:
    """Sums one round's composed weights as the updates arrive. `total` is the sum of the expected weights."""

    def __init__(self, products: Products, total: float) -> None:
        self._products, self._sum = products, WeightedSum(total)

    def add(self, y: State, weight: float) -> None:
        self._sum.add(self._products.composed(y), weight)

    def aggregated(self, x: State, mean: State) -> tuple[State, AggregationError]:
        """(the mean of the factors, refitted if the run asks for it; the error). x is the server's before the round."""
        products, weights = self._products, self._sum.mean()
        error = norm(subtract(weights, products.composed(mean)))
        size, change = norm(weights), norm(subtract(weights, products.composed(x)))
        found = AggregationError(error, _share(error, size), _share(error, change))
        if not products.refits:
            return mean, found
        mean = products.refitted(mean, weights)
        return mean, replace(found, refitted=norm(subtract(weights, products.composed(mean))))


def make_products(session: Session, settings: Settings) -> Products | None:
    """What the run does with composed weights; None for the plain mean of the factors."""
    products = settings.products
    if products == "mean" and not settings.aggregation_error:
        return None
    what = f"products {products!r}" if products != "mean" else "aggregation_error"
    program, aggregate = session.program, session.algorithm.aggregate
    shared = set(program.shared)
    names = {
        weight: {f"{weight}.{factor}" for factor in form.factors} for weight, form in program.forms.items()
    }
    forms = {weight: form for weight, form in program.forms.items() if names[weight] & shared}
    if not forms:
        raise ConfigError(f"{what} needs factorized weights that clients share, and this model has none.")
    if hidden := next((weight for weight in forms if names[weight] & program.private), ""):
        raise ConfigError(
            f"{what} needs every factor on the server, and some of {hidden} are private: use fedpara or lowrank."
        )
    if products != "mean" and not takes_mean(session.algorithm):
        raise ConfigError(
            f"{what} replaces the mean of fedavg and fedprox, and {session.algorithm.name} steps from it: use one of "
            "these two."
        )
    if not isinstance(aggregate, FromMean):
        raise ConfigError(
            f"{what} compares with the mean of the factors, and {session.algorithm.name} has its own aggregate: use "
            "FromMean."
        )
    others = ("robust", "attack", "privacy", "secure", *["rotate"] * (products != "mean"))
    if taken := next((name for name in others if getattr(settings, name)), ""):
        raise ConfigError(f"{what} and {taken} each decide how updates are combined: leave one out.")
    fixed = {name: program.initial[name] for weight in forms for name in names[weight] - shared}
    return Products(forms, fixed, products == "refit")


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products in full float32 on a GPU. Engines may allow tf32, whose rounding is as large as the error."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
