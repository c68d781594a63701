"""Wrong options of schemes, and weights for which no rank is useful."""

import pytest
import torch
from snapshot import Snapshot
from torch import nn

import fedpara as fp
from fedpara import parameterization
from fedpara.errors import SchemeError
from fedpara.parameterization import plan, write


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
        (lambda: fp.FedPara(gamma=1.1), "gamma is 1.1: expected 0 .* to 1 "),
        (lambda: fp.PFedPara(gamma=-0.1), "gamma is -0.1: expected 0 .* to 1 "),
        (lambda: fp.LowRank(gamma=10), "gamma is 10: expected 0 .* to 1 "),
        (lambda: fp.FedPara(rank=0), "rank is 0: expected a whole number of at least 1. Set gamma instead"),
        (lambda: fp.LowRank(rank=-3), "rank is -3: expected a whole number of at least 1"),
        (lambda: fp.LowRank(ratio=0.0), "ratio is 0.0: expected the share of the dense parameters"),
        (lambda: fp.LowRank(ratio=1.5), "ratio is 1.5: expected .* at most 1"),
        (lambda: fp.LowRank(gamma=0.1, ratio=0.5), "exactly one of gamma, rank, ratio: got gamma and ratio"),
        (
            lambda: fp.FedPara(gamma=0.1, nonlinearity="relu"),
            "nonlinearity is 'relu': expected None or 'tanh'",
        ),
        (
            lambda: fp.PFedPara(gamma=0.1, conv="flat"),
            r"conv is 'flat': expected 'tensor' \(Prop. 3\) or 'reshape' \(Prop. 1\)",
        ),
    ],
)
def test_wrong_options_of_a_scheme(build, text):
    with pytest.raises(SchemeError, match=text):
        build()


@pytest.mark.parametrize("name", parameterization.SCHEMES)
def test_a_scheme_is_made_by_name(name):
    options = {} if "kronecker" in name else {"conv": "reshape"}
    scheme = parameterization.make_scheme(name, rank=2, gamma=None, **options)
    assert scheme == parameterization.SCHEMES[name](rank=2, **options)
    with pytest.raises(
        SchemeError, match=rf"scheme '{name}' has no alpha: leave it out. It takes gamma, rank"
    ):
        parameterization.make_scheme(name, rank=2, alpha=1)


def test_a_fraction_is_no_rank():
    with pytest.raises(TypeError):
        write(fp.FedPara(rank=1.5), (16, 14))


@pytest.mark.parametrize("scheme", [fp.FedPara, fp.PFedPara])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.6, 0.9])
def test_a_higher_gamma_never_gives_a_lower_rank(scheme, gamma):
    """For a 4 x 64 head, no rank makes the product both smaller and of full rank."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    chosen = {choice.name: choice for choice in plan(model, scheme(gamma=gamma))}
    assert chosen["0.weight"].form.max_rank == 64
    assert chosen["1.weight"].form is None
    assert chosen["1.weight"].reason
    forced = {choice.name: choice for choice in plan(model, scheme(gamma=gamma), force=True)}
    assert forced["1.weight"].form is not None


@pytest.mark.parametrize("groups", [1, 32])
def test_a_kernel_of_one_channel_stays_dense_where_its_rank_would_be_one(groups):
    """Depthwise layers, and the first layer on grey images: rank 1 makes all filters multiples of one."""

    def model():
        return nn.Sequential(nn.Conv2d(groups, 32, 3, groups=groups), nn.Conv2d(32, 32, 3))

    chosen = fp.factorize(model(), fp.FedPara(gamma=0.1))
    assert chosen.state_dict()["0.weight"].shape == (32, 1, 3, 3)
    forced = fp.factorize(model(), fp.FedPara(gamma=0.1), force=True)
    assert torch.linalg.matrix_rank(forced[0].weight.flatten(1)) == 1
    for more, rank in ((fp.FedPara(gamma=0.5), 4), (fp.PFedPara(gamma=0.1), 2)):
        taken = fp.factorize(model(), more)
        assert torch.linalg.matrix_rank(taken[0].weight.flatten(1)) == rank
    with pytest.raises(fp.errors.SchemeError, match="all its filters multiples of one filter"):
        fp.factorize(nn.Conv2d(1, 32, 3), fp.FedPara(gamma=0.1))


def test_pfedpara_reaches_full_rank_at_a_lower_rank():
    """rank(W) <= r (r + 1): 2 is enough for 6, where FedPara needs 3."""
    own, other = (
        plan(nn.Linear(64, 6, bias=False), scheme)[0] for scheme in (fp.PFedPara(1.0), fp.FedPara(1.0))
    )
    assert own.form is not None
    assert own.form.rank == 2
    assert own.form.max_rank == 6
    assert other.form is None
    assert "not of full rank" in other.reason
