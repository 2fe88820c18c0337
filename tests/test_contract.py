"""Every check of contract.py on views made by hand: exception type, argument and value in the message, and order."""

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np
import pytest

from numba_kvcache.arrays import ArrayView, array_facts
from numba_kvcache.contract import PlanKey, Rows, as_rows, check_store

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
    facts = array_facts(shape, strides, dtype, itemsize, device, readonly)
    return ArrayView(BASE[name] if address is None else address, facts)


class Request(NamedTuple):
    """What check_store returns, with names."""

    batch: int
    key: PlanKey
    arguments: tuple[int, ...]


def call_views(batch=4, width=128, slots=64):
    return {
        "k": view("k", (batch, width)), "v": view("v", (batch, width)),
        "k_cache": view("k_cache", (slots, width)), "v_cache": view("v_cache", (slots, width)),
        "indices": view("indices", (batch,), "int64"),
    }  # fmt: skip


def call(batch=4, width=128, slots=64, *, num_split=0, size_limit=0, skip_index=None, **views):
    """A valid call, but for the views given."""
    arrays = call_views(batch, width, slots)
    checked = check_store(**{**arrays, **views}, num_split=num_split, size_limit=size_limit, skip_index=skip_index)
    return checked and Request(*checked)


def test_valid_call_becomes_the_kernels_arguments():
    request = call()
    assert request.batch == 4
    assert request.arguments == (
        0x10000, 0x20000, 0x30000, 0x40000, 0x50000,
        256, 256, 256, 256, 8,
        4, 64, 0,
    )  # fmt: skip
    key = request.key
    assert (key.k_row_bytes, key.v_row_bytes, key.k_alignment, key.v_alignment) == (256, 256, 16, 16)
    assert (key.num_split, key.index_bits, key.device, key.skipping) == (0, 64, 0, False)


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "indices"])
@pytest.mark.parametrize("stride", [2**63, -(2**63) - 8, 2**64 - 65536])
def test_strides_past_64_bits_are_refused(name, stride):
    """CuPy 14.2 exports a negative stride through DLPack as one of 2**64 less."""
    given = call_views()[name]
    strides = (stride, *given.strides[1:])
    with pytest.raises(ValueError, match=rf"{name} must have strides within int64, got {stride} bytes"):
        call(**{name: given._replace(facts=dataclasses.replace(given.facts, strides=strides))})


def test_int32_indices_and_their_stride():
    request = call(indices=view("indices", (4,), "int32", strides=(12,)))
    assert request.key.index_bits == 32
    assert request.arguments[9] == 12


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("shape", [(128,), (2, 2, 1, 128), ()])
def test_sources_have_two_or_three_dimensions(name, shape):
    with pytest.raises(
        ValueError, match=rf"{name} must have 2 dimensions .* or 3 .*\({', '.join(map(str, shape))}.*; view all tokens"
    ):
        call(**{name: view(name, shape, strides=(2,) * len(shape))})


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize("shape", [(128,), (2, 2, 16, 128), ()])
def test_caches_have_a_dimension_for_slots_or_two_for_pages(name, shape):
    with pytest.raises(
        ValueError,
        match=rf"{name} must have 2 dimensions \(slots, \*row\) or 3 .* row \(128,\) of {name[0]}, "
        rf"got shape \({', '.join(map(str, shape))}",
    ):
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
    with pytest.raises(
        ValueError,
        match=rf"{name} and {cache} must have one row shape, got \(128,\) in {name} \(4, 128\) and \(256,\) "
        rf"in {cache} \(64, 256\)",
    ):
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


# Heads and pages. Strides in bytes, of 2-byte elements, worked out by hand.


@pytest.mark.parametrize(
    ("shape", "strides", "row_dimensions", "count", "row_bytes", "dense", "stride"),
    [
        # One token after another.
        ((5, 128), (256, 2), 1, 5, 256, True, 256),
        ((5, 128), (1280, 2), 1, 5, 256, True, 1280),
        ((5, 128), (-256, 2), 1, 5, 256, True, -256),
        ((5, 128), (0, 2), 1, 5, 256, True, 0),
        ((1, 128), (77, 2), 1, 1, 256, True, 0),
        ((5, 1), (7, 99), 1, 5, 2, True, 7),
        ((5, 128), (256, 4), 1, 5, 256, False, 256),
        ((5, 128), (256, 0), 1, 5, 256, False, 256),
        # Heads.
        ((5, 8, 16), (256, 32, 2), 2, 5, 256, True, 256),
        ((5, 8, 16), (768, 32, 2), 2, 5, 256, True, 768),
        ((5, 8, 16), (512, 64, 2), 2, 5, 256, False, 512),
        ((5, 8, 16), (32, 160, 2), 2, 5, 256, False, 32),  # heads outermost
        ((5, 8, 16), (256, 2, 16), 2, 5, 256, False, 256),  # transposed rows
        ((5, 1, 16), (32, -1, 2), 2, 5, 32, True, 32),
        ((5, 8, 1), (16, 2, 99), 2, 5, 16, True, 16),
        ((5, 8, 1), (16, 4, 2), 2, 5, 16, False, 16),
        ((5, 1, 1), (4, 7, 9), 2, 5, 2, True, 4),
        ((1, 8, 16), (3, 32, 2), 2, 1, 256, True, 0),
        # Pages.
        ((3, 4, 128), (1024, 256, 2), 1, 12, 256, True, 256),
        ((3, 4, 128), (2048, 512, 2), 1, 12, 256, True, 512),
        ((3, 4, 128), (-1024, -256, 2), 1, 12, 256, True, -256),
        ((3, 4, 128), (2048, 256, 2), 1, 12, 256, True, None),  # V's pages between
        ((3, 4, 128), (-1024, 256, 2), 1, 12, 256, True, None),
        ((3, 4, 128), (256, 768, 2), 1, 12, 256, True, None),  # pages innermost
        ((1, 4, 128), (-7, 256, 2), 1, 4, 256, True, 256),
        ((3, 1, 128), (1024, -7, 2), 1, 3, 256, True, 1024),
        ((1, 1, 128), (-7, -9, 2), 1, 1, 256, True, 0),
        ((3, 4, 8, 16), (1024, 256, 32, 2), 2, 12, 256, True, 256),
        ((3, 4, 8, 16), (2048, 256, 32, 2), 2, 12, 256, True, None),
        ((3, 4, 8, 16), (1024, 32, 128, 2), 2, 12, 256, False, None),  # heads before slots
        # Nothing.
        ((0, 4, 128), (5, 7, 2), 1, 0, 256, True, 0),
        ((3, 0, 128), (5, 7, 2), 1, 0, 256, True, 0),
        ((3, 4, 0), (5, 7, 9), 1, 12, 0, True, None),
        ((5, 0, 16), (8, 3, 3), 2, 5, 0, True, 8),
    ],
)  # fmt: skip
def test_an_array_as_rows(shape, strides, row_dimensions, count, row_bytes, dense, stride):
    facts = array_facts(shape, strides, "float16", 2, 0, False)
    assert as_rows(facts, row_dimensions) == Rows(count, row_bytes, dense, stride)


def test_rows_are_where_the_elements_are():
    """Against NumPy's own addresses: each row's elements, one after another from count and stride alone."""
    rng = np.random.default_rng(1)
    served = 0
    for _ in range(3000):
        row_dimensions, shape = int(rng.integers(1, 3)), tuple(rng.integers(1, 4, rng.integers(2, 5)).tolist())
        if len(shape) not in (row_dimensions + 1, row_dimensions + 2):
            continue
        dense = np.zeros(shape, np.int16).strides
        scale = rng.choice((1, 1, 1, 2, -1), len(shape))
        strides = tuple(int(s * f) for s, f in zip(dense, scale, strict=True))
        rows = as_rows(array_facts(shape, strides, "int16", 2, 0, False), row_dimensions)
        at = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(shape)]
        elements = rows.row_bytes // 2
        steps = [at[i] - at[i - 1] for i in range(1, len(at)) if i % elements]
        assert rows.dense is (set(steps) <= {2})
        starts = at[::elements]
        gaps = {b - a for a, b in itertools.pairwise(starts)}
        assert rows.count == len(starts)
        assert rows.stride == (None if len(gaps) > 1 else gaps.pop() if gaps else 0)
        served += rows.dense and rows.stride is not None
    assert served > 500


def shaped(*, size_limit=0, **changes):
    """A call with heads and pages; `changes` are shapes of dense arrays, or views."""
    shapes = {"k": (4, 8, 16), "k_cache": (16, 4, 8, 16), "v": (4, 2, 64), "v_cache": (64, 2, 64), **changes}
    views = {
        name: shape if isinstance(shape, ArrayView) else view(name, shape, strides=np.zeros(shape, np.int16).strides)
        for name, shape in shapes.items()
    }
    return call(**views, size_limit=size_limit)


def test_heads_and_pages_become_the_same_arguments_as_rows():
    assert shaped() == call()
    assert shaped(k=(4, 128), k_cache=(16, 4, 128), v=(4, 4, 32), v_cache=(1, 64, 4, 32)) == call()


def test_slots_are_counted_across_pages():
    assert shaped(v_cache=(3, 20, 2, 64)).arguments[11] == 60
    assert shaped(size_limit=64).arguments[11] == 64
    with pytest.raises(ValueError, match="got 61 with 64 rows in k_cache and 60 in v_cache"):
        shaped(v_cache=(3, 20, 2, 64), size_limit=61)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        # Equal elements are not equal shapes: which of them are heads must be said.
        ({"k": (4, 128)}, r"k_cache must have 2 dimensions .* or 3 .* row \(128,\) of k, got shape \(16, 4, 8, 16\)"),
        ({"k": (4, 128), "k_cache": (64, 8, 16)}, r"got \(128,\) in k \(4, 128\) and \(16,\) in k_cache \(64, 8, 16\)"),
        ({"k_cache": (64, 128)}, r"k_cache must have 3 dimensions .* or 4 .* row \(8, 16\) of k, got .* \(64, 128\)"),
        ({"k_cache": (16, 4, 128)}, r"got \(8, 16\) in k \(4, 8, 16\) and \(4, 128\) in k_cache \(16, 4, 128\)"),
        ({"k_cache": (16, 4, 16, 8)}, r"got \(8, 16\) in k .* and \(16, 8\) in k_cache"),
        ({"v_cache": (64, 1, 64)}, r"got \(2, 64\) in v .* and \(1, 64\) in v_cache"),
        ({"v_cache": (2, 2, 16, 2, 64)}, r"v_cache must have 3 dimensions .* got shape \(2, 2, 16, 2, 64\)"),
    ],
)  # fmt: skip
def test_row_shapes_must_agree(shapes, message):
    with pytest.raises(ValueError, match=f"{message}.* view [kv] or [kv]_cache like the other"):
        shaped(**shapes)


@pytest.mark.parametrize(
    ("name", "shape", "strides"),
    [
        ("k", (4, 8, 16), (512, 64, 2)), ("k", (4, 8, 16), (32, 128, 2)), ("v", (4, 2, 64), (256, 2, 4)),
        ("k_cache", (16, 4, 8, 16), (2048, 512, 64, 2)), ("k_cache", (16, 4, 8, 16), (1024, 32, 128, 2)),
        ("v_cache", (64, 2, 64), (256, 128, 4)),
    ],
)  # fmt: skip
def test_rows_of_heads_are_dense(name, shape, strides):
    given = ", ".join(map(str, strides))
    with pytest.raises(ValueError, match=rf"{name} must have dense rows: .* got strides \({given}\) bytes with shape"):
        shaped(**{name: view(name, shape, strides=strides)})


def test_gaps_between_heads_are_cured_in_a_source_and_not_served_in_a_cache():
    """The inner stride is right in both: k is ``(4, 8, 32)[..., :16]``, the cache ``(16, 8, 4, 16)`` transposed."""
    with pytest.raises(ValueError, match=r"follow one another .* \(512, 64, 2\) .*; pass a dense copy of it \(k\.cont"):
        shaped(k=view("k", (4, 8, 16), strides=(512, 64, 2)))
    with pytest.raises(ValueError, match=r"heads lie outside of its slots, .* is not served"):
        shaped(k_cache=view("k_cache", (16, 4, 8, 16), strides=(1024, 32, 128, 2)))


@pytest.mark.parametrize("strides", [(2048, 256, 32, 2), (-1024, 256, 32, 2), (0, 256, 32, 2), (256, 4096, 32, 2)])
def test_pages_have_one_stride(strides):
    with pytest.raises(
        ValueError,
        match=r"k_cache must have one stride for the slots of all pages .* got strides .* with shape \(16, 4, 8, 16\); "
        r".* whole pool as \(slots, \*row\)",
    ):
        shaped(k_cache=view("k_cache", (16, 4, 8, 16), strides=strides))


def test_pages_with_gaps_between_their_slots():
    request = shaped(k_cache=view("k_cache", (16, 4, 8, 16), strides=(4 * 272, 272, 32, 2)))
    assert request.arguments[7] == 272
    request = shaped(k_cache=view("k_cache", (16, 4, 8, 16), strides=(-1024, -256, 32, 2)))
    assert request.arguments[7] == -256


def test_slots_of_pages_must_not_overlap():
    with pytest.raises(ValueError, match="rows of k_cache must not overlap, got 256 bytes per row 128 bytes apart"):
        shaped(k_cache=view("k_cache", (16, 4, 8, 16), strides=(512, 128, 32, 2)))


@pytest.mark.parametrize("shape", [(0, 4, 8, 16), (16, 0, 8, 16), (0, 8, 16)])
def test_no_page_is_no_slot(shape):
    with pytest.raises(ValueError, match="k_cache has 0 rows, but the batch has 4"):
        shaped(k_cache=shape)


@pytest.mark.parametrize(("k", "k_cache"), [((4, 0, 16), (64, 0, 16)), ((4, 8, 0), (16, 4, 8, 0))])
def test_heads_of_width_zero(k, k_cache):
    with pytest.raises(ValueError, match="rows of k must hold at least 4 bytes, got 0"):
        shaped(k=k, k_cache=k_cache)


def test_empty_batch_of_heads_never_looks_at_strides():
    odd = {
        "k": view("k", (0, 8, 16), address=0, strides=(1, 2, 3)),
        "k_cache": view("k_cache", (16, 4, 8, 16), address=2, strides=(9, 7, 5, 3)),
        "v": view("v", (0, 2, 64), address=0),
        "indices": view("indices", (0,), "int64", address=3, strides=(5,)),
    }
    assert shaped(**odd) is None


# Rows left out.


def test_skip_index_is_a_word_of_the_launch_and_its_being_there_of_the_key():
    plain = call()
    for skip_index in (-1, 0, 5, 63, 64, 2**63 - 1, -(2**63)):
        request = call(skip_index=skip_index)
        assert request.arguments == (*plain.arguments[:12], skip_index)
        assert request.key == plain.key._replace(skipping=True)
    assert call(skip_index=None) == plain


@pytest.mark.parametrize("value", [True, False, np.True_, 1.0, "1", [1]])
def test_skip_index_is_an_integer(value):
    with pytest.raises(TypeError, match="skip_index must be an integer, got "):
        call(skip_index=value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, 2**70])
@pytest.mark.parametrize("batch", [0, 4])
def test_skip_index_has_64_bits(value, batch):
    with pytest.raises(ValueError, match=f"skip_index must be within int64, as indices are, got {value}; None skips"):
        call(batch, skip_index=value)


def test_numpy_integers_skip_as_plain_ones():
    request = call(skip_index=np.int32(-1))
    assert request == call(skip_index=-1)
    assert type(request.arguments[12]) is int


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


@pytest.mark.parametrize("limit", [0, 2**63, 2**80])
def test_a_limit_past_64_bits_is_one_that_the_kernel_can_take(limit):
    """Such rows, one after another, are in no memory, but an array interface may say so."""
    caches = {name: view(name, (2**40, 2**40, 128), strides=(2**48, 256, 2)) for name in ("k_cache", "v_cache")}
    assert call(**caches, size_limit=limit).arguments[11] == 2**63 - 1


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


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache", "indices"])
def test_lengths_are_not_negative(name):
    """Two of them make a positive number of rows."""
    if name == "indices":
        views = {"indices": view("indices", (-4,), "int64")}
        views |= {source: view(source, (-4, 128)) for source in ("k", "v")}
        name = "k"
    elif "cache" in name:
        views = {name: view(name, (-8, -8, 128), strides=(-2048, 256, 2))}
    else:
        views = {name: view(name, (4, -2, -64), strides=(256, -128, 2))}
        views[f"{name}_cache"] = view(f"{name}_cache", (64, -2, -64), strides=(256, -128, 2))
    with pytest.raises(ValueError, match=rf"{name} must have no dimension of negative length, got shape \(.*-"):
        call(**views)


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
        ValueError,
        match=rf"{name} must have dense rows: the elements of a row must follow one another \(C order\), got strides "
        rf"\(256, {inner}\)",
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
    wide = valid["k"]._replace(facts=dataclasses.replace(valid["k"].facts, itemsize=4, strides=(512, 4)))
    with pytest.raises(TypeError, match="k and k_cache must have one dtype"):
        call(k=wide)
