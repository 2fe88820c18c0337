"""The quantised store's device code, without a GPU: its arithmetic run on this CPU, and its machine code.

The device's division and its software conversion are LLVM code that knows nothing of a GPU, so they are compiled for
the CPU here, and run over everything that could go wrong.
"""

import re

import numpy as np
import pytest
from fp8_oracle import as_float32, every_format, interesting_bits, nearest, quantised_bytes
from support import SIMULATED, needs_compiler

from numba_kvcache.fp8 import FORMATS
from numba_kvcache.layout import Strategy, plan_store
from numba_kvcache.quantised_kernel import QuantisedSpec, Side

if not SIMULATED:
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic

    from numba_kvcache import compiler, device, inspection

pytestmark = needs_compiler

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


def test_quotients_at_the_roundings_of_fp8_are_ieees():
    """All significands of fp16, bf16's among them, and every 31st of fp32. (All 2**23 of those were tried once.)"""
    assert hard_cases(corrected, np.arange(2**10) << 13) == 0
    assert hard_cases(corrected, np.arange(0, 2**23, 31)) == 0


def test_the_reciprocal_alone_would_not_do():
    """The control of the test above."""
    assert hard_cases(uncorrected, np.arange(2**10) << 13) > 1000


# ----------------------------------------------------------------------------------------------------------------------
# Machine code. Expected loads and stores are worked out by hand: a thread takes 16 bytes of K and of V.

CODE = {
    # source, elements of a row, (source, cache) alignment: loads and stores of one thread, K and V together
    ("bfloat16", 1024, 16, 16): ({16: 2}, {8: 2}),
    ("float16", 128, 16, 16): ({16: 2}, {8: 2}),
    ("float32", 1024, 16, 16): ({16: 2}, {4: 2}),
    ("bfloat16", 4096, 16, 16): ({16: 2}, {8: 2}),  # several parts, a vector per thread in each
    ("float32", 16384, 16, 16): ({16: 2}, {4: 2}),
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


@pytest.mark.parametrize("cc", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("skipping", [False, True])
@pytest.mark.parametrize("release_first", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_rows_and_scales_do_not_wait_for_the_index(cc, skipping, release_first, on_device):
    """As test_machine_code.py asks of the plain store: no branch before the last load."""
    strategy = Strategy(release_first=release_first)
    spec = spec_of("bfloat16", 1024, 16, 16, cc, on_device=on_device, strategy=strategy, skipping=skipping)
    bases = [i.base for i in inspection.read_sass(machine_code(spec, cc)[1]).instructions]
    loads = [at for at, base in enumerate(bases) if base == "LDG"]
    assert len(loads) == 3 + 2 * on_device  # the index, K, V, the scales
    assert not {"BRA", "EXIT", "BSSY", "BSYNC", "CALL"} & {*bases[bases.index("ACQBULK") : loads[-1]]}


@pytest.mark.parametrize(
    "strategy", [Strategy(), Strategy(bypass_l1=True), Strategy(release_first=True)], ids=["plain", "past_l1", "first"]
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


def test_arithmetic_is_ieees():
    """No approximate division, nothing flushed to zero, no double precision, one reciprocal per scale."""
    ptx = compiler.compile_ptx(spec_of("float16", 1024, 16, 16, (9, 0)), (9, 0))
    assert ".approx" not in ptx
    assert ".ftz" not in ptx
    assert ".f64" not in ptx
    assert len(re.findall(r"(?:rcp|div)\.rn\.f32", ptx)) == 2
    assert ptx.count("cvt.rn.satfinite.e4m3x2.f32") == 8


def test_what_is_not_asked_for_costs_nothing():
    """The skip index is a parameter that only a kernel that skips reads."""
    for skipping in (False, True):
        ptx = compiler.compile_ptx(spec_of("bfloat16", 1024, 16, 16, (9, 0), skipping=skipping), (9, 0))
        last = max(map(int, re.findall(r"_param_(\d+)", ptx)))
        assert last == len(QuantisedSpec.parameters) - 1
        assert bool(re.search(rf"ld\.param\S*\s+\S+ \[\S*_param_{last}\]", ptx)) is skipping


def test_entry_parameters_and_assert():
    spec = spec_of("bfloat16", 1024, 16, 16, (9, 0))
    ptx = compiler.compile_ptx(spec, (9, 0))
    assert re.findall(r"\.entry\s+([\w$]+)", ptx) == [spec.name]
    parameters = re.findall(r"\.param \.[a-z](\d+) ", ptx[ptx.index(".entry") :].split(")")[0])
    assert parameters == ["64"] * 12 + ["32", "64", "64"]
    assert "__assertfail" in ptx


def test_the_line_in_the_assert_is_the_checks():
    from numba_kvcache import quantised_kernel

    with open(quantised_kernel.__file__) as file:
        lines = file.read().splitlines()
    assert lines[quantised_kernel._CHECK_LINE - 1].strip() == "check_slot(in_bounds)"


@pytest.mark.parametrize("name", ["quantised_kernel.py", "fp8.py"])
def test_disk_cache_key_depends_on_the_sources(name, monkeypatch):
    spec = spec_of("bfloat16", 1024, 16, 16, (9, 0))
    before, real = compiler.cache_key(spec, (9, 0)), compiler.Path.read_bytes
    monkeypatch.setattr(compiler.Path, "read_bytes", lambda p: real(p) + (b" " if p.name == name else b""))
    monkeypatch.setattr(compiler, "_sources_digest", compiler._sources_digest.__wrapped__)
    assert compiler.cache_key(spec, (9, 0)) != before
