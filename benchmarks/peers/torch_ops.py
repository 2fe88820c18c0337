"""torch: `k_cache[i] = k; v_cache[i] = v`, two index_put_ calls."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..shapes import Cell
from . import AbsentError, Peer

__all__ = ["load", "on_stream", "tensors"]


def tensors(a: Any) -> SimpleNamespace:
    """The same memory as torch tensors, bf16."""
    # Through int16: the array interface has no bf16, and torch does little with uint16.
    rows = {
        name: torch.as_tensor(getattr(a, name).view(np.int16), device="cuda").view(torch.bfloat16)
        for name in ("k", "v", "k_cache", "v_cache")
    }
    return SimpleNamespace(indices=torch.as_tensor(a.indices, device="cuda"), **rows)


def on_stream(stream: int) -> AbstractContextManager[Any]:
    """Make `stream` torch's current stream."""
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


def require_cuda() -> None:
    """Raise AbsentError if torch has no GPU."""
    if not torch.cuda.is_available():
        raise AbsentError("torch sees no GPU")


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""
    require_cuda()
    return Peer("torch index_put", _bind, on_stream)


def _bind(cell: Cell, arrays: Any, stream: int) -> Callable[[], None]:
    t = tensors(arrays)

    def call() -> None:
        t.k_cache[t.indices] = t.k
        t.v_cache[t.indices] = t.v

    return call
