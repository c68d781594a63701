"""The accountant against a second computation, and against the mechanism."""

import dp_accounting
import numpy as np
import pytest
from canaries import empirical

from fedpara.engines.participation.cohorts import Cohorts, poisson
from fedpara.errors import ConfigError
from fedpara.privacy import User, epsilon, epsilon_rdp, noise_for, rounds_within
from fedpara.privacy.accountant import default_delta
from fedpara.privacy.spending import in_words

SETTINGS = [(1.0, 0.1, 50, 1e-5), (0.8, 0.02, 50, 1e-6), (4.0, 1.0, 10, 1e-5), (1.2, 0.002, 100, 1e-6)]


@pytest.mark.parametrize(("noise", "q", "rounds", "delta"), SETTINGS)
def test_epsilon_is_that_of_the_librarys_accountants(noise, q, rounds, delta):
    """A second way to the number: the library composes events at its finest default, we self-compose a distribution."""
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(noise))
    pld, rdp = dp_accounting.pld.PLDAccountant(), dp_accounting.rdp.RdpAccountant()
    pld.compose(event, rounds)
    rdp.compose(event, rounds)
    ours = epsilon(noise, q, rounds, delta)
    assert ours == pytest.approx(pld.get_epsilon(delta), rel=2e-3)
    assert ours >= pld.get_epsilon(delta) * (1 - 1e-9)  # a coarser step rounds up
    assert epsilon_rdp(noise, q, rounds, delta) == pytest.approx(rdp.get_epsilon(delta), rel=1e-9)
    assert ours <= epsilon_rdp(noise, q, rounds, delta)


def test_the_cost_without_sampling_is_the_gaussian_mechanisms():
    """Balle and Wang's formula for one Gaussian: T rounds of noise z are one of noise z / sqrt(T)."""
    assert epsilon(4.0, 1.0, 16, 1e-5) == pytest.approx(
        dp_accounting.get_epsilon_gaussian(1.0, 1e-5), rel=1e-3
    )


def test_noise_for_a_budget_is_the_smallest():
    z = noise_for(3.0, 1e-5, 1.0, 20)
    assert epsilon(z, 1.0, 20, 1e-5) <= 3.0 < epsilon(z / 1.002, 1.0, 20, 1e-5)
    assert rounds_within(z, 1.0, 3.0, 1e-5, 100) == 20
    with pytest.raises(ConfigError, match="needs more noise than 10000"):
        noise_for(1e-9, 1e-12, 1.0, 50)
    assert default_delta(1000) == pytest.approx(1000**-1.1)


def test_a_delta_below_what_pld_cuts_off_has_the_bound_of_rdp():
    assert epsilon(1.0, 0.1, 100, 1e-16) == epsilon_rdp(1.0, 0.1, 100, 1e-16)
    assert epsilon(1.0, 0.1, 100, 1e-10) < epsilon(1.0, 0.1, 100, 1e-16) < 20


@pytest.mark.parametrize(
    ("kind", "rounds_played", "strength"),
    [
        (User(0.6, 1.0), 1, 1e6),  # a canary that ignores the bound
        (User(0.9, 1.0), 2, 1.0),
        (User(0.6, 1.0, quantile=0.5, bit_noise=0.5), 2, 1e6),
    ],
    ids=["unbounded", "two-rounds", "adaptive"],
)
def test_canaries_find_no_more_than_the_accountant_allows(rounds, kind, rounds_played, strength):
    """A client whose update is as long as it may be, in a federation of clients that send zeros.

    Noise and cohorts are seeded, so that the answer is the same every time. The attacker adds up the changes along
    the canary, in units of the round's bound: the best that it can do.
    """
    clients, cohort, delta, times = 4, 2, 1e-2, 1200

    def world(canary):
        seen, play = [], rounds(kind, clients, cohort, size=1)
        for number in range(times):
            play.reset(2 * number + canary)
            total = 0.0
            chosen = Cohorts(2 * number + canary, clients, cohort, poisson)
            for t in range(1, rounds_played + 1):
                bound = float(play.server["privacy"]["clip"]) if kind.adaptive else kind.bound
                changes = [[strength * (client == 0 and canary)] for client in chosen.draw(t)]
                total += float(play.play(changes)[0]) / bound
            seen.append(total)
        return np.array(seen)

    found = empirical(world(0), world(1), delta)
    claimed = epsilon(kind.noise, cohort / clients, rounds_played, delta)
    assert 0.4 < found < claimed


def test_a_large_delta_is_called_so():
    """Of ten clients, the default delta is 0.08."""
    line = {"epsilon": 0.5, "delta": 0.08, "private": True}
    assert "too large to protect anyone" in in_words(line)
    assert "too large" not in in_words({**line, "delta": 1e-3})
