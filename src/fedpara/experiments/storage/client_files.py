"""OnDisk: client memories, one file per client and round, which survive a kill at any moment.

A round writes new files beside the old ones. `secure` syncs them to disk together. The next checkpoint then refers to
each file by round and digest. Opening a run folder verifies every file that its checkpoint refers to, and falls back to
the previous checkpoint if one is damaged. Only then are newer files removed. An old file is removed once two
checkpoints refer to newer ones, so that both checkpoints stay complete.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedpara.algorithms import Variables
from fedpara.engines.threads import THREADS, map_in_threads
from fedpara.errors import RunError
from fedpara.experiments.storage.tensor_files import named_digest, read_memory, verify_memory, write_memory
from fedpara.files import sync

CLIENTS_PER_FOLDER = 1000
"""Clients per subfolder, so that no folder holds a million files."""


def memory_files(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """(client, round, path) of every complete file."""
    for path in folder.glob("*/*.safetensors"):
        if found := re.fullmatch(r"(\d+)-(\d+)", path.stem, re.ASCII):
            yield int(found[1]), int(found[2]), path


def memory_file(folder: Path, client: int, round: int) -> Path:
    return folder / str(client // CLIENTS_PER_FOLDER) / f"{client}-{round}.safetensors"


def verify_memories(folder: Path, rounds: Mapping[int, int], digests: Mapping[int, str]) -> dict[int, str]:
    """The digest of each client's memory file, after reading the whole file. `rounds` holds the round of each file.

    RunError if a file is missing or damaged, or differs from the checkpoint's `digests`. Checkpoints of earlier
    versions have no digests.
    """

    def verify(clients: Sequence[int]) -> list[str | RunError]:
        return [_verified(folder, client, rounds[client], digests.get(client)) for client in clients]

    clients = list(rounds)
    # A thousand files per task: starting a task costs more than reading a file.
    pieces = [clients[i : i + CLIENTS_PER_FOLDER] for i in range(0, len(clients), CLIENTS_PER_FOLDER)]
    if len(pieces) < THREADS:
        pieces = [clients[i::THREADS] for i in range(THREADS)]
    results = {
        client: result
        for piece, results in zip(pieces, map_in_threads(verify, pieces), strict=True)
        for client, result in zip(piece, results, strict=True)
    }
    wrong = sorted((client, result) for client, result in results.items() if isinstance(result, RunError))
    if wrong:
        client, error = wrong[0]
        others = f" {len(wrong) - 1} more files cannot be used either." if len(wrong) > 1 else ""
        raise RunError(
            f"the memory of client {client}, round {rounds[client]} cannot be used: {error}{others}"
        )
    return {client: str(result) for client, result in results.items()}


def _verified(folder: Path, client: int, round: int, digest: str | None) -> str | RunError:
    path = memory_file(folder, client, round)
    try:
        return verify_memory(path, (client, round), digest)
    except RunError as error:
        return error if path.exists() else RunError(f"{path} is missing.")


class OnDisk:
    def __init__(self, folder: Path, checkpoint: int = 0) -> None:
        """The memories up to the round `checkpoint`. Newer files are removed."""
        self.folder = folder
        self._versions: dict[int, list[int]] = {}
        for client, round, path in memory_files(folder):
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
        return read_memory(self._path(client, rounds[-1]), (client, rounds[-1]))

    def put(self, client: int, round: int, memory: Variables) -> None:
        self.stage(client, round, memory)
        self.adopt(client, round)

    def stage(self, client: int, round: int, memory: Variables) -> None:
        """Write the file. `adopt` makes it current; a restart before the next checkpoint removes it."""
        path = self._path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_memory(path, memory, durable=False, origin=(client, round))

    def drop(self, client: int, round: int) -> None:
        self._path(client, round).unlink(missing_ok=True)

    def adopt(self, client: int, round: int) -> None:
        rounds = self._versions.setdefault(client, [])
        if not rounds or rounds[-1] != round:
            rounds.append(round)
        self._touched.add(client)

    def secure(self, round: int, clients: Sequence[int]) -> dict[int, str]:
        """Sync these clients' files of this round to disk, and return their digests."""
        paths = [self._path(client, round) for client in clients]
        if not paths:
            return {}
        map_in_threads(_sync, paths)
        map_in_threads(_sync, {*(path.parent for path in paths), self.folder})
        return dict(zip(clients, map(named_digest, paths), strict=True))

    def settle(self, previous: int) -> None:
        """Remove files that neither the newest checkpoint nor the one at round `previous` refers to."""
        for client in list(self._touched):
            rounds = self._versions[client]
            while len(rounds) > 1 and rounds[1] <= previous:
                self._path(client, rounds.pop(0)).unlink(missing_ok=True)
            if len(rounds) == 1:
                self._touched.discard(client)

    def _path(self, client: int, round: int) -> Path:
        return memory_file(self.folder, client, round)


def _sync(path: Path) -> None:
    """Syncs to disk. RunError if the disk is full or broken, which may only show here."""
    try:
        sync(path)
    except OSError as error:
        raise RunError(f"{path} could not be written: {error.strerror}.") from error
