"""What secure aggregation costs on Flower: bytes and seconds a round, beside the plain round in the same federation.

    python benchmarks/secure.py --nodes 3 --out results/benchmarks/secure-3-nodes.jsonl
    python benchmarks/secure.py --simulation --out results/benchmarks/secure-simulation.jsonl

Nodes are real SuperNodes on loopback with TLS and node keys, one client each (digits, MLP, FedPara). They start once
and serve both runs, the plain one first. Each line of the output is one round. The last line compares the two models
after the first round: they must agree within quantization. Later, training amplifies the differences.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedpara.apps.flower.federation import Federation
from fedpara.apps.flower.processes import Processes
from fedpara.apps.flower.simulation import follow
from fedpara.experiments import Experiment, Summary, run
from fedpara.experiments.run import lay_out
from fedpara.experiments.storage.checkpoint import PREVIOUS
from fedpara.experiments.storage.tensor_files import read_tensors
from fedpara.secure import read_secure

BASE = Experiment(model="mlp", lr=0.05, engine="flower")
SECURE = "secagg(clip=4.0)"
STAGGER = 4.0
"""Seconds between the starts of two nodes: each imports torch."""
SIMULATED = [(10, "secagg"), (30, "secagg"), (30, "secagg(neighbours=10)")]

Line = dict[str, Any]


def deployed(nodes: int, scratch: Path) -> Iterator[Line]:
    """One line per round of both runs, and one that compares their models after the first round."""
    experiment = replace(BASE, clients=nodes, cohort=nodes, rounds=2)
    folders = {"plain": scratch / "plain", "secure": scratch / "secure"}
    with Processes() as processes:
        given: dict[str, str | int | float] = {"deadline": 900, "wait": 900, "hello": 600}
        federation = Federation(scratch / "federation", nodes, processes, given, {"OMP_NUM_THREADS": "1"})
        federation.start_link()
        federation.register()
        for i in range(nodes):
            federation.start_node(i)
            time.sleep(STAGGER)
        for name, folder in folders.items():
            lay_out(replace(experiment, secure=SECURE if name == "secure" else None), folder)
            submitted = federation.submit(f'out="{folder}"')
            summary = follow(folder, submitted, federation.folder / "run.log", None, None)
            for line in lines_of(summary):
                yield {"engine": "flower", "tls": True, "nodes": nodes, "run": name, **line}
            submitted.wait(120)
    first, second = (read_tensors(folder / PREVIOUS)[0] for folder in folders.values())
    farthest = max(float((first[name] - second[name]).abs().max()) for name in first)
    numbers, step = sum(tensor.numel() for tensor in first.values()), read_secure(SECURE).step
    yield {
        "nodes": nodes,
        "numbers": numbers,
        "step": step,
        "largest difference after round 1": farthest,
        "in steps": round(farthest / step, 2),
    }


def simulated(scratch: Path) -> Iterator[Line]:
    """The same for simulations on the sequential engine, with the bytes of one client."""
    for number, (cohort, secure) in enumerate(SIMULATED):
        for name, value in (("plain", None), ("secure", secure)):
            experiment = replace(
                BASE,
                clients=cohort,
                cohort=cohort,
                rounds=5,
                epochs=None,
                steps=2,
                engine="sequential",
                secure=value,
            )
            summary = run(experiment, scratch / f"{number}-{name}")
            for line in lines_of(summary):
                yield {"engine": "sequential", "cohort": cohort, "run": value or "plain", **line}


def lines_of(summary: Summary) -> Iterator[Line]:
    for line, timing in zip(summary.metrics, summary.timing, strict=True):
        assert not line["refused"], line["refused"]
        yield {
            "round": line["round"],
            "up": line["up"],
            "down": line["down"],
            "seconds": round(timing["seconds"], 2),
            "accuracy": line["accuracy"],
            "load": round(os.getloadavg()[0], 1),
        }


def table(lines: list[Line]) -> str:
    """The median of each kind of run, without its first round."""
    rows = [
        "| run | clients | bytes up per client | bytes down per client | seconds, later rounds |",
        "|---|---|---|---|---|",
    ]
    kinds = dict.fromkeys(
        (line["run"], line.get("nodes") or line["cohort"]) for line in lines if "run" in line
    )
    for name, count in kinds:
        some = [
            line
            for line in lines
            if line.get("run") == name and count in (line.get("nodes"), line.get("cohort"))
        ]
        seconds = median(line["seconds"] for line in some[1:] or some)
        up, down = (some[-1][way] / count for way in ("up", "down"))
        rows.append(f"| {name} | {count} | {up:,.0f} | {down:,.0f} | {seconds:.1f} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--simulation", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory(prefix="sec-") as name, given.out.open("x") as out:
        scratch = Path(name)
        made = simulated(scratch) if given.simulation else deployed(given.nodes, scratch)
        for line in made:
            lines.append(line)
            out.write(json.dumps(line) + "\n")
            out.flush()
    print(table(lines))
    if given.simulation:
        return 0
    print(
        f"\nAfter the first round the models differ by at most {lines[-1]['in steps']} steps of fixed point."
    )
    return 0 if lines[-1]["in steps"] <= 1.5 else 1


if __name__ == "__main__":
    sys.exit(main())
