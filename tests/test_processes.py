"""Threads and processes on a GPU (REPORTS 23): first calls at one moment, fork, spawn, exits, one cache for many.

What of this needs no GPU is in test_driver.py (fork), test_compiler.py and test_disk_cache.py (the cache's faults).
"""

import concurrent.futures
import itertools
import threading

import pytest
from support import expect_store, index_array, make_rows, needs_gpu, needs_kernels, run_python, synchronize, tally

from numba_kvcache import compiler, fast_road, settings, store_kvcache

# ----------------------------------------------------------------------------------------------------------------------
# Threads


def run_threads(count, work):
    """Run `work(i)` in so many threads that start at one moment; what they raised."""
    barrier, failures = threading.Barrier(count), []

    def guarded(i):
        barrier.wait()
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


@needs_kernels
@pytest.mark.parametrize("widths", [(1004,), (1012, 2020, 3028, 4036)], ids=["one kernel", "four kernels"])
def test_16_threads_on_cold_and_warm_kernels(widths, monkeypatch):
    """On a GPU each kernel is compiled once, whoever comes first."""
    compiled, real = [], compiler.compile_ptx
    monkeypatch.setattr(settings, "cache_folder", lambda: None)
    monkeypatch.setattr(compiler, "compile_ptx", lambda spec, cc: compiled.append(spec) or real(spec, cc))
    chosen = [width for width, _ in zip(itertools.cycle(widths), range(16), strict=False)]
    calls = [(make_rows(3, 7, width), index_array([6, 0, 3])[1]) for width in chosen]
    for _ in range(2):  # cold, then warm
        assert run_threads(16, lambda i: store_kvcache(*(r.array for r in calls[i][0]), calls[i][1])) == []
    synchronize()
    assert len(compiled) == len(set(compiled))
    assert compiled or settings.SIMULATED
    for rows, _ in calls:
        for source, cache in zip(rows[:2], rows[2:], strict=True):
            expect_store(source, cache, [6, 0, 3])
            cache.memory.check()


# ----------------------------------------------------------------------------------------------------------------------
# Processes

STORE = """
import numpy as np
from numba import cuda
from numba_kvcache import store_kvcache
def arrays():
    k, v = (np.arange(i, i + 512, dtype=np.int32).reshape(4, 128) for i in (1, 1000))
    caches = [cuda.to_device(np.zeros((9, 128), np.int32)) for _ in range(2)]
    return k, v, caches, cuda.to_device(np.array([5, 0, 2, 7]))
def store():
    k, v, caches, indices = arrays()
    store_kvcache(cuda.to_device(k), cuda.to_device(v), *caches, indices)
    return k, v, caches
def check(k, v, caches):
    for source, cache in zip((k, v), caches):
        now = cache.copy_to_host()
        assert np.array_equal(now[[5, 0, 2, 7]], source) and not now[[1, 3, 4, 6, 8]].any()
"""


def assert_silent_success(result):
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@needs_gpu
def test_import_makes_no_context():
    code = """
import numba_kvcache
from cuda.bindings import driver as cu
assert cu.cuCtxGetCurrent()[0] == cu.CUresult.CUDA_ERROR_NOT_INITIALIZED
cu.cuInit(0)
status, flags, active = cu.cuDevicePrimaryCtxGetState(cu.cuDeviceGet(0)[1])
assert status == cu.CUresult.CUDA_SUCCESS and active == 0
"""
    assert_silent_success(run_python(code))


@needs_gpu
def test_fork_after_import():
    code = STORE + """
import os
child = os.fork()
if child == 0:
    check(*store())
    os._exit(23)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 23
"""  # fmt: skip
    assert_silent_success(run_python(code))


FORK_AFTER_USE = """
import os, signal, warnings
{setup}
call()
{ready}
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on fork in a process of many threads
child = os.fork()
if child == 0:
    signal.alarm(20)  # a hang ends here
    for _ in range(2):
        try:
            call()
        except RuntimeError as error:
            if "fork" not in str(error):
                os.write(2, str(error).encode())
                os._exit(3)
        else:
            os._exit(4)
    os._exit(23)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 23
call()
cuda.synchronize()
"""
NUMBA_CALL = STORE + """
k, v, caches, indices = arrays()
k, v = cuda.to_device(k), cuda.to_device(v)
def call():
    store_kvcache(k, v, *caches, indices)
"""  # fmt: skip
TORCH_CALL = """
import torch
from numba import cuda
from numba_kvcache import store_kvcache
k, v, k_cache, v_cache = (torch.zeros(n, 128, device="cuda") for n in (4, 4, 9, 9))
indices = torch.tensor([5, 0, 2, 7], device="cuda")
def call():
    store_kvcache(k, v, k_cache, v_cache, indices, stream=0)
"""


@needs_gpu
@pytest.mark.parametrize("road", ["Python", "fast"])
@pytest.mark.parametrize("library", ["numba", "torch"])
def test_fork_after_first_use_is_refused(library, road):
    """In the child each call is a RuntimeError that names the fork; the parent goes on."""
    if library == "torch":
        pytest.importorskip("torch")
    if road == "fast" and fast_road._obstacle():
        pytest.skip(f"no fast road here: {fast_road._obstacle()}")
    code = FORK_AFTER_USE.format(
        setup=NUMBA_CALL if library == "numba" else TORCH_CALL,
        ready="from numba_kvcache import fast_road; fast_road.wait(); call()" if road == "fast" else "",
    )
    assert_silent_success(run_python(code, NUMBA_KVCACHE_NATIVE=str(int(road == "fast"))))


def store_in_a_worker(queue):
    """What the spawned child of the next test runs."""
    names = {}
    exec(STORE, names)
    names["check"](*names["store"]())
    queue.put("stored")


@needs_gpu
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_multiprocessing(method):
    code = STORE + f"""
import multiprocessing, test_processes
store()
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    workers = [context.Process(target=test_processes.store_in_a_worker, args=(queue,)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert [queue.get(timeout=100) for _ in workers] == ["stored"] * 3
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 3
"""  # fmt: skip
    assert_silent_success(run_python(code))


WORK_IN_FLIGHT = """
@cuda.jit
def sleep():
    for _ in range(500_000):
        cuda.nanosleep(1000)
import warnings
warnings.simplefilter("ignore")  # Numba's, on a grid of one
sleep[1, 1]()
kept = [store() for _ in range(3)]
"""


@needs_gpu
@pytest.mark.parametrize("end", ["check(*store())", "store()", "for _ in range(200): kept = store()", WORK_IN_FLIGHT])
def test_exit(end):
    assert_silent_success(run_python(STORE + end))


@needs_gpu
def test_exit_after_the_fast_road_is_in_force():
    assert_silent_success(run_python(STORE + "from numba_kvcache import fast_road\nstore()\nfast_road.wait()\nstore()"))


@needs_gpu
def test_exit_by_exception():
    result = run_python(STORE + "store()\n1 / 0")
    assert result.returncode == 1
    assert result.stderr.startswith("Traceback (most recent call last):")
    assert result.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert result.stderr.count("Traceback") == 1


# ----------------------------------------------------------------------------------------------------------------------
# The kernel cache, end to end


@needs_gpu
def test_second_process_does_not_compile(tmp_path):
    cache = str(tmp_path / "cache")
    assert run_python(STORE + "check(*store())", NUMBA_KVCACHE_CACHE_DIR=cache).returncode == 0
    blocked = STORE + "from numba_kvcache import compiler\ncompiler.compile_ptx = None\ncheck(*store())"
    result = run_python(blocked, NUMBA_KVCACHE_CACHE_DIR=cache)
    assert result.returncode == 0, result.stderr
    # And the same script without the cache fails, so the block does block.
    assert run_python(blocked, NUMBA_KVCACHE_CACHE_DIR="").returncode != 0


@needs_gpu
@pytest.mark.parametrize("damage", ["truncated", "empty", "swapped"])
def test_damaged_cache_costs_a_compile(tmp_path, damage):
    cache = tmp_path / "cache"
    assert run_python(STORE + "check(*store())", NUMBA_KVCACHE_CACHE_DIR=str(cache)).returncode == 0
    contents = [path.read_bytes() for path in cache.glob("*.cubin")]
    assert len(contents) > 1
    for path, other in zip(cache.glob("*.cubin"), contents[1:] + contents[:1], strict=True):
        path.write_bytes({"truncated": path.read_bytes()[:1000], "empty": b"", "swapped": other}[damage])
    assert_silent_success(run_python(STORE + "check(*store())", NUMBA_KVCACHE_CACHE_DIR=str(cache)))


@needs_gpu
def test_many_processes_on_one_cold_cache(tmp_path):
    """Twelve start at one moment; and the folder is deleted under twelve more."""
    cache, ready = tmp_path / "cache", tmp_path / "ready"
    wait = """
import os, shutil, time
open(f"{os.environ['READY']}/{os.getpid()}", "w").close()
while len(os.listdir(os.environ["READY"])) < 12:
    time.sleep(0.005)
"""
    delete = "if os.getpid() % 2: shutil.rmtree(os.environ['NUMBA_KVCACHE_CACHE_DIR'], ignore_errors=True)\n"
    for between in ("", delete):
        ready.mkdir()
        code = STORE + wait + between + "check(*store())"
        environment = {"READY": str(ready), "NUMBA_KVCACHE_CACHE_DIR": str(cache)}
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            for result in pool.map(lambda _: run_python(code, **environment), range(12)):  # noqa: B023
                assert_silent_success(result)
        assert not list(cache.glob("*.tmp"))
        for path in ready.iterdir():
            path.unlink()
        ready.rmdir()
    tally("processes on one cold cache", processes=24)
