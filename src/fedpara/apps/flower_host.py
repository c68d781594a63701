"""How a run folder is run on nodes: the Flower engine over a courier, and the schedule it can keep."""

import secrets
import time
from collections.abc import Callable
from dataclasses import replace

import fedpara
from fedpara.engines.client import Protocol
from fedpara.engines.flower import Flower
from fedpara.engines.loop import Engine, Schedule
from fedpara.engines.parcels import Courier
from fedpara.engines.pins import Pins
from fedpara.engines.roster import Keys
from fedpara.engines.terms import Terms
from fedpara.experiments.build import Parts
from fedpara.experiments.config import to_toml
from fedpara.experiments.own import is_own
from fedpara.experiments.run import Host, Speaker
from fedpara.experiments.store import NODES, RunFolder
from fedpara.files import write_bytes

EXAMPLES = "examples.json"
"""In the run folder: how many examples each client stated first, where nodes bring their own data."""


def host_on(
    courier: Courier,
    terms: Terms,
    keys: Keys | None = None,
    *,
    version: str = fedpara.__version__,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Host:
    def host(
        protocol: Protocol, parts: Parts, folder: RunFolder, schedule: Schedule, tell: Speaker
    ) -> tuple[Engine, Schedule]:
        own = is_own(folder.experiment.dataset)
        engine = Flower(
            protocol,
            parts.task,
            folder.memory,
            courier,
            terms,
            experiment=to_toml(replace(folder.experiment, engine="flower")),
            run=_run_name(folder) if protocol.keeps else "0",
            version=version,
            clients=schedule.clients,
            cohort=schedule.cohort,
            tell=tell,
            keys=keys,
            pins=Pins(folder.path / EXAMPLES) if own else None,
            clock=clock,
            sleep=sleep,
        )
        if own:
            schedule = replace(schedule, examples=engine.examples)
        return engine, terms.schedule(schedule)

    return host


def _run_name(folder: RunFolder) -> str:
    """Under which nodes keep what belongs to this run: drawn once, since two runs may share a config."""
    file = folder.path / NODES
    if not file.exists():
        write_bytes(file, f"{secrets.token_hex(16)}\n".encode())
    return file.read_text().strip()
