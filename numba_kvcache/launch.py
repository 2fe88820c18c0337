"""One launch: grid, block, stream and the early-launch attribute into `cuLaunchKernelEx`.

The call goes through ctypes because that is the cheapest way from Python alone: cuda.bindings' own launch builds its
configuration object in Python (3 us of an H200 host's time) and packs arguments in another (5).
"""

import ctypes
import functools
from collections.abc import Callable

from . import driver

__all__ = ["launch"]

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the grid may start before the one before it has finished.
EARLY_LAUNCH_ATTRIBUTE = 6


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int32),
        ("pad", ctypes.c_int32),
        ("value", ctypes.c_int32),
        ("rest", ctypes.c_int32 * 15),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _Arguments(ctypes.Structure):
    """The kernel's parameters, as compiler.SIGNATURE has them."""

    _fields_ = (
        ("addresses", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_int64 * 5),
        ("batch", ctypes.c_uint32),
        ("size_limit", ctypes.c_int64),
    )


_ARGUMENT_OFFSETS = (*range(0, 80, 8), _Arguments.batch.offset, _Arguments.size_limit.offset)
_Pointers = ctypes.c_void_p * len(_ARGUMENT_OFFSETS)

_early = _Attribute(id=EARLY_LAUNCH_ATTRIBUTE, value=1)


@functools.cache
def _launch_kernel() -> Callable[..., int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return prototype(driver.procedure("cuLaunchKernelEx"))


def launch(kernel: int, grid: int, block: int, stream: int, early_launch: bool, arguments: tuple[int, ...]) -> None:
    """Launch `kernel` on `stream` of the current device. The driver copies the arguments before it returns."""
    *words, batch, size_limit = arguments
    values = _Arguments(tuple(words[:5]), tuple(words[5:]), batch, size_limit)
    base = ctypes.addressof(values)
    pointers = _Pointers(*[base + offset for offset in _ARGUMENT_OFFSETS])
    config = _Config((grid, 1, 1), (block, 1, 1), 0, stream)
    if early_launch:
        config.attributes = ctypes.addressof(_early)
        config.attribute_count = 1
    status = _launch_kernel()(ctypes.addressof(config), kernel, ctypes.addressof(pointers), None)
    if status:
        raise RuntimeError(f"launching the store failed: {driver.describe(status)}")
