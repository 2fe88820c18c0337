"""The two 8-bit float formats of a quantised cache, in pure integers: no CUDA import."""

from dataclasses import dataclass

__all__ = ["FORMATS", "NAN", "Fp8Format", "round_float32"]

NAN = 0x7F
"""What every NaN becomes, whatever its sign and payload: what torch writes for a quotient of its own on a GPU."""


@dataclass(frozen=True)
class Fp8Format:
    """Sign, exponent and `mantissa` bits in a byte.

    Attributes
    ----------
    dtype : str
        The name that array libraries have for it.
    mantissa, bias : int
        Bits of the mantissa, and what is added to an exponent in its field.
    largest : int
        The byte of the largest finite value.
    """

    dtype: str
    mantissa: int
    bias: int
    largest: int

    @property
    def dropped(self) -> int:
        """Bits of a float32's mantissa that a normal value loses."""
        return 23 - self.mantissa

    @property
    def rebias(self) -> int:
        """What the exponent field of a normal float32 that has lost `dropped` bits is too large by, in place."""
        return (127 - self.bias) << self.mantissa

    @property
    def largest_bits(self) -> int:
        """The largest finite value as bits of a float32."""
        return (self.largest + self.rebias) << self.dropped

    @property
    def smallest_normal_bits(self) -> int:
        """The smallest normal value as bits of a float32."""
        return (128 - self.bias) << 23


# By the names that a caller may give.
FORMATS = {
    "e4m3": Fp8Format("float8_e4m3fn", mantissa=3, bias=7, largest=0x7E),
    "e5m2": Fp8Format("float8_e5m2", mantissa=2, bias=15, largest=0x7B),
}


def round_float32(bits: int, to: Fp8Format) -> int:
    """The byte of `to` that is nearest to the float32 with these bits, ties to even, clipped to the finite range."""
    magnitude = bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return NAN
    magnitude = min(magnitude, to.largest_bits)
    if magnitude >= to.smallest_normal_bits:
        kept = _shift_to_even(magnitude, to.dropped) - to.rebias
    else:
        # Values are equally spaced here: the smaller the exponent, the more bits are lost, and from 25 on all of them.
        shift = to.dropped + (to.smallest_normal_bits >> 23) - (magnitude >> 23)
        kept = _shift_to_even(magnitude & 0x7FFFFF | 0x800000, min(shift, 25))
    return bits >> 24 & 0x80 | kept


def _shift_to_even(value: int, shift: int) -> int:
    """``value / 2**shift``, rounded to the nearest integer, ties to even."""
    odd = value >> shift & 1
    return (value + (1 << (shift - 1)) - 1 + odd) >> shift
