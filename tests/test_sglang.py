"""The drop-in for SGLang's store_cache: meanings on any back end; on a GPU, a grid like that of SGLang's tests."""

import inspect
import logging
import random
import statistics
import sys
import time
import types
from itertools import product

import pytest
from support import ON_GPU, TESTS, needs_gpu, needs_kernels

from benchmarks.roads import without_fast_road
from numba_kvcache import fast_road, native, store_kvcache, warmup

torch = pytest.importorskip("torch", reason="torch is optional and not installed")
kvcache = pytest.importorskip("numba_kvcache.sglang")

# Inductor's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
DEVICE = "cuda" if ON_GPU else "cpu"


def random_rows(rows, width, dtype, seed):
    """Random bits, NaNs of every kind included."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    bits = torch.randint(
        -(2**31), 2**31, (rows, width * dtype.itemsize // 4), dtype=torch.int32, device=DEVICE, generator=generator
    )
    return bits.view(dtype)


def bits_of(tensor):
    return tensor.view(torch.int32)


def small_call(slots=(5, 0, 2)):
    """k, v, k_cache, v_cache, indices, and both caches as they must be afterwards, by a plain loop."""
    k, v = (random_rows(len(slots), 64, torch.float16, seed) for seed in (1, 2))
    caches = [random_rows(8, 64, torch.float16, seed) for seed in (3, 4)]
    right = [bits_of(cache).clone() for cache in caches]
    for after, rows in zip(right, (k, v), strict=True):
        for row, slot in zip(bits_of(rows), slots, strict=True):
            after[slot] = row
    return (k, v, *caches, torch.tensor(slots, device=DEVICE)), right


def assert_caches(arguments, right):
    for cache, after in zip(arguments[2:4], right, strict=True):
        assert torch.equal(bits_of(cache), after)


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"row_bytes": 128},
        {"row_bytes": 128, "v_row_bytes": 128, "size_limit": 8},
        {"size_limit": -1, "num_split": -1},
        {"num_split": 1, "reserved_skip_index": -7},
    ],
)
def test_store(options):
    arguments, right = small_call()
    kvcache.store_cache(*arguments, **options)
    assert_caches(arguments, right)


@pytest.mark.parametrize(("name", "owner"), [("row_bytes", "k"), ("v_row_bytes", "v")])
def test_a_part_of_a_row_is_refused(name, owner):
    arguments, _ = small_call()
    before = [bits_of(cache).clone() for cache in arguments[2:4]]
    with pytest.raises(ValueError, match=f"^{name} must be the bytes of a row of {owner}, 128, or 0"):
        kvcache.store_cache(*arguments, **{name: 64})
    assert_caches(arguments, before)


@pytest.mark.parametrize("name", ["row_bytes", "v_row_bytes", "num_split", "size_limit", "reserved_skip_index"])
@pytest.mark.parametrize("value", [0.0, -1.5, True, "", [], torch.tensor([1])], ids=repr)
def test_an_option_is_an_integer(name, value):
    arguments, _ = small_call()
    before = [bits_of(cache).clone() for cache in arguments[2:4]]
    with pytest.raises(TypeError, match=f"^{name} must be an integer"):
        kvcache.store_cache(*arguments, **{name: value})
    assert_caches(arguments, before)


@pytest.mark.parametrize("k", [[1], None])
def test_what_is_no_array_is_refused_as_such(k):
    (_, *rest), _ = small_call()
    with pytest.raises(TypeError, match=r"^k must be an array that a kernel can reach"):
        kvcache.store_cache(k, *rest, row_bytes=128)


@needs_kernels
def test_a_row_of_heads_is_all_of_them():
    arguments, right = small_call()
    *arrays, indices = arguments
    heads = [array.view(-1, 4, 16) for array in arrays]
    kvcache.store_cache(*heads, indices, row_bytes=128, v_row_bytes=128)
    assert_caches(arguments, right)


@pytest.mark.parametrize(("name", "owner"), [("row_bytes", "k"), ("v_row_bytes", "v")])
@pytest.mark.parametrize("row_bytes", [32, 64, 256])
def test_a_part_of_a_row_of_heads_is_refused(name, owner, row_bytes):
    """One head of four, two of them, two rows."""
    arguments, _ = small_call()
    before = [bits_of(cache).clone() for cache in arguments[2:4]]
    *arrays, indices = arguments
    with pytest.raises(ValueError, match=f"^{name} must be the bytes of a row of {owner}, 128, or 0"):
        kvcache.store_cache(*(array.view(-1, 4, 16) for array in arrays), indices, **{name: row_bytes})
    assert_caches(arguments, before)


@needs_kernels
def test_a_refused_call_is_refused_as_the_plain_one():
    arguments, _ = small_call()
    before = [bits_of(cache).clone() for cache in arguments[2:4]]
    with pytest.raises(ValueError, match="size_limit must not exceed"):
        kvcache.store_cache(*arguments, size_limit=9)
    assert_caches(arguments, before)


@pytest.mark.parametrize(("reserved", "passed"), [(-1, {}), (-2, {}), (0, {"skip_index": 0}), (5, {"skip_index": 5})])
def test_the_reserved_slot_is_passed_on(reserved, passed, monkeypatch):
    """By the Python function: the fast road would serve such a call itself."""
    calls = []
    monkeypatch.setattr(kvcache, "store_kvcache", lambda *arguments, **options: calls.append((arguments[5:], options)))
    store_cache = without_fast_road(kvcache.store_cache)
    store_cache(*small_call()[0], num_split=1, size_limit=7, reserved_skip_index=reserved)
    assert calls == [((1, 7), passed)]


@needs_kernels
@pytest.mark.parametrize("reserved", [0, 6])
def test_rows_aimed_at_the_reserved_slot_are_not_written(reserved):
    arguments, _ = small_call((reserved, 5, reserved))
    right = [bits_of(cache).clone() for cache in arguments[2:4]]
    for after, rows in zip(right, arguments[:2], strict=True):
        after[5] = bits_of(rows)[1]
    kvcache.store_cache(*arguments, reserved_skip_index=reserved)
    assert_caches(arguments, right)


@needs_kernels
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_gpu)])
def test_compiled(backend):
    def step(k, v, k_cache, v_cache, indices):
        if kvcache.can_use_store_cache(k.shape[-1] * k.itemsize):
            kvcache.store_cache(
                k.view(-1, 64), v.view(-1, 64), k_cache, v_cache, indices, row_bytes=128, size_limit=k_cache.shape[0]
            )

    torch._dynamo.reset()
    arguments, right = small_call()
    with torch._inductor.config.patch(compile_threads=1):
        torch.compile(step, fullgraph=True, backend=backend)(*arguments)
    assert_caches(arguments, right)


@pytest.mark.parametrize("widths", [(128,), (256, 384), (1024, 0), (2048, 2048, 4), (196, 196, 1), (128, 0, -1)])
def test_widths_that_can_be_used(widths, caplog):
    assert kvcache.can_use_store_cache(*widths) is True
    assert caplog.records == []


@pytest.mark.parametrize(
    ("widths", "reason"),
    [
        ((90,), "rows of k must be a multiple of 4 bytes"),
        ((128, 94), "rows of v must be a multiple of 4 bytes"),
        ((160, 0, 2), "num_split=2 needs row bytes that are a multiple of 256"),
        ((-4,), "rows of k"),
    ],
)
def test_widths_that_cannot_say_why_once(widths, reason, caplog):
    kvcache._can_use.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [kvcache.can_use_store_cache(*widths) for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("numba_kvcache.sglang", "WARNING")
    assert f"k_row_bytes={widths[0]}" in record.getMessage()
    assert reason in record.getMessage()


@pytest.mark.parametrize("width", [128.0, True, "128", None])
def test_a_width_is_an_integer(width):
    kvcache.can_use_store_cache(128)
    kvcache.can_use_store_cache(4)
    with pytest.raises(TypeError, match="k_row_bytes must be an integer"):
        kvcache.can_use_store_cache(width)


@needs_kernels
def test_readme_puts_it_in_sglangs_place(monkeypatch):
    """In a stand-in for SGLang's memory pool, which calls both by the names that it has imported."""
    pool = types.ModuleType("sglang.srt.mem_cache.memory_pool")
    exec("def write(*arguments, **options):\n    return store_cache(*arguments, **options)", pool.__dict__)
    package = types.ModuleType("sglang.srt.mem_cache")
    package.memory_pool = pool
    for module in (types.ModuleType("sglang"), types.ModuleType("sglang.srt"), package, pool):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    readme = (TESTS.parent / "README.md").read_text()
    (lines,) = (block for block in readme.split("```python\n")[1:] if "memory_pool" in block.split("```")[0])
    exec(lines.split("```")[0], {})
    arguments, right = small_call()
    pool.write(*arguments, row_bytes=128, size_limit=8)
    assert_caches(arguments, right)
    assert pool.can_use_store_cache is kvcache.can_use_store_cache


# ----------------------------------------------------------------------------------------------------------------------
# The grid.

POWERS = [2**n for n in range(15)]  # 1 to 16,384
BATCHES = sorted({*POWERS, *(n + 1 + i for i, n in enumerate(POWERS))})
WIDTHS = (64, 96, 98, 100, 128, 256, 512, 1024)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPLIT_MULTIPLE = {0: 4, 1: 4, 2: 256, 4: 512}
GRID_SLOTS = 20_000


def variants(row_bytes):
    """(num_split, index dtype): every split with int64, the package's choice with int32."""
    splits = [split for split, multiple in SPLIT_MULTIPLE.items() if row_bytes % multiple == 0]
    return [*((split, torch.int64) for split in splits), (0, torch.int32)]


def test_the_grid_is_as_large_as_it_should_be():
    cases = sum(len(variants(w * d.itemsize)) * len(BATCHES) for w, d in product(WIDTHS, DTYPES))
    assert cases >= 400
    assert (min(BATCHES), 16_384 in BATCHES, any(batch % 2 for batch in BATCHES[5:])) == (1, True, True)


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_grid(width, dtype):
    """Caches and their expected content, written by torch's index_put, start equal and are compared whole each time."""
    row_bytes = width * dtype.itemsize
    sources = [random_rows(max(BATCHES) + 4, width, dtype, seed) for seed in (1, 2)]
    caches = [random_rows(GRID_SLOTS, width, dtype, seed) for seed in (3, 4)]
    right = [bits_of(cache).clone() for cache in caches]
    cases, wrong = [], []
    for batch, (split, index_dtype) in product(BATCHES, variants(row_bytes)):
        first = len(cases) % 5  # other rows than in the case before
        rows = [source[first : first + batch] for source in sources]
        slots = torch.randperm(GRID_SLOTS, device=DEVICE)[:batch]
        kvcache.store_cache(*rows, *caches, slots.to(index_dtype), row_bytes=row_bytes, num_split=split)
        for after, source in zip(right, rows, strict=True):
            after.index_put_((slots,), bits_of(source))
        cases.append((batch, split, index_dtype))
        wrong.append(torch.stack([(bits_of(c) != a).any() for c, a in zip(caches, right, strict=True)]).any())
    assert [case for case, bad in zip(cases, torch.stack(wrong).tolist(), strict=True) if bad] == []


def test_the_fast_road_knows_the_parameters():
    parameters = inspect.signature(kvcache.store_cache).parameters.values()
    assert {p.name for p in parameters} == {*native.PARAMETERS[native.STORE_CACHE]} - {""}
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [*native.PARAMETERS[native.STORE_CACHE][: len(positional)]]


@needs_gpu
@pytest.mark.skipif(sys.version_info < (3, 12), reason="the fast road needs Python 3.12")
@pytest.mark.parametrize("as_sglang", [False, True], ids=["bare", "as SGLang calls it"])
def test_host_cost(as_sglang):
    """Over the plain call's; each turn is short of filling the queue."""
    warmup(2048)
    assert fast_road.status() == "on"
    k, v = (random_rows(1, 1024, torch.bfloat16, seed) for seed in (1, 2))
    k_cache, v_cache = (random_rows(64, 1024, torch.bfloat16, seed) for seed in (3, 4))
    indices = torch.tensor([5], device=DEVICE)

    def plain():
        if as_sglang:
            store_kvcache(k, v, k_cache, v_cache, indices, size_limit=64)
        else:
            store_kvcache(k, v, k_cache, v_cache, indices)

    def dropped_in():
        if as_sglang:
            kvcache.store_cache(k, v, k_cache, v_cache, indices, row_bytes=2048, size_limit=64)
        else:
            kvcache.store_cache(k, v, k_cache, v_cache, indices)

    def seconds(call):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            call()
        return time.perf_counter() - start

    # Some hosts' drivers take now 2.6 and now 3.4 us to launch, for many calls on end: medians of many short turns, in
    # an order that follows no period.
    rng, times = random.Random(0), {plain: [], dropped_in: []}
    for _ in range(400):
        for call in rng.sample([*times], 2):
            times[call].append(seconds(call))
    ratio = statistics.median(times[dropped_in]) / statistics.median(times[plain])
    assert ratio <= 1.1
    print(f"{ratio:.3f} of the plain call")  # noqa: T201
