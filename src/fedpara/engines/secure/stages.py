"""How the stages of secure aggregation reach the clients.

An engine whose clients live elsewhere (Flower) carries the messages itself. For the others, `Simulated` keeps the
clients' side in this process. Its secrets come from the run's seed, so a run can be repeated; such a run is a study of
the protocol and hides nothing from whoever runs it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

from fedpara.engines.client import Reply
from fedpara.engines.distributed.process_group import join
from fedpara.engines.participation.cohorts import LOST
from fedpara.engines.secure.vector import masked_reply
from fedpara.engines.server.engine import Engine
from fedpara.engines.session import Session
from fedpara.errors import WireError
from fedpara.privacy import User
from fedpara.privacy.randomness import fresh_key
from fedpara.secure import SecAgg
from fedpara.secure.client import Participant
from fedpara.secure.messages import Stage
from fedpara.secure.primitives import seeded_secret
from fedpara.state import State
from fedpara.wire import Message


@runtime_checkable
class Stages(Protocol):
    def stage(
        self, stage: Stage, round: int, bodies: Mapping[int, bytes], message: Message, personal: bool
    ) -> Iterable[Reply]:
        """One reply per client of `bodies`, in their order. In the stage "masked" clients train on `message`."""


class Simulated:
    """The clients' side in this process, for one round. `lost` clients vanish after they have received the model."""

    def __init__(
        self, engine: Engine, session: Session, how: SecAgg, sent: State, lost: Collection[int]
    ) -> None:
        self._engine, self._session, self._how, self._sent, self._lost = engine, session, how, sent, lost
        self._participants: dict[int, Participant] = {}

    def stage(
        self, stage: Stage, round: int, bodies: Mapping[int, bytes], message: Message, personal: bool
    ) -> Iterator[Reply]:
        if stage == "masked":
            yield from self._train(round, bodies, message, personal)
            return
        for client, body in bodies.items():
            if stage == "keys":
                yield Reply(client, self._join(round, client).keys())
                continue
            participant = self._participants[client]
            try:
                yield Reply(client, getattr(participant, stage)(body))
            except WireError as error:
                yield Reply(client, reason=str(error))

    def _join(self, round: int, client: int) -> Participant:
        def secret(which: str) -> bytes:
            return seeded_secret(self._session.seed, "secagg", round, client, which)

        self._participants[client] = Participant.fresh(self._how, round, client, secret)
        return self._participants[client]

    def _secret_of_noise(self, round: int) -> bytes:
        """The secret from which the clients' noise is derived, equal on every rank.

        Empty without noise, and with seeded noise.
        """
        if not isinstance(self._session.privacy, User) or self._session.privacy_seed is not None:
            return b""
        return bytes.fromhex(join().agreed(f"the clients' noise of round {round}", fresh_key().hex()))

    def _train(
        self, round: int, bodies: Mapping[int, bytes], message: Message, personal: bool
    ) -> Iterator[Reply]:
        present = [client for client in bodies if client not in self._lost]
        secret = self._secret_of_noise(round)
        for reply in self._engine.train(round, present, message, personal) if present else ():
            if reply.message is None:
                yield reply
                continue
            participant = self._participants[reply.client]
            key = secret + reply.client.to_bytes(8, "little") if secret else b""
            sealed, why = masked_reply(
                self._session, participant, bodies[reply.client], reply, self._sent, key
            )
            yield replace(reply, message=sealed or None, reason=why)
        yield from (Reply(client, reason=LOST) for client in bodies if client in self._lost)
