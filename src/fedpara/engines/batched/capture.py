"""One step of all lanes as a CUDA graph: traced, compiled, warmed up, captured, replayed.

Only what a step does with a batch is compiled. The graph also gathers the batch and counts, so the compiled program
does not depend on the number of steps or of examples.
"""

import os
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from fedpara.cuda_graphs import CudaGraphs
from fedpara.engines.batched.lane_state import LaneState
from fedpara.engines.batched.step import Tick
from fedpara.errors import in_a_line

KERNELS = Path(__file__).parent / "kernels"
CUSTOM_OPS = tuple(sorted(path.name for path in KERNELS.glob("*.py")))
"""Files that decide what a traced step looks like. Those in `gpu/` only decide what runs inside an op."""


def eager(tick: Tick, lanes: LaneState) -> Callable[[], None]:
    """The tick on the next batch of these lanes."""
    return lambda: tick(lanes, lanes.feed.next())


def capture(tick: Tick, lanes: LaneState, compile: bool, note: Callable[[str], None]) -> Callable[[], None]:
    """The tick on these lanes, compiled and captured as a CUDA graph. `note` is told what was not possible and why.

    Warming up changes the lanes, so their contents are restored afterwards.
    """
    use_lasting_caches()
    graphs = CudaGraphs(lanes.losses.device)
    step = eager(tick, lanes)
    if compile:
        try:
            fast = compiled(tick, lanes)
            _warm_up(graphs, fast, lanes, 1)
            step = fast
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            note(f"the step is not compiled, and slower: {in_a_line(error)}")
    _warm_up(graphs, step, lanes, 3)
    graph = graphs.record(step)

    def replay(held: Callable[[], None] = step) -> None:
        """`held` keeps the step's tensors alive."""
        graph()

    return replay


def compiled(tick: Tick, lanes: LaneState) -> Callable[[], None]:
    """The tick on the next batch of these lanes, traced and compiled into one program, which torch caches."""
    from torch._inductor import config, standalone_compile

    tensors = lanes.tensors()
    with (
        config.patch(unsafe_marked_cacheable_functions={"fedpara": _custom_ops_digest()}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # float32 is intended
        program = standalone_compile(
            traced(tick, lanes),
            [*tensors, *lanes.feed.first().tensors()],
            dynamic_shapes="from_example_inputs",
        )
    return lambda: program(*tensors, *lanes.feed.next().tensors())


def traced(tick: Tick, lanes: LaneState) -> GraphModule:
    """The tick as operations on the tensors of the lanes and of a batch, with `vmap`, `grad` and autocast resolved.

    torch.compile would read the tick's Python code, which takes two or three times as long at every start.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors, batch = lanes.tensors(), lanes.feed.first()

    def on(*given: Tensor) -> None:
        tick(lanes.holding(given[: len(tensors)]), batch.holding(given[len(tensors) :]))

    return make_fx(on, tracing_mode="fake", _allow_non_fake_inputs=True)(*tensors, *batch.tensors())


def _custom_ops_digest() -> str:
    """A digest of the custom ops' source, for torch's cache key, which otherwise contains only their names.

    torch's own cache tag does not reach the processes that compile kernels. Without this digest, a kernel would be
    tuned again at the next start, and might then compute other bits.
    """
    return sha256(b"".join((KERNELS / name).read_bytes() for name in CUSTOM_OPS)).hexdigest()


def use_lasting_caches() -> None:
    """Cache compiled programs in ~/.cache/fedpara unless the user chose a folder; torch's default is lost on reboot.

    Also set two things that torch sets in some processes only: Triton's cache folder, and the assembler that torch
    ships, whose version is part of Triton's cache key.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder in (
        None,
        default_cache_dir(),
    ):  # torch sets the default when its compiler is imported, which vmap does
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(home) / "fedpara" / "compiled")
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(folder) / "triton"))
    _set_triton_ptxas_path()


def _warm_up(graphs: CudaGraphs, tick: Callable[[], None], lanes: LaneState, times: int) -> None:
    saved = _contents(lanes)

    def first() -> None:
        lanes.feed.counter.zero_()
        tick()

    for _ in range(times):
        graphs.warm_up(first)
    torch.cuda.synchronize()
    _put_back(lanes, saved)


def _changing(lanes: LaneState) -> list[Tensor]:
    states = (lanes.parameters, *lanes.slots.values(), lanes.buffers)
    return [t for state in states for t in state.values()] + [lanes.feed.counter, lanes.losses]


def _contents(lanes: LaneState) -> list[Tensor]:
    return [tensor.clone() for tensor in _changing(lanes)]


def _put_back(lanes: LaneState, saved: list[Tensor]) -> None:
    for tensor, old in zip(_changing(lanes), saved, strict=True):
        tensor.copy_(old)
