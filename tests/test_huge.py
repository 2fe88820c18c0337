"""Sizes past what 16 and 32 bits count, on a GPU (REPORTS 5): strides, slots, batches, widths.

Expected values are made by kernels and memory functions of other libraries or by NumPy, from formulas: word j of source
row i is a mix of i and j, and whatever is not written keeps a sentinel.
"""

import numpy as np
import pytest
from numba import cuda
from support import SIMULATED, make_rows, needs_gpu, store_and_check, tally
from test_gpu import gpu_view

from numba_kvcache import driver, store_kvcache

if not SIMULATED:
    from cuda.bindings import driver as cu

pytestmark = [needs_gpu, pytest.mark.timeout(120)]

SENTINEL = 0x5A5A5A5A
GIB = 1 << 30


def words(count):
    """So many words of GPU memory, every one the sentinel; a skip if there is too little."""
    cuda.current_context().memory_manager.deallocations.clear()  # Numba frees late
    free = driver.check(cu.cuMemGetInfo())[0]
    if free < 4 * count + GIB:
        pytest.skip(f"needs {4 * count / GIB + 1:.0f} GiB of GPU memory, {free / GIB:.0f} GiB are free")
    memory = cuda.device_array(count, np.uint32)
    driver.check(cu.cuMemsetD32(memory.device_ctypes_pointer.value, SENTINEL, count))
    return memory


def count_other_than_sentinel(memory):
    @cuda.jit
    def count(words, found):
        mine = 0
        for i in range(cuda.grid(1), words.size, cuda.gridsize(1)):
            if words[i] != SENTINEL:
                mine += 1
        cuda.atomic.add(found, 0, mine)

    found = cuda.to_device(np.zeros(1, np.int64))
    count[2048, 256](memory, found)
    return int(found.copy_to_host()[0])


def source_rows(first, rows, width):
    return np.arange(first, first + rows * width, dtype=np.uint32).reshape(rows, width)


# ----------------------------------------------------------------------------------------------------------------------
# Strides. pitch: bytes from row to row, of cache and source; rows 4, 0, 3, 1 of 5.


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("pitch", "rows"),
    [(2**31, 5), (2**31 + 16, 5), (2**32, 4), (2**32 + 4, 4), (-(2**31) - 16, 5), (-(2**32), 4), (2**34 + 16, 2)],
    ids=str,
)
def test_strides_past_32_bits(pitch, rows, index_dtype):
    """2**31 bytes are 2**29 elements; 2**34 bytes are 2**32 elements: each is past the sign or the end of 32 bits."""
    width, step = 128, abs(pitch) // 4
    memory = words((rows - 1) * step + 2 * width)
    start = (rows - 1) * step if pitch < 0 else 0
    slots = np.array([4, 0, 3, 1] if rows == 5 else [3, 0, 1] if rows == 4 else [1, 0], index_dtype)
    sources = [source_rows(first, len(slots), width) for first in (1000, 90_000)]
    caches = [gpu_view(memory, 4 * (start + i * width), (rows, width), (pitch, 4), np.dtype("uint32")) for i in (0, 1)]
    store_kvcache(*map(cuda.to_device, sources), *caches, cuda.to_device(slots))
    for i, source in enumerate(sources):
        for row, slot in enumerate(slots):
            at = start + int(slot) * (pitch // 4) + i * width
            np.testing.assert_array_equal(memory[at : at + width].copy_to_host(), source[row])
    # All else is the sentinel, so nothing was written at any wrapped address.
    assert count_other_than_sentinel(memory) == 2 * len(slots) * width

    # The same strides at the source: the rows of the cache, in their order, into a small one.
    small = [cuda.to_device(np.zeros((9, width), np.uint32)) for _ in range(2)]
    into = np.array([8, 1, 2, 5, 7][:rows], index_dtype)
    store_kvcache(*caches, *small, cuda.to_device(into))
    for source, cache in zip(sources, small, strict=True):
        expected = np.zeros((9, width), np.uint32)
        expected[into] = SENTINEL
        for row, slot in enumerate(slots):
            expected[into[slot]] = source[row]
        np.testing.assert_array_equal(cache.copy_to_host(), expected)
    tally("huge", pitch=pitch, rows=rows)


def test_an_index_stride_past_32_bits():
    memory = words(2**31 + 2)
    for i, slot in enumerate((3, 1)):
        memory[i * 2**31 : i * 2**31 + 1].copy_to_device(np.array([slot], np.uint32))
    indices = gpu_view(memory, 0, (2,), (2**33,), np.dtype("int32"))
    sources = [source_rows(first, 2, 64) for first in (1, 5000)]
    caches = [cuda.to_device(np.zeros((5, 64), np.uint32)) for _ in range(2)]
    store_kvcache(*map(cuda.to_device, sources), *caches, indices)
    for source, cache in zip(sources, caches, strict=True):
        expected = np.zeros((5, 64), np.uint32)
        expected[[3, 1]] = source
        np.testing.assert_array_equal(cache.copy_to_host(), expected)


# ----------------------------------------------------------------------------------------------------------------------
# Many slots, many rows: whole caches, checked on the GPU by a kernel of the test's own.

if not SIMULATED:

    @cuda.jit
    def fill_sources(k, v, width):
        for i in range(cuda.grid(1), k.size, cuda.gridsize(1)):
            k[i] = np.uint32(i * 2654435761)
            v[i] = np.uint32(i * 2246822519 + 77)

    @cuda.jit
    def fill_slots(slots, count, factor):
        """Row i goes to slot i * factor mod count, which are all different if factor and count have no divisor."""
        for i in range(cuda.grid(1), slots.size, cuda.gridsize(1)):
            slots[i] = i * factor % count

    @cuda.jit
    def count_wrong(k_cache, v_cache, width, count, inverse, batch, wrong):
        """Words of both caches that are not what the row that belongs there holds, or the sentinel where none does."""
        mine = 0
        for i in range(cuda.grid(1), count * width, cuda.gridsize(1)):
            row = i // width * inverse % count
            at = row * width + i % width
            k = np.uint32(at * 2654435761) if row < batch else np.uint32(SENTINEL)
            v = np.uint32(at * 2246822519 + 77) if row < batch else np.uint32(SENTINEL)
            if k_cache[i] != k or v_cache[i] != v:
                mine += 1
        cuda.atomic.add(wrong, 0, mine)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("batch", "slots", "width", "split"),
    [
        (65_537, 65_599, 32, 1),  # past the y and z axes of a grid
        (70_001, 2**20 + 7, 256, 0),
        (2**20, 2**20 + 7, 512, 4),
        (2**24 + 1, 2**24 + 43, 1, 0),  # past what a float32 counts
        (2**24 + 1, 2**24 + 43, 8, 1),
        (2**26 + 1, 2**26 + 15, 23, 0),  # rows of 92 bytes, 6 GB of each
    ],
)
def test_many_rows_and_slots(batch, slots, width, split, index_dtype):
    factor = 1_000_003
    inverse = pow(factor, -1, slots)
    k_cache, v_cache = words(slots * width), words(slots * width)
    k, v = words(batch * width), words(batch * width)
    indices = cuda.device_array(batch, index_dtype)
    fill_sources[2048, 256](k, v, width)
    fill_slots[2048, 256](indices, slots, factor)
    row = (4 * width, 4)
    store_kvcache(
        *(gpu_view(source, 0, (batch, width), row, np.dtype("uint32")) for source in (k, v)),
        *(gpu_view(cache, 0, (slots, width), row, np.dtype("uint32")) for cache in (k_cache, v_cache)),
        indices, split,
    )  # fmt: skip
    wrong = cuda.to_device(np.zeros(1, np.int64))
    count_wrong[2048, 256](k_cache, v_cache, width, slots, inverse, batch, wrong)
    assert wrong.copy_to_host()[0] == 0
    tally("huge", batch=batch, slots=slots, row_bytes=4 * width)


def test_a_wrong_word_would_be_counted():
    """The control of the test above: one word of V is spoiled."""
    cache = [words(67 * 4) for _ in range(2)]
    k, v, indices = words(5 * 4), words(5 * 4), cuda.device_array(5, np.int64)
    fill_sources[2048, 256](k, v, 4)
    fill_slots[2048, 256](indices, 67, 10)
    for source, target in zip((k, v), cache, strict=True):
        host = np.full((67, 4), SENTINEL, np.uint32)
        host[[i * 10 % 67 for i in range(5)]] = source.copy_to_host().reshape(5, 4)
        target.copy_to_device(host.reshape(-1))
    for expected in (0, 1):
        wrong = cuda.to_device(np.zeros(1, np.int64))
        count_wrong[2048, 256](*cache, 4, 67, pow(10, -1, 67), 5, wrong)
        assert wrong.copy_to_host()[0] == expected
        cache[1][11:12].copy_to_device(np.array([1], np.uint32))


# ----------------------------------------------------------------------------------------------------------------------
# Wide rows.


@pytest.mark.parametrize("split", [0, 1, 2, 4])
@pytest.mark.parametrize("row_bytes", [16 << 10, 32 << 10, 64 << 10])
def test_wide_rows(row_bytes, split):
    store_and_check(*make_rows(9, 21, row_bytes), [20, 0, 3, 4, 19, 7, 1, 12, 11], num_split=split)


@pytest.mark.parametrize("row_bytes", [(64 << 10) - 4, (64 << 10) + 4, (1 << 20) + 12, 16 << 20])
def test_wider_than_a_block_moves_at_once(row_bytes):
    store_and_check(*make_rows(2, 3, row_bytes), [2, 0])
