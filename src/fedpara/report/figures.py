"""Figures from run folders."""

from collections.abc import Mapping
from pathlib import Path

from fedpara.experiments import Summary


def accuracy_against_bytes(runs: Mapping[str, Summary], path: Path) -> Path:
    """One curve a run: accuracy [%] over megabytes sent, both ways, as Figure 3."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name, run in runs.items():
        measured = [line for line in run.metrics if line["accuracy"] is not None]
        sent = [(line["total_up"] + line["total_down"]) / 1e6 for line in measured]
        axes.plot(sent, [100 * line["accuracy"] for line in measured], marker="o", markersize=3, label=name)
    axes.set_xscale("log")
    axes.set_xlabel("sent so far, both ways [MB]")
    axes.set_ylabel("accuracy [%]")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
