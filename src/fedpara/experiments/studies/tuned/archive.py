"""The runs of a tuning in an archive, such as results/, so that another machine does not repeat finished runs.

tuning/NAME/NAME-METHOD-K-seedS    finished trials, and the diverged ones once the choice is made
tuning/NAME/chosen.json            the choice, with grid.json
final/NAME/METHOD-seedS            finished final runs
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.catalog import Library, archive_run, finished
from fedpara.experiments.storage.summary import Summary
from fedpara.experiments.studies.tune import CHOSEN, GRID
from fedpara.files import make_folder, write_bytes

TRIALS, FINALS = "trials", "final"
"""The folders of `fedpara tune`."""
ARCHIVES = {TRIALS: "tuning", FINALS: "final"}


def restore(folder: Path, runs: Mapping[str, Experiment], library: Library) -> None:
    """Copies the library's finished runs of these experiments to `folder`, unless a run is there."""
    for name, experiment in runs.items():
        if not (folder / name / "config.toml").exists() and (found := _whole(experiment, library)):
            archive_run(found.path, folder, name)


def _whole(experiment: Experiment, library: Library) -> Summary | None:
    """A finished run of exactly these rounds. A longer one belongs to another folder."""
    runs = library.runs.get(experiment.identity, ())
    return next((run for run in runs if run.rounds == run.experiment.rounds == experiment.rounds), None)


def restore_choice(name: str, folder: Path, archive: Path) -> None:
    """Copies grid.json and chosen.json of an archive to a folder of `fedpara tune` that has none."""
    if not (folder / CHOSEN).exists() and (archive / ARCHIVES[TRIALS] / name / CHOSEN).exists():
        _copy_choice(archive / ARCHIVES[TRIALS] / name, folder)


def archive_tuning(name: str, folder: Path, into: Path) -> None:
    """Copies the finished runs of a folder of `fedpara tune` that the archive does not have."""
    if not folder.is_dir():
        return
    chosen = json.loads((folder / CHOSEN).read_bytes()) if (folder / CHOSEN).exists() else {}
    diverged = chosen.get("diverged", {})
    for part, archive in ARCHIVES.items():
        target = into / archive / name
        known = {(_method(run.path.name, name), run.experiment.identity) for run in Library.of(target)}
        library = Library.of(folder / part)
        for run in library:
            ended = finished(run, run.experiment.rounds) or (part == TRIALS and run.path.name in diverged)
            if ended and (_method(run.path.name, name), run.experiment.identity) not in known:
                archive_run(run.path, target, f"{name}-{run.path.name}" if part == TRIALS else None)
        library.refuse_damaged("archived")
    if chosen:
        _copy_choice(folder, into / ARCHIVES[TRIALS] / name)


def _method(folder: str, tuning: str) -> str:
    """The method in the name of a run folder. Older archives have no seed in the names of their trials."""
    return re.sub(r"(-\d+)?(-seed\d+)?$", "", folder.removeprefix(f"{tuning}-"))


def _copy_choice(folder: Path, into: Path) -> None:
    """Copies chosen.json last: without it the choice is made again."""
    make_folder(into)
    for name in (GRID, CHOSEN):
        write_bytes(into / name, (folder / name).read_bytes())
