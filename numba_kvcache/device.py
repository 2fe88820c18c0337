"""What a kernel may say on a GPU, as Numba intrinsics; simulator.py has the same words in plain Python.

The words are few because each one is exact: a vector load is one `ld.global.v4.u32`, a failed check is CUDA's own
assert, and the two early-launch statements are the PTX instructions of that name (PTX ISA, `griddepcontrol`).
"""

import functools
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.cuda import cgutils
from numba.cuda.extending import intrinsic

from .fp8 import FORMATS, NAN, Fp8Format
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

u32, u64, i64 = types.uint32, types.uint64, types.int64

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

GLOBAL = 1  # the NVPTX address space; a generic address would cost a conversion and lose `ld.global`


def row_access(row: RowLayout, chunks: int, bypass_l1: bool, access_bytes: int = 16) -> tuple[Any, Any]:
    """Make the two words that move one thread's share of a row.

    `load_row(address, first)` returns a tuple of uint32: vectors `first`, `first + threads`, ... of a row, of which
    `first` lies at `address`. `store_row(address, first, words)` is its inverse. Vectors past the row's end are neither
    read nor written; `chunks` is how many parts and steps cover the row, which tells how many vectors need no test. A
    vector is moved by one instruction, or by several of `access_bytes` bytes each where that is less.
    """
    words, at_once = row.words, access_bytes // 4
    count = words * row.loops
    whole = row.whole_loops(chunks)
    hint = ".L1::no_allocate" if bypass_l1 else ""

    def at(b: ir.IRBuilder, address: ir.Value, loop: int) -> ir.Value:
        # The constant becomes the instruction's immediate, so that all loops share one address.
        return b.add(address, I64(loop * row.threads * row.vector_bytes))

    def in_row(b: ir.IRBuilder, first: ir.Value, loop: int) -> ir.Value:
        return b.icmp_unsigned("<", b.add(first, I32(loop * row.threads)), I32(row.vectors))

    @intrinsic
    def load_row(typingctx, address, first):
        def codegen(context, b, sig, args):
            address, first = args
            values = []
            for loop in range(row.loops):
                if loop < whole:
                    values += _load_words(b, at(b, address, loop), words, at_once, hint)
                    continue
                slots = [cgutils.alloca_once_value(b, I32(0)) for _ in range(words)]
                with b.if_then(in_row(b, first, loop)):
                    vector = _load_words(b, at(b, address, loop), words, at_once, hint)
                    for slot, value in zip(slots, vector, strict=True):
                        b.store(value, slot)
                values += [b.load(slot) for slot in slots]
            return context.make_tuple(b, sig.return_type, values)

        return types.UniTuple(u32, count)(u64, u32), codegen

    @intrinsic
    def store_row(typingctx, address, first, values):
        def codegen(context, b, sig, args):
            address, first, row_words = args
            values = cgutils.unpack_tuple(b, row_words, count)
            for loop in range(row.loops):
                vector = values[loop * words : (loop + 1) * words]
                if loop < whole:
                    _store_words(b, at(b, address, loop), vector, at_once, hint)
                    continue
                with b.if_then(in_row(b, first, loop)):
                    _store_words(b, at(b, address, loop), vector, at_once, hint)
            return context.get_dummy_value()

        return types.void(u64, u32, types.UniTuple(u32, count)), codegen

    return load_row, store_row


def _load_words(b: ir.IRBuilder, address: ir.Value, words: int, at_once: int, hint: str) -> list[ir.Value]:
    """`words` words that follow one another, by as few loads of at most `at_once` words as can be."""
    values: list[ir.Value] = []
    for first in range(0, words, at_once):
        values += _load_vector(b, b.add(address, I64(4 * first)), min(at_once, words), hint)
    return values


def _store_words(b: ir.IRBuilder, address: ir.Value, values: list[ir.Value], at_once: int, hint: str) -> None:
    """The inverse of _load_words."""
    for first in range(0, len(values), at_once):
        _store_vector(b, b.add(address, I64(4 * first)), values[first : first + at_once], hint)


def _load_vector(b: ir.IRBuilder, address: ir.Value, words: int, hint: str) -> list[ir.Value]:
    """`ld.global.v4.u32` or narrower, where it stands.

    A load of LLVM's own is free to sink to its use, behind the index and its check; then the row waits for the index,
    and a small launch takes 1.0 us instead of 0.73 (seen with NVVM 13.0, not with 13.5). And LLVM has no `hint`.
    """
    registers = ", ".join(f"${i}" for i in range(words))
    shape, vector = (f".v{words}", f"{{{registers}}}") if words > 1 else ("", registers)
    result = ir.LiteralStructType([I32] * words) if words > 1 else I32
    ptx = f"ld.global{hint}{shape}.u32 {vector}, [${words}];"
    signature = ir.FunctionType(result, [I64])
    loaded = b.call(ir.InlineAsm(signature, ptx, ",".join(["=r"] * words + ["l"]), side_effect=True), [address])
    return [b.extract_value(loaded, i) for i in range(words)] if words > 1 else [loaded]


def _store_vector(b: ir.IRBuilder, address: ir.Value, values: list[ir.Value], hint: str) -> None:
    """`st.global.v4.u32` or narrower."""
    words = len(values)
    registers = ", ".join(f"${i + 1}" for i in range(words))
    shape, vector = (f".v{words}", f"{{{registers}}}") if words > 1 else ("", registers)
    ptx = f"st.global{hint}{shape}.u32 [$0], {vector};"
    signature = ir.FunctionType(ir.VoidType(), [I64] + [I32] * words)
    constraints = ",".join(["l"] + ["r"] * words + ["~{memory}"])
    b.call(ir.InlineAsm(signature, ptx, constraints, side_effect=True), [address, *values])


def index_access(bits: int) -> Any:
    """Make `load_index(address)`: the signed index of `bits` bits (32 or 64) at `address`, widened to int64."""

    @intrinsic
    def load_index(typingctx, address):
        def codegen(context, b, sig, args):
            pointer = ir.PointerType(ir.IntType(bits), addrspace=GLOBAL)
            index = b.load(b.inttoptr(args[0], pointer), align=bits // 8)
            return b.sext(index, I64) if bits < 64 else index

        return i64(u64), codegen

    return load_index


def scale_access(on_device: bool) -> Any:
    """Make `load_scale(scale)`: the bits of a float32, which lies at the address `scale`, or is `scale` itself."""

    @intrinsic
    def load_scale(typingctx, scale):
        def codegen(context, b, sig, args):
            return _load_vector(b, args[0], 1, "")[0] if on_device else b.trunc(args[0], I32)

        return u32(u64), codegen

    return load_scale


def quantiser(source: str, to: Fp8Format, count: int, in_hardware: bool) -> Any:
    """Make `quantise(words, scale)`: elements over a float32, given by its bits, as bytes of `to`.

    `words` are `count` uint32 with elements of the dtype `source` in them, a multiple of 4 elements; what comes back is
    a tuple of uint32 as well. The quotient is IEEE's, rounded to float32, and is rounded once more to the nearest value
    of `to`, ties to even, clipped to the finite range; NaN is 0x7F. `in_hardware`: convert by the instruction that
    compute capability 8.9 has.
    """
    read = {"bfloat16": _bfloat16_pair, "float16": _float16_pair, "float32": _float32}[source]
    pack = _pack_in_hardware if in_hardware else _pack_in_software
    packed = count * (1 if source == "float32" else 2) // 4

    @intrinsic
    def quantise(typingctx, words, scale):
        def codegen(context, b, sig, args):
            words, scale = args
            divisor = prepare_divisor(b, b.bitcast(scale, F32))
            elements = [value for word in cgutils.unpack_tuple(b, words, count) for value in read(b, word)]
            quotients = [divide(b, value, divisor) for value in elements]
            fours = [quotients[first : first + 4] for first in range(0, len(quotients), 4)]
            return context.make_tuple(b, sig.return_type, [pack(b, four, to) for four in fours])

        return types.UniTuple(u32, packed)(types.UniTuple(u32, count), u32), codegen

    return quantise


def _bfloat16_pair(b: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    """A bfloat16 is the upper half of a float32."""
    return [b.bitcast(bits, F32) for bits in (b.shl(word, I32(16)), b.and_(word, I32(0xFFFF0000)))]


def _float16_pair(b: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    halves = (b.trunc(word, I16), b.trunc(b.lshr(word, I32(16)), I16))
    return [b.fpext(b.bitcast(half, ir.HalfType()), F32) for half in halves]


def _float32(b: ir.IRBuilder, word: ir.Value) -> list[ir.Value]:
    return [b.bitcast(word, F32)]


class Divisor(NamedTuple):
    """What divide needs of a scale, once per thread: all of them float32 values.

    `factor` is a power of two with the sign of the scale, which brings it to `scale`, a positive one that is neither
    small nor large; `reciprocal` is 1 / `scale`.
    """

    factor: ir.Value
    scale: ir.Value
    reciprocal: ir.Value


def prepare_divisor(b: ir.IRBuilder, scale: ir.Value) -> Divisor:
    """See Divisor. A scale of 0, infinity or NaN has its meaning in `reciprocal`: infinity, 0 or NaN."""
    bits = b.bitcast(scale, I32)
    magnitude = b.and_(bits, I32(0x7FFFFFFF))

    def power_of_two(exponent: int) -> ir.Value:
        return I32((127 + exponent) << 23)

    small = b.icmp_unsigned("<", magnitude, power_of_two(-63))
    large = b.icmp_unsigned(">", magnitude, power_of_two(63))
    factor = b.select(small, power_of_two(64), b.select(large, power_of_two(-64), power_of_two(0)))
    factor = b.bitcast(b.or_(factor, b.and_(bits, I32(0x80000000))), F32)
    scaled = b.fmul(scale, factor)
    reciprocal = b.fdiv(F32(1.0), scaled)
    # An infinite scale would make NaN of a remainder; any finite one leaves 0 * x what it is.
    infinite = b.icmp_unsigned("==", magnitude, I32(0x7F800000))
    return Divisor(factor, b.select(infinite, F32(1.0), scaled), reciprocal)


def divide(b: ir.IRBuilder, value: ir.Value, divisor: Divisor) -> ir.Value:
    """A float32 that rounds to the same fp8 value as the IEEE quotient of `value` and the scale.

    Markstein's division: the product with the reciprocal, corrected by its own remainder, which a fused multiply-add
    gives exactly. `div.rn.f32` is three times as many instructions and a call for what is out of its range. Past 2**20
    the product needs no correction, being clipped, and would overflow in it. Both terms of the correction are negated,
    because then a zero keeps its sign. (tests/test_quantised_code.py tries all that could go wrong.)
    """
    scaled = b.fmul(value, divisor.factor)
    rough = b.fmul(scaled, divisor.reciprocal)
    remainder = b.fma(rough, divisor.scale, _negated(b, scaled))
    corrected = b.fma(remainder, _negated(b, divisor.reciprocal), rough)
    magnitude = b.bitcast(b.and_(b.bitcast(rough, I32), I32(0x7FFFFFFF)), F32)
    return b.select(b.fcmp_ordered("<", magnitude, F32(2.0**20)), corrected, rough)


def _negated(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """(NVVM reads LLVM 7, which has no fneg.)"""
    return b.fsub(F32(-0.0), value)


def _pack_in_hardware(b: ir.IRBuilder, four: list[ir.Value], to: Fp8Format) -> ir.Value:
    """Four float32 as bytes of `to` in a uint32, the first one lowest."""
    kind = {FORMATS["e4m3"]: "e4m3x2", FORMATS["e5m2"]: "e5m2x2"}[to]
    convert = f"cvt.rn.satfinite.{kind}.f32"
    ptx = (
        "{ .reg .b16 low, high; "
        f"{convert} low, $2, $1; {convert} high, $4, $3; "  # the first operand goes to the upper byte
        "mov.b32 $0, {low, high}; }"
    )
    return b.call(ir.InlineAsm(ir.FunctionType(I32, [F32] * 4), ptx, "=r,f,f,f,f", side_effect=False), four)


def _pack_in_software(b: ir.IRBuilder, four: list[ir.Value], to: Fp8Format) -> ir.Value:
    """See _pack_in_hardware."""
    word = I32(0)
    for position, value in enumerate(four):
        byte = round_in_software(b, b.bitcast(value, I32), to)
        word = b.or_(word, b.shl(byte, I32(8 * position)))
    return word


def round_in_software(b: ir.IRBuilder, bits: ir.Value, to: Fp8Format) -> ir.Value:
    """fp8.round_float32 without branches, on uint32."""
    magnitude = b.and_(bits, I32(0x7FFFFFFF))
    nan = b.icmp_unsigned(">", magnitude, I32(0x7F800000))
    largest = I32(to.largest_bits)
    magnitude = b.select(b.icmp_unsigned("<", magnitude, largest), magnitude, largest)
    normal = b.icmp_unsigned(">=", magnitude, I32(to.smallest_normal_bits))
    lost = b.sub(I32(to.dropped + (to.smallest_normal_bits >> 23)), b.lshr(magnitude, I32(23)))
    lost = b.select(b.icmp_unsigned("<", lost, I32(25)), lost, I32(25))
    significand = b.or_(b.and_(magnitude, I32(0x7FFFFF)), I32(0x800000))
    value, shift = b.select(normal, magnitude, significand), b.select(normal, I32(to.dropped), lost)
    odd = b.and_(b.lshr(value, shift), I32(1))
    half = b.shl(I32(1), b.sub(shift, I32(1)))
    rounded = b.lshr(b.add(b.add(value, odd), b.sub(half, I32(1))), shift)
    kept = b.sub(rounded, b.select(normal, I32(to.rebias), I32(0)))
    sign = b.and_(b.lshr(bits, I32(24)), I32(0x80))
    return b.select(nan, I32(NAN), b.or_(sign, kept))


def assertion(expression: str, file: str, line: int, function: str) -> Any:
    """Make `check(condition)`: a device assert that stays on in every build.

    `__assertfail` is what CUDA C++'s assert calls: the driver prints file, line, function, block, thread and
    expression on stderr, and the next synchronisation reports error 710. Numba's own assert is compiled out unless
    the kernel is built for debugging.
    """

    @intrinsic
    def check(typingctx, condition):
        def codegen(context, b, sig, args):
            text_type = ir.PointerType(ir.IntType(8))
            with b.if_then(b.not_(args[0]), likely=False):
                signature = ir.FunctionType(ir.VoidType(), [text_type, text_type, I32, text_type, I64])
                fail = cgutils.get_or_insert_function(b.module, signature, "__assertfail")
                text = functools.partial(context.insert_string_const_addrspace, b)
                b.call(fail, [text(expression), text(file), I32(line), text(function), I64(1)])
            return context.get_dummy_value()

        return types.void(types.boolean), codegen

    return check


def _statement(ptx: str) -> Any:
    """Make a word for one PTX instruction without operands that no memory access may cross."""

    @intrinsic
    def statement(typingctx):
        def codegen(context, b, sig, args):
            b.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), ptx, "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return types.void(), codegen

    return statement


wait_primary = _statement("griddepcontrol.wait;")
release_dependents = _statement("griddepcontrol.launch_dependents;")
