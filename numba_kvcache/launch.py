"""One launch: grid, block, stream and the early-launch attribute into `cuLaunchKernelEx`.

The call goes through ctypes because that is the cheapest way from Python alone: cuda.bindings' own launch builds its
configuration object in Python (3 us of an H200 host's time) and packs arguments in another (5).
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import NamedTuple

from . import driver

__all__ = ["EARLY_LAUNCH", "Launch", "launch"]

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the grid may start before the one before it has finished.
EARLY_LAUNCH_ATTRIBUTE = 6


# CUlaunchAttribute: id, then a union of 64 bytes at offset 8.
_early_launch = ctypes.create_string_buffer(struct.pack("i4xi60x", EARLY_LAUNCH_ATTRIBUTE, 1), 72)
EARLY_LAUNCH = ctypes.addressof(_early_launch)
"""Address of the launch attribute, for both host roads."""

# A block holds one call: CUlaunchConfig (grid, block, shared bytes, stream, attributes, their count), the parameters as
# compiler.SIGNATURE has them, and the addresses of those.
_CALL = struct.Struct("3I3II4xQQI4x 5Q5qI4xqq")
_POINTER_TABLE = struct.Struct("13Q")
_PARAMETERS = struct.calcsize("3I3II4xQQI4x")
_POINTERS = _CALL.size
_Block = ctypes.c_char * (_CALL.size + _POINTER_TABLE.size)


@functools.cache
def _launch_kernel() -> Callable[..., int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(driver.procedure("cuLaunchKernelEx"))


# Blocks that no launch is using now. Taken and returned in one bytecode each, so that threads, and finalisers that run
# between our lines, never share one.
_free: list[tuple[ctypes.Array[ctypes.c_char], int]] = []


def _new_block() -> tuple[ctypes.Array[ctypes.c_char], int]:
    block = _Block()
    base = ctypes.addressof(block)
    first = base + _PARAMETERS
    _POINTER_TABLE.pack_into(block, _POINTERS, *range(first, first + 104, 8))
    return block, base


class Launch(NamedTuple):
    """What to launch: a kernel's handle, blocks, threads per block, and whether it starts early."""

    kernel: int
    grid: int
    block: int
    early_launch: bool


def launch(what: Launch, stream: int, arguments: tuple[int, ...]) -> None:
    """Launch on `stream` of the current device. The driver copies the arguments before it returns."""
    kernel, grid, block, early_launch = what
    try:
        entry = _free.pop()
    except IndexError:
        entry = _new_block()
    values, base = entry
    attributes, count = (EARLY_LAUNCH, 1) if early_launch else (0, 0)
    _CALL.pack_into(values, 0, grid, 1, 1, block, 1, 1, 0, stream, attributes, count, *arguments)
    status = _launch_kernel()(base, kernel, base + _POINTERS, None)
    _free.append(entry)
    if status:
        raise RuntimeError(f"launching the store failed: {driver.describe(status)}")
