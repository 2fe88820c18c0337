"""Kernel time by graph replay, the same for the package and for every peer."""

import itertools
import math
from collections.abc import Callable, Sequence

from .gpu import Call, Gpu, Graph, capture, elapsed_us
from .results import Spread, spread_of
from .rotation import LAUNCHES

__all__ = ["time_calls"]

SAMPLES = 31
SAMPLE_US = 200.0
MAX_REPLAYS = 8


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
