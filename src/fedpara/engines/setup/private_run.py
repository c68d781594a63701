"""A private run before its first round: its session, what it may spend, and why it cannot be private."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from fedpara.algorithms import Algorithm, FromMean, Variables
from fedpara.engines.program import Program
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.engines.setup.rotation import make_rotation
from fedpara.errors import ConfigError
from fedpara.privacy import Privacy, Spending
from fedpara.privacy.accountant import default_delta
from fedpara.privacy.kinds import CLIP, PRIVACY
from fedpara.state import State
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
) -> Session:
    """The session that the server and its clients agree on."""
    rotation = make_rotation(program, algorithm) if rotate else None
    if rotation is not None:
        algorithm = rotation.of(algorithm)
    if privacy is not None and privacy.adaptive:
        algorithm = _sending_the_bound(algorithm, privacy.bound)
    secret = privacy is not None and privacy_seed is None
    return Session(program, algorithm, link, seed, privacy, rotation, secret)


def _sending_the_bound(algorithm: Algorithm, first: float) -> Algorithm:
    """The algorithm, whose server also keeps the bound of adaptive clipping and sends it to the clients."""

    def server_init(x: State) -> Variables:
        bound = torch.tensor(first, dtype=torch.float32)
        return {**algorithm.server_init(x), PRIVACY: {CLIP: bound}}

    def broadcast(server: Variables) -> Variables:
        own = {name: state for name, state in server.items() if name != PRIVACY}
        return {**algorithm.broadcast(own), PRIVACY: server[PRIVACY]}

    return replace(algorithm, server_init=server_init, broadcast=broadcast)


def private_spending(session: Session, settings: Settings, clients: int) -> Spending | None:
    """What the run may spend; None if it is not private. ConfigError if it cannot be private as it is set up."""
    kind = session.privacy
    if kind is None:
        for name in ("epsilon", "delta", "privacy_seed"):
            if getattr(settings, name) is not None:
                raise ConfigError(
                    f"{name} is {getattr(settings, name)} without privacy: add one, such as user(noise=1.1, clip=0.5)."
                )
        return None
    for problem in _problems(session, settings):
        raise ConfigError(f"privacy {kind} {problem}")
    delta = default_delta(clients) if settings.delta is None else settings.delta
    spending = Spending(kind, clients, settings.cohort, delta, settings.epsilon, settings.privacy_seed)
    kind.update_noise(settings.cohort)  # raises if the bits of adaptive clipping cost too much
    spending.refuse_spent()
    return spending


def _problems(session: Session, settings: Settings) -> Iterator[str]:
    algorithm, program = session.algorithm, session.program
    if settings.sampler != "poisson":
        sampler = settings.sampler if isinstance(settings.sampler, str) else "a function"
        yield f"needs sampler 'poisson', for which its cost is computed: the sampler is {sampler!r}."
    if settings.weights != "uniform":
        yield f"counts every client the same: weights is {settings.weights!r}, expected 'uniform'."
    if session.extras or not isinstance(algorithm.aggregate, FromMean):
        more = "its clients send more than the model" if session.extras else "it needs single updates"
        yield f"bounds one model per client, and with {algorithm.name} {more}: use fedavg, fedprox or fedadam."
    if program.shared_buffers:
        yield (
            f"adds noise to weights, and the model also sends {program.shared_buffers[0]!r}, which is averaged without "
            "noise: use GroupNorm or LayerNorm in place of BatchNorm."
        )
    if settings.delta == 0:
        yield "needs a delta above 0: a Gaussian has no epsilon at delta 0."
