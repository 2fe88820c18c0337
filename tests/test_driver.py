"""driver.py's errors, which need no driver to be made."""

import os

import pytest
from support import needs_compiler, run_python

from numba_kvcache import driver

pytestmark = needs_compiler


def test_success_gives_the_values():
    success = driver.cu.CUresult.CUDA_SUCCESS
    assert driver.check((success,)) is None
    assert driver.check((success, 7)) == 7
    assert driver.check((success, 7, 8)) == (7, 8)


def test_failure_names_the_error(monkeypatch):
    result = driver.cu.CUresult
    monkeypatch.setattr(
        driver.cu, "cuGetErrorString", lambda code: (result.CUDA_SUCCESS, b"device-side assert triggered")
    )
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_ASSERT \(710\): device-side assert triggered"):
        driver.check((result.CUDA_ERROR_ASSERT, 0))


@pytest.fixture
def answers(monkeypatch):
    """Sets what cuInit says, and the version that the driver serves."""
    result = driver.cu.CUresult

    def answer(init="CUDA_SUCCESS", version=13000):
        monkeypatch.setattr(driver.cu, "cuInit", lambda flags: (getattr(result, init),))
        monkeypatch.setattr(driver.cu, "cuDriverGetVersion", lambda: (result.CUDA_SUCCESS, version))
        monkeypatch.setattr(driver.cu, "cuGetErrorString", lambda code: (result.CUDA_SUCCESS, b"its text"))

    driver.initialise.cache_clear()
    yield answer
    driver.initialise.cache_clear()


def test_failed_initialisation_is_explained_and_not_remembered(answers):
    """A driver that appears later (a container's, say) is used."""
    answers(init="CUDA_ERROR_NO_DEVICE")
    found = r"no usable CUDA GPU: .*CUDA_ERROR_NO_DEVICE \(100\): its text\. A GPU needs .* 525 or newer.*nvidia-smi, "
    with pytest.raises(RuntimeError, match=found + r"CUDA_VISIBLE_DEVICES.*NUMBA_ENABLE_CUDASIM=1"):
        driver.initialise()
    answers()
    driver.initialise()


def test_a_driver_that_is_not_there(monkeypatch, answers):
    def absent(flags):
        raise OSError("libcuda.so.1:\n  not found.")

    answers()
    monkeypatch.setattr(driver.cu, "cuInit", absent)
    with pytest.raises(
        RuntimeError, match=r"no usable CUDA GPU: libcuda\.so\.1: not found\. A GPU needs .* 525"
    ) as raised:
        driver.initialise()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("version", "spoken"), [(11080, "11.8"), (11999, "11.99")])
def test_a_driver_that_is_too_old(answers, version, spoken):
    answers(version=version)
    message = (
        rf"the driver serves CUDA {spoken}, and 12\.0 or newer is needed; update the NVIDIA driver to 525 or newer"
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            driver.initialise()
    answers(version=12000)
    driver.initialise()


def test_cuinit_in_a_forked_child(answers):
    """What it says where another library had used CUDA before the fork."""
    answers(init="CUDA_ERROR_NOT_INITIALIZED")
    with pytest.raises(RuntimeError, match=r"forked from one that had already used CUDA.*get_context\('spawn'\)"):
        driver.initialise()


FORK = """
import os
from numba_kvcache import driver
cu = driver.cu
cu.cuInit = lambda flags: (cu.CUresult.CUDA_SUCCESS,)
cu.cuDriverGetVersion = lambda: (cu.CUresult.CUDA_SUCCESS, 13000)
{before}
child = os.fork()
if child == 0:
    try:
        driver.initialise()
    except RuntimeError as error:
        os._exit(7 if "forked from one" in str(error) else 8)
    os._exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == {code}
driver.initialise()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX")
@pytest.mark.parametrize(("before", "code"), [("driver.initialise()", 7), ("", 9)], ids=["after first use", "before"])
def test_fork(before, code):
    """A child of fork is refused what its parent had initialised, and nothing else."""
    result = run_python(FORK.format(before=before, code=code))
    assert (result.returncode, result.stderr) == (0, "")


def test_a_missing_entry_point_is_named(monkeypatch):
    success = driver.cu.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "initialise", lambda: None)
    monkeypatch.setattr(driver.cu, "cuGetProcAddress", lambda name, version, flags: (success, 0, "not found"))
    with pytest.raises(RuntimeError, match=r"the CUDA driver lacks cuLaunchKernelEx"):
        driver.procedure("cuLaunchKernelEx")
