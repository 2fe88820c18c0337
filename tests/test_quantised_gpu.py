"""The quantised store on a GPU: every pattern, graphs, sizes, 64-bit offsets, traps."""

import re

import numpy as np
import pytest
from fp8_oracle import DTYPES, LARGEST, as_float32, every_format, quantised_bytes
from support import needs_gpu, optional, run_python

from numba_kvcache import quantised, store_kvcache_fp8

pytestmark = needs_gpu

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
