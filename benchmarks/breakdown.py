"""Where a step's time goes: milliseconds by kind of kernel, of one row of `gpu.py`.

    python benchmarks/breakdown.py fedpara/compiled/bfloat16/16       on a GPU
    python benchmarks/breakdown.py resnet18/compiled/bfloat16/16
    python benchmarks/breakdown.py fedpara/batched/float32/1 --device cpu

A kernel's kind follows from its name. A compiler names a kernel after the operations in it, so a kernel that does
several things counts as the first kind whose pattern it matches. The longest kernels are listed below the table.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable

import torch
from gpu import ready
from torch.profiler import ProfilerActivity, profile

KINDS = {
    "convolution": r"_convolve|_correlate|conv|cudnn|implicit|im2col",
    "composing": r"hadamard|_compose|_row_gradient|_column_gradient",
    "norm, ReLU, pooling": r"norm|relu|pool|rsqrt|^_forward|^_backward",
    "matrix products": r"gemm|nvjet|cutlass|bmm|addmm|^aten::mm",
    "loss": r"softmax|nll|cross_entropy",
    "copies": r"memcpy|memset|copy_kernel|aten::copy_",
}
STEPS = 20


def kernels(step: Callable[[], None], device: str) -> Counter[str]:
    """Milliseconds per step by kernel, or by operation on a CPU."""
    kind, steps = (ProfilerActivity.CUDA, STEPS) if device == "cuda" else (ProfilerActivity.CPU, 1)
    step()
    with profile(activities=[kind]) as recorded:
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in recorded.key_averages():
        spent = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        if spent:
            found[event.key] += spent / 1e3 / steps
    return found


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE)), "others")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", help="a row of gpu.py: weights/way/precision/lanes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=int, default=30)
    args = parser.parse_args()
    found = kernels(ready(args.row, args.device), args.device)
    kinds: Counter[str] = Counter()
    for name, spent in found.items():
        kinds[kind_of(name)] += spent
    print(
        f"{args.row}: {found.total():.3f} ms per step of all lanes, the kernels alone\n\n| kind | ms |\n|---|---:|"
    )
    for kind, spent in kinds.most_common():
        print(f"| {kind} | {spent:.3f} |")
    print("\n| kernel | kind | ms |\n|---|---|---:|")
    for name, spent in found.most_common(args.longest):
        print(f"| `{name[:110]}` | {kind_of(name)} | {spent:.3f} |")


if __name__ == "__main__":
    main()
