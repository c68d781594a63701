"""The server's side of folding (`setup/folding.py`): folding between two periods, and each message's base."""

from collections.abc import Sequence
from dataclasses import replace

from fedpara.engines.differences import needed
from fedpara.engines.progress import Progress
from fedpara.engines.rng import torch_rng
from fedpara.engines.session import Session
from fedpara.engines.setup.folding import Folds, OntoBase
from fedpara.errors import RunError, UpdateRejected
from fedpara.state import State, finite
from fedpara.wire import Message, decode, make_message


def begun(session: Session, progress: Progress) -> Progress:
    """The server's state at the beginning of the next round: folded, if a period has ended."""
    folding, round = session.folding, progress.round + 1
    if folding is None:
        return progress
    folds = progress.folds or Folds(folding.first())
    if len(folds.sizes) == folding.folds(round):
        return replace(progress, folds=folds)
    factors = {name: tensor for name, tensor in progress.x.items() if name in folding.factors}
    generator = torch_rng(session.seed, "fold", round) if session.link.downlink.draws else None
    try:
        message = make_message(factors, session.header(progress.round), session.link.down, generator)
    except UpdateRejected as error:
        raise RunError(
            f"the factors cannot be folded before round {round}: {error} The state before is kept."
        ) from None
    _, read = decode(message, link=session.link.down)
    received = {name: tensor.to(factors[name]) for name, tensor in read.items()}
    start = folding.start(len(folds.sizes) + 1)
    state = {name: start.get(name, tensor) for name, tensor in folds.state.items()}
    state |= folding.folded(folds.state, received)
    if not finite(state):
        raise RunError(
            f"the base holds NaN or infinity after the fold before round {round}: lower the learning rate."
        )
    x = {name: start.get(name, tensor) for name, tensor in progress.x.items()}
    kept = needed((*folds.messages, bytes(message)), len(_copy(session, state, round)))
    folds = replace(folds, state=state, sizes=(*folds.sizes, len(message)), messages=kept)
    return replace(progress, x=x, folds=folds)


def onto_base(session: Session, progress: Progress, message: Message, round: int) -> Message:
    """The message with its base; unchanged in a run that does not fold."""
    folding, folds = session.folding, progress.folds
    if folding is None or folds is None:
        return message
    start = folding.factors if folding.restarts(round) else ()
    beside = {**folds.state, **{name: progress.x[name] for name in start}}
    copy = _copy(session, folds.state, round)
    return OntoBase(message.head, message.tensors, beside, folds, copy, folding.every)


def _copy(session: Session, state: State, round: int) -> Message:
    """The base in float32."""
    return make_message({name: state[name] for name in session.copied}, session.header(round))


def folds_after(progress: Progress, accepted: Sequence[int]) -> Folds | None:
    """The folds after a round. The accepted clients now have its base."""
    folds = progress.folds
    if folds is None:
        return None
    return replace(folds, last={**folds.last, **dict.fromkeys(accepted, len(folds.sizes))})
