"""Launch the kernel yourself, as Numba users launch theirs. Runs on a GPU and on Numba's simulator.

Nothing is checked on this road, and Numba's launch costs eight times the host time of store_kvcache's and more: it is
for reading, for experiments, and for kernels built upon this one.

    python examples/raw_kernel.py
    NUMBA_ENABLE_CUDASIM=1 python examples/raw_kernel.py
"""

import sys
import warnings
from typing import Any

import numpy as np
from numba import config, cuda

from numba_kvcache import make_store_kernel

SLOTS, WIDTH, TOKENS = 16, 256, 4


def address(array: Any) -> int:
    """Where the array's first element lies: on the simulator, in the host's memory."""
    if config.ENABLE_CUDASIM:
        return int(array.ctypes.data)
    return int(array.device_ctypes_pointer.value)


def main() -> None:
    """Store, then compare with NumPy's answer."""
    if not cuda.is_available():
        sys.exit("raw_kernel.py needs a GPU, or NUMBA_ENABLE_CUDASIM=1")
    rng = np.random.default_rng(0)
    k_rows, v_rows = (rng.standard_normal((TOKENS, WIDTH)).astype(np.float32) for _ in range(2))
    slots = np.array([9, 2, 15, 0], np.int64)
    arrays = [cuda.to_device(a) for a in (k_rows, v_rows, *np.zeros((2, SLOTS, WIDTH), np.float32), slots)]

    kernel = make_store_kernel(WIDTH * 4)  # bytes of a row
    layout = kernel.layout
    grid, block = layout.grid(TOKENS), layout.block
    print(f"{layout.threads} threads per row, {grid} blocks of {block} threads")

    stream = cuda.stream()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Grid size")  # Numba warns of small grids
        kernel[grid, block, stream](
            *(address(a) for a in arrays),  # k, v, k_cache, v_cache, indices
            *(a.strides[0] for a in arrays),  # their strides in bytes
            TOKENS,  # how many rows
            SLOTS,  # the bound of every index
            0,  # the index to skip: this kernel skips none
        )
    stream.synchronize()

    for rows, cache in ((k_rows, arrays[2]), (v_rows, arrays[3])):
        expected = np.zeros((SLOTS, WIDTH), np.float32)
        expected[slots] = rows
        np.testing.assert_array_equal(cache.copy_to_host(), expected)
    print(f"stored {TOKENS} rows into slots {slots.tolist()}")


if __name__ == "__main__":
    main()
