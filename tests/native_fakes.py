"""A driver and a tensor library without a GPU, for tests of both host roads. Only for a process of its own.

The driver's entry points, and the DLPack exchange table of the tensors, are C functions that `numba.cfunc` compiles: so
the fast road calls them as it calls the real ones, and a million calls take a second. What the Python road asks of the
driver through cuda.bindings is replaced function by function.
"""

import ast
import ctypes
import math
import struct
import sys
import types as python_types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numba import cfunc, types

from benchmarks.roads import without_fast_road
from numba_kvcache import arrays, dispatch, driver, fast_road, known_calls, layout, native
from numba_kvcache.native import load, load32, store, store32

i32, i64 = types.int32, types.int64

# ----------------------------------------------------------------------------------------------------------------------
# Memory that the compiled fakes and the tests share: int64 words.

LAUNCHES, LAUNCH_STATUS, CONTEXT, CONTEXT_STATUS, STREAM, STREAM_STATUS, POINTER_STATUS = range(7)
STREAM_CALLS, ROAD_CALLS, ROAD_FUNCTION, ROAD_ARGS, ROAD_COUNT, ROAD_NAMES, ROAD_RESULT, ERROR, THREADED = range(7, 16)

control = np.zeros(16, np.int64)
records = np.zeros(32, np.int64)  # the latest launch
per_thread = np.zeros((64, 2), np.int64)  # calls, calls whose parameters were another thread's

_CONTROL, _RECORDS, _THREADS = control.ctypes.data, records.ctypes.data, per_thread.ctypes.data
# As numbers, which compiled code takes for constants.
_LAUNCHES, _LAUNCH_STATUS, _CONTEXT, _CONTEXT_STATUS = (_CONTROL + 8 * i for i in range(4))
_STREAM, _STREAM_STATUS, _POINTER_STATUS, _STREAM_CALLS, _ROAD, _ = (_CONTROL + 8 * i for i in range(4, 10))
_ROAD_RESULT, _ERROR, _THREADED = (_CONTROL + 8 * i for i in (ROAD_RESULT, ERROR, THREADED))

_yield = types.ExternalFunction("sched_yield", i32())
_set_error = types.ExternalFunction("PyErr_SetNone", types.void(i64))


@cfunc(i32(i64, i64, i64, i64))
def _launch(config, kernel, parameters, extra):
    if load(_THREADED) != 0:
        # Called without the GIL: give the other threads time to write where they should not.
        for _ in range(20):
            _yield()
        thread = load(config + 32)
        at = _THREADS + 16 * thread
        store(at, load(at) + 1)
        for i in range(5):
            if load(load(parameters + 8 * i)) >> 32 != thread:
                store(at + 8, load(at + 8) + 1)
        if load(load(parameters + 80)) != thread or kernel != 1000 + thread:
            store(at + 8, load(at + 8) + 1)
        return np.int32(0)
    store(_LAUNCHES, load(_LAUNCHES) + 1)
    for i in range(7):
        store(_RECORDS + 8 * i, load(config + 8 * i))
    store(_RECORDS + 56, kernel)
    for i in range(13):
        store(_RECORDS + 64 + 8 * i, load(load(parameters + 8 * i)))
    store(_RECORDS + 168, extra)
    for i in range(9):
        store(_RECORDS + 176 + 8 * i, load(load(config + 40) + 8 * i) if load32(config + 48) != 0 else 0)
    return np.int32(load(_LAUNCH_STATUS))


@cfunc(i32(i64))
def _current_context(out):
    store(out, load(_CONTEXT))
    return np.int32(load(_CONTEXT_STATUS))


@cfunc(i32(i64, i32, i64))
def _pointer_attribute(out, attribute, address):
    # The fakes' addresses name their device, as device_of below reads them.
    store32(out, (address >> 44) & 15)
    return np.int32(load(_POINTER_STATUS)) if attribute == 9 else np.int32(1)


@cfunc(i32(i64, i64))
def _to_dltensor(tensor, out):
    fields = load(tensor + 16)  # ctypes keeps an instance's memory there
    fails = load(fields + 48)
    if fails == 1:
        _set_error(load(_ERROR))
    if fails != 0:
        return np.int32(-1)
    for i in range(6):
        store(out + 8 * i, load(fields + 8 * i))
    return np.int32(0)


@cfunc(i32(i32, i32, i64))
def _current_stream(kind, ordinal, out):
    store(_STREAM_CALLS, load(_STREAM_CALLS) + 1)
    if load(_STREAM_STATUS) != 0:
        _set_error(load(_ERROR))
        return np.int32(-1)
    store(out, load(_STREAM) + ordinal if kind == 2 else 0)
    return np.int32(0)


@cfunc(i64(i64, i64, i64, i64))
def _road(function, args, nargsf, names):
    """Stands for the Python road's vectorcall: counts, and returns what the test asked for."""
    store(_ROAD, load(_ROAD) + 1)
    store(_ROAD + 8, function)
    store(_ROAD + 16, args)
    store(_ROAD + 24, nargsf)
    store(_ROAD + 32, names)
    return load(_ROAD_RESULT)


def last_launch():
    """The latest launch, by name; parameters as the kernel takes them."""
    *grid_block, shared, stream, _, count = struct.unpack("3I3II4xQQI4x", records[:7].tobytes())
    return {
        "grid": tuple(grid_block[:3]),
        "block": tuple(grid_block[3:]),
        "shared": shared,
        "stream": stream,
        "attributes": records[22:31].tobytes() if count else b"",
        "count": count,
        "kernel": int(records[7]),
        "parameters": records[8:21].tolist(),
        "extra": int(records[21]),
    }


# ----------------------------------------------------------------------------------------------------------------------
# Tensors

CUDA = 2
DTYPES = {
    "bool": (6, 8, 1),
    "uint8": (1, 8, 1),
    "int16": (0, 16, 1),
    "float16": (2, 16, 1),
    "bfloat16": (4, 16, 1),
    "float32": (2, 32, 1),
    "int32": (0, 32, 1),
    "uint32": (1, 32, 1),
    "int64": (0, 64, 1),
    "uint64": (1, 64, 1),
    "float64": (2, 64, 1),
    "complex64": (5, 64, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}


class _Dtype:
    """What torch.float16 is: a singleton with a name and a size."""

    def __init__(self, name, code, bits, lanes):
        self.name, self.itemsize, self.word = name, bits * lanes // 8, (code, bits, lanes)
        self.is_complex = name.startswith("complex")

    def __str__(self):
        return f"torch.{self.name}"


dtypes = {name: _Dtype(name, *word) for name, word in DTYPES.items()}
_by_word = {dtype.word: dtype for dtype in dtypes.values()}


class Fields(ctypes.Structure):
    """A DLTensor, and the arrays that it points to; strides in elements."""

    _fields_ = (
        ("data", ctypes.c_uint64),
        ("device_kind", ctypes.c_int32),
        ("ordinal", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape_at", ctypes.c_uint64),
        ("strides_at", ctypes.c_uint64),
        ("byte_offset", ctypes.c_uint64),
        ("fails", ctypes.c_int64),
        ("extents", ctypes.c_int64 * 5),
        ("steps", ctypes.c_int64 * 5),
    )

    def __init__(self, shape, strides, dtype, address, *, ordinal=0, device_kind=CUDA, offset=0, conj=False, neg=False):
        super().__init__(address, device_kind, ordinal, len(shape), *DTYPES[dtype])
        self.byte_offset, self._conj, self._neg = offset, conj, neg
        self.extents[: len(shape)], self.steps[: len(strides)] = shape, strides
        self.shape_at = ctypes.addressof(self) + Fields.extents.offset
        self.strides_at = ctypes.addressof(self) + Fields.steps.offset


def exchange_table(version=1 | 3 << 32, current_stream=_current_stream.address):
    """A `__dlpack_c_exchange_api__`, and the table within, which must outlive it."""
    table = (ctypes.c_uint64 * 7)(version, 0, 0, 0, 0, _to_dltensor.address, current_stream)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(table), _CAPSULE_NAME, None), table


_CAPSULE_NAME = b"dlpack_exchange_api"
_capsule, _table = exchange_table()


class Device(NamedTuple):
    """What torch.device is."""

    type: str
    index: int


class Tensor(Fields):
    """Stands for torch.Tensor, with what the Python road asks of one."""

    __dlpack_c_exchange_api__ = _capsule

    is_cuda = property(lambda self: self.device_kind == CUDA)
    device = property(lambda self: Device("cuda" if self.is_cuda else "cpu", self.ordinal))
    shape = property(lambda self: tuple(self.extents[: self.ndim]))
    dtype = property(lambda self: _by_word[self.code, self.bits, self.lanes])

    def get_device(self):  # of the current stream
        return self.ordinal

    def is_neg(self):
        return self._neg

    def is_conj(self):
        return self._conj

    def data_ptr(self):
        return self.data + self.byte_offset

    def stride(self):
        return tuple(self.steps[: self.ndim])

    def is_contiguous(self):
        dense = [math.prod(self.shape[i + 1 :]) for i in range(self.ndim)]
        steps = zip(self.shape, self.stride(), dense, strict=True)
        return 0 in self.shape or all(extent == 1 or step == wanted for extent, step, wanted in steps)


class Parameter(Tensor):
    """A second type of tensors."""


assert ctypes.c_uint64.from_address(id(probe := Tensor((1,), (1,), "int64", 1)) + 16).value == ctypes.addressof(probe)

_torch = python_types.ModuleType("torch")
_torch.Tensor = Tensor
_torch._C = python_types.SimpleNamespace(_cuda_getCurrentRawStream=lambda ordinal: int(control[STREAM]) + ordinal)


# ----------------------------------------------------------------------------------------------------------------------
# Numba's arrays


class _Memory:
    """What OwnedPointer owns."""

    is_managed = False

    def __init__(self, pointer):
        self.refct, self.device_ctypes_pointer = 1, pointer

    def free(self):
        raise AssertionError("the fakes own no memory")


def numba_array(shape, strides, dtype, address, *, pointer=ctypes.c_size_t, owner=None):
    """A DeviceNDArray whose memory is a number. Strides in bytes."""
    from numba.cuda.cudadrv.devicearray import DeviceNDArray
    from numba.cuda.cudadrv.driver import OwnedPointer

    memory = _Memory(pointer(address))
    return DeviceNDArray(shape, strides, dtype, gpu_data=(owner or OwnedPointer)(memory))


# ----------------------------------------------------------------------------------------------------------------------
# CuPy's arrays


class CupyArray:
    """Stands for cupy.ndarray: what both roads ask of one. Strides in bytes."""

    def __init__(self, shape, strides, dtype, address):
        self.shape, self.strides, self.dtype = shape, strides, np.dtype(dtype)
        self.data = python_types.SimpleNamespace(ptr=address, device_id=device_of(address))


cupy_streams = {}
"""The handle of CuPy's current stream, by device; or an exception, raised when it is asked for."""


def _cupy_current_stream(device_id=-1):
    handle = cupy_streams[CONTEXTS.index(int(control[CONTEXT])) if device_id == -1 else device_id]
    if isinstance(handle, BaseException):
        raise handle
    return python_types.SimpleNamespace(ptr=handle)


_cupy = python_types.ModuleType("cupy")
_cupy.ndarray = CupyArray
_cupy.cuda = python_types.SimpleNamespace(get_current_stream=_cupy_current_stream)


# ----------------------------------------------------------------------------------------------------------------------
# The process

CONTEXTS = (0x1000, 0x1001)  # of devices 0 and 1
real_start = fast_road.start
_kernels = {}


def device_of(address):
    return address >> 44 & 15


def install():
    """Replace the driver. Once per process, before anything has been launched."""
    entries = {
        "cuLaunchKernelEx": _launch,
        "cuCtxGetCurrent": _current_context,
        "cuPointerGetAttribute": _pointer_attribute,
    }
    sys.modules["torch"], sys.modules["cupy"] = _torch, _cupy
    driver.procedure = lambda name, version=12000: entries[name].address
    driver.device_count = lambda: 2
    driver.initialise = lambda: None
    driver.current_device = lambda: CONTEXTS.index(int(control[CONTEXT]))
    driver.current_context = driver.context_here = lambda: int(control[CONTEXT])
    driver.compute_capability = lambda device: (9, 0)
    driver.sm_count = lambda device: 16  # few: small batches then meet more than one band
    driver.kernel_function = lambda kernel: kernel + 1_000_000
    driver.pointer_device = device_of
    driver.describe = lambda status: f"status {status}"
    driver.push_device, driver.pop_device = _push_device, _pop_device
    dispatch.loaded_kernel = lambda spec, device: _kernels.setdefault((spec, device), len(_kernels) + 1)
    fast_road.start = lambda: None  # most tests call the road by its address
    reset()


_before = []


def _push_device(device):
    if control[CONTEXT] == CONTEXTS[device]:
        return False
    _before.append(int(control[CONTEXT]))
    control[CONTEXT] = CONTEXTS[device]
    return True


def _pop_device():
    control[CONTEXT] = _before.pop()


def reset():
    """The state in which every test begins: nothing remembered, device 0 current."""
    control[:] = 0
    control[CONTEXT], control[STREAM] = CONTEXTS[0], 0x7000
    control[ERROR], control[ROAD_RESULT] = id(RuntimeError), id(Ellipsis)
    cupy_streams.update({0: 0x9000, 1: 0x9001})
    records[:] = per_thread[:] = 0
    forget_plans()
    fast_road._state[native.TYPES // 8 : native.DTYPES // 8] = 0
    fast_road.ways.clear()
    arrays.readers.clear()  # so that the Python road reports the types anew
    arrays.unreported.clear()
    fast_road._write(native.DEVICE_COUNT, 2)
    fast_road._write(native.STORE, id(dispatch.store_kvcache), _road.address, 7)


def forget_plans():
    fast_road._state[native.PLANS // 8 :] = 0
    dispatch._plans.clear()
    known_calls.known.clear()


def python_road():
    """`store_kvcache` as a function whose vectorcall is CPython's own."""
    return without_fast_road(dispatch.store_kvcache)


def store_cache():
    """SGLang's function as sglang.py has it, without the torch that this module imports, over the Python road."""
    tree = ast.parse(Path(native.__file__).with_name("sglang.py").read_text())
    tree.body = [
        node for node in tree.body if getattr(node, "name", "") in ("store_cache", "_check_row_bytes", "_plain")
    ]
    names = {"Any": Any, "math": math, "integer": layout.integer, "store_kvcache": python_road()}
    exec(compile(tree, "sglang.py", "exec"), names)
    return names["store_cache"]


class FastRoad:
    """The compiled entry, called as CPython would call a vectorcall of `function`, on any version."""

    def __init__(self, function=len):
        self.function = function
        self.address = fast_road.compile_entry()
        prototype = ctypes.PYFUNCTYPE(
            ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        )
        self.entry = prototype(self.address)  # raises whatever exception the call leaves set

    def __call__(self, *args, **keywords):
        """Whether the call was served; anything but 'served' or 'given back, once' is an AssertionError."""
        names = tuple(map(sys.intern, keywords))
        return self.call((*args, *keywords.values()), len(args), names)

    def call(self, values, count, names=()):
        # The top bit says that the caller lends the place before args, as CPython's own calls do.
        array = (ctypes.c_uint64 * (len(values) + 1))(0, *map(id, values))
        calls = int(control[ROAD_CALLS])
        at = ctypes.addressof(array) + 8
        result = self.entry(self.function, at, count | 1 << 63, id(names) if names else None)
        if control[ROAD_CALLS] == calls:
            assert result == id(None)
            return True
        assert control[ROAD_CALLS] == calls + 1
        assert result == id(Ellipsis)
        # What the Python road gets is what we were given.
        assert int(control[ROAD_FUNCTION]) == id(self.function)
        assert int(control[ROAD_ARGS]) == at
        assert int(control[ROAD_COUNT]) & 2**64 - 1 == count | 1 << 63
        assert int(control[ROAD_NAMES]) == (id(names) if names else 0)
        assert list(array)[1:] == list(map(id, values))
        return False


def read(array):
    """The view that the Python road has of an array."""
    return arrays.read_array("array", array, 0)
