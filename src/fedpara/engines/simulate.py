"""simulate: a whole federated run in one call."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fedpara.algorithms import Algorithm
from fedpara.algorithms.core import Weighting
from fedpara.attacks import Attack, poisoned
from fedpara.data import FederatedData
from fedpara.engines.batched.engine import Batched
from fedpara.engines.batched.round_plan import typical_shape
from fedpara.engines.batched.support import slower_on_cpu, unsupported
from fedpara.engines.checks import check_run, tell_unused_test_set
from fedpara.engines.device import find_device
from fedpara.engines.distributed.engine import Distributed, RankMemory
from fedpara.engines.distributed.process_group import Part, ProcessGroup, join
from fedpara.engines.local.engine import Sequential
from fedpara.engines.memory import ClientMemory, InMemory
from fedpara.engines.participation.cohorts import Cohorts, Sampler, find_sampler
from fedpara.engines.participation.devices import Devices
from fedpara.engines.program import make_program
from fedpara.engines.progress import Round, Schedule
from fedpara.engines.result import Run, tell_untrained
from fedpara.engines.server.by_gamma import ByGamma
from fedpara.engines.server.engine import Engine
from fedpara.engines.server.guard import attacked, hostile_of, make_guard
from fedpara.engines.server.levels import make_levels
from fedpara.engines.server.products import make_products
from fedpara.engines.server.rounds import run_rounds
from fedpara.engines.server.scores import with_everyone
from fedpara.engines.session import Session
from fedpara.engines.settings import Precision, Settings
from fedpara.engines.setup.folding import refuse_with_folding
from fedpara.engines.setup.private_run import open_session, private_spending
from fedpara.engines.setup.recycling import refuse_others
from fedpara.errors import ConfigError
from fedpara.privacy import Privacy
from fedpara.robust import Defence
from fedpara.secure import SecAgg
from fedpara.tasks import Task
from fedpara.wire import Link

MAX_CLAIMED_SHARE = 0.5
"""The default of `max_share` if only the clients know how many examples they have."""


def simulate(
    task: Task,
    data: FederatedData,
    algorithm: Algorithm,
    *,
    rounds: int,
    cohort: int,
    seed: int = 0,
    link: Link | None = None,
    share: str = "all",
    engine: str = "auto",
    precision: Precision | None = None,
    device: str | None = None,
    evaluate_every: int = 1,
    personal: bool | None = None,
    max_norm: float | None = None,
    weights: Weighting = "examples",
    max_share: float | None = None,
    target: float | None = None,
    sampler: str | Sampler = "uniform",
    lost: float = 0.0,
    devices: Devices | None = None,
    patience: int | None = None,
    products: str = "mean",
    aggregation_error: bool = False,
    gammas: Sequence[float] | None = None,
    robust: str | Defence | None = None,
    attack: str | Attack | None = None,
    hostile: float = 0.0,
    rotate: bool = False,
    recycle: int = 0,
    privacy: str | Privacy | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    privacy_seed: int | None = None,
    secure: str | SecAgg | None = None,
    fold_every: int | None = None,
    memory: ClientMemory | None = None,
    on_round: Callable[[Round], object] | None = None,
) -> Run:
    """Run `algorithm` on the federation for `rounds` rounds with `cohort` clients each.

    The scores are those of the global model on `task.test`. If parts of the model are private, or there is no test
    set, they are means over the cohort of each client's own model on its own test data, after training and before
    aggregation.

    task            the model, its test set and the augmentation
    data            who holds which examples
    algorithm       such as `algorithms.fedavg(lr=0.1)`
    rounds          how many rounds to run
    cohort          how many clients take part in each round
    seed            decides every random draw of the run
    link            the encoding of messages in each direction, such as `Link(up="float16")` or
                    `Link(up="topk(0.01, feedback=True)", down="int8")`
    share           what clients send: "all", "fedper" (all but the layer registered last), "none", or "all but head,
                    norm1" for modules and parameters by name; pFedPara's second factors are never sent
    engine          "auto", "batched" or "sequential"
    precision       on a GPU: "float32", "tf32" or "bfloat16"; by default the fastest in the batched engine, and float32
                    in the sequential one
    device          "cuda", "cuda:1" or "cpu"; by default the GPU if there is one
    evaluate_every  score the model after every this many rounds, and after the last
    personal        score each client's own model on its own test data; by default if the clients have any
    max_norm        refuse an update farther than this from the model that was sent, counting changes of control
                    variates and of BatchNorm's statistics
    weights         "examples" weights each update by the client's number of examples, "uniform" weights all alike;
                    SCAFFOLD and FedDyn are uniform by definition
    max_share       the largest share of a round's weight that one client may have, such as 0.5
    target          stop when the primary metric reaches this value, such as an accuracy of 0.8
    sampler         who takes part: "uniform", "poisson" (each client independently with probability cohort / clients,
                    so cohorts vary in size and may be empty), "by-data" (with a probability proportional to its
                    examples), or a function (round, clients, cohort, generator) that returns client numbers and draws
                    from the generator only
    lost            the probability that a chosen client is lost in a round: it receives the model and sends nothing
    devices         the clients' bandwidth and speed, such as `Devices(bandwidth=lognormal(1e6, 0.5), speed=20)`: each
                    round then has a simulated clock, and a deadline refuses clients that are too slow
    patience        stop after this many evaluations without a better score
    products        "mean" averages each factor, "refit" takes the factors nearest to the mean of the composed weights
    aggregation_error  measure in each round how far these two are apart (`Round.aggregation_error`)
    gammas          a gamma per client: client i has gammas[i % len(gammas)] and the model must have the largest
    robust          how the server defends itself against hostile clients: "auto", "rfa", "trimmed-mean(0.2)", or a
                    Defence of `fedpara.robust`; by default it takes the algorithm's mean
    attack          what hostile clients do, for studies: "label-flip", "backdoor(target=3)", or an Attack of
                    `fedpara.attacks`
    hostile         the share of the clients that are hostile, such as 0.2; the seed decides which
    rotate          train and send one factor of every weight per round, in turn: averaging is then exact, and uploads
                    are two to four times smaller
    recycle         how many layers the clients leave out of a round's updates: the server repeats its last update of
                    them (FedLUAR)
    privacy         `privacy.User(noise=1.1, clip=0.5)`: the models hide whether any one client took part; needs
                    sampler="poisson" and weights="uniform". `privacy.Example(noise=1.0, clip=1.0)`: what a client
                    sends hides whether any one of its examples was there
    epsilon         the privacy budget: the run stops before a round that would exceed it
    delta           the delta of every epsilon; by default N^-1.1 for N clients, or examples for example-level
                    privacy
    privacy_seed    draws the noise from this seed: for tests, because such a run is not private
    secure          "secagg" or "secagg(clip=0.5)": secure aggregation, so that the server learns only the sum of a
                    round's updates
    fold_every      after every this many rounds, add the change of each adapter to its base and start the factors
                    again; needs a model of `factorize(..., onto="frozen", train="*")`
    memory          where client memories are stored: an object with `get(client)` and
                    `put(client, round, variables)`
    on_round        called with the result of each round; the run ends if it returns False
    """
    settings = Settings(
        rounds=rounds,
        cohort=cohort,
        seed=seed,
        link=link or Link(),
        share=share,
        engine=engine,
        precision=precision,
        device=device,
        evaluate_every=evaluate_every,
        personal=personal,
        max_norm=max_norm,
        weights=weights,
        max_share=max_share,
        target=target,
        sampler=sampler,
        lost=lost,
        devices=devices,
        patience=patience,
        products=products,
        aggregation_error=aggregation_error,
        gammas=gammas,
        robust=robust,
        attack=attack,
        hostile=hostile,
        rotate=rotate,
        recycle=recycle,
        privacy=privacy,
        epsilon=epsilon,
        delta=delta,
        privacy_seed=privacy_seed,
        secure=secure,
        fold_every=fold_every,
    )
    refuse_flower_engine(engine)
    task = with_own_test(task, data)
    session, schedule, scored = prepare(task, data, algorithm, settings)
    tell_unused_test_set(session.program, task, scored)
    memory = InMemory() if memory is None else memory
    results: list[Round] = []
    with join().in_step("the end of the run"):
        chosen = build_engine(settings, session, task, data, memory)
        for result in run_rounds(session, chosen, schedule, scored):
            if results:
                results[-1] = without_tensors(results[-1])
            results.append(result)
            if on_round is not None and says_stop(on_round(result)):
                if scored and result.everyone is None:
                    results[-1] = with_everyone(session, chosen, schedule, result)
                break
    if isinstance(chosen, Distributed):
        memory = RankMemory(memory, chosen)
    tell_untrained(results)
    return Run(session, memory, tuple(results), f"{chosen.name}: {chosen.why}", len(data))


def with_own_test(task: Task, data: FederatedData) -> Task:
    """The task, scored on the test set of the data if it has none itself."""
    return replace(task, test=data.test) if task.test is None and data.test is not None else task


def says_stop(answer: object) -> bool:
    """Whether `on_round` returned False on some rank, so that all ranks stop in the same round."""
    stop = isinstance(answer, bool | np.bool_) and not answer
    return any(part.header["stop"] for part in join().gather("on_round", lambda: Part({"stop": stop})))


def without_tensors(result: Round) -> Round:
    """The result without the server's tensors, which would take 12 GB over 200 rounds of VGG16."""
    return replace(
        result, progress=replace(result.progress, x={}, buffers={}, server={}, known=None, folds=None)
    )


def prepare(
    task: Task, data: FederatedData, algorithm: Algorithm, settings: Settings
) -> tuple[Session, Schedule, bool]:
    """(session, schedule, whether clients are scored), after all checks and before anything runs."""
    if algorithm.local.schedule is not None:
        algorithm = replace(algorithm, local=replace(algorithm.local, rounds=settings.rounds))
    refuse_others(settings)
    program = make_program(task.model, settings.share)
    session = open_session(
        program,
        attacked(algorithm, program, settings, len(data)),
        settings.link,
        seed=settings.seed,
        privacy=settings.privacy,  # type: ignore[arg-type]  # Settings has read it
        privacy_seed=settings.privacy_seed,
        rotate=settings.rotate,
        fold_every=settings.fold_every,
        recycle=settings.recycle,
    )
    refuse_with_folding(settings)
    personal = data.has_personal if settings.personal is None else settings.personal
    check_run(session, task, data, settings, personal)
    spending = private_spending(session, settings, task, data)
    max_share = settings.max_share
    if not len(data.train) and max_share is None:  # only the nodes know how many examples they have
        max_share = MAX_CLAIMED_SHARE
    if settings.devices is not None:
        settings.devices.expect_clients(len(data))
    schedule = Schedule(
        settings.rounds,
        len(data),
        settings.cohort,
        data.size,
        settings.evaluate_every,
        settings.max_norm,
        settings.target,
        weights=settings.weights,
        max_share=max_share,
        primary=task.primary,
        higher_is_better=task.higher_is_better,
        sampler=find_sampler(settings.sampler, lambda: data.sizes),
        lost=settings.lost,
        devices=settings.devices,
        patience=settings.patience,
        products=make_products(session, settings),
        levels=make_levels(session, settings, personal),
        guard=make_guard(session, task, data, settings),
        spending=spending,
        secure=settings.secure,  # type: ignore[arg-type]  # Settings has read it
    )
    schedule.cohorts(session.seed).draw(1)  # raises if a custom sampler returns something else than clients
    return session, schedule, personal


def refuse_flower_engine(engine: str) -> None:
    """ConfigError for engine "flower": Flower launches fedpara, not the reverse."""
    if engine == "flower":
        raise ConfigError(
            "engine 'flower' runs an experiment under Flower: use `fedpara run --engine flower`, or `flwr run` on a "
            "folder that `fedpara flower init` writes."
        )


def build_engine(
    settings: Settings, session: Session, task: Task, data: FederatedData, memory: ClientMemory
) -> Engine:
    """The engine that the settings name. Under torchrun every rank builds one, for its share of the cohort."""
    group = join()
    if (levels := make_levels(session, settings, personal=False)) is not None:
        cohort = -(-settings.cohort // len(levels.sessions))
        one = replace(settings, gammas=None, cohort=cohort)
        return ByGamma(levels, lambda own: build_engine(one, own, task, data, memory))
    if isinstance(settings.attack, Attack):
        data = poisoned(settings.attack, data, hostile_of(settings, len(data)), settings.seed)
    inner = _build_on_this_rank(settings, session, task, data, memory, group)
    return inner if group.size == 1 else Distributed(group, inner, session)


def _build_on_this_rank(
    settings: Settings,
    session: Session,
    task: Task,
    data: FederatedData,
    memory: ClientMemory,
    group: ProcessGroup,
) -> Engine:
    device = find_device(settings.device)
    if group.device is not None and device.type == "cuda":
        device = group.device
    alone = group.size == 1  # ranks exchange updates, so they must be on the host

    def sequential(reason: str = "") -> Engine:
        return Sequential(
            session, task, data, memory, reason, device=device, precision=settings.precision, stay=alone
        )

    if settings.engine == "sequential":
        return sequential()
    reason = unsupported(session, task, data)
    size = -(-settings.cohort // group.size)
    sampler = find_sampler(settings.sampler, lambda: data.sizes)
    cohorts = Cohorts(session.cohort_seed, len(data), size, sampler, settings.lost)
    shape = None if reason else typical_shape(session, data, cohorts)
    if shape is not None and settings.engine == "auto" and device.type == "cpu":
        reason = slower_on_cpu(session, shape.lanes)
    if reason:
        return sequential(f"not batched: {reason}")
    return Batched(
        session,
        task,
        data,
        memory,
        cohorts=cohorts,
        shape=shape,
        device=str(device),
        precision=settings.precision,
        stream=group.rank,
        stay=alone,
    )
