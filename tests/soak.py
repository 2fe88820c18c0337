"""Many warm calls in one process: host memory and time per call must stay what they are.

    python tests/soak.py                    ten million calls of mixed shapes, some 40 s on a GPU
    python tests/soak.py --calls 200000

Prints one row, and exits with 1 if anything grew. NUMBA_KVCACHE_NATIVE=0 soaks the Python road.
"""

import argparse
import gc
import os
import sys
import time
from typing import NamedTuple

import numpy as np
from numba import cuda
from support import synchronize, tally

from numba_kvcache import fast_road, settings, store_kvcache

# (batch, row bytes): decoding and small prefills; all of one width share a plan.
SHAPES = ((1, 1024), (1, 2048), (3, 256), (8, 1024), (16, 128), (2, 4096), (7, 92), (1, 1024))
SLOTS = 64
PERIODS, PARTS = 10, 20

MOST_BYTES, MOST_BLOCKS, MOST_SLOWER = 4 << 20, 1000, 1.15


class Sample(NamedTuple):
    """What one period of the run showed at its end."""

    resident_bytes: int
    blocks: int
    microseconds: float


def growth(samples):
    """What grew from the second period to the last, in words; the first one is for the driver's own queues."""
    first, last = samples[1], samples[-1]
    # The quickest of some periods, since a neighbour on the machine may slow any of them.
    third = max(1, (len(samples) - 1) // 3)
    early = min(sample.microseconds for sample in samples[1 : 1 + third])
    late = min(sample.microseconds for sample in samples[-third:])
    grown = []
    if last.resident_bytes - first.resident_bytes > MOST_BYTES:
        grown.append(f"memory by {last.resident_bytes - first.resident_bytes} bytes")
    if last.blocks - first.blocks > MOST_BLOCKS:
        grown.append(f"Python's allocated blocks by {last.blocks - first.blocks}")
    if late > MOST_SLOWER * early:
        grown.append(f"time per call from {early:.2f} to {late:.2f} us")
    return grown


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def make_calls(shapes=SHAPES):
    """The arguments of one call per shape, and what its caches must hold afterwards."""
    rng = np.random.default_rng(11)
    calls, expected = [], []
    for batch, row_bytes in shapes:
        sources = [rng.integers(0, 2**32, (batch, row_bytes // 4), np.uint32) for _ in range(2)]
        caches = [rng.integers(0, 2**32, (SLOTS, row_bytes // 4), np.uint32) for _ in range(2)]
        slots = rng.permutation(SLOTS)[:batch]
        calls.append([cuda.to_device(array) for array in (*sources, *caches, slots)])
        for source, cache in zip(sources, caches, strict=True):
            cache[slots] = source
        expected.append(caches)
    return calls, expected


def soak(calls, count):
    """About `count` stores, round after round of `calls`; a Sample per period."""
    rounds = max(1, count // (len(calls) * PERIODS * PARTS))
    samples, made = [], 0
    for _ in range(PERIODS):
        quickest = float("inf")
        for _ in range(PARTS):
            start = time.perf_counter()
            for _ in range(rounds):
                for k, v, k_cache, v_cache, indices in calls:
                    store_kvcache(k, v, k_cache, v_cache, indices)
            quickest = min(quickest, time.perf_counter() - start)
        made += rounds * PARTS * len(calls)
        synchronize()
        gc.collect()
        samples.append(Sample(resident_bytes(), sys.getallocatedblocks(), quickest / rounds / len(calls) * 1e6))
    return samples, made


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Soak store_kvcache: many warm calls, constant memory and time.")
    parser.add_argument("--calls", type=int, default=10_000_000)
    count = parser.parse_args(arguments).calls
    calls, expected = make_calls()
    for call in calls:
        store_kvcache(*call)
    if not settings.SIMULATED:
        fast_road.wait()
    start = time.perf_counter()
    samples, made = soak(calls, count)
    seconds = time.perf_counter() - start
    grown = growth(samples)
    for call, caches in zip(calls, expected, strict=True):
        for array, right in zip(call[2:4], caches, strict=True):
            if not np.array_equal(array.copy_to_host(), right):
                grown.append("a cache holds wrong rows")
    first, last = samples[1], samples[-1]
    numbers = {
        "calls": made, "seconds": round(seconds, 1), "us per call, early": round(first.microseconds, 2),
        "us per call, late": round(last.microseconds, 2), "MiB, early": round(first.resident_bytes / 2**20, 1),
        "MiB, late": round(last.resident_bytes / 2**20, 1), "blocks grown": last.blocks - first.blocks,
    }  # fmt: skip
    road = fast_road.status()
    print(" | ".join([*numbers, "fast road", "verdict"]))
    print(" | ".join([*map(str, numbers.values()), road, "; ".join(grown) or "nothing grew"]))
    tally("soak", road=road, grown=grown, **numbers)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
