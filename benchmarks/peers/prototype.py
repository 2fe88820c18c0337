"""The design's prototype, kept as it was measured: 16 bytes per thread, and one thread per 16 bytes of a row."""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda

from numba_kvcache.launch import Launch, launch

from ..gpu import address
from ..names import PROTOTYPE
from ..numba_kernel import compile_kernel
from ..shapes import Cell
from ..words import (
    VECTOR_BYTES,
    check_slot,
    i64,
    load_index,
    load_vector,
    release_dependents,
    store_vector,
    u32,
    u64,
    wait_primary,
)
from . import AbsentError, Peer

__all__ = ["load"]

ROW_BYTES = (128, 256, 512, 1024, 2048, 4096)
"""Widths of 8 to 256 threads, one vector each. (The prototype's other widths were never measured.)"""


def make_kernel(row_bytes: int, early_launch: bool) -> tuple[Callable[..., Any], int, int]:
    """(kernel, rows per block, threads per block) for K and V rows of `row_bytes`."""
    threads = row_bytes // VECTOR_BYTES
    block = max(128, threads)
    rows, shift, mask = block // threads, threads.bit_length() - 1, threads - 1

    def store(
        k, v, k_cache, v_cache, indices, k_stride, v_stride, k_cache_stride, v_cache_stride, index_stride,
        batch, size_limit, skip_index,
    ):  # fmt: skip
        thread = u32(cuda.threadIdx.x)
        row = u32(u32(u32(cuda.blockIdx.x) * u32(rows)) + u32(thread >> u32(shift)))
        offset = u64(u32(u32(thread & u32(mask)) * u32(VECTOR_BYTES)))
        if row >= batch:
            return
        if early_launch:
            wait_primary()
        index = load_index(u64(indices + u64(i64(row) * index_stride)))
        k_words = load_vector(u64(k + u64(i64(row) * k_stride) + offset))
        v_words = load_vector(u64(v + u64(i64(row) * v_stride) + offset))
        if early_launch:
            release_dependents()
        check_slot(index >= i64(0) and index < size_limit)
        store_vector(u64(k_cache + u64(index * k_cache_stride) + offset), k_words)
        store_vector(u64(v_cache + u64(index * v_cache_stride) + offset), v_words)

    return store, rows, block


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""

    @functools.cache
    def loaded(row_bytes: int) -> tuple[int, int, int]:
        store, rows, block = make_kernel(row_bytes, early_launch)
        return compile_kernel(store, f"prototype_{row_bytes}", block), rows, block

    def bind(cell: Cell, a: Any, stream: int) -> Callable[[], None]:
        if cell.k_bytes != cell.v_bytes or cell.k_bytes not in ROW_BYTES:
            raise AbsentError("serves K and V of one width, a power of two of 128 to 4,096 bytes")
        kernel, rows, block = loaded(cell.k_bytes)
        stored = (a.k, a.v, a.k_cache, a.v_cache, a.indices)
        strides = [array.strides[0] for array in stored]
        arguments = (*map(address, stored), *strides, cell.batch, a.k_cache.shape[0], 0)
        grid = -(-cell.batch // rows)
        return lambda: launch(Launch(kernel, grid, block, early_launch), stream, arguments)

    return Peer(PROTOTYPE, bind)
