"""What contenders and rows of the tables are called; goals.py and plot.py find them by these names."""

__all__ = [
    "CUDA_CPP",
    "DISPATCHER",
    "EMPTY",
    "EMPTY_WAITING",
    "FLOOR",
    "INT32",
    "MEMCPY",
    "OURS",
    "PROTOTYPE",
    "PYTHON_NUMBA",
    "PYTHON_TORCH",
    "STORE_CUPY",
    "STORE_NUMBA",
    "STORE_TORCH",
    "YARDSTICKS",
]

OURS = "numba_kvcache"
CUDA_CPP = "CUDA C++"
PROTOTYPE = "prototype"
INT32 = "int32 indices"

MEMCPY = "memcpy"
EMPTY = "empty kernel"
EMPTY_WAITING = "empty, wait+release"
YARDSTICKS = (MEMCPY, EMPTY, EMPTY_WAITING)

# Host time per call.
FLOOR = "driver floor"
STORE_TORCH = "store_kvcache, torch tensors"
STORE_NUMBA = "store_kvcache, Numba arrays"
STORE_CUPY = "store_kvcache, CuPy arrays"
PYTHON_TORCH = "Python road alone, torch tensors"
PYTHON_NUMBA = "Python road alone, Numba arrays"
DISPATCHER = "Numba's dispatcher, same kernel, scalars"
