"""The tests of the whole call on Numba's simulator, in a process of its own: Numba chooses its back end at import."""

import os
import re
import subprocess
import sys

from support import SIMULATED, TESTS, needs_compiler

FILES = ("test_store.py", "test_errors.py", "test_arrays.py")
# Fewer would mean that files were lost or skipped; the count was above 280 when this was written.
AT_LEAST = 250


@needs_compiler
def test_whole_calls_on_the_simulator():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        cwd=TESTS, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, timeout=280,
        check=False,
    )  # fmt: skip
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed, output
    assert int(passed[1]) >= AT_LEAST, output


def test_support_agrees_with_numba():
    from numba import config

    assert bool(config.ENABLE_CUDASIM) is SIMULATED
