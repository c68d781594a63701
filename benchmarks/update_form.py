"""The update form against whole weights of factors, at about equal bytes, on scikit-learn's digits.

    python benchmarks/update_form.py    results/update-form/trials.jsonl, results/update-form/final.jsonl

Each method gets four trials of the learning rate: 10 rounds, seed 100, scored on a tenth of each client's training
data. The best one runs 20 rounds with seeds 1 to 3 and is scored on the test set. Each line of a file is a run: its
fields that differ, and the numbers of every round. Runs that a file holds are not repeated. 20 clients, Dirichlet 0.5,
cohort 10, deep-mlp (85,002 numbers), 1 epoch, batches of 16, momentum 0.9, gradients clipped to 2; one CPU thread.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from fedpara.experiments import Experiment, run

RESULTS = Path(__file__).parents[1] / "results" / "update-form"
BASE: dict[str, Any] = {
    "dataset": "digits", "model": "deep-mlp", "clients": 20, "cohort": 10, "epochs": 1, "batch_size": 16,
    "momentum": 0.9, "clip": 2.0, "engine": "sequential",
}  # fmt: skip
FOLD = {"fold_every": 5}
WHOLE, FOLDED = (0.05, 0.1, 0.2, 0.4), (0.2, 0.5, 1.0, 2.0)
"""The learning rates tried. An adapter starts with one factor at 0, so its first steps are shorter."""
METHODS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "original": ({"scheme": "original"}, WHOLE),
    "FedPara": ({"scheme": "fedpara", "rank": 3}, WHOLE),
    "low-rank, folded": ({"scheme": "lowrank", "ratio": 0.09, **FOLD}, FOLDED),
    "FedPara, folded": ({"scheme": "fedpara", "rank": 3, **FOLD}, FOLDED),
    "block-Kronecker, folded": ({"scheme": "kronecker", "ratio": 0.08, **FOLD}, FOLDED),
    "low-rank, aggregation-aware, folded": ({"scheme": "lowrank-aad", "ratio": 0.09, **FOLD}, FOLDED),
    "block-Kronecker, aggregation-aware, folded": (
        {"scheme": "kronecker-aad", "ratio": 0.08, **FOLD},
        FOLDED,
    ),
}
TRIAL = {"rounds": 10, "seed": 100, "validation": 0.1}
SEEDS = (1, 2, 3)


def measured(file: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The line of this run, from the file or from a new run that it then holds."""
    path = RESULTS / file
    there = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if found := next((line for line in there if line["fields"] == fields), None):
        return dict(found)
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        summary = run(Experiment(**{**BASE, **fields}), Path(folder) / "run")
        seconds = time.process_time() - started
    kept = ("round", "accuracy", "loss", "total_up", "total_down")
    rounds = [{name: line[name] for name in kept} for line in summary.metrics]
    line = {"fields": fields, "cpu_seconds": round(seconds, 1), "rounds": rounds}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as out:
        out.write(json.dumps(line) + "\n")
    return line


def last(line: dict[str, Any], count: int) -> float:
    """The mean accuracy of the last rounds, in percent."""
    return 100 * mean(float(r["accuracy"]) for r in line["rounds"][-count:])


def sent(round: dict[str, Any]) -> float:
    return float(round["total_up"] + round["total_down"]) / 1e6


def main() -> None:
    torch.set_num_threads(1)
    finals: dict[str, tuple[float, list[dict[str, Any]]]] = {}
    for name, (fields, rates) in METHODS.items():
        trials = {lr: measured("trials.jsonl", {**fields, **TRIAL, "lr": lr}) for lr in rates}
        best = max(rates, key=lambda lr: last(trials[lr], 3))
        runs = [measured("final.jsonl", {**fields, "rounds": 20, "seed": seed, "lr": best}) for seed in SEEDS]
        finals[name] = best, runs
    budget = max(
        sent(line["rounds"][-1]) for name, (_, runs) in finals.items() for line in runs if name != "original"
    )
    print(f"{'method':44} {'lr':>5} {'accuracy':>14} {'MB':>6}")
    for name, (best, runs) in finals.items():
        scores, megabytes = [last(line, 5) for line in runs], mean(sent(line["rounds"][-1]) for line in runs)
        print(f"{name:44} {best:5} {mean(scores):7.2f} ± {stdev(scores):4.2f} {megabytes:6.1f}")
    within = [[r for r in line["rounds"] if sent(r) <= budget] for line in finals["original"][1]]
    scores = [100 * float(rounds[-1]["accuracy"]) for rounds in within]
    print(
        f"original after {budget:.1f} MB ({len(within[0])} rounds): {mean(scores):.2f} ± {stdev(scores):.2f}"
    )


if __name__ == "__main__":
    main()
