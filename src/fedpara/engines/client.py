"""One client's part of a round: a message in, a message out. It sees nothing of the server but that message.

x, down <- message;  y = local steps from (x, own private part);  message <- y's shared part, extras
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedpara.algorithms import Algorithm, Groups
from fedpara.algorithms.core import expect_groups, expect_like
from fedpara.data import Examples
from fedpara.engines.program import Program
from fedpara.engines.streams import torch_numbers
from fedpara.engines.worker import Score, Trained, Worker
from fedpara.errors import ConfigError, UpdateRejected
from fedpara.state import State, finite, zeros_like
from fedpara.wire import Header, Letter, Link, Message, Spec, admit, guard, letter, pack, spec_of, unpack

PRIVATE = "private"


@dataclass(frozen=True)
class Reply:
    """What an engine hands back for one client: the message, or why there is none."""

    client: int
    message: Message | None = None
    reason: str = ""
    loss: float = float("nan")
    before: Score | None = None
    after: Score | None = None
    reached: bool = True  # the server's message was sent to it
    unread: int = 0  # bytes that came and are not read: no message, or one that came late
    late: int = 0  # the earlier round that it answers
    diverged: bool = False  # its loss or its parameters are no longer finite


@dataclass(frozen=True)
class Protocol:
    """What both ends know before the first message."""

    program: Program
    algorithm: Algorithm
    link: Link
    seed: int
    down: Spec = field(init=False)
    up: Spec = field(init=False)

    def __repr__(self) -> str:
        link = f"{self.link.down} down, {self.link.up} up"
        return f"Protocol({self.algorithm.name}, {self.program.scheme}, seed {self.seed}, link: {link})"

    def __post_init__(self) -> None:
        x = self.program.start(self.program.shared)
        model = {**x, **self.program.start(self.program.shared_buffers)}
        first, broadcast, extra, kept = self._tried(x)
        if taken := {PRIVATE, ""} & {*first, *kept, *broadcast, *extra}:
            raise ConfigError(
                f"{self.algorithm.name} has a group called {taken.pop()!r}, which holds the model's own: expected "
                "another name."
            )
        for group, state in kept.items():
            if state.keys() != first.get(group, {}).keys():
                raise ConfigError(
                    f"{self.algorithm.name} keeps {group!r} of a client with other tensors than its client_init gives: "
                    "expected the same names before a client's first round and after it."
                )
        down = pack({"": model, **broadcast})
        object.__setattr__(self, "down", spec_of(down, self.link.down, self.exact))
        object.__setattr__(self, "up", spec_of(pack({"": model, **extra}), self.link.up, self.exact))

    def _tried(self, x: State) -> tuple[Groups, Groups, Groups, Groups]:
        """What a client has at first, what travels to it, what it sends beside the model, what it keeps.

        Each function of the algorithm but `aggregate`, tried before the first round."""
        a = self.algorithm
        server = expect_groups(a.name, "server_init", a.server_init(x))
        broadcast = expect_groups(a.name, "broadcast", a.broadcast(server))
        first = expect_groups(a.name, "client_init", a.client_init(x))
        expect_like(a.name, "correct", a.correct(zeros_like(x), x, x, broadcast, first), x)
        made = a.finish(x, x, broadcast, first, 1, 1.0)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ConfigError(
                f"algorithm {a.name!r}: finish returned {type(made).__name__}: expected (the groups to upload, the "
                "client's new variables), two dicts."
            )
        extra, kept = (expect_groups(a.name, "finish", part) for part in made)
        return first, broadcast, extra, kept

    @property
    def exact(self) -> frozenset[str]:
        """Buffers: on every link they travel as they are."""
        return frozenset(self.program.shared_buffers)

    def read_down(self, message: Message, round: int) -> tuple[State, Groups]:
        """(the model as every client sees it, in its own types whatever the link's; the algorithm's groups)"""
        _, state = admit(
            message,
            spec=self.down,
            round=round,
            method=self.algorithm.name,
            scheme=self.program.scheme,
            link=self.link.down,
            exact=self.exact,
        )
        own = self.program.initial
        groups = {
            group: {name: t.to(own[name].dtype) if name in own else t for name, t in members.items()}
            for group, members in unpack(state).items()
        }
        return groups.pop(""), groups

    def first(self, model: State) -> Groups:
        """What a client holds before its first round."""
        x = {name: model[name] for name in self.program.shared}
        return {PRIVATE: self.program.start(self.program.kept), **self.algorithm.client_init(x)}

    @property
    def extras(self) -> bool:
        """Whether clients send more than the model."""
        return len(self.up) > len(self.program.shared) + len(self.program.shared_buffers)

    @cached_property
    def keeps(self) -> bool:
        """Whether a client holds anything from round to round."""
        return any(self.first(self.program.start(self.program.shared)).values())

    def header(self, round: int, sender: str = "server", examples: int = 0) -> Header:
        return Header(round, self.algorithm.name, self.program.scheme, sender, examples)


def client_round(
    protocol: Protocol,
    worker: Worker,
    received: tuple[State, Groups],
    memory: Groups | None,
    examples: Examples,
    *,
    round: int,
    client: int,
    test: Examples | None = None,
) -> tuple[Reply, Groups]:
    """The client's reply and what it keeps: its private parameters and the algorithm's variables.

    With `test` the client's own model is scored before and after the local steps.
    """
    model, down = received
    memory = memory or protocol.first(model)
    state = {**model, **memory[PRIVATE]}
    before = worker.evaluate(state, test) if test is not None else None
    trained = worker.train(
        state,
        examples,
        protocol.algorithm,
        {name: model[name] for name in protocol.program.shared},
        down,
        own_variables(memory),
        seed=protocol.seed,
        round=round,
        who=client,
    )
    after = worker.evaluate(trained.state, test) if test is not None else None
    reply = reply_of(
        protocol, trained, model, down, memory, round=round, client=client, examples=len(examples)
    )
    return replace(reply[0], before=before, after=after), reply[1]


def reply_of(
    protocol: Protocol,
    trained: Trained,
    model: State,
    down: Groups,
    memory: Groups,
    *,
    round: int,
    client: int,
    examples: int,
) -> tuple[Reply, Groups]:
    """What a trained client sends, and what it keeps. One that diverged sends nothing and keeps what it had."""
    program, algorithm = protocol.program, protocol.algorithm
    wrong = "" if math.isfinite(trained.loss) else f"its loss is {trained.loss}"
    if not wrong and not (finite(trained.parameters) if trained.finite is None else trained.finite):
        wrong = "its parameters are no longer finite"
    if wrong:
        return Reply(client, reason=f"it diverged: {wrong}", diverged=True), memory
    x = {name: model[name] for name in program.shared}
    y = {name: trained.parameters[name] for name in program.shared}
    eta = algorithm.local.lr_at(round)
    extra, own = algorithm.finish(x, y, down, own_variables(memory), trained.steps, eta)
    sent = {**y, **{name: trained.buffers[name] for name in program.shared_buffers}}
    private = {name: trained.state[name] for name in program.kept}
    try:
        message = _write_up(protocol, sent, model, extra, round, client, examples)
    except UpdateRejected as error:  # too large for a narrow uplink
        return Reply(client, reason=str(error)), {PRIVATE: private, **own}
    return Reply(client, message, "", trained.loss), {PRIVATE: private, **own}


def own_model(protocol: Protocol, model: State, memory: Groups | None) -> State:
    """A client's whole model: the shared part it received, and the private part it keeps or starts with."""
    return {**model, **(memory or protocol.first(model))[PRIVATE]}


def own_variables(memory: Groups) -> Groups:
    """The algorithm's part of what a client keeps."""
    return {name: state for name, state in memory.items() if name != PRIVATE}


def change_coded(link: Link) -> bool:
    """A narrow uplink carries y - x, as FedPAQ does: the change is what its few bits should resolve."""
    return link.up != "float32"


def as_change(y: State, x: State, exact: frozenset[str]) -> State:
    """y - x, but for what travels as it is."""
    return {name: tensor if name in exact else tensor - x[name] for name, tensor in y.items()}


def from_change(d: State, x: State, exact: frozenset[str]) -> State:
    """The inverse: x + d"""
    return {name: tensor if name in exact else x[name] + tensor for name, tensor in d.items()}


def _write_up(
    protocol: Protocol, sent: State, model: State, extra: Groups, round: int, client: int, examples: int
) -> Letter:
    if change_coded(protocol.link):
        sent = as_change(sent, model, protocol.exact)
    state = pack({"": sent, **extra})
    guard(state, protocol.program.private)
    generator = torch_numbers(protocol.seed, "link-up", round, client) if protocol.link.up == "int8" else None
    header = protocol.header(round, f"client:{client}", examples)
    return letter(state, header, protocol.link.up, generator, protocol.exact)
