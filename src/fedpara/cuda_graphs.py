"""CUDA graphs: a step is recorded once, and a replay launches all its operations at once, without Python.

A replay reads and writes the memory that the step used when it was recorded, so a recorded step works on tensors that
stay where they are. Recording executes nothing. Random layers that draw from the device's default generator draw the
same numbers in a replay as in a step that runs: torch passes the generator's seed and offset to each replay.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from fedpara.errors import RunError

Replay = Callable[[], None]
_ABANDONED: list[torch.cuda.CUDAGraph] = []
"""Graphs whose recording failed. torch's allocators may still ask them, so they are kept until the process ends."""


class Recorder(Protocol):
    """Makes replays of steps. A step is a function without arguments and results."""

    def warm_up(self, step: Callable[[], None]) -> None:
        """Runs the step once, so that it can be recorded later."""

    def record(self, step: Callable[[], None]) -> Replay:
        """The step as a replay; nothing is executed. Raises if the step cannot be recorded.

        The caller keeps the tensors that the step uses: the replay knows them only by address.
        """


class CudaGraphs:
    """Graphs of one device. They share a pool of memory, so no tensor that a step creates may be used after it."""

    def __init__(self, device: torch.device, spare: bool = False) -> None:
        """With `spare`, refuses to record unless twice the memory that torch has cached is free."""
        self.device, self.spare = device, spare
        # Libraries allocate their workspace per stream: the warm-up allocates that of the recording.
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._scratch = torch.zeros(1, device=device)

    def warm_up(self, step: Callable[[], None]) -> None:
        here = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            step()
        here.wait_stream(self._stream)

    def record(self, step: Callable[[], None]) -> Replay:
        self._free_memory()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may use the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                step()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise

        return graph.replay

    def _free_memory(self) -> None:
        """Empties torch's cache. With `spare`, RunError if the pool might take memory that later steps need.

        The cache shows what the warm-up needed beside the tensors that stay.
        """
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.empty_cache()
        needed = before - torch.cuda.memory_reserved(self.device)
        free, _ = torch.cuda.mem_get_info(self.device)
        if self.spare and free < 2 * needed:
            raise RunError(
                f"{free / 1e9:.1f} GB of the GPU's memory are free, and a step takes {needed / 1e9:.1f}"
            )

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends a recording that failed. torch leaves its allocator and its generator as if it still went on."""
        _ABANDONED.append(graph)
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):  # raises if the recording has ended properly
            index = self._scratch.device.index
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()  # torch refuses to record to the old one again
        another = torch.cuda.CUDAGraph()
        another.capture_begin(capture_error_mode="thread_local")
        self._scratch.zero_()
        another.capture_end()
        graph.reset()
