"""One client's part of a round: a message in, a message out. The client sees nothing else of the server.

x, down <- message;  y = local steps from (x, its private part);  message <- y's shared part, extras
"""

import math
from dataclasses import dataclass, replace

from fedpara.algorithms import Variables, Visit
from fedpara.algorithms.optimizers import Slots
from fedpara.data import Examples
from fedpara.engines.local.worker import Trained, Worker
from fedpara.engines.rng import torch_rng, torch_seed
from fedpara.engines.session import PRIVATE, SLOT, Session, named_slots
from fedpara.errors import UpdateRejected
from fedpara.state import State, finite
from fedpara.tasks import Score
from fedpara.wire import (
    AnyMessage,
    Link,
    Message,
    guard,
    make_message,
    pack,
)


@dataclass(frozen=True)
class Reply:
    """What an engine returns for one client: the message, or the reason why there is none."""

    client: int
    message: AnyMessage | None = None
    reason: str = ""
    loss: float = float("nan")
    before: Score | None = None
    after: Score | None = None
    reached: bool = True  # the server's message was sent to the client
    unread: int = 0  # bytes that arrived but were not a valid message of this round
    late: int = 0  # the earlier round that this reply belongs to
    diverged: bool = False  # the loss or the parameters are no longer finite


def client_round(
    session: Session,
    worker: Worker,
    received: tuple[State, Variables],
    memory: Variables | None,
    examples: Examples,
    *,
    round: int,
    client: int,
    test: Examples | None = None,
) -> tuple[Reply, Variables]:
    """(the client's reply, its new memory: private parameters and the algorithm's variables)

    With `test`, the client's own model is scored before and after the local steps.
    """
    model, down = received
    memory = memory or session.first_memory(model)
    state = {**model, **memory[PRIVATE]}
    before = worker.evaluate(state, test) if test is not None else None
    trained = worker.train(
        state,
        examples,
        session.algorithm,
        {name: model[name] for name in session.program.shared},
        down,
        own_variables(memory),
        seed=session.seed,
        round=round,
        who=client,
        slots=own_slots(memory),
    )
    after = worker.evaluate(trained.state, test) if test is not None else None
    reply = reply_of(
        session, trained, model, down, memory, round=round, client=client, examples=len(examples)
    )
    return replace(reply[0], before=before, after=after), reply[1]


def reply_of(
    session: Session,
    trained: Trained,
    model: State,
    down: Variables,
    memory: Variables,
    *,
    round: int,
    client: int,
    examples: int,
) -> tuple[Reply, Variables]:
    """(the trained client's reply, its new memory). A client that diverged sends nothing and keeps its old memory."""
    program, algorithm = session.program, session.algorithm
    problem = "" if math.isfinite(trained.loss) else f"its loss is {trained.loss}"
    if not problem and not (finite(trained.parameters) if trained.finite is None else trained.finite):
        problem = "its parameters are no longer finite"
    if problem:
        return Reply(client, reason=f"it diverged: {problem}", diverged=True), memory
    x = {name: model[name] for name in program.shared}
    y = {name: trained.parameters[name] for name in program.shared}
    eta = algorithm.local.of(client).mean_lr(round, trained.steps)
    extra, own = algorithm.finish(x, y, down, own_variables(memory), trained.steps, eta)
    if algorithm.local.keep_optimizer:
        own = {**own, **named_slots(trained.slots)}
    seed = torch_seed(session.seed, "send", round, client)
    y = algorithm.send(x, y, Visit(client, round, trained.steps, eta, seed))
    sent = {**y, **{name: trained.buffers[name] for name in program.shared_buffers}}
    private = {name: trained.state[name] for name in program.retained}
    try:
        message = _encode_update(session, sent, model, extra, round, client, examples)
    except UpdateRejected as error:  # a value too large for a lossy uplink
        return Reply(client, reason=str(error)), {PRIVATE: private, **own}
    return Reply(client, message, "", trained.loss), {PRIVATE: private, **own}


def own_model(session: Session, model: State, memory: Variables | None) -> State:
    """A client's whole model: the shared part it received and its private part."""
    return {**model, **(memory or session.first_memory(model))[PRIVATE]}


def own_variables(memory: Variables) -> Variables:
    """The algorithm's variables in a client's memory."""
    return {name: state for name, state in memory.items() if name != PRIVATE and not name.startswith(SLOT)}


def own_slots(memory: Variables) -> Slots:
    """The optimizer's slots in a client's memory; empty if they are not kept."""
    return {name.removeprefix(SLOT): state for name, state in memory.items() if name.startswith(SLOT)}


def sends_changes(link: Link) -> bool:
    """Whether clients send y - x, as in FedPAQ: on a lossy uplink, few bits resolve a small change better."""
    return link.up != "float32"


def as_change(y: State, x: State, exact: frozenset[str]) -> State:
    """y - x; the names in `exact` are sent unchanged."""
    return {name: tensor if name in exact else tensor - x[name] for name, tensor in y.items()}


def from_change(d: State, x: State, exact: frozenset[str]) -> State:
    """The inverse: x + d."""
    return {name: tensor if name in exact else x[name] + tensor for name, tensor in d.items()}


def _encode_update(
    session: Session, sent: State, model: State, extra: Variables, round: int, client: int, examples: int
) -> Message:
    if sends_changes(session.link):
        sent = as_change(sent, model, session.exact)
    state = pack({"": sent, **extra})
    guard(state, session.program.private)
    generator = torch_rng(session.seed, "link-up", round, client) if session.link.up == "int8" else None
    header = session.header(round, f"client:{client}", examples)
    return make_message(state, header, session.link.up, generator, session.exact)
