"""Collects a round under secure aggregation: four exchanges with the cohort, and one sum at the end.

The server cannot check a single update. A client bounds its own (its norm by clipping, its range by fixed point). The
server checks the sum: it is finite by construction, and its norm must be within the bound of all clients together.

With user-level privacy the clients have added noise to the sum (`secure.distributed_noise`). As in `server.private`, it
is divided by the expected cohort.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedpara.algorithms import FromMean, Variables
from fedpara.algorithms.core import Mean
from fedpara.engines.client import Reply
from fedpara.engines.participation.cohorts import LOST
from fedpara.engines.progress import Progress, Schedule
from fedpara.engines.secure.stages import Simulated, Stages
from fedpara.engines.secure.vector import length_of, moved
from fedpara.engines.server.aggregation import round_weights
from fedpara.engines.server.collect import Collected
from fedpara.engines.server.engine import Engine
from fedpara.engines.server.private import noise_key
from fedpara.engines.server.products import AggregationError
from fedpara.engines.session import Session
from fedpara.privacy import User
from fedpara.privacy.randomness import Noise
from fedpara.secure.distributed_noise import server_noise
from fedpara.secure.fixed_point import Floats
from fedpara.secure.messages import Stage
from fedpara.secure.server import Aggregation, Skipped
from fedpara.state import State
from fedpara.wire import Message, Meter


class SecureMean:
    """A round's mean change in place of its updates; as `Aggregator`, it makes the next model."""

    error: AggregationError | None = None  # not measured: it needs the single updates

    def __init__(self, session: Session, progress: Progress, change: Floats, count: int) -> None:
        self._session, self._progress, self._change, self._count = session, progress, change, count

    def aggregate(self, server: Variables, clients: int, round: int) -> tuple[State, Variables, State]:
        """(the next x, the server's variables, the buffers as before)"""
        aggregate, x = self._session.algorithm.aggregate, self._progress.x
        assert isinstance(aggregate, FromMean)
        mean = Mean(moved(self._session, x, self._change), {}, self._count)
        fresh, variables = aggregate.step(x, server, mean, clients)
        return fresh, variables, self._progress.buffers


class SecureRound:
    """One round: `collect` asks the cohort four times."""

    def __init__(
        self, session: Session, schedule: Schedule, progress: Progress, message: Message, meter: Meter
    ) -> None:
        assert schedule.secure is not None
        self.session, self.schedule, self.progress, self.message = session, schedule, progress, message
        self.meter, self.round, self.how = meter, progress.round + 1, schedule.secure
        self.collected = Collected()
        self.gone: dict[int, str] = {}

    def collect(
        self, engine: Engine, chosen: Sequence[int], lost: Sequence[int], sent: State, personal: bool
    ) -> Collected:
        stages: Stages
        if isinstance(engine, Stages):  # its clients are real: a lost one is not asked
            stages, asked = engine, [client for client in chosen if client not in lost]
            self.gone = dict.fromkeys(lost, LOST)
        else:
            stages, asked = Simulated(engine, self.session, self.how, sent, lost), list(chosen)
        kind, length = self.session.privacy, length_of(self.session)
        noise = kind.sum_noise if isinstance(kind, User) else 0.0
        aggregation = Aggregation(self.how, self.round, chosen, length, self.session.seed, noise)
        try:
            total, weight = self._sum(stages, aggregation, asked, personal)
            change, count = total / weight, len(aggregation.arrived)
            if noise:
                change, count = self._private_mean(total, aggregation)
            self.collected.aggregator = SecureMean(self.session, self.progress, change, count)
            self.collected.diverged.clear()
        except Skipped as error:
            self.collected.notes.append(f"round {self.round}: secure aggregation gave no sum: {error}")
            if self.collected.replies:
                self.collected.diverged.clear()
            self.collected.replies.clear()
        for client, why in aggregation.refused.items():
            self.gone.setdefault(client, why)
        arrived = {*aggregation.arrived}
        self.collected.replies = [reply for reply in self.collected.replies if reply.client in arrived]
        accepted = {reply.client for reply in self.collected.replies}
        self.collected.refused += [
            (client, self.gone[client]) for client in chosen if client in self.gone and client not in accepted
        ]
        return self.collected

    def _sum(
        self, stages: Stages, aggregation: Aggregation, asked: Sequence[int], personal: bool
    ) -> tuple[Floats, float]:
        """(the sum of the changes, of the weights)"""

        def ask(stage: Stage, bodies: Mapping[int, bytes]) -> Iterator[tuple[int, bytes]]:
            replies = stages.stage(stage, self.round, bodies, self.message, personal)
            return self._received(stage, bodies, replies)

        keys = dict(ask("keys", dict.fromkeys(asked, b"")))
        shares = dict(ask("shares", aggregation.receive_keys(keys)))
        masked = ask("masked", aggregation.receive_shares(shares, self._weights(aggregation.cohort)))
        survivors = aggregation.receive_masked(masked)
        return aggregation.receive_unmask(dict(ask("unmask", survivors)))

    def _private_mean(self, total: Floats, aggregation: Aggregation) -> tuple[Floats, int]:
        """(the noisy sum over the expected cohort q N, and q N). The noise has the same variance in every round."""
        spending, stayed = self.schedule.spending, len(aggregation.arrived)
        assert spending is not None
        own = server_noise(aggregation.noise, self.how, len(aggregation.cohort), stayed)
        drawn = Noise(noise_key(spending, self.round)).draw(len(total))
        return (total + own * drawn) / spending.cohort, spending.cohort

    def _received(
        self, stage: Stage, bodies: Mapping[int, bytes], replies: Iterable[Reply]
    ) -> Iterator[tuple[int, bytes]]:
        """Counts and yields the messages that arrive. A client that sends none has left the round."""
        waiting = dict.fromkeys(bodies)
        for reply in replies:
            client = reply.client
            self.meter.up(self.round, client, reply.unread if reply.message is None else reply.message)
            if reply.late:
                self.collected.notes.append(
                    f"round {self.round}: client {client}'s reply to round {reply.late} came too late and is refused"
                )
                continue
            if client not in waiting:
                self.collected.notes.append(
                    f"client {client} replied twice or was not asked: that reply is dropped"
                )
                continue
            del waiting[client]
            if reply.reached:
                self._sent(stage, client, bodies[client])
            if reply.message is None or (stage == "masked" and self._is_late(client)):
                if reply.message is None:
                    self.gone.setdefault(client, f"it left at the stage {stage!r}: {reply.reason}")
                self.collected.diverged += [(client, reply.reason)] if reply.diverged else []
                continue
            if stage == "masked":
                self.collected.replies.append(replace(reply, message=None))
            yield client, bytes(reply.message)
        for client in waiting:
            self._sent(stage, client, bodies[client])
            self.gone.setdefault(client, f"it left at the stage {stage!r}: it sent no reply")

    def _sent(self, stage: Stage, client: int, body: bytes) -> None:
        self.meter.down(self.round, client, body)
        if stage == "masked":
            self.meter.down(self.round, client, self.message)

    def _is_late(self, client: int) -> bool:
        """Whether the client misses the simulated deadline."""
        devices, traffic = self.schedule.devices, self.meter.by_client[client]
        if devices is None:
            return False
        steps = self.session.algorithm.local.of(client).steps_for(self.schedule.examples(client))
        waited, late = devices.wait(self.session.seed, client, steps, traffic.down, traffic.up)
        self.collected.seconds = max(self.collected.seconds, waited)
        if late:
            self.gone[client] = late
        return bool(late)

    def _weights(self, chosen: Sequence[int]) -> dict[int, float]:
        """a_i = w_i / max_j w_j"""
        aggregate = self.session.algorithm.aggregate
        uniform = isinstance(aggregate, FromMean) and aggregate.weights == "uniform"
        counts = {client: self.schedule.examples(client) for client in chosen}
        weighting = "uniform" if uniform else self.schedule.weights
        weights, notes = round_weights(counts, weighting, self.schedule.max_share)
        self.collected.notes += [f"round {self.round}: {note}" for note in notes]
        most = max(weights.values(), default=1.0)
        return {client: weight / most for client, weight in weights.items()}
