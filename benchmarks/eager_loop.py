"""Client updates per second: a plain eager loop, the sequential engine and the batched engine.

    python benchmarks/eager_loop.py --out rows.jsonl        on a GPU, every row: about five minutes on an H200
    python benchmarks/eager_loop.py --only 'resnet.*uneven' the rows whose names match
    python benchmarks/eager_loop.py --device cpu --turns 3  float32 on the CPU, smaller clients, what `auto` chooses
    python benchmarks/eager_loop.py --tiny                  on the CPU, tiny models: only that it runs

A row is case/way/precision. All ways train the same model with the same optimizer and batch size on clients of the same
sizes; 16 clients per round, one epoch each. The ways:
    eager        PyTorch as one writes it: torch.optim, one client after another, data and averaging on the GPU
    sequential   `fp.simulate(engine="sequential")`
    batched      `fp.simulate(engine="batched")`, at its default precision
    auto         `fp.simulate()`: the engine that the library chooses (on the CPU)
The engines' rounds include the server: messages, checks, aggregation. `ratio` compares with the eager loop at the same
precision in the same turn, `cpu_ratio` by CPU time, which varies less on a shared machine. Attention is written as
matrix products, in every way.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedpara as fp
from fedpara import algorithms, data, models

CLIENTS = 16
ROUNDS = 100_000  # more than fit in the seconds of a row
WARM_UP = 2  # rounds


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        if self.causal:
            later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        mixed: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        made: Tensor = x + self.mlp(self.norm2(x))
        return made


class ViT(nn.Module):
    """ViT-tiny for 32 x 32 images in patches of 4 x 4, with mean pooling."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


class LanguageModel(nn.Module):
    """A decoder with tied embeddings; 10 million parameters by default."""

    def __init__(self, vocabulary: int = 8192, width: int = 320, depth: int = 6, heads: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, 128, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[:, : tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embed.weight)


def depthwise(width: int = 32, stages: tuple[int, ...] = (1, 2, 2, 4, 4, 8, 8)) -> nn.Sequential:
    """A MobileNet-like network: depthwise 3 x 3 and pointwise 1 x 1 convolutions with BatchNorm."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    inputs = width
    for factor in stages:
        outputs, stride = factor * width, 1 if factor * width == inputs else 2
        layers += [
            nn.Conv2d(inputs, inputs, 3, stride, padding=1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    examples: int  # per client
    batch: int
    tokens: int = 0  # the vocabulary; 0 for images
    uneven: bool = False
    optimizer: str = "sgd"
    lr: float = 0.01
    length: int = 64

    @property
    def sizes(self) -> list[int]:
        """Examples of each client; uneven ones give short batches of 2 or more examples."""
        if not self.uneven:
            return [self.examples] * CLIENTS
        spread = self.examples // 2
        return [self.examples - spread + (2 * spread * i) // (CLIENTS - 1) + 2 for i in range(CLIENTS)]

    @property
    def steps(self) -> int:
        """Of all clients in a round."""
        return sum(-(-n // self.batch) for n in self.sizes)

    def federation(self) -> fp.FederatedData:
        generator = torch.Generator().manual_seed(0)
        count, owners = sum(self.sizes), torch.arange(CLIENTS).repeat_interleave(torch.tensor(self.sizes))
        if self.tokens:
            inputs = torch.randint(0, self.tokens, (count, self.length), generator=generator)
            targets, classes = inputs, None
        else:
            inputs = torch.randn(count, 3, 32, 32, generator=generator)
            targets, classes = torch.randint(0, 10, (count,), generator=generator), 10
        parts = [torch.nonzero(owners == client)[:, 0].numpy() for client in range(CLIENTS)]
        return fp.FederatedData(data.Examples(inputs, targets, classes), parts)

    def task(self) -> fp.Task:
        torch.manual_seed(0)
        return fp.Task(self.model(), loss="next-token" if self.tokens else "cross-entropy", metrics=[])


CASES = {
    "vgg16": Case(lambda: models.vgg16(10), 512, 64),
    "resnet18-even": Case(lambda: models.resnet18(10), 512, 64),
    "resnet18-uneven": Case(lambda: models.resnet18(10), 512, 64, uneven=True),
    "vit-tiny": Case(ViT, 512, 64),
    "depthwise": Case(depthwise, 512, 64),
    "transformer-lm": Case(LanguageModel, 128, 16, tokens=8192, optimizer="adamw", lr=3e-4),
}
TINY = {
    "resnet18-uneven": Case(lambda: models.resnet18(10, shrink=16), 6, 4, uneven=True),
    "vit-tiny": Case(lambda: ViT(16, 1, 2), 4, 4),
    "depthwise": Case(lambda: depthwise(4, (1, 2)), 4, 4),
    "transformer-lm": Case(lambda: LanguageModel(32, 16, 1, 2), 4, 2, 32, optimizer="adamw", length=8),
}


ON_CPU = {
    "mlp": Case(lambda: models.build("mlp", classes=10, shape=(3, 32, 32)), 128, 32),
    "cnn": Case(lambda: models.build("cnn", classes=10, shape=(3, 32, 32)), 128, 32),
    "vgg16": Case(lambda: models.vgg16(10), 32, 32),
    "resnet18": Case(lambda: models.resnet18(10), 32, 32),
}


def names(cases: dict[str, Case]) -> list[str]:
    """case/way/precision; the eager loop first, because the others are compared with it."""
    if cases is ON_CPU:
        return [f"{case}/{way}/float32" for case in cases for way in ("eager", "auto")]
    ways = [
        "eager/float32",
        "eager/bfloat16",
        "sequential/float32",
        "sequential/bfloat16",
        "batched/bfloat16",
    ]
    return [f"{case}/{way}" for case in cases for way in ways]


def eager(case: Case, precision: str, device: str, rounds_done: Callable[[], bool]) -> str:
    """FedAvg as a plain loop, until `rounds_done()`."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    torch.backends.cudnn.benchmark = False  # torch's default, and the sequential engine's choice
    narrow = precision == "bfloat16" and device == "cuda"
    held, model = case.federation(), case.task().model.to(device).train()
    inputs, targets = held.train.inputs.to(device), held.train.targets.to(device)
    owned = [torch.as_tensor(held.indices(client), device=device) for client in range(CLIENTS)]
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[case.optimizer]
    server = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    while True:
        mean = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in server.items()}
        for rows in owned:
            model.load_state_dict(server)
            optimizer = make(model.parameters(), lr=case.lr)
            for batch in rows[torch.randperm(len(rows), device=device)].split(case.batch):
                optimizer.zero_grad()
                with torch.autocast(device, torch.bfloat16, enabled=narrow):
                    output = model(inputs[batch])
                if case.tokens:
                    output, wanted = output[:, :-1].flatten(0, 1), targets[batch][:, 1:].flatten()
                else:
                    wanted = targets[batch]
                F.cross_entropy(output.float(), wanted).backward()
                optimizer.step()
            for name, tensor in model.state_dict().items():
                mean[name] += tensor * (len(rows) / sum(case.sizes))
        server = {name: tensor.to(server[name].dtype) for name, tensor in mean.items()}
        if rounds_done():
            return "torch.optim, one client after another"


def engine(way: str, case: Case, precision: str, device: str, rounds_done: Callable[[], bool]) -> str:
    """The same rounds with an engine of the library. Returns what it says about itself."""
    algorithm = algorithms.fedavg(lr=case.lr, batch_size=case.batch, epochs=1, optimizer=case.optimizer)
    run = fp.simulate(
        case.task(),
        case.federation(),
        algorithm,
        rounds=ROUNDS,
        cohort=CLIENTS,
        engine=way,
        device=device,
        precision=precision if device == "cuda" else None,
        evaluate_every=ROUNDS,
        on_round=lambda _: not rounds_done(),
    )
    return run.engine


def measured(name: str, cases: dict[str, Case], device: str, seconds: float) -> dict[str, Any]:
    label, way, precision = name.split("/")
    case, times, cpu = cases[label], [time.perf_counter()], [time.process_time()]

    def rounds_done() -> bool:
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        cpu.append(time.process_time())
        return len(times) > WARM_UP + 1 and times[-1] - times[WARM_UP] >= seconds

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    how = eager(case, precision, device, rounds_done) if way == "eager" else ""
    how = how or engine(way, case, precision, device, rounds_done)
    rounds, took = len(times) - 1 - WARM_UP, times[-1] - times[WARM_UP]
    return {
        "row": name,
        "updates_per_s": round(CLIENTS * rounds / took, 2),
        "ms_per_step": round(1e3 * took / rounds / case.steps, 3),
        "cpu_ms_per_step": round(1e3 * (cpu[-1] - cpu[WARM_UP]) / rounds / case.steps, 3),
        "rounds": rounds,
        "seconds": round(took, 2),
        "warm_up_s": round(times[WARM_UP] - times[0], 2),
        "GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else 0.0,
        "parameters": sum(p.numel() for p in case.model().parameters()),
        "how": how,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="a regular expression for the names of rows")
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    parser.add_argument("--seconds", type=float, default=8.0, help="per row, after the warm-up")
    parser.add_argument("--turns", type=int, default=1, help="how often the ways of a case take turns")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    cases, device = (CASES, "cuda") if given.device == "cuda" else (ON_CPU, "cpu")
    if given.tiny:
        cases, device = TINY, "cpu"
    seconds = 0.0 if given.tiny else given.seconds
    loops: dict[str, dict[str, Any]] = {}  # the last row of each case and precision
    for name in [
        name
        for case in cases
        for _ in range(given.turns)
        for name in names(cases)
        if name.startswith(f"{case}/")
    ]:
        if not re.search(given.only, name):
            continue
        try:
            row = measured(name, cases, device, seconds)
            label, way, precision = name.split("/")
            if way == "eager":
                loops[f"{label}/{precision}"] = row
            if base := loops.get(f"{label}/{precision}"):
                row["ratio"] = round(row["updates_per_s"] / base["updates_per_s"], 2)
                row["cpu_ratio"] = round(base["cpu_ms_per_step"] / row["cpu_ms_per_step"], 2)
        except Exception as error:
            row = {"row": name, "error": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
        row["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        print(json.dumps(row), flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
