"""What secure aggregation cannot be combined with, and what it no longer checks."""

import math
from collections.abc import Iterator
from importlib.util import find_spec

from fedpara.algorithms import FromMean
from fedpara.engines.session import Session
from fedpara.engines.settings import Settings
from fedpara.errors import install
from fedpara.privacy import Spending, User
from fedpara.secure.distributed_noise import FEWEST_STEPS
from fedpara.secure.settings import SMALLEST, SecAgg

UNCHECKED = (
    "secure aggregation: the server sees only the sum of a round's updates. It cannot check a single update or its "
    "weight. Clients clip to a norm of {clip:g} and a range of {range:g} themselves; the server checks the "
    "range and the norm of the sum"
)
"""What the log of a run says at its start."""


def unchecked(settings: Settings) -> str:
    """The sentence for the log, or ""."""
    how = settings.secure
    if how is None or isinstance(how, str):
        return ""
    return UNCHECKED.format(clip=how.clip, range=how.range or how.clip)


def secure_problems(session: Session, settings: Settings) -> Iterator[str]:
    """Why these settings cannot run with secure aggregation. The server has only the sum of the updates."""
    if settings.secure is None:
        return
    algorithm, program = session.algorithm, session.program
    if find_spec("flwr") is None:
        yield f"secure aggregation uses Flower's primitives: {install('flower')}"
    if not isinstance(algorithm.aggregate, FromMean):
        yield f"secure aggregation gives only the sum of the updates, and {algorithm.name!r} needs each one."
    if session.extras:
        yield f"secure aggregation sums models, and {algorithm.name!r} sends more than the model: use fedavg."
    if session.link.up != "float32":
        yield (
            f"secure aggregation has its own encoding of uploads, and link_up is {session.link.up!r}: leave it out and "
            "set the precision with bits, as in secagg(bits=16)."
        )
    if settings.max_norm is not None:
        yield (
            "max_norm checks each update, and secure aggregation hides them: leave it out, and bound the norm with "
            "clip, as in secagg(clip=2.0)."
        )
    if settings.robust is not None:
        yield "robust compares single updates, and secure aggregation hides them: choose one of the two."
    if session.differences:
        yield f"secure aggregation sends whole models, and link_down {session.link.down!r} sends differences: use int8."
    if session.rotation is not None:
        yield "secure aggregation masks whole models, and rotate sends a part: leave one of them out."
    if getattr(settings.attack, "collude", None):
        yield "secure aggregation hides single updates, which this attack compares: use another one, such as sign-flip."
    if not program.shared:
        yield "secure aggregation sums what clients share, and this run shares no parameter."
    if any(program.initial[name].is_floating_point() for name in program.shared_buffers):
        yield (
            "secure aggregation bounds the norm of an update, and BatchNorm's statistics have no such bound: use a "
            "model without BatchNorm, such as resnet18-gn."
        )
    if settings.cohort < SMALLEST:
        yield (
            f"a cohort of {settings.cohort} with secure aggregation: expected {SMALLEST} clients or more, so that a "
            "sum hides each of them."
        )


def distributed_noise_problems(spending: Spending, settings: Settings) -> Iterator[str]:
    """Why the clients of these settings cannot add the noise themselves."""
    kind, how = spending.kind, settings.secure
    if not spending.hidden:
        return
    assert isinstance(kind, User)
    assert isinstance(how, SecAgg)
    if kind.adaptive:
        yield "counts how many updates are below its bound, which secure aggregation hides: leave quantile out."
    if how.clip != kind.bound:
        yield f"and {how} clip the same update to different norms: set secagg(clip={kind.bound!r})."
    steps = how.share(kind.sum_noise, spending.clients) / how.step
    if steps < FEWEST_STEPS:
        yield (
            f"gives each client noise of {steps:.2g} steps of fixed point, in which it is not a Gaussian: expected "
            f"{FEWEST_STEPS:g} or more, so raise bits in {how}."
        )
    if (width := how.width(spending.clients, kind.sum_noise)) > 8:
        yield f"needs {width} bytes for a masked number: expected at most 8, so lower bits in {how}."


def telling_cohorts(clients: int, cohort: int) -> float:
    """P(Binomial(N - 1, q) = 2): two of the other clients are chosen, so one client decides if there is a sum."""
    q, others = cohort / clients, SMALLEST - 1
    return math.comb(clients - 1, others) * q**others * (1 - q) ** (clients - 1 - others) if q < 1 else 0.0
