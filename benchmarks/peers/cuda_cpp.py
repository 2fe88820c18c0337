"""The CUDA C++ reference (cuda_cpp.cu), built by tvm-ffi with nvcc and called with torch tensors."""

import functools
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tvm_ffi.cpp

from ..names import CUDA_CPP
from ..shapes import Cell
from . import AbsentError, Peer
from .torch_ops import on_stream, require_cuda, tensors

__all__ = ["load"]


def default_split(row_bytes: int) -> int:
    """The reference's warps per row."""
    return 4 if row_bytes % 2048 == 0 else 2 if row_bytes % 1024 == 0 else 1


def source(cells: Iterable[Cell], early_launch: bool) -> str:
    """The CUDA source with instantiations for what `cells` need and no more: each costs nvcc a second."""
    widths = sorted({cell.k_bytes for cell in cells if cell.k_bytes == cell.v_bytes})
    cases = " ".join(f"X({width}, {default_split(width)})" for width in widths)
    settings = f"#define STORE_CASES(X) {cases}\n#define STORE_EARLY_LAUNCH {str(early_launch).lower()}\n"
    return settings + Path(__file__).with_suffix(".cu").read_text()


def load(cells: tuple[Cell, ...], early_launch: bool) -> Peer:
    """See Peer."""
    require_cuda()
    if shutil.which("nvcc") is None:
        raise AbsentError("nvcc is not on PATH")
    module = tvm_ffi.cpp.load_inline(
        "store_kvcache_reference", cuda_sources=source(cells, early_launch), functions=["run"]
    )

    def bind(cell: Cell, arrays: Any, stream: int) -> Callable[[], None]:
        if cell.k_bytes != cell.v_bytes:
            raise AbsentError("serves K and V of one width only")
        t, split = tensors(arrays), default_split(cell.k_bytes)
        slots = t.k_cache.shape[0]
        return functools.partial(module.run, t.k, t.v, t.k_cache, t.v_cache, t.indices, split, slots)

    # tvm-ffi takes torch's current stream from the tensors that it is called with.
    return Peer(CUDA_CPP, bind, on_stream)
