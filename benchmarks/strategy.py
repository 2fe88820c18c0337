"""Which of the package's strategies a launch takes, and what they are called."""

from numba_kvcache import driver
from numba_kvcache.dispatch import use_early_launch
from numba_kvcache.layout import PLAIN, StoreLayout, Strategy, strategies

__all__ = ["STRATEGIES", "chosen_strategy"]

STRATEGIES = {
    "plain": PLAIN,
    "bypass L1": Strategy(bypass_l1=True),
    "release first": Strategy(release_first=True),
}


def chosen_strategy(layout: StoreLayout, batch: int, device: int) -> Strategy:
    """What layout.strategies has for this many rows on `device`, as dispatch.py asks it."""
    bands = strategies(layout, driver.sm_count(device), use_early_launch(device))
    return next(strategy for largest, strategy in bands if batch <= largest)
