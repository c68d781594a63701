"""host_on: runs a run folder on nodes, with the Flower engine over a transport."""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import fedpara
from fedpara.engines.device import eager_device
from fedpara.engines.flower.engine import Flower
from fedpara.engines.flower.example_counts import ExampleCounts
from fedpara.engines.flower.policy import Policy
from fedpara.engines.flower.roster import Keys
from fedpara.engines.flower.rpc import Transport
from fedpara.engines.progress import Schedule
from fedpara.engines.server.engine import Engine
from fedpara.engines.session import Session
from fedpara.experiments.build import Parts
from fedpara.experiments.config_file import to_toml
from fedpara.experiments.node_data import is_own
from fedpara.experiments.run import Host
from fedpara.experiments.storage.run_folder import NODES, RunFolder
from fedpara.files import write_bytes
from fedpara.source_files import combined_digest

EXAMPLES = "examples.json"
"""In the run folder, if nodes bring their own data: the number of examples that each client stated first."""


def host_on(
    transport: Transport,
    policy: Policy,
    keys: Keys | None = None,
    *,
    version: str = fedpara.__version__,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Host:
    """A function that makes the Flower engine for a run folder, and the schedule that it can follow."""

    def host(
        session: Session, parts: Parts, folder: RunFolder, schedule: Schedule
    ) -> tuple[Engine, Schedule]:
        own = is_own(folder.experiment.dataset)
        engine = Flower(
            session,
            parts.task,
            folder.memory,
            transport,
            policy,
            experiment=to_toml(replace(folder.experiment, engine="flower")),
            run=_run_name(folder) if session.on_nodes else "0",
            version=version,
            clients=schedule.clients,
            cohort=schedule.cohort,
            sources=combined_digest(folder.experiment.references.values()),
            device=eager_device(folder.experiment.device),
            keys=keys,
            counts=ExampleCounts(folder.path / EXAMPLES) if own else None,
            clock=clock,
            sleep=sleep,
        )
        if own:
            schedule = replace(schedule, examples=engine.examples)
        return engine, policy.schedule(schedule)

    return host


def _run_name(folder: RunFolder) -> str:
    """The name under which nodes store this run's client memories. Random, because two runs may share a config."""
    file = folder.path / NODES
    if not file.exists():
        write_bytes(file, f"{secrets.token_hex(16)}\n".encode())
    return file.read_text().strip()
