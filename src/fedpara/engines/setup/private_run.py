"""Opens a run's session, and checks its privacy settings and budget before the first round."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from fedpara.algorithms import Algorithm, FromMean, Variables
from fedpara.data import FederatedData
from fedpara.engines.local.per_example import private_gradient
from fedpara.engines.local.worker import Worker
from fedpara.engines.participation.cohorts import Cohorts, find_sampler
from fedpara.engines.program import Program
from fedpara.engines.secure.checks import distributed_noise_problems, telling_cohorts
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.engines.setup.folding import make_folding
from fedpara.engines.setup.recycling import make_recycling
from fedpara.engines.setup.rotation import make_rotation
from fedpara.errors import ConfigError, in_a_line
from fedpara.privacy import Example, Privacy, Spending, User
from fedpara.privacy.accountant import default_delta
from fedpara.privacy.kinds import CLIP, PRIVACY
from fedpara.state import State
from fedpara.tasks import Task
from fedpara.wire import Link


def open_session(
    program: Program,
    algorithm: Algorithm,
    link: Link,
    *,
    seed: int,
    privacy: Privacy | None = None,
    privacy_seed: int | None = None,
    rotate: bool = False,
    fold_every: int | None = None,
    recycle: int = 0,
) -> Session:
    """The session that the server and its clients agree on."""
    rotation = make_rotation(program, algorithm) if rotate else None
    if rotation is not None:
        algorithm = rotation.of(algorithm)
    recycling = make_recycling(program, algorithm, recycle, seed) if recycle else None
    if recycling is not None:
        algorithm = recycling.of(algorithm)
    if privacy is not None and privacy.adaptive:
        algorithm = _sending_the_bound(algorithm, privacy.bound)
    folding = make_folding(program, algorithm, link, fold_every, seed)
    return Session(program, algorithm, link, seed, privacy, rotation, privacy_seed, folding, recycling)


def _sending_the_bound(algorithm: Algorithm, first: float) -> Algorithm:
    """The algorithm, whose server also keeps the bound of adaptive clipping and sends it to the clients."""

    def server_init(x: State) -> Variables:
        bound = torch.tensor(first, dtype=torch.float32)
        return {**algorithm.server_init(x), PRIVACY: {CLIP: bound}}

    def broadcast(server: Variables) -> Variables:
        own = {name: state for name, state in server.items() if name != PRIVACY}
        return {**algorithm.broadcast(own), PRIVACY: server[PRIVACY]}

    return replace(algorithm, server_init=server_init, broadcast=broadcast)


def private_spending(
    session: Session, settings: Settings, task: Task, data: FederatedData
) -> Spending | None:
    """What the run may spend; None if it is not private. ConfigError if it cannot be private as it is set up."""
    kind = session.privacy
    if kind is None:
        for name in ("epsilon", "delta", "privacy_seed"):
            if getattr(settings, name) is not None:
                raise ConfigError(
                    f"{name} is {getattr(settings, name)} without privacy: add one, such as user(noise=1.1, clip=0.5)."
                )
        return None
    problems = _user_problems if isinstance(kind, User) else _example_problems
    for problem in (*problems(session, settings, task, data), *_common_problems(session, settings)):
        raise ConfigError(f"privacy {kind} {problem}")
    units = len(data) if isinstance(kind, User) else len(data.train) or len(data)
    delta = default_delta(units) if settings.delta is None else settings.delta
    uses = None if isinstance(kind, User) else Uses(session, settings, data)
    hidden = isinstance(kind, User) and settings.secure is not None
    spending = Spending(
        kind,
        len(data),
        settings.cohort,
        delta,
        settings.epsilon,
        settings.privacy_seed,
        uses,
        hidden,
        telling_cohorts(len(data), settings.cohort) if hidden else 0.0,
    )
    for problem in distributed_noise_problems(spending, settings):
        raise ConfigError(f"privacy {kind} {problem}")
    spending.refuse_spent()
    return spending


def _common_problems(session: Session, settings: Settings) -> Iterator[str]:
    if buffers := session.program.buffers:
        yield (
            f"adds noise to weights, and the model also sends {buffers[0]!r}, which is averaged without noise: use "
            "GroupNorm or LayerNorm in place of BatchNorm."
        )
    if settings.delta == 0:
        yield "needs a delta above 0: a Gaussian has no epsilon at delta 0."


def _user_problems(session: Session, settings: Settings, task: Task, data: FederatedData) -> Iterator[str]:
    algorithm, kind = session.algorithm, session.privacy
    assert isinstance(kind, User)
    if settings.sampler != "poisson":
        sampler = settings.sampler if isinstance(settings.sampler, str) else "a function"
        yield f"needs sampler 'poisson', for which its cost is computed: the sampler is {sampler!r}."
    if settings.weights != "uniform":
        yield f"counts every client the same: weights is {settings.weights!r}, expected 'uniform'."
    if session.extras or not isinstance(algorithm.aggregate, FromMean):
        more = "its clients send more than the model" if session.extras else "it needs single updates"
        yield f"bounds one model per client, and with {algorithm.name} {more}: use fedavg, fedprox or fedadam."
    colluding = getattr(settings.attack, "collude", None) and settings.attack
    for name, given in (("robust", settings.robust), ("attack", colluding)):
        if given:
            yield f"adds updates up as they arrive, and {name} compares them: leave one of the two out."
    kind.update_noise(settings.cohort)  # raises if the bits of adaptive clipping cost too much


def _example_problems(session: Session, settings: Settings, task: Task, data: FederatedData) -> Iterator[str]:
    kind, local = session.privacy, session.algorithm.local
    assert isinstance(kind, Example)
    if local.jacobian:
        yield "bounds the gradient of each example, which the Jacobian correction changes: leave jacobian out."
    if session.algorithm.distill is not None:
        yield f"takes the gradient of the task's loss alone, and {session.algorithm.name} adds a term: use fedavg."
    some = data.some(2)
    if session.program.buffers or not len(some):
        return
    gradient = private_gradient(Worker(session.program, task), kind, 0)
    try:
        with torch.random.fork_rng(devices=[]):
            gradient(some.normalised(), some.targets)
    except Exception as error:  # the model may not work under vmap
        yield f"needs the gradient of each example, which this model does not give ({in_a_line(error)})."


class Uses:
    """How often the first rounds used the most used example: at most once per epoch of each of its client's rounds.

    With `steps` in place of epochs, at most once per begun pass over the client's data.
    """

    def __init__(self, session: Session, settings: Settings, data: FederatedData) -> None:
        self._local, self._size = session.algorithm.local, data.size
        sampler = find_sampler(settings.sampler, lambda: data.sizes)
        self._cohorts = Cohorts(session.cohort_seed, len(data), settings.cohort, sampler)
        self._counts, self._most = dict[int, int](), [0]

    def __call__(self, rounds: int) -> int:
        while len(self._most) <= rounds:
            for client in self._cohorts.draw(len(self._most)):
                self._counts[client] = self._counts.get(client, 0) + self._in_a_round(client)
            self._most.append(max(self._counts.values(), default=0))
        return self._most[rounds]

    def _in_a_round(self, client: int) -> int:
        local = self._local.of(client)
        if local.epochs is not None:
            return local.epochs
        batches = -(-self._size(client) // local.batch_size)
        return -(-local.steps_for(1) // max(1, batches))
