"""The yardstick for large batches: one device-to-device memcpy of as many bytes as K and V have."""

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from numba_kvcache.driver import check

from ..gpu import address
from ..names import MEMCPY
from ..rotation import LINE, rotated_offset
from ..shapes import Cell
from . import Peer

__all__ = ["load"]


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""
    return Peer(MEMCPY, _bind, stores=False)


def _bind(cell: Cell, a: Any, stream: int) -> Callable[[], None]:
    # V follows K, and v_cache follows k_cache; targets rotate over both caches, as the stores' slots do.
    start, size = address(a.k_cache), cell.source_bytes
    room = a.k_cache.nbytes + a.v_cache.nbytes - size
    offset = rotated_offset(a.number, size, room, (address(a.k) - start) % LINE)
    target, source = cu.CUdeviceptr(start + offset), cu.CUdeviceptr(address(a.k))

    def call() -> None:
        check(cu.cuMemcpyDtoDAsync(target, source, size, cu.CUstream(stream)))

    return call
