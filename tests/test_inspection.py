"""`python -m numba_kvcache inspect`, and the readers of assembly on text small enough to see through."""

import os
import re
import subprocess
import sys

import pytest
from support import child_environment

from numba_kvcache import __main__ as command_line
from numba_kvcache import inspection, settings
from numba_kvcache.inspection import Resources, parse_ptx, parse_report, parse_sass, reached_before, read_ptx, read_sass
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.layout import plan_store

needs_compiler = pytest.mark.skipif(settings.SIMULATED, reason="the simulator has no compiler")

# Hand-made: words that look like opcodes on lines that are none, guards of every kind, a label inside an operand.
SASS = """\
        .other          store,@"STO_CUDA_ENTRY STV_DEFAULT"
.text.store:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 EXIT ;
        /*0020*/                   ACQBULK ;
        /*0030*/                   LDG.E.64 R2, desc[UR36][R2.64] ;
        /*0040*/              @!P0 LDG.E.128 R4, desc[UR36][R4.64+0x40] ;
        /*0050*/             @!UPT LDG.E.LTC128B R9, desc[UR36][R8.64] ;
        /*0060*/                   PREEXIT ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   CALL.ABS.NOINC `(__assertfail) ;
.L_x_0:
        /*0090*/                   EXIT ;
.L_x_1:
        /*00a0*/                   STG.E.128 desc[UR36][R12.64], R4 ;
        /*00b0*/                   STG.E.U8 desc[UR36][R12.64], R4 ;
        /*00c0*/               @P2 STL.64 [R1], R4 ;
        /*00d0*/                   EXIT ;
.L_x_2:
        /*00e0*/                   BRA `(.L_x_2);
"""

# Blocks out of order: the loads stand above the wait and run after it.
PTX = """\
.visible .entry store(
	.param .u64 store_param_0
)
{
	.reg .b64 	%rd<36>;
	ld.param.u64 	%rd2, [store_param_0];
	@%p2 bra 	$L__BB0_2;
	ret;
$L__BB0_1:
	ld.global.v4.u32 	{%r3, %r4, %r5, %r6}, [%rd21];
	@%p3 ld.global.L1::no_allocate.b64 	%rd7, [%rd22];
	griddepcontrol.launch_dependents;
	st.global.v2.b32 	[%rd32], {%r3, %r4};
	call.uni
	__assertfail,
	(
	param0,
	param1
	);
	ret;
$L__BB0_2:
	griddepcontrol.wait;
	bra.uni 	$L__BB0_1;
}
"""

# From nvJitLink -verbose, with figures that differ between its two halves and from zero.
REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'store' for 'sm_90'
ptxas         .     16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers
info    : used 30 registers, used 4 barriers, 8 stack, 0 bytes smem, 624 bytes cmem[0], 0 bytes lmem
"""


def test_sass_is_counted_by_width() -> None:
    counts = parse_sass(SASS)
    assert counts.loads == {16: 1, 8: 1, 4: 1}
    assert counts.stores == {16: 1, 1: 1}
    assert (counts.local_accesses, counts.waits, counts.releases) == (1, 1, 1)
    assert counts.accesses_before_wait == 0


def test_ptx_is_counted_by_width_and_by_flow_not_by_place() -> None:
    counts = parse_ptx(PTX)
    assert counts.loads == {16: 1, 8: 1}
    assert counts.stores == {8: 1}
    assert (counts.local_accesses, counts.waits, counts.releases) == (0, 1, 1)
    assert counts.accesses_before_wait == 0


def test_opcodes_come_in_the_order_of_the_text() -> None:
    assert [instruction.opcode for instruction in read_sass(SASS).instructions][:3] == ["LDC", "EXIT", "ACQBULK"]
    assert [instruction.opcode for instruction in read_ptx(PTX).instructions] == [
        "ld.param.u64",
        "bra",
        "ret",
        "ld.global.v4.u32",
        "ld.global.L1::no_allocate.b64",
        "griddepcontrol.launch_dependents",
        "st.global.v2.b32",
        "call.uni",
        "ret",
        "griddepcontrol.wait",
        "bra.uni",
    ]


@pytest.mark.parametrize(
    "broken",
    [
        SASS.replace("   ACQBULK ;", "@P3 ACQBULK ;"),  # a wait that some threads skip
        SASS.replace("@P0 EXIT", "@P0 BRA `(.L_x_1)"),  # a way around it
        SASS.replace("LDC R1, c[0x0][0x28]", "LDG.E R1, [R2.64]"),
    ],
    ids=["guarded wait", "way around", "load before"],
)
def test_accesses_that_need_not_wait_are_found_in_sass(broken: str) -> None:
    assert broken != SASS
    assert parse_sass(broken).accesses_before_wait >= 1


def test_accesses_that_need_not_wait_are_found_in_ptx() -> None:
    assert parse_ptx(PTX.replace("bra 	$L__BB0_2", "bra 	$L__BB0_1")).accesses_before_wait == 3


def test_a_branch_with_its_condition_among_the_operands_falls_through() -> None:
    text = SASS.replace("@P0 EXIT", "BRA.U UP0, `(.L_x_2)")
    opcodes = [i.opcode for i in reached_before(read_sass(text), lambda i: i.opcode == "PREEXIT")]
    assert "LDG.E.64" in opcodes


def test_code_without_early_launch_waits_for_nothing() -> None:
    counts = parse_sass(SASS.replace("ACQBULK", "NOP").replace("PREEXIT", "NOP"))
    assert (counts.waits, counts.releases, counts.accesses_before_wait) == (0, 0, 0)


@pytest.mark.parametrize("parse", [parse_sass, parse_ptx])
def test_text_without_instructions_is_refused(parse) -> None:
    """Or a new format of nvdisasm would pass every test that says what must not be in the code."""
    with pytest.raises(ValueError, match="no instructions"):
        parse("STO_CUDA_ENTRY\n")


def test_the_worst_figures_of_a_link_report_count() -> None:
    assert parse_report(REPORT) == Resources(30, 16, 24, 40)


def test_a_report_without_registers_is_refused() -> None:
    with pytest.raises(ValueError, match="registers"):
        parse_report("ptxas info : 0 bytes gmem")


@needs_compiler
def test_a_kernel_report_reads_in_one_line() -> None:
    report = inspection.inspect_kernel(StoreSpec(plan_store(1024), 64, early_launch=True), (9, 0))
    assert report.source == "SASS"
    assert report.counts.loads == {16: 2, 8: 1}
    assert report.resources.registers <= 32
    line = f"{report.resources.registers} registers, 0 B stack, 0 B spills, loads 2 x 16 B + 1 x 8 B, stores 2 x 16 B"
    assert str(report) == f"sm_90: {line} (SASS)"


@needs_compiler
def test_without_nvdisasm_the_ptx_is_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(inspection, "find_nvdisasm", lambda: None)
    command_line.main(["inspect", "--row-bytes", "1024"])
    out = capsys.readouterr().out
    assert "instructions, in PTX" in out
    assert "pip install" in out


@needs_compiler
def test_sass_without_nvdisasm_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(command_line, "find_nvdisasm", lambda: None)
    with pytest.raises(SystemExit) as exit_:
        command_line.main(["inspect", "--row-bytes", "1024", "--sass"])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert "pip install 'nvidia-cuda-nvdisasm" in err


@pytest.fixture
def broken_nvdisasm(tmp_path) -> str:
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho 'unknown architecture' >&2\nexit 1\n")
    tool.chmod(0o755)
    return str(tool)


@needs_compiler
def test_an_nvdisasm_that_fails_is_named(broken_nvdisasm) -> None:
    with pytest.raises(RuntimeError, match=r"nvdisasm cannot read .* older .* or too new .*: unknown architecture"):
        inspection.disassemble(b"", broken_nvdisasm)


@needs_compiler
def test_where_nvdisasm_fails_the_ptx_is_counted(broken_nvdisasm, monkeypatch, capsys) -> None:
    monkeypatch.setattr(inspection, "find_nvdisasm", lambda: broken_nvdisasm)
    command_line.main(["inspect", "--row-bytes", "1024"])
    out = capsys.readouterr().out
    assert figures(out)["instructions, in PTX"] == ["16", "B", "8", "B", "4", "B"]
    assert figures(out)["global stores"] == ["2", "0", "0"]
    assert "Counted in PTX, not in machine code: " in out
    assert "unknown architecture" in out


@needs_compiler
def test_early_launch_is_refused_where_the_gpu_has_none() -> None:
    with pytest.raises(ValueError, match=r"early launch needs compute capability 9\.0, got 8\.0"):
        inspection.compile_kernel(StoreSpec(plan_store(1024), 64, early_launch=True), (8, 0))


def run(*arguments: str, simulated: bool = False) -> subprocess.CompletedProcess:
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": str(int(simulated))}
    command = [sys.executable, "-m", "numba_kvcache", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def figures(text: str) -> dict[str, list[str]]:
    """First words -> numbers of each line of the report but the first."""
    lines = [(line[:32].strip(), line[32:].split()) for line in text.splitlines()[1:]]
    return {name: values for name, values in lines if values}


@needs_compiler
def test_inspect_prints_layout_registers_and_instructions() -> None:
    done = run("inspect", "--row-bytes", "1152", "--v-row-bytes", "1024")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("store_kvcache_1152x16_1024x16_t72_p1_i64_pdl for sm_90, strategy: plain\n")
    found = figures(done.stdout)
    registers = found.pop("registers")
    assert 0 < int(registers[0]) <= 32
    assert found == {
        "layout": ["K", "V"],
        "row bytes": ["1152", "1024"],
        "vector bytes": ["16", "16"],
        "vectors per row": ["72", "64"],
        "loops per step": ["1", "1"],
        "threads in a partial last loop": ["0", "64"],
        "threads per row": ["72"],
        "parts per row": ["1"],
        "steps": ["1"],
        "rows per block": ["3"],
        "threads per block": ["224"],
        "of them idle": ["8"],
        "local memory (stack), bytes": ["0"],
        "spilled, bytes stored": ["0"],
        "spilled, bytes loaded": ["0"],
        "instructions, in SASS": ["16", "B", "8", "B", "4", "B"],
        "global loads (one is the index)": ["2", "1", "0"],
        "global stores": ["2", "0", "0"],
        "early launch: wait": ["1"],
        "early launch: release": ["1"],
    }


@needs_compiler
def test_inspect_honours_split_alignment_index_type_and_gpu() -> None:
    done = run(
        *("inspect", "--row-bytes", "2048", "--num-split", "4", "--index-dtype", "int32"),
        *("--alignment", "8", "--cc", "8.0"),
    )
    found = figures(done.stdout)
    assert done.stdout.startswith("store_kvcache_2048x8_t32_p4_i32 for sm_80, strategy: plain\n")
    assert (found["loops per step"], found["parts per block"]) == (["2", "2"], ["4"])
    assert (found["global loads (one is the index)"], found["global stores"]) == (["0", "4", "1"], ["0", "4", "0"])
    assert (found["early launch: wait"], found["early launch: release"]) == (["0"], ["0"])


@needs_compiler
@pytest.mark.parametrize("strategy", command_line.STRATEGIES)
def test_inspect_names_the_strategy(strategy: str, capsys: pytest.CaptureFixture) -> None:
    command_line.main(["inspect", "--row-bytes", "1024", "--strategy", strategy])
    assert capsys.readouterr().out.splitlines()[0].endswith(f" for sm_90, strategy: {strategy}")


@needs_compiler
@pytest.mark.parametrize(
    ("option", "cc", "expected", "absent"),
    [
        ("--ptx", "9.0", "griddepcontrol.wait", "ACQBULK"),
        ("--sass", "9.0", "ACQBULK", "griddepcontrol"),
        ("--ptx", "8.9", ".target sm_89", "griddepcontrol"),
    ],
)
def test_inspect_prints_the_code(
    option: str, cc: str, expected: str, absent: str, capsys: pytest.CaptureFixture
) -> None:
    command_line.main(["inspect", "--row-bytes", "256", "--cc", cc, option])
    out = capsys.readouterr().out
    assert expected in out
    assert absent not in out


@needs_compiler
@pytest.mark.parametrize("more", [(), ("--skipping",)], ids=["", "skipping"])
def test_skipping_is_another_kernel(more: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    """By its name, and by its reading one parameter more, the thirteenth."""
    command_line.main(["inspect", "--row-bytes", "1024", "--ptx", *more])
    out = capsys.readouterr().out
    assert bool(re.search(r"\.entry\s+\w+_pdl_skip\b", out)) is bool(more)
    assert bool(re.search(r"ld\.param\S*\s+\S+, \[\w+_param_12\]", out)) is bool(more)


@needs_compiler
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--row-bytes", "6"], "multiple of 4 bytes"),
        (["--row-bytes", "1024", "--v-row-bytes", "-4"], "rows of v"),
        (["--row-bytes", "1024", "--num-split", "3"], "num_split must be one of"),
        (["--row-bytes", "1152", "--num-split", "2"], "multiple of 256"),
        (["--row-bytes", "1024", "--cc", "9"], "major.minor"),
        (["--row-bytes", "1024", "--cc", "3.5"], "compute capability 3.5"),
        (["--row-bytes", "1024", "--cc", "9.1"], "compute capability 9.1"),
        (["--row-bytes", "1024", "--alignment", "2"], "choose from"),
        (["--row-bytes", "1024", "--ptx", "--sass"], "not allowed with"),
        ([], "--row-bytes"),
    ],
    ids=" ".join,
)
def test_bad_arguments_end_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        command_line.main(["inspect", *arguments])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("python -m numba_kvcache inspect: error: ")
    assert err.count("\n") == 1
    assert words in err


@needs_compiler
def test_bad_arguments_end_the_process_with_code_2() -> None:
    done = run("inspect", "--row-bytes", "6")
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@needs_compiler
def test_the_simulator_has_nothing_to_inspect() -> None:
    done = run("inspect", "--row-bytes", "1024", simulated=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "simulator" in done.stderr


@needs_compiler
@pytest.mark.skipif(os.name == "nt", reason="pipes are POSIX")
def test_a_reader_that_has_seen_enough():
    """`inspect ... | head -1`: no traceback, and nothing on stderr."""
    child = subprocess.Popen(
        [sys.executable, "-m", "numba_kvcache", "inspect", "--row-bytes", "128", "--ptx"],
        env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child.stdout.close()
    assert (child.stderr.read(), child.wait(timeout=60)) == ("", 1)
    child.stderr.close()
