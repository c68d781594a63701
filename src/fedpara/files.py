"""Atomic file writes: a file is written under a temporary name, then moved into place.

A writer that is killed leaves at most a temporary `.part` file; `sweep` removes those.
"""

import errno
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedpara.errors import ConfigError, FedParaError, StateError, UsageError
from fedpara.state import State

PART = ".*.part*"
"""Temporary names, of files that are not complete yet."""


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A temporary name to write to. The file moves to `path` at the end and disappears if anything fails.

    If `durable`, content and name are on the disk when this returns. Otherwise a power failure may lose them; a killed
    process does not.
    """
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise UsageError(f"{path} is not a place for a file: expected a file name in an existing folder.")
    temporary = path.with_name(f".{secrets.token_hex(8)}.part{path.suffix}")
    try:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode
            yield temporary
            # Some libraries replace the file by one that only its owner can read.
            temporary.chmod(mode)
            if durable:
                sync(temporary)
            os.replace(temporary, path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    # Name the requested file, not the temporary one.
    except OSError as error:
        why = error.strerror or str(error).replace(str(temporary), str(path))
        raise FedParaError(f"{path} could not be written: {why}.") from error
    except FedParaError as error:
        if str(temporary) in str(error):
            raise type(error)(str(error).replace(str(temporary), str(path))) from error
        raise


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # Some file systems cannot sync folders, and a folder may be writable but not readable.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES) or not os.path.isdir(path):
            raise


def make_folder(folder: Path, what: str = "folder", cure: str = "another --out") -> None:
    """Create a folder and its parents. The ConfigError of a failure names the folder and suggests `cure`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the {what} {folder} cannot be made: {error.strerror}. Choose {cure}.") from None


def sweep(folder: Path, older_than: float = 0.0) -> None:
    """Remove the temporary files of killed writers, in the folder and below it.

    Set `older_than`, in seconds, where other writers may be active: an active writer updates its file all the time.
    """
    for leftover in folder.rglob(PART):
        with suppress(FileNotFoundError):
            if time.time() - leftover.stat().st_mtime >= older_than:
                leftover.unlink()


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    with replacing(path, durable) as temporary:
        temporary.write_bytes(content)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], durable: bool = True
) -> None:
    """Write a safetensors file. The tensors are contiguous and share no memory."""
    with replacing(path, durable) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata))
        except KeyError as error:
            raise StateError(f"{path} could not be written: safetensors has no type {error}.") from error
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise StateError(f"{path} could not be written as safetensors: {error}") from error


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    """The tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            # Copies: memory mapped from the file would change with it.
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return state, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} cannot be read ({error}): expected a whole safetensors file.") from error
