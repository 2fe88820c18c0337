"""A Triton kernel for the job: some rows per program, both copies loaded before either is stored."""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..shapes import Cell
from . import Peer
from .torch_ops import on_stream, require_cuda, tensors

__all__ = ["load"]

BLOCK_WORDS = 2048
"""int32 words of K, and of V, per program: 16 bytes of each for 512 threads, or more for fewer."""


@triton.jit
def _store(
    k, v, k_cache, v_cache, indices, batch, slots,
    k_width: tl.constexpr, v_width: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)[None, :]
    inside = row < batch
    if early:
        tl.extra.cuda.gdc_wait()
    slot = tl.load(indices + row, mask=inside, other=0)
    source, target = row.to(tl.int64)[:, None], slot[:, None]
    k_mask, v_mask = inside[:, None] & (column < k_width), inside[:, None] & (column < v_width)
    k_words = tl.load(k + source * k_width + column, mask=k_mask)
    v_words = tl.load(v + source * v_width + column, mask=v_mask)
    if early:
        tl.extra.cuda.gdc_launch_dependents()
    stays = ((slot >= 0) & (slot < slots))[:, None]
    tl.store(k_cache + target * k_width + column, k_words, mask=k_mask & stays)
    tl.store(v_cache + target * v_width + column, v_words, mask=v_mask & stays)


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""
    require_cuda()

    def bind(cell: Cell, arrays: Any, stream: int) -> Callable[[], None]:
        t = tensors(arrays)
        k, v, k_cache, v_cache = (x.view(torch.int32) for x in (t.k, t.v, t.k_cache, t.v_cache))
        columns = triton.next_power_of_2(max(cell.k_bytes, cell.v_bytes) // 4)
        # Few rows per program while there are few, so that the batch still spreads over the GPU.
        rows = max(1, min(BLOCK_WORDS // columns, triton.next_power_of_2(cell.batch // 128)))
        grid, slots = (triton.cdiv(cell.batch, rows),), k_cache.shape[0]
        warps = max(1, min(8, rows * columns // 128))

        def call() -> None:
            _store[grid](
                k, v, k_cache, v_cache, t.indices, cell.batch, slots,
                k_width=cell.k_bytes // 4, v_width=cell.v_bytes // 4, columns=columns, rows=rows, early=early_launch,
                num_warps=warps, launch_pdl=early_launch,
            )  # fmt: skip

        return call

    return Peer("Triton", bind, on_stream)
