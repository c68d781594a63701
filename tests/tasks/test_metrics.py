"""Golden: every named metric equals scikit-learn's. Properties: batch sizes and padding do not change a score."""

import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch.nn import functional as F

import fedpara as fp
from fedpara.tasks.losses import IGNORED
from fedpara.tasks.metrics import METRICS, Totals, summed


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape, top):
    return torch.randint(top, shape, generator=torch.Generator().manual_seed(3))


def per_mask(score):
    """The mean over examples of a scikit-learn score of their foreground."""

    def mean(output, target):
        found = (output.reshape(target.shape) > 0).flatten(1).int().numpy()
        pairs = zip(target.flatten(1).int().numpy(), found, strict=True)
        return np.mean([score(true, one, zero_division=1.0) for true, one in pairs])

    return mean


def per_class(score):
    """The mean over examples and over the classes but the background."""

    def mean(output, target):
        found = output.argmax(1).flatten(1).numpy()
        options = {"labels": range(1, output.shape[1]), "average": "macro", "zero_division": 1.0}
        pairs = zip(target.flatten(1).numpy(), found, strict=True)
        return np.mean([score(true, one, **options) for true, one in pairs])

    return mean


def perplexity(output, target):
    return math.exp(F.cross_entropy(output[:, :-1].flatten(0, 1), target[:, 1:].flatten()))


def token_accuracy(output, target):
    counts = target[:, 1:] != IGNORED
    return sk.accuracy_score(target[:, 1:][counts], output[:, :-1].argmax(2)[counts])


TOKENS = classes(6, 5, top=4).index_fill(1, torch.tensor([4]), IGNORED)
MASKS = classes(6, 4, 4, top=2)
EMPTY = MASKS.clone().index_fill_(0, torch.tensor([0, 3]), 0)
BINARY = torch.tensor([1, 0, 1, 1, 0, 1])
CASES = {
    "accuracy": (
        "accuracy",
        drawn(6, 4),
        classes(6, top=4),
        lambda o, t: sk.accuracy_score(t, o.argmax(1)),
    ),
    "accuracy of pixels": (
        "accuracy",
        drawn(6, 4, 3, 3),
        classes(6, 3, 3, top=4),
        lambda o, t: sk.accuracy_score(t.flatten(), o.argmax(1).flatten()),
    ),
    "accuracy of one logit": (
        "accuracy",
        drawn(6),
        classes(6, top=2),
        lambda o, t: sk.accuracy_score(t, o > 0),
    ),
    "accuracy of a column": (
        "accuracy",
        torch.tensor([[2.0], [-1.0], [3.0], [1.0], [0.5], [-2.0]]),
        torch.tensor([1, 0, 1, 1, 0, 1]),
        lambda o, t: sk.accuracy_score(t, o[:, 0] > 0),
    ),
    "top-5": (
        "top-5",
        drawn(6, 9),
        classes(6, top=9),
        lambda o, t: sk.top_k_accuracy_score(t, o.numpy(), k=5, labels=range(9)),
    ),
    "f1": ("f1", drawn(6, 4), classes(6, top=3), lambda o, t: sk.f1_score(t, o.argmax(1), average="macro")),
    "f1 of one logit": ("f1", drawn(6, 1), BINARY, lambda o, t: sk.f1_score(t, o[:, 0] > 0)),
    "auroc": ("auroc", drawn(6), BINARY, lambda o, t: sk.roc_auc_score(t, o)),
    "auroc of a column": ("auroc", drawn(6, 1), BINARY, lambda o, t: sk.roc_auc_score(t, o[:, 0])),
    "auroc of two classes": (
        "auroc",
        drawn(6, 2),
        BINARY,
        lambda o, t: sk.roc_auc_score(t, o.softmax(1)[:, 1]),
    ),
    "auroc of classes": (
        "auroc",
        drawn(6, 3),
        torch.tensor([0, 1, 2, 2, 1, 0]),
        lambda o, t: sk.roc_auc_score(t, o.softmax(1), multi_class="ovr"),
    ),
    "auroc of labels": (
        "auroc",
        drawn(6, 2),
        torch.stack([BINARY, 1 - BINARY.roll(1)], 1),
        lambda o, t: sk.roc_auc_score(t, o),
    ),
    "r2": ("r2", drawn(6), drawn(6, seed=1), lambda o, t: sk.r2_score(t, o)),
    "r2 of a column": ("r2", drawn(6, 1), drawn(6, seed=1), lambda o, t: sk.r2_score(t, o[:, 0])),
    "r2 of several": (
        "r2",
        drawn(6, 3),
        drawn(6, 3, seed=1),
        lambda o, t: sk.r2_score(t, o),
    ),
    "mse": ("mse", drawn(6, 1), drawn(6, seed=1), lambda o, t: sk.mean_squared_error(t, o)),
    "mae": ("mae", drawn(6, 3), drawn(6, 3, seed=1), lambda o, t: sk.mean_absolute_error(t, o)),
    "dice": ("dice", drawn(6, 4, 4), EMPTY, per_mask(sk.f1_score)),
    "dice of one channel": ("dice", drawn(6, 1, 4, 4), EMPTY, per_mask(sk.f1_score)),
    "dice of classes": ("dice", drawn(6, 3, 4, 4), classes(6, 4, 4, top=3), per_class(sk.f1_score)),
    "iou": ("iou", drawn(6, 4, 4), EMPTY, per_mask(sk.jaccard_score)),
    "iou of one channel": ("iou", drawn(6, 1, 4, 4), EMPTY, per_mask(sk.jaccard_score)),
    "iou of classes": ("iou", drawn(6, 3, 4, 4), classes(6, 4, 4, top=3), per_class(sk.jaccard_score)),
    "perplexity": ("perplexity", drawn(6, 5, 4), TOKENS, perplexity),
    "token-accuracy": (
        "token-accuracy",
        drawn(6, 5, 4),
        TOKENS,
        token_accuracy,
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def measured(name, batches):
    total = Totals(METRICS[name])
    for output, target, counts in batches:
        total.add(*summed(METRICS[name].of(output, target), counts))
    return total.score()


def test_every_named_metric_is_covered():
    assert {name for name, *_ in CASES.values()} == {*METRICS}


def test_a_named_metric_is_the_references(case):
    name, output, target, reference = case
    score = measured(name, [(output, target, None)])
    assert score == pytest.approx(float(reference(output, target)), rel=1e-5)


@pytest.mark.parametrize("size", [1, 4])
def test_a_score_does_not_depend_on_the_batches(case, size):
    name, output, target, reference = case
    batches = zip(output.split(size), target.split(size), [None] * 6, strict=False)
    assert measured(name, batches) == pytest.approx(float(reference(output, target)), rel=1e-5)


def test_a_score_ignores_padded_examples(case):
    name, output, target, reference = case
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])
    score = measured(name, [(output[rows], target[rows], torch.arange(8) < 6)])
    assert score == pytest.approx(float(reference(output, target)), rel=1e-5)


def test_empty_masks_that_are_found_empty_score_one():
    output, target = torch.full((2, 1, 4, 4), -1.0), torch.zeros(2, 1, 4, 4)
    assert measured("dice", [(output, target, None)]) == measured("iou", [(output, target, None)]) == 1


@pytest.mark.parametrize("name", ["accuracy", "dice", "iou"])
def test_ignored_pixels_do_not_count(name):
    target = classes(6, 4, 4, top=3)
    output = F.one_hot(target, 3).movedim(3, 1).float()
    output[:, :, 2:] = output[:, :, 2:].flip(1)
    target[:, 2:] = IGNORED
    assert measured(name, [(output, target, None)]) == 1


@pytest.mark.parametrize("scale", [0.5, 3.0, 10.0])
def test_the_bins_of_several_outputs_hardly_change_auroc(scale):
    target = classes(5000, top=4)
    output = scale * (drawn(5000, 4) + F.one_hot(target, 4))
    expected = sk.roc_auc_score(target, output.double().softmax(1), multi_class="ovr")
    assert measured("auroc", [(output, target, None)]) == pytest.approx(expected, abs=2e-3)


def test_a_class_that_does_not_occur_is_left_out_of_auroc():
    target = classes(50, top=3)
    output = drawn(50, 4)
    expected = [sk.roc_auc_score(target == c, output.double().softmax(1)[:, c]) for c in range(3)]
    assert measured("auroc", [(output, target, None)]) == pytest.approx(sum(expected) / 3, abs=2e-3)


@pytest.mark.parametrize("scale", [0.5, 3.0, 10.0])
def test_the_bins_of_auroc_hardly_change_it(scale):
    target = classes(5000, top=2)
    output = scale * (drawn(5000) + target)
    expected = sk.roc_auc_score(target, output)
    assert measured("auroc", [(output, target, None)]) == pytest.approx(expected, abs=1e-3)


def test_scores_of_a_single_class():
    ones = torch.ones(3, dtype=torch.long)
    assert math.isnan(measured("auroc", [(drawn(3), ones, None)]))
    assert measured("f1", [(torch.ones(3), ones, None)]) == 1


def test_ignored_examples_do_not_count_in_classes():
    target = torch.where(torch.arange(6) < 4, BINARY, IGNORED)
    for name, output in (("f1", drawn(6, 2)), ("auroc", drawn(6, 2)), ("auroc", drawn(6, 3))):
        alone = measured(name, [(output[:4], target[:4], None)])
        assert measured(name, [(output, target, None)]) == alone


def test_r2_leaves_out_an_output_whose_targets_are_equal():
    output, target = drawn(6, 3), drawn(6, 3, seed=1)
    target[:, 1] = 0.1
    expected = sk.r2_score(target[:, [0, 2]], output[:, [0, 2]])
    assert measured("r2", [(output, target, None)]) == pytest.approx(expected, rel=1e-5)


def test_r2_of_constant_targets_is_no_number():
    assert math.isnan(measured("r2", [(drawn(3), torch.ones(3), None)]))


def test_directions():
    lower = {name for name, metric in METRICS.items() if not metric.higher_is_better}
    assert lower == {"mse", "mae", "perplexity"}


def test_a_decorated_function_is_a_metric():
    @fp.metric(higher_is_better=False, finish=lambda sums, weight: math.sqrt(sums / weight))
    def rmse(output, target):
        return (output - target).square()

    @fp.metric
    def near(output, target):
        return (output - target).abs() < 1

    assert isinstance(near, fp.tasks.Metric)
    output, target = drawn(5), drawn(5, seed=1)
    total = Totals(rmse)
    total.add(*summed(rmse.of(output, target)))
    assert not rmse.higher_is_better
    assert total.score() == pytest.approx(sk.root_mean_squared_error(target, output), rel=1e-6)
