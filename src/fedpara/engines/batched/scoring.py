"""Scores many clients' own models on their own test examples at once."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedpara.data import Examples, normalise
from fedpara.engines.device import widened
from fedpara.engines.local.worker import EVALUATION_BATCH, Worker
from fedpara.engines.transfer import HOST, stack_on
from fedpara.errors import in_a_line
from fedpara.parameterization import Form, compose_state
from fedpara.state import State
from fedpara.tasks import Score, Task
from fedpara.tasks.metrics import Totals, summed
from fedpara.trees import Tree, arguments, stack, to_device


def scores_in_lanes(
    plain: nn.Module,
    forms: Mapping[str, Form],
    scorer: Worker,
    states: Sequence[State],
    tests: Sequence[Examples],
    device: torch.device,
    lanes: int,
    note: Callable[[str], None],
) -> list[Score]:
    """One score per state on its own test examples, `lanes` at a time.

    A model that cannot be scored in lanes is scored by `scorer`; `note` is then told the reason.
    """
    found = [Score(0)] * len(states)
    able = [position for position, test in enumerate(tests) if len(test)]
    for start in range(0, len(able), lanes):
        chosen = able[start : start + lanes]
        stacked = stack_on([states[position] for position in chosen], device)
        there = [tests[position].on(device) for position in chosen]
        try:
            scored = scores(plain, forms, stacked, there, scorer.task)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            plain.train()
            scored = [scorer.evaluate(states[p], test) for p, test in zip(chosen, there, strict=True)]
            note(f"clients' own models are scored one after another: {in_a_line(error)}")
        for position, score in zip(chosen, scored, strict=True):
            found[position] = score
    return found


@torch.no_grad()
def scores(
    plain: nn.Module, forms: Mapping[str, Form], states: State, tests: Sequence[Examples], task: Task
) -> list[Score]:
    """One score per stacked state. Short test sets are padded with their last example, which does not count."""
    weights = vmap(lambda state: compose_state(state, forms))(states)
    totals = [{name: Totals(metric) for name, metric in task.scored.items()} for _ in tests]
    longest = max(map(len, tests))

    def measured(
        weights: State, inputs: Tree, targets: Tree, counts: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        output = widened(functional_call(plain, weights, *arguments(inputs)))
        return {name: summed(metric.of(output, targets), counts) for name, metric in task.scored.items()}

    plain.eval()
    try:
        for start in range(0, longest, EVALUATION_BATCH):
            place = torch.arange(start, min(start + EVALUATION_BATCH, longest))
            parts = [test.subset(place.clamp(max=len(test) - 1)) for test in tests]
            inputs, targets = stack([part.inputs for part in parts]), stack([part.targets for part in parts])
            if tests[0].mean is not None:
                flat = normalise(inputs.flatten(0, 1), tests[0].mean, tests[0].std)
                inputs = flat.view(inputs.shape)
            else:
                inputs = normalise(inputs, None, None)
            counts = place < torch.tensor([[len(test)] for test in tests])
            made = vmap(measured)(weights, inputs, targets, counts.to(tests[0].device))
            for name, (sums, weight) in to_device(made, HOST).items():
                for lane, own in enumerate(totals):
                    own[name].add(sums[lane], weight[lane])
    finally:
        plain.train()
    return [
        Score(len(test), {name: total.score() for name, total in own.items()})
        for test, own in zip(tests, totals, strict=True)
    ]
