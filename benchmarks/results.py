"""The numbers: what a run found, as plain values that go into a table."""

from dataclasses import dataclass, field

import numpy as np

from .names import OURS
from .shapes import Cell

__all__ = ["OURS", "CellResult", "HostTime", "Outcome", "Results", "Spread", "TuneResult", "spread_of"]


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


@dataclass(frozen=True)
class TuneResult:
    """Every strategy in one cell, and which of them the package chooses there."""

    cell: Cell
    sets: int
    cold: bool
    chosen: str
    outcomes: dict[str, Outcome]

    @property
    def exact(self) -> bool:
        """Whether every strategy ran and stored what it should."""
        return all(outcome.time for outcome in self.outcomes.values())

    @property
    def cost(self) -> float:
        """The time of the choice over that of the best; 1.0 where the choice is the best."""
        times = {name: outcome.time.median for name, outcome in self.outcomes.items() if outcome.time}
        return times[self.chosen] / min(times.values()) if self.chosen in times else float("nan")


@dataclass(frozen=True)
class HostTime:
    """Host time per call of one row of the host table, and which road the call took (a word or two for others)."""

    time: Spread
    road: str = ""


@dataclass
class Results:
    """A whole run. `environment` is GPU, driver, versions, how inputs rotate, date."""

    environment: dict[str, str]
    cells: list[CellResult] = field(default_factory=list)
    tuning: list[TuneResult] = field(default_factory=list)
    host: dict[str, HostTime] = field(default_factory=dict)
    host_notes: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    machine_code: dict[str, str] = field(default_factory=dict)
    failure: str = ""

    @property
    def exact(self) -> bool:
        """Whether every store of the run was exact."""
        measured = (*self.cells, *self.tuning)
        return bool(measured) and not self.failure and all(result.exact for result in measured)
