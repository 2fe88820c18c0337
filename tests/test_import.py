"""What importing does, and what a call does where there is no GPU (REPORTS 23). Each in a fresh interpreter."""

import subprocess
import sys

import pytest
from support import needs_compiler, needs_no_gpu, run_python


def assert_runs(code, **environment):
    result = run_python(code, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("simulator", ["0", "1"])
def test_import_loads_no_other_array_library(simulator):
    code = """
import sys
import numba_kvcache
assert not {"torch", "cupy", "jax"} & set(sys.modules), sys.modules.keys()
"""
    assert_runs(code, NUMBA_ENABLE_CUDASIM=simulator)


@pytest.mark.parametrize("name", ["torch", "sglang"])
def test_what_needs_torch_asks_for_it(name):
    """And for the library: within numba_kvcache/torch.py, `torch` is not that file."""
    code = f"""
import importlib, sys
sys.modules["torch"] = None  # as if it were not installed
import numba_kvcache
try:
    importlib.import_module("numba_kvcache.{name}")
except ImportError as error:
    assert error.name == "torch", error
else:
    raise SystemExit("no error")
"""
    assert_runs(code)


@needs_compiler
def test_import_makes_no_driver_call():
    """Not even cuInit: a process that has called it cannot fork and use the GPU in the child."""
    code = """
from cuda.bindings import driver
for name in dir(driver):
    if name.startswith("cu") and name[2:3].isupper() and callable(getattr(driver, name)):
        if not isinstance(getattr(driver, name), type):
            def forbidden(*args, name=name):
                raise SystemExit(f"import called {name}")
            setattr(driver, name, forbidden)
from cuda.bindings import runtime
import numba_kvcache
from numba_kvcache import driver as ours
assert ours.initialise.cache_info().currsize == 0
try:
    ours.initialise()  # the trap does spring
except SystemExit as trapped:
    assert "cuInit" in str(trapped)
else:
    raise SystemExit("the trap is not where the package looks")
"""
    assert_runs(code)


@pytest.mark.parametrize("simulator", ["0", "1"])
def test_import_changes_nothing_of_numbas(simulator):
    code = """
import warnings
from numba import config
from numba.core.errors import NumbaPerformanceWarning
import numba.cuda
names = [name for name in dir(config) if name.isupper()]
before = {name: getattr(config, name) for name in names}
filters = list(warnings.filters)
import numba_kvcache
assert {name: getattr(config, name) for name in names} == before
assert warnings.filters == filters
"""
    assert_runs(code, NUMBA_ENABLE_CUDASIM=simulator)


def test_import_writes_nothing(tmp_path):
    folder = tmp_path / "cache"
    assert_runs("import numba_kvcache", NUMBA_KVCACHE_CACHE_DIR=str(folder), HOME=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_public_names():
    code = """
import numba_kvcache
names = {"__version__", "can_use_store_kvcache", "make_store_kernel", "show_config", "store_kvcache",
         "store_kvcache_fp8", "warmup"}
assert set(numba_kvcache.__all__) == names
assert all(hasattr(numba_kvcache, name) for name in names)
"""
    assert_runs(code)


def test_warnings_as_errors_at_import():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import numba_kvcache"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@needs_no_gpu
@pytest.mark.parametrize(
    "call",
    [
        "store_kvcache(array, array, array, array, InterfaceArray(0x1000, (4,), '<i8'))",
        "warmup(128)",
        "warmup(128, device=0)",
    ],
)
def test_only_the_call_fails_without_a_gpu(call):
    code = f"""
from support import InterfaceArray
from numba_kvcache import can_use_store_kvcache, store_kvcache, warmup
array = InterfaceArray(0x1000, (4, 128), "<f2")
assert can_use_store_kvcache(128)
for _ in range(2):
    try:
        {call}
    except RuntimeError as error:
        assert "no usable CUDA GPU: " in str(error), error
        assert "NUMBA_ENABLE_CUDASIM=1" in str(error), error
    else:
        raise SystemExit("no error")
"""
    assert_runs(code)


@needs_no_gpu
def test_ways_that_need_no_gpu_still_work():
    """An unservable call is refused for its own reason, and kernels still compile."""
    code = """
import numpy as np
from numba_kvcache import store_kvcache, warmup
for call, error in ((lambda: store_kvcache([1], [1], [1], [1], [1]), TypeError), (lambda: warmup(6), ValueError)):
    try:
        call()
    except error:
        pass
    else:
        raise SystemExit("no error")
"""
    assert_runs(code)
