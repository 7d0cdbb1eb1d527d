"""Stable forms of keys that the native hash does not know.

`plain` turns a key into None, an int, a float, text, bytes or a tuple of these, so that equal keys have equal forms on
every worker, process and machine. It refuses what has none: an object whose hash is its address, a type whose order of
elements depends on `PYTHONHASHSEED`.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import uuid
from typing import Any

__all__ = ["plain"]

_EPOCH = datetime.datetime(1970, 1, 1)
_MICROSECOND = datetime.timedelta(microseconds=1)
_DAY_US = 86_400_000_000
#: Microseconds of the units of numpy, as numerator and denominator.
_UNITS = {
    "W": (7 * _DAY_US, 1),
    "D": (_DAY_US, 1),
    "h": (3_600_000_000, 1),
    "m": (60_000_000, 1),
    "s": (1_000_000, 1),
    "ms": (1_000, 1),
    "us": (1, 1),
    "ns": (1, 10**3),
    "ps": (1, 10**6),
    "fs": (1, 10**9),
    "as": (1, 10**12),
}


def plain(key: Any) -> Any:
    """The stable form of `key`.

    Raises
    ------
    TypeError
        When its type has none.

    Examples
    --------
    >>> import datetime, decimal
    >>> plain(datetime.date(1970, 1, 3)), plain(decimal.Decimal("0.1")), plain(decimal.Decimal("4.0"))
    (2, ('fraction', 1, 10), 4)
    """
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)
    if isinstance(key, float):
        return float.__float__(key)
    if isinstance(key, enum.Enum):
        return ("enum", type(key).__qualname__, key.name)
    if isinstance(key, datetime.datetime):
        zone = key.utcoffset()
        naive = key.replace(tzinfo=None) - (zone or datetime.timedelta())
        return (naive - _EPOCH) // _MICROSECOND
    if isinstance(key, datetime.date):
        return key.toordinal() - _EPOCH.toordinal()
    if isinstance(key, datetime.timedelta):
        return key // _MICROSECOND
    if isinstance(key, datetime.time):
        zone = key.utcoffset()
        if zone is None:
            return ("time", key.isoformat())
        # Equal where they are at once, whatever their zones.
        since = datetime.timedelta(hours=key.hour, minutes=key.minute, seconds=key.second, microseconds=key.microsecond)
        return ("time", "at once", (since - zone) // _MICROSECOND)
    if isinstance(key, (decimal.Decimal, fractions.Fraction)):
        return _number(key)
    if isinstance(key, uuid.UUID):
        return key.bytes
    if isinstance(key, frozenset):
        return ("frozenset", *sorted((plain_deep(part) for part in key), key=repr))
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        fields = tuple(getattr(key, field.name) for field in dataclasses.fields(key) if field.compare)
        return ("dataclass", type(key).__qualname__, fields)
    if type(key).__module__ == "numpy" and hasattr(key, "item") and getattr(key, "ndim", 1) == 0:
        if key.dtype.kind in "mM":
            return _time(key)
        item = key.item()
        if type(item) is not type(key):
            return item
        if key.dtype.kind == "f":  # longer than Python's
            return _number(fractions.Fraction(*key.as_integer_ratio())) if abs(key) < math.inf else float(key)
    raise TypeError(
        f"a key of type {type(key).__qualname__} has no hash that is the same in every process: "
        "return an int, float, str, bytes, bool, None, a date, a decimal, a UUID, an enum, or a tuple of these"
    )


def plain_deep(key: Any) -> Any:
    """`plain` of the key and of all its parts."""
    if key is None or type(key) in (int, str, bytes):
        return key
    if isinstance(key, int):
        return int(key)
    if isinstance(key, tuple):
        return tuple(plain_deep(part) for part in key)
    if type(key) is float:
        return int(key) if key.is_integer() else key
    return plain_deep(plain(key))


def _time(key: Any) -> Any:
    """A time or length of time of numpy, in whole microseconds as those of datetime and pandas, whatever its unit."""
    import numpy as np

    unit, step = np.datetime_data(key.dtype)
    count = int(key.view("int64")) * step
    if np.isnat(key) or unit == "generic":
        return key.item()
    if unit in "YM":
        if key.dtype.kind == "m":
            return ("months", count * (12 if unit == "Y" else 1))
        return int(key.astype("datetime64[D]").view("int64")) * _DAY_US
    up, down = _UNITS[unit]
    return count * up // down


def _number(value: decimal.Decimal | fractions.Fraction) -> Any:
    if isinstance(value, decimal.Decimal) and not value.is_finite():
        return float(value)
    exact = fractions.Fraction(value)
    if exact.denominator == 1:
        return exact.numerator
    try:
        approximate = float(exact)
    except OverflowError:
        return ("fraction", exact.numerator, exact.denominator)
    # Equal to a float: then it must go where that float goes.
    if fractions.Fraction(approximate) == exact:
        return approximate
    return ("fraction", exact.numerator, exact.denominator)
