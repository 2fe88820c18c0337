"""What fp8 rows must be: the formats by their definition, and the nearest of all their values."""

import numpy as np
import pytest

LAYOUTS = {"e4m3": (3, 7), "e5m2": (2, 15)}  # mantissa bits, bias; the exponent has what is left
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
every_format = pytest.mark.parametrize("to", LAYOUTS)


def positive_values(to):
    """The finite values from 0 up, in the order of their bytes."""
    mantissa_bits, bias = LAYOUTS[to]
    values = []
    for byte in range(128):
        exponent, mantissa = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        if exponent:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        else:
            value = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
        values.append(value)
    # e4m3 gives up one code for NaN, e5m2 the topmost exponent for infinity and NaN.
    return np.array(values[:127] if to == "e4m3" else values[: 128 - 2**mantissa_bits])


def nearest(quotients, to):
    """The bytes of the values nearest to float32 quotients: ties to even, clipped, NaN 0x7F."""
    values = positive_values(to)
    midpoints = (values[:-1] + values[1:]) / 2  # all exact in float64
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitudes = np.abs(quotients.astype(np.float64))
    below = np.searchsorted(midpoints, magnitudes, side="left")
    tie = np.append(midpoints, np.inf)[below] == magnitudes
    finite = np.isfinite(magnitudes)
    byte = np.where(tie & finite & (below % 2 == 1), below + 1, below) | np.where(np.signbit(quotients), 0x80, 0)
    return np.where(np.isnan(quotients), 0x7F, byte).astype(np.uint8)


def as_float32(bits, source):
    """Elements of `source`, given as unsigned integers of their size, as float32."""
    if source == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return bits.view(source).astype(np.float32)


def quantised_bytes(values, scale, to):
    with np.errstate(all="ignore"):
        return nearest(values / np.float32(scale), to)


def interesting_bits(to, seed=0, count=20_000):
    """float32 patterns: at and beside all values and midpoints of `to`, special ones, random ones; of both signs."""
    values = positive_values(to)
    near = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32).view(np.uint32)
    near = (near.astype(np.int64)[:, None] + np.arange(-2, 3)).ravel() % 2**32
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x43E80000]
    random = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)
    bits = np.concatenate([near.astype(np.uint32), np.array(special, np.uint32), random])
    return np.concatenate([bits, bits ^ np.uint32(0x80000000)])
