"""The GPU as the benchmark sees it: its figures, device memory of a cell, streams, graphs and events.

All of it through cuda.bindings, so that nothing but the package's own requirements is needed.
"""

import contextlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from numba import cuda

from numba_kvcache import driver
from numba_kvcache.driver import check

from .reference import UNTOUCHED, Trial, difference
from .shapes import Cell

__all__ = [
    "Gpu",
    "GpuFailedError",
    "Graph",
    "StoreArrays",
    "TrialArrays",
    "capture",
    "cell_arrays",
    "elapsed_us",
    "open_gpu",
    "random_words",
    "require_health",
    "set_bytes",
    "settle",
]

Call = Callable[[], None]

RANDOM_BYTES = 256 << 20
ALIGNMENT = 16


@dataclass(frozen=True)
class Gpu:
    """The current device and the stream that everything timed runs on."""

    name: str
    driver: str
    l2_bytes: int
    early_launch: bool
    stream: int


def open_gpu() -> Gpu:
    """Make the primary context of the first GPU current, and a stream; RuntimeError with the reason without a GPU."""
    driver.initialise()
    cuda.current_context()
    device = check(cu.cuCtxGetDevice())
    attributes = cu.CUdevice_attribute
    return Gpu(
        name=check(cu.cuDeviceGetName(128, device)).split(b"\0")[0].decode(),
        driver=_driver_version(),
        l2_bytes=check(cu.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device)),
        early_launch=driver.compute_capability(int(device)) >= (9, 0),
        stream=int(check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value))),
    )


def _driver_version() -> str:
    version = check(cu.cuDriverGetVersion())
    api = f"CUDA {version // 1000}.{version % 1000 // 10}"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()
        return f"{lines[0]} ({api})"
    return api


def settle() -> None:
    """Wait for the GPU; RuntimeError if something on it has failed."""
    check(cu.cuCtxSynchronize())


class GpuFailedError(Exception):
    """An error on the GPU, after which nothing in this process can be measured."""


def require_health(name: str, reason: str) -> None:
    """Raise GpuFailedError if what `name` did (`reason`: what it raised) has left the GPU in error."""
    try:
        settle()
    except RuntimeError as error:
        raise GpuFailedError(f"{name}: {reason}; then: {error}") from error


# ----------------------------------------------------------------------------------------------------------------------
# Memory


@dataclass(frozen=True)
class StoreArrays:
    """The arrays of one call, Numba device arrays: uint16 (bf16 bits; Numba has no bf16), indices int64.

    K is followed by V in memory, and `k_cache` by `v_cache`, so that one memcpy can move as many bytes. Each starts at
    ALIGNMENT, as allocations do: some peers copy what does not, or compile anew. `number` is which of the rotated sets
    this is.
    """

    number: int
    k: Any  # (B, D)
    v: Any  # (B, Dv)
    k_cache: Any  # (N, D)
    v_cache: Any  # (N, Dv)
    indices: Any  # (B,)


def address(array: Any) -> int:
    """Where a Numba device array starts."""
    return int(array.device_ctypes_pointer.value)


def random_words(count: int, rng: np.random.Generator) -> Any:
    """A flat uint16 device array of random bits, the same ones again after RANDOM_BYTES."""
    words = cuda.device_array(count, np.uint16)
    block = np.frombuffer(rng.bytes(min(words.nbytes, RANDOM_BYTES)), np.uint16)
    for start in range(0, count, len(block)):
        end = min(count, start + len(block))
        words[start:end].copy_to_device(block[: end - start])
    return words


def _pair(flat: Any, start: int, rows: int, cell: Cell) -> tuple[Any, Any]:
    """`rows` rows of K, then as many of V, from element `start` of a flat uint16 array."""
    k_width, v_width = cell.k_bytes // 2, cell.v_bytes // 2
    v_start = start + _aligned(rows * cell.k_bytes) // 2
    return (
        flat[start : start + rows * k_width].reshape(rows, k_width),
        flat[v_start : v_start + rows * v_width].reshape(rows, v_width),
    )


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def set_bytes(cell: Cell) -> int:
    """How far apart the sources of two sets lie."""
    return _aligned(cell.batch * cell.k_bytes) + _aligned(cell.batch * cell.v_bytes)


def cell_arrays(cell: Cell, sources: Any, caches: Any, slots: np.ndarray, cache_slots: int) -> list[StoreArrays]:
    """One StoreArrays per row of `slots`, cut from flat uint16 device arrays, each with sources of its own."""
    indices = cuda.to_device(np.pad(slots, ((0, 0), (0, slots.shape[1] % 2))))  # rows start at ALIGNMENT
    k_cache, v_cache = _pair(caches, 0, cache_slots, cell)
    sets = []
    for number in range(len(slots)):
        k, v = _pair(sources, number * set_bytes(cell) // 2, cell.batch, cell)
        sets.append(StoreArrays(number, k, v, k_cache, v_cache, indices[number, : cell.batch]))
    return sets


class TrialArrays:
    """A trial on the device. Its caches lie at the start of `caches`, a flat uint16 device array."""

    def __init__(self, cell: Cell, trial: Trial, caches: Any) -> None:
        self.trial = trial
        k_cache, v_cache = _pair(caches, 0, trial.slots, cell)
        k, v, indices = map(cuda.to_device, (trial.k, trial.v, trial.indices))
        self.arrays = StoreArrays(0, k, v, k_cache, v_cache, indices)

    def difference_after(self, call: Call) -> str:
        """Fill the caches, run `call`, wait, and compare every byte on the host."""
        k_cache, v_cache = self.arrays.k_cache, self.arrays.v_cache
        for cache in (k_cache, v_cache):
            check(cu.cuMemsetD8(address(cache), UNTOUCHED & 0xFF, cache.nbytes))
        settle()
        call()
        settle()
        return difference(self.trial, k_cache.copy_to_host(), v_cache.copy_to_host())


# ----------------------------------------------------------------------------------------------------------------------
# Graphs and events


class Graph:
    """An instantiated graph of captured launches; close it when done."""

    def __init__(self, graph: Any, stream: int) -> None:
        self._executable = check(cu.cuGraphInstantiate(graph, 0))
        self._stream = cu.CUstream(stream)
        check(cu.cuGraphUpload(self._executable, self._stream))

    def replay(self) -> None:
        """Queue one replay."""
        check(cu.cuGraphLaunch(self._executable, self._stream))

    def close(self) -> None:
        """Free it."""
        check(cu.cuGraphExecDestroy(self._executable))


def capture(stream: int, calls: Sequence[Call]) -> Graph:
    """A graph of what `calls` launch on `stream`. Launches keep their early-launch edges."""
    # Relaxed: a peer's allocator may have to ask the driver for memory in the middle.
    check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    try:
        for call in calls:
            call()
    except BaseException:
        _, graph = cu.cuStreamEndCapture(stream)  # ends the capture whatever came of it
        if graph is not None and int(graph):
            cu.cuGraphDestroy(graph)
        raise
    graph = check(cu.cuStreamEndCapture(stream))
    try:
        return Graph(graph, stream)
    finally:
        check(cu.cuGraphDestroy(graph))


@contextlib.contextmanager
def _events(count: int) -> Iterator[list[Any]]:
    events = [check(cu.cuEventCreate(0)) for _ in range(count)]
    try:
        yield events
    finally:
        for event in events:
            check(cu.cuEventDestroy(event))


def elapsed_us(stream: int, work: Sequence[Call], before: Call) -> list[float]:
    """GPU microseconds of each element of `work`. `before` is queued ahead of each, outside the time."""
    with _events(2 * len(work)) as events:
        for job, start, end in zip(work, events[::2], events[1::2], strict=True):
            before()
            check(cu.cuEventRecord(start, stream))
            job()
            check(cu.cuEventRecord(end, stream))
        check(cu.cuStreamSynchronize(stream))
        pairs = zip(events[::2], events[1::2], strict=True)
        return [1e3 * check(cu.cuEventElapsedTime(start, end)) for start, end in pairs]
