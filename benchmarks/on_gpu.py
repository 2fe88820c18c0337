"""The benchmark on a GPU: for every cell check each contender's store, then time it; then host time per call."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numba import cuda

from .gpu import (
    Gpu,
    GpuFailedError,
    StoreArrays,
    TrialArrays,
    cell_arrays,
    random_words,
    require_health,
    set_bytes,
    settle,
)
from .host import CELL as HOST_CELL
from .host import host_times
from .numba_kernel import make_backlog
from .peers import AbsentError, Peer, load_peers
from .peers.package import PACKAGE, PACKAGE_INT32
from .reference import make_trial
from .results import CellResult, Outcome, Results
from .rotation import is_cold, sets_for
from .shapes import CACHE_SLOTS, Cell, draw_slots
from .timing import time_calls
from .tune import strategy_peers, tuned

__all__ = ["describe", "run_on_gpu", "tune_on_gpu"]

Progress = Callable[[str], None]

# In a fresh process launches cost otherwise than later: an empty kernel takes 0.46 us instead of 0.64. The change came
# within three cells in all runs so far, and stays; what brings it is not known (docs/notes/kernel-speed.md).
WARM_UP = 3


def run_on_gpu(
    gpu: Gpu, cells: Sequence[Cell], environment: dict[str, str], *, sets: int, host: bool, progress: Progress
) -> Results:
    """Measure `cells`; a peer that fails is absent with its reason, an error on the GPU ends the run early.

    `sets` is how many input sets to rotate (rotation.sets_for).
    """
    results = Results(environment)
    peers, results.absent = load_peers((*cells, HOST_CELL) if host else cells, gpu.early_launch, progress)
    try:
        for result in _Bench(gpu, cells, sets).measure_all([PACKAGE, PACKAGE_INT32, *peers], progress):
            results.cells.append(result)
        if host:
            _measure_host(results, peers, progress)
    except GpuFailedError as error:
        results.failure = str(error)
    return results


def _measure_host(results: Results, peers: Sequence[Peer], progress: Progress) -> None:
    try:
        results.host, results.host_notes, absent = host_times(peers, progress)
    except GpuFailedError:
        raise
    except Exception as error:  # the kernel times stand
        absent = {"all": f"{type(error).__name__}: {error}"}
        require_health("host time", absent["all"])
    results.absent |= {f"host time of {name}": reason for name, reason in absent.items()}


def tune_on_gpu(
    gpu: Gpu, cells: Sequence[Cell], environment: dict[str, str], *, sets: int, progress: Progress
) -> Results:
    """Measure the package's strategies in `cells`, without any peer."""
    results = Results(environment)
    try:
        for result in _Bench(gpu, cells, sets).measure_all(strategy_peers(), progress):
            results.tuning.append(tuned(result))
    except GpuFailedError as error:
        results.failure = str(error)
    return results


class _Bench:
    """Device memory that all cells share: random sources, and caches as large as the widest row asks."""

    def __init__(self, gpu: Gpu, cells: Sequence[Cell], sets: int) -> None:
        self.gpu, self.cells, self.sets = gpu, cells, sets
        self.rng = np.random.default_rng(0)
        self.backlog = make_backlog(gpu.stream)
        source_bytes = max(self._sets(cell) * set_bytes(cell) for cell in cells)
        cache_bytes = CACHE_SLOTS * max(cell.k_bytes + cell.v_bytes for cell in cells)
        self.sources = random_words(source_bytes // 2, self.rng)
        self.caches = cuda.device_array(math.ceil(cache_bytes / 2), np.uint16)

    def measure_all(self, contenders: Sequence[Peer], progress: Progress) -> Iterator[CellResult]:
        """All contenders in every cell, the first few measured once before for nothing."""
        for cell in self.cells[:WARM_UP]:
            self.measure(cell, contenders, f"warming up: {cell.k_bytes} B x {cell.batch}", progress)
        for number, cell in enumerate(self.cells, 1):
            where = f"cell {number} of {len(self.cells)}: {cell.k_bytes} B x {cell.batch} {cell.phase}"
            yield self.measure(cell, contenders, where, progress)

    def _sets(self, cell: Cell) -> int:
        return sets_for(cell, self.gpu.l2_bytes, self.sets)

    def measure(self, cell: Cell, contenders: Sequence[Peer], where: str, progress: Progress) -> CellResult:
        """All contenders in one cell; `where` says in the progress which one it is."""
        sets = self._sets(cell)
        trial = TrialArrays(cell, make_trial(cell, self.rng), self.caches)
        slots = draw_slots(cell, sets, CACHE_SLOTS, self.rng)
        arrays = cell_arrays(cell, self.sources, self.caches, slots, CACHE_SLOTS)
        outcomes = {}
        for peer in contenders:
            progress(f"{where}, {peer.name}")
            outcomes[peer.name] = self._outcome(cell, peer, trial, arrays)
        return CellResult(cell, sets, is_cold(cell, sets, self.gpu.l2_bytes), outcomes)

    def _outcome(self, cell: Cell, peer: Peer, trial: TrialArrays, arrays: list[StoreArrays]) -> Outcome:
        try:
            with peer.on_stream(self.gpu.stream):
                wrong = self._check(cell, peer, trial) if peer.stores else ""
                if wrong:
                    return Outcome(wrong=wrong)
                calls = [peer.bind(cell, a, self.gpu.stream) for a in arrays]
                for call in calls:  # what is compiled or loaded at a first call, before the capture
                    call()
                settle()
                return Outcome(time=time_calls(self.gpu, calls, self.backlog))
        except AbsentError as error:
            return Outcome(absent=str(error))
        except Exception as error:  # whatever a peer raises is its reason
            reason = f"{type(error).__name__}: {error}"
        require_health(peer.name, reason)
        return Outcome(absent=reason)

    def _check(self, cell: Cell, peer: Peer, trial: TrialArrays) -> str:
        return trial.difference_after(peer.bind(cell, trial.arrays, self.gpu.stream))


def describe(gpu: Gpu) -> dict[str, Any]:
    """What the report says of the GPU."""
    return {"gpu": gpu.name, "driver": gpu.driver, "L2": f"{gpu.l2_bytes / 2**20:.0f} MiB"}
