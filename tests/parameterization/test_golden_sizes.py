"""Golden: the paper's parameter counts, Table 1 and the gamma table of appendix C.2."""

import pytest
import torch

import fedpara as fp
from fedpara import models
from fedpara.parameterization import plan, write

GAMMA_TABLE = {
    0.1: (1.55, 1.59),
    0.2: (2.33, 2.38),
    0.3: (3.31, 3.36),
    0.4: (4.45, 4.50),
    0.5: (5.79, 5.84),
    0.6: (7.33, 7.38),
    0.7: (9.01, 9.05),
    0.8: (10.90, 10.94),
    0.9: (12.92, 12.96),
}


def parameters(model: torch.nn.Module, scheme, where=None) -> int:
    return sum(choice.parameters for choice in plan(model, scheme, where))


@pytest.fixture(scope="module")
def vgg():
    return {classes: models.vgg16(classes=classes) for classes in (10, 100)}


@pytest.mark.parametrize("gamma", GAMMA_TABLE)
@pytest.mark.parametrize(("classes", "column"), [(10, 0), (100, 1)])
def test_gamma_table(vgg, gamma, classes, column):
    count = parameters(vgg[classes], fp.FedPara(gamma=gamma), models.convolutions)
    assert abs(count / 1e6 - GAMMA_TABLE[gamma][column]) < 0.02


def test_the_exact_count_the_headline_rests_on(vgg):
    assert parameters(vgg[10], fp.FedPara(gamma=0.1), models.convolutions) == 1_545_442
    assert sum(p.numel() for p in vgg[10].parameters()) == 15_253_578


def test_a_factorized_model_holds_what_the_plan_said():
    model = models.vgg16(classes=10)
    expected = parameters(model, fp.FedPara(gamma=0.1), models.convolutions)
    fp.factorize(model, fp.FedPara(gamma=0.1), models.convolutions)
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize(
    ("scheme", "shape", "count", "rank"),
    [
        (fp.FedPara(rank=16), (256, 256), 16_384, 256),
        (fp.LowRank(rank=32), (256, 256), 16_384, 32),
        (fp.FedPara(rank=16, conv="reshape"), (256, 256, 3, 3), 81_920, 256),
        (fp.FedPara(rank=16), (256, 256, 3, 3), 20_992, 256),
    ],
)
def test_table_1(scheme, shape, count, rank):
    form = write(scheme, shape)
    assert (form.parameters, form.max_rank) == (count, rank)


def test_low_rank_is_never_larger_than_the_fedpara_it_is_compared_with():
    for shape in ((256, 256), (1024, 8), (64, 3, 3, 3), (512, 512, 3, 3), (512, 256, 1, 1)):
        for gamma in (0.0, 0.1, 0.5, 0.9):
            low, ours = write(fp.LowRank(gamma=gamma), shape), write(fp.FedPara(gamma=gamma), shape)
            assert low.parameters <= ours.parameters


def test_lstm_ratio():
    model = models.lstm(weight_norm=False)
    original = sum(p.numel() for p in model.parameters())
    ours = parameters(model, fp.FedPara(gamma=0.0), models.recurrent)
    assert (original, ours) == (819_920, 154_368)
    assert round(ours / original, 3) == 0.188


def test_personalisation_sizes():
    model = models.mlp(inputs=784, hidden=256, classes=62)
    original = sum(p.numel() for p in model.parameters())
    fp.factorize(model, fp.PFedPara(gamma=0.5), models.linears)
    state = model.state_dict()
    private = fp.parameterization.private(model)
    shared = sum(tensor.numel() for name, tensor in state.items() if name not in private)
    ranks = [form.rank for form in fp.parameterization.forms(model).values()]
    assert (original, ranks, shared) == (216_894, [56, 16], 63_646)
    assert round(original / shared, 2) == 3.41
    assert original - 256 * 62 - 62 == 200_960


def test_resnet_keeps_full_rank_early_and_shrinks_the_rest():
    scheme = fp.FedPara(gamma=0.1)
    model = models.resnet18(classes=10)
    where = models.resnet_layers(fp.FedPara(gamma=1.0), scheme)
    choices = {c.name: c for c in plan(model, scheme, where)}
    early = [c for c in choices.values() if c.form and c.form.scheme.gamma == 1.0]
    assert "conv1.weight" in {c.name for c in early} | {n for n, c in choices.items() if c.form is None}
    assert sum(c.parameters for c in choices.values()) < 0.3 * sum(c.weight.numel() for c in choices.values())
