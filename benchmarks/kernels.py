"""Microseconds of the fused kernels on the shapes of VGG16 in 16 lanes, by block sizes and warps.

    python benchmarks/kernels.py                    on a GPU: all kernels
    python benchmarks/kernels.py --only compose     the kernels whose names match

A row compares with what the memory allows: the bytes that must be read and written once, at the rate of a large copy.
Processes side by side compile the variants first. Then the variants run one after another, alone on the GPU.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context

import torch
from torch import Tensor

LANES, BATCH, GROUPS, EPS = 16, 64, 32, 1e-5
WEIGHTS = {"512-512": (4608, 512, 56), "256-512": (4608, 256, 40), "256-256": (2304, 256, 32)}
"""Rows, columns and padded rank of a composed kernel."""
WIDE = {"gamma0.2": (4608, 512, 80), "gamma0.4": (4608, 512, 144), "gamma0.9": (4608, 512, 280)}
"""The same for the kernels of large ranks."""
IMAGES = {"64x32": (64, 32), "128x16": (128, 16), "256x8": (256, 8), "512x4": (512, 4), "512x2": (512, 2)}


@dataclass(frozen=True)
class Case:
    """A kernel on a shape with its variants, and the bytes that it must move."""

    kernel: str
    shape: str
    variants: tuple[tuple[int, ...], ...]
    moved: int


def cases() -> Iterator[Case]:
    compose = ((128, 128, 8), (128, 64, 8), (64, 64, 4), (128, 64, 4), (64, 128, 4))
    rows = ((64, 64, 4), (64, 32, 4), (128, 32, 8), (128, 64, 8), (64, 64, 8), (64, 128, 8))
    columns = ((64, 64, 4), (32, 64, 4), (128, 64, 8), (64, 64, 8), (64, 32, 4), (128, 32, 4))
    for shape, (m, n, _) in WEIGHTS.items():
        for kernel, variants in (("compose", compose), ("row_gradient", rows), ("column_gradient", columns)):
            yield Case(kernel, shape, variants, 2 * LANES * m * n)
    tiles_of_w = ((128, 128, 32, 8), (128, 128, 64, 8), (128, 64, 32, 4), (128, 64, 64, 8), (64, 128, 32, 4))
    for shape, (m, n, _) in WIDE.items():
        for kernel, each in (("wide_forward", 1), ("wide_inner_gradients", 3), ("wide_backward", 3)):
            given: tuple[tuple[int, ...], ...] = ((),) if kernel == "wide_backward" else tiles_of_w
            yield Case(kernel, shape, given, 2 * LANES * m * n * each)
    for (shape, (c, h)), pool in product(IMAGES.items(), (False, True)):
        numbers = LANES * BATCH * c * h * h
        name, result = ("norm_pool", numbers // 4) if pool else ("norm", numbers)
        wide = [
            channels
            for channels in (16, 32, 64, 128, 256)
            if channels >= c // GROUPS and channels * h * h <= 1 << 15
        ]
        once = tuple(product(wide, (0, 128, 80)))
        yield Case(f"{name}_forward", shape, once, 2 * (numbers + result))
        again = tuple((*variant, again) for variant in once for again in (False, True))
        yield Case(f"{name}_backward", shape, again, 2 * (2 * numbers + result))
        tiles = tuple((channels, tile) for channels in wide[:3] for tile in (512, 1024, 2048, 4096))
        yield Case(f"streamed_{name}_forward", shape, tiles, 2 * (numbers + result))
        yield Case(f"streamed_{name}_backward", shape, tiles, 2 * (2 * numbers + result))


def call(kernel: str, shape: str, variant: tuple[int, ...]) -> Callable[[], object]:
    from fedpara.engines.batched.kernels.gpu import hadamard
    from fedpara.engines.batched.kernels.gpu import hadamard_wide as wide

    torch.manual_seed(0)
    if "norm" in kernel:
        return norm(kernel, *IMAGES[shape], variant)
    m, n, r = {**WEIGHTS, **WIDE}[shape]
    a, y, dw = (drawn(LANES, *size) for size in ((2, m, r), (2, n, r), (m, n)))
    if kernel == "compose":
        return lambda: hadamard.forward(a, y, 0.0, *variant)
    if kernel == "wide_forward":
        return lambda: wide.forward(a, y, 0.0, *variant)
    if kernel.startswith("wide"):
        return lambda: getattr(wide, kernel.removeprefix("wide_"))(a, y, dw, 0.0, *variant)
    gradient = getattr(hadamard, kernel)
    return lambda: gradient(a, y, dw, 0.0, *variant)


def norm(kernel: str, c: int, h: int, variant: tuple[int, ...]) -> Callable[[], object]:
    from fedpara.engines.batched.kernels.gpu import norm_once, norm_streamed

    kernels = norm_streamed if kernel.startswith("streamed") else norm_once
    pool = "pool" in kernel
    x = drawn(LANES, BATCH, h, h, c)
    offset, weight, bias = (torch.ones(LANES, c, device="cuda") for _ in range(3))
    if kernel.endswith("forward"):
        return lambda: kernels.forward(x, offset, weight, bias, GROUPS, EPS, pool, *variant)
    y, stats, totals = kernels.forward(x, offset, weight, bias, GROUPS, EPS, pool)
    dy = torch.randn_like(y)
    given = x, dy, offset, weight, bias, stats, totals
    return lambda: kernels.backward(*given, GROUPS, pool, *variant)


def drawn(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def compiled(case: tuple[str, str, tuple[int, ...]]) -> str | None:
    """Runs it once; the error's first line if it cannot run."""
    try:
        call(*case)()
        torch.cuda.synchronize()
    except Exception as error:
        return str(error).splitlines()[0][:90]
    return None


def microseconds(step: Callable[[], object]) -> float:
    """The least of five averages over 4 calls. A write clears the cache before each call."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    step()
    for _ in range(5):
        total = 0.0
        for _ in range(4):
            flush.zero_()
            first.record()
            step()
            last.record()
            torch.cuda.synchronize()
            total += first.elapsed_time(last)
        found.append(1e3 * total / 4)
    return min(found)


def copy_rate() -> float:
    """Bytes per second of a copy of 2 GB, read and written."""
    a = torch.empty(2**30, dtype=torch.int16, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / (microseconds(lambda: b.copy_(a)) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a pattern of kernel/shape")
    args = parser.parse_args()
    chosen = [case for case in cases() if re.search(args.only, f"{case.kernel}/{case.shape}")]
    every = [(case.kernel, case.shape, variant) for case in chosen for variant in case.variants]
    with ProcessPoolExecutor(min(12, os.cpu_count() or 1), get_context("spawn")) as pool:
        errors = dict(zip(every, pool.map(compiled, every), strict=True))
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy moves {rate / 1e12:.2f} TB/s\n")
    print("| kernel | shape | variant | µs | at the memory's rate |\n|---|---|---|---:|---:|")
    for case in chosen:
        times = {
            variant: microseconds(call(case.kernel, case.shape, variant))
            for variant in case.variants
            if errors[case.kernel, case.shape, variant] is None
        }
        for variant in case.variants:
            bound = f"{1e6 * case.moved / rate:.0f}"
            if variant in times:
                best = "**" * (times[variant] == min(times.values()) and len(times) > 1)
                print(
                    f"| {case.kernel} | {case.shape} | {variant} | {best}{times[variant]:.0f}{best} | {bound} |"
                )
            else:
                error = errors[case.kernel, case.shape, variant]
                print(f"| {case.kernel} | {case.shape} | {variant} | {error} | {bound} |", flush=True)


if __name__ == "__main__":
    main()
