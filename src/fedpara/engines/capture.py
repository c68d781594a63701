"""A step of all lanes as one CUDA graph: compiled, warmed up, captured, replayed."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from fedpara.engines.places import Lanes
from fedpara.errors import in_a_line

OF_VMAP_AND_GRAD = tuple(
    f"{module}.{name}"
    for module in ("torch._functorch.predispatch", "torch._functorch.eager_transforms", "torch._C._functorch")
    for name in (
        *("_vmap_increment_nesting", "_vmap_decrement_nesting", "_add_batch_dim", "_remove_batch_dim"),
        *("_grad_increment_nesting", "_grad_decrement_nesting", "_wrap_for_grad", "_unwrap_for_grad"),
        *("_autograd_grad", "_set_tensor_requires_grad", "set_inplace_requires_grad_allowed"),
        "lazy_load_decompositions",
    )
)
AUTOCAST = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")
"""What `vmap`, `grad` and autocast leave in a traced program. torch holds such a program back from its cache of derived
programs, and derives it anew at every start, which takes as long as tracing it."""


def capture(tick: Callable[[], None], lanes: Lanes, compile: bool, notes: list[str]) -> Callable[[], None]:
    """The tick compiled and captured as a CUDA graph; `notes` says what could not be done and why.

    Warming up steps the lanes for real: their contents are put back afterwards.
    """
    if compile:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder()))
        torch._dynamo.reset()  # another experiment's program in this process is not to count as a recompilation
        compiled = torch.compile(tick, dynamic=False)
        try:
            with cached_whole():
                _warm_up(compiled, lanes, 1)
            tick = compiled
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            notes.append(f"not compiled: {in_a_line(error)}")
    _warm_up(tick, lanes, 3)
    graph = torch.cuda.CUDAGraph()
    saved = _contents(lanes)
    with torch.cuda.graph(graph):
        tick()
    _put_back(lanes, saved)

    def replay(held: Callable[[], None] = tick) -> None:
        """The graph knows its inputs by address only: what the tick closes over must stay alive with it."""
        graph.replay()

    return replay


@contextmanager
def cached_whole() -> Iterator[None]:
    """Programs compiled in here are cached with their derivatives; our own ops count by their source."""
    import torch._inductor.config as settings

    own = ("ops.py", "convolution.py", "recurrence.py")
    source = sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in own)).hexdigest()
    with settings.patch(unsafe_marked_cacheable_functions=dict.fromkeys(OF_VMAP_AND_GRAD + AUTOCAST, source)):
        yield


def cache_folder() -> Path:
    """Where compiled code waits for the next start; torch's own choice is a folder that a reboot empties."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "fedpara" / "compiled"


def _warm_up(tick: Callable[[], None], lanes: Lanes, times: int) -> None:
    saved = _contents(lanes)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            lanes.counter.zero_()
            tick()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    _put_back(lanes, saved)


def _moving(lanes: Lanes) -> list[Tensor]:
    states = (lanes.parameters, lanes.velocity, lanes.buffers)
    return [t for state in states for t in state.values()] + [lanes.counter, lanes.losses]


def _contents(lanes: Lanes) -> list[Tensor]:
    return [tensor.clone() for tensor in _moving(lanes)]


def _put_back(lanes: Lanes, saved: list[Tensor]) -> None:
    for tensor, old in zip(_moving(lanes), saved, strict=True):
        tensor.copy_(old)
