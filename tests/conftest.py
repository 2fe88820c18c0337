"""One process is one back end: Numba's simulator, a GPU, or the compiler alone; support.py says which this one is."""

import os
import shutil
import tempfile

import pytest

# The suite neither reads nor fills the user's kernel cache. Set before the package is imported; children inherit it.
_cache = os.environ.get("NUMBA_KVCACHE_TEST_CACHE") or tempfile.mkdtemp(prefix="numba_kvcache_tests_")
_owns_cache = "NUMBA_KVCACHE_TEST_CACHE" not in os.environ
os.environ["NUMBA_KVCACHE_CACHE_DIR"] = os.environ["NUMBA_KVCACHE_TEST_CACHE"] = _cache
# Where hypothesis would keep what it learns of the sources it tests.
os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = os.path.join(_cache, "hypothesis")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    if _owns_cache:
        shutil.rmtree(_cache, ignore_errors=True)


def pytest_report_header():
    from fuzzing import SEED
    from support import BACKEND

    return [f"numba_kvcache back end: {BACKEND}", f"NUMBA_KVCACHE_FUZZ_SEED={SEED}"]
