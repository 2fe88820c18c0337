"""Order of work on a GPU while much else goes on: early launches under memory pressure, streams beside one another.

The chains' kernels are those of test_early_launch.py, which also has the control: a reader that does not wait.
"""

import threading

import numpy as np
import pytest
from numba import cuda
from support import ON_GPU, SIMULATED, needs_gpu, tally
from test_early_launch import SLOTS, WORDS, make_producer, make_reader
from test_gpu import Chain, non_blocking_stream, small_grids

from numba_kvcache import driver, store_kvcache, warmup
from numba_kvcache.launch import Launch, launch

if not SIMULATED:
    from cuda.bindings import driver as cu
    from test_gpu import late_fill

pytestmark = needs_gpu

REPEATS, ROUND = 1000, 50
PRESSURE_BYTES = 256 << 20


class Pressure:
    """Copies on a stream of their own, which keep the GPU's memory busy."""

    def __init__(self):
        self.memory = [cuda.device_array(PRESSURE_BYTES, np.uint8) for _ in range(2)]
        self.addresses = [memory.device_ctypes_pointer.value for memory in self.memory]

    def queue(self, stream, copies):
        for i in range(copies):
            source, target = self.addresses if i % 2 else self.addresses[::-1]
            driver.check(cu.cuMemcpyDtoDAsync(target, source, PRESSURE_BYTES, stream))


@pytest.mark.skipif(
    not ON_GPU or driver.compute_capability(0) < (9, 0), reason="early launch needs compute capability 9.0"
)
@pytest.mark.parametrize("batch", [1, 64, 500])
def test_producer_store_and_reader_under_memory_pressure(batch):
    """A thousand times: rows that name their link, stored into the same slots, and copied out by an early reader."""
    producer, reader, pressure = make_producer(), make_reader(waits=True), Pressure()
    slots = np.random.default_rng(batch).permutation(SLOTS)[:batch].astype(np.int64)
    k, v = (cuda.to_device(np.zeros((batch, WORDS), np.uint32)) for _ in range(2))
    caches = [cuda.to_device(np.zeros((SLOTS, WORDS), np.uint32)) for _ in range(2)]
    outputs = [cuda.to_device(np.zeros((ROUND, batch, WORDS), np.uint32)) for _ in range(2)]
    indices, epoch = cuda.to_device(slots), cuda.to_device(np.zeros(1, np.int32))
    warmup(4 * WORDS)
    addresses = [array.device_ctypes_pointer.value for array in (k, v, *caches, indices, epoch, *outputs)]
    none, stale, busy = (0,) * 5, 0, 0
    of_link = np.arange(ROUND, dtype=np.uint32)[:, None, None] * 1_000_000
    expected = of_link + np.arange(batch * WORDS, dtype=np.uint32).reshape(batch, WORDS)
    cuda.synchronize()
    with non_blocking_stream() as stream, non_blocking_stream() as beside:
        for number in range(REPEATS // ROUND):
            epoch.copy_to_device(np.array([number * 60_000_000], np.int32))
            cuda.synchronize()
            pressure.queue(beside, 40)
            for link in range(ROUND):
                outs = [out + link * batch * 4 * WORDS for out in addresses[6:]]
                what = Launch(producer, batch, WORDS, True)
                launch(what, stream, (*addresses[:2], addresses[5], 0, 0, *none, batch, link, 0))
                store_kvcache(k, v, *caches, indices, stream=stream)
                what = Launch(reader, batch, WORDS, True)
                launch(what, stream, (*outs, *addresses[2:5], *none, batch, link, 0))
            driver.check(cu.cuStreamSynchronize(stream))
            busy += cu.cuStreamQuery(beside)[0] == cu.CUresult.CUDA_ERROR_NOT_READY
            for out, more in zip(outputs, (0, 500_000), strict=True):
                stale += np.count_nonzero(out.copy_to_host() != expected + np.uint32(number * 60_000_000 + more))
    assert stale == 0
    tally("producer, store, reader", repeats=REPEATS, batch=batch, rounds_with_copies_left=busy, stale_words=int(stale))


@small_grids
@pytest.mark.parametrize("named", ["handle", "Numba's stream"])
def test_the_per_thread_default_stream(named):
    """Four threads, each with its own rows and its own per-thread default stream (handle 2)."""
    chains, failures = [Chain() for _ in range(4)], []
    warmup(1024, index_dtype="int32")

    def work(thread):
        cuda.current_context()
        stream = cuda.per_thread_default_stream()
        for i in range(50):
            value = 1000 * (i + 1) + 100_000_000 * thread
            chains[thread].fill(late_fill, value, stream, microseconds=20)
            store_kvcache(*chains[thread].arguments(), stream=2 if named == "handle" else stream)
            results = chains[thread].results(stream)
            stream.synchronize()
            if not np.array_equal(results, chains[thread].expected(value)):
                failures.append((thread, i))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("threads", [1, 2])
def test_two_streams_store_to_disjoint_slots(threads):
    """Even slots from one stream, odd ones from the other, into the same caches, with neighbouring rows in one line."""
    batch, slots, width = 100, 1024, 4  # rows of 16 bytes: eight to a line of the L2
    rng = np.random.default_rng(5)
    expected = [rng.integers(0, 2**32, (slots, width), np.uint32) for _ in range(2)]
    caches = [cuda.to_device(cache) for cache in expected]
    rounds = []
    for i in range(400):
        chosen = 2 * rng.permutation(slots // 2)[:batch] + i % 2
        rows = [rng.integers(0, 2**32, (batch, width), np.uint32) for _ in range(2)]
        for cache, source in zip(expected, rows, strict=True):
            cache[chosen] = source
        rounds.append([*map(cuda.to_device, rows), *caches, cuda.to_device(chosen)])
    warmup(4 * width)
    cuda.synchronize()
    with non_blocking_stream() as even, non_blocking_stream() as odd:

        def work(which):
            cuda.current_context()
            for i in which:
                store_kvcache(*rounds[i], stream=odd if i % 2 else even)

        parts = [range(400)] if threads == 1 else [range(0, 400, 2), range(1, 400, 2)]
        workers = [threading.Thread(target=work, args=(part,)) for part in parts]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for cache, right in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cache.copy_to_host(), right)
