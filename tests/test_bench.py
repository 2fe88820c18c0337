"""bench.py: what it measures, that its verifier sees every kind of wrong store, and its whole run without a GPU."""

import ctypes
import functools
import itertools
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import TESTS, child_environment, needs_compiler, needs_no_gpu, optional

from benchmarks import command_line, simulated, without_gpu
from benchmarks.as_json import from_json, to_json
from benchmarks.goals import host_goals, kernel_goals
from benchmarks.names import (
    CUDA_CPP,
    DISPATCHER,
    EMPTY,
    FLOOR,
    INT32,
    MEMCPY,
    PROTOTYPE,
    STORE_CUPY,
    STORE_NUMBA,
    STORE_TORCH,
)
from benchmarks.reference import UNTOUCHED, difference, expected_cache, make_trial, run_trial
from benchmarks.report import print_report
from benchmarks.results import OURS, CellResult, HostTime, Outcome, Results, Spread, TuneResult, spread_of
from benchmarks.rotation import COLD, LINE, MAX_SETS, is_cold, rotated_offset, sets_for
from benchmarks.shapes import ALL_CELLS, MODELS, SWEEP_CELLS, Cell, Model, draw_slots, model_cells, row_groups

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
    assert {cell.k_bytes for cell in SWEEP_CELLS} == {128, 256, 1024, 2048, 4096}


def test_all_cells_have_four_more_rows_at_the_same_batches():
    cells = select("--cells", "all")
    assert cells == ALL_CELLS
    assert len(set(cells)) == 54
    more = set(cells) - set(SWEEP_CELLS)
    assert {cell.k_bytes for cell in more} == {92, 200, 768, 1152}
    assert all(cell.phase == "random" for cell in more)
    assert {cell.batch for cell in more} == {cell.batch for cell in SWEEP_CELLS}


def test_tuning_defaults_to_the_sweep():
    assert select("--tune") == SWEEP_CELLS
    assert {cell.phase for cell in select("--tune", "--models", "gpt-oss")} == {"decode", "prefill"}


@pytest.mark.parametrize(
    ("arguments", "sets"),
    [
        ([], COLD),
        (["--models", "gpt-oss"], COLD),
        (["--cells", "30"], 32),
        (["--tune"], 32),
        (["--cells", "all", "--sets", "cold"], COLD),
        (["--sets", "64"], 64),
    ],
)
def test_input_sets(arguments, sets):
    assert command_line.parse(arguments).sets == sets


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cells", "30", "--models", "gpt-oss"], "exclude each other"),
        (["--cells", "31"], "invalid choice"),
        (["--sets", "0"], "from 1, or cold, got '0'"),
        (["--sets", "warm"], "got 'warm'"),
        (["--from", "no-such.json"], "there is no file"),
        (["--from", __file__, "--sets", "cold", "--no-host"], "--sets, --no-host can do nothing"),
        (["--tune", "--plot", "x.png"], "--tune measures none"),
    ],
)
def test_refused_options(arguments, words, capsys):
    with pytest.raises(SystemExit) as failed:
        command_line.parse(arguments)
    assert failed.value.code == 2
    assert words in capsys.readouterr().err


def test_plotting_without_matplotlib_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as failed:
        command_line.parse(["--plot", "x.png"])
    assert failed.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err


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

    def no_gpu(cells, *, sets, host, tune):
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
    results = Results({"gpu": "some GPU"}, cells, host={FLOOR: HostTime(Spread(4.5, 4.0, 5.0), "by hand")})
    print_report(results)
    text = capsys.readouterr().out
    # 1024 x 4 rows of 2,048 bytes and 8,192 bytes of indices in 4 us
    assert re.search(r"decode 1024 +8.4 +4.00 +\[4.00, 4.00\] +2099 +0.50 +2.00", text)
    assert re.search(r"decode 1\* ", text)
    assert "gone" in text
    assert re.search(r"driver floor  4.50  4.00  5.00 +1.00  by hand", text)
    assert "Goals for the kernel" not in text  # those are for random slots
    assert results.exact
    assert to_json(results)["cells"][0]["contenders"][OURS]["gb_per_s"] == pytest.approx(2099.2)


def test_a_wrong_peer_is_no_success():
    outcomes = {OURS: timed(1.0), "peer": Outcome(wrong="k_cache: 1 of 160 slots are wrong")}
    assert not Results({}, [CellResult(CELL, 1, True, outcomes)]).exact


def test_nothing_measured_is_no_success():
    assert not Results({}).exact
    assert not Results({}, [CellResult(CELL, 1, True, {OURS: Outcome(absent="no memory")})]).exact


def test_a_failed_strategy_is_no_success():
    outcomes = {"plain": timed(1.0), "bypass L1": Outcome(absent="no memory")}
    assert not Results({}, tuning=[TuneResult(CELL, 1, True, "plain", outcomes)]).exact


def a_run():
    """A run with a bit of everything."""
    cells = [
        CellResult(cell, 32, cell.batch > 1000, {OURS: timed(2.0), MEMCPY: timed(1.9), "peer": Outcome(absent="gone")})
        for cell in SWEEP_CELLS[:8]
    ]
    strategies = {"plain": timed(1.1), "release first": timed(1.0), "bypass L1": timed(2.0)}
    return Results(
        {"gpu": "some GPU", "driver": "1.2", "versions": "numba 1", "python": "3", "input sets": "32"},
        cells,
        tuning=[TuneResult(CELL, 32, False, "plain", strategies)],
        host={FLOOR: HostTime(Spread(2.0, 1.9, 2.1), "machine code"), STORE_TORCH: HostTime(Spread(3.0, 2.9, 3.1))},
        host_notes={"fast road": "on"},
        absent={"someone": "not installed"},
    )


def test_json_comes_back():
    results = a_run()
    numbers = json.loads(json.dumps(to_json(results)))
    assert from_json(numbers) == results
    assert numbers["environment"]["input sets"] == "32"
    assert numbers["host_us_per_call"][STORE_TORCH]["ratio_to_floor"] == 1.5
    assert numbers["goals"]["host"][0] == {
        "goal": "torch tensors: <= 1.25x the driver floor",
        "measured": "1.50x (3.00 over 2.00 us)",
        "met": False,
    }


def test_the_cost_of_a_choice():
    (result,) = a_run().tuning
    assert result.cost == pytest.approx(1.1)


def test_tuning_is_reported(capsys):
    print_report(a_run())
    text = capsys.readouterr().out
    assert re.search(r"decode 5\* .* > 1.100 \[1.100, 1.100\] +1.000 \[.* 1.100\n", text)
    assert "geometric mean 1.1000, most 1.100 (128 + 128 B x 5)" in text
    assert "had every cell taken bypass L1: 2.0000" in text


# ----------------------------------------------------------------------------------------------------------------------
# Goals, by hand


def kernel_verdicts(cells):
    return {goal.what: (goal.met, goal.measured) for goal in kernel_goals(cells)}


def find(verdicts, *words):
    (verdict,) = (its for what, its in verdicts.items() if all(word in what for word in words))
    return verdict


def sweep_result(row_bytes, batch, ours, **others):
    names = {"cpp": CUDA_CPP, "copy": MEMCPY, "empty": EMPTY, "prototype": PROTOTYPE, "int32": INT32}
    outcomes = {OURS: timed(ours)} | {names[name]: timed(us) for name, us in others.items()}
    return CellResult(Cell(row_bytes, row_bytes, batch, "random"), 32, True, outcomes)


def test_goals_against_the_reference():
    met = kernel_verdicts([sweep_result(128, 1, 1.0, cpp=1.0), sweep_result(128, 16, 1.0, cpp=4.0)])
    assert find(met, CUDA_CPP, "geometric") == (True, "2.000 over 2 cells")
    assert find(met, CUDA_CPP, "least of the 30") == (True, "1.000 at 128 B x 1 (2 cells)")
    missed = kernel_verdicts([sweep_result(128, 1, 1.0, cpp=0.9), sweep_result(128, 16, 1.0, cpp=1.1)])
    assert find(missed, CUDA_CPP, "geometric")[0] is False
    assert find(missed, CUDA_CPP, "least of the 30") == (
        False,
        "0.900 at 128 B x 1; missed in 1 of 2 cells, in 0 within p20..p80",
    )


def test_a_miss_within_the_spread_is_said_to_be_one():
    outcomes = {OURS: Outcome(time=Spread(1.0, 0.98, 1.02)), CUDA_CPP: Outcome(time=Spread(0.99, 0.97, 1.01))}
    verdicts = kernel_verdicts([CellResult(SWEEP_CELLS[0], 32, True, outcomes)])
    met, measured = find(verdicts, CUDA_CPP, "least of the 30")
    assert met is False
    assert measured.endswith("in 1 within p20..p80")


def test_goals_for_large_and_small_batches():
    # 2 x 2 x 16,384 rows of 1,024 B and their indices are 67 MB; of 256 B 17 MB.
    cells = [
        sweep_result(1024, 16_384, 20.0, copy=19.4),
        sweep_result(256, 16_384, 20.0, copy=1.0),
        sweep_result(128, 1, 1.2, empty=1.0),
        sweep_result(128, 16, 1.3, empty=1.0),
        sweep_result(128, 128, 9.0, empty=1.0),
    ]
    verdicts = kernel_verdicts(cells)
    assert find(verdicts, MEMCPY) == (True, "0.970 at 1024 B x 16384 (1 cells)")
    assert find(verdicts, EMPTY) == (False, "1.300 at 128 B x 16; missed in 1 of 2 cells, in 0 within p20..p80")


def test_goals_for_narrow_rows_and_the_prototype():
    cells = [sweep_result(92, 1, 1.0, cpp=1.2), sweep_result(200, 1, 1.0, cpp=0.8), sweep_result(768, 1, 1.0, cpp=0.1)]
    verdicts = kernel_verdicts(cells)
    assert find(verdicts, "92 and 200") == (False, "0.800 at 200 B x 1; missed in 1 of 2 cells, in 0 within p20..p80")
    assert find(verdicts, CUDA_CPP, "geometric") == (None, "not measured")  # none of these is of the 30
    verdicts = kernel_verdicts([sweep_result(128, 1, 1.04, prototype=1.0), sweep_result(128, 16, 1.06, prototype=1.0)])
    assert find(verdicts, PROTOTYPE, "geometric")[0] is True
    assert find(verdicts, PROTOTYPE, "most")[0] is False


def test_goals_for_index_types():
    alike = [sweep_result(128, 1, 1.0, int32=1.04), sweep_result(128, 16, 1.0, int32=0.97)]
    assert find(kernel_verdicts(alike), "int32", "mean") == (True, "1.004 over 2 cells")
    assert find(kernel_verdicts(alike), "int32", "most") == (True, "1.040 at 128 B x 1 (2 cells)")
    apart = kernel_verdicts([sweep_result(128, 1, 1.0, int32=1.06)])
    assert find(apart, "int32", "mean")[0] is False
    assert find(apart, "int32", "most")[0] is False


def test_no_goals_for_models():
    assert kernel_goals([CellResult(CELL, 2, True, {OURS: timed(1.0), CUDA_CPP: timed(2.0)})]) == []
    assert host_goals({}) == []


@pytest.mark.parametrize(
    ("times", "words", "met"),
    [
        ({FLOOR: 4.0, STORE_TORCH: 5.0}, ("torch", "1.25x"), True),
        ({FLOOR: 4.0, STORE_TORCH: 5.1}, ("torch", "1.25x"), False),
        ({CUDA_CPP: 5.0, STORE_TORCH: 4.0}, ("torch", "0.80x"), True),
        ({CUDA_CPP: 4.9, STORE_TORCH: 4.0}, ("torch", "0.80x"), False),
        ({FLOOR: 4.0, STORE_NUMBA: 6.0}, ("Numba arrays: <=",), True),
        ({DISPATCHER: 36.0, STORE_NUMBA: 6.0}, ("dispatcher",), True),
        ({DISPATCHER: 35.9, STORE_NUMBA: 6.0}, ("dispatcher",), False),
        ({FLOOR: 1.0, STORE_CUPY: 12.0}, ("CuPy",), True),  # the one or the other
        ({FLOOR: 10.0, STORE_CUPY: 25.0}, ("CuPy",), True),
        ({FLOOR: 4.0, STORE_CUPY: 12.1}, ("CuPy",), False),
        ({FLOOR: 4.0}, ("CuPy",), None),
        ({STORE_CUPY: 13.0}, ("CuPy",), None),
    ],
)
def test_host_goals(times, words, met):
    goals = host_goals({name: HostTime(Spread(us, us, us)) for name, us in times.items()})
    assert find({goal.what: (goal.met, goal.measured) for goal in goals}, *words)[0] is met


# ----------------------------------------------------------------------------------------------------------------------
# The picture


def test_redraw_from_json(tmp_path, capsys):
    optional("matplotlib")
    numbers, picture = tmp_path / "run.json", tmp_path / "run.png"
    numbers.write_text(json.dumps(to_json(a_run())))
    assert command_line.main(["--from", str(numbers), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"Drawn: {picture}" in capsys.readouterr().out


def test_nothing_to_draw(tmp_path, capsys):
    optional("matplotlib")
    numbers = tmp_path / "run.json"
    numbers.write_text(json.dumps(to_json(Results({}, [CellResult(CELL, 1, True, {OURS: Outcome()})]))))
    assert command_line.main(["--from", str(numbers), "--plot", str(tmp_path / "run.png")]) == 1
    assert "no cell has a time" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------------
# What can be said of the GPU's part without one


def test_sets_exceed_the_cache():
    l2 = 50 * 2**20
    large, middle, small = (Cell(2048, 2048, batch, "random") for batch in (16_384, 128, 1))
    assert sets_for(large, l2) == 2
    assert sets_for(middle, l2) == 160  # 157.3 MB of 1.05 MB each are 150, in whole graphs of 32
    assert sets_for(small, l2) == MAX_SETS
    assert [is_cold(cell, sets_for(cell, l2), l2) for cell in (large, middle, small)] == [True, True, False]


@pytest.mark.parametrize(
    ("size", "room"), [(3_014_656, 2_400_000_000), (67_108_864, 150_000_000), (92, 1000), (4096, 127)]
)
@pytest.mark.parametrize("phase", [0, 16, 112])
def test_rotated_copies_stay_in_their_room_and_on_their_line(size, room, phase):
    offsets = [rotated_offset(number, size, room, phase) for number in range(100)]
    assert all(0 <= offset <= room and offset % LINE == phase for offset in offsets)
    assert all(b - a < size + LINE for a, b in itertools.pairwise(offsets))  # one behind the other, or from the start
    assert len(set(offsets)) > 1 or room < LINE


def test_a_given_number_of_sets():
    cell = Cell(2048, 2048, 1, "random")
    assert [sets_for(cell, 50 * 2**20, sets) for sets in (1, 24, 32, 33)] == [1, 24, 32, 64]


def test_sources_of_odd_rows_start_where_allocations_do():
    from benchmarks.gpu import set_bytes

    assert set_bytes(Cell(92, 92, 1, "random")) == 2 * 96
    assert set_bytes(Cell(200, 200, 1, "random")) == 2 * 208
    assert all(set_bytes(cell) == cell.source_bytes for cell in SWEEP_CELLS)


@needs_compiler
@pytest.mark.parametrize("native", [True, False])
def test_the_floor_launches_what_it_is_given(native, monkeypatch):
    """cuLaunchKernelEx is played by a function that notes what it gets."""
    from benchmarks import native_loop

    calls = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    def launch(config, function, addresses, extra):
        parameters = [
            int.from_bytes(ctypes.string_at(at, 8), "little", signed=True)
            for at in (ctypes.c_uint64 * 13).from_address(addresses)
        ]
        calls.append((struct.unpack("3I3II4xQQI4x", ctypes.string_at(config, 56)), function, parameters))
        return 0 if function == 77 else 1

    def refuse(procedure):
        raise RuntimeError("no compiler")

    if not native:
        monkeypatch.setattr(native_loop, "_compiled_loop", refuse)
    procedure = ctypes.cast(launch, ctypes.c_void_p).value
    arguments = (1, 2, 3, 4, 5, -6, 7, 8, 9, 10, 11, 12, -13)
    run, how = native_loop.launch_loop(procedure, 77, 3, 128, True, arguments)
    assert how == "machine code" if native else "no native loop: RuntimeError: no compiler" in how
    run(5)
    assert len(calls) == 5
    (*config, attribute, count), function, parameters = calls[-1]
    assert config == [3, 1, 1, 128, 1, 1, 0, 0]
    assert count == 1
    assert struct.unpack("i4xi", ctypes.string_at(attribute, 12)) == (6, 1)
    assert (function, parameters) == (77, list(arguments))
    failing, _ = native_loop.launch_loop(procedure, 78, 3, 128, False, arguments)
    with pytest.raises(RuntimeError, match="4 of 4 bare launches failed"):
        failing(4)
    (*_, attribute, count), _, _ = calls[-1]
    assert (attribute, count) == (0, 0)


@needs_compiler
def test_the_first_cells_are_measured_once_before_for_nothing():
    from benchmarks.on_gpu import _Bench

    bench, seen = object.__new__(_Bench), []
    bench.cells = SWEEP_CELLS[:5]
    bench.measure = lambda cell, contenders, where, progress: seen.append(cell) or cell
    assert tuple(bench.measure_all([], lambda text: None)) == SWEEP_CELLS[:5]
    assert tuple(seen) == (*SWEEP_CELLS[:3], *SWEEP_CELLS[:5])


@needs_compiler
def test_rows_are_timed_in_turns():
    from benchmarks.host import interleave

    log = []
    runs = {name: lambda calls, name=name: log.append((name, calls)) for name in "ab"}
    samples = interleave(runs, 3, 7, lambda: log.append("sync"), lambda text: None)
    assert log == ["sync", ("a", 7), "sync", ("b", 7)] * 3 + ["sync"]
    assert {name: len(its) for name, its in samples.items()} == {"a": 3, "b": 3}


@needs_compiler
def test_the_python_road_can_be_called_alone_and_seen():
    from benchmarks.host import repeated, runs_frame_of
    from benchmarks.roads import without_fast_road

    def store(a, b=2, *, c=3):
        return store_results.append((a, b, c))

    store_results = []
    copy = without_fast_road(store)
    assert copy is not store
    assert runs_frame_of(store.__code__, repeated(functools.partial(copy, 1)))
    assert not runs_frame_of(store.__code__, repeated(functools.partial(divmod, 7, 2)))
    assert store_results == [(1, 2, 3)]


@needs_compiler
def test_every_strategy_has_a_name():
    from benchmarks.strategy import STRATEGIES
    from numba_kvcache.layout import plan_store, strategies

    for row_bytes in (92, 128, 1152, 4096):
        for early_launch in (True, False):
            bands = strategies(plan_store(row_bytes), 132, early_launch)
            assert {strategy for _, strategy in bands} <= set(STRATEGIES.values())


@needs_compiler
def test_the_floor_kernels():
    """The plain one says nothing of early launch; the other waits and releases."""
    import numba_kvcache.inspection
    from benchmarks.peers import empty, empty_waiting
    from numba_kvcache.compiler import signature
    from numba_kvcache.kernel import StoreSpec

    found, parameters = {}, signature(StoreSpec.parameters)

    def note(function, symbol, block):
        from numba import cuda

        ptx, _ = cuda.compile(function, parameters, device=False, abi="numba", cc=(9, 0), output="ptx")
        found[symbol] = numba_kvcache.inspection.parse_ptx(ptx)
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(empty, "compile_kernel", note)
        assert not empty.load((), True).stores
        assert not empty_waiting.load((), True).stores
    counts = {symbol: (its.waits, its.releases) for symbol, its in found.items()}
    assert counts == {"benchmark_empty": (0, 0), "benchmark_empty_waiting": (1, 1)}


def test_the_reference_is_built_for_every_width():
    optional("tvm_ffi")
    from benchmarks.peers.cuda_cpp import source

    first = source(ALL_CELLS, True).splitlines()[0]
    assert all(f"X({width}, 1)" in first for width in (92, 200, 768, 1152))


@needs_compiler
@pytest.mark.parametrize("row_bytes", [128, 4096])
def test_the_prototype_is_what_was_measured(row_bytes):
    """One index, one 16-byte load and store each of K and V, nothing before the wait."""
    from numba import cuda

    from benchmarks.peers.prototype import make_kernel
    from numba_kvcache.compiler import signature
    from numba_kvcache.inspection import parse_ptx
    from numba_kvcache.kernel import StoreSpec

    kernel, rows, block = make_kernel(row_bytes, early_launch=True)
    assert (rows, block) == {128: (16, 128), 4096: (1, 256)}[row_bytes]
    ptx, _ = cuda.compile(kernel, signature(StoreSpec.parameters), device=False, abi="numba", cc=(9, 0), output="ptx")
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


# bench.py --fp8


def test_fp8_cells_count_what_is_moved():
    from benchmarks.fp8 import CELLS, GOAL_BYTES, Fp8Cell

    # One row of 1,024: 2,048 bytes read and 1,024 written, of K and of V, and an index of 8.
    assert Fp8Cell("bfloat16", 1024, 1).moved_bytes == 6152
    assert Fp8Cell("float32", 1024, 2).moved_bytes == 2 * (2 * (4096 + 1024) + 8)
    assert sum(cell.moved_bytes >= GOAL_BYTES for cell in CELLS) >= 4


def test_fp8_goal_line():
    from benchmarks.fp8 import goal_line

    assert goal_line([0.95, 0.9]).endswith("met, least 0.900")
    assert goal_line([0.95, 0.89]).endswith("NOT met, least 0.890")


@pytest.mark.parametrize("other", [["--quick"], ["--no-host"], ["--json", "x"], ["--plot", "x.png"]])
def test_fp8_goes_with_no_other_option(other, capsys):
    with pytest.raises(SystemExit):
        command_line.parse(["--fp8", *other])
    assert "--fp8 measures cells of its own" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough():
    """`bench.py --from run.json | head -1`: no traceback, and nothing on stderr."""
    root = TESTS.parent
    command = [sys.executable, "bench.py", "--from", "docs/results/h200-cells.json"]
    child = subprocess.Popen(
        command, cwd=root, env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    child.stdout.close()
    assert (child.stderr.read(), child.wait(timeout=60)) == ("", 1)
    child.stderr.close()
