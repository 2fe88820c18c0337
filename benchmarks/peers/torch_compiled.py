"""torch.compile of the two assignments, which it fuses as it likes."""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from ..shapes import Cell
from . import Peer
from .torch_ops import on_stream, require_cuda, tensors

__all__ = ["load"]


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""
    require_cuda()
    # Widths stay constants, as in every other kernel here: two kernels per width, since torch treats a batch of 1
    # apart, and more than the default limit allows.
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.recompile_limit = 64
    return Peer("torch.compile", _bind, on_stream)


@torch.compile
def _store(k, v, k_cache, v_cache, indices):
    k_cache[indices] = k
    v_cache[indices] = v


def _bind(cell: Cell, arrays: Any, stream: int) -> Callable[[], None]:
    t = tensors(arrays)
    for tensor in vars(t).values():
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return lambda: _store(t.k, t.v, t.k_cache, t.v_cache, t.indices)
