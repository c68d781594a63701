"""The server's message of a round."""

import torch

from fedpara.engines.differences import Differences, Known
from fedpara.engines.progress import Progress
from fedpara.engines.rng import torch_rng
from fedpara.engines.server.folds import onto_base
from fedpara.engines.server.guard import without_standing
from fedpara.engines.session import Session
from fedpara.errors import RunError, UpdateRejected
from fedpara.state import State, finite
from fedpara.wire import Message, guard, make_message, pack


def broadcast(session: Session, progress: Progress, round: int) -> tuple[Message, State]:
    """(the message, the model as the clients will read it: a lossy link changes it)"""
    model = {**progress.x, **progress.buffers}
    sent = {name: tensor for name, tensor in model.items() if name not in session.left_out(round)}
    state = pack({"": sent, **session.algorithm.broadcast(without_standing(progress.server))})
    guard(state, session.program.private)
    downlink = session.link.downlink
    generator = torch_rng(session.seed, "link-down", round) if downlink.draws else None
    try:
        if not finite(state):
            raise UpdateRejected("it holds NaN or infinity.")
        if session.differences:
            known = progress.known or Known(session.first_known())
            message: Message = _differences(session, state, known, round, generator)
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
