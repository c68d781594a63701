"""Many clients' own models on their own test examples, all at once."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.functional import cross_entropy

from fedpara.data import Examples, normalise
from fedpara.engines.local.worker import EVALUATION_BATCH, Score
from fedpara.parameterization import Form, compose_state
from fedpara.state import State


@torch.no_grad()
def scores(
    plain: nn.Module, forms: Mapping[str, Form], states: State, tests: Sequence[Examples]
) -> list[Score]:
    """One score a stacked state. A short test set is padded with its last example, which does not count."""
    weights = vmap(lambda state: compose_state(state, forms))(states)
    sizes = torch.tensor([len(test) for test in tests], device=tests[0].labels.device)
    correct, loss = torch.zeros_like(sizes), torch.zeros(len(tests), device=sizes.device)
    plain.eval()
    try:
        for start in range(0, int(sizes.max()), EVALUATION_BATCH):
            place = torch.arange(start, min(start + EVALUATION_BATCH, int(sizes.max())), device=sizes.device)
            index = [place.clamp(max=len(test) - 1) for test in tests]
            taken = [(test.inputs[i], test.labels[i]) for test, i in zip(tests, index, strict=True)]
            images, labels = (torch.stack(part) for part in zip(*taken, strict=True))
            images = normalise(images.flatten(0, 1), tests[0].mean, tests[0].std).view(images.shape)
            logits = vmap(lambda w, x: functional_call(plain, w, (x,)))(weights, images).float()
            each = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            counts = place < sizes[:, None]
            correct += ((logits.argmax(-1) == labels) & counts).sum(1)
            loss += torch.where(counts, each, 0.0).sum(1)
    finally:
        plain.train()
    return [
        Score(right, len(test), total / len(test))
        for test, right, total in zip(tests, correct.tolist(), loss.tolist(), strict=True)
    ]
