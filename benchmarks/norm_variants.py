"""Variants of the fused norm's kernels that keep an image in registers, beside the engine's, on the shapes of VGG16.

    python benchmarks/norm_variants.py            on a GPU: microseconds of each variant, and of the engine's kernel
    TRITON_INTERPRET=1 python benchmarks/norm_variants.py --check     on a CPU: compares small shapes with float64

The engine's kernels read an image three times forward and twice backward. These variants read it once:

    forward          all pixels of an image and a block of channels in registers, in 16 bits
    backward         the same for x and dz
    backward again   dz in registers; x is read a second time, while the cache has it

The pixels are PARTS tensors, so that few of them are in float32 at a time. `_after` makes the compiler convert a part
again after each sum, in place of keeping it in float32. Sums over a group are butterflies of `tl.gather`: with a
reshape, the compiler computes all of an image in the layout of the group sums, in which all threads of a warp repeat
each other's work. dx = dz A + x B + D takes two multiplications per number.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUPS, EPS = 32, 1e-5
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def _group_sums(values, SIZE: tl.constexpr, CB: tl.constexpr):
    index = tl.arange(0, CB)
    if SIZE >= 2:
        values += tl.gather(values, index ^ 1, 0)
    if SIZE >= 4:
        values += tl.gather(values, index ^ 2, 0)
    if SIZE >= 8:
        values += tl.gather(values, index ^ 4, 0)
    if SIZE >= 16:
        values += tl.gather(values, index ^ 8, 0)
    return values


@triton.jit
def _tap(p, t: tl.constexpr, C: tl.constexpr, W: tl.constexpr, TAPS: tl.constexpr):
    """Where tap t of the result's pixel p is in the image."""
    if TAPS == 1:
        return p * C
    else:
        half: tl.constexpr = W // 2
        return (p // half * W + p % half) * (2 * C) + (t // 2 * W + t % 2) * C


@triton.jit
def _after(v, zero, made, PTX: tl.constexpr):
    """v ^ (zero & made): v, but not before `made` is known."""
    if PTX:
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $4, 0x78;",
            "=r,r,r,r,r,r",
            [v, zero, made.to(tl.int32, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        return v


@triton.jit
def _forward(
    x,
    weight,
    bias,
    y,
    stats,
    eps,
    zero,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    PTX: tl.constexpr,
):
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    channels = start + tl.arange(0, CB)
    x += image * (C * H * W) + channels[None, :]
    y += image * (C * H * W // TAPS) + channels[None, :]
    n = SIZE * H * W
    parts = ()
    for i in tl.static_range(PARTS):
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        for t in tl.static_range(TAPS):
            parts += (tl.load(x + _tap(p, t, C, W, TAPS)),)
    total = tl.zeros((PIXELS, CB), tl.float32)
    for i in tl.static_range(PARTS * TAPS):
        total += parts[i].to(tl.float32)
    means = _group_sums(tl.sum(total, 0), SIZE, CB) / n
    mean = means[None, :]
    total = tl.zeros((PIXELS, CB), tl.float32)
    for i in tl.static_range(PARTS * TAPS):
        c = _after(parts[i], zero, mean, PTX).to(tl.float32) - mean
        total += c * c
    scales = tl.rsqrt(_group_sums(tl.sum(total, 0), SIZE, CB) / n + eps)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    tl.store(group, means, channels % SIZE == 0)
    tl.store(group + C // SIZE, scales, channels % SIZE == 0)
    w = (tl.load(weight + image // BATCH * C + channels).to(tl.float32) * scales)[None, :]
    b = tl.load(bias + image // BATCH * C + channels).to(tl.float32)[None, :]
    for i in tl.static_range(PARTS):
        top = tl.zeros((PIXELS, CB), tl.float32)
        for t in tl.static_range(TAPS):
            c = _after(parts[i * TAPS + t], zero, w, PTX).to(tl.float32) - mean
            top = tl.maximum(top, c * w + b)
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        tl.store(y + p * C, top.to(y.dtype.element_ty))


@triton.jit
def _backward(
    x,
    dy,
    weight,
    bias,
    stats,
    dx,
    sums,
    zero,
    BATCH: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    SIZE: tl.constexpr,
    CB: tl.constexpr,
    PIXELS: tl.constexpr,
    PARTS: tl.constexpr,
    TAPS: tl.constexpr,
    PTX: tl.constexpr,
    AGAIN: tl.constexpr,
):
    program = tl.program_id(0)
    image, start = (program // (C // CB)).to(tl.int64), program % (C // CB) * CB
    channels = start + tl.arange(0, CB)
    place = image * (C * H * W) + channels[None, :]
    x += place
    dx += place
    dy += image * (C * H * W // TAPS) + channels[None, :]
    n = SIZE * H * W
    parts, dys = (), ()
    if not AGAIN:
        for i in tl.static_range(PARTS):
            p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
            dys += (tl.load(dy + p * C),)
            for t in tl.static_range(TAPS):
                parts += (tl.load(x + _tap(p, t, C, W, TAPS)),)
    group = stats + image * (2 * C // SIZE) + channels // SIZE
    mean1, scale1 = tl.load(group), tl.load(group + C // SIZE)
    w1 = tl.load(weight + image // BATCH * C + channels).to(tl.float32)
    mean, w = mean1[None, :], (w1 * scale1)[None, :]
    b = tl.load(bias + image // BATCH * C + channels).to(tl.float32)[None, :]
    dz_hat = tl.zeros((PIXELS, CB), tl.float32)
    dz_sum = tl.zeros((PIXELS, CB), tl.float32)
    dzs, taps = (), ()
    for i in tl.static_range(PARTS):
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        if AGAIN:
            d = tl.load(dy + p * C)
            v = tl.load(x + _tap(p, 0, C, W, TAPS))
        else:
            d = dys[i]
            v = parts[i * TAPS]
        c = v.to(tl.float32) - mean
        z = c * w + b
        if TAPS > 1:
            z = z.to(x.dtype.element_ty).to(tl.float32)
            tap = tl.zeros((PIXELS, CB), tl.int8)
            for t in tl.static_range(1, TAPS):
                if AGAIN:
                    v = tl.load(x + _tap(p, t, C, W, TAPS))
                else:
                    v = parts[i * TAPS + t]
                one = v.to(tl.float32) - mean
                z1 = (one * w + b).to(x.dtype.element_ty).to(tl.float32)
                higher = z1 > z
                c = tl.where(higher, one, c)
                z = tl.where(higher, z1, z)
                tap = tl.where(higher, t, tap).to(tl.int8)
            taps += (tap,)
        dz = tl.where(z > 0.0, d.to(tl.float32), 0.0)
        dz_hat += dz * c
        dz_sum += dz
        dzs += (dz.to(dy.dtype.element_ty),)
    s_hat, s = tl.sum(dz_hat, 0) * scale1, tl.sum(dz_sum, 0)
    tl.store(sums + image * (2 * C) + channels, s_hat)
    tl.store(sums + image * (2 * C) + C + channels, s)
    g_hat, g = _group_sums(s_hat * w1, SIZE, CB) / n, _group_sums(s * w1, SIZE, CB) / n
    slope1 = -(scale1 * scale1 * g_hat)
    level = (-(scale1 * g) - slope1 * mean1)[None, :]
    slope = slope1[None, :]
    for i in tl.static_range(PARTS):
        dz = _after(dzs[i], zero, level, PTX).to(tl.float32) * w + level
        p = i * PIXELS + tl.arange(0, PIXELS)[:, None]
        for t in tl.static_range(TAPS):
            at = _tap(p, t, C, W, TAPS)
            if AGAIN:
                v = tl.load(x + at)
            else:
                v = _after(parts[i * TAPS + t], zero, level, PTX)
            d = dz
            if TAPS > 1:
                d = tl.where(taps[i] == t, dz, level)
            tl.store(dx + at, (v.to(tl.float32) * slope + d).to(dx.dtype.element_ty))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, pool: bool, cb: int, warps: int, parts: int, most: int | None
):
    lanes, batch, h, w, c = x.shape
    y = x.new_empty((lanes, batch, h // 2, w // 2, c) if pool else x.shape)
    stats = torch.empty((lanes, batch, 2, GROUPS), dtype=torch.float32, device=x.device)
    taps = 4 if pool else 1
    blocks = {"SIZE": c // GROUPS, "CB": cb, "PIXELS": h * w // taps // parts, "PARTS": parts, "TAPS": taps}
    _forward[(lanes * batch * (c // cb),)](
        x,
        weight,
        bias,
        y,
        stats,
        EPS,
        0,
        batch,
        c,
        h,
        w,
        **blocks,
        PTX=not INTERPRETED,
        **_options(warps, most),
    )
    return y, stats


def backward(
    x, dy, weight, bias, stats, pool: bool, cb: int, warps: int, parts: int, most: int | None, again: bool
):
    lanes, batch, h, w, c = x.shape
    dx = torch.empty_like(x)
    sums = torch.empty((lanes, batch, 2, c), dtype=torch.float32, device=x.device)
    taps = 4 if pool else 1
    blocks = {"SIZE": c // GROUPS, "CB": cb, "PIXELS": h * w // taps // parts, "PARTS": parts, "TAPS": taps}
    _backward[(lanes * batch * (c // cb),)](
        *(x, dy, weight, bias, stats, dx, sums, 0, batch, c, h, w),
        **blocks,
        PTX=not INTERPRETED,
        AGAIN=again,
        **_options(warps, most),
    )
    return dx, sums


def _options(warps: int, most: int | None) -> dict[str, int]:
    return {} if INTERPRETED else {"num_warps": warps, **({"maxnreg": most} if most else {})}


def drawn(lanes: int, batch: int, h: int, c: int, device: str, dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.randn(lanes, batch, h, h, c, device=device).to(dtype)
    weight, bias = (torch.randn(lanes, c, device=device).to(dtype) for _ in range(2))
    return x, weight, bias


def reference(x, weight, bias, dy, pool: bool):
    """(y, dx, gradients of weight and bias) of the op without lanes, in float64, rounded as the kernels round"""
    from fedpara.engines.batched.kernels.norm_ops import _backward as back
    from fedpara.engines.batched.kernels.norm_ops import _forward as forth

    images = x.cpu().double().movedim(-1, 2)
    y, stats = forth(images, weight.cpu().double(), bias.cpu().double(), GROUPS, EPS, pool)
    dx, parts = back(
        images,
        dy.cpu().double().movedim(-1, 2),
        weight.cpu().double(),
        bias.cpu().double(),
        stats,
        GROUPS,
        pool,
    )
    return y.movedim(2, -1), stats, dx.movedim(2, -1), parts


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.cpu().double() - b).norm() / b.norm())


def errors(shape, pool: bool, cb: int, warps: int, parts: int, most: int | None) -> list[float]:
    """Relative errors of y, stats, dx and the sums, both ways of the backward pass."""
    device = "cpu" if INTERPRETED else "cuda"
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    x, weight, bias = drawn(*shape, device, dtype)
    y, stats = forward(x, weight, bias, pool, cb, warps, parts, most)
    dy = torch.randn(y.shape).to(dtype).to(device)
    want = reference(x, weight, bias, dy, pool)
    found = [distance(y, want[0]), distance(stats, want[1])]
    for again in (False, True):
        dx, sums = backward(x, dy, weight, bias, stats, pool, cb, warps, parts, most, again)
        found += [distance(dx, want[2]), distance(sums, want[3])]
    return found


LANES, BATCH = 16, 64
IMAGES = {"64x32": (64, 32), "128x16": (128, 16), "256x8": (256, 8), "512x4": (512, 4), "512x2": (512, 2)}


def variants(c: int, h: int, pool: bool, direction: str) -> Iterator[tuple]:
    """(channels, warps, parts, registers) with 16 to 64 values per thread, 8 per part and tap"""
    taps = 4 if pool else 1
    for cb, warps in product((16, 32, 64, 128, 256, 512), (1, 2, 4, 8, 16)):
        per = cb * h * h // (32 * warps)
        if (
            not c // GROUPS <= cb <= c
            or per not in ((32, 64) if taps == 1 else (64, 32))
            or cb * h * h > 1 << 15
        ):
            continue
        for most in (None, 128, 80) if per == 64 else (None, 64):
            yield cb, warps, max(1, per // (8 * taps)), most


def calls(name: str, pool: bool, direction: str, variant: tuple) -> Callable[[], object]:
    c, h = IMAGES[name]
    x, weight, bias = drawn(LANES, BATCH, h, c, "cuda", torch.bfloat16)
    from fedpara.engines.batched.kernels import norm_triton

    y, stats = norm_triton.forward(x, weight, bias, GROUPS, EPS, pool)
    dy = torch.randn_like(y)
    if not variant:
        if direction == "forward":
            return lambda: norm_triton.forward(x, weight, bias, GROUPS, EPS, pool)
        return lambda: norm_triton.backward(x, dy, weight, bias, stats, GROUPS, pool)
    if direction == "forward":
        return lambda: forward(x, weight, bias, pool, *variant)
    return lambda: backward(x, dy, weight, bias, stats, pool, *variant, direction == "backward again")


def compiled(case: tuple) -> str | None:
    try:
        calls(*case)()
        torch.cuda.synchronize()
    except Exception as error:
        return str(error).splitlines()[0][:90]
    return None


def microseconds(step: Callable[[], object]) -> float:
    """The least of three averages over 4 calls. A write clears the cache before each call."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    step()
    for _ in range(3):
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if args.check:
        for (c, h), pool in product(((64, 4), (128, 4), (256, 2), (512, 2)), (False, True)):
            for cb, parts in ((max(16, c // GROUPS), 1), (c, 1)):
                print(
                    c,
                    h,
                    pool,
                    cb,
                    parts,
                    *(f"{e:.1e}" for e in errors((2, 2, h, c), pool, cb, 4, parts, None)),
                )
        print(*(f"{e:.1e}" for e in errors((1, 2, 8, 64), True, 16, 4, 4, None)))
        print(*(f"{e:.1e}" for e in errors((1, 2, 8, 64), False, 16, 4, 4, None)))
        return
    cases = [
        (name, pool, direction, variant)
        for (name, (c, h)), pool in product(IMAGES.items(), (False, True))
        for direction in ("forward", "backward", "backward again")
        for variant in ((), *variants(c, h, pool, direction))
        if variant or direction != "backward again"
    ]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool_of:
        failed = dict(zip(cases, pool_of.map(compiled, cases, chunksize=4), strict=True))
    best: dict[tuple, list] = {}
    for case in cases:
        if failed[case] is None:
            best.setdefault(case[:2] + (case[2][:8],), []).append(
                (microseconds(calls(*case)), case[2], case[3])
            )
        else:
            print(*case, failed[case], flush=True)
    print(
        "shape pool direction: microseconds of the engine's | the best variants; what the memory allows at 4.3 TB/s"
    )
    for (name, pool, direction), rows in best.items():
        c, h = IMAGES[name]
        numbers = LANES * BATCH * c * h * h
        moved = 2 * (numbers + numbers // (4 if pool else 1) + (numbers if direction == "backward" else 0))
        now = [t for t, _, variant in rows if not variant]
        others = sorted((row for row in rows if row[2]), key=lambda row: row[0])[:6]
        print(f"{name} {pool} {direction}: {now[0]:.0f} | {moved / 4.3e6:.0f}", flush=True)
        for t, way, variant in others:
            print(f"    {t:.0f} {way} {variant}", flush=True)
    for (name, pool, direction), rows in best.items():
        c, h = IMAGES[name]
        variant = min((row for row in rows if row[2]), key=lambda row: row[0])[2]
        if direction == "forward":
            found = errors((2, 8, h, c), pool, *variant)
            print("errors", name, pool, variant, *(f"{e:.1e}" for e in found), flush=True)


if __name__ == "__main__":
    main()
