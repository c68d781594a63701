"""What an LSTM layer's recurrence costs over stacked clients: the loop of products and cells, and the kernels.

    python benchmarks/recurrence.py            one GPU, half a minute
    python benchmarks/recurrence.py --smoke    on the CPU, small: only that it runs

80 characters, 16 clients, batch 64, h of 256: forwards, and backwards with W's gradient, each captured as a CUDA graph.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedpara.engines.batched.kernels.ops import OPS

PAPER = (80, 16, 64, 256)
SMALL = (3, 2, 4, 32)


def drawn(length: int, lanes: int, batch: int, hidden: int, device: str) -> list[Tensor]:
    """p, W and the gradient of h"""
    generator = torch.Generator(device).manual_seed(0)
    shapes = (length, lanes, batch, 4 * hidden), (lanes, 4 * hidden, hidden), (length, lanes, batch, hidden)
    p, w, dh = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    return [p, w * hidden**-0.5, dh]


def milliseconds(run: Callable[[], object], turns: int = 10) -> float:
    """The median of the turns."""
    run()
    if not torch.cuda.is_available():
        started = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - started)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    took: list[float] = []
    for _ in range(turns):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
    return sorted(took)[turns // 2]


def row(name: str, p: Tensor, w: Tensor, dh: Tensor) -> None:
    h, c, gates = OPS.lanes_lstm(p, w)
    forwards = milliseconds(lambda: OPS.lanes_lstm(p, w))
    backwards = milliseconds(lambda: OPS.lanes_lstm_backward(dh, h, c, gates, w))
    print(f"| {name} | {forwards:.3f} | {backwards:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true")
    smoke = parser.parse_args().smoke
    if not smoke and not torch.cuda.is_available():
        raise SystemExit("no GPU here: --smoke shows that it runs.")
    device = "cpu" if smoke else "cuda"
    what = "CPU" if smoke else torch.cuda.get_device_name()
    print(
        f"torch {torch.__version__}, {what}, milliseconds a layer\n\n| | forwards | backwards |\n|---|---|---|"
    )
    given = drawn(*(SMALL if smoke else PAPER), device)
    for name, precision in (("loop, float32", "highest"), ("loop, TF32", "high")):
        torch.set_float32_matmul_precision(precision)
        row(name, *given)
    row("in bfloat16 (kernels on a GPU)", *(tensor.bfloat16() for tensor in given))


if __name__ == "__main__":
    main()
