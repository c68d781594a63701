"""simulate: a whole federated run in one call."""

from collections.abc import Callable
from dataclasses import dataclass

from fedpara.algorithms import Algorithm
from fedpara.data import FederatedData
from fedpara.engines.client import PRIVATE, Protocol
from fedpara.engines.loop import Engine, Progress, Round, Schedule, play
from fedpara.engines.memory import ClientMemory, InMemory
from fedpara.engines.program import Share, take_apart
from fedpara.engines.sequential import Sequential
from fedpara.engines.task import Task
from fedpara.errors import ConfigError, RunError
from fedpara.state import State
from fedpara.wire import Link

ENGINES: dict[str, Callable[[Protocol, Task, FederatedData, ClientMemory], Engine]] = {
    "sequential": Sequential,
}


@dataclass(frozen=True, eq=False)
class Run:
    """What a run came to. `state` is the model's whole state; private parts are those it started with."""

    protocol: Protocol
    memory: ClientMemory
    rounds: tuple[Round, ...]

    @property
    def progress(self) -> Progress:
        return self.rounds[-1].progress

    @property
    def state(self) -> State:
        return {**self.protocol.program.initial, **self.progress.x, **self.progress.buffers}

    def client_state(self, client: int) -> State:
        """The whole state of one client's own model: the shared part and what it keeps."""
        return {**self.state, **(self.memory.get(client) or {}).get(PRIVATE, {})}

    @property
    def accuracy(self) -> float:
        """The last accuracy that was measured."""
        measured = [r.accuracy for r in self.rounds if r.accuracy is not None]
        if not measured:
            raise RunError("no accuracy was measured: give the Task a test set, or the clients test data.")
        return measured[-1]

    @property
    def bytes(self) -> int:
        return self.progress.bytes_up + self.progress.bytes_down


def simulate(
    task: Task,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    rounds: int,
    cohort: int,
    seed: int = 0,
    link: Link | None = None,
    share: Share = "all",
    engine: str = "auto",
    evaluate_every: int = 1,
    personal: bool | None = None,
    max_norm: float | None = None,
    target: float | None = None,
    memory: ClientMemory | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Run:
    """Run `algorithm` on the federation for `rounds` rounds with `cohort` clients each."""
    protocol, schedule, engine_, personal = prepare(
        task,
        data,
        algorithm,
        rounds=rounds,
        cohort=cohort,
        seed=seed,
        link=link or Link(),
        share=share,
        engine=engine,
        evaluate_every=evaluate_every,
        personal=personal,
        max_norm=max_norm,
        target=target,
        memory=(memory := memory or InMemory()),
    )
    results: list[Round] = []
    for result in play(protocol, engine_, schedule, personal):
        results.append(result)
        if on_round is not None:
            on_round(result)
    return Run(protocol, memory, tuple(results))


def prepare(
    task: Task,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    rounds: int,
    cohort: int,
    seed: int,
    link: Link,
    share: Share,
    engine: str,
    evaluate_every: int,
    personal: bool | None,
    max_norm: float | None,
    target: float | None,
    memory: ClientMemory,
) -> tuple[Protocol, Schedule, Engine, bool]:
    """Everything checked and built, nothing run yet."""
    for name, value in (("rounds", rounds), ("cohort", cohort), ("evaluate_every", evaluate_every)):
        if value < 1:
            raise ConfigError(f"{name} is {value}: expected at least 1.")
    if cohort > len(data):
        raise ConfigError(f"a cohort of {cohort} from {len(data)} clients: expected no more than there are.")
    if seed < 0:
        raise ConfigError(f"seed is {seed}: expected 0 or more.")
    if max_norm is not None and not max_norm > 0:
        raise ConfigError(f"max_norm is {max_norm}: expected a positive bound.")
    program = take_apart(task.model, share)
    if personal is None:
        personal = data.has_personal
    if personal and not data.has_personal:
        raise ConfigError("personal evaluation was asked for, and no client has test data of its own.")
    protocol = Protocol(program, algorithm, link, seed)
    schedule = Schedule(rounds, len(data), cohort, evaluate_every, max_norm, target)
    return protocol, schedule, build_engine(engine)(protocol, task, data, memory), personal


def build_engine(name: str) -> Callable[[Protocol, Task, FederatedData, ClientMemory], Engine]:
    if name == "auto":
        return Sequential
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: expected auto or one of {', '.join(ENGINES)}.")
    return ENGINES[name]
