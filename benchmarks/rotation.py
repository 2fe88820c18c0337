"""How many input sets the launches of a graph rotate over. No CUDA here."""

import math

from .shapes import Cell

__all__ = [
    "BEYOND_L2",
    "COLD",
    "LAUNCHES",
    "LINE",
    "MAX_SETS",
    "SWEEP_SETS",
    "describe_sets",
    "is_cold",
    "rotated_offset",
    "sets_for",
]

LAUNCHES = 32
"""Launches per graph: a replay costs the GPU a microsecond or two besides its launches, whatever they do."""

BEYOND_L2 = 3
MAX_SETS = 1024
"""Sets that are rotated at most. Capture costs host time per set, and the smallest launches would need 100,000."""

COLD = -1
"""In place of a number of sets: as many as exceed 3x L2."""

SWEEP_SETS = LAUNCHES
"""One set per launch of one graph, whatever their size: what the design's sweep had."""


def sets_for(cell: Cell, l2_bytes: int, sets: int = COLD) -> int:
    """How many input sets to rotate: `sets`, or for COLD so many that what they read and write exceeds 3x L2.

    Where they are more than a graph has launches, they fill whole graphs.
    """
    wanted = sets if sets != COLD else max(2, math.ceil(BEYOND_L2 * l2_bytes / cell.moved_bytes))
    if wanted > LAUNCHES:
        wanted = -(-wanted // LAUNCHES) * LAUNCHES
    return wanted if sets != COLD else min(MAX_SETS, wanted)


LINE = 128
"""Bytes of a cache line."""


def rotated_offset(number: int, size: int, room: int, phase: int) -> int:
    """Where, within `room` bytes more than `size`, set `number` of a rotated copy of `size` bytes goes.

    One set behind the other, and again from the start; always `phase` bytes past a line. A memcpy whose source and
    target lie differently on their lines takes 1.5 times as long (H200).
    """
    return phase + number * size % (room - phase + 1) // LINE * LINE


def is_cold(cell: Cell, sets: int, l2_bytes: int) -> bool:
    """Whether the rotated sets exceed 3x L2; a launch of few bytes cannot, and finds its rows in L2."""
    return sets * cell.moved_bytes >= BEYOND_L2 * l2_bytes


def describe_sets(sets: int) -> str:
    """The mode in words, for report and JSON."""
    if sets == COLD:
        return f"as many as exceed {BEYOND_L2}x L2, at most {MAX_SETS} (--sets cold)"
    return f"{sets} in every cell, whether or not they exceed L2 (--sets {sets})"
