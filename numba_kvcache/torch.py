"""torch.compile: once this module is imported, compiled functions may call `store_kvcache`.

    import numba_kvcache.torch
    from numba_kvcache import store_kvcache

Four things are registered with torch:

1. the op `numba_kvcache::store_kvcache`, which says what is written and runs `store_kvcache`;
2. with Dynamo, that a call of `store_kvcache` is traced as a call of the op. Dynamo is told of the function object, so
   an eager call is the plain call, at no added cost: the op's own price is never paid outside a compiled graph;
3. with Dynamo, that a call of `store_kvcache_fp8` breaks the graph: it has no op yet;
4. with functionalisation, by which op caches that are views are written (`_functionalize`).

`store_kvcache` here is `numba_kvcache.store_kvcache` itself. `torch.export` and `make_fx` do not trace through Dynamo:
call `torch.ops.numba_kvcache.store_kvcache` there. It takes what `store_kvcache` takes, but for `stream`, and for None
as `size_limit`: 0 means the rows of the smaller cache.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from .dispatch import store_kvcache
from .quantised import store_kvcache_fp8

__all__ = ["store_kvcache"]

_OPTIONS = "SymInt num_split=0, SymInt size_limit=0, *, SymInt? skip_index=None) -> ()"


@torch.library.custom_op(
    "numba_kvcache::store_kvcache",
    mutates_args=("k_cache", "v_cache"),
    schema=f"(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices, {_OPTIONS}",
)
def _store_op(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    indices: Any,
    num_split: int = 0,
    size_limit: int = 0,
    *,
    skip_index: int | None = None,
) -> None:
    store_kvcache(k, v, k_cache, v_cache, indices, num_split, size_limit, skip_index=skip_index)


# The signature of store_kvcache, which tests compare; torch's own comparison would refuse an import over it.
@torch.compiler.substitute_in_graph(store_kvcache, skip_signature_check=True)
def _traced(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    indices: Any,
    num_split: int = 0,
    size_limit: int | None = 0,
    *,
    stream: Any = None,
    skip_index: int | None = None,
) -> None:
    if stream is not None:
        raise ValueError("stream must be None under torch.compile: a compiled graph runs on torch's current stream")
    limit = 0 if size_limit is None else size_limit
    torch.ops.numba_kvcache.store_kvcache(k, v, k_cache, v_cache, indices, num_split, limit, skip_index=skip_index)


def _leave_untraced(function: Any) -> None:
    """Keep Dynamo out of a real call, e.g. behind a graph break: it would trace every frame of the Python road."""
    with contextlib.suppress(ImportError):  # no public name; torch before 2.7 has none at all
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))


_leave_untraced(store_kvcache)
_leave_untraced(store_kvcache_fp8)


@torch.compiler.substitute_in_graph(store_kvcache_fp8, skip_signature_check=True)
def _untraced_fp8(*arguments: Any, **options: Any) -> None:
    """Traced in the place of a call, which then breaks the graph: Dynamo would trace the Python road until it fails."""
    raise NotImplementedError("store_kvcache_fp8 breaks the graph: it has no op for compiled graphs yet")


# ----------------------------------------------------------------------------------------------------------------------
# Caches that are views. Left to torch 2.11, an op that writes a view is given `as_strided` of the view's base, or a
# clone of it. Inductor counts the offsets of both from the start of the storage, but starts at the graph's input, so
# for an input that has an offset itself (a layer of a pool) memory past its end is read and written (pytorch issues
# 139628 and 198068). So in the graph the bases are written, and the views are taken when the op runs.

_WRITE_VIEWS = "numba_kvcache::store_kvcache_views"
_WRITE_VIEW = "numba_kvcache::store_one_view"


@torch.library.custom_op(
    _WRITE_VIEWS,
    mutates_args=("k_base", "v_base"),
    schema=f"(Tensor k, Tensor v, Tensor(a!) k_base, Tensor(b!) v_base, SymInt[] k_view, SymInt[] v_view, "
    f"Tensor indices, {_OPTIONS}",
)
def _store_views_op(
    k: Any,
    v: Any,
    k_base: Any,
    v_base: Any,
    k_view: Sequence[int],
    v_view: Sequence[int],
    indices: Any,
    num_split: int = 0,
    size_limit: int = 0,
    *,
    skip_index: int | None = None,
) -> None:
    caches = _take_view(k_base, k_view), _take_view(v_base, v_view)
    store_kvcache(k, v, *caches, indices, num_split, size_limit, skip_index=skip_index)


@torch.library.custom_op(
    _WRITE_VIEW,
    mutates_args=("base",),
    schema=f"(Tensor rows, Tensor(a!) base, SymInt[] view, Tensor indices, {_OPTIONS}",
)
def _store_view_op(
    rows: Any,
    base: Any,
    view: Sequence[int],
    indices: Any,
    num_split: int = 0,
    size_limit: int = 0,
    *,
    skip_index: int | None = None,
) -> None:
    cache = _take_view(base, view)
    # K and V the same: each word is written twice, with one value.
    store_kvcache(rows, rows, cache, cache, indices, num_split, size_limit, skip_index=skip_index)


def _nothing_returned(*arguments: Any, **options: Any) -> None:
    """All three ops for fake tensors; the checks are made when the op runs."""


for _op in (_store_op, _store_views_op, _store_view_op):
    _op.register_fake(_nothing_returned)


@torch.library.register_torch_dispatch("numba_kvcache::store_kvcache", FunctionalTensorMode)
def _functionalize(mode: Any, op: Any, types: Any, arguments: Any, options: Any = None) -> None:
    """Write the caches' bases in one op; in one op each, where the bases are different views of one buffer.

    (Of two such arguments of an op, Inductor would write only the first in place, and clone the other, whole.)
    """
    k, v, k_cache, v_cache, *rest = arguments
    (k_base, k_view), (v_base, v_view) = _find_view("k_cache", k_cache), _find_view("v_cache", v_cache)
    if k_base is v_base or _storage(k_base) != _storage(v_base):
        one = torch.ops.numba_kvcache.store_kvcache_views.default
        mode.__torch_dispatch__(one, types, (k, v, k_base, v_base, k_view, v_view, *rest), options)
        return
    each = torch.ops.numba_kvcache.store_one_view.default
    mode.__torch_dispatch__(each, types, (k, k_base, k_view, *rest), options)
    mode.__torch_dispatch__(each, types, (v, v_base, v_view, *rest), options)


def _find_view(name: str, cache: Any) -> tuple[Any, list[int]]:
    """(the tensor of the graph that a cache is a view of, or itself; the view: offset in the base, shape, strides)."""
    base = cache._inference_mode_base if torch.is_inference_mode_enabled() else cache._base
    if base is None:
        base = cache
    if base.dtype != cache.dtype or not torch._is_functional_tensor_base(base.elem):
        raise TypeError(
            f"{name} must not be viewed as another dtype ({cache.dtype}), or detached, within a compiled function: it "
            "would be copied; do so before"
        )
    return base, [cache.storage_offset() - base.storage_offset(), *cache.shape, *cache.stride()]


def _take_view(base: Any, view: Sequence[int]) -> Any:
    dimensions = len(view) // 2
    shape, strides = view[1 : 1 + dimensions], view[1 + dimensions :]
    return base.as_strided(shape, strides, base.storage_offset() + view[0])


def _storage(tensor: Any) -> int:
    return int(torch._from_functional_tensor(tensor.elem).untyped_storage()._cdata)
