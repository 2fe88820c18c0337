"""The whole call, on the back end that this process has: every byte of every memory against a plain loop."""

import numpy as np
import pytest
from numba import cuda
from support import (
    GUARD,
    ON_GPU,
    Memory,
    Rows,
    expect_store,
    index_array,
    make_rows,
    needs_kernels,
    needs_simulator,
    run_python,
    store_and_check,
    synchronize,
)

import numba_kvcache
from numba_kvcache import make_store_kernel, store_kvcache, warmup

pytestmark = needs_kernels

SLOTS = [9, 0, 4, 7, 2]


# The narrowest row, rows that are no power of two, one wider than a block's vectors, some of several steps or parts.
@pytest.mark.parametrize("row_bytes", [4, 8, 12, 92, 128, 196, 256, 516, 1024, 8192, 16388])
@pytest.mark.parametrize("batch", [1, 5])
def test_row_widths(row_bytes, batch):
    store_and_check(*make_rows(batch, 11, row_bytes), SLOTS[:batch])


@pytest.mark.parametrize(
    ("row_bytes", "split"),
    [(4, 1), (516, 1), (1024, 1), (2052, 1), (8192, 1), (256, 2), (1024, 2), (512, 4), (2048, 4), (8192, 4)],
)
def test_splits(row_bytes, split):
    store_and_check(*make_rows(3, 7, row_bytes), [6, 0, 3], num_split=split)


@pytest.mark.parametrize(
    "dtype", ["int8", "bool", "float16", "float32", "float64", "complex64", "complex128", "uint16"]
)
def test_dtypes_move_as_bits(dtype):
    store_and_check(*make_rows(3, 7, 64, dtype=dtype), [6, 0, 3])


# REPORTS 1: caches whose rows are off the vector grid, from the slot or from the base.


@pytest.mark.parametrize(
    ("row_bytes", "pitch", "split"),
    [(512, 520, 1), (92, 92, 0), (92, 92, 1), (2048, 2052, 4), (512, 520, 0), (2048, 2052, 0), (128, 132, 0)],
)
def test_cache_pitch_off_the_vector_grid(row_bytes, pitch, split):
    k, v = (Rows(4, row_bytes, seed=seed) for seed in (1, 2))
    caches = [Rows(64, row_bytes, pitch=pitch, seed=seed) for seed in (3, 4)]
    store_and_check(k, v, *caches, [1, 2, 3, 16], num_split=split)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("shift", [4, 8, 12])
def test_any_base_off_the_vector_grid(which, shift):
    shifts = [shift if i == which else 0 for i in range(4)]
    rows = [Rows(3 if i < 2 else 7, 128, shift=shifts[i], seed=i) for i in range(4)]
    store_and_check(*rows, [6, 0, 3])


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize("pitch", [132, 136, 144, -128, -132])
def test_any_pitch(which, pitch):
    rows = [Rows(3 if i < 2 else 7, 128, pitch=pitch if i == which else None, seed=i) for i in range(4)]
    store_and_check(*rows, [6, 0, 3])


# REPORTS 3: slices of a fused projection.


def test_slices_of_one_projection():
    qkv = Memory(8192, seed=7)
    k = Rows(5, 256, pitch=1280, shift=768, seed=0, memory=qkv, dtype="float16")
    v = Rows(5, 256, pitch=1280, shift=1024, seed=0, memory=qkv, dtype="float16")
    caches = [Rows(11, 256, seed=seed, dtype="float16") for seed in (3, 4)]
    store_and_check(k, v, *caches, SLOTS)


def test_one_sliced_and_one_dense_source():
    k = Rows(5, 256, pitch=1280, seed=1)
    store_and_check(k, *make_rows(5, 11, 256)[1:], SLOTS)


def test_one_row_expanded():
    k = Rows(5, 256, pitch=0, seed=1)
    store_and_check(k, *make_rows(5, 11, 256)[1:], SLOTS)


# K and V of their own width and pitch.


@pytest.mark.parametrize(("k_bytes", "v_bytes"), [(128, 64), (1024, 128), (92, 2048), (4, 516), (8192, 4)])
@pytest.mark.parametrize("split", [0, 1])
def test_k_and_v_of_different_widths(k_bytes, v_bytes, split):
    store_and_check(*make_rows(3, 7, k_bytes, v_bytes), [6, 0, 3], num_split=split)


def test_everything_different_at_once():
    k = Rows(5, 96, pitch=100, shift=4, seed=1)
    v = Rows(5, 512, pitch=-520, seed=2)
    k_cache = Rows(11, 96, pitch=-112, seed=3)
    v_cache = Rows(13, 512, pitch=528, shift=8, seed=4)
    store_and_check(k, v, k_cache, v_cache, SLOTS, index_dtype="int32", index_step=3)


# Indices.


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("step", [1, 2, 5, -1, -3])
def test_index_types_and_strides(dtype, step):
    store_and_check(*make_rows(5, 11, 64), SLOTS, index_dtype=dtype, index_step=step)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("split", [0, 1])
def test_duplicates_leave_each_word_from_one_of_the_rows(dtype, split):
    slots = [4, 1, 4, 4, 2]
    k, v, k_cache, v_cache = make_rows(5, 7, 512)
    _, indices = index_array(slots, dtype)
    expect_store(k, k_cache, slots)
    expect_store(v, v_cache, slots)
    store_kvcache(k.array, v.array, k_cache.array, v_cache.array, indices, num_split=split)
    synchronize()
    for source, cache in ((k, k_cache), (v, v_cache)):
        where = cache.where(4)
        words = cache.memory.bytes_now()[where].view(np.uint32)
        candidates = [source.memory.expected[source.where(i)].view(np.uint32) for i in (0, 2, 3)]
        assert np.all(np.any([words == candidate for candidate in candidates], axis=0))
        cache.memory.expected[where] = words.view(np.uint8)
        cache.memory.check()


def test_batch_of_one_and_cache_of_one():
    store_and_check(*make_rows(1, 1, 128), [0])


def test_slot_zero_and_the_last_slot_are_ordinary():
    store_and_check(*make_rows(2, 64, 128), [0, 63])


# REPORTS 7's control: everything below the limit is stored.
@pytest.mark.parametrize(("slots", "limit"), [([0, 39], 40), ([63, 0], 64), ([63, 1], 0), ([63, 1], None), ([0], 1)])
def test_slots_under_the_limit(slots, limit):
    store_and_check(*make_rows(len(slots), 64, 64), slots, size_limit=limit)


def test_limit_of_unequal_caches_is_the_smaller():
    k, v, k_cache, _ = make_rows(2, 64, 64)
    store_and_check(k, v, k_cache, Rows(32, 64, seed=9), [31, 0])


# REPORTS 9: padding sliced away.
def test_padded_sources_sliced_to_the_batch():
    padded_k, padded_v = Rows(8, 128, seed=1), Rows(8, 128, seed=2)
    k = Rows(6, 128, seed=0, memory=padded_k.memory)
    v = Rows(6, 128, seed=0, memory=padded_v.memory)
    store_and_check(k, v, *make_rows(1, 64, 128)[2:], [5, 1, 0, 63, 20, 33])


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_empty_batch(dtype):
    """Sources without memory: their pointers are null on a GPU."""
    _, _, k_cache, v_cache = make_rows(1, 7, 128)
    k, v = (cuda.device_array((0, 128), np.uint8) for _ in range(2))
    store_kvcache(k, v, k_cache.array, v_cache.array, cuda.device_array(0, dtype))
    store_kvcache(k, v, cuda.device_array((0, 128), np.uint8), v_cache.array, cuda.device_array(0, dtype))
    synchronize()
    k_cache.memory.check()
    v_cache.memory.check()


# Heads and pages: the slots are counted by the plain loop, page after page.


@pytest.mark.parametrize("k_pages", [None, (3, 4), (12, 1), (1, 12)])
@pytest.mark.parametrize("v_pages", [None, (4, 3)])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_heads_and_pages(k_pages, v_pages, index_dtype):
    k, v, k_cache, v_cache = make_rows(5, 12, 256, 96, dtype="float16")
    k.shaped((5,), (4, 32))
    k_cache.shaped(k_pages or (12,), (4, 32))
    v.shaped((5,), (3, 16))
    v_cache.shaped(v_pages or (12,), (3, 16))
    store_and_check(k, v, k_cache, v_cache, [11, 0, 4, 7, 3], index_dtype=index_dtype)


@pytest.mark.parametrize("split", [0, 1, 2])
def test_pages_of_plain_rows(split):
    k, v, k_cache, v_cache = make_rows(5, 12, 512, dtype="float16")
    k_cache.shaped((3, 4), (256,))
    v_cache.shaped((6, 2), (256,))
    store_and_check(k, v, k_cache, v_cache, [11, 0, 4, 7, 3], num_split=split)


def test_heads_of_a_projection_into_spaced_pages():
    """k and v are heads 4 to 6 and 6 to 8 of 8; slots of the cache lie apart, evenly over all pages."""
    qkv = Memory(8192, seed=7)
    k = Rows(5, 128, pitch=512, shift=256, seed=0, memory=qkv, dtype="float16").shaped((5,), (2, 32))
    v = Rows(5, 128, pitch=512, shift=384, seed=0, memory=qkv, dtype="float16").shaped((5,), (2, 32))
    k_cache = Rows(12, 128, pitch=144, seed=3, dtype="float16").shaped((3, 4), (2, 32))
    v_cache = Rows(12, 128, pitch=-128, seed=4, dtype="float16").shaped((3, 4), (2, 32))
    store_and_check(k, v, k_cache, v_cache, [11, 0, 4, 7, 3])


@pytest.mark.parametrize("skip_index", [None, -1])
def test_pages_of_k_and_v_in_turn_through_a_view_of_the_pool(skip_index):
    """What the README says of (pages, 2, page size, ...): two views of the pool, a page size apart."""
    pages, page_size = 3, 4
    pool = Memory(2 * GUARD + pages * 2 * page_size * 128, seed=8)
    before, rows = pool.expected.copy(), make_rows(4, 1, 128)[:2]
    k_cache = Rows(20, 128, seed=0, memory=pool)
    v_cache = Rows(20, 128, seed=0, shift=page_size * 128, memory=pool)
    where = [(2, 3), (0, 0), (1, 2), (0, 3)]  # page, offset
    store_and_check(*rows, k_cache, v_cache, [2 * page * page_size + at for page, at in where], skip_index=skip_index)
    for row, (page, at) in enumerate(where):
        for which, source in enumerate(rows):
            start = GUARD + ((page * 2 + which) * page_size + at) * 128
            before[start : start + 128] = source.memory.expected[source.where(row)]
    np.testing.assert_array_equal(pool.bytes_now(), before)


# Rows left out. -1 is in no cache; 4 is a slot; 12 is past the end.


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(("skip_index", "slots"), [
    (-1, [9, -1, 4, -1, 2]), (-1, [-1] * 5), (-1, SLOTS), (4, SLOTS), (0, [0, 0, 4, 0, 2]), (12, [12, 3, 12, 12, 0]),
    (2**31 - 1, [2**31 - 1, 1, 2, 3, 4]), (-(2**31), [1, 2, 3, 4, -(2**31)]), (2**40, SLOTS), (None, SLOTS),
])  # fmt: skip
def test_rows_left_out(skip_index, slots, index_dtype):
    store_and_check(*make_rows(5, 11, 256), slots, skip_index=skip_index, index_dtype=index_dtype)


@pytest.mark.parametrize("skip_index", [-(2**63), 2**63 - 1, 2**32 - 1])
def test_rows_left_out_by_all_64_bits(skip_index):
    store_and_check(*make_rows(5, 11, 64), [9, skip_index, 4, skip_index, 2], skip_index=skip_index)


@pytest.mark.parametrize(("row_bytes", "split"), [(4, 0), (92, 0), (196, 0), (516, 1), (8192, 0), (8192, 1), (2048, 4)])
def test_rows_left_out_of_every_layout(row_bytes, split):
    """Several rows per block, idle threads, predicated vectors, parts, and steps."""
    store_and_check(*make_rows(6, 11, row_bytes), [9, -1, 4, 7, -1, 2], skip_index=-1, num_split=split)


def test_rows_left_out_of_pages_under_a_limit():
    k, v, k_cache, v_cache = make_rows(5, 12, 256, dtype="float16")
    for rows, leading in ((k, (5,)), (v, (5,)), (k_cache, (3, 4)), (v_cache, (3, 4))):
        rows.shaped(leading, (4, 32))
    store_and_check(k, v, k_cache, v_cache, [7, 9, 0, 9, 3], skip_index=9, size_limit=8, index_dtype="int32")


@pytest.mark.parametrize("indices", [[], [3]])
def test_an_index_to_skip_and_none_that_is(indices):
    store_and_check(*make_rows(len(indices), 11, 128), indices, skip_index=-1)


# Sources that share memory with the caches, as long as no byte written is also read.


def test_rows_moved_within_one_cache():
    k_cache, v_cache = make_rows(1, 11, 128)[2:]
    k = Rows(3, 128, seed=0, memory=k_cache.memory)  # slots 0, 1, 2 as sources
    v = Rows(3, 128, seed=0, memory=v_cache.memory, shift=128)  # slots 1, 2, 3
    store_and_check(k, v, k_cache, v_cache, [10, 5, 7])


def test_k_and_v_interleaved_in_one_pool():
    pool = Memory(8192, seed=8)
    k_cache = Rows(11, 128, pitch=256, seed=0, memory=pool)
    v_cache = Rows(11, 128, pitch=256, shift=128, seed=0, memory=pool)
    store_and_check(*make_rows(5, 1, 128)[:2], k_cache, v_cache, SLOTS)


def test_one_source_for_both():
    k, _, k_cache, v_cache = make_rows(5, 11, 128)
    store_and_check(k, k, k_cache, v_cache, SLOTS)


# Ways to call.


def test_numba_device_arrays_of_the_front_door():
    """`cuda.to_device` and `copy_to_host`, as a user has them."""
    k, v = (np.arange(i, i + 5 * 32, dtype=np.int32).reshape(5, 32) for i in (1000, 5000))
    k_cache, v_cache = (cuda.to_device(np.full((11, 32), fill, np.int32)) for fill in (-1, -2))
    store_kvcache(cuda.to_device(k), cuda.to_device(v), k_cache, v_cache, cuda.to_device(np.array(SLOTS)))
    for source, cache, fill in ((k, k_cache, -1), (v, v_cache, -2)):
        expected = np.full((11, 32), fill, np.int32)
        for i, slot in enumerate(SLOTS):
            expected[slot] = source[i]
        np.testing.assert_array_equal(cache.copy_to_host(), expected)


def test_keywords_and_a_stream():
    k, v, k_cache, v_cache = make_rows(5, 11, 128)
    index_memory, indices = index_array(SLOTS)
    expect_store(k, k_cache, SLOTS)
    expect_store(v, v_cache, SLOTS)
    result = store_kvcache(
        stream=cuda.stream(), indices=indices, v_cache=v_cache.array, k_cache=k_cache.array, v=v.array, k=k.array,
        num_split=1, size_limit=11,
    )  # fmt: skip
    assert result is None
    synchronize()
    for memory in (k.memory, v.memory, k_cache.memory, v_cache.memory, index_memory):
        memory.check()


@pytest.mark.parametrize("repeats", [5])
def test_same_call_again_with_other_memory(repeats):
    """What is remembered of a call is not its addresses."""
    for i in range(repeats):
        rows = [Rows(3 if j < 2 else 7, 128, shift=4 * i, seed=10 * i + j) for j in range(4)]
        store_and_check(*rows, [(i + j) % 7 for j in (0, 2, 4)])


# Numba's own launch of a small grid warns; store_kvcache's must not.
@pytest.mark.filterwarnings("ignore:.*Grid size")
@pytest.mark.parametrize(("row_bytes", "v_row_bytes", "split"), [(128, 0, 0), (512, 256, 1), (1024, 0, 4)])
@pytest.mark.parametrize("skipping", [False, True])
def test_kernel_for_users_own_launches(row_bytes, v_row_bytes, split, skipping):
    """Unless it is made for it, the kernel does not look at the index to skip, which is a slot here."""
    k, v, k_cache, v_cache = make_rows(3, 7, row_bytes, v_row_bytes)
    slots = [6, 0, 3]
    index_memory, _ = index_array(slots, "int32")
    kernel = make_store_kernel(row_bytes, split, v_element_bytes=v_row_bytes, index_dtype="int32", skipping=skipping)
    expect_store(k, k_cache, slots, 0 if skipping else None)
    expect_store(v, v_cache, slots, 0 if skipping else None)
    # Four blocks are more than three rows need: threads past the batch do nothing.
    kernel[max(4, kernel.layout.grid(3)), kernel.layout.block](
        *(rows.memory.address(rows.start) for rows in (k, v, k_cache, v_cache)), index_memory.address(256),
        *(rows.pitch for rows in (k, v, k_cache, v_cache)), 4, 3, 7, 0,
    )  # fmt: skip
    synchronize()
    for memory in (k.memory, v.memory, k_cache.memory, v_cache.memory):
        memory.check()


# Slots out of range. (On a GPU the context is lost: test_traps.py runs those in processes of their own.)


@needs_simulator
@pytest.mark.parametrize(
    ("slot", "limit", "dtype"),
    [
        (-1, 64, "int64"), (-1, 0, "int32"), (40, 40, "int64"), (64, 64, "int64"), (64, None, "int32"),
        (-(2**31), 0, "int32"), (-(2**31), 0, "int64"), (2**31 - 1, 0, "int32"), (2**32, 0, "int64"),
        (2**32 + 5, 64, "int64"), (-(2**63), 0, "int64"), (2**63 - 1, 0, "int64"),
    ],
)  # fmt: skip
def test_slot_out_of_range(slot, limit, dtype):
    k, v, k_cache, v_cache = make_rows(1, 64, 64)
    _, indices = index_array([slot], dtype)
    with pytest.raises(AssertionError, match=r"numba_kvcache/kernel.py:\d+: store_kvcache: Assertion `0 <= index"):
        store_kvcache(k.array, v.array, k_cache.array, v_cache.array, indices, size_limit=limit)
    k_cache.memory.check()
    v_cache.memory.check()


@needs_simulator
@pytest.mark.parametrize(("slot", "skip_index"), [(-2, -1), (-1, 5), (64, -1), (-1, 2**32 - 1), (-1, None)])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_only_the_index_to_skip_is_skipped(slot, skip_index, dtype):
    k, v, k_cache, v_cache = make_rows(1, 64, 64)
    arrays = k.array, v.array, k_cache.array, v_cache.array, index_array([slot], dtype)[1]
    with pytest.raises(AssertionError, match="Assertion `0 <= index"):
        store_kvcache(*arrays, skip_index=skip_index)
    k_cache.memory.check()
    v_cache.memory.check()


@needs_simulator
def test_slot_between_two_unequal_caches():
    k, v, k_cache, _ = make_rows(1, 64, 64)
    v_cache = Rows(32, 64, seed=9)
    with pytest.raises(AssertionError, match="Assertion `0 <= index"):
        store_kvcache(k.array, v.array, k_cache.array, v_cache.array, index_array([40])[1])
    k_cache.memory.check()
    v_cache.memory.check()


@needs_simulator
def test_the_check_survives_python_without_asserts():
    code = """
from support import index_array, make_rows, store_kvcache
k, v, k_cache, v_cache = make_rows(1, 4, 64)
try:
    store_kvcache(k.array, v.array, k_cache.array, v_cache.array, index_array([4])[1])
except AssertionError:
    raise SystemExit(77 if not __debug__ else 1)
"""
    assert run_python(code, PYTHONOPTIMIZE="1").returncode == 77


def test_warmup_makes_the_call_ready():
    warmup(384, 128, 1, index_dtype="int32")
    store_and_check(*make_rows(3, 7, 384, 128), [6, 0, 3], num_split=1, index_dtype="int32")
    warmup(384, 128, 1, index_dtype="int32", skipping=True)
    store_and_check(*make_rows(3, 7, 384, 128), [6, -1, 3], num_split=1, index_dtype="int32", skip_index=-1)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((6,), {}, "rows of k must be a multiple of 4"),
        ((128, 0, 2), {}, "num_split=2 needs"),
        ((128,), {"index_dtype": "uint8"}, "index_dtype must be one of int32, int64, got 'uint8'"),
        ((128,), {"alignment": 2}, "alignment must be one of 16, 8, 4, got 2"),
    ],
)
def test_warmup_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        warmup(*arguments, **options)


def test_back_end_is_the_one_that_the_process_asked_for():
    assert numba_kvcache.settings.SIMULATED is not ON_GPU
