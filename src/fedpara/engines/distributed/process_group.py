"""ProcessGroup: the processes of one run that torchrun started, one a GPU, kept in step.

All they do together is one thing: every rank puts in a JSON header and byte strings, or the error that kept it
from them, and every rank gets what all put in. So an error on one rank is raised on all, and none waits for ever.
A process that torchrun did not start is a group of one, which exchanges nothing.
"""

import atexit
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from fedpara import errors
from fedpara.errors import ConfigError, FedParaError, RunError

PATIENCE = timedelta(hours=1)
"""For a rank that hangs. One that dies closes its connections, which is seen at once."""


@dataclass(frozen=True)
class Part:
    """What one rank puts in."""

    header: dict[str, Any] = field(default_factory=dict)
    blobs: list[bytes] = field(default_factory=list)


class ProcessGroup:
    """`device` is this rank's own GPU; `over` means that no rank can be reached any more."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.over = False
        self._raised: Exception | None = None  # by all ranks together

    @property
    def backend(self) -> str:
        return "nccl" if self.device is not None else "gloo"

    def gather(self, what: str, work: Callable[[], Part] = Part) -> list[Part]:
        """Every rank's part, by rank. If `work` failed on one, all raise the first such rank's error."""
        if self.size == 1:
            return [work()]
        failed: Exception | None = None
        try:
            own = work()
        except Exception as error:
            own, failed = Part({"error": _told(error, self.rank)}), error
        try:
            parts = self._exchange(what, own)
        except RunError as lost:
            raise failed or lost from None
        for rank, part in enumerate(parts):
            if "error" in part.header:
                mine = failed if rank == self.rank else None
                self._raised = mine or _rebuilt(**part.header["error"])
                raise self._raised
        told = [part.header["what"] for part in parts]
        if len(set(told)) > 1:
            self._raised = RunError(
                f"the ranks are not at the same place: {', '.join(told)}. Expected one script with the same "
                "settings on every rank."
            )
            raise self._raised
        return parts

    def agreed(self, what: str, text: str) -> str:
        """Rank 0's text."""
        return str(self.gather(what, lambda: Part({"text": text}))[0].header.get("text"))

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """All ranks come to the end of this block, or all leave it with an error."""
        try:
            yield
        except Exception as error:
            if self.size > 1 and not self.over and error is not self._raised:
                self.gather(what, _raising(error))
            raise
        except BaseException:  # Ctrl-C, SIGTERM: the others see this process go
            self.over = self.size > 1
            raise
        self.gather(what)

    def leave(self) -> None:
        """Wait for the others, so that none is stopped by torchrun while it still says why it ended."""
        if self.size == 1 or not dist.is_initialized():
            return
        try:
            if not self.over:
                self.gather("the end")
        except FedParaError:
            self.over = True
        _destroy()

    def _exchange(self, what: str, own: Part) -> list[Part]:
        header = {**own.header, "what": what, "blobs": [len(blob) for blob in own.blobs]}
        text = json.dumps(header).encode()
        content = b"".join([len(text).to_bytes(8, "little"), text, *own.blobs])
        try:
            if self.over:
                raise RuntimeError("the group has ended before")
            return [_opened(one) for one in all_gather(content, self.size, self.device)]
        except RuntimeError as error:
            self.over = True
            others = [str(rank) for rank in range(self.size) if rank != self.rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(others)}"
            raise RunError(
                f"{who} no longer answers at {what}: it was ended, or its machine cannot be reached "
                f"({_cause(error)})."
            ) from None


def place() -> tuple[int, int]:
    """(this process's rank, how many there are), as torchrun's environment says."""
    size = _whole("WORLD_SIZE", "1")
    return (_whole("RANK"), size) if size > 1 and "RANK" in os.environ else (0, 1)


def _whole(variable: str, usual: str = "") -> int:
    value = os.environ.get(variable, usual)
    try:
        return int(value)
    except ValueError:
        raise ConfigError(
            f"{variable} is {value!r} in the environment: expected a whole number, as torchrun sets it. Unset it."
        ) from None


@cache
def join() -> ProcessGroup:
    """The group that torchrun's environment names, joined once; a group of one without it.

    NCCL between GPUs, one a rank; gloo between CPUs, and for what is small.
    """
    rank, size = place()
    if size == 1:
        return ProcessGroup()
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed was started before fedpara, which joins the ranks itself: leave "
            "init_process_group out of the script."
        )
    # Imported later, as `grad` does, it would hold the group to the process's end as its functions' default, and gloo's
    # threads with it: one that lets go of a tensor when Python is gone aborts the process.
    import_module("torch.distributed.nn.functional")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"the {size} ranks could not be joined: {_cause(error)}. Start them with torchrun."
        ) from error
    atexit.register(_destroy)
    local = int(os.environ.get("LOCAL_RANK", rank))
    # By gloo, until each is known to have a GPU: a rank without one would keep NCCL waiting.
    group = ProcessGroup(rank, size)
    group.gather("the start", lambda: _placed(rank, local, gpus))
    group.device = torch.device("cuda", local) if gpus else None
    return group


def _placed(rank: int, local: int, gpus: int) -> Part:
    if gpus and local >= gpus:
        raise ConfigError(
            f"rank {rank} has no GPU of its own: its machine has {gpus}. Start as many ranks as there are GPUs, or "
            "hide them with CUDA_VISIBLE_DEVICES='' to use the CPUs."
        )
    if gpus:
        torch.cuda.set_device(local)
    return Part()


def all_gather(content: bytes, size: int, device: torch.device | None) -> list[bytes]:
    """Every rank's bytes, by rank: how many first, then all of them, padded to the longest.

    The counts go by gloo, whose connections tell at once of a rank that died, so the GPUs never wait for one.
    """
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(content)]))
    longest = int(max(counts))
    own = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8).to(device or "cpu")
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own)
    return [one[: int(count)].cpu().numpy().tobytes() for one, count in zip(every, counts, strict=True)]


def _opened(content: bytes) -> Part:
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    blobs = []
    for length in header.pop("blobs"):
        blobs.append(content[start : start + length])
        start += length
    return Part(header, blobs)


def _told(error: Exception, rank: int) -> dict[str, str]:
    if isinstance(error, FedParaError):
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "RunError", "text": f"rank {rank} failed: {type(error).__name__}: {error}"}


def _rebuilt(kind: str, text: str) -> FedParaError:
    known = getattr(errors, kind, None)
    return known(text) if isinstance(known, type) and issubclass(known, FedParaError) else RunError(text)


def _cause(error: Exception) -> str:
    """torch's text without the place in its source and its advice."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0].rstrip(".")


def _raising(error: Exception) -> Callable[[], Part]:
    def work() -> Part:
        raise error

    return work


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
