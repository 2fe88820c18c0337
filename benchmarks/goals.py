"""What the package has set itself, held against a run's numbers. No CUDA here."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .names import (
    CUDA_CPP,
    DISPATCHER,
    EMPTY,
    FLOOR,
    INT32,
    MEMCPY,
    OURS,
    PROTOTYPE,
    PYTHON_NUMBA,
    PYTHON_TORCH,
    STORE_CUPY,
    STORE_NUMBA,
    STORE_TORCH,
)
from .results import CellResult, HostTime, Spread
from .shapes import SWEEP_CELLS

__all__ = ["Goal", "geometric_mean", "host_goals", "kernel_goals", "time_of"]

LARGE_COPY_BYTES = 64_000_000
SMALL_BATCH = 16
NARROW_ROWS = (92, 200)

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Goal:
    """One goal, what was measured, and whether that meets it (None: a number it needs is absent)."""

    what: str
    measured: str = NOT_MEASURED
    met: bool | None = None


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def time_of(result: CellResult, name: str) -> Spread | None:
    """The time of a contender in a cell, None where it has none."""
    outcome = result.outcomes.get(name)
    return outcome.time if outcome else None


# ----------------------------------------------------------------------------------------------------------------------
# Kernel time


@dataclass(frozen=True)
class _Ratio:
    """The quotient of two contenders' times in one cell."""

    result: CellResult
    above: Spread
    below: Spread

    @property
    def value(self) -> float:
        return self.above.median / self.below.median

    def within_spread(self, bound: float) -> bool:
        """Whether the 20th to 80th percentiles of the two times allow for a quotient of `bound`."""
        return self.above.p20 / self.below.p80 <= bound <= self.above.p80 / self.below.p20

    def __str__(self) -> str:
        cell = self.result.cell
        return f"{self.value:.3f} at {cell.k_bytes} B x {cell.batch}"


def kernel_goals(cells: Iterable[CellResult]) -> list[Goal]:
    """The goals for the cells with random slots (--cells); none if there are no such cells."""
    cells = [result for result in cells if result.cell.phase == "random"]
    if not cells:
        return []
    sweep = [result for result in cells if result.cell in SWEEP_CELLS]
    large = [result for result in cells if result.cell.moved_bytes >= LARGE_COPY_BYTES]
    small = [result for result in cells if result.cell.batch <= SMALL_BATCH]
    narrow = [result for result in cells if result.cell.k_bytes in NARROW_ROWS]
    speed, prototype = _ratios(sweep, CUDA_CPP, OURS), _ratios(sweep, OURS, PROTOTYPE)
    int32 = _ratios(cells, INT32, OURS)
    return [
        _mean_goal(f"speed over {CUDA_CPP}, geometric mean of the 30 cells: >= 1.30", speed, _at_least(1.30)),
        _least_goal(f"speed over {CUDA_CPP}, least of the 30 cells: >= 1.00", speed, 1.00),
        _least_goal(f"share of {MEMCPY}, least where 64 MB or more move: >= 0.96", _ratios(large, MEMCPY, OURS), 0.96),
        _most_goal(f"time over the {EMPTY}, most of batches up to 16: <= 1.20", _ratios(small, OURS, EMPTY), 1.20),
        _least_goal(
            f"speed over {CUDA_CPP}, least of rows of 92 and 200 B: >= 1.00", _ratios(narrow, CUDA_CPP, OURS), 1.00
        ),
        _mean_goal("time of int32 indices over that of int64, geometric mean: <= 1.01", int32, _at_most(1.01)),
        _most_goal("time of int32 indices over that of int64, most: <= 1.05", int32, 1.05),
        _mean_goal(f"time over the {PROTOTYPE}, geometric mean of the 30: <= 1.05", prototype, _at_most(1.05)),
        _most_goal(f"time over the {PROTOTYPE}, most of the 30 cells: <= 1.05", prototype, 1.05),
    ]


def _ratios(cells: Iterable[CellResult], above: str, below: str) -> list[_Ratio]:
    pairs = ((result, time_of(result, above), time_of(result, below)) for result in cells)
    return [_Ratio(result, first, second) for result, first, second in pairs if first and second]


def _mean_goal(what: str, ratios: Sequence[_Ratio], meets: Callable[[float], bool]) -> Goal:
    if not ratios:
        return Goal(what)
    mean = geometric_mean([ratio.value for ratio in ratios])
    return Goal(what, f"{mean:.3f} over {len(ratios)} cells", meets(mean))


def _least_goal(what: str, ratios: Sequence[_Ratio], bound: float) -> Goal:
    missed = [ratio for ratio in ratios if ratio.value < bound]
    return _extreme_goal(what, min(ratios, key=lambda ratio: ratio.value, default=None), missed, len(ratios), bound)


def _most_goal(what: str, ratios: Sequence[_Ratio], bound: float) -> Goal:
    missed = [ratio for ratio in ratios if ratio.value > bound]
    return _extreme_goal(what, max(ratios, key=lambda ratio: ratio.value, default=None), missed, len(ratios), bound)


def _extreme_goal(what: str, worst: _Ratio | None, missed: Sequence[_Ratio], count: int, bound: float) -> Goal:
    if worst is None:
        return Goal(what)
    if not missed:
        return Goal(what, f"{worst} ({count} cells)", True)
    unclear = sum(ratio.within_spread(bound) for ratio in missed)
    return Goal(what, f"{worst}; missed in {len(missed)} of {count} cells, in {unclear} within p20..p80", False)


# ----------------------------------------------------------------------------------------------------------------------
# Host time


def host_goals(host: Mapping[str, HostTime]) -> list[Goal]:
    """The goals for host time per call; none if it was not measured."""
    if not host:
        return []
    times = {name: row.time.median for name, row in host.items()}
    return [
        _host_goal(times, f"torch tensors: <= 1.25x the {FLOOR}", STORE_TORCH, FLOOR, _at_most(1.25)),
        _host_goal(times, f"torch tensors: <= 0.80x {CUDA_CPP} through tvm-ffi", STORE_TORCH, CUDA_CPP, _at_most(0.80)),
        _host_goal(times, f"Numba arrays: <= 1.5x the {FLOOR}", STORE_NUMBA, FLOOR, _at_most(1.5)),
        _host_goal(times, "Numba arrays: >= 6x less than Numba's dispatcher", DISPATCHER, STORE_NUMBA, _at_least(6)),
        _cupy_goal(times),
        _host_goal(times, f"Python road, torch tensors: < 3x the {FLOOR}", PYTHON_TORCH, FLOOR, lambda x: x < 3),
        _host_goal(times, f"Python road, Numba arrays: < 3x the {FLOOR}", PYTHON_NUMBA, FLOOR, lambda x: x < 3),
    ]


def _at_most(bound: float) -> Callable[[float], bool]:
    return lambda value: value <= bound


def _at_least(bound: float) -> Callable[[float], bool]:
    return lambda value: value >= bound


def _host_goal(times: Mapping[str, float], what: str, above: str, below: str, meets: Callable[[float], bool]) -> Goal:
    if above not in times or below not in times:
        return Goal(what)
    ratio = times[above] / times[below]
    return Goal(what, f"{ratio:.2f}x ({times[above]:.2f} over {times[below]:.2f} us)", meets(ratio))


def _cupy_goal(times: Mapping[str, float]) -> Goal:
    what = f"CuPy arrays: <= 12 us or <= 2.5x the {FLOOR}"
    if STORE_CUPY not in times:
        return Goal(what)
    cupy, floor = times[STORE_CUPY], times.get(FLOOR)
    if floor is None:
        return Goal(what, f"{cupy:.2f} us, {FLOOR} {NOT_MEASURED}", True if cupy <= 12 else None)
    return Goal(what, f"{cupy:.2f} us, {cupy / floor:.2f}x", cupy <= 12 or cupy / floor <= 2.5)
