"""A kernel of the benchmark's own, compiled and launched as the package's are: same signature, same launch."""

from collections.abc import Callable
from typing import Any

from numba import cuda, types

from numba_kvcache import driver
from numba_kvcache.compiler import link_cubin, signature
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.launch import Launch, launch

__all__ = ["IGNORED", "compile_kernel", "make_backlog"]

IGNORED = (0,) * 10
"""Addresses and strides, for a kernel that looks at none."""


def compile_kernel(function: Callable[..., Any], name: str, block: int) -> int:
    """The handle of `function` as a kernel on the current device."""
    cc = driver.compute_capability(driver.current_device())
    ptx, _ = cuda.compile(
        function, signature(StoreSpec.parameters), device=False, abi="numba", abi_info={"abi_name": name}, cc=cc,
        output="ptx", launch_bounds=block,
    )  # fmt: skip
    return driver.load_kernel(link_cubin(str(ptx), cc).cubin, name)


def _nap(
    k, v, k_cache, v_cache, indices, k_stride, v_stride, k_cache_stride, v_cache_stride, index_stride,
    batch, size_limit, skip_index,
):  # fmt: skip
    for _ in range(batch):
        cuda.nanosleep(types.uint32(10_000))


def make_backlog(stream: int) -> Callable[[], None]:
    """A call that keeps the GPU idle but busy for some 300 us, while the host queues what is timed behind it.

    Without it, replays of short graphs would be timed at the host's pace.
    """
    kernel = compile_kernel(_nap, "benchmark_nap", 32)
    return lambda: launch(Launch(kernel, 1, 32, False), stream, (*IGNORED, 30, 1, 0))
