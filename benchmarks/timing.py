"""Kernel time by graph replay, the same for the package and for every peer."""

import itertools
import math
from collections.abc import Callable, Sequence

from .gpu import Call, Gpu, Graph, capture, elapsed_us
from .results import Spread, spread_of
from .shapes import Cell

__all__ = ["MAX_SETS", "is_cold", "sets_for", "time_calls"]

LAUNCHES = 32
"""Launches per graph: a replay costs the GPU a microsecond or two besides its launches, whatever they do."""

SAMPLES = 31
SAMPLE_US = 200.0
MAX_REPLAYS = 8

BEYOND_L2 = 3
MAX_SETS = 1024
"""Sets that are rotated at most. Capture costs host time per set, and the smallest launches would need 100,000."""


def sets_for(cell: Cell, l2_bytes: int) -> int:
    """How many input sets to rotate, so that what they read and write exceeds 3x L2: whole graphs of them if many."""
    wanted = max(2, math.ceil(BEYOND_L2 * l2_bytes / cell.moved_bytes))
    return wanted if wanted <= LAUNCHES else min(MAX_SETS, -(-wanted // LAUNCHES) * LAUNCHES)


def is_cold(cell: Cell, sets: int, l2_bytes: int) -> bool:
    """Whether the rotated sets exceed 3x L2; a launch of few bytes cannot, and finds its rows in L2."""
    return sets * cell.moved_bytes >= BEYOND_L2 * l2_bytes


def time_calls(gpu: Gpu, calls: Sequence[Call], backlog: Callable[[], None]) -> Spread:
    """Microseconds per call on the GPU; `calls` are the rotated sets, `backlog` keeps the GPU busy while we queue."""
    rotation = list(itertools.islice(itertools.cycle(calls), max(LAUNCHES, len(calls))))
    graphs: list[Graph] = []
    try:
        for first in range(0, len(rotation), LAUNCHES):
            graphs.append(capture(gpu.stream, rotation[first : first + LAUNCHES]))
        return _time_graphs(gpu, graphs, backlog)
    finally:
        for graph in graphs:
            graph.close()


def _time_graphs(gpu: Gpu, graphs: Sequence[Graph], backlog: Callable[[], None]) -> Spread:
    turns = itertools.cycle(graphs)

    def sample(replays: int) -> Call:
        def run() -> None:
            for _ in range(replays):
                next(turns).replay()

        return run

    # The first replay loads what is loaded lazily; the second tells how many make a sample.
    rough = elapsed_us(gpu.stream, [sample(1), sample(1)], backlog)[1]
    replays = max(1, min(MAX_REPLAYS, math.ceil(SAMPLE_US / rough)))
    elapsed = elapsed_us(gpu.stream, [sample(replays)] * SAMPLES, backlog)
    return spread_of([us / replays / LAUNCHES for us in elapsed])
