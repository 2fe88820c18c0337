"""The few driver calls that the package makes, through cuda.bindings; errors become exceptions with the driver's words.

Nothing here runs at import: the first call initialises the driver, and without one it says so.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

from cuda.bindings import driver as cu

__all__ = [
    "check",
    "compute_capability",
    "context_here",
    "current_context",
    "current_device",
    "device_count",
    "device_name",
    "driver_version",
    "initialise",
    "kernel_function",
    "load_kernel",
    "pointer_device",
    "pop_device",
    "procedure",
    "push_device",
    "relaxed_capture",
    "sm_count",
]


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or a RuntimeError that names its error."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(describe(int(status)))
    return values[0] if len(values) == 1 else tuple(values) or None


def describe(status: int) -> str:
    """Name and text of a CUresult."""
    code = cu.CUresult(status)
    _, text = cu.cuGetErrorString(code)
    return f"the CUDA driver reports {code.name} ({status}): {text.decode() if text else 'no description'}"


# What cuLaunchKernelEx and libraries of kernels need: CUDA 12.0, which came with driver 525.
OLDEST_DRIVER = 12000

_forked = False
"""Whether this process is a child, made by fork, of one that had initialised the driver."""


@functools.cache
def initialise() -> None:
    """Initialise the driver; RuntimeError with reason and remedy where there is none, an old one, or no GPU."""
    if _forked:
        raise RuntimeError(_FORKED)
    try:
        status = cu.cuInit(0)[0]
        version = check(cu.cuDriverGetVersion()) if status == cu.CUresult.CUDA_SUCCESS else OLDEST_DRIVER
    except Exception as error:  # cuda.bindings raises types of its own when the driver's library is absent
        raise RuntimeError(f"no usable CUDA GPU: {' '.join(str(error).split()).rstrip('.')}. {_NO_DRIVER}") from error
    if status == cu.CUresult.CUDA_ERROR_NOT_INITIALIZED:  # cuInit says so in a forked child alone
        raise RuntimeError(_FORKED)
    if status != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"no usable CUDA GPU: {describe(int(status))}. {_NO_DRIVER}")
    if version < OLDEST_DRIVER:
        raise RuntimeError(
            f"no usable CUDA GPU: the driver serves CUDA {_dotted(version)}, and {_dotted(OLDEST_DRIVER)} or newer is "
            "needed; update the NVIDIA driver to 525 or newer (nvidia-smi shows what is installed)"
        )


_NO_DRIVER = (
    "A GPU needs NVIDIA's driver 525 or newer (580 with the extra cu13), and must be visible to this process "
    "(nvidia-smi, CUDA_VISIBLE_DEVICES). "
    "To run without one, set NUMBA_ENABLE_CUDASIM=1 before Numba is imported."
)
_FORKED = (
    "this process was forked from one that had already used CUDA, which CUDA does not survive; start workers with "
    "multiprocessing.get_context('spawn'), or fork before the first call that needs the GPU"
)


def _after_fork_in_child() -> None:
    """What the parent's driver said does not hold here."""
    global _forked
    _forked = _forked or initialise.cache_info().currsize > 0
    initialise.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def _primary_context(device: int) -> Any:
    """The context that Numba, torch and CuPy share on `device`. Retained for good, as theirs are."""
    return check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(device))))


def current_device() -> int:
    """The ordinal of the calling thread's device; 0 where it has no context yet."""
    initialise()
    status, device = cu.cuCtxGetDevice()
    return int(device) if status == cu.CUresult.CUDA_SUCCESS else 0


def push_device(device: int) -> bool:
    """Make `device` current unless a context of it already is; True if pop_device must follow.

    (Not a context manager, whose generator every call would pay for.)
    """
    status, current = cu.cuCtxGetDevice()
    if not status and int(current) == device:
        return False
    initialise()
    check(cu.cuCtxPushCurrent(_primary_context(device)))
    return True


def pop_device() -> None:
    """Undo push_device."""
    check(cu.cuCtxPopCurrent())


@functools.cache
def compute_capability(device: int) -> tuple[int, int]:
    """(major, minor) of `device`."""
    initialise()
    handle = check(cu.cuDeviceGet(device))
    attributes = cu.CUdevice_attribute
    return (
        check(cu.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)),
        check(cu.cuDeviceGetAttribute(attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)),
    )


@functools.cache
def sm_count(device: int) -> int:
    """Streaming multiprocessors of `device`."""
    initialise()
    handle = check(cu.cuDeviceGet(device))
    return int(check(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, handle)))


@functools.cache
def device_count() -> int:
    """How many GPUs this process sees."""
    initialise()
    return int(check(cu.cuDeviceGetCount()))


def device_name(device: int) -> str:
    """The name of `device`."""
    initialise()
    return str(check(cu.cuDeviceGetName(128, check(cu.cuDeviceGet(device)))).rstrip(b"\0").decode())


def driver_version() -> str:
    """The CUDA version that the driver serves, e.g. "13.0"."""
    return _dotted(int(check(cu.cuDriverGetVersion())))


context_here = cu.cuCtxGetCurrent
"""current_context unwrapped, for a question that every known call asks: equal to the answer of before in one context.

In two thirds of the time of asking for the device, as push_device does.
"""


def current_context() -> int:
    """The handle of the calling thread's context, 0 for none."""
    return int(check(cu.cuCtxGetCurrent()))


def kernel_function(kernel: int) -> int:
    """The CUfunction of a kernel in the current context."""
    return int(check(cu.cuKernelGetFunction(cu.CUkernel(kernel))))


def pointer_device(address: int) -> int | None:
    """The ordinal of the device that `address` belongs to, or None if CUDA does not know the address."""
    initialise()
    status, device = cu.cuPointerGetAttribute(
        cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, cu.CUdeviceptr(address)
    )
    return int(device) if status == cu.CUresult.CUDA_SUCCESS and int(device) >= 0 else None


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow, on this thread, calls that a stream capture would otherwise forbid, such as loading a module."""
    relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(cu.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        yield
    finally:
        check(cu.cuThreadExchangeStreamCaptureMode(before))


def load_kernel(cubin: bytes, name: str) -> int:
    """Load `cubin` for good and return the handle of its kernel `name`, ready to launch in the current context."""
    with relaxed_capture():
        library = check(cu.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        kernel = check(cu.cuLibraryGetKernel(library, name.encode()))
        check(cu.cuKernelGetFunction(kernel))  # load it now: a lazy load inside the first launch may be in a capture
    return int(kernel)


def procedure(name: str, version: int = 12000) -> int:
    """The address of the driver's entry point `name` as of CUDA `version`."""
    initialise()
    address, found = check(cu.cuGetProcAddress(name.encode(), version, 0))
    if not address:
        raise RuntimeError(f"the CUDA driver lacks {name} ({found}); a driver of CUDA 12.0 or newer is needed")
    return int(address)
