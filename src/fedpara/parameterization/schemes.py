"""The schemes: ways to write a weight as factors.

    FedPara    W = s(W1) * s(W2)           X1 Y1 [T1], X2 Y2 [T2]     rank(W) <= R^2
    PFedPara   W = s(W1) * (s(W2) + 1)     the same; X2 Y2 [T2] are private
    LowRank    W = X Y^T, or Tucker-2 for kernels                     rank(W) <= R

`write(scheme, shape)` applies a scheme to the shape of one weight and returns a `Form`.

To add a scheme, write a subclass of `Scheme` with `@register` above it. Configs, saved states, starting factors,
fitting and reports need nothing else. Add its name to `choices.SCHEMES` for the command line's help.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from operator import index
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization import compose, ranks

Nonlinearity = Literal["tanh"]
ConvStyle = Literal["tensor", "reshape"]

SIZES = ("gamma", "rank", "ratio")
"""The options that choose a weight's rank. A scheme takes exactly one."""

ACCEPTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "gamma": (
        lambda gamma: gamma is None or 0 <= gamma <= 1,
        "0 (the lowest rank that allows full rank) to 1 (the highest that is no bigger than the dense weight)",
    ),
    "rank": (
        lambda rank: rank is None or rank >= 1,
        "a whole number of at least 1. Set gamma instead to choose each weight's rank from its shape",
    ),
    "ratio": (lambda r: r is None or 0 < r <= 1, "the share of the dense parameters, above 0 and at most 1"),
    "nonlinearity": (lambda s: s in compose.NONLINEARITIES, "None or 'tanh'"),
    "conv": (lambda conv: conv in ("tensor", "reshape"), "'tensor' (Prop. 3) or 'reshape' (Prop. 1)"),
}
"""For each option, a test of its value and the words for what passes."""


@dataclass(frozen=True)
class Scheme(ABC):
    """W = join(W1, ...), where each inner weight is W_i = X_i Y_i^T (Prop. 1) or T_i x_1 X_i x_2 Y_i (Prop. 3)."""

    gamma: float | None = None
    rank: int | None = None

    name: ClassVar[str]
    """In configs and files."""
    title: ClassVar[str]
    """In reports."""
    suffixes: ClassVar[tuple[str, ...]] = ("1", "2")
    """One per inner weight: `("1", "2")` names the factors x1 y1 t1 and x2 y2 t2."""
    private: ClassVar[tuple[str, ...]] = ()
    """Suffixes of the private inner weights. Their scale is fixed; the shared ones carry the scale of W."""
    kernel_init: ClassVar[str] = "calibrated"
    """The default initialiser of kernels (Prop. 3). Matrices start with "calibrated"."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Names of factors that never train and never travel: both ends draw them from the same seed."""
    nested: ClassVar[bool] = True
    """Whether the first columns of the factors are the factors of a weight of lower rank."""

    @property
    def nonlinearity(self) -> Nonlinearity | None:
        return None

    @property
    @abstractmethod
    def conv(self) -> ConvStyle: ...

    @property
    def degree(self) -> int:
        """W grows by c^degree when every shared inner weight grows by c."""
        return len(self.suffixes) - len(self.private)

    @property
    def halves(self) -> int:
        """The number of inner weights whose parameters count."""
        return len(self.suffixes)

    def __post_init__(self) -> None:
        options = {option.name: getattr(self, option.name) for option in fields(self)}
        sizes = {name: value for name, value in options.items() if name in SIZES}
        given = [name for name, value in sizes.items() if value is not None]
        if len(given) != 1:
            raise SchemeError(
                f"{type(self).__name__} takes exactly one of {', '.join(sizes)}: got {' and '.join(given) or 'none'}."
            )
        for name, (accepts, expected) in ACCEPTED.items():
            if name in options and not accepts(options[name]):
                raise SchemeError(f"{name} is {options[name]!r}: expected {expected}.")

    def rank_of(self, m: int, n: int, k: int | None) -> int:
        """The rank R of the factors of an m x n matrix, or of an m x n x k kernel."""
        if self.rank is None:
            return self.chosen_rank(m, n, k)
        limit = ranks.largest(m, n, k, m * n * (k or 1), halves=self.halves)
        if self.rank > limit:
            sides = f"{m} x {n}" + (f" x {k}" if k else "")
            raise SchemeError(
                f"rank {self.rank} is above {limit}, the largest rank at which a {sides} weight does not grow: "
                "lower the rank, set gamma instead, or give this weight its own scheme (or False) through `where`."
            )
        return self.rank

    def chosen_rank(self, m: int, n: int, k: int | None) -> int:
        """The rank if no `rank` was given."""
        assert self.gamma is not None
        return ranks.rank_for_gamma(m, n, k, self.gamma)

    def shapes(self, shape: tuple[int, ...], r: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the factors of one inner weight, by the first letters of their names."""
        if len(shape) > 2 and self.conv == "tensor":
            return {"x": (shape[0], r), "y": (shape[1], r), "t": (r, r, *shape[2:])}
        return {"x": (shape[0], r), "y": (prod(shape[1:]), r)}

    def product(self, x: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
        """An inner weight from two factors."""
        return compose.matrix(x, y).reshape(shape)

    def nearest(self, w: Tensor, r: int) -> list[Tensor]:
        """The two factors whose product is nearest to w: the truncated SVD, padded with zeros."""
        return compose.truncated(w.flatten(1), r)

    def reach(self, y: tuple[int, ...]) -> int:
        """How many entries of the factor of shape `y` one entry of the other factor is multiplied with."""
        return y[0]

    @abstractmethod
    def rank_bound(self, r: int) -> int:
        """An upper bound on rank(W), by the propositions."""

    @abstractmethod
    def join(self, inner: Sequence[Tensor]) -> Tensor:
        """W from its inner weights."""

    @abstractmethod
    def split(self, w: Tensor) -> list[list[Tensor | float]]:
        """Inner weights whose join is near `w`: one list per start of `fit`. A number is a constant inner weight."""

    def s(self, w: Tensor) -> Tensor:
        return compose.NONLINEARITIES[self.nonlinearity](w)

    def s_inverse(self, w: Tensor) -> Tensor:
        return compose.INVERSES[self.nonlinearity](w)


S = TypeVar("S", bound=Scheme)
SCHEMES: dict[str, type[Scheme]] = {}
"""The registered schemes by name."""


def register(scheme: type[S]) -> type[S]:
    SCHEMES[scheme.name] = scheme
    return scheme


def make_scheme(name: str, **options: Any) -> Scheme:
    """The registered scheme `name` with these options. An option that is None counts as not given."""
    scheme = SCHEMES[name]
    given = {option: value for option, value in options.items() if value is not None}
    known = [option.name for option in fields(scheme)]
    for option in given:
        if option not in known:
            raise SchemeError(f"scheme {name!r} has no {option}: leave it out. It takes {', '.join(known)}.")
    return scheme(**given)


@dataclass(frozen=True)
class Form:
    """A scheme applied to one weight: its shape, its rank, and the shapes of its factors.

    An adapter's form has a `scale`: the weight is W0 + scale * join(W1, ...), and `base` is the frozen W0.
    """

    scheme: Scheme
    shape: tuple[int, ...]
    rank: int
    factors: Mapping[str, tuple[int, ...]] = field(compare=False)
    channels_last: bool = field(default=False, compare=False)  # memory layout of a composed kernel
    scale: float | None = None  # None: the factors give the whole weight
    base: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def is_kernel(self) -> bool:
        return len(self.shape) > 2 and self.scheme.conv == "tensor"

    @property
    def parameters(self) -> int:
        """Of the factors that train."""
        return sum(prod(shape) for name, shape in self.factors.items() if name not in self.scheme.fixed)

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
        """The inner weights (W1 and W2) from factors in the order of `self.factors`."""
        each = 3 if self.is_kernel else 2
        parts = [factors[i : i + each] for i in range(0, len(factors), each)]
        if self.is_kernel:
            return compose.kernels(parts, self.channels_last)
        return [self.scheme.product(x, y, self.shape) for x, y in parts]

    def compose(self, factors: Sequence[Tensor]) -> Tensor:
        """The weight; the change scale * join(W1, ...) for an adapter without its base."""
        return self.compose_onto(self.base, factors)

    def compose_onto(self, base: Tensor | None, factors: Sequence[Tensor]) -> Tensor:
        """The weight from its factors; `base` is an adapter's W0."""
        return self.joined(self.inner(factors), base)

    def joined(self, inner: Sequence[Tensor], base: Tensor | None = None) -> Tensor:
        """The weight from its inner weights."""
        return self.placed(self.scheme.join(inner), base)

    def placed(self, w: Tensor, base: Tensor | None) -> Tensor:
        """The weight from w = join(W1, ...): base + scale w for an adapter (scale w without a base), w otherwise."""
        if self.scale is None:
            return w
        return self.scale * w if base is None else torch.add(base, w, alpha=self.scale)

    @property
    def whole(self) -> "Form":
        """The form whose factors give the whole weight: join(W1, ...), without scale and W0."""
        return replace(self, scale=None, base=None)

    def on(self, device: torch.device, channels_last: bool = False) -> "Form":
        """The same form with W0 on the device, in the memory layout of the composed kernel."""
        base = self.base.to(device) if self.base is not None else None
        if base is not None and channels_last and base.dim() == 4:
            base = base.contiguous(memory_format=torch.channels_last)
        return replace(self, base=base, channels_last=channels_last)


def write(scheme: Scheme, shape: Sequence[int], rank: int | None = None) -> Form:
    """The form of a weight of this shape, at the scheme's rank for it.

    An explicit `rank` may be above r_max, as in a file that another tool wrote.
    """
    shape = tuple(shape)
    kernel = len(shape) > 2 and scheme.conv == "tensor"
    m, n, k = (shape[0], shape[1], prod(shape[2:])) if kernel else (shape[0], prod(shape[1:]), None)
    r = index(scheme.rank_of(m, n, k) if rank is None else rank)
    inner = scheme.shapes(shape, r).items()
    factors = {f"{letter}{suffix}": sides for suffix in scheme.suffixes for letter, sides in inner}
    return Form(scheme, shape, r, factors)


@register
@dataclass(frozen=True)
class LowRank(Scheme):
    """W = X Y^T, or Tucker-2 T x_1 X x_2 Y for a kernel.

    `gamma` takes the largest rank that needs no more parameters than FedPara at that gamma,
    `ratio` the largest within that share of the dense weight.
    """

    ratio: float | None = None
    conv: ConvStyle = "tensor"

    name = "lowrank"
    title = "low-rank"
    suffixes: ClassVar[tuple[str, ...]] = ("",)

    def chosen_rank(self, m: int, n: int, k: int | None) -> int:
        if self.ratio is not None:
            dense = m * n * (k or 1)
            budget = int(self.ratio * dense)
        else:
            budget = ranks.parameters(m, n, k, super().chosen_rank(m, n, k))
        return max(1, ranks.largest(m, n, k, budget, halves=1))

    def rank_bound(self, r: int) -> int:
        return r

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return inner[0]

    def split(self, w: Tensor) -> list[list[Tensor | float]]:
        return [[w]]


@register
@dataclass(frozen=True)
class FedPara(Scheme):
    """W = s(W1) * s(W2), W_i = X_i Y_i^T (Prop. 1) or T_i x_1 X_i x_2 Y_i (Prop. 3)."""

    nonlinearity: Nonlinearity | None = None
    conv: ConvStyle = "tensor"

    name = "fedpara"
    title = "FedPara"
    kernel_init = "fan_out"

    def rank_bound(self, r: int) -> int:
        return r * r

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return self.s(inner[0]) * self.s(inner[1])

    def split(self, w: Tensor) -> list[list[Tensor | float]]:
        """W and all ones; sign(W) sqrt|W| and sqrt|W|."""
        one, root = self.s_inverse(w.new_ones(())), w.abs().sqrt()
        return [
            [self.s_inverse(w / self.s(one)), float(one)],
            [self.s_inverse(w.sign() * root), self.s_inverse(root)],
        ]


@register
@dataclass(frozen=True)
class PFedPara(Scheme):
    """W = s(W1) * (s(W2) + 1): W1 is shared, W2 is private and personalises the model."""

    nonlinearity: Nonlinearity | None = None
    conv: ConvStyle = "tensor"

    name = "pfedpara"
    title = "pFedPara"
    private = ("2",)

    def rank_bound(self, r: int) -> int:
        """rank(W2 + 1) <= r + 1"""
        return r * (r + 1)

    def join(self, inner: Sequence[Tensor]) -> Tensor:
        return self.s(inner[0]) * (self.s(inner[1]) + 1)

    def split(self, w: Tensor) -> list[list[Tensor | float]]:
        """W and all zeros."""
        return [[self.s_inverse(w), 0.0]]
