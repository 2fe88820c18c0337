"""Kernel times as a picture: for each row size, time per launch and share of a memcpy against batch."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from .goals import time_of
from .names import CUDA_CPP, EMPTY, EMPTY_WAITING, INT32, MEMCPY, OURS, PROTOTYPE, YARDSTICKS
from .results import CellResult, Results

__all__ = ["draw"]

COLUMNS = 5
PANEL_INCHES = (3.9, 5.6)
MAX_SHARE = 1.6

# The package stands out, yardsticks recede; the rest take what is left.
STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#d62728", "linewidth": 2.4, "marker": "o", "markersize": 4.5, "zorder": 10},
    MEMCPY: {"color": "0.35", "linestyle": "--"},
    EMPTY: {"color": "0.6", "linestyle": ":"},
    EMPTY_WAITING: {"color": "0.6", "linestyle": "-."},
    CUDA_CPP: {"color": "#1f77b4", "marker": "s", "markersize": 3.5},
    PROTOTYPE: {"color": "#ff7f0e", "marker": "^", "markersize": 3.5},
    "Triton": {"color": "#9467bd", "marker": "v", "markersize": 3.5},
    "torch index_put": {"color": "#2ca02c", "marker": "D", "markersize": 3},
    "torch.compile": {"color": "#17becf", "marker": "x", "markersize": 4},
    "CuPy": {"color": "#8c564b", "marker": "+", "markersize": 5},
}
OTHER = {"color": "black", "marker": ".", "markersize": 4}


def draw(results: Results, file: Path) -> None:
    """Write the picture to `file`, in the format that its suffix names.

    Raises
    ------
    ValueError
        No cell has a time, or matplotlib knows no such format.
    """
    panels = [
        (widths, list(cells))
        for widths, cells in groupby(results.cells, lambda result: (result.cell.k_bytes, result.cell.v_bytes))
    ]
    names = list(dict.fromkeys(name for its in results.cells for name in its.outcomes if time_of(its, name)))
    names = [name for name in names if name != INT32]  # it would hide the line of the package
    if not names:
        raise ValueError("there is nothing to draw: no cell has a time")
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    title = _title(results, columns)
    legend_columns = min(len(names), 2 * columns)
    # Title and legend keep their height whatever the number of panels.
    top, bottom = 0.17 * (2 + len(title.splitlines())), 0.2 + 0.22 * math.ceil(len(names) / legend_columns)
    width, height = columns * PANEL_INCHES[0] + 0.6, rows * PANEL_INCHES[1] + top + bottom
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        rows, columns, left=0.75 / width, right=1 - 0.2 / width, top=1 - (top + 0.2) / height,
        bottom=(bottom + 0.6) / height, wspace=0.22, hspace=0.24,
    )  # fmt: skip
    lines: dict[str, Any] = {}
    for place, (widths, cells) in enumerate(panels):
        inner = grid[place // columns, place % columns].subgridspec(2, 1, height_ratios=(3, 2), hspace=0.08)
        times, shares = figure.add_subplot(inner[0]), figure.add_subplot(inner[1])
        for name in names:
            lines[name] = _draw_times(times, cells, name) or lines.get(name)
            if name not in YARDSTICKS:
                _draw_shares(shares, cells, name)
        times.set_title(_rows_of(*widths), fontsize=10)
        _set_axes(cells, times, shares)
        if place % columns == 0:
            times.set_ylabel("time per launch, µs")
            shares.set_ylabel("share of memcpy speed")
    figure.suptitle(title, fontsize=10, x=0.75 / width, y=1 - 0.12 / height, ha="left", va="top")
    figure.legend(
        lines.values(), lines.keys(), loc="lower center", ncols=legend_columns, frameon=False,
        bbox_to_anchor=(0.5, 0.02 / height),
    )  # fmt: skip
    figure.savefig(file, dpi=110)


def _title(results: Results, columns: int) -> str:
    about = results.environment
    driver = f", driver {about['driver']}" if "driver" in about else ""
    sets = f"; input sets: {about['input sets']}" if "input sets" in about else ""
    versions = textwrap.fill(f"{about.get('versions', '')}, Python {about.get('python', '?')}", 48 * columns)
    what = textwrap.fill(f"KV store on {about.get('gpu', 'an unnamed GPU')}{driver}{sets}", 48 * columns)
    return f"{what}\n{versions}"


def _rows_of(k_bytes: int, v_bytes: int) -> str:
    return f"rows of {k_bytes:,} B" if k_bytes == v_bytes else f"rows of {k_bytes:,} B (K) and {v_bytes:,} B (V)"


def _set_axes(cells: Sequence[CellResult], times: Any, shares: Any) -> None:
    times.set_yscale("log")
    times.yaxis.set_major_locator(FixedLocator([n * 10**e for e in range(-1, 5) for n in (1, 2, 5)]))
    times.yaxis.set_minor_locator(NullLocator())
    times.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
    shares.axhline(1, color=STYLES[MEMCPY]["color"], linestyle="--", linewidth=1)
    shares.set_ylim(0, MAX_SHARE)
    shares.set_xlabel("batch, rows per launch")
    batches = sorted({result.cell.batch for result in cells})
    for its in (times, shares):
        its.set_xscale("log", base=2)
        its.xaxis.set_major_locator(FixedLocator(batches))
        its.xaxis.set_minor_locator(NullLocator())
        its.xaxis.set_major_formatter(FuncFormatter(lambda batch, _: f"{batch:,.0f}"))
        its.grid(color="0.9", linewidth=0.6)
        its.tick_params(labelsize=8)
    times.tick_params(labelbottom=False)
    if any(after <= 2 * before for before, after in itertools.pairwise(batches)):  # an octave is narrow
        shares.tick_params(axis="x", rotation=35)


def _draw_times(axes: Any, cells: Sequence[CellResult], name: str) -> Any:
    points = [(its.cell.batch, time) for its in cells if (time := time_of(its, name))]
    if not points:
        return None
    (line,) = axes.plot(*_split([(batch, time.median) for batch, time in points]), label=name, **_style(name))
    batches = [batch for batch, _ in points]
    low, high = [time.p20 for _, time in points], [time.p80 for _, time in points]
    axes.fill_between(batches, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    return line


def _draw_shares(axes: Any, cells: Sequence[CellResult], name: str) -> None:
    both = ((its.cell.batch, time_of(its, MEMCPY), time_of(its, name)) for its in cells)
    points = [(batch, copy.median / time.median) for batch, copy, time in both if copy and time]
    if points:
        axes.plot(*_split(points), **_style(name))


def _split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _style(name: str) -> dict[str, Any]:
    return {"linewidth": 1.2} | STYLES.get(name, OTHER)
