"""All that the benchmark prints when it is done."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from .goals import Goal, host_goals, kernel_goals
from .kernel_tables import heading, print_kernel_times, print_ratios, print_tuning
from .names import FLOOR
from .results import OURS, CellResult, HostTime, Results, TuneResult
from .text import print_pairs, print_table, progress

__all__ = ["print_report"]

HOST_METHOD = """
Host time, us per call: median of 25 rounds of 300 calls each, all rows in turns, batch 1, rows of 2,048 B.
x floor: over a loop of machine code that does nothing but launch the same kernel with the early-launch attribute."""


def print_report(results: Results) -> None:
    """Print everything that a run found."""
    if sys.stderr.isatty():
        progress("")
    for name, value in results.environment.items():
        print(f"{name}: {value}")
    if any(outcome.time for result in results.cells for outcome in result.outcomes.values()):
        print_kernel_times(results.cells)
        print_ratios(results.cells)
        sets = results.environment.get("input sets", "not recorded")
        _print_goals(f"Goals for the kernel's speed; input sets: {sets}", kernel_goals(results.cells))
    elif results.cells:
        _print_checks(results.cells)
    if results.tuning:
        print_tuning(results.tuning)
    print_pairs("What the compiler makes of these rows (no GPU needed):", results.machine_code)
    if results.host:
        _print_host_times(results.host, results.host_notes)
        _print_goals("Goals for the host's time", host_goals(results.host))
    print_pairs("Absent:", results.absent | _absent_from_cells((*results.cells, *results.tuning)))
    _print_verdict(results)


def _print_checks(cells: Sequence[CellResult]) -> None:
    print("\nStores on Numba's simulator, compared with NumPy byte for byte")
    for widths, group in groupby(cells, lambda result: (result.cell.k_bytes, result.cell.v_bytes)):
        checks = ", ".join(f"{its.cell.phase} of {its.cell.batch} {_check(its)}" for its in group)
        print(f"  {heading(*widths)}: {checks}")


def _check(result: CellResult) -> str:
    return "WRONG" if result.outcomes[OURS].wrong else "exact"


def _print_host_times(host: Mapping[str, HostTime], notes: Mapping[str, str]) -> None:
    print(HOST_METHOD)
    floor = host.get(FLOOR)
    rows = [
        (name, f"{its.time.median:.2f}", f"{its.time.p20:.2f}", f"{its.time.p80:.2f}", _over(its, floor))
        for name, its in host.items()
    ]
    roads = ["road", *(its.road for its in host.values())]
    table = [("", "us", "p20", "p80", "x floor"), *rows]
    wide = max(map(len, roads))
    print_table([(*row, road[:100].ljust(wide)) for row, road in zip(table, roads, strict=True)])
    for name, text in notes.items():
        print(f"  {name}: {text}")


def _over(row: HostTime, floor: HostTime | None) -> str:
    return f"{row.time.median / floor.time.median:.2f}" if floor else "-"


def _print_goals(title: str, goals: Sequence[Goal]) -> None:
    if goals:
        print(f"\n{title}")
        for goal in goals:
            verdict = {True: "met: ", False: "not met: ", None: ""}[goal.met]
            print(f"  {goal.what}\n    {verdict}{goal.measured}")


def _absent_from_cells(cells: Iterable[CellResult | TuneResult]) -> dict[str, str]:
    """Reasons of contenders that ran in some cells and not in others, each reason once, with the first such cell."""
    reasons: dict[str, str] = {}
    seen = set()
    for result in cells:
        for name, outcome in result.outcomes.items():
            if outcome.absent and (name, outcome.absent) not in seen:
                seen.add((name, outcome.absent))
                where = f"{result.cell.k_bytes} + {result.cell.v_bytes} B x {result.cell.batch}"
                reasons[f"{name} (first at {where})"] = outcome.absent
    return reasons


def _print_verdict(results: Results) -> None:
    measured = (*results.cells, *results.tuning)
    wrong = [
        f"{name}, {result.cell.k_bytes} + {result.cell.v_bytes} B x {result.cell.batch}: {outcome.wrong}"
        for result in measured
        for name, outcome in result.outcomes.items()
        if outcome.wrong
    ]
    print()
    for line in wrong:
        print(f"WRONG: {line}")
    if results.failure:
        print(f"FAILED: {results.failure}")
    if results.exact:
        print(f"Every store was exact ({len(measured)} cells).")
    elif not wrong and not results.failure:
        print("FAILED: the package did not run in every cell.")
