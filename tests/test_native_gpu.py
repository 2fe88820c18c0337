"""The fast road on a GPU: that warm calls take it, and that they do what the Python road does. (Each check by itself,
and what a failing driver or a strange array would do: test_native.py, which needs no GPU.)
"""

import gc
import os
import random
import sys
import threading

import numpy as np
import pytest
from numba import cuda
from support import SIMULATED, expect_store, index_array, make_rows, needs_gpu, optional
from test_gpu import Chain, captured, gpu_view, non_blocking_stream, replay_and_check, small_grids

from benchmarks.roads import without_fast_road
from numba_kvcache import compiler, dispatch, driver, fast_road, known_calls, native, store_kvcache, warmup

if not SIMULATED:
    from cuda.bindings import driver as cu
    from test_gpu import late_fill

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def no_plans():
    """256 plans are remembered in a process; the tests of other files may have used them up."""
    fast_road._state[native.PLANS // 8 :] = 0
    dispatch._plans.clear()
    known_calls.known.clear()


@pytest.fixture(autouse=True)
def in_force(no_plans):
    """Every test runs with the fast road, or where it cannot be, not at all."""
    obstacle = fast_road._obstacle()
    if obstacle is not None:
        pytest.skip(f"no fast road here: {obstacle}")
    warmup(256)
    assert fast_road.status() == "on"


@pytest.fixture
def python_road():
    """`store_kvcache` with CPython's own vectorcall."""
    return without_fast_road(store_kvcache)


class Launches:
    """Counts the Python road's launches."""

    def __init__(self, monkeypatch):
        self.count = 0
        for holder in (dispatch, dispatch.ReadyLaunch):
            monkeypatch.setattr(holder, "launch", self.counted(holder.launch))

    def counted(self, launch):
        def counted(*arguments):
            self.count += 1
            launch(*arguments)

        return counted


@pytest.fixture
def python_launches(monkeypatch):
    return Launches(monkeypatch)


def optional_torch():
    """torch, if the fast road can read its tensors."""
    torch = optional("torch")
    if getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) is None:
        pytest.skip(f"torch {torch.__version__} has no DLPack exchange table")
    return torch


def make_arrays(library, batch=8, slots=64, words=64):
    """k, v, k_cache, v_cache, indices of either library: rows of int32, slots that rise."""
    host = [np.arange(rows * words, dtype=np.int32).reshape(rows, words) + i
            for i, rows in enumerate((batch, batch, slots, slots))]  # fmt: skip
    host.append(np.arange(batch, dtype=np.int64) * (slots // batch))
    if library == "numba":
        return [cuda.to_device(array) for array in host]
    torch = optional_torch()
    return [torch.from_numpy(array).cuda() for array in host]


LIBRARIES = ("numba", "torch")


# ----------------------------------------------------------------------------------------------------------------------
# Which road


@pytest.mark.parametrize("library", LIBRARIES)
def test_warm_calls_take_it(library, python_launches):
    arrays = make_arrays(library)
    store_kvcache(*arrays)  # the type may be new
    python_launches.count = 0
    k, v, k_cache, v_cache, indices = arrays
    store_kvcache(*arrays)
    store_kvcache(*arrays, 0, None)
    store_kvcache(k, v, indices=indices, v_cache=v_cache, k_cache=k_cache, size_limit=64, stream=0)
    store_kvcache(**dict(zip(("k", "v", "k_cache", "v_cache", "indices"), arrays, strict=True)), num_split=0)
    for batch in (1, 2, 7):
        store_kvcache(k[:batch], v[:batch], k_cache, v_cache, indices[:batch])
    assert python_launches.count == 0
    cuda.synchronize()


def test_libraries_mixed(python_launches):
    mixed = [t if i % 2 else n for i, (n, t) in enumerate(zip(*map(make_arrays, LIBRARIES), strict=True))]
    store_kvcache(*mixed)
    python_launches.count = 0
    store_kvcache(*mixed)
    assert python_launches.count == 0
    cuda.synchronize()


def test_the_counter_counts(python_launches, python_road):
    """The control of every count of 0 here."""
    arrays = make_arrays("numba")
    python_road(*arrays)
    store_kvcache(*arrays, stream=cuda.default_stream())  # an object, no handle
    assert python_launches.count == 2
    cuda.synchronize()


# ----------------------------------------------------------------------------------------------------------------------
# Random calls: what is written and what is raised, on both roads

POOL = 1 << 20
REGIONS = dict(zip(("k", "v", "k_cache", "v_cache", "indices"), range(1 << 16, 1 << 20, 3 << 16), strict=True))
FOUR = ("k", "v", "k_cache", "v_cache")
ITEMSIZE = {"uint8": 1, "float16": 2, "int16": 2, "float32": 4, "int32": 4, "int64": 8, "float64": 8, "complex64": 8}


class Call:
    """A valid call of at most 16 rows into at most 40 slots; all arrays lie in one pool of bytes."""

    def __init__(self, rng):
        self.rng, self.options = rng, {}
        self.dtype = rng.choice(("uint8", "float16", "int16", "float32", "float64"))
        itemsize = ITEMSIZE[self.dtype]
        self.batch = rng.choice((1, 2, 3, 8, 16))
        self.slots = self.batch + rng.randrange(1, 24)
        widths = rng.choice(((64, 64), (512, 512), (512, 64)))  # few: each plan is some compiles
        self.arrays = {}
        for name, width, rows in zip(FOUR, widths * 2, (self.batch,) * 2 + (self.slots,) * 2, strict=True):
            stride = width + rng.choice((0, 0, 16, 32))
            at = REGIONS[name] + rng.choice((0, 0, 16, 8 if name == "k" else 32))
            self.arrays[name] = [at, (rows, width // itemsize), (stride, itemsize), self.dtype]
        dtype = rng.choice(("int32", "int64"))
        size = ITEMSIZE[dtype]
        self.arrays["indices"] = [REGIONS["indices"], (self.batch,), (size * rng.choice((1, 2)),), dtype]
        if rng.random() < 0.5:
            self.options["num_split"] = rng.choice((0, 2) if 64 not in widths else (0, 1))
        if rng.random() < 0.5:
            self.options["size_limit"] = rng.choice((0, None, self.batch, self.slots))
        if rng.random() < 0.3:
            self.options["stream"] = rng.choice((None, 0))

    def spoil(self):
        """Change one aspect; most often for the worse."""
        rng = self.rng
        array = self.arrays[rng.choice(FOUR)]
        _, shape, strides, dtype = array
        indices = self.arrays["indices"]
        kind = rng.randrange(12)
        if kind == 0:
            array[3] = rng.choice([d for d in ITEMSIZE if ITEMSIZE[d] == ITEMSIZE[dtype]])
        elif kind == 1:
            array[1] = (shape[0] + rng.choice((-1, 1)), shape[1])
        elif kind == 2:
            array[1] = (shape[0], shape[1] - 1)
        elif kind == 3:
            array[2] = (strides[0], 2 * strides[1])
        elif kind == 4:
            array[0] += rng.choice((1, 2)) * ITEMSIZE[dtype]
        elif kind == 5:
            cache = self.arrays[rng.choice(FOUR[2:])]
            cache[2] = (rng.choice((0, cache[2][0] // 2 // 8 * 8)), cache[2][1])
        elif kind == 6:
            array[1:3] = rng.choice(((shape[:1], strides[:1]), ((*shape, 1), (*strides, strides[1]))))
        elif kind == 7:
            self.options["num_split"] = rng.choice((3, -1, 8, True, 1.0, np.int64(0), 2**70))
        elif kind == 8:
            self.options["size_limit"] = rng.choice((-1, self.slots + 1, True, 2.0, np.int32(self.slots), 2**70))
        elif kind == 9:
            self.options["stream"] = rng.choice((-1, True, "0", np.int64(0), 1.0))
        elif kind == 10:
            for name in ("k", "v", "indices"):
                self.arrays[name][1] = (0, *self.arrays[name][1][1:])
        else:
            indices[3] = rng.choice(("float64", "float32", "int16"))
            indices[2] = (ITEMSIZE[indices[3]],)

    def place_slots(self, pool):
        """Different slots, all under the limit, where the indices are read."""
        at, shape, strides, dtype = self.arrays["indices"]
        limit = self.options.get("size_limit")
        limit = limit if type(limit) is int and 0 < limit <= self.slots else self.slots - 1
        slots = self.rng.sample(range(max(limit, self.batch)), self.batch)
        for i, slot in zip(range(shape[0]), slots, strict=False):
            value = np.array(slot, dtype).tobytes()
            pool[at + i * strides[0] : at + i * strides[0] + len(value)] = np.frombuffer(value, np.uint8)


class Pool:
    """The pool on the GPU, and arrays of one library over it."""

    def __init__(self, library):
        self.library, self.memory = library, cuda.device_array(POOL, np.uint8)
        if library == "torch":
            torch = optional_torch()
            self.torch, self.tensor = torch, torch.as_tensor(self.memory, device="cuda")
            assert self.tensor.data_ptr() == self.memory.device_ctypes_pointer.value

    def fill(self, content):
        self.memory.copy_to_device(content)

    def content(self):
        cuda.synchronize()
        return self.memory.copy_to_host()

    def array(self, offset, shape, strides, dtype):
        if self.library == "numba" and 0 not in shape:
            return gpu_view(self.memory, offset, shape, strides, np.dtype(dtype))
        if self.library == "numba":
            return cuda.device_array(shape, dtype)
        itemsize = ITEMSIZE[dtype]
        elements = [stride // itemsize for stride in strides]
        return self.tensor.view(getattr(self.torch, dtype)).as_strided(shape, elements, offset // itemsize)


def outcome(function, arguments, options):
    try:
        return function(*arguments, **options)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("library", LIBRARIES)
def test_random_calls(library, python_launches, python_road):
    rng = random.Random(7)
    pool = Pool(library)
    content = np.random.default_rng(7).integers(0, 256, POOL, np.uint8)
    served = refused = written = 0
    for i in range(2000):
        call = Call(rng)
        if i % 2:
            call.spoil()
        before = content.copy()
        call.place_slots(before)
        arguments = [pool.array(*call.arrays[name]) for name in REGIONS]
        pool.fill(before)
        python_launches.count = 0
        right = outcome(python_road, arguments, call.options)
        launched = python_launches.count
        expected = pool.content()
        pool.fill(before)
        python_launches.count = 0
        result = outcome(store_kvcache, arguments, call.options)
        where = (call.arrays, call.options, right)
        assert result == right, where
        np.testing.assert_array_equal(pool.content(), expected, err_msg=str(where))
        plain = all(type(value) is int or value is None for value in call.options.values())
        if plain and launched:
            assert python_launches.count == 0, where
        served += bool(launched) and python_launches.count == 0
        refused += right is not None
        written += not np.array_equal(expected, before)
    assert served >= 1000
    assert refused > 600
    assert written >= 1000


# ----------------------------------------------------------------------------------------------------------------------
# Streams and graphs


@small_grids
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_handle_is_honoured(library, python_launches):
    chain = Chain()
    arguments = chain.arguments()
    if library == "torch":
        torch = optional_torch()
        arguments = [torch.as_tensor(array.view(np.int32), device="cuda") for array in arguments]
    store_kvcache(*arguments)
    cuda.synchronize()  # zeros were written
    python_launches.count = 0
    with non_blocking_stream() as handle:
        stream = cuda.external_stream(handle)
        for i in range(100):
            chain.fill(late_fill, 1000 * (i + 1), stream)
            store_kvcache(*arguments, stream=handle)
            results = chain.results(stream)
            stream.synchronize()
            np.testing.assert_array_equal(results, chain.expected(1000 * (i + 1)))
    assert python_launches.count == 0


@pytest.mark.parametrize("side", [True, False], ids=["side stream", "default stream"])
def test_torchs_current_stream(side, python_launches):
    torch = optional_torch()
    k, v, k_cache, v_cache, indices = make_arrays("torch")
    base = k.clone()
    store_kvcache(k, v, k_cache, v_cache, indices)
    torch.cuda.synchronize()
    python_launches.count = 0
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
        for i in range(100):
            torch.cuda._sleep(200_000)  # some 100 us
            torch.add(base, 1000 * i, out=k)
            torch.add(base, 5000 * i, out=v)
            store_kvcache(k, v, k_cache, v_cache, indices)
            results = [cache[indices] for cache in (k_cache, v_cache)]
            assert torch.equal(results[0], base + 1000 * i)
            assert torch.equal(results[1], base + 5000 * i)
    assert python_launches.count == 0


def test_captured_fast_calls(python_launches):
    slots = [9, 0, 4, 7, 2]
    rows = make_rows(5, 11, 256)
    _, indices = index_array(slots)
    with non_blocking_stream() as stream:
        for source, cache in zip(rows[:2], rows[2:], strict=True):
            expect_store(source, cache, slots)
        store_kvcache(*(r.array for r in rows), indices, stream=stream)
        driver.check(cu.cuStreamSynchronize(stream))
        python_launches.count = 0
        with captured(stream) as graph:
            store_kvcache(*(r.array for r in rows), indices, stream=stream)
        assert python_launches.count == 0
        replay_and_check(graph, stream, rows, slots)


def test_torch_graph_of_fast_calls(python_launches):
    torch = optional_torch()
    k, v, k_cache, v_cache, indices = make_arrays("torch")
    store_kvcache(k, v, k_cache, v_cache, indices)
    torch.cuda.synchronize()
    python_launches.count = 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            store_kvcache(k, v, k_cache, v_cache, indices)
    assert python_launches.count == 0
    for shift in (100, 200):
        k += shift
        v -= shift
        indices += 1
        graph.replay()
        assert torch.equal(k_cache[indices], k)
        assert torch.equal(v_cache[indices], v)


# ----------------------------------------------------------------------------------------------------------------------
# What calls leave behind


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("library", LIBRARIES)
def test_memory_is_constant(library, python_launches):
    arrays = make_arrays(library)
    for _ in range(20_000):  # the driver's own queues grow at first
        store_kvcache(*arrays)
    cuda.synchronize()
    gc.collect()
    python_launches.count = 0
    counts = [sys.getrefcount(array) for array in arrays]
    blocks, pages, free = sys.getallocatedblocks(), resident_bytes(), driver.check(cu.cuMemGetInfo())[0]
    for _ in range(200_000):
        store_kvcache(*arrays)
    cuda.synchronize()
    assert python_launches.count == 0
    assert [sys.getrefcount(array) for array in arrays] == counts
    assert abs(sys.getallocatedblocks() - blocks) < 500
    assert resident_bytes() - pages < 8 << 20
    if "PYTEST_XDIST_WORKER" not in os.environ:  # other workers' memory is on the same GPU
        assert driver.check(cu.cuMemGetInfo())[0] >= free - (16 << 20)


def test_warm_calls_of_any_batch_neither_allocate_nor_compile(python_launches, monkeypatch):
    torch = optional_torch()
    compiled = []
    compile_ptx = compiler.compile_ptx
    monkeypatch.setattr(compiler, "compile_ptx", lambda *spec: compiled.append(spec) or compile_ptx(*spec))
    k, v, k_cache, v_cache, indices = make_arrays("torch", batch=4096, slots=8192, words=256)
    warmup(1024)
    store_kvcache(k, v, k_cache, v_cache, indices)
    torch.cuda.synchronize()
    python_launches.count, rng = 0, random.Random(3)
    compiled.clear()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10_000):
        batch = rng.randint(1, 4096)
        store_kvcache(k[:batch], v[:batch], k_cache, v_cache, indices[:batch])
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    assert compiled == []
    assert python_launches.count == 0
    assert torch.equal(k_cache[indices], k)


def test_threads(python_launches):
    """Eight threads, each with its own rows and stream, which fast calls must not mix."""
    warmup(512)
    failures = []
    lists = [make_arrays("numba", words=128) for _ in range(8)]
    store_kvcache(*lists[0])
    cuda.synchronize()
    python_launches.count = 0

    def work(thread):
        cuda.current_context()  # the fast road serves where the plan's context is current
        k, v, k_cache, v_cache, indices = lists[thread]
        slots = np.arange(8) * 8
        with non_blocking_stream() as handle:
            for i in range(200):
                host = np.full((8, 128), 1000 * thread + i, np.int32)
                stream = cuda.external_stream(handle)
                k.copy_to_device(host, stream=stream)
                v.copy_to_device(host + 500_000, stream=stream)
                for _ in range(5):
                    store_kvcache(k, v, k_cache, v_cache, indices, stream=handle)
                stream.synchronize()
                if i % 20 == 0:
                    right = [np.array_equal(k_cache.copy_to_host()[slots], host),
                             np.array_equal(v_cache.copy_to_host()[slots], host + 500_000)]  # fmt: skip
                    failures.extend([(thread, i)] * (right != [True, True]))

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert failures == []
    assert python_launches.count == 0
