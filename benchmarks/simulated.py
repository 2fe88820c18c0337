"""The child process of a run without a GPU: stores on Numba's simulator, each checked.

`python -m benchmarks.simulated` reads cells as JSON from stdin and writes, as JSON, how each store was wrong
(empty: exact). NUMBA_ENABLE_CUDASIM=1 must be set before: Numba reads it when it is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from .reference import Store, make_trial, run_trial
from .shapes import Cell

__all__ = ["check_cells", "check_in_child"]


def check_in_child(cells: Sequence[Cell]) -> list[str]:
    """For each cell how its store was wrong, found on the simulator in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([vars(cell) for cell in cells]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        check=False,
    )
    if done.returncode:
        return [f"the simulator's process ended with code {done.returncode}"] * len(cells)
    return json.loads(done.stdout)


def check_cells(cells: Iterable[Cell], store: Store, progress: Callable[[str], None]) -> list[str]:
    """For each cell how `store` was wrong; an exception counts as wrong."""
    rng = np.random.default_rng(0)
    found = []
    for cell in cells:
        progress(f"simulator: {cell.k_bytes} B x {cell.batch} {cell.phase}")
        try:
            found.append(run_trial(make_trial(cell, rng), store))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    from numba_kvcache import store_kvcache

    from .text import progress

    json.dump(check_cells([Cell(**cell) for cell in json.load(sys.stdin)], store_kvcache, progress), sys.stdout)
