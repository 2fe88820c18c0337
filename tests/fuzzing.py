"""Random calls of store_kvcache: what a call may be, as hypothesis strategies, and what must be in memory after it.

All five arrays of a case lie in one pool of random bytes, in any order, often without a gap between them. So every byte
that is not written guards its neighbours, and one comparison of the pool finds a lost and a stray byte alike.
"""

import collections
import os
import random
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from support import GUARD, ON_GPU, SIMULATED, InterfaceArray, Memory, Rows, expect_store, synchronize

from benchmarks.roads import without_fast_road
from numba_kvcache import store_kvcache

SEED = int(os.environ.get("NUMBA_KVCACHE_FUZZ_SEED") or random.SystemRandom().randrange(2**32))
"""What all cases of this process follow from."""

DTYPES = ("uint8", "bool", "int16", "float16", "float32", "int32", "int64", "float64", "complex64", "complex128")
TORCH_ONLY = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
ITEMSIZE = {name: np.dtype(name).itemsize for name in DTYPES} | {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
SPLIT_MULTIPLE = {0: 4, 1: 4, 2: 256, 4: 512}

# One word, odd words, powers of two, one word past them; up to more than a block moves in one step.
WIDTHS = (4, 8, 12, 16, 20, 64, 92, 128, 196, 200, 256, 512, 516, 768, 1024, 1152, 2048, 2052, 4096)
WIDE = (8192, 16388, 65536)

counts: collections.Counter[str] = collections.Counter()
"""What the cases of this process were, for the tally."""


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for; on a GPU a run draws few of these, and many cases of each."""

    k_row_bytes: int
    v_row_bytes: int
    num_split: int
    k_alignment: int
    v_alignment: int
    index_dtype: str


def choose_plan(choose):
    """A plan, each part of it by `choose(sequence)`."""
    num_split = choose((0, 0, 0, 1, 2, 4))
    multiple = SPLIT_MULTIPLE[num_split]
    widths = [w for w in (*WIDTHS, *(WIDE if ON_GPU else ())) if w % multiple == 0]
    widths = choose((widths, range(multiple, 4097, multiple)))
    k = choose(widths)
    v = choose((k, choose(widths)))
    return Plan(k, v, num_split, choose((16, 16, 8, 4)), choose((16, 16, 8, 4)), choose(("int32", "int64")))


@dataclass(frozen=True)
class Placed:
    """Rows of one array: how many, how far apart, and where in the pool their lowest byte is."""

    count: int
    pitch: int
    low: int


@dataclass(frozen=True)
class Case:
    """One call, whole."""

    plan: Plan
    dtype: str
    rows: tuple[Placed, Placed, Placed, Placed]
    index_low: int
    index_step: int
    slots: tuple[int, ...]
    size_limit: int | None
    kinds: tuple[str, ...]
    stream: str
    road: str
    noise: int


def row_pitch(draw, row_bytes, alignment, *, cache, odd):
    """Bytes from row to row; `odd` makes `alignment` the most that divides it."""
    gap = draw(st.sampled_from((0, 0, 1, 2, 3, 17)))
    pitch = -(-row_bytes // alignment) * alignment + gap * alignment
    if not cache and draw(st.integers(0, 7)) == 0:  # the rows of a source may overlap, and may be one row
        pitch = draw(st.sampled_from((0, alignment, 2 * alignment)))
    if odd and pitch // alignment % 2 == 0:
        pitch += alignment
    return -pitch if draw(st.integers(0, 3)) == 0 else pitch


class _Pool:
    """Gives out places in the pool from its start."""

    def __init__(self):
        self.end = GUARD

    def place(self, span, alignment, gap, odd):
        """The lowest byte of `span` bytes, `gap` alignments after what was placed before."""
        low = (-(-self.end // alignment) + gap) * alignment
        if odd and low // alignment % 2 == 0:
            low += alignment
        self.end = low + span
        return low


@st.composite
def cases(draw, *, pool_bytes, plans, kinds, roads=("store_kvcache",), most_rows, most_bytes=2**31):
    """Valid calls whose five arrays fit into a pool of `pool_bytes`, and that store no more than `most_bytes`."""
    plan = draw(plans)
    widths = (plan.k_row_bytes, plan.v_row_bytes) * 2
    alignments = (plan.k_alignment, plan.v_alignment) * 2
    fits = [d for d in ITEMSIZE if widths[0] % ITEMSIZE[d] == 0 == widths[1] % ITEMSIZE[d]]
    fits = [d for d in fits if d in DTYPES or "torch" in kinds]
    # Which address or pitch is off the wider grid, for K and for V: 0 and 1 are the addresses, 2 and 3 the pitches.
    culprits = [draw(st.integers(0, 3)) if a < 16 else None for a in alignments[:2]]
    culprits = [None if c is None else (c % 2, c // 2) for c in culprits]
    pitches = [
        row_pitch(draw, widths[i], alignments[i], cache=i > 1, odd=culprits[i % 2] == (i // 2, 1)) for i in range(4)
    ]

    room = pool_bytes // 6
    most = [max(1, min(most_rows, room // max(abs(p), w))) for p, w in zip(pitches, widths, strict=True)]
    index_size = np.dtype(plan.index_dtype).itemsize
    step = draw(st.sampled_from((1, 1, 1, 2, 3, -1, -2, 0)))
    slots_k, slots_v = (draw(st.one_of(st.integers(1, m), st.just(m))) for m in most[2:])
    bound = min(slots_k, slots_v)
    size_limit = draw(st.one_of(st.sampled_from((0, 0, None)), st.integers(1, bound)))
    twice = step == 0 or draw(st.integers(0, 7)) == 0
    largest = min(most[0], most[1], room // (index_size * max(1, abs(step))), max(1, most_bytes // sum(widths[:2])))
    largest = largest if twice else min(largest, size_limit or bound)
    batch = draw(st.one_of(st.integers(1, min(largest, 8)), st.just(largest), st.integers(1, largest)))
    noise = draw(st.integers(0, 2**20))
    chosen = np.random.default_rng(noise)
    slots = chosen.integers(0, size_limit or bound, batch) if twice else chosen.permutation(size_limit or bound)[:batch]
    slots = np.full(batch, slots[0]) if step == 0 else slots

    pool, rows, index_low = _Pool(), [None] * 4, 0
    for i in draw(st.permutations(range(5))):
        gap = draw(st.sampled_from((0, 0, 0, 1, 2, 5)))
        if i == 4:
            index_low = pool.place(index_size * ((batch - 1) * abs(step) + 1), index_size, gap, odd=False)
            continue
        count = (batch, batch, slots_k, slots_v)[i]
        # The pitch of a single row means nothing, so another thing must be off the grid then.
        culprit = culprits[i % 2]
        odd = culprit is not None and culprit[0] == i // 2 and (culprit[1] == 0 or count == 1)
        low = pool.place((count - 1) * abs(pitches[i]) + widths[i], alignments[i], gap, odd)
        # Row 0 of a negative pitch is the highest one: it is as far off the grid as the lowest.
        rows[i] = Placed(count, pitches[i], low)
    dtype = draw(st.sampled_from(fits))
    kind = st.sampled_from(kinds)
    return Case(
        plan, dtype, tuple(rows), index_low, step, tuple(slots.tolist()), size_limit,
        tuple(draw(kind) for _ in range(5)), draw(st.sampled_from(("none", "none", "zero", "handle"))),
        draw(st.sampled_from(roads)), noise,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# Array kinds. Each maker gives an array over the pool, or None where the kind cannot be such an array.


def _positive_steps(strides, itemsize, offset):
    return all(s >= 0 and s % itemsize == 0 for s in strides) and offset % itemsize == 0


def _native(pool, offset, shape, strides, dtype):
    return pool.array(offset, shape, strides, np.dtype(dtype))


def _simulated(pool, offset, shape, strides, dtype):
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(_native(pool, offset, shape, strides, dtype))


def _interface(pool, offset, shape, strides, dtype):
    return InterfaceArray(pool.address(offset), shape, np.dtype(dtype).str, strides=strides)


class DLPackOnly:
    """An array that shows nothing but its DLPack export."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def _dlpack(pool, offset, shape, strides, dtype):
    if any(s % ITEMSIZE[dtype] for s in strides):
        return None
    if ON_GPU and min(strides) < 0:  # CuPy 14.2 exports it as one of 2**64 less (test_contract.py has that refused)
        return None
    array = _cupy(pool, offset, shape, strides, dtype) if ON_GPU else _native(pool, offset, shape, strides, dtype)
    return None if array is None else DLPackOnly(array)


def _torch(pool, offset, shape, strides, dtype):
    import torch

    itemsize = ITEMSIZE[dtype]
    if not _positive_steps(strides, itemsize, offset):
        return None
    if not hasattr(pool, "tensor"):
        pool.tensor = torch.from_numpy(pool.memory) if SIMULATED else torch.as_tensor(pool.memory, device="cuda")
    elements = [stride // itemsize for stride in strides]
    whole = pool.tensor[: pool.tensor.numel() // itemsize * itemsize]
    return whole.view(getattr(torch, dtype)).as_strided(shape, elements, offset // itemsize)


def _cupy(pool, offset, shape, strides, dtype):
    import cupy

    memory = cupy.cuda.UnownedMemory(pool.address(0), pool.expected.size, pool)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset), strides)


def _installed(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def array_kinds():
    """The kinds that can be made on this back end with what is installed."""
    kinds = {"numpy": _native, "cuda.to_device": _simulated} if SIMULATED else {"numba": _native}
    kinds["interface"] = _interface
    if _installed("torch"):
        kinds["torch"] = _torch
    if ON_GPU and _installed("cupy"):
        kinds["cupy"] = _cupy
    if SIMULATED or "cupy" in kinds:
        kinds["dlpack"] = _dlpack
    return kinds


# ----------------------------------------------------------------------------------------------------------------------
# One case: into memory, through the call, and compared.


class Arena:
    """A pool that cases are played in, again and again, each over fresh noise."""

    def __init__(self, size):
        self.memory = Memory(size, seed=SEED % 2**16)
        self.noise = np.random.default_rng(SEED).integers(0, 2**64, size // 4, np.uint64).view(np.uint8)
        self.size, self.kinds = size, array_kinds()
        if ON_GPU:
            from cuda.bindings import driver as cu

            from numba_kvcache import driver

            self.handle = int(driver.check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        else:
            self.handle = 0

    def scene(self, case):
        """Put the case's bytes into memory; its five arrays, and its rows for the oracle."""
        pool = self.memory
        start = case.noise % (self.noise.size - self.size)
        pool.expected[:] = self.noise[start : start + self.size]
        rows = [
            Rows(placed.count, width, seed=0, pitch=placed.pitch, shift=placed.low - GUARD, memory=pool)
            for placed, width in zip(case.rows, (case.plan.k_row_bytes, case.plan.v_row_bytes) * 2, strict=True)
        ]
        index_dtype = np.dtype(case.plan.index_dtype)
        size, step = index_dtype.itemsize, case.index_step * index_dtype.itemsize
        index_start = case.index_low + (max(0, len(case.slots) - 1) * -step if step < 0 else 0)
        for i, slot in enumerate(case.slots):
            at = index_start + i * step
            pool.expected[at : at + size] = np.frombuffer(np.array(slot, index_dtype).tobytes(), np.uint8)
        if SIMULATED:
            pool.memory[:] = pool.expected
        else:
            pool.memory.copy_to_device(pool.expected)
        synchronize()
        itemsize = ITEMSIZE[case.dtype]
        arrays = [
            self._array(kind, r.start, (r.count, r.row_bytes // itemsize), (r.pitch, itemsize), case.dtype)
            for kind, r in zip(case.kinds, rows, strict=False)
        ]
        shape = (len(case.slots),)
        arrays.append(self._array(case.kinds[4], index_start, shape, (step,), case.plan.index_dtype))
        return arrays, rows

    def _array(self, kind, offset, shape, strides, dtype):
        if dtype in TORCH_ONLY:
            # torch has no negative strides. The call is the same with another type of that size in all four arrays, so
            # those cases are played as such: see `as_playable`.
            return self.kinds["torch"](self.memory, offset, shape, strides, dtype)
        array = self.kinds[kind](self.memory, offset, shape, strides, dtype)
        if array is None:
            kind = next(iter(self.kinds))
            array = self.kinds[kind](self.memory, offset, shape, strides, dtype)
        counts[f"arrays of {kind}"] += 1
        return array

    def call(self, case, arrays):
        """The store that the case is, and its end."""
        options = {"none": {}, "zero": {"stream": 0}, "handle": {"stream": self.handle}}[case.stream]
        function = python_road if case.road == "python" else store_kvcache
        # Numba's and CuPy's default stream, and torch's, are the legacy one here, so `synchronize` covers all.
        function(*arrays, case.plan.num_split, case.size_limit, **options)
        synchronize()

    def play(self, case):
        """Store as the case says; every byte of the pool must be what a plain loop makes of it."""
        case = as_playable(case)
        arrays, rows = self.scene(case)
        for source, cache in zip(rows[:2], rows[2:], strict=True):
            expect_store(source, cache, case.slots)
        self.call(case, arrays)
        if len(set(case.slots)) < len(case.slots):
            self.settle_duplicates(case, rows)
        self.memory.check()
        counts["cases"] += 1
        counts["rows"] += len(case.slots)
        counts[f"road {case.road}"] += 1

    def settle_duplicates(self, case, rows):
        """Where several rows name one slot, each word must be one of theirs; which, is not promised."""
        now = self.memory.bytes_now()
        by_slot = collections.defaultdict(list)
        for row, slot in enumerate(case.slots):
            by_slot[slot].append(row)
        for slot, aimed in by_slot.items():
            for source, cache in zip(rows[:2], rows[2:], strict=True):
                words = now[cache.where(slot)].view(np.uint32)
                candidates = np.array([self.memory.expected[source.where(row)] for row in aimed]).view(np.uint32)
                assert np.all((candidates == words).any(axis=0)), f"slot {slot} holds a word of none of rows {aimed}"
                self.memory.expected[cache.where(slot)] = words.view(np.uint8)


def as_playable(case):
    """The case, its dtype exchanged for one of the same size where torch, which alone has it, cannot have the array."""
    if case.dtype not in TORCH_ONLY:
        return case
    itemsize = ITEMSIZE[case.dtype]
    if all(r.pitch >= 0 and r.pitch % itemsize == 0 == r.low % itemsize for r in case.rows):
        return case
    return Case(**{**vars(case), "dtype": "float16" if itemsize == 2 else "uint8"})


# `store_kvcache` with CPython's own vectorcall, whatever the fast road has done to the other.
python_road = without_fast_road(store_kvcache)
