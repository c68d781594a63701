"""Schemes and ranks that cannot be, and weights for which a scheme has no rank worth having."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from snapshot import Snapshot
from torch import nn

import fedpara as fp
from fedpara.errors import SchemeError
from fedpara.parameterization import plan, write


@pytest.mark.parametrize("kind", [fp.FedPara, fp.PFedPara, fp.LowRank])
@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan"), float("inf"), "0.5"])
def test_gamma_outside_0_to_1(kind, gamma):
    with pytest.raises(
        SchemeError, match=rf"gamma must lie in \[0, 1\]: got {gamma!r}\. 0 is the least rank"
    ):
        kind(gamma=gamma)


@pytest.mark.parametrize("kind", [fp.FedPara, fp.PFedPara, fp.LowRank])
@pytest.mark.parametrize("rank", [0, -3, 1.5, 2.0, True, float("nan"), "2"])
def test_a_rank_that_is_no_whole_number_from_1(kind, rank):
    with pytest.raises(SchemeError, match=rf"whole number of at least 1: got {rank!r}\. With gamma instead"):
        kind(rank=rank)


@pytest.mark.parametrize(
    ("scheme", "limit"), [(fp.FedPara(rank=7), 3), (fp.PFedPara(rank=4), 3), (fp.LowRank(rank=8), 7)]
)
def test_a_rank_above_r_max(scheme, limit):
    layer = nn.Linear(16, 14)
    before = Snapshot(layer)
    with pytest.raises(
        SchemeError, match=rf"weight: rank {scheme.rank} is above {limit}.*14 x 16.*lower the rank"
    ):
        fp.factorize(layer, scheme, lambda n, m, p: p == "weight")
    before.assert_unchanged()
    with pytest.raises(SchemeError, match=r"64 x 32 x 9"):
        write(fp.FedPara(rank=30), (64, 32, 3, 3))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: fp.FedPara(), "exactly one of gamma, rank: got none"),
        (lambda: fp.FedPara(gamma=0.1, rank=3), "exactly one of gamma, rank: got gamma and rank"),
        (lambda: fp.LowRank(ratio=0.0), r"ratio must lie in \(0, 1\]: got 0.0. It is the share"),
        (lambda: fp.LowRank(ratio=1.5), r"ratio must lie in \(0, 1\]: got 1.5"),
        (lambda: fp.LowRank(gamma=0.1, ratio=0.5), "exactly one of gamma, rank, ratio: got gamma and ratio"),
        (lambda: fp.FedPara(gamma=0.1, nonlinearity="relu"), "must be None or 'tanh': got 'relu'"),
        (
            lambda: fp.PFedPara(gamma=0.1, conv="flat"),
            r"'tensor' \(Prop. 3\) or 'reshape' \(Prop. 1\): got 'flat'",
        ),
    ],
)
def test_schemes_that_cannot_be(build, text):
    with pytest.raises(SchemeError, match=text):
        build()


@dataclass(frozen=True)
class Choosing(fp.FedPara):
    """Somebody's own rule for the rank."""

    chosen: object = 0

    def rank_of(self, m, n, k):
        return self.chosen


@pytest.mark.parametrize("chosen", [0, 2.5, None, True])
def test_a_rank_of_ones_own_that_is_none(chosen):
    with pytest.raises(SchemeError, match="expected a whole number of at least 1"):
        fp.factorize(nn.Linear(40, 40), Choosing(gamma=0.1, chosen=chosen))


def test_a_nonlinearity_and_an_init_of_another_kind():
    with pytest.raises(SchemeError, match="nonlinearity must be None or 'tanh'"):
        fp.FedPara(gamma=0.1, nonlinearity=["tanh"])
    with pytest.raises(SchemeError, match="init must be a name or a function"):
        fp.factorize(nn.Linear(40, 40), fp.FedPara(gamma=0.1), init=np.ones(3))


@pytest.mark.parametrize("scheme", [fp.FedPara, fp.PFedPara])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.6, 0.9])
def test_more_gamma_is_never_less_rank(scheme, gamma):
    """Of a 4 x 64 head no rank makes a product both smaller and of full rank."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    chosen = {choice.name: choice for choice in plan(model, scheme(gamma=gamma))}
    assert chosen["0.weight"].form.max_rank == 64
    assert chosen["1.weight"].form is None
    assert chosen["1.weight"].reason
    forced = {choice.name: choice for choice in plan(model, scheme(gamma=gamma), force=True)}
    assert forced["1.weight"].form is not None


@pytest.mark.parametrize("groups", [1, 32])
def test_a_kernel_of_one_channel_stays_dense_where_its_rank_would_be_one(groups):
    """Depthwise layers, and the first on grey images: two pieces of rank 1 make one filter in many sizes."""

    def model():
        return nn.Sequential(nn.Conv2d(groups, 32, 3, groups=groups), nn.Conv2d(32, 32, 3))

    chosen = fp.factorize(model(), fp.FedPara(gamma=0.1))
    assert chosen.state_dict()["0.weight"].shape == (32, 1, 3, 3)
    forced = fp.factorize(model(), fp.FedPara(gamma=0.1), force=True)
    assert torch.linalg.matrix_rank(forced[0].weight.flatten(1)) == 1
    for more, rank in ((fp.FedPara(gamma=0.5), 4), (fp.PFedPara(gamma=0.1), 2)):
        taken = fp.factorize(model(), more)
        assert torch.linalg.matrix_rank(taken[0].weight.flatten(1)) == rank
    with pytest.raises(fp.errors.SchemeError, match="filters a multiple of one and the same"):
        fp.factorize(nn.Conv2d(1, 32, 3), fp.FedPara(gamma=0.1))


def test_pfedpara_is_of_full_rank_one_rank_sooner():
    """rank(W) <= r (r + 1): 2 is enough for 6, where FedPara needs 3."""
    own, other = (
        plan(nn.Linear(64, 6, bias=False), scheme)[0] for scheme in (fp.PFedPara(1.0), fp.FedPara(1.0))
    )
    assert own.form is not None
    assert own.form.rank == 2
    assert own.form.max_rank == 6
    assert other.form is None
    assert "not of full rank" in other.reason
