"""The two roads of a call on the host, told apart from outside. For the tests as well: nothing is imported here."""

import types
from collections.abc import Callable
from typing import Any

__all__ = ["without_fast_road"]


def without_fast_road(f: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function with the vectorcall that CPython gives every function, whatever has been done to its own."""
    copy = types.FunctionType(f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
    copy.__kwdefaults__ = f.__kwdefaults__
    return copy
