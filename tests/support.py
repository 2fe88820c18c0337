"""What the tests share: which back end this process has, memory that shows every byte written, a plain-loop oracle."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from numba_kvcache import driver, store_kvcache
from numba_kvcache.settings import SIMULATED

TESTS = Path(__file__).parent
GUARD = 256


def _gpu_obstacle():
    if SIMULATED:
        return "this process runs Numba's simulator"
    try:
        count = driver.device_count()
    except RuntimeError as error:
        return str(error)
    return None if count else "no GPU is visible"


GPU_OBSTACLE = _gpu_obstacle()
ON_GPU = GPU_OBSTACLE is None
BACKEND = "simulator" if SIMULATED else "GPU" if ON_GPU else "compiler only (no GPU)"

needs_gpu = pytest.mark.skipif(not ON_GPU, reason=f"needs a GPU: {GPU_OBSTACLE}")
needs_kernels = pytest.mark.skipif(
    not (ON_GPU or SIMULATED), reason="runs kernels: without a GPU test_simulator.py runs it in a child process"
)
needs_simulator = pytest.mark.skipif(
    not SIMULATED, reason="simulator only: test_simulator.py runs it in a child process"
)
needs_compiler = pytest.mark.skipif(SIMULATED, reason="the simulator has no compiler")
needs_no_gpu = pytest.mark.skipif(SIMULATED or ON_GPU, reason="shows what happens without a GPU; this process has one")


def optional(name):
    """An optional library, or a skip that names it."""
    return pytest.importorskip(name, reason=f"{name} is optional and not installed")


def child_environment(**environment):
    """This process's environment for a child that can import what tests can, and is no worker of pytest-xdist."""
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment}


def run_python(code, *, timeout=240, **environment):
    """Run `code` in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=child_environment(**environment), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def tally(what, **counts):
    """Add a line to the file that NUMBA_KVCACHE_TALLY names, if any: what was tried, and how much of it."""
    path = os.environ.get("NUMBA_KVCACHE_TALLY")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps({"what": what, "back end": BACKEND, **counts}) + "\n")


# The tests of the whole call, which run on whatever back end their process has.
WHOLE_CALLS = ("test_store.py", "test_errors.py", "test_arrays.py", "test_producers.py", "test_quantised.py")


def run_whole_calls(names=WHOLE_CALLS, *, at_least, before="", **environment):
    """Run test files in a process of their own, after the statements `before`; so many must pass."""
    files = [str(TESTS / name) for name in names]
    code = f"import sys, pytest\n{before}\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', *{files}]))"
    result = run_python(code, timeout=280, **environment)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed, output
    assert int(passed[1]) >= at_least, output


class Memory:
    """Bytes that a kernel can reach, all of them random, and what they must be after the stores."""

    def __init__(self, size, seed):
        content = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
        self.expected = content.copy()
        if SIMULATED:
            spare = np.empty(size + GUARD, np.uint8)
            start = -spare.ctypes.data % GUARD  # as aligned as what cudaMalloc returns
            self.memory = spare[start : start + size]
            self.memory[:] = content
        else:
            self.memory = cuda.to_device(content)

    def array(self, offset, shape, strides, dtype):
        """An array over this memory."""
        if SIMULATED:
            return np.ndarray(shape, dtype, self.memory, offset, strides)
        from numba.cuda.cudadrv.devicearray import DeviceNDArray

        return DeviceNDArray(shape, strides, dtype, gpu_data=self.memory.gpu_data.view(offset))

    def address(self, offset):
        base = self.memory.ctypes.data if SIMULATED else self.memory.device_ctypes_pointer.value
        return base + offset

    def bytes_now(self):
        return self.memory.copy() if SIMULATED else self.memory.copy_to_host()

    def check(self):
        """Compare every byte, guards and gaps included."""
        wrong = np.flatnonzero(self.bytes_now() != self.expected)
        assert wrong.size == 0, f"{wrong.size} bytes differ, the first at offsets {wrong[:8].tolist()}"


class Rows:
    """`count` rows of `row_bytes` bytes, `pitch` bytes apart, inside a memory with guards before and after."""

    def __init__(self, count, row_bytes, *, seed, pitch=None, shift=0, dtype="uint8", memory=None):
        self.count, self.row_bytes = count, row_bytes
        self.pitch = row_bytes if pitch is None else pitch
        span = max(0, count - 1) * abs(self.pitch)
        self.start = GUARD + shift + (span if self.pitch < 0 else 0)
        self.memory = memory or Memory(2 * GUARD + shift + span + row_bytes, seed)
        dtype = np.dtype(dtype)
        self.array = self.memory.array(
            self.start, (count, row_bytes // dtype.itemsize), (self.pitch, dtype.itemsize), dtype
        )

    def shaped(self, leading, row_shape):
        """These rows with an array of more dimensions: of heads, or of pages, over the same memory; returns self.

        `leading` are the dimensions that count rows, in C order, and `row_shape` those of a row, dense.
        """
        itemsize = self.array.dtype.itemsize
        assert math.prod(leading) == self.count
        assert math.prod(row_shape) * itemsize == self.row_bytes
        strides = [math.prod(leading[i + 1 :]) * self.pitch for i in range(len(leading))]
        strides += [math.prod(row_shape[i + 1 :]) * itemsize for i in range(len(row_shape))]
        self.array = self.memory.array(self.start, (*leading, *row_shape), tuple(strides), self.array.dtype)
        return self

    def where(self, row):
        first = self.start + int(row) * self.pitch
        return slice(first, first + self.row_bytes)


def index_array(slots, dtype="int64", step=1):
    """Slots `step` elements apart (negative: stored backwards), random bits between; (memory, array)."""
    dtype = np.dtype(dtype)
    span = max(0, len(slots) - 1) * abs(step)
    memory = Memory(2 * GUARD + (span + 1) * dtype.itemsize, seed=5)
    start = GUARD + (span * dtype.itemsize if step < 0 else 0)
    for i, slot in enumerate(slots):
        at = start + i * step * dtype.itemsize
        memory.expected[at : at + dtype.itemsize] = np.frombuffer(np.array(slot, dtype).tobytes(), np.uint8)
    if SIMULATED:
        memory.memory[:] = memory.expected
    else:
        memory.memory.copy_to_device(memory.expected)
    return memory, memory.array(start, (len(slots),), (step * dtype.itemsize,), dtype)


def expect_store(source, cache, slots, skip_index=None):
    """The oracle: a plain loop over bytes."""
    for row, slot in enumerate(slots):
        if slot == skip_index:
            continue
        cache.memory.expected[cache.where(slot)] = source.memory.expected[source.where(row)]


def synchronize():
    if ON_GPU:
        cuda.synchronize()


def store_and_check(k, v, k_cache, v_cache, slots, *, index_dtype="int64", index_step=1, **options):
    """Store, and compare every byte of every memory involved with the plain loop's."""
    index_memory, indices = index_array(slots, index_dtype, index_step)
    expect_store(k, k_cache, slots, options.get("skip_index"))
    expect_store(v, v_cache, slots, options.get("skip_index"))
    store_kvcache(k.array, v.array, k_cache.array, v_cache.array, indices, **options)
    synchronize()
    memories = {id(m): m for m in (k.memory, v.memory, k_cache.memory, v_cache.memory, index_memory)}
    for memory in memories.values():
        memory.check()


def make_rows(batch, slots, row_bytes, v_row_bytes=None, dtype="uint8"):
    """k, v, k_cache, v_cache, all dense."""
    v_row_bytes = v_row_bytes or row_bytes
    return (
        Rows(batch, row_bytes, seed=1, dtype=dtype),
        Rows(batch, v_row_bytes, seed=2, dtype=dtype),
        Rows(slots, row_bytes, seed=3, dtype=dtype),
        Rows(slots, v_row_bytes, seed=4, dtype=dtype),
    )


class InterfaceArray:
    """Nothing but a `__cuda_array_interface__`."""

    def __init__(self, address, shape, typestr, **entries):
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": typestr, "data": (address, False), "version": 3, **entries
        }  # fmt: skip


def interface_of(rows, typestr="|u1", **entries):
    """The array-interface stub over `rows`, with explicit strides."""
    itemsize = np.dtype(typestr).itemsize
    entries.setdefault("strides", (rows.pitch, itemsize))
    address = rows.memory.address(rows.start)
    return InterfaceArray(address, (rows.count, rows.row_bytes // itemsize), typestr, **entries)
