"""A representative run for sanitize.sh: every kind of kernel, each store compared byte for byte. Small, since each
launch is slow under a sanitizer, and all memory is filled, or initcheck would complain of the test.

    python tests/sanitize_run.py            prints how many stores were made
    python tests/sanitize_run.py --fault    launches a kernel that reads past the end of k
"""

import sys
import warnings

import numpy as np
from numba import cuda
from support import Rows, index_array, make_rows, store_and_check, synchronize

from numba_kvcache import fast_road, make_store_kernel, settings, store_kvcache

SLOTS = [9, 0, 4, 7, 2]
WIDTHS = (4, 92, 128, 196, 256, 1024, 1152, 2048, 2052, 4096, 16388)


def stores():
    """Make them all; how many."""
    made = 0
    for i, width in enumerate(WIDTHS):
        for split, multiple in ((0, 4), (1, 4), (2, 256), (4, 512)):
            if width % multiple == 0 and (split == 0 or width in (256, 1024, 2052, 4096)):
                index_dtype = "int32" if (i + split) % 2 else "int64"
                store_and_check(*make_rows(5, 11, width), SLOTS, num_split=split, index_dtype=index_dtype)
                made += 1
    # Vectors of 8 and 4 bytes; K and V that differ; strides of every sign, also of the indices.
    for shift in (8, 4):
        rows = [Rows(3 if i < 2 else 7, 256, shift=shift, pitch=264 if i else -272, seed=i) for i in range(4)]
        store_and_check(*rows, [6, 0, 3], index_step=-2)
    k, v = Rows(5, 96, pitch=100, shift=4, seed=1), Rows(5, 512, pitch=0, seed=2)
    caches = Rows(11, 96, pitch=-112, seed=3), Rows(13, 512, pitch=528, shift=8, seed=4)
    store_and_check(k, v, *caches, SLOTS, index_dtype="int32", index_step=3)
    # Batches past what one block, and past what half the GPU's SMs hold, and of more than 1 MiB.
    for batch, width in ((300, 128), (200, 4096)):
        store_and_check(*make_rows(batch, 320, width), np.random.default_rng(1).permutation(320)[:batch])
    return made + 5


def chain(repeats):
    """Stores right behind one another, each reading what the one before has written; in order, since rows move on."""
    k_cache, v_cache = make_rows(1, 40, 1024)[2:]
    _, indices = index_array([10])
    arrays = [
        [cache.memory.array(cache.where(row).start, (1, 1024), (1024, 1), np.dtype("uint8")) for row in (0, 10)]
        for cache in (k_cache, v_cache)
    ]
    for i in range(repeats):
        # Row 0 to slot 10, then slot 10 to slot 20 + i.
        store_kvcache(arrays[0][0], arrays[1][0], k_cache.array, v_cache.array, indices)
        _, far = index_array([20 + i])
        store_kvcache(arrays[0][1], arrays[1][1], k_cache.array, v_cache.array, far)
    synchronize()
    for cache in (k_cache, v_cache):
        for slot in (10, *range(20, 20 + repeats)):
            cache.memory.expected[cache.where(slot)] = cache.memory.expected[cache.where(0)]
        cache.memory.check()
    return 2 * repeats


def graph():
    """One store, captured and replayed twice."""
    from test_gpu import captured, non_blocking_stream, replay_and_check

    rows, (_, indices) = make_rows(5, 11, 1024), index_array(SLOTS)
    with non_blocking_stream() as stream:
        with captured(stream) as held:
            store_kvcache(*(r.array for r in rows), indices, stream=stream)
        replay_and_check(held, stream, rows, SLOTS)
    return 2


def fault():
    """The kernel by itself checks nothing: one row more than k has."""
    warnings.simplefilter("ignore")  # Numba's own, of a small grid
    k, v, k_cache, v_cache = (cuda.to_device(np.ones((rows, 1024), np.uint8)) for rows in (2, 3, 8, 8))
    indices = cuda.to_device(np.array([0, 1, 2]))
    kernel = make_store_kernel(1024)
    addresses = [array.device_ctypes_pointer.value for array in (k, v, k_cache, v_cache, indices)]
    kernel[kernel.layout.grid(3), kernel.layout.block](*addresses, *[1024] * 4, 8, 3, 8, 0)
    cuda.synchronize()


def main():
    if "--fault" in sys.argv:
        fault()
        return
    made = stores() + chain(8)
    if not settings.SIMULATED:
        made += graph()
        fast_road.wait()  # the same again, by the other host road
        made += chain(8)
    print(f"{made} stores, all of them right; fast road: {fast_road.status()}")


if __name__ == "__main__":
    main()
