"""What a kernel may say on a GPU, as Numba intrinsics; simulator.py has the same words in plain Python.

The words are few because each one is exact: a vector load is one `ld.global.v4.u32`, a failed check is CUDA's own
assert, and the two early-launch statements are the PTX instructions of that name (PTX ISA, `griddepcontrol`).
"""

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda import cgutils
from numba.cuda.extending import intrinsic

from .layout import RowLayout

__all__ = ["assertion", "i64", "index_access", "release_dependents", "row_access", "u32", "u64", "wait_primary"]

u32, u64, i64 = types.uint32, types.uint64, types.int64

I32, I64 = ir.IntType(32), ir.IntType(64)

GLOBAL = 1  # the NVPTX address space; a generic address would cost a conversion and lose `ld.global`


def row_access(row: RowLayout, chunks: int, bypass_l1: bool) -> tuple[Any, Any]:
    """Make the two words that move one thread's share of a row.

    `load_row(address, first)` returns a tuple of uint32: vectors `first`, `first + threads`, ... of a row, of which
    `first` lies at `address`. `store_row(address, first, words)` is its inverse. Vectors past the row's end are neither
    read nor written; `chunks` is how many parts and steps cover the row, which tells how many vectors need no test.
    """
    words = row.words
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
                    values += _load_vector(b, at(b, address, loop), words, hint)
                    continue
                slots = [cgutils.alloca_once_value(b, I32(0)) for _ in range(words)]
                with b.if_then(in_row(b, first, loop)):
                    for slot, value in zip(slots, _load_vector(b, at(b, address, loop), words, hint), strict=True):
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
                    _store_vector(b, at(b, address, loop), vector, hint)
                    continue
                with b.if_then(in_row(b, first, loop)):
                    _store_vector(b, at(b, address, loop), vector, hint)
            return context.get_dummy_value()

        return types.void(u64, u32, types.UniTuple(u32, count)), codegen

    return load_row, store_row


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
