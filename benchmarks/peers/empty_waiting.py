"""The other floor: a kernel that releases the one after it, waits for the one before it, and does nothing else.

A launch of it takes less than one of the kernel that says neither: its successor comes up while it waits.
"""

from ..names import EMPTY_WAITING
from ..shapes import Cell
from ..words import release_dependents, wait_primary
from . import AbsentError, Peer
from .empty import empty_peer

__all__ = ["load"]


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""
    if not early_launch:
        raise AbsentError("early launch is not to be had here")

    def empty(
        k, v, k_cache, v_cache, indices, k_stride, v_stride, k_cache_stride, v_cache_stride, index_stride,
        batch, size_limit, skip_index,
    ):  # fmt: skip
        release_dependents()  # first, as the package does on small grids: the floor must not stand above it
        wait_primary()

    return empty_peer(EMPTY_WAITING, "benchmark_empty_waiting", empty, early_launch)
