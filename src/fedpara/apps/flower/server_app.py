"""The ServerApp: runs the server loop over Flower's Grid into a run folder on the SuperLink's machine.

An existing run folder is resumed, so after a crash the same `flwr run` continues the run.
"""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedpara.apps.flower.certificates import read_keys
from fedpara.apps.flower.grid import GridTransport
from fedpara.apps.flower.host import host_on
from fedpara.apps.flower.run_config import Settings, read
from fedpara.errors import FedParaError, of_several
from fedpara.experiments import resume
from fedpara.experiments.run import Host, lay_out
from fedpara.experiments.storage.run_folder import refuse_another
from fedpara.references import search_working_directory_last

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    logging.getLogger("fedpara").addHandler(logging.StreamHandler(sys.stdout))  # Flower shows it
    search_working_directory_last()  # the copy of a module in the app has precedence
    settings = read(context.run_config)
    if settings.policy.threads:
        torch.set_num_threads(settings.policy.threads)
    keys = read_keys(settings.keys) if settings.keys is not None else None
    run_folders(_laid_out(settings), settings.data_dir, host_on(GridTransport(grid), settings.policy, keys))


def run_folders(runs: Mapping[Path, int | None], data_dir: Path | None, host: Host) -> None:
    """Run each folder to its rounds. If one fails, the others still run; RunError at the end names it."""
    failed: dict[str, FedParaError] = {}
    for path, rounds in runs.items():
        print(f"run folder {path}", flush=True)
        try:
            resume(path, rounds=rounds, engine="flower", data_dir=data_dir, host=host)
        except FedParaError as error:
            if len(runs) == 1:
                raise
            failed[str(path)] = error
    if failed:
        raise of_several(failed, len(runs))


def _laid_out(settings: Settings) -> dict[Path, int | None]:
    """The folders to run, each with its rounds if they were given. Creates the new ones."""
    if not settings.names_an_experiment and all((path / "config.toml").exists() for path in settings.out):
        return dict.fromkeys(settings.out, settings.given.get("rounds"))
    runs = settings.experiments()
    for path, experiment in runs.items():
        if (path / "config.toml").exists():
            refuse_another(path, experiment)
        else:
            lay_out(experiment, path, data_dir=settings.data_dir)
    return {path: experiment.rounds for path, experiment in runs.items()}
