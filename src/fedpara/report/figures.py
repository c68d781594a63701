"""Figures with matplotlib: PNG, SVG or PDF, by the ending of the file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpara.experiments import Summary
from fedpara.experiments.paper.measures import GIGABYTE
from fedpara.experiments.paper.sizes import parameters, random_ranks
from fedpara.report.own import Section
from fedpara.report.series import CurvePoint, Series, aligned, all_series, curve, points
from fedpara.report.tables import Table

BLUE, AMBER, GREY = "#2f6fb3", "#c9822b", "#6b6f76"
PALETTE = (BLUE, AMBER, "#3c8d5a", "#8a5bb0", "#c0504d", "#2a9aa6", "#9a7d2e", "#d0679d", "#5d6bc0")


def study_figure(table: Table, runs: Sequence[Summary], path: Path) -> Path | None:
    """The figure of a study, or None if it has none or there are no runs yet."""
    kind, series = table.study.figure, all_series(runs)
    if kind == "histogram":
        return _histogram(path)
    if kind == "bars" and table.run:
        return _bars(table, path)
    if kind == "gamma" and series:
        return _by_parameters(series, path, table.caveat)
    return curves(series, path, table.caveat) if kind != "none" and series else None


def accuracy_against_bytes(runs: Mapping[str, Summary], path: Path) -> Path:
    """One curve per run: the score over megabytes sent both ways, as in Figure 3."""
    plt = new_pyplot()
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name, run in runs.items():
        found = points(run)
        label = f"{name} (validation)" if run.experiment.validation else name
        axes.plot([sent / 1e6 for sent in found.sent], found.score, marker="o", markersize=3, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("sent both ways [MB]")
    titles = dict.fromkeys(run.metric.title for run in runs.values())
    return _saved(plt, figure, [axes], path, score=", ".join(titles))


def section_figure(section: Section, path: Path) -> Path | None:
    """The score over rounds and over bytes: one curve per setting, with its 95% interval over seeds as a band.

    None if no run was scored.
    """
    found = [(one, points_) for one in section.series if (points_ := curve(one.runs))]
    if not found:
        return None
    plt, unit = new_pyplot(), section.unit
    below = 0.22 * -(-len(found) // 2)
    figure, (rounds, sent) = plt.subplots(1, 2, figsize=(8.4, 3.8 + below), layout="constrained", sharey=True)
    for number, (one, line) in enumerate(found):
        seeds = f"{len(one.runs)} seed{'s' * (len(one.runs) != 1)}"
        color = PALETTE[number % len(PALETTE)]
        style = {"color": color, "marker": "o" if len(line) < 30 else None, "markersize": 3}
        dashed = "-" if number < len(PALETTE) else "--"
        for axes, x in (
            (rounds, [point.round for point in line]),
            (sent, [point.sent / unit.bytes for point in line]),
        ):
            scores = [point.score for point in line]
            axes.plot(x, [s.value for s in scores], linestyle=dashed, label=f"{one.label} ({seeds})", **style)
            if scores[0].half is not None:
                low, high = [s.low for s in scores], [s.high for s in scores]
                axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    rounds.set_xlabel("round")
    rounds.xaxis.get_major_locator().set_params(integer=True)
    sent.set_xlabel(f"sent both ways by all clients [{unit.name}]")
    several = any(len(one.runs) > 1 for one, _ in found)
    figure.suptitle(
        section.panel + "\nmean and 95% confidence interval over seeds" * several, fontsize=9, color="#333333"
    )
    handles, labels = rounds.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    _limit(rounds, section, found)
    for axes in (rounds, sent):
        styled(axes)
    rounds.set_ylabel(section.metric.title)
    return written(plt, figure, path)


def _limit(axes: Any, section: Section, found: Sequence[tuple[Series, Sequence[CurvePoint]]]) -> None:
    """Limit the score axis to the means and half their range: a wide interval of few seeds would hide the curves."""
    means = [point.score.value for _, line in found for point in line]
    room = 0.5 * (max(means) - min(means)) or 0.05 * abs(means[0]) or 1.0
    low, high = axes.get_ylim()
    low, high = max(low, min(means) - room), min(high, max(means) + room)
    axes.set_ylim((max(low, 0.0), min(high, 100.0)) if section.metric.unit else (low, high))


def curves(series: Sequence[Series], path: Path, caveat: str = "") -> Path:
    """One panel per data set and split: accuracy [%] over gigabytes. The original is dashed, as in Figure 3."""
    plt = new_pyplot()
    panels = list(dict.fromkeys(one.panel for one in series))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.2 * columns + (1.8 if columns == 1 else 0), 3.2 * rows + (0.8 if rows == 1 else 0))
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        for number, one in enumerate(s for s in series if s.panel == panel):
            for index, run in enumerate(one.runs):
                found = points(run)
                axes.plot(
                    [sent / GIGABYTE for sent in found.sent],
                    found.score,
                    color=GREY if one.original else PALETTE[number % len(PALETTE)],
                    linestyle="--" if one.original else "-",
                    linewidth=1.2 if index == 0 else 0.6,
                    label=one.label if index == 0 else None,
                )
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel("sent both ways [GB]")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    return _saved(plt, figure, list(grid.flat)[: len(panels)], path, caveat)


def _by_parameters(series: Sequence[Series], path: Path, caveat: str) -> Path:
    """Figure 4: the last accuracy over the share of the parameters. The original is a dotted line."""
    plt = new_pyplot()
    panels = list(dict.fromkeys(one.panel for one in series))
    figure, grid = plt.subplots(
        1, len(panels), figsize=(4.2 * len(panels) + 1, 3.6), layout="constrained", squeeze=False
    )
    for axes, panel in zip(grid.flat, panels, strict=True):
        here = [one for one in series if one.panel == panel]
        whole = max(parameters(one.runs[0].experiment) for one in here)
        dots = []
        for one in here:
            last = [found.score[-1] for found in aligned(one.runs)]
            if not last:
                continue
            accuracy = sum(last) / len(last)
            if one.original:
                axes.axhline(accuracy, color=GREY, linestyle=":", label=one.label)
            else:
                dots.append((100 * parameters(one.runs[0].experiment) / whole, accuracy))
        axes.plot(
            *zip(*sorted(dots), strict=True), color=BLUE, marker="o", markersize=4, label="FedPara"
        ) if dots else None
        axes.set_title(panel, fontsize=10)
        axes.set_xlabel("parameters [% of the largest]")
    return _saved(plt, figure, list(grid.flat), path, caveat)


def _bars(table: Table, path: Path) -> Path:
    """Figure 5: one group per column, one bar per row, whiskers for ±."""
    plt = new_pyplot()
    columns = [
        c
        for c in table.study.columns
        if any((e := table.at(r, c)) and e.style == "%" for r in table.study.rows)
    ]
    figure, axes = plt.subplots(figsize=(1.6 * len(columns) + 1.5, 3.6), layout="constrained")
    rows = table.study.rows
    width = 0.8 / len(rows)
    lowest = 100.0
    for number, row in enumerate(rows):
        shown = [(i, e) for i, c in enumerate(columns) if (e := table.at(row, c)) and e.value is not None]
        heights = [e.value for _, e in shown if e.value is not None]
        lowest = min([lowest, *heights])
        axes.bar(
            [i + (number - (len(rows) - 1) / 2) * width for i, _ in shown],
            heights,
            width * 0.92,
            yerr=[e.spread or 0.0 for _, e in shown],
            color=(GREY, AMBER, "#3c8d5a", BLUE)[number % 4],
            error_kw={"linewidth": 0.9},
            label=row,
        )
    axes.set_ylim(max(0.0, lowest - 10), 100)
    axes.set_xticks(range(len(columns)), [column.replace(", ", "\n") for column in columns])
    return _saved(plt, figure, [axes], path, table.caveat)


def _histogram(path: Path) -> Path:
    plt = new_pyplot()
    counts = random_ranks()
    figure, axes = plt.subplots(figsize=(4.4, 3.2), layout="constrained")
    axes.bar(list(counts), list(counts.values()), width=0.8, color=BLUE)
    axes.set_xlim(90, 101)
    axes.set_xlabel("rank of W")
    axes.set_ylabel("count (1,000 random products)")
    return written(plt, figure, path)


def new_pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fedpara"  # equal figures give equal files
    from matplotlib import pyplot

    return pyplot


def _saved(
    plt: Any,
    figure: Any,
    axes: Sequence[Any],
    path: Path,
    caveat: str = "",
    score: str = "accuracy [%]",
) -> Path:
    if caveat:
        figure.suptitle(caveat.replace(": ", ":\n"), fontsize=8, color=AMBER)
    for one in axes:
        one.set_ylabel(score)
        styled(one)
        if one.get_legend_handles_labels()[0]:
            one.legend(frameon=False, fontsize=8)
    return written(plt, figure, path)


def styled(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def written(plt: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # No creation time, so that equal figures give equal files.
    dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    figure.savefig(path, dpi=150, metadata=dated.get(path.suffix, {}))
    plt.close(figure)
    return path
