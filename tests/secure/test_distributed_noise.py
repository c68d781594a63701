"""Secure aggregation with differential privacy: each client adds its share of the noise before it masks."""

import json
from dataclasses import replace
from math import comb, sqrt

import dp_accounting
import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from canaries import empirical
from flower_nodes import BASE, run_on_nodes, run_sequentially
from secure_federation import Federation

from fedpara.engines.secure import collect
from fedpara.engines.secure.checks import telling_cohorts
from fedpara.engines.secure.vector import client_noise
from fedpara.errors import ConfigError
from fedpara.experiments import resume, run
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import final_checkpoint
from fedpara.privacy import Spending, User, epsilon
from fedpara.secure import SecAgg
from fedpara.secure.messages import STAGES
from fedpara.secure.server import Skipped

LENGTH = 40_000
EXPERIMENT = replace(
    BASE,
    clients=6,
    cohort=5,
    rounds=2,
    engine="sequential",
    sampler="poisson",
    weights="uniform",
    privacy="user(noise=1.5, clip=0.5)",
    privacy_seed=3,
    delta=0.15,
    secure="secagg(clip=0.5)",
)


def close(variance, claim, numbers=LENGTH):
    """Whether a sample variance is within five standard errors of a Gaussian's."""
    return abs(variance / claim - 1) < 5 * sqrt(2 / numbers)


@pytest.mark.parametrize(
    ("how", "clients", "vanish", "stayed", "needed"),
    [
        (SecAgg(clip=0.5), 5, {"masked": [10, 14]}, 3, 3),  # the fewest that may stay: exactly the claim
        (SecAgg(clip=0.5), 5, {"keys": [10], "shares": [12]}, 3, 3),
        (SecAgg(clip=0.5), 5, {"unmask": [10, 11]}, 5, 3),  # their updates count, and so does their noise
        (SecAgg(clip=0.5, threshold=1.0), 4, {}, 4, 4),
        (SecAgg(clip=0.5, threshold=0.55, neighbours=6, bits=16), 9, {"masked": [11, 17]}, 7, 5),
    ],
)
def test_the_sums_noise_has_the_claimed_variance(how, clients, vanish, stayed, needed):
    """Golden: (m / t) (z C)^2, by NumPy, and never below (z C)^2. The updates are known, so the rest is noise."""
    z = 1.5
    federation = Federation(how, clients, vanish, 0.001, LENGTH, noise=z * how.clip)
    federation.weights = dict.fromkeys(federation.clients, 1.0)
    total, weight = federation.run()
    assert weight == stayed == len(federation.server.arrived)
    noise = total - federation.expected(federation.server.arrived)
    assert close(noise.var(), stayed / needed * (z * how.clip) ** 2)
    assert noise.var() > (z * how.clip) ** 2 * (1 - 5 * sqrt(2 / LENGTH))
    assert abs(noise.mean()) < 5 * noise.std() / sqrt(LENGTH)
    edges = np.array([-1.959964, -0.6744898, 0.0, 0.6744898, 1.959964])
    below = (noise[:, None] / noise.std() < edges).mean(0)
    np.testing.assert_allclose(below, [0.025, 0.25, 0.5, 0.75, 0.975], atol=0.012)


def test_with_fewer_clients_than_the_noise_counts_on_there_is_no_sum():
    for stage in STAGES:
        with pytest.raises(Skipped, match="2 of 5 clients"):
            Federation(SecAgg(), 5, {stage: [10, 11, 12]}, noise=2.0).run()


def test_a_client_that_does_not_clip_is_noticed_through_the_noise():
    federation = Federation(SecAgg(clip=0.5), 5, length=400, noise=0.1)
    federation.weights[12], federation.updates[12] = 1.0, np.full(400, 0.45)
    federation.settings[12] = SecAgg(clip=1000.0, range=0.5)
    with pytest.raises(Skipped, match="the norm of the sum is"):
        federation.run()


@pytest.mark.parametrize("noise", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("clients", [3, 4, 5, 100])
def test_the_sum_has_room_for_its_noise(noise, clients):
    how = SecAgg()
    width, share = how.width(clients, noise), how.share(noise, clients)
    assert clients * how.largest(share) <= 2 ** (8 * width - 1) < 2**8 * clients * how.largest(share)
    if not noise:
        assert width == -(-(22 + int(np.ceil(np.log2(clients)))) // 8)


def test_canaries_find_no_more_than_the_claim_against_the_server():
    """Each coordinate is one game: the canary sends C in it, or nothing. The fewest clients stay, the canary with them.

    The server sees the sum and knows the cohort, so nothing hides in a sample.
    """
    z, bound, games, delta = 0.9, 0.5, 4000, 1e-2

    def world(canary):
        how = SecAgg(clip=bound * sqrt(games) * 1.01, range=bound, bits=22)
        federation = Federation(how, 5, {"masked": [10, 14]}, 0.0, games, noise=z * bound)
        federation.weights = dict.fromkeys(federation.clients, 1.0)
        federation.updates[12] = np.full(games, bound * canary)
        return federation.run()[0]

    found = empirical(world(0), world(1), delta)
    assert 1.0 < found < epsilon(z, 1.0, 1, delta)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same(a, b):
    first, second = (final_checkpoint(folder).progress.x for folder in (a, b))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_nodes_simulation_and_a_resumed_run_give_the_same_bits(tmp_path):
    run_on_nodes(EXPERIMENT, tmp_path / "nodes")
    run_sequentially(EXPERIMENT, tmp_path / "here")
    assert same(tmp_path / "nodes", tmp_path / "here")
    run(replace(EXPERIMENT, rounds=1), tmp_path / "parts")
    resume(tmp_path / "parts", rounds=2)
    assert same(tmp_path / "parts", tmp_path / "here")
    assert not any(line["privacy"]["private"] for line in lines(tmp_path / "nodes"))


@pytest.mark.parametrize(("clients", "cohort", "rounds", "delta"), [(60, 30, 3, 1e-3), (12, 4, 3, 0.05)])
def test_epsilon_is_that_of_the_guaranteed_noise(clients, cohort, rounds, delta):
    """By a second computation: q < 1 for those who see the models, q = 1 for the server, who knows the cohorts.

    A cohort of which one client decides whether there is a sum counts in delta. In a small federation that takes all of
    delta, and epsilon is the server's.
    """
    q, telling = cohort / clients, telling_cohorts(clients, cohort)
    spending = Spending(User(1.5, 0.5), clients, cohort, delta, hidden=True, telling=telling)

    def cost(kind, sampling, left):
        accountant = kind()
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(1.5)), rounds
        )
        return accountant.get_epsilon(left)

    left, line = delta - rounds * telling, spending.line(rounds, 0.5)
    for name, kind in {
        "epsilon": dp_accounting.pld.PLDAccountant,
        "epsilon_rdp": dp_accounting.rdp.RdpAccountant,
    }.items():
        server = cost(kind, 1.0, delta)
        assert line[name] == pytest.approx(min(server, cost(kind, q, left)) if left > 0 else server, rel=5e-3)
    assert line["epsilon_server"] == pytest.approx(
        cost(dp_accounting.pld.PLDAccountant, 1.0, delta), rel=5e-3
    )
    assert (line["epsilon"] < 0.8 * line["epsilon_server"]) == (clients == 60)


def test_every_line_of_metrics_has_the_cost(tmp_path):
    run(replace(EXPERIMENT, privacy_seed=None), tmp_path / "run")
    told = [line["privacy"] for line in lines(tmp_path / "run")]
    assert [one["epsilon_server"] for one in told] == [epsilon(1.5, 1.0, t, 0.15) for t in (1, 2)]
    assert all(one["private"] and one["noise"] == 1.5 and one["clip"] == 0.5 for one in told)


def test_the_models_noise_is_the_same_in_every_round(tmp_path, monkeypatch):
    """1.01 (z C)^2 / threshold over (q N)^2, whoever stays: its size does not tell how large the cohort was."""
    seen, mean = [], collect.SecureRound._private_mean

    def spied(self, total, aggregation):
        change, count = mean(self, total, aggregation)
        seen.append((change, len(aggregation.arrived), len(aggregation.cohort)))
        return change, count

    monkeypatch.setattr(collect.SecureRound, "_private_mean", spied)
    run(replace(EXPERIMENT, rounds=4, lr=1e-7, lost=0.15, clients=8, cohort=6), tmp_path / "run")
    assert len({stayed for _, stayed, _ in seen}) > 1
    assert len({cohort for *_, cohort in seen}) > 1
    for change, *_ in seen:
        assert close(change.var(), 1.01 * (1.5 * 0.5) ** 2 / 0.6 / 6**2, len(change))


def test_clients_draw_different_noise_and_fresh_noise_every_time(tmp_path, monkeypatch):
    drawn = []

    def spied(session, participant, key):
        noise = client_noise(session, participant, key)
        drawn.append(key or client_noise(session, participant, key).source.draw(4))
        return noise

    monkeypatch.setattr("fedpara.engines.secure.vector.client_noise", spied)
    for name in ("first", "second"):
        run(replace(EXPERIMENT, privacy_seed=None, rounds=1), tmp_path / name)
    run_on_nodes(replace(EXPERIMENT, privacy_seed=None, rounds=1), tmp_path / "nodes")
    assert len(drawn) > 2  # the cohorts are random
    assert len({bytes(one) for one in drawn}) == len(drawn)


BAD = {
    "clip": ({"secure": "secagg"}, r"clip the same update to different norms: set secagg\(clip=0.5\)"),
    "quantile": (
        {"privacy": "user(noise=1.5, clip=0.5, quantile=0.5)"},
        "secure aggregation hides: leave quantile out",
    ),
    "bits": ({"secure": "secagg(clip=0.5, bits=8, range=10.0)"}, "steps of fixed point"),
    "width": (
        {"privacy": "user(noise=1e12, clip=0.5)", "secure": "secagg(clip=0.5, bits=32)"},
        "expected at most 8, so lower bits",
    ),
    "sampler": ({"sampler": "uniform"}, "needs sampler 'poisson'"),
}


@pytest.mark.parametrize(("change", "expected"), BAD.values(), ids=BAD)
def test_a_mistake_leaves_no_folder(tmp_path, change, expected):
    with pytest.raises(ConfigError, match=expected):
        lay_out(replace(EXPERIMENT, **change), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_cohorts_that_are_too_small_are_rare_in_large_federations():
    assert telling_cohorts(12, 4) == pytest.approx(comb(11, 2) * (1 / 3) ** 2 * (2 / 3) ** 9)
    assert telling_cohorts(1000, 100) < 1e-40
    assert telling_cohorts(3, 3) == 0
