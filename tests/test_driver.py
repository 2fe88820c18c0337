"""driver.py's errors, which need no driver to be made."""

import pytest
from support import needs_compiler

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


def test_failed_initialisation_is_explained_and_not_remembered(monkeypatch):
    """A driver that appears later (a container's, say) is used."""
    driver.initialise.cache_clear()
    result = driver.cu.CUresult
    monkeypatch.setattr(driver.cu, "cuGetErrorString", lambda code: (result.CUDA_SUCCESS, b"no GPU"))
    monkeypatch.setattr(driver.cu, "cuInit", lambda flags: (result.CUDA_ERROR_NO_DEVICE,))
    with pytest.raises(RuntimeError, match=r"no usable CUDA GPU: .*CUDA_ERROR_NO_DEVICE.*NUMBA_ENABLE_CUDASIM=1"):
        driver.initialise()
    monkeypatch.setattr(driver.cu, "cuInit", lambda flags: (result.CUDA_SUCCESS,))
    driver.initialise()
    driver.initialise.cache_clear()


def test_a_missing_entry_point_is_named(monkeypatch):
    success = driver.cu.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "initialise", lambda: None)
    monkeypatch.setattr(driver.cu, "cuGetProcAddress", lambda name, version, flags: (success, 0, "not found"))
    with pytest.raises(RuntimeError, match=r"the CUDA driver lacks cuLaunchKernelEx"):
        driver.procedure("cuLaunchKernelEx")
