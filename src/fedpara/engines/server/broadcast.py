"""The server's message of a round."""

from dataclasses import replace

import torch
from torch import Tensor

from fedpara.engines.differences import Differences, Known, Moves, flat
from fedpara.engines.progress import Progress
from fedpara.engines.rng import torch_rng
from fedpara.engines.server.folds import onto_base
from fedpara.engines.server.guard import without_standing
from fedpara.engines.session import Session
from fedpara.errors import RunError, UpdateRejected
from fedpara.state import State, device_of, finite
from fedpara.wire import Message, guard, make_message, pack
from fedpara.wire.encoders.grid import EXACT, Grid, exactly


def broadcast(session: Session, progress: Progress, round: int) -> tuple[Message, State]:
    """(the message, the model as the clients will read it: a lossy link changes it)"""
    model = {**progress.x, **progress.buffers}
    sent = {name: tensor for name, tensor in model.items() if name not in session.left_out(round)}
    state = pack({"": sent, **session.algorithm.broadcast(without_standing(progress.server))})
    guard(state, session.program.local)
    downlink = session.link.downlink
    generator = torch_rng(session.seed, "link-down", round) if downlink.draws else None
    try:
        if not finite(state):
            raise UpdateRejected("it holds NaN or infinity.")
        if session.differences:
            known = progress.known or Known(session.first_known())
            grid = downlink.grid
            message: Message = (
                _differences(session, state, known, round, generator)
                if grid is None
                else _moves(session, state, known, round, grid)
            )
        else:
            message = make_message(state, session.header(round), session.link.down, generator, session.exact)
            message = onto_base(session, progress, message, round)
        exact = downlink.text == "float32"
        return message, model if exact else session.read_down(message, round)[0]
    except UpdateRejected as error:
        raise RunError(
            f"the model cannot be sent in round {round}: {error} The state before this round is kept."
        ) from None


def _differences(
    session: Session, state: State, known: Known, round: int, generator: torch.Generator | None
) -> Differences:
    change = {name: t - known.state[name] if name in known.state else t for name, t in state.items()}
    header = session.header(round)
    message = make_message(change, header, session.link.down, generator, session.exact)
    received = session.plus(known.state, session.admit_down(message, round, session.link.down))
    copy = make_message(received, header, exact=session.exact)
    return Differences(message.head, message.tensors, received, known, copy)


def _moves(session: Session, state: State, known: Known, round: int, grid: Grid) -> Moves:
    """Encodes on the device of the state: on the host of a GPU this would take longer than the round."""
    device = device_of([state])
    nothing = torch.Generator()  # numbers on a grid are not rounded: no draws
    known = known.on(device)
    rounded = grid.at(round).rounded([state[name] for name in known.state])
    rest = {name: tensor for name, tensor in state.items() if name not in known.state}

    def start() -> Tensor:
        first = session.first_known()
        return flat(first, known.state).to(device)

    def message_of(move: State, since: int) -> Message:
        return make_message(
            {**rest, **move}, session.header(round, since=since), EXACT, nothing, session.exact
        )

    def joined(now: Tensor, before: Tensor, since: int) -> Message | None:
        total = now.double() - before
        pieces = total.float().split([tensor.numel() for tensor in rounded])
        if not torch.equal(torch.cat(pieces).double(), total) or not exactly(pieces):
            return None
        move = {name: piece.view_as(t) for (name, t), piece in zip(known.state.items(), pieces, strict=True)}
        return message_of(move, since)

    message = message_of(
        {name: new - known.state[name] for name, new in zip(known.state, rounded, strict=True)}, round - 1
    )
    change = session.admit_move(message, round, round - 1)
    received = session.plus(known.state, change)
    exact = all(
        torch.equal(change[name].double(), new.double() - known.state[name])
        for name, new in zip(known.state, rounded, strict=True)
    )
    copy = make_message(received, session.header(round), exact=session.exact)
    before = replace(known, earlier=_earlier(session, known))
    return Moves(message.head, message.tensors, received, before, copy, start, exact, joined)


def _earlier(session: Session, known: Known) -> tuple[Tensor, ...]:
    """x^ before each message. The messages are decoded, from the last one back, only after a run was resumed."""
    if len(known.earlier) == len(known.messages):
        return known.earlier
    states = [flat(known.state)]
    for back, message in enumerate(reversed(known.messages)):
        t = len(known.sizes) - back
        states.append(states[-1] - flat(session.admit_move(message, t, t - 1), known.state).to(states[-1]))
    return tuple(reversed(states[1:]))
