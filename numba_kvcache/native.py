"""The fast road: `store_kvcache`'s decision, once made by the Python road, replayed by code that Numba compiles.

A decode-step store takes 1 microsecond of GPU time; the Python road takes 7 and more of host time for it, a driver
launch alone about 3. So `store_kvcache` stays the Python function that it is, and its *vectorcall* pointer, the C
function that CPython calls when somebody calls it, is set to `entry` below: machine code with the C signature
`(function, args, nargsf, names) -> PyObject *`, compiled by `numba.cfunc`. `entry`

1. sorts positional and keyword arguments into slots, by the parameters of the function that was called: this one, or
   SGLang's `store_cache` (sglang.py), which asks for the same in other words;
2. reads each array into a view: torch tensors (and whatever else has one) through the DLPack C exchange table of their
   type, Numba and CuPy arrays through their attributes;
3. makes the checks of contract.py, in its order of arguments though not of messages;
4. looks the plan up (which kernel, how many threads) that dispatch.py made for these row widths and alignments;
5. fills the parameter block, on its own stack, and launches.

Whatever it has not seen before, cannot read or would have to refuse, it gives back: it calls the function's original
vectorcall, and the Python road serves the call or raises the right error. Nothing has been written by then. So the
Python road is the truth, and this one is that truth remembered; tests/test_native.py holds them against each other.

The GIL is held throughout, which guards the tables, but not during the launch, which can block when the stream's queue
is full. All that the code must know of the process (types, plans, names) lies in one table, `_state`, whose address
the linker resolves by name; so the machine code holds no addresses and Numba's cache can keep it on disk.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# ----------------------------------------------------------------------------------------------------------------------
# The table: int64 words, offsets in bytes.

# Interned strings.
ATTRIBUTES = ("shape", "strides", "dtype", "gpu_data", "device_ctypes_pointer", "value", "data", "ptr", "device_id")
SHAPE, STRIDES, DTYPE_NAME, GPU_DATA, POINTER, VALUE, DATA, PTR, DEVICE_ID = range(0, 72, 8)
NONE = 72
INT_TYPE = 80
EXCEPTION = 88  # the class
OWNED_POINTER = 96  # Numba's class for memory that its own memory manager allocated
DEVICE_COUNT = 104

# The two functions that may be called, a row each: the function, its original vectorcall, how many arguments may be
# positional, and for each slot the name of its parameter, an interned string, or 0 for none.
STORE, STORE_CACHE = 112, 232
FUNCTION_ROAD, FUNCTION_POSITIONAL, FUNCTION_NAMES = 8, 16, 24
PARAMETERS = {
    STORE: ("k", "v", "k_cache", "v_cache", "indices", "num_split", "size_limit", "stream", "skip_index", "", ""),
    STORE_CACHE: (
        *("k", "v", "k_cache", "v_cache", "indices", "num_split", "size_limit", "", "reserved_skip_index"),
        *("row_bytes", "v_row_bytes"),
    ),
}
NUM_SPLIT, SIZE_LIMIT, STREAM, SKIP_INDEX, ROW_BYTES, V_ROW_BYTES = range(40, 88, 8)  # slots, as offsets
ARGUMENT_SLOTS = 11

# Rows: type, how to read it, how to find its library's stream, whether none is ever read-only. How to read: READ_NUMBA,
# READ_CUPY, or the address of a DLPack to_dltensor. The stream: of Numba none, of CuPy a Python callable, of the others
# the address of a DLPack current_work_stream.
TYPES = 384
TYPE_BYTES, MAX_TYPES = 32, 16
TYPE_READER, TYPE_STREAM, TYPE_WRITABLE = 8, 16, 24
READ_NUMBA, READ_CUPY = 0, 1

DTYPES = TYPES + TYPE_BYTES * MAX_TYPES  # rows: numpy dtype object, DLPack dtype word
DTYPE_BYTES, MAX_DTYPES = 16, 32

# Open addressing; rows: two key words, then these.
PLANS = DTYPES + DTYPE_BYTES * MAX_DTYPES
PLAN_BYTES, MAX_PLANS = 128, 512
PLAN_CONTEXT, PLAN_BLOCK, PLAN_GROUPS, PLAN_PARTS, PLAN_ATTRIBUTES, PLAN_USED, PLAN_BANDS = range(16, 72, 8)
MAX_BANDS = 4  # pairs: largest batch, kernel

STATE_BYTES = PLANS + PLAN_BYTES * MAX_PLANS

# ----------------------------------------------------------------------------------------------------------------------
# The stack frame of one call, offsets in bytes.

SLOTS = 0  # the argument objects
VIEWS = 88  # five views
DLTENSOR = 728
LIBRARY_STREAM = 776
CONFIG = 784  # CUlaunchConfig
ARGUMENTS = 840  # thirteen words
POINTERS = 944  # thirteen addresses of those
SCRATCH = 1048
FRAME_BYTES = 1056

# A view: what arrays.ArrayView is, in int64 words, then the array as rows (contract.py). Dtype as DLPack packs it, all
# strides in bytes.
VIEW_BYTES = 128
ADDRESS, DIMENSIONS, DTYPE, DEVICE, EXTENTS = range(0, 40, 8)
PITCHES = 64  # strides, one per dimension
ROWS, ROW_STRIDE, COLUMNS = range(96, 120, 8)  # COLUMNS: elements of a row
MAX_DIMENSIONS = 4

DL_CUDA = 2
DL_COMPLEX = 5
DL_INT32, DL_INT64 = 0 | 32 << 8 | 1 << 16, 0 | 64 << 8 | 1 << 16

MAX_BATCH = 2**31 - 1
DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

# ----------------------------------------------------------------------------------------------------------------------
# What compiled code may say. C functions of CPython are found by name; the driver's are registered by fast_road.py.

Py_DecRef = types.ExternalFunction("Py_DecRef", types.void(types.int64))
PyErr_Clear = types.ExternalFunction("PyErr_Clear", types.void())
PyErr_ExceptionMatches = types.ExternalFunction("PyErr_ExceptionMatches", types.int32(types.int64))
PyErr_Occurred = types.ExternalFunction("PyErr_Occurred", types.int64())
PyEval_RestoreThread = types.ExternalFunction("PyEval_RestoreThread", types.void(types.int64))
PyEval_SaveThread = types.ExternalFunction("PyEval_SaveThread", types.int64())
PyLong_AsLongLong = types.ExternalFunction("PyLong_AsLongLong", types.int64(types.int64))
PyLong_AsLongLongAndOverflow = types.ExternalFunction(
    "PyLong_AsLongLongAndOverflow", types.int64(types.int64, types.int64)
)
PyLong_AsUnsignedLongLongMask = types.ExternalFunction("PyLong_AsUnsignedLongLongMask", types.int64(types.int64))
PyObject_CallNoArgs = types.ExternalFunction("PyObject_CallNoArgs", types.int64(types.int64))
PyObject_GetAttr = types.ExternalFunction("PyObject_GetAttr", types.int64(types.int64, types.int64))
PyTuple_GetItem = types.ExternalFunction("PyTuple_GetItem", types.int64(types.int64, types.int64))
PyTuple_Size = types.ExternalFunction("PyTuple_Size", types.int64(types.int64))

launch_kernel = types.ExternalFunction(
    "numba_kvcache_launch", types.int32(types.int64, types.int64, types.int64, types.int64)
)
current_context = types.ExternalFunction("numba_kvcache_current_context", types.int32(types.int64))
pointer_attribute = types.ExternalFunction(
    "numba_kvcache_pointer_attribute", types.int32(types.int64, types.int32, types.int64)
)

# One function after inlining; as calls between them, each with a status to test, the road stood at 1.36 times the
# driver's floor instead of 1.22 to 1.30 (docs/notes/launch-cost.md).
inlined = njit(forceinline=True)

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def _pointer(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.inttoptr(address, kind.as_pointer())


@intrinsic
def state(typingctx):
    """Address of the table."""

    def codegen(context, b, sig, args):
        name = "numba_kvcache_state"
        variable = b.module.globals.get(name) or ir.GlobalVariable(b.module, ir.IntType(8), name)
        return b.ptrtoint(variable, _I64)

    return types.int64(), codegen


@intrinsic
def stack_frame(typingctx):
    """Address of FRAME_BYTES bytes on the caller's stack."""

    def codegen(context, b, sig, args):
        frame = cgutils.alloca_once(b, ir.ArrayType(_I64, FRAME_BYTES // 8))
        return b.ptrtoint(frame, _I64)

    return types.int64(), codegen


@intrinsic
def load(typingctx, address):
    """The 64-bit word at an address."""
    return types.int64(types.int64), lambda context, b, sig, args: b.load(_pointer(b, args[0], _I64))


@intrinsic
def load32(typingctx, address):
    """The unsigned 32-bit word at an address."""

    def codegen(context, b, sig, args):
        return b.zext(b.load(_pointer(b, args[0], _I32)), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def store(typingctx, address, value):
    """Write a 64-bit word."""

    def codegen(context, b, sig, args):
        b.store(args[1], _pointer(b, args[0], _I64))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def store32(typingctx, address, value):
    """Write the low 32 bits of a word."""

    def codegen(context, b, sig, args):
        b.store(b.trunc(args[1], _I32), _pointer(b, args[0], _I32))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _indirect(*kinds: ir.Type) -> Callable[..., Any]:
    """Code generator for `function(...) -> int` where `function` is an address."""

    def codegen(context, b, sig, args):
        signature = ir.FunctionType(_I32, kinds)
        values = [b.trunc(arg, kind) if kind is _I32 else arg for arg, kind in zip(args[1:], kinds, strict=True)]
        return b.sext(b.call(_pointer(b, args[0], signature), values), _I64)

    return codegen


@intrinsic
def call_to_dltensor(typingctx, function, array, tensor):
    """DLPackDLTensorFromPyObjectNoSync."""
    return types.int64(types.int64, types.int64, types.int64), _indirect(_I64, _I64)


@intrinsic
def call_current_stream(typingctx, function, kind, ordinal, stream):
    """DLPackCurrentWorkStream."""
    return types.int64(types.int64, types.int64, types.int64, types.int64), _indirect(_I32, _I32, _I64)


@intrinsic
def call_python_road(typingctx, road, function, args, nargsf, names):
    """A vectorcall."""

    def codegen(context, b, sig, args):
        signature = ir.FunctionType(_I64, [_I64] * 4)
        return b.call(_pointer(b, args[0], signature), args[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), codegen


# ----------------------------------------------------------------------------------------------------------------------
# 1. Arguments


@inlined
def object_type(thing):
    """The type of a Python object, by address."""
    return load(thing + 8)


@inlined
def forget_error():
    """Clear what a failed call raised: the Python road will meet it again. A KeyboardInterrupt stays for `entry`."""
    if PyErr_Occurred() != 0 and PyErr_ExceptionMatches(load(state() + EXCEPTION)) != 0:
        PyErr_Clear()


@inlined
def sort_arguments(function, args, count, names, slots):
    """Argument objects into their slots, 0 where absent; False for a call that Python itself would refuse.

    `function` is its row of the table.
    """
    if count > load(function + FUNCTION_POSITIONAL):
        return False
    for i in range(ARGUMENT_SLOTS):
        store(slots + 8 * i, load(args + 8 * i) if i < count else 0)
    if names != 0:
        for j in range(PyTuple_Size(names)):
            name = PyTuple_GetItem(names, j)
            found = -1
            for i in range(ARGUMENT_SLOTS):
                if load(function + FUNCTION_NAMES + 8 * i) == name:
                    found = i
            if found < 0 or load(slots + 8 * found) != 0:
                return False
            store(slots + 8 * found, load(args + 8 * (count + j)))
    for i in range(5):  # noqa: SIM110
        if load(slots + 8 * i) == 0:
            return False
    return True


@inlined
def integer_argument(thing, scratch):
    """(whether it is a plain int or absent or None, its value)."""
    if thing == 0 or thing == load(state() + NONE):
        return True, 0
    if object_type(thing) != load(state() + INT_TYPE):
        return False, 0
    store(scratch, 0)
    value = PyLong_AsLongLongAndOverflow(thing, scratch)
    return load32(scratch) == 0, value


@inlined
def read_options(slots, as_store_cache, scratch):
    """(whether they may be served, split, size limit, skip index, whether there is one)."""
    none = load(state() + NONE)
    split, limit, skip = load(slots + NUM_SPLIT), load(slots + SIZE_LIMIT), load(slots + SKIP_INDEX)
    split_ok, num_split = integer_argument(split, scratch)
    limit_ok, size_limit = integer_argument(limit, scratch)
    skip_ok, skip_index = integer_argument(skip, scratch)
    skipping = skip != 0 and skip != none
    valid = split_ok and limit_ok and skip_ok and split != none
    if as_store_cache:
        # It has negative numbers where store_kvcache has None.
        valid = valid and limit != none and skip != none
        num_split, size_limit = max(num_split, 0), max(size_limit, 0)
        skipping = skipping and skip_index >= 0
    valid = valid and num_split >= 0 and num_split <= 4 and size_limit >= 0
    return valid, num_split, size_limit, skip_index if skipping else 0, skipping


# ----------------------------------------------------------------------------------------------------------------------
# 2. Arrays


@inlined
def find_type(array):
    """The array's row of TYPES, or 0."""
    kind = object_type(array)
    for i in range(MAX_TYPES):
        row = state() + TYPES + TYPE_BYTES * i
        if load(row) == kind:
            return row
        if load(row) == 0:
            return 0
    return 0


@inlined
def read_view(array, row, view, frame):
    """Fill a view from an array whose type has this row of TYPES."""
    reader = load(row + TYPE_READER)
    if reader in (READ_NUMBA, READ_CUPY):
        return read_attributes(array, reader, view, frame + SCRATCH)
    return read_exchange(array, reader, view, frame + DLTENSOR)


@inlined
def item_bytes(dtype):
    """Bytes per element: bits times lanes, over eight."""
    return (((dtype >> 8) & 0xFF) * (dtype >> 16)) >> 3


@inlined
def read_exchange(array, function, view, tensor):
    """A view through the type's DLPack exchange table; the DLTensor's fields are in dlpack.h's order."""
    if call_to_dltensor(function, array, tensor) != 0:
        forget_error()
        return False
    dimensions, dtype = load32(tensor + 16), load32(tensor + 20)
    shape, strides = load(tensor + 24), load(tensor + 32)
    if load32(tensor + 8) != DL_CUDA or dimensions < 1 or dimensions > MAX_DIMENSIONS or strides == 0:
        return False
    # A complex tensor may be lazily conjugated, and bits that are no whole bytes have no stride.
    if dtype & 0xFF == DL_COMPLEX or ((dtype >> 8 & 0xFF) * (dtype >> 16)) & 7:
        return False
    size = item_bytes(dtype)
    store(view + ADDRESS, load(tensor) + load(tensor + 40))
    store(view + DIMENSIONS, dimensions)
    for i in range(dimensions):
        store(view + EXTENTS + 8 * i, load(shape + 8 * i))
        store(view + PITCHES + 8 * i, load(strides + 8 * i) * size)
    store(view + DTYPE, dtype)
    store(view + DEVICE, load32(tensor + 12))
    return True


@inlined
def read_attributes(array, reader, view, scratch):
    """A view of a numba.cuda or CuPy array: shape, strides, dtype, and where its memory is."""
    dimensions = read_integers(array, SHAPE, view + EXTENTS)
    if dimensions == 0 or read_integers(array, STRIDES, view + PITCHES) != dimensions:
        return False
    dtype = read_dtype(array)
    if dtype == 0:
        return False
    store(view + DIMENSIONS, dimensions)
    store(view + DTYPE, dtype)
    store(scratch, 0)
    address = read_cupy_memory(array, scratch) if reader == READ_CUPY else read_numba_memory(array, scratch)
    store(view + ADDRESS, address)
    store(view + DEVICE, load32(scratch))
    return address != 0  # no memory, or not of the usual kind: the Python road looks closer


@inlined
def read_integers(array, name, first):
    """One to four integers of a tuple attribute; returns how many, 0 for anything else."""
    numbers = PyObject_GetAttr(array, load(state() + name))
    if numbers == 0:
        forget_error()
        return 0
    count = PyTuple_Size(numbers)
    valid = 0 < count <= MAX_DIMENSIONS
    if valid:
        for i in range(count):
            value = PyLong_AsLongLong(PyTuple_GetItem(numbers, i))
            store(first + 8 * i, value)
            if value == -1:  # also how an error is reported
                valid = False
    if not valid:
        forget_error()
    Py_DecRef(numbers)
    return count if valid else 0


@inlined
def read_dtype(array):
    """DLPack's word for the array's dtype, or 0."""
    dtype = PyObject_GetAttr(array, load(state() + DTYPE_NAME))
    if dtype == 0:
        forget_error()
        return 0
    word = 0
    for i in range(MAX_DTYPES):
        row = state() + DTYPES + DTYPE_BYTES * i
        if load(row) == dtype:
            word = load(row + 8)
            break
        if load(row) == 0:
            break
    Py_DecRef(dtype)
    return word


@inlined
def integer_attribute(thing, name):
    """(whether the attribute is a plain int, it as an unsigned word, else 0)."""
    value = PyObject_GetAttr(thing, load(state() + name))
    if value == 0:
        forget_error()
        return False, 0
    plain, number = object_type(value) == load(state() + INT_TYPE), 0
    if plain:
        number = PyLong_AsUnsignedLongLongMask(value)
    Py_DecRef(value)
    return plain, number


@inlined
def read_numba_memory(array, ordinal):
    """The address that `array.gpu_data` holds, and its GPU into `ordinal`; or 0."""
    memory = PyObject_GetAttr(array, load(state() + GPU_DATA))
    if memory == 0:
        forget_error()
        return 0
    address = 0
    if object_type(memory) == load(state() + OWNED_POINTER):
        pointer = PyObject_GetAttr(memory, load(state() + POINTER))  # a ctypes.c_void_p; None for null
        if pointer != 0:
            _, address = integer_attribute(pointer, VALUE)
            Py_DecRef(pointer)
        else:
            forget_error()
    Py_DecRef(memory)
    # Numba's own memory is on the only GPU if there is only one; asking costs 0.1 us an array.
    one = load(state() + DEVICE_COUNT) == 1
    return address if one or address == 0 or pointer_attribute(ordinal, DEVICE_ORDINAL, address) == 0 else 0


@inlined
def read_cupy_memory(array, ordinal):
    """The address that `array.data.ptr` holds, and `array.data.device_id` into `ordinal`; or 0."""
    memory = PyObject_GetAttr(array, load(state() + DATA))
    if memory == 0:
        forget_error()
        return 0
    known, address = integer_attribute(memory, PTR)
    if known and load(state() + DEVICE_COUNT) != 1:
        known, device = integer_attribute(memory, DEVICE_ID)
        store(ordinal, device)
    Py_DecRef(memory)
    return address if known else 0


@inlined
def library_stream(row, device, scratch):
    """(whether it could be found, the stream that the array library of this row of TYPES works on)."""
    find = load(row + TYPE_STREAM)
    if find == 0:
        return True, 0
    if load(row + TYPE_READER) == READ_CUPY:
        stream = PyObject_CallNoArgs(find)  # of the current device, which is the arrays'
        if stream == 0:
            forget_error()
            return False, 0
        found, handle = integer_attribute(stream, PTR)
        Py_DecRef(stream)
        return found, handle
    if call_current_stream(find, DL_CUDA, device, scratch) != 0:
        forget_error()
        return False, 0
    return True, load(scratch)


# ----------------------------------------------------------------------------------------------------------------------
# 3. Checks, 4. plan, 5. launch


@inlined
def see_rows(view, leading):
    """Fold a view into rows, counted over its `leading` dimensions; False for what contract.py would refuse.

    Rows of one element have no inner stride to look at, and may be a lazily negated view: the Python road asks.
    """
    size, elements = item_bytes(load(view + DTYPE)), 1
    for i in range(load(view + DIMENSIONS) - 1, leading - 1, -1):
        extent = load(view + EXTENTS + 8 * i)
        if extent < 1 or extent >= 2**31 or (extent > 1 and load(view + PITCHES + 8 * i) != elements * size):
            return False
        elements *= extent
        if elements >= 2**31:
            return False
    rows, stride = load(view + EXTENTS), load(view + PITCHES)
    if leading == 2:
        pages, page_rows, page_stride = rows, load(view + EXTENTS + 8), stride
        if pages < 1 or pages >= 2**31 or page_rows < 1 or page_rows >= 2**31:
            return False
        if page_rows > 1:
            stride = load(view + PITCHES + 8)
            if pages > 1 and page_stride != page_rows * stride:
                return False
        rows = pages * page_rows
    store(view + ROWS, rows)
    store(view + ROW_STRIDE, stride if rows > 1 else 0)
    store(view + COLUMNS, elements)
    return elements > 1


@inlined
def alignment(source, cache):
    """What divides addresses and row strides: 16, 8, 4 or less."""
    bits = load(source + ADDRESS) | load(cache + ADDRESS) | load(source + ROW_STRIDE) | load(cache + ROW_STRIDE) | 16
    return bits & -bits


@inlined
def pair_is_valid(source, cache, batch, dtype):
    """What contract.py asks of k with k_cache, and of v with v_cache."""
    row_dimensions = load(source + DIMENSIONS) - 1
    leading = load(cache + DIMENSIONS) - row_dimensions
    if row_dimensions < 1 or row_dimensions > 2 or leading < 1 or leading > 2:
        return False
    for i in range(row_dimensions):
        if load(source + EXTENTS + 8 * (1 + i)) != load(cache + EXTENTS + 8 * (leading + i)):
            return False
    if load(source + DTYPE) != dtype or load(cache + DTYPE) != dtype:
        return False
    if not see_rows(source, 1) or not see_rows(cache, leading):
        return False
    row_bytes = load(source + COLUMNS) * item_bytes(dtype)
    slots = load(cache + ROWS)
    return (
        load(source + ROWS) == batch
        and row_bytes < 2**31
        and slots > 0
        and (slots == 1 or abs(load(cache + ROW_STRIDE)) >= row_bytes)
        and alignment(source, cache) >= 4
    )


@inlined
def indices_are_valid(indices):
    """int32 or int64, one dimension, aligned; its row stride is then known as well."""
    dtype = load(indices + DTYPE)
    if load(indices + DIMENSIONS) != 1 or (dtype != DL_INT32 and dtype != DL_INT64):
        return False
    stride = load(indices + PITCHES) if load(indices + EXTENTS) > 1 else 0
    store(indices + ROW_STRIDE, stride)
    return (load(indices + ADDRESS) | stride) & (item_bytes(dtype) - 1) == 0


@inlined
def plan_key(k, v, k_cache, v_cache, indices, num_split, skipping):
    """The two words under which remember_plan files a plan (fast_road._key_words)."""
    dtype = load(k_cache + DTYPE)
    size = item_bytes(dtype)
    first = load(k + COLUMNS) * size | (load(v + COLUMNS) * size) << 32
    second = (
        alignment(k, k_cache)
        | alignment(v, v_cache) << 8
        | num_split << 16
        | (item_bytes(load(indices + DTYPE)) << 3) << 24
        | load(k_cache + DEVICE) << 32
        | skipping << 56
    )
    return first, second


@inlined
def plan_home(first, second):
    """Where the search for a key starts: a multiplicative hash (Knuth) of both words."""
    return ((first * 0x9E3779B97F4A7C1 ^ second * 0x5851F42D4C957F2D) >> 40) & (MAX_PLANS - 1)


@inlined
def find_plan(first, second):
    """The plan's row, or 0."""
    slot = plan_home(first, second)
    for _ in range(MAX_PLANS):
        row = state() + PLANS + PLAN_BYTES * slot
        if load(row + PLAN_USED) == 0:
            return 0
        if load(row) == first and load(row + 8) == second:
            return row
        slot = (slot + 1) & (MAX_PLANS - 1)
    return 0


@inlined
def plan_kernel(plan, batch):
    """The kernel of the first band that holds this many rows; the last band has no bound."""
    band = plan + PLAN_BANDS
    while load(band) < batch:
        band += 16
    return load(band + 8)


@inlined
def launch_plan(plan, batch, size_limit, skip_index, stream, frame):
    """Fill the parameter block and launch; True if the driver took it. The stack is this call's own."""
    views, arguments, config = frame + VIEWS, frame + ARGUMENTS, frame + CONFIG
    for i in range(5):
        store(arguments + 8 * i, load(views + VIEW_BYTES * i + ADDRESS))
        store(arguments + 40 + 8 * i, load(views + VIEW_BYTES * i + ROW_STRIDE))
    store(arguments + 80, batch)
    store(arguments + 88, size_limit)
    store(arguments + 96, skip_index)
    for i in range(13):
        store(frame + POINTERS + 8 * i, arguments + 8 * i)
    kernel = plan_kernel(plan, batch)
    groups, attributes = load(plan + PLAN_GROUPS), load(plan + PLAN_ATTRIBUTES)
    store32(config, (batch * load(plan + PLAN_PARTS) + groups - 1) // groups)
    store32(config + 4, 1)
    store32(config + 8, 1)
    store32(config + 12, load(plan + PLAN_BLOCK))
    store32(config + 16, 1)
    store32(config + 20, 1)
    store32(config + 24, 0)
    store(config + 32, stream)
    store(config + 40, attributes)
    store32(config + 48, 1 if attributes != 0 else 0)
    # The launch blocks while the stream's queue is full, and what drains the queue may need the GIL.
    thread = PyEval_SaveThread()
    status = launch_kernel(config, kernel, frame + POINTERS, 0)
    PyEval_RestoreThread(thread)
    return status == 0


@inlined
def on_stream(foreign, slots, device, handle, scratch):
    """Whether the libraries of these arrays work on the stream that we launch on; else theirs must be waited for."""
    for i in range(5):
        if foreign >> i & 1:
            found, theirs = library_stream(find_type(load(slots + 8 * i)), device, scratch)
            if not found or theirs != handle:
                return False
    return True


@inlined
def row_bytes_are(given, view, scratch):
    """Whether the caller, who may say how many bytes a row has, says so; 0, None and an absent argument say nothing."""
    known, row_bytes = integer_argument(given, scratch)
    return known and (row_bytes == 0 or row_bytes == load(view + COLUMNS) * item_bytes(load(view + DTYPE)))


@inlined
def serve(function, args, count, names):
    """Serve the call and return True, or change nothing and return False."""
    frame = stack_frame()
    slots, views, scratch = frame + SLOTS, frame + VIEWS, frame + SCRATCH
    if not sort_arguments(function, args, count, names, slots):
        return False

    owner, foreign = 0, 0
    for i in range(5):
        array = load(slots + 8 * i)
        row = find_type(array)
        if row == 0 or not read_view(array, row, views + VIEW_BYTES * i, frame):
            return False
        if load(views + VIEW_BYTES * i + ADDRESS) == 0:
            return False
        if load(row + TYPE_WRITABLE) == 0:
            if i == 2 or i == 3:
                return False
            foreign |= 1 << i
        if i == 2:
            owner = row
    k, v, k_cache = views, views + VIEW_BYTES, views + 2 * VIEW_BYTES
    v_cache, indices = views + 3 * VIEW_BYTES, views + 4 * VIEW_BYTES

    batch, dtype = load(indices + EXTENTS), load(k_cache + DTYPE)
    if batch < 1 or batch > MAX_BATCH or not indices_are_valid(indices):
        return False
    if not pair_is_valid(k, k_cache, batch, dtype) or not pair_is_valid(v, v_cache, batch, dtype):
        return False

    if not row_bytes_are(load(slots + ROW_BYTES), k, scratch) or not row_bytes_are(
        load(slots + V_ROW_BYTES), v, scratch
    ):
        return False
    as_store_cache = function == state() + STORE_CACHE
    valid, num_split, size_limit, skip_index, skipping = read_options(slots, as_store_cache, scratch)
    rows = min(load(k_cache + ROWS), load(v_cache + ROWS))
    if not valid or size_limit > rows:
        return False
    if size_limit == 0:
        size_limit = rows

    device = load(k_cache + DEVICE)
    for i in range(5):
        if load(views + VIEW_BYTES * i + DEVICE) != device:
            return False
    first, second = plan_key(k, v, k_cache, v_cache, indices, num_split, 1 if skipping else 0)
    plan = find_plan(first, second)
    if plan == 0 or batch * load(plan + PLAN_PARTS) > MAX_BATCH:
        return False
    if current_context(scratch) != 0 or load(scratch) != load(plan + PLAN_CONTEXT):
        return False  # another context is current, or none: the Python road switches and switches back

    stream = load(slots + STREAM)
    if stream != 0 and stream != load(state() + NONE):
        stream_ok, handle = integer_argument(stream, scratch)
        stream_ok = stream_ok and handle >= 0
    else:
        stream_ok, handle = library_stream(owner, device, frame + LIBRARY_STREAM)
    if not stream_ok or (foreign != 0 and not on_stream(foreign, slots, device, handle, frame + LIBRARY_STREAM)):
        return False
    return launch_plan(plan, batch, size_limit, skip_index, handle, frame)


def entry(function, args, nargsf, names):
    """A vectorcall: serve the call here, or leave it to the Python road. 0 says that an exception is set."""
    count = nargsf & 0x7FFFFFFFFFFFFFFF  # the top bit is PY_VECTORCALL_ARGUMENTS_OFFSET
    row = state() + (STORE_CACHE if function == load(state() + STORE_CACHE) else STORE)
    if serve(row, args, count, names):
        return load(state() + NONE)
    if PyErr_Occurred() != 0:
        return 0
    return call_python_road(load(row + FUNCTION_ROAD), function, args, nargsf, names)
