"""A run's numbers as JSON, and back."""

from typing import Any

from .goals import Goal, host_goals, kernel_goals
from .names import FLOOR
from .results import CellResult, HostTime, Outcome, Results, Spread, TuneResult
from .shapes import Cell

__all__ = ["from_json", "to_json"]


def to_json(results: Results) -> dict[str, Any]:
    """Plain dictionaries and lists. What follows from other numbers (bandwidths, ratios, goals) is for the reader."""
    floor = results.host.get(FLOOR)
    return {
        "environment": results.environment,
        "exact": results.exact,
        "failure": results.failure,
        "cells": [_cell_to_json(result) for result in results.cells],
        "tuning": [_cell_to_json(its) | {"chosen": its.chosen, "cost": its.cost} for its in results.tuning],
        "host_us_per_call": {name: _host_to_json(host, floor) for name, host in results.host.items()},
        "host_notes": results.host_notes,
        "goals": {
            "kernel": [_goal_to_json(goal) for goal in kernel_goals(results.cells)],
            "host": [_goal_to_json(goal) for goal in host_goals(results.host)],
        },
        "absent": results.absent,
        "machine_code": results.machine_code,
    }


def _cell_to_json(result: CellResult | TuneResult) -> dict[str, Any]:
    cell = result.cell
    return {
        **vars(cell),
        "moved_bytes": cell.moved_bytes,
        "sets": result.sets,
        "beyond_l2": result.cold,
        "contenders": {name: _outcome_to_json(cell, outcome) for name, outcome in result.outcomes.items()},
    }


def _outcome_to_json(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    if outcome.absent:
        return {"absent": outcome.absent}
    if outcome.wrong:
        return {"wrong": outcome.wrong}
    if outcome.time is None:
        return {"exact": True}
    return _spread_to_json(outcome.time, "_us") | {"gb_per_s": cell.moved_bytes / outcome.time.median / 1e3}


def _spread_to_json(spread: Spread, unit: str = "") -> dict[str, Any]:
    return {f"{name}{unit}": value for name, value in vars(spread).items()}


def _host_to_json(host: HostTime, floor: HostTime | None) -> dict[str, Any]:
    ratio = host.time.median / floor.time.median if floor else None
    return {**_spread_to_json(host.time), "ratio_to_floor": ratio, "road": host.road}


def _goal_to_json(goal: Goal) -> dict[str, Any]:
    return {"goal": goal.what, "measured": goal.measured, "met": goal.met}


def from_json(numbers: dict[str, Any]) -> Results:
    """What `to_json` made of a run; also of one from before there were goals and tuning."""
    return Results(
        numbers["environment"],
        [CellResult(*_cell_from_json(each)) for each in numbers["cells"]],
        [_tuning_from_json(each) for each in numbers.get("tuning", ())],
        {
            name: HostTime(_spread_from_json(each), each.get("road", ""))
            for name, each in numbers["host_us_per_call"].items()
        },
        numbers.get("host_notes", {}),
        numbers["absent"],
        numbers["machine_code"],
        numbers["failure"],
    )


def _tuning_from_json(each: dict[str, Any]) -> TuneResult:
    *where, outcomes = _cell_from_json(each)
    return TuneResult(*where, each["chosen"], outcomes)


def _cell_from_json(each: dict[str, Any]) -> tuple[Cell, int, bool, dict[str, Outcome]]:
    cell = Cell(each["k_bytes"], each["v_bytes"], each["batch"], each["phase"])
    outcomes = {name: _outcome_from_json(its) for name, its in each["contenders"].items()}
    return cell, each["sets"], each["beyond_l2"], outcomes


def _outcome_from_json(each: dict[str, Any]) -> Outcome:
    time = _spread_from_json(each, "_us") if "median_us" in each else None
    return Outcome(time, each.get("wrong", ""), each.get("absent", ""))


def _spread_from_json(each: dict[str, Any], unit: str = "") -> Spread:
    return Spread(*(each[f"{name}{unit}"] for name in ("median", "p20", "p80")))
