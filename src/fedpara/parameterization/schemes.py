"""The ways a weight can be written as factors.

    FedPara    W = s(W1) * s(W2)           X1 Y1 [T1], X2 Y2 [T2]     rank(W) <= R^2
    PFedPara   W = s(W1) * (s(W2) + 1)     the same; X2 Y2 [T2] never leave the device
    LowRank    W = X Y^T, or Tucker-2 for kernels                     rank(W) <= R

A scheme is a value that says how; `write(scheme, shape)` is one weight written that way, a `Form`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from numbers import Integral, Real
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization import compose, ranks

Nonlinearity = Literal["tanh"]
ConvStyle = Literal["tensor", "reshape"]


class Scheme(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """One suffix an inner weight: `("1", "2")` gives factors x1 y1 t1 and x2 y2 t2."""

    @property
    def private(self) -> tuple[str, ...]:
        """The suffixes of the inner weights that stay on the device."""

    @property
    def nonlinearity(self) -> Nonlinearity | None: ...

    @property
    def conv(self) -> ConvStyle: ...

    def rank_of(self, m: int, n: int, k: int | None) -> int: ...

    def rank_bound(self, r: int) -> int:
        """The rank the composed weight cannot exceed, by the propositions."""

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        """The inner weights put together."""


@dataclass(frozen=True)
class Form:
    """One weight of a given shape written as factors of a given rank."""

    scheme: Scheme
    shape: tuple[int, ...]
    rank: int
    factors: Mapping[str, tuple[int, ...]] = field(compare=False)
    channels_last: bool = field(default=False, compare=False)  # how a composed kernel lies in memory

    @property
    def is_kernel(self) -> bool:
        return len(self.shape) > 2 and self.scheme.conv == "tensor"

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.factors.values())

    @property
    def dense_parameters(self) -> int:
        return prod(self.shape)

    @property
    def max_rank(self) -> int:
        """Of the weight, or of a kernel's first unfolding. An elementwise nonlinearity lifts the bound."""
        full = min(self.shape[0], prod(self.shape[1:]))
        return full if self.scheme.nonlinearity else min(self.scheme.rank_bound(self.rank), full)

    @property
    def private(self) -> frozenset[str]:
        return frozenset(name for name in self.factors if name[1:] in self.scheme.private)

    def inner(self, factors: Sequence[Tensor]) -> list[Tensor]:
        """W1 and W2: each from its own factors, in the order of `self.factors`."""
        each = 3 if self.is_kernel else 2
        parts = [factors[i : i + each] for i in range(0, len(factors), each)]
        if self.is_kernel:
            return compose.kernels(parts, self.channels_last)
        return [compose.matrix(x, y).reshape(self.shape) for x, y in parts]

    def compose(self, factors: Sequence[Tensor]) -> Tensor:
        return self.scheme.join(self.inner(factors))


def write(scheme: Scheme, shape: Sequence[int]) -> Form:
    """The form a scheme gives a weight of this shape; SchemeError where it cannot."""
    shape = tuple(shape)
    if len(shape) < 2 or 0 in shape:
        raise SchemeError(
            f"{scheme.name} cannot write a weight of shape {shape}: expected two or more dimensions, none of "
            "them 0. Leave this parameter out with `where`."
        )
    m, n, k = _sides(scheme, shape)
    r = scheme.rank_of(m, n, k)
    if not _is_rank(r):
        raise SchemeError(f"{scheme!r} chose the rank {r!r}: expected a whole number of at least 1.")
    r = int(r)
    factors: dict[str, tuple[int, ...]] = {}
    for suffix in scheme.suffixes:
        factors |= {f"x{suffix}": (m, r), f"y{suffix}": (n, r)}
        if k is not None:
            factors[f"t{suffix}"] = (r, r, *shape[2:])
    return Form(scheme, shape, r, factors)


def _sides(scheme: Scheme, shape: tuple[int, ...]) -> tuple[int, int, int | None]:
    if len(shape) > 2 and scheme.conv == "tensor":
        return shape[0], shape[1], prod(shape[2:])
    return shape[0], prod(shape[1:]), None


def _check(scheme: "FedPara | PFedPara | LowRank", sizes: Mapping[str, object]) -> None:
    given = [name for name, value in sizes.items() if value is not None]
    if len(given) != 1:
        raise SchemeError(
            f"{type(scheme).__name__} takes exactly one of {', '.join(sizes)}: got {' and '.join(given) or 'none'}."
        )
    gamma, rank, ratio = sizes.get("gamma"), sizes.get("rank"), sizes.get("ratio")
    if gamma is not None and not (isinstance(gamma, Real) and 0 <= float(gamma) <= 1):
        raise SchemeError(
            f"gamma must lie in [0, 1]: got {gamma!r}. 0 is the least rank that allows full rank, "
            "1 the largest that is no bigger than the dense weight."
        )
    if ratio is not None and not (isinstance(ratio, Real) and 0 < float(ratio) <= 1):
        raise SchemeError(
            f"ratio must lie in (0, 1]: got {ratio!r}. It is the share of the dense parameters to keep."
        )
    if rank is not None and not _is_rank(rank):
        raise SchemeError(
            f"rank must be a whole number of at least 1: got {rank!r}. With gamma instead, each weight's rank is "
            "chosen from its shape."
        )
    if scheme.nonlinearity not in tuple(compose.NONLINEARITIES):
        raise SchemeError(f"nonlinearity must be None or 'tanh': got {scheme.nonlinearity!r}.")
    if scheme.conv not in ("tensor", "reshape"):
        raise SchemeError(f"conv must be 'tensor' (Prop. 3) or 'reshape' (Prop. 1): got {scheme.conv!r}.")


def _is_rank(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _given_rank(rank: int, limit: int, m: int, n: int, k: int | None) -> int:
    if rank > limit:
        sides = f"{m} x {n}" + (f" x {k}" if k else "")
        raise SchemeError(
            f"rank {rank} is above {limit}, the largest that makes a {sides} weight no bigger than it is: lower "
            "the rank, set gamma instead, or give this weight its own scheme (or False) through `where`."
        )
    return rank


def _hadamard_rank(scheme: "FedPara | PFedPara", m: int, n: int, k: int | None) -> int:
    if scheme.rank is not None:
        return _given_rank(scheme.rank, ranks.r_max(m, n, k), m, n, k)
    assert scheme.gamma is not None
    return ranks.rank_for_gamma(m, n, k, scheme.gamma)


@dataclass(frozen=True)
class FedPara:
    """W = s(W1) * s(W2), W_i = X_i Y_i^T (Prop. 1) or T_i x_1 X_i x_2 Y_i (Prop. 3)."""

    gamma: float | None = None
    rank: int | None = None
    nonlinearity: Nonlinearity | None = None
    conv: ConvStyle = "tensor"

    name: ClassVar[str] = "fedpara"
    suffixes: ClassVar[tuple[str, ...]] = ("1", "2")
    private: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check(self, {"gamma": self.gamma, "rank": self.rank})

    def rank_of(self, m: int, n: int, k: int | None) -> int:
        return _hadamard_rank(self, m, n, k)

    def rank_bound(self, r: int) -> int:
        return r * r

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return compose.fedpara(inner[0], inner[1], compose.NONLINEARITIES[self.nonlinearity])


@dataclass(frozen=True)
class PFedPara:
    """W = s(W1) * (s(W2) + 1): W1 is shared, W2 stays on the device and personalises."""

    gamma: float | None = None
    rank: int | None = None
    nonlinearity: Nonlinearity | None = None
    conv: ConvStyle = "tensor"

    name: ClassVar[str] = "pfedpara"
    suffixes: ClassVar[tuple[str, ...]] = ("1", "2")
    private: ClassVar[tuple[str, ...]] = ("2",)

    def __post_init__(self) -> None:
        _check(self, {"gamma": self.gamma, "rank": self.rank})

    def rank_of(self, m: int, n: int, k: int | None) -> int:
        return _hadamard_rank(self, m, n, k)

    def rank_bound(self, r: int) -> int:
        """rank(W2 + 1) <= r + 1"""
        return r * (r + 1)

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return compose.pfedpara(inner[0], inner[1], compose.NONLINEARITIES[self.nonlinearity])


@dataclass(frozen=True)
class LowRank:
    """W = X Y^T, or Tucker-2 T x_1 X x_2 Y for a kernel.

    `gamma` takes the largest rank that needs no more parameters than FedPara at that gamma,
    `ratio` the largest within that share of the dense weight.
    """

    gamma: float | None = None
    rank: int | None = None
    ratio: float | None = None
    conv: ConvStyle = "tensor"

    name: ClassVar[str] = "lowrank"
    suffixes: ClassVar[tuple[str, ...]] = ("",)
    private: ClassVar[tuple[str, ...]] = ()
    nonlinearity: ClassVar[Nonlinearity | None] = None

    def __post_init__(self) -> None:
        _check(self, {"gamma": self.gamma, "rank": self.rank, "ratio": self.ratio})

    def rank_of(self, m: int, n: int, k: int | None) -> int:
        dense = m * n * (k or 1)
        if self.rank is not None:
            return _given_rank(self.rank, ranks.largest(m, n, k, dense, halves=1), m, n, k)
        if self.ratio is not None:
            budget = int(self.ratio * dense)
        else:
            assert self.gamma is not None
            budget = ranks.parameters(m, n, k, ranks.rank_for_gamma(m, n, k, self.gamma))
        return max(1, ranks.largest(m, n, k, budget, halves=1))

    def rank_bound(self, r: int) -> int:
        return r

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return inner[0]


SCHEMES: dict[str, type[FedPara] | type[PFedPara] | type[LowRank]] = {
    scheme.name: scheme for scheme in (FedPara, PFedPara, LowRank)
}
