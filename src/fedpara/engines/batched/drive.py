"""drive: trains a round's clients in the lanes.

It steps all lanes until a client ends, and swaps finished clients for waiting ones, until all are done.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedpara.algorithms import Variables
from fedpara.engines.batched.lane_state import LaneState, lanes_of, slots_of
from fedpara.engines.batched.packing import Segment
from fedpara.engines.batched.round_plan import RoundPlan
from fedpara.engines.local.trained_row import TrainedRow, in_rows
from fedpara.engines.local.worker import Trained
from fedpara.engines.session import Session
from fedpara.engines.transfer import HOST, fetch, move
from fedpara.state import State, device_of

Event = tuple[list[Segment], State, Tensor]


def drive(
    tick: Callable[[], None],
    lane_state: LaneState,
    plan: RoundPlan,
    start: State,
    load_owned: Callable[[Sequence[int]], list[Variables]],
    waits: bool,
    with_slots: bool,
) -> Iterator[Event]:
    """Yields (segments that ended, their stacked states, their summed losses), event by event.

    The last event's states may be views of the lanes: read them before the next round. `load_owned` gives the
    clients' own tensors for their lanes, on the device, in the order of the given positions.
    With `waits`, the clients' memories are on the device before the first step, and trained states stay there until
    the last step: a copy in between would wait for the steps. A cohort may be too large for that. Then each event
    loads the memories of the entering clients and moves the states of the leaving ones to the host.
    """
    events = sorted({0} | {segment.end for segment in plan.segments})
    changes = [
        (
            [segment for segment in plan.segments if segment.end == event],
            [segment for segment in plan.segments if segment.start == event],
        )
        for event in events
    ]

    device = lane_state.losses.device
    lanes = [[lanes_of([s.lane for s in part], device) for part in change] for change in changes]
    everyone = load_owned(range(len(plan.segments))) if waits else None
    lane_state.feed.counter.zero_()
    for before, event, (leaving, coming), (left, taken) in zip(
        [0, *events], events, changes, lanes, strict=False
    ):
        for _ in range(event - before):
            tick()
        ended = None
        if leaving:
            state, losses = lane_state.leave(left, with_slots, last=event == events[-1])
            ended = leaving, state if waits else move(state, HOST), losses
        if coming:
            clients = [segment.client for segment in coming]
            owned = load_owned(clients) if everyone is None else [everyone[client] for client in clients]
            lane_state.enter(taken, start, owned)
            del owned
        if ended:
            yield ended
            del ended, state  # the caller owns them now


def joined(events: list[Event]) -> Event:
    """Several events, joined into one."""
    if len(events) == 1:
        return events[0]
    segments, states, losses = zip(*events, strict=True)
    joined = {name: torch.cat([state[name] for state in states]) for name in states[0]}
    return [segment for part in segments for segment in part], joined, torch.cat(losses)


def finite_lanes(stacked: State) -> list[bool]:
    """Whether each lane's state is finite. On the device, all at once, this is faster than one by one on the host."""
    each = [tensor.flatten(1).isfinite().all(1) for tensor in stacked.values() if tensor.is_floating_point()]
    return torch.stack(each).all(0).tolist() if each else []


def trained_clients(event: Event, session: Session, check: bool, stay: bool) -> dict[int, Trained]:
    """The trained clients by their position in the cohort, on the host unless they `stay` on the device.

    With `check`, tests here whether the states are finite, all at once.
    """
    segments, stacked, losses = event
    program, here = session.program, device_of([stacked]) == HOST
    if (stay or here) and (rows := in_rows(session, stacked)) is not None:
        return {
            segment.client: TrainedRow(session, rows, position, total / max(1, segment.steps), segment.steps)
            for position, (segment, total) in enumerate(zip(segments, losses.tolist(), strict=True))
        }
    sound = finite_lanes({name: stacked[name] for name in program.parameters}) if check else None
    clients = fetch(stacked, stay)
    return {
        segment.client: Trained(
            {name: client[name] for name in program.parameters},
            {name: client[name] for name in program.buffers},
            total / max(1, segment.steps),
            segment.steps,
            sound[position] if sound is not None else None,
            slots_of(client),
        )
        for position, (segment, client, total) in enumerate(
            zip(segments, clients, losses.tolist(), strict=True)
        )
    }
