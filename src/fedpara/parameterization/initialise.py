"""How factors start when there is no trained weight to start from.

    fan_out      X, Y ~ N(0, 2/r), T ~ N(0, 2/(k r)): known to learn for FedPara's kernels under GroupNorm
    calibrated   scaled so that the composed weight has He's deviation sqrt(2 / fan_in)
    he           X ~ N(0, 2/O), Y ~ N(0, 2/I), T ~ N(0, 2/(k r)): He's rule for each factor as torch counts its fan-out

"fan_out:0.5" is fan_out with every deviation halved, "fan_out:0.5,1.4" with X and Y halved and T 1.4 times larger.

An initialiser is a function of a `Form` and a generator that returns the factors in the form's order;
a user's own function of that signature goes wherever these do.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf, prod, sqrt

import torch
from torch import Generator, Tensor

from fedpara.errors import SchemeError
from fedpara.parameterization.schemes import Form

Init = Callable[[Form, Generator | None], Sequence[Tensor]]

PRIVATE_SCALE = 1.0
"""Deviation of pFedPara's private W2. Near 0 the model is FedAvg's with a slow residue, from 3 it diverges."""
REACH = 0.95
"""tanh keeps W below a bound, which He's deviation can pass where fan_in is 1 or 2: no more than this part of it."""


def fan_out(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """std sqrt(2/r) for X and Y, sqrt(2/(k r)) for T: He's rule with each factor's own fan-out."""
    return _drawn(form, generator, lambda shape: form.rank * prod(shape[2:]))


def calibrated(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """rms(W) = sqrt(2 / fan_in), for any scheme, rank and nonlinearity, in every single draw.

    FedPara gives both inner weights the same deviation; pFedPara's W2 starts at PRIVATE_SCALE and W1
    carries the rest. Each factor of an inner weight takes the same part of its scale.
    """
    factors = [_normal(shape, generator) for shape in form.factors.values()]
    inner = form.inner(factors)
    norms = [_rms(w) for w in inner]
    units = [w / norm for w, norm in zip(inner, norms, strict=True)]
    free = [suffix not in form.scheme.private for suffix in form.scheme.suffixes]

    def scales(a: float) -> list[float]:
        return [a if is_free else PRIVATE_SCALE for is_free in free]

    def rms(a: float) -> float:
        return _rms(form.scheme.join([scale * w for scale, w in zip(scales(a), units, strict=True)]))

    he = sqrt(2 / prod(form.shape[1:]))
    a = _solve(rms, min(he, REACH * rms(1e6) or he), sum(free))
    each = len(factors) // len(inner)
    shares = [(scale / norm) ** (1 / each) for scale, norm in zip(scales(a), norms, strict=True)]
    return [factor * shares[i // each] for i, factor in enumerate(factors)]


def he(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """kaiming_normal_(mode="fan_out") of each factor. W starts at about a hundredth of He's scale: only under norms."""
    return _drawn(form, generator, lambda shape: shape[0] * prod(shape[2:]))


def _drawn(form: Form, generator: Generator | None, fan: Callable[[Sequence[int]], int]) -> list[Tensor]:
    """Every factor from N(0, 2 / fan)."""
    return [_normal(shape, generator) * sqrt(2 / fan(shape)) for shape in form.factors.values()]


def _normal(shape: Sequence[int], generator: Generator | None) -> Tensor:
    """Where the generator is, whatever torch's default device: on "meta" there would be no numbers to scale by."""
    return torch.randn(shape, generator=generator, device=generator.device if generator else "cpu")


def _solve(rms: Callable[[float], float], target: float, power: int) -> float:
    """The a with rms(a) = target, where rms grows as a^power, or slower once tanh bends it."""
    a: float = target ** (1 / power)
    for _ in range(100):
        now = rms(a)
        if now == 0 or abs(now / target - 1) < 1e-3:  # 0: the one entry of a 1 x 1 weight with W2 = -1
            break
        a *= (target / now) ** (1 / power)
    return a


def _rms(w: Tensor) -> float:
    return float(w.square().mean().sqrt())


INITS: dict[str, Init] = {"fan_out": fan_out, "calibrated": calibrated, "he": he}


def named(text: str) -> Init:
    """The initialiser of that name; after a colon the gain of every factor, or that of X and Y, that of T."""
    name, colon, rest = text.partition(":")
    try:
        gains = [float(part) for part in rest.split(",")] if colon else [1.0]
    except ValueError:
        gains = []
    if name not in INITS or len(gains) not in (1, 2) or not all(0 < gain < inf for gain in gains):
        raise SchemeError(
            f"unknown init {text!r}: expected one of {', '.join(INITS)}, fit; fan_out:0.5 halves every factor, "
            "fan_out:0.5,2 halves X and Y and doubles T."
        )
    start = INITS[name]
    if not colon:
        return start

    def scaled(form: Form, generator: Generator | None = None) -> list[Tensor]:
        return [factor * gains[-1 if factor.dim() > 2 else 0] for factor in start(form, generator)]

    return scaled


def default(form: Form, generator: Generator | None = None) -> list[Tensor]:
    """fan_out for FedPara's kernels (Prop. 3), calibrated for everything else.

    A composed matrix of fan_out factors is several times He's scale, and where no norm follows it, as in an
    MLP, training diverges in its first round at any usual learning rate.
    """
    kernel_of_fedpara = form.scheme.name == "fedpara" and form.is_kernel
    return (fan_out if kernel_of_fedpara else calibrated)(form, generator)


def checked(init: Init, form: Form, generator: Generator | None) -> list[Tensor]:
    """What `init` returned, if it fits the form."""
    given = init(form, generator)
    factors = list(given) if isinstance(given, Iterable) else [given]
    expected = [tuple(shape) for shape in form.factors.values()]
    got = [tuple(f.shape) if isinstance(f, Tensor) else type(f).__name__ for f in factors]
    if got != expected:
        raise SchemeError(
            f"the initialiser {getattr(init, '__name__', init)!r} returned factors of shapes {got} for a weight of "
            f"shape {form.shape}: expected {dict(form.factors)}, in that order. `form.factors` holds these shapes."
        )
    if not all(bool(factor.isfinite().all()) for factor in factors if not factor.is_meta):
        raise SchemeError(
            f"the initialiser {getattr(init, '__name__', init)!r} returned NaN or infinity for a weight of shape "
            f"{form.shape}: expected finite factors."
        )
    return factors
