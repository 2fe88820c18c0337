"""Arrays of real libraries that are known by DLPack or the array interface alone: JAX, NumPy, torch, CuPy.

test_arrays.py has the same for producers written by hand; torch, Numba and CuPy by their own attributes are in
test_gpu.py.
"""

import numpy as np
import pytest
from support import ON_GPU, SIMULATED, index_array, make_rows, needs_compiler, needs_kernels, optional, synchronize
from test_arrays import BFLOAT, FLOAT, INT, dlpack_of

from numba_kvcache import arrays, store_kvcache
from numba_kvcache.arrays import read_array

SLOTS = [6, 0, 3]

# As dlpack.h has them, by the names that NumPy, JAX and torch share.
TYPES = {
    "bfloat16": (BFLOAT, 16, 1), "float16": (FLOAT, 16, 1), "float32": (FLOAT, 32, 1), "int8": (INT, 8, 1),
    "float8_e4m3fn": (10, 8, 1),
}  # fmt: skip


@pytest.fixture
def jax(monkeypatch):
    """JAX with the device that kernels run on here, the host's memory on the simulator."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = optional("jax")
    if SIMULATED:
        jax.config.update("jax_platforms", "cpu")
    if ON_GPU and jax.default_backend() != "gpu":
        pytest.skip("the JAX that is installed has no GPU")
    return jax


def caches_of(dtype):
    """Two caches of random bytes between guards, and them as DLPack producers."""
    caches = make_rows(3, 7, 256)[2:]
    return caches, [dlpack_of(cache, dtype=TYPES[dtype]) for cache in caches]


def random_rows(seed):
    """Three rows of 256 bytes; every NaN there is may be among them."""
    return np.random.default_rng(seed).integers(0, 256, (3, 256), np.uint8)


def check(caches, sources, slots):
    """The caches hold the sources' bytes in the slots, and all else is as it was."""
    synchronize()
    for cache, source in zip(caches, sources, strict=True):
        for row, slot in enumerate(slots):
            cache.memory.expected[cache.where(slot)] = source[row]
        cache.memory.check()


@needs_kernels
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_jax_sources(jax, dtype, index_dtype):
    jnp, sources = jax.numpy, [random_rows(seed) for seed in (1, 2)]
    k, v = (jnp.asarray(source.view(jnp.dtype(dtype))) for source in sources)
    with jax.enable_x64(True):
        indices = jnp.asarray(np.array(SLOTS, index_dtype))
    assert indices.dtype == index_dtype
    caches, producers = caches_of(dtype)
    for _ in range(2):  # the second time the types are known
        store_kvcache(k, v, *producers, indices)
    check(caches, sources, SLOTS)


@needs_kernels
def test_jax_results_that_are_still_being_computed(jax):
    """JAX returns before it has computed; an export waits for the result, on the stream or on the host."""
    jnp = jax.numpy
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: y @ y / jnp.linalg.norm(y), x)[:3, :64] * 0 + 7)
    k = slow(jnp.ones((64, 64), jnp.float32))
    caches, producers = caches_of("float32")
    store_kvcache(k, k, *producers, jnp.asarray(SLOTS))
    check(caches, [np.full((3, 64), 7, np.float32).view(np.uint8)] * 2, SLOTS)


@needs_kernels
@pytest.mark.parametrize("flags", [True, False], ids=["", "exported without flags"])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_jax_arrays_are_no_caches(jax, monkeypatch, which, flags):
    """JAX arrays do not change, which JAX before 0.12 had no way to say."""
    export = arrays._export

    def export_without_flags(name, array, stream):
        old = isinstance(array, jax.Array)
        return (0, array.__dlpack__(stream=stream)) if old else export(name, array, stream)

    if not flags:
        monkeypatch.setattr(arrays, "_export", export_without_flags)
    jnp = jax.numpy
    k, locked = jnp.ones((3, 128), jnp.float16), jnp.zeros((7, 128), jnp.float16)
    caches, producers = caches_of("float16")
    position = ("k_cache", "v_cache").index(which)
    producers[position] = locked
    with pytest.raises(ValueError, match=f"{which} must be writable, got a read-only array .JAX arrays never change"):
        store_kvcache(k, k, *producers, jnp.asarray(SLOTS))
    check(caches, [[], []], [])
    assert not np.asarray(locked).any()


@needs_kernels
def test_jax_array_without_memory(jax):
    k = jax.numpy.ones((3, 128), jax.numpy.float16)
    k.delete()
    _, producers = caches_of("float16")
    with pytest.raises(ValueError, match="k is a JAX array without memory"):
        store_kvcache(k, k, *producers, index_array(SLOTS)[1])


@needs_kernels
def test_jax_tracers_are_refused(jax):
    """Within jit there is no array yet."""
    caches, producers = caches_of("float16")

    def store(k):
        store_kvcache(k, k, *producers, index_array(SLOTS)[1])
        return k

    with pytest.raises(TypeError, match=r"k must be an array that a kernel can reach, got jax\..*Tracer"):
        jax.jit(store)(jax.numpy.ones((3, 128), jax.numpy.float16))
    check(caches, [[], []], [])


@needs_compiler
def test_jax_arrays_on_the_host_are_refused():
    jax = optional("jax")
    k = jax.device_put(np.ones((3, 128), np.float16), jax.devices("cpu")[0])
    with pytest.raises(TypeError, match=r"k must be an array that a kernel can reach, got jax.* in host memory;"):
        read_array("k", k, 0)


class DLPackOnly:
    """All that is known of the array is its DLPack export."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class InterfaceOnly:
    """All that is known of the array is its array interface."""

    def __init__(self, array):
        self.array = array

    @property
    def __cuda_array_interface__(self):
        return self.array.__cuda_array_interface__


def store_through(wrap, arrays):
    """Store three rows of 64 fp32 into slots of 7; compare with NumPy."""
    expected = [np.zeros((7, 64), np.float32) for _ in range(2)]
    for cache, first in zip(expected, (1, 1000), strict=True):
        cache[SLOTS] = np.arange(first, first + 192).reshape(3, 64)
    store_kvcache(*map(wrap, arrays))
    return arrays[2:4], expected


def host_arrays():
    k, v = (np.arange(first, first + 192, dtype=np.float32).reshape(3, 64) for first in (1, 1000))
    return k, v, np.zeros((7, 64), np.float32), np.zeros((7, 64), np.float32), np.array(SLOTS)


@pytest.mark.skipif(not SIMULATED, reason="NumPy's memory is the simulator's alone")
def test_numpy_through_dlpack():
    caches, expected = store_through(DLPackOnly, host_arrays())
    np.testing.assert_array_equal(caches, expected)


@pytest.mark.skipif(not SIMULATED, reason="NumPy's memory is the simulator's alone")
def test_numpy_read_only_through_dlpack():
    arrays = host_arrays()
    arrays[3].flags.writeable = False
    with pytest.raises(ValueError, match="v_cache must be writable"):
        store_kvcache(*map(DLPackOnly, arrays))
    assert not arrays[2].any()
    assert not arrays[3].any()


@needs_kernels
def test_torch_through_dlpack():
    torch = optional("torch")
    tensors = [torch.from_numpy(array).to("cuda" if ON_GPU else "cpu") for array in host_arrays()]
    if ON_GPU:
        torch.cuda.synchronize()
    caches, expected = store_through(DLPackOnly, tensors)
    synchronize()
    for cache, right in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cache.cpu().numpy(), right)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("wrap", [DLPackOnly, InterfaceOnly])
def test_cupy_through_protocols(wrap):
    cupy = optional("cupy")
    caches, expected = store_through(wrap, [cupy.asarray(array) for array in host_arrays()])
    synchronize()
    for cache, right in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(cache), right)
