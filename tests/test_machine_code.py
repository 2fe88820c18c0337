"""The machine code of the kernels, for three GPU generations, read without a GPU.

The expected loads and stores are worked out by hand from the layout rules, not taken from layout.py. nvdisasm is a
declared test dependency, so a machine without it fails here rather than skipping.
"""

import functools
import re
from collections import Counter
from typing import NamedTuple

import pytest

from numba_kvcache import settings
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.layout import PLAIN, Strategy, plan_store

pytestmark = pytest.mark.skipif(settings.SIMULATED, reason="the simulator has no compiler")

if not settings.SIMULATED:
    from numba_kvcache import inspection
    from numba_kvcache.inspection import Instruction, Listing, Resources

ARCHITECTURES = ((8, 0), (9, 0), (10, 0))


class Case(NamedTuple):
    """`moves`: the vectors (bytes -> how many) that one thread loads, and stores, in one step, of K and V together."""

    row_bytes: int
    num_split: int
    moves: dict[int, int]
    v_row_bytes: int = 0
    alignment: int = 16
    steps: int = 1
    index_bits: int = 64
    strategy: Strategy = PLAIN
    skipping: bool = False

    def __str__(self) -> str:
        rows = f"{self.row_bytes}" + (f"+{self.v_row_bytes}" if self.v_row_bytes else "")
        how = ("-release_first" if self.strategy.release_first else "") + (
            "-past_l1" if self.strategy.bypass_l1 else ""
        )
        how += "-skip" if self.skipping else ""
        return f"{rows}-split{self.num_split}-align{self.alignment}-i{self.index_bits}{how}"


PAST_L1, RELEASE_FIRST = Strategy(bypass_l1=True), Strategy(release_first=True)

CASES = (
    # The package chooses: up to 128 threads take one vector each of the row, then up to 16 bytes; then there are parts.
    Case(4, 0, {4: 2}),
    Case(92, 0, {4: 2}),  # 23 threads of 4 bytes: 92 is no multiple of 8
    Case(128, 0, {16: 2}),
    Case(200, 0, {8: 2}),  # 25 threads of 8 bytes
    Case(256, 0, {16: 2}),
    Case(256, 0, {16: 2}, index_bits=32),
    Case(512, 0, {16: 2}),
    Case(576 * 2, 0, {16: 2}, v_row_bytes=512 * 2),  # 72 threads; 8 of them have no part of V
    Case(1024, 0, {16: 2}),
    Case(1024, 0, {16: 2}, index_bits=32),
    Case(2048, 0, {16: 2}),
    Case(2048, 0, {8: 4}, alignment=8),  # 256 vectors of 8 bytes for 128 threads
    Case(2048, 0, {4: 8}, alignment=4),  # 512 words for 128 threads
    Case(2052, 0, {4: 6}),  # 513 words for 2 parts of 86 threads: the third is predicated
    Case(2048, 0, {16: 1, 4: 1}, v_row_bytes=92),
    Case(4096, 0, {16: 2}),
    Case(8192, 0, {16: 2}),  # 4 parts of 128 threads
    Case(8192, 0, {16: 2}, index_bits=32),
    Case(12000, 0, {16: 2}),  # 750 vectors for 6 parts of 125 threads
    Case(65536, 0, {16: 2}),  # 32 parts
    # A warp per part, of vectors that fill whole warps: a multiple of 512 bytes takes 16, of 256 takes 8, else 4.
    Case(92, 1, {4: 2}),
    Case(200, 1, {4: 4}),  # 50 words for 32 lanes
    Case(1024, 1, {16: 4}),
    Case(576 * 2, 1, {4: 9, 16: 2}, v_row_bytes=512 * 2),  # 1,152 is no multiple of 256
    Case(2048, 1, {16: 8}, index_bits=32),
    Case(512, 2, {8: 2}),
    Case(2048, 2, {16: 4}),
    Case(512, 4, {4: 2}),
    Case(2048, 4, {16: 2}),
    Case(4096, 4, {16: 4}),
    # More than 4 vectors of 16 bytes per lane: in steps, which the compiler may unroll.
    Case(4096, 1, {16: 8}, steps=2),
    Case(65536, 1, {16: 8}, steps=32),
    Case(65536, 2, {16: 8}, steps=16, index_bits=32),
    Case(4128, 1, {4: 12}, v_row_bytes=4, steps=3),  # 1,032 words of K for 32 lanes: 33 = 3 x 11
    # The other strategies move the same vectors.
    Case(92, 0, {4: 2}, strategy=PAST_L1),
    Case(200, 0, {8: 2}, strategy=PAST_L1),
    Case(1024, 0, {16: 2}, strategy=PAST_L1, index_bits=32),
    Case(2052, 0, {4: 6}, strategy=PAST_L1),
    Case(2048, 0, {16: 1, 4: 1}, v_row_bytes=92, strategy=PAST_L1),
    Case(65536, 1, {16: 8}, steps=32, strategy=PAST_L1),
    Case(92, 0, {4: 2}, strategy=RELEASE_FIRST),
    Case(1024, 0, {16: 2}, strategy=RELEASE_FIRST),
    Case(65536, 1, {16: 8}, steps=32, strategy=RELEASE_FIRST),
    # A row that may be left out is loaded before that is known.
    Case(4, 0, {4: 2}, skipping=True),
    Case(92, 0, {4: 2}, index_bits=32, skipping=True),
    Case(200, 0, {8: 2}, skipping=True),
    Case(1024, 0, {16: 2}, skipping=True),
    Case(1024, 0, {16: 2}, index_bits=32, strategy=RELEASE_FIRST, skipping=True),
    Case(2048, 0, {16: 2}, strategy=PAST_L1, skipping=True),
    Case(2048, 0, {16: 1, 4: 1}, v_row_bytes=92, skipping=True),
    Case(2052, 0, {4: 6}, skipping=True),
    Case(65536, 0, {16: 2}, skipping=True),
    Case(2048, 4, {16: 2}, skipping=True),
    Case(4096, 1, {16: 8}, steps=2, skipping=True),
    Case(65536, 1, {16: 8}, steps=32, index_bits=32, skipping=True),
)


def architecture(cc: tuple[int, int]) -> str:
    return f"sm_{cc[0]}{cc[1]}"


every_kernel = pytest.mark.parametrize("cc", ARCHITECTURES, ids=architecture)
early_kernel = pytest.mark.parametrize("cc", [cc for cc in ARCHITECTURES if cc >= (9, 0)], ids=architecture)
every_case = pytest.mark.parametrize("case", CASES, ids=str)


class Code(NamedTuple):
    sass: "Listing"
    sass_counts: "inspection.CodeCounts"
    ptx: "Listing"
    ptx_counts: "inspection.CodeCounts"
    resources: "Resources"


@functools.cache
def compile_text(case: tuple, cc: tuple[int, int]) -> tuple[str, str, str]:
    row_bytes, num_split, v_row_bytes, alignment, index_bits, strategy, skipping = case
    layout = plan_store(row_bytes, v_row_bytes, num_split, alignment, alignment)
    kernel = inspection.compile_kernel(StoreSpec(layout, index_bits, cc >= (9, 0), strategy, skipping), cc)
    nvdisasm = inspection.find_nvdisasm()
    assert nvdisasm is not None, inspection.NVDISASM_MISSING
    return inspection.disassemble(kernel.cubin, nvdisasm), kernel.ptx, kernel.link_report


@functools.cache
def read(case: tuple, cc: tuple[int, int]) -> Code:
    sass, ptx, report = compile_text(case, cc)
    return Code(
        inspection.read_sass(sass),
        inspection.parse_sass(sass),
        inspection.read_ptx(ptx),
        inspection.parse_ptx(ptx),
        inspection.parse_report(report),
    )


@pytest.fixture
def code(case: Case, cc: tuple[int, int]) -> Code:
    """Each kernel is compiled once per process, by the first test that wants it."""
    return read(specialisation(case), cc)


def specialisation(case: Case) -> tuple:
    """What of a case decides the kernel."""
    layout = (case.row_bytes, case.num_split, case.v_row_bytes, case.alignment)
    return (*layout, case.index_bits, case.strategy, case.skipping)


def without_index_load(loads: Counter[int], case: Case) -> Counter[int]:
    rest = Counter(loads)
    rest[case.index_bits // 8] -= 1
    return +rest


def copies(found: Counter[int], moves: dict[int, int]) -> float:
    """How often `moves` stands in the code; NaN, which equals nothing, if the widths or their shares differ."""
    times = {found[width] / moves[width] if width in moves else float("nan") for width in (*found, *moves)}
    return times.pop() if len(times) == 1 else float("nan")


@every_case
@every_kernel
def test_loads_and_stores_are_as_wide_and_as_many_as_the_layout_promises(case: Case, cc, code: Code) -> None:
    for counts in (code.sass_counts, code.ptx_counts):
        loads = without_index_load(counts.loads, case)
        stores = counts.stores
        if case.steps == 1:
            assert (loads, stores) == (case.moves, case.moves)
        elif (case.row_bytes, case.v_row_bytes) == (4128, 4):
            # V is one word: the steps that hold nothing of it may have lost it when they were unrolled.
            assert loads == stores
            assert 3 * 11 + 1 <= loads[4] <= 3 * 12
            assert set(loads) == {4}
        else:
            assert 1 <= copies(loads, case.moves) <= case.steps
            assert copies(stores, case.moves) == copies(loads, case.moves)


@every_case
@every_kernel
def test_nothing_spills_and_there_is_no_local_memory(case: Case, cc, code: Code) -> None:
    resources = code.resources
    assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)
    assert code.sass_counts.local_accesses == 0
    assert code.ptx_counts.local_accesses == 0


@every_case
@every_kernel
def test_registers_are_the_words_in_flight_and_24_more(case: Case, cc, code: Code) -> None:
    """One 16-byte vector of K and of V per thread: at most 32; two: 40; four: 56.

    Where there are steps, which only an explicit split of a wide row brings, the compiler unrolls them up to four times
    and keeps addresses of all: 16 more, and 24 more on sm_80. The hardware hands registers out by eights: 32 let the
    full 2,048 threads run on an SM, 64 let 1,024, 80 let 768.
    """
    words = sum(width // 4 * count for width, count in case.moves.items())
    for_steps = 0 if case.steps == 1 else 24 if cc < (9, 0) else 16
    assert code.resources.registers <= -(-(words + 24) // 8) * 8 + for_steps


def is_wait(instruction: "Instruction") -> bool:
    return instruction.opcode in ("ACQBULK", "griddepcontrol.wait")


def touches_global(instruction: "Instruction") -> bool:
    in_ptx = instruction.base in ("ld", "st") and "global" in instruction.modifiers
    return in_ptx or instruction.base in ("LDG", "STG", "LD", "ST")


@every_case
@early_kernel
@pytest.mark.parametrize("level", ["sass", "ptx"])
def test_nothing_is_loaded_before_the_wait(level: str, case: Case, cc, code: Code) -> None:
    listing: Listing = getattr(code, level)
    instructions = listing.instructions
    assert [is_wait(instruction) for instruction in instructions].count(True) == 1
    assert any(map(touches_global, instructions))
    assert not [i.opcode for i in inspection.reached_before(listing, is_wait) if touches_global(i)]
    assert getattr(code, f"{level}_counts").accesses_before_wait == 0


@every_case
@early_kernel
def test_the_wait_comes_first_in_the_text_of_the_machine_code(case: Case, cc, code: Code) -> None:
    """The plain check beside the one over branches, which stands on more of our own code."""
    opcodes = [instruction.opcode for instruction in code.sass.instructions]
    first_load = next(at for at, opcode in enumerate(opcodes) if opcode.startswith("LDG"))
    assert opcodes.index("ACQBULK") < first_load


@pytest.mark.parametrize("case", [case for case in CASES if case.steps == 1], ids=str)
@every_kernel
def test_all_loads_are_in_flight_before_the_first_store(case: Case, cc, code: Code) -> None:
    bases = [instruction.base for instruction in code.sass.instructions]
    first_store = bases.index("STG")
    assert "LDG" in bases[:first_store]
    assert "LDG" not in bases[first_store:]


@pytest.mark.parametrize("level", ["ptx", "sass"])
@pytest.mark.parametrize("strategy", [PLAIN, PAST_L1, RELEASE_FIRST], ids=str)
@pytest.mark.parametrize("row_bytes", [92, 128, 256, 1024, 2048, 4096])
@pytest.mark.parametrize("skipping", [False, True], ids=["", "skip"])
@early_kernel
def test_rows_do_not_wait_for_their_index(
    skipping: bool, row_bytes: int, strategy: Strategy, cc: tuple[int, int], level: str
) -> None:
    """A load that a compiler sinks behind the check of the index costs a small launch 0.2 us; a store must stay.

    Either compiler may: what the first one leaves where it is written, the second one is free to move.
    """
    listing: Listing = getattr(read((row_bytes, 0, 0, 16, 64, strategy, skipping), cc), level)
    instructions = listing.instructions
    loads = [at for at, i in enumerate(instructions) if touches_global(i) and i.base in ("ld", "LDG")]
    wait = next(at for at, i in enumerate(instructions) if is_wait(i))
    assert len(loads) == 3  # the index, K, V: one vector per thread
    branches = {"bra", "BRA", "EXIT", "BSSY", "BSYNC", "CALL"}
    assert not [i.opcode for i in instructions[wait : loads[-1]] if i.base in branches]


SKIP_INDEX = "_param_12"  # the thirteenth parameter, as PTX names it


@every_case
@every_kernel
def test_the_index_to_skip_is_looked_at_only_where_it_is_asked_for(case: Case, cc) -> None:
    """Off, it costs nothing: nothing reads the parameter."""
    ptx = compile_text(specialisation(case), cc)[1]
    name = re.search(r"\.entry\s+([\w$]+)", ptx)[1]
    assert f".param .u64 {name}{SKIP_INDEX}" in ptx or f".param .b64 {name}{SKIP_INDEX}" in ptx
    reads = re.findall(rf"ld\.param\S*\s+\S+, \[{re.escape(name)}{SKIP_INDEX}\]", ptx)
    assert bool(reads) is case.skipping


SKIPPING = tuple(case for case in CASES if case.skipping and case.steps == 1)


@pytest.mark.parametrize("case", SKIPPING, ids=str)
@every_kernel
def test_skipping_costs_a_comparison_or_two(case: Case, cc, code: Code) -> None:
    """In PTX: the parameter, its comparison, a branch. Words alive across the assert would take 12 registers."""
    plain = read(specialisation(case._replace(skipping=False)), cc)
    assert len(code.ptx.instructions) <= len(plain.ptx.instructions) + 7
    assert code.resources.registers <= plain.resources.registers + 4


@every_case
@early_kernel
def test_dependents_are_released_before_the_stores(case: Case, cc, code: Code) -> None:
    assert code.sass_counts.releases >= 1
    if case.steps == 1:
        bases = [instruction.base for instruction in code.sass.instructions]
        assert bases.index("PREEXIT") < bases.index("STG")


@every_case
@pytest.mark.parametrize("cc", [(8, 0)], ids=["sm_80"])
def test_gpus_without_early_launch_get_none_of_it(case: Case, cc, code: Code) -> None:
    for counts in (code.sass_counts, code.ptx_counts):
        assert (counts.waits, counts.releases) == (0, 0)


@every_case
@every_kernel
def test_memory_is_reached_by_plain_global_accesses_only(case: Case, cc, code: Code) -> None:
    """No read-only path, which under early launch could hold stale bytes, and no generic, shared or atomic access."""
    memory = {"LD", "ST", "LDG", "STG", "LDL", "STL", "LDS", "STS", "LDSM", "LDGSTS"}
    for instruction in code.sass.instructions:
        if instruction.base in memory or instruction.base.startswith(("ATOM", "RED", "TEX", "TLD", "SULD")):
            assert instruction.base in ("LDG", "STG")
            assert "CONSTANT" not in instruction.modifiers
    assert not [i.opcode for i in code.ptx.instructions if i.base == "ldu" or (i.base == "ld" and "nc" in i.modifiers)]


@every_case
@every_kernel
def test_there_is_no_double_precision_arithmetic(case: Case, cc, code: Code) -> None:
    """An untyped Python number would bring it in: it is how Numba divides, and how it mixes int64 with uint64."""
    doubles = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "DMMA"}
    kinds = {"F64", "RCP64H", "RSQ64H"}
    found = [i.opcode for i in code.sass.instructions if i.base in doubles or kinds & set(i.modifiers)]
    found += [i.opcode for i in code.ptx.instructions if "f64" in i.modifiers]
    assert not found
