"""What a node keeps for its clients: a file a round, under the run's and the client's name.

    <folder>/nodes-<run>/<client>/<round>.safetensors

A round's file counts once the server has taken that round's update, which it says with the next order. Kept are
that one, the one before it (the server may go back by a checkpoint) and the newest, which still waits; a round
that comes late leaves the newer ones alone.
"""

import re
from pathlib import Path

from fedpara.algorithms import Variables
from fedpara.errors import RunError
from fedpara.experiments.storage.tensor_files import read_groups, write_groups
from fedpara.files import sweep


class NodeMemory:
    def __init__(self, folder: Path, run: str, client: int) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", run):
            raise RunError(f"a run called {run[:80]!r}: expected hexadecimal digits.")
        self.client = int(client)
        self.folder = folder / f"nodes-{run}" / str(self.client)

    def get(self, accepted: int) -> Variables | None:
        """What the client kept in its round `accepted`; None before its first."""
        if accepted == 0:
            return None
        path = self._path(accepted)
        if not path.exists():
            raise RunError(
                f"what the client kept in round {accepted} is not on this node ({path}). Bring the folder back, "
                "or begin a new run."
            )
        return read_groups(path, (self.client, accepted))

    def put(self, round: int, groups: Variables, accepted: int) -> None:
        if not any(groups.values()):
            return
        # Each by itself: `parents=True` would make those above readable to all, whatever the mode.
        for folder in (*reversed(self.folder.parents), self.folder):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
        sweep(self.folder, older_than=3600.0)
        write_groups(self._path(round), groups, whose=(self.client, round))
        rounds = sorted(int(path.stem) for path in self.folder.glob("*.safetensors") if path.stem.isdigit())
        taken = [known for known in rounds if known <= accepted]
        for old in {*rounds} - {*taken[-2:]}:
            if old < round:  # a client may finish late, when the server has taken a newer round
                self._path(old).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"
