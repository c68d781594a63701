"""Samplers: who takes part in a round."""

import hashlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpara.engines.batched.packing import length, pack
from fedpara.engines.batched.round_plan import typical_shape
from fedpara.engines.participation.cohorts import Cohorts, by_data, inclusion, poisson
from fedpara.errors import ConfigError

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**40)
ROUNDS = 8_000


def within(count, p, rounds=ROUNDS):
    """A binomial count is within five standard deviations of its mean."""
    return abs(count - rounds * p) < 5 * (rounds * p * (1 - p)) ** 0.5 + 1e-9


def test_uniform_cohorts_keep_their_bits():
    """Recorded before samplers existed."""
    assert Cohorts(7, 100, 10).draw(3) == [3, 21, 22, 37, 42, 52, 62, 71, 92, 93]
    assert Cohorts(2**40, 1_000_000, 5).draw(200) == [3303, 228199, 586761, 738825, 756651]
    drawn = [Cohorts(seed, 100, 16).draw(t) for seed in range(5) for t in range(1, 201)]
    digest = hashlib.sha256(repr(drawn).encode()).hexdigest()
    assert digest == "6f98207e8cca1d5df2f44ddcf60ff879d6ca2aade3ce6dcdc19c3833fd6d9d9f"


@quick
@given(seed=seeds, round=st.integers(1, 10_000), clients=st.integers(1, 2_000_000), data=st.data())
def test_a_cohort_is_a_sorted_set_of_its_size(seed, round, clients, data):
    size = data.draw(st.integers(1, min(clients, 300)))
    chosen = Cohorts(seed, clients, size).draw(round)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == size
    assert chosen[0] >= 0
    assert chosen[-1] < clients
    assert chosen == Cohorts(seed, clients, size).draw(round)
    assert all(type(client) is int for client in chosen)


def test_a_cohort_of_all_clients_has_every_client():
    assert Cohorts(3, 50, 50).draw(7) == list(range(50))


def test_a_cohort_of_all_clients_but_one_can_be_drawn():
    assert len(Cohorts(0, 20_000, 19_999).draw(1)) == 19_999


def counted(cohorts):
    """How often each client and each pair of clients takes part, over 8,000 rounds."""
    drawn = [cohorts.draw(t) for t in range(1, ROUNDS + 1)]
    single = Counter(client for chosen in drawn for client in chosen)
    pairs = Counter((a, b) for chosen in drawn for a in chosen for b in chosen if a < b)
    return drawn, single, pairs


def test_every_client_and_every_pair_is_equally_likely():
    """3 of 8 clients: each client in 3/8 and each pair in 3/28 of the rounds."""
    _, single, pairs = counted(Cohorts(0, 8, 3))
    for found, kinds, p in ((single, 8, 3 / 8), (pairs, 28, 3 / 28)):
        assert len(found) == kinds
        assert all(within(n, p) for n in found.values())


def test_poisson_chooses_clients_independently():
    """Each client with probability 3/8, each pair with (3/8)^2, and sizes are binomial, 0 included."""
    drawn, single, pairs = counted(Cohorts(0, 8, 3, poisson))
    assert len(single) == 8
    assert all(within(n, 3 / 8) for n in single.values())
    assert len(pairs) == 28
    assert all(within(n, (3 / 8) ** 2) for n in pairs.values())
    sizes = np.array([len(chosen) for chosen in drawn])
    assert abs(sizes.mean() - 3) < 5 * (8 * 3 / 8 * 5 / 8 / ROUNDS) ** 0.5
    assert within(int((sizes == 0).sum()), (5 / 8) ** 8)
    assert within(int((sizes == 8).sum()), (3 / 8) ** 8)


def test_poisson_with_a_cohort_of_everyone_has_everyone():
    assert Cohorts(0, 5, 5, poisson).draw(1) == [0, 1, 2, 3, 4]


def test_by_data_chooses_in_proportion_to_the_examples():
    """3 of clients with 0, 10, 20, 30, 40, 50 examples: p_i = 3 n_i / 150, exactly 3 in every round."""
    sizes = np.array([0, 10, 20, 30, 40, 50])
    drawn, single, pairs = counted(Cohorts(0, 6, 3, by_data(sizes)))
    assert {len(chosen) for chosen in drawn} == {3}
    assert single[0] == 0
    assert all(within(single[i], 3 * sizes[i] / 150) for i in range(6))
    assert len(pairs) == 10, "every pair with examples comes up"


@quick
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 40), seeds)
def test_by_data_gives_every_client_its_probability(counts, cohort, seed):
    """p_i = min(1, c n_i), and their sum is the size of every cohort."""
    sizes, cohort = np.array(counts), min(cohort, len(counts))
    p, able = inclusion(sizes, cohort), np.count_nonzero(sizes)
    assert p.sum() == pytest.approx(min(cohort, able))
    assert ((p >= 0) & (p <= 1)).all()
    assert (p[sizes == 0] == 0).all()
    ratios = p[(p > 0) & (p < 1)] / sizes[(p > 0) & (p < 1)]
    assert ratios == pytest.approx(ratios[:1].repeat(len(ratios)))
    chosen = Cohorts(seed, len(counts), cohort, by_data(sizes)).draw(1)
    assert len(chosen) == min(cohort, able)
    assert set(np.flatnonzero(p == 1)) <= set(chosen) <= set(np.flatnonzero(sizes))


def test_a_larger_client_is_never_less_likely():
    sizes = np.array([1, 1, 2, 3, 100])
    assert inclusion(sizes, 3).tolist() == pytest.approx([2 / 7, 2 / 7, 4 / 7, 6 / 7, 1])


@pytest.mark.parametrize(
    "sampler", ["uniform", "poisson", "by-data", lambda t, n, m, g: [t % n, (t + 2) % n]]
)
def test_engines_draw_the_same_cohorts(world, sampler):
    runs = [
        world.simulate(world.model(), rounds=5, engine=e, sampler=sampler) for e in ("sequential", "batched")
    ]
    a, b = ([result.cohort for result in run.rounds] for run in runs)
    assert a == b
    assert len(set(a)) > 1
    for name, tensor in runs[0].state.items():
        torch.testing.assert_close(tensor, runs[1].state[name], rtol=1e-5, atol=1e-6)


def test_a_sampler_gets_the_rounds_own_generator(world):
    def own(round, clients, cohort, generator):
        assert (clients, cohort) == (6, 3)
        return generator.choice(clients, cohort, replace=False, shuffle=False)

    custom, plain = (world.simulate(world.model(), sampler=s) for s in (own, "uniform"))
    assert [r.cohort for r in custom.rounds] == [r.cohort for r in plain.rounds]


def test_an_empty_cohort_keeps_the_model(world, engine):
    run = world.simulate(
        world.model(), engine=engine, sampler=lambda t, n, m, g: [4] if t == 2 else [], rounds=3
    )
    first, second, third = run.rounds
    assert first.notes == ("round 1 had no clients: the model stays unchanged",)
    assert (first.cohort, first.bytes_up, first.bytes_down) == ((), 0, 0)
    assert (second.cohort, second.notes) == ((4,), ())
    assert second.accuracy == third.accuracy, "round 3 has no clients and is scored"


@pytest.mark.parametrize(
    ("drawn", "says"),
    [
        ([0, 6], "the sampler returned client 6 in round 1: expected distinct client numbers from 0 to 5"),
        ([-1], "the sampler returned client -1 in round 1"),
        ([3, 1, 3], "the sampler returned client 3 twice in round 1"),
        ([0.5, 1.0], r"the sampler returned \[0.5, 1.0\] in round 1"),
        (None, "the sampler returned None in round 1"),
    ],
)
def test_a_bad_sampler_is_named_before_the_run(world, drawn, says):
    with pytest.raises(ConfigError, match=says):
        world.simulate(world.model(), sampler=lambda *_: drawn)


def test_a_sampler_that_fails_is_named(world):
    with pytest.raises(
        ConfigError, match=r"the sampler failed in round 1 \(TypeError.*\): expected a function"
    ):
        world.simulate(world.model(), sampler=lambda round, clients: [0])


def test_a_sampler_may_know_only_the_rounds_of_the_run(world, engine):
    """Such as a list of who was awake in each round."""
    awake = [[0, 1], [2], [3, 4]]
    run = world.simulate(world.model(), engine=engine, sampler=lambda t, n, m, g: awake[t - 1], rounds=3)
    assert [list(result.cohort) for result in run.rounds] == awake


def test_an_unknown_sampler_is_named(world):
    with pytest.raises(ConfigError, match="unknown sampler 'poison': did you mean 'poisson'"):
        world.simulate(world.model(), sampler="poison")


def test_by_data_needs_examples(world):
    empty = type(world.federation)(world.train, [[], []])
    with pytest.raises(ConfigError, match="sampler 'by-data' needs clients with a known number of examples"):
        world.simulate(world.model(), federation=empty, cohort=1, sampler="by-data")


def test_lanes_fit_the_largest_typical_cohort(world):
    """Six equal clients, each chosen with probability 1/2: a cohort of all six still trains in one pass."""
    federation = type(world.federation)(world.train, [range(8)] * 6)
    session = world.session(world.model())
    shape = typical_shape(session, federation, Cohorts(0, 6, 3, poisson))
    largest = max(len(Cohorts(0, 6, 3, poisson).draw(t)) for t in range(1, 21))
    assert (shape.clients, shape.lanes, shape.steps) == (largest, largest, 2)
    assert length(pack([2] * 6, shape.lanes)) <= 2 * shape.steps
