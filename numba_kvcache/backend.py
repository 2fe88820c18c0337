"""The words that kernels are written in, as this process has them: device.py's on a GPU, simulator.py's without one."""

from .settings import SIMULATED

if SIMULATED:
    from .simulator import (
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
else:
    from .device import (
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

__all__ = [
    "assertion",
    "i64",
    "index_access",
    "quantiser",
    "release_dependents",
    "row_access",
    "scale_access",
    "u32",
    "u64",
    "wait_primary",
]
