"""Any array -> one small view: address, shape, strides in bytes, dtype, device; and the stream its library works on.

Nothing is copied, no memory is allocated and no stream is waited for. One reader per kind of array, chosen once per
type:

====================================  ==================================================================================
kind                                  read through
====================================  ==================================================================================
torch tensors                         their attributes: DLPack refuses tensors that require grad, and the array
                                      interface knows neither bf16 nor fp8
Numba device arrays, CuPy             their attributes
other array interfaces                `__cuda_array_interface__`
other producers                       `__dlpack__`, read here because cuda.core's view has no bf16 and no fp8 dtype
JAX                                   `__dlpack__`, never to be written: JAX arrays do not change
on the simulator                      NumPy arrays, `cuda.to_device` arrays, torch CPU tensors and DLPack producers
                                      whose memory the host reaches
====================================  ==================================================================================
"""

import ctypes
import functools
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import driver
from .settings import SIMULATED

__all__ = [
    "SIMULATED_DEVICE",
    "ArrayFacts",
    "ArrayView",
    "View",
    "array_facts",
    "find_reader",
    "never_readonly",
    "read_array",
    "readers",
    "stream_finder",
    "stream_handle",
]

SIMULATED_DEVICE = -1


@dataclass(frozen=True, eq=False)
class ArrayFacts:
    """All but the address of an array; made by `array_facts`, so that equal facts are one object.

    `dtype` is a name that is equal for equal types of all libraries, e.g. "bfloat16". `strides` are in bytes.
    `device` is a CUDA ordinal, or SIMULATED_DEVICE.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: int
    readonly: bool


# contract.py looks five of them up per call, which by identity costs a fifth of what hashing their tuples does.
@functools.lru_cache(maxsize=4096)
def array_facts(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, itemsize: int, device: int, readonly: bool
) -> ArrayFacts:
    """The ArrayFacts of these values."""
    return ArrayFacts(shape, strides, dtype, itemsize, device, readonly)


View = tuple[int, ArrayFacts]
"""What the rest of the package knows of an array: its address and its facts. (Plain: five are made per call.)"""


class ArrayView(NamedTuple):
    """A View with names."""

    address: int
    facts: ArrayFacts

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dimension."""
        return self.facts.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from element to element, per dimension."""
        return self.facts.strides

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self.facts.dtype

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.facts.itemsize

    @property
    def device(self) -> int:
        """CUDA ordinal."""
        return self.facts.device

    @property
    def readonly(self) -> bool:
        """Whether writing is refused."""
        return self.facts.readonly


Reader = Callable[[str, Any, int], View]
"""(name, array, stream handle) -> view."""

readers: dict[type, Reader] = {}
"""How arrays of each type are read, as far as `find_reader` was asked."""

unreported: list[type] = []
"""Types that have been read and that dispatch.py has not yet told the fast road of."""


def read_array(name: str, array: Any, stream: int) -> ArrayView:
    """The view of `array`, which the caller will use on `stream` (a handle; only DLPack producers are told).

    Raises
    ------
    TypeError
        Not a device array.
    ValueError
        A device array that cannot be seen as plain strided memory: masked, sparse, lazily conjugated or negated.
    """
    reader = readers.get(type(array)) or find_reader(name, array)
    return ArrayView(*reader(name, array, stream))


def find_reader(name: str, array: Any) -> Reader:
    """The reader of arrays of this one's type, from now on in `readers`; TypeError if it is no device array."""
    reader = readers[type(array)] = _choose_reader(name, array)
    unreported.append(type(array))
    return reader


def _choose_reader(name: str, array: Any) -> Reader:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _read_torch
    if SIMULATED and (isinstance(array, np.ndarray) or getattr(array, "__cuda_ndarray__", False)):
        return _read_simulated
    if getattr(array, "__cuda_ndarray__", False) and hasattr(array, "device_ctypes_pointer"):
        return _read_numba
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return _read_cupy
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array) and hasattr(array, "__dlpack_device__"):
        return _read_jax  # not by the array interface, which JAX's bf16 and fp8 arrays lack
    if getattr(array, "__cuda_array_interface__", None) is not None:
        return _read_cuda_array_interface
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _read_dlpack
    raise _not_a_device_array(name, array)


def _not_a_device_array(name: str, array: Any, where: str = "") -> TypeError:
    kind = f"{type(array).__module__}.{type(array).__qualname__}".removeprefix("builtins.")
    if SIMULATED:
        cure = "the simulator takes NumPy arrays, cuda.to_device arrays, torch CPU tensors and DLPack on the host"
    else:
        cure = "copy it to the GPU first (numba.cuda.to_device, tensor.cuda())"
        try:
            driver.initialise()
        except RuntimeError as error:
            cure += f"; {error}"
    return TypeError(f"{name} must be an array that a kernel can reach, got {kind}{where}; {cure}")


def _read_torch(name: str, tensor: Any, stream: int) -> View:
    try:
        address, strides = tensor.data_ptr(), tensor.stride()
    except RuntimeError as error:  # sparse, fake and functional tensors own no memory
        raise ValueError(
            f"{name} is a torch tensor without plain strided memory: {error} (Where a graph is traced, as torch.export "
            "does, import numba_kvcache.torch and call torch.ops.numba_kvcache.store_kvcache.)"
        ) from error
    known = _torch_facts(tensor.shape, strides, tensor.dtype, tensor.device)
    if known is None:
        raise _not_a_device_array(name, tensor, f" on device {tensor.device}")
    facts, is_complex = known
    if tensor.is_neg() or (is_complex and tensor.is_conj()):
        raise ValueError(f"{name} is a lazily conjugated or negated view; materialise it (resolve_conj, resolve_neg)")
    return address, facts


@functools.lru_cache(maxsize=4096)
def _torch_facts(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, device: Any
) -> tuple[ArrayFacts, bool] | None:
    """What a view holds besides its address, and whether it is complex; None off the GPU."""
    if device.type == "cuda":
        ordinal = device.index
    elif SIMULATED and device.type == "cpu":
        ordinal = SIMULATED_DEVICE
    else:
        return None
    name, itemsize = str(dtype).removeprefix("torch."), dtype.itemsize
    in_bytes = tuple([stride * itemsize for stride in strides])
    return array_facts(tuple(shape), in_bytes, name, itemsize, ordinal, False), name.startswith("complex")


def _read_simulated(name: str, array: Any, stream: int) -> View:
    if array.dtype.hasobject or array.dtype.kind == "T":
        raise TypeError(f"{name} must hold plain data, got dtype {array.dtype}, whose elements are references")
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"{name} is a masked array; pass its data and leave masked rows out of the batch")
    return array.ctypes.data, array_facts(
        tuple(array.shape),
        tuple(array.strides),
        str(array.dtype),
        array.dtype.itemsize,
        SIMULATED_DEVICE,
        not array.flags.writeable,
    )


def _read_numba(name: str, array: Any, stream: int) -> View:
    address = array.device_ctypes_pointer.value
    device = _device_of(name, address, array.shape)
    # Mapped and managed memory is an ndarray, which the host can lock.
    readonly = isinstance(array, np.ndarray) and not array.flags.writeable
    return address or 0, _numpy_facts(array.shape, array.strides, array.dtype, device, readonly)


def _read_cupy(name: str, array: Any, stream: int) -> View:
    data = array.data
    return data.ptr, _numpy_facts(array.shape, array.strides, array.dtype, data.device_id, False)


@functools.lru_cache(maxsize=4096)
def _numpy_facts(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, device: int, readonly: bool
) -> ArrayFacts:
    return array_facts(shape, strides, str(dtype), dtype.itemsize, device, readonly)


def _read_cuda_array_interface(name: str, array: Any, stream: int) -> View:
    try:
        interface = array.__cuda_array_interface__
    except AttributeError as error:  # of a type whose arrays may be on the host as well
        raise _not_a_device_array(name, array) from error
    try:
        masked = interface.get("mask") is not None
        # Integers of other types would come back from caches in the place of equal plain ones.
        shape = tuple(map(operator.index, interface["shape"]))
        dtype, itemsize = _numpy_dtype(str(interface["typestr"]), repr(interface.get("descr")))
        strides = interface.get("strides")
        strides = _dense_strides(shape, itemsize) if strides is None else tuple(map(operator.index, strides))
        address, readonly = interface["data"]
        address = 0 if address is None else operator.index(address)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TypeError(f"{name} has a malformed __cuda_array_interface__: {error!r}") from error
    if masked:
        raise ValueError(f"{name} is a masked array; pass its data and leave masked rows out of the batch")
    if len(strides) != len(shape):
        raise ValueError(f"{name} must have a stride per dimension, got shape {shape} and strides {strides}")
    device = _device_of(name, address, shape)
    return address, array_facts(shape, strides, dtype, itemsize, device, bool(readonly))


@functools.lru_cache(maxsize=256)
def _numpy_dtype(typestr: str, descr: str) -> tuple[str, int]:
    dtype = np.dtype(typestr)
    # Two record types of one size share a typestr; what tells them apart is the field list.
    name = str(dtype) if dtype.kind != "V" or descr == "None" else f"{typestr} {descr}"
    return name, dtype.itemsize


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * extent)
    return tuple(reversed(strides))[: len(shape)]


def _device_of(name: str, address: int | None, shape: tuple[int, ...]) -> int:
    if SIMULATED:
        return SIMULATED_DEVICE
    if not address or 0 in shape:
        return driver.current_device()  # an array without memory is on every device
    device = driver.pointer_device(address)
    if device is None:
        raise TypeError(f"{name} must be an array that a kernel can reach, but {address:#x} is no CUDA address")
    return device


class _DLDevice(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("ordinal", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# The DLPack 1.3 header: device kinds and type codes.
_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
_DL_REACHED = {_DL_CUDA_HOST, _DL_CUDA_MANAGED, _DL_CPU if SIMULATED else _DL_CUDA}
_DL_READ_ONLY, _DL_IS_COPIED = 1, 2
_DL_PREFIXES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_DL_NAMES = {
    6: "bool",
    7: "float8_e3m4",
    8: "float8_e4m3",
    9: "float8_e4m3b11fnuz",
    10: "float8_e4m3fn",
    11: "float8_e4m3fnuz",
    12: "float8_e5m2",
    13: "float8_e5m2fnuz",
    14: "float8_e8m0fnu",
    15: "float6_e2m3fn",
    16: "float6_e3m2fn",
    17: "float4_e2m1fn",
}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.restype, _capsule_is_valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]


def _read_dlpack(name: str, array: Any, stream: int) -> tuple[int, ArrayFacts]:
    ordinal, capsule = _export(name, array, _dlpack_stream(stream))
    # The capsule is read and dropped, which releases it; the caller's array keeps the memory alive.
    flags, tensor = _open_capsule(name, capsule)
    if flags & _DL_IS_COPIED:
        raise ValueError(f"{name} was exported as a copy; a store must reach the array itself")
    if not 0 <= tensor.ndim <= 64 or (tensor.ndim and not tensor.shape):
        raise ValueError(f"{name} has a malformed DLPack export: {tensor.ndim} dimensions")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    bits = tensor.dtype.bits * tensor.dtype.lanes
    if bits % 8:
        raise TypeError(f"{name} has elements of {bits} bits; pack them into whole bytes first")
    itemsize = bits // 8
    if tensor.strides:
        strides = tuple([stride * itemsize for stride in tensor.strides[: tensor.ndim]])
    else:  # no strides means compact row-major
        strides = _dense_strides(shape, itemsize)
    return (tensor.data or 0) + tensor.byte_offset, array_facts(
        shape,
        strides,
        _dlpack_dtype_name(tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes),
        itemsize,
        SIMULATED_DEVICE if SIMULATED else ordinal,
        bool(flags & _DL_READ_ONLY),
    )


def _read_jax(name: str, array: Any, stream: int) -> tuple[int, ArrayFacts]:
    if array.is_deleted():
        raise ValueError(f"{name} is a JAX array without memory: it has been deleted, or donated to a computation")
    address, facts = _read_dlpack(name, array, stream)
    # By rule and not by flag: JAX before 0.12 exports no flags.
    return address, array_facts(facts.shape, facts.strides, facts.dtype, facts.itemsize, facts.device, True)


def _export(name: str, array: Any, stream: int | None) -> tuple[int, Any]:
    """The device's ordinal and a capsule; where that is refused (several devices hold the array, say), a ValueError."""
    try:
        kind, ordinal = array.__dlpack_device__()
        if kind not in _DL_REACHED:
            where = " in host memory" if kind == _DL_CPU else f" on DLPack device ({int(kind)}, {ordinal})"
            raise _not_a_device_array(name, array, where)
        try:
            return ordinal, array.__dlpack__(stream=stream, max_version=(1, 3))
        except TypeError:  # a producer of before DLPack 1.0
            return ordinal, array.__dlpack__(stream=stream)
    except BufferError as error:
        raise ValueError(f"{name} cannot be exported through DLPack: {error}") from error


def _dlpack_stream(stream: int) -> int | None:
    """The array API's stream number: 0 is ambiguous there, so the legacy default stream is 1."""
    return None if SIMULATED else stream or 1


def _open_capsule(name: str, capsule: Any) -> tuple[int, _DLTensor]:
    if _capsule_is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major != 1:
            raise TypeError(f"{name} speaks DLPack {managed.major}.{managed.minor}; this package knows 1.x")
        return managed.flags, managed.tensor
    if not _capsule_is_valid(capsule, b"dltensor"):
        raise TypeError(f"{name} must export a fresh DLPack capsule, got {capsule!r}")
    return 0, _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))


@functools.lru_cache(maxsize=256)
def _dlpack_dtype_name(code: int, bits: int, lanes: int) -> str:
    name = f"{_DL_PREFIXES[code]}{bits}" if code in _DL_PREFIXES else _DL_NAMES.get(code, f"dlpack{code}_{bits}")
    return name if lanes == 1 else f"{name}_x{lanes}"


def never_readonly(kind: type) -> bool:
    """Whether no array of this type, which has been read before, can be read-only: those of torch, Numba and CuPy."""
    return readers[kind] in (_read_torch, _read_cupy) or getattr(kind, "__cuda_ndarray__", False)


def stream_finder(array: Any) -> Callable[[], int]:
    """What tells, at any time, the handle of the stream on which the library that owns `array` works.

    torch and CuPy: their current stream on the array's device. Numba: its default stream. Other producers of the
    array interface: the stream that they export. All else: the default stream.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if not array.is_cuda:
            return _default_stream
        return functools.partial(torch._C._cuda_getCurrentRawStream, array.get_device())
    if getattr(array, "__cuda_ndarray__", False):
        return _default_stream
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        find, device = cupy.cuda.get_current_stream, array.data.device_id
        return lambda: int(find(device).ptr)
    interface = getattr(array, "__cuda_array_interface__", None)
    exported = interface.get("stream") if isinstance(interface, dict) else None
    return _default_stream if exported is None else functools.partial(stream_handle, exported)


def _default_stream() -> int:
    """The legacy default stream."""
    return 0


def stream_handle(stream: Any) -> int:
    """The handle of a stream that the caller named: a Numba, torch, CuPy or cuda.core stream, or a plain handle.

    Raises
    ------
    TypeError
        Not a stream.
    """
    handle = _stream_number(stream)
    if not 0 <= handle < 2**64:
        raise ValueError(f"stream must be a handle, and handles are not negative and have 64 bits, got {handle}")
    return handle


def _stream_number(stream: Any) -> int:
    if isinstance(stream, int | np.integer) and not isinstance(stream, bool):
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        try:
            _version, handle = protocol() if callable(protocol) else protocol
            return operator.index(handle)
        except (TypeError, ValueError) as error:
            raise TypeError(f"stream has a malformed __cuda_stream__: {error}") from error
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy of before the protocol
        handle = getattr(stream, attribute, None)
        if handle is not None:
            return int(handle)
    if SIMULATED and hasattr(stream, "synchronize"):
        return 0  # the simulator's streams have no handle
    raise TypeError(f"stream must be a CUDA stream or an integer handle, got {type(stream).__qualname__}")
