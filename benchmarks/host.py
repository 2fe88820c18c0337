"""Host time per call: what a server's Python thread pays to queue one store."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numba import cuda

from numba_kvcache import make_store_kernel, store_kvcache, warmup
from numba_kvcache.compiler import loaded_kernel
from numba_kvcache.dispatch import use_early_launch
from numba_kvcache.driver import current_device
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.launch import launch
from numba_kvcache.layout import plan_store

from .gpu import Call, StoreArrays, address, settle
from .peers import Peer
from .results import Spread, spread_of
from .shapes import Cell

__all__ = ["host_times"]

# Llama-3.1-8B, 16 sequences: a kernel of a microsecond, so that the GPU is never what a call waits for.
CELL = Cell(2048, 2048, 16, "decode")
SLOTS = 4096
SAMPLES = 31
CALLS = 100
"""Calls per sample; the GPU is waited for between samples, so that the launch queue never fills."""


def host_times(peers: Iterable[Peer], progress: Callable[[str], None]) -> tuple[dict[str, Spread], dict[str, str]]:
    """(microseconds per call, why some are absent), both by name."""
    arrays = _arrays()
    times: dict[str, Spread] = {}
    absent: dict[str, str] = {}
    for name, make_call in _cases(arrays, list(peers)):
        progress(f"host time: {name}")
        try:
            times[name] = _time_call(make_call())
        except Exception as error:  # whatever a peer raises is its reason
            settle()
            absent[name] = f"{type(error).__name__}: {error}"
    return times, absent


def _arrays() -> StoreArrays:
    rng = np.random.default_rng(0)
    k, v = (rng.integers(2**16, size=(CELL.batch, CELL.k_bytes // 2), dtype=np.uint16) for _ in range(2))
    cache = np.zeros((SLOTS, CELL.k_bytes // 2), np.uint16)
    indices = rng.permutation(SLOTS)[: CELL.batch].astype(np.int64)
    # Arrays with memory of their own, as a server has them: the cheapest to read.
    return StoreArrays(0, *map(cuda.to_device, (k, v, cache, cache, indices)))


def _cases(arrays: StoreArrays, peers: list[Peer]) -> Iterator[tuple[str, Callable[[], Call]]]:
    yield "driver floor (one bare launch)", lambda: _bare_launch(arrays)
    yield "store_kvcache, Numba arrays", lambda: _store(arrays)
    yield "store_kvcache, torch tensors", lambda: _store_torch(arrays)
    yield "store_kvcache, CuPy arrays", lambda: _store_cupy(arrays)
    yield "Numba's dispatcher, same kernel", lambda: _numba_dispatcher(arrays)
    for peer in peers:
        if peer.stores:
            yield peer.name, lambda peer=peer: peer.bind(CELL, arrays, 0)


def _time_call(call: Call) -> Spread:
    for _ in range(2 * CALLS):
        call()
    settle()
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter_ns() - start) / CALLS / 1e3)
        settle()
    return spread_of(samples)


def _store(a) -> Call:
    warmup(CELL.k_bytes)  # returns with the fast road in force
    k, v, k_cache, v_cache, indices = a.k, a.v, a.k_cache, a.v_cache, a.indices
    return lambda: store_kvcache(k, v, k_cache, v_cache, indices)


def _store_torch(arrays: StoreArrays) -> Call:
    from .peers.torch_ops import tensors

    return _store(tensors(arrays))


def _store_cupy(arrays: StoreArrays) -> Call:
    from .peers.cupy_ops import arrays_of

    return _store(arrays_of(arrays))


def _arguments(a: StoreArrays) -> tuple[int, ...]:
    rows = (a.k, a.v, a.k_cache, a.v_cache)
    strides = (array.strides[0] for array in (*rows, a.indices))
    return (*map(address, (*rows, a.indices)), *strides, CELL.batch, SLOTS)


def _bare_launch(arrays: StoreArrays) -> Call:
    layout = plan_store(CELL.k_bytes)
    device = current_device()
    early = use_early_launch(device)
    kernel = loaded_kernel(StoreSpec(layout, 64, early), device)
    grid, arguments = layout.grid(CELL.batch), _arguments(arrays)
    return lambda: launch(kernel, grid, layout.block, 0, early, arguments)


def _numba_dispatcher(arrays: StoreArrays) -> Call:
    kernel = make_store_kernel(CELL.k_bytes)
    grid, block, arguments = kernel.layout.grid(CELL.batch), kernel.layout.block, _arguments(arrays)

    def call() -> None:
        kernel[grid, block](*arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba warns of a small grid, once
        call()
    return call
