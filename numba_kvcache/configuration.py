"""What is in use on this machine, and why: `numba_kvcache.show_config()`."""

import platform
from collections.abc import Callable

import numba
import numpy

from . import driver, fast_road, settings
from ._version import __version__
from .compiler import COMPILER_DISTRIBUTIONS, EARLY_LAUNCH_SINCE, distribution_version

__all__ = ["configuration", "show_config"]


def show_config() -> None:
    """Print versions, GPU, early launch, kernel cache, and by which host road each kind of array goes.

    Needs no GPU; without one it says so.
    """
    width = max(map(len, facts := configuration()))
    for name, value in facts.items():
        print(f"{name:{width}}  {value}")  # noqa: T201


def configuration() -> dict[str, str]:
    """The lines of show_config: name to value."""
    facts = {
        "numba_kvcache": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "numba": f"{numba.__version__}, numba-cuda {distribution_version('numba-cuda')}",
        "numpy": numpy.__version__,
        "compiler": ", ".join(f"{name} {version}" for name, version in _toolkit() if version != "none"),
    }
    facts.update(_gpu())
    folder = settings.cache_folder()
    facts["kernel cache"] = str(folder) if folder else "off"
    facts["fast host road"] = _answer(fast_road.status)
    for kind, way in fast_road.ways.items():
        facts[f"{kind.__module__}.{kind.__qualname__}"] = way
    if not fast_road.ways and not settings.SIMULATED:
        facts["arrays"] = "none stored yet: each type's road is known after its first call"
    return facts


def _answer(question: Callable[[], str]) -> str:
    """The answer, or what is wrong with a switch in the environment that it depends on."""
    try:
        return question()
    except ValueError as error:
        return str(error)


def _toolkit() -> list[tuple[str, str]]:
    names = [name for name in COMPILER_DISTRIBUTIONS if name.startswith("nvidia-")]
    return [(name, distribution_version(name)) for name in names]


def _gpu() -> dict[str, str]:
    if settings.SIMULATED:
        return {"gpu": "Numba's simulator"}
    try:
        device = driver.current_device()
        major, minor = driver.compute_capability(device)
    except RuntimeError as error:
        return {"gpu": f"none: {error}"}
    return {
        "gpu": f"{driver.device_name(device)} (device {device} of {driver.device_count()}), compute capability "
        f"{major}.{minor}, {driver.sm_count(device)} SMs, driver for CUDA {driver.driver_version()}",
        "early launch": _answer(lambda: _early_launch((major, minor))),
    }


def _early_launch(cc: tuple[int, int]) -> str:
    if not settings.early_launch():
        return "off: NUMBA_KVCACHE_EARLY_LAUNCH is 0"
    if cc < EARLY_LAUNCH_SINCE:
        return "off: needs compute capability {}.{}".format(*EARLY_LAUNCH_SINCE)
    return "on"
