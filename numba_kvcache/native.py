"""The fast road: `store_kvcache`'s decision, once made by the Python road, replayed by code that Numba compiles.

A decode-step store takes 1 microsecond of GPU time; the Python road takes some 15 of host time to launch it, a driver
launch alone about 4. So `store_kvcache` stays the Python function that it is, and its *vectorcall* pointer, the C
function that CPython calls when somebody calls it, is set to `entry` below: machine code with the C signature
`(function, args, nargsf, names) -> PyObject *`, compiled by `numba.cfunc`. `entry`

1. sorts positional and keyword arguments into eight slots;
2. reads each array into a view: torch tensors (and whatever else has one) through the DLPack C exchange table of their
   type, Numba device arrays through their attributes;
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

PARAMETERS = ("k", "v", "k_cache", "v_cache", "indices", "num_split", "size_limit", "stream")
ATTRIBUTES = ("shape", "strides", "dtype", "gpu_data", "device_ctypes_pointer", "value")

NAMES = 0  # interned strings: PARAMETERS, then ATTRIBUTES
SHAPE, STRIDES, DTYPE_NAME, GPU_DATA, POINTER, VALUE = range(64, 112, 8)
NONE = 112
INT_TYPE = 120
OWNED_POINTER = 128  # Numba's class for memory that its own memory manager allocated
PYTHON_ROAD = 136  # the function's original vectorcall
DEVICE_COUNT = 144
ATTRIBUTE = 152  # CUlaunchAttribute, 72 bytes: early launch on

TYPES = 256  # rows: type, DLPack to_dltensor, current_stream, whether none is ever read-only
TYPE_BYTES, MAX_TYPES = 32, 16

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

SLOTS = 0  # eight argument objects
VIEWS = 64  # five views of eight words
DLTENSOR = 384
STREAM = 432
CONFIG = 440  # CUlaunchConfig
ARGUMENTS = 496  # thirteen words
POINTERS = 600  # thirteen addresses of those
SCRATCH = 704
FRAME_BYTES = 712

# A view: what arrays.ArrayView is, in int64 words. All strides in bytes; dtype as DLPack packs it.
VIEW_BYTES = 64
ADDRESS, DIMENSIONS, ROWS, COLUMNS, ROW_STRIDE, COLUMN_STRIDE, DTYPE, DEVICE = range(0, 64, 8)

DL_CUDA = 2
DL_COMPLEX = 5
DL_INT32, DL_INT64 = 0 | 32 << 8 | 1 << 16, 0 | 64 << 8 | 1 << 16

MAX_BATCH = 2**31 - 1
DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

# ----------------------------------------------------------------------------------------------------------------------
# What compiled code may say. C functions of CPython are found by name; the driver's are registered by fast_road.py.

Py_DecRef = types.ExternalFunction("Py_DecRef", types.void(types.int64))
PyErr_Clear = types.ExternalFunction("PyErr_Clear", types.void())
PyEval_RestoreThread = types.ExternalFunction("PyEval_RestoreThread", types.void(types.int64))
PyEval_SaveThread = types.ExternalFunction("PyEval_SaveThread", types.int64())
PyLong_AsLongLong = types.ExternalFunction("PyLong_AsLongLong", types.int64(types.int64))
PyLong_AsLongLongAndOverflow = types.ExternalFunction(
    "PyLong_AsLongLongAndOverflow", types.int64(types.int64, types.int64)
)
PyLong_AsUnsignedLongLongMask = types.ExternalFunction("PyLong_AsUnsignedLongLongMask", types.int64(types.int64))
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
def sort_arguments(args, count, names, slots):
    """Argument objects into their slots, 0 where absent; False for a call that Python itself would refuse."""
    if count > 7:
        return False
    for i in range(8):
        store(slots + 8 * i, load(args + 8 * i) if i < count else 0)
    if names != 0:
        for j in range(PyTuple_Size(names)):
            name = PyTuple_GetItem(names, j)
            found = -1
            for i in range(8):
                if load(state() + NAMES + 8 * i) == name:
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
    function = load(row + 8)
    if function != 0:
        return read_exchange(array, function, view, frame + DLTENSOR)
    return read_numba(array, view, frame + SCRATCH)


@inlined
def item_bytes(dtype):
    """Bytes per element: bits times lanes, over eight."""
    return (((dtype >> 8) & 0xFF) * (dtype >> 16)) >> 3


@inlined
def read_exchange(array, function, view, tensor):
    """A view through the type's DLPack exchange table; the DLTensor's fields are in dlpack.h's order."""
    if call_to_dltensor(function, array, tensor) != 0:
        PyErr_Clear()
        return False
    dimensions, dtype = load32(tensor + 16), load32(tensor + 20)
    shape, strides = load(tensor + 24), load(tensor + 32)
    if load32(tensor + 8) != DL_CUDA or dimensions < 1 or dimensions > 2 or strides == 0:
        return False
    # A complex tensor may be lazily conjugated, and bits that are no whole bytes have no stride.
    if dtype & 0xFF == DL_COMPLEX or ((dtype >> 8 & 0xFF) * (dtype >> 16)) & 7:
        return False
    size = item_bytes(dtype)
    store(view + ADDRESS, load(tensor) + load(tensor + 40))
    store(view + DIMENSIONS, dimensions)
    store(view + ROWS, load(shape))
    store(view + ROW_STRIDE, load(strides) * size)
    store(view + COLUMNS, load(shape + 8) if dimensions == 2 else 1)
    store(view + COLUMN_STRIDE, load(strides + 8) * size if dimensions == 2 else size)
    store(view + DTYPE, dtype)
    store(view + DEVICE, load32(tensor + 12))
    return True


@inlined
def read_numba(array, view, scratch):
    """A view of a numba.cuda DeviceNDArray: shape, strides, dtype, gpu_data."""
    dimensions = read_pair(array, SHAPE, view + ROWS, view + COLUMNS)
    if dimensions == 0 or read_pair(array, STRIDES, view + ROW_STRIDE, view + COLUMN_STRIDE) != dimensions:
        return False
    dtype = read_dtype(array)
    if dtype == 0:
        return False
    store(view + DIMENSIONS, dimensions)
    store(view + DTYPE, dtype)
    address = read_pointer(array)
    store(view + ADDRESS, address)
    if address == 0:
        return False  # no memory, or not Numba's own: the Python road looks closer
    # Numba's own memory is on the only GPU if there is only one; asking costs 0.1 us an array.
    store(scratch, 0)
    if load(state() + DEVICE_COUNT) != 1 and pointer_attribute(scratch, DEVICE_ORDINAL, address) != 0:
        return False
    store(view + DEVICE, load32(scratch))
    return True


@inlined
def read_pair(array, name, first, second):
    """One or two integers of a tuple attribute; returns how many, 0 for anything else."""
    pair = PyObject_GetAttr(array, load(state() + name))
    if pair == 0:
        PyErr_Clear()
        return 0
    count = PyTuple_Size(pair)
    if count == 1 or count == 2:
        a = PyLong_AsLongLong(PyTuple_GetItem(pair, 0))
        b = PyLong_AsLongLong(PyTuple_GetItem(pair, 1)) if count == 2 else 1
        store(first, a)
        store(second, b)
        if a == -1 or b == -1:  # also how an error is reported
            count = 0
    else:
        count = 0
    if count == 0:
        PyErr_Clear()
    Py_DecRef(pair)
    return count


@inlined
def read_dtype(array):
    """DLPack's word for the array's dtype, or 0."""
    dtype = PyObject_GetAttr(array, load(state() + DTYPE_NAME))
    if dtype == 0:
        PyErr_Clear()
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
def read_pointer(array):
    """The device address that `array.gpu_data` holds, or 0."""
    memory = PyObject_GetAttr(array, load(state() + GPU_DATA))
    if memory == 0:
        PyErr_Clear()
        return 0
    address = 0
    if object_type(memory) == load(state() + OWNED_POINTER):
        # A ctypes.c_void_p; its value is None for null, which is no integer.
        pointer = PyObject_GetAttr(memory, load(state() + POINTER))
        value = PyObject_GetAttr(pointer, load(state() + VALUE)) if pointer != 0 else 0
        if value != 0 and object_type(value) == load(state() + INT_TYPE):
            address = PyLong_AsUnsignedLongLongMask(value)
        if value != 0:
            Py_DecRef(value)
        else:
            PyErr_Clear()
        if pointer != 0:
            Py_DecRef(pointer)
    Py_DecRef(memory)
    return address


# ----------------------------------------------------------------------------------------------------------------------
# 3. Checks, 4. plan, 5. launch


@inlined
def row_stride(view):
    """Bytes from row to row; 0 where there is one row."""
    return load(view + ROW_STRIDE) if load(view + ROWS) > 1 else 0


@inlined
def dense(view, dtype):
    """Two dimensions, the common dtype, dense rows.

    Rows of one element have no inner stride to look at, and may be a lazily negated view: the Python road asks.
    """
    return (
        load(view + DIMENSIONS) == 2
        and load(view + DTYPE) == dtype
        and load(view + COLUMNS) > 1
        and load(view + COLUMN_STRIDE) == item_bytes(dtype)
    )


@inlined
def alignment(source, cache):
    """What divides addresses and row strides: 16, 8, 4 or less."""
    bits = load(source + ADDRESS) | load(cache + ADDRESS) | row_stride(source) | row_stride(cache) | 16
    return bits & -bits


@inlined
def pair_is_valid(source, cache, batch, dtype):
    """What contract.py asks of k with k_cache, and of v with v_cache."""
    row_bytes = load(source + COLUMNS) * item_bytes(dtype)
    slots = load(cache + ROWS)
    return (
        dense(source, dtype)
        and dense(cache, dtype)
        and load(source + ROWS) == batch
        and load(source + COLUMNS) == load(cache + COLUMNS)
        and 0 < row_bytes < 2**31
        and slots > 0
        and (slots == 1 or abs(load(cache + ROW_STRIDE)) >= row_bytes)
        and alignment(source, cache) >= 4
    )


@inlined
def indices_are_valid(indices):
    """int32 or int64, one dimension, aligned."""
    dtype = load(indices + DTYPE)
    if dtype != DL_INT32 and dtype != DL_INT64:
        return False
    low_bits = item_bytes(dtype) - 1
    return load(indices + DIMENSIONS) == 1 and (load(indices + ADDRESS) | row_stride(indices)) & low_bits == 0


@inlined
def plan_key(k, v, k_cache, v_cache, indices, num_split):
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
def launch_plan(plan, batch, size_limit, stream, frame):
    """Fill the parameter block and launch; True if the driver took it. The stack is this call's own."""
    views, arguments, config = frame + VIEWS, frame + ARGUMENTS, frame + CONFIG
    for i in range(5):
        store(arguments + 8 * i, load(views + VIEW_BYTES * i + ADDRESS))
        store(arguments + 40 + 8 * i, row_stride(views + VIEW_BYTES * i))
    store(arguments + 80, batch)
    store(arguments + 88, size_limit)
    store(arguments + 96, 0)  # skip index, which these kernels do not look at
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
            row = find_type(load(slots + 8 * i))
            if call_current_stream(load(row + 16), DL_CUDA, device, scratch) != 0:
                PyErr_Clear()
                return False
            if load(scratch) != handle:
                return False
    return True


@inlined
def serve(args, count, names):
    """Serve the call and return True, or change nothing and return False."""
    frame = stack_frame()
    slots, views, scratch = frame + SLOTS, frame + VIEWS, frame + SCRATCH
    if not sort_arguments(args, count, names, slots):
        return False

    stream_of, foreign = 0, 0
    for i in range(5):
        array = load(slots + 8 * i)
        row = find_type(array)
        if row == 0 or not read_view(array, row, views + VIEW_BYTES * i, frame):
            return False
        if load(views + VIEW_BYTES * i + ADDRESS) == 0:
            return False
        if load(row + 24) == 0:
            if i == 2 or i == 3:
                return False
            foreign |= 1 << i
        if i == 2:
            stream_of = load(row + 16)
    k, v, k_cache = views, views + VIEW_BYTES, views + 2 * VIEW_BYTES
    v_cache, indices = views + 3 * VIEW_BYTES, views + 4 * VIEW_BYTES

    batch, dtype = load(indices + ROWS), load(k_cache + DTYPE)
    if batch < 1 or batch > MAX_BATCH or not indices_are_valid(indices):
        return False
    if not pair_is_valid(k, k_cache, batch, dtype) or not pair_is_valid(v, v_cache, batch, dtype):
        return False

    split_ok, num_split = integer_argument(load(slots + 40), scratch)
    limit_ok, size_limit = integer_argument(load(slots + 48), scratch)
    # None is a size limit but not a split.
    if not split_ok or not limit_ok or load(slots + 40) == load(state() + NONE) or num_split < 0 or num_split > 4:
        return False
    rows = min(load(k_cache + ROWS), load(v_cache + ROWS))
    if size_limit < 0 or size_limit > rows:
        return False
    if size_limit == 0:
        size_limit = rows

    device = load(k_cache + DEVICE)
    for i in range(5):
        if load(views + VIEW_BYTES * i + DEVICE) != device:
            return False
    first, second = plan_key(k, v, k_cache, v_cache, indices, num_split)
    plan = find_plan(first, second)
    if plan == 0 or batch * load(plan + PLAN_PARTS) > MAX_BATCH:
        return False
    if current_context(scratch) != 0 or load(scratch) != load(plan + PLAN_CONTEXT):
        return False  # another context is current, or none: the Python road switches and switches back

    stream = load(slots + 56)
    handle = 0
    if stream != 0 and stream != load(state() + NONE):
        stream_ok, handle = integer_argument(stream, scratch)
        if not stream_ok or handle < 0:
            return False
    elif stream_of != 0:
        if call_current_stream(stream_of, DL_CUDA, device, frame + STREAM) != 0:
            PyErr_Clear()
            return False
        handle = load(frame + STREAM)
    if foreign != 0 and not on_stream(foreign, slots, device, handle, frame + STREAM):
        return False
    return launch_plan(plan, batch, size_limit, handle, frame)


def entry(function, args, nargsf, names):
    """A vectorcall: serve the call here, or leave it to the Python road."""
    count = nargsf & 0x7FFFFFFFFFFFFFFF  # the top bit is PY_VECTORCALL_ARGUMENTS_OFFSET
    if serve(args, count, names):
        return load(state() + NONE)
    return call_python_road(load(state() + PYTHON_ROAD), function, args, nargsf, names)
