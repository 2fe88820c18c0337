"""The programs of examples/: on the simulator everywhere, on a GPU where there is one."""

import subprocess
import sys

import pytest
from support import ON_GPU, TESTS, child_environment, needs_gpu, needs_no_gpu, optional, run_python

EXAMPLES = TESTS.parent / "examples"
ANYWHERE = ("numba_arrays.py", "raw_kernel.py")
NEEDS_TORCH = "cuda_graph.py"
NEEDS_TRANSFORMERS = "generate.py"


def run_example(name, simulator="0"):
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)], env=child_environment(NUMBA_ENABLE_CUDASIM=simulator),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*ANYWHERE, NEEDS_TORCH, NEEDS_TRANSFORMERS}


@pytest.mark.parametrize("simulator", ["1", pytest.param("0", marks=needs_gpu)], ids=["simulator", "GPU"])
@pytest.mark.parametrize("name", ANYWHERE)
def test_example(name, simulator):
    result = run_example(name, simulator)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    assert "stored" in result.stdout


def assert_refuses(result, reason):
    """Exit code 1 and one line that says what is missing."""
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert reason in result.stderr


@pytest.mark.parametrize("name", [NEEDS_TORCH, NEEDS_TRANSFORMERS])
def test_example_without_torch(name):
    code = f"""
import runpy, sys
sys.modules["torch"] = None  # as if it were not installed
runpy.run_path({str(EXAMPLES / name)!r}, run_name="__main__")
"""
    assert_refuses(run_python(code), "needs torch")


@pytest.mark.skipif(ON_GPU, reason="shows what happens without a GPU; this process has one")
@pytest.mark.parametrize(("name", "library"), [(NEEDS_TORCH, "torch"), (NEEDS_TRANSFORMERS, "transformers")])
def test_example_without_a_gpu(name, library):
    optional(library)
    if optional("torch").cuda.is_available():
        pytest.skip("torch sees a GPU")
    assert_refuses(run_example(name), "needs a GPU")


@needs_no_gpu
@pytest.mark.parametrize("name", ANYWHERE)
def test_example_without_a_gpu_names_the_simulator(name):
    assert_refuses(run_example(name), f"{name} needs a GPU, or NUMBA_ENABLE_CUDASIM=1")


@needs_gpu
def test_graph_example():
    optional("torch")
    result = run_example(NEEDS_TORCH)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    assert "replays stored" in result.stdout


@pytest.mark.parametrize("simulator", ["1", pytest.param("0", marks=needs_gpu)], ids=["simulator", "GPU"])
def test_generate_example(simulator):
    optional("torch")
    optional("transformers")
    result = run_example(NEEDS_TRANSFORMERS, simulator)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    ways = ["eager", "eager, fixed shapes"] + ["CUDA graph"] * (simulator == "0")
    lines = result.stdout.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == ways
    assert all(" equal to " in line for line in lines)


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ("store_kvcache(as_rows(keys), as_rows(values), self.k_cache, self.v_cache, new_slots)", "pass"),
        ("self.pages[i // PAGE]", "self.pages[0]"),
        ("store_kvcache(as_rows(keys),", "store_kvcache(as_rows(values),"),
    ],
    ids=["nothing stored", "one page for all", "V in the place of K"],
)
def test_a_wrong_cache_gives_other_tokens(tmp_path, statement, fault):
    """Random weights could repeat one token whatever the cache holds; then equal tokens would show nothing."""
    optional("torch")
    optional("transformers")
    lesson = (EXAMPLES / NEEDS_TRANSFORMERS).read_text()
    assert lesson.count(statement) == 1
    (tmp_path / NEEDS_TRANSFORMERS).write_text(lesson.replace(statement, fault))
    result = run_example(tmp_path / NEEDS_TRANSFORMERS, "1")
    assert (result.returncode, result.stderr) == (1, "the paged cache gave other tokens\n")
    assert result.stdout.count(" NOT equal to ") == 2
