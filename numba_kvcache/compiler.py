"""Kernel -> PTX (Numba) -> cubin (nvJitLink) -> loaded function. All but the last step run without a GPU.

nvJitLink makes machine code for the GPU at hand, so a driver older than the toolkit still loads it.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numba import cuda, types

from . import disk_cache, driver, settings
from .layout import StoreLayout

__all__ = [
    "EARLY_LAUNCH_SINCE",
    "KernelSpec",
    "LinkedKernel",
    "compile_ptx",
    "distribution_version",
    "link_cubin",
    "loaded_kernel",
    "signature",
]

# griddepcontrol and the launch attribute came with this compute capability.
EARLY_LAUNCH_SINCE = (9, 0)

# The files whose text decides the machine code.
KERNEL_SOURCES = ("compiler.py", "device.py", "fp8.py", "kernel.py", "layout.py", "quantised_kernel.py")

# What compiles: Numba, and NVVM and nvJitLink as CUDA 13's wheels name them, then as CUDA 12's do.
COMPILER_DISTRIBUTIONS = (
    "numba",
    "numba-cuda",
    "cuda-core",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)


class KernelSpec(Protocol):
    """All that one kernel is specialised for; its repr says all of it.

    `parameters` has a struct code per parameter of the kernel: Q, q or I.
    """

    parameters: str

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def layout(self) -> StoreLayout: ...  # noqa: D102

    def build(self) -> Any: ...  # noqa: D102


class LinkedKernel(NamedTuple):
    """Machine code, and what the linker said of it (registers, spills)."""

    cubin: bytes
    report: str


_TYPES = {"Q": types.uint64, "q": types.int64, "I": types.uint32}


def signature(parameters: str) -> tuple[Any, ...]:
    """Numba's types for a kernel with these parameters."""
    return tuple(_TYPES[code] for code in parameters)


def compile_ptx(spec: KernelSpec, cc: tuple[int, int]) -> str:
    """PTX of the kernel for `spec`; its entry is `spec.name`."""
    _check_numpy()
    with _toolkit():
        ptx, _ = cuda.compile(
            spec.build().py_func,
            signature(spec.parameters),
            device=False,
            abi="numba",
            abi_info={"abi_name": spec.name},
            cc=cc,
            output="ptx",
            launch_bounds=spec.layout.block,
        )
    return str(ptx)


def link_cubin(ptx: str, cc: tuple[int, int]) -> LinkedKernel:
    """Machine code for compute capability `cc` from PTX."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from cuda.pathfinder import load_nvidia_dynamic_lib

    with _toolkit():  # without it, cuda.core would warn and take the driver's linker, which knows no newer PTX
        load_nvidia_dynamic_lib("nvJitLink")
    # What nvJitLink takes from its own cache, it does not report on.
    options = LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", verbose=True, no_cache=True)
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    return LinkedKernel(bytes(linker.link("cubin").code), linker.get_info_log())


_loaded: dict[tuple[KernelSpec, int], int] = {}
_lock = threading.RLock()  # a finaliser may store while we compile


def loaded_kernel(spec: KernelSpec, device: int) -> int:
    """The handle of the kernel for `spec`, loaded on `device`, which must be current.

    Compiled once however many threads ask, and kept for the life of the process.
    """
    handle = _loaded.get((spec, device))
    if handle is None:
        with _lock:
            handle = _loaded.get((spec, device))
            if handle is None:
                cubin = _cubin(spec, driver.compute_capability(device))
                handle = _loaded[spec, device] = _load(cubin, spec.name)
    return handle


def _load(cubin: bytes, name: str) -> int:
    try:
        return driver.load_kernel(cubin, name)
    except RuntimeError as error:
        driver_major, toolkit = int(driver.driver_version().split(".")[0]), _toolkit_major()
        if toolkit <= driver_major:
            raise
        raise RuntimeError(
            f"{error}; the driver serves CUDA {driver.driver_version()}, and the installed compiler is of CUDA "
            f"{toolkit}: update the driver, or pip install 'numba-cuda[cu{driver_major}]'"
        ) from error


def _cubin(spec: KernelSpec, cc: tuple[int, int]) -> bytes:
    _check_gpu(cc)
    key = cache_key(spec, cc)
    folder = settings.cache_folder()
    cubin = disk_cache.load(folder, key)
    if cubin is None:
        with driver.relaxed_capture():
            cubin = link_cubin(compile_ptx(spec, cc), cc).cubin
        disk_cache.save(folder, key, cubin)
    return cubin


def cache_key(spec: KernelSpec, cc: tuple[int, int]) -> str:
    """All that the machine code depends on: specialisation, GPU, compiler versions, our sources."""
    return json.dumps([repr(spec), cc, _versions(), _sources_digest()])


@functools.cache
def _versions() -> dict[str, str]:
    return {name: distribution_version(name) for name in COMPILER_DISTRIBUTIONS}


def distribution_version(distribution: str) -> str:
    """The installed version of a distribution, or "none"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for name in KERNEL_SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def _check_numpy() -> None:
    """numba-cuda 0.30 registers numpy.row_stack at its first compile; NumPy 2.5 removed it."""
    if not hasattr(np, "row_stack"):
        raise RuntimeError(
            f"numba-cuda {distribution_version('numba-cuda')} cannot compile under NumPy {np.__version__}, which no "
            "longer has row_stack; install an older one: pip install 'numpy<2.5'"
        )


# PTX has `L1::no_allocate` from 7.0 on; CUDA 13's compiler begins at 7.5.
OLDEST_GPU, OLDEST_GPU_OF_CUDA_13 = (7, 0), (7, 5)


def _check_gpu(cc: tuple[int, int]) -> None:
    """RuntimeError for a GPU that is too old for the package, or for the installed compiler."""
    found = f"the GPU has compute capability {cc[0]}.{cc[1]}"
    if cc < OLDEST_GPU:
        raise RuntimeError(f"{found}, and {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer is needed")
    if cc < OLDEST_GPU_OF_CUDA_13 and _toolkit_major() >= 13:
        raise RuntimeError(
            f"{found}, which the installed compiler, of CUDA {_toolkit_major()}, no longer serves; install CUDA 12's: "
            "pip install 'numba-cuda[cu12]'"
        )


def _toolkit_major() -> int:
    """The major version of the toolkit whose compiler is installed as wheels, 0 for none."""
    if _versions()["nvidia-nvvm"] != "none":
        return int(_versions()["nvidia-nvvm"].split(".")[0])
    return 12 if _versions()["nvidia-cuda-nvcc-cu12"] != "none" else 0


@contextlib.contextmanager
def _toolkit() -> Iterator[None]:
    """Turn a library of the toolkit that is not there into an error that says how to install it."""
    from cuda.pathfinder import DynamicLibNotFoundError
    from numba.cuda.cudadrv.error import NvvmSupportError

    try:
        yield
    except (DynamicLibNotFoundError, NvvmSupportError) as error:
        raise RuntimeError(
            f"the CUDA toolkit's compiler was not found: {str(error).splitlines()[0]}; it comes as wheels: "
            f"pip install 'numba-cuda[cu{_driver_major() or 13}]'"
        ) from error


def _driver_major() -> int:
    """12 or 13: the newest toolkit that the driver serves; 0 without one."""
    try:
        return min(13, max(12, int(driver.driver_version().split(".")[0])))
    except Exception:  # cuda.bindings raises types of its own when the driver's library is absent
        return 0
