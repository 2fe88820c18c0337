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
from .kernel import StoreSpec

__all__ = ["EARLY_LAUNCH", "Launch", "launch", "launcher"]

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the grid may start before the one before it has finished.
EARLY_LAUNCH_ATTRIBUTE = 6


# CUlaunchAttribute: id, then a union of 64 bytes at offset 8.
_early_launch = ctypes.create_string_buffer(struct.pack("i4xi60x", EARLY_LAUNCH_ATTRIBUTE, 1), 72)
EARLY_LAUNCH = ctypes.addressof(_early_launch)
"""Address of the launch attribute, for both host roads."""

# CUlaunchConfig: grid, block, shared bytes, stream, attributes, their count.
_CONFIG = "3I3II4xQQI4x"


class Launch(NamedTuple):
    """What to launch: a kernel's handle, blocks, threads per block, and whether it starts early."""

    kernel: int
    grid: int
    block: int
    early_launch: bool


@functools.cache
def _launch_kernel() -> Callable[..., int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(driver.procedure("cuLaunchKernelEx"))


def launcher(parameters: str) -> Callable[[Launch, int, tuple[int, ...]], None]:
    """Make `launch` for kernels with these parameters: struct codes, each in 8 bytes of its own."""
    # A block holds one call: CUlaunchConfig, the parameters, and the addresses of those.
    call = struct.Struct(f"{_CONFIG} {parameters.replace('I', 'I4x')}")
    first, pointers = struct.calcsize(_CONFIG), call.size
    pointer_table = struct.Struct(f"{len(parameters)}Q")
    size = pointers + pointer_table.size

    # Blocks that no launch is using now. Taken and returned in one bytecode each, so that threads, and finalisers that
    # run between our lines, never share one.
    free: list[tuple[ctypes.Array[ctypes.c_char], int]] = []

    def new_block() -> tuple[ctypes.Array[ctypes.c_char], int]:
        block = ctypes.create_string_buffer(size)
        base = ctypes.addressof(block)
        pointer_table.pack_into(block, pointers, *range(base + first, base + pointers, 8))
        return block, base

    def launch(what: Launch, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch on `stream` of the current device. The driver copies the arguments before it returns."""
        kernel, grid, block, early_launch = what
        try:
            entry = free.pop()
        except IndexError:
            entry = new_block()
        values, base = entry
        attributes, count = (EARLY_LAUNCH, 1) if early_launch else (0, 0)
        call.pack_into(values, 0, grid, 1, 1, block, 1, 1, 0, stream, attributes, count, *arguments)
        status = _launch_kernel()(base, kernel, base + pointers, None)
        free.append(entry)
        if status:
            raise RuntimeError(f"launching the store failed: {driver.describe(status)}")

    return launch


launch = launcher(StoreSpec.parameters)
