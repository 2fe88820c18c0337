"""torch.compile: once this module is imported, compiled functions may call `store_kvcache`.

    import numba_kvcache.torch
    from numba_kvcache import store_kvcache

Three things are registered with torch:

1. the op `numba_kvcache::store_kvcache`, which says what is written (functionalisation) and runs `store_kvcache`;
2. with Dynamo, that a call of `store_kvcache` is traced as a call of the op. Dynamo is told of the function object, so
   an eager call is the plain call, at no added cost: the op's own price is never paid outside a compiled graph;
3. with functionalisation, how two caches that are views of one buffer are taken (`_functionalize`).

`store_kvcache` here is `numba_kvcache.store_kvcache` itself. `torch.export` and `make_fx` do not trace through Dynamo:
call `torch.ops.numba_kvcache.store_kvcache` there.
"""

import contextlib
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensorMode

from .dispatch import store_kvcache

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


@torch.library.custom_op(
    "numba_kvcache::store_one_cache",
    mutates_args=("cache",),
    schema=f"(Tensor rows, Tensor(a!) cache, Tensor indices, {_OPTIONS}",
)
def _store_one_op(
    rows: Any, cache: Any, indices: Any, num_split: int = 0, size_limit: int = 0, *, skip_index: int | None = None
) -> None:
    # K and V the same: each word is written twice, with one value.
    store_kvcache(rows, rows, cache, cache, indices, num_split, size_limit, skip_index=skip_index)


@_store_op.register_fake
def _(*arguments: Any, **options: Any) -> None:
    """Nothing is returned; the real call makes the checks."""


@_store_one_op.register_fake
def _(*arguments: Any, **options: Any) -> None:
    """See above."""


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


@torch.library.register_torch_dispatch("numba_kvcache::store_kvcache", FunctionalTensorMode)
def _functionalize(mode: Any, op: Any, types: Any, arguments: Any, options: Any = None) -> Any:
    """torch's own way, unless the caches are two inputs of the graph that share one buffer.

    Of those, Inductor writes only the first in place. It clones the other, whole, and where that one has a storage
    offset the clone is of the wrong memory (torch 2.11; pytorch issue 139628). One op per cache is free of both.
    """
    k, v, k_cache, v_cache, indices, *rest = arguments
    if _base(k_cache) is _base(v_cache) or _storage(k_cache) != _storage(v_cache):
        return mode.__torch_dispatch__(op, types, arguments, options)
    one = torch.ops.numba_kvcache.store_one_cache.default
    for rows, cache in ((k, k_cache), (v, v_cache)):
        mode.__torch_dispatch__(one, types, (rows, cache, indices, *rest), options)
    return None


def _base(tensor: Any) -> Any:
    """The tensor of the graph that this one is a view of, or itself."""
    base = tensor._inference_mode_base if torch.is_inference_mode_enabled() else tensor._base
    return tensor if base is None else base


def _storage(tensor: Any) -> int:
    return int(torch._from_functional_tensor(tensor.elem).untyped_storage()._cdata)
