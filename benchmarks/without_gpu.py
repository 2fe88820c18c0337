"""The benchmark's job without a GPU: stores on the simulator, and what the compiler makes of their kernels."""

from collections.abc import Callable, Sequence

from numba_kvcache.inspection import inspect_kernel
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.layout import plan_store
from numba_kvcache.settings import SIMULATED

from .results import OURS, CellResult, Outcome, Results
from .shapes import Cell
from .simulated import check_in_child

__all__ = ["run_without_gpu"]

CC = (9, 0)

# A simulated thread is a Python thread: 10,000 of them take some seconds.
BATCHES = {"decode": 3, "prefill": 18, "random": 5}


def run_without_gpu(cells: Sequence[Cell], environment: dict[str, str], progress: Callable[[str], None]) -> Results:
    """The widths and phases of `cells`, with small batches."""
    small = list(dict.fromkeys(Cell(c.k_bytes, c.v_bytes, BATCHES[c.phase], c.phase) for c in cells))
    results = Results(environment)
    for cell, wrong in zip(small, check_in_child(small), strict=True):
        results.cells.append(CellResult(cell, 1, False, {OURS: Outcome(wrong=wrong)}))
    for widths in dict.fromkeys((cell.k_bytes, cell.v_bytes) for cell in small):
        progress(f"compiling for rows of {widths[0]} B")
        results.machine_code[_width_label(*widths)] = _machine_code(*widths)
    return results


def _width_label(k_bytes: int, v_bytes: int) -> str:
    return f"{k_bytes} B" if k_bytes == v_bytes else f"{k_bytes} + {v_bytes} B"


def _machine_code(k_bytes: int, v_bytes: int) -> str:
    if SIMULATED:
        return "the simulator has no compiler: unset NUMBA_ENABLE_CUDASIM"
    layout = plan_store(k_bytes, v_bytes)
    threads = f"{layout.threads * layout.parts} threads per row, blocks of {layout.block}"
    return f"{threads}; {inspect_kernel(StoreSpec(layout, 64, early_launch=True), CC)}"
