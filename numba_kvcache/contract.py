"""What a call must be: every public check, in one pure function of five views.

Symbols, the same in the whole package: B rows in the batch, H heads of D elements, or just D elements, per row of K;
Hv and Dv per row of V; N and Nv slots in the caches, or P pages of S slots. A failed check names the argument, the
rule, what was given, and where it helps what to do. TypeError is for the wrong kind, ValueError for the wrong value.
Nothing has been written when one is raised.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from .arrays import ArrayFacts, View
from .layout import INDEX_BITS, check_row_bytes, check_split, integer

__all__ = [
    "MAX_BATCH",
    "ROW_ARRAYS",
    "Arrangement",
    "PlanKey",
    "Rows",
    "as_rows",
    "check_addresses",
    "check_arrangement",
    "check_index_type",
    "check_shapes",
    "check_skip_index",
    "check_store",
]

# The kernel counts groups of threads in 32 bits, and the grid has as many blocks; 2**31 rows of one word are 8 GiB.
MAX_BATCH = 2**31 - 1

ROW_ARRAYS = ("k", "v", "k_cache", "v_cache")


class PlanKey(NamedTuple):
    """What decides which kernel a call launches."""

    k_row_bytes: int
    v_row_bytes: int
    k_alignment: int
    v_alignment: int
    num_split: int
    index_bits: int
    device: int
    skipping: bool


def check_store(
    k: View,  # (B, D) or (B, H, D)
    v: View,  # (B, Dv) or (B, Hv, Dv)
    k_cache: View,  # (N, *row) or (P, S, *row), with the row of k
    v_cache: View,  # (Nv, *row) or (Pv, Sv, *row), with the row of v
    indices: View,  # (B,) int32 or int64
    num_split: Any = 0,
    size_limit: Any = 0,
    skip_index: Any = None,
) -> tuple[int, PlanKey, tuple[int, ...]] | None:
    """The batch, what decides on the kernel, and what the kernel takes; or None for an empty batch.

    The kernel takes five addresses, five strides in bytes, batch, size limit, skip index.

    Raises
    ------
    TypeError
        dtypes that differ, indices that are not int32 or int64, `num_split`, `size_limit` or `skip_index` that are no
        integers.
    ValueError
        Shapes, strides, alignment, devices, split, limit, skip index, or a read-only cache.
    """
    if type(num_split) is not int:
        num_split = integer("num_split", num_split)
    if type(size_limit) is not int:
        size_limit = integer("size_limit", 0 if size_limit is None else size_limit)
    if skip_index is not None and type(skip_index) is not int:
        skip_index = integer("skip_index", skip_index)
    (k_at, k_facts), (v_at, v_facts), (k_cache_at, k_cache_facts), (v_cache_at, v_cache_facts) = k, v, k_cache, v_cache
    indices_at, indices_facts = indices
    facts = _check_facts(
        k_facts, v_facts, k_cache_facts, v_cache_facts, indices_facts, num_split, size_limit, skip_index
    )
    if facts is None:
        return None
    all_bits = k_at | v_at | k_cache_at | v_cache_at | indices_at
    if not (k_at and v_at and k_cache_at and v_cache_at and indices_at and 0 < all_bits < 2**64):
        _refuse_addresses((k, v, k_cache, v_cache, indices))
    if indices_at & facts.index_mask:
        _check_index_address(indices)
    k_bits = k_at | k_cache_at | facts.k_bits
    v_bits = v_at | v_cache_at | facts.v_bits
    if (k_bits | v_bits) & 3:
        _refuse_alignment((k, v, k_cache, v_cache), facts.arguments[: len(ROW_ARRAYS)])
    bits, device, skipping = INDEX_BITS[indices_facts.dtype], k_cache_facts.device, skip_index is not None
    key = PlanKey(*facts.row_bytes, k_bits & -k_bits, v_bits & -v_bits, num_split, bits, device, skipping)
    return facts.batch, key, (k_at, v_at, k_cache_at, v_cache_at, indices_at, *facts.arguments)


class _Facts(NamedTuple):
    """What a call comes to before its addresses are known."""

    batch: int
    row_bytes: tuple[int, int]
    k_bits: int  # the row strides of source and cache, and 16: their lowest bit bounds the alignment
    v_bits: int
    index_mask: int
    arguments: tuple[int, ...]  # the kernel's, after the addresses: the strides of the four row arrays first


@dataclass(frozen=True)
class Rows:
    """An array as rows, which is all that the kernel knows of it; the slots of all pages of a cache are its rows.

    Attributes
    ----------
    count, row_bytes : int
        How many rows, of how many bytes.
    dense : bool
        Whether the elements of a row follow one another without gaps, in C order.
    stride : int or None
        Bytes from row to row: 0 where there is one row, None where no one stride leads through all of them.
    """

    count: int
    row_bytes: int
    dense: bool
    stride: int | None


def as_rows(facts: ArrayFacts, row_dimensions: int) -> Rows:
    """The array with its last `row_dimensions` dimensions as one row each, and those before as one row after another.

    A stride of a dimension of length 1 is never looked at.
    """
    split = len(facts.shape) - row_dimensions
    elements, row_shape = math.prod(facts.shape[split:]), facts.shape[split:]
    dense = elements <= 1 or _one_stride(row_shape, facts.strides[split:]) == facts.itemsize
    stride = _one_stride(facts.shape[:split], facts.strides[:split])
    return Rows(math.prod(facts.shape[:split]), elements * facts.itemsize, dense, stride)


def _one_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The stride that leads through these dimensions, in C order, as if they were one.

    0 where they hold one element or none, None where no one stride does.
    """
    if 0 in shape:
        return 0
    stride, count = 0, 1  # of the dimensions behind
    for extent, step in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            continue
        if count == 1:
            stride = step
        elif step != count * stride:
            return None
        count *= extent
    return stride


# Decoding makes the same call over and over with other addresses, so what does not depend on them is remembered; asking
# the memory costs 1 to 2 us (host of an H200).
@functools.lru_cache(maxsize=4096)
def _check_facts(
    k_facts: ArrayFacts,
    v_facts: ArrayFacts,
    k_cache_facts: ArrayFacts,
    v_cache_facts: ArrayFacts,
    indices: ArrayFacts,
    num_split: int,
    limit: int,
    skip_index: int | None,
) -> _Facts | None:
    """All checks that need no address; None for an empty batch."""
    all_facts = (k_facts, v_facts, k_cache_facts, v_cache_facts)
    arrays = dict(zip(ROW_ARRAYS, all_facts, strict=True))
    check_split(num_split)
    if skip_index is not None:
        check_skip_index(skip_index)
    _check_dtypes(arrays, indices)
    rows = check_shapes(arrays, indices)
    row_bytes = rows["k"].row_bytes, rows["v"].row_bytes
    for name, width in zip(("k", "v"), row_bytes, strict=True):
        check_row_bytes(name, width, num_split)
    arrangement = check_arrangement(arrays, rows, indices, limit)
    if arrangement is None:
        return None
    batch, strides, index_stride, limit = arrangement
    k_bits, v_bits = strides[0] | strides[2] | 16, strides[1] | strides[3] | 16
    arguments = (*strides, index_stride, batch, limit, skip_index or 0)
    return _Facts(batch, row_bytes, k_bits, v_bits, indices.itemsize - 1, arguments)


class Arrangement(NamedTuple):
    """Where the rows of a non-empty call lie: strides in bytes, of the four row arrays and of the indices."""

    batch: int
    strides: tuple[int, ...]
    index_stride: int
    size_limit: int


def check_arrangement(
    arrays: dict[str, ArrayFacts], rows: dict[str, Rows], indices: ArrayFacts, limit: int
) -> Arrangement | None:
    """Check all that needs neither dtypes nor addresses, of what check_shapes has passed; None for an empty batch."""
    for name in ("k_cache", "v_cache"):
        if arrays[name].readonly:
            raise ValueError(f"{name} must be writable, got a read-only array (JAX arrays never change)")
    limit = _size_limit(limit, rows["k_cache"].count, rows["v_cache"].count)
    batch = indices.shape[0]
    if batch == 0:
        return None
    if batch > MAX_BATCH:
        raise ValueError(f"a batch may have at most {MAX_BATCH} rows, got {batch}; store it in pieces")
    for name in ("k_cache", "v_cache"):
        if rows[name].count == 0:
            raise ValueError(f"{name} has 0 rows, but the batch has {batch}: there is no slot to write")
    _check_devices(arrays, indices)
    strides = tuple(_row_stride(name, arrays[name], rows[name]) for name in ROW_ARRAYS)
    for name, stride in zip(ROW_ARRAYS[2:], strides[2:], strict=True):
        _check_rows_apart(name, rows[name], stride)
    return Arrangement(batch, strides, _index_stride(indices), limit)


def _check_dtypes(arrays: dict[str, ArrayFacts], indices: ArrayFacts) -> None:
    dtype = arrays["k_cache"].dtype
    for name, facts in arrays.items():
        if (facts.dtype, facts.itemsize) != (dtype, arrays["k_cache"].itemsize):
            raise TypeError(
                f"{name} and k_cache must have one dtype, got {facts.dtype} and {dtype}; rows are moved bit for bit, "
                "so convert or view them alike first"
            )
    check_index_type(indices)


def check_index_type(indices: ArrayFacts) -> None:
    """Raise TypeError unless the kernel can read these indices."""
    if indices.dtype not in INDEX_BITS:
        raise TypeError(f"indices must be {' or '.join(INDEX_BITS)}, got {indices.dtype}")


def check_skip_index(skip_index: int) -> None:
    """Raise ValueError unless the kernel can compare an index with it."""
    if not -(2**63) <= skip_index < 2**63:
        raise ValueError(f"skip_index must be within int64, as indices are, got {skip_index}; None skips no row")


def check_shapes(arrays: dict[str, ArrayFacts], indices: ArrayFacts) -> dict[str, Rows]:
    """The row arrays as rows; ValueError unless rows, caches and indices fit one another."""
    for name in ("k", "v"):
        if len(arrays[name].shape) not in (2, 3):
            raise ValueError(
                f"{name} must have 2 dimensions (B, D) or 3 (B, H, D), got shape {arrays[name].shape}; "
                "view all tokens as one dimension"
            )
    if len(indices.shape) != 1:
        raise ValueError(f"indices must have 1 dimension (B,), got shape {indices.shape}")
    for name, facts in (*arrays.items(), ("indices", indices)):
        if any(extent < 0 for extent in facts.shape):
            raise ValueError(f"{name} must have no dimension of negative length, got shape {facts.shape}")
    batch = indices.shape[0]
    for name in ("k", "v"):
        count = arrays[name].shape[0]
        if count != batch:
            raise ValueError(
                f"{name} and indices must have one row count B, got {count} rows in {name} and {batch} "
                f"in indices; pass {name if count > batch else 'indices'}[:{min(count, batch)}] to leave padding out"
            )
    for name in ("k", "v"):
        _check_row_shape(name, arrays[name].shape, arrays[f"{name}_cache"].shape)
    row_dimensions = {name: len(arrays[name.removesuffix("_cache")].shape) - 1 for name in ROW_ARRAYS}
    return {name: as_rows(facts, row_dimensions[name]) for name, facts in arrays.items()}


def _check_row_shape(name: str, shape: tuple[int, ...], cache_shape: tuple[int, ...]) -> None:
    row = shape[1:]
    dimensions = len(row) + 1, len(row) + 2
    if len(cache_shape) not in dimensions:
        raise ValueError(
            f"{name}_cache must have {dimensions[0]} dimensions (slots, *row) or {dimensions[1]} (pages, page size, "
            f"*row) with the row {row} of {name}, got shape {cache_shape}; view {name} or {name}_cache like the other"
        )
    cache_row = cache_shape[-len(row) :]
    if row != cache_row:
        raise ValueError(
            f"{name} and {name}_cache must have one row shape, got {row} in {name} {shape} and {cache_row} in "
            f"{name}_cache {cache_shape}, a cache being (slots, *row) or (pages, page size, *row); where the rows hold "
            f"the same elements, view {name} or {name}_cache like the other"
        )


def _size_limit(size_limit: int, k_slots: int, v_slots: int) -> int:
    slots = min(k_slots, v_slots)
    if size_limit < 0:
        raise ValueError(f"size_limit must not be negative, got {size_limit}; 0 or None means all rows of the caches")
    if size_limit > slots:
        raise ValueError(
            f"size_limit must not exceed the caches' rows, got {size_limit} with {k_slots} rows in k_cache and "
            f"{v_slots} in v_cache: it is the bound that keeps writes inside them"
        )
    # The kernel counts in int64, and an index is less than this. (More rows are a library's word, as such strides are.)
    return min(size_limit or slots, 2**63 - 1)


def _check_devices(arrays: dict[str, ArrayFacts], indices: ArrayFacts) -> None:
    device = arrays["k_cache"].device
    for name, facts in (*arrays.items(), ("indices", indices)):
        if facts.device != device:
            raise ValueError(
                f"all arrays must be on one GPU, got {name} on device {facts.device} and k_cache on device {device}"
            )


def _row_stride(name: str, facts: ArrayFacts, rows: Rows) -> int:
    given = f"got strides {facts.strides} bytes with shape {facts.shape}"
    if not rows.dense:
        raise ValueError(
            f"{name} must have dense rows: the elements of a row must follow one another (C order), {given}; "
            + _cure_of_gaps(name)
        )
    if rows.stride is None:
        raise ValueError(
            f"{name} must have one stride for the slots of all pages (page stride = page size * slot stride), {given}; "
            "where other pages lie between these, pass a view of the whole pool as (slots, *row), and count slots in it"
        )
    return _stride_of_64_bits(name, rows.stride)


def _cure_of_gaps(name: str) -> str:
    if name in ("k", "v"):
        return f"pass a dense copy of it ({name}.contiguous(), say), or a view with dense rows"
    return "a cache whose heads lie outside of its slots, (pages, heads, page size, D), is not served, however viewed"


def _stride_of_64_bits(name: str, stride: int) -> int:
    """The kernel counts in int64. (No memory is as large; a library may report so all the same.)"""
    if not -(2**63) <= stride < 2**63:
        raise ValueError(f"{name} must have strides within int64, got {stride} bytes")
    return stride


def _check_rows_apart(name: str, rows: Rows, stride: int) -> None:
    if rows.count > 1 and abs(stride) < rows.row_bytes:
        raise ValueError(
            f"rows of {name} must not overlap, got {rows.row_bytes} bytes per row {stride} bytes apart: "
            "a store to one slot would change others"
        )


def _index_stride(indices: ArrayFacts) -> int:
    stride = indices.strides[0] if indices.shape[0] > 1 else 0
    if stride % indices.itemsize:
        raise ValueError(f"indices must have a stride of whole elements ({indices.itemsize} bytes), got {stride} bytes")
    return _stride_of_64_bits("indices", stride)


def check_addresses(views: tuple[View, ...], strides: tuple[int, ...]) -> None:
    """Raise ValueError unless all five arrays have memory, on the grid of 4 bytes and of whole indices.

    `strides` are those of the four row arrays. (check_store asks the same at less cost, and names what is wrong by the
    same functions.)
    """
    *rows, indices = views
    _refuse_addresses(views)
    _refuse_alignment(tuple(rows), strides)
    _check_index_address(indices)


def _check_index_address(indices: View) -> None:
    address, facts = indices
    if address % facts.itemsize:
        raise ValueError(f"indices must be aligned to {facts.itemsize} bytes, got address {address:#x}")


def _refuse_addresses(views: tuple[View, ...]) -> None:
    for name, (address, facts) in zip((*ROW_ARRAYS, "indices"), views, strict=True):
        if not 0 < address < 2**64:
            raise ValueError(f"{name} must have memory, got address {address:#x} with shape {facts.shape}")


def _refuse_alignment(views: tuple[View, ...], strides: tuple[int, ...]) -> None:
    for name, (address, _), stride in zip(ROW_ARRAYS, views, strides, strict=True):
        if address % 4:
            raise ValueError(f"{name} must be aligned to 4 bytes, got address {address:#x}")
        if stride % 4:
            raise ValueError(f"{name} must have rows a multiple of 4 bytes apart, got {stride} bytes")
