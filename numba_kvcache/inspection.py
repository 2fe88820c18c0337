"""What the compiler made of a kernel: registers, spills, loads and stores by width. Needs no GPU.

Registers and spills are the linker's own words. Instructions are counted in machine code (SASS) where nvdisasm is
installed and knows the GPU, and otherwise in PTX, which the linker may still unroll or reorder; the report says which.
"""

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .compiler import EARLY_LAUNCH_SINCE, compile_ptx, link_cubin
from .kernel import StoreSpec
from .settings import SIMULATED

__all__ = [
    "NVDISASM_MISSING",
    "CodeCounts",
    "CompiledKernel",
    "Instruction",
    "KernelReport",
    "Listing",
    "Resources",
    "compile_kernel",
    "disassemble",
    "find_nvdisasm",
    "inspect_kernel",
    "parse_ptx",
    "parse_report",
    "parse_sass",
    "reached_before",
    "read_ptx",
    "read_sass",
]

NVDISASM_MISSING = (
    "nvdisasm, which turns a cubin into readable machine code, was not found; "
    "install it (no GPU is needed) with: pip install 'nvidia-cuda-nvdisasm>=13'"
)


@dataclass(frozen=True)
class Resources:
    """What one thread takes, as the linker reports it."""

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


@dataclass(frozen=True)
class CodeCounts:
    """Instructions of a kernel as they stand in its code, where a loop's body counts once.

    `loads` and `stores` are those of global memory: bytes -> how many. The load of the index is among them.
    `accesses_before_wait` are those of global memory that may run before the wait of an early launch has.
    """

    loads: Counter[int]
    stores: Counter[int]
    local_accesses: int
    waits: int
    releases: int
    accesses_before_wait: int


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel on every level but the loaded one."""

    spec: StoreSpec
    cc: tuple[int, int]
    ptx: str
    cubin: bytes
    link_report: str


@dataclass(frozen=True)
class KernelReport:
    """What inspect_kernel found; `no_sass` says why the instructions were counted in PTX, and is empty if in SASS."""

    spec: StoreSpec
    cc: tuple[int, int]
    resources: Resources
    counts: CodeCounts
    no_sass: str = ""

    @property
    def source(self) -> str:
        """Where the instructions were counted."""
        return "PTX" if self.no_sass else "SASS"

    def __str__(self) -> str:
        """One line."""
        used, counts = self.resources, self.counts
        spills = used.spill_store_bytes + used.spill_load_bytes
        return (
            f"sm_{self.cc[0]}{self.cc[1]}: {used.registers} registers, {used.stack_bytes} B stack, {spills} B spills, "
            f"loads {_widths(counts.loads)}, stores {_widths(counts.stores)} ({self.source})"
        )


def _widths(counts: Counter[int]) -> str:
    return " + ".join(f"{counts[width]} x {width} B" for width in sorted(counts, reverse=True)) or "none"


def inspect_kernel(spec: StoreSpec, cc: tuple[int, int]) -> KernelReport:
    """Compile `spec` for compute capability `cc` and report on its code.

    Raises
    ------
    ValueError
        The installed compiler does not know `cc`, or `cc` lacks the early launch that `spec` asks for.
    RuntimeError
        On the simulator, which has no compiler.
    """
    kernel = compile_kernel(spec, cc)
    resources, nvdisasm = parse_report(kernel.link_report), find_nvdisasm()
    if nvdisasm is None:
        return KernelReport(spec, cc, resources, parse_ptx(kernel.ptx), NVDISASM_MISSING)
    try:
        sass = disassemble(kernel.cubin, nvdisasm)
    except RuntimeError as error:
        return KernelReport(spec, cc, resources, parse_ptx(kernel.ptx), " ".join(str(error).split()))
    return KernelReport(spec, cc, resources, parse_sass(sass))


def compile_kernel(spec: StoreSpec, cc: tuple[int, int]) -> CompiledKernel:
    """PTX and machine code of `spec` for `cc`; raises as inspect_kernel does."""
    if SIMULATED:
        raise RuntimeError("the simulator (NUMBA_ENABLE_CUDASIM=1) has no compiler, so there is no code to inspect")
    from cuda.bindings.nvjitlink import nvJitLinkError
    from numba.cuda.cudadrv.error import CCSupportError

    target = f"{cc[0]}.{cc[1]}"
    if spec.early_launch and cc < EARLY_LAUNCH_SINCE:
        since = ".".join(map(str, EARLY_LAUNCH_SINCE))
        raise ValueError(f"early launch needs compute capability {since}, got {target}")
    try:
        ptx = compile_ptx(spec, cc)
        linked = link_cubin(ptx, cc)
    except (CCSupportError, nvJitLinkError) as error:
        raise ValueError(f"the installed compiler cannot serve compute capability {target}: {error}") from error
    return CompiledKernel(spec, cc, ptx, linked.cubin, linked.report)


def find_nvdisasm() -> str | None:
    """The path of nvdisasm, from the NVIDIA wheels, a CUDA toolkit or PATH; None without one."""
    from cuda.pathfinder import find_nvidia_binary_utility

    return find_nvidia_binary_utility("nvdisasm") or shutil.which("nvdisasm")


def disassemble(cubin: bytes, nvdisasm: str) -> str:
    """The SASS of `cubin`, as the program `nvdisasm` prints it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run([nvdisasm, "-c", str(file)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{nvdisasm} cannot read this code (it may be older than the compiler, or too new for this generation of "
            f"GPUs): {done.stderr.strip()}"
        )
    return done.stdout


def parse_report(text: str) -> Resources:
    """Registers, stack and spills from what ptxas, or nvJitLink under -verbose, prints for one kernel."""
    return Resources(
        _reported(text, r"\bused (\d+) registers"),
        _reported(text, r"(\d+) bytes stack frame|\b(\d+) stack\b"),
        _reported(text, r"(\d+) bytes spill stores"),
        _reported(text, r"(\d+) bytes spill loads"),
    )


def _reported(text: str, pattern: str) -> int:
    """The largest figure that `pattern` finds: nvJitLink reports before and after linking, and the worst counts."""
    found = [int(next(filter(None, match.groups()))) for match in re.finditer(pattern, text, re.IGNORECASE)]
    if not found:
        raise ValueError(f"the linker's report has nothing like {pattern!r}:\n{text}")
    return max(found)


# `/*01e0*/  @!P0 LDG.E.128 R4, desc[UR36][R4.64] ;`: address, perhaps a guard, opcode with its modifiers, operands.
# Lines without an address are no instructions, though some of their words look like it (STO_CUDA_ENTRY).
_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(@!?\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)([^;]*)")
_SASS_LABEL = re.compile(r"\.L_\w+")

# `@%p1 ld.global.v4.u32  {...}, [%rd21];`: words without a modifier are operands on lines of their own, but for these.
_PTX_LINE = re.compile(
    r"^\s*(?:\{\s*)?(@!?%\w+\s+)?([a-z][a-z0-9]*(?:(?:\.|::)\w+)+|bra|ret|exit|trap)(?![^\s;])([^;]*)"
)
_PTX_LABEL = re.compile(r"\$L_\w+")

_SASS_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Instruction:
    """An opcode with its modifiers, whether it is predicated, and the labels that it names."""

    opcode: str
    guarded: bool
    targets: tuple[str, ...]
    ends: bool

    @property
    def base(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.split(".")[0]

    @property
    def modifiers(self) -> list[str]:
        """What follows the opcode's dots."""
        return re.split(r"\.|::", self.opcode)[1:]


@dataclass(frozen=True)
class Listing:
    """Instructions in the order of the text; `labels` says before which one each label stands."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def read_sass(text: str) -> Listing:
    """Read what nvdisasm prints."""
    return _read(text, _SASS_LINE, _SASS_LABEL, _sass_ends)


def read_ptx(text: str) -> Listing:
    """Read PTX."""
    return _read(text, _PTX_LINE, _PTX_LABEL, lambda opcode, _: opcode.split(".")[0] in ("bra", "ret", "exit", "trap"))


def _sass_ends(opcode: str, operands: str) -> bool:
    """A branch may also have its condition among its operands."""
    return opcode in ("EXIT", "RET") or (opcode == "BRA" and operands.strip().startswith("`("))


def _read(text: str, line: re.Pattern[str], label: re.Pattern[str], ends: Callable[[str, str], bool]) -> Listing:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for row in text.splitlines():
        name = label.match(row)
        if name is not None and row[name.end() :].startswith(":"):
            labels[name[0]] = len(instructions)
        elif (found := line.match(row)) is not None:
            guard, opcode, operands = found.groups()
            targets = tuple(label.findall(operands))
            instructions.append(Instruction(opcode, guard is not None, targets, not guard and ends(opcode, operands)))
    if not instructions:
        raise ValueError("there are no instructions in this text")
    return Listing(tuple(instructions), labels)


def reached_before(listing: Listing, stop: Callable[[Instruction], bool]) -> list[Instruction]:
    """The instructions that may run before one at which `stop` holds has run, whatever way the branches go.

    Blocks need not stand in the order in which they run, so the order of the text says nothing.
    """
    seen: set[int] = set()
    ways = [0]
    while ways:
        at = ways.pop()
        if at in seen or at >= len(listing.instructions):
            continue
        instruction = listing.instructions[at]
        if stop(instruction) and not instruction.guarded:
            continue
        seen.add(at)
        ways += [listing.labels[target] for target in instruction.targets if target in listing.labels]
        if not instruction.ends:
            ways.append(at + 1)
    return [listing.instructions[at] for at in sorted(seen)]


def parse_sass(text: str) -> CodeCounts:
    """Count in what nvdisasm prints."""
    return _count(read_sass(text), _classify_sass)


def parse_ptx(text: str) -> CodeCounts:
    """Count in PTX."""
    return _count(read_ptx(text), _classify_ptx)


def _classify_sass(instruction: Instruction) -> tuple[str, int]:
    """(kind, bytes). A generic load or store may reach global memory, so it counts as one that does."""
    kinds = {
        "LDG": "load", "LD": "load", "STG": "store", "ST": "store",
        "LDL": "local", "STL": "local", "ACQBULK": "wait", "PREEXIT": "release",
    }  # fmt: skip
    width = next((_SASS_BYTES[word] for word in instruction.modifiers if word in _SASS_BYTES), 4)
    return kinds.get(instruction.base, "other"), width


def _classify_ptx(instruction: Instruction) -> tuple[str, int]:
    base, modifiers = instruction.base, instruction.modifiers
    if base == "griddepcontrol":
        return {"wait": "wait", "launch_dependents": "release"}[modifiers[0]], 0
    if base not in ("ld", "st") or not {"param", "shared", "const"}.isdisjoint(modifiers):
        return "other", 0
    if "local" in modifiers:
        return "local", 0
    lanes = next((int(word[1:]) for word in modifiers if re.fullmatch(r"v\d", word)), 1)
    return {"ld": "load", "st": "store"}[base], lanes * int(modifiers[-1].lstrip("bsuf")) // 8


def _count(listing: Listing, classify: Callable[[Instruction], tuple[str, int]]) -> CodeCounts:
    classified = [classify(instruction) for instruction in listing.instructions]
    kinds = Counter(kind for kind, _ in classified)
    before_wait = reached_before(listing, lambda instruction: classify(instruction)[0] == "wait")
    early = sum(classify(instruction)[0] in ("load", "store") for instruction in before_wait)
    return CodeCounts(
        loads=Counter(width for kind, width in classified if kind == "load"),
        stores=Counter(width for kind, width in classified if kind == "store"),
        local_accesses=kinds["local"],
        waits=kinds["wait"],
        releases=kinds["release"],
        accesses_before_wait=early if kinds["wait"] else 0,
    )
