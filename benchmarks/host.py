"""Host time per call: what a server's Python thread pays to queue one store.

All rows are measured in turns, a few hundred calls each: apart, medians drift by a third with the host's mood.
"""

import functools
import gc
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numba import cuda

from numba_kvcache import driver, fast_road, make_store_kernel, store_kvcache, warmup
from numba_kvcache.compiler import loaded_kernel
from numba_kvcache.dispatch import use_early_launch
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.layout import plan_store

from .gpu import StoreArrays, address, require_health, settle
from .names import DISPATCHER, FLOOR, PROTOTYPE, PYTHON_NUMBA, PYTHON_TORCH, STORE_CUPY, STORE_NUMBA, STORE_TORCH
from .native_loop import Run, launch_loop
from .peers import Peer
from .results import HostTime, spread_of
from .roads import without_fast_road
from .shapes import Cell
from .strategy import chosen_strategy

__all__ = ["CELL", "host_times", "interleave", "repeated", "runs_frame_of"]

# Batch 1 of Llama-3.1-8B: a kernel of a microsecond, so that the GPU is never what a call waits for.
CELL = Cell(2048, 2048, 1, "decode")
SLOTS = 4096
ROUNDS = 25
CALLS = 300
"""Calls per row and round; the GPU is waited for between, so that the launch queue never fills."""

ON_PURPOSE = "Python road, called past the fast one"


def host_times(
    peers: Iterable[Peer], progress: Callable[[str], None]
) -> tuple[dict[str, HostTime], dict[str, str], dict[str, str]]:
    """(rows of the table, what to know of them, why others are absent), all by name."""
    arrays = _arrays()
    warmup(CELL.k_bytes)  # returns with the fast road in force, or known not to be
    runs: dict[str, Run] = {}
    roads: dict[str, str] = {}
    absent: dict[str, str] = {}
    for name, make in _rows(arrays, list(peers)).items():
        progress(f"host time: {name}, first calls")
        try:
            runs[name], roads[name] = make()
            runs[name](CALLS)
            settle()
        except Exception as error:  # whatever a peer raises is its reason
            absent[name] = f"{type(error).__name__}: {error}"
            runs.pop(name, None)
            require_health(name, absent[name])
    for name, call in ((name, run) for name, run in runs.items() if name.startswith("store_kvcache")):
        roads[name] = _road(call, roads[name])
    samples = interleave(runs, ROUNDS, CALLS, settle, progress)
    rows = {name: HostTime(spread_of(its), roads[name]) for name, its in samples.items()}
    notes = {"fast road": fast_road.status(), "stream": "the default stream, for all"}
    return rows, notes, absent


def interleave(
    runs: Mapping[str, Run], rounds: int, calls: int, between: Callable[[], None], progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Microseconds per call of each of `runs`, one sample a round; `between` is called outside the time."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            progress(f"host time: round {number + 1} of {rounds}")
            for name, run in runs.items():
                between()
                start = time.perf_counter_ns()
                run(calls)
                samples[name].append((time.perf_counter_ns() - start) / calls / 1e3)
        between()
    finally:
        if collecting:
            gc.enable()
    return samples


def _arrays() -> StoreArrays:
    rng = np.random.default_rng(0)
    k, v = (rng.integers(2**16, size=(CELL.batch, CELL.k_bytes // 2), dtype=np.uint16) for _ in range(2))
    cache = np.zeros((SLOTS, CELL.k_bytes // 2), np.uint16)
    indices = rng.permutation(SLOTS)[: CELL.batch].astype(np.int64)
    # Arrays with memory of their own, as a server has them: the cheapest to read.
    return StoreArrays(0, *map(cuda.to_device, (k, v, cache, cache, indices)))


Row = Callable[[], tuple[Run, str]]
"""Does what is done once; (so many calls, how they go)."""


def _rows(arrays: StoreArrays, peers: list[Peer]) -> dict[str, Row]:
    rows: dict[str, Row] = {
        FLOOR: lambda: _floor(arrays),
        STORE_TORCH: lambda: _store(_as_torch(arrays)),
        STORE_NUMBA: lambda: _store(arrays),
        STORE_CUPY: lambda: _store(_as_cupy(arrays)),
        PYTHON_TORCH: lambda: _python_road(_as_torch(arrays)),
        PYTHON_NUMBA: lambda: _python_road(arrays),
        DISPATCHER: lambda: (repeated(_numba_dispatcher(arrays)), "no early launch, no checks"),
    }
    for peer in peers:
        # The prototype would be a bare launch from Python.
        if peer.stores and peer.name != PROTOTYPE:
            rows[peer.name] = lambda peer=peer: (repeated(peer.bind(CELL, arrays, 0)), "")
    return rows


def repeated(call: Callable[[], Any]) -> Run:
    """So many calls in a loop. A partial's function is called itself: nothing of ours is in the time."""
    function, arguments = (call.func, call.args) if isinstance(call, functools.partial) else (call, ())

    def run(count: int) -> None:
        for _ in range(count):
            function(*arguments)

    return run


# ----------------------------------------------------------------------------------------------------------------------
# The package


def _as_torch(arrays: StoreArrays) -> Any:
    from .peers.torch_ops import require_cuda, tensors

    require_cuda()
    return tensors(arrays)


def _as_cupy(arrays: StoreArrays) -> Any:
    from .peers.cupy_ops import arrays_of

    return arrays_of(arrays)


def _store(a: Any) -> tuple[Run, str]:
    calls = repeated(functools.partial(store_kvcache, a.k, a.v, a.k_cache, a.v_cache, a.indices))
    calls(2)  # the Python road meets the array type, and tells the fast one
    return calls, fast_road.ways.get(type(a.k_cache), "")


def _python_road(a: Any) -> tuple[Run, str]:
    return repeated(functools.partial(without_fast_road(store_kvcache), a.k, a.v, a.k_cache, a.v_cache, a.indices)), (
        ON_PURPOSE
    )


def _road(run: Run, way: str) -> str:
    """Which road the calls of `run` take, seen from outside: the fast one runs no Python frame."""
    if not runs_frame_of(store_kvcache.__code__, run):
        return way
    return way if way.startswith("Python road") else f"Python road (fast road {fast_road.status()})"


def runs_frame_of(code: types.CodeType, run: Run) -> bool:
    """Whether one call of `run` runs a Python frame of `code`."""
    seen = []

    def watch(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is code:
            seen.append(frame.f_lineno)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        run(1)
    finally:
        sys.setprofile(before)
    return bool(seen)


# ----------------------------------------------------------------------------------------------------------------------
# The same kernel by other ways


def _arguments(a: StoreArrays) -> tuple[int, ...]:
    rows = (a.k, a.v, a.k_cache, a.v_cache)
    strides = (array.strides[0] for array in (*rows, a.indices))
    return (*map(address, (*rows, a.indices)), *strides, CELL.batch, SLOTS, 0)


def _floor(arrays: StoreArrays) -> tuple[Run, str]:
    layout, device = plan_store(CELL.k_bytes), driver.current_device()
    early = use_early_launch(device)
    spec = StoreSpec(layout, 64, early, chosen_strategy(layout, CELL.batch, device))
    function = driver.kernel_function(loaded_kernel(spec, device))
    grid, procedure = layout.grid(CELL.batch), driver.procedure("cuLaunchKernelEx")
    return launch_loop(procedure, function, grid, layout.block, early, _arguments(arrays))


def _numba_dispatcher(arrays: StoreArrays) -> Callable[[], None]:
    kernel = make_store_kernel(CELL.k_bytes)
    grid, block, arguments = kernel.layout.grid(CELL.batch), kernel.layout.block, _arguments(arrays)

    def call() -> None:
        kernel[grid, block](*arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba warns of a small grid, once
        call()
    return call
