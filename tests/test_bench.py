"""bench.py: what it measures, that its verifier sees every kind of wrong store, and its whole run without a GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import needs_compiler, needs_no_gpu

from benchmarks import command_line, simulated, without_gpu
from benchmarks.reference import UNTOUCHED, difference, expected_cache, make_trial, run_trial
from benchmarks.report import print_report
from benchmarks.results import OURS, CellResult, Outcome, Results, Spread, spread_of
from benchmarks.shapes import MODELS, SWEEP_CELLS, Cell, Model, draw_slots, model_cells, row_groups

ROOT = Path(__file__).parent.parent


def select(*arguments):
    return command_line.select_cells(command_line.parse(arguments))


# ----------------------------------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize(
    ("name", "ranks", "widths"),
    [
        ("Llama-3.1-8B", 1, (2048, 2048)),  # 8 heads x 128 x 2 bytes
        ("Llama-3.1-8B", 8, (256, 256)),
        ("gpt-oss-120b", 4, (256, 256)),  # 2 heads x 64 x 2 bytes
        ("Gemma-3-27B", 1, (4096, 4096)),
        ("DeepSeek-V3 (MLA)", 8, (1152, 1024)),  # 576 and 512 elements, on every rank
    ],
)
def test_row_bytes(name, ranks, widths):
    (model,) = (model for model in MODELS if model.name == name)
    assert model.row_bytes(ranks) == widths


def test_heads_that_do_not_divide():
    assert Model("two heads", 2, 64, 64).row_bytes(4) is None


def test_groups_name_everyone_of_a_width():
    groups = {(group.k_bytes, group.v_bytes): group for group in row_groups()}
    assert list(groups) == [(n, n) for n in (128, 256, 512, 1024)] + [(1152, 1024), (2048, 2048), (4096, 4096)]
    assert groups[2048, 2048].label == "TP1: Llama-3.1-8B, Llama-3.1-70B, Qwen3-8B, Mistral-7B"
    assert groups[1024, 1024].label == "TP1: gpt-oss-20b, gpt-oss-120b; TP4: Gemma-3-27B"
    assert groups[1152, 1024].label == "TP1, 4, 8: DeepSeek-V3 (MLA)"


def test_bytes_are_counted():
    cell = Cell(1152, 1024, 10, "decode")
    assert cell.source_bytes == 21_760  # 10 x (1152 + 1024)
    assert cell.moved_bytes == 43_600  # read and written, and 10 indices of 8 bytes


def test_batches_of_the_models():
    cells = model_cells(row_groups())
    assert {cell.batch for cell in cells if cell.phase == "decode"} == {1, 8, 32, 128, 512}
    assert {cell.batch for cell in cells if cell.phase == "prefill"} == {2048, 8192, 16384}
    assert len(cells) == len(set(cells)) == 7 * 8


def test_cells_of_the_sweep():
    assert len(set(SWEEP_CELLS)) == 30
    assert select("--cells", "30") == SWEEP_CELLS


def test_filters():
    assert {cell.k_bytes for cell in select("--models", "gpt-oss")} == {128, 256, 1024}
    assert {cell.k_bytes for cell in select("--rows", "512", "4096")} == {512, 4096}
    assert len(select("--quick")) == 4
    with pytest.raises(SystemExit):
        command_line.parse(["--rows", "5"])


# ----------------------------------------------------------------------------------------------------------------------
# Slots


def test_decode_slots_lie_in_pages_of_their_own():
    slots = draw_slots(Cell(128, 128, 20, "decode"), 6, 64 * 16, np.random.default_rng(1))
    assert slots.shape == (6, 20)
    assert slots.dtype == np.int64
    pages = slots // 16
    assert all(len(set(row)) == 20 for row in pages.tolist())
    # 64 pages last for 3 sets of 20 sequences; the fourth set is the first one's next token.
    assert len(set(slots.ravel().tolist())) == 120
    assert (pages[3] == pages[0]).all()
    assert ((slots[3] - slots[0]) % 16 == 1).all()


def test_prefill_slots_fill_whole_pages_in_order():
    slots = draw_slots(Cell(128, 128, 40, "prefill"), 2, 64 * 16, np.random.default_rng(1))
    assert slots.shape == (2, 40)
    for row in slots:
        assert (row[:16] == row[0] + np.arange(16)).all()
        assert (row[16:32] == row[16] + np.arange(16)).all()
        assert (row[32:] == row[32] + np.arange(8)).all()
        assert all(first % 16 == 0 for first in (row[0], row[16], row[32]))
    assert len(set(slots.ravel().tolist())) == 80
    starts = slots[:, [0, 16, 32]].ravel()
    assert (np.diff(starts) != 16).any()  # pages are shuffled


def test_random_slots_are_distinct_within_a_set():
    slots = draw_slots(Cell(128, 128, 48, "random"), 5, 64, np.random.default_rng(1))
    assert all(len(set(row)) == 48 for row in slots.tolist())
    assert slots.min() >= 0
    assert slots.max() < 64


def test_too_many_slots():
    with pytest.raises(ValueError, match="65 distinct numbers"):
        draw_slots(Cell(128, 128, 65, "random"), 1, 64, np.random.default_rng(1))


# ----------------------------------------------------------------------------------------------------------------------
# The verifier


def plain_store(k, v, k_cache, v_cache, indices):
    k_cache[indices] = k
    v_cache[indices] = v


def misses_a_row(k, v, k_cache, v_cache, indices):
    plain_store(k[1:], v[1:], k_cache, v_cache, indices[1:])


def flips_a_bit(k, v, k_cache, v_cache, indices):
    plain_store(k, v, k_cache, v_cache, indices)
    v_cache[indices[-1], -1] ^= 1


def touches_another_slot(k, v, k_cache, v_cache, indices):
    plain_store(k, v, k_cache, v_cache, indices)
    k_cache[np.setdiff1d(np.arange(len(k_cache)), indices)[0], 0] ^= 1


def swaps_k_and_v(k, v, k_cache, v_cache, indices):
    plain_store(v, k, k_cache, v_cache, indices)


def raises(k, v, k_cache, v_cache, indices):
    raise RuntimeError("the launch failed")


CELL = Cell(128, 128, 5, "decode")


def test_expected_cache_by_hand():
    rows = np.array([[1, 2], [3, 4]], np.uint16)
    cache = expected_cache(3, rows, np.array([2, 0]))
    assert cache.tolist() == [[3, 4], [UNTOUCHED, UNTOUCHED], [1, 2]]


@pytest.mark.parametrize("phase", ["decode", "prefill", "random"])
def test_a_right_store_passes(phase):
    assert run_trial(make_trial(Cell(128, 64, 21, phase), np.random.default_rng(2)), plain_store) == ""


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (misses_a_row, "stored wrongly"),
        (flips_a_bit, "v_cache: 1 of 160 slots are wrong"),
        (touches_another_slot, "touched, though no row was aimed at it"),
        (swaps_k_and_v, "k_cache: 5 of 160"),
    ],
)
def test_a_wrong_store_is_seen(store, words):
    assert words in run_trial(make_trial(CELL, np.random.default_rng(2)), store)


def test_a_corrupted_cache_is_seen():
    trial = make_trial(CELL, np.random.default_rng(2))
    assert difference(trial, trial.k_expected, trial.v_expected) == ""
    corrupted = trial.k_expected.copy()
    corrupted[-1, -1] ^= 0x8000
    assert "k_cache: 1 of 160 slots" in difference(trial, corrupted, trial.v_expected)


@pytest.mark.parametrize("store", [flips_a_bit, raises])
def test_a_wrong_store_fails_the_run(store, monkeypatch, capsys):
    def check_here(cells):
        return simulated.check_cells(cells, store, lambda text: None)

    def no_gpu(cells, *, host):
        return without_gpu.run_without_gpu(cells, {"gpu": "none"}, lambda text: None)

    monkeypatch.setattr(without_gpu, "check_in_child", check_here)
    monkeypatch.setattr(without_gpu, "_machine_code", lambda *widths: "not compiled")
    monkeypatch.setattr(command_line, "_run", no_gpu)
    assert command_line.main(["--quick"]) == 1
    assert "WRONG" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# Numbers and the report


def test_spread():
    assert spread_of([float(n) for n in range(11)]) == Spread(5.0, 2.0, 8.0)


def timed(us):
    return Outcome(time=Spread(us, us, us))


def test_report_of_a_gpu_run(capsys):
    cells = [
        CellResult(Cell(2048, 2048, 1024, "decode"), 2, True, {OURS: timed(4.0), "memcpy": timed(2.0)}),
        CellResult(Cell(2048, 2048, 1, "decode"), 2, False, {OURS: timed(1.0), "memcpy": Outcome(absent="gone")}),
    ]
    results = Results({"gpu": "some GPU"}, cells, host={"bare launch": Spread(4.5, 4.0, 5.0)})
    print_report(results)
    text = capsys.readouterr().out
    # 1024 x 4 rows of 2,048 bytes and 8,192 bytes of indices in 4 us
    assert re.search(r"decode 1024 +8.4 +4.00 +\[4.00, 4.00\] +2099 +0.50 +2.00", text)
    assert re.search(r"decode 1\* ", text)
    assert "gone" in text
    assert "bare launch  4.50" in text
    assert results.exact
    assert results.as_json()["cells"][0]["contenders"][OURS]["gb_per_s"] == pytest.approx(2099.2)


def test_a_wrong_peer_is_no_success():
    outcomes = {OURS: timed(1.0), "peer": Outcome(wrong="k_cache: 1 of 160 slots are wrong")}
    assert not Results({}, [CellResult(CELL, 1, True, outcomes)]).exact


def test_nothing_measured_is_no_success():
    assert not Results({}).exact
    assert not Results({}, [CellResult(CELL, 1, True, {OURS: Outcome(absent="no memory")})]).exact


# ----------------------------------------------------------------------------------------------------------------------
# What can be said of the GPU's part without one


def test_sets_exceed_the_cache():
    from benchmarks.timing import MAX_SETS, is_cold, sets_for

    l2 = 50 * 2**20
    large, middle, small = (Cell(2048, 2048, batch, "random") for batch in (16_384, 128, 1))
    assert sets_for(large, l2) == 2
    assert sets_for(middle, l2) == 160  # 157.3 MB of 1.05 MB each are 150, in whole graphs of 32
    assert sets_for(small, l2) == MAX_SETS
    assert [is_cold(cell, sets_for(cell, l2), l2) for cell in (large, middle, small)] == [True, True, False]


@needs_compiler
@pytest.mark.parametrize("row_bytes", [128, 4096])
def test_the_prototype_is_what_was_measured(row_bytes):
    """One index, one 16-byte load and store each of K and V, nothing before the wait: as spike/kernel_spike.py."""
    from numba import cuda

    from benchmarks.peers.prototype import make_kernel
    from numba_kvcache.compiler import SIGNATURE
    from numba_kvcache.inspection import parse_ptx

    kernel, rows, block = make_kernel(row_bytes, early_launch=True)
    assert (rows, block) == {128: (16, 128), 4096: (1, 256)}[row_bytes]
    ptx, _ = cuda.compile(kernel, SIGNATURE, device=False, abi="numba", cc=(9, 0), output="ptx")
    counts = parse_ptx(ptx)
    assert (dict(counts.loads), dict(counts.stores)) == ({16: 2, 8: 1}, {16: 2})
    assert (counts.waits, counts.releases, counts.accesses_before_wait) == (1, 1, 0)


@needs_no_gpu
def test_the_run_without_a_gpu(tmp_path):
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, "bench.py", "--quick", "--json", str(numbers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "gpu: none" in done.stdout
    assert "16 B" in done.stdout
    assert "Every store was exact (4 cells)." in done.stdout
    found = json.loads(numbers.read_text())
    assert found["exact"]
    assert [cell["k_bytes"] for cell in found["cells"]] == [128, 128, 4096, 4096]
    assert set(found["machine_code"]) == {"128 B", "4096 B"}
