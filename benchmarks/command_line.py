"""The command line of bench.py: which cells, on what, and where the numbers go."""

import argparse
import datetime
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from .report import print_report, progress
from .results import Results
from .shapes import MODELS, SWEEP_CELLS, Cell, model_cells, row_groups

__all__ = ["main", "select_cells"]

PACKAGES = (
    "numba-kvcache", "numba", "numba-cuda", "numpy", "cuda-bindings", "torch", "triton", "cupy-cuda13x", "cupy-cuda12x",
    "apache-tvm-ffi",
)  # fmt: skip

EPILOG = """\
Every store is compared with a plain NumPy loop, untouched bytes included, before it is timed; the exit code is 0 only
if all were exact. Peers (torch, Triton, CuPy, the CUDA C++ kernel through apache-tvm-ffi and nvcc) are measured where
they are installed. Without a GPU, small batches of the same rows run on Numba's simulator, and the compiler's figures
for their kernels are printed.

examples:
  python bench.py
  python bench.py --models Llama-3.1 gpt-oss --json run.json
  python bench.py --cells 30 --no-host
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description="Measure how fast KV rows of real models are stored, and that they are stored exactly.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few cells: the narrowest and the widest rows, 2 batches")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only models whose names contain one of these")
    parser.add_argument("--rows", nargs="+", type=int, metavar="BYTES", help="only K rows of these widths in bytes")
    parser.add_argument(
        "--cells", type=int, choices=(len(SWEEP_CELLS),),
        help="instead of models: rows of 128 B to 4 KiB, batches 1 to 16,384, random slots",
    )  # fmt: skip
    parser.add_argument("--no-host", action="store_true", help="leave out the host time per call")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all numbers to FILE")
    options = parser.parse_args(arguments)
    if options.cells and options.models:
        parser.error("--cells and --models exclude each other: those cells belong to no model")
    if not select_cells(options):
        known = ", ".join(model.name for model in MODELS)
        parser.error(f"no cells are left; the models are {known}")
    return options


def select_cells(options: argparse.Namespace) -> tuple[Cell, ...]:
    """The cells that the options ask for."""
    wanted = [name.lower() for name in options.models or [""]]
    models = [model for model in MODELS if any(name in model.name.lower() for name in wanted)]
    cells = SWEEP_CELLS if options.cells else model_cells(row_groups(models))
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
    """Run; the exit code, 0 only if every store was exact."""
    options = parse(arguments)
    results = _run(select_cells(options), host=not options.no_host)
    print_report(results)
    if options.json:
        options.json.write_text(json.dumps(results.as_json(), indent=1) + "\n")
    return 0 if results.exact else 1


def _run(cells: Sequence[Cell], *, host: bool) -> Results:
    from numba_kvcache.settings import SIMULATED

    from .gpu import open_gpu
    from .without_gpu import run_without_gpu

    if SIMULATED:
        return run_without_gpu(cells, _environment(gpu="none: NUMBA_ENABLE_CUDASIM is set"), progress)
    try:
        gpu = open_gpu()
    except RuntimeError as error:
        reason = str(error).split(":")[0]
        return run_without_gpu(cells, _environment(gpu=f"none; stores run on the simulator ({reason})"), progress)

    from .on_gpu import describe, run_on_gpu

    return run_on_gpu(gpu, cells, _environment(**describe(gpu)), host=host, progress=progress)


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
