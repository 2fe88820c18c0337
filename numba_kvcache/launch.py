"""One launch: grid, block, stream and the early-launch attribute into `cuLaunchKernelEx`.

The call goes through ctypes because that is the cheapest way from Python alone: cuda.bindings' own launch builds its
configuration object in Python (3 us of an H200 host's time) and packs arguments in another (5).
"""

import ctypes
import functools
import struct
from collections.abc import Callable

from . import driver

__all__ = ["launch"]

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the grid may start before the one before it has finished.
EARLY_LAUNCH_ATTRIBUTE = 6


# CUlaunchAttribute: id, then a union of 64 bytes at offset 8.
_early_launch = ctypes.create_string_buffer(struct.pack("i4xi60x", EARLY_LAUNCH_ATTRIBUTE, 1), 72)

# One block per call: CUlaunchConfig (grid, block, shared bytes, stream, attributes, their count), the parameters as
# compiler.SIGNATURE has them, and the addresses of those.
_BLOCK = struct.Struct("3I3II4xQQI4x 5Q5qI4xq 12Q")
_PARAMETERS = struct.calcsize("3I3II4xQQI4x")
_POINTERS = _PARAMETERS + 96
_Block = ctypes.c_char * _BLOCK.size


@functools.cache
def _launch_kernel() -> Callable[..., int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(driver.procedure("cuLaunchKernelEx"))


def launch(kernel: int, grid: int, block: int, stream: int, early_launch: bool, arguments: tuple[int, ...]) -> None:
    """Launch `kernel` on `stream` of the current device. The driver copies the arguments before it returns."""
    values = _Block()
    base = ctypes.addressof(values)
    first = base + _PARAMETERS
    attributes = ctypes.addressof(_early_launch) if early_launch else 0
    _BLOCK.pack_into(
        values, 0, grid, 1, 1, block, 1, 1, 0, stream, attributes, 1 if early_launch else 0,
        *arguments, *range(first, first + 96, 8),
    )  # fmt: skip
    status = _launch_kernel()(base, kernel, base + _POINTERS, None)
    if status:
        raise RuntimeError(f"launching the store failed: {driver.describe(status)}")
