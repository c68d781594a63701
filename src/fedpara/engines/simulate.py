"""simulate: a whole federated run in one call."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import get_args

import torch

from fedpara.algorithms import Algorithm
from fedpara.algorithms.core import AT_MOST_ONE, COUNT, SEED, Weighting, check
from fedpara.choices import ENGINES
from fedpara.data import FederatedData
from fedpara.engines.batched.engine import Batched
from fedpara.engines.batched.round_plan import typical_shape
from fedpara.engines.batched.step import Precision
from fedpara.engines.batched.support import slower_on_cpu, unsupported
from fedpara.engines.checks import refuse_unscorable, refuse_untrainable
from fedpara.engines.distributed.engine import Distributed, RankMemory
from fedpara.engines.distributed.process_group import ProcessGroup, join
from fedpara.engines.memory import ClientMemory, InMemory
from fedpara.engines.program import Share, make_program, shared_names
from fedpara.engines.progress import Progress, Round, Schedule
from fedpara.engines.sequential import Sequential
from fedpara.engines.server import Engine, run_rounds
from fedpara.engines.session import PRIVATE, Session
from fedpara.engines.task import Task
from fedpara.errors import ConfigError, RunError, expect_kind
from fedpara.parameterization import covered
from fedpara.state import State
from fedpara.wire import Link

MAX_CLAIMED_SHARE = 0.5
"""The default of `max_share` where clients state how many examples they have, and nobody else knows."""


@dataclass(frozen=True, eq=False)
class Run:
    """What a run came to. `state` is the model's whole state; private parts are those it started with.

    Of `rounds` only the last holds the server's tensors.
    """

    session: Session
    memory: ClientMemory
    rounds: tuple[Round, ...]
    engine: str  # which one ran, how, and what could not be done and why

    @property
    def progress(self) -> Progress:
        return self.rounds[-1].progress

    @property
    def state(self) -> State:
        return self._whole({})

    def client_state(self, client: int) -> State:
        """The whole state of one client's own model: the shared part as averaged last, and what the client keeps.

        It is the model that the next round begins with: `Round.before` is of such, `Round.after` of the model as
        trained, whose shared part has gone into the average since.
        """
        return self._whole((self.memory.get(client) or {}).get(PRIVATE, {}))

    def _whole(self, private: State) -> State:
        """Under every name of `model.state_dict()`, those of tied weights too."""
        program = self.session.program
        state = {**program.initial, **self.progress.x, **self.progress.buffers, **private}
        return state | {twin: state[name] for twin, name in shared_names(program.model).items()}

    @property
    def accuracy(self) -> float:
        """The last accuracy that was measured."""
        measured = [r.accuracy for r in self.rounds if r.accuracy is not None]
        if not measured:
            private = "parts of the model are private, so only the clients' own models can be scored: give the clients"
            missing = private if self.session.program.private else "give the Task a test set, or the clients"
            raise RunError(f"no accuracy was measured: {missing} test data.")
        return measured[-1]

    @property
    def bytes(self) -> int:
        return self.progress.bytes_up + self.progress.bytes_down

    def __repr__(self) -> str:
        last = next((r for r in reversed(self.rounds) if r.accuracy is not None), None)
        measured = f"{last.accuracy:.2%} after round {last.number}" if last else "not measured"
        engine = shorten(self.engine, 160, placeholder=" ...")
        return (
            f"Run({self.progress.round} rounds of {self.session.algorithm.name}, {self.bytes / 1e6:.2f} MB sent\n"
            f"    accuracy: {measured}\n    engine: {engine})"
        )


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
    precision: Precision | None = None,
    evaluate_every: int = 1,
    personal: bool | None = None,
    max_norm: float | None = None,
    weights: Weighting = "examples",
    max_share: float | None = None,
    target: float | None = None,
    memory: ClientMemory | None = None,
    on_round: Callable[[Round], None] | None = None,
) -> Run:
    """Run `algorithm` on the federation for `rounds` rounds with `cohort` clients each.

    share       "all", "fedper" (all but the last layer) or "none" travels; pFedPara's second factors never do
    accuracy    of the global model on `task.test`; where parts are private, or there is no such test, the mean over
                the cohort of each client's model on its own test data, after its training and before the averaging
    max_norm    an update further than this from the model it began with is refused; the change of a control variate and
                of BatchNorm's statistics counts too
    weights     "examples" weights a client's update by its number of examples, "uniform" gives all the same; SCAFFOLD
                and FedDyn are uniform by definition
    max_share   the largest share of a round's weight that one client may have, such as 0.5
    target      ends the run at this accuracy, a fraction such as 0.8
    memory      where clients' private parts and variables are kept: `get(client)`, `put(client, round, groups)`
    """
    refuse_hostless(engine)
    if on_round is not None and not callable(on_round):
        raise ConfigError(f"on_round is {on_round!r}: expected a function of a Round.")
    session, schedule, personal = prepare(
        task,
        data,
        algorithm,
        rounds=rounds,
        cohort=cohort,
        seed=seed,
        link=link or Link(),
        share=share,
        engine=engine,
        precision=precision,
        evaluate_every=evaluate_every,
        personal=personal,
        max_norm=max_norm,
        weights=weights,
        max_share=max_share,
        target=target,
    )
    memory = InMemory() if memory is None else memory
    if not all(callable(getattr(memory, name, None)) for name in ("get", "put")):
        raise ConfigError(
            f"memory is of type {type(memory).__name__}: expected something with `get` and `put`."
        )
    results: list[Round] = []
    with join().in_step("the end of the run"):
        chosen = build_engine(engine, session, task, data, memory, cohort, precision)
        for result in run_rounds(session, chosen, schedule, personal):
            if results:
                results[-1] = _without_tensors(results[-1])
            results.append(result)
            if on_round is not None:
                on_round(result)
    if isinstance(chosen, Distributed):
        memory = RankMemory(memory, chosen)
    return Run(session, memory, tuple(results), f"{chosen.name}: {chosen.why}")


def _without_tensors(result: Round) -> Round:
    """A history of models would fill the memory: 200 rounds of VGG16 are 12 GB."""
    return replace(result, progress=replace(result.progress, x={}, buffers={}, server={}))


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
    precision: str | None,
    evaluate_every: int,
    personal: bool | None,
    max_norm: float | None,
    weights: Weighting,
    max_share: float | None,
    target: float | None,
) -> tuple[Session, Schedule, bool]:
    """Everything checked, nothing run yet: what both ends know, the rounds, and whether clients are scored."""
    for what, value, kind in (
        ("task", task, Task),
        ("data", data, FederatedData),
        ("algorithm", algorithm, Algorithm),
    ):
        expect_kind(what, value, kind, ConfigError)
    check(COUNT, rounds=rounds, cohort=cohort, evaluate_every=evaluate_every)
    if cohort > len(data):
        raise ConfigError(f"a cohort of {cohort} from {len(data)} clients: expected no more than there are.")
    check(SEED, seed=seed)
    if not isinstance(link, Link):
        raise ConfigError(f"link is {link!r}: expected a Link, such as Link(up='float16').")
    if max_norm is not None:
        check(("a positive bound", lambda bound: bound > 0), max_norm=max_norm)
    if weights not in get_args(Weighting):
        raise ConfigError(f"weights is {weights!r}: expected 'examples' or 'uniform'.")
    if max_share is not None:
        check(AT_MOST_ONE, max_share=max_share)
    if target is not None:
        check(("an accuracy above 0 and at most 1, such as 0.8", lambda share: 0 < share <= 1), target=target)
    if engine not in ENGINES:
        raise ConfigError(f"unknown engine {engine!r}: expected one of {', '.join(ENGINES)}.")
    check_precision(precision, engine)
    if task.augment == "crop-flip" and len(data.train.shape) != 3:
        raise ConfigError(f"crop-flip of examples of shape {data.train.shape}: expected images. Use 'none'.")
    program = make_program(task.model, share)
    if algorithm.local.jacobian and not program.forms:
        raise ConfigError(
            "the Jacobian correction needs factorized weights: factorize the model, or leave it out."
        )
    if algorithm.local.jacobian and program.half_frozen:
        raise ConfigError(
            f"the Jacobian correction steps all factors of a weight, and of {program.half_frozen} only some train: "
            "set requires_grad of all of them alike, or leave it out."
        )
    if algorithm.local.jacobian and (over := covered(task.model)):
        raise ConfigError(
            f"the Jacobian correction steps the factors of a weight, and {over} has another parametrization on top "
            "of them: remove it, or leave the correction out."
        )
    refuse_untrainable(program, data, algorithm.local)
    if personal is None:
        personal = data.has_personal
    if personal and not data.has_personal:
        raise ConfigError("personal evaluation was asked for, and no client has test data of its own.")
    if task.test is not None and not len(task.test):
        raise ConfigError("the test data hold no example: expected some, or None for no test.")
    if task.test is not None and not program.private:
        refuse_unscorable(program, "the test data", task.test)
    if personal and data.personal is not None:
        refuse_unscorable(program, "the clients' test data", data.personal[0])
    if target is not None and not personal and (program.private or task.test is None):
        raise ConfigError(
            f"a target of {target} and no accuracy to hold it against: expected test data, and where parts of the "
            "model are private, each client's own."
        )
    session = Session(program, algorithm, link, seed)
    if not len(data.train) and max_share is None:  # nodes bring their own data, and state how much
        max_share = MAX_CLAIMED_SHARE
    schedule = Schedule(
        rounds,
        len(data),
        cohort,
        data.size,
        evaluate_every,
        max_norm,
        target,
        weights=weights,
        max_share=max_share,
    )
    return session, schedule, personal


def check_precision(precision: str | None, engine: str) -> None:
    if precision in (None, "float32"):
        return
    if precision not in get_args(Precision):
        raise ConfigError(
            f"unknown precision {precision!r}: expected one of {', '.join(get_args(Precision))}."
        )
    if engine not in ("auto", "batched"):
        raise ConfigError(f"precision {precision!r} is the batched engine's: {engine} computes in float32.")
    if not torch.cuda.is_available():
        raise ConfigError(f"precision {precision!r} needs a GPU: on the CPU expected float32.")


def refuse_hostless(engine: str) -> None:
    """ConfigError for an engine that cannot be made here: Flower starts us, not we it."""
    if engine == "flower":
        raise ConfigError(
            "engine 'flower' runs an experiment under Flower: use `fedpara run --engine flower`, or `flwr run` on a "
            "folder that `fedpara flower init` writes."
        )


def build_engine(
    name: str,
    session: Session,
    task: Task,
    data: FederatedData,
    memory: ClientMemory,
    cohort: int,
    precision: Precision | None = None,
    say: Callable[[str], None] | None = None,
) -> Engine:
    """The engine of that name. Under torchrun every rank has one, for its share of the cohort."""
    group = join()
    inner = _build_one(name, session, task, data, memory, cohort, precision, say, group)
    return inner if group.size == 1 else Distributed(group, inner, session)


def _build_one(
    name: str,
    session: Session,
    task: Task,
    data: FederatedData,
    memory: ClientMemory,
    cohort: int,
    precision: Precision | None,
    say: Callable[[str], None] | None,
    group: ProcessGroup,
) -> Engine:
    if name == "sequential":
        return Sequential(session, task, data, memory)
    reason = unsupported(session, data)
    size = -(-cohort // group.size)
    shape = None if reason else typical_shape(session, data, size)
    if shape is not None and name == "auto" and not torch.cuda.is_available():
        reason = slower_on_cpu(session, shape.lanes)
    if reason:
        return Sequential(
            session, task, data, memory, why=f"one client after another on the CPU; not batched: {reason}"
        )
    return Batched(
        session,
        task,
        data,
        memory,
        size=size,
        shape=shape,
        device=str(group.device) if group.device is not None else None,
        precision=precision,
        say=say,
        stream=group.rank,
        stay=group.size == 1,  # between ranks they travel
    )
