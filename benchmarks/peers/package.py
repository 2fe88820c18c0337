"""The package itself, called as its users call it."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from numba_kvcache import store_kvcache

from ..names import INT32, OURS
from ..shapes import Cell
from . import AbsentError, Peer

__all__ = ["PACKAGE", "PACKAGE_INT32"]


def _bind(cell: Cell, a: Any, stream: int) -> Callable[[], None]:
    return lambda: store_kvcache(a.k, a.v, a.k_cache, a.v_cache, a.indices, stream=stream)


def _bind_int32(cell: Cell, a: Any, stream: int) -> Callable[[], None]:
    if cell.phase != "random":
        raise AbsentError("measured with --cells only")
    indices = cuda.to_device(a.indices.copy_to_host().astype(np.int32))
    return lambda: store_kvcache(a.k, a.v, a.k_cache, a.v_cache, indices, stream=stream)


PACKAGE = Peer(OURS, _bind)
PACKAGE_INT32 = Peer(INT32, _bind_int32)
