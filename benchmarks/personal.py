"""Personal models on MNIST's two-class clients: pFedPara, FedPer, FedAvg and Local at each learning rate.

    python benchmarks/personal.py                                  the grid: 30 rounds, four rates, four methods
    python benchmarks/personal.py --methods pfedpara --rates 0.1   one cell of it
    python benchmarks/personal.py --smoke                          2 rounds on a tenth of the data: only that it runs

Each cell is the preset personal-mnist with another learning rate, in a run folder of its own under --out. Called
again, finished cells are read and a broken one goes on. `before` and `after` are the mean accuracy of the ten
clients' own models on their own test data before and after the last round's local training. Exit code 1 if
pFedPara or FedPer end below 95% before or 97.5% after.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedpara.errors import RunError
from fedpara.experiments import Experiment, Summary, read_run, resume, run
from fedpara.experiments.presets import preset

PRESET = "personal-mnist"
RATES = (0.01, 0.03, 0.05, 0.1)
FLOORS = {"pfedpara": (0.95, 0.975), "fedper": (0.95, 0.975)}


def cell(experiment: Experiment, path: Path, data_dir: Path | None) -> Summary | None:
    """The finished run; None if it diverged."""
    try:
        if not (path / "config.toml").exists():
            return run(experiment, path, data_dir=data_dir)
        return resume(path, data_dir=data_dir) if read_run(path).experiment == experiment else _mixed(path)
    except RunError as error:
        if "diverged" in str(error):
            return None
        raise


def _mixed(path: Path) -> Summary:
    sys.exit(f"{path} holds another experiment than the one asked for: choose another --out.")


def row(name: str, lr: float, summary: Summary | None) -> str:
    if summary is None:
        return f"{name:10}{lr:>6}{'diverged':>9}"
    last = summary.metrics[-1]
    sent = summary.bytes_up + summary.bytes_down
    return (
        f"{name:10}{lr:>6}{last['before']:>9.2%}{last['after']:>9.2%}{sent / 1e6:>12.2f}"
        f"{summary.seconds:>9.0f}{'' if meets(name, summary) else '   below the floor'}"
    )


def meets(name: str, summary: Summary | None) -> bool:
    if name not in FLOORS:
        return True
    if summary is None:
        return False
    last, (before, after) = summary.metrics[-1], FLOORS[name]
    return bool(last["before"] >= before and last["after"] >= after)


def table(rates: Sequence[float], runs: dict[str, Experiment], out: Path, data_dir: Path | None) -> bool:
    """One line a cell, as it is done; whether the floors are met everywhere."""
    one = next(iter(runs.values()))
    print(
        f"{one.dataset}, {one.keep} of {one.clients} clients, {one.rounds} rounds, E {one.epochs}, B {one.batch_size}, "
        f"clip {one.clip}, seed {one.seed}; accuracy of the last round, bytes of all of them, up and down"
    )
    print(f"{'':10}{'lr':>6}{'before':>9}{'after':>9}{'sent [MB]':>12}{'seconds':>9}", flush=True)
    good = True
    for lr in rates:
        for name, experiment in runs.items():
            summary = cell(replace(experiment, lr=lr), out / f"{name}-{lr}", data_dir)
            good &= meets(name, summary)
            print(row(name, lr, summary), flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = preset(PRESET).runs
    parser.add_argument("--methods", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clip", type=float, default=None, help="in place of the preset's; 0 is none")
    parser.add_argument("--out", type=Path, default=Path("runs") / PRESET)
    parser.add_argument(
        "--data-dir", type=Path, help="where data sets lie; else FEDPARA_DATA, else the cache"
    )
    parser.add_argument("--smoke", action="store_true", help="2 rounds, a tenth of the data; not for figures")
    given = parser.parse_args()
    runs = {name: replace(known[name], seed=given.seed) for name in given.methods}
    if given.clip is not None:
        runs = {name: replace(e, clip=given.clip or None) for name, e in runs.items()}
    if given.smoke:
        runs = {name: replace(e, rounds=2, epochs=1, data_fraction=0.1) for name, e in runs.items()}
    good = table(given.rates, runs, given.out, given.data_dir)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )
    return 0 if good or given.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
