"""The command line of bench.py: which cells, on what, and where the numbers go."""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from .as_json import from_json, to_json
from .report import print_report
from .results import Results
from .rotation import COLD, SWEEP_SETS, describe_sets
from .shapes import ALL_CELLS, MODELS, SWEEP_CELLS, Cell, model_cells, row_groups
from .text import progress

__all__ = ["main", "select_cells"]

PACKAGES = (
    "numba-kvcache", "numba", "numba-cuda", "numpy", "cuda-bindings", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x",
    "apache-tvm-ffi",
)  # fmt: skip

CELLS = {"30": SWEEP_CELLS, "all": ALL_CELLS}

EPILOG = """\
Every store is compared with a plain NumPy loop, untouched bytes included, before it is timed; the exit code is 0 only
if all were exact. Peers (torch, Triton, CuPy, the CUDA C++ kernel through apache-tvm-ffi and nvcc) are measured where
they are installed. Without a GPU, small batches of the same rows run on Numba's simulator, and the compiler's figures
for their kernels are printed. The column "prototype" is a Numba kernel from before this package, kept as it was: one
thread per 16 bytes of a row.

examples:
  python bench.py
  python bench.py --models Llama-3.1 gpt-oss --json run.json
  python bench.py --cells 30 --no-host            32 input sets per cell
  python bench.py --cells all --sets cold         beyond L2, and four more row sizes
  python bench.py --fp8                           the quantised store
  python bench.py --tune                          what layout.strategies rests on, on this GPU
  python bench.py --from run.json --plot run.png  no GPU needed
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description="Measure how fast KV rows of real models are stored, and that they are stored exactly.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_argument_group("which cells")
    which.add_argument("--quick", action="store_true", help="few cells: the narrowest and the widest rows, 2 batches")
    which.add_argument("--models", nargs="+", metavar="NAME", help="only models whose names contain one of these")
    which.add_argument("--rows", nargs="+", type=int, metavar="BYTES", help="only K rows of these widths in bytes")
    which.add_argument(
        "--cells", choices=CELLS,
        help="instead of models: random slots, batches 1 to 16,384, and rows of 128, 256, 1,024, 2,048 and 4,096 B "
        "(30 cells), or of 92, 200, 768 and 1,152 B as well (all: 54); their goals are printed beneath",
    )  # fmt: skip
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--sets", type=_sets, metavar="N|cold",
        help="input sets that launches rotate over: N, or cold, as many as exceed 3x L2 (at most 1,024); "
        f"by default cold, and {SWEEP_SETS} with --cells or --tune",
    )  # fmt: skip
    what.add_argument(
        "--tune", action="store_true",
        help="instead of peers: every strategy of layout.strategies, and what the package's choice costs "
        "(in the 30 cells, or those asked for)",
    )  # fmt: skip
    what.add_argument(
        "--fp8", action="store_true",
        help="instead of all else: store_kvcache_fp8 against memcpy and torch's own operations (needs torch and a GPU)",
    )  # fmt: skip
    what.add_argument("--no-host", action="store_true", help="leave out the host time per call")
    where = parser.add_argument_group("where numbers go")
    where.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    where.add_argument("--plot", type=Path, metavar="FILE", help="also draw the kernel times (needs matplotlib)")
    where.add_argument(
        "--from", dest="source", type=Path, metavar="FILE",
        help="measure nothing: read, report and --plot what --json wrote",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    _refuse_contradictions(parser, options)
    if options.sets is None:
        options.sets = SWEEP_SETS if options.cells or options.tune else COLD
    return options


def _refuse_contradictions(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.cells and options.models:
        parser.error("--cells and --models exclude each other: those cells belong to no model")
    measuring = ("quick", "models", "rows", "cells", "sets", "tune", "fp8", "no_host", "json")
    useless = [f"--{name.replace('_', '-')}" for name in measuring if getattr(options, name) not in (None, False)]
    others = [name for name in useless if name != "--fp8"]
    if options.fp8 and (others or options.source or options.plot):
        parser.error("--fp8 measures cells of its own and prints a table; no other option goes with it")
    if options.source and useless:
        parser.error(f"--from measures nothing, so {', '.join(useless)} can do nothing with it")
    if options.source and not options.source.is_file():
        parser.error(f"--from: there is no file {options.source}")
    if options.plot and options.tune:
        parser.error("--plot draws contenders, and --tune measures none")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib, or this package with its extra [bench]")
    if not select_cells(options):
        known = ", ".join(model.name for model in MODELS)
        parser.error(f"no cells are left; the models are {known}")


def _sets(text: str) -> int:
    if text == "cold":
        return COLD
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of sets from 1, or cold, got {text!r}")
    return int(text)


def select_cells(options: argparse.Namespace) -> tuple[Cell, ...]:
    """The cells that the options ask for."""
    wanted = [name.lower() for name in options.models or [""]]
    models = [model for model in MODELS if any(name in model.name.lower() for name in wanted)]
    if options.cells or (options.tune and not options.models):
        cells = CELLS[options.cells or "30"]
    else:
        cells = model_cells(row_groups(models))
    cells = tuple(cell for cell in cells if not options.rows or cell.k_bytes in options.rows)
    return _few(cells) if options.quick and cells else cells


def _few(cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """The narrowest and the widest rows, each with its smallest and its largest batch."""
    widths = [(cell.k_bytes, cell.v_bytes) for cell in cells]
    few: list[Cell] = []
    for width in sorted({min(widths), max(widths)}):
        batches = [cell for cell in cells if (cell.k_bytes, cell.v_bytes) == width]
        few += dict.fromkeys((batches[0], batches[-1]))
    return tuple(few)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; the exit code, 0 only if every store was exact (and drawn, where --plot asks for it)."""
    from numba_kvcache.__main__ import readers_may_leave

    options = parse(arguments)
    with readers_may_leave():
        return _do(options)


def _do(options: argparse.Namespace) -> int:
    if options.fp8:
        from .fp8 import run_fp8

        return run_fp8()
    if options.source:
        results = from_json(json.loads(options.source.read_text()))
    else:
        results = _run(select_cells(options), sets=options.sets, host=not options.no_host, tune=options.tune)
    if options.json:  # before the report, which may lose its reader
        options.json.write_text(json.dumps(to_json(results), indent=1) + "\n")
    print_report(results)
    drawn = not options.plot or _plot(results, options.plot)
    return 0 if results.exact and drawn else 1


def _plot(results: Results, file: Path) -> bool:
    from .plot import draw

    try:
        draw(results, file)
    except ValueError as error:
        print(f"FAILED: --plot: {error}")
        return False
    print(f"Drawn: {file}")
    return True


def _run(cells: Sequence[Cell], *, sets: int, host: bool, tune: bool) -> Results:
    from numba_kvcache.settings import SIMULATED

    if SIMULATED:
        return _run_without_gpu(cells, "none: NUMBA_ENABLE_CUDASIM is set", tune=tune)

    from .gpu import open_gpu

    try:
        gpu = open_gpu()
    except RuntimeError as error:
        reason = str(error).split(":")[0]
        return _run_without_gpu(cells, f"none; stores run on the simulator ({reason})", tune=tune)

    from .on_gpu import describe, run_on_gpu, tune_on_gpu

    environment = _environment(**describe(gpu), **{"input sets": describe_sets(sets)})
    if tune:
        return tune_on_gpu(gpu, cells, environment, sets=sets, progress=progress)
    return run_on_gpu(gpu, cells, environment, sets=sets, host=host, progress=progress)


def _run_without_gpu(cells: Sequence[Cell], gpu: str, *, tune: bool) -> Results:
    from .without_gpu import run_without_gpu

    if tune:
        return Results(_environment(gpu="none"), failure="--tune measures a GPU, and there is none")
    return run_without_gpu(cells, _environment(gpu=gpu), progress)


def _environment(**gpu: str) -> dict[str, str]:
    return {
        **gpu,
        "versions": ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name))),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
