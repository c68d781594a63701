"""A node's side: an order in, an answer out. It sees nothing of the server but the order.

What can be asked of a node: `hello`, one client's part of a round, the score of one client's own model. Whatever goes
wrong becomes the answer's reason; an answer that takes too long becomes one too, so that a client that hangs does
not block its node.
"""

import os
import threading
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

import fedpara
from fedpara.algorithms import Variables
from fedpara.data import Examples
from fedpara.engines.client import client_round
from fedpara.engines.flower.engine import digest
from fedpara.engines.flower.rpc import Hello, Packet, Request, Response, from_packet, size_limit, to_packet
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program
from fedpara.engines.session import PRIVATE, Session
from fedpara.errors import ConfigError, FedParaError, RunError, WireError
from fedpara.experiments.build import Parts, build
from fedpara.experiments.config import Experiment, with_values
from fedpara.experiments.node_data import is_own, read_own
from fedpara.experiments.storage.node_memory import NodeMemory
from fedpara.experiments.storage.run_folder import NODES
from fedpara.state import State

ORDER_LIMIT = 1 << 32
MEMORY = "FEDPARA_MEMORY"
RUNS = "FEDPARA_RUNS"
"""Simulation: run folders on this machine, a line each. What their clients keep stays in them."""
DATA_DIR = "data-dir"
SPARE = 0.9
"""Of the server's seconds: the answer must still travel."""

NodeConfig = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Site:
    """An experiment as one node builds it."""

    session: Session
    worker: Worker
    parts: Parts
    own: tuple[Examples, Examples | None] | None

    def data(self, client: int, personal: bool) -> tuple[Examples, Examples | None]:
        if self.own is not None:
            return self.own[0], self.own[1] if personal else None
        held = self.parts.data
        return held.client(client), held.client_test(client) if personal else None


def answer(packet: Packet, node_config: NodeConfig) -> Packet:
    """Never raises for what an order or a node's own files hold."""
    try:
        order = from_packet(packet, Request, ORDER_LIMIT)
    except WireError as error:
        return to_packet(Hello(fedpara.__version__, reason=f"the order cannot be read: {error}"))
    if order.kind == "hello":
        return to_packet(_in_time(order, lambda: hello(order, node_config), _no_hello))
    work = score if order.kind == "score" else train
    return to_packet(_in_time(order, lambda: work(order, node_config), lambda why: _no_answer(order, why)))


def hello(order: Request, node_config: NodeConfig) -> Hello:
    """Everything is built that training needs, so that what is missing is known before a round begins."""
    if order.version != fedpara.__version__:
        return Hello(fedpara.__version__)
    first, every = place(node_config)
    site = _site_of(order, node_config)
    examples = len(site.own[0]) if site.own is not None else 0
    if site.own is not None and not examples:
        return Hello(fedpara.__version__, reason="its data set holds no training examples")
    scheme = site.session.program.scheme
    return Hello(fedpara.__version__, first, every, scheme, digest(site.session), examples)


def train(order: Request, node_config: NodeConfig) -> Response:
    site, received, memory = _begin(order, node_config)
    session = site.session
    examples, test = site.data(order.client, order.personal)
    if len(examples) == 0:
        return Response(order.client, order.round, reason="it holds no examples")
    reply, kept = client_round(
        session,
        site.worker,
        received,
        memory.get(order.accepted) if session.stateful else None,
        examples,
        round=order.round,
        client=order.client,
        test=test,
    )
    memory.put(order.round, kept, order.accepted)
    sealed = bytes(reply.message or b"")
    return Response(order.client, order.round, sealed, reply.reason, reply.loss, reply.before, reply.after)


def score(order: Request, node_config: NodeConfig) -> Response:
    """The client's own model, that is the shared state as sent and what the client keeps, on its own test data."""
    site, (model, _), memory = _begin(order, node_config)
    _, test = site.data(order.client, personal=True)
    if test is None:
        return Response(order.client, order.round, reason="it has no test data of its own")
    kept = memory.get(order.accepted) if site.session.stateful else None
    own = (kept or site.session.first(model))[PRIVATE]
    return Response(order.client, order.round, before=site.worker.evaluate({**model, **own}, test))


def _begin(order: Request, node_config: NodeConfig) -> tuple[Site, tuple[State, Variables], NodeMemory]:
    """What a client's order needs: the site, the server's message as read, what the client kept."""
    if order.version != fedpara.__version__:
        raise RunError(f"the node runs fedpara {fedpara.__version__}, the server {order.version}.")
    if order.threads:
        torch.set_num_threads(order.threads)
    site = _site_of(order, node_config)
    limit = size_limit(site.session.down)
    if len(order.message) > limit:
        raise WireError(f"a broadcast of {len(order.message)} bytes: expected at most {limit}.")
    received = site.session.read_down(order.message, order.round)
    return site, received, NodeMemory(memory_folder(node_config, order.run), order.run, order.client)


def place(node_config: NodeConfig) -> tuple[int, int]:
    """(k, n): the node serves the clients i with i % n == k."""
    for first, every in (("client", "clients"), ("partition-id", "num-partitions")):
        if first in node_config:
            k, n = node_config[first], node_config.get(every)
            if type(k) is not int or type(n) is not int or not 0 <= k < n:
                raise ConfigError(
                    f"the node's config says {first}={k!r} {every}={n!r}: expected whole numbers, such as "
                    f"{first}=0 {every}=3."
                )
            return k, n
    raise ConfigError(
        "the node's config does not say which clients it serves: start it with --node-config "
        "'partition-id=0 num-partitions=3', each node with its own number."
    )


def memory_folder(node_config: NodeConfig, run: str) -> Path:
    """node_config's memory, else FEDPARA_MEMORY, else the user's state folder."""
    for folder in map(Path, os.environ.get(RUNS, "").splitlines()):
        if (folder / NODES).exists() and (folder / NODES).read_text().strip() == run:
            return folder
    given = node_config.get("memory") or os.environ.get(MEMORY)
    if given:
        return Path(str(given)).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "fedpara"


def _site_of(order: Request, node_config: NodeConfig) -> Site:
    experiment = with_values(Experiment(), tomllib.loads(order.experiment))
    own = is_own(experiment.dataset)
    return _site(
        order.experiment, tuple(sorted((k, v) for k, v in node_config.items() if own or k == DATA_DIR))
    )


@lru_cache(maxsize=1)
def _site(experiment_toml: str, node_config: tuple[tuple[str, Any], ...]) -> Site:
    """Kept while the process lasts: for one order in a deployment, for many in a simulation."""
    config = dict(node_config)
    experiment = with_values(Experiment(), tomllib.loads(experiment_toml))
    data_dir = config.get(DATA_DIR)
    parts = build(experiment, Path(str(data_dir)).expanduser() if data_dir else None)
    program = make_program(parts.task.model, experiment.share)  # type: ignore[arg-type]
    own = read_own(experiment.dataset, config) if is_own(experiment.dataset) else None
    session = Session(program, parts.algorithm, parts.link, experiment.seed)
    return Site(session, Worker(program, parts.task.augment), parts, own)


def _in_time(order: Request, work: Callable[[], T], failed: Callable[[str], T]) -> T:
    """The work's result, or why there is none, within the seconds the server waits."""
    if not 0 < order.seconds <= threading.TIMEOUT_MAX:
        return failed(
            f"the order grants {order.seconds:g} s: expected above 0, at most {threading.TIMEOUT_MAX:g}"
        )
    result: list[T] = []

    def run() -> None:
        try:
            result.append(work())
        except FedParaError as error:
            result.append(failed(str(error)))
        except Exception as error:
            result.append(failed(f"{type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SPARE * order.seconds)
    if result:
        return result[0]
    _site.cache_clear()  # the thread may wake up and go on with this worker
    return failed(f"it did not finish within {SPARE * order.seconds:g} s")


def _no_hello(why: str) -> Hello:
    return Hello(fedpara.__version__, reason=why)


def _no_answer(order: Request, why: str) -> Response:
    return Response(order.client, order.round, reason=why)
