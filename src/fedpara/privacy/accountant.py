"""What a run costs: epsilon at a given delta, by two accountants of `dp-accounting`.

    PLD    privacy loss distributions: nearly exact, and what a budget is compared with
    RDP    Renyi differential privacy: an older bound that is slightly larger; a check of the first

PLD cuts off a tail of 1e-15 per round, so it has no bound for a delta below that tail. There the bound is RDP's.

A round of user-level privacy is a Gaussian mechanism with noise multiplier z on a Poisson sample with probability q.
Two federations are neighbours if one has one client more. Both accountants give upper bounds.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpara.errors import ConfigError, MissingExtraError, install

COARSE, FINE = 1e-3, 1e-4
"""Steps in which privacy losses are rounded up. Small samples lose little per round, so they need the fine one."""
LARGEST_NOISE = 1e4


@lru_cache(maxsize=256)  # a round asks for its own cost and for that of the next
def epsilon(noise: float, sampling: float, rounds: int, delta: float) -> float:
    """Epsilon after `rounds` rounds, by PLD, or by RDP for a delta that is too small for PLD."""
    if not rounds:
        return 0.0
    found = float(_loss(noise, sampling).self_compose(rounds).get_epsilon_for_delta(delta))
    return found if math.isfinite(found) else epsilon_rdp(noise, sampling, rounds, delta)


def epsilon_rdp(noise: float, sampling: float, rounds: int, delta: float) -> float:
    """Epsilon after `rounds` rounds, by RDP."""
    if not rounds:
        return 0.0
    orders, rdp = _renyi(noise, sampling)
    return float(_library().rdp.compute_epsilon(orders, rdp * rounds, delta)[0])


def rounds_within(noise: float, sampling: float, budget: float, delta: float, most: int) -> int:
    """The largest number of rounds, at most `most`, that cost no more than the budget."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if epsilon(noise, sampling, middle, delta) <= budget:
            low = middle
        else:
            high = middle
    return low


def noise_for(budget: float, delta: float, sampling: float, rounds: int) -> float:
    """The smallest noise multiplier with which `rounds` rounds cost at most the budget, to 0.1%."""
    low = high = 1.0
    while epsilon(high, sampling, rounds, delta) > budget:
        low, high = high, 2 * high
        if high > LARGEST_NOISE:
            raise ConfigError(
                f"epsilon {budget:g} at delta {delta:g} needs more noise than {LARGEST_NOISE:g}: expected a larger "
                "budget, or fewer rounds."
            )
    while low == high or epsilon(low, sampling, rounds, delta) <= budget:
        high, low = low, low / 2
        if low < 0.1:
            return high
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        if epsilon(middle, sampling, rounds, delta) <= budget:
            high = middle
        else:
            low = middle
    return high


def default_delta(clients: int) -> float:
    """N^-1.1 for N clients or examples. A delta of 1 / N would permit publishing one of them at random."""
    return min(0.1, math.pow(clients, -1.1))


@lru_cache(maxsize=8)
def _loss(noise: float, sampling: float) -> Any:
    """The privacy loss distribution of one round."""
    return _library().pld.privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        sampling_prob=sampling,
        value_discretization_interval=COARSE if sampling >= 0.01 else FINE,
    )


@lru_cache(maxsize=8)
def _renyi(noise: float, sampling: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(the orders, the Renyi divergence of one round at each)"""
    library = _library()
    accountant = library.rdp.RdpAccountant()
    accountant.compose(library.PoissonSampledDpEvent(sampling, library.GaussianDpEvent(noise)))
    return np.asarray(accountant.orders), np.asarray(accountant.rdp)


@lru_cache(maxsize=1)
def _library() -> Any:
    """dp_accounting, imported at its first use: it takes a second."""
    try:
        import dp_accounting
        from absl import logging
    except ImportError:
        raise MissingExtraError(f"privacy needs dp-accounting: {install('privacy')}") from None
    logging.set_verbosity(logging.ERROR)  # it warns of each order at which its series does not converge
    return dp_accounting
