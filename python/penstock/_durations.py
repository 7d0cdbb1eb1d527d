"""Durations as people write them.

Owns: the one reading of ``"60s"``, ``timedelta(seconds=60)`` and ``60_000`` that every
argument of the package shares. Inside penstock a duration is a whole number of
microseconds, because that is the unit of Spark's timestamps and of event time in the
native part.

Non-goals: calendar units. A month has no fixed length, so ``"1mo"`` is refused.
"""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal

from penstock.errors import ConfigError

__all__ = ["Duration", "format_duration", "milliseconds", "parse_duration"]

#: What every duration argument accepts: text with units, a timedelta, or whole milliseconds.
Duration = str | int | timedelta

_UNITS_US = {
    "us": 1,
    "µs": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]+)")
_EXAMPLES = 'write "60s", "500ms", "1m30s", "2h", a timedelta, or whole milliseconds such as 60_000'
_LARGEST_US = 2**62


def parse_duration(value: Duration, name: str = "duration", *, allow_zero: bool = False) -> int:
    """Read a duration and return whole microseconds.

    Parameters
    ----------
    value : str, int or datetime.timedelta
        Text made of numbers with units (``us``, ``ms``, ``s``, ``m`` or ``min``, ``h``,
        ``d``), which may be joined (``"1m30s"``); a timedelta; or an int, read as
        **milliseconds**.
    name : str, default "duration"
        What the caller calls the value; error messages begin with it.
    allow_zero : bool, default False
        Whether a duration of zero makes sense here (a lateness: yes; a window: no).

    Returns
    -------
    int
        Microseconds.

    Raises
    ------
    ConfigError
        When the value has no unit, an unknown unit, a fraction of a microsecond, is
        negative, or is zero where that makes no sense.

    Examples
    --------
    >>> parse_duration("60s")
    60000000
    >>> parse_duration("1m30s") == parse_duration(90_000)
    True
    >>> from datetime import timedelta
    >>> parse_duration(timedelta(milliseconds=500))
    500000
    """
    us = _read(value, name)
    if us < 0:
        raise ConfigError(f"{name} {value!r} is negative; {_EXAMPLES}")
    if us == 0 and not allow_zero:
        raise ConfigError(f"{name} {value!r} is zero; it must be longer than that")
    if us > _LARGEST_US:
        raise ConfigError(f"{name} {value!r} is longer than event time can hold")
    return us


def milliseconds(us: int, name: str = "duration") -> int:
    """Turn microseconds into whole milliseconds, refusing a remainder.

    Parameters
    ----------
    us : int
        Microseconds.
    name : str, default "duration"
        What the caller calls the value.

    Returns
    -------
    int
        Milliseconds.

    Raises
    ------
    ConfigError
        When the value is not a whole number of milliseconds.

    Examples
    --------
    >>> milliseconds(5_000_000)
    5000
    """
    whole, rest = divmod(us, 1_000)
    if rest:
        raise ConfigError(f"{name} of {us} us is finer than a millisecond; use whole milliseconds")
    return whole


def format_duration(us: int) -> str:
    """Write microseconds in the largest unit that divides them.

    Parameters
    ----------
    us : int
        Microseconds, not negative.

    Returns
    -------
    str
        Text that `parse_duration` reads back to the same number.

    Examples
    --------
    >>> format_duration(90_000_000)
    '90s'
    >>> format_duration(3_600_000_000)
    '1h'
    """
    if us == 0:
        return "0s"
    for unit in ("d", "h", "m", "s", "ms"):
        if us % _UNITS_US[unit] == 0:
            return f"{us // _UNITS_US[unit]}{unit}"
    return f"{us}us"


def _read(value: Duration, name: str) -> int:
    if isinstance(value, timedelta):
        return (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f"{name} {value!r} is a {type(value).__name__}; {_EXAMPLES}")
    if isinstance(value, int):
        return value * 1_000
    text = value.strip()
    negative = text.startswith("-")
    total = Decimal(0)
    position = 1 if negative else 0
    if position == len(text):
        raise ConfigError(f"{name} {value!r} is empty; {_EXAMPLES}")
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text[position:]):
                raise ConfigError(f"{name} {value!r} has no unit; {_EXAMPLES}")
            raise ConfigError(f"{name} {value!r} is not a duration; {_EXAMPLES}")
        unit = part.group(2)
        if unit not in _UNITS_US:
            known = ", ".join(u for u in _UNITS_US if u != "µs")
            raise ConfigError(f"{name} {value!r} has the unknown unit {unit!r}; the units are {known}")
        total += Decimal(part.group(1)) * _UNITS_US[unit]
        position = part.end()
    if total != total.to_integral_value():
        raise ConfigError(f"{name} {value!r} is not a whole number of microseconds")
    return -int(total) if negative else int(total)
