"""The programs of examples/: on the simulator everywhere, on a GPU where there is one."""

import subprocess
import sys

import pytest
from support import ON_GPU, TESTS, child_environment, needs_gpu, optional, run_python

EXAMPLES = TESTS.parent / "examples"
ANYWHERE = ("numba_arrays.py", "raw_kernel.py")
NEEDS_TORCH = "cuda_graph.py"


def run_example(name, simulator="0"):
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)], env=child_environment(NUMBA_ENABLE_CUDASIM=simulator),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_every_example_is_run_here():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*ANYWHERE, NEEDS_TORCH}


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


def test_graph_example_without_torch():
    code = f"""
import runpy, sys
sys.modules["torch"] = None  # as if it were not installed
runpy.run_path({str(EXAMPLES / NEEDS_TORCH)!r}, run_name="__main__")
"""
    assert_refuses(run_python(code), "needs torch")


@pytest.mark.skipif(ON_GPU, reason="shows what happens without a GPU; this process has one")
def test_graph_example_without_a_gpu():
    if optional("torch").cuda.is_available():
        pytest.skip("torch sees a GPU")
    assert_refuses(run_example(NEEDS_TORCH), "needs a GPU")


@needs_gpu
def test_graph_example():
    optional("torch")
    result = run_example(NEEDS_TORCH)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    assert "replays stored" in result.stdout
