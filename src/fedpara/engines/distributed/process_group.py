"""ProcessGroup: the processes of one run that torchrun started, one per GPU.

Their only joint operation is `gather`: every rank contributes a JSON header and byte strings, or its error, and every
rank gets all contributions. So an error on one rank is raised on all, and no rank waits forever. Without torchrun the
group has one process and exchanges nothing.
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
from torch.distributed.distributed_c10d import _set_pg_timeout

from fedpara import errors
from fedpara.errors import ConfigError, FedParaError, RunError

JOIN_TIMEOUT = timedelta(minutes=5)
"""How long to wait for ranks that have not joined: until then there is no connection that a dead rank would close.

torch tries to reach rank 0 for up to twice this time.
"""
RANK_TIMEOUT = timedelta(hours=1)
"""How long to wait for a rank that hangs. A rank that dies closes its connections, which is noticed at once."""


@dataclass(frozen=True)
class Part:
    """What one rank contributes."""

    header: dict[str, Any] = field(default_factory=dict)
    blobs: list[bytes] = field(default_factory=list)


class ProcessGroup:
    """`device` is this rank's GPU; `over` means that the other ranks can no longer be reached."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | None = None) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.over = False
        self._raised: Exception | None = None  # the error that all ranks raised together

    @property
    def backend(self) -> str:
        return "nccl" if self.device is not None else "gloo"

    def gather(self, what: str, work: Callable[[], Part] = Part) -> list[Part]:
        """Every rank's part, by rank. If `work` fails on any rank, all raise the first one's error."""
        if self.size == 1:
            return [work()]
        failed: Exception | None = None
        try:
            own = work()
        except Exception as error:
            own, failed = Part({"error": _described(error, self.rank)}), error
        try:
            parts = self._exchange(what, own)
        except RunError as lost:
            raise failed or lost from None
        for rank, part in enumerate(parts):
            if "error" in part.header:
                mine = failed if rank == self.rank else None
                self._raised = mine or _rebuilt(**part.header["error"])
                raise self._raised
        stages = [part.header["what"] for part in parts]
        if len(set(stages)) > 1:
            self._raised = RunError(
                f"the ranks are out of step: {', '.join(stages)}. Run one script with the same settings on every rank."
            )
            raise self._raised
        return parts

    def agreed(self, what: str, text: str) -> str:
        """Rank 0's text, on every rank."""
        return str(self.gather(what, lambda: Part({"text": text}))[0].header.get("text"))

    @contextmanager
    def in_step(self, what: str) -> Iterator[None]:
        """All ranks reach the end of this block, or all raise an error."""
        try:
            yield
        except Exception as error:
            if self.size > 1 and not self.over and error is not self._raised:
                self.gather(what, _raising(error))
            raise
        except BaseException:  # Ctrl-C, SIGTERM: the others notice that this process ends
            self.over = self.size > 1
            raise
        self.gather(what)

    def leave(self) -> None:
        """Wait for the others, so that torchrun does not stop a rank that is still reporting its error."""
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
                raise RuntimeError("the group has already ended")
            return [_parse(one) for one in all_gather(content, self.size, self.device)]
        except RuntimeError as error:
            self.over = True
            others = [str(rank) for rank in range(self.size) if rank != self.rank]
            who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(others)}"
            raise RunError(
                f"{who} no longer responds at {what}: the process ended, or its machine cannot be reached "
                f"({_cause(error)})."
            ) from None


def place() -> tuple[int, int]:
    """(this process's rank, the number of ranks), from torchrun's environment."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), size) if size > 1 and "RANK" in os.environ else (0, 1)


def is_joined() -> bool:
    """Whether this process has met the other ranks."""
    return dist.is_initialized()


@cache
def join() -> ProcessGroup:
    """The group that torchrun's environment describes, joined once; without torchrun a group of one.

    It uses NCCL between GPUs, one per rank, and gloo between CPUs and for small exchanges.
    """
    rank, size = place()
    if size == 1:
        return ProcessGroup()
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is already initialized: fedpara joins the ranks itself, so leave init_process_group "
            "out of the script."
        )
    # If `grad` imported this module later, its functions' defaults would keep the group and gloo's threads alive until
    # the process ends; a thread that frees a tensor after Python has shut down aborts the process.
    import_module("torch.distributed.nn.functional")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=JOIN_TIMEOUT)
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        seconds = JOIN_TIMEOUT.total_seconds()
        raise RunError(
            f"rank {rank} could not reach all {size} ranks within {seconds:g} s ({_cause(error)}): a "
            "process has ended or did not start. Start all ranks together, with torchrun."
        ) from error
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"the {size} ranks could not be joined: {_cause(error)}. Start them with torchrun."
        ) from error
    atexit.register(_destroy)
    local = int(os.environ.get("LOCAL_RANK", rank))
    # gloo until every rank has confirmed its GPU: NCCL would wait forever for a rank without one.
    group = ProcessGroup(rank, size)
    group.gather("the start", lambda: _claim_gpu(rank, local, gpus))
    group.device = torch.device("cuda", local) if gpus else None
    _set_pg_timeout(RANK_TIMEOUT)
    return group


def _claim_gpu(rank: int, local: int, gpus: int) -> Part:
    if gpus and local >= gpus:
        raise ConfigError(
            f"rank {rank} has no GPU: its machine has {gpus}. Start as many ranks as there are GPUs, or set "
            "CUDA_VISIBLE_DEVICES='' to use the CPUs."
        )
    if gpus:
        torch.cuda.set_device(local)
    return Part()


def all_gather(content: bytes, size: int, device: torch.device | None) -> list[bytes]:
    """Every rank's bytes, by rank: first their lengths, then the bytes, padded to the longest.

    gloo sends the lengths: its connections report a dead rank at once, so the GPUs never wait for one.
    """
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(counts, torch.tensor([len(content)]))
    longest = int(max(counts))
    own = torch.frombuffer(bytearray(content.ljust(longest, b"\0")), dtype=torch.uint8).to(device or "cpu")
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own)
    return [one[: int(count)].cpu().numpy().tobytes() for one, count in zip(every, counts, strict=True)]


def _parse(content: bytes) -> Part:
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    blobs = []
    for length in header.pop("blobs"):
        blobs.append(content[start : start + length])
        start += length
    return Part(header, blobs)


def _described(error: Exception, rank: int) -> dict[str, str]:
    if isinstance(error, FedParaError):
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "RunError", "text": f"rank {rank} failed: {type(error).__name__}: {error}"}


def _rebuilt(kind: str, text: str) -> FedParaError:
    known = getattr(errors, kind, None)
    return known(text) if isinstance(known, type) and issubclass(known, FedParaError) else RunError(text)


def _cause(error: Exception) -> str:
    """torch's message without its source location and advice."""
    return re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0].rstrip(".")


def _raising(error: Exception) -> Callable[[], Part]:
    def work() -> Part:
        raise error

    return work


def _destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
