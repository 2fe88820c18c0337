"""The quantised store: its arithmetic against a table of all fp8 values, the whole call, machine code, and the GPU.

The device's division and its software conversion are LLVM code that knows nothing of a GPU, so they are also compiled
for the CPU here, and run over everything that could go wrong.
"""

import re

import numpy as np
import pytest
from numba import cuda
from support import (
    SIMULATED,
    Rows,
    index_array,
    interface_of,
    needs_compiler,
    needs_gpu,
    needs_kernels,
    needs_simulator,
    optional,
    run_python,
    synchronize,
)

from numba_kvcache import quantised, store_kvcache_fp8
from numba_kvcache.arrays import ArrayFacts, ArrayView
from numba_kvcache.fp8 import FORMATS, round_float32
from numba_kvcache.layout import Strategy, plan_store
from numba_kvcache.quantised_kernel import QuantisedSpec, Side

if not SIMULATED:
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic

    from numba_kvcache import compiler, device, inspection

# ----------------------------------------------------------------------------------------------------------------------
# The oracle: the formats by their definition, and the nearest of all their values.

LAYOUTS = {"e4m3": (3, 7), "e5m2": (2, 15)}  # mantissa bits, bias; the exponent has what is left
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
DTYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
every_format = pytest.mark.parametrize("to", LAYOUTS)


def positive_values(to):
    """The finite values from 0 up, in the order of their bytes."""
    mantissa_bits, bias = LAYOUTS[to]
    values = []
    for byte in range(128):
        exponent, mantissa = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        if exponent:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        else:
            value = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
        values.append(value)
    # e4m3 gives up one code for NaN, e5m2 the topmost exponent for infinity and NaN.
    return np.array(values[:127] if to == "e4m3" else values[: 128 - 2**mantissa_bits])


def nearest(quotients, to):
    """The bytes of the values nearest to float32 quotients: ties to even, clipped, NaN 0x7F."""
    values = positive_values(to)
    midpoints = (values[:-1] + values[1:]) / 2  # all exact in float64
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitudes = np.abs(quotients.astype(np.float64))
    below = np.searchsorted(midpoints, magnitudes, side="left")
    tie = np.append(midpoints, np.inf)[below] == magnitudes
    finite = np.isfinite(magnitudes)
    byte = np.where(tie & finite & (below % 2 == 1), below + 1, below) | np.where(np.signbit(quotients), 0x80, 0)
    return np.where(np.isnan(quotients), 0x7F, byte).astype(np.uint8)


def as_float32(bits, source):
    """Elements of `source`, given as unsigned integers of their size, as float32."""
    if source == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return bits.view(source).astype(np.float32)


def quantised_bytes(values, scale, to):
    with np.errstate(all="ignore"):
        return nearest(values / np.float32(scale), to)


def test_the_table_is_right():
    for to, largest in LARGEST.items():
        values = positive_values(to)
        assert values[-1] == largest
        assert len(values) - 1 == FORMATS[to].largest
        assert np.all(np.diff(values) > 0)
    assert (positive_values("e4m3")[1], positive_values("e5m2")[1]) == (2**-9, 2**-16)


def interesting_bits(to, seed=0, count=20_000):
    """float32 patterns: at and beside all values and midpoints of `to`, special ones, random ones; of both signs."""
    values = positive_values(to)
    near = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32).view(np.uint32)
    near = (near.astype(np.int64)[:, None] + np.arange(-2, 3)).ravel() % 2**32
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x43E80000]
    random = np.random.default_rng(seed).integers(0, 2**32, count, np.uint32)
    bits = np.concatenate([near.astype(np.uint32), np.array(special, np.uint32), random])
    return np.concatenate([bits, bits ^ np.uint32(0x80000000)])


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
# The device's arithmetic, compiled for this CPU.

SCALE_BITS = np.array(
    [0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x3FFFFFFF, 0x3EAAAAAB, 0x3DCCCCCD, 0x7F7FFFFF, 0x7F800000,
     0x7FC00000, *[(127 + e << 23) + d for e in (-126, -100, -64, -63, -62, 62, 63, 64, 100, 127) for d in (-1, 0, 1)]],
    np.uint32,
)  # fmt: skip
SCALE_BITS = np.concatenate([SCALE_BITS, SCALE_BITS ^ np.uint32(0x80000000)])


def cpu_functions(to, divide):
    """`quantise(value, scale)` and `quotient`, by the device's own LLVM code, and IEEE's quotient; all on bits."""
    uint32 = types.uint32

    @intrinsic
    def quotient(typingctx, value, scale):
        def codegen(context, b, sig, args):
            value, scale = (b.bitcast(arg, device.F32) for arg in args)
            return b.bitcast(divide(b, value, scale), device.I32)

        return uint32(uint32, uint32), codegen

    @intrinsic
    def exact_quotient(typingctx, value, scale):
        def codegen(context, b, sig, args):
            return b.bitcast(b.fdiv(*(b.bitcast(arg, device.F32) for arg in args)), device.I32)

        return uint32(uint32, uint32), codegen

    @intrinsic
    def encode(typingctx, bits):
        return uint32(uint32), lambda context, b, sig, args: device.round_in_software(b, args[0], FORMATS[to])

    return quotient, exact_quotient, encode


def corrected(b, value, scale):
    return device.divide(b, value, device.prepare_divisor(b, scale))


def uncorrected(b, value, scale):
    return b.fmul(value, b.fdiv(ir.Constant(device.F32, 1.0), scale))


@needs_compiler
@every_format
def test_software_conversion(to):
    _, _, encode = cpu_functions(to, corrected)
    bits = interesting_bits(to, count=2_000_000)

    @njit
    def run(bits, out):
        for i in range(bits.size):
            out[i] = encode(bits[i])

    found = np.empty(bits.size, np.uint8)
    run(bits, found)
    np.testing.assert_array_equal(found, nearest(bits.view(np.float32), to))


@needs_compiler
@every_format
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_division(to, source):
    """Every bf16 and fp16, and random fp32, over ordinary, odd and impossible scales."""
    quotient, _, encode = cpu_functions(to, corrected)
    rng = np.random.default_rng(7)
    if source == "float32":
        values = np.concatenate([interesting_bits(to), SCALE_BITS]).view(np.float32)
    else:
        values = as_float32(np.arange(65536, dtype=np.uint16), source)
    scales = np.concatenate([SCALE_BITS, rng.integers(0, 2**32, 60, np.uint32)])
    scales = np.concatenate([scales, np.exp2(rng.uniform(-12, 12, 60)).astype(np.float32).view(np.uint32)])

    @njit
    def run(bits, scale, out):
        for i in range(bits.size):
            out[i] = encode(quotient(bits[i], scale))

    found = np.empty(values.size, np.uint8)
    wrong = []
    for scale in scales:
        run(values.view(np.uint32), scale, found)
        if not np.array_equal(found, quantised_bytes(values, scale.view(np.float32), to)):
            wrong.append(hex(scale))
    assert wrong == []


def hard_cases(divide, significands):
    """How many quotients next to a midpoint of fp8 values are not IEEE's, over all such scales.

    A quotient that is off by a few units in the last place rounds to another fp8 value only where one lies between, so
    only scales next to value / midpoint matter. Exponents do not: those far from 0 are test_division's.
    """
    quotient, exact_quotient, _ = cpu_functions("e4m3", divide)
    midpoints = (np.float32(1) + np.arange(16, dtype=np.float32) / 16).view(np.uint32)  # those of e5m2 among them

    @njit
    def run(significands, midpoints):
        wrong = 0
        for significand in significands:
            value = np.uint32(0x3F800000 | significand)
            for midpoint in midpoints:
                near = exact_quotient(value, midpoint)
                for away in range(-4, 5):
                    scale = np.uint32(near + away)
                    wrong += quotient(value, scale) != exact_quotient(value, scale)
        return wrong

    return run(significands.astype(np.uint32), midpoints)


@needs_compiler
def test_quotients_at_the_roundings_of_fp8_are_ieees():
    """All significands of fp16, bf16's among them, and every 31st of fp32. (All 2**23 of those were tried once.)"""
    assert hard_cases(corrected, np.arange(2**10) << 13) == 0
    assert hard_cases(corrected, np.arange(0, 2**23, 31)) == 0


@needs_compiler
def test_the_reciprocal_alone_would_not_do():
    """The control of the test above."""
    assert hard_cases(uncorrected, np.arange(2**10) << 13) > 1000


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
    "dtype": (ValueError, "dtype must be one of e4m3, e5m2, got 'fp8'", {"dtype": "fp8"}),
    "dtype's kind": (TypeError, "dtype must be one of e4m3, e5m2, by name, got int", {"dtype": 8}),
    "width": (ValueError, "rows of k must have a multiple of 4 elements .* got 62", {"k": ("float16", 5, 124),
              "k_cache": ("uint8", 11, 62)}),
    "widths differ": (ValueError, "v and v_cache must have one row width", {"v_cache": ("uint8", 11, 32)}),
    "rows": (ValueError, "k and indices must have one row count B", {"k": ("float16", 4, 128)}),
    "limit": (ValueError, "size_limit must not exceed", {"size_limit": 12}),
    "skip": (ValueError, "skip_index must be within int64", {"skip_index": 2**63}),
    "skip's kind": (TypeError, "skip_index must be an integer", {"skip_index": 1.5}),
    "no scale": (TypeError, "k_scale must be a float or a device array .* got NoneType", {"k_scale": None}),
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


# ----------------------------------------------------------------------------------------------------------------------
# Machine code. Expected loads and stores are worked out by hand: a thread takes 16 bytes of K and of V.

CODE = {
    # source, elements of a row, (source, cache) alignment: loads and stores of one thread, K and V together
    ("bfloat16", 1024, 16, 16): ({16: 2}, {8: 2}),
    ("float16", 128, 16, 16): ({16: 2}, {8: 2}),
    ("float32", 1024, 16, 16): ({16: 2}, {4: 2}),
    ("bfloat16", 4096, 16, 16): ({16: 4}, {8: 4}),
    ("float32", 16384, 16, 16): ({16: 8}, {4: 8}),
    ("bfloat16", 100, 16, 16): ({8: 2}, {4: 2}),  # 200 bytes are no multiple of 16
    ("bfloat16", 1024, 8, 16): ({8: 4}, {8: 2}),
    ("bfloat16", 1024, 16, 4): ({16: 2}, {4: 4}),
    ("float32", 256, 4, 8): ({4: 8}, {4: 2}),
}
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


def spec_of(source, width, source_alignment, cache_alignment, cc, *, on_device=False, strategy=None, skipping=False):
    side = Side(source_alignment, cache_alignment, on_device)
    layout = plan_store(width * ITEMSIZE[source])
    return QuantisedSpec(
        layout, source, "e4m3", side, side, 64, skipping, cc >= (9, 0), cc >= (8, 9), strategy or Strategy()
    )


def machine_code(spec, cc):
    kernel = inspection.compile_kernel(spec, cc)
    nvdisasm = inspection.find_nvdisasm()
    assert nvdisasm is not None, inspection.NVDISASM_MISSING
    return kernel, inspection.disassemble(kernel.cubin, nvdisasm)


@needs_compiler
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("case", CODE, ids=str)
def test_machine_code(case, cc):
    kernel, sass = machine_code(spec_of(*case, cc, on_device=True), cc)
    loads, stores = CODE[case]
    counts, resources = inspection.parse_sass(sass), inspection.parse_report(kernel.link_report)
    bases = [instruction.base for instruction in inspection.read_sass(sass).instructions]
    rest = counts.loads.copy()
    rest[8] -= 1  # the index
    rest[4] -= 2  # the scales
    assert (+rest, counts.stores) == (loads, stores)
    assert (resources.stack_bytes, resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0, 0)
    assert counts.local_accesses == counts.accesses_before_wait == 0
    assert (counts.waits, counts.releases >= 1) == ((1, True) if cc >= (9, 0) else (0, False))
    assert "LDG" not in bases[bases.index("STG") :]
    if cc >= (9, 0):
        # What one vector of K and of V takes lets 1,536 threads run on an SM; four of each, 1,024.
        assert resources.registers <= (40 if sum(stores.values()) * 16 <= 32 else 64)
        assert "F2FP.SATFINITE.E4M3" in sass
    else:
        assert resources.registers <= 80
        assert "F2FP.SATFINITE" not in sass


@needs_compiler
@pytest.mark.parametrize(
    "strategy", [Strategy(), Strategy(release_first=True), Strategy(bypass_l1=True)], ids=["plain", "first", "past_l1"]
)
def test_scales_are_read_after_the_wait(strategy):
    for on_device in (False, True):
        spec = spec_of("bfloat16", 1024, 16, 16, (9, 0), on_device=on_device, strategy=strategy)
        ptx = compiler.compile_ptx(spec, (9, 0))
        before, wait, after = ptx.partition("griddepcontrol.wait")
        assert wait
        assert "ld.global" not in before
        assert len(re.findall(r"ld\.global\S*\.u32\s+%r\d+,", after)) == 2 * on_device
        assert ".nc" not in ptx


@needs_compiler
def test_arithmetic_is_ieees():
    """No approximate division, nothing flushed to zero, no double precision, one reciprocal per scale."""
    ptx = compiler.compile_ptx(spec_of("float16", 1024, 16, 16, (9, 0)), (9, 0))
    assert ".approx" not in ptx
    assert ".ftz" not in ptx
    assert ".f64" not in ptx
    assert len(re.findall(r"(?:rcp|div)\.rn\.f32", ptx)) == 2
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 8


@needs_compiler
def test_what_is_not_asked_for_costs_nothing():
    """The skip index is a parameter that only a kernel that skips reads."""
    for skipping in (False, True):
        ptx = compiler.compile_ptx(spec_of("bfloat16", 1024, 16, 16, (9, 0), skipping=skipping), (9, 0))
        last = max(map(int, re.findall(r"_param_(\d+)", ptx)))
        assert last == len(QuantisedSpec.parameters) - 1
        assert bool(re.search(rf"ld\.param\S*\s+\S+ \[\S*_param_{last}\]", ptx)) is skipping


@needs_compiler
def test_entry_parameters_and_assert():
    spec = spec_of("bfloat16", 1024, 16, 16, (9, 0))
    ptx = compiler.compile_ptx(spec, (9, 0))
    assert re.findall(r"\.entry\s+([\w$]+)", ptx) == [spec.name]
    parameters = re.findall(r"\.param \.[a-z](\d+) ", ptx[ptx.index(".entry") :].split(")")[0])
    assert parameters == ["64"] * 12 + ["32", "64", "64"]
    assert "__assertfail" in ptx


@needs_compiler
def test_the_line_in_the_assert_is_the_checks():
    from numba_kvcache import quantised_kernel

    with open(quantised_kernel.__file__) as file:
        lines = file.read().splitlines()
    assert lines[quantised_kernel._CHECK_LINE - 1].strip() == "check_slot(in_bounds)"


@needs_compiler
@pytest.mark.parametrize("name", ["quantised_kernel.py", "fp8.py"])
def test_disk_cache_key_depends_on_the_sources(name, monkeypatch):
    spec = spec_of("bfloat16", 1024, 16, 16, (9, 0))
    before, real = compiler.cache_key(spec, (9, 0)), compiler.Path.read_bytes
    monkeypatch.setattr(compiler.Path, "read_bytes", lambda p: real(p) + (b" " if p.name == name else b""))
    monkeypatch.setattr(compiler, "_sources_digest", compiler._sources_digest.__wrapped__)
    assert compiler.cache_key(spec, (9, 0)) != before


# ----------------------------------------------------------------------------------------------------------------------
# On a GPU: everything at once.

GPU_SCALES = [1.0, 0.5, 2.0, 0.1, 0.3, 1 / 448, 3.7e-3, 7.1, 448.0, 1.9999999, 1e-30, 1e30, 1e-42, -0.7, 0.0, -0.0,
              float("inf"), float("nan")]  # fmt: skip


def every_pattern(torch, source):
    """All bit patterns of a 16-bit dtype, or 2**20 random ones of fp32, as rows of 1,024."""
    if source == "float32":
        bits = np.random.default_rng(1).integers(0, 2**32, 2**20, np.uint32)
        return torch.from_numpy(bits.view(np.float32)).cuda().view(-1, 1024), bits
    bits = np.arange(2**16, dtype=np.uint16)
    return torch.from_numpy(bits.view(np.int16)).cuda().view(getattr(torch, source)).view(-1, 1024), bits


@pytest.fixture(params=[True, False], ids=["in hardware", "in software"])
def _conversion(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(quantised, "CONVERSION_SINCE", (99, 0))
    monkeypatch.setattr(quantised, "_plans", {})


@needs_gpu
@pytest.mark.usefixtures("_conversion")
@every_format
@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
def test_every_pattern(source, to):
    """Against the table, and against torch's own operations on the same GPU, NaN and all."""
    torch = optional("torch")
    rows, bits = every_pattern(torch, source)
    values, kind = as_float32(bits, source), getattr(torch, DTYPES[to])
    caches = [torch.zeros(rows.shape, dtype=torch.uint8, device="cuda") for _ in range(2)]
    slots = torch.arange(len(rows), device="cuda")
    random = np.exp2(np.random.default_rng(2).uniform(-20, 20, 40)).astype(np.float32)
    for scale in (*GPU_SCALES, *map(float, random)):
        there = torch.tensor(scale, dtype=torch.float32, device="cuda")
        store_kvcache_fp8(rows, rows, *caches, slots, scale, there, dtype=to)
        right = quantised_bytes(values, scale, to).reshape(rows.shape)
        theirs = (rows.float() / there).clamp(-LARGEST[to], LARGEST[to]).to(kind).view(torch.uint8).cpu().numpy()
        for cache in caches:
            np.testing.assert_array_equal(cache.cpu().numpy(), right, err_msg=f"scale {scale}")
        np.testing.assert_array_equal(theirs, right, err_msg=f"torch, scale {scale}")


@needs_gpu
def test_a_scale_on_the_device_may_change_between_replays():
    torch = optional("torch")
    k = torch.randn(7, 256, device="cuda", dtype=torch.bfloat16)
    caches = [torch.zeros(16, 256, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2)]
    slots = torch.tensor([3, 1, 15, 0, 7, 8, 4], device="cuda")
    k_scale, v_scale = torch.ones(1, device="cuda"), torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        k_scale.mul_(2)  # an ordinary kernel before ours, which ours must wait for
        store_kvcache_fp8(k, k, *caches, slots, k_scale, v_scale)
    for i in range(1, 6):
        v_scale.fill_(0.1 * i)
        graph.replay()
        for cache, scale in zip(caches, (torch.tensor(2.0**i, device="cuda"), v_scale), strict=True):
            right = (k.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(cache.view(torch.uint8)[slots], right.view(torch.uint8))


@needs_gpu
@every_format
def test_batches_and_widths(to):
    torch = optional("torch")
    kind = getattr(torch, DTYPES[to])
    for width in (4, 12, 60, 64, 100, 128, 576, 1024, 2052, 4096, 8192, 20_000):
        for batch in (1, 2, 7, 129, 1000, 4096):
            k, v = (torch.randn(batch, width, device="cuda").mul(50).to(torch.bfloat16) for _ in range(2))
            caches = [torch.full((batch + 37, width), 0xA5, dtype=torch.uint8, device="cuda") for _ in range(2)]
            slots = torch.randperm(batch + 37, device="cuda")[:batch]
            store_kvcache_fp8(k, v, *(cache.view(kind) for cache in caches), slots, 0.25, 0.5)
            for source, cache, scale in zip((k, v), caches, (0.25, 0.5), strict=True):
                right = torch.full_like(cache, 0xA5)
                right[slots] = (source.float() / scale).clamp(-LARGEST[to], LARGEST[to]).to(kind).view(torch.uint8)
                assert torch.equal(cache, right), (width, batch)


@needs_gpu
def test_offsets_past_32_bits():
    torch = optional("torch")
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of GPU memory")
    cache = torch.zeros(9, 2**30, dtype=torch.uint8, device="cuda")[:, :128]
    k = torch.randn(2, 128, device="cuda")
    store_kvcache_fp8(k, k, cache, torch.zeros(9, 128, dtype=torch.uint8, device="cuda"),
                      torch.tensor([8, 5], device="cuda"), 1.0, 1.0, dtype="e4m3")  # fmt: skip
    assert torch.equal(cache[[8, 5]], k.to(torch.float8_e4m3fn).view(torch.uint8))
    assert not cache[[0, 1, 2, 3, 4, 6, 7]].any()


TRAP = """
import os, sys
import numpy as np
from numba import cuda
from numba_kvcache import store_kvcache_fp8
k = cuda.to_device(np.ones((3, 64), np.float32))
caches = [cuda.mapped_array((8, 64), np.uint8) for _ in range(2)]
for cache in caches:
    cache[:] = 0xA5
slots = {slots}
store_kvcache_fp8(k, k, *caches, cuda.to_device(np.array(slots)), 1.0, 1.0, dtype="e4m3", skip_index={skip})
try:
    cuda.synchronize()
except Exception as error:
    print("error", error)
else:
    print("no error")
for cache in caches:
    now = np.array(cache)
    for slot in range(8):
        untouched = np.all(now[slot] == 0xA5)
        assert untouched or (slot in slots and np.all((now[slot] == 0xA5) | (now[slot] == 0x38)))
print("intact")
sys.stdout.flush()
os._exit(0)
"""


@needs_gpu
@pytest.mark.parametrize(
    ("slots", "skip", "trap"), [([2, -1, 5], None, True), ([2, 8, 5], -1, True), ([2, -1, 5], -1, False)]
)
def test_trap(slots, skip, trap):
    result = run_python(TRAP.format(slots=slots, skip=skip))
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert bool(re.search(r"^error .*710", result.stdout, re.MULTILINE)) is trap, output
    line = r"numba_kvcache/quantised_kernel\.py:\d+: store_kvcache_fp8: .*Assertion `0 <= index && index < size_limit`"
    assert bool(re.search(line, result.stderr)) is trap, output
    assert result.stdout.endswith("intact\n"), output
