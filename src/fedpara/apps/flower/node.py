"""A node's side: it turns a request into a response. A node learns nothing else from the server.

The requests are `hello`, `train` (one client's part of a round) and `score` (one client's own model). A failure
becomes the response's reason. So does a timeout, so a client that hangs does not block its node.
"""

import os
import threading
import tomllib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

import fedpara
from fedpara.algorithms import Variables
from fedpara.apps.flower.run_config import served
from fedpara.data import Examples
from fedpara.engines.client import Reply, client_round, own_model, unreadable
from fedpara.engines.device import eager_device
from fedpara.engines.flower.engine import digest
from fedpara.engines.flower.rpc import Hello, Packet, Request, Response, from_packet, size_limit, to_packet
from fedpara.engines.flower.secure import SECURE_KINDS
from fedpara.engines.local.worker import Worker
from fedpara.engines.program import make_program
from fedpara.engines.session import FOLDED, KNOWN, Session
from fedpara.engines.settings import check_device
from fedpara.engines.setup.private_run import open_session
from fedpara.errors import ConfigError, DataError, FedParaError, RunError, WireError
from fedpara.experiments.build import Parts, build, build_privacy
from fedpara.experiments.config import Experiment
from fedpara.experiments.config_file import with_values
from fedpara.experiments.node_data import is_own, read_own
from fedpara.experiments.storage.node_memory import NodeMemory
from fedpara.experiments.storage.run_folder import NODES
from fedpara.source_files import combined_digest
from fedpara.state import State

REQUEST_LIMIT = 1 << 32
MEMORY = "FEDPARA_MEMORY"
RUNS = "FEDPARA_RUNS"
"""Run folders on this machine, one per line. They store the memories of their clients, as in a simulation."""
DATA_DIR = "data-dir"
DEVICE = "device"
ONLY_SECURE = "only-secure"
"""In a node's config: refuse to send an update outside secure aggregation."""
SPARE = 0.9
"""The share of the server's time limit that the work may take. The rest is for sending the response."""
GPU = "FEDPARA_DEVICE"
"""The device of a node whose config has no `device`."""

NodeConfig = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Site:
    """An experiment as a node builds it. `own` is the node's own training and test data, if it brings any.

    The worker trains one client at a time. With `turn`, a request waits for an earlier one that timed out and still
    trains.
    """

    session: Session
    worker: Worker
    parts: Parts
    own: tuple[Examples, Examples | None] | None
    turn: threading.Lock = field(default_factory=threading.Lock)

    def data(self, client: int, personal: bool) -> tuple[Examples, Examples | None]:
        """The client's training data and, if `personal`, its test data."""
        if self.own is not None:
            return self.own[0], self.own[1] if personal else None
        held = self.parts.data
        try:
            examples = held.client(client)
        except DataError as error:
            raise DataError(unreadable(error)) from error
        return examples, held.client_test(client) if personal else None


def respond(
    packet: Packet, node_config: NodeConfig, kept: MutableMapping[str, bytes] | None = None
) -> Packet:
    """The response to a request. An invalid request or file gives a reason, never an exception.

    `kept` holds what the node keeps in memory between requests.
    """
    try:
        request = from_packet(packet, Request, REQUEST_LIMIT)
    except WireError as error:
        return to_packet(Hello(fedpara.__version__, reason=f"the request cannot be read: {error}"))
    if request.kind == "hello":
        return to_packet(_in_time(request, lambda: hello(request, node_config), _no_hello))

    def work() -> Response:
        if request.kind not in SECURE_KINDS:
            return (score if request.kind == "score" else train)(request, node_config)
        from fedpara.apps.flower.secure.node import respond_stage

        experiment = _experiment(request.experiment)
        return respond_stage(request, node_config, experiment, {} if kept is None else kept)

    return to_packet(_in_time(request, work, lambda why: _no_response(request, why)))


def hello(request: Request, node_config: NodeConfig) -> Hello:
    """Build everything that training needs, so that problems show before a round starts."""
    if request.version != fedpara.__version__:
        return Hello(fedpara.__version__)
    first, every = place(node_config)
    site = _site_of(request, node_config)
    examples = len(site.own[0]) if site.own is not None else 0
    if site.own is not None and not examples:
        return Hello(fedpara.__version__, reason="its data set holds no training examples")
    scheme = site.session.program.scheme
    sources = combined_digest(_experiment(request.experiment).references.values())
    return Hello(fedpara.__version__, first, every, scheme, digest(site.session), examples, sources)


def train(request: Request, node_config: NodeConfig) -> Response:
    """One client's part of a round; its new memory is stored on this node."""
    if node_config.get(ONLY_SECURE):
        raise RunError(
            f"this node sends updates only under secure aggregation ({ONLY_SECURE} in its config): set secure=secagg."
        )
    _, _, reply = train_client(request, node_config)
    encoded = bytes(reply.message or b"")
    return Response(
        request.client, request.round, encoded, reply.reason, reply.loss, reply.before, reply.after
    )


def train_client(request: Request, node_config: NodeConfig) -> tuple[Site, State, Reply]:
    """(the site, the model as it was sent, the reply of the trained client)"""
    begun = _begin(request, node_config)
    session, site, (model, _) = begun.site.session, begun.site, begun.received
    examples, test = site.data(request.client, request.personal)
    if len(examples) == 0:
        return site, model, Reply(request.client, reason="it holds no examples")
    with site.turn:
        reply, new_memory = client_round(
            session,
            site.worker,
            begun.received,
            begun.stored if session.stateful else None,
            examples,
            round=request.round,
            client=request.client,
            test=test,
        )
    begun.memory.put(begun.stored_as, {**new_memory, **begun.known}, request.accepted)
    return site, model, reply


def score(request: Request, node_config: NodeConfig) -> Response:
    """The score of the client's own model (the shared state as sent, and its private tensors) on its test data."""
    begun = _begin(request, node_config)
    site, (model, _) = begun.site, begun.received
    _, test = site.data(request.client, personal=True)
    if test is None:
        return Response(request.client, request.round, reason="it has no test data")
    own = own_model(site.session, model, begun.stored if site.session.stateful else None)
    with site.turn:
        return Response(request.client, request.round, before=site.worker.evaluate(own, test))


@dataclass(frozen=True, eq=False)
class _Begun:
    """The state that a client's request needs."""

    site: Site
    received: tuple[State, Variables]  # the server's decoded message
    memory: NodeMemory
    stored: Variables | None  # the client's memory after its last accepted round
    known: Variables  # x^ after this message, if the server sends differences; the base, if the run folds
    stored_as: int  # the round whose memory this request makes


def _begin(request: Request, node_config: NodeConfig) -> _Begun:
    if request.version != fedpara.__version__:
        raise RunError(f"the node runs fedpara {fedpara.__version__}, the server {request.version}.")
    if request.threads:
        torch.set_num_threads(request.threads)
    site = _site_of(request, node_config)
    limit = size_limit(site.session.down) + size_limit(site.session.copied)
    if len(request.message) > limit:
        raise WireError(f"a broadcast of {len(request.message)} bytes: expected at most {limit}.")
    session = site.session
    memory = NodeMemory(memory_folder(node_config, request.run), request.run, request.client)
    stored = memory.get(request.accepted) if session.on_nodes else None
    if session.folding is not None:
        base = stored.pop(FOLDED) if stored else None
        received, base = session.add_folds(request.message, request.round, base, request.accepted)
        fold = session.folding.folds(request.round) * session.folding.every
        return _Begun(site, received, memory, None, {FOLDED: base} if fold else {}, fold)
    if not session.differences:
        received = session.read_down(request.message, request.round)
        return _Begun(site, received, memory, stored, {}, request.round)
    before = stored.pop(KNOWN) if stored else None
    state = session.add_differences(request.message, request.round, before, request.accepted)
    known = {KNOWN: {name: state[name] for name in session.first_known()}}
    return _Begun(site, session.as_model(state, request.round), memory, stored, known, request.round)


def place(node_config: NodeConfig) -> tuple[int, int]:
    """(k, n) from the node's config: the node serves the clients i with i % n == k."""
    for first, every in (("client", "clients"), ("partition-id", "num-partitions")):
        if first in node_config:
            where = f"the node's config ({first}, {every})"
            return served(node_config[first], node_config.get(every), where)
    raise ConfigError(
        "the node's config does not say which clients it serves: add --node-config "
        "'partition-id=0 num-partitions=3', with a different partition-id per node."
    )


def memory_folder(node_config: NodeConfig, run: str) -> Path:
    """The folder for client memory: the run folder if it is on this machine, else the node config's `memory`, else
    FEDPARA_MEMORY, else the user's state folder."""
    for folder in map(Path, os.environ.get(RUNS, "").splitlines()):
        if (folder / NODES).exists() and (folder / NODES).read_text().strip() == run:
            return folder
    given = node_config.get("memory") or os.environ.get(MEMORY)
    if given:
        return Path(str(given)).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "fedpara"


def _site_of(request: Request, node_config: NodeConfig) -> Site:
    own = is_own(_experiment(request.experiment).dataset)
    kept = {k: v for k, v in node_config.items() if own or k in (DATA_DIR, DEVICE)}
    return _site(request.experiment, tuple(sorted(kept.items())))


def _experiment(text: str) -> Experiment:
    return with_values(Experiment(), tomllib.loads(text))


@lru_cache(maxsize=1)
def _site(experiment_toml: str, node_config: tuple[tuple[str, Any], ...]) -> Site:
    """Builds the experiment, cached per process. A deployment serves one request per process, a simulation many."""
    config = dict(node_config)
    experiment = _experiment(experiment_toml)
    data_dir = config.get(DATA_DIR)
    parts = build(experiment, Path(str(data_dir)).expanduser() if data_dir else None)
    program = make_program(parts.task.model, experiment.share)
    own = read_own(experiment.dataset, config) if is_own(experiment.dataset) else None
    session = open_session(
        program,
        parts.algorithm,
        parts.link,
        seed=experiment.seed,
        privacy=build_privacy(experiment),
        privacy_seed=experiment.privacy_seed,
        rotate=experiment.rotate,
        fold_every=experiment.fold_every,
        recycle=experiment.recycle,
    )
    return Site(session, Worker(program, parts.task, node_device(config, experiment.device)), parts, own)


def node_device(node_config: NodeConfig, asked: str | None) -> torch.device:
    """The device on which a node trains: its config's, else FEDPARA_DEVICE, else the experiment's, else its GPU."""
    given = node_config.get(DEVICE) or os.environ.get(GPU)
    name = str(given) if given else asked
    check_device(name)
    return eager_device(name)


def _in_time(request: Request, work: Callable[[], T], failed: Callable[[str], T]) -> T:
    """The result of `work`, or `failed(reason)`, before the server stops waiting."""
    if not 0 < request.seconds <= threading.TIMEOUT_MAX:
        return failed(
            f"the request grants {request.seconds:g} s: expected above 0, at most {threading.TIMEOUT_MAX:g}"
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
    thread.join(SPARE * request.seconds)
    if result:
        return result[0]
    _site.cache_clear()  # the thread may still be using this worker
    return failed(f"it did not finish within {SPARE * request.seconds:g} s")


def _no_hello(why: str) -> Hello:
    return Hello(fedpara.__version__, reason=why)


def _no_response(request: Request, why: str) -> Response:
    return Response(request.client, request.round, reason=why)
