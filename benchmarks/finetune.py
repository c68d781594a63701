"""Federated fine-tuning of MiniLM-L6 on SST-2: accuracy against bytes of adapters and of full fine-tuning.

    python benchmarks/finetune.py --stage tune --out FILE     every method at every rate, scored on validation data
    python benchmarks/finetune.py --stage final --out FILE    each method at its best rate, three seeds, SST-2's dev set
    python benchmarks/finetune.py --table --out FILE          the table
    python benchmarks/finetune.py --smoke --out FILE          both stages on the CPU, tiny: checks only that they run

100 clients by Dirichlet(0.5) of the labels; 10 of them take 20 AdamW steps of 32 sentences in each round. Methods:

    fedpara   W0 + (X1 Y1^T) * (X2 Y2^T), rank 4, in every linear layer of the encoder, and the classifier
    lora      W0 + X Y^T, rank 8: as many numbers as fedpara
    full      all parameters

`tune` holds out a tenth of each client's training data, the same for all methods, and tries five rates each. FILE gets
one JSON line per run. Runs that FILE has are not repeated, so the command can be given again after `--seconds`.
Several processes may write to the same FILE, one `--method` each. `benchmarks/minilm.py` makes the folder of `--data`.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import minilm
import numpy as np
import torch
from torch import nn

import fedpara as fp
from fedpara import algorithms, data

METHODS: dict[str, Any] = {"fedpara": fp.FedPara(rank=4), "lora": fp.LowRank(rank=8), "full": None}
RATES = {
    "fedpara": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "lora": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "full": (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
}
TUNE_SEED, FINAL_SEEDS = 0, (1, 2, 3)
T_95 = 4.303  # of three values


@dataclass(frozen=True)
class Scale:
    rounds: int
    clients: int = 100
    cohort: int = 10
    steps: int = 20
    batch_size: int = 32
    examples: int | None = None
    rates: int = 5
    engine: str = "batched"


def read(folder: Path, part: str, most: int | None) -> data.Examples:
    with np.load(folder / "sst2.npz") as saved:
        ids = torch.from_numpy(saved[f"{part}_ids"][:most].astype(np.int32))
        labels = torch.from_numpy(saved[f"{part}_labels"][:most].astype(np.int64))
    return data.Examples({"ids": ids, "mask": ids != 0}, labels, classes=2)


def network(method: str, folder: Path, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = minilm.Classifier()
    minilm.load(model.encoder, folder / "minilm.npz")
    if METHODS[method] is not None:
        fp.factorize(model, METHODS[method], onto="frozen", train=("classifier",))
    return model


def run(
    stage: str, method: str, lr: float, seed: int, scale: Scale, folder: Path, ends: float
) -> dict[str, Any]:
    began = time.perf_counter()
    train, test = read(folder, "train", scale.examples), read(folder, "dev", scale.examples)
    clients = data.dirichlet(train.targets, scale.clients, alpha=0.5, seed=seed)
    if stage == "tune":
        # The clients keep their rows of the same set, so the compiled step of both stages is the same.
        clients, held = data.split(clients, train.targets, 0.1, seed=0, exact=True)
        test = train.subset(held.indices)
    model = network(method, folder, seed)
    local = algorithms.Local(
        lr=lr,
        optimizer="adamw",
        weight_decay=0.01,
        steps=scale.steps,
        batch_size=scale.batch_size,
        schedule=fp.linear(),
    )
    first: list[float] = []

    def on_round(_: object) -> bool:
        first.append(time.perf_counter() - began)
        return time.monotonic() < ends

    done = fp.simulate(
        fp.Task(model, test=test),
        fp.FederatedData(train, clients),
        algorithms.fedavg(local=local),
        rounds=scale.rounds,
        cohort=scale.cohort,
        seed=seed,
        engine=scale.engine,
        evaluate_every=5,
        on_round=on_round,
    )
    sent = [(r.number, r.progress.bytes_up + r.progress.bytes_down, r.scores) for r in done.rounds]
    curve = [(number, total, scores["accuracy"], scores["loss"]) for number, total, scores in sent if scores]
    return {
        "stage": stage,
        "method": method,
        "lr": lr,
        "seed": seed,
        "rounds": scale.rounds,
        "clients": scale.clients,
        "done": len(done.rounds),
        "accuracy": curve[-1][2] if curve else None,
        "loss": curve[-1][3] if curve else None,
        "bytes": done.bytes,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "curve": curve,
        "seconds": round(time.perf_counter() - began, 1),
        "first_round_s": round(first[0], 1),
        "engine": done.engine,
        "torch": torch.__version__,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
    }


def finished(path: Path) -> list[dict[str, Any]]:
    """The complete runs of the file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["done"] == row["rounds"]]


def best_rate(path: Path, method: str) -> float:
    """The rate of the best validation accuracy; of equal ones, the one with the lower loss."""
    tried = [row for row in finished(path) if row["stage"] == "tune" and row["method"] == method]
    if not tried:
        raise SystemExit(f"{path} has no tuned rate of {method}: run --stage tune --method {method} first.")
    return float(max(tried, key=lambda row: (row["accuracy"], -row["loss"]))["lr"])


def wanted(stage: str, method: str, path: Path, scale: Scale) -> Iterator[tuple[float, int]]:
    """(rate, seed) of each run."""
    if stage == "tune":
        yield from ((lr, TUNE_SEED) for lr in RATES[method][-scale.rates :])
    else:
        yield from ((best_rate(path, method), seed) for seed in FINAL_SEEDS)


def run_stage(stage: str, methods: list[str], path: Path, scale: Scale, folder: Path, ends: float) -> None:
    for method in methods:
        for lr, seed in wanted(stage, method, path, scale):
            key = {"stage": stage, "method": method, "lr": lr, "seed": seed, "rounds": scale.rounds}
            if any(key.items() <= row.items() for row in finished(path)) or time.monotonic() >= ends:
                continue
            row = run(stage, method, lr, seed, scale, folder, ends)
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print({name: value for name, value in row.items() if name != "curve"}, flush=True)


def table(path: Path) -> str:
    rows = finished(path)
    lines = [
        "| method | trained numbers | rates tried | rate | accuracy, 95% interval | range | MB sent | MB a message |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in METHODS:
        final = [row for row in rows if row["stage"] == "final" and row["method"] == method]
        if not final:
            continue
        tried = sum(row["stage"] == "tune" and row["method"] == method for row in rows)
        scores = [100 * row["accuracy"] for row in final]
        half = T_95 * stdev(scores) / len(scores) ** 0.5 if len(scores) == len(FINAL_SEEDS) else float("nan")
        sent, number = mean(row["bytes"] for row in final) / 1e6, final[0]["trained"]
        lines.append(
            f"| {method} | {number:,} | {tried} | {final[0]['lr']:g} | {mean(scores):.2f} ± {half:.2f} | "
            f"{min(scores):.2f} to {max(scores):.2f} | {sent:,.0f} | {4 * number / 1e6:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=("tune", "final", "both"), default="both")
    parser.add_argument(
        "--method", action="append", choices=list(METHODS), help="may be repeated; default: all"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path("gpu_text"))
    parser.add_argument("--seconds", type=float, default=1e9, help="no run goes on after this many seconds")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.table:
        scale = Scale(args.rounds)
        if args.smoke:
            scale = Scale(
                2, clients=4, cohort=2, steps=2, batch_size=4, examples=64, rates=2, engine="sequential"
            )
        stages = ("tune", "final") if args.stage == "both" else (args.stage,)
        ends = time.monotonic() + args.seconds
        for stage in stages:
            run_stage(stage, args.method or list(METHODS), args.out, scale, args.data, ends)
    print(table(args.out))


if __name__ == "__main__":
    main()
