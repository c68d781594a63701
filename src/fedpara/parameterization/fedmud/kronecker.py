"""BKD: a weight as blocks of Kronecker products (FedMUD, ICML 2025).

    W = the first mn entries of vec(A_1 kron B_1), ..., vec(A_k kron B_k), in the shape of W
    A_i, B_i are z x z,   z = ceil((mn / k)^(1/4)),   2 k z^2 parameters
    k = ceil(ratio^2 mn / 4), so that 2 k z^2 is about ratio * mn

z is rounded up, so the last blocks may lie behind the last entry of W. Unlike the paper, we leave those out: k becomes
ceil(mn / z^4), and 2 k z^2 about 2 mn / z^2. With z = 8 the ratio is 1/32 as in the paper, with z = 5 it is 0.08.

A Kronecker product of full-rank blocks has full rank, so W can have it at any ratio. The factors are named like those
of the other schemes: x holds all A_i and y all B_i, each of the shape [k, z, z].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar

import torch
from torch import Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization import ranks
from fedpara.parameterization.schemes import ConvStyle, Scheme, register

NO_BOUND = 1 << 62


@register
@dataclass(frozen=True)
class Kronecker(Scheme):
    """W from k blocks A_i kron B_i. `ratio` is the largest share of the dense parameters, `rank` the largest k.

    `gamma` takes as many parameters as FedPara at that gamma with conv="reshape".
    """

    ratio: float | None = None

    name = "kronecker"
    title = "block-Kronecker"
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    nested = False

    @property
    def conv(self) -> ConvStyle:
        """A kernel is one flat list of numbers, like a matrix."""
        return "reshape"

    def rank_of(self, m: int, n: int, k: int | None) -> int:
        z = side(m * n, self.chosen_rank(m, n, k) if self.rank is None else self.rank)
        blocks = -(-m * n // z**4)
        if self.rank is not None and 2 * blocks * z**2 > m * n:
            raise SchemeError(
                f"rank {self.rank} gives a {m} x {n} weight {blocks} blocks, with which it grows: lower the rank, set "
                "ratio instead, or give this weight its own scheme (or False) through `where`."
            )
        return blocks

    def chosen_rank(self, m: int, n: int, k: int | None) -> int:
        ratio = self.ratio
        if ratio is None:
            ratio = ranks.parameters(m, n, k, super().chosen_rank(m, n, k)) / (m * n)
        return max(1, ceil(ratio**2 * m * n / 4))

    def shapes(self, shape: tuple[int, ...], r: int) -> dict[str, tuple[int, ...]]:
        z = side(prod(shape), r)
        return {"x": (r, z, z), "y": (r, z, z)}

    def product(self, x: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
        blocks = torch.einsum("oim,ojn->oijmn", x, y)
        return blocks.reshape(-1)[: prod(shape)].reshape(shape)

    def nearest(self, w: Tensor, r: int) -> list[Tensor]:
        """The best A_i and B_i: the first singular pair of each rearranged block (Van Loan and Pitsianis)."""
        z = side(w.numel(), r)
        blocks = torch.nn.functional.pad(w.reshape(-1), (0, r * z**4 - w.numel())).reshape(r, z, z, z, z)
        u, s, vh = torch.linalg.svd(blocks.permute(0, 1, 3, 2, 4).reshape(r, z * z, z * z))
        root = s[:, :1].sqrt()
        return [(u[:, :, 0] * root).reshape(r, z, z), (vh[:, 0] * root).reshape(r, z, z)]

    def reach(self, y: tuple[int, ...]) -> int:
        return prod(y[1:])

    def rank_bound(self, r: int) -> int:
        return NO_BOUND

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return inner[0]

    def split(self, w: Tensor) -> list[list[Tensor | float]]:
        return [[w]]


def side(numbers: int, blocks: int) -> int:
    """The smallest z for which `blocks` blocks of z^4 numbers hold so many numbers."""
    z = max(1, int((numbers / blocks) ** 0.25) - 1)
    while blocks * z**4 < numbers:
        z += 1
    return z
