"""The run folders in the folder of a study (`sweep`, `tune`, `reproduce`), and the command that made it."""

import shlex
from pathlib import Path

from fedpara.experiments.storage.environment import read_environment
from fedpara.experiments.studies.tune import CHOSEN

STUDIES = ("sweep", "tune", "reproduce")


def runs_in(folder: Path) -> dict[str, Path]:
    """The folder itself if it is a run, else the run folders in it, or in its subfolders if it has none.

    In a folder of `tune` whose choice is made, these are the final runs, because no trial is left to run.
    """
    if (folder / "config.toml").exists() or not folder.is_dir():
        return {folder.name: folder}
    levels = ["final/*"] if (folder / CHOSEN).exists() else ["*", "*/*"]
    for level in levels:
        if paths := sorted(path.parent for path in folder.glob(f"{level}/config.toml")):
            return {path.relative_to(folder).as_posix(): path for path in paths}
    return {}


def why_none(folder: Path) -> str:
    """Why a folder has no run to resume."""
    if (folder / CHOSEN).exists():
        return "its trials are done. `fedpara tune` with --final-seeds starts final runs."
    return "give a folder that `fedpara run` made."


def study_command(paths: dict[str, Path]) -> str:
    """The command of the study that these runs belong to; "" if they belong to none."""
    words = [str(word) for word in read_environment(next(iter(paths.values()))).get("command", [])]
    return shlex.join(words) if words[:1] == ["fedpara"] and words[1:2] and words[1] in STUDIES else ""
