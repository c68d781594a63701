"""What the mean of factors loses, and what a gamma per client saves, on scikit-learn's digits.

    python benchmarks/products.py errors    aggregation errors with and without refit    results/products/errors.jsonl
    python benchmarks/products.py gammas    three gammas against one                     results/products/gammas.jsonl

Each line of a file is a run: its fields that differ, and the numbers of every round. Runs that a file holds are not
repeated. 30 clients, Dirichlet splits, FedAvg, a cohort of 10, 30 rounds (15 for the errors); on one CPU thread.
"""

import json
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch

from fedpara.experiments import Experiment, run

RESULTS = Path(__file__).parents[1] / "results" / "products"
BASE: dict[str, Any] = {
    "dataset": "digits", "model": "mlp", "clients": 30, "cohort": 10, "rounds": 30, "engine": "sequential"
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "2 epochs, alpha 0.5": {"epochs": 2, "alpha": 0.5},
    "10 epochs, alpha 0.1": {"epochs": 10, "alpha": 0.1},
}
GAMMAS: dict[str, dict[str, Any]] = {
    "all 0.5": {"gamma": 0.5},
    "0.1, 0.3, 0.5": {"gammas": "0.1, 0.3, 0.5"},
    "all 0.1": {"gamma": 0.1},
}
SEEDS = (2, 3, 4)


def runs(study: str) -> list[dict[str, Any]]:
    if study == "errors":
        return [
            {
                **work,
                "rounds": 15,
                "scheme": scheme,
                "gamma": 0.3,
                "products": products,
                "seed": 0,
                "aggregation_error": True,
            }
            for work, scheme, products in product(
                SETTINGS.values(), ("fedpara", "lowrank"), ("mean", "refit")
            )
        ]
    return [
        {"epochs": 2, "alpha": 0.5, "scheme": scheme, **sizes, "seed": seed}
        for seed, scheme, sizes in product(SEEDS, ("fedpara", "lowrank"), GAMMAS.values())
    ]


def measured(fields: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        found = run(Experiment(**{**BASE, **fields}), Path(folder) / "run")
        seconds = time.perf_counter() - started
    kept = ("round", "accuracy", "loss", "total_up", "total_down", "aggregation_error")
    rounds = [{name: line[name] for name in kept if name in line} for line in found.metrics]
    return {"fields": fields, "seconds": round(seconds, 1), "rounds": rounds}


def last(line: dict[str, Any], count: int = 5) -> float:
    """The mean accuracy of the last rounds, in percent."""
    return 100 * mean(float(r["accuracy"]) for r in line["rounds"][-count:])


def show_errors(lines: list[dict[str, Any]]) -> None:
    print(
        f"{'work':22} {'scheme':8} {'products':8} {'/ ||W||':>9} {'/ change':>9} {'after refit':>11} "
        f"{'accuracy':>9} {'s':>6}"
    )
    for line in lines:
        fields, errors = line["fields"], [r["aggregation_error"] for r in line["rounds"]]
        work = next(name for name, values in SETTINGS.items() if values.items() <= fields.items())
        shares = [mean(e[name] for e in errors) for name in ("relative", "of_change")]
        left = mean(e.get("refitted", e["norm"]) / e["norm"] for e in errors)
        print(
            f"{work:22} {fields['scheme']:8} {fields['products']:8} {shares[0]:9.2%} {shares[1]:9.1%} {left:11.0%} "
            f"{last(line):9.1f} {line['seconds']:6.1f}"
        )


def show_gammas(lines: list[dict[str, Any]]) -> None:
    print(f"{'scheme':8} {'gammas':14} {'accuracy':>14} {'MB':>7}")
    for scheme, (name, sizes) in product(("fedpara", "lowrank"), GAMMAS.items()):
        some = [x for x in lines if sizes.items() <= x["fields"].items() and x["fields"]["scheme"] == scheme]
        scores = [last(line) for line in some]
        sent = mean(line["rounds"][-1]["total_up"] + line["rounds"][-1]["total_down"] for line in some)
        print(f"{scheme:8} {name:14} {mean(scores):7.2f} ± {pstdev(scores):4.2f} {sent / 1e6:7.2f}")


def main(study: str) -> None:
    torch.set_num_threads(1)
    path = RESULTS / f"{study}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    there = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for fields in runs(study):
        if all(line["fields"] != fields for line in there):
            there.append(measured(fields))
            with path.open("a") as file:
                file.write(json.dumps(there[-1]) + "\n")
    (show_errors if study == "errors" else show_gammas)(there)


if __name__ == "__main__":
    main(sys.argv[1])
