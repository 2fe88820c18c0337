"""Store new keys and values into a paged KV cache, in one launch: a CUDA kernel in Python alone.

    from numba_kvcache import store_kvcache
    store_kvcache(k, v, k_cache, v_cache, indices)

The road of a call is dispatch.py, top to bottom.
"""

from ._version import __version__
from .configuration import show_config
from .dispatch import can_use_store_kvcache, store_kvcache, warmup
from .kernel import make_store_kernel
from .quantised import store_kvcache_fp8

__all__ = [
    "__version__",
    "can_use_store_kvcache",
    "make_store_kernel",
    "show_config",
    "store_kvcache",
    "store_kvcache_fp8",
    "warmup",
]
