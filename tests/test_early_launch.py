"""Dependents are released before our stores, even before our loads: a reader that waits must still see every word.

A CUDA graph of 24 links, each a producer, a store and a reader, all launched early. The producer writes rows that name
their link and replay; the store puts them into the same slots each time; the reader copies the slots out. A reader that
did not wait long enough would copy an older link's rows. To make sure that it could, the store sleeps 50 us between its
release and its stores; the control, a reader without the wait, then sees stale words, and the test has shown something.
"""

import numpy as np
import pytest
from numba import cuda
from support import ON_GPU, SIMULATED, needs_gpu

from numba_kvcache import compiler, driver, kernel
from numba_kvcache.launch import Launch, launch
from numba_kvcache.layout import PLAIN, RowLayout, Strategy, plan_store

if not SIMULATED:
    from cuda.bindings import driver as cu
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    from numba_kvcache.device import index_access, release_dependents, row_access, u32, u64, wait_primary

pytestmark = [
    needs_gpu,
    pytest.mark.skipif(
        not ON_GPU or driver.compute_capability(0) < (9, 0), reason="early launch needs compute capability 9.0"
    ),
]

LINKS, REPLAYS, WORDS, SLOTS = 24, 20, 256, 512
STRATEGIES = (PLAIN, Strategy(bypass_l1=True), Strategy(release_first=True))


def load_function(function, name):
    """Compile a kernel that takes what the store takes, and load it."""
    capability = driver.compute_capability(0)
    ptx, _ = cuda.compile(
        function, compiler.signature(kernel.StoreSpec.parameters), device=False, abi="numba",
        abi_info={"abi_name": name}, cc=capability, output="ptx",
    )  # fmt: skip
    return driver.load_kernel(compiler.link_cubin(ptx, capability).cubin, name)


def make_producer():
    """k[row, word] = epoch + link * 1,000,000 + row * WORDS + word, v that plus 500,000. (The limit is the link.)"""
    _, store_word = row_access(RowLayout(4, 4, 1, 1), 1, bypass_l1=False)
    load_epoch = index_access(32)

    def producer(k, v, epoch, unused, indices, a, b, c, d, e, batch, link, skip_index):
        release_dependents()
        wait_primary()
        at = u32(u32(cuda.blockIdx.x) * u32(WORDS) + u32(cuda.threadIdx.x))
        value = u32(u32(load_epoch(epoch)) + u32(u32(link) * u32(1_000_000)) + at)
        store_word(u64(k + u64(at) * u64(4)), u32(0), (value,))
        store_word(u64(v + u64(at) * u64(4)), u32(0), (u32(value + u32(500_000)),))

    return load_function(producer, "producer")


def make_reader(waits):
    """out[row, word] = cache[indices[row], word], for both caches. (k and v are the two outputs.)"""
    load_word, store_word = row_access(RowLayout(4, 4, 1, 1), 1, bypass_l1=False)
    load_index = index_access(64)

    def reader(k_out, v_out, k_cache, v_cache, indices, a, b, c, d, e, batch, link, skip_index):
        release_dependents()
        if waits:
            wait_primary()
        row, word = u64(cuda.blockIdx.x), u64(cuda.threadIdx.x)
        slot = u64(load_index(u64(indices + row * u64(8))))
        source, target = u64((slot * u64(WORDS) + word) * u64(4)), u64((row * u64(WORDS) + word) * u64(4))
        store_word(u64(k_out + target), u32(0), load_word(u64(k_cache + source), u32(0)))
        store_word(u64(v_out + target), u32(0), load_word(u64(v_cache + source), u32(0)))

    return load_function(reader, f"reader_{waits}")


def sleepy_assertion(expression, file, line, function):
    """In the assert's place, between the loads and the stores: 50 us of sleep."""

    @intrinsic
    def sleep(typingctx, condition):
        def codegen(context, builder, signature, arguments):
            asm = ir.InlineAsm(
                ir.FunctionType(ir.VoidType(), []), "nanosleep.u32 1000; " * 50, "~{memory}", side_effect=True
            )
            builder.call(asm, [])
            return context.get_dummy_value()

        return types.void(types.boolean), codegen

    return sleep


def load_store(strategy, sleeps, monkeypatch):
    spec = kernel.StoreSpec(plan_store(4 * WORDS), 64, early_launch=True, strategy=strategy)
    capability = driver.compute_capability(0)
    if sleeps:
        monkeypatch.setattr(kernel, "assertion", sleepy_assertion)
        monkeypatch.setattr(kernel, "build_kernel", kernel.build_kernel.__wrapped__)
    linked = compiler.link_cubin(compiler.compile_ptx(spec, capability), capability)
    return driver.load_kernel(linked.cubin, spec.name), spec.layout


def stale_words(batch, strategy, sleeps, waits, monkeypatch):
    """How many words the readers copied that are not their own link's and replay's."""
    cuda.current_context()
    store, layout = load_store(strategy, sleeps, monkeypatch)
    producer, reader = make_producer(), make_reader(waits)
    slots = np.random.default_rng(batch).permutation(SLOTS)[:batch].astype(np.int64)
    k, v = (cuda.device_array((batch, WORDS), np.uint32) for _ in range(2))
    caches = [cuda.to_device(np.zeros((SLOTS, WORDS), np.uint32)) for _ in range(2)]
    outputs = [cuda.to_device(np.zeros((LINKS, batch, WORDS), np.uint32)) for _ in range(2)]
    indices, epoch = cuda.to_device(slots), cuda.to_device(np.zeros(1, np.int32))
    cuda.synchronize()
    address = [array.device_ctypes_pointer.value for array in (k, v, *caches, indices, epoch, *outputs)]
    stride, none = 4 * WORDS, (0,) * 5
    stream = driver.check(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
    driver.check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    for link in range(LINKS):
        outs = [out + link * batch * stride for out in address[6:]]
        launch(
            Launch(producer, batch, WORDS, True), int(stream), (*address[:2], address[5], 0, 0, *none, batch, link, 0)
        )
        arguments = (*address[:5], stride, stride, stride, stride, 8, batch, SLOTS, 0)
        launch(Launch(store, layout.grid(batch), layout.block, True), int(stream), arguments)
        launch(Launch(reader, batch, WORDS, True), int(stream), (*outs, *address[2:5], *none, batch, link, 0))
    graph = driver.check(cu.cuGraphInstantiate(driver.check(cu.cuStreamEndCapture(stream)), 0))
    link_rows = np.arange(LINKS, dtype=np.uint32)[:, None, None] * 1_000_000
    expected = link_rows + np.arange(batch * WORDS, dtype=np.uint32).reshape(batch, WORDS)
    stale = 0
    for replay in range(REPLAYS):
        epoch.copy_to_device(np.array([replay * 50_000_000], np.int32))
        cuda.synchronize()  # the graph's stream does not wait for this copy: link 0 once read the old epoch
        driver.check(cu.cuGraphLaunch(graph, stream))
        driver.check(cu.cuStreamSynchronize(stream))
        for out, more in zip(outputs, (0, 500_000), strict=True):
            stale += np.count_nonzero(out.copy_to_host() != expected + np.uint32(replay * 50_000_000 + more))
    return stale


@pytest.mark.parametrize("sleeps", [False, True], ids=["", "asleep before the stores"])
@pytest.mark.parametrize("batch", [1, 64, 500])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_reader_that_waits_sees_every_word(strategy, batch, sleeps, monkeypatch):
    assert stale_words(batch, strategy, sleeps, True, monkeypatch) == 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_reader_that_does_not_wait_would_not(strategy, monkeypatch):
    assert stale_words(64, strategy, True, False, monkeypatch) > 0
