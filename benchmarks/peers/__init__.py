"""Who else can do the job, one small file each; what is not installed is absent, with its reason."""

import contextlib
import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..shapes import Cell

__all__ = ["AbsentError", "Peer", "load_peers"]

MODULES = (
    "memcpy", "empty", "empty_waiting", "prototype", "cuda_cpp", "triton_kernel", "torch_ops", "torch_compiled",
    "cupy_ops",
)  # fmt: skip


class AbsentError(Exception):
    """Why a peer cannot run here, or not in this cell."""


@dataclass(frozen=True)
class Peer:
    """One contender.

    `bind(cell, arrays, stream)` does all that is done once and returns the call that is timed, or raises AbsentError.
    `on_stream(stream)` makes the peer's library work on a stream, for peers that take none. `stores` is False for the
    yardsticks, which leave no answer to check.
    """

    name: str
    bind: Callable[[Cell, Any, int], Callable[[], None]]
    on_stream: Callable[[int], AbstractContextManager[Any]] = lambda stream: contextlib.nullcontext()
    stores: bool = True


def load_peers(
    cells: Iterable[Cell], early_launch: bool, progress: Callable[[str], None]
) -> tuple[list[Peer], dict[str, str]]:
    """(peers that can run `cells`, why others cannot by module)."""
    cells = tuple(cells)
    peers: list[Peer] = []
    absent: dict[str, str] = {}
    for name in MODULES:
        progress(f"loading {name}")
        try:
            peers.append(importlib.import_module(f"{__name__}.{name}").load(cells, early_launch))
        except Exception as error:  # a peer that breaks while it loads must not end the run
            absent[name] = str(error) if isinstance(error, AbsentError) else f"{type(error).__name__}: {error}"
    return peers, absent
