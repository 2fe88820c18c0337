"""layout.py as pure integers, against a plain enumeration and the reference's rules worked out by hand."""

import pytest

from numba_kvcache import can_use_store_kvcache
from numba_kvcache.layout import PLAIN, Strategy, plan_store, strategies

# The widths heads have, the narrowest, odd ones, ones just past a power of two (2052 and 16388: several steps or parts,
# the last one ragged), and far wider than any block.
ROW_BYTES = (4, 8, 12, 92, 128, 192, 196, 200, 256, 512, 516, 1024, 1152, 2048, 2052, 4096, 8192, 16388, 65536)
ALIGNMENTS = (16, 8, 4)
MULTIPLE = {0: 4, 1: 4, 2: 256, 4: 512}


def cases():
    return [
        (n, a, s) for n in ROW_BYTES for a in ALIGNMENTS for s in MULTIPLE if n % MULTIPLE[s] == 0
    ]  # fmt: skip


def positions(row, layout):
    """Every vector index that some thread asks for, past the row's end included: (index, loop)."""
    for part in range(layout.parts):
        for step in range(layout.steps):
            chunk = part * layout.steps + step
            for thread in range(layout.threads):
                for loop in range(row.loops):
                    yield chunk * row.threads * row.loops + thread + loop * row.threads, loop


def assert_covered_once(row, layout):
    asked = list(positions(row, layout))
    inside = sorted(index for index, _ in asked if index < row.row_bytes // row.vector_bytes)
    assert inside == list(range(row.row_bytes // row.vector_bytes))
    # A loop that needs no test never leaves the row; the first that does need one, leaves it somewhere.
    whole = row.whole_loops(layout.parts * layout.steps)
    assert 0 <= whole <= row.loops
    assert all(index * row.vector_bytes < row.row_bytes for index, loop in asked if loop < whole)
    assert whole == row.loops or any(
        index * row.vector_bytes >= row.row_bytes for index, loop in asked if loop == whole
    )


@pytest.mark.parametrize(("row_bytes", "alignment", "split"), cases())
def test_every_vector_is_moved_exactly_once(row_bytes, alignment, split):
    layout = plan_store(row_bytes, row_bytes, split, alignment, alignment)
    for row in (layout.k, layout.v):
        assert row.row_bytes == row_bytes
        assert row.vector_bytes <= alignment
        assert row.row_bytes % row.vector_bytes == 0
        assert_covered_once(row, layout)
    assert layout.block <= 1024
    assert layout.block % 32 == 0
    assert layout.groups * layout.threads <= layout.block
    assert layout.idle_threads == layout.block - layout.groups * layout.threads < 32


@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize(
    ("k_bytes", "v_bytes", "k_alignment", "v_alignment"),
    [
        (4, 8192, 16, 16),
        (1024, 128, 16, 16),
        (1024, 1024, 16, 4),
        (92, 2048, 4, 16),
        (65536, 4, 16, 4),
        (516, 196, 8, 16),
    ],
)
def test_k_and_v_may_differ(k_bytes, v_bytes, k_alignment, v_alignment, split):
    layout = plan_store(k_bytes, v_bytes, split, k_alignment, v_alignment)
    assert (layout.k.row_bytes, layout.v.row_bytes) == (k_bytes, v_bytes)
    assert layout.k.vector_bytes <= k_alignment
    assert layout.v.vector_bytes <= v_alignment
    assert_covered_once(layout.k, layout)
    assert_covered_once(layout.v, layout)


# By hand from the reference: 16 B when the part is a multiple of 512 B, 8 B when of 256 B, else 4 B.
@pytest.mark.parametrize(
    ("row_bytes", "split", "alignment", "vector"),
    [
        (512, 1, 16, 16), (1024, 1, 16, 16), (2048, 4, 16, 16), (1024, 2, 16, 16),
        (256, 1, 16, 8), (768, 1, 16, 8), (512, 2, 16, 8), (1024, 4, 16, 8),
        (128, 1, 16, 4), (92, 1, 16, 4), (640, 1, 16, 4), (256, 2, 16, 4), (512, 4, 16, 4), (516, 1, 16, 4),
        (512, 1, 8, 8), (512, 1, 4, 4), (256, 1, 4, 4), (2048, 4, 8, 8), (2048, 4, 4, 4),
    ],
)  # fmt: skip
def test_explicit_split_keeps_the_reference_scheme(row_bytes, split, alignment, vector):
    layout = plan_store(row_bytes, row_bytes, split, alignment, alignment)
    assert (layout.block, layout.groups, layout.threads, layout.parts) == (128, 4, 32, split)
    assert layout.k.vector_bytes == vector


@pytest.mark.parametrize(
    ("row_bytes", "alignment", "vector"),
    [(128, 16, 16), (128, 8, 8), (128, 4, 4), (200, 16, 8), (12, 16, 4), (92, 16, 4), (8, 16, 8), (4, 16, 4)],
)
def test_auto_takes_the_widest_vector_that_fits(row_bytes, alignment, vector):
    assert plan_store(row_bytes, 0, 0, alignment, alignment).k.vector_bytes == vector


def test_auto_gives_a_narrow_row_fewer_threads_than_a_warp():
    layout = plan_store(128)
    assert (layout.threads, layout.groups, layout.block, layout.parts) == (8, 16, 128, 1)


@pytest.mark.parametrize(
    ("split", "row_bytes", "multiple"), [(2, 128, 256), (2, 516, 256), (4, 256, 512), (4, 768, 512)]
)
def test_refused_split_names_split_and_bytes(split, row_bytes, multiple):
    with pytest.raises(ValueError, match=rf"num_split={split} .*multiple of {multiple}.* {row_bytes} bytes"):
        plan_store(row_bytes, 0, split)


def test_refused_split_names_v_when_v_is_the_one():
    with pytest.raises(ValueError, match=r"num_split=4 .*rows of v have 256 bytes"):
        plan_store(512, 256, 4)


@pytest.mark.parametrize("split", [-1, 3, 5, 8])
def test_unknown_split_is_refused(split):
    with pytest.raises(ValueError, match=rf"num_split must be one of 0, 1, 2, 4, got {split}"):
        plan_store(512, 0, split)


@pytest.mark.parametrize("row_bytes", [-4, 0, 1, 6, 130])
def test_row_bytes_must_be_whole_words(row_bytes):
    with pytest.raises(ValueError, match=rf"rows of k .* {row_bytes}"):
        plan_store(row_bytes)


@pytest.mark.parametrize("alignment", [0, 1, 2, 3, 7, 32])
@pytest.mark.parametrize("split", [0, 1])
def test_unknown_alignment_is_refused(alignment, split):
    with pytest.raises(ValueError, match=rf"alignment must be one of 16, 8, 4, got {alignment}"):
        plan_store(512, 0, split, alignment, 16)
    with pytest.raises(ValueError, match=rf"alignment must be one of 16, 8, 4, got {alignment}"):
        plan_store(512, 0, split, 16, alignment)


@pytest.mark.parametrize(
    ("row_bytes", "split", "batch", "blocks"),
    [
        (512, 1, 0, 0), (512, 1, 1, 1), (512, 1, 4, 1), (512, 1, 5, 2), (512, 1, 70_000, 17_500),
        (512, 2, 1, 1), (512, 2, 2, 1), (512, 2, 3, 2), (2048, 4, 1, 1), (2048, 4, 3, 3),
        (128, 0, 16, 1), (128, 0, 17, 2), (128, 0, 0, 0),
    ],
)  # fmt: skip
def test_grid_by_hand(row_bytes, split, batch, blocks):
    assert plan_store(row_bytes, 0, split).grid(batch) == blocks


@pytest.mark.parametrize(
    ("row_bytes", "v_row_bytes", "split", "answer"),
    [(128, 0, 0, True), (128, 0, 2, False), (256, 0, 2, True), (512, 256, 4, False), (6, 0, 0, False), (0, 0, 0, False),
     (128, 6, 0, False), (512, 0, 3, False)],
)  # fmt: skip
def test_can_use(row_bytes, v_row_bytes, split, answer):
    assert can_use_store_kvcache(row_bytes, v_row_bytes, split) is answer


@pytest.mark.parametrize(
    ("row_bytes", "alignment", "threads", "loops", "parts"),
    [
        (2048, 16, 128, 1, 1),
        (4096, 16, 128, 1, 2),
        (8192, 16, 128, 1, 4),
        (65536, 16, 128, 1, 32),
        (2048, 8, 128, 2, 1),
        (4096, 4, 128, 4, 2),
        (516, 16, 65, 2, 1),  # 129 words: two rounds of 65 threads, not 128 and one
        (2064, 16, 65, 1, 2),  # 129 vectors of 16 bytes: two parts of 65
    ],
)
def test_wide_rows_by_hand(row_bytes, alignment, threads, loops, parts):
    layout = plan_store(row_bytes, 0, 0, alignment, alignment)
    assert (layout.threads, layout.k.loops, layout.parts) == (threads, loops, parts)


# Which kernel serves which batch. By hand: up to 2,048 bytes of reads per SM release first, 1 to 16 MiB pass the L1 by.
FIRST, PAST_L1, LARGEST = Strategy(release_first=True), Strategy(bypass_l1=True), 2**31 - 1


@pytest.mark.parametrize(
    ("row_bytes", "split", "sm_count", "early_launch", "bands"),
    [
        # 2 KiB of reads a row: 264 KiB are 132 rows, 1 MiB 512, 16 MiB 8,192.
        (1024, 0, 132, True, ((132, FIRST), (511, PLAIN), (8192, PAST_L1), (LARGEST, PLAIN))),
        (1024, 1, 132, True, ((132, FIRST), (511, PLAIN), (8192, PAST_L1), (LARGEST, PLAIN))),
        (1024, 0, 132, False, ((511, PLAIN), (8192, PAST_L1), (LARGEST, PLAIN))),
        (2048, 4, 132, True, ((66, FIRST), (255, PLAIN), (4096, PAST_L1), (LARGEST, PLAIN))),
        (92, 0, 132, True, ((1469, FIRST), (5698, PLAIN), (91180, PAST_L1), (LARGEST, PLAIN))),
        # A row reads 1 MiB, more than two SMs' share.
        (524288, 1, 2, True, ((16, PAST_L1), (LARGEST, PLAIN))),
        # A row of 32 MiB passes every bound.
        (16 << 20, 0, 132, True, ((LARGEST, PLAIN),)),
    ],
)
def test_strategies_by_hand(row_bytes, split, sm_count, early_launch, bands):
    assert strategies(plan_store(row_bytes, 0, split), sm_count, early_launch) == bands


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
@pytest.mark.parametrize("sm_count", [1, 2, 132, 10_000])
@pytest.mark.parametrize("early_launch", [True, False])
def test_every_batch_has_a_strategy(row_bytes, sm_count, early_launch):
    bands = strategies(plan_store(row_bytes), sm_count, early_launch)
    limits = [limit for limit, _ in bands]
    assert limits == sorted(set(limits))
    assert limits[0] >= 1
    assert limits[-1] == LARGEST
    assert early_launch or not any(strategy.release_first for _, strategy in bands)
