"""All that the benchmark prints."""

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

from .results import OURS, CellResult, Outcome, Results
from .shapes import MODELS, RowGroup, row_groups

__all__ = ["print_report", "progress"]


def progress(text: str) -> None:
    """Say on stderr what is being done: one line, rewritten, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def print_report(results: Results) -> None:
    """Print everything that a run found."""
    if sys.stderr.isatty():
        progress("")
    for name, value in results.environment.items():
        print(f"{name}: {value}")
    if any(outcome.time for result in results.cells for outcome in result.outcomes.values()):
        _print_kernel_times(results.cells)
        _print_ratios(results.cells)
    else:
        _print_checks(results.cells)
    _print_machine_code(results)
    _print_host_times(results)
    _print_pairs("Absent:", results.absent | _absent_from_cells(results.cells))
    _print_verdict(results)


# ----------------------------------------------------------------------------------------------------------------------
# Kernel time


def _print_kernel_times(cells: Sequence[CellResult]) -> None:
    print(
        "\nKernel time, us per launch: median of 31 graph replays of 32 or more launches [20th, 80th percentile]."
        "\nGB/s counts K and V read and written and the indices read. of copy: the time of a device-to-device memcpy"
        "\nof as many bytes, over ours. Inputs rotate beyond 3x L2, but for batches marked *: their rows lie in L2."
    )
    names = [name for name in _names(cells) if name != OURS]
    for widths, group in groupby(cells, lambda result: (result.cell.k_bytes, result.cell.v_bytes)):
        print(f"\n{_heading(*widths)}")
        head = ("batch", "MB", OURS, "[p20, p80]", "GB/s", "of copy", *names)
        _print_table([head, *(_kernel_row(result, names) for result in group)], left=0)


def _heading(k_bytes: int, v_bytes: int) -> str:
    users = {(group.k_bytes, group.v_bytes): group for group in row_groups(MODELS)}
    group = users.get((k_bytes, v_bytes), RowGroup(k_bytes, v_bytes, ()))
    return f"K rows of {k_bytes} B, V rows of {v_bytes} B" + (f" ({group.label})" if group.users else "")


def _kernel_row(result: CellResult, names: Iterable[str]) -> tuple[str, ...]:
    cell, ours = result.cell, result.outcomes[OURS]
    copy = result.outcomes.get("memcpy", Outcome()).time
    figures = ("", "", "")
    if ours.time is not None:
        share = f"{copy.median / ours.time.median:.2f}" if copy else "-"
        spread = f"[{ours.time.p20:.2f}, {ours.time.p80:.2f}]"
        figures = (spread, f"{cell.moved_bytes / ours.time.median / 1e3:.0f}", share)
    return (
        f"{cell.phase} {cell.batch}{' ' if result.cold else '*'}",
        f"{cell.moved_bytes / 1e6:.3g}",
        _time(ours),
        *figures,
        *(_time(result.outcomes.get(name, Outcome(absent="-"))) for name in names),
    )


def _time(outcome: Outcome) -> str:
    if outcome.time is not None:
        return f"{outcome.time.median:.2f}"
    return "WRONG" if outcome.wrong else "-"


def _names(cells: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(name for result in cells for name in result.outcomes))


def _print_ratios(cells: Sequence[CellResult]) -> None:
    rows = [row for name in _names(cells) if name != OURS and (row := _ratio_row(name, cells))]
    if rows:
        print(f"\nTime of each over that of {OURS} (above 1: {OURS} is faster)")
        _print_table([("", "cells", "geometric mean", "least", "most"), *rows])


def _ratio_row(name: str, cells: Sequence[CellResult]) -> tuple[str, ...] | None:
    pairs = ((result.outcomes[OURS].time, result.outcomes.get(name, Outcome()).time) for result in cells)
    ratios = [theirs.median / ours.median for ours, theirs in pairs if ours and theirs]
    if not ratios:
        return None
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return name, str(len(ratios)), f"{mean:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"


# ----------------------------------------------------------------------------------------------------------------------
# The rest


def _print_checks(cells: Sequence[CellResult]) -> None:
    print("\nStores on Numba's simulator, compared with NumPy byte for byte")
    for widths, group in groupby(cells, lambda result: (result.cell.k_bytes, result.cell.v_bytes)):
        checks = ", ".join(f"{its.cell.phase} of {its.cell.batch} {_check(its)}" for its in group)
        print(f"  {_heading(*widths)}: {checks}")


def _check(result: CellResult) -> str:
    return "WRONG" if result.outcomes[OURS].wrong else "exact"


def _print_machine_code(results: Results) -> None:
    _print_pairs("What the compiler makes of these rows (no GPU needed):", results.machine_code)


def _print_host_times(results: Results) -> None:
    if results.host:
        print("\nHost time, us per call: median of 31 samples of 100 calls; kernels of about a microsecond")
        rows = [
            (name, f"{spread.median:.2f}", f"[{spread.p20:.2f}, {spread.p80:.2f}]")
            for name, spread in results.host.items()
        ]
        _print_table([("", "us", "[p20, p80]"), *rows])


def _absent_from_cells(cells: Sequence[CellResult]) -> dict[str, str]:
    """Reasons of contenders that ran in some cells and not in others, each reason once, with the first such cell."""
    reasons: dict[str, str] = {}
    for result in cells:
        for name, outcome in result.outcomes.items():
            if outcome.absent:
                where = f"{result.cell.k_bytes} + {result.cell.v_bytes} B x {result.cell.batch}"
                reasons.setdefault(f"{name} (first at {where})", outcome.absent)
    return {name: reason for name, reason in reasons.items() if name in _first_of_each(reasons)}


def _first_of_each(reasons: dict[str, str]) -> list[str]:
    seen: dict[tuple[str, str], str] = {}
    for name, reason in reasons.items():
        seen.setdefault((name.split(" (first")[0], reason), name)
    return list(seen.values())


def _print_verdict(results: Results) -> None:
    wrong = [
        f"{name}, {result.cell.k_bytes} + {result.cell.v_bytes} B x {result.cell.batch}: {outcome.wrong}"
        for result in results.cells
        for name, outcome in result.outcomes.items()
        if outcome.wrong
    ]
    print()
    for line in wrong:
        print(f"WRONG: {line}")
    if results.failure:
        print(f"FAILED: {results.failure}")
    if results.exact:
        print(f"Every store was exact ({len(results.cells)} cells).")
    elif not wrong and not results.failure:
        print("FAILED: the package did not run in every cell.")


def _print_pairs(title: str, pairs: dict[str, str]) -> None:
    if pairs:
        print(f"\n{title}")
        for name, text in pairs.items():
            print(f"  {name}: {_short(text)}")


def _short(text: str) -> str:
    """The line that says most: a compiler's first error, else the first line."""
    lines = text.strip().splitlines() or ["(no reason given)"]
    return next((line for line in lines if " error" in line), lines[0])[:200]


def _print_table(rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print rows with the first `left` columns set left, the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  " + "  ".join(cells).rstrip())
