"""Metrics: what a model is scored by. Each sums over examples, so any batch size gives the same score.

    score = finish(sum_i sums_i, sum_i weights_i),   by default their quotient

A metric is a function with the contract of a loss (`losses.py`), and may return k sums per example, [N, k].
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor

from fedpara.tasks import losses
from fedpara.tasks.losses import IGNORED, Loss, PerExample, fit, mae, mse, next_token

BINS, BINS_OF_SEVERAL = 4096, 1000
"""Of auroc, for one output and for each of several, by sigmoid(logit / 4): 0.004 (0.016) wide near 0, 0.15 (0.6) near
20. Logits in the same bin count as equal."""


def _quotient(sums: Tensor, weight: float) -> float:
    return float(sums / weight) if weight else math.nan


@dataclass(frozen=True)
class Metric:
    """`of` (output, target) gives one value per example, or (sums, weights); `finish` turns the totals into a score."""

    of: Loss
    higher_is_better: bool = True
    finish: Callable[[Tensor, float], float] = _quotient


@overload
def metric(of: Loss) -> Metric: ...


@overload
def metric(
    *, higher_is_better: bool = True, finish: Callable[[Tensor, float], float] = _quotient
) -> Callable[[Loss], Metric]: ...


def metric(
    of: Loss | None = None,
    *,
    higher_is_better: bool = True,
    finish: Callable[[Tensor, float], float] = _quotient,
) -> Metric | Callable[[Loss], Metric]:
    """Decorates a function (output, target) as a Metric: `@fp.metric` or `@fp.metric(higher_is_better=False)`.

    The function returns one value per example, or k values, [N, k]. `finish` gets their sums over all examples and the
    number of examples, and returns the score; by default their quotient.
    """
    if of is not None:
        return Metric(of, higher_is_better, finish)
    return lambda of: Metric(of, higher_is_better, finish)


@dataclass(frozen=True)
class Score:
    """A model's scores on some examples: `values` by metric, "loss" included. Empty if there was no example."""

    examples: int
    values: Mapping[str, float] = field(default_factory=dict)


def summed(made: PerExample, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(sum_i sums_i, sum_i weights_i) in float64. `counts` marks the examples that are not padding."""
    sums, weights = made if isinstance(made, tuple) else (made, made.new_ones(len(made)))
    if counts is not None:
        sums = sums.masked_fill(~counts.view(-1, *[1] * (sums.dim() - 1)), 0)  # keeps booleans small
        weights = weights.masked_fill(~counts, 0)
    return sums.double().sum(0), weights.double().sum(0)


class Totals:
    """Adds up one metric over batches."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._sums, self._weight = (torch.zeros((), dtype=torch.float64) for _ in range(2))

    def add(self, sums: Tensor, weight: Tensor) -> None:
        """Adds a batch, from `summed`. The sums stay on their device until `score`, which waits for it."""
        self._sums, self._weight = self._sums + sums, self._weight + weight

    def score(self) -> float:
        return float(self._metric.finish(self._sums.cpu(), float(self._weight)))


def accuracy(output: Tensor, target: Tensor) -> PerExample:
    """The share of correct classes: the largest logit of [N, C, ...], or the sign of one logit per target."""
    output = _one_logit(output, target)
    right = (output > 0) == target.bool() if output.shape == target.shape else output.argmax(1) == target
    if target.dim() == 1:
        return right
    counts = target != IGNORED
    return (right & counts).flatten(1).sum(1), counts.flatten(1).sum(1)


def top_5(output: Tensor, target: Tensor) -> Tensor:
    """The share of examples whose class is among the five largest logits."""
    return (output.topk(min(5, output.shape[1]), 1).indices == target[:, None]).any(1)


def _masks(output: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Where each class from `first` on is predicted and is true, [N, classes, ...]. Of one logit, class 1 alone."""
    output, counts = _one_logit(output, target), (target != IGNORED)[:, None]
    if output.shape == target.shape:
        predicted, true = (output > 0)[:, None], target.bool()[:, None]
    else:
        classes = torch.arange(first, output.shape[1], device=output.device)
        classes = classes.view(-1, *[1] * (target.dim() - 1))
        predicted, true = (part[:, None] == classes for part in (output.argmax(1), target))
    return predicted & counts, true & counts


def _counts(output: Tensor, target: Tensor) -> Tensor:
    """Per example and class: whether it is right, predicted and true, [N, 3 classes]."""
    predicted, true = _masks(output, target, first=0)
    return torch.cat([predicted & true, predicted, true], 1)


def _f1(sums: Tensor, weight: float) -> float:
    """2 right / (predicted + true) of each class; their mean over the classes that occur."""
    right, predicted, true = sums.view(3, -1)
    found = predicted + true
    return float((2 * right / found)[found > 0].mean())


def _ranks(output: Tensor, target: Tensor) -> Tensor:
    """Per example: the bin of each output's logit, among those of class 0 or of class 1, [N, 2 outputs bins]."""
    output = _one_logit(output, target)
    if output.shape == target.shape:
        logits, labels = (part.reshape(len(part), -1) for part in (output, target))
    elif target.dim() == 1 and output.shape[1:] == (2,):
        logits, labels = output[:, 1:] - output[:, :1], target[:, None]
    elif target.dim() == 1 and output.dim() == 2:
        logits, labels = _against_the_rest(output, target)
    else:
        raise ValueError(f"auroc takes {TAKES['auroc']}, and the output is {list(output.shape)}")
    outputs = logits.shape[1]
    bins = BINS if outputs == 1 else BINS_OF_SEVERAL
    place = ((logits / 4).float().sigmoid() * bins).long().clamp(max=bins - 1)
    first = (labels == 1) * outputs + torch.arange(outputs, device=output.device)
    none = torch.zeros(len(output), 2 * outputs * bins, dtype=torch.bool, device=output.device)
    return none.scatter(1, first * bins + place, (labels == 0) | (labels == 1))


def _against_the_rest(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The logit of each class's probability, and whether it is the true class; ignored targets stay what they are."""
    log_p = output.double().log_softmax(1)
    labels = (target[:, None] == torch.arange(output.shape[1], device=target.device)).long()
    return log_p - (-log_p.expm1()).log(), torch.where(target[:, None] == IGNORED, IGNORED, labels)


def _auroc(sums: Tensor, weight: float) -> float:
    """The share of pairs of both classes in which class 1 is the likelier one; half of those in the same bin.

    Of several outputs, the mean over those of which both classes occur.
    """
    bins = BINS if len(sums) == 2 * BINS else BINS_OF_SEVERAL
    zeros, ones = sums.view(2, -1, bins)
    likelier = (ones * (zeros.cumsum(1) - zeros / 2)).sum(1)
    return float((likelier / (zeros.sum(1) * ones.sum(1))).nanmean())


def _one_logit(output: Tensor, target: Tensor) -> Tensor:
    """Logits [N, 1, ...] as [N, ...] if the targets are: a channel of one logit is no class."""
    return output.squeeze(1) if output.dim() == target.dim() + 1 and output.shape[1] == 1 else output


def _moments(output: Tensor, target: Tensor) -> Tensor:
    """Per example and output: the squared error, the target and its square, [N, 3 outputs]."""
    parts = (target, fit(output, target) - target)
    y, error = (part.double().reshape(len(part), -1) for part in parts)  # also [N], which flatten(1) refuses
    return torch.cat([error.square(), y, y.square()], 1)


def _r2(sums: Tensor, weight: float) -> float:
    """1 - residual / variance of each output; their mean. An output whose targets are all equal is left out."""
    residual, total, squares = sums.view(3, -1)
    around_mean = squares - total.square() / weight
    varies = around_mean > 1e-12 * squares
    return float((1 - residual / around_mean)[varies].mean())


def next_token_accuracy(output: Tensor, target: Tensor) -> PerExample:
    """The share of correct tokens. Takes what the loss next-token takes."""
    return accuracy(output[:, :-1].transpose(1, 2), target[:, 1:])


def _overlap(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sizes of prediction, target and intersection, [N, classes]. Class 0 of several is the background: left out."""
    predicted, true = _masks(output, target, first=1)
    return tuple(part.flatten(2).sum(2) for part in (predicted, true, predicted & true))  # type: ignore[return-value]


def dice(output: Tensor, target: Tensor) -> Tensor:
    """2 |A and B| / (|A| + |B|) of a mask, per example; the mean over the classes. 1 if both are empty."""
    a, b, both = _overlap(output, target)
    return torch.where(a + b > 0, 2 * both / (a + b).clamp(min=1), 1.0).mean(1)


def iou(output: Tensor, target: Tensor) -> Tensor:
    """|A and B| / |A or B| of a mask, per example; the mean over the classes. 1 if both are empty."""
    a, b, both = _overlap(output, target)
    return torch.where(a + b > 0, both / (a + b - both).clamp(min=1), 1.0).mean(1)


def _perplexity(sums: Tensor, weight: float) -> float:
    mean = _quotient(sums, weight)
    return math.exp(mean) if mean < 700 else math.inf


METRICS: dict[str, Metric] = {
    "accuracy": Metric(accuracy),
    "top-5": Metric(top_5),
    "f1": Metric(_counts, finish=_f1),
    "auroc": Metric(_ranks, finish=_auroc),
    "r2": Metric(_moments, finish=_r2),
    "mse": Metric(mse, higher_is_better=False),
    "mae": Metric(mae, higher_is_better=False),
    "dice": Metric(dice),
    "iou": Metric(iou),
    "perplexity": Metric(next_token, higher_is_better=False, finish=_perplexity),
    "token-accuracy": Metric(next_token_accuracy),
}
_MASKS = "logits [N, classes, ...] and classes [N, ...] per pixel, or one logit per target"
TAKES = {
    "accuracy": "logits [N, classes, ...] and classes [N, ...], or one logit per target",
    **dict.fromkeys(("top-5", "f1"), "logits [N, classes] and classes [N]"),
    "auroc": "one logit per target, or logits [N, classes] and classes [N]",
    **dict.fromkeys(("r2", "mse", "mae"), losses.TAKES["mse"]),
    "dice": _MASKS,
    "iou": _MASKS,
    **dict.fromkeys(("perplexity", "token-accuracy"), losses.TAKES["next-token"]),
}
"""What each metric takes, for messages."""
FRACTIONS = frozenset({"accuracy", "top-5", "f1", "auroc", "dice", "iou", "token-accuracy", "backdoor"})
"""Metrics between 0 and 1, which are shown in percent; `backdoor` is the score of an attack."""


def shown(name: str, value: float) -> str:
    """A score for people: 93.20% for an accuracy, 0.0123 otherwise."""
    return f"{value:.2%}" if name in FRACTIONS else f"{value:.4g}"


def as_metric(made: Any) -> Metric:
    return made if isinstance(made, Metric) else Metric(made)
