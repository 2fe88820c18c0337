"""What a store must leave behind, in plain NumPy, and where a cache differs from it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .shapes import PAGE_SIZE, Cell, draw_slots

__all__ = ["Trial", "difference", "expected_cache", "make_trial", "run_trial"]

Store = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]

UNTOUCHED = 0xA5A5
"""What every word of a cache holds before a trial (a byte pattern, so that a device can be filled with it)."""


@dataclass(frozen=True)
class Trial:
    """One small store and its answer. Rows hold random bits, as uint16."""

    k: np.ndarray  # (B, D) uint16
    v: np.ndarray  # (B, Dv) uint16
    indices: np.ndarray  # (B,) int64
    slots: int
    k_expected: np.ndarray  # (slots, D) uint16
    v_expected: np.ndarray  # (slots, Dv) uint16


def expected_cache(slots: int, rows: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """A cache of `slots` untouched rows after `rows` were stored at `indices`."""
    cache = np.full((slots, rows.shape[1]), UNTOUCHED, np.uint16)
    for row, slot in zip(rows, indices, strict=True):
        cache[slot] = row
    return cache


def make_trial(cell: Cell, rng: np.random.Generator) -> Trial:
    """A trial of `cell`'s shape, in caches that are about twice as large as they need be."""
    pages = cell.batch if cell.phase == "decode" else -(-cell.batch // PAGE_SIZE)
    slots = 2 * pages * PAGE_SIZE
    indices = draw_slots(cell, 1, slots, rng)[0]
    k, v = (_random_rows(cell.batch, width, rng) for width in (cell.k_bytes, cell.v_bytes))
    return Trial(k, v, indices, slots, expected_cache(slots, k, indices), expected_cache(slots, v, indices))


def _random_rows(rows: int, row_bytes: int, rng: np.random.Generator) -> np.ndarray:
    return np.frombuffer(rng.bytes(rows * row_bytes), np.uint16).reshape(rows, row_bytes // 2)


def difference(trial: Trial, k_cache: np.ndarray, v_cache: np.ndarray) -> str:
    """How the caches after a store differ from the trial's answer; empty if every bit is right."""
    found = (("k_cache", k_cache, trial.k_expected), ("v_cache", v_cache, trial.v_expected))
    return "; ".join(filter(None, (_difference(name, cache, right, trial.indices) for name, cache, right in found)))


def _difference(name: str, cache: np.ndarray, right: np.ndarray, indices: np.ndarray) -> str:
    wrong = np.flatnonzero((cache != right).any(axis=1))
    if wrong.size == 0:
        return ""
    slot = int(wrong[0])
    what = "stored wrongly" if slot in indices else "touched, though no row was aimed at it"
    return f"{name}: {wrong.size} of {len(right)} slots are wrong; slot {slot} was {what}"


def run_trial(trial: Trial, store: Store) -> str:
    """Run `store` on host arrays; the difference it leaves."""
    k_cache, v_cache = (np.full_like(right, UNTOUCHED) for right in (trial.k_expected, trial.v_expected))
    store(trial.k, trial.v, k_cache, v_cache, trial.indices)
    return difference(trial, k_cache, v_cache)
