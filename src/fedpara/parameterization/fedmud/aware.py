"""AAD, aggregation-aware decomposition (FedMUD, ICML 2025): a weight that is linear in all that trains.

    W = X1 Y1^T + X2 Y2^T,   X1 and Y2 train;   Y1 and X2 are drawn from the seed that both ends share and stay fixed

Averaging is exact: the mean of the clients' weights is the weight of their mean factors. A product of two trained
factors does not have this property. The fixed factors never travel, so a message is as long as that of one product
X Y^T.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization.fedmud.kronecker import Kronecker
from fedpara.parameterization.schemes import ConvStyle, LowRank, Scheme, register


class Aware(Scheme):
    """The sum of two inner weights, each with one fixed factor."""

    suffixes: ClassVar[tuple[str, ...]] = ("1", "2")
    fixed = ("y1", "x2")

    @property
    def degree(self) -> int:
        return 1

    @property
    def halves(self) -> int:
        """Half of the factors train."""
        return 1

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return inner[0] + inner[1]

    def split(self, w: Tensor) -> list[list[Tensor | float]]:
        return [[w, 0.0]]


@register
@dataclass(frozen=True)
class AwareLowRank(Aware, LowRank):
    """W = X1 Y1^T + X2 Y2^T with fixed Y1 and X2. A kernel is reshaped: with a trained core W would not be linear."""

    conv: ConvStyle = "reshape"

    name = "lowrank-aad"
    title = "low-rank, aggregation-aware"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv != "reshape":
            raise SchemeError(f"conv is {self.conv!r}: {self.name} takes 'reshape' only.")

    def rank_bound(self, r: int) -> int:
        return 2 * r


@register
@dataclass(frozen=True)
class AwareKronecker(Aware, Kronecker):
    """W = blocks of A1_i kron B1_i + A2_i kron B2_i with fixed B1 and A2."""

    name = "kronecker-aad"
    title = "block-Kronecker, aggregation-aware"
