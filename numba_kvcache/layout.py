"""How threads cover rows: pure integers, no CUDA import, no device query.

A *row* is the K or the V of one token. A *group* of `threads` neighbouring threads copies one *part* of a row, in
vectors of 16, 8 or 4 bytes: thread 0 takes the first vector, thread 1 the next, and so on, so that a warp's accesses
are coalesced. K and V of a token are copied by the same group and may differ in width and in alignment.

The warp-per-part scheme behind an explicit `num_split` is that of the CUDA C++ kernel `store_kvcache` (mini-sglang,
SGLang); `num_split=0` lets this module choose, down to a single thread per row.
"""

import functools
import numbers
import operator
from dataclasses import dataclass
from typing import Any

__all__ = [
    "INDEX_BITS",
    "PLAIN",
    "SPLIT_MULTIPLE",
    "RowLayout",
    "StoreLayout",
    "Strategy",
    "check_row_bytes",
    "check_split",
    "integer",
    "plan_store",
    "strategies",
]

WARP = 32

VECTOR_BYTES = (16, 8, 4)

# Vectors of a row are counted in 32 bits.
MAX_ROW_BYTES = 2**31 - 4

# dtype of `indices` -> its bits.
INDEX_BITS = {"int32": 32, "int64": 64}

# num_split -> what row bytes must be a multiple of. A split of 2 or 4 gives every lane at least one 4-byte word of its
# part; 0 (the package chooses) and 1 ask only for whole words.
SPLIT_MULTIPLE = {0: 4, 1: 4, 2: 256, 4: 512}

# Blocks of 128 threads were at or near the best of 64 to 256 on an H200; up to 256 where that leaves fewer idle.
BLOCK = 128
MAX_BLOCK = 256

# What a thread moves of each row where the package chooses: more per thread gained up to 7 % at 16 MiB of reads and
# lost up to 6 % elsewhere (H200, docs/notes/kernel-speed.md).
THREAD_BYTES = 16

# Every load of a step is issued before its first store, so words in flight are registers: 16 words of K and 16 of V
# make 44 to 54 registers in one step, at most 73 (sm_80) in several; tests/test_machine_code.py bounds them.
MAX_WORDS_IN_FLIGHT = 16


@dataclass(frozen=True)
class RowLayout:
    """One row as its groups see it: each thread moves `loops` vectors per step, `threads` vectors apart."""

    row_bytes: int
    vector_bytes: int
    threads: int
    loops: int

    @property
    def words(self) -> int:
        """uint32 words per vector."""
        return self.vector_bytes // 4

    @property
    def vectors(self) -> int:
        """Vectors per row."""
        return self.row_bytes // self.vector_bytes

    @property
    def step_vectors(self) -> int:
        """Vectors that one group covers in one step."""
        return self.threads * self.loops

    def whole_loops(self, chunks: int) -> int:
        """How many of the `loops` need no bounds check in any of the `chunks` chunks (parts x steps) of the row.

        The last chunk decides: its first vector is `(chunks - 1) * step_vectors`.
        """
        left = self.vectors - (chunks - 1) * self.step_vectors
        return max(0, min(self.loops, left // self.threads))


@dataclass(frozen=True)
class StoreLayout:
    """How a launch covers its rows: the whole of what the kernel is specialised for, but index type and early launch.

    Attributes
    ----------
    k, v : RowLayout
        The two rows; both have the same `threads`.
    parts : int
        Groups per row. Group `g` of the launch copies part `g % parts` of row `g // parts`.
    steps : int
        Rounds of loads and stores per group: 1 unless an explicit split makes a warp copy a wide row.
    groups : int
        Groups per block.
    """

    k: RowLayout
    v: RowLayout
    parts: int
    steps: int
    groups: int

    @property
    def threads(self) -> int:
        """Threads per group."""
        return self.k.threads

    @property
    def block(self) -> int:
        """Threads per block: whole warps, so up to 31 threads of the last warp may be idle."""
        return -(-self.groups * self.threads // WARP) * WARP

    @property
    def idle_threads(self) -> int:
        """Threads of each block that belong to no group."""
        return self.block - self.groups * self.threads

    def grid(self, batch: int) -> int:
        """Blocks for `batch` rows."""
        return -(-batch * self.parts // self.groups)


# Reading an integer out of an array on a GPU waits for it.
ARRAY_PROTOCOLS = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")


def integer(name: str, value: Any) -> int:
    """`value` as a plain int; TypeError unless it is an integer (NumPy's are; bool and arrays of one element are not).

    Plain, because equal integers of other types hash alike: one in a cached layout would come back for every int.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value}")
    if not isinstance(value, numbers.Integral) and any(hasattr(value, protocol) for protocol in ARRAY_PROTOCOLS):
        kind = type(value).__qualname__
        raise TypeError(f"{name} must be an integer, got an array ({kind}); reading it could wait for a GPU")
    try:
        return int(operator.index(value))
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__qualname__}") from None


def check_split(num_split: int) -> None:
    """Raise ValueError unless `num_split` is one that the kernel knows."""
    if num_split not in SPLIT_MULTIPLE:
        raise ValueError(f"num_split must be one of {', '.join(map(str, SPLIT_MULTIPLE))}, got {num_split}")


def check_row_bytes(name: str, row_bytes: int, num_split: int) -> None:
    """Raise ValueError unless rows of `row_bytes` bytes can be moved under `num_split`; `name` is for the message."""
    if row_bytes <= 0:
        raise ValueError(f"rows of {name} must hold at least 4 bytes, got {row_bytes}")
    if row_bytes > MAX_ROW_BYTES:
        raise ValueError(f"rows of {name} may hold at most {MAX_ROW_BYTES} bytes, got {row_bytes}")
    if row_bytes % SPLIT_MULTIPLE[0]:
        raise ValueError(
            f"rows of {name} must be a multiple of 4 bytes (the kernel moves uint32), got {row_bytes} bytes"
        )
    if row_bytes % SPLIT_MULTIPLE[num_split]:
        raise ValueError(
            f"num_split={num_split} needs row bytes that are a multiple of {SPLIT_MULTIPLE[num_split]}, "
            f"but rows of {name} have {row_bytes} bytes; use a smaller num_split, or 0 to let the package choose"
        )


@dataclass(frozen=True)
class Strategy:
    """How a kernel meets the memory system; which is best depends on how much one launch moves.

    Attributes
    ----------
    release_first : bool
        Release dependents right after the wait for the primary, rather than after the loads.
    bypass_l1 : bool
        Load and store with `L1::no_allocate`.
    """

    release_first: bool = False
    bypass_l1: bool = False


PLAIN = Strategy()

# Bytes of K and V that a launch reads: up to which, per SM, dependents are released first; and between which rows pass
# the L1 by.
RELEASE_FIRST_PER_SM = 2048
BYPASS_FROM, BYPASS_TO = 1 << 20, 16 << 20


def strategies(layout: StoreLayout, sm_count: int, early_launch: bool) -> tuple[tuple[int, Strategy], ...]:
    """Which strategy serves which batch: (largest batch, strategy) in rising order; the last has no bound (2**31 - 1).

    Measured on an H200 (132 SMs), rows of 92 to 8,192 bytes, in graphs of 32 launches (docs/notes/kernel-speed.md):

    - Dependents that are released before the loads come up while the rows are on their way: a launch takes 0.61 to
      0.82 us instead of 0.67 to 0.97 (14 cells of up to 256 KiB of reads). At 512 KiB it gains 7 % in one cell and
      costs 4 % in another, since the next grid's waiting blocks share SMs with ours. The bound is from a finer sweep
      with the release before the wait, where it cost 5 to 20 % from 384 KiB on.
    - From 1 to 16 MiB, passing the L1 by is worth up to 25 %; above it costs 1 %. Below, it is worth as much where the
      rows lie in L2, but rows that it brings from DRAM do not stay there: the next to read them pays.
    """
    row_bytes = layout.k.row_bytes + layout.v.row_bytes
    bands = (
        (sm_count * RELEASE_FIRST_PER_SM // row_bytes if early_launch else 0, Strategy(release_first=True)),
        (-(-BYPASS_FROM // row_bytes) - 1, PLAIN),
        (BYPASS_TO // row_bytes, Strategy(bypass_l1=True)),
        (2**31 - 1, PLAIN),
    )
    kept: list[tuple[int, Strategy]] = []
    for limit, strategy in bands:
        if limit > (kept[-1][0] if kept else 0):
            kept.append((limit, strategy))
    return tuple(kept)


@functools.lru_cache(maxsize=4096)
def plan_store(
    k_row_bytes: int, v_row_bytes: int = 0, num_split: int = 0, k_alignment: int = 16, v_alignment: int = 16
) -> StoreLayout:
    """Choose how a launch covers its rows.

    Parameters
    ----------
    k_row_bytes, v_row_bytes : int
        Bytes of a row of K and of V; `v_row_bytes=0` means as K.
    num_split : {0, 1, 2, 4}
        Warps per row, or 0 to choose.
    k_alignment, v_alignment : {16, 8, 4}
        What divides the address and the row stride, in bytes, of both the source and the cache.

    Raises
    ------
    ValueError
        Unknown split or alignment, or row bytes that the split cannot serve.
    """
    rows = {"k": k_row_bytes, "v": v_row_bytes or k_row_bytes}
    check_split(num_split)
    for name, row_bytes in rows.items():
        check_row_bytes(name, row_bytes, num_split)
    alignments = (k_alignment, v_alignment)
    for alignment in alignments:
        if alignment not in VECTOR_BYTES:
            raise ValueError(f"alignment must be one of {', '.join(map(str, VECTOR_BYTES))}, got {alignment!r}")
    if num_split:
        return _plan_split(tuple(rows.values()), alignments, num_split)
    return _plan_auto(tuple(rows.values()), alignments)


def _plan_split(row_bytes: tuple[int, ...], alignments: tuple[int, ...], num_split: int) -> StoreLayout:
    """The reference's scheme: `num_split` warps per row, four warps per block."""
    vectors = [_split_vector_bytes(n // num_split, a) for n, a in zip(row_bytes, alignments, strict=True)]
    loops = [-(-n // (vec * WARP * num_split)) for n, vec in zip(row_bytes, vectors, strict=True)]
    steps = max(-(-loop // _max_loops(vec)) for loop, vec in zip(loops, vectors, strict=True))
    k, v = (RowLayout(n, vec, WARP, -(-loop // steps)) for n, vec, loop in zip(row_bytes, vectors, loops, strict=True))
    return StoreLayout(k, v, parts=num_split, steps=steps, groups=BLOCK // WARP)


def _plan_auto(row_bytes: tuple[int, ...], alignments: tuple[int, ...]) -> StoreLayout:
    """A vector per thread; rows of more than BLOCK vectors take up to THREAD_BYTES per thread, then several parts.

    Parts rather than more threads per block: a single row of 8 KiB took 0.74 us in four blocks and 0.89 in one (H200).
    """
    vectors = [_widest(n, a) for n, a in zip(row_bytes, alignments, strict=True)]
    counts = [n // vec for n, vec in zip(row_bytes, vectors, strict=True)]
    parts = max(-(-n // (BLOCK * THREAD_BYTES)) for n in row_bytes)
    # As many rounds as a full block would need, then no more threads than those rounds ask for.
    rounds = [-(-count // (BLOCK * parts)) for count in counts]
    threads = max(-(-count // (n * parts)) for count, n in zip(counts, rounds, strict=True))
    k, v = (
        RowLayout(n, vec, threads, -(-count // (threads * parts)))
        for n, vec, count in zip(row_bytes, vectors, counts, strict=True)
    )
    return StoreLayout(k, v, parts=parts, steps=1, groups=_groups_per_block(threads))


def _split_vector_bytes(part_bytes: int, alignment: int) -> int:
    """The reference's rule, narrowed to what the addresses allow: the widest vector that fills whole warps."""
    return next((vec for vec in VECTOR_BYTES if vec <= alignment and part_bytes % (vec * WARP) == 0), 4)


def _widest(row_bytes: int, alignment: int) -> int:
    return next(vec for vec in VECTOR_BYTES if vec <= alignment and row_bytes % vec == 0)


def _max_loops(vector_bytes: int) -> int:
    return MAX_WORDS_IN_FLIGHT * 4 // vector_bytes


def _groups_per_block(threads: int) -> int:
    """Whole groups per block of 128 to 256 threads: as few idle threads as can be, then as small as can be."""
    candidates = range(max(1, BLOCK // threads), MAX_BLOCK // threads + 1)

    def idle_share(groups: int) -> tuple[float, int]:
        block = -(-groups * threads // WARP) * WARP
        return 1 - groups * threads / block, groups

    return min(candidates, key=idle_share)
