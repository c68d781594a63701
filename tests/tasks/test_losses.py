"""Golden: every named loss equals torch's own. Properties: padding and batch sizes do not change it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fedpara.tasks.losses import IGNORED, LOSSES, mean_loss
from fedpara.tasks.metrics import Metric, Totals, summed

LENGTHS = torch.tensor([5, 2, 4, 6, 3])


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape, top=4):
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(7))


def padded(tokens):
    return torch.where(torch.arange(tokens.shape[1]) < LENGTHS[:, None], tokens, IGNORED)


def next_token(output, target):
    return F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten())


CASES = {
    "cross-entropy": ("cross-entropy", drawn(5, 4), classes(5), F.cross_entropy),
    "cross-entropy of pixels": ("cross-entropy", drawn(5, 4, 3, 2), classes(5, 3, 2), F.cross_entropy),
    "cross-entropy of padded tokens": (
        "cross-entropy",
        drawn(5, 4, 6),
        padded(classes(5, 6)),
        F.cross_entropy,
    ),
    "mse": ("mse", drawn(5, 3), drawn(5, 3, seed=1), F.mse_loss),
    "mse of a column": ("mse", drawn(5, 1), drawn(5, seed=1), lambda o, t: F.mse_loss(o[:, 0], t)),
    "mse of images": ("mse", drawn(5, 1, 2, 3), drawn(5, 1, 2, 3, seed=1), F.mse_loss),
    "mae": ("mae", drawn(5, 3), drawn(5, 3, seed=1), F.l1_loss),
    "mae of a column": ("mae", drawn(5, 1), drawn(5, seed=1), lambda o, t: F.l1_loss(o[:, 0], t)),
    "bce": (
        "bce",
        drawn(5),
        classes(5, top=2),
        lambda o, t: F.binary_cross_entropy_with_logits(o, t.float()),
    ),
    "bce of a mask": (
        "bce",
        drawn(5, 1, 4, 4),
        classes(5, 4, 4, top=2).bool(),
        lambda o, t: F.binary_cross_entropy_with_logits(o[:, 0], t.float()),
    ),
    "next-token": ("next-token", drawn(5, 6, 4), padded(classes(5, 6)), next_token),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_every_named_loss_is_covered():
    assert {name for name, *_ in CASES.values()} == {*LOSSES}


def test_a_named_loss_is_torchs_mean(case):
    name, output, target, reference = case
    torch.testing.assert_close(mean_loss(LOSSES[name](output, target)), reference(output, target))


def test_a_loss_and_its_gradient_ignore_padded_examples(case):
    name, output, target, _ = case
    rows = torch.tensor([0, 1, 2, 3, 4, 0, 0])
    counts = torch.arange(7) < 5
    plain = output.clone().requires_grad_()
    longer = output.clone().requires_grad_()
    expected = mean_loss(LOSSES[name](plain, target))
    made = mean_loss(LOSSES[name](longer[rows], target[rows]), counts)
    torch.testing.assert_close(made, expected)
    expected.backward()
    made.backward()
    torch.testing.assert_close(longer.grad, plain.grad)


@settings(max_examples=20, deadline=None)
@given(cut=st.integers(1, 4), key=st.sampled_from(sorted(CASES)))
def test_a_measured_loss_does_not_depend_on_the_batches(cut, key):
    name, output, target, reference = CASES[key]
    total = Totals(Metric(LOSSES[name]))
    for rows in (slice(cut), slice(cut, None)):
        total.add(*summed(LOSSES[name](output[rows], target[rows])))
    assert total.score() == pytest.approx(float(reference(output, target)), rel=1e-5)


def test_a_batch_without_a_token_that_counts_has_loss_zero():
    target = torch.full((2, 6), IGNORED)
    assert mean_loss(LOSSES["next-token"](drawn(2, 6, 4), target)) == 0


def test_targets_of_another_precision_do_not_change_a_loss():
    output, target = drawn(5, 3), drawn(5, 3, seed=1)
    for name in ("mse", "mae", "bce"):
        half = LOSSES[name](output, target.clamp(0, 1).double())
        torch.testing.assert_close(half.float(), LOSSES[name](output, target.clamp(0, 1)))


@pytest.mark.parametrize("integer", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_classes_may_be_integers_of_any_size(integer):
    output, target = drawn(6, 3), torch.arange(6) % 3
    made = LOSSES["cross-entropy"](output, target.to(integer))
    torch.testing.assert_close(made, LOSSES["cross-entropy"](output, target))
