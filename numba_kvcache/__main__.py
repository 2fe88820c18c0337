"""`python -m numba_kvcache inspect`: the layout and the machine code of one specialisation, without a GPU."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from .compiler import EARLY_LAUNCH_SINCE
from .inspection import NVDISASM_MISSING, KernelReport, compile_kernel, disassemble, find_nvdisasm, inspect_kernel
from .kernel import StoreSpec
from .layout import INDEX_BITS, PLAIN, VECTOR_BYTES, RowLayout, StoreLayout, Strategy, plan_store


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage before them."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


STRATEGIES = {
    "plain": PLAIN,
    "release-first": Strategy(release_first=True),
    "past-l1": Strategy(bypass_l1=True),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; bad input ends the process with one line on stderr and exit code 2."""
    parser = _Parser(prog="python -m numba_kvcache")
    inspect = parser.add_subparsers(dest="command", required=True).add_parser(
        "inspect",
        help="print what a kernel's layout and machine code are",
        description="Compile one specialisation, which needs no GPU, and print its layout, registers and instructions.",
    )
    inspect.add_argument("--row-bytes", type=int, required=True, help="bytes of one row of K (and of V)")
    inspect.add_argument("--v-row-bytes", type=int, default=0, help="bytes of one row of V, if they differ")
    inspect.add_argument("--num-split", type=int, default=0, help="warps per row: 1, 2, 4, or 0 to choose (default)")
    inspect.add_argument(
        "--strategy", choices=tuple(STRATEGIES), default="plain",
        help="release-first serves the smallest batches (from compute capability 9.0), past-l1 the middle, plain the "
        "rest; where one ends and the next begins goes by row bytes and the GPU's SMs (default: plain)",
    )  # fmt: skip
    inspect.add_argument("--index-dtype", choices=tuple(INDEX_BITS), default="int64", help="default: int64")
    inspect.add_argument(
        "--alignment", type=int, choices=VECTOR_BYTES, default=16, help="of addresses and row strides (default: 16)"
    )
    inspect.add_argument("--cc", type=_compute_capability, default=(9, 0), help="compute capability (default: 9.0)")
    inspect.add_argument("--skipping", action="store_true", help="the kernel for calls with a skip_index")
    code = inspect.add_mutually_exclusive_group()
    code.add_argument("--ptx", action="store_true", help="print the PTX instead")
    code.add_argument("--sass", action="store_true", help="print the machine code instead (needs nvdisasm)")
    options = parser.parse_args(arguments)
    try:
        with readers_may_leave():
            print(_answer(options))
    except (ValueError, RuntimeError) as error:
        inspect.error(" ".join(str(error).split()))


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """Print within it, and the process ends quietly where the reader (`| head`) has seen enough."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Or the interpreter would flush what is left on its way out, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _compute_capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected major.minor, such as 9.0, got {text!r}")
    return int(match[1]), int(match[2])


def _answer(options: argparse.Namespace) -> str:
    aligned = options.alignment
    layout = plan_store(options.row_bytes, options.v_row_bytes, options.num_split, aligned, aligned)
    spec = StoreSpec(
        layout, INDEX_BITS[options.index_dtype], options.cc >= EARLY_LAUNCH_SINCE, STRATEGIES[options.strategy],
        options.skipping,
    )  # fmt: skip
    if options.ptx:
        return compile_kernel(spec, options.cc).ptx
    if options.sass:
        nvdisasm = find_nvdisasm()
        if nvdisasm is None:
            raise RuntimeError(NVDISASM_MISSING)
        return disassemble(compile_kernel(spec, options.cc).cubin, nvdisasm)
    return _describe(inspect_kernel(spec, options.cc))


def _describe(report: KernelReport) -> str:
    layout, used, counts = report.spec.layout, report.resources, report.counts
    widths = sorted({*VECTOR_BYTES, *counts.loads, *counts.stores}, reverse=True)
    sections = [
        [
            _line("layout", "K", "V"),
            *(_line(name, k, v) for name, k, v in _row_lines(layout.k, layout.v)),
            *(_line(name, value) for name, value in _launch_lines(layout)),
        ],
        [
            _line("resources of a thread"),
            _line("registers", used.registers),
            _line("local memory (stack), bytes", used.stack_bytes),
            _line("spilled, bytes stored", used.spill_store_bytes),
            _line("spilled, bytes loaded", used.spill_load_bytes),
        ],
        [
            _line(f"instructions, in {report.source}", *(f"{width} B" for width in widths)),
            _line("global loads (one is the index)", *(counts.loads[width] for width in widths)),
            _line("global stores", *(counts.stores[width] for width in widths)),
            _line("early launch: wait", counts.waits),
            _line("early launch: release", counts.releases),
        ],
    ]
    strategy = next(name for name, strategy in STRATEGIES.items() if strategy == report.spec.strategy)
    header = f"{report.spec.name} for sm_{report.cc[0]}{report.cc[1]}, strategy: {strategy}"
    text = [header, *("\n".join(lines) for lines in sections)]
    if report.no_sass:
        text.append(f"Counted in PTX, not in machine code: {report.no_sass}")
    elif layout.steps > 1:
        text.append("A step's instructions may stand in the code several times: the compiler unrolls the steps.")
    return "\n\n".join(text)


def _row_lines(k: RowLayout, v: RowLayout) -> list[tuple[str, int, int]]:
    return [
        ("row bytes", k.row_bytes, v.row_bytes),
        ("vector bytes", k.vector_bytes, v.vector_bytes),
        ("vectors per row", k.vectors, v.vectors),
        ("loops per step", k.loops, v.loops),
        ("threads in a partial last loop", k.vectors % k.threads, v.vectors % v.threads),
    ]


def _launch_lines(layout: StoreLayout) -> list[tuple[str, int]]:
    return [
        ("threads per row", layout.threads * layout.parts),
        ("parts per row", layout.parts),
        ("steps", layout.steps),
        ("rows per block", layout.groups) if layout.parts == 1 else ("parts per block", layout.groups),
        ("threads per block", layout.block),
        ("of them idle", layout.idle_threads),
    ]


def _line(name: str, *values: object) -> str:
    return f"{name:<32}" + "".join(f"{value!s:>8}" for value in values) if values else name


if __name__ == "__main__":
    main()
