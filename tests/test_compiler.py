"""compiler.py up to the load, which needs no GPU: names, keys, what the PTX holds. (SASS: test_machine_code.py.)"""

import concurrent.futures
import contextlib
import os
import re
import shutil
import warnings

import numpy as np
import pytest
from support import TESTS, needs_compiler, run_python, tally

from numba_kvcache import compiler, disk_cache, driver, make_store_kernel, settings
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.layout import Strategy, plan_store

pytestmark = needs_compiler

SPECS = {
    "narrow": StoreSpec(plan_store(128), 64, True),
    "split 4": StoreSpec(plan_store(2048, 0, 4), 32, True),
    "odd": StoreSpec(plan_store(92, 516, 1), 64, False),
    "idle threads": StoreSpec(plan_store(196, 0, 0), 32, False),
    "release first": StoreSpec(plan_store(1024), 64, True, Strategy(release_first=True)),
    "past the L1": StoreSpec(plan_store(1024), 64, True, Strategy(bypass_l1=True)),
    "wide": StoreSpec(plan_store(65536, 0, 1), 64, True),
    "skipping": StoreSpec(plan_store(1024), 32, True, Strategy(bypass_l1=True), skipping=True),
}


@pytest.fixture(scope="module", params=SPECS, name="compiled")
def fixture_compiled(request):
    spec = SPECS[request.param]
    return spec, compiler.compile_ptx(spec, (9, 0))


def test_entry_has_the_specs_name(compiled):
    """numba-cuda takes the name from an option that its documentation denies: a new release may drop it."""
    spec, ptx = compiled
    assert re.findall(r"\.entry\s+([\w$]+)", ptx) == [spec.name]


def test_names_of_hand():
    assert SPECS["narrow"].name == "store_kvcache_128x16_t8_p1_i64_pdl"
    assert SPECS["split 4"].name == "store_kvcache_2048x16_t32_p4_i32_pdl"
    assert SPECS["release first"].name == "store_kvcache_1024x16_t64_p1_i64_pdl_rf"
    assert SPECS["past the L1"].name == "store_kvcache_1024x16_t64_p1_i64_pdl_nl1"
    assert SPECS["skipping"].name == "store_kvcache_1024x16_t64_p1_i32_pdl_nl1_skip"
    assert SPECS["odd"].name == "store_kvcache_92x4_516x4_t32_p1_i64"


def test_bytes_are_moved_and_never_computed_with(compiled):
    """No floating point of any kind: Numba widens mixed integers to f64, and a float move can quieten a NaN."""
    _, ptx = compiled
    assert not re.findall(r"\.(?:f16|bf16|f32|f64)\w*", ptx)


def test_no_read_only_loads(compiled):
    """Under early launch the producer may still be writing, and k may share memory with a cache."""
    _, ptx = compiled
    assert "ld.global" in ptx
    assert ".nc" not in ptx


def test_parameters_are_the_thirteen(compiled):
    """Five addresses, five strides, batch, size limit, skip index: what launch.py and native.py pack."""
    _, ptx = compiled
    parameters = re.findall(r"\.param \.[a-z](\d+) ", ptx[ptx.index(".entry") :].split(")")[0])
    assert parameters == ["64"] * 10 + ["32", "64", "64"]


def test_assert_is_compiled_in(compiled):
    _, ptx = compiled
    assert "__assertfail" in ptx
    strings = [bytes(map(int, numbers.split(","))) for numbers in re.findall(r"\[\d+\] = \{([\d, ]+)\}", ptx)]
    expected = {b"0 <= index && index < size_limit", b"numba_kvcache/kernel.py", b"store_kvcache"}
    assert expected <= {string.rstrip(b"\0") for string in strings}


def test_the_line_in_the_assert_is_the_checks():
    from numba_kvcache import kernel

    with open(kernel.__file__) as file:
        lines = file.read().splitlines()
    assert lines[kernel._CHECK_LINE - 1].strip() == "check_slot(in_bounds)"


def test_early_launch_is_all_or_nothing(compiled):
    spec, ptx = compiled
    found = re.findall(r"griddepcontrol\.(\w+)", ptx)
    # (The compiler may repeat the release, one on each of several paths.)
    assert set(found) == ({"wait", "launch_dependents"} if spec.early_launch else set())
    assert found.count("wait") == spec.early_launch
    if spec.early_launch:
        _, _, after = ptx.partition("griddepcontrol.wait")
        before_loads = after[: after.index("ld.global")]
        assert ("launch_dependents" in before_loads) is spec.strategy.release_first


def test_nothing_is_loaded_before_the_wait(compiled):
    spec, ptx = compiled
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert bool(wait) == spec.early_launch
    assert not spec.early_launch or "ld.global" not in before


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)])
def test_cubin_is_linked_for_the_gpu(compiled, cc):
    spec, _ = compiled
    if spec.early_launch and cc < compiler.EARLY_LAUNCH_SINCE:
        spec = spec.__class__(spec.layout, spec.index_bits, early_launch=False)
    linked = compiler.link_cubin(compiler.compile_ptx(spec, cc), cc)
    assert linked.cubin[:4] == b"\x7fELF"
    assert spec.name.encode() in linked.cubin
    assert re.search(r"\b0 bytes spill stores", linked.report) or "spill" not in linked.report


# The cache key.

SPEC, CC = SPECS["narrow"], (9, 0)


@pytest.mark.parametrize(
    "spec",
    [
        StoreSpec(SPEC.layout, 32, True), StoreSpec(SPEC.layout, 64, False), StoreSpec(plan_store(256), 64, True),
        StoreSpec(plan_store(128, 256), 64, True), StoreSpec(plan_store(128, 0, 1), 64, True),
        StoreSpec(plan_store(128, 0, 0, 8, 16), 64, True), StoreSpec(plan_store(128, 0, 0, 16, 8), 64, True),
        StoreSpec(SPEC.layout, 64, True, Strategy(release_first=True)),
        StoreSpec(SPEC.layout, 64, True, Strategy(bypass_l1=True)),
        StoreSpec(SPEC.layout, 64, True, skipping=True),
    ],
)  # fmt: skip
def test_key_depends_on_the_spec(spec):
    assert compiler.cache_key(spec, CC) != compiler.cache_key(SPEC, CC)


def test_key_is_stable():
    assert compiler.cache_key(StoreSpec(plan_store(128), 64, True), (9, 0)) == compiler.cache_key(SPEC, CC)


def test_key_depends_on_the_gpu():
    assert compiler.cache_key(SPEC, (9, 0)) != compiler.cache_key(SPEC, (10, 0))


@pytest.mark.parametrize("name", compiler.COMPILER_DISTRIBUTIONS)
def test_key_depends_on_every_version(name, monkeypatch):
    before = compiler.cache_key(SPEC, CC)
    real = compiler.distribution_version
    monkeypatch.setattr(compiler, "distribution_version", lambda d: "0.0.1" if d == name else real(d))
    monkeypatch.setattr(compiler, "_versions", compiler._versions.__wrapped__)
    assert compiler.cache_key(SPEC, CC) != before


@pytest.mark.parametrize("name", ["compiler.py", "device.py", "kernel.py", "layout.py"])
def test_key_depends_on_every_kernel_source(name, monkeypatch):
    before = compiler.cache_key(SPEC, CC)
    real = compiler.Path.read_bytes
    monkeypatch.setattr(compiler.Path, "read_bytes", lambda p: real(p) + (b" " if p.name == name else b""))
    monkeypatch.setattr(compiler, "_sources_digest", compiler._sources_digest.__wrapped__)
    assert compiler.cache_key(SPEC, CC) != before


@pytest.fixture
def _no_driver(monkeypatch):
    """relaxed_capture asks the driver, which is not there."""
    monkeypatch.setattr(driver, "relaxed_capture", contextlib.nullcontext)


@pytest.mark.usefixtures("_no_driver")
def test_second_process_reads_the_cubin(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "cache_folder", lambda: tmp_path / "cache")
    first = compiler._cubin(SPEC, CC)
    assert disk_cache.load(tmp_path / "cache", compiler.cache_key(SPEC, CC)) == first
    monkeypatch.setattr(compiler, "compile_ptx", None)  # a call would fail
    assert compiler._cubin(SPEC, CC) == first


OTHER = SPECS["odd"]


def is_kernel(cubin, spec):
    """(The bytes are no measure: Numba numbers what it compiles, and puts the numbers into symbols.)"""
    return cubin[:4] == b"\x7fELF" and [s for s in (SPEC, OTHER) if s.name.encode() in cubin] == [spec]


def cached_pair(folder, monkeypatch):
    """The files of two kernels, and their machine code."""
    monkeypatch.setattr(settings, "cache_folder", lambda: folder)
    right = {spec: compiler._cubin(spec, CC) for spec in (SPEC, OTHER)}
    assert all(is_kernel(cubin, spec) for spec, cubin in right.items())
    files = [folder / disk_cache._name(compiler.cache_key(spec, CC)) for spec in (SPEC, OTHER)]
    assert sorted(files) == sorted(folder.iterdir())
    return files, right


@pytest.mark.usefixtures("_no_driver")
@pytest.mark.parametrize("fault", ["swapped", "truncated", "garbage", "bare cubin", "another version's", "deleted"])
def test_a_faulty_cache_never_gives_a_wrong_kernel(tmp_path, monkeypatch, fault):
    """A compile at worst, without a word, and the cache is whole again afterwards."""
    folder = tmp_path / "cache"
    (first, second), right = cached_pair(folder, monkeypatch)
    a, b = first.read_bytes(), second.read_bytes()
    if fault == "swapped":
        first.write_bytes(b)
        second.write_bytes(a)
    elif fault == "truncated":
        first.write_bytes(a[:-1])
        second.write_bytes(b[:40])
    elif fault == "garbage":
        first.write_bytes(bytes(len(a)))
        second.write_bytes(b"\x7fELF")
    elif fault == "bare cubin":  # machine code without a digest
        first.write_bytes(right[OTHER])
        second.write_bytes(right[SPEC])
    elif fault == "another version's":
        key = compiler.cache_key(SPEC, CC).replace("numba-cuda", "numba-cuda of before")
        first.write_bytes(disk_cache._digest(key, right[OTHER]) + right[OTHER])
        second.unlink()
    else:
        shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for spec in (SPEC, OTHER):
            assert is_kernel(compiler._cubin(spec, CC), spec)
            assert is_kernel(disk_cache.load(folder, compiler.cache_key(spec, CC)), spec)
    tally("cache fault", fault=fault)


@pytest.mark.skipif(os.name == "nt", reason="the clock of the start is POSIX")
def test_processes_race_on_one_cold_cache(tmp_path):
    """Four processes start to compile two kernels at one moment; each gets the right ones, and the folder is whole."""
    code = """
import contextlib, os, time
from numba_kvcache import compiler, driver
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.layout import plan_store
driver.relaxed_capture = contextlib.nullcontext
open(f"{os.environ['READY']}/{os.getpid()}", "w").close()
while len(os.listdir(os.environ["READY"])) < 4:
    time.sleep(0.005)
for width in (640, 644):
    spec = StoreSpec(plan_store(width), 64, True)
    cubin = compiler._cubin(spec, (9, 0))
    assert cubin[:4] == b"\x7fELF" and spec.name.encode() in cubin
"""
    cache, ready = tmp_path / "cache", tmp_path / "ready"
    ready.mkdir()
    environment = {"READY": str(ready), "NUMBA_KVCACHE_CACHE_DIR": str(cache)}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run_python(code, **environment), range(4)))
    assert [(result.returncode, result.stderr) for result in results] == [(0, "")] * 4
    assert [path.suffix for path in cache.iterdir()] == [".cubin"] * 2


@pytest.mark.usefixtures("_no_driver")
def test_unusable_cache_costs_a_compile(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(settings, "cache_folder", lambda: tmp_path / "file")
    assert compiler._cubin(SPEC, CC)[:4] == b"\x7fELF"


def test_numpy_without_row_stack_is_named(monkeypatch):
    """REPORTS 23."""
    monkeypatch.delattr(np, "row_stack")
    monkeypatch.setattr(np, "__version__", "2.5.5")
    with pytest.raises(RuntimeError, match=r"numba-cuda 0\.30\.\d+ .* NumPy 2\.5\.5.* pip install 'numpy<2\.5'"):
        compiler.compile_ptx(SPEC, CC)


# Machines that cannot: each message says what was found, what is needed, and the command that mends it.


@pytest.mark.parametrize("library", ["nvrtc", "nvvm", "nvJitLink"])
def test_a_toolkit_that_is_not_installed(library):
    code = f"""
import cuda.pathfinder._dynamic_libs.load_nvidia_dynamic_lib as loader
find = loader._load_lib_no_cache
def absent(name):
    if name == {library!r}:
        raise loader.DynamicLibNotFoundError(f"Failure finding {{name}}")
    return find(name)
loader._load_lib_no_cache = absent
from numba_kvcache import compiler
from numba_kvcache.kernel import StoreSpec
from numba_kvcache.layout import plan_store
try:
    compiler.link_cubin(compiler.compile_ptx(StoreSpec(plan_store(128), 64, True), (9, 0)), (9, 0))
except RuntimeError as error:
    print(error)
"""
    result = run_python(code)
    message = (
        rf"the CUDA toolkit's compiler was not found: Failure finding {library}; .*pip install 'numba-cuda\[cu1[23]\]'"
    )
    assert re.fullmatch(message, result.stdout.strip()), result.stdout + result.stderr
    assert result.stderr == ""


@pytest.fixture
def toolkit(monkeypatch):
    """Sets the installed compiler's version, as CUDA 13's wheels name it or as CUDA 12's do."""

    def install(version):
        versions = dict.fromkeys(compiler.COMPILER_DISTRIBUTIONS, "none")
        versions["nvidia-nvvm" if version.startswith("13") else "nvidia-cuda-nvcc-cu12"] = version
        monkeypatch.setattr(compiler, "_versions", lambda: versions)

    return install


@pytest.mark.parametrize("cc", [(3, 7), (6, 1)])
def test_a_gpu_that_is_too_old(toolkit, cc):
    toolkit("12.9.86")
    with pytest.raises(RuntimeError, match=rf"the GPU has compute capability {cc[0]}\.{cc[1]}, and 7\.0 or newer is"):
        compiler._cubin(SPEC, cc)


def test_a_gpu_that_only_cuda_12_serves(toolkit):
    toolkit("13.5.37")
    message = r"the GPU has compute capability 7\.0, which .* of CUDA 13, no longer .* pip install 'numba-cuda\[cu12\]'"
    with pytest.raises(RuntimeError, match=message):
        compiler._cubin(SPEC, (7, 0))
    compiler._check_gpu((7, 5))
    toolkit("12.9.86")
    compiler._check_gpu((7, 0))


def refuse(cubin, name):
    raise RuntimeError("the CUDA driver reports CUDA_ERROR_NO_BINARY_FOR_GPU (209): no kernel image")


def test_a_toolkit_newer_than_the_driver(toolkit, monkeypatch):
    """The kernel does not load; which of the two to change, the message says."""
    monkeypatch.setattr(driver, "load_kernel", refuse)
    monkeypatch.setattr(driver, "driver_version", lambda: "12.4")
    toolkit("13.5.37")
    message = r"\(209\): .*the driver serves CUDA 12\.4, and .* of CUDA 13: update .* pip install 'numba-cuda\[cu12\]'"
    with pytest.raises(RuntimeError, match=message):
        compiler._load(b"", "name")
    toolkit("12.9.86")
    with pytest.raises(RuntimeError, match=r"\(209\): no kernel image$"):
        compiler._load(b"", "name")


def test_python_versions_are_declared():
    """pip refuses the rest, and says which Python was found and which is needed."""
    text = (TESTS.parent / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in text
    assert "Python 3.10 to 3.14" in (TESTS.parent / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"index_dtype": "uint32"}, "index_dtype must be one of int32, int64, got 'uint32'"),
        ({"alignment": 2}, "alignment must be one of 16, 8, 4, got 2"),
        ({"num_split": 3}, "num_split must be one of"),
        ({"num_split": 4}, "num_split=4 needs"),
    ],
)
def test_make_store_kernel_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        make_store_kernel(256, **options)
