"""The tables of GPU time: contenders per cell, their ratios, and the strategies of --tune."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from .goals import geometric_mean, time_of
from .names import MEMCPY
from .results import OURS, CellResult, Outcome, TuneResult
from .shapes import MODELS, Cell, RowGroup, row_groups
from .text import print_table

__all__ = ["heading", "print_kernel_times", "print_ratios", "print_tuning"]

METHOD = """
Kernel time, us per launch: median of 31 samples of graph replays, 32 launches per graph [20th, 80th percentile].
GB/s counts K and V read and written and the indices read. of copy: the time of a device-to-device memcpy
of as many bytes, over ours. Batches marked *: all that the rotated input sets touch is less than 3x L2."""

TUNING = """
Strategies (layout.strategies), us per launch [20th, 80th percentile]; > marks what the package takes for that batch.
cost: the time of that choice over the best of the row's, which noise alone puts 1 to 2 % above 1."""


def print_kernel_times(cells: Sequence[CellResult]) -> None:
    """One table per row width."""
    print(METHOD)
    names = [name for name in _names(cells) if name != OURS]
    for widths, group in groupby(cells, lambda result: (result.cell.k_bytes, result.cell.v_bytes)):
        print(f"\n{heading(*widths)}")
        head = ("batch", "MB", OURS, "[p20, p80]", "GB/s", "of copy", *names)
        print_table([head, *(_kernel_row(result, names) for result in group)], left=0)


def heading(k_bytes: int, v_bytes: int) -> str:
    """The widths, and the models that have them."""
    users = {(group.k_bytes, group.v_bytes): group for group in row_groups(MODELS)}
    group = users.get((k_bytes, v_bytes), RowGroup(k_bytes, v_bytes, ()))
    return f"K rows of {k_bytes} B, V rows of {v_bytes} B" + (f" ({group.label})" if group.users else "")


def _kernel_row(result: CellResult, names: Iterable[str]) -> tuple[str, ...]:
    cell, ours, copy = result.cell, result.outcomes[OURS], time_of(result, MEMCPY)
    figures = ("", "", "")
    if ours.time is not None:
        share = f"{copy.median / ours.time.median:.2f}" if copy else "-"
        spread = f"[{ours.time.p20:.2f}, {ours.time.p80:.2f}]"
        figures = (spread, f"{cell.moved_bytes / ours.time.median / 1e3:.0f}", share)
    return (
        _batch(cell, result.cold),
        f"{cell.moved_bytes / 1e6:.3g}",
        _time(ours),
        *figures,
        *(_time(result.outcomes.get(name, Outcome(absent="-"))) for name in names),
    )


def _batch(cell: Cell, cold: bool) -> str:
    return f"{cell.phase} {cell.batch}{' ' if cold else '*'}"


def _time(outcome: Outcome) -> str:
    if outcome.time is not None:
        return f"{outcome.time.median:.2f}"
    return "WRONG" if outcome.wrong else "-"


def _names(cells: Sequence[CellResult | TuneResult]) -> list[str]:
    return list(dict.fromkeys(name for result in cells for name in result.outcomes))


def print_ratios(cells: Sequence[CellResult]) -> None:
    """Every contender against the package, over all cells."""
    rows = [row for name in _names(cells) if name != OURS and (row := _ratio_row(name, cells))]
    if rows:
        print(f"\nTime of each over that of {OURS} (above 1: {OURS} is faster)")
        print_table([("", "cells", "geometric mean", "least", "most"), *rows])


def _ratio_row(name: str, cells: Sequence[CellResult]) -> tuple[str, ...] | None:
    pairs = ((time_of(result, OURS), time_of(result, name)) for result in cells)
    ratios = [theirs.median / ours.median for ours, theirs in pairs if ours and theirs]
    if not ratios:
        return None
    return name, str(len(ratios)), f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"


def print_tuning(cells: Sequence[TuneResult]) -> None:
    """Every strategy in every cell, and what the package's choices cost."""
    print(TUNING)
    names = _names(cells)
    for widths, group in groupby(cells, lambda result: (result.cell.k_bytes, result.cell.v_bytes)):
        print(f"\n{heading(*widths)}")
        print_table([("batch", "K+V MB", *names, "cost"), *(_tuning_row(its, names) for its in group)], left=0)
    costs = [result.cost for result in cells if result.exact]
    if costs:
        worst = max((result for result in cells if result.exact), key=lambda result: result.cost)
        where = f"{worst.cell.k_bytes} + {worst.cell.v_bytes} B x {worst.cell.batch}"
        print(f"\nCost of the choices: geometric mean {geometric_mean(costs):.4f}, most {worst.cost:.3f} ({where})")
        for name in names:
            alone = [_cost_of(name, result) for result in cells if result.exact]
            print(f"  had every cell taken {name}: {geometric_mean(alone):.4f}, most {max(alone):.3f}")


def _tuning_row(result: TuneResult, names: Sequence[str]) -> tuple[str, ...]:
    # layout.strategies counts what is read of K and V.
    read = f"{result.cell.source_bytes / 1e6:.3g}"
    times = (("> " if name == result.chosen else "") + _time_and_spread(result.outcomes[name]) for name in names)
    return _batch(result.cell, result.cold), read, *times, f"{result.cost:.3f}"


def _time_and_spread(outcome: Outcome) -> str:
    if outcome.time is None:
        return _time(outcome)
    return f"{outcome.time.median:.3f} [{outcome.time.p20:.3f}, {outcome.time.p80:.3f}]"


def _cost_of(name: str, result: TuneResult) -> float:
    times = {each: outcome.time.median for each, outcome in result.outcomes.items() if outcome.time}
    return times[name] / min(times.values())
