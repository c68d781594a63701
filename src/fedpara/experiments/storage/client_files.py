"""OnDisk: what clients keep, a file a client and round, so that a run killed at any moment goes on.

A round writes new files beside the old ones. `secure` then puts them on the disk, all at once, and the checkpoint that
follows makes them count: it names each by its round and digest. When a folder is opened, `verify_kept` reads every
file that the checkpoint names; where one is damaged, the checkpoint before it is tried. Only then are later files
removed. Older files go once two checkpoints have passed them, so that both have all of theirs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedpara.algorithms import Variables
from fedpara.engines.threads import THREADS, at_once
from fedpara.errors import RunError
from fedpara.experiments.storage.tensor_files import named_digest, read_groups, verify_groups, write_groups
from fedpara.files import sync

FAN = 1000
"""Clients a folder, so that a million of them do not lie in one."""


def kept_files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(client, round, path) of every whole file."""
    for path in folder.glob("*/*.safetensors"):
        if found := re.fullmatch(r"(\d+)-(\d+)", path.stem, re.ASCII):
            yield int(found[1]), int(found[2]), path


def kept_file(folder: Path, client: int, round: int) -> Path:
    return folder / str(client // FAN) / f"{client}-{round}.safetensors"


def verify_kept(folder: Path, kept: Mapping[int, int], digests: Mapping[int, str]) -> dict[int, str]:
    """The digest of the file of each client in `kept`, by its round, after reading it whole.

    RunError for a file that is missing, damaged, or not the one whose digest the checkpoint has in `digests`; a
    checkpoint of an earlier version has none.
    """

    def found(clients: Sequence[int]) -> list[str | RunError]:
        return [_verified(folder, client, kept[client], digests.get(client)) for client in clients]

    clients = list(kept)
    # A thousand files a piece of work: a future for each of a million would cost more than they do.
    pieces = [clients[i : i + FAN] for i in range(0, len(clients), FAN)]
    if len(pieces) < THREADS:
        pieces = [clients[i::THREADS] for i in range(THREADS)]
    results = {
        client: result
        for piece, results in zip(pieces, at_once(found, pieces), strict=True)
        for client, result in zip(piece, results, strict=True)
    }
    wrong = sorted((client, result) for client, result in results.items() if isinstance(result, RunError))
    if wrong:
        client, error = wrong[0]
        others = f" The same goes for {len(wrong) - 1} more." if len(wrong) > 1 else ""
        raise RunError(f"what client {client} kept of round {kept[client]} cannot be used: {error}{others}")
    return {client: str(result) for client, result in results.items()}


def _verified(folder: Path, client: int, round: int, digest: str | None) -> str | RunError:
    path = kept_file(folder, client, round)
    try:
        return verify_groups(path, (client, round), digest)
    except RunError as error:
        return error if path.exists() else RunError(f"{path} is missing.")


class OnDisk:
    def __init__(self, folder: Path, checkpoint: int = 0) -> None:
        """What clients kept up to the round `checkpoint`; later files are removed."""
        self.folder = folder
        self._versions: dict[int, list[int]] = {}
        for client, round, path in kept_files(folder):
            if round > checkpoint:
                path.unlink()
            else:
                self._versions.setdefault(client, []).append(round)
        for rounds in self._versions.values():
            rounds.sort()
        self._touched = {client for client, rounds in self._versions.items() if len(rounds) > 1}

    def get(self, client: int) -> Variables | None:
        rounds = self._versions.get(client)
        if not rounds:
            return None
        return read_groups(self._path(client, rounds[-1]), (client, rounds[-1]))

    def put(self, client: int, round: int, groups: Variables) -> None:
        self.stage(client, round, groups)
        self.adopt(client, round)

    def stage(self, client: int, round: int, groups: Variables) -> None:
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

    def secure(self, round: int, clients: Sequence[int]) -> dict[int, str]:
        """Put what these clients kept in this round on the disk; the digest of each file."""
        paths = [self._path(client, round) for client in clients]
        if not paths:
            return {}
        at_once(_sync, paths)
        at_once(_sync, {*(path.parent for path in paths), self.folder})
        return dict(zip(clients, map(named_digest, paths), strict=True))

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


def _sync(path: Path) -> None:
    """A full or broken disk may show only here."""
    try:
        sync(path)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}.") from error
