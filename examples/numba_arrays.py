"""Append the K and V of three tokens to one layer of a paged cache. Runs on a GPU and on Numba's simulator.

python examples/numba_arrays.py
NUMBA_ENABLE_CUDASIM=1 python examples/numba_arrays.py
"""

import sys

import numpy as np
from numba import cuda

from numba_kvcache import store_kvcache

LAYERS, SLOTS, WIDTH, TOKENS = 4, 64, 128, 3


def main() -> None:
    """Store, then compare with NumPy's answer."""
    if not cuda.is_available():
        sys.exit("numba_arrays.py needs a GPU, or NUMBA_ENABLE_CUDASIM=1")
    rng = np.random.default_rng(0)

    # K and V stand side by side in one array, as a fused projection leaves them: each is a slice of it, not a copy.
    projected = rng.standard_normal((TOKENS, 2 * WIDTH)).astype(np.float16)
    kv = cuda.to_device(projected)  # (B, D + Dv)
    k, v = kv[:, :WIDTH], kv[:, WIDTH:]

    # One pool for all layers; a layer's cache is a view into it.
    k_pool, v_pool = (cuda.to_device(np.zeros((LAYERS, SLOTS, WIDTH), np.float16)) for _ in range(2))
    layer = 2
    slots = np.array([5, 0, 63], np.int32)

    store_kvcache(k, v, k_pool[layer], v_pool[layer], cuda.to_device(slots))

    for pool, columns in ((k_pool, slice(0, WIDTH)), (v_pool, slice(WIDTH, None))):
        expected = np.zeros((LAYERS, SLOTS, WIDTH), np.float16)
        expected[layer, slots] = projected[:, columns]
        np.testing.assert_array_equal(pool.copy_to_host(), expected)
    print(f"stored {TOKENS} tokens into slots {slots.tolist()} of layer {layer}; every other byte is as it was")


if __name__ == "__main__":
    main()
