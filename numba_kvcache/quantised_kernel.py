"""The kernel of the quantised store: kernel.py's closure, with a division and a rounding between load and store.

    k_cache[indices[i], :] = fp8(k[i, :] / k_scale)
    v_cache[indices[i], :] = fp8(v[i, :] / v_scale)

A thread loads a vector of 16 bytes, quantises its elements, and stores the 8 or 4 bytes that they become. So the row of
a cache is covered as the source's row is, in narrower vectors. Where addresses are aligned to less than a vector, it is
moved in pieces. (Which row and part a thread has is worked out here once more: Numba's simulator gives `cuda.threadIdx`
to the kernel's own module alone.)
"""

import functools
import inspect
import sys
from dataclasses import dataclass, replace
from typing import Any

from numba import cuda

from .backend import (
    assertion,
    i64,
    index_access,
    quantiser,
    release_dependents,
    row_access,
    scale_access,
    u32,
    u64,
    wait_primary,
)
from .fp8 import FORMATS
from .layout import PLAIN, RowLayout, StoreLayout, Strategy

__all__ = ["ITEMSIZES", "QuantisedSpec", "build_quantised_kernel"]

# What can be quantised, and the bytes of an element.
ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Side:
    """What K, or V, is specialised for besides its layout.

    Attributes
    ----------
    source_alignment, cache_alignment : {16, 8, 4}
        What divides, in bytes, address and row stride of the source and of the cache.
    scale_on_device : bool
        The kernel is given the address of the scale, rather than its bits.
    """

    source_alignment: int = 16
    cache_alignment: int = 16
    scale_on_device: bool = False


@dataclass(frozen=True)
class QuantisedSpec:
    """All that the kernel is specialised for. `layout` covers the rows of the sources, in vectors of 16 or 8 bytes."""

    layout: StoreLayout
    source: str
    to: str
    k: Side
    v: Side
    index_bits: int
    skipping: bool
    early_launch: bool
    in_hardware: bool
    strategy: Strategy = PLAIN

    # Five addresses, two scales, five strides in bytes, batch, size limit, skip index.
    parameters = "QQQQQQQqqqqqIqq"

    @property
    def name(self) -> str:
        """The kernel's symbol, as profilers show it."""
        sides = "_".join(
            f"{row.row_bytes}a{side.source_alignment}a{side.cache_alignment}{'d' if side.scale_on_device else 'h'}"
            for row, side in ((self.layout.k, self.k), (self.layout.v, self.v))
        )
        flags = {
            "_skip": self.skipping, "_pdl": self.early_launch, "_soft": not self.in_hardware,
            "_rf": self.strategy.release_first, "_nl1": self.strategy.bypass_l1,
        }  # fmt: skip
        name = f"store_kvcache_fp8_{self.source}_{self.to}_{sides}_i{self.index_bits}"
        return name + "".join(flag for flag, on in flags.items() if on)

    def build(self) -> Any:
        """The dispatcher."""
        return build_quantised_kernel(self)

    def target_row(self, row: RowLayout) -> RowLayout:
        """The cache's row under a source's row: one byte per element."""
        itemsize = ITEMSIZES[self.source]
        return replace(row, row_bytes=row.row_bytes // itemsize, vector_bytes=row.vector_bytes // itemsize)


@functools.lru_cache(maxsize=1024)
def build_quantised_kernel(spec: QuantisedSpec) -> Any:
    """The dispatcher for `spec`, whose kernel takes what QuantisedSpec.parameters lists."""
    layout, early_launch, bypass_l1 = spec.layout, spec.early_launch, spec.strategy.bypass_l1
    release_first = spec.strategy.release_first
    skipping = spec.skipping
    threads, parts, groups = layout.threads, layout.parts, layout.groups
    idle_threads = layout.idle_threads > 0
    k_step, v_step = layout.k.step_vectors, layout.v.step_vectors
    k_target_row, v_target_row = spec.target_row(layout.k), spec.target_row(layout.v)
    k_vector_bytes, v_vector_bytes = layout.k.vector_bytes, layout.v.vector_bytes
    k_target_bytes, v_target_bytes = k_target_row.vector_bytes, v_target_row.vector_bytes
    load_k, _ = row_access(layout.k, parts, bypass_l1, spec.k.source_alignment)
    load_v, _ = row_access(layout.v, parts, bypass_l1, spec.v.source_alignment)
    _, store_k = row_access(k_target_row, parts, bypass_l1, spec.k.cache_alignment)
    _, store_v = row_access(v_target_row, parts, bypass_l1, spec.v.cache_alignment)
    load_k_scale, load_v_scale = scale_access(spec.k.scale_on_device), scale_access(spec.v.scale_on_device)
    to = FORMATS[spec.to]
    quantise_k = quantiser(spec.source, to, layout.k.words * layout.k.loops, spec.in_hardware)
    quantise_v = quantiser(spec.source, to, layout.v.words * layout.v.loops, spec.in_hardware)
    load_index = index_access(spec.index_bits)
    check_slot = assertion(
        "0 <= index && index < size_limit", "numba_kvcache/quantised_kernel.py", _CHECK_LINE, "store_kvcache_fp8"
    )

    def store_kvcache_fp8(
        k, v, k_cache, v_cache, indices, k_scale, v_scale,
        k_stride, v_stride, k_cache_stride, v_cache_stride, index_stride,
        batch, size_limit, skip_index,
    ):  # fmt: skip
        thread = u32(cuda.threadIdx.x)
        local = u32(thread // u32(threads))
        lane = u32(thread - u32(local * u32(threads)))
        group = u32(u32(u32(cuda.blockIdx.x) * u32(groups)) + local)
        row = u32(group // u32(parts))
        part = u32(group - u32(row * u32(parts)))
        if row >= batch:
            return
        if idle_threads and local >= u32(groups):
            return

        k_first, v_first = u32(u32(part * u32(k_step)) + lane), u32(u32(part * u32(v_step)) + lane)
        index_source = u64(indices + u64(i64(row) * index_stride))
        k_source = u64(u64(k + u64(i64(row) * k_stride)) + u64(u64(k_first) * u64(k_vector_bytes)))
        v_source = u64(u64(v + u64(i64(row) * v_stride)) + u64(u64(v_first) * u64(v_vector_bytes)))
        # When dependents are released, and why nothing is read before the wait: see kernel.py.
        if early_launch:
            wait_primary()
        if early_launch and release_first:
            release_dependents()

        index = load_index(index_source)
        k_words = load_k(k_source, k_first)
        v_words = load_v(v_source, v_first)
        k_scale_bits, v_scale_bits = load_k_scale(k_scale), load_v_scale(v_scale)
        if early_launch:  # for the second time, perhaps: see kernel.py
            release_dependents()
        if skipping and index == skip_index:
            return
        k_target = u64(u64(k_cache + u64(i64(index) * k_cache_stride)) + u64(u64(k_first) * u64(k_target_bytes)))
        v_target = u64(u64(v_cache + u64(i64(index) * v_cache_stride)) + u64(u64(v_first) * u64(v_target_bytes)))
        in_bounds = index >= i64(0) and index < size_limit
        check_slot(in_bounds)
        if in_bounds:
            store_k(k_target, k_first, quantise_k(k_words, k_scale_bits))
            store_v(v_target, v_first, quantise_v(v_words, v_scale_bits))

    kernel = cuda.jit(store_kvcache_fp8)
    kernel.layout = layout
    return kernel


_CHECK_LINE = 1 + next(
    number
    for number, line in enumerate(inspect.getsource(sys.modules[__name__]).splitlines())
    if line.strip().startswith("check_slot(")
)
"""Where the assert stands in this file, for its message."""
