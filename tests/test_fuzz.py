"""Random calls against a plain loop over bytes, on the simulator and on a GPU (tests/fuzzing.py makes the calls).

A failure prints the smallest call that shows it, and the blob that reproduces it under the same seed: the header of
pytest's output names the seed, and NUMBA_KVCACHE_FUZZ_SEED sets it. What a run finds becomes a test with a name, in
test_store.py or test_gpu.py. NUMBA_KVCACHE_FUZZ_CASES asks for more cases, or fewer.
"""

import dataclasses
import os
import random
import time

import fuzzing
import numpy as np
import pytest
from fuzzing import SEED, Arena, array_kinds, cases, choose_plan, counts
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support import (
    ON_GPU,
    needs_gpu,
    needs_kernels,
    needs_simulator,
    synchronize,
    tally,
)

from numba_kvcache import store_kvcache

ASKED = int(os.environ.get("NUMBA_KVCACHE_FUZZ_CASES") or 0)
# Compiling a plan takes a second on a GPU, playing a case some milliseconds.
PLANS = 20


def runs(examples):
    """The settings of a fuzz test of so many cases: as many as were asked for, if any were."""
    return settings(
        max_examples=ASKED or examples, database=None, deadline=None, print_blob=True, derandomize=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def play_all(arena, strategy, examples):
    """Play so many cases; the tally gets what they were."""

    @seed(SEED)
    @runs(examples)
    @given(strategy)
    def play(case):
        arena.play(case)

    counts.clear()
    start = time.perf_counter()
    try:
        play()
    finally:
        tally("fuzz", seed=SEED, pool_bytes=arena.size, seconds=round(time.perf_counter() - start, 1), **counts)
    assert counts["cases"] >= 0.8 * (ASKED or examples)


@st.composite
def any_plan(draw):
    return choose_plan(lambda sequence: draw(st.sampled_from(sequence)))


def simulated_cases(arena):
    """Small ones: the simulator starts a Python thread for each of CUDA's."""
    kinds = tuple(array_kinds())
    return cases(pool_bytes=arena.size, plans=any_plan(), kinds=kinds, most_rows=12, most_bytes=8192)


@needs_simulator
@pytest.mark.timeout(0 if ASKED else 300)
def test_calls_on_the_simulator():
    arena = Arena(32 << 10)
    strategy = simulated_cases(arena)
    play_all(arena, strategy, 300)


@needs_gpu
@pytest.mark.timeout(0 if ASKED else 300)
@pytest.mark.filterwarnings("ignore:.*ExternalStream:DeprecationWarning")  # CuPy's own, when it exports to a stream
@pytest.mark.parametrize(
    ("pool_bytes", "most_rows", "examples"), [(1 << 20, 256, 5000), (32 << 20, 20_000, 200)], ids=["small", "large"]
)
def test_calls_on_a_gpu(pool_bytes, most_rows, examples):
    """The large pool's batches reach the kernels that pass the L1 by."""
    rng = random.Random(SEED)
    plans = [choose_plan(rng.choice) for _ in range(PLANS)]
    arena = Arena(pool_bytes)
    strategy = cases(
        pool_bytes=arena.size, plans=st.sampled_from(plans), kinds=tuple(array_kinds()),
        roads=("store_kvcache", "store_kvcache", "python"), most_rows=most_rows,
    )  # fmt: skip
    play_all(arena, strategy, examples)


@needs_simulator
def test_slots_out_of_range():
    """One slot of a valid call is spoiled: the assert fails, and no byte changes but those of slots that are in range.

    (The rows of a block run in any order, so a row before or after the bad one may have been stored or not.)
    """
    arena = Arena(32 << 10)
    strategy = simulated_cases(arena)
    trapped = 0

    @seed(SEED)
    @runs(60)
    @given(strategy, st.data())
    def trap(case, data):
        nonlocal trapped
        case = fuzzing.as_playable(case)
        limit = case.size_limit or min(case.rows[2].count, case.rows[3].count)
        bits = 8 * np.dtype(case.plan.index_dtype).itemsize
        beyond = st.sampled_from((limit, limit + 1, 2**31 - 1, 2 ** (bits - 1) - 1)) | st.integers(
            limit, 2 ** (bits - 1) - 1
        )
        below = st.sampled_from((-1, -(2**31), -(2 ** (bits - 1)))) | st.integers(-(2 ** (bits - 1)), -1)
        bad = data.draw(beyond | below)
        at = data.draw(st.integers(0, len(case.slots) - 1))
        slots = list(case.slots)
        slots[at] = bad
        if case.index_step == 0:
            slots = [bad] * len(slots)
        case = dataclasses.replace(case, slots=tuple(slots))
        arrays, rows = arena.scene(case)
        with pytest.raises(AssertionError, match="Assertion `0 <= index && index < size_limit` failed"):
            arena.call(case, arrays)
        now = arena.memory.bytes_now()
        for source, cache in zip(rows[:2], rows[2:], strict=True):
            for slot in slots:
                if 0 <= slot < limit:
                    where, old = now[cache.where(slot)], arena.memory.expected[cache.where(slot)]
                    aimed = [r for r, s in enumerate(slots) if s == slot]
                    stored = np.array([arena.memory.expected[source.where(r)] for r in aimed])
                    assert np.all((where == old) | (stored == where).any(axis=0))
                    now[cache.where(slot)] = old
        assert np.array_equal(now, arena.memory.expected)
        trapped += 1

    trap()
    tally("fuzz, slots out of range", seed=SEED, cases=trapped)


@needs_kernels
@pytest.mark.parametrize("wrong", ["lost", "stray", "other row"])
def test_a_wrong_store_would_show(wrong, monkeypatch):
    """The control: what is stored is spoiled by one byte, and the comparison fails."""
    arena = Arena(32 << 10)
    kind = next(iter(array_kinds()))
    places = tuple(fuzzing.Placed(count, 64, 1024 * (i + 1)) for i, count in enumerate((2, 2, 9, 9)))
    plan = fuzzing.Plan(64, 64, 0, 16, 16, "int64")
    case = fuzzing.Case(plan, "uint8", places, 8192, 1, (2, 5), 0, (kind,) * 5, "none", "store_kvcache", 0)
    at = {"lost": 3 * 1024 + 2 * 64, "stray": 3 * 1024 + 3 * 64, "other row": 4 * 1024 + 5 * 64}[wrong]

    def spoiled(*arguments):
        store_kvcache(*arguments)
        synchronize()
        now = arena.memory.bytes_now()
        now[at] ^= 1
        if ON_GPU:
            arena.memory.memory.copy_to_device(now)
        else:
            arena.memory.memory[:] = now

    arena.play(case)
    monkeypatch.setattr(fuzzing, "store_kvcache", spoiled)
    with pytest.raises(AssertionError, match=rf"1 bytes differ, the first at offsets \[{at}\]"):
        arena.play(case)
