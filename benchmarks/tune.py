"""The evidence behind layout.strategies on the GPU at hand: every strategy in every cell, as contenders."""

from collections.abc import Callable
from typing import Any

from numba_kvcache.compiler import loaded_kernel
from numba_kvcache.dispatch import use_early_launch
from numba_kvcache.driver import current_device
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.launch import Launch, launch
from numba_kvcache.layout import Strategy, plan_store

from .gpu import StoreArrays, address
from .peers import Peer
from .results import CellResult, TuneResult
from .shapes import Cell
from .strategy import STRATEGIES, chosen_strategy

__all__ = ["strategy_peers", "tuned"]


def strategy_peers() -> list[Peer]:
    """One contender per strategy that means something on the current device."""
    early = use_early_launch(current_device())
    return [_peer(name, strategy) for name, strategy in STRATEGIES.items() if early or not strategy.release_first]


def _peer(name: str, strategy: Strategy) -> Peer:
    def bind(cell: Cell, a: StoreArrays, stream: int) -> Callable[[], Any]:
        layout, device = plan_store(cell.k_bytes, cell.v_bytes), current_device()
        early = use_early_launch(device)
        kernel = loaded_kernel(StoreSpec(layout, 64, early, strategy), device)
        stored = (a.k, a.v, a.k_cache, a.v_cache, a.indices)
        strides = (array.strides[0] for array in stored)
        slots = min(a.k_cache.shape[0], a.v_cache.shape[0])
        arguments = (*map(address, stored), *strides, cell.batch, slots, 0)
        what = Launch(kernel, layout.grid(cell.batch), layout.block, early)
        return lambda: launch(what, stream, arguments)

    return Peer(name, bind)


def tuned(result: CellResult) -> TuneResult:
    """A cell that `strategy_peers` were measured in, with the package's choice."""
    cell = result.cell
    strategy = chosen_strategy(plan_store(cell.k_bytes, cell.v_bytes), cell.batch, current_device())
    chosen = next(name for name, each in STRATEGIES.items() if each == strategy)
    return TuneResult(cell, result.sets, result.cold, chosen, result.outcomes)
