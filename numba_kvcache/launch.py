"""One launch: grid, block, stream and the early-launch attribute into `cuLaunchKernelEx`.

The call goes through ctypes because that is the cheapest way from Python alone: cuda.bindings' own launch builds its
configuration object in Python (3 us of an H200 host's time) and packs arguments in another (5).
"""

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from . import driver
from .kernel import StoreSpec

__all__ = ["EARLY_LAUNCH", "Launch", "ReadyLaunch", "launch", "launcher"]

# CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: the grid may start before the one before it has finished.
EARLY_LAUNCH_ATTRIBUTE = 6


# CUlaunchAttribute: id, then a union of 64 bytes at offset 8.
_early_launch = ctypes.create_string_buffer(struct.pack("i4xi60x", EARLY_LAUNCH_ATTRIBUTE, 1), 72)
EARLY_LAUNCH = ctypes.addressof(_early_launch)
"""Address of the launch attribute, for both host roads."""

# CUlaunchConfig: grid, block, shared bytes, stream, attributes, their count.
_CONFIG = "3I3II4xQQI4x"
# What of a call differs from one of the same shapes to the next, in one piece: the end of CUlaunchConfig (stream,
# attributes, their count), and the five addresses behind it. (L packs in a third of the time of Q.)
_WORD = "L" if struct.calcsize("L") == 8 else "Q"
_VARYING = struct.Struct(f"2{_WORD}I4x5{_WORD}")
_VARYING_AT = struct.calcsize("3I3II4x")


class Launch(NamedTuple):
    """What to launch: a kernel's handle, blocks, threads per block, and whether it starts early."""

    kernel: int
    grid: int
    block: int
    early_launch: bool


@functools.cache
def _launch_kernel() -> Callable[..., int]:
    """cuLaunchKernelEx. Without argument types, which cost 0.14 us to apply: pass None and ctypes' objects alone."""
    return ctypes.CFUNCTYPE(ctypes.c_int)(driver.procedure("cuLaunchKernelEx"))


class _Block(NamedTuple):
    """Memory of one call: CUlaunchConfig, the parameters, and the addresses of those; and references into it."""

    memory: ctypes.Array[ctypes.c_char]
    config: Any
    pointers: Any


class _Packing:
    """How a call of kernels with these parameters (struct codes) is packed: each has 8 bytes of its own."""

    def __init__(self, parameters: str) -> None:
        self._call = struct.Struct(f"{_CONFIG} {parameters.replace('I', 'I4x')}")
        self._pointers = struct.Struct(f"{len(parameters)}Q")

    def new_block(self) -> _Block:
        first, pointers = struct.calcsize(_CONFIG), self._call.size
        memory = ctypes.create_string_buffer(pointers + self._pointers.size)
        base = ctypes.addressof(memory)
        self._pointers.pack_into(memory, pointers, *range(base + first, base + pointers, 8))
        return _Block(memory, ctypes.byref(memory), ctypes.byref(memory, pointers))

    def fill(self, block: _Block, what: Launch, stream: int, arguments: tuple[int, ...]) -> None:
        _, grid, threads, early_launch = what
        attributes, count = (EARLY_LAUNCH, 1) if early_launch else (0, 0)
        self._call.pack_into(block.memory, 0, grid, 1, 1, threads, 1, 1, 0, stream, attributes, count, *arguments)


# Blocks that no launch is using now are in lists, taken and returned in one bytecode each, so that threads, and
# finalisers that run between our lines, never share one.


def launcher(parameters: str) -> Callable[[Launch, int, tuple[int, ...]], None]:
    """Make `launch` for kernels with these parameters: struct codes, each in 8 bytes of its own."""
    packing = _Packing(parameters)
    free: list[_Block] = []

    def launch(what: Launch, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch on `stream` of the current device. The driver copies the arguments before it returns."""
        try:
            block = free.pop()
        except IndexError:
            block = packing.new_block()
        packing.fill(block, what, stream, arguments)
        status = _launch_kernel()(block.config, ctypes.c_void_p(what.kernel), block.pointers, None)
        free.append(block)
        if status:
            raise _failed(status)

    return launch


launch = launcher(StoreSpec.parameters)


class ReadyLaunch:
    """`launch` of one kernel, again and again, with the same arguments but for stream and addresses.

    All else is packed once: of the 1.1 us that `launch` takes in Python, 0.4 are left.
    """

    _packing = _Packing(StoreSpec.parameters)

    def __init__(self, context: Any, current_stream: Callable[[], int], what: Launch, rest: tuple[int, ...]) -> None:
        """`rest` are the arguments after the addresses.

        `context` (as driver.context_here says it) and `current_stream` are for the caller, who sees to both.
        """
        self.context, self.current_stream, self._what, self._rest = context, current_stream, what, rest
        self._launch_kernel = _launch_kernel()
        self._attributes, self._count = (EARLY_LAUNCH, 1) if what.early_launch else (0, 0)
        self._free: list[tuple[ctypes.Array[ctypes.c_char], tuple[Any, ...]]] = []

    def launch(self, stream: int, addresses: tuple[int, ...]) -> None:
        """Launch on `stream` of the current context, with the five arrays at these addresses."""
        k, v, k_cache, v_cache, indices = addresses  # packed one by one in two thirds of the time of a starred tuple
        try:
            call = self._free.pop()
        except IndexError:
            call = self._new_call()
        memory, arguments = call
        _VARYING.pack_into(memory, _VARYING_AT, stream, self._attributes, self._count, k, v, k_cache, v_cache, indices)
        status = self._launch_kernel(*arguments)
        self._free.append(call)
        if status:
            raise _failed(status)

    def _new_call(self) -> tuple[ctypes.Array[ctypes.c_char], tuple[Any, ...]]:
        """A block, packed but for what varies, and the arguments of cuLaunchKernelEx."""
        block = self._packing.new_block()
        self._packing.fill(block, self._what, 0, (0, 0, 0, 0, 0, *self._rest))
        return block.memory, (block.config, ctypes.c_void_p(self._what.kernel), block.pointers, None)


def _failed(status: int) -> RuntimeError:
    return RuntimeError(f"launching the store failed: {driver.describe(status)}")
