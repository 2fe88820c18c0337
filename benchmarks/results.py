"""The numbers: what a run found, as plain values that go into a table or a JSON file."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .shapes import Cell

__all__ = ["OURS", "CellResult", "Outcome", "Results", "Spread", "spread_of"]

OURS = "numba_kvcache"


@dataclass(frozen=True)
class Spread:
    """Microseconds: median with 20th and 80th percentile."""

    median: float
    p20: float
    p80: float


def spread_of(samples: list[float]) -> Spread:
    """The spread of samples, in their unit."""
    p20, median, p80 = np.percentile(samples, (20, 50, 80))
    return Spread(float(median), float(p20), float(p80))


@dataclass(frozen=True)
class Outcome:
    """What became of one contender in one cell: a time, or how its store was wrong, or why it is absent."""

    time: Spread | None = None
    wrong: str = ""
    absent: str = ""


@dataclass(frozen=True)
class CellResult:
    """All contenders in one cell; `sets` is how many input sets were rotated, `cold` whether they exceed 3x L2."""

    cell: Cell
    sets: int
    cold: bool
    outcomes: dict[str, Outcome]

    @property
    def exact(self) -> bool:
        """Whether our store ran and no contender's store was wrong."""
        ours = self.outcomes[OURS]
        return not ours.absent and not any(outcome.wrong for outcome in self.outcomes.values())


@dataclass
class Results:
    """A whole run. `environment` is GPU, driver, versions, date."""

    environment: dict[str, str]
    cells: list[CellResult] = field(default_factory=list)
    host: dict[str, Spread] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    machine_code: dict[str, str] = field(default_factory=dict)
    failure: str = ""

    @property
    def exact(self) -> bool:
        """Whether every store of the run was exact."""
        return bool(self.cells) and not self.failure and all(result.exact for result in self.cells)

    def as_json(self) -> dict[str, Any]:
        """Plain dictionaries and lists."""
        return {
            "environment": self.environment,
            "exact": self.exact,
            "failure": self.failure,
            "cells": [_cell_as_json(result) for result in self.cells],
            "host_us_per_call": {name: vars(spread) for name, spread in self.host.items()},
            "absent": self.absent,
            "machine_code": self.machine_code,
        }


def _cell_as_json(result: CellResult) -> dict[str, Any]:
    cell = result.cell
    return {
        **vars(cell),
        "moved_bytes": cell.moved_bytes,
        "sets": result.sets,
        "beyond_l2": result.cold,
        "contenders": {name: _outcome_as_json(cell, outcome) for name, outcome in result.outcomes.items()},
    }


def _outcome_as_json(cell: Cell, outcome: Outcome) -> dict[str, Any]:
    if outcome.absent:
        return {"absent": outcome.absent}
    if outcome.wrong:
        return {"wrong": outcome.wrong}
    if outcome.time is None:
        return {"exact": True}
    time = outcome.time
    return {
        "median_us": time.median,
        "p20_us": time.p20,
        "p80_us": time.p80,
        "gb_per_s": cell.moved_bytes / time.median / 1e3,
    }
