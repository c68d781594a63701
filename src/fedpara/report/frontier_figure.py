"""The figure of the frontier: accuracy over the bytes of a whole run, with the Pareto front.

Every point and its name is a link to the run's folder, in formats that have links (SVG, PDF).
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import stdev
from typing import Any

from fedpara.experiments.studies.frontier.study import Point, front
from fedpara.report.figures import GREY, PALETTE, new_pyplot, styled, written
from fedpara.report.own import Unit

SIZE = (9.2, 7.0)
_PLACES = {
    **dict.fromkeys(("original", "fedavg"), 0),
    **dict.fromkeys(("fedpara0.1", "fedpara"), 1),
    **dict.fromkeys(("fedpara0.4", "mud+bkd"), 2),
    **dict.fromkeys(("dense20", "dense64", "mud"), 3),
    "lowrank": 4,
    **dict.fromkeys(("fedpara0", "fedpara0.2", "mud+bkd+aad"), 5),
    **dict.fromkeys(("fedpara0.3", "fedparamixed"), 7),
    "dense128": 6,
    "dense32": 8,
}
"""The colours of networks in the palette, so that a network has the same colour in every figure of the page."""
_AROUND = tuple(
    (radius * x, radius * y)
    for radius in (7, 14, 22, 32, 44, 58, 74, 92, 112)
    for x, y in ((1, 0), (1, 0.7), (1, -0.7), (0, 1), (0, -1), (-1, 0), (-1, 0.7), (-1, -0.7))
)
"""The possible positions of a name, in pixels from its point, the nearest first."""


def frontier_figure(points: Sequence[Point], path: Path, title: str, unit: Unit, target: float) -> Path:
    """Draws the points with their names. Bytes are on a logarithmic axis."""
    plt = new_pyplot()
    figure, axes = plt.subplots(figsize=SIZE, layout="constrained")
    best = front(points)
    axes.step(
        [one.sent / unit.bytes for one in best],
        [100 * one.accuracy for one in best],
        where="post",
        color=GREY,
        linewidth=1,
        label="Pareto front",
    )
    axes.axhline(100 * target, color=GREY, linestyle=":", linewidth=0.8, label=f"target, {target:.0%}")
    networks = list(dict.fromkeys(one.combination.split()[0] for one in points))
    colors = {name: PALETTE[_PLACES.get(name, i) % len(PALETTE)] for i, name in enumerate(networks)}
    for point in points:
        color = colors[point.combination.split()[0]]
        x, y = point.sent / unit.bytes, 100 * point.accuracy
        if len(point.runs) > 1:
            half = 100 * stdev(point.accuracies)
            axes.plot([x, x], [y - half, y + half], color=color, linewidth=0.8, alpha=0.6)
        dot = axes.scatter(x, y, 34 if point in best else 16, color=color, zorder=3)
        dot.set_urls([_link(point, path)])
    for network, color in colors.items():
        axes.scatter([], [], 16, color=color, label=network)
    axes.set_xscale("log")
    axes.set_xlabel(f"sent both ways by all clients [{unit.name}]")
    axes.set_ylabel("accuracy [%]")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, loc="lower right", framealpha=1, edgecolor="none")
    axes.margins(x=0.12, y=0.08)
    least, most = axes.get_xlim()
    between = (2.0, 5.0) if most / least < 100 else ()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if float(f"{x:e}"[0]) in between else "")
    styled(axes)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # otherwise the names would move the axes
    axes.autoscale(False)  # otherwise the lines to the names would change their limits
    _name(figure, axes, points, best, path, unit)
    return written(plt, figure, path)


def _link(point: Point, path: Path) -> str:
    """The folder of the first run, relative to the figure."""
    return Path(os.path.relpath(point.runs[0].path.resolve(), path.parent.resolve())).as_posix()


def _name(
    figure: Any, axes: Any, points: Sequence[Point], best: Sequence[Point], path: Path, unit: Unit
) -> None:
    """Write each point's name at the nearest free place; the front's points first, in bold."""
    renderer = figure.canvas.get_renderer()
    at = {
        point.combination: axes.transData.transform((point.sent / unit.bytes, 100 * point.accuracy))
        for point in points
    }
    taken = [_box(x - 4, y - 4, 8, 8) for x, y in at.values()]
    corners = [at[point.combination] for point in best]
    for (x, y), (right, top) in pairwise(corners):
        taken += [_box(x + 5, y, right - x - 5, 1), _box(right, y, 1, top - y - 5)]  # the line of the front
    if axes.get_legend():
        taken.append(axes.get_legend().get_window_extent(renderer).extents)
    inside = axes.get_window_extent(renderer).extents
    for point in sorted(points, key=lambda one: one not in best):
        x, y = at[point.combination]
        text = axes.text(0, 0, point.combination, fontsize=7, weight="bold" if point in best else "normal")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.4})
        text.set_url(_link(point, path))
        size = text.get_window_extent(renderer)
        width, height = size.width, size.height
        places = [_placed(x, y, dx, dy, width, height) for dx, dy in _AROUND]
        free = [box for box in places if _within(box, inside) and not any(_meet(box, one) for one in taken)]
        box = free[0] if free else places[0]
        taken.append(box)
        text.set_position(axes.transData.inverted().transform((box[0], box[1])))
        near = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
        if abs(near[0] - x) + abs(near[1] - y) > 12:
            ends = axes.transData.inverted().transform([(x, y), near])
            axes.plot(*zip(*ends, strict=True), color=GREY, linewidth=0.5, zorder=2.5)


def _placed(x: float, y: float, dx: float, dy: float, width: float, height: float) -> Any:
    """The box of a name whose nearest edge or corner is (dx, dy) from its point."""
    left = x + dx - (width if dx < 0 else width / 2 if dx == 0 else 0)
    low = y + dy - (height if dy < 0 else height / 2 if dy == 0 else 0)
    return _box(left, low, width, height)


def _box(left: float, low: float, width: float, height: float) -> tuple[float, float, float, float]:
    return left, low, left + width, low + height


def _meet(a: Any, b: Any) -> bool:
    return bool(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])


def _within(a: Any, b: Any) -> bool:
    return bool(a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3])
