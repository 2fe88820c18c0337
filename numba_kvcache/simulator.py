"""The words of device.py in plain Python, for Numba's CUDA simulator (NUMBA_ENABLE_CUDASIM=1).

Addresses are host addresses, so a wrong one is a segmentation fault rather than a Python error: the checks of
contract.py stand before every launch here as they do on a GPU.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from .layout import RowLayout

__all__ = ["assertion", "i64", "index_access", "release_dependents", "row_access", "u32", "u64", "wait_primary"]


def u32(value: int) -> int:
    """Wrap to unsigned 32 bits."""
    return int(value) & 0xFFFFFFFF


def u64(value: int) -> int:
    """Wrap to unsigned 64 bits."""
    return int(value) & 0xFFFFFFFFFFFFFFFF


def i64(value: int) -> int:
    """Wrap to signed 64 bits."""
    return (int(value) + 2**63) % 2**64 - 2**63


def row_access(row: RowLayout, chunks: int, bypass_l1: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
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
