"""NodeMemory: the client memories on a Flower node, one file per run, client and round.

    <folder>/nodes-<run>/<client>/<round>.safetensors

A file becomes current once the server has accepted the update of its round; the next request reports it. The node keeps
that file, the previous one (the server may fall back by one checkpoint), and newer ones that are not accepted yet.
"""

import re
from pathlib import Path

from fedpara.algorithms import Variables
from fedpara.errors import RunError
from fedpara.experiments.storage.tensor_files import read_memory, write_memory
from fedpara.files import sweep


class NodeMemory:
    def __init__(self, folder: Path, run: str, client: int) -> None:
        if not re.fullmatch(r"[0-9a-f]{1,64}", run):
            raise RunError(f"the run id is {run[:80]!r}: expected hexadecimal digits.")
        self.client = int(client)
        self.folder = folder / f"nodes-{run}" / str(self.client)

    def get(self, accepted: int) -> Variables | None:
        """The client's memory of the round `accepted`. None before its first round."""
        if accepted == 0:
            return None
        path = self._path(accepted)
        if not path.exists():
            raise RunError(
                f"the client's memory of round {accepted} is not on this node: {path} is missing. Restore it, or start "
                "a new run."
            )
        return read_memory(path, (self.client, accepted))

    def put(self, round: int, memory: Variables, accepted: int) -> None:
        if not any(memory.values()):
            return
        # One by one: `parents=True` would ignore the mode and make the parents readable for everyone.
        for folder in (*reversed(self.folder.parents), self.folder):
            if not folder.is_dir():
                folder.mkdir(mode=0o700, exist_ok=True)
        sweep(self.folder, older_than=3600.0)
        write_memory(self._path(round), memory, origin=(self.client, round))
        rounds = sorted(int(path.stem) for path in self.folder.glob("*.safetensors") if path.stem.isdigit())
        accepted_rounds = [known for known in rounds if known <= accepted]
        for old in {*rounds} - {*accepted_rounds[-2:]}:
            if old < round:  # rounds after a late one must stay
                self._path(old).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"{round}.safetensors"
