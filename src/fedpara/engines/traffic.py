"""Traffic: a round's clients through the lanes.

Step all to the next client's end, let those that end leave and the next ones in, and on.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedpara.algorithms import Groups
from fedpara.engines.freight import HOST, bring
from fedpara.engines.lanes import Segment
from fedpara.engines.places import Lanes
from fedpara.engines.plan import Plan
from fedpara.state import State

Owned = tuple[State, Groups]
"""Clients' private parameters and their algorithm's variables, stacked, on the device."""
Event = tuple[list[Segment], State, Tensor]


def drive(
    tick: Callable[[], None],
    places: Lanes,
    plan: Plan,
    start: State,
    bring_own: Callable[[Sequence[int]], Owned],
    waits: bool,
) -> Iterator[Event]:
    """Who ended, their stacked states and their summed losses, event by event.

    Who comes and goes is on the device before the first step, and so is what everyone owns; each state `waits` there
    for the last one: a copy in between would wait for the steps. Where a cohort is too large for that, each event
    brings what those own who come in, and takes the states of those who leave to the host.
    """
    events = sorted({0} | {segment.end for segment in plan.segments})
    changes = [
        (
            [segment for segment in plan.segments if segment.end == event],
            [segment for segment in plan.segments if segment.start == event],
        )
        for event in events
    ]

    def index(of: Sequence[int]) -> Tensor:
        return torch.tensor(of, dtype=torch.int64, device=places.losses.device)

    lanes = [[index([s.lane for s in part]) for part in change] for change in changes]
    everyone = bring_own(range(len(plan.segments))) if waits else None
    owners = [index([s.client for s in coming] if waits else range(len(coming))) for _, coming in changes]
    places.counter.zero_()
    for before, event, (leaving, coming), (left, taken), who in zip(
        [0, *events], events, changes, lanes, owners, strict=False
    ):
        for _ in range(event - before):
            tick()
        ended = None
        if leaving:
            state = places.leave(left)
            ended = leaving, state if waits else bring(state, HOST), places.losses.index_select(0, left)
        if coming:
            owned = everyone or bring_own([segment.client for segment in coming])
            places.enter(taken, start, who, *owned)
            del owned
        if ended:
            yield ended
            del ended, state  # the caller has them
