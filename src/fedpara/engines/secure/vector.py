"""The shared part of a model as one vector: a client's change of it, and the server's model from the mean change."""

import numpy as np
import torch

from fedpara.engines.client import Reply
from fedpara.engines.rng import numpy_rng
from fedpara.engines.session import Session
from fedpara.errors import WireError
from fedpara.privacy import User
from fedpara.privacy.randomness import Noise, fresh_key, seeded_key
from fedpara.secure.client import Participant
from fedpara.secure.distributed_noise import ClientNoise
from fedpara.secure.fixed_point import Floats
from fedpara.state import State
from fedpara.wire import AnyMessage, decode


def client_noise(session: Session, participant: Participant, key: bytes) -> ClientNoise | None:
    """The client's share of the noise in this round; None if the run does not hide clients."""
    if not isinstance(session.privacy, User):
        return None
    if session.privacy_seed is not None:
        key = seeded_key(session.privacy_seed, participant.round, participant.client)
    return ClientNoise(session.privacy.sum_noise, Noise(key or fresh_key()))


def length_of(session: Session) -> int:
    """The number of values in a client's update."""
    return sum(session.program.initial[name].numel() for name in session.program.shared)


def change_of(session: Session, message: AnyMessage, sent: State) -> Floats:
    """y - x of the shared parameters, from the message that the client would send without secure aggregation.

    A tensor that the message leaves out counts as unchanged.
    """
    _, state = decode(message, session.exact)
    changes = [
        (state[name].cpu().double() - sent[name].cpu().double()).reshape(-1)
        if name in state
        else torch.zeros(sent[name].numel(), dtype=torch.float64)
        for name in session.program.shared
    ]
    return np.asarray(torch.cat(changes).numpy(), np.float64)


def moved(session: Session, x: State, change: Floats) -> State:
    """x + change, in the types of x. A checkpoint may hold x in another order than the vector."""
    names = session.program.shared
    parts = torch.from_numpy(change).split([x[name].numel() for name in names])
    changes = dict(zip(names, parts, strict=True))
    return {
        name: (tensor.double() + changes[name].view(tensor.shape)).to(tensor.dtype)
        for name, tensor in x.items()
    }


def masked_reply(
    session: Session, participant: Participant, body: bytes, reply: Reply, sent: State, key: bytes = b""
) -> tuple[bytes, str]:
    """(the masked vector of a trained client, ""), or (b"", the reason why there is none)

    `key` is the key of the client's noise in a private run. If it is empty, the noise has a fresh key.
    """
    assert reply.message is not None
    change = change_of(session, reply.message, sent)
    rng = numpy_rng(session.seed, "secure", participant.round, participant.client)
    try:
        return participant.masked(body, change, rng, client_noise(session, participant, key)), ""
    except WireError as error:
        return b"", str(error)
