"""The server's message of a round."""

from fedpara.engines.progress import Progress
from fedpara.engines.rng import torch_rng
from fedpara.engines.server.guard import without_standing
from fedpara.engines.session import Session
from fedpara.errors import RunError, UpdateRejected
from fedpara.state import State, finite
from fedpara.wire import Message, guard, make_message, pack


def broadcast(session: Session, progress: Progress, round: int) -> tuple[Message, State]:
    """(the message, the model as the clients will read it: a lossy link changes it)"""
    model = {**progress.x, **progress.buffers}
    state = pack({"": model, **session.algorithm.broadcast(without_standing(progress.server))})
    guard(state, session.program.private)
    generator = torch_rng(session.seed, "link-down", round) if session.link.down == "int8" else None
    try:
        if not finite(state):
            raise UpdateRejected("it holds NaN or infinity.")
        message = make_message(state, session.header(round), session.link.down, generator, session.exact)
        exact = session.link.down == "float32"
        return message, model if exact else session.read_down(message, round)[0]
    except UpdateRejected as error:
        raise RunError(
            f"the model cannot be sent in round {round}: {error} The state before this round is kept."
        ) from None
