"""Milliseconds a client-step on one GPU: VGG16 on 3 x 32 x 32 images, batch 64, by way, precision and lanes.

    python benchmarks/gpu.py --out DIR                   every row of every table; about 5 minutes with 12 jobs
    python benchmarks/gpu.py --only 'fedpara.*compiled'  the rows whose names match
    python benchmarks/gpu.py --smoke                     on the CPU, tiny and uncompiled: only that it runs

A client-step is one SGD step of one client. The ways:
    eager      PyTorch as one writes it, client after client
    captured   the step of one client as a CUDA graph, client after client
    batched    all lanes as one program (`vmap`), captured
    compiled   the same, through torch.compile: what the engine runs

Compiling takes a minute or two a row and one core, so the rows are made ready in several processes at once; when all
of them are, they are timed one after another, alone on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import fedpara as fp
from fedpara import algorithms, data, models
from fedpara.algorithms import sgd
from fedpara.engines.batched.engine import Batched
from fedpara.engines.local.worker import Worker
from fedpara.engines.memory import InMemory
from fedpara.engines.participation.cohorts import Cohorts
from fedpara.engines.program import make_program
from fedpara.engines.session import Session
from fedpara.tasks import Task

GAMMA = 0.1
BATCH = 64
MODELS = ("original", "fedpara")
LARGER = ("fedpara0.2", "fedpara0.4")
"""FedPara with a larger gamma."""
CORRECTED = "fedpara-jacobian"
"""FedPara with the Jacobian correction, lambda 1."""
READY = "ready"
PRECISIONS = ("float32", "tf32", "bfloat16")


def names() -> list[str]:
    """model/way/precision/lanes, the most telling first."""
    rows = [f"{m}/compiled/{p}/16" for m in MODELS for p in PRECISIONS[::-1]]
    rows += [f"{m}/compiled/bfloat16/{k}" for m in MODELS for k in (32, 4, 1)]
    rows += [f"{m}/compiled/{p}/{k}" for m in MODELS for p in PRECISIONS[:2] for k in (32, 4, 1)]
    rows += [f"{m}/batched/{p}/{k}" for m in MODELS for p in PRECISIONS for k in (1, 4, 16, 32)]
    rows += [f"{m}/{way}/{p}/1" for m in MODELS for way in ("eager", "captured") for p in PRECISIONS]
    rows += [f"{m}/compiled/bfloat16/16" for m in LARGER]
    rows += [f"{CORRECTED}/compiled/{p}/16" for p in PRECISIONS[::-1]]
    rows += [
        f"{CORRECTED}/{way}/bfloat16/{k}" for way, k in (("compiled", 32), ("batched", 16), ("eager", 1))
    ]
    return rows


def federation(clients: int, device: str) -> fp.FederatedData:
    size = BATCH if device == "cpu" else 500  # CIFAR-10 among 100: seven full batches and one of 52, masked
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (clients * size, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (clients * size,), generator=generator)
    train = data.Examples(images, labels, 10, mean=(0.5,) * 3, std=(0.25,) * 3)
    return fp.FederatedData(train, data.iid(labels, clients, 0))


def network(kind: str) -> torch.nn.Module:
    """VGG16 in this form, or ResNet18, which `breakdown.py` can show too."""
    torch.manual_seed(0)
    if kind == "resnet18":
        return models.resnet18(10)
    model = models.vgg16(10)
    if kind != "original":
        gamma = float(kind.removeprefix("fedpara")) if kind in LARGER else GAMMA
        fp.factorize(model, fp.FedPara(gamma=gamma), where=models.convolutions)
    return model


def ready(name: str, device: str) -> Callable[[], None]:
    """One step of all its lanes, made ready."""
    kind, way, precision, lanes = name.split("/")
    held = federation(int(lanes), device)
    task = Task(network(kind), augment="crop-flip")
    method = algorithms.fedavg(lr=1e-3, batch_size=BATCH, jacobian=float(kind == CORRECTED))
    session = Session(make_program(task.model), method, fp.Link(), 0)
    if way == "eager":
        return _eager(session, held, precision, device)
    engine = Batched(
        session,
        task,
        held,
        InMemory(),
        cohorts=Cohorts(0, int(lanes), int(lanes)),
        device=device,
        precision=precision if device == "cuda" else None,  # type: ignore[arg-type]
        compile=way == "compiled" and device == "cuda",
    )
    return engine.one_tick()


def _eager(session: Session, held: fp.FederatedData, precision: str, device: str) -> Callable[[], None]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    torch.backends.cudnn.benchmark = True
    task, local = Task(session.program.model), session.algorithm.local
    worker = Worker(session.program, task, torch.device(device), precision)  # type: ignore[arg-type]
    images = data.normalise(held.train.inputs[:BATCH], held.train.mean, held.train.std).to(device)
    labels = held.train.targets[:BATCH].to(device)

    def step() -> None:
        gradient, _ = worker.gradient(images, labels, local, 1e-3)
        worker._step(sgd(), gradient, {}, 1e-3)

    return step


def measure(step: Callable[[], None], device: str) -> float:
    """Milliseconds a call: the median of blocks of calls, as many as take about half a second in all."""
    if device == "cpu":
        began = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - began)
    for _ in range(3):
        step()

    def block(calls: int) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        for _ in range(calls):
            step()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / calls

    calls = max(1, int(70 / max(block(2), 1e-3)))
    return median(block(calls) for _ in range(7))


def one_row(name: str, device: str) -> dict[str, Any]:
    """Made ready; timed when the parent says so."""
    began = time.perf_counter()
    step = ready(name, device)
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    prepared = time.perf_counter() - began
    print(READY, flush=True)
    sys.stdin.readline()
    each = measure(step, device) / int(name.rpartition("/")[2])
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"row": name, "ms": each, "ready_s": prepared, "GiB": memory}


def flops() -> float:
    """Of one client-step with the plain weights: forward and backward, composing not counted."""
    model = models.vgg16(10)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(1, 3, 32, 32)).sum().backward()
    return float(counter.get_total_flops()) * BATCH


def matrix_rate() -> float:
    """FLOP/s of a large bfloat16 matrix product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / (measure(lambda: torch.mm(a, b), "cuda") / 1e3)  # type: ignore[arg-type]


def in_processes(chosen: list[str], device: str, jobs: int) -> list[dict[str, Any]]:
    """Each row in a process of its own; one that fails beside others, for want of memory, is tried again alone."""
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for start in range(0, len(chosen), jobs):
        batch = {name: _child(name, device) for name in chosen[start : start + jobs]}
        ready = {name: _said(process, READY) for name, process in batch.items()}
        for name, process in batch.items():
            row = _timed(process) if ready[name] is None else None
            process.kill()
            process.wait()
            if row is None:
                print(f"{name}: failed\n{(ready[name] or '')[-1500:]}", flush=True)
                failed.append(name)
                continue
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows + (in_processes(failed, device, 1) if jobs > 1 else [])


def _timed(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """What a process that is ready measured, now that it may; None if it failed."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)  # type: ignore[no-any-return]
    return None


def _child(name: str, device: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--row", name, "--device", device]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environment
    )


def _said(process: subprocess.Popen[str], word: str) -> str | None:
    """None once the process has said the word; else all it said before it ended."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return None
        lines.append(line)
    return "".join(lines)


def table(rows: list[dict[str, Any]], device: str) -> str:
    work, rate = flops(), matrix_rate() if device == "cuda" else float("nan")
    lines = [
        f"{hardware(device)}; a client-step is {work / 1e9:.1f} GFLOP; bf16 matrix rate {rate / 1e12:.0f} TFLOP/s",
        "",
        "| weights | way | precision | lanes | ms a client-step | TFLOP/s | of the bf16 rate | GiB | ready after [s] |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    order = {name: place for place, name in enumerate(names())}
    for row in sorted(rows, key=lambda row: order.get(row["row"], len(order))):
        done = work / (row["ms"] / 1e3)
        cells = [*row["row"].split("/"), f"{row['ms']:.3f}", f"{done / 1e12:.1f}", f"{done / rate:.1%}"]
        lines.append(f"| {' | '.join(cells)} | {row['GiB']:.1f} | {row['ready_s']:.0f} |")
    return "\n".join(lines) + "\n"


def hardware(device: str) -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    card = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return f"{card}; Python {platform.python_version()}, torch {torch.__version__}, commit {commit.strip() or '-'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--only", default="", help="rows whose names match this pattern")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--row", help="one row, in this process")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(one_row(args.row, args.device)), flush=True)
        return
    device, jobs, chosen = args.device, args.jobs, [n for n in names() if re.search(args.only, n)]
    if args.smoke:
        device, jobs = "cpu", 1
        chosen = [f"{m}/{way}/float32/1" for m in (*MODELS, CORRECTED) for way in ("eager", "batched")]
    args.out.mkdir(parents=True, exist_ok=True)
    rows = in_processes(chosen, device, jobs)
    text = table(rows, device)
    (args.out / "gpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
