"""The quantised store: dispatch.py's road once more, for rows that become fp8 on their way into the caches.

Checks that the plain store has too are contract.py's; what is here is dtypes, row widths and scales. There is no fast
road on the host, and no call is known: one costs what a plain one of a new shape does on the Python road.
"""

import ctypes
import functools
import math
import numbers
from dataclasses import replace
from typing import Any, NamedTuple

from . import driver
from .arrays import ArrayFacts, ArrayView, read_array, stream_finder, stream_handle
from .compiler import loaded_kernel
from .contract import (
    ROW_ARRAYS,
    Rows,
    check_addresses,
    check_arrangement,
    check_index_type,
    check_shapes,
    check_skip_index,
)
from .dispatch import Plan, simulator_lock, use_early_launch
from .fp8 import FORMATS
from .launch import launcher
from .layout import INDEX_BITS, MAX_ROW_BYTES, StoreLayout, integer, plan_store, strategies
from .quantised_kernel import ITEMSIZES, QuantisedSpec, Side
from .settings import SIMULATED

__all__ = ["store_kvcache_fp8"]

# The conversion is one instruction from here on; below, it is some twenty of integer arithmetic.
CONVERSION_SINCE = (8, 9)

_DTYPES = {to.dtype: name for name, to in FORMATS.items()}


def store_kvcache_fp8(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    indices: Any,
    k_scale: Any,
    v_scale: Any,
    size_limit: int | None = 0,
    *,
    dtype: str | None = None,
    stream: Any = None,
    skip_index: int | None = None,
) -> None:
    """Write row i of `k` and `v`, over their scales, as fp8 into slot `indices[i]` of two paged caches, in one launch.

    ``k_cache[indices[i], :] = fp8(k[i, :] / k_scale)`` for every i, and V alike. The quotient is IEEE's in float32; it
    is clipped to the finite range of the format and rounded to the nearest value of it, ties to even. That is bit for
    bit ``(k.float() / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)`` of torch on a GPU, where `scale` is a
    float32 tensor on it. So an infinite quotient becomes the largest value with its sign, a negative zero stays one,
    and any NaN becomes 0x7F. A scale of 0, infinity, NaN or below 0 is taken as it is.

    Layout, indices, streams, capture and early launch are as for store_kvcache.

    Parameters
    ----------
    k : device array, shape (B, D) or (B, H, D), bfloat16, float16 or float32
        New keys, one row per token, of a multiple of 4 elements. Any row stride, dense rows, 4-byte aligned.
    v : device array, shape (B, Dv) or (B, Hv, Dv)
        New values, of k's dtype. Row shape and strides may differ from k's.
    k_cache : device array, shape (N, *row) or (P, S, *row), where row is k.shape[1:]
        Slots for keys, or pages of S slots, all of them one stride apart; float8_e4m3fn, float8_e5m2 or uint8. Rows
        must not overlap, and are 4-byte aligned.
    v_cache : device array, shape (Nv, *row) or (Pv, Sv, *row), where row is v.shape[1:]
        Slots for values, of k_cache's dtype.
    indices : device array, shape (B,), int32 or int64
        The slot of each row. A slot outside [0, size_limit) fails an assert on the device.
    k_scale, v_scale : float, or device array of one float32
        What K and V are divided by. An array is read by the kernel, when it runs; a float is rounded to float32.
    size_limit : int, optional
        The bound on slots. 0 or None: the smaller cache's rows.
    dtype : {"e4m3", "e5m2"}, optional
        What the bytes of the caches mean. None: as the caches' own dtype says, so caches of uint8 need it.
    stream : optional
        As for store_kvcache.
    skip_index : int, optional
        Rows aimed at this slot are not written, even if it is out of bounds.

    Raises
    ------
    TypeError
        An argument of the wrong kind: a host array, a dtype that is not named above, a scale that is neither.
    ValueError
        An argument of the wrong value: shape, stride, alignment, device, limit, a read-only cache, caches of uint8
        without `dtype`.
    RuntimeError
        No usable GPU, or the driver refused the launch.

    Examples
    --------
    >>> store_kvcache_fp8(k, v, k_cache, v_cache, slots, 0.5, layer.v_scale, dtype="e4m3")  # doctest: +SKIP
    """
    handle = stream_finder(k_cache)() if stream is None else stream_handle(stream)
    request = check_quantised_store(
        read_array("k", k, handle),
        read_array("v", v, handle),
        read_array("k_cache", k_cache, handle),
        read_array("v_cache", v_cache, handle),
        read_array("indices", indices, handle),
        read_scale("k_scale", k_scale, handle),
        read_scale("v_scale", v_scale, handle),
        size_limit,
        dtype,
        skip_index,
    )
    if request is None:
        return
    if SIMULATED:
        _simulate(request)
        return
    pushed = driver.push_device(request.key.device)
    try:
        plan = _plans.get(request.key) or _make_plan(request.key)
        _launch(plan.launch(request.batch), handle, request.arguments)
    finally:
        if pushed:
            driver.pop_device()


class QuantisedKey(NamedTuple):
    """What decides which kernel a call launches."""

    widths: tuple[int, int]  # elements per row of K and of V
    source: str
    to: str
    k: Side
    v: Side
    index_bits: int
    skipping: bool
    device: int


class QuantisedRequest(NamedTuple):
    """A checked, non-empty call; `arguments` are those of QuantisedSpec.parameters."""

    batch: int
    key: QuantisedKey
    arguments: tuple[int, ...]


class Scale(NamedTuple):
    """The bits of a float32, or the address of one on `device`; both are what the kernel takes."""

    value: int
    device: int | None = None

    @property
    def on_device(self) -> bool:
        """Whether `value` is an address."""
        return self.device is not None


def read_scale(name: str, scale: Any, stream: int) -> Scale:
    """The scale that a caller gave: a number, or an array of one float32."""
    if isinstance(scale, numbers.Real) and not isinstance(scale, bool):
        try:
            number = float(scale)
        except OverflowError as error:
            raise ValueError(f"{name} must be within the range of a float, got a larger integer or fraction") from error
        return Scale(ctypes.c_uint32.from_buffer(ctypes.c_float(number)).value)
    if isinstance(scale, bool | str | bytes | type(None) | list | tuple):
        raise TypeError(f"{name} must be a float or a device array of one float32, got {type(scale).__qualname__}")
    view = read_array(name, scale, stream)
    if view.dtype != "float32":
        raise TypeError(f"{name} must be float32 where it is an array, got {view.dtype}")
    if math.prod(view.shape) != 1:
        raise ValueError(f"{name} must hold one element, one scale for the whole of {name[0]}, got shape {view.shape}")
    if view.address <= 0 or view.address % 4:
        raise ValueError(f"{name} must lie in memory, aligned to 4 bytes, got address {view.address:#x}")
    return Scale(view.address, view.device)


def check_quantised_store(
    k: ArrayView,  # (B, D) or (B, H, D)
    v: ArrayView,  # (B, Dv) or (B, Hv, Dv)
    k_cache: ArrayView,  # (N, *row) or (P, S, *row), with the row of k
    v_cache: ArrayView,  # (Nv, *row) or (Pv, Sv, *row), with the row of v
    indices: ArrayView,  # (B,) int32 or int64
    k_scale: Scale,
    v_scale: Scale,
    size_limit: Any = 0,
    dtype: Any = None,
    skip_index: Any = None,
) -> QuantisedRequest | None:
    """The request that these arguments make, or None for an empty batch; raises as store_kvcache_fp8 says."""
    size_limit = integer("size_limit", 0 if size_limit is None else size_limit)
    skip_index = None if skip_index is None else integer("skip_index", skip_index)
    if dtype is not None and not isinstance(dtype, str):
        raise TypeError(f"dtype must be one of {', '.join(map(repr, FORMATS))}, by name, got {dtype!r}")
    views = (k, v, k_cache, v_cache, indices)
    facts = _check_facts(*(view.facts for view in views), size_limit, dtype, skip_index)
    if facts is None:
        return None
    check_addresses(views, facts.strides)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.on_device and scale.device != k_cache.device:
            raise ValueError(
                f"all arrays must be on one GPU, got {name} on device {scale.device} and k_cache on device "
                f"{k_cache.device}"
            )
    alignments = [_alignment(view.address | stride) for view, stride in zip(views[:4], facts.strides, strict=True)]
    key = QuantisedKey(
        facts.widths,
        k.dtype,
        facts.to,
        Side(alignments[0], alignments[2], k_scale.on_device),
        Side(alignments[1], alignments[3], v_scale.on_device),
        INDEX_BITS[indices.dtype],
        skip_index is not None,
        k_cache.device,
    )
    addresses = (view.address for view in views)
    return QuantisedRequest(facts.batch, key, (*addresses, k_scale.value, v_scale.value, *facts.rest))


def _alignment(bits: int) -> int:
    """The largest of 16, 8 and 4 that divides what these bits were or-ed from."""
    bits |= 16
    return bits & -bits


class _Facts(NamedTuple):
    """What a call comes to before its addresses are known."""

    batch: int
    widths: tuple[int, int]
    to: str
    strides: tuple[int, ...]  # of the four row arrays, in bytes
    rest: tuple[int, ...]  # the kernel's arguments after the scales


@functools.lru_cache(maxsize=4096)
def _check_facts(
    k_facts: ArrayFacts,
    v_facts: ArrayFacts,
    k_cache_facts: ArrayFacts,
    v_cache_facts: ArrayFacts,
    indices: ArrayFacts,
    limit: int,
    dtype: str | None,
    skip_index: int | None,
) -> _Facts | None:
    """All checks that need no address; None for an empty batch. (Remembered, as contract.py does.)"""
    all_facts = (k_facts, v_facts, k_cache_facts, v_cache_facts)
    arrays = dict(zip(ROW_ARRAYS, all_facts, strict=True))
    if skip_index is not None:
        check_skip_index(skip_index)
    _check_sources(arrays)
    to = _format(arrays, dtype)
    check_index_type(indices)
    rows = check_shapes(arrays, indices)
    for name in ("k", "v"):
        _check_width(name, rows[name], arrays[name].itemsize)
    arrangement = check_arrangement(arrays, rows, indices, limit)
    if arrangement is None:
        return None
    batch, strides, index_stride, limit = arrangement
    widths = rows["k"].row_bytes // k_facts.itemsize, rows["v"].row_bytes // v_facts.itemsize
    return _Facts(batch, widths, to, strides, (*strides, index_stride, batch, limit, skip_index or 0))


def _check_sources(arrays: dict[str, ArrayFacts]) -> None:
    for name in ("k", "v"):
        if arrays[name].dtype not in ITEMSIZES:
            raise TypeError(f"{name} must be one of {', '.join(ITEMSIZES)}, got {arrays[name].dtype}")
    if arrays["k"].dtype != arrays["v"].dtype:
        raise TypeError(f"k and v must have one dtype, got {arrays['k'].dtype} and {arrays['v'].dtype}")


def _format(arrays: dict[str, ArrayFacts], dtype: str | None) -> str:
    """The name of the format that the caches hold."""
    if dtype is not None and dtype not in FORMATS:
        raise ValueError(f"dtype must be one of {', '.join(map(repr, FORMATS))}, by name, got {dtype!r}")
    caches = arrays["k_cache"].dtype, arrays["v_cache"].dtype
    for name, kind in zip(("k_cache", "v_cache"), caches, strict=True):
        if kind not in (*_DTYPES, "uint8"):
            raise TypeError(f"{name} must be one of {', '.join(_DTYPES)} and uint8, got {kind}")
    if caches[0] != caches[1]:
        raise TypeError(f"k_cache and v_cache must have one dtype, got {caches[0]} and {caches[1]}")
    own = _DTYPES.get(caches[0])
    if own is None and dtype is None:
        raise ValueError(
            "dtype must say what the bytes of uint8 caches mean, got None; pass "
            + " or ".join(f'dtype="{name}"' for name in FORMATS)
        )
    if own is not None and dtype not in (None, own):
        raise ValueError(f"dtype must be that of the caches, got {dtype!r} with caches of {caches[0]}; leave it out")
    return own or str(dtype)


def _check_width(name: str, rows: Rows, itemsize: int) -> None:
    width = rows.row_bytes // itemsize
    if width <= 0 or width % 4:
        raise ValueError(
            f"rows of {name} must have a multiple of 4 elements (the caches are written in uint32, 4 elements each), "
            f"got {width}"
        )
    if rows.row_bytes > MAX_ROW_BYTES:
        raise ValueError(f"rows of {name} may hold at most {MAX_ROW_BYTES} bytes, got {rows.row_bytes}")


_plans: dict[QuantisedKey, Plan] = {}

_launch = launcher(QuantisedSpec.parameters)


def _layout(key: QuantisedKey) -> StoreLayout:
    """How threads cover the sources' rows. Alignment does not decide here: a vector may be moved in pieces."""
    itemsize = ITEMSIZES[key.source]
    return plan_store(key.widths[0] * itemsize, key.widths[1] * itemsize)


def _spec(key: QuantisedKey, early_launch: bool, in_hardware: bool) -> QuantisedSpec:
    return QuantisedSpec(
        _layout(key), key.source, key.to, key.k, key.v, key.index_bits, key.skipping, early_launch, in_hardware
    )


def _make_plan(key: QuantisedKey) -> Plan:
    """Compile and load, on the current device, which is the key's."""
    early_launch = use_early_launch(key.device)
    spec = _spec(key, early_launch, driver.compute_capability(key.device) >= CONVERSION_SINCE)
    # (Strategies were measured on the plain store: they go by what is read.)
    bands = tuple(
        (largest, loaded_kernel(replace(spec, strategy=strategy), key.device))
        for largest, strategy in strategies(spec.layout, driver.sm_count(key.device), early_launch)
    )
    return _plans.setdefault(key, Plan(bands, spec.layout, early_launch))


def _simulate(request: QuantisedRequest) -> None:
    spec = _spec(request.key, early_launch=True, in_hardware=True)
    with simulator_lock:
        spec.build()[spec.layout.grid(request.batch), spec.layout.block](*request.arguments)
