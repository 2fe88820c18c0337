"""What the benchmark's own kernels say, as Numba intrinsics.

None of it comes from the package's device.py: a change there must not move the yardsticks.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda import cgutils
from numba.cuda.extending import intrinsic

__all__ = [
    "VECTOR_BYTES",
    "check_slot",
    "i64",
    "load_index",
    "load_vector",
    "release_dependents",
    "store_vector",
    "u32",
    "u64",
    "wait_primary",
]

u32, u64, i64 = types.uint32, types.uint64, types.int64

VECTOR_BYTES = 16

_I32, _I64, _TEXT = ir.IntType(32), ir.IntType(64), ir.PointerType(ir.IntType(8))
_VECTOR = ir.VectorType(_I32, 4)
_WORDS = types.UniTuple(u32, 4)


def _global(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.inttoptr(address, ir.PointerType(kind, addrspace=1))


@intrinsic
def load_index(typingctx, address):
    """The int64 at `address`."""

    def codegen(context, b, sig, args):
        return b.load(_global(b, args[0], _I64), align=8)

    return i64(u64), codegen


@intrinsic
def load_vector(typingctx, address):
    """Four uint32 in one load."""

    def codegen(context, b, sig, args):
        vector = b.load(_global(b, args[0], _VECTOR), align=VECTOR_BYTES)
        return context.make_tuple(b, sig.return_type, [b.extract_element(vector, _I32(i)) for i in range(4)])

    return _WORDS(u64), codegen


@intrinsic
def store_vector(typingctx, address, words):
    """Four uint32 in one store."""

    def codegen(context, b, sig, args):
        vector = ir.Constant(_VECTOR, ir.Undefined)
        for i, word in enumerate(cgutils.unpack_tuple(b, args[1], 4)):
            vector = b.insert_element(vector, word, _I32(i))
        b.store(vector, _global(b, args[0], _VECTOR), align=VECTOR_BYTES)
        return context.get_dummy_value()

    return types.void(u64, _WORDS), codegen


@intrinsic
def check_slot(typingctx, condition):
    """CUDA's own assert, for a slot out of bounds."""

    def codegen(context, b, sig, args):
        with b.if_then(b.not_(args[0]), likely=False):
            signature = ir.FunctionType(ir.VoidType(), [_TEXT, _TEXT, _I32, _TEXT, _I64])
            fail = cgutils.get_or_insert_function(b.module, signature, "__assertfail")
            expression, file, function = (
                context.insert_string_const_addrspace(b, text)
                for text in ("index >= 0 && index < size_limit", "benchmarks/peers/prototype.py", "store")
            )
            b.call(fail, [expression, file, _I32(1), function, _I64(1)])
        return context.get_dummy_value()

    return types.void(types.boolean), codegen


def _statement(ptx: str) -> Any:
    @intrinsic
    def statement(typingctx):
        def codegen(context, b, sig, args):
            # The memory clobber: no access may cross it.
            b.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), ptx, "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return types.void(), codegen

    return statement


wait_primary = _statement("griddepcontrol.wait;")
release_dependents = _statement("griddepcontrol.launch_dependents;")
