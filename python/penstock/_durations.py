"""Durations as people write them, and read them.

Owns: the one reading of ``"60s"``, ``"10 minutes"`` and ``timedelta(seconds=60)`` that every argument of the package
shares, and how one that was measured is shown. There are two kinds of arguments:

- *Durations* of event time and state (windows, lateness): text with a unit, or a timedelta. A bare number is
  refused, for nobody can see its unit. Inside penstock they are whole microseconds, the unit of Spark's timestamps
  and of event time in the native part.
  A timedelta of numpy is one, too.
- *Timeouts*, how long somebody waits (``timeout``, ``start_timeout``, ``member_timeout``, ``linger``): the same, and
  a number is seconds, as everywhere in Python's standard library. Inside they are float seconds.

Non-goals: calendar units. A month has no fixed length, so ``"1mo"`` is refused.
"""

from __future__ import annotations

import math
import re
import threading
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any, overload

from penstock.errors import ConfigError

__all__ = [
    "Duration",
    "Timeout",
    "duration_text",
    "format_duration",
    "lateness_ms",
    "milliseconds",
    "parse_duration",
    "parse_timeout",
    "plain_duration",
]

#: What every duration argument accepts: text with units, or a timedelta.
Duration = str | timedelta

#: What every timeout accepts: a duration, or a number of seconds.
Timeout = float | str | timedelta

_WORDS_US = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_UNITS_US = {
    "us": 1,
    "µs": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "sec": 1_000_000,
    "m": 60_000_000,
    "min": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
    **_WORDS_US,
    **{f"{word}s": us for word, us in _WORDS_US.items()},
}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ]+)")
_EXAMPLES = 'write "60s", "500ms", "1m30s", "2 hours" or a timedelta'
_LARGEST_US = 2**62
#: What rows may be late: event times are within so much of 1970.
_LATEST_MS = (2**63 - 1) // 4_000
#: Seconds that the standard library can wait, some 290 years.
_LONGEST_S = threading.TIMEOUT_MAX


def parse_duration(value: Duration, name: str = "duration", *, allow_zero: bool = False) -> int:
    """Read a duration and return whole microseconds.

    Parameters
    ----------
    value : str or datetime.timedelta
        Text made of numbers with units (``us``, ``ms``, ``s``, ``m`` or ``min``, ``h``, ``d``, ``w``, or the English
        words that Spark takes, such as ``minutes``), which may be joined (``"1m30s"``); or a timedelta.
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
    >>> parse_duration("1m30s") == parse_duration("1 minute 30 seconds")
    True
    >>> from datetime import timedelta
    >>> parse_duration(timedelta(milliseconds=500))
    500000
    >>> parse_duration(60, "window size")
    Traceback (most recent call last):
    ...
    penstock.errors.ConfigError: window size 60 has no unit; write "60s", "60ms" or a timedelta
    """
    us = _read(value, name)
    if us < 0:
        raise ConfigError(f"{name} {value!r} is negative; {_EXAMPLES}")
    if us == 0 and not allow_zero:
        raise ConfigError(f"{name} {value!r} is zero; it must be longer than that")
    if us > _LARGEST_US:
        raise ConfigError(f"{name} {value!r} is longer than event time can hold")
    return us


@overload
def parse_timeout(value: Timeout, name: str = ..., *, least_s: float | None = ..., most_s: float = ...) -> float: ...
@overload
def parse_timeout(
    value: Timeout | None, name: str = ..., *, optional: bool, least_s: float | None = ..., most_s: float = ...
) -> float | None: ...
def parse_timeout(
    value: Timeout | None,
    name: str = "timeout",
    *,
    optional: bool = False,
    least_s: float | None = None,
    most_s: float = _LONGEST_S,
) -> float | None:
    """Read how long to wait and return seconds.

    Parameters
    ----------
    value : float, str, datetime.timedelta or None
        A number of seconds, or what `parse_duration` takes.
    name : str, default "timeout"
        What the argument is called; error messages begin with it.
    optional : bool, default False
        Whether None is one, and stays None: no limit.
    least_s, most_s : float, optional
        Bounds, included; without `least_s` it has to be above 0, without `most_s` what threads can wait.

    Returns
    -------
    float or None
        Seconds, finite.

    Raises
    ------
    ConfigError
        When the value is none of these, or out of bounds.

    Examples
    --------
    >>> parse_timeout(1.5), parse_timeout("500ms"), parse_timeout(None, optional=True)
    (1.5, 0.5, None)
    >>> parse_timeout(-1, "linger", least_s=0.0)
    Traceback (most recent call last):
    ...
    penstock.errors.ConfigError: linger=-1 must be at least 0 s: a number of seconds, text such as "30s", or a timedelta
    """
    if value is None and optional:
        return None
    value = plain_duration(value, name)
    seconds = math.nan
    # An int may be larger than any float.
    try:
        if isinstance(value, Real) and not isinstance(value, bool):
            seconds = float(value)
        elif isinstance(value, (str, timedelta)):
            seconds = _read(value, name) / 1e6
    except OverflowError:
        seconds = math.inf
    if math.isfinite(seconds) and (seconds > 0 if least_s is None else seconds >= least_s) and seconds <= most_s:
        return seconds
    bounds = "above 0 s" if least_s is None else f"at least {least_s:g} s"
    if most_s != _LONGEST_S or most_s < seconds < math.inf:
        bounds += f" and at most {most_s:g} s"
    raise ConfigError(f'{name}={value!r} must be {bounds}: a number of seconds, text such as "30s", or a timedelta')


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


def lateness_ms(value: Duration, name: str = "lateness") -> int:
    """Read how far rows may lag behind and return whole milliseconds.

    Parameters
    ----------
    value : str or datetime.timedelta
        What `parse_duration` takes; zero, too.
    name : str, default "lateness"
        What the caller calls the value; error messages begin with it.

    Returns
    -------
    int
        Milliseconds.

    Raises
    ------
    ConfigError
        When it is no duration, finer than a millisecond, or longer than event times may lie apart.

    Examples
    --------
    >>> lateness_ms("5s")
    5000
    """
    found = milliseconds(parse_duration(value, name, allow_zero=True), name)
    if found > _LATEST_MS:
        raise ConfigError(f"{name} {value!r} is longer than event time can hold: at most {_LATEST_MS} ms")
    return found


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


def duration_text(seconds: float) -> str:
    """A duration that was measured, as people read it.

    Examples
    --------
    >>> [duration_text(seconds) for seconds in (2e-7, 8.4e-4, 0.012, 3.21, 1234.5)]
    ['0.2 µs', '840 µs', '12 ms', '3.21 s', '1,234 s']
    """
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def plain_duration(value: Any, name: str) -> Any:
    """A timedelta for one of numpy; any other value as it is."""
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", None) != "m" or getattr(value, "shape", None) != ():
        return value
    found = value.item()
    if isinstance(found, int) and getattr(dtype, "name", "").endswith(("[ns]", "[ps]", "[fs]", "[as]")):
        coarse = value.astype("timedelta64[us]")
        if coarse != value:
            raise ConfigError(f"{name} {value!r} is not a whole number of microseconds")
        found = coarse.item()
    if not isinstance(found, timedelta):
        # None of a unit, of months, or more than any timedelta.
        raise ConfigError(f"{name} {value!r} is no length of time that a timedelta holds; {_EXAMPLES}")
    return found


def _read(value: Duration, name: str) -> int:
    value = plain_duration(value, name)
    if isinstance(value, timedelta):
        if getattr(value, "nanoseconds", 0):  # of pandas
            raise ConfigError(f"{name} {value!r} is not a whole number of microseconds")
        return (value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds
    if isinstance(value, Real) and not isinstance(value, bool):
        raise ConfigError(f'{name} {value!r} has no unit; write "{value}s", "{value}ms" or a timedelta')
    if not isinstance(value, str):
        raise ConfigError(f"{name} {value!r} is a {type(value).__name__}; {_EXAMPLES}")
    text = value.strip()
    negative = text.startswith("-")
    # Exact whatever the context of decimals, which is the caller's: that is for what is calculated with them.
    total = Fraction(0)
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
        # Spark reads its words in any case; "M" alone would be a month elsewhere.
        known_us = _UNITS_US.get(unit) or _UNITS_US.get(unit.lower() if len(unit) > 1 else unit)
        if known_us is None:
            raise ConfigError(
                f"{name} {value!r} has the unknown unit {unit!r}; the units are us, ms, s, m or min, h, d, w and their"
                " English words (a month has no fixed length)"
            )
        total += Fraction(Decimal(part.group(1))) * known_us  # of any number of digits, as `int` of a text is not
        position = part.end()
    if total.denominator != 1:
        raise ConfigError(f"{name} {value!r} is not a whole number of microseconds")
    return -int(total) if negative else int(total)
