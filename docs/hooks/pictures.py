"""Run the examples and draw what the documentation shows of them.

python docs/hooks/pictures.py                    every picture and printed output, in docs/
python docs/hooks/pictures.py factorize /tmp/x   one tutorial's picture and output, in another folder

The pictures are transparent SVGs in colours that are readable on a light and on a dark page.
"""

import runpy
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from fedpara.experiments import Summary, read_run

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
BLUE, AMBER, GREEN, PURPLE, GREY = "#3d86d6", "#d18a2c", "#3fa066", "#9a6cc4", "#85888f"
COLOURS = (GREY, AMBER, BLUE, GREEN, PURPLE)
STYLE: Any = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), GREY
    ),
    "svg.hashsalt": "fedpara",  # the same figure gives the same file
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 2,
}


def factorize(found: dict[str, Any], axes: Any) -> None:
    for name, colour in (("original", GREY), ("FedPara", BLUE)):
        scores = [100 * score for score in found["curves"][name]]
        label = f"{name}, {found['sizes'][name]:,} parameters"
        axes.plot(range(1, len(scores) + 1), scores, color=colour, marker="o", label=label)
    axes.set_xticks(range(1, len(scores) + 1))
    axes.set(xlabel="epoch", ylabel="test accuracy [%]")
    axes.legend(loc="lower right")


def compare_schemes(found: dict[str, Any], axes: Any) -> None:
    for (name, run), colour in zip(found["runs"].items(), COLOURS, strict=False):
        sent = [(r.progress.bytes_up + r.progress.bytes_down) / 1e6 for r in run.rounds]
        axes.plot(sent, [100 * r.accuracy for r in run.rounds], color=colour, label=name)
    axes.set(xlabel="bytes sent in both directions [MB]", ylabel="test accuracy [%]")
    axes.legend(loc="lower right")


def personalize(found: dict[str, Any], axes: Any) -> None:
    runs = found["runs"]
    scores = [100 * run.rounds[-1].everyone.score for run in runs.values()]
    sent = [run.bytes / 1e6 for run in runs.values()]
    bars = axes.bar(list(runs), scores, width=0.6, color=[GREY, AMBER, GREEN, BLUE])
    axes.bar_label(bars, [f"{s:.1f}%\n{b:.2f} MB" for s, b in zip(scores, sent, strict=True)], padding=3)
    axes.set(ylabel="mean accuracy on own digits [%]", ylim=(0, 115), yticks=range(0, 101, 20))
    axes.grid(axis="x", visible=False)
    axes.set_axisbelow(True)


def own_algorithm(found: dict[str, Any], axes: Any) -> None:
    figure = axes.figure
    axes.remove()
    parts = {"strips": (GREY, BLUE, AMBER), "uneven": (GREY, GREEN)}
    titles = ("strips", "a large client that errs")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, title, (part, colours) in zip(panels, titles, parts.items(), strict=True):
        for (name, run), colour in zip(found[part].items(), colours, strict=True):
            scores = [100 * r.accuracy for r in run.rounds]
            panel.plot([r.number for r in run.rounds], scores, color=colour, label=name)
        panel.set(xlabel="round", title=title)
        panel.legend(loc="center")
    panels[0].set(ylabel="test accuracy [%]")


def regression(found: dict[str, Any], axes: Any) -> None:
    curves(found, axes, "r2", 1, "R2 on the test patients")


def segmentation(found: dict[str, Any], axes: Any) -> None:
    curves(found, axes, "dice", 100, "dice of the test images [%]")


def curves(found: dict[str, Any], axes: Any, metric: str, factor: float, label: str) -> None:
    for (name, run), colour in zip(found["runs"].items(), (GREY, BLUE), strict=True):
        sent = [(r.progress.bytes_up + r.progress.bytes_down) / 1e6 for r in run.rounds]
        axes.plot(sent, [factor * r.scores[metric] for r in run.rounds], color=colour, label=name)
    axes.set(xlabel="bytes sent in both directions [MB]", ylabel=label)
    axes.legend(loc="lower right")


def larger_than_memory(found: dict[str, Any], axes: Any) -> None:
    rounds = found["run"].rounds
    axes.plot([r.number for r in rounds], [r.scores["r2"] for r in rounds], color=BLUE)
    axes.set(xlabel="round", ylabel="R2 on the test windows")


def language_model(found: dict[str, Any], axes: Any) -> None:
    curves(found, axes, "perplexity", 1, "perplexity on the test documents")
    axes.legend(loc="upper right")


TUTORIALS: dict[str, tuple[str, Callable[[dict[str, Any], Any], None]]] = {
    "factorize": ("01_factorize.py", factorize),
    "compare_schemes": ("03_compare_schemes.py", compare_schemes),
    "personalize": ("04_personalize.py", personalize),
    "own_algorithm": ("own_algorithm.py", own_algorithm),
    "regression": ("regression.py", regression),
    "segmentation": ("segmentation.py", segmentation),
    "larger_than_memory": ("larger_than_memory.py", larger_than_memory),
    "language_model": ("language_model.py", language_model),
    "adapters": ("adapters.py", compare_schemes),
}


def tutorial(name: str, folder: Path) -> None:
    """Run one example. Write what it prints to NAME.txt and its picture to NAME.svg."""
    script, draw = TUTORIALS[name]
    printed = StringIO()
    with redirect_stdout(printed):
        found = runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    (folder / f"{name}.txt").write_text(printed.getvalue(), encoding="utf-8")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.8, 3.8), layout="constrained")
        draw(found, axes)
        save(figure, folder / f"{name}.svg")


def accuracy_against_bytes(path: Path) -> None:
    """The README's picture: CIFAR-10 IID, the tuned networks, every seed a curve."""
    archive = ROOT / "results" / "final" / "cifar10-iid"
    methods = {"original": "original VGG16", "fedpara": "FedPara, γ 0.1", "narrow": "narrow dense VGG16"}
    runs = {
        method: [read_run(folder) for folder in sorted(archive.glob(f"{method}-*"))] for method in methods
    }
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.8, 3.7), layout="constrained")
        reached = {}
        for (method, name), colour in zip(methods.items(), (GREY, BLUE, GREEN), strict=True):
            for number, run in enumerate(runs[method]):
                label = f"{name} ({len(runs[method])} seeds)" if number == 0 else None
                axes.plot(*curve(run), color=colour, label=label, linewidth=1, alpha=0.9)
            lines = [line for run in runs[method] if (line := run.reached(0.8))]
            reached[method] = sum(gigabytes(line) for line in lines) / len(lines)
        most, least = reached["original"], reached["fedpara"]
        axes.annotate("", (least, 80), (most, 80), arrowprops={"arrowstyle": "->", "color": AMBER, "lw": 2})
        axes.text(
            (least * most) ** 0.5,
            87.5,
            f"80%: {least:.1f} instead of {most:.1f} GB, {most / least:.1f} times fewer",
            color=AMBER,
            ha="center",
            va="bottom",
        )
        axes.set_xscale("log")
        axes.set(xlabel="bytes sent by all clients in both directions [GB, log scale]")
        axes.set(ylabel="test accuracy [%]", xlim=(0.9, 400), ylim=(15, 95))
        axes.xaxis.set_major_locator(FixedLocator([1, 3, 10, 30, 100, 300]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.legend(loc="lower right", fontsize=9.5, handlelength=1.2, borderaxespad=0)
        save(figure, path)


def curve(run: Summary) -> tuple[list[float], list[float]]:
    scored = [line for line in run.metrics if line["accuracy"] is not None]
    return [gigabytes(line) for line in scored], [100 * line["accuracy"] for line in scored]


def gigabytes(line: dict[str, Any]) -> float:
    """GB of 2^30 bytes, as in the paper's Figure 3."""
    return float(line["total_up"] + line["total_down"]) / 2**30


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)
    # matplotlib ends lines with spaces, which formatters of a repository complain about.
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")


def main(arguments: list[str]) -> None:
    if arguments:
        tutorial(arguments[0], Path(arguments[1]))
        return
    for name in TUTORIALS:
        tutorial(name, DOCS / "tutorials")
    accuracy_against_bytes(DOCS / "assets" / "accuracy-against-bytes.svg")


if __name__ == "__main__":
    main(sys.argv[1:])
