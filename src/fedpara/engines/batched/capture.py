"""A step of all lanes as one CUDA graph: traced, compiled, warmed up, captured, replayed."""

import os
import warnings
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedpara.engines.batched.lane_state import LaneState
from fedpara.errors import in_a_line

OWN_OPS = ("ops.py", "conv.py", "lstm.py")


def capture(
    tick: Callable[[LaneState], None], lanes: LaneState, compile: bool, notes: list[str]
) -> Callable[[], None]:
    """The tick on these lanes, compiled and captured as a CUDA graph; `notes` says what could not be done and why.

    Warming up steps the lanes for real: their contents are put back afterwards.
    """
    keep_what_is_compiled()
    step: Callable[[], None] = partial(tick, lanes)
    if compile:
        try:
            fast = compiled(tick, lanes)
            _warm_up(fast, lanes, 1)
            step = fast
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            notes.append(f"not compiled: {in_a_line(error)}")
    _warm_up(step, lanes, 3)
    graph = torch.cuda.CUDAGraph()
    saved = _contents(lanes)
    with torch.cuda.graph(graph):
        step()
    _put_back(lanes, saved)

    def replay(held: Callable[[], None] = step) -> None:
        """The graph knows its inputs by address only: what the step reads must stay alive with it."""
        graph.replay()

    return replay


def compiled(tick: Callable[[LaneState], None], lanes: LaneState) -> Callable[[], None]:
    """The tick on these lanes, traced and compiled: a program that torch caches whole."""
    from torch._inductor import config, standalone_compile

    tensors = lanes.tensors()
    with config.patch(unsafe_marked_cacheable_functions={"fedpara": _own_ops()}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # float32 was asked for
        program = standalone_compile(traced(tick, lanes), [*tensors], dynamic_shapes="from_example_inputs")
    return lambda: program(*tensors)


def traced(tick: Callable[[LaneState], None], lanes: LaneState) -> GraphModule:
    """The tick as operations on `lanes.tensors()`: of `vmap`, `grad` and autocast only what they come to is left.

    To read the tick's Python code, as torch.compile does, takes two or three times as long, and at every start.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    trace = make_fx(
        lambda *given: tick(lanes.holding(given)), tracing_mode="fake", _allow_non_fake_inputs=True
    )
    return trace(*lanes.tensors())


def _own_ops() -> str:
    """The cache knows an op of ours by its name alone. Its source is to count too, and a setting is a part of the key.

    Not torch's own tag for keys: the processes that compile kernels do not hear of it, and a kernel whose best shape
    one of them wrote down would be tuned again at the next start, perhaps to other bits.
    """
    folder = Path(__file__).parent / "kernels"
    return sha256(b"".join((folder / name).read_bytes() for name in OWN_OPS)).hexdigest()


def keep_what_is_compiled() -> None:
    """Between starts, in a folder of ours unless the user named one; torch names its own, which a reboot empties.

    Two things torch settles in some starts only, and our own kernels would be compiled again in the others: Triton's
    folder, and its assembler, which torch brings along and whose version is a part of what Triton knows a kernel by.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder in (None, default_cache_dir()):  # as soon as torch's compiler is imported, which vmap does
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(home) / "fedpara" / "compiled")
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))
    _set_triton_ptxas_path()


def _warm_up(tick: Callable[[], None], lanes: LaneState, times: int) -> None:
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


def _moving(lanes: LaneState) -> list[Tensor]:
    states = (lanes.parameters, lanes.velocity, lanes.buffers)
    return [t for state in states for t in state.values()] + [lanes.counter, lanes.losses]


def _contents(lanes: LaneState) -> list[Tensor]:
    return [tensor.clone() for tensor in _moving(lanes)]


def _put_back(lanes: LaneState, saved: list[Tensor]) -> None:
    for tensor, old in zip(_moving(lanes), saved, strict=True):
        tensor.copy_(old)
