"""Every check of contract.py on views made by hand: exception type, argument and value in the message, and order."""

import numpy as np
import pytest

from numba_kvcache.arrays import ArrayFacts, ArrayView
from numba_kvcache.contract import check_store

BASE = {"k": 0x10000, "v": 0x20000, "k_cache": 0x30000, "v_cache": 0x40000, "indices": 0x50000}
ITEMSIZE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
}


def view(name, shape, dtype="float16", *, pitch=None, strides=None, address=None, device=0, readonly=False):
    itemsize = ITEMSIZE.get(dtype, 8)
    if strides is None:
        strides = (itemsize,) if len(shape) == 1 else (shape[-1] * itemsize if pitch is None else pitch, itemsize)
        strides = strides if len(shape) in (1, 2) else (itemsize,) * len(shape)
    facts = ArrayFacts(shape, strides, dtype, itemsize, device, readonly)
    return ArrayView(BASE[name] if address is None else address, facts)


def call_views(batch=4, width=128, slots=64):
    return {
        "k": view("k", (batch, width)), "v": view("v", (batch, width)),
        "k_cache": view("k_cache", (slots, width)), "v_cache": view("v_cache", (slots, width)),
        "indices": view("indices", (batch,), "int64"),
    }  # fmt: skip


def call(batch=4, width=128, slots=64, *, num_split=0, size_limit=0, **views):
    """A valid call, but for the views given."""
    arrays = call_views(batch, width, slots)
    return check_store(**{**arrays, **views}, num_split=num_split, size_limit=size_limit)


def test_valid_call_becomes_the_kernels_arguments():
    request = call()
    assert request.batch == 4
    assert request.arguments == (
        0x10000, 0x20000, 0x30000, 0x40000, 0x50000,
        256, 256, 256, 256, 8,
        4, 64,
    )  # fmt: skip
    key = request.key
    assert (key.k_row_bytes, key.v_row_bytes, key.k_alignment, key.v_alignment) == (256, 256, 16, 16)
    assert (key.num_split, key.index_bits, key.device) == (0, 64, 0)


def test_int32_indices_and_their_stride():
    request = call(indices=view("indices", (4,), "int32", strides=(12,)))
    assert request.key.index_bits == 32
    assert request.arguments[9] == 12


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
@pytest.mark.parametrize("shape", [(128,), (4, 1, 128), ()])
def test_rows_have_two_dimensions(name, shape):
    with pytest.raises(ValueError, match=rf"{name} must have 2 dimensions.*\({', '.join(map(str, shape))}"):
        call(**{name: view(name, shape, strides=(2,) * len(shape))})


@pytest.mark.parametrize("shape", [(4, 1), ()])
def test_indices_have_one_dimension(shape):
    with pytest.raises(ValueError, match="indices must have 1 dimension"):
        call(indices=view("indices", shape, "int64", strides=(8,) * len(shape)))


# REPORTS 9: row counts that disagree are stated, never trusted.
@pytest.mark.parametrize(
    ("name", "views", "numbers"),
    [
        ("k", {"indices": view("indices", (6,), "int64")}, ("8", "6")),
        ("v", {"v": view("v", (6, 128))}, ("6", "8")),
        ("k", {"k": view("k", (9, 128))}, ("9", "8")),
    ],
)
def test_row_counts_must_agree(name, views, numbers):
    with pytest.raises(
        ValueError, match=rf"{name} and indices .* {numbers[0]} rows in {name} and {numbers[1]} in indices"
    ):
        call(8, **views)


@pytest.mark.parametrize(("name", "cache"), [("k", "k_cache"), ("v", "v_cache")])
def test_widths_must_agree(name, cache):
    with pytest.raises(ValueError, match=rf"{name} and {cache} must have one row width, got 128 and 256"):
        call(**{cache: view(cache, (64, 256))})


def test_k_and_v_may_have_different_widths():
    request = call(v=view("v", (4, 64)), v_cache=view("v_cache", (64, 64)))
    assert (request.key.k_row_bytes, request.key.v_row_bytes) == (256, 128)


# REPORTS 11: equal bytes are not equal types.
@pytest.mark.parametrize(
    ("name", "view_", "message"),
    [
        ("k", view("k", (4, 128), "bfloat16"), "k and k_cache .* bfloat16 and float16"),
        ("k", view("k", (4, 64), "float32"), "k and k_cache .* float32 and float16"),
        ("v", view("v", (4, 128), "bfloat16"), "v and k_cache .* bfloat16 and float16"),
        ("v_cache", view("v_cache", (64, 128), "float8_e4m3fn"), "v_cache and k_cache .* float8_e4m3fn and float16"),
        ("k_cache", view("k_cache", (64, 256), "uint8"), "k and k_cache .* float16 and uint8"),
    ],
)
def test_one_dtype_for_all_rows(name, view_, message):
    with pytest.raises(TypeError, match=message):
        call(**{name: view_})


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "float32", "uint64"])
def test_index_types(dtype):
    with pytest.raises(TypeError, match=f"indices must be int32 or int64, got {dtype}"):
        call(indices=view("indices", (4,), dtype))


@pytest.mark.parametrize(("dtype", "width", "row_bytes"), [("int8", 6, 6), ("float16", 3, 6), ("int8", 1, 1)])
def test_rows_are_whole_words(dtype, width, row_bytes):
    arrays = {name: view(name, (4 if name in "kv" else 64, width), dtype) for name in ("k", "v", "k_cache", "v_cache")}
    with pytest.raises(ValueError, match=rf"rows of k must be a multiple of 4 bytes.* got {row_bytes} bytes"):
        call(**arrays)


@pytest.mark.parametrize("batch", [0, 4])
def test_width_zero(batch):
    with pytest.raises(ValueError, match="rows of k must hold at least 4 bytes, got 0"):
        call(batch, width=0)


# Splits and limits.


@pytest.mark.parametrize(
    ("num_split", "message"), [(3, "one of 0, 1, 2, 4, got 3"), (-1, "got -1"), (4, "num_split=4 .* 256 bytes")]
)
def test_split_values(num_split, message):
    with pytest.raises(ValueError, match=message):
        call(num_split=num_split)


@pytest.mark.parametrize("name", ["num_split", "size_limit"])
@pytest.mark.parametrize("value", [True, False, np.True_, 1.0, "1", [1]])
def test_integers_only(name, value):
    with pytest.raises(TypeError, match=f"{name} must be an integer, got "):
        call(**{name: value})


def test_none_is_a_limit_but_no_split():
    assert call(size_limit=None).arguments[11] == 64
    with pytest.raises(TypeError, match="num_split must be an integer, got NoneType"):
        call(num_split=None)


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint16])
def test_numpy_integers_are_integers(kind):
    request = call(num_split=kind(1), size_limit=kind(40))
    assert (request.key.num_split, request.arguments[11]) == (1, 40)
    assert type(request.arguments[11]) is int


@pytest.mark.parametrize(("limit", "bound"), [(0, 32), (None, 32), (1, 1), (31, 31), (32, 32)])
def test_limit_is_at_most_the_smaller_cache(limit, bound):
    smaller = {"v_cache": view("v_cache", (32, 128))}
    assert call(size_limit=limit, **smaller).arguments[11] == bound


@pytest.mark.parametrize("limit", [33, 64, 100, 2**63])
def test_limit_above_a_cache_is_refused(limit):
    with pytest.raises(ValueError, match=f"got {limit} with 64 rows in k_cache and 32 in v_cache"):
        call(size_limit=limit, v_cache=view("v_cache", (32, 128)))


def test_negative_limit():
    with pytest.raises(ValueError, match="size_limit must not be negative, got -1"):
        call(size_limit=-1)


# Empty batches and empty caches.


def test_empty_batch_never_looks_at_pointers_and_strides():
    odd = {
        "k": view("k", (0, 128), address=0, strides=(3, 5)),
        "v": view("v", (0, 128), address=1, strides=(-7, 0)),
        "k_cache": view("k_cache", (64, 128), address=2, pitch=0),
        "v_cache": view("v_cache", (64, 128), address=0),
        "indices": view("indices", (0,), "int64", address=3, strides=(5,)),
    }
    assert call(**odd) is None
    assert call(0, slots=0) is None


def test_empty_batch_is_checked_for_kind():
    with pytest.raises(TypeError, match="k and k_cache"):
        call(0, k=view("k", (0, 128), "bfloat16"))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_batch_needs_slots(name):
    with pytest.raises(ValueError, match=f"{name} has 0 rows, but the batch has 4"):
        call(**{name: view(name, (0, 128))})


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_read_only_cache(name):
    with pytest.raises(ValueError, match=f"{name} must be writable"):
        call(**{name: view(name, (64, 128), readonly=True)})


@pytest.mark.parametrize("name", ["k", "v"])
def test_read_only_source(name):
    assert call(**{name: view(name, (4, 128), readonly=True)}).batch == 4


@pytest.mark.parametrize("name", ["k", "v", "v_cache", "indices"])
def test_one_device(name):
    shape, dtype = ((4,), "int64") if name == "indices" else ((64 if "cache" in name else 4, 128), "float16")
    with pytest.raises(ValueError, match=f"{name} on device 1 and k_cache on device 0"):
        call(**{name: view(name, shape, dtype, device=1)})


# Strides and alignment.


# REPORTS 3: any row pitch for sources; dense rows.
@pytest.mark.parametrize(("pitch", "expected"), [(1280, 1280), (0, 0), (-256, -256), (4, 4), (2**40, 2**40)])
def test_source_pitch(pitch, expected):
    assert call(k=view("k", (4, 128), pitch=pitch)).arguments[5] == expected


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
@pytest.mark.parametrize("inner", [0, -2, 4, 256])
def test_inner_stride(name, inner):
    rows = 64 if "cache" in name else 4
    with pytest.raises(
        ValueError, match=rf"{name} must have dense rows \(inner stride 2 bytes\), got strides \(256, {inner}\)"
    ):
        call(**{name: view(name, (rows, 128), strides=(256, inner))})


def test_stride_of_a_length_one_dimension_is_not_looked_at():
    request = call(
        1, 1, 1,
        k=view("k", (1, 1), "int32", strides=(3, 7)),
        v=view("v", (1, 1), "int32", strides=(-1, 0)),
        k_cache=view("k_cache", (1, 1), "int32", strides=(0, 5)),
        v_cache=view("v_cache", (1, 1), "int32", strides=(1, 9)),
        indices=view("indices", (1,), "int64", strides=(3,)),
    )  # fmt: skip
    assert request.arguments[5:10] == (0, 0, 0, 0, 0)
    assert (request.key.k_alignment, request.key.v_alignment) == (16, 16)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("pitch", [0, 4, 252, -252])
def test_cache_rows_must_not_overlap(name, pitch):
    with pytest.raises(
        ValueError, match=rf"rows of {name} must not overlap, got 256 bytes per row {pitch} bytes apart"
    ):
        call(**{name: view(name, (64, 128), pitch=pitch)})


@pytest.mark.parametrize("pitch", [256, -256, 260, -520])
def test_cache_rows_may_touch_or_run_backwards(pitch):
    assert call(k_cache=view("k_cache", (64, 128), pitch=pitch)).arguments[7] == pitch


# By hand: the largest of 16, 8, 4 that divides both addresses and both pitches.
@pytest.mark.parametrize(
    ("address", "pitch", "cache_address", "cache_pitch", "alignment"),
    [
        (0x10000, 256, 0x30000, 256, 16),
        (0x10008, 256, 0x30000, 256, 8),
        (0x10004, 256, 0x30000, 256, 4),
        (0x10000, 264, 0x30000, 256, 8),
        (0x10000, 260, 0x30000, 256, 4),
        (0x10000, 256, 0x30008, 256, 8),
        (0x10000, 256, 0x3000C, 256, 4),
        (0x10000, 256, 0x30000, 520, 8),
        (0x10000, 256, 0x30000, 516, 4),
        (0x10000, -264, 0x30000, -272, 8),
        (0x10000, -260, 0x30000, 272, 4),
        (0x10000, 0, 0x30000, 256, 16),
    ],
)
def test_alignment_by_hand(address, pitch, cache_address, cache_pitch, alignment):
    request = call(
        k=view("k", (4, 128), address=address, pitch=pitch),
        k_cache=view("k_cache", (64, 128), address=cache_address, pitch=cache_pitch),
    )
    assert (request.key.k_alignment, request.key.v_alignment) == (alignment, 16)
    request = call(
        v=view("v", (4, 128), address=address, pitch=pitch),
        v_cache=view("v_cache", (64, 128), address=cache_address, pitch=cache_pitch),
    )
    assert (request.key.k_alignment, request.key.v_alignment) == (16, alignment)


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
@pytest.mark.parametrize("off", [1, 2, 6])
def test_addresses_below_four_bytes(name, off):
    rows = 64 if "cache" in name else 4
    address = BASE[name] + off
    with pytest.raises(ValueError, match=rf"{name} must be aligned to 4 bytes, got address {address:#x}"):
        call(**{name: view(name, (rows, 128), address=address)})


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
@pytest.mark.parametrize("pitch", [258, -258, 301])
def test_pitches_below_four_bytes(name, pitch):
    rows = 64 if "cache" in name else 4
    with pytest.raises(ValueError, match=rf"{name} must have rows a multiple of 4 bytes apart, got {pitch} bytes"):
        call(**{name: view(name, (rows, 128), pitch=pitch)})


@pytest.mark.parametrize(("dtype", "address"), [("int64", 0x50004), ("int32", 0x50002)])
def test_index_address(dtype, address):
    with pytest.raises(ValueError, match=f"indices must be aligned to . bytes, got address {address:#x}"):
        call(indices=view("indices", (4,), dtype, address=address))


@pytest.mark.parametrize(("dtype", "stride"), [("int64", 12), ("int32", 6), ("int64", -4)])
def test_index_stride_is_whole_elements(dtype, stride):
    with pytest.raises(ValueError, match=f"indices must have a stride of whole elements .* got {stride} bytes"):
        call(indices=view("indices", (4,), dtype, strides=(stride,)))


@pytest.mark.parametrize("stride", [0, -8, 16, 2**40])
def test_index_stride_is_free(stride):
    assert call(indices=view("indices", (4,), "int64", strides=(stride,))).arguments[9] == stride


def test_batch_is_bounded():
    huge = 2**31
    views = {name: view(name, (huge, 128), pitch=0) for name in ("k", "v")}
    with pytest.raises(ValueError, match=rf"at most {huge - 1} rows, got {huge}"):
        call(**views, indices=view("indices", (huge,), "int32", strides=(0,)))


def test_order_kind_before_value():
    """A call with several faults reports the first of the documented order: types, shapes, limits, devices, strides."""
    faults = {
        "k": view("k", (5, 128), "bfloat16", address=1),
        "k_cache": view("k_cache", (64, 128), pitch=0, device=1),
    }
    with pytest.raises(TypeError, match="k and k_cache"):
        call(**faults, size_limit=-1)
    faults["k"] = view("k", (5, 128), address=1)
    with pytest.raises(ValueError, match="k and indices"):
        call(**faults, size_limit=-1)
    faults["k"] = view("k", (4, 128), address=1)
    with pytest.raises(ValueError, match="size_limit"):
        call(**faults, size_limit=-1)
    with pytest.raises(ValueError, match="all arrays must be on one GPU"):
        call(**faults)


def test_same_facts_at_another_address_are_checked_again():
    """Checks are remembered by shape; the addresses must not be."""
    assert call().key.k_alignment == 16
    assert call(k=view("k", (4, 128), address=0x10004)).key.k_alignment == 4
    with pytest.raises(ValueError, match="k must be aligned"):
        call(k=view("k", (4, 128), address=0x10002))


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "indices"])
@pytest.mark.parametrize("address", [0, -16, 2**64])
def test_arrays_without_memory_are_refused(name, address):
    """A torch storage that was resized to nothing keeps its shape; its address is null."""
    valid = call_views()
    with pytest.raises(ValueError, match=f"{name} must have memory"):
        call(**{name: valid[name]._replace(address=address)})


def test_equal_names_of_other_sizes_are_other_types():
    valid = call_views()
    wide = valid["k"]._replace(facts=valid["k"].facts._replace(itemsize=4, strides=(512, 4)))
    with pytest.raises(TypeError, match="k and k_cache must have one dtype"):
        call(k=wide)
