"""The benchmark on a GPU: for every cell check each contender's store, then time it; then host time per call."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import cuda

from .gpu import Gpu, StoreArrays, TrialArrays, cell_arrays, settle
from .host import host_times
from .numba_kernel import make_backlog
from .peers import AbsentError, Peer, load_peers
from .peers.package import PACKAGE
from .reference import make_trial
from .results import CellResult, Outcome, Results
from .shapes import CACHE_SLOTS, Cell, draw_slots
from .timing import is_cold, sets_for, time_calls

__all__ = ["run_on_gpu"]

Progress = Callable[[str], None]


class GpuFailedError(Exception):
    """An error on the GPU, after which nothing in this process can be measured."""


def run_on_gpu(
    gpu: Gpu, cells: Sequence[Cell], environment: dict[str, str], *, host: bool, progress: Progress
) -> Results:
    """Measure `cells`; a peer that fails is absent with its reason, an error on the GPU ends the run early."""
    results = Results(environment)
    peers, results.absent = load_peers(cells, gpu.early_launch, progress)
    try:
        bench = _Bench(gpu, cells)
        for number, cell in enumerate(cells, 1):
            where = f"cell {number} of {len(cells)}: {cell.k_bytes} B x {cell.batch} {cell.phase}"
            results.cells.append(bench.measure(cell, [PACKAGE, *peers], where, progress))
        if host:
            results.host, absent = host_times(peers, progress)
            results.absent |= {f"host time of {name}": reason for name, reason in absent.items()}
    except GpuFailedError as error:
        results.failure = str(error)
    return results


class _Bench:
    """Device memory that all cells share: random sources, and caches as large as the widest row asks."""

    def __init__(self, gpu: Gpu, cells: Sequence[Cell]) -> None:
        self.gpu = gpu
        self.rng = np.random.default_rng(0)
        self.backlog = make_backlog(gpu.stream)
        source_bytes = max(sets_for(cell, gpu.l2_bytes) * cell.source_bytes for cell in cells)
        cache_bytes = CACHE_SLOTS * max(cell.k_bytes + cell.v_bytes for cell in cells)
        self.sources = cuda.to_device(np.frombuffer(self.rng.bytes(source_bytes), np.uint16))
        self.caches = cuda.device_array(math.ceil(cache_bytes / 2), np.uint16)

    def measure(self, cell: Cell, contenders: Sequence[Peer], where: str, progress: Progress) -> CellResult:
        """All contenders in one cell; `where` says in the progress which one it is."""
        sets = sets_for(cell, self.gpu.l2_bytes)
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
                calls[0]()  # what is compiled or loaded at a first call, before the capture
                settle()
                return Outcome(time=time_calls(self.gpu, calls, self.backlog))
        except AbsentError as error:
            return Outcome(absent=str(error))
        except Exception as error:  # whatever a peer raises is its reason
            reason = f"{type(error).__name__}: {error}"
        self._require_health(peer, reason)
        return Outcome(absent=reason)

    def _check(self, cell: Cell, peer: Peer, trial: TrialArrays) -> str:
        return trial.difference_after(peer.bind(cell, trial.arrays, self.gpu.stream))

    def _require_health(self, peer: Peer, reason: str) -> None:
        try:
            settle()
        except RuntimeError as error:
            raise GpuFailedError(f"{peer.name}: {reason}; then: {error}") from error


def describe(gpu: Gpu) -> dict[str, Any]:
    """What the report says of the GPU."""
    return {"gpu": gpu.name, "driver": gpu.driver, "L2": f"{gpu.l2_bytes / 2**20:.0f} MiB"}
