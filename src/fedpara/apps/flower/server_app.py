"""The ServerApp: our own loop over Flower's Grid, into a run folder on the SuperLink's machine.

A folder that holds a run already is gone on with, so the same `flwr run` after a crash is the resume.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpara.apps.flower.certificates import read_keys
from fedpara.apps.flower.grid import GridTransport
from fedpara.apps.flower.host import host_on
from fedpara.apps.flower.run_config import Settings, difference, read
from fedpara.errors import ConfigError, FedParaError, of_several
from fedpara.experiments import Experiment, resume
from fedpara.experiments.config import FREE
from fedpara.experiments.run import Host, lay_out
from fedpara.experiments.storage.summary import read_config

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = read(context.run_config)
    if settings.policy.threads:
        torch.set_num_threads(settings.policy.threads)
    keys = read_keys(settings.keys) if settings.keys is not None else None
    go_through(_laid_out(settings), settings.data_dir, host_on(GridTransport(grid), settings.policy, keys))


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
