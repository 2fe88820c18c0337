"""What a call must be: every public check, in one pure function of five views.

Symbols, the same in the whole package: B rows in the batch, D and Dv elements per row of K and of V, N and Nv rows in
the caches. A failed check names the argument, the rule, what was given, and where it helps what to do. TypeError is for
the wrong kind, ValueError for the wrong value. Nothing has been written when one is raised.
"""

import functools
from typing import Any, NamedTuple

from .arrays import ArrayFacts, ArrayView
from .layout import INDEX_BITS, check_row_bytes, check_split, integer

__all__ = [
    "MAX_BATCH",
    "ROW_ARRAYS",
    "Arrangement",
    "PlanKey",
    "StoreRequest",
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


class StoreRequest(NamedTuple):
    """A checked, non-empty call.

    `arguments` is what the kernel takes: five addresses, five strides in bytes, batch, size limit.
    """

    batch: int
    key: PlanKey
    arguments: tuple[int, ...]


def check_store(
    k: ArrayView,  # (B, D)
    v: ArrayView,  # (B, Dv)
    k_cache: ArrayView,  # (N, D)
    v_cache: ArrayView,  # (Nv, Dv)
    indices: ArrayView,  # (B,) int32 or int64
    num_split: Any = 0,
    size_limit: Any = 0,
) -> StoreRequest | None:
    """The request that these arguments make, or None for an empty batch.

    Raises
    ------
    TypeError
        dtypes that differ, indices that are not int32 or int64, `num_split` or `size_limit` that are no integers.
    ValueError
        Shapes, strides, alignment, devices, split, limit, or a read-only cache.
    """
    if type(num_split) is not int:
        num_split = integer("num_split", num_split)
    if type(size_limit) is not int:
        size_limit = integer("size_limit", 0 if size_limit is None else size_limit)
    facts = _check_facts(k.facts, v.facts, k_cache.facts, v_cache.facts, indices.facts, num_split, size_limit)
    if facts is None:
        return None
    k_stride, v_stride, k_cache_stride, v_cache_stride = facts.strides
    addresses = (k.address, v.address, k_cache.address, v_cache.address, indices.address)
    if min(addresses) <= 0 or max(addresses) >= 2**64:
        _refuse_addresses((k, v, k_cache, v_cache, indices))
    if indices.address % indices.facts.itemsize:
        _check_index_address(indices)
    k_bits = k.address | k_cache.address | k_stride | k_cache_stride | 16
    v_bits = v.address | v_cache.address | v_stride | v_cache_stride | 16
    if (k_bits | v_bits) & 3:
        _refuse_alignment((k, v, k_cache, v_cache), facts.strides)
    alignment = (k_bits & -k_bits, v_bits & -v_bits)
    key = facts.keys.get(alignment)
    if key is None:
        k_row_bytes, v_row_bytes = facts.row_bytes
        key = PlanKey(k_row_bytes, v_row_bytes, *alignment, num_split, INDEX_BITS[indices.dtype], k_cache.device)
        facts.keys[alignment] = key
    return StoreRequest(facts.batch, key, (*addresses, *facts.rest))


class _Facts(NamedTuple):
    """What a call comes to before its addresses are known."""

    batch: int
    row_bytes: tuple[int, int]
    strides: tuple[int, ...]  # of the four row arrays, in bytes
    rest: tuple[int, ...]  # the kernel's arguments after the addresses
    keys: dict[tuple[int, int], PlanKey]  # by the alignment of K and of V


# Decoding makes the same call over and over with other addresses, so what does not depend on them is remembered; asking
# the memory costs 1 to 2 us (host of an H200).
@functools.lru_cache(maxsize=4096)
def _check_facts(
    k_facts: ArrayFacts,
    v_facts: ArrayFacts,
    k_cache_facts: ArrayFacts,
    v_cache_facts: ArrayFacts,
    indices_facts: ArrayFacts,
    num_split: int,
    limit: int,
) -> _Facts | None:
    """All checks that need no address; None for an empty batch."""
    all_facts = (k_facts, v_facts, k_cache_facts, v_cache_facts)
    rows = {name: ArrayView(0, facts) for name, facts in zip(ROW_ARRAYS, all_facts, strict=True)}
    indices = ArrayView(0, indices_facts)
    check_split(num_split)
    _check_dtypes(rows, indices)
    check_shapes(rows, indices)
    row_bytes = rows["k"].shape[1] * rows["k"].itemsize, rows["v"].shape[1] * rows["v"].itemsize
    for name, width in zip(("k", "v"), row_bytes, strict=True):
        check_row_bytes(name, width, num_split)
    arrangement = check_arrangement(rows, indices, limit)
    if arrangement is None:
        return None
    batch, strides, index_stride, limit = arrangement
    return _Facts(batch, row_bytes, strides, (*strides, index_stride, batch, limit), {})


class Arrangement(NamedTuple):
    """Where the rows of a non-empty call lie: strides in bytes, of the four row arrays and of the indices."""

    batch: int
    strides: tuple[int, ...]
    index_stride: int
    size_limit: int


def check_arrangement(rows: dict[str, ArrayView], indices: ArrayView, limit: int) -> Arrangement | None:
    """Check all that needs neither dtypes nor addresses, of arrays that have passed check_shapes; None: empty batch."""
    for name in ("k_cache", "v_cache"):
        if rows[name].readonly:
            raise ValueError(f"{name} must be writable, got a read-only array")
    limit = _size_limit(limit, rows["k_cache"].shape[0], rows["v_cache"].shape[0])
    batch = indices.shape[0]
    if batch == 0:
        return None
    if batch > MAX_BATCH:
        raise ValueError(f"a batch may have at most {MAX_BATCH} rows, got {batch}; store it in pieces")
    for name in ("k_cache", "v_cache"):
        if rows[name].shape[0] == 0:
            raise ValueError(f"{name} has 0 rows, but the batch has {batch}: there is no slot to write")
    _check_devices(rows, indices)
    strides = tuple(_row_stride(name, view) for name, view in rows.items())
    for name, stride in zip(ROW_ARRAYS[2:], strides[2:], strict=True):
        _check_rows_apart(name, rows[name], stride)
    return Arrangement(batch, strides, _index_stride(indices), limit)


def _check_dtypes(rows: dict[str, ArrayView], indices: ArrayView) -> None:
    dtype = rows["k_cache"].dtype
    for name, view in rows.items():
        if (view.dtype, view.itemsize) != (dtype, rows["k_cache"].itemsize):
            raise TypeError(
                f"{name} and k_cache must have one dtype, got {view.dtype} and {dtype}; rows are moved bit for bit, "
                "so convert or view them alike first"
            )
    check_index_type(indices)


def check_index_type(indices: ArrayView) -> None:
    """Raise TypeError unless the kernel can read these indices."""
    if indices.dtype not in INDEX_BITS:
        raise TypeError(f"indices must be {' or '.join(INDEX_BITS)}, got {indices.dtype}")


def check_skip_index(skip_index: int) -> None:
    """Raise ValueError unless the kernel can compare an index with it."""
    if not -(2**63) <= skip_index < 2**63:
        raise ValueError(f"skip_index must be within int64, as indices are, got {skip_index}; None skips no row")


def check_shapes(rows: dict[str, ArrayView], indices: ArrayView) -> None:
    """Raise ValueError unless rows, caches and indices fit one another."""
    for name, view in rows.items():
        if len(view.shape) != 2:
            raise ValueError(
                f"{name} must have 2 dimensions (rows, elements of a row), got shape {view.shape}; "
                "view heads, and pages of slots, as one dimension each"
            )
    if len(indices.shape) != 1:
        raise ValueError(f"indices must have 1 dimension (B,), got shape {indices.shape}")
    batch = indices.shape[0]
    for name in ("k", "v"):
        if rows[name].shape[0] != batch:
            raise ValueError(
                f"{name} and indices must have one row count B, got {rows[name].shape[0]} rows in {name} and {batch} "
                f"in indices; pass {name if rows[name].shape[0] > batch else 'indices'}"
                f"[:{min(rows[name].shape[0], batch)}] to leave padding out"
            )
    for name in ("k", "v"):
        width, cache_width = rows[name].shape[1], rows[f"{name}_cache"].shape[1]
        if width != cache_width:
            raise ValueError(f"{name} and {name}_cache must have one row width, got {width} and {cache_width} elements")


def _size_limit(size_limit: int, k_slots: int, v_slots: int) -> int:
    slots = min(k_slots, v_slots)
    if size_limit < 0:
        raise ValueError(f"size_limit must not be negative, got {size_limit}; 0 or None means all rows of the caches")
    if size_limit > slots:
        raise ValueError(
            f"size_limit must not exceed the caches' rows, got {size_limit} with {k_slots} rows in k_cache and "
            f"{v_slots} in v_cache: it is the bound that keeps writes inside them"
        )
    return size_limit or slots


def _check_devices(rows: dict[str, ArrayView], indices: ArrayView) -> None:
    device = rows["k_cache"].device
    for name, view in (*rows.items(), ("indices", indices)):
        if view.device != device:
            raise ValueError(
                f"all arrays must be on one GPU, got {name} on device {view.device} and k_cache on device {device}"
            )


def _row_stride(name: str, view: ArrayView) -> int:
    """Bytes from row to row; 0 where there is one row, since such a stride means nothing."""
    if view.shape[1] > 1 and view.strides[1] != view.itemsize:
        raise ValueError(
            f"{name} must have dense rows (inner stride {view.itemsize} bytes), got strides {view.strides} bytes"
        )
    return view.strides[0] if view.shape[0] > 1 else 0


def _check_rows_apart(name: str, view: ArrayView, stride: int) -> None:
    row_bytes = view.shape[1] * view.itemsize
    if view.shape[0] > 1 and abs(stride) < row_bytes:
        raise ValueError(
            f"rows of {name} must not overlap, got {row_bytes} bytes per row {stride} bytes apart: "
            "a store to one slot would change others"
        )


def _index_stride(indices: ArrayView) -> int:
    stride = indices.strides[0] if indices.shape[0] > 1 else 0
    if stride % indices.itemsize:
        raise ValueError(f"indices must have a stride of whole elements ({indices.itemsize} bytes), got {stride} bytes")
    return stride


def check_addresses(views: tuple[ArrayView, ...], strides: tuple[int, ...]) -> None:
    """Raise ValueError unless all five arrays have memory, on the grid of 4 bytes and of whole indices.

    `strides` are those of the four row arrays. (check_store asks the same at less cost, and names what is wrong by the
    same functions.)
    """
    *rows, indices = views
    _refuse_addresses(views)
    _refuse_alignment(tuple(rows), strides)
    _check_index_address(indices)


def _check_index_address(indices: ArrayView) -> None:
    if indices.address % indices.facts.itemsize:
        raise ValueError(f"indices must be aligned to {indices.itemsize} bytes, got address {indices.address:#x}")


def _refuse_addresses(views: tuple[ArrayView, ...]) -> None:
    for name, view in zip((*ROW_ARRAYS, "indices"), views, strict=True):
        if not 0 < view.address < 2**64:
            raise ValueError(f"{name} must have memory, got address {view.address:#x} with shape {view.shape}")


def _refuse_alignment(views: tuple[ArrayView, ...], strides: tuple[int, ...]) -> None:
    for name, view, stride in zip(ROW_ARRAYS, views, strides, strict=True):
        if view.address % 4:
            raise ValueError(f"{name} must be aligned to 4 bytes, got address {view.address:#x}")
        if stride % 4:
            raise ValueError(f"{name} must have rows a multiple of 4 bytes apart, got {stride} bytes")
