"""CuPy: `k_cache[i] = k; v_cache[i] = v`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cupy

from ..shapes import Cell
from . import AbsentError, Peer

__all__ = ["arrays_of", "load"]


def arrays_of(a: Any) -> SimpleNamespace:
    """The same memory as CuPy arrays, uint16."""
    names = ("k", "v", "k_cache", "v_cache", "indices")
    return SimpleNamespace(**{name: cupy.asarray(getattr(a, name)) for name in names})


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""
    if not cupy.cuda.is_available():
        raise AbsentError("CuPy sees no GPU")
    return Peer("CuPy", _bind, cupy.cuda.ExternalStream)


def _bind(cell: Cell, arrays: Any, stream: int) -> Callable[[], None]:
    c = arrays_of(arrays)

    def call() -> None:
        c.k_cache[c.indices] = c.k
        c.v_cache[c.indices] = c.v

    return call
