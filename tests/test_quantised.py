"""The quantised store: the formats' arithmetic, and the whole call on the back end that this process has.

Its device code is in test_quantised_code.py, and what only a GPU shows in test_quantised_gpu.py.
"""

import numpy as np
import pytest
from fp8_oracle import (
    DTYPES,
    LARGEST,
    as_float32,
    every_format,
    interesting_bits,
    nearest,
    positive_values,
    quantised_bytes,
)
from numba import cuda
from support import (
    SIMULATED,
    Rows,
    index_array,
    interface_of,
    needs_kernels,
    needs_simulator,
    optional,
    synchronize,
)

from numba_kvcache import quantised, store_kvcache_fp8
from numba_kvcache.arrays import ArrayFacts, ArrayView
from numba_kvcache.fp8 import FORMATS, round_float32
from numba_kvcache.quantised_kernel import Side


def test_the_table_is_right():
    for to, largest in LARGEST.items():
        values = positive_values(to)
        assert values[-1] == largest
        assert len(values) - 1 == FORMATS[to].largest
        assert np.all(np.diff(values) > 0)
    assert (positive_values("e4m3")[1], positive_values("e5m2")[1]) == (2**-9, 2**-16)


@every_format
def test_rounding(to):
    bits = interesting_bits(to)
    found = np.array([round_float32(int(each), FORMATS[to]) for each in bits], np.uint8)
    np.testing.assert_array_equal(found, nearest(bits.view(np.float32), to))


@every_format
def test_the_oracle_agrees_with_torch(to):
    """torch on a CPU keeps a NaN's sign, which its quotients on a GPU do not have; else bit for bit."""
    torch = optional("torch")
    bits = interesting_bits(to)
    values = torch.from_numpy(bits.view(np.float32))
    found = values.clamp(-LARGEST[to], LARGEST[to]).to(getattr(torch, DTYPES[to])).view(torch.uint8).numpy()
    nan = np.isnan(bits.view(np.float32))
    np.testing.assert_array_equal(np.where(nan, found & 0x7F, found), nearest(bits.view(np.float32), to))


# ----------------------------------------------------------------------------------------------------------------------
# The whole call, on the simulator or on a GPU.

SLOTS = [9, 0, 4, 7, 2]


def device_scale(value):
    scale = np.array([value], np.float32)
    return scale if SIMULATED else cuda.to_device(scale)


class Call:
    """A valid call, whose arguments a test replaces, and what it must leave behind."""

    def __init__(self, source="float16", to="e4m3", width=64, v_width=None, slots=SLOTS, rows=11, **options):
        self.itemsize, self.source, self.to, self.slots = np.dtype(source).itemsize, source, to, slots
        widths = (width, v_width or width)
        self.sources = [
            Rows(len(slots), w * self.itemsize, seed=i, dtype=source, **options.get(name, {}))
            for i, (w, name) in enumerate(zip(widths, ("k", "v"), strict=True))
        ]
        self.caches = [
            Rows(rows, w, seed=i + 2, **options.get(f"{name}_cache", {}))
            for i, (w, name) in enumerate(zip(widths, ("k", "v"), strict=True))
        ]
        self.index_memory, self.indices = index_array(slots, *options.get("index", ()))

    @property
    def arrays(self):
        names = ("k", "v", "k_cache", "v_cache")
        rows = zip(names, (*self.sources, *self.caches), strict=True)
        return {name: each.array for name, each in rows} | {"indices": self.indices, "dtype": self.to}

    def expect(self, k_scale, v_scale, skip_index=None):
        for source, cache, scale in zip(self.sources, self.caches, (k_scale, v_scale), strict=True):
            for row, slot in enumerate(self.slots):
                if slot != skip_index:
                    bits = source.memory.expected[source.where(row)].copy().view(f"u{self.itemsize}")
                    cache.memory.expected[cache.where(slot)] = quantised_bytes(
                        as_float32(bits, self.source), scale, self.to
                    )

    def check(self):
        synchronize()
        for memory in (*(rows.memory for rows in (*self.sources, *self.caches)), self.index_memory):
            memory.check()

    def refuse(self, error, match, **arguments):
        scales = {"k_scale": 1.0, "v_scale": 1.0}
        with pytest.raises(error, match=match):
            store_kvcache_fp8(**{**self.arrays, **scales, **arguments})
        self.check()


def store_and_check(call, k_scale=0.37, v_scale=2.0, **options):
    call.expect(k_scale, v_scale, options.get("skip_index"))
    store_kvcache_fp8(**call.arrays, k_scale=k_scale, v_scale=v_scale, **options)
    call.check()


@needs_kernels
@every_format
@pytest.mark.parametrize("source", ["float16", "float32"])
@pytest.mark.parametrize("width", [4, 12, 64, 100, 256, 2052])
def test_widths(source, to, width):
    store_and_check(Call(source, to, width))


@needs_kernels
@pytest.mark.parametrize("scale", [1.0, 0.1, 3.0, 1e-3, 0.0, -0.0, -1.5, np.inf, -np.inf, np.nan, 1e-42, 1e38, 1e60, 2])
def test_scales(scale):
    with np.errstate(over="ignore"):
        store_and_check(Call(width=256), scale, np.float32(scale))


@needs_kernels
@pytest.mark.parametrize("on_device", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("batch", [1, 5])
def test_scales_on_the_device(on_device, batch):
    call = Call(slots=SLOTS[:batch])
    scales = [device_scale(value) if there else value for value, there in zip((0.7, 1.9), on_device, strict=True)]
    call.expect(0.7, 1.9)
    store_kvcache_fp8(**call.arrays, k_scale=scales[0], v_scale=scales[1])
    call.check()


@needs_kernels
@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
@pytest.mark.parametrize("shift", [4, 8, 12])
def test_any_base_off_the_vector_grid(name, shift):
    store_and_check(Call(width=128, **{name: {"shift": shift}}))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "pitch"),
    [("k", 260), ("k", 264), ("k", -256), ("v", 0), ("v", 1028), ("k_cache", 132), ("v_cache", 136), ("k_cache", -144)],
)
def test_any_pitch(name, pitch):
    store_and_check(Call(width=128, **{name: {"pitch": pitch}}))


@needs_kernels
@pytest.mark.parametrize(("width", "v_width"), [(128, 64), (576, 512), (12, 2052), (4096, 4)])
def test_k_and_v_of_different_widths(width, v_width):
    store_and_check(Call("float32", width=width, v_width=v_width))


@needs_kernels
@pytest.mark.parametrize("index", [("int32",), ("int64", 3), ("int32", -1)])
def test_index_types_and_strides(index):
    store_and_check(Call(index=index))


@needs_kernels
@pytest.mark.parametrize(("slots", "skip"), [([9, -1, 4], -1), ([9, 3, 4], 3), ([9, 2**40, 4], 2**40), ([-1], -1)])
def test_skip_index(slots, skip):
    store_and_check(Call(slots=slots), skip_index=skip)


@needs_kernels
def test_empty_batch():
    call = Call(slots=[], rows=11)
    store_and_check(call)


@needs_kernels
def test_size_limit():
    store_and_check(Call(slots=[9, 0]), size_limit=10)


@needs_simulator
@pytest.mark.parametrize("slot", [-1, 11])
def test_slots_out_of_bounds_fail_on_the_simulator(slot):
    call = Call(slots=[slot])
    with pytest.raises(
        AssertionError, match=r"quantised_kernel\.py:\d+: store_kvcache_fp8: .*0 <= index && index < size_limit"
    ):
        store_kvcache_fp8(**call.arrays, k_scale=1.0, v_scale=1.0)
    for rows in call.caches:
        rows.memory.check()


@needs_simulator
@every_format
def test_bfloat16_on_the_simulator(to):
    """NumPy has no bfloat16, so the word itself."""
    from numba_kvcache.simulator import quantiser

    bits = np.random.default_rng(3).integers(0, 2**16, 4096, np.uint16)
    scale = np.array(0.3, np.float32)
    (words,) = quantiser("bfloat16", FORMATS[to], 2048, True)([tuple(bits.view(np.uint32))], int(scale.view(np.uint32)))
    found = np.array(words, np.uint32).view(np.uint8)
    np.testing.assert_array_equal(found, quantised_bytes(as_float32(bits, "bfloat16"), scale, to))


def torch_device():
    return "cpu" if SIMULATED else "cuda"


@needs_kernels
@every_format
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("own", [True, False], ids=["fp8 cache", "uint8 cache"])
def test_torch(source, to, own):
    """Against torch's own operations; NaN signs aside, which differ between its CPU and its GPU."""
    torch = optional("torch")
    torch.manual_seed(1)
    kind, there = getattr(torch, DTYPES[to]), torch_device()
    k, v = (torch.randn(5, 128, device=there).mul(100).to(getattr(torch, source)) for _ in range(2))
    k[1, 3], k[2, 5], v[0, 0], v[4, 127] = float("nan"), float("inf"), -0.0, -float("inf")
    caches = [torch.zeros(11, 128, dtype=torch.uint8, device=there) for _ in range(2)]
    slots = torch.tensor(SLOTS, device=there)
    k_scale, v_scale = torch.tensor(0.3, device=there), torch.tensor([1.7], device=there)
    given = [cache.view(kind) for cache in caches] if own else caches
    store_kvcache_fp8(k, v, *given, slots, k_scale, 1.7, dtype=None if own else to)
    for source_rows, scale, cache in zip((k, v), (k_scale, v_scale), caches, strict=True):
        right = torch.zeros_like(cache)
        quotients = (source_rows.float() / scale).clamp(-LARGEST[to], LARGEST[to])
        right[slots] = quotients.to(kind).view(torch.uint8)
        assert torch.equal(torch.where(right == 0xFF, 0x7F, right), cache)


# ----------------------------------------------------------------------------------------------------------------------
# What is refused. (Checks that the plain store has too are contract.py's, and tested there; one of each kind is here.)

REFUSED = {
    "source": (TypeError, "k must be one of bfloat16, float16, float32, got int16", {"k": ("int16", 5, 128)}),
    "sources differ": (TypeError, "k and v must have one dtype, got float16 and float32", {"v": ("float32", 5, 256)}),
    "cache": (TypeError, "k_cache must be one of float8_e4m3fn, float8_e5m2 and uint8, got int8",
              {"k_cache": ("int8", 11, 64)}),
    "no dtype": (ValueError, "uint8 caches mean, got None; pass dtype=\"e4m3\" or dtype=\"e5m2\"", {"dtype": None}),
    "dtype": (ValueError, "dtype must be one of 'e4m3', 'e5m2', by name, got 'fp8'", {"dtype": "fp8"}),
    "dtype's kind": (TypeError, "dtype must be one of 'e4m3', 'e5m2', by name, got 8", {"dtype": 8}),
    "width": (ValueError, "rows of k must have a multiple of 4 elements .* got 62", {"k": ("float16", 5, 124),
              "k_cache": ("uint8", 11, 62)}),
    "widths differ": (ValueError, "v and v_cache must have one row shape", {"v_cache": ("uint8", 11, 32)}),
    "rows": (ValueError, "k and indices must have one row count B", {"k": ("float16", 4, 128)}),
    "limit": (ValueError, "size_limit must not exceed", {"size_limit": 12}),
    "skip": (ValueError, "skip_index must be within int64", {"skip_index": 2**63}),
    "skip's kind": (TypeError, "skip_index must be an integer", {"skip_index": 1.5}),
    "no scale": (TypeError, "k_scale must be a float or a device array .* got NoneType", {"k_scale": None}),
    "huge scale": (ValueError, "k_scale must be within the range of a float", {"k_scale": 10**400}),
    "bool scale": (TypeError, "v_scale must be a float .* got bool", {"v_scale": True}),
}  # fmt: skip


@needs_kernels
@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    error, message, arguments = REFUSED[case]
    arrays = {
        name: Rows(value[1], value[2], seed=9, dtype=value[0]).array if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }
    Call().refuse(error, message, **arrays)


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "shape", "error", "message"),
    [
        ("float64", (1,), TypeError, "k_scale must be float32 where it is an array, got float64"),
        ("float32", (2,), ValueError, r"k_scale must hold one element.* got shape \(2,\)"),
        ("float32", (0,), ValueError, r"k_scale must hold one element.* got shape \(0,\)"),
    ],
)
def test_scale_arrays(dtype, shape, error, message):
    scale = np.ones(shape, dtype)
    Call().refuse(error, message, k_scale=scale if SIMULATED else cuda.to_device(scale))


def view_of(rows, address, stride):
    count, row_bytes = rows
    itemsize = row_bytes // 64
    dtype = {1: "float8_e4m3fn", 2: "bfloat16"}[itemsize]
    return ArrayView(address, ArrayFacts((count, 64), (stride, itemsize), dtype, itemsize, 0, False))


@pytest.mark.parametrize(
    ("addresses", "strides", "k", "v"),
    [
        ((0x1000, 0x2000, 0x3000, 0x4000), (128, 128, 64, 64), (16, 16), (16, 16)),
        ((0x1008, 0x2004, 0x3000, 0x4000), (128, 128, 64, 64), (8, 16), (4, 16)),
        ((0x1000, 0x2000, 0x3004, 0x4008), (128, 128, 64, 64), (16, 4), (16, 8)),
        ((0x1000, 0x2000, 0x3000, 0x4000), (132, 136, 72, 68), (4, 8), (8, 4)),
    ],
)
def test_source_and_cache_are_as_wide_as_each_is_aligned(addresses, strides, k, v):
    """A simulator would not notice: there nothing faults."""
    rows = ((2, 128), (2, 128), (8, 64), (8, 64))
    views = [view_of(*each) for each in zip(rows, addresses, strides, strict=True)]
    indices = ArrayView(0x5000, ArrayFacts((2,), (8,), "int64", 8, 0, False))
    scales = quantised.Scale(0x6000, 0), quantised.Scale(0x3F800000)
    request = quantised.check_quantised_store(*views, indices, *scales)
    assert (request.key.k, request.key.v) == (Side(*k, True), Side(*v, False))
    assert request.key.to == "e4m3"
    assert request.arguments == (*addresses, 0x5000, 0x6000, 0x3F800000, *strides, 8, 2, 8, 0)


def test_scale_on_another_device():
    rows = ((2, 128), (2, 128), (8, 64), (8, 64))
    views = [view_of(each, 0x1000, each[1]) for each in rows]
    indices = ArrayView(0x5000, ArrayFacts((2,), (8,), "int64", 8, 0, False))
    with pytest.raises(ValueError, match="got v_scale on device 1 and k_cache on device 0"):
        quantised.check_quantised_store(*views, indices, quantised.Scale(0x6000, 0), quantised.Scale(0x6000, 1))


@needs_kernels
def test_read_only_cache():
    call = Call()
    cache = call.caches[0]
    locked = interface_of(cache, data=(cache.memory.address(cache.start), True))
    call.refuse(ValueError, "k_cache must be writable", k_cache=locked)


@needs_kernels
def test_base_off_the_word_grid():
    Call().refuse(ValueError, "k_cache must be aligned to 4 bytes", k_cache=Rows(11, 64, shift=2, seed=9).array)


@needs_kernels
def test_a_dtype_that_the_caches_do_not_have():
    torch = optional("torch")
    there = torch_device()
    k = torch.ones(1, 16, device=there)
    cache = torch.zeros(2, 16, dtype=torch.uint8, device=there)
    with pytest.raises(ValueError, match="dtype must be that of the caches, got 'e5m2' with caches of float8_e4m3fn"):
        store_kvcache_fp8(
            k, k, *(cache.view(torch.float8_e4m3fn),) * 2, torch.tensor([1], device=there), 1.0, 1.0, dtype="e5m2"
        )
    assert not cache.any()
