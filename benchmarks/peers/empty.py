"""The floor: a kernel that releases the one after it, waits for the one before it, and does nothing else."""

from collections.abc import Callable
from typing import Any

from numba_kvcache.launch import launch

from ..numba_kernel import IGNORED, compile_kernel
from ..shapes import Cell
from ..words import release_dependents, wait_primary
from . import Peer

__all__ = ["load"]

BLOCK = 128


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""

    def empty(
        k, v, k_cache, v_cache, indices, k_stride, v_stride, k_cache_stride, v_cache_stride, index_stride,
        batch, size_limit,
    ):  # fmt: skip
        if early_launch:
            release_dependents()  # first, as the package does on small grids: the floor must not stand above it
            wait_primary()

    kernel = compile_kernel(empty, "benchmark_empty", BLOCK)

    def bind(cell: Cell, arrays: Any, stream: int) -> Callable[[], None]:
        return lambda: launch(kernel, 1, BLOCK, stream, early_launch, (*IGNORED, 1, 1))

    return Peer("empty kernel", bind, stores=False)
