"""torch.compile: the op, and what a compiled graph makes of a call; with CPU tensors on the simulator, or on a GPU."""

import contextlib
import inspect

import pytest
from support import ON_GPU, needs_gpu, needs_kernels

import numba_kvcache
from numba_kvcache import store_kvcache, store_kvcache_fp8

torch = pytest.importorskip("torch", reason="torch is optional and not installed")
compiled_graphs = pytest.importorskip("numba_kvcache.torch")

# Inductor's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # The trees of reduce-overhead capture an empty graph to begin with.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]
DEVICE = "cuda" if ON_GPU else "cpu"
WIDTH, SLOTS = 64, 8
OP = torch.ops.numba_kvcache.store_kvcache.default

# Inductor compiles C++ on a CPU: minutes, and a compiler that CI may lack.
on_both = pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=needs_gpu)])


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Inductor's cache on disk takes no notice of storage offsets, so one test's graph could serve another."""
    torch._dynamo.reset()
    with (
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


@pytest.fixture
def launches(monkeypatch):
    """The cache addresses of each launch that an op makes."""
    seen = []

    def recorded(k, v, k_cache, v_cache, *arguments, **options):
        seen.append((k_cache.data_ptr(), v_cache.data_ptr()))
        store_kvcache(k, v, k_cache, v_cache, *arguments, **options)

    monkeypatch.setattr(compiled_graphs, "store_kvcache", recorded)
    return seen


def numbers(*shape, first=0):
    """Whole numbers, each its own: exact in float32, and never 0."""
    size = torch.Size(shape).numel()
    return torch.arange(first + 1, first + 1 + size, dtype=torch.float32, device=DEVICE).reshape(shape)


def slot_tensor(*slots, dtype=torch.int64):
    return torch.tensor(slots, dtype=dtype, device=DEVICE)


def expected_after(cache, rows, slots):
    """The oracle: a plain loop over rows, on a copy."""
    after = cache.detach().clone()
    for row, slot in zip(rows.detach(), slots.tolist(), strict=True):
        after[slot] = row
    return after


def test_eager_calls_are_plain_calls():
    """Nothing stands between, so nothing is added to a launch's cost."""
    assert compiled_graphs.store_kvcache is numba_kvcache.store_kvcache


def test_the_traced_function_takes_what_the_plain_one_takes():
    plain, traced = (
        {name: (p.kind, p.default) for name, p in inspect.signature(function).parameters.items()}
        for function in (store_kvcache, compiled_graphs._traced)
    )
    assert {name: traced.get(name) for name in plain} == plain
    assert set(traced) == set(plain)


def test_schema():
    text = str(OP._schema)
    assert "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor indices" in text
    assert "*, SymInt? skip_index=None) -> ()" in text


# ----------------------------------------------------------------------------------------------------------------------
# Where caches come from: (the function's inputs, how it makes caches of them, the launches that Inductor makes of it).


def separate():
    return [numbers(SLOTS, WIDTH), numbers(SLOTS, WIDTH, first=5000)], lambda a, b: (a, b), 1


def views_taken_inside():
    return [numbers(2, SLOTS, WIDTH)], lambda kv: (kv[0], kv[1]), 1


def interleaved_inside():
    return [numbers(SLOTS, 2 * WIDTH)], lambda kv: (kv[:, :WIDTH], kv[:, WIDTH:]), 1


def layers_of_two_pools():
    pools = [numbers(3, SLOTS, WIDTH, first=first) for first in (0, 9000)]
    return [pool[1] for pool in pools], lambda a, b: (a, b), 1


def views_of_one_buffer():
    return list(numbers(2, SLOTS, WIDTH)), lambda a, b: (a, b), 2


def layers_of_one_pool():
    pool = numbers(2, 3, SLOTS, WIDTH)
    return [pool[0, 1], pool[1, 1]], lambda a, b: (a, b), 2


def interleaved_rows():
    kv = numbers(SLOTS, 2 * WIDTH)
    return [kv[:, :WIDTH], kv[:, WIDTH:]], lambda a, b: (a, b), 2


def views_of_views():
    kv = numbers(2, SLOTS, 4, WIDTH // 4)
    return [kv[0], kv[1]], lambda a, b: (a.view(-1, WIDTH), b.view(-1, WIDTH)), 2


def layers_viewed_inside():
    pools = [numbers(3, SLOTS, 4, WIDTH // 4, first=first) for first in (0, 9000)]
    return [pool[1] for pool in pools], lambda a, b: (a.view(-1, WIDTH), b.view(-1, WIDTH)), 1


ARRANGEMENTS = (
    separate, views_taken_inside, interleaved_inside, layers_of_two_pools, views_of_one_buffer, layers_of_one_pool,
    interleaved_rows, views_of_views, layers_viewed_inside,
)  # fmt: skip
MODES = {"grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@needs_kernels
@on_both
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_compiled_stores(arrangement, mode, backend, launches):
    def step(x, indices, *inputs):
        k_cache, v_cache = caches_of(*inputs)
        before = k_cache[indices] + v_cache.sum()
        store_kvcache(x * 2, x + 1, k_cache, v_cache, indices, size_limit=SLOTS)
        return before, k_cache.sum(), v_cache[indices]

    with MODES[mode]():
        inputs, caches_of, count = arrangement()
        pools = [entry if entry._base is None else entry._base for entry in inputs]
        x, slots = numbers(3, WIDTH, first=20_000), slot_tensor(5, 0, 2)
        caches = caches_of(*inputs)
        right = [expected_after(cache, rows, slots) for cache, rows in zip(caches, (x * 2, x + 1), strict=True)]
        old = caches[0][slots] + caches[1].sum()
        whole = [pool.double().sum() for pool in pools]
        gained = [after.double().sum() - cache.double().sum() for after, cache in zip(right, caches, strict=True)]

        before, total, stored = torch.compile(step, fullgraph=True, backend=backend)(x, slots, *inputs)

        for cache, after in zip(caches, right, strict=True):
            assert torch.equal(cache, after)
        assert torch.equal(before, old)
        assert torch.allclose(total, right[0].sum())
        assert torch.equal(stored, x + 1)
        if len({pool.data_ptr() for pool in pools}) == 1:  # nothing else in a shared buffer has changed
            assert pools[0].double().sum() == whole[0] + sum(gained)
    if backend == "inductor":  # no cache is copied; one launch wherever that can be
        assert {address for launch in launches for address in launch} == {cache.data_ptr() for cache in caches}
        assert len(launches) == count


@needs_kernels
@on_both
def test_two_stores_in_one_graph(backend):
    def two(x, k_cache, v_cache, first, second):
        store_kvcache(x, x + 1, k_cache, v_cache, first)
        between = k_cache[second]
        store_kvcache(x + 2, x + 3, k_cache, v_cache, second, 0, None)
        return between

    x, k_cache, v_cache = numbers(2, WIDTH), numbers(SLOTS, WIDTH, first=700), numbers(SLOTS, WIDTH, first=5000)
    first, second = slot_tensor(3, 1), slot_tensor(1, 7, dtype=torch.int32)
    right = [
        expected_after(expected_after(cache, x + i, first), x + i + 2, second)
        for i, cache in enumerate((k_cache, v_cache))
    ]
    seventh = k_cache[7].clone()
    between = torch.compile(two, fullgraph=True, backend=backend)(x, k_cache, v_cache, first, second)
    assert torch.equal(k_cache, right[0])
    assert torch.equal(v_cache, right[1])
    assert torch.equal(between, torch.stack((x[1], seventh)))


@needs_kernels
@on_both
def test_one_graph_for_every_batch(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    store = torch.compile(lambda *arguments: store_kvcache(*arguments), fullgraph=True, backend=counter)
    for batch in (3, 5, 2, 8):
        k, v, slots = (
            numbers(batch, WIDTH),
            numbers(batch, WIDTH, first=900),
            torch.randperm(SLOTS, device=DEVICE)[:batch],
        )
        for batched in (k, v, slots):
            torch._dynamo.mark_dynamic(batched, 0)
        caches = [torch.zeros(SLOTS, WIDTH, device=DEVICE) for _ in range(2)]
        store(k, v, *caches, slots)
        for cache, rows in zip(caches, (k, v), strict=True):
            assert torch.equal(cache, expected_after(torch.zeros_like(cache), rows, slots))
    assert counter.frame_count == 1


@needs_kernels
@on_both
@pytest.mark.parametrize("arrangement", [views_taken_inside, interleaved_inside, layers_viewed_inside])
def test_dynamic_shapes(arrangement, backend):
    """Offsets and strides of the views are then symbols."""

    def step(x, indices, *inputs):
        store_kvcache(x * 2, x + 1, *caches_of(*inputs), indices)

    inputs, caches_of, _ = arrangement()
    x, slots = numbers(3, WIDTH, first=20_000), slot_tensor(5, 0, 2)
    caches = caches_of(*inputs)
    right = [expected_after(cache, rows, slots) for cache, rows in zip(caches, (x * 2, x + 1), strict=True)]
    torch.compile(step, fullgraph=True, backend=backend, dynamic=True)(x, slots, *inputs)
    for cache, after in zip(caches, right, strict=True):
        assert torch.equal(cache, after)


@needs_kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float16])
def test_a_cache_viewed_as_another_dtype_inside_is_refused(dtype, mode):
    """Torch would copy it, and where it has an offset, from memory that is not its own."""

    def step(k, k_cache, v_cache, indices):
        store_kvcache(k, k, k_cache, v_cache.view(torch.bfloat16), indices)

    with MODES[mode]():
        pool = torch.zeros(2, SLOTS, WIDTH // dtype.itemsize * 2, dtype=dtype, device=DEVICE)
        k_cache, k = (torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=DEVICE) for rows in (SLOTS, 1))
        with pytest.raises(
            torch._dynamo.exc.BackendCompilerFailed, match="v_cache must not be viewed as another dtype"
        ):
            torch.compile(step, fullgraph=True, backend="aot_eager")(k + 1, k_cache, pool[1], slot_tensor(3))
        assert not pool.any()
        assert not k_cache.any()


@needs_kernels
def test_a_cache_detached_inside_is_refused():
    """Torch does not say what it is a view of. The message names what was done."""

    def step(k, k_cache, v_cache, indices):
        store_kvcache(k, k, k_cache, v_cache.detach(), indices)

    k_cache, v_cache = (torch.zeros(SLOTS, WIDTH, device=DEVICE) for _ in range(2))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"v_cache must not be .*, or detached, within"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(numbers(1, WIDTH), k_cache, v_cache, slot_tensor(3))
    assert not k_cache.any()
    assert not v_cache.any()


@needs_kernels
@on_both
def test_a_refused_call_raises_its_error_and_writes_nothing(backend):
    caches = [numbers(SLOTS, WIDTH), numbers(SLOTS, WIDTH)]
    k = numbers(2, WIDTH)
    with pytest.raises(ValueError, match="size_limit must not exceed the caches' rows, got 9"):
        torch.compile(store_kvcache_of, fullgraph=True, backend=backend)(k, *caches, slot_tensor(1, 2), 9)
    assert all(torch.equal(cache, numbers(SLOTS, WIDTH)) for cache in caches)


def store_kvcache_of(k, k_cache, v_cache, indices, size_limit=0, stream=None):
    store_kvcache(k, k + 1, k_cache, v_cache, indices, size_limit=size_limit, stream=stream)
    return k_cache[indices]


@needs_kernels
def test_a_named_stream_breaks_the_graph():
    k, slots = numbers(2, WIDTH), slot_tensor(6, 2)
    stream = torch.cuda.current_stream() if ON_GPU else 0
    caches = [torch.zeros(SLOTS, WIDTH, device=DEVICE) for _ in range(2)]
    stored = torch.compile(store_kvcache_of, backend="aot_eager")(k, *caches, slots, 0, stream)
    assert torch.equal(stored, k)
    assert torch.equal(caches[1], expected_after(torch.zeros_like(caches[1]), k + 1, slots))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"stream must be None under torch\.compile"):
        torch.compile(store_kvcache_of, backend="aot_eager", fullgraph=True)(k, *caches, slots, 0, stream)


def store_fp8_of(k, k_cache, v_cache, indices):
    doubled = k * 2
    store_kvcache_fp8(doubled, doubled, k_cache, v_cache, indices, 1.0, 2.0, dtype="e4m3")
    return doubled + 1


@needs_kernels
def test_a_quantised_store_breaks_the_graph():
    """Without a warning, which Dynamo has for whatever it traces of the Python road."""
    k, slots = torch.ones(2, WIDTH, device=DEVICE), slot_tensor(6, 2)
    caches = [torch.zeros(SLOTS, WIDTH, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    stored = torch.compile(store_fp8_of, backend="aot_eager")(k, *caches, slots)
    assert torch.equal(stored, k * 3)
    for cache, byte in zip(caches, (0x40, 0x38), strict=True):  # 2.0 and 1.0 in e4m3
        right = torch.zeros_like(cache)
        right[[6, 2]] = byte
        assert torch.equal(cache, right)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="store_kvcache_fp8 breaks the graph"):
        torch.compile(store_fp8_of, backend="aot_eager", fullgraph=True)(k, *caches, slots)


@needs_kernels
def test_export_without_the_op_is_told_of_it():
    class Step(torch.nn.Module):
        def forward(self, k, cache, indices):
            store_kvcache(k, k, cache, cache, indices)
            return k

    with pytest.raises(ValueError, match=r"torch\.export .* call torch\.ops\.numba_kvcache\.store_kvcache"):
        torch.export.export(Step(), (numbers(2, WIDTH), numbers(SLOTS, WIDTH), slot_tensor(1, 2)), strict=False)


# ----------------------------------------------------------------------------------------------------------------------
# Gradients, and the op by itself.


@needs_kernels
@on_both
def test_gradients_do_not_see_the_store(backend):
    """d(sum(k * cache_row))/dw with the cache's row a constant: x^T times that row, by hand."""

    def loss(x, weight, k_cache, v_cache, indices):
        k = x @ weight
        store_kvcache(k, weight[: len(x)], k_cache, v_cache, indices)
        return (k * k_cache[indices]).sum()

    x, slots = numbers(2, WIDTH) / WIDTH, slot_tensor(6, 2)
    weight = (numbers(WIDTH, WIDTH) / WIDTH**2).requires_grad_()
    caches = [torch.zeros(SLOTS, WIDTH, device=DEVICE) for _ in range(2)]
    torch.compile(loss, fullgraph=True, backend=backend)(x, weight, *caches, slots).backward()
    torch.testing.assert_close(weight.grad, x.T @ (x @ weight.detach()))
    torch.testing.assert_close(caches[0][slots], (x @ weight).detach())
    assert torch.equal(caches[1][slots], weight.detach()[:2])
    assert not any(cache.requires_grad for cache in caches)


def op_cases():
    qkv = numbers(3, 4 * WIDTH, first=300)
    dense, grad = numbers(3, WIDTH), numbers(3, WIDTH).requires_grad_()
    apart = [numbers(SLOTS, WIDTH), numbers(SLOTS, WIDTH)]
    return {
        "dense": (dense, dense + 1, *apart, slot_tensor(5, 0, 2)),
        "int32": (dense, dense + 1, *apart, slot_tensor(5, 0, 2, dtype=torch.int32), 1, 7),
        "slices": (qkv[:, WIDTH : 2 * WIDTH], qkv[:, -WIDTH:], *apart, slot_tensor(5, 0, 2)),
        "requires grad": (grad, numbers(3, WIDTH, first=50).requires_grad_(), *apart, slot_tensor(5, 0, 2)),
        "one buffer": (dense, dense + 1, *numbers(2, SLOTS, WIDTH), slot_tensor(5, 0, 2)),
        "empty": (dense[:0], dense[:0], *apart, slot_tensor()),
    }


@needs_kernels
@pytest.mark.parametrize("case", op_cases())
def test_opcheck(case):
    results = torch.library.opcheck(OP, op_cases()[case])
    assert set(results.values()) == {"SUCCESS"}


@needs_kernels
def test_opcheck_of_the_ops_that_graphs_hold():
    """K in the first half of each row of a buffer, V in the second."""
    ops, kv, k, slots = torch.ops.numba_kvcache, numbers(SLOTS, 2 * WIDTH), numbers(3, WIDTH), slot_tensor(5, 0, 2)
    views = [[offset, SLOTS, WIDTH, 2 * WIDTH, 1] for offset in (0, WIDTH)]
    cases = (
        (ops.store_kvcache_views.default, (k, k + 1, kv, kv.clone(), *views, slots)),
        (ops.store_one_view.default, (k, kv, views[1], slots, 1, SLOTS)),
    )
    for op, arguments in cases:
        assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


@needs_kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("store", [store_kvcache, OP], ids=["plain", "op"])
def test_eager_stores(store, mode):
    with MODES[mode]():
        k = numbers(3, WIDTH).requires_grad_(mode != "inference_mode")
        caches, slots = list(numbers(2, SLOTS, WIDTH, first=900)), slot_tensor(5, 0, 2)
        right = [expected_after(cache, rows, slots) for cache, rows in zip(caches, (k * 2, k), strict=True)]
        store(k * 2, k, *caches, slots)
        for cache, after in zip(caches, right, strict=True):
            assert torch.equal(cache, after)
            assert not cache.requires_grad


@pytest.mark.parametrize(("given", "passed"), [({}, {"skip_index": None}), ({"skip_index": -1}, {"skip_index": -1})])
def test_the_op_passes_on_the_slot_to_skip(given, passed, monkeypatch):
    calls = []
    monkeypatch.setattr(compiled_graphs, "store_kvcache", lambda *arguments, **options: calls.append(options))
    k, caches = numbers(2, WIDTH), [numbers(SLOTS, WIDTH) for _ in range(2)]
    OP(k, k, *caches, slot_tensor(1, 2), **given)
    assert calls == [passed]


@needs_kernels
@on_both
@pytest.mark.parametrize("arrangement", [separate, views_of_one_buffer])
def test_compiled_skip(arrangement, backend):
    def step(k, k_cache, v_cache, indices):
        store_kvcache(k, k + 1, k_cache, v_cache, indices, skip_index=-1)

    k, caches = numbers(3, WIDTH, first=9000), arrangement()[0]
    right = [
        expected_after(cache, rows[[0, 2]], slot_tensor(5, 2)) for cache, rows in zip(caches, (k, k + 1), strict=True)
    ]
    torch.compile(step, fullgraph=True, backend=backend)(k, *caches, slot_tensor(5, -1, 2))
    for cache, after in zip(caches, right, strict=True):
        assert torch.equal(cache, after)


# ----------------------------------------------------------------------------------------------------------------------
# Streams and CUDA graphs.


def graph_inputs():
    x = torch.zeros(4, WIDTH, device=DEVICE)
    caches = [torch.zeros(SLOTS, WIDTH, device=DEVICE) for _ in range(2)]
    return x, caches, slot_tensor(0, 1, 2, 3)


def fused_step(x, k_cache, v_cache, indices):
    store_kvcache(x * 2, x + 1, k_cache, v_cache, indices)
    return v_cache[indices]


ROUNDS = ([7, 0, 4, 5], [1, 6, 2, 3], [0, 3, 7, 1])


@needs_gpu
def test_a_compiled_step_is_captured_and_replayed():
    x, caches, slots = graph_inputs()
    step = torch.compile(fused_step, fullgraph=True)
    step(x, *caches, slots)
    right = [cache.clone() for cache in caches]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stored = step(x, *caches, slots)
    for i, named in enumerate(ROUNDS):
        slots.copy_(torch.tensor(named))
        x.copy_(numbers(4, WIDTH, first=1000 * i))
        right = [expected_after(cache, rows, slots) for cache, rows in zip(right, (x * 2, x + 1), strict=True)]
        graph.replay()
        assert torch.equal(stored, x + 1)
        for cache, after in zip(caches, right, strict=True):
            assert torch.equal(cache, after)


@needs_gpu
@pytest.mark.parametrize("static", [True, False], ids=["static caches", "plain caches"])
def test_reduce_overhead(static):
    """torch captures the step itself where the caches' addresses are marked static, and leaves it be otherwise."""
    from torch._dynamo.utils import counters

    _, caches, _ = graph_inputs()
    if static:
        for cache in caches:
            torch._dynamo.mark_static_address(cache)
    counters.clear()
    step = torch.compile(fused_step, fullgraph=True, mode="reduce-overhead")
    right = [cache.clone() for cache in caches]
    for i, named in enumerate(ROUNDS * 3):
        x, slots = numbers(4, WIDTH, first=1000 * i), slot_tensor(*named)
        right = [expected_after(cache, rows, slots) for cache, rows in zip(right, (x * 2, x + 1), strict=True)]
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(step(x, *caches, slots), x + 1)
        for cache, after in zip(caches, right, strict=True):
            assert torch.equal(cache, after)
    if static:
        assert counters["inductor"]["cudagraph_skips"] == 0


@needs_gpu
@pytest.mark.parametrize("side", [True, False], ids=["side stream", "default stream"])
def test_a_compiled_step_runs_on_the_current_stream(side):
    """Each round's input is written late, on the same stream; a store on another one would find the round before."""
    x, _, slots = graph_inputs()
    step = torch.compile(fused_step, fullgraph=True)
    step(x, *graph_inputs()[1], slots)
    torch.cuda.synchronize()
    results = []
    with torch.cuda.stream(torch.cuda.Stream()) if side else contextlib.nullcontext():
        for i in range(50):
            caches = graph_inputs()[1]
            torch.cuda._sleep(200_000)  # some 100 us
            x.copy_(numbers(4, WIDTH, first=1000 * i))
            step(x, *caches, slots)
            results.append(caches)
        torch.cuda.current_stream().synchronize()
    for i, (k_cache, v_cache) in enumerate(results):
        right = numbers(4, WIDTH, first=1000 * i)
        assert torch.equal(k_cache[:4], right * 2)
        assert torch.equal(v_cache[:4], right + 1)
