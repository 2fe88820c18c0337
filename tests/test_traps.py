"""Slots out of range on a GPU (REPORTS 7): the assert's line, error 710, and no byte written but where a row may go.

The context is lost with the trap, so each case has a process of its own, some of them at a time. All five arrays lie in
one pool of host memory that the GPU reaches, which can be read afterwards, and compared with what it was before.
"""

import concurrent.futures
import importlib.util
import itertools
import os
import re
import sys
from typing import NamedTuple

import numpy as np
import pytest
from numba import cuda
from support import SIMULATED, InterfaceArray, needs_gpu, optional, run_python, tally
from test_gpu import gpu_view

from numba_kvcache import dispatch, driver, fast_road, store_kvcache, warmup

if not SIMULATED:
    from cuda.bindings import driver as cu

pytestmark = needs_gpu

AT_ONCE = max(2, min(8, (os.cpu_count() or 2) // 2))


class Trap(NamedTuple):
    """One process: some slots, by one road."""

    slots: tuple[int, ...]
    limit: int = 64
    dtype: str = "int64"
    v_rows: int = 64
    road: str = "Python"
    early_launch: str = "1"
    graph: bool = False
    skip_index: int | None = None

    def __str__(self):
        ways = [f"{self.dtype} {list(self.slots)} under {self.limit}", self.road]
        ways += [f"skipping {self.skip_index}"] * (self.skip_index is not None)
        return ", ".join([*ways, *["no early launch"] * (self.early_launch == "0"), *["graph"] * self.graph])


SLOTS = (
    Trap((2, -1, 5)),
    Trap((2, -1, 5), dtype="int32"),
    Trap((40,), limit=40),  # a row that is there
    Trap((64,)),
    Trap((-(2**31),), dtype="int32"),
    Trap((2**31 - 1,), dtype="int32"),
    Trap((2**31,)),
    Trap((2**32 + 1,)),
    Trap((-(2**63),)),
    Trap((2**63 - 1,)),
    Trap((40,), limit=32, v_rows=32),  # a row of K's cache and not of V's
    Trap((2, -2, 5), skip_index=-1),
    Trap((2, -1, 5), dtype="int32", skip_index=2**32 - 1),
    Trap((64,), skip_index=3, road="fast"),
)
ROADS = ("Python", "fast", "torch op")
KEY_SLOTS = (Trap((2, -1, 5)), Trap((64,)), Trap((-(2**31),), dtype="int32"), Trap((2**32 + 1,)))
WAYS = [
    trap._replace(road=road, early_launch=early_launch, graph=graph)
    for trap, road, early_launch, graph in itertools.product(KEY_SLOTS, ROADS, "10", (False, True))
]
TRAPS = tuple(dict.fromkeys((*SLOTS, *WAYS)))
LEGAL = (
    *(Trap((0, 39), 40, road=road, graph=graph) for road in ROADS for graph in (False, True)),
    *(Trap((0, -1, 39, -1), 40, road=road, skip_index=-1) for road in ROADS),
    Trap((64, 0), skip_index=64),
)


def process(trap):
    """Run `trap` in an interpreter of its own."""
    switches = {"NUMBA_KVCACHE_NATIVE": "0" if trap.road == "Python" else "1"}
    switches["NUMBA_KVCACHE_EARLY_LAUNCH"] = trap.early_launch
    return run_python(f"from test_traps import Trap, fall_into\nfall_into({trap!r})", **switches)


@pytest.fixture(scope="module")
def processes():
    """The future of each case's process; they run ahead while the first tests wait."""
    pool = concurrent.futures.ThreadPoolExecutor(AT_ONCE)
    try:
        yield {trap: pool.submit(process, trap) for trap in (*TRAPS, *LEGAL) if not obstacle(trap.road)}
    finally:
        pool.shutdown(cancel_futures=True)


def obstacle(road):
    """Why calls cannot take this road here, or None."""
    if road == "fast":
        return fast_road._obstacle()
    if road == "torch op" and importlib.util.find_spec("numba_kvcache.torch") is None:
        return "this version registers no torch op"
    return None


def result_of(trap, processes):
    if trap.road == "torch op":
        optional("torch")
    if obstacle(trap.road):
        pytest.skip(f"no {trap.road} road here: {obstacle(trap.road)}")
    return processes[trap].result()


ASSERT_LINE = re.compile(
    r"numba_kvcache/kernel\.py:\d+: store_kvcache: block: \[\d+,0,0\], thread: \[\d+,0,0\] "
    r"Assertion `0 <= index && index < size_limit` failed\."
)


@pytest.mark.parametrize("trap", TRAPS, ids=str)
def test_trap(trap, processes):
    result = result_of(trap, processes)
    output = result.stdout + result.stderr
    assert (result.returncode, result.stdout) == (0, "status 710\nintact\n"), output
    assert ASSERT_LINE.search(result.stderr), output
    tally("trap", case=str(trap))


@pytest.mark.parametrize("trap", LEGAL, ids=str)
def test_no_trap_under_the_limit(trap, processes):
    """The control: same script, legal slots, and rows that must have been stored."""
    result = result_of(trap, processes)
    assert (result.returncode, result.stdout) == (0, "status 0\nstored\n"), result.stdout + result.stderr
    assert "Assertion" not in result.stderr


# ----------------------------------------------------------------------------------------------------------------------
# What the child does.

ROW = 128  # bytes
POOL = 64 << 10


def fall_into(trap):
    """Make the call; print the driver's status, and whether memory is what it may be."""
    memory = cuda.mapped_array(POOL, np.uint8)
    memory[:] = np.random.default_rng(3).integers(0, 256, POOL, np.uint8)
    rows = (len(trap.slots), len(trap.slots), 64, trap.v_rows)
    offsets = [1024 + 12 * 1024 * i for i in range(5)]  # the caches, of 8 KiB, have 4 KiB of guards on both sides
    slots = np.array(trap.slots, trap.dtype)
    memory[offsets[4] : offsets[4] + slots.nbytes] = slots.view(np.uint8)
    before = np.array(memory)

    warmup(ROW, index_dtype=trap.dtype, skipping=trap.skip_index is not None)
    make = torch_views if trap.road == "torch op" else numba_views
    arrays = make(memory, offsets, rows, slots.dtype)
    call = store_by(trap)
    launches = count_python_launches()
    if trap.graph:
        call = captured_by(call, "torch" if trap.road == "torch op" else "driver")
    call(*arrays)
    status = int(cu.cuCtxSynchronize()[0])
    assert trap.road != "fast" or launches == [], "the fast road gave the call back"
    sys.stdout.write(f"status {status}\n{verdict(trap, np.array(memory), before, offsets)}\n")
    sys.stdout.flush()
    os._exit(0)  # the context is past tidying up


def numba_views(memory, offsets, rows, index_dtype):
    """The four row arrays and the indices, as Numba device arrays over the mapped pool."""
    arrays = [
        gpu_view(memory, offset, (count, ROW // 4), (ROW, 4), np.dtype("uint32"))
        for offset, count in zip(offsets, rows, strict=False)
    ]
    return [*arrays, gpu_view(memory, offsets[4], rows[:1], (index_dtype.itemsize,), index_dtype)]


def torch_views(memory, offsets, rows, index_dtype):
    """The same as torch tensors."""
    import torch

    address = memory.device_ctypes_pointer.value
    pool = torch.as_tensor(InterfaceArray(address, (POOL,), "|u1"), device="cuda")
    assert pool.data_ptr() == address
    words, integers = pool.view(torch.int32), pool.view(getattr(torch, index_dtype.name))
    arrays = [
        words.as_strided((count, ROW // 4), (ROW // 4, 1), offset // 4)
        for offset, count in zip(offsets, rows, strict=False)
    ]
    return [*arrays, integers.as_strided(rows[:1], (1,), offsets[4] // index_dtype.itemsize)]


def store_by(trap):
    """The function that stores by the case's road, warm."""
    if trap.road == "torch op":
        import torch

        importlib.import_module("numba_kvcache.torch")
        op = torch.ops.numba_kvcache.store_kvcache
        return lambda *arrays: op(*arrays, 0, trap.limit, skip_index=trap.skip_index)
    if trap.road == "fast":
        # The type must have been seen.
        k, caches = np.zeros((1, ROW // 4), np.uint32), [np.zeros((64, ROW // 4), np.uint32)] * 2
        store_kvcache(*map(cuda.to_device, (k, k, *caches, np.zeros(1, trap.dtype))))
        cuda.synchronize()
        assert fast_road.status() == "on", fast_road.status()
    options = {"size_limit": trap.limit, "skip_index": trap.skip_index}
    return lambda *arrays, **stream: store_kvcache(*arrays, **options, **stream)


def count_python_launches():
    """A list that grows with each launch by the Python road."""
    launches, real = [], dispatch.launch
    dispatch.launch = lambda *arguments: launches.append(1) or real(*arguments)
    return launches


def captured_by(call, library):
    """`call`, captured and then replayed once."""
    if library == "torch":
        import torch

        def replay(*arrays):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(*arrays)
            graph.replay()

        return replay

    def launch(*arrays):
        stream = driver.check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        driver.check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
        call(*arrays, stream=int(stream))
        graph = driver.check(cu.cuGraphInstantiate(driver.check(cu.cuStreamEndCapture(stream)), 0))
        driver.check(cu.cuGraphLaunch(graph, stream))

    return launch


def verdict(trap, now, before, offsets):
    """ "intact" if only legal rows changed, if any; "stored" if all rows of a legal call did."""
    wanted = [slot for slot in trap.slots if slot != trap.skip_index]
    legal = [slot for slot in wanted if 0 <= slot < trap.limit]
    stored = 0
    for source, cache in zip(offsets[:2], offsets[2:4], strict=True):
        for row, slot in enumerate(trap.slots):
            if slot not in legal:
                continue
            where = slice(cache + slot * ROW, cache + (slot + 1) * ROW)
            new = before[source + row * ROW : source + (row + 1) * ROW]
            # A legal row may have been stored before the trap, each byte of it or not.
            if not np.all((now[where] == before[where]) | (now[where] == new)):
                return f"slot {slot} holds what is no row of this call"
            stored += np.array_equal(now[where], new)
            now[where] = before[where]
    if not np.array_equal(now, before):
        return f"stray bytes at {np.flatnonzero(now != before)[:8].tolist()}"
    return "stored" if stored == 2 * len(wanted) else "intact"
