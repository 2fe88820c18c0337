"""What only a GPU shows: the full grid, 64-bit offsets, traps, streams, early launch, graphs, processes, threads.

"REPORTS n" are the numbered kinds of fault in docs/reports.md.
"""

import contextlib
import sys
import threading
import warnings

import numpy as np
import pytest
from numba import cuda
from support import (
    GUARD,
    ON_GPU,
    SIMULATED,
    expect_store,
    index_array,
    make_rows,
    needs_gpu,
    optional,
    run_python,
    run_whole_calls,
    store_and_check,
)

from numba_kvcache import compiler, driver, fast_road, kernel, launch, settings, store_kvcache, warmup
from numba_kvcache.layout import PLAIN, Strategy, plan_store

if not SIMULATED:
    from cuda.bindings import driver as cu
    from numba import types
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.extending import intrinsic

    from numba_kvcache.device import release_dependents

pytestmark = needs_gpu

has_early_launch = pytest.mark.skipif(
    not ON_GPU or driver.compute_capability(0) < (9, 0), reason="early launch needs compute capability 9.0"
)
# Kernels of the tests' own, launched through Numba, are small.
small_grids = pytest.mark.filterwarnings("ignore:.*Grid size")


def gpu_view(memory, offset, shape, strides, dtype):
    return DeviceNDArray(shape, strides, dtype, gpu_data=memory.gpu_data.view(offset))


def random_bytes(size, seed):
    return np.random.default_rng(seed).integers(0, 2**64, -(-size // 8), np.uint64).view(np.uint8)[:size]


# ----------------------------------------------------------------------------------------------------------------------
# The grid: every row width x batch x index type x split, the whole of both caches compared, guards included.

ROW_BYTES = (4, 8, 12, 92, 128, 192, 196, 200, 256, 512, 516, 1024, 2048, 2052, 4096, 8192, 16388)
BATCHES = (0, 1, 2, 3, 7, 127, 128, 129, 1000, 16384)
SPLIT_MULTIPLE = {0: 4, 1: 4, 2: 256, 4: 512}


class Side:
    """K or V of one shape: a source, and a cache that is renewed for every call."""

    def __init__(self, batch, slots, row_bytes, seed):
        self.shape, self.row_bytes = (slots, row_bytes // 4), row_bytes
        self.source_host = random_bytes(batch * row_bytes, seed).reshape(batch, row_bytes)
        self.source = (
            cuda.to_device(self.source_host.view(np.int32))
            if batch
            else cuda.device_array((0, row_bytes // 4), np.int32)
        )
        self.before = random_bytes(slots * row_bytes + 2 * GUARD, seed + 1)
        self.pristine, self.memory = cuda.to_device(self.before), cuda.device_array(self.before.size, np.uint8)
        self.cache = gpu_view(self.memory, GUARD, self.shape, (row_bytes, 4), np.int32)

    def renew(self):
        self.memory.copy_to_device(self.pristine)

    def expected(self, slots, skip_index=None):
        after = self.before.copy()
        rows = after[GUARD:-GUARD].reshape(self.shape[0], self.row_bytes)
        for i, slot in enumerate(slots):
            if slot != skip_index:
                rows[slot] = self.source_host[i]
        return after


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_grid(row_bytes):
    wrong = []
    for batch in BATCHES:
        slots = np.random.default_rng(batch).permutation(batch + 37)[:batch]
        k, v = (Side(batch, batch + 37, row_bytes, seed) for seed in (10, 20))
        expected = [side.expected(slots) for side in (k, v)]
        for index_dtype in (np.int32, np.int64):
            indices = cuda.to_device(slots.astype(index_dtype)) if batch else cuda.device_array(0, index_dtype)
            for split in [split for split, multiple in SPLIT_MULTIPLE.items() if row_bytes % multiple == 0]:
                k.renew()
                v.renew()
                store_kvcache(k.source, v.source, k.cache, v.cache, indices, split)
                now = [side.memory.copy_to_host() for side in (k, v)]
                if not all(map(np.array_equal, now, expected)):
                    wrong.append((batch, index_dtype.__name__, split))
    assert wrong == []


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("skipped", ["none", "some", "all"])
@pytest.mark.parametrize("in_cache", [False, True], ids=["-1", "a slot"])
def test_rows_left_out(in_cache, skipped, index_dtype):
    """Every strategy's batches and some layouts: half of the rows at random places, or all, name the index to skip."""
    wrong = []
    for row_bytes in (4, 92, 128, 1024, 2052, 8192):
        for batch in (1, 3, 128, 1000, 16384):
            if batch * row_bytes > 2**25:
                continue
            rng = np.random.default_rng(batch + row_bytes)
            skip_index = batch + 20 if in_cache else -1
            slots = rng.permutation(batch)
            if skipped != "none":
                slots[rng.random(batch) < (2 if skipped == "all" else 0.5)] = skip_index
            k, v = (Side(batch, batch + 37, row_bytes, seed) for seed in (10, 20))
            expected = [side.expected(slots, skip_index) for side in (k, v)]
            indices = cuda.to_device(slots.astype(index_dtype))
            for split in [split for split, multiple in SPLIT_MULTIPLE.items() if row_bytes % multiple == 0]:
                k.renew()
                v.renew()
                store_kvcache(k.source, v.source, k.cache, v.cache, indices, split, skip_index=skip_index)
                now = [side.memory.copy_to_host() for side in (k, v)]
                if not all(map(np.array_equal, now, expected)):
                    wrong.append((row_bytes, batch, split))
    assert wrong == []


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "bool", "float16", "int16", "float32", "float64", "complex64", "complex128"]
)
@pytest.mark.parametrize("split", [0, 1, 2, 4])
def test_item_sizes(dtype, split):
    slots = np.random.default_rng(1).permutation(300)[:129]
    store_and_check(*make_rows(129, 300, 1024, dtype=dtype), slots, num_split=split)


# ----------------------------------------------------------------------------------------------------------------------
# REPORTS 15: streams. Each producer sleeps, then fills k, v and indices; a store on another stream would find old data.


@contextlib.contextmanager
def non_blocking_stream():
    """A stream that does not wait for the legacy default stream. (Numba's own do, which hides a wrong stream.)"""
    cuda.current_context()
    handle = driver.check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
    try:
        yield int(handle)
    finally:
        driver.check(cu.cuStreamSynchronize(handle))
        driver.check(cu.cuStreamDestroy(handle))


if not SIMULATED:

    @cuda.jit
    def late_fill(k, v, indices, slots, value, microseconds):
        for _ in range(microseconds):
            cuda.nanosleep(1000)
        i = cuda.grid(1)
        if i < k.size:
            k[i] = value + i
            v[i] = value + 100_000 + i
        if i < indices.size:
            indices[i] = slots[i]

    @cuda.jit
    def early_fill(k, v, indices, slots, value, microseconds):
        """late_fill, but whatever comes next may start at once."""
        release_dependents()
        for _ in range(microseconds):
            cuda.nanosleep(1000)
        i = cuda.grid(1)
        if i < k.size:
            k[i] = value + i
            v[i] = value + 100_000 + i
        if i < indices.size:
            indices[i] = slots[i]


class Chain:
    """Three rows of 256 words that a kernel fills late, and the store behind it."""

    OLD, NEW = (1, 2, 3), (11, 12, 13)

    def __init__(self, stale=OLD):
        self.k, self.v = (cuda.to_device(np.zeros(3 * 256, np.uint32)) for _ in range(2))
        self.caches = [cuda.to_device(np.zeros((16, 256), np.uint32)) for _ in range(2)]
        self.stale, self.slots = (cuda.to_device(np.array(slots, np.int32)) for slots in (stale, self.NEW))
        self.indices = cuda.to_device(np.array(stale, np.int32))
        cuda.synchronize()

    def arguments(self):
        return (self.k.reshape(3, 256), self.v.reshape(3, 256), *self.caches, self.indices)

    def fill(self, producer, value, stream, microseconds=100):
        self.indices.copy_to_device(self.stale, stream=stream)
        producer[3, 256, stream](self.k, self.v, self.indices, self.slots, value, microseconds)

    def results(self, stream):
        return [cache.copy_to_host(stream=stream) for cache in self.caches]

    def expected(self, value):
        out = [np.zeros((16, 256), np.uint32) for _ in range(2)]
        for array, first in zip(out, (value, value + 100_000), strict=True):
            for row, slot in enumerate(self.NEW):
                array[slot] = np.arange(first + 256 * row, first + 256 * (row + 1))
        return out


@small_grids
@pytest.mark.parametrize("named", ["numba", "handle"])
def test_explicit_stream(named):
    chain = Chain()
    with non_blocking_stream() as handle:
        stream = cuda.external_stream(handle)
        for i in range(200):
            chain.fill(late_fill, 1000 * (i + 1), stream)
            store_kvcache(*chain.arguments(), stream=stream if named == "numba" else handle)
            results = chain.results(stream)
            stream.synchronize()
            np.testing.assert_array_equal(results, chain.expected(1000 * (i + 1)))


@small_grids
def test_a_wrong_stream_would_show():
    """The control of the test above: named the default stream, the store finds the slots of before."""
    chain = Chain()
    store_kvcache(*chain.arguments())  # warm
    cuda.synchronize()
    with non_blocking_stream() as handle:
        stream = cuda.external_stream(handle)
        chain.fill(late_fill, 1000, stream, microseconds=20_000)
        store_kvcache(*chain.arguments(), stream=0)
        stream.synchronize()
        assert not np.array_equal(chain.results(0), chain.expected(1000))


@small_grids
def test_numbas_default_stream():
    chain = Chain()
    for i in range(50):
        chain.fill(late_fill, 1000 * (i + 1), 0)
        store_kvcache(*chain.arguments())
        np.testing.assert_array_equal(chain.results(0), chain.expected(1000 * (i + 1)))


@pytest.mark.parametrize("side", [True, False], ids=["side stream", "default stream"])
def test_torch_current_stream(side):
    torch = optional("torch")
    k, v = (torch.zeros(4, 128, dtype=torch.int32, device="cuda") for _ in range(2))
    indices = torch.zeros(4, dtype=torch.int64, device="cuda")
    base = torch.arange(512, dtype=torch.int32, device="cuda").reshape(4, 128)
    slots = torch.tensor([9, 0, 4, 7], device="cuda")
    store_kvcache(k, v, *(torch.zeros(16, 128, dtype=torch.int32, device="cuda") for _ in range(2)), slots)  # warm
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(torch.cuda.Stream()) if side else contextlib.nullcontext():
        for i in range(200):
            caches = [torch.zeros(16, 128, dtype=torch.int32, device="cuda") for _ in range(2)]
            torch.cuda._sleep(200_000)  # some 100 us
            torch.add(base, 1000 * i, out=k)
            torch.add(base, 1000 * i + 500_000, out=v)
            torch.add(slots, i % 3, out=indices)
            store_kvcache(k, v, *caches, indices)
            results.append(caches)
        torch.cuda.current_stream().synchronize()
    for i, caches in enumerate(results):
        for cache, first in zip(caches, (1000 * i, 1000 * i + 500_000), strict=True):
            expected = np.zeros((16, 128), np.int32)
            expected[np.array([9, 0, 4, 7]) + i % 3] = np.arange(512).reshape(4, 128) + first
            np.testing.assert_array_equal(cache.cpu().numpy(), expected)


@small_grids
@pytest.mark.parametrize("owner", ["torch", "numba"])
def test_arguments_of_two_libraries_follow_the_owner_of_k_cache(owner):
    """k, v and indices are Numba's, the caches one of each; a torch side stream is current, but that is not enough."""
    torch = optional("torch")
    chain = Chain()
    k, v, k_cache, v_cache, indices = chain.arguments()
    k, v, *caches = (array.view(np.int32) for array in (k, v, k_cache, v_cache))  # torch's type of that size
    which = 0 if owner == "torch" else 1
    caches[which] = torch.as_tensor(caches[which], device="cuda")
    store_kvcache(k, v, *(cuda.to_device(np.zeros((16, 256), np.int32)) for _ in range(2)), indices)  # warm
    side = torch.cuda.Stream()
    stream = cuda.external_stream(side.cuda_stream) if owner == "torch" else cuda.default_stream()
    cuda.synchronize()
    with torch.cuda.stream(side):
        for i in range(50):
            chain.fill(late_fill, 1000 * (i + 1), stream)
            store_kvcache(k, v, *caches, indices)
            results = chain.results(stream)
            stream.synchronize()
            np.testing.assert_array_equal(results, chain.expected(1000 * (i + 1)))


@pytest.mark.parametrize("side", [True, False], ids=["side stream", "default stream"])
def test_cupy_current_stream(side):
    cupy = optional("cupy")
    host = np.arange(512, dtype=np.int32).reshape(4, 128)
    base, slots = cupy.asarray(host), cupy.asarray(np.array([9, 0, 4, 7]))
    k, v, indices = cupy.zeros_like(base), cupy.zeros_like(base), cupy.zeros_like(slots)
    heavy = cupy.ones((2048, 2048), cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True) if side else cupy.cuda.Stream.null
    results = []
    cupy.cuda.Device().synchronize()
    with stream:
        for i in range(50):
            caches = [cupy.zeros((16, 128), cupy.int32) for _ in range(2)]
            cupy.sqrt(heavy, out=heavy)
            cupy.add(base, 1000 * i, out=k)
            cupy.add(base, 1000 * i + 500_000, out=v)
            cupy.add(slots, i % 3, out=indices)
            store_kvcache(k, v, *caches, indices)
            results.append(caches)
        stream.synchronize()
    for i, caches in enumerate(results):
        for cache, first in zip(caches, (1000 * i, 1000 * i + 500_000), strict=True):
            expected = np.zeros((16, 128), np.int32)
            expected[np.array([9, 0, 4, 7]) + i % 3] = host + first
            np.testing.assert_array_equal(cupy.asnumpy(cache), expected)


@pytest.mark.parametrize("library", ["numba", "torch", "cupy", "cuda.core"])
def test_stream_objects_are_taken(library):
    """The stream of each library by itself; that it is the one used, the tests above show."""
    from numba_kvcache.arrays import stream_handle

    with non_blocking_stream() as handle:
        if library == "numba":
            stream = cuda.external_stream(handle)
        elif library == "torch":
            stream = optional("torch").cuda.ExternalStream(handle)
        elif library == "cupy":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # CuPy 14.2 prefers a newer spelling
                stream = optional("cupy").cuda.ExternalStream(handle)
        else:
            from cuda.core import Stream

            stream = Stream.from_handle(handle)
        assert stream_handle(stream) == handle


# ----------------------------------------------------------------------------------------------------------------------
# REPORTS 21: early launch. The store's grid is there while its producer still sleeps; it must not read before.


@small_grids
@has_early_launch
def test_nothing_is_read_before_the_producer_has_finished():
    """The stale index would trap, the stale rows would show."""
    chain = Chain(stale=(2**31 - 1,) * 3)
    warmup(1024, index_dtype="int32")
    for i in range(1000):
        chain.fill(early_fill, 1000 * (i + 1), 0, microseconds=50)
        store_kvcache(*chain.arguments())
        np.testing.assert_array_equal(chain.results(0), chain.expected(1000 * (i + 1)))


if not SIMULATED:

    @intrinsic
    def no_wait(typingctx):
        """wait_primary without its instruction."""

        def codegen(context, builder, signature, arguments):
            return context.get_dummy_value()

        return types.void(), codegen


def stale_results(chain, strategy, repeats, microseconds):
    """How many of the stores of one kernel, each right behind its producer, stored anything but the new rows."""
    spec = kernel.StoreSpec(plan_store(1024), 32, early_launch=True, strategy=strategy)
    capability = driver.compute_capability(0)
    linked = compiler.link_cubin(compiler.compile_ptx(spec, capability), capability)
    handle = driver.load_kernel(linked.cubin, spec.name)
    addresses = [array.device_ctypes_pointer.value for array in chain.arguments()]
    arguments = (*addresses, 1024, 1024, 1024, 1024, 4, 3, 16, 0)
    stale = 0
    for i in range(repeats):
        chain.fill(early_fill, 1000 * (i + 1), 0, microseconds)
        launch.launch(launch.Launch(handle, spec.layout.grid(3), spec.layout.block, True), 0, arguments)
        stale += not np.array_equal(chain.results(0), chain.expected(1000 * (i + 1)))
    return stale


STRATEGIES = (PLAIN, Strategy(bypass_l1=True), Strategy(release_first=True))


@small_grids
@has_early_launch
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_strategy_waits(strategy):
    assert stale_results(Chain(stale=(2**31 - 1,) * 3), strategy, repeats=200, microseconds=100) == 0


@small_grids
@has_early_launch
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_without_the_wait_stale_data_would_show(strategy, monkeypatch):
    """The control: the same kernel with the wait taken out, launched the same way, stores to the stale slots."""
    monkeypatch.setattr(kernel, "wait_primary", no_wait)
    monkeypatch.setattr(kernel, "build_kernel", kernel.build_kernel.__wrapped__)
    assert stale_results(Chain(), strategy, repeats=20, microseconds=500) > 0


# ----------------------------------------------------------------------------------------------------------------------
# CUDA graphs.


@contextlib.contextmanager
def captured(stream):
    """Capture what goes to `stream` in the strictest mode; yields a list that then holds the executable graph."""
    graph = []
    driver.check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    try:
        yield graph
    finally:
        graph.append(driver.check(cu.cuGraphInstantiate(driver.check(cu.cuStreamEndCapture(stream)), 0)))


def replay_and_check(graph, stream, rows, slots):
    for source, cache in zip(rows[:2], rows[2:], strict=True):
        cache.memory.check()  # captured, not run
        source.memory.expected[:] = random_bytes(source.memory.expected.size, 77)
        source.memory.memory.copy_to_device(source.memory.expected)
        expect_store(source, cache, slots)
    cuda.synchronize()
    for _ in range(2):
        driver.check(cu.cuGraphLaunch(graph[0], stream))
        driver.check(cu.cuStreamSynchronize(stream))
        for cache in rows[2:]:
            cache.memory.check()


@pytest.mark.parametrize("row_bytes", [1024, 1000], ids=["warm", "first call"])
def test_capture_and_replay(row_bytes, monkeypatch):
    """A first call compiles and loads within the capture, in a mode that forbids most calls to the driver."""
    slots = [9, 0, 4, 7, 2]
    rows = make_rows(5, 11, row_bytes)
    _, indices = index_array(slots)
    if row_bytes == 1024:
        warmup(1024)
    else:
        monkeypatch.setattr(settings, "cache_folder", lambda: None)
    cuda.synchronize()
    with non_blocking_stream() as stream:
        with captured(stream) as graph:
            store_kvcache(*(r.array for r in rows), indices, stream=stream)
        replay_and_check(graph, stream, rows, slots)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_padding_of_a_graph(index_dtype):
    """One graph of 8 rows, replayed for batches of other sizes: what is not needed names the index to skip."""
    rows = make_rows(8, 11, 1024)
    indices = cuda.to_device(np.zeros(8, index_dtype))
    warmup(1024, index_dtype=index_dtype, skipping=True)
    cuda.synchronize()
    with non_blocking_stream() as stream:
        with captured(stream) as graph:
            store_kvcache(*(r.array for r in rows), indices, stream=stream, skip_index=-1)
        batches = ([9, 0, 4, 7, 2, -1, -1, -1], [-1] * 8, [-1, 3, -1, 10, -1, -1, 1, 5], [7, 6, 5, 4, 3, 2, 1, 0])
        for replay, slots in enumerate(batches):
            indices.copy_to_device(np.array(slots, index_dtype))
            for number, (source, cache) in enumerate(zip(rows[:2], rows[2:], strict=True)):
                source.memory.expected[:] = random_bytes(source.memory.expected.size, 2 * replay + number)
                source.memory.memory.copy_to_device(source.memory.expected)
                expect_store(source, cache, slots, -1)
            cuda.synchronize()
            driver.check(cu.cuGraphLaunch(graph[0], stream))
            driver.check(cu.cuStreamSynchronize(stream))
            for cache in rows[2:]:
                cache.memory.check()


def test_the_very_first_call_is_captured():
    """Of a process: whatever is set up once, is set up within the capture."""
    code = """
from support import index_array, make_rows
from test_gpu import captured, non_blocking_stream, replay_and_check
from numba_kvcache import store_kvcache
slots = [9, 0, 4, 7, 2]
rows = make_rows(5, 11, 256)
indices = index_array(slots)[1]
with non_blocking_stream() as stream:
    with captured(stream) as graph:
        store_kvcache(*(r.array for r in rows), indices, stream=stream)
    replay_and_check(graph, stream, rows, slots)
"""
    result = run_python(code, NUMBA_KVCACHE_CACHE_DIR="")
    assert result.returncode == 0, result.stdout + result.stderr


def test_torch_graph():
    torch = optional("torch")
    k, v = (torch.zeros(4, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    caches = [torch.zeros(16, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    indices = torch.zeros(4, dtype=torch.int64, device="cuda")
    store_kvcache(k, v, *caches, indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_kvcache(k, v, *caches, indices)
    expected = [torch.zeros(16, 128, dtype=torch.bfloat16) for _ in range(2)]
    for i, slots in enumerate(([9, 0, 4, 7], [1, 15, 2, 3])):
        indices.copy_(torch.tensor(slots))
        for source, cache, first in zip((k, v), expected, (i, 100 + i), strict=True):
            values = torch.arange(first, first + 512).reshape(4, 128).to(torch.bfloat16)
            source.copy_(values)
            cache[slots] = values
        graph.replay()
        for cache, right in zip(caches, expected, strict=True):
            cache_now = cache.cpu()
            if i == 0:  # the warm call wrote zeros, to slot 0
                assert not cache_now[1].any()
            assert torch.equal(cache_now.view(torch.int16), right.view(torch.int16))


# ----------------------------------------------------------------------------------------------------------------------
# REPORTS 3 and 11 with torch, and CuPy.

TORCH_TYPES = {
    "bfloat16": 128, "float16": 128, "float8_e4m3fn": 128, "float8_e5m2": 128, "int8": 128, "complex64": 16,
    "float64": 8, "bool": 128,
}  # fmt: skip


def torch_rows(torch, rows, width, dtype, seed):
    """Rows of random bits, NaNs of every kind included; bool holds 0 and 1 alone."""
    itemsize = getattr(torch, dtype).itemsize
    bits = random_bytes(rows * width * itemsize, seed).reshape(rows, width * itemsize)
    bits = bits & 1 if dtype == "bool" else bits
    return torch.from_numpy(bits.copy()).cuda().view(getattr(torch, dtype))


def host_bytes(torch, tensor):
    return tensor.detach().contiguous().view(torch.uint8).cpu().numpy()


@pytest.mark.parametrize("dtype", TORCH_TYPES)
@pytest.mark.parametrize("times", [1, 3])
def test_torch_types(dtype, times):
    torch = optional("torch")
    width, slots = TORCH_TYPES[dtype], [5, 0, 2, 7]
    k, v = (torch_rows(torch, 4, width, dtype, seed) for seed in (1, 2))
    caches = [torch_rows(torch, 9, width, dtype, seed) for seed in (3, 4)]
    expected = [host_bytes(torch, cache) for cache in caches]
    for source, cache in zip((k, v), expected, strict=True):
        cache[slots] = host_bytes(torch, source)
    for _ in range(times):
        store_kvcache(k, v, *caches, torch.tensor(slots, device="cuda"))
    for cache, right in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(host_bytes(torch, cache), right)


@pytest.mark.parametrize(
    ("k", "v", "caches", "message"),
    [
        ("bfloat16", "bfloat16", "float16", "k and k_cache .* bfloat16 and float16"),
        ("float8_e4m3fn", "float8_e4m3fn", "uint8", "k and k_cache .* float8_e4m3fn and uint8"),
        ("bfloat16", "float16", "bfloat16", "v and k_cache .* float16 and bfloat16"),
    ],
)
def test_torch_types_that_differ(k, v, caches, message):
    torch = optional("torch")
    arrays = [torch_rows(torch, 4, 128, dtype, seed) for seed, dtype in enumerate((k, v, caches, caches))]
    before = [host_bytes(torch, array) for array in arrays]
    with pytest.raises(TypeError, match=message):
        store_kvcache(*arrays, torch.tensor([3, 0, 1, 2], device="cuda"))
    torch.cuda.synchronize()
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(host_bytes(torch, array), old)


def test_fp8_into_uint8_once_viewed_alike():
    torch = optional("torch")
    k, v = (torch_rows(torch, 2, 128, "float8_e4m3fn", seed) for seed in (1, 2))
    caches = [torch.zeros(4, 128, dtype=torch.uint8, device="cuda") for _ in range(2)]
    store_kvcache(k.view(torch.uint8), v.view(torch.uint8), *caches, torch.tensor([3, 1], device="cuda"))
    assert torch.equal(caches[0][[3, 1]], k.view(torch.uint8))
    assert torch.equal(caches[1][[3, 1]], v.view(torch.uint8))


def test_gradients_are_left_alone():
    torch = optional("torch")
    k, v = (torch.randn(2, 128, device="cuda", requires_grad=True) for _ in range(2))
    caches = [torch.zeros(4, 128, device="cuda") for _ in range(2)]
    store_kvcache(k * 2, v, *caches, torch.tensor([3, 1], device="cuda"))
    assert torch.equal(caches[0][[3, 1]], (k * 2).detach())
    assert torch.equal(caches[1][[3, 1]], v.detach())
    assert not any(cache.requires_grad for cache in caches)


@pytest.mark.parametrize("times", [1, 2])
def test_lazily_conjugated_tensors_are_refused(times):
    torch = optional("torch")
    k = torch_rows(torch, 2, 16, "complex64", 1)
    caches = [torch_rows(torch, 4, 16, "complex64", seed) for seed in (3, 4)]
    for _ in range(times):  # the second time the type is known
        store_kvcache(k, k, *caches, torch.tensor([3, 1], device="cuda"))
        with pytest.raises(ValueError, match="v is a lazily conjugated"):
            store_kvcache(k, k.conj(), *caches, torch.tensor([3, 1], device="cuda"))


def test_projection_slices_allocate_nothing():
    torch = optional("torch")
    qkv = torch.arange(5 * 640, device="cuda").to(torch.float16).reshape(5, 640)
    before, slots = qkv.clone(), torch.tensor([9, 0, 4, 7, 2], device="cuda")
    caches = [torch.zeros(11, 128, dtype=torch.float16, device="cuda") for _ in range(2)]
    k, v, one_row = qkv[:, 384:512], qkv[:, 512:640], qkv[:1, :128].expand(5, 128)
    dense = v.contiguous()
    cases = ((k, v), (k, dense), (one_row, v))
    for sources in cases:
        torch.cuda.synchronize()
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        store_kvcache(*sources, *caches, slots)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocations
        for source, cache in zip(sources, caches, strict=True):
            assert torch.equal(cache[slots], source)
    assert torch.equal(qkv, before)
    with pytest.raises(ValueError, match="k must have dense rows"):
        store_kvcache(torch.zeros(128, 5, dtype=torch.float16, device="cuda").T, v, *caches, slots)


# (heads of K, elements of a head of K, heads of V, elements of a head of V)
MODELS = {
    "Llama 3 8B": (8, 128, 8, 128),
    "Llama 3 70B on 8 GPUs": (1, 128, 1, 128),
    "Phi-3 mini": (32, 96, 32, 96),
    "Gemma 2 9B": (8, 256, 8, 256),
    "heads of two widths": (16, 192, 16, 128),
}


@pytest.mark.parametrize("skip_index", [None, -1])
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("model", MODELS)
def test_heads_and_pages_of_models(model, page_size, skip_index):
    """k and v as slices of one projection, heads and all; slots counted by hand."""
    torch = optional("torch")
    k_heads, k_size, v_heads, v_size = MODELS[model]
    batch, slots = 37, 112
    widths = [k_heads * k_size, k_heads * k_size, v_heads * v_size]
    qkv = torch_rows(torch, batch, sum(widths), "bfloat16", 1)
    _, k, v = qkv.split(widths, dim=1)
    pools = [torch_rows(torch, slots, width, "bfloat16", seed) for seed, width in ((2, widths[1]), (3, widths[2]))]
    expected = [pool.clone().view(torch.int16) for pool in pools]
    where = np.random.default_rng(4).permutation(slots)[:batch]
    if skip_index is not None:
        where[::5] = skip_index
    for source, right in zip((k, v), expected, strict=True):
        for row, slot in enumerate(where.tolist()):
            if slot != skip_index:
                right[slot] = source[row].view(torch.int16)
    leading = (slots,) if page_size is None else (slots // page_size, page_size)
    k, v = k.view(batch, k_heads, k_size), v.view(batch, v_heads, v_size)
    caches = [pools[0].view(*leading, k_heads, k_size), pools[1].view(*leading, v_heads, v_size)]
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    indices = torch.from_numpy(where).cuda()
    more = torch.cuda.memory_stats()["allocation.all.allocated"]
    store_kvcache(k, v, *caches, indices, skip_index=skip_index)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == more > allocations
    for pool, right in zip(pools, expected, strict=True):
        assert torch.equal(pool.view(torch.int16), right)


def test_heads_and_pages_that_are_refused():
    """Strided heads, heads before slots, K's and V's pages in turn: nothing is written."""
    torch = optional("torch")
    k, v = (torch_rows(torch, 4, 8 * 64, "float16", seed).view(4, 8, 64) for seed in (1, 2))
    pool = torch_rows(torch, 6 * 2 * 16, 8 * 64, "float16", 3).view(6, 2, 16, 8, 64)
    before, slots = pool.clone().view(torch.int16), torch.tensor([5, 0, 2, 95], device="cuda")
    k_cache, v_cache = pool[:, 0], pool[:, 1]
    plain = torch.zeros(96, 8, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match=r"k_cache must have one stride for the slots of all pages.*whole pool"):
        store_kvcache(k, v, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="k must have dense rows"):
        store_kvcache(torch.cat((k, k), 2)[:, :, :64], v, plain, plain.clone(), slots)
    heads_first = pool.view(12, 8, 16, 64).transpose(1, 2)
    with pytest.raises(ValueError, match="v_cache must have dense rows"):
        store_kvcache(k, v, plain, heads_first, slots)
    with pytest.raises(ValueError, match="view k or k_cache like the other"):
        store_kvcache(k.flatten(1), v, plain, plain.clone(), slots)
    torch.cuda.synchronize()
    assert torch.equal(pool.view(torch.int16), before)
    assert not plain.any()
    # What the message says to do: slots of the whole pool, where V's are a page further.
    flat = pool.view(-1, 8, 64)
    store_kvcache(k, v, flat[:-16], flat[16:], slots // 16 * 32 + slots % 16)
    for i, slot in enumerate((5, 0, 2, 95)):
        before[slot // 16, 0, slot % 16] = k[i].view(torch.int16)
        before[slot // 16, 1, slot % 16] = v[i].view(torch.int16)
    assert torch.equal(pool.view(torch.int16), before)


def test_layer_of_a_pool():
    """REPORTS 13."""
    torch = optional("torch")
    pools = [torch_rows(torch, 4 * 64, 128, "float16", seed).view(4, 64, 128) for seed in (1, 2)]
    expected = [pool.clone().view(torch.int16) for pool in pools]
    k, v = (torch_rows(torch, 2, 128, "float16", seed) for seed in (3, 4))
    for pool, source in zip(expected, (k, v), strict=True):
        pool[2, 0], pool[2, 63] = source.view(torch.int16)
    store_kvcache(k, v, pools[0][2], pools[1][2], torch.tensor([0, 63], device="cuda"))
    for pool, right in zip(pools, expected, strict=True):
        assert torch.equal(pool.view(torch.int16), right)


def test_host_tensors_are_refused():
    torch = optional("torch")
    k, cache = torch.zeros(2, 128, device="cuda"), torch.zeros(4, 128, device="cuda")
    with pytest.raises(
        TypeError, match=r"indices must be an array that a kernel can reach, got torch\.Tensor on device cpu"
    ):
        store_kvcache(k, k, cache, cache.clone(), torch.tensor([3, 1]))


@pytest.mark.parametrize("dtype", ["float16", "int8", "complex64", "float64"])
def test_cupy_arrays(dtype):
    cupy = optional("cupy")
    itemsize = np.dtype(dtype).itemsize
    hosts = [random_bytes(n * 64 * itemsize, seed).reshape(n, -1) for seed, n in enumerate((3, 3, 7, 7))]
    arrays = [cupy.asarray(host).view(dtype) for host in hosts]
    store_kvcache(*arrays, cupy.asarray(np.array([6, 0, 3])))
    for source, cache, array in zip(hosts[:2], hosts[2:], arrays[2:], strict=True):
        cache[[6, 0, 3]] = source
        np.testing.assert_array_equal(cupy.asnumpy(array).view(np.uint8), cache)


def test_arrays_of_three_libraries_in_one_call():
    torch, cupy = optional("torch"), optional("cupy")
    host = np.arange(256, dtype=np.int32).reshape(2, 128)
    caches = [torch.zeros(4, 128, dtype=torch.int32, device="cuda"), cupy.zeros((4, 128), cupy.int32)]
    cupy.cuda.Device().synchronize()
    store_kvcache(cuda.to_device(host), cupy.asarray(host + 500), *caches, torch.tensor([3, 1], device="cuda"))
    torch.cuda.synchronize()
    np.testing.assert_array_equal(caches[0].cpu().numpy()[[3, 1]], host)
    np.testing.assert_array_equal(cupy.asnumpy(caches[1])[[3, 1]], host + 500)


# ----------------------------------------------------------------------------------------------------------------------
# REPORTS 17 and threads: contexts.


def current_context():
    return int(driver.check(cu.cuCtxGetCurrent()))


def test_current_device_is_left_as_it_was():
    rows = make_rows(3, 7, 128)
    before = current_context()
    store_and_check(*rows, [6, 0, 3])
    assert current_context() == before != 0


def test_thread_without_a_context():
    rows, (_, indices) = make_rows(3, 7, 128), index_array([6, 0, 3])
    for source, cache in zip(rows[:2], rows[2:], strict=True):
        expect_store(source, cache, [6, 0, 3])
    contexts = []

    def work():
        contexts.append(current_context())
        store_kvcache(*(r.array for r in rows), indices)
        contexts.append(current_context())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert contexts == [0, 0]
    cuda.synchronize()
    for r in rows:
        r.memory.check()


def test_another_gpu_than_the_current_one():
    torch = optional("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        k, v = (torch_rows(torch, 4, 128, "bfloat16", seed).to(device) for seed in (1, 2))
        caches = [torch.zeros(9, 128, dtype=torch.bfloat16, device=device) for _ in range(2)]
        slots = torch.tensor([5, 0, 2, 7], device=device)
        store_kvcache(k, v, *caches, slots)
        for source, cache in zip((k, v), caches, strict=True):
            assert torch.equal(cache[slots].view(torch.int16), source.view(torch.int16))
        assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="k on device 0 and k_cache on device 1"):
        store_kvcache(k.to("cuda:0"), v, *caches, slots)


# ----------------------------------------------------------------------------------------------------------------------
# REPORTS 19: noise. (All tests here run with warnings as errors.)


def test_users_own_small_kernel_still_warns():
    from numba.cuda.core.errors import NumbaPerformanceWarning

    @cuda.jit
    def nothing(words):
        words[0] = 1

    store_and_check(*make_rows(1, 1, 128), [0])
    with pytest.warns(NumbaPerformanceWarning, match="Grid size 1"):
        nothing[1, 32](cuda.to_device(np.zeros(4, np.int32)))


# ----------------------------------------------------------------------------------------------------------------------
# The whole call again, each way that a switch or a machine may take it.


@pytest.mark.parametrize("variable", ["NUMBA_KVCACHE_NATIVE", "NUMBA_KVCACHE_EARLY_LAUNCH"])
def test_whole_calls_with_a_switch_off(variable):
    run_whole_calls(at_least=200, **{variable: "0"})


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the fast road needs Python 3.12")
def test_whole_calls_once_the_fast_road_is_in_force():
    begin = "import numba_kvcache as n; n.warmup(128); assert n.fast_road.status() == 'on', n.fast_road.status()"
    run_whole_calls(at_least=200, before=begin)


def test_fast_road_reports_for_this_process():
    fast_road.wait()
    assert fast_road.status() == "on" or fast_road.status().startswith("off: "), fast_road.status()
