"""One client's part of a round: a message in, a message out. It sees nothing of the server but that message.

x, down <- message;  y = local steps from (x, own private part);  message <- y's shared part, extras
"""

from dataclasses import dataclass, field

from fedpara.algorithms import Algorithm, Groups
from fedpara.data import Examples
from fedpara.engines.program import Program
from fedpara.engines.streams import torch_numbers
from fedpara.engines.worker import Score, Worker
from fedpara.errors import RunError
from fedpara.state import State, subtract
from fedpara.wire import Header, Link, Spec, admit, encode, guard, pack, spec_of, unpack

PRIVATE = "private"


@dataclass(frozen=True)
class Reply:
    """What an engine hands back for one client: the message, or why there is none."""

    client: int
    message: bytes | None = None
    reason: str = ""
    loss: float = float("nan")
    before: Score | None = None
    after: Score | None = None


@dataclass(frozen=True)
class Protocol:
    """What both ends know before the first message."""

    program: Program
    algorithm: Algorithm
    link: Link
    seed: int
    down: Spec = field(init=False)
    up: Spec = field(init=False)

    def __post_init__(self) -> None:
        x = self.program.start(self.program.shared)
        model = {**x, **self.program.start(self.program.shared_buffers)}
        down = pack({"": model, **self.algorithm.broadcast(self.algorithm.server_init(x))})
        extra, _ = self.algorithm.finish(
            x,
            x,
            self.algorithm.broadcast(self.algorithm.server_init(x)),
            self.algorithm.client_init(x),
            1,
            1.0,
        )
        object.__setattr__(self, "down", spec_of(down, self.link.down))
        object.__setattr__(self, "up", spec_of(pack({"": model, **extra}), self.link.up))

    def read_down(self, message: bytes, round: int) -> tuple[State, Groups]:
        """(the model as every client sees it, the algorithm's groups)"""
        _, state = admit(
            message, spec=self.down, round=round, method=self.algorithm.name, scheme=self.program.scheme
        )
        groups = unpack(state)
        return groups.pop(""), groups

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
    program, algorithm = protocol.program, protocol.algorithm
    model, down = received
    x = {name: model[name] for name in program.shared}
    if memory is None:
        memory = {PRIVATE: program.start(program.kept), **algorithm.client_init(x)}
    own = {name: state for name, state in memory.items() if name != PRIVATE}
    state = {**model, **memory[PRIVATE]}
    before = worker.evaluate(state, test) if test is not None else None
    trained = worker.train(
        state, examples, algorithm, x, down, own, seed=protocol.seed, round=round, who=client
    )
    if not trained.loss == trained.loss or trained.loss in (float("inf"), float("-inf")):
        raise RunError(
            f"client {client} diverged in round {round}: its loss is {trained.loss}. The state before this round is "
            "kept. Lower the learning rate, or set a gradient clip."
        )
    after = worker.evaluate({**trained.parameters, **trained.buffers}, test) if test is not None else None
    y = {name: trained.parameters[name] for name in program.shared}
    extra, own = algorithm.finish(x, y, down, own, trained.steps, algorithm.local.lr_at(round))
    sent = {**y, **{name: trained.buffers[name] for name in program.shared_buffers}}
    message = _encode_up(protocol, sent, model, extra, round, client, len(examples))
    trained_state = {**trained.parameters, **trained.buffers}
    private = {name: trained_state[name] for name in program.kept}
    return Reply(client, message, "", trained.loss, before, after), {PRIVATE: private, **own}


def change_coded(link: Link) -> bool:
    """A narrow uplink carries y - x, as FedPAQ does: the change is what its few bits should resolve."""
    return link.up != "float32"


def _encode_up(
    protocol: Protocol, sent: State, model: State, extra: Groups, round: int, client: int, examples: int
) -> bytes:
    if change_coded(protocol.link):
        sent = subtract(sent, {name: model[name] for name in sent})
    state = pack({"": sent, **extra})
    guard(state, protocol.program.private)
    generator = torch_numbers(protocol.seed, "link-up", round, client) if protocol.link.up == "int8" else None
    header = protocol.header(round, f"client:{client}", examples)
    return encode(state, header, protocol.link.up, generator)
