"""The floor: a kernel that does nothing, launched to start early, as the package's are."""

from collections.abc import Callable
from typing import Any

from numba_kvcache.launch import Launch, launch

from ..names import EMPTY
from ..numba_kernel import IGNORED, compile_kernel
from ..shapes import Cell
from . import Peer

__all__ = ["empty_peer", "load"]

BLOCK = 128


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""

    def empty(
        k, v, k_cache, v_cache, indices, k_stride, v_stride, k_cache_stride, v_cache_stride, index_stride,
        batch, size_limit, skip_index,
    ):  # fmt: skip
        return

    return empty_peer(EMPTY, "benchmark_empty", empty, early_launch)


def empty_peer(name: str, symbol: str, function: Callable[..., Any], early_launch: bool) -> Peer:
    """One block of `function` as a yardstick."""
    kernel = compile_kernel(function, symbol, BLOCK)

    def bind(cell: Cell, arrays: Any, stream: int) -> Callable[[], None]:
        return lambda: launch(Launch(kernel, 1, BLOCK, early_launch), stream, (*IGNORED, 1, 1, 0))

    return Peer(name, bind, stores=False)
