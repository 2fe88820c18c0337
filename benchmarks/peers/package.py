"""The package itself, called as its users call it."""

from collections.abc import Callable
from typing import Any

from numba_kvcache import store_kvcache

from ..names import OURS
from ..shapes import Cell
from . import Peer

__all__ = ["PACKAGE"]


def _bind(cell: Cell, a: Any, stream: int) -> Callable[[], None]:
    return lambda: store_kvcache(a.k, a.v, a.k_cache, a.v_cache, a.indices, stream=stream)


PACKAGE = Peer(OURS, _bind)
