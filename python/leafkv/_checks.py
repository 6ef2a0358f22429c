"""Checks of arguments that several modules need: an error names the argument, what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import inf, isfinite, nan
from numbers import Integral, Real
from typing import Any

from leafkv.errors import InvalidInputError


def check_integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int from ``low`` to ``high``; a bool is none."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if number is None or number < low or (high is not None and number > high):
        bound = f">= {low}" if high is None else f"from {low} to {high}"
        raise InvalidInputError(f"{name}: expected an integer {bound}, got {value!r}")
    return number


def check_number(name: str, value: Any, expected: str, holds: Callable[[float], bool]) -> float:
    """``value`` as a finite float for which ``holds``; a bool is none."""
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else nan
    except OverflowError:
        number = inf
    if not isfinite(number) or not holds(number):
        raise InvalidInputError(f"{name}: expected {expected}, got {value!r}")
    return number


def check_bool(name: str, value: Any) -> bool:
    """``value``, which is True or False."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}: expected True or False, got {value!r}")
    return value


MAX_TOKEN_ID = 2**31 - 1
"""No vocabulary has more tokens."""


def check_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """``value``, a collection of token ids (text is none), as different ints in the order in which they came."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise InvalidInputError(f"{name}: expected token ids, got {value!r}")
    return tuple(dict.fromkeys(check_integer(name, token, 0, MAX_TOKEN_ID) for token in value))


def check_strings(name: str, value: Any) -> tuple[str, ...]:
    """``value``, a collection of strings that are not empty, as different ones in the order in which they came."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise InvalidInputError(f"{name}: expected a list of strings, got {value!r}")
    for text in value:
        if not isinstance(text, str) or not text:
            raise InvalidInputError(f"{name}: expected strings of at least one character, got {text!r}")
    return tuple(dict.fromkeys(value))
