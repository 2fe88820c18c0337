"""A bounded soak on a GPU (tests/soak.py is the long one), and what counts as growth."""

import pytest
from soak import Sample, growth
from support import needs_gpu, run_python

STEADY = [Sample(100 << 20, 5000, 9.0), *[Sample(101 << 20, 5100, 3.3)] * 9]


@needs_gpu
@pytest.mark.parametrize("native", ["1", "0"], ids=["fast road", "Python road"])
def test_200_000_calls_of_mixed_shapes(native):
    code = "import sys, soak\nsys.exit(soak.main(['--calls', '200000']))"
    result = run_python(code, NUMBA_KVCACHE_NATIVE=native)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith("nothing grew")


def test_what_is_steady():
    assert growth(STEADY) == []
    # A neighbour that slows some periods, at whichever end, is no growth.
    noisy = [s._replace(microseconds=3.3 * (1 + (i in (1, 8, 9)))) for i, s in enumerate(STEADY)]
    assert growth(noisy) == []


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("resident_bytes", 1 << 20, "memory by 8388608 bytes"),
        ("blocks", 200, "Python's allocated blocks by 1600"),
        ("microseconds", 0.2, "time per call from 3.50 to 4.70 us"),
    ],
)
def test_what_is_growth(name, step, words):
    grown = [s._replace(**{name: getattr(s, name) + i * step}) for i, s in enumerate(STEADY)]
    assert growth(grown) == [words]
