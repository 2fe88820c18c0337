"""The words of device.py in plain Python, for Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1).

Addresses are host addresses, so a wrong one is a segmentation fault rather than a Python error: the checks of
contract.py stand before every launch here as they do on a GPU.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from .fp8 import Fp8Format, round_float32
from .layout import RowLayout

__all__ = [
    "assertion",
    "i64",
    "index_access",
    "quantiser",
    "release_dependents",
    "row_access",
    "scale_access",
    "u32",
    "u64",
    "wait_primary",
]


def u32(value: int) -> int:
    """Wrap to unsigned 32 bits."""
    return int(value) & 0xFFFFFFFF


def u64(value: int) -> int:
    """Wrap to unsigned 64 bits."""
    return int(value) & 0xFFFFFFFFFFFFFFFF


def i64(value: int) -> int:
    """Wrap to signed 64 bits."""
    return (int(value) + 2**63) % 2**64 - 2**63


def row_access(
    row: RowLayout, chunks: int, bypass_l1: bool, access_bytes: int = 16
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """See device.row_access."""
    vector = ctypes.c_uint32 * row.words

    def vectors(address: int, first: int) -> list[ctypes.Array[ctypes.c_uint32]]:
        share = range(first, min(first + row.step_vectors, row.vectors), row.threads)
        return [vector.from_address(address + (i - first) * row.vector_bytes) for i in share]

    def load_row(address: int, first: int) -> list[tuple[int, ...]]:
        return [tuple(words) for words in vectors(address, first)]

    def store_row(address: int, first: int, values: list[tuple[int, ...]]) -> None:
        for words, value in zip(vectors(address, first), values, strict=True):
            words[:] = list(value)

    return load_row, store_row


def index_access(bits: int) -> Callable[[int], int]:
    """See device.index_access."""
    integer = {32: ctypes.c_int32, 64: ctypes.c_int64}[bits]

    def load_index(address: int) -> int:
        return integer.from_address(address).value

    return load_index


def scale_access(on_device: bool) -> Callable[[int], int]:
    """See device.scale_access."""

    def load_scale(scale: int) -> int:
        return ctypes.c_uint32.from_address(scale).value if on_device else u32(scale)

    return load_scale


def quantiser(
    source: str, to: Fp8Format, count: int, in_hardware: bool
) -> Callable[[list[tuple[int, ...]], int], list[tuple[int, ...]]]:
    """See device.quantiser; here NumPy divides."""

    def quantise(vectors: list[tuple[int, ...]], scale: int) -> list[tuple[int, ...]]:
        divisor = np.array(scale, np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            return [_packed(_as_float32(words, source) / divisor, to) for words in vectors]

    return quantise


def _as_float32(words: tuple[int, ...], source: str) -> np.ndarray[Any, Any]:
    bits = np.array(words, np.uint32)
    if source == "bfloat16":
        return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(source).astype(np.float32)


def _packed(quotients: np.ndarray[Any, Any], to: Fp8Format) -> tuple[int, ...]:
    octets = bytes(round_float32(int(bits), to) for bits in quotients.view(np.uint32))
    return tuple(int(word) for word in np.frombuffer(octets, np.uint32))


def assertion(expression: str, file: str, line: int, function: str) -> Callable[[bool], None]:
    """See device.assertion; here the failure is an AssertionError."""

    def check(condition: bool) -> None:
        if not condition:
            raise AssertionError(f"{file}:{line}: {function}: Assertion `{expression}` failed.")

    return check


def wait_primary() -> None:
    """Nothing to wait for: the simulator runs one kernel at a time."""


def release_dependents() -> None:
    """Nothing to release."""
