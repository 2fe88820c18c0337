"""Brings the fast road into force, and tells it what the Python road has decided.

native.py is what is compiled; this is what happens around it: the table that the compiled code reads, the plans and
array types that dispatch.py reports, and the moment when the vectorcall of `store_kvcache`, and of SGLang's
`store_cache`, becomes machine code. Where that cannot be, `status()` says why and the Python road serves every call.
"""

import ctypes
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numpy as np
from numba import cfunc, types

from . import disk_cache, driver, native, settings
from .launch import EARLY_LAUNCH
from .layout import StoreLayout

__all__ = ["attach", "compile_entry", "remember_plan", "remember_type", "start", "status", "wait", "ways"]

_state = np.zeros(native.STATE_BYTES // 8, np.int64)

ways: dict[type, str] = {}
"""By which road calls with arrays of each type go."""

# Rows are published last word first, under the GIL: a reader, which holds it too, sees whole rows only.

# A finaliser may store, and so come here, while we are here. At worst the row that one of the two calls wrote is lost:
# rows are whole and carry their key, so what is lost takes the Python road.
_lock = threading.RLock()
_keep: list[Any] = []  # types and dtypes whose addresses are in the table


def _write(offset: int, *words: int) -> None:
    for i in reversed(range(len(words))):
        _state[offset // 8 + i] = np.uint64(words[i] & 0xFFFFFFFFFFFFFFFF).astype(np.int64)


def _free_row(start: int, row_bytes: int, rows: int) -> int | None:
    return next((at for i in range(rows) if _state[(at := start + row_bytes * i) // 8] == 0), None)


def remember_type(kind: type, *, writable: bool) -> None:
    """Let arrays of exactly this type take the fast road, if it can read them.

    `writable` says that no array of the type is ever read-only, so that it may be a cache.
    """
    if kind in ways:
        return
    way, reader, current_stream = _way_to_read(kind)
    with _lock:
        if ways.setdefault(kind, way) is not way or reader is None:
            return
        offset = _free_row(native.TYPES, native.TYPE_BYTES, native.MAX_TYPES)
        if offset is None:
            ways[kind] = "Python road: more array types than the table holds"
            return
        _keep.append(kind)
        _write(offset, id(kind), reader, current_stream, writable)


def _way_to_read(kind: type) -> tuple[str, int | None, int]:
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    if kind is DeviceNDArray:
        return "native: Numba's attributes", native.READ_NUMBA, 0
    cupy = sys.modules.get("cupy")
    if cupy is not None and kind is getattr(cupy, "ndarray", None):
        find_stream = cupy.cuda.get_current_stream
        _keep.append(find_stream)
        return "native: CuPy's attributes", native.READ_CUPY, id(find_stream)
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return "Python road: the type has no __dlpack_c_exchange_api__", None, 0
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        # version, previous API, allocator, managed from object, managed to object, DLTensor from object, stream
        table = (ctypes.c_uint64 * 7).from_address(pointer(capsule, b"dlpack_exchange_api"))
    except ValueError as error:
        return f"Python road: {error}", None, 0
    major, minor = table[0] & 0xFFFFFFFF, table[0] >> 32
    if major != 1 or not table[5] or not table[6]:
        return f"Python road: DLPack {major}.{minor}'s exchange table lacks what is needed", None, 0
    return f"native: DLPack {major}.{minor} exchange table", table[5], table[6]


def remember_plan(
    key: tuple[int, ...], context: int, bands: tuple[tuple[int, int], ...], layout: StoreLayout, early_launch: bool
) -> None:
    """Let calls with this key (contract.PlanKey), made while `context` is current, take the fast road.

    `bands` are (largest batch, CUfunction of that context): launching one costs 0.1 us less than a CUkernel, which
    fits any context.
    """
    with _lock:
        first, second = _key_words(*key)
        if len(bands) > native.MAX_BANDS:
            return
        used = int(np.count_nonzero(_state[(native.PLANS + native.PLAN_USED) // 8 :: native.PLAN_BYTES // 8]))
        if used >= native.MAX_PLANS // 2:  # half full: the search stays short, and the Python road serves the rest
            return
        slot = _python_plan_home(first, second)
        while _state[(native.PLANS + native.PLAN_BYTES * slot + native.PLAN_USED) // 8]:
            slot = (slot + 1) % native.MAX_PLANS
        row = native.PLANS + native.PLAN_BYTES * slot
        attributes = EARLY_LAUNCH if early_launch else 0
        _write(row, first, second, context, layout.block, layout.groups, layout.parts, attributes)
        _write(row + native.PLAN_BANDS, *(word for band in bands for word in band))
        _write(row + native.PLAN_USED, 1)


def _forget_plans() -> None:
    """In a child of fork the parent's contexts are lost: the Python road says so."""
    global _lock
    _lock = threading.RLock()  # the thread that held the parent's is not here to let it go
    _state[native.PLANS // 8 :] = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_plans)


def _key_words(
    k_row_bytes: int,
    v_row_bytes: int,
    k_align: int,
    v_align: int,
    num_split: int,
    index_bits: int,
    device: int,
    skipping: int,
) -> tuple[int, int]:
    first = k_row_bytes | v_row_bytes << 32
    return first, k_align | v_align << 8 | num_split << 16 | index_bits << 24 | device << 32 | skipping << 56


def _python_plan_home(first: int, second: int) -> int:
    with np.errstate(over="ignore"):
        return int(native.plan_home.py_func(np.int64(first), np.int64(second)))


def _remember_dtypes() -> None:
    kinds = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
    names = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
    for name in (*names, "complex64", "complex128", "bool"):
        dtype = np.dtype(name)
        _keep.append(dtype)
        _write(
            _free_row(native.DTYPES, native.DTYPE_BYTES, native.MAX_DTYPES) or native.DTYPES,
            id(dtype),
            kinds[dtype.kind] | dtype.itemsize * 8 << 8 | 1 << 16,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Coming into force


_functions: dict[int, Callable[..., Any]] = {}
_entry = 0
_status = ""
_builder: threading.Thread | None = None


def status() -> str:
    """Whether the fast road is in force, and if not, why."""
    if _status:
        return _status
    reason = _obstacle()
    return f"off: {reason}" if reason else "not built yet: the first call on a GPU builds it"


def attach(row: int, function: Callable[..., Any]) -> None:
    """Let the fast road take the calls of a Python function, which has the parameters of native.PARAMETERS[row].

    One that had this row before (its module has been reloaded) is an ordinary function again.
    """
    with _lock:
        before = _functions.get(row, function)
        _functions[row] = function
        if _entry:
            if before is not function:
                _uninstall(row, before)
            _install(row, function, _entry)


def start() -> None:
    """Build in the background, once; the Python road serves meanwhile. Does nothing where the road cannot be."""
    global _builder, _status
    with _lock:
        if _builder is not None:
            return
        _builder = threading.Thread(target=_build, name="numba_kvcache native road")
        reason = _obstacle()
        if reason is not None:
            _status = f"off: {reason}"
            return
        _status = "being built"
        try:
            _builder.start()
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            _status = f"off: {error}"


def wait() -> None:
    """Return once the road that `start` began is in force, or is known not to be."""
    start()
    if _builder is not None and _builder.is_alive():
        _builder.join()


def _obstacle() -> str | None:
    if not settings.native():
        return "NUMBA_KVCACHE_NATIVE is 0"
    if settings.SIMULATED:
        return "the simulator launches through Numba"
    if sys.implementation.name != "cpython":
        return f"{sys.implementation.name} has no vectorcall of CPython's"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded Python lays out objects in another way, and has no GIL to guard the tables"
    if sys.version_info < (3, 12):
        return f"Python {platform.python_version()} lacks PyFunction_SetVectorcall (new in 3.12)"
    if sys.maxsize < 2**63 - 1:
        return "a 64-bit Python is needed"
    main = ctypes.pythonapi.PyInterpreterState_Main
    here = ctypes.pythonapi.PyInterpreterState_Get
    main.restype = here.restype = ctypes.c_void_p
    if main() != here():
        return "sub-interpreters do not share objects"
    return None


def _build() -> None:
    global _entry, _status
    try:
        entry = compile_entry()
        with _lock:
            _entry = entry
            for row in native.PARAMETERS:
                if row in _functions:
                    _install(row, _functions[row], _entry)
    except Exception as error:  # whatever Numba or CPython changed, the Python road stands
        _status = f"off: {type(error).__name__}: {error}"
    else:
        _status = "on"


def compile_entry() -> int:
    """Fill the table's constants and compile `native.entry`, or load it from Numba's cache; returns its address."""
    from numba.cuda.cudadrv.driver import OwnedPointer

    _write(native.SHAPE, *_interned(native.ATTRIBUTES))
    for row, names in native.PARAMETERS.items():
        _write(row + native.FUNCTION_NAMES, *_interned(names))
    _write(native.NONE, id(None), id(int), id(Exception), id(OwnedPointer))
    _write(native.DEVICE_COUNT, driver.device_count())
    if _state[native.DTYPES // 8] == 0:
        _remember_dtypes()
    _register()
    signature = types.int64(types.int64, types.int64, types.int64, types.int64)
    try:
        compiled = cfunc(signature, cache=_numbas_cache_is_ours())(native.entry)
    except Exception:  # Numba finds no folder that it may write to, or a damaged file in it
        compiled = cfunc(signature)(native.entry)
    _keep.append(compiled)
    return int(compiled.address)


def _numbas_cache_is_ours() -> bool:
    """Whether the folder where Numba would keep the code is as safe as the package's source.

    Beside the source it is by definition: who can write there can put a .pyc in Python's way. In a folder of its own
    (NUMBA_CACHE_DIR, or the user's cache folder), what is loaded is a pickle, which nobody else may have written.
    """
    from numba.core.caching import FunctionCache

    folder = Path(FunctionCache(native.entry).cache_path)
    return folder == Path(native.__file__).parent / "__pycache__" or disk_cache.only_ours(folder)


def _register() -> None:
    symbols = {
        "launch": "cuLaunchKernelEx",
        "current_context": "cuCtxGetCurrent",
        "pointer_attribute": "cuPointerGetAttribute",
    }
    for name, procedure in symbols.items():
        llvmlite.binding.add_symbol(f"numba_kvcache_{name}", driver.procedure(procedure))
    llvmlite.binding.add_symbol("numba_kvcache_state", _state.ctypes.data)


def _interned(names: tuple[str, ...]) -> list[int]:
    """Addresses of the names, 0 for an empty one; CPython interns keywords, so that identity finds them."""
    strings = [sys.intern(name) for name in names]
    _keep.extend(strings)
    return [id(string) if string else 0 for string in strings]


def _install(row: int, function: Callable[..., Any], entry: int) -> None:
    api = ctypes.pythonapi
    api.PyVectorcall_Function.restype, api.PyVectorcall_Function.argtypes = ctypes.c_void_p, [ctypes.py_object]
    api.PyFunction_SetVectorcall.restype = None
    api.PyFunction_SetVectorcall.argtypes = [ctypes.py_object, ctypes.c_void_p]
    if api.PyVectorcall_Function(function) == entry:  # else it would be its own Python road
        return
    _write(row, id(function), api.PyVectorcall_Function(function), function.__code__.co_argcount)
    api.PyFunction_SetVectorcall(function, entry)


def _uninstall(row: int, function: Callable[..., Any]) -> None:
    if _state[row // 8] == id(function):
        road = int(_state[(row + native.FUNCTION_ROAD) // 8])
        ctypes.pythonapi.PyFunction_SetVectorcall(function, road)
