"""Files that are whole or not there: written beside their name, then moved into place.

A writer that is killed leaves at most a `.part` file beside; `sweep` removes those.
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
"""The names of files that are not whole yet."""


@contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[Path]:
    """A name beside `path` to write to. Moved there whole at the end; gone if anything fails.

    If `durable`, content and name are on the disk when this returns. Otherwise they may be lost with the machine's
    power, never with the process.
    """
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        raise UsageError(f"{path} is not a place for a file: expected a file name in a folder that exists.")
    temporary = path.with_name(f".{secrets.token_hex(8)}.part{path.suffix}")
    try:
        try:
            temporary.touch()
            mode = temporary.stat().st_mode
            yield temporary
            # Some writers make a private file of their own and move it there.
            temporary.chmod(mode)
            if durable:
                sync(temporary)
            os.replace(temporary, path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    # Their own texts may say the name beside, which is none of the reader's business.
    except OSError as error:
        why = error.strerror or str(error).replace(str(temporary), str(path))
        raise FedParaError(f"{path} could not be written: {why}.") from error
    except FedParaError as error:
        if str(temporary) in str(error):
            raise type(error)(str(error).replace(str(temporary), str(path))) from error
        raise


def sync(path: Path) -> None:
    """Put a file's content, or a folder's names, on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # Some file systems refuse this for folders, and a folder may be writable but not readable.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES) or not os.path.isdir(path):
            raise


def make_folder(folder: Path, what: str = "folder", cure: str = "another --out") -> None:
    """With those above it. ConfigError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the {what} {folder} cannot be made: {error.strerror}. Choose {cure}.") from None


def sweep(folder: Path, older_than: float = 0.0) -> None:
    """Remove what killed writers left in the folder and below it.

    Where others may be writing, give a time in seconds: a living writer touches its file all the time.
    """
    for left in folder.rglob(PART):
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime >= older_than:
                left.unlink()


def write_bytes(path: Path, content: bytes, durable: bool = True) -> None:
    with replacing(path, durable) as temporary:
        temporary.write_bytes(content)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], durable: bool = True
) -> None:
    """A safetensors file. Tensors are contiguous and share no memory."""
    if "__metadata__" in tensors:
        raise StateError("a tensor is named '__metadata__', which safetensors keeps for itself: rename it.")
    _refuse_no_text(path)
    with replacing(path, durable) as temporary:
        try:
            save_file(dict(tensors), temporary, dict(metadata))
        except KeyError as error:
            raise StateError(f"{path} could not be written: safetensors has no type {error}.") from error
        except (SafetensorError, ValueError, RuntimeError) as error:
            raise StateError(f"{path} could not be written as safetensors: {error}") from error


def read_tensors(path: Path) -> tuple[State, dict[str, str]]:
    _refuse_no_text(path)
    try:
        with safe_open(path, framework="pt") as file:
            # A copy each: what is mapped from the file would change with it.
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return state, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise StateError(f"{path} cannot be read ({error}): expected a whole safetensors file.") from error


def _refuse_no_text(path: Path) -> None:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise StateError(
            f"{path} is no text in UTF-8, as safetensors expects of a name: choose another."
        ) from None
