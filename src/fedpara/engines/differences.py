"""A downlink that sends differences, and the messages for clients that missed some of them.

    message t = encode(x_t - x^_(t-1)),   x^_t = x^_(t-1) + what the message decodes to

x^ is the server's state as the clients know it, with the same bits at both ends. x^_0 is the initial state, which every
client builds itself. What a message leaves out is part of the next difference: this is error feedback, and x - x^ is
the server's residue.

A client has x^_a of the last round a in which the server accepted its update. In round t it receives the messages
a + 1 to t, or a float32 copy of x^_t in their place, whichever takes fewer bytes. Both count as bytes sent down.

On a grid (`Moves`) x^_t is x_t rounded to multiples of a power of two per tensor. Differences of such states are exact,
so one message takes the place of the messages a + 1 to t:

    message a to t = x^_t - x^_a,   exactly

The server keeps the x^_a that a client may have, on the device of the model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedpara.engines.threads import STREAMS, THREADS, own_stream, ready_on
from fedpara.engines.transfer import HOST, move
from fedpara.state import State, device_of
from fedpara.wire import AnyMessage, Message


@dataclass(frozen=True, eq=False)
class Known:
    """What the clients know between two rounds; part of a checkpoint."""

    state: State  # x^, without the tensors that every message holds in full
    sizes: tuple[int, ...] = ()  # the bytes of each round's message
    last: Mapping[int, int] = field(default_factory=dict)  # the round a of each client; 0 if it is missing
    messages: tuple[bytes, ...] = ()  # the last ones, as many as a client may need
    earlier: tuple[Tensor, ...] = ()  # on a grid: x^ before each of these messages, flat; not in a checkpoint

    def on(self, device: torch.device) -> "Known":
        """Returns this value with all tensors on the device."""
        if all(tensor.device.type == device.type for tensor in (*self.state.values(), *self.earlier)):
            return self
        earlier = tuple(tensor.to(device) for tensor in self.earlier)
        return replace(self, state=move(self.state, device), earlier=earlier)

    def on_host(self) -> "Known":
        """Returns this value with `state` on the host. `earlier` is not in a checkpoint and stays on its device."""
        return replace(self, state=move(self.state, HOST))


class PerClient(Message):
    """A message of which each client receives its own version, with its own length."""

    def bytes_to(self, client: int) -> int:
        """The number of bytes that this client receives in the message's round."""
        raise NotImplementedError

    def to(self, client: int) -> tuple[AnyMessage, ...]:
        """The messages that this client receives; their lengths add up to `bytes_to`."""
        raise NotImplementedError

    def last(self, client: int) -> int:
        """The round of the state that the client has stored; 0 before its first round."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Differences(PerClient):
    """A round's message with the states before and after it. A client receives only what `to` returns."""

    received: State  # the whole state that a client has afterwards
    known: Known  # before this message
    copy: Message  # `received` in float32

    def bytes_to(self, client: int) -> int:
        """The number of bytes that this client receives to get x^_t."""
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


@dataclass(frozen=True, eq=False)
class Moves(Differences):
    """Differences on a grid: one message takes a client from any earlier state to x^_t."""

    start: Callable[[], Tensor]  # x^_0, flat
    exact: bool  # whether the message holds x^_t - x^_(t-1) without a rounding error
    make: Callable[[Tensor, Tensor, int], Message | None]
    """the message of x^_t, x^_a and a; None if x^_t - x^_a would round"""
    _since: dict[int, Future[Message]] = field(default_factory=dict)

    def bytes_to(self, client: int) -> int:
        return len(self._from(client))

    def to(self, client: int) -> tuple[AnyMessage, ...]:
        return (self._from(client),)

    def begin(self, clients: Iterable[int]) -> None:
        """Starts encoding these clients' messages in background threads."""
        device = device_of([self.received])
        ready = ready_on(device)
        pool = ThreadPoolExecutor(THREADS if device == HOST else STREAMS)
        for since in {self.last(client) for client in clients} - self._since.keys():
            self._since[since] = pool.submit(self._made, since, device, ready)
        pool.shutdown(wait=False)

    def _from(self, client: int) -> Message:
        if self.last(client) not in self._since:
            self.begin([client])
        return self._since[self.last(client)].result()

    def _made(self, since: int, device: torch.device, ready: torch.cuda.Event | None) -> Message:
        """The message to a client that has x^_since."""
        made, missed = None, len(self.known.sizes) - since
        if not missed:
            return self
        with own_stream(device, ready):
            if since == 0:
                made = self.make(flat(self.received, self.known.state), self.start(), 0)
            elif self.exact and missed <= len(self.known.earlier):
                made = self.make(flat(self.received, self.known.state), self.known.earlier[-missed], since)
            return made if made is not None and len(made) < len(self.copy) else self.copy


def bytes_to(message: Message, client: int) -> int:
    """The bytes that the client receives in this message's round."""
    return message.bytes_to(client) if isinstance(message, PerClient) else len(message)


def begin(message: Message, clients: Iterable[int]) -> None:
    """On a grid, starts encoding the clients' messages in background threads."""
    if isinstance(message, Moves):
        message.begin(clients)


def known_after(message: Message, accepted: Sequence[int]) -> Known | None:
    """What the clients know after a round; None if the server does not send differences."""
    if not isinstance(message, Differences):
        return None
    known = message.known
    sizes, kept = (*known.sizes, len(message)), needed((*known.messages, bytes(message)), len(message.copy))
    state = {name: message.received[name] for name in known.state}
    last = {**known.last, **dict.fromkeys(accepted, len(sizes))}
    if not isinstance(message, Moves):
        return Known(state, sizes, last, kept)
    earlier = (*known.earlier, flat(known.state))
    missed = len(sizes) - min(last.values(), default=len(sizes))  # by the client that is furthest behind
    count = min(missed, len(kept), len(earlier)) if message.exact else 0
    return Known(state, sizes, last, kept[len(kept) - count :], earlier[len(earlier) - count :])


def flat(state: State, names: Iterable[str] | None = None) -> Tensor:
    """The tensors with these names (by default all) as one flat tensor."""
    return torch.cat([state[name].reshape(-1) for name in (state if names is None else names)])


def needed(messages: tuple[bytes, ...], copy: int) -> tuple[bytes, ...]:
    """The most recent messages to keep. A client that misses an older one receives a copy of `copy` bytes."""
    later = 0
    for count, one in enumerate(reversed(messages)):
        if later > copy:
            return messages[-count:]
        later += len(one)
    return messages
