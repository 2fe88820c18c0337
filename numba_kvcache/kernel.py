"""The kernel: a closure that `numba.cuda.jit` compiles, one for each layout, index width and early-launch choice.

    k_cache[indices[i], :] = k[i, :]
    v_cache[indices[i], :] = v[i, :]

The closure's free variables (threads, parts, steps, ...) are constants to the compiler, so that loops unroll, tests
that cannot fail vanish, and what is left for row widths people have is a handful of instructions around the copies.
"""

import functools
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from numba import cuda

from .backend import assertion, i64, index_access, release_dependents, row_access, u32, u64, wait_primary
from .layout import INDEX_BITS, PLAIN, StoreLayout, Strategy, integer, plan_store

__all__ = ["StoreSpec", "build_kernel", "make_store_kernel"]


@dataclass(frozen=True)
class StoreSpec:
    """All that the kernel is specialised for."""

    layout: StoreLayout
    index_bits: int
    early_launch: bool
    strategy: Strategy = PLAIN
    skipping: bool = False

    # Five addresses, five strides in bytes, batch, size limit, skip index.
    parameters = "QQQQQqqqqqIqq"

    @property
    def name(self) -> str:
        """The kernel's symbol, as profilers show it."""
        k, v = self.layout.k, self.layout.v
        rows = f"{k.row_bytes}x{k.vector_bytes}"
        if v != k:
            rows += f"_{v.row_bytes}x{v.vector_bytes}"
        shape = f"t{self.layout.threads}_p{self.layout.parts}"
        name = f"store_kvcache_{rows}_{shape}_i{self.index_bits}{'_pdl' if self.early_launch else ''}"
        if self.strategy.release_first:
            name += "_rf"
        if self.strategy.bypass_l1:
            name += "_nl1"
        return name + ("_skip" if self.skipping else "")

    def build(self) -> Any:
        """The dispatcher."""
        return build_kernel(self)


def make_store_kernel(
    element_bytes: int,
    num_split: int = 0,
    *,
    v_element_bytes: int = 0,
    index_dtype: str = "int64",
    alignment: int = 16,
    early_launch: bool = False,
    skipping: bool = False,
) -> Any:
    """The `@cuda.jit` dispatcher for one specialisation, to launch yourself or to learn from.

    `store_kvcache` does all of this for you, checks its input, and costs far less host time per launch. Nothing is
    checked here, so a wrong address or stride faults the GPU.

    Parameters
    ----------
    element_bytes, v_element_bytes : int
        Bytes of one row of K and of V; multiples of 4. `v_element_bytes=0` means as K.
    num_split : {0, 1, 2, 4}
        Warps per row, or 0 to let the package choose.
    index_dtype : {"int64", "int32"}
        Type of `indices`.
    alignment : {16, 8, 4}
        What divides, in bytes, all four addresses and row strides.
    early_launch : bool
        Emit the two early-launch (PDL) instructions. They need compute capability 9.0, and mean something only if the
        launch carries the attribute, which `kernel[grid, block, stream]` does not set.
    skipping : bool
        Leave rows out whose index is `skip_index`, before the assert; without it the kernel never looks at that.

    Returns
    -------
    kernel
        `kernel.layout` is its StoreLayout. Launch with
        `kernel[kernel.layout.grid(batch), kernel.layout.block, stream](k, v, k_cache, v_cache, indices, k_stride,
        v_stride, k_cache_stride, v_cache_stride, index_stride, batch, size_limit, skip_index)`: five addresses, five
        strides in bytes, the number of rows, the bound that every index is asserted to be under, and the index that
        means "leave this row out" (0, say, where the kernel is not `skipping`).

    Raises
    ------
    ValueError
        A width, split, index dtype or alignment that the kernel does not serve.
    """
    if index_dtype not in INDEX_BITS:
        raise ValueError(f"index_dtype must be one of {', '.join(INDEX_BITS)}, got {index_dtype!r}")
    alignment = integer("alignment", alignment)
    layout = plan_store(
        integer("element_bytes", element_bytes), integer("v_element_bytes", v_element_bytes),
        integer("num_split", num_split), alignment, alignment,
    )  # fmt: skip
    return build_kernel(StoreSpec(layout, INDEX_BITS[index_dtype], bool(early_launch), skipping=bool(skipping)))


@functools.lru_cache(maxsize=1024)
def build_kernel(spec: StoreSpec) -> Any:
    """The dispatcher for `spec`; see make_store_kernel for its arguments."""
    layout, early_launch, bypass_l1 = spec.layout, spec.early_launch, spec.strategy.bypass_l1
    release_first = spec.strategy.release_first
    threads, parts, steps, groups = layout.threads, layout.parts, layout.steps, layout.groups
    idle_threads, skipping = layout.idle_threads > 0, spec.skipping
    k_step, v_step = layout.k.step_vectors, layout.v.step_vectors
    k_vector_bytes, v_vector_bytes = layout.k.vector_bytes, layout.v.vector_bytes
    load_k, store_k = row_access(layout.k, parts * steps, bypass_l1)
    load_v, store_v = row_access(layout.v, parts * steps, bypass_l1)
    load_index = index_access(spec.index_bits)
    check_slot = assertion("0 <= index && index < size_limit", "numba_kvcache/kernel.py", _CHECK_LINE, "store_kvcache")

    def store_kvcache(
        k, v, k_cache, v_cache, indices,
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

        # This thread's first vector of each row; the later ones follow at constant distances.
        k_first = u32(u32(part * u32(steps * k_step)) + lane)
        v_first = u32(u32(part * u32(steps * v_step)) + lane)
        k_offset = u64(u64(k_first) * u64(k_vector_bytes))
        v_offset = u64(u64(v_first) * u64(v_vector_bytes))
        # Rows and slots are widened before they meet a stride: caches go far past 4 GiB.
        index_source = u64(indices + u64(i64(row) * index_stride))
        k_source = u64(u64(k + u64(i64(row) * k_stride)) + k_offset)
        v_source = u64(u64(v + u64(i64(row) * v_stride)) + v_offset)

        # The kernel before this one may still be writing k, v and indices: nothing is read before it has finished.
        if early_launch:
            wait_primary()
        # A dependent grid that waits, waits for our stores too, so it may come up at any time; layout.strategies says
        # when it should.
        if early_launch and release_first:
            release_dependents()

        index = load_index(index_source)
        k_target = u64(u64(k_cache + u64(i64(index) * k_cache_stride)) + k_offset)
        v_target = u64(u64(v_cache + u64(i64(index) * v_cache_stride)) + v_offset)
        in_bounds = index >= i64(0) and index < size_limit
        # A row that is left out is loaded all the same: to leave earlier, every row would have to wait for its index.
        wanted = not skipping or index != skip_index

        for step in range(steps):
            k_at, v_at = u64(step * k_step * k_vector_bytes), u64(step * v_step * v_vector_bytes)
            k_vector, v_vector = u32(k_first + u32(step * k_step)), u32(v_first + u32(step * v_step))
            # The row's address does not wait for its index: all loads are in flight before the first store.
            k_words = load_k(u64(k_source + k_at), k_vector)
            v_words = load_v(u64(v_source + v_at), v_vector)
            # For those that were released before, this is only what keeps the compiler from moving the loads of K and V
            # behind the check of the index: up to 0.09 us of a small launch (H200, rows left out).
            if early_launch and step == steps - 1:
                release_dependents()
            if wanted:
                check_slot(in_bounds)
                if in_bounds:
                    store_k(u64(k_target + k_at), k_vector, k_words)
                    store_v(u64(v_target + v_at), v_vector, v_words)

    kernel = cuda.jit(store_kvcache)
    kernel.layout = layout
    return kernel


_CHECK_LINE = 1 + next(
    number
    for number, line in enumerate(inspect.getsource(sys.modules[__name__]).splitlines())
    if line.strip().startswith("check_slot(")
)
"""Where the assert stands in this file, for its message."""
