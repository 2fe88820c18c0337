"""Calls that were made before, but with other addresses: what they launch is known, so nothing is checked twice.

A call's *name* holds all that the checks of contract.py look at, and all that decides on the launch, but for the
addresses; and of those the bits that say how they are aligned. Names are equal only where all of that is, so an equal
name proves every check but that the arrays have memory, which is asked anew. What has no name takes the whole road,
where everything that can be wrong is named: arrays of several or of other types, tensors that are lazily negated or
without memory, integers that are not plain.

Decoding makes the same call over and over. Without the driver's own time it costs a quarter of what the whole road does
with torch tensors, a sixth with Numba arrays.
"""

import sys
from collections.abc import Callable
from typing import Any

from . import driver
from .launch import ReadyLaunch
from .torch_guards import TorchGuards, find_guards

__all__ = ["Name", "known", "name_call", "remember_call", "remember_type"]

Name = tuple[Any, ...]

known: dict[Name | None, ReadyLaunch] = {}
"""What calls of these names launch. (None names no call.)"""

# A few KiB each. Past this many, all are forgotten: whoever makes so many different calls pays for the whole road then,
# once per call. (Every use of `known` is a single operation of the dict, for threads and finalisers.)
MAX_KNOWN = 1024


def remember_call(name: Name, ready: ReadyLaunch, arrays: tuple[Any, ...]) -> None:
    """Let calls of this name launch `ready` from now on; `arrays` are those of the call that had it."""
    _remember(name, ready)
    facts, *options = name
    # Facts are a tuple; in a name with a guard, the guard is there already. (The store is done: no KeyError from here.)
    if _torch_guards is not None and _readers.get(type(arrays[0])) == _torch_guards.read and type(facts) is tuple:
        guard = _torch_guards.add(facts, arrays)
        if guard is not None:
            _remember((guard, *options), ready)


def _remember(name: Name, ready: ReadyLaunch) -> None:
    if name not in known and len(known) >= MAX_KNOWN:
        known.clear()
    known[name] = ready


def name_call(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    indices: Any,
    num_split: Any,
    size_limit: Any,
    skip_index: Any,
) -> tuple[Name | None, tuple[int, ...]]:
    """The name of this call, None where it has none, and the addresses of its arrays."""
    read = _readers.get(type(k_cache))
    if read is None:
        return _UNNAMED
    # 0, False, 0.0 and NumPy's zeros are equal, and not alike.
    if not (
        type(num_split) is int
        and (type(size_limit) is int or size_limit is None)
        and (skip_index is None or type(skip_index) is int)
    ):
        return _UNNAMED
    call = read(k, v, k_cache, v_cache, indices)
    if call is None:
        return _UNNAMED
    facts, addresses = call  # each address None, or within [0, 2**64)
    k_at, v_at, k_cache_at, v_cache_at, indices_at = addresses
    if not (k_at and v_at and k_cache_at and v_cache_at and indices_at):
        return _UNNAMED
    k_alignment, v_alignment = (k_at | k_cache_at) & 15, (v_at | v_cache_at) & 15
    return (facts, num_split, size_limit, skip_index, k_alignment, v_alignment, indices_at & 7), addresses


_UNNAMED: tuple[None, tuple[int, ...]] = None, ()

Reader = Callable[[Any, Any, Any, Any, Any], tuple[Any, tuple[int, ...]] | None]
"""(k, v, k_cache, v_cache, indices) -> (all that arrays.py reads of them, or what stands for it; addresses).

None if they are not of one type, or the whole road must look at them. k_cache is of the reader's type, the others may
be anything.
"""

_readers: dict[type, Reader] = {}
"""By exact type: a subclass may answer otherwise, or have its own reasons to be refused."""


def remember_type(kind: type) -> None:
    """Name calls with arrays of exactly this type, if it is one of those whose arrays can be read all at once."""
    global _torch_guards
    from numba.cuda.cudadrv.devicearray import DeviceNDArray

    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and kind is torch.Tensor:
        _torch_guards = find_guards(_read_torch, most=MAX_KNOWN)
        _readers[kind] = _read_torch if _torch_guards is None else _torch_guards.read
    elif kind is DeviceNDArray:
        _readers[kind] = _numba_reader()
    elif cupy is not None and kind is cupy.ndarray:
        _readers[kind] = _read_cupy


_torch_guards: TorchGuards | None = None


# Written out, one flat tuple: loops, map() and attrgetter over the five take longer than the attributes themselves.


def _of_one_type(k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any) -> bool:
    kind = type(k_cache)
    return type(k) is kind and type(v) is kind and type(v_cache) is kind and type(indices) is kind


def _read_torch(k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any) -> Any:
    if not _of_one_type(k, v, k_cache, v_cache, indices):
        return None
    if k.dtype.is_complex:  # perhaps lazily conjugated: one more question for each, for what nobody stores
        return None
    try:
        addresses = k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), indices.data_ptr()
        if k.is_neg() or v.is_neg() or k_cache.is_neg() or v_cache.is_neg() or indices.is_neg():
            return None
        facts = (
            k.shape, v.shape, k_cache.shape, v_cache.shape, indices.shape,
            # Contiguity and shape say what strides contract.py looks at: those of dimensions longer than 1. Asking and
            # looking it up takes 55 ns, strides 90.
            k.is_contiguous() or k.stride(), v.is_contiguous() or v.stride(),
            k_cache.is_contiguous() or k_cache.stride(), v_cache.is_contiguous() or v_cache.stride(),
            indices.is_contiguous() or indices.stride(),
            k.dtype, v.dtype, k_cache.dtype, v_cache.dtype, indices.dtype,
            k.device, v.device, k_cache.device, v_cache.device, indices.device,
        )  # fmt: skip
    except RuntimeError:  # sparse, fake and functional tensors own no memory
        return None
    return facts, addresses


def _numba_reader() -> Reader:
    from numba.cuda.cudadrv.driver import OwnedPointer

    def read(k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any) -> Any:
        if not _of_one_type(k, v, k_cache, v_cache, indices):
            return None
        k_memory, v_memory, k_cache_memory, v_cache_memory, indices_memory = (
            k.gpu_data, v.gpu_data, k_cache.gpu_data, v_cache.gpu_data, indices.gpu_data
        )  # fmt: skip
        if not (
            type(k_memory) is OwnedPointer
            and type(v_memory) is OwnedPointer
            and type(k_cache_memory) is OwnedPointer
            and type(v_cache_memory) is OwnedPointer
            and type(indices_memory) is OwnedPointer
        ):
            return None
        addresses = (
            k_memory.device_ctypes_pointer.value,
            v_memory.device_ctypes_pointer.value,
            k_cache_memory.device_ctypes_pointer.value,
            v_cache_memory.device_ctypes_pointer.value,
            indices_memory.device_ctypes_pointer.value,
        )
        # What Numba's own memory manager allocated is on the only GPU if there is only one, as for the fast road.
        device = 0 if driver.device_count() == 1 else _common_device(addresses)
        if device is None:
            return None
        facts = (
            k.shape, v.shape, k_cache.shape, v_cache.shape, indices.shape,
            k.strides, v.strides, k_cache.strides, v_cache.strides, indices.strides,
            k.dtype, v.dtype, k_cache.dtype, v_cache.dtype, indices.dtype,
            device,
        )  # fmt: skip
        return facts, addresses

    return read


def _common_device(addresses: tuple[int, ...]) -> int | None:
    """The device on which all of this memory is, if it is memory and on one device."""
    if not all(addresses):
        return None
    device, *others = {driver.pointer_device(address) for address in addresses}
    return None if others else device


def _read_cupy(k: Any, v: Any, k_cache: Any, v_cache: Any, indices: Any) -> Any:
    if not _of_one_type(k, v, k_cache, v_cache, indices):
        return None
    k_memory, v_memory, k_cache_memory, v_cache_memory, indices_memory = (
        k.data, v.data, k_cache.data, v_cache.data, indices.data
    )  # fmt: skip
    addresses = k_memory.ptr, v_memory.ptr, k_cache_memory.ptr, v_cache_memory.ptr, indices_memory.ptr
    if not 0 <= min(addresses) <= max(addresses) < 2**64:  # CuPy takes any number for an address
        return None
    facts = (
        k.shape, v.shape, k_cache.shape, v_cache.shape, indices.shape,
        k.strides, v.strides, k_cache.strides, v_cache.strides, indices.strides,
        k.dtype, v.dtype, k_cache.dtype, v_cache.dtype, indices.dtype,
        k_memory.device_id, v_memory.device_id, k_cache_memory.device_id, v_cache_memory.device_id,
        indices_memory.device_id,
    )  # fmt: skip
    return facts, addresses
