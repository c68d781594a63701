"""The ServerApp: our own loop over Flower's Grid, into a run folder on the SuperLink's machine.

A folder that holds a run already is gone on with, so the same `flwr run` after a crash is the resume.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedpara
from fedpara.apps.flower_grid import GridCourier
from fedpara.apps.flower_settings import Settings, difference, read
from fedpara.engines.client import Protocol
from fedpara.engines.flower import Flower, Terms
from fedpara.engines.loop import Engine, Schedule
from fedpara.errors import ConfigError, FedParaError, of_several
from fedpara.experiments import Experiment, resume
from fedpara.experiments.build import Parts
from fedpara.experiments.config import FREE, to_toml
from fedpara.experiments.run import Host, Speaker, lay_out
from fedpara.experiments.store import NODES, RunFolder
from fedpara.experiments.summary import read_config
from fedpara.files import write_bytes

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = read(context.run_config)
    if settings.terms.threads:
        torch.set_num_threads(settings.terms.threads)
    go_through(_laid_out(settings), settings.data_dir, _host(grid, settings.terms))


def go_through(runs: Mapping[Path, int | None], data_dir: Path | None, host: Host) -> None:
    """Each to its rounds. One that fails does not keep the others from theirs; RunError at the end names it."""
    failed: dict[str, FedParaError] = {}
    for path, rounds in runs.items():
        print(f"run folder {path}", flush=True)
        try:
            resume(
                path,
                rounds=rounds,
                engine="flower",
                data_dir=data_dir,
                say=lambda text: print(text, flush=True),
                host=host,
            )
        except FedParaError as error:
            if len(runs) == 1:
                raise
            failed[str(path)] = error
    if failed:
        raise of_several(failed, len(runs))


def _laid_out(settings: Settings) -> dict[Path, int | None]:
    """The folders to run, each with its rounds where they were given; new ones are made."""
    if not settings.names_an_experiment and all((path / "config.toml").exists() for path in settings.out):
        return dict.fromkeys(settings.out, settings.given.get("rounds"))
    runs = settings.experiments()
    for path, experiment in runs.items():
        if (path / "config.toml").exists():
            _refuse_another(path, experiment)
        else:
            lay_out(experiment, path, data_dir=settings.data_dir)
    return {path: experiment.rounds for path, experiment in runs.items()}


def _refuse_another(path: Path, experiment: Experiment) -> None:
    there = read_config(path)
    if there.identity != experiment.identity:
        raise ConfigError(
            f"{path} holds a run of another experiment, and nothing is overwritten: "
            f"{difference(there, experiment, FREE)}. Choose another out, or leave out everything but out to go on with "
            "that one."
        )


def _host(grid: Grid, terms: Terms) -> Host:
    def host(
        protocol: Protocol, parts: Parts, folder: RunFolder, schedule: Schedule, tell: Speaker
    ) -> tuple[Engine, Schedule]:
        engine = Flower(
            protocol,
            parts.task,
            folder.memory,
            GridCourier(grid),
            terms,
            experiment=to_toml(replace(folder.experiment, engine="flower")),
            run=_run_name(folder) if protocol.keeps else "0",
            version=fedpara.__version__,
            cohort=schedule.cohort,
            tell=tell,
        )
        return engine, terms.schedule(schedule)

    return host


def _run_name(folder: RunFolder) -> str:
    """Under which nodes keep what belongs to this run: drawn once, since two runs may share a config."""
    file = folder.path / NODES
    if not file.exists():
        write_bytes(file, f"{secrets.token_hex(16)}\n".encode())
    return file.read_text().strip()
