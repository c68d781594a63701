"""ByGamma: the engine of a federation with a gamma per client. Each gamma has an inner engine with its own model."""

from collections.abc import Callable, Iterable, Sequence

from fedpara.engines.client import Reply
from fedpara.engines.server.engine import Engine
from fedpara.engines.server.levels import Levels
from fedpara.engines.session import Session
from fedpara.state import State
from fedpara.tasks import Score
from fedpara.wire import Message


class ByGamma:
    """Every call of `train` is for clients of one gamma."""

    def __init__(self, levels: Levels, build: Callable[[Session], Engine]) -> None:
        self.levels = levels
        self.engines = {gamma: build(session) for gamma, session in levels.sessions.items()}
        self.largest = self.engines[max(self.engines)]

    @property
    def name(self) -> str:
        return self.largest.name

    @property
    def why(self) -> str:
        return f"gammas {', '.join(f'{gamma:g}' for gamma in self.engines)} in turn, each: {self.largest.why}"

    def train(self, round: int, clients: Sequence[int], message: Message, personal: bool) -> Iterable[Reply]:
        return self.engines[self.levels.gamma_of(clients[0])].train(round, clients, message, personal)

    def commit(self, round: int, clients: Sequence[int]) -> None:
        for gamma, engine in self.engines.items():
            engine.commit(round, [client for client in clients if self.levels.gamma_of(client) == gamma])

    def evaluate(self, state: State) -> Score | None:
        return self.largest.evaluate(state)

    def score_clients(self, round: int, clients: Sequence[int], message: Message) -> Iterable[Reply]:
        raise NotImplementedError("make_levels refuses runs that score the clients' own models")
