"""A drop-in for `store_cache` and `can_use_store_cache`, which SGLang's KV pool calls at every layer.

Names, arguments and meanings are those of SGLang's kvcache module (`sglang.jit_kernel.kvcache`, later
`sglang.kernels.ops.kvcache.kvcache`). SGLang's memory pool imports both by name, so they are replaced there:

    from sglang.srt.mem_cache import memory_pool
    import numba_kvcache.sglang as kvcache

    memory_pool.store_cache, memory_pool.can_use_store_cache = kvcache.store_cache, kvcache.can_use_store_cache

in every process that holds a pool, before it serves. What differs from SGLang's own:

- `reserved_skip_index` is off (-1) by default. SGLang from mid-2026 on has 0 there, and its pool does not pass it: with
  such a version, put `functools.partial(kvcache.store_cache, reserved_skip_index=0)` in its place. Else rows aimed at
  slot 0 are written into it.
- A row aimed at the reserved slot is skipped before the bounds assert, so that slot may lie outside the bounds.
- More is refused: a `size_limit` above the rows of either cache, rows of a cache that overlap.
- Nothing is compiled by `can_use_store_cache`; `numba_kvcache.warmup` does that.
- A default that somebody writes into `store_cache.__kwdefaults__` is not seen; use functools.partial as above.

An eager call takes the fast road itself (native.py), and costs what `store_kvcache` costs. Under torch.compile the call
is traced (numba_kvcache.torch).
"""

import functools
import logging
import math
from typing import Any

import torch

from . import fast_road, native
from .layout import integer, plan_store
from .torch import store_kvcache

__all__ = ["can_use_store_cache", "store_cache"]

_logger = logging.getLogger(__name__)


def store_cache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    indices: Any,
    *,
    row_bytes: int = 0,
    v_row_bytes: int = 0,
    num_split: int = 0,
    size_limit: int = 0,
    reserved_skip_index: int = -1,
) -> None:
    """Write row i of `k` and `v` into slot `indices[i]` of two caches, in one launch.

    Parameters
    ----------
    k, v : torch.Tensor, shape (B, D) and (B, Dv), or (B, H, D) and (B, Hv, Dv)
        New keys and values, rows dense.
    k_cache, v_cache : torch.Tensor, shape (N, *row) and (Nv, *row), each with the row of its source
        Slots, or pages of them as in numba_kvcache.store_kvcache; of k's dtype.
    indices : torch.Tensor, shape (B,), int32 or int64
        The slot of each row.
    row_bytes, v_row_bytes : int
        Bytes of a row of `k` and of `v`, heads and all, or 0. They say what the tensors say already; there is no
        storing a part of a row.
    num_split : int
        1, 2 or 4 warps per row; 0 or less lets the package choose.
    size_limit : int
        The bound on slots; 0 or less means the rows of the smaller cache.
    reserved_skip_index : int
        Rows aimed at this slot are not written; negative: every row is.

    Raises
    ------
    ValueError
        `row_bytes` or `v_row_bytes` that is not the tensor's.
    TypeError, ValueError, RuntimeError
        As numba_kvcache.store_kvcache.
    """
    if row_bytes is not None:
        _check_row_bytes("row_bytes", row_bytes, "k", k)
    if v_row_bytes is not None:
        _check_row_bytes("v_row_bytes", v_row_bytes, "v", v)
    num_split = max(0, _plain("num_split", num_split))
    size_limit = max(0, _plain("size_limit", size_limit))
    reserved_skip_index = _plain("reserved_skip_index", reserved_skip_index)
    if reserved_skip_index < 0:
        store_kvcache(k, v, k_cache, v_cache, indices, num_split, size_limit)
    else:
        store_kvcache(k, v, k_cache, v_cache, indices, num_split, size_limit, skip_index=reserved_skip_index)


fast_road.attach(native.STORE_CACHE, store_cache)


def _check_row_bytes(name: str, row_bytes: int, owner: str, tensor: Any) -> None:
    """ValueError unless a row, heads and all, has `row_bytes` bytes, or that is 0. What has no rows, others refuse."""
    row_bytes = _plain(name, row_bytes)
    if row_bytes == 0 or getattr(tensor, "shape", None) is None:
        return
    whole = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    if row_bytes != whole:
        raise ValueError(
            f"{name} must be the bytes of a row of {owner}, {whole}, or 0, got {row_bytes}; "
            "to store a part of each row, slice rows and cache alike"
        )


def _plain(name: str, value: Any) -> int:
    """`integer`, which Dynamo cannot trace, for what is no plain int."""
    return value if type(value) is int else integer(name, value)


@torch.compiler.assume_constant_result
def can_use_store_cache(k_row_bytes: int, v_row_bytes: int = 0, num_split: int = 0) -> bool:
    """Whether rows of these widths can be stored; if not, a warning says why, once per width.

    Parameters
    ----------
    k_row_bytes, v_row_bytes : int
        Bytes of one row of K and of V; `v_row_bytes=0` means as K.
    num_split : int
        As for store_cache.

    Raises
    ------
    TypeError
        An argument that is no integer.
    """
    return _can_use(k_row_bytes, v_row_bytes, num_split)


# SGLang asks before every store. (Apart from the function, because Dynamo warns of a cache that it sees.)
@functools.lru_cache(maxsize=None, typed=True)
def _can_use(k_row_bytes: int, v_row_bytes: int, num_split: int) -> bool:
    widths = integer("k_row_bytes", k_row_bytes), integer("v_row_bytes", v_row_bytes)
    try:
        plan_store(*widths, max(0, integer("num_split", num_split)))
    except ValueError as error:
        _logger.warning(
            "store_cache cannot serve k_row_bytes=%d v_row_bytes=%d num_split=%d: %s", *widths, num_split, error
        )
        return False
    return True
