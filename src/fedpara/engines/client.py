"""One client's part of a round: a message in, a message out. The client sees nothing else of the server.

x, down <- message;  y = local steps from (x, its private part);  message <- y's shared part, extras

With a personal model v: v = local steps from v, after those of y and from the same message.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fedpara.algorithms import Variables, Visit
from fedpara.algorithms.optimizers import Slots
from fedpara.data import Examples
from fedpara.engines.local.per_example import private_gradient
from fedpara.engines.local.trained_row import Start, TrainedRow, as_row
from fedpara.engines.local.worker import Trained, Worker
from fedpara.engines.rng import torch_seed, uplink_rng
from fedpara.engines.session import (
    PERSONAL,
    PERSONAL_SLOT,
    PRIVATE,
    RESIDUE,
    SLOT,
    Session,
    memory_of,
    named_slots,
    own_part,
)
from fedpara.errors import UpdateRejected
from fedpara.layout import together
from fedpara.privacy import Example, User
from fedpara.state import State, finite
from fedpara.tasks import Score
from fedpara.wire import (
    AnyMessage,
    Header,
    Link,
    Message,
    decode,
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


def unreadable(why: object) -> str:
    """The reason in a reply of a client whose data cannot be read. All engines use this text."""
    return f"its data could not be read: {why}"


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
    """(the client's reply, its new memory: private parameters, the algorithm's variables and the personal model)

    With `test`, the client's own model is scored before and after the local steps.
    """
    model, down = received
    memory = memory or session.first_memory(model)
    before = worker.evaluate({**model, **own_part(memory)}, test) if test is not None else None
    trained, kind = [], session.privacy
    for training, one in enumerate(session.trainings):
        own = memory_of(memory, training)
        trained += [
            worker.train(
                {**model, **own[PRIVATE]},
                examples,
                one.algorithm,
                {name: model[name] for name in session.program.shared},
                down,
                own_variables(own),
                seed=session.seed,
                round=round,
                who=client,
                slots=own_slots(own),
                gradient=private_gradient(worker, kind, session.privacy_seed, round, client)
                if isinstance(kind, Example) and not training  # the personal model never leaves the client
                else None,
            )
        ]
    after = worker.evaluate(trained[-1].state, test) if test is not None else None
    if len(trained) == 1:
        trained = [as_row(session, trained[0])]
    start = Start(session, model, down)
    reply = reply_of(start, trained, memory, round=round, client=client, examples=len(examples))
    return replace(reply[0], before=before, after=after), reply[1]


def reply_of(
    start: Start,
    trainings: Sequence[Trained],
    memory: Variables,
    *,
    round: int,
    client: int,
    examples: int,
    generator: torch.Generator | None = None,
) -> tuple[Reply, Variables]:
    """(the trained client's reply, its new memory). A client that diverged sends nothing and keeps its old memory.

    `trainings` are the results of the session's trainings, in their order. `generator` is the client's `uplink_rng`
    with its numbers already drawn; by default they are drawn here.
    """
    session, model, down = start.session, start.model, start.down
    program, algorithm = session.program, session.algorithm
    for whose, one in zip(("its", "its personal model's"), trainings, strict=False):
        if problem := _divergence(one, whose):
            return Reply(client, reason=f"it diverged: {problem}", diverged=True), memory
    trained, *personal = trainings
    x = start.x
    eta = algorithm.local.of(client).mean_lr(round, trained.steps)
    if isinstance(trained, TrainedRow) and not personal:
        header = session.header(round, f"client:{client}", examples)
        row, own = trained.reply(header, start, own_variables(memory), eta)
        return Reply(client, row, "", trained.loss), {PRIVATE: {}, **own}
    y = {name: trained.parameters[name] for name in program.shared}
    extra, own = algorithm.finish(x, y, down, own_variables(memory), trained.steps, eta)
    if algorithm.local.keep_optimizer:
        own = {**own, **named_slots(trained.slots)}
    for one, second in zip(personal, session.trainings[1:], strict=True):
        slots = named_slots(one.slots, PERSONAL_SLOT) if second.algorithm.local.keep_optimizer else {}
        own = {**own, PERSONAL: one.state, **slots}
    seed = torch_seed(session.seed, "send", round, client)
    y = algorithm.send(x, y, Visit(client, round, trained.steps, eta, seed))
    if isinstance(session.privacy, User):
        y = session.privacy.bounded(x, y, down)
    sent = {**y, **{name: trained.buffers[name] for name in program.shared_buffers}}
    for name in session.unsent(round, down):
        del sent[name]
    private = {name: trained.state[name] for name in program.retained}
    try:
        header = session.header(round, f"client:{client}", examples)
        generator = generator or uplink_rng(session.seed, round, client)
        message, left = _encode_update(session, sent, model, down, extra, memory, header, generator)
    except UpdateRejected as error:  # a value too large for a lossy uplink
        return Reply(client, reason=str(error)), {PRIVATE: private, **own}
    return Reply(client, message, "", trained.loss), {PRIVATE: private, **own, **left}


def own_model(session: Session, model: State, memory: Variables | None) -> State:
    """A client's own model: the shared part it received and its private part, or its personal model."""
    return {**model, **own_part(memory or session.first_memory(model))}


def _divergence(trained: Trained, whose: str) -> str:
    """Why the trained model is unusable, or ""."""
    if not math.isfinite(trained.loss):
        return f"{whose} loss is {trained.loss}"
    sound = finite(trained.parameters) if trained.finite is None else trained.finite
    return "" if sound else f"{whose} parameters are no longer finite"


def own_variables(memory: Variables) -> Variables:
    """The algorithm's variables in a client's memory."""
    rest = (PRIVATE, RESIDUE)
    return {name: s for name, s in memory.items() if name not in rest and not name.startswith(SLOT)}


def own_slots(memory: Variables) -> Slots:
    """The optimizer's slots in a client's memory; empty if they are not kept."""
    return {name.removeprefix(SLOT): state for name, state in memory.items() if name.startswith(SLOT)}


def sends_changes(link: Link) -> bool:
    """Whether clients send y - x, as in FedPAQ: on a lossy uplink, few bits resolve a small change better."""
    return link.uplink.text != "float32"


def as_change(y: State, x: State, exact: frozenset[str]) -> State:
    """y - x; the names in `exact` are sent unchanged."""
    changed = {name: tensor for name, tensor in y.items() if name not in exact}
    return y | together(torch.sub, changed, x)


def _encode_update(
    session: Session,
    sent: State,
    model: State,
    down: Variables,
    extra: Variables,
    memory: Variables,
    header: Header,
    generator: torch.Generator,
) -> tuple[Message, Variables]:
    """(the message, the client's new residue e if the uplink has error feedback)

    a = (y - x, extras) + e;   message = encode(a);   e = a - what the message decodes to
    """
    if sends_changes(session.link):
        sent = as_change(sent, model, session.exact)
    state = pack({"": sent, **extra})
    guard(state, session.program.local)
    uplink, residue = session.link.uplink, memory.get(RESIDUE, {})
    kept = {name: left for name, left in residue.items() if name in state}
    state |= together(torch.add, kept, state)
    message = make_message(state, header, session.link.up, generator, session.exact)
    if not uplink.feedback:
        return message, {}
    _, read = decode(message, session.exact, session.link.up, session.up_in(header.round, down))
    left = together(lambda _, a, sent: (a - sent).float(), kept, state, read)
    return message, {RESIDUE: {**residue, **left}}  # tensors that are not sent keep their residue
