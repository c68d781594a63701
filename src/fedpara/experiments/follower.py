"""One run folder, several ranks: rank 0 holds it, the others start from its checkpoint and follow.

A follower writes what its own clients keep, nothing else. The ranks therefore need one folder that all see.
"""

from collections.abc import Callable
from pathlib import Path

from fedpara.engines.distributed.process_group import Part, ProcessGroup
from fedpara.engines.progress import Round
from fedpara.experiments.config import Experiment
from fedpara.experiments.storage.checkpoint import read_progress
from fedpara.experiments.storage.client_files import OnDisk
from fedpara.experiments.storage.run_folder import RunFolder


class Follower:
    """The folder as a rank that does not hold it sees it."""

    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, experiment: Experiment, round: int, finished: bool) -> None:
        self.path, self.experiment, self.finished = path, experiment, finished
        self.progress = read_progress(path, round) if round else None
        self.memory = OnDisk(path / "clients", round)

    def save(self, result: Round, timing: dict[str, float], engine: str) -> None:
        """Rank 0 may still be writing this round's checkpoint; the one before is written, as all kept their own."""
        self.memory.settle(result.number - 2)

    def log(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def opened(
    group: ProcessGroup, path: Path, experiment: Experiment, make: Callable[[], RunFolder]
) -> RunFolder | Follower:
    """`make` on rank 0; then, once it has swept and cut back what a kill left, the others look."""
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
