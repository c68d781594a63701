"""The defences as values. `robust/weighing.py`, `clustering.py` and `coordinatewise.py` hold their formulas."""

from functools import partial
from typing import Any

from fedpara.algorithms.local import COUNT, POSITIVE, Rule, check
from fedpara.data import Examples
from fedpara.robust import clustering, coordinatewise, weighing
from fedpara.robust.core import Defence

BELOW_HALF: Rule = ("a number of 0 or more and below 0.5", lambda value: 0 <= value < 0.5)
HOSTILE_SHARE = 0.3
"""The share of hostile clients in a cohort that some defences assume by default."""


def mean() -> Defence:
    """The algorithm's weighted mean, on composed weights: no defence, except against rescaled factors."""
    return Defence("mean", weigh=_own_weights)


def median() -> Defence:
    """The coordinate-wise median. It withstands hostile values of fewer than half of the clients per coordinate."""
    return Defence("median", combine=coordinatewise.coordinatewise_median, needs=_three)


def trimmed_mean(share: float = HOSTILE_SHARE) -> Defence:
    """The coordinate-wise mean without the `share` smallest and the `share` largest values."""
    check(BELOW_HALF, share=share)
    return Defence(
        "trimmed-mean", combine=partial(coordinatewise.trimmed_mean, share=share), needs=partial(_trim, share)
    )


def krum(share: float = HOSTILE_SHARE) -> Defence:
    """The one update nearest to its neighbours. It assumes at most `share` hostile clients in a cohort."""
    check(BELOW_HALF, share=share)
    return Defence("krum", weigh=partial(weighing.krum, share=share), needs=partial(_krum, share))


def multi_krum(share: float = HOSTILE_SHARE) -> Defence:
    """The mean of the updates nearest to their neighbours, without the `share` farthest."""
    check(BELOW_HALF, share=share)
    return Defence("multi-krum", weigh=partial(weighing.multi_krum, share=share), needs=partial(_krum, share))


def rfa(steps: int = 100) -> Defence:
    """The geometric median. It withstands clients with less than half of the weight."""
    check(COUNT, steps=steps)
    return Defence("rfa", weigh=partial(weighing.rfa, steps=steps), needs=_three)


def centred_clip(tau: float | None = None, steps: int = 10) -> Defence:
    """Centred clipping around the server's model, to `tau` or the median distance."""
    check(POSITIVE, tau=tau)
    check(COUNT, steps=steps)
    return Defence("centred-clip", weigh=partial(weighing.centred_clip, tau=tau, steps=steps), needs=_three)


def norm_clip(bound: float | None = None) -> Defence:
    """The mean of updates that are clipped to `bound`, or to the median norm of the round."""
    check(POSITIVE, bound=bound)
    return Defence("norm-clip", weigh=partial(weighing.norm_clip, bound=bound))


def fltrust(examples: int = 100, clean: Examples | None = None) -> Defence:
    """Weights by agreement with the server's own update on a few clean examples.

    `clean` are the examples. By default the simulator draws `examples` of them from the training set.
    """
    check(COUNT, examples=examples)
    return Defence("fltrust", weigh=weighing.fltrust, clean=examples if clean is None else clean)


def flame() -> Defence:
    """The mean of the largest group of updates with similar directions, clipped to the median norm."""
    return Defence("flame", weigh=clustering.flame, needs=_three)


def auto() -> Defence:
    """The default: flame's group, without early outliers and without clients whose updates resemble each other.

    It remembers each client's standing. On Flower, a node's key should therefore be bound to its clients.
    """
    return Defence(
        "auto", clustering.auto, remember=clustering.standing, reference=clustering.trusted, needs=_three
    )


def _own_weights(g: Any) -> Any:
    return g.w


def _three(cohort: int) -> int:
    return 3


def _krum(share: float, cohort: int) -> int:
    """2 f + 3"""
    return 2 * int(share * cohort + weighing.ROUNDING) + 3


def _trim(share: float, cohort: int) -> int:
    return 2 * int(share * cohort + weighing.ROUNDING) + 1
