"""The driver's floor: one `cuLaunchKernelEx` after another with nothing to prepare, from a loop of machine code."""

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numpy as np
from numba import njit, types

__all__ = ["launch_loop"]

EARLY_LAUNCH_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
SYMBOL = "numba_kvcache_benchmark_launch"

# CUlaunchConfig, CUlaunchAttribute, the parameters as StoreSpec.parameters has them, their addresses.
_CONFIG = struct.Struct("3I3II4xQQI4x")
_ATTRIBUTE = struct.Struct("i4xi60x")
_PARAMETERS = struct.Struct("5Q5qI4xqq")
_ADDRESSES = struct.Struct("13Q")

Run = Callable[[int], Any]


def launch_loop(
    procedure: int, function: int, grid: int, block: int, early_launch: bool, arguments: Sequence[int]
) -> tuple[Run, str]:
    """(call that launches `function` on the default stream so many times, how it loops).

    `procedure` is the address of `cuLaunchKernelEx`. Where Numba cannot compile the loop, it is one of ctypes calls.
    """
    buffer = np.zeros(512 // 8, np.int64)
    config = buffer.ctypes.data
    attribute = config + _CONFIG.size
    parameters = attribute + _ATTRIBUTE.size
    addresses = parameters + _PARAMETERS.size
    early = (attribute, 1) if early_launch else (0, 0)
    _CONFIG.pack_into(buffer, 0, grid, 1, 1, block, 1, 1, 0, 0, *early)
    _ATTRIBUTE.pack_into(buffer, attribute - config, EARLY_LAUNCH_ATTRIBUTE, 1)
    _PARAMETERS.pack_into(buffer, parameters - config, *arguments)
    _ADDRESSES.pack_into(buffer, addresses - config, *range(parameters, parameters + 104, 8))
    words = (config, function, addresses)
    try:
        loop, how = _compiled_loop(procedure), "machine code"
    except Exception as error:  # whatever Numba or llvmlite changed, there is still ctypes
        loop, how = _ctypes_loop(procedure), f"ctypes, no native loop: {type(error).__name__}: {error}"

    def run(count: int, _keep: np.ndarray = buffer) -> None:
        failed = loop(*words, count)
        if failed:
            raise RuntimeError(f"{failed} of {count} bare launches failed")

    return run, how


def _compiled_loop(procedure: int) -> Callable[[int, int, int, int], int]:
    llvmlite.binding.add_symbol(SYMBOL, procedure)
    launch = types.ExternalFunction(SYMBOL, types.int32(types.int64, types.int64, types.int64, types.int64))

    @njit(types.int64(types.int64, types.int64, types.int64, types.int64))
    def loop(config, function, addresses, count):
        failed = 0
        for _ in range(count):
            if launch(config, function, addresses, 0) != 0:
                failed += 1
        return failed

    return loop


def _ctypes_loop(procedure: int) -> Callable[[int, int, int, int], int]:
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    launch = prototype(procedure)

    def loop(config: int, function: int, addresses: int, count: int) -> int:
        return sum(launch(config, function, addresses, None) != 0 for _ in range(count))

    return loop
