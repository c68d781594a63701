"""Starting factors: the deviation of the composed weight, by simulation, and custom initialisers."""

from copy import deepcopy
from math import prod, sqrt

import pytest
import torch
from torch import nn

import fedpara as fp
from fedpara import models
from fedpara.errors import SchemeError
from fedpara.parameterization import calibrated, fan_out, forms, he, write
from fedpara.parameterization.initialise import PRIVATE_SCALE, named

KINDS = {
    "fedpara": lambda gamma: fp.FedPara(gamma=gamma),
    "tanh": lambda gamma: fp.FedPara(gamma=gamma, nonlinearity="tanh"),
    "reshape": lambda gamma: fp.FedPara(gamma=gamma, conv="reshape"),
    "pfedpara": lambda gamma: fp.PFedPara(gamma=gamma),
    "pfedpara tanh": lambda gamma: fp.PFedPara(gamma=gamma, nonlinearity="tanh"),
    "lowrank": lambda gamma: fp.LowRank(gamma=gamma),
}


def weights(*nets: nn.Module) -> list[tuple[int, ...]]:
    return sorted({tuple(p.shape) for net in nets for p in net.parameters() if p.dim() >= 2})


SHAPES = weights(
    models.vgg16(), models.resnet18(), models.lstm(), models.mlp(), models.mlp(classes=62), models.cnn()
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rms(w: torch.Tensor) -> float:
    return float(w.square().mean().sqrt())


@pytest.mark.parametrize(
    ("kind", "gamma"),
    [(kind, gamma) for kind in ("fedpara", "tanh", "pfedpara", "lowrank") for gamma in (0.1, 0.5, 0.9)]
    + [("reshape", 0.5), ("pfedpara tanh", 0.5)],
)
def test_calibrated_composes_at_he_scale_for_every_shape_of_the_models(kind, gamma):
    assert {(512, 512, 3, 3), (64, 3, 3, 3), (128, 64, 1, 1), (1024, 8), (256, 784), (62, 256)} <= set(SHAPES)
    for shape in SHAPES:
        form = write(KINDS[kind](gamma), shape)
        he = sqrt(2 / prod(shape[1:]))
        for seed in range(1 if form.dense_parameters > 2**15 else 3):
            w = form.compose(calibrated(form, seeded(seed)))
            assert rms(w) == pytest.approx(he, rel=0.1), (shape, seed)


def test_the_deviation_of_the_private_weight_can_be_chosen():
    form = write(fp.PFedPara(gamma=0.5), (62, 256))
    for scale in (0.3, 2.0):
        factors = named(f"private:{scale}")(form, seeded())
        assert rms(form.inner(list(factors))[1]) == pytest.approx(scale, rel=1e-3)
        assert rms(form.compose(factors)) == pytest.approx(sqrt(2 / 256), rel=0.01)
    for wrong in ("private", "private:0", "private:1,2"):
        with pytest.raises(SchemeError, match="starts pFedPara's W2"):
            named(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(8, 1), (6, 2), (9, 1, 1, 1), (2, 3)])
def test_calibrated_where_tanh_cannot_reach_he_scale(kind, shape):
    """fan_in 1 needs a deviation of 1.41, but tanh stays below 1. The factors must not saturate it."""
    form = write(KINDS[kind](0.5), shape)
    w = form.compose(calibrated(form, seeded()))
    he = sqrt(2 / prod(shape[1:]))
    if form.scheme.nonlinearity and he >= 0.9:
        assert 0.5 < rms(w) <= he
        assert max(float(f.abs().max()) for f in calibrated(form, seeded())) < 100
    else:
        assert rms(w) == pytest.approx(he, rel=0.1)


@pytest.mark.parametrize("shape", [(256, 784), (128, 64, 3, 3)])
def test_calibrated_shares(shape):
    """FedPara: equal inner weights. pFedPara: W2 at PRIVATE_SCALE, and W1 carries the rest."""
    form = write(fp.FedPara(gamma=0.5), shape)
    w1, w2 = form.inner(calibrated(form, seeded()))
    assert rms(w1) == pytest.approx(rms(w2), rel=1e-3)
    form = write(fp.PFedPara(gamma=0.5), shape)
    w1, w2 = form.inner(calibrated(form, seeded()))
    assert rms(w2) == pytest.approx(PRIVATE_SCALE, rel=1e-3)
    assert rms(w1) < rms(w2)
    factors = dict(zip(form.factors, calibrated(form, seeded()), strict=True))
    for x, y in (("x1", "y1"), ("x2", "y2")):
        assert float(factors[x].std()) == pytest.approx(float(factors[y].std()), rel=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_calibrated_of_a_single_entry(kind):
    form = write(KINDS[kind](0.5), (1, 1))
    for seed in range(20):
        assert all(f.isfinite().all() and f.ne(0).all() for f in calibrated(form, seeded(seed)))


@pytest.mark.parametrize("kind", ["fedpara", "reshape", "lowrank"])
def test_fan_out_deviations(kind):
    """X, Y: sqrt(2/r). T: sqrt(2/(k r)), k the kernel's area."""
    form = write(KINDS[kind](0.5), (512, 512, 3, 3))
    for name, factor in zip(form.factors, fan_out(form, seeded()), strict=True):
        area = 9 if name.startswith("t") else 1
        assert float(factor.std()) == pytest.approx(sqrt(2 / (form.rank * area)), rel=0.02), name


def test_fan_out_of_a_matrix():
    form = write(fp.FedPara(rank=64), (1024, 512))
    for factor in fan_out(form, seeded()):
        assert float(factor.std()) == pytest.approx(sqrt(2 / 64), rel=0.02)
    w1, _ = form.inner(fan_out(form, seeded()))
    assert rms(w1) == pytest.approx(2 / sqrt(64), rel=0.05)


@pytest.mark.parametrize(
    ("layer", "scheme", "init"),
    [
        (nn.Conv2d(24, 20, 3), fp.FedPara(gamma=0.5), fan_out),
        (nn.Conv2d(24, 20, 3), fp.FedPara(gamma=0.5, conv="reshape"), calibrated),
        (nn.Linear(24, 20), fp.FedPara(gamma=0.5), calibrated),
        (nn.Linear(24, 20), fp.PFedPara(gamma=0.5), calibrated),
        (nn.Conv2d(24, 20, 3), fp.PFedPara(gamma=0.5), calibrated),
        (nn.Linear(24, 20), fp.LowRank(gamma=0.5), calibrated),
    ],
)
def test_the_start_of_each_scheme_and_form(layer, scheme, init):
    layer = fp.factorize(deepcopy(layer), scheme, force=True, generator=seeded(3))
    (form,) = forms(layer).values()
    for got, expected in zip(list(layer.state_dict().values())[1:], init(form, seeded(3)), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("init", ["fan_out", "calibrated", fan_out, None])
def test_a_generator_makes_it_reproducible(init):
    def start(seed):
        torch.manual_seed(99)
        net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Linear(16, 12))
        before = torch.get_rng_state()
        state = fp.factorize(
            net, fp.FedPara(gamma=0.1), force=True, init=init, generator=seeded(seed)
        ).state_dict()
        assert torch.equal(torch.get_rng_state(), before)
        return state

    one, same, other = start(1), start(1), start(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if ".x" in name or ".t" in name)


def test_he_gives_each_factor_the_deviation_of_torch():
    form = write(fp.FedPara(gamma=0.5), (128, 256, 3, 3))
    for (name, shape), factor in zip(form.factors.items(), he(form, seeded()), strict=True):
        expected = nn.init.kaiming_normal_(torch.empty(shape), mode="fan_out", nonlinearity="relu")
        assert rms(factor) == pytest.approx(rms(expected), rel=0.03), name


@pytest.mark.parametrize(("name", "gains"), [("he:1.4", (1.4, 1.4)), ("fan_out:0.5,2", (0.5, 2.0))])
def test_gains_scale_the_factors_and_the_core(name, gains):
    def start(init):
        layer = fp.factorize(nn.Conv2d(64, 64, 3), fp.FedPara(gamma=0.1), init=init, generator=seeded())
        return layer.state_dict()

    plain = start(name.partition(":")[0])
    for key, tensor in start(name).items():
        if key != "bias":
            torch.testing.assert_close(tensor, plain[key] * gains[".t" in key])


def test_without_a_generator_the_global_seed_decides():
    def start(seed):
        torch.manual_seed(seed)
        return fp.factorize(nn.Linear(24, 20), fp.FedPara(gamma=0.1)).state_dict()

    one, same, other = start(1), start(1), start(2)
    assert torch.equal(one["weight.x1"], same["weight.x1"])
    assert not torch.equal(one["weight.x1"], other["weight.x1"])


def test_the_dtype_is_kept():
    layer = fp.factorize(nn.Linear(24, 20).to(torch.bfloat16), fp.FedPara(gamma=0.1))
    assert {t.dtype for t in layer.state_dict().values()} == {torch.bfloat16}


def test_a_custom_initialiser():
    seen = []

    def ones(form, generator):
        seen.append((form.shape, generator))
        return [torch.full(shape, i + 1.0) for i, shape in enumerate(form.factors.values())]

    generator = seeded()
    net = nn.Sequential(nn.Linear(24, 20), nn.Linear(20, 24))
    fp.factorize(net, fp.FedPara(rank=3), init=ones, generator=generator)
    assert seen == [((20, 24), generator), ((24, 20), generator)]
    assert net[0].weight.eq(3 * (1 * 2) * 3 * (3 * 4)).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda form, g: fan_out(form, g)[:3],
        lambda form, g: [f.T for f in fan_out(form, g)],
        lambda form, g: fan_out(form, g)[::-1],
    ],
    ids=["too few", "transposed", "another order"],
)
def test_an_initialiser_that_returns_wrong_shapes(wrong):
    layer = nn.Linear(24, 20)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(
        SchemeError, match=r"weight: the initialiser returned .* expected \{'x1': \(20, 3\), 'y1': \(24, 3\)"
    ):
        fp.factorize(layer, fp.FedPara(rank=3), init=wrong)
    assert type(layer) is nn.Linear
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
