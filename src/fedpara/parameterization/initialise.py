"""Random starting factors.

    fan_out      X, Y ~ N(0, 2/r), T ~ N(0, 2/(k r)): trains well for FedPara's kernels under GroupNorm
    calibrated   scaled so that the composed weight has He's deviation sqrt(2 / fan_in)
    private:0.5  calibrated, with pFedPara's private W2 at this deviation in place of 1
    he           X ~ N(0, 2/O), Y ~ N(0, 2/I), T ~ N(0, 2/(k r)): He's rule per factor, with torch's fan-out
    adapter      X = 0, Y ~ U(-1/sqrt(n), 1/sqrt(n)) in one inner weight, the others of rms 1: adapters only

"fan_out:0.5" is fan_out with every deviation halved, "fan_out:0.5,1.4" with X and Y halved and T 1.4 times larger.

An initialiser is a function of a `Form` and a generator that returns the factors in the form's order.
`factorize` also accepts custom functions with this signature.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, prod, sqrt

import torch
from torch import Generator, Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization.schemes import Form

Init = Callable[[Form, Generator | None], Sequence[Tensor]]

PRIVATE_SCALE = 1.0
"""Deviation of pFedPara's private W2. Near 0 clients hardly personalise; from 3 on training diverges."""
REACH = 0.95
"""Largest deviation as a share of tanh's bound. He's deviation exceeds the bound where fan_in is 1 or 2."""


def fan_out(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """std sqrt(2/r) for X and Y, sqrt(2/(k r)) for T: He's rule with the fan-out of each factor."""
    return _drawn(form, generator, lambda shape: form.rank * prod(shape[2:]))


def calibrated(
    form: Form, generator: Generator | None = None, private: float = PRIVATE_SCALE
) -> list[Tensor]:
    """rms(W) = sqrt(2 / fan_in) in every draw, for any scheme, rank and nonlinearity.

    FedPara's inner weights get the same deviation. pFedPara's W2 starts at `private` and W1
    carries the rest. The factors of an inner weight share its scale equally.
    """
    factors = [_normal(shape, generator) for shape in form.factors.values()]
    inner = form.inner(factors)
    norms = [_rms(w) for w in inner]
    units = [w / norm for w, norm in zip(inner, norms, strict=True)]
    free = [suffix not in form.scheme.private for suffix in form.scheme.suffixes]

    def scales(a: float) -> list[float]:
        return [a if is_free else private for is_free in free]

    def rms(a: float) -> float:
        return _rms(form.scheme.join([scale * w for scale, w in zip(scales(a), units, strict=True)]))

    he = sqrt(2 / prod(form.shape[1:]))
    a = _solve(rms, min(he, REACH * rms(1e6) or he), form.scheme.degree)
    each = len(factors) // len(inner)
    shares = [(scale / norm) ** (1 / each) for scale, norm in zip(scales(a), norms, strict=True)]
    return [factor * shares[i // each] for i, factor in enumerate(factors)]


def he(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """kaiming_normal_(mode="fan_out") of each factor. W starts near 1% of He's scale, so a norm layer must follow."""
    return _drawn(form, generator, lambda shape: shape[0] * prod(shape[2:]))


def adapter(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """LoRA's start in the last shared inner weight, and rms 1 in the others, so that W = 0.

    X = 0, Y ~ U(-1/sqrt(n), 1/sqrt(n)) and, for a kernel, T ~ N(0, 1/(k r)). For LowRank this is LoRA's B = 0 and
    A. The others only scale the gradient of X, so FedPara's first step changes W about as much as LoRA's. Where X is
    fixed and Y trains, Y = 0 and X ~ U(-1/sqrt(m), 1/sqrt(m)).
    """
    factors = dict(
        zip(form.factors, (_normal(shape, generator) for shape in form.factors.values()), strict=True)
    )
    each = len(factors) // len(form.scheme.suffixes)
    names = list(factors)
    for i, w in enumerate(form.inner(list(factors.values()))):
        share = _rms(w) ** (-1 / each)
        factors |= {name: share * factors[name] for name in names[i * each : (i + 1) * each]}
    for zero in zero_factors(form):
        other, core = ("y" if zero[0] == "x" else "x") + zero[1:], f"t{zero[1:]}"
        y = form.factors[other]
        factors[zero] = torch.zeros(form.factors[zero])
        factors[other] = (2 * _uniform(y, generator) - 1) / sqrt(form.scheme.reach(y))
        if core in factors:
            shape = form.factors[core]
            factors[core] = _normal(shape, generator) / sqrt(prod(shape[1:]))
    return list(factors.values())


def zero_factors(form: Form) -> tuple[str, ...]:
    """The factors of an adapter that start at 0: X of the last shared inner weight (x, x2; x1 for pFedPara).

    Where some factors are fixed, all others.
    """
    if form.scheme.fixed:
        return tuple(name for name in form.factors if name not in form.scheme.fixed)
    return (f"x{[s for s in form.scheme.suffixes if s not in form.scheme.private][-1]}",)


def unchanged(form: Form, factors: Sequence[Tensor]) -> list[Tensor]:
    """The factors with those of `zero_factors` set to 0: an adapter that does not change its weight."""
    zero = zero_factors(form)
    return [torch.zeros_like(f) if name in zero else f for name, f in zip(form.factors, factors, strict=True)]


def _drawn(form: Form, generator: Generator | None, fan: Callable[[Sequence[int]], int]) -> list[Tensor]:
    """Every factor from N(0, 2 / fan)."""
    return [_normal(shape, generator) * sqrt(2 / fan(shape)) for shape in form.factors.values()]


def _normal(shape: Sequence[int], generator: Generator | None) -> Tensor:
    """On the generator's device. torch's default device may be "meta", which has no numbers to scale by."""
    return torch.randn(shape, generator=generator, device=generator.device if generator else "cpu")


def _uniform(shape: Sequence[int], generator: Generator | None) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device if generator else "cpu")


def _solve(rms: Callable[[float], float], target: float, power: int) -> float:
    """The a with rms(a) = target. rms grows as a^power, or slower where tanh saturates."""
    a: float = target ** (1 / power)
    for _ in range(100):
        now = rms(a)
        if now == 0 or abs(now / target - 1) < 1e-3:  # 0: a 1 x 1 weight with W2 = -1
            break
        a *= (target / now) ** (1 / power)
    return a


def _rms(w: Tensor) -> float:
    return float(w.square().mean().sqrt())


INITS: dict[str, Init] = {"fan_out": fan_out, "calibrated": calibrated, "he": he}
PRIVATE = "private"


def named(text: str) -> Init:
    """The initialiser `name`, `name:gain`, or `name:gain,gain` with one gain for X and Y and one for T."""
    name, colon, rest = text.partition(":")
    try:
        gains = [float(part) for part in rest.split(",")] if colon else [1.0]
    except ValueError:
        gains = []
    most = 1 if name == PRIVATE else 2
    known = name in INITS or (name == PRIVATE and colon)
    if not known or not 1 <= len(gains) <= most or not all(0 < gain < inf for gain in gains):
        raise SchemeError(
            f"unknown init {text!r}: expected one of {', '.join(INITS)}, fit. fan_out:0.5 halves every factor; "
            "fan_out:0.5,2 halves X and Y and doubles T; private:0.5 starts pFedPara's W2 at 0.5."
        )
    if name == PRIVATE:
        return partial(calibrated, private=gains[0])
    start = INITS[name]
    if not colon:
        return start

    def scaled(form: Form, generator: Generator | None = None) -> list[Tensor]:
        return [factor * gains[-1 if factor.dim() > 2 else 0] for factor in start(form, generator)]

    return scaled


def default(form: Form, generator: Generator | None = None) -> Sequence[Tensor]:
    """The scheme's `kernel_init` for kernels (Prop. 3), calibrated for matrices.

    A matrix composed of fan_out factors is several times He's scale. Without a norm layer behind it, as in an
    MLP, training diverges in the first round at any usual learning rate.
    """
    return INITS[form.scheme.kernel_init if form.is_kernel else "calibrated"](form, generator)
