"""Conversion of one JSON value to a number: `8`, `"8"`, `1e9` and `"1e9"` are counts; booleans, NaN and infinities not.

Every function raises ValueError with what was expected; the caller adds the path and what was found.
"""

from __future__ import annotations

import math
from typing import Any


def number(value: Any) -> float:
    """A finite float from a number or a numeric string."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("expected a number")
    try:
        result = float(value)
    except (ValueError, OverflowError):
        raise ValueError("expected a number") from None
    if not math.isfinite(result):
        raise ValueError("expected a finite number")
    return result


def shown(value: Any) -> str:
    """Return a value as an error quotes it: repr, cut to a line; also for a number with too many digits to print."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"{type(value).__name__} too long to print"
    return text if len(text) <= 200 else f"{text[:200]}..."


def whole(value: Any) -> int:
    """An int from an int, an integral float (1e9) or a string of either; digits are exact beyond 2**53."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return _int(value)
    try:
        result = number(value)
    except ValueError as error:
        raise ValueError(str(error).replace("number", "whole number")) from None
    if not result.is_integer():
        raise ValueError("expected a whole number")
    return int(result)


def switch(value: Any) -> Any:
    """DeepSpeed reads 0, 1 and their words as false and true; anything else is returned as it is."""
    if not isinstance(value, (int, float, str)):
        return value
    words = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True}
    return words.get(value.lower() if isinstance(value, str) else value, value)


def number_or_same(value: Any) -> Any:
    """Numeric strings become numbers, also inside lists; the rest is returned as it is, but no NaN or infinity."""
    if isinstance(value, (list, tuple)):
        return [number_or_same(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    if not isinstance(value, str):
        return value
    try:
        parsed = number(value)
    except ValueError as error:
        if "finite" in str(error):
            raise
        return value
    return _int(value) if value.strip().lstrip("+-").isdecimal() else parsed


def _int(digits: str) -> int:
    number(digits)  # which has a range
    return int(digits)
