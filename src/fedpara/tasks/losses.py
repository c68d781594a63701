"""Losses: functions (output, target) -> one value per example, [N], or a pair (sums, weights), each [N].

    loss of a batch = sum_i sums_i / sum_i weights_i,   weights_i = 1 if only values are returned

One value per example lets every engine pad a batch, and average it, without knowing the loss. A loss over tokens or
pixels, of which an example has a varying number, returns a pair: the sum over the tokens and their number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpara.trees import Tree

IGNORED = -100
"""A target of this value does not count, as in torch's cross_entropy."""

PerExample = Tensor | tuple[Tensor, Tensor]
Loss = Callable[[Any, Any], PerExample]


def cross_entropy(output: Tensor, target: Tensor) -> PerExample:
    """Logits [N, C] and classes [N]; or one more dimension per pixel or token: [N, C, ...] and [N, ...]."""
    if target.dtype in (torch.int32, torch.int16, torch.int8):  # torch takes int64 and uint8 only
        target = target.long()
    each = F.cross_entropy(output, target, reduction="none", ignore_index=IGNORED)
    return each if target.dim() == 1 else _over_elements(each, target)


def next_token(output: Tensor, target: Tensor) -> PerExample:
    """Logits [N, L, V] and the token ids themselves [N, L]: position t predicts token t + 1. -100 marks padding."""
    return cross_entropy(output[:, :-1].transpose(1, 2), target[:, 1:])


def mse(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error over an example's numbers."""
    return _mean_per_example((fit(output, target) - target).square())


def mae(output: Tensor, target: Tensor) -> Tensor:
    """The mean absolute error over an example's numbers."""
    return _mean_per_example((fit(output, target) - target).abs())


def bce(output: Tensor, target: Tensor) -> Tensor:
    """Binary cross-entropy of logits: targets 0 or 1 (or between) of the output's shape, or [N] for [N, 1]."""
    logits = fit(output, target)
    return _mean_per_example(F.binary_cross_entropy_with_logits(logits, target.to(logits), reduction="none"))


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "mse": mse,
    "mae": mae,
    "bce": bce,
    "next-token": next_token,
}

_ALIKE = "an output of the targets' shape, or [N, 1] for targets [N]"
TAKES = {
    "cross-entropy": "logits [N, classes, ...] and classes [N, ...]",
    "mse": _ALIKE,
    "mae": _ALIKE,
    "bce": _ALIKE,
    "next-token": "logits [N, length, vocabulary] and token ids [N, length]",
}
"""What each loss takes, for messages."""


def mean_loss(made: PerExample, counts: Tensor | None = None) -> Tensor:
    """The loss of a batch, from what a loss returned. `counts` marks the examples that are not padding."""
    if isinstance(made, tuple):
        sums, weights = made
        if counts is not None:
            sums, weights = (torch.where(counts, part, 0.0) for part in (sums, weights.to(sums)))
        return sums.sum() / weights.sum().clamp(min=1e-12)
    if counts is None:
        return made.mean()
    return torch.where(counts, made, 0.0).sum() / counts.sum().clamp(min=1)


def problem_of(made: Any, count: int, what: str) -> str:
    """Why `made` is not one value per example for `count` examples, in a sentence, or ""."""
    parts: Tree = made if isinstance(made, tuple) and len(made) == 2 else (made,)
    advice = "one value per example, such as with reduction='none', or a pair (sums, weights) of such tensors"
    for part in parts:
        if not isinstance(part, Tensor):
            return f"{what} returned {type(part).__name__}: expected {advice}."
        if part.shape[:1] != (count,) or (part.dim() > 1 and what.startswith("the loss")):
            shape = list(part.shape) if part.dim() else "a single number"
            return f"{what} returned {shape} for {count} examples: expected {advice}."
    return ""


def fit(output: Tensor, target: Tensor) -> Tensor:
    """The output in the target's shape: [N, 1] fits [N]. Broadcasting the two would give [N, N]."""
    return output if output.shape == target.shape else output.reshape(target.shape)


def _mean_per_example(each: Tensor) -> Tensor:
    return each if each.dim() == 1 else each.flatten(1).mean(1)


def _over_elements(each: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return each.flatten(1).sum(1), (target != IGNORED).flatten(1).sum(1).to(each.dtype)
