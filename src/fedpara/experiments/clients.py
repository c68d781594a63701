"""OnDisk: what clients keep, a file a client and round, so that a run killed at any moment goes on.

A round writes new files beside the old ones. The checkpoint that follows makes them count: after a restart
the newest file of a client that is no later than the checkpoint's round is its memory, and later ones are
dropped. Files are removed only once two checkpoints have passed them, since the newest may be unreadable.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedpara.algorithms import Groups
from fedpara.errors import RunError
from fedpara.experiments.tensor_files import read_groups, write_groups

FAN = 1000
"""Clients a folder, so that a million of them do not lie in one."""


def kept_files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(client, round, path) of every whole file."""
    for path in folder.glob("*/*.safetensors"):
        if found := re.fullmatch(r"(\d+)-(\d+)", path.stem, re.ASCII):
            yield int(found[1]), int(found[2]), path


def kept_file(folder: Path, client: int, round: int) -> Path:
    return folder / str(client // FAN) / f"{client}-{round}.safetensors"


class OnDisk:
    def __init__(self, folder: Path, checkpoint: int = 0, expected: Mapping[int, int] | None = None) -> None:
        """`expected` is the round of each client's newest file, as the checkpoint has it."""
        self.folder = folder
        self._versions: dict[int, list[int]] = {}
        later = []
        for client, round, path in kept_files(folder):
            if round > checkpoint:
                later.append(path)
            else:
                self._versions.setdefault(client, []).append(round)
        self._refuse_lost(expected or {})
        for path in later:
            path.unlink()
        for rounds in self._versions.values():
            rounds.sort()
        self._touched = {client for client, rounds in self._versions.items() if len(rounds) > 1}

    def get(self, client: int) -> Groups | None:
        rounds = self._versions.get(client)
        if not rounds:
            return None
        return read_groups(self._path(client, rounds[-1]), (client, rounds[-1]))

    def put(self, client: int, round: int, groups: Groups) -> None:
        self.stage(client, round, groups)
        self.adopt(client, round)

    def stage(self, client: int, round: int, groups: Groups) -> None:
        """Write the file; it counts once it is adopted. A restart drops it, as it is later than the checkpoint."""
        path = self._path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_groups(path, groups, durable=False, whose=(client, round))

    def drop(self, client: int, round: int) -> None:
        self._path(client, round).unlink(missing_ok=True)

    def adopt(self, client: int, round: int) -> None:
        rounds = self._versions.setdefault(client, [])
        if not rounds or rounds[-1] != round:
            rounds.append(round)
        self._touched.add(client)

    def settle(self, previous: int) -> None:
        """After a checkpoint: drop what neither it nor the one at round `previous` can need."""
        for client in list(self._touched):
            rounds = self._versions[client]
            while len(rounds) > 1 and rounds[1] <= previous:
                self._path(client, rounds.pop(0)).unlink(missing_ok=True)
            if len(rounds) == 1:
                self._touched.discard(client)

    def _path(self, client: int, round: int) -> Path:
        return kept_file(self.folder, client, round)

    def _refuse_lost(self, expected: Mapping[int, int]) -> None:
        """RunError where a client's newest file is gone: it would begin again, and nobody would know."""
        lost = sorted(c for c, round in expected.items() if round not in self._versions.get(c, ()))
        if lost:
            others = f", and of {len(lost) - 1} more," if len(lost) > 1 else ""
            raise RunError(
                f"{self.folder} lacks what client {lost[0]}{others} kept of round {expected[lost[0]]}: expected a file "
                f"of each of the {len(expected)} clients that have taken part. Bring them back, or start the run anew."
            )
