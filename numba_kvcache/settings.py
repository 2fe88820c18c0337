"""The environment variables that the package reads, each once."""

import functools
import os
from pathlib import Path
from typing import NamedTuple

from numba import config

__all__ = ["SIMULATED", "cache_folder", "early_launch", "native"]

SIMULATED = bool(config.ENABLE_CUDASIM)
"""NUMBA_ENABLE_CUDASIM: kernels run on Numba's simulator. Numba fixes this when it is imported."""


class _Switches(NamedTuple):
    early_launch: bool
    native: bool


@functools.cache
def _switches() -> _Switches:
    """Both at once, so that a word that is neither on nor off is refused by every call, whichever switch it is of."""
    return _Switches(
        _is_on("NUMBA_KVCACHE_EARLY_LAUNCH", os.environ.get("NUMBA_KVCACHE_EARLY_LAUNCH", "1")),
        _is_on("NUMBA_KVCACHE_NATIVE", os.environ.get("NUMBA_KVCACHE_NATIVE", "1")),
    )


_WORDS = {"1": True, "true": True, "on": True, "yes": True, "0": False, "false": False, "off": False, "no": False}


def _is_on(name: str, value: str) -> bool:
    try:
        return _WORDS[value.strip().lower() or "1"]
    except KeyError:
        raise ValueError(f"{name} must be one of {', '.join(_WORDS)}, got {value!r}; unset, it is on") from None


def early_launch() -> bool:
    """NUMBA_KVCACHE_EARLY_LAUNCH: 0 turns early launch (PDL) off; otherwise it is on where the GPU has it."""
    return _switches().early_launch


def native() -> bool:
    """NUMBA_KVCACHE_NATIVE: 0 leaves every call to the Python road; see native.py."""
    return _switches().native


@functools.cache
def cache_folder() -> Path | None:
    """NUMBA_KVCACHE_CACHE_DIR: where compiled kernels are kept; empty turns the disk cache off.

    Unset, it is `numba_kvcache` in the user's cache folder.
    """
    folder = os.environ.get("NUMBA_KVCACHE_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    try:
        if folder is not None:
            return Path(folder).expanduser() if folder else None
        return (Path(base) if base else Path.home() / ".cache") / "numba_kvcache"
    except RuntimeError:  # no home folder
        return None
