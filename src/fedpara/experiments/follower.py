"""One run folder for several ranks: rank 0 writes it, and the others start from its checkpoint.

A follower writes only the memories of its own clients. The ranks therefore need a folder that all of them can read.
"""

from collections.abc import Callable
from pathlib import Path

from fedpara.engines.distributed.process_group import Part, ProcessGroup
from fedpara.engines.progress import Round
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.checkpoint import read_progress
from fedpara.experiments.storage.client_files import OnDisk
from fedpara.experiments.storage.jsonl import read_lines
from fedpara.experiments.storage.run_folder import RunFolder
from fedpara.experiments.storage.summary import evaluations


class Follower:
    """The run folder on a rank other than 0, which only writes client memories."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, experiment: Experiment, round: int, finished: bool) -> None:
        self.path, self.experiment, self.finished = path, experiment, finished
        self.progress = read_progress(path, round) if round else None
        lines = read_lines(path / "metrics.jsonl") if round else []
        self.evaluations = evaluations(experiment, [line for line in lines if line["round"] <= round])
        self.memory = OnDisk(path / "clients", round)

    def save(self, result: Round, timing: dict[str, float], engine: str) -> None:
        """Removes memories that no checkpoint needs. Rank 0 may still be writing this round's checkpoint."""
        self.memory.settle(result.number - 2)

    def log(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def open_on_ranks(
    group: ProcessGroup, path: Path, experiment: Experiment, make: Callable[[], RunFolder]
) -> RunFolder | Follower:
    """The folder from `make` on rank 0; a `Follower` on other ranks, which read it after rank 0 has opened it."""
    held: list[RunFolder] = []

    def work() -> Part:
        if group.rank:
            return Part()
        folder = make()
        held.append(folder)
        return Part({"round": folder.progress.round if folder.progress else 0, "finished": folder.finished})

    try:
        first = group.gather(f"opening {path}", work)[0].header
    except BaseException:
        for folder in held:
            folder.close()
        raise
    return held[0] if held else Follower(path, experiment, first["round"], first["finished"])
