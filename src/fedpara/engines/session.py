"""Session: what the server and its clients agree on before the first message."""

from dataclasses import dataclass, field
from functools import cached_property

from fedpara.algorithms import Algorithm, Variables
from fedpara.algorithms.core import expect_groups, expect_like
from fedpara.engines.program import Program
from fedpara.errors import ConfigError
from fedpara.state import State, zeros_like
from fedpara.wire import AnyMessage, Header, Link, Spec, admit, pack, spec_of, unpack

PRIVATE = "private"
"""The name under which a client's memory holds its private parameters, beside the algorithm's variables."""


@dataclass(frozen=True)
class Session:
    """What both ends know before the first message."""

    program: Program
    algorithm: Algorithm
    link: Link
    seed: int
    down: Spec = field(init=False)
    up: Spec = field(init=False)

    def __repr__(self) -> str:
        link = f"{self.link.down} down, {self.link.up} up"
        return f"Session({self.algorithm.name}, {self.program.scheme}, seed {self.seed}, link: {link})"

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

    def _tried(self, x: State) -> tuple[Variables, Variables, Variables, Variables]:
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

    def read_down(self, message: AnyMessage, round: int) -> tuple[State, Variables]:
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

    def first(self, model: State) -> Variables:
        """What a client holds before its first round."""
        x = {name: model[name] for name in self.program.shared}
        return {PRIVATE: self.program.start(self.program.retained), **self.algorithm.client_init(x)}

    @property
    def extras(self) -> bool:
        """Whether clients send more than the model."""
        return len(self.up) > len(self.program.shared) + len(self.program.shared_buffers)

    @cached_property
    def stateful(self) -> bool:
        """Whether a client holds anything from round to round."""
        return any(self.first(self.program.start(self.program.shared)).values())

    def header(self, round: int, sender: str = "server", examples: int = 0) -> Header:
        return Header(round, self.algorithm.name, self.program.scheme, sender, examples)
