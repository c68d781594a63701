"""The nodes of a Flower run: which are connected, which clients each one serves, and why others are refused.

A node must answer a hello before it gets any work. The log names each refused node and the reason:

    its fedpara version, its model, its frozen base weights or its copy of a referenced module differ from the server's
    its key is not listed for the clients it claims (if the server has a keys file)
    it claims a client that another connected node serves
    the number of examples it states is out of range, or has changed since the run began
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from fedpara.engines.flower.example_counts import ExampleCounts
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.rpc import Hello, Packet, Request, Transport, from_packet, to_packet
from fedpara.errors import WireError
from fedpara.wire.tensors import in_one_line, shown

logger = logging.getLogger(__name__)

Keys = Mapping[bytes, tuple[int, int]]
"""Maps a public key to (k, n): the node may serve the clients i with i % n == k."""


class Roster:
    def __init__(
        self,
        transport: Transport,
        policy: Policy,
        greeting: Request,
        *,
        scheme: str,
        digest: str,
        sources: str,
        clients: int,
        keys: Keys | None,
        counts: ExampleCounts | None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        """`keys` binds node keys to clients; `counts` are example counts, if nodes bring their own data."""
        self._transport, self._policy, self._greeting = transport, policy, greeting
        self._scheme, self._digest, self._sources, self._clients = scheme, digest, sources, clients
        self._keys, self._counts = keys, counts
        self._clock, self._sleep = clock, sleep
        self._connected: Mapping[int, bytes] = {}
        self._known: set[int] = set()  # they answered a hello and every request since
        self._owners: dict[int, int] = {}  # the node of each client, for as long as it is connected
        self._refused: dict[int, str] = {}
        self._hellos: dict[str, tuple[int, float]] = {}
        self._started = False

    def find(self, clients: Sequence[int], enough: int) -> dict[int, int]:
        """The node of each client that has one.

        Waits up to `policy.wait` seconds for nodes at the start, and whenever fewer than `enough` clients have one.
        """
        started, asked = self._clock(), set[int]()
        while True:
            self._update_connected()
            missing = len(self.hosts(clients)) < len(clients)
            fresh = self._connected.keys() - self._known - asked
            fresh -= set() if missing else self._refused.keys()
            if fresh:
                asked |= self._send_hellos(fresh)
            hosts = self.hosts(clients)
            met = len(hosts) == len(clients) or (self._started and len(hosts) >= enough)
            if met or self._clock() >= started + self._policy.wait:
                self._started = self._started or len(hosts) >= enough
                return hosts
            self._sleep(self._policy.poll)

    def hosts(self, clients: Sequence[int]) -> dict[int, int]:
        """Like `find`, without looking for new nodes."""
        owned = {client: self._owners[client] for client in clients if client in self._owners}
        return {client: node for client, node in owned.items() if node in self._known}

    def doubt(self, node: int) -> None:
        """The node did not answer in time: it must answer a hello before it gets more work. It keeps its clients."""
        self._known.discard(node)

    def absence(self, client: int) -> str:
        """Why no node serves this client now."""
        node = self._owners.get(client)
        return ("no node serves it" if node is None else f"its node {node} did not answer") + self.refusals()

    def refusals(self) -> str:
        refused = "; ".join(f"node {node} was refused: {why}" for node, why in self._refused.items())
        return f" ({refused})" if refused else ""

    def _update_connected(self) -> None:
        """Updates which nodes are connected; a node that left frees its clients."""
        self._connected = self._transport.nodes()
        self._known &= self._connected.keys()
        self._owners = {client: node for client, node in self._owners.items() if node in self._connected}

    def _send_hellos(self, nodes: Collection[int]) -> set[int]:
        """The nodes that answered. A silent node is not asked again while its answer may still arrive."""
        waited = {node for node, _ in self._hellos.values()}
        new = sorted(set(nodes) - waited)
        packet = to_packet(self._greeting)
        names = self._transport.send([(node, packet) for node in new], self._policy.hello) if new else []
        now = self._clock()
        self._hellos |= {
            name: (node, now + self._policy.hello) for node, name in zip(new, names, strict=True) if name
        }
        met: set[int] = set()
        while self._hellos:
            for name, got in self._transport.collect(list(self._hellos)).items():
                node, _ = self._hellos.pop(name)
                self._read_hello(node, got)
                met.add(node)
            if not self._hellos or self._clock() >= now + self._policy.hello or met >= set(nodes):
                break
            self._sleep(self._policy.poll)
        for name, (node, end) in list(self._hellos.items()):
            if self._clock() >= end:
                self._refuse(node, f"it did not answer a hello within {self._policy.hello:g} s")
            if self._clock() >= end + self._policy.hello:
                del self._hellos[name]
        return met

    def _read_hello(self, node: int, got: Packet | str) -> None:
        try:
            hello = from_packet(got, Hello, 0) if isinstance(got, Packet) else None
            why = in_one_line(str(got)) if hello is None else self._objection(node, hello)
        except WireError as error:
            hello, why = None, f"its hello cannot be read: {error}"
        if hello is None or why:
            return self._refuse(node, why)
        served = hello.clients(self._clients)
        if self._counts is not None:
            self._counts.pin(served, hello.examples)
        self._refused.pop(node, None)
        self._known.add(node)
        others = {client: owner for client, owner in self._owners.items() if owner != node}
        self._owners = {**others, **dict.fromkeys(served, node)}
        has = f", with {hello.examples} examples" if self._counts is not None else ""
        logger.info("node %d is number %d of %d%s", node, hello.first, hello.every, has)
        return None

    def _objection(self, node: int, hello: Hello) -> str:
        """Why the node cannot take part, or ""."""
        if not 0 <= hello.first < hello.every:
            return (
                f"it is number {hello.first} of {hello.every}: expected a number from 0 to {hello.every - 1}"
            )
        if hello.version != self._greeting.version:
            here = self._greeting.version
            return f"it runs fedpara {in_one_line(hello.version)}, the server {here}: install the same"
        if hello.reason:
            return in_one_line(hello.reason)
        if hello.sources != self._sources:
            return "its copy of the modules that the experiment references differs from the server's: install the same"
        if hello.scheme != self._scheme:
            return f"its model is {shown(hello.scheme)}, the server's {self._scheme!r}"
        if hello.digest != self._digest:
            if hello.digest.partition("+")[0] == self._digest.partition("+")[0]:
                return (
                    "its base (the frozen weights) differs from the server's: load the same weights on both"
                )
            return "its model has other names, shapes or types than the server's"
        served = hello.clients(self._clients)
        counted = self._counts.objection(served, hello.examples) if self._counts is not None else ""
        return self._key_objection(node, hello) or self._claim_objection(node, served) or counted

    def _key_objection(self, node: int, hello: Hello) -> str:
        if self._keys is None:
            return ""
        listed = self._keys.get(self._connected.get(node, b""))
        if listed is None:
            return "its key is not in the server's keys file: add it there, or stop the node"
        if listed != (hello.first, hello.every):
            return (
                f"it claims to be number {hello.first} of {hello.every}, and the server's keys file lists its key as "
                f"number {listed[0]} of {listed[1]}: correct its --node-config or the file"
            )
        return ""

    def _claim_objection(self, node: int, served: range) -> str:
        for client in served:
            if (owner := self._owners.get(client, node)) != node:
                return (
                    f"it claims client {client}, which node {owner} serves, and that node is still connected: stop "
                    "it first, or give this one another number"
                )
        return ""

    def _refuse(self, node: int, why: str) -> None:
        if self._refused.get(node) != why:
            logger.info("node %d refused: %s", node, why)
        self._refused[node] = why
