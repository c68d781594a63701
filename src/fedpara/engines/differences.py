"""A downlink that sends differences, and what a client needs that missed some of them.

    message t = encode(x_t - x^_(t-1)),   x^_t = x^_(t-1) + what the message decodes to

x^ is the server's state as the clients know it, with the same bits at both ends. x^_0 is the initial state, which every
client builds itself. What a message leaves out is part of the next difference: this is error feedback, and x - x^ is
the server's residue.

A client has x^_a of the last round a in which the server accepted its update. In round t it receives the messages
a + 1 to t, or a float32 copy of x^_t in their place, whichever takes fewer bytes. Both count as bytes sent down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedpara.state import State
from fedpara.wire import AnyMessage, Message


@dataclass(frozen=True, eq=False)
class Known:
    """What the clients know between two rounds; part of a checkpoint."""

    state: State  # x^, without the tensors that every message holds in full
    sizes: tuple[int, ...] = ()  # the bytes of each round's message
    last: Mapping[int, int] = field(default_factory=dict)  # the round a of each client; 0 if not here
    messages: tuple[bytes, ...] = ()  # the last ones, as many as a client may need


class PerClient(Message):
    """A message with which clients receive different numbers of bytes."""

    def bytes_to(self, client: int) -> int:
        """What this client receives in the message's round."""
        raise NotImplementedError

    def to(self, client: int) -> tuple[AnyMessage, ...]:
        """The messages that this client receives; their lengths add up to `bytes_to`."""
        raise NotImplementedError

    def last(self, client: int) -> int:
        """The round of what the client has; 0 before its first one."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Differences(PerClient):
    """A round's message, with what it leads to and what came before. Only `to` and the message itself are sent."""

    received: State  # the whole state that a client has afterwards
    known: Known  # before this message
    copy: Message  # `received` in float32

    def bytes_to(self, client: int) -> int:
        """What this client receives so that it has x^_t."""
        return min(len(self.copy), self._missed(client) + len(self))

    def to(self, client: int) -> tuple[AnyMessage, ...]:
        if self._missed(client) + len(self) >= len(self.copy):
            return (self.copy,)
        count = len(self.known.sizes) - self.last(client)
        return (*self.known.messages[len(self.known.messages) - count :], self)

    def last(self, client: int) -> int:
        """The round whose x^ the client has."""
        return self.known.last.get(client, 0)

    def _missed(self, client: int) -> int:
        return sum(self.known.sizes[self.last(client) :])


def bytes_to(message: Message, client: int) -> int:
    """The bytes that the client receives in this message's round."""
    return message.bytes_to(client) if isinstance(message, PerClient) else len(message)


def known_after(message: Message, accepted: Sequence[int]) -> Known | None:
    """What the clients know after a round; None if the message is no difference."""
    if not isinstance(message, Differences):
        return None
    known = message.known
    sizes, kept = (*known.sizes, len(message)), needed((*known.messages, bytes(message)), len(message.copy))
    state = {name: message.received[name] for name in known.state}
    return Known(state, sizes, {**known.last, **dict.fromkeys(accepted, len(sizes))}, kept)


def needed(messages: tuple[bytes, ...], copy: int) -> tuple[bytes, ...]:
    """The last of the messages: a client that lacks an earlier one gets a copy, of so many bytes."""
    later = 0
    for count, one in enumerate(reversed(messages)):
        if later > copy:
            return messages[-count:]
        later += len(one)
    return messages
