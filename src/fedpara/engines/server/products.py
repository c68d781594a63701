"""The mean of composed weights, beside the mean of factors.

    e = ||mean_i W_i - compose(mean_i factors_i)||,   W_i = compose(factors_i)

A weight is a product of its factors, so e is 0 only if the clients agree in all factors of a weight but one. Both means
have the round's weights. "mean" takes the mean of the factors, as FedPara does. "refit" takes the factors nearest to
the mean of the weights, found by Gauss-Newton steps from the mean of the factors:

    factors = argmin ||mean_i W_i - compose(factors)||

Norms are over all factorized weights. The W of an adapter is its change, without W0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedpara.algorithms import FromMean
from fedpara.algorithms.fedavg import takes_mean
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.errors import ConfigError
from fedpara.parameterization.composed import Block, Blocks, exact_products
from fedpara.state import State, WeightedSum, norm, subtract


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

    blocks: Blocks
    refits: bool

    def composed(self, state: Mapping[str, Tensor]) -> State:
        """The weights of a state of shared parameters, in float32 or wider."""
        state = {name: _wide(tensor) for name, tensor in state.items()}
        with exact_products():
            return {block.name: block.of(state) for block in self._factorized(state)}

    def refitted(self, mean: State, weights: State) -> State:
        """The state with factors that compose to the given weights, as nearly as the steps get."""
        start = {name: _wide(tensor) for name, tensor in mean.items()}
        with exact_products():
            factors = self.blocks.refit(start, weights)
        return {**mean, **{name: factor.to(mean[name]) for name, factor in factors.items()}}

    def _factorized(self, state: State) -> Iterator[Block]:
        return (block for block in self.blocks.over(state) if block.compose is not None)


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
    return Products(Blocks(forms, fixed), products == "refit")


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
