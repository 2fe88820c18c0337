"""settings.py: the words that switch something off, and those that are refused."""

import pytest
from support import run_python

from numba_kvcache import settings

NAMES = ("NUMBA_KVCACHE_EARLY_LAUNCH", "NUMBA_KVCACHE_NATIVE")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    settings._switches.cache_clear()
    yield
    settings._switches.cache_clear()


def test_unset_is_on():
    assert settings.early_launch()
    assert settings.native()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("word", "on"),
    [("1", True), ("true", True), ("On", True), (" YES ", True), ("", True), ("0", False), ("False", False),
     ("off", False), (" no", False)],
)  # fmt: skip
def test_words(name, word, on, monkeypatch):
    monkeypatch.setenv(name, word)
    assert (settings.early_launch(), settings.native()) == (on or name != NAMES[0], on or name != NAMES[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("word", ["2", "disable", "00", "-1"])
def test_nonsense_is_refused_every_time(name, word, monkeypatch):
    monkeypatch.setenv(name, word)
    for switch in (settings.early_launch, settings.native) * 2:
        with pytest.raises(ValueError, match=rf"{name} must be one of 1, true, .* off, no, got '{word}'"):
            switch()


def test_nonsense_does_not_stop_an_import():
    result = run_python("import numba_kvcache", NUMBA_KVCACHE_NATIVE="nonsense")
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("simulator", ["0", "1"])
@pytest.mark.parametrize("name", NAMES)
def test_show_config_says_that_a_word_is_nonsense(name, simulator):
    code = "import numba_kvcache; numba_kvcache.show_config()"
    result = run_python(code, NUMBA_ENABLE_CUDASIM=simulator, **{name: "maybe"})
    assert (result.returncode, result.stderr) == (0, "")
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("fast host road "))
    assert f"{name} must be one of 1, true," in line
    assert "got 'maybe'" in line


def test_show_config_on_the_simulator_awaits_no_first_call():
    """Every array goes one way there, before the first call and after it."""
    result = run_python("import numba_kvcache; numba_kvcache.show_config()", NUMBA_ENABLE_CUDASIM="1")
    assert "the simulator launches through Numba" in result.stdout
    assert "none stored yet" not in result.stdout
