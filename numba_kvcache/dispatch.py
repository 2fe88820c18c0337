"""The one road a call takes: arrays -> checks -> layout -> kernel -> launch; or, where it is known, launch."""

import contextlib
import threading
from typing import Any, NamedTuple

from . import driver, fast_road, known_calls, native, settings
from .arrays import find_reader, never_readonly, readers, stream_finder, stream_handle, unreported
from .compiler import EARLY_LAUNCH_SINCE, loaded_kernel
from .contract import MAX_BATCH, ROW_ARRAYS, PlanKey, check_store
from .kernel import StoreSpec, build_kernel
from .known_calls import Name, known, name_call, remember_call
from .launch import Launch, ReadyLaunch, launch
from .layout import INDEX_BITS, StoreLayout, integer, plan_store, strategies
from .settings import SIMULATED

__all__ = ["can_use_store_kvcache", "store_kvcache", "warmup"]


def store_kvcache(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    indices: Any,
    num_split: int = 0,
    size_limit: int | None = 0,
    *,
    stream: Any = None,
    skip_index: int | None = None,
) -> None:
    """Write row i of `k` and `v` into slot `indices[i]` of two paged caches, in one launch.

    ``k_cache[indices[i], :] = k[i, :]`` and ``v_cache[indices[i], :] = v[i, :]`` for every i, bit for bit, for any
    dtype. Slots are counted across pages: slot = page * page size + offset. The call returns once the launch is queued;
    it never waits for the GPU and never allocates device memory.

    Parameters
    ----------
    k : device array, shape (B, D) or (B, H, D)
        New keys, one row per token. Any row stride, dense rows, 4-byte aligned; rows of a multiple of 4 bytes.
    v : device array, shape (B, Dv) or (B, Hv, Dv)
        New values, of k's dtype. Row shape and strides may differ from k's.
    k_cache : device array, shape (N, *row) or (P, S, *row), where row is k.shape[1:]
        Slots for keys, or pages of S slots, all of them one stride apart; of k's dtype. Rows must not overlap.
    v_cache : device array, shape (Nv, *row) or (Pv, Sv, *row), where row is v.shape[1:]
        Slots for values.
    indices : device array, shape (B,), int32 or int64
        The slot of each row; any stride. A slot outside [0, size_limit) fails an assert on the device: its line is
        printed on stderr, nothing is written out of bounds, and the next synchronisation reports error 710. (On the
        simulator: AssertionError.) Where a slot is named twice, each of its words comes from one of the rows.
    num_split : {0, 1, 2, 4}
        Warps per row. 2 needs rows of a multiple of 256 bytes, 4 of 512. 0 lets the package choose.
    size_limit : int, optional
        The bound on slots, in rows, at most those of the smaller cache. 0 or None: the smaller cache's rows.
    stream : optional
        A Numba, torch, CuPy or cuda.core stream, anything with `__cuda_stream__`, or a handle. None: the current
        stream of the library that owns `k_cache`; for Numba arrays, Numba's default stream.
    skip_index : int, optional
        Rows whose index is this one are not written, be it a slot or (as -1) none: the padding of a graph. None: no row
        is left out.

    Raises
    ------
    TypeError
        An argument of the wrong kind: a host array, a list, dtypes that differ, indices of another type.
    ValueError
        An argument of the wrong value: shape, stride, alignment, device, split, limit, skip index, a read-only cache.
    RuntimeError
        No usable GPU, or the driver refused the launch.

    Notes
    -----
    Nothing is written when an exception is raised. An empty batch returns without a launch. Sources may share memory
    with the caches as long as no byte written is also read. The algorithm, a warp copy per part of a row, is that of
    the CUDA C++ kernel of the same name in mini-sglang and SGLang.

    Examples
    --------
    >>> store_kvcache(k, v, k_cache, v_cache, slots)  # doctest: +SKIP
    """
    # First: it runs the caller's code, which may change arrays and context.
    handle = None if stream is None else stream_handle(stream)
    name, addresses = name_call(k, v, k_cache, v_cache, indices, num_split, size_limit, skip_index)
    ready = known.get(name)
    if ready is not None and driver.context_here() == ready.context:
        ready.launch(ready.current_stream() if handle is None else handle, addresses)
    else:
        arrays, options = (k, v, k_cache, v_cache, indices), (num_split, size_limit, skip_index)
        _store_unknown(arrays, options, handle, name, addresses)


def _store_unknown(
    arrays: tuple[Any, ...], options: tuple[Any, ...], handle: int | None, name: Name | None, addresses: tuple[int, ...]
) -> None:
    """The call with every check made; known from now on, if it has a name and was made in a context of its device."""
    find_stream = stream_finder(arrays[2])
    if handle is None:
        handle = find_stream()
    views = [
        (readers.get(type(array)) or find_reader(argument, array))(argument, array, handle)
        for argument, array in zip((*ROW_ARRAYS, "indices"), arrays, strict=True)
    ]
    if name is not None and name_call(*arrays, *options)[0] != name:
        name = None  # another thread, or a finaliser, changes an array: what follows is not what the name says
    checked = check_store(*views, *options)
    if checked is None:
        return
    batch, key, arguments = checked
    if SIMULATED:
        _simulate(batch, key, arguments)
        return
    pushed = driver.push_device(key.device)
    try:
        what = (_plans.get(key) or _make_plan(key)).launch(batch)
        launch(what, handle, arguments)
    finally:
        if pushed:
            driver.pop_device()
    if name is not None and not pushed and arguments[: len(arrays)] == addresses:
        remember_call(name, ReadyLaunch(driver.context_here(), find_stream, what, arguments[len(arrays) :]), arrays)
    if unreported:
        _report_types()


def _report_types() -> None:
    """Tell known_calls.py and the fast road of the array types that have been read since they were last told."""
    for kind in tuple(unreported):
        known_calls.remember_type(kind)
        fast_road.remember_type(kind, writable=never_readonly(kind))
        with contextlib.suppress(ValueError):  # another thread was faster
            unreported.remove(kind)


class Plan(NamedTuple):
    """What calls with one key launch: a kernel for each band of batches (layout.strategies)."""

    bands: tuple[tuple[int, int], ...]
    layout: StoreLayout
    early_launch: bool

    def launch(self, batch: int) -> Launch:
        """The launch for this many rows."""
        if batch * self.layout.parts > MAX_BATCH:
            raise ValueError(f"a batch of {batch} rows of this width is too large for one launch; split it")
        kernel = next(kernel for largest, kernel in self.bands if batch <= largest)
        return Launch(kernel, self.layout.grid(batch), self.layout.block, self.early_launch)


_plans: dict[PlanKey, Plan] = {}


def _make_plan(key: PlanKey) -> Plan:
    """Compile and load, on the current device, which is the key's; remembered here and by the fast road."""
    layout = _layout(key)
    early_launch = use_early_launch(key.device)
    bands = tuple(
        (largest, loaded_kernel(StoreSpec(layout, key.index_bits, early_launch, strategy, key.skipping), key.device))
        for largest, strategy in strategies(layout, driver.sm_count(key.device), early_launch)
    )
    plan = Plan(bands, layout, early_launch)
    if _plans.setdefault(key, plan) is plan:
        functions = tuple((largest, driver.kernel_function(kernel)) for largest, kernel in bands)
        fast_road.remember_plan(key, driver.current_context(), functions, layout, early_launch)
        fast_road.start()
    return plan


def _layout(key: PlanKey) -> StoreLayout:
    return plan_store(key.k_row_bytes, key.v_row_bytes, key.num_split, key.k_alignment, key.v_alignment)


# Numba's simulator swaps the globals of kernel.py while it runs a kernel, `cuda.jit` among them: none is built then.
simulator_lock = threading.RLock()


def _simulate(batch: int, key: PlanKey, arguments: tuple[int, ...]) -> None:
    layout = _layout(key)
    with simulator_lock:
        kernel = build_kernel(StoreSpec(layout, key.index_bits, early_launch=True, skipping=key.skipping))
        kernel[layout.grid(batch), layout.block](*arguments)


def use_early_launch(device: int) -> bool:
    """Whether stores on `device` start early: the instructions and the launch attribute, or neither."""
    return settings.early_launch() and driver.compute_capability(device) >= EARLY_LAUNCH_SINCE


fast_road.attach(native.STORE, store_kvcache)


def can_use_store_kvcache(row_bytes: int, v_row_bytes: int = 0, num_split: int = 0) -> bool:
    """Whether rows of these widths can be stored under `num_split`.

    Parameters
    ----------
    row_bytes, v_row_bytes : int
        Bytes of one row of K and of V; `v_row_bytes=0` means as K.
    num_split : int
        As for store_kvcache.

    Raises
    ------
    TypeError
        An argument that is no integer.
    """
    widths = integer("row_bytes", row_bytes), integer("v_row_bytes", v_row_bytes)
    num_split = integer("num_split", num_split)
    try:
        plan_store(*widths, num_split)
    except ValueError:
        return False
    return True


def warmup(
    row_bytes: int,
    v_row_bytes: int = 0,
    num_split: int = 0,
    *,
    index_dtype: str = "int64",
    alignment: int = 16,
    device: int | None = None,
    skipping: bool = False,
) -> None:
    """Compile and load ahead of the first call, e.g. before a graph is captured or a server takes requests.

    Returns when everything is in force, the fast host road (native.py) included.

    Parameters
    ----------
    row_bytes, v_row_bytes : int
        Bytes of one row of K and of V; `v_row_bytes=0` means as K.
    num_split : {0, 1, 2, 4}
        As the calls will pass it.
    index_dtype : {"int64", "int32"}
        dtype of the calls' indices.
    alignment : {16, 8, 4}
        What divides the addresses and row strides of the calls, in bytes.
    device : int, optional
        CUDA ordinal; the current device by default.
    skipping : bool
        Whether the calls will pass a `skip_index`, for which there are kernels of their own.

    Raises
    ------
    ValueError
        A width, split, index dtype or alignment that cannot be served.
    RuntimeError
        No usable GPU.
    """
    row_bytes, v_row_bytes = integer("row_bytes", row_bytes), integer("v_row_bytes", v_row_bytes)
    num_split, alignment = integer("num_split", num_split), integer("alignment", alignment)
    device = None if device is None else integer("device", device)
    plan_store(row_bytes, v_row_bytes, num_split, alignment, alignment)
    if index_dtype not in INDEX_BITS:
        raise ValueError(f"index_dtype must be one of {', '.join(INDEX_BITS)}, got {index_dtype!r}")
    if SIMULATED:
        return  # nothing to compile
    ordinal = driver.current_device() if device is None else device
    if not 0 <= ordinal < driver.device_count():
        raise ValueError(f"device must be one of {driver.device_count()} GPUs, counted from 0, got {ordinal}")
    key = PlanKey(
        row_bytes, v_row_bytes or row_bytes, alignment, alignment, num_split, INDEX_BITS[index_dtype], ordinal,
        bool(skipping),
    )  # fmt: skip
    pushed = driver.push_device(ordinal)
    try:
        _make_plan(key)
    finally:
        if pushed:
            driver.pop_device()
    fast_road.wait()
