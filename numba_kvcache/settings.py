"""The environment variables that the package reads, each once."""

import functools
import os
from pathlib import Path

from numba import config

__all__ = ["SIMULATED", "cache_folder", "early_launch", "native"]

SIMULATED = bool(config.ENABLE_CUDASIM)
"""NUMBA_ENABLE_CUDASIM: kernels run on Numba's simulator. Numba fixes this when it is imported."""


@functools.cache
def early_launch() -> bool:
    """NUMBA_KVCACHE_EARLY_LAUNCH: 0 turns early launch (PDL) off; otherwise it is on where the GPU has it."""
    return os.environ.get("NUMBA_KVCACHE_EARLY_LAUNCH", "1") != "0"


@functools.cache
def native() -> bool:
    """NUMBA_KVCACHE_NATIVE: 0 leaves every call to the Python road; see native.py."""
    return os.environ.get("NUMBA_KVCACHE_NATIVE", "1") != "0"


@functools.cache
def cache_folder() -> Path | None:
    """NUMBA_KVCACHE_CACHE_DIR: where compiled kernels are kept; empty turns the disk cache off.

    Unset, it is `numba_kvcache` in the user's cache folder.
    """
    folder = os.environ.get("NUMBA_KVCACHE_CACHE_DIR")
    if folder is not None:
        return Path(folder).expanduser() if folder else None
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "numba_kvcache"
    except RuntimeError:  # no home folder
        return None
